"""What a checkpoint makes of documents: held-out losses, and gradients of whole steps. For benchmarks/convergence.py.

    python -m megatron.wlb.convergence_probe REQUEST.json

One code path for all runs: the model is built from the arguments in the checkpoint with packed attention, documents are
packed one after the other, and sums over tokens do not depend on who shares a pack with whom.

The request is a JSON object: `tasks`, a list of
    {"kind": "heldout", "weights": FILE, "output": FILE, "prefix": PATH, "first": ROW, "stop": ROW}
    {"kind": "gradients", "weights": FILE, "output": FILE, "prefix": PATH, "steps": STEPS}
with STEPS a list of steps, each a list of [sequence, start, length].
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wlb.data.atomic_files import atomic_path
from wlb.data.collate import collate
from wlb.documents import Document, MicroBatch
from wlb.errors import DataError
from wlb.sharding.plan import unsharded


class Probe:
    """A trained model and the documents of an index.

    weights: Megatron's `torch` checkpoint of a run of one process. prefix: of the index, without `.idx`.
    """

    def __init__(self, weights: Path, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        # Written by the benchmark's own runs: holds Megatron's arguments, which are no tensors.
        checkpoint = torch.load(weights, weights_only=False, map_location="cpu")
        self.args = checkpoint["args"]
        self.model = _model(self.args, checkpoint["model"])
        self.data = IndexedDataset(prefix, multimodal=False, mmap=True)

    def heldout(self, first: int, stop: int) -> list[tuple[int, int, float]]:
        """(row, positions, sum of losses) of each stored sequence in [first, stop), cut only at the window."""
        window = self.args.seq_length
        lengths = {row: int(self.data.sequence_lengths[row]) - 1 for row in range(first, stop)}
        pieces = [
            (row, start, min(window, length - start))
            for row, length in lengths.items()
            for start in range(0, length, window)
        ]
        sums = dict.fromkeys(lengths, 0.0)
        with torch.no_grad():
            for micro_batch in _packs(pieces, window):
                losses = self._losses(micro_batch)
                for document, part in zip(micro_batch.documents, losses.split(micro_batch.lengths), strict=True):
                    sums[document.sequence] += float(part.double().sum())
        return [(row, length, sums[row]) for row, length in lengths.items() if length > 0]

    def gradient(self, pieces: Sequence[Sequence[int]]) -> tuple[float, torch.Tensor]:
        """Mean loss per token over `pieces` (sequence, start, length), and its gradient, flat (P,) float32.

        Zeros without pieces: Algorithm 1 plans empty steps while all that arrives waits, and they count as steps.
        """
        num_tokens = max(1, sum(int(length) for _, _, length in pieces))
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for micro_batch in _packs(pieces, self.args.seq_length):
            loss = self._losses(micro_batch).sum()
            loss.backward()
            total += float(loss.detach())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        return total / num_tokens, torch.cat([g.flatten() for g in gradients]) / num_tokens

    def _losses(self, micro_batch: MicroBatch) -> torch.Tensor:
        """(T,) of the micro-batch's tokens."""
        from megatron.wlb.batch import batch_on_device
        from megatron.wlb.data_provider import PADDING_TOKEN

        plan = unsharded(micro_batch.lengths)
        packed = collate(
            micro_batch, self._read, plan=plan, padding_token=PADDING_TOKEN, vocab_size=self.args.padded_vocab_size
        )
        batch = batch_on_device(micro_batch, packed, plan, 0, max_positions=self.args.seq_length)
        return self.model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=batch["packed_seq_params"],
        )[0].float()

    def _read(self, sequence: int, start: int, count: int) -> NDArray[Any]:
        return np.asarray(self.data.get(sequence, offset=start, length=count))


def step_gradients(probe: Probe, steps: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Of each step at the same weights: tokens, mean loss, and all inner products of the gradients, (N, N)."""
    losses, gradients = zip(*map(probe.gradient, steps), strict=True)
    stacked = torch.stack(gradients).double()  # (N, P)
    return {
        "tokens": [sum(length for _, _, length in step) for step in steps],
        "losses": list(losses),
        "inner_products": (stacked @ stacked.T).tolist(),
    }


def _packs(pieces: Sequence[Sequence[int]], window: int) -> Iterator[MicroBatch]:
    """The pieces in order, as many to a micro-batch as fit into a window."""
    documents: list[Document] = []
    num_tokens = 0
    for i, (sequence, start, length) in enumerate(pieces):
        if documents and num_tokens + length > window:
            yield MicroBatch(documents=tuple(documents))
            documents, num_tokens = [], 0
        documents.append(Document(doc_id=i, length=int(length), arrival=0, sequence=int(sequence), start=int(start)))
        num_tokens += int(length)
    if documents:
        yield MicroBatch(documents=tuple(documents))


def _model(args: Any, weights: dict[str, Any]) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron.wlb.core_attention import GroupExchanges
    from megatron.wlb.layer_spec import packed_layer_spec

    config = gpt_config_from_args(args)
    config.transformer_layer_spec = packed_layer_spec(GroupExchanges(), keep_gathered_kv=False)
    config.transformer.variable_seq_lengths = True
    model: torch.nn.Module = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).cuda()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    # Upstream's layers store an empty extra state each, which holds nothing to load.
    wrong = [name for name in [*missing, *unexpected] if not name.endswith("_extra_state")]
    if wrong:
        raise DataError(
            f"checkpoint must hold the weights of the model that its arguments describe, got {wrong[0]} on one side"
        )
    return model


def main(argv: Sequence[str]) -> None:
    """Run the tasks of a request in turn; a task's output appears when it is complete.

    Raises:
        DataError: the request or a checkpoint cannot be used.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied

    if len(argv) != 1:
        raise DataError(f"one request file must be named, got {len(argv)} arguments")
    tasks = json.loads(Path(argv[0]).read_text())["tasks"]
    with cpu_as_device() as on_cpu, applied([rope_thd.PATCH]), single_process("gloo" if on_cpu else "nccl"):
        model_parallel_cuda_manual_seed(1)
        for task in tasks:
            begin_s = time.perf_counter()
            probe = Probe(Path(task["weights"]), task["prefix"])
            if task["kind"] == "heldout":
                result: dict[str, Any] = {"documents": probe.heldout(task["first"], task["stop"])}
            else:
                result = step_gradients(probe, task["steps"])
            with atomic_path(Path(task["output"])) as path:
                path.write_text(json.dumps(result) + "\n", encoding="utf-8")
            print(f"{task['kind']}: {task['output']} ({time.perf_counter() - begin_s:.1f} s)", flush=True)


if __name__ == "__main__":
    from wlb.command_line import run_tool

    warnings.simplefilter("ignore")
    sys.exit(run_tool(main))
