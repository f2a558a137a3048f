"""A tiny GPT on packed documents and on the documents one by one: what the parity tests compare.

`measure` runs every case in one rank and returns numbers; the tests hold them against their bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np

LENGTHS = (33, 1, 7, 20, 3)
# 64 tokens, with the longest document in the upper half: the RoPE table is as long as the pack.
TABLE_LENGTH = 64
LENGTHS_OF_TABLE = {"exact": (33, 31), "padded": (40, 20)}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa-rope": {"num_query_groups": 2},
    "mqa-interleaved": {"num_query_groups": 1, "rotary_interleaved": True},
    "mha-learned": {"num_query_groups": 4, "position_embedding": "learned_absolute", "normalization": "LayerNorm"},
}
DTYPES = ("float64", "float32")
PAD_TO = (1, 16)


def measure() -> dict[str, Any]:
    """Every case, by name. Runs in a rank of its own."""
    with _single_rank():
        return {
            "equal": {key: _equal(*key) for key in product(SHAPES, DTYPES, PAD_TO)},
            "bfloat16": {name: _ratios(name) for name in SHAPES},
            "padding": {name: _padding(name) for name in SHAPES},
            "independent": {name: _independent(name) for name in SHAPES},
            "table": {name: _table(lengths) for name, lengths in LENGTHS_OF_TABLE.items()},
            "cut": _cut_pieces(),
            "merged": _merged_documents(),
        }


@contextmanager
def _single_rank() -> Iterator[None]:
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.parallel import single_process

    with cpu_as_device(), single_process("gloo"):
        yield


@contextmanager
def _rope() -> Iterator[None]:
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied

    with applied([rope_thd.PATCH]):
        yield


def _shape(name: str) -> Any:
    from megatron.wlb.gpu_check.model import SmallGpt

    return SmallGpt(**SHAPES[name])


def _documents(lengths: Sequence[int], seed: int = 3) -> tuple[list[np.ndarray], Any]:
    """Token ids >= 1 of each sequence, and the micro-batch of them all; id 0 is padding alone."""
    from wlb.documents import MicroBatch, documents_from_lengths

    rng = np.random.default_rng(seed)
    stored = [rng.integers(1, 64, size=length + 1) for length in lengths]
    return stored, MicroBatch(documents=documents_from_lengths(lengths))


def _models(shape: Any, dtype: str) -> tuple[Any, Any]:
    import torch

    from megatron.wlb.gpu_check.model import packed_gpt, stock_gpt

    return (
        packed_gpt(shape, getattr(torch, dtype), transformer_engine=False),
        stock_gpt(shape, torch.float64),
    )


def _equal(name: str, dtype: str, pad_to: int) -> dict[str, float]:
    """Errors of the packed model against Megatron's own in float64, one document at a time."""
    from megatron.wlb.gpu_check.model import difference, run_one_by_one, run_packed

    model, oracle = _models(_shape(name), dtype)
    stored, micro_batch = _documents(LENGTHS)
    exact = run_one_by_one(oracle, stored, micro_batch)
    with _rope():
        outcome = run_packed(model, stored, micro_batch, pad_to_multiple=pad_to)
    return {**asdict(difference(outcome, exact)), "loss": abs(outcome.loss / exact.loss - 1)}


def _ratios(name: str) -> dict[str, float]:
    """Errors in bfloat16 over those of Megatron's own model in bfloat16."""
    import torch

    from megatron.wlb.gpu_check.model import difference, run_one_by_one, run_packed, stock_gpt

    shape = replace(_shape(name), weight_dtype=torch.bfloat16)
    model, oracle = _models(shape, "bfloat16")
    stored, micro_batch = _documents(LENGTHS)
    exact = run_one_by_one(oracle, stored, micro_batch)
    scale = difference(run_one_by_one(stock_gpt(shape, torch.bfloat16), stored, micro_batch), exact)
    with _rope():
        ours = difference(run_packed(model, stored, micro_batch), exact)
    return {"logits": ours.logits / scale.logits, "gradients": ours.gradients / scale.gradients}


def _padding(name: str) -> dict[str, float]:
    """The loss that training takes, with and without a padded tail, and with a tail that is all NaN."""
    import torch

    from megatron.wlb.gpu_check.model import packed_batch
    from megatron.wlb.stock import masked_loss

    model, _ = _models(_shape(name), "float64")
    stored, micro_batch = _documents(LENGTHS)

    def losses(pad_to: int) -> tuple[torch.Tensor, float, int]:
        batch = packed_batch(model, stored, micro_batch, pad_to_multiple=pad_to)
        mask, packed = batch["loss_mask"], batch["packed_seq_params"]
        each = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
        total, num_tokens, _ = masked_loss(mask, each)
        return each[0].detach(), float(total.detach()), int(num_tokens)

    with _rope():
        _, bare, num_bare = losses(1)
        each, padded, num_padded = losses(48)
        with torch.no_grad():
            model.embedding.word_embeddings.weight[0] = float("nan")
        each_nan, poisoned, _ = losses(48)
    real = sum(LENGTHS)
    return {
        "padding_tokens": len(each) - real,
        "num_tokens": num_padded,
        "num_tokens_bare": num_bare,
        "loss_change": abs(padded / bare - 1),
        "nan_losses_of_padding": int(each_nan[real:].isnan().sum()),
        "nan_losses_of_documents": int(each_nan[:real].isnan().sum()),
        "poisoned_loss_change": abs(poisoned / padded - 1),
    }


def _independent(name: str) -> dict[str, list[bool]]:
    """Whether each document's logits keep every bit when document 0 becomes another one."""
    import torch

    from megatron.wlb.gpu_check.model import run_packed

    unchanged = {}
    for dtype in DTYPES:
        model, _ = _models(_shape(name), dtype)
        stored, micro_batch = _documents(LENGTHS)
        others = [_documents(LENGTHS, seed=4)[0][0], *stored[1:]]
        with _rope():
            before, after = (run_packed(model, tokens, micro_batch).logits for tokens in (stored, others))
        unchanged[dtype] = [torch.equal(was, now) for was, now in zip(before, after, strict=True)]
    return unchanged


def _table(lengths: tuple[int, ...]) -> dict[str, float]:
    """Errors of rotation and logits, with our patch and without, where the RoPE table is as long as the pack."""
    from megatron.wlb.gpu_check.model import difference, packed_batch, run_one_by_one, run_packed

    model, oracle = _models(_shape("gqa-rope"), "float64")
    stored, micro_batch = _documents(lengths)
    pad = {"pad_to_multiple": TABLE_LENGTH}
    exact = run_one_by_one(oracle, stored, micro_batch)
    packed = packed_batch(model, stored, micro_batch, **pad)["packed_seq_params"]
    unpatched = difference(run_packed(model, stored, micro_batch, **pad), exact)
    unpatched_rotation = _rotation_error(model, packed, lengths)
    with _rope():
        patched = difference(run_packed(model, stored, micro_batch, **pad), exact)
        patched_rotation = _rotation_error(model, packed, lengths)
        backwards = _backwards(model, stored, micro_batch)
    return {
        "pack_tokens": packed.segments[-1],
        "table_tokens": packed.max_seqlen_q,
        "patched": patched.logits,
        "patched_rotation": patched_rotation,
        "unpatched": unpatched.logits,
        "unpatched_rotation": unpatched_rotation,
        "backwards": difference(backwards, exact).logits,
    }


def _rotation_error(model: Any, packed: Any, lengths: tuple[int, ...]) -> float:
    """Error of a rotated pack against the rotation of each document by itself."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils

    from megatron.wlb.gpu_check.model import relative_error

    angles = model.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
    query = torch.ones(packed.segments[-1], 1, model.config.kv_channels, dtype=torch.float64)
    group = parallel_state.get_context_parallel_group()
    rotated = rope_utils.apply_rotary_pos_emb(query, angles, model.config, packed.cu_seqlens_q, cp_group=group)
    alone = [rope_utils._apply_rotary_pos_emb_bshd(query[:n].unsqueeze(1), angles[:n]).squeeze(1) for n in lengths]
    return relative_error(rotated[: sum(lengths)], torch.cat(alone))


def _backwards(model: Any, stored: Any, micro_batch: Any) -> Any:
    """The packed run with the positions of the pack in reverse order."""
    from contextlib import ExitStack

    from megatron.wlb import batch
    from megatron.wlb.gpu_check.model import run_packed
    from megatron.wlb.patches.registry import replace as replaced

    original = batch.packed_seq_params

    def reverse(*args: Any, position_ids: Any, **kwargs: Any) -> Any:
        return original(*args, position_ids=position_ids.flip(0), **kwargs)

    with ExitStack() as undo:
        replaced(undo, batch, "packed_seq_params", reverse)
        return run_packed(model, stored, micro_batch)


def _cut_pieces() -> dict[str, Any]:
    """Two pieces of one sequence of 18 tokens and a whole one of 6, in an order that is not the sequence's."""
    from megatron.wlb.gpu_check.model import difference, packed_batch, run_one_by_one, run_packed
    from wlb.documents import Document, MicroBatch

    model, oracle = _models(_shape("gqa-rope"), "float64")
    stored = [np.arange(1, 19), np.arange(40, 46)]
    pieces = [(0, 10, 7), (1, 0, 5), (0, 0, 10)]
    micro_batch = MicroBatch(
        documents=tuple(
            Document(doc_id=i, length=length, arrival=0, sequence=sequence, start=start)
            for i, (sequence, start, length) in enumerate(pieces)
        )
    )
    batch = packed_batch(model, stored, micro_batch, pad_to_multiple=8)
    exact = run_one_by_one(oracle, stored, micro_batch)
    with _rope():
        outcome = run_packed(model, stored, micro_batch, pad_to_multiple=8)
        rolled = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["tokens"].roll(-1, dims=1),
            packed_seq_params=batch["packed_seq_params"],
        )
    return {
        "labels": batch["labels"][0].tolist(),
        "error": difference(outcome, exact).gradients,
        "loss_change": abs(outcome.loss / exact.loss - 1),
        "rolled_loss_change": abs(float(rolled[0, : micro_batch.num_tokens].sum().detach()) / exact.loss - 1),
    }


def _merged_documents() -> float:
    """The control: error of the logits when documents 0 and 1 are taken for one."""
    from contextlib import ExitStack

    from megatron.wlb import core_attention
    from megatron.wlb.gpu_check.model import difference, run_one_by_one, run_packed
    from megatron.wlb.patches.registry import replace as replaced
    from wlb.sharding.plan import unsharded

    model, oracle = _models(_shape("gqa-rope"), "float64")
    stored, micro_batch = _documents((20, 12, 9))
    exact = run_one_by_one(oracle, stored, micro_batch)
    original = core_attention.sharded_attention

    def merging(query: Any, key: Any, value: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        first, second, *others = plan.lengths
        return original(query, key, value, unsharded((first + second, *others)), *args, **kwargs)

    with _rope(), ExitStack() as undo:
        replaced(undo, core_attention, "sharded_attention", merging)
        return difference(run_packed(model, stored, micro_batch), exact).logits
