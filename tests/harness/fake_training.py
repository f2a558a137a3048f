"""Training on a CUDA device that is not there: one context-parallel rank, whose others are elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from tests.harness.fake_cuda import fake_cuda, run_backward
from wlb.attention import sharded
from wlb.attention.torch_kernel import TorchKernel

LENGTHS = ((700, 300, 41), (9, 1300, 2), (9, 1300, 2))


class _Over:
    def wait(self) -> None:
        pass


class FakeExchange:
    """Nothing is sent."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_to_all(self, *_args: Any) -> _Over:
        return _Over()

    def shift(self, *_args: Any) -> _Over:
        return _Over()


def fake_kernel() -> TorchKernel:
    """With operators that compute nothing."""

    def attend(query: Any, _key: Any, value: Any, *_others: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, heads, _ = query.shape
        return query.new_empty(rows, heads, value.shape[2]), query.new_empty(heads, rows, dtype=torch.float32), None

    def differentiate(_grad: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(t) for t in inputs[:3])

    return TorchKernel(attend, differentiate)


def micro_batch_of(lengths: Sequence[int], cp_size: int, rank: int) -> tuple[dict[str, Any], Any]:
    """The batch of a rank, as training makes it, and the plan."""
    from megatron.wlb.batch import batch_on_device
    from wlb.data.collate import collate, padded_lengths
    from wlb.documents import MicroBatch, documents_from_lengths
    from wlb.sharding import Sharding

    micro_batch = MicroBatch(documents=documents_from_lengths(lengths))
    plan = Sharding(name="hybrid", cp_size=cp_size).plan(padded_lengths(micro_batch, 2 * cp_size))
    packed = collate(micro_batch, lambda _s, _a, n: np.ones(n, dtype=np.int32), plan=plan, rank=rank, padding_token=0)
    return batch_on_device(micro_batch, packed, plan, rank, max_positions=4096), plan


def gpt_syncs() -> dict[str, list[Counter[tuple[str, str, str]]]]:
    """Of each micro-batch through a GPT of two layers, loss and backward: as training runs it, and without our RoPE.

    Runs in a rank of its own.
    """
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check.model import SmallGpt, packed_gpt
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied, replace

    found: dict[str, list[Counter[tuple[str, str, str]]]] = {}
    with single_process("gloo"):
        with cpu_as_device():
            model = packed_gpt(SmallGpt(num_query_groups=2), torch.bfloat16, transformer_engine=False)
        with ExitStack() as undo:
            replace(undo, sharded, "kernel_for", lambda *_args, **_kwargs: fake_kernel())
            syncs = undo.enter_context(fake_cuda())
            _move(model)
            for name, patches in (("ours", [rope_thd.PATCH]), ("without rope_thd", [])):
                with applied(patches):
                    found[name] = [_train(model, lengths, syncs) for lengths in LENGTHS]
    return found


def _train(model: Any, lengths: Sequence[int], syncs: Any) -> Counter[tuple[str, str, str]]:
    from megatron.wlb.stock import masked_loss

    model.zero_grad()
    syncs.found.clear()
    batch, _ = micro_batch_of(lengths, 4, 1)
    try:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=batch["packed_seq_params"],
        )
    except RuntimeError:  # what was read back has no value here
        return Counter(syncs.found)
    run_backward(masked_loss(batch["loss_mask"], output)[0])
    assert all(p.grad is not None and p.grad.is_cuda for p in model.parameters())
    return Counter(syncs.found)


def _move(model: torch.nn.Module) -> None:
    """`Module.cuda` would ask the driver."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    tensors[name] = torch.nn.Parameter(there) if tensors is module._parameters else there
        if hasattr(module, "inv_freq"):
            module.inv_freq = torch.empty(module.inv_freq.shape, device="cuda")
        if hasattr(module, "window_tokens"):
            module._exchange = FakeExchange(4, 1)
