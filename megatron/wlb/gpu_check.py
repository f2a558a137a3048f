"""What a person runs first on a GPU machine: does the packed path compute there what it should?

Kernels and model are held against a float64 oracle by the ratio rule: in bfloat16 they may err at most twice as
much as PyTorch's own operations in bfloat16 do. Without a GPU the same checks run on the CPU, as a rehearsal.
"""

from __future__ import annotations

import platform
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron.wlb.environment import OPTIONAL_PACKAGES, TRANSFORMER_ENGINE, has_package
from megatron.wlb.gpu_check_memory import MEMORY_RULE, check_memory
from megatron.wlb.gpu_check_model import SmallGpt, difference, packed_gpt, run_one_by_one, run_packed, stock_gpt
from megatron.wlb.gpu_check_rank_times import TIMES_RULE, check_rank_times
from megatron.wlb.gpu_check_rule import RULE, Attention, error_ratios, with_gradients, within_ratio
from megatron.wlb.gpu_check_scales import SCALES, Scale
from megatron.wlb.gpu_check_sharding import LONG_RULE, SHARDING_RULE, check_long_pack, check_sharding
from megatron.wlb.gpu_check_tiles import TILES_RULE, check_tiles, suggested_costs
from megatron.wlb.gpu_check_training import training_check
from megatron.wlb.packed_seq_params import packed_seq_params
from wlb.attention import dense_attention, packed_attention
from wlb.documents import MicroBatch, documents_from_lengths
from wlb.sharding.plan import unsharded

__all__ = ["SCALES", "Result", "Scale", "check_attention", "check_model", "environment", "run_checks"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One check. measured: numbers by name, or what went wrong."""

    name: str
    passed: bool
    rule: str
    measured: dict[str, Any]
    duration_s: float


def environment(device: str) -> dict[str, Any]:
    """What the checks run on."""
    cuda = device == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "compute_capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "packages": {p.name: {"found": p.found, "version": p.version, "lost": p.lost} for p in OPTIONAL_PACKAGES},
    }


def run_checks(device: Literal["cuda", "cpu"], folder: Path) -> Iterator[Result]:
    """Every check in turn; one that raises has failed, and the next one runs.

    folder: for the data and logs of the training runs.
    """
    scale = SCALES[device]
    kernels = {"PyTorch": False}
    if device == "cuda" and has_package(TRANSFORMER_ENGINE):
        kernels[TRANSFORMER_ENGINE] = True
    for name, engine in kernels.items():
        yield _timed(f"attention, {name}", RULE, partial(check_attention, scale, engine=engine))
    for name, engine in kernels.items():
        yield _timed(f"GPT packed = one by one, {name}", RULE, partial(check_model, scale, engine=engine))
    yield _timed("sharded attention, all ranks here", SHARDING_RULE, partial(check_sharding, scale.sharding))
    yield _timed("sharded attention, long pack", LONG_RULE, partial(check_long_pack, scale.sharding))
    yield _timed("gathered keys and values", MEMORY_RULE, partial(check_memory, scale.times))
    tiles = _timed("kernel time by rows of queries", TILES_RULE, partial(check_tiles, scale.tiles))
    yield tiles
    times = partial(check_rank_times, scale.times, suggested_costs(tiles.measured))
    yield _timed("slowest rank over that of per_sequence", TIMES_RULE, times)
    rule, check = training_check(scale.training, folder, device)
    yield _timed("training, plain and wlb", rule, check)


def check_attention(scale: Scale, *, engine: bool) -> tuple[bool, dict[str, Any]]:
    """Output and gradients of the packed kernel for every kind of heads; documents do not see each other."""
    measured: dict[str, Any] = {}
    passed = True
    for head_size in scale.head_sizes:
        for kind, num_kv_heads in (("MHA", 8), ("GQA", 2), ("MQA", 1)):
            heads = (8, num_kv_heads, head_size)
            ratios, independent = _attention_ratios(_kernel(scale, heads, engine=engine), scale.lengths, heads)
            name = f"{kind} {head_size}"
            measured[name] = {**ratios, "independent": independent}
            passed &= independent and within_ratio(ratios)
    return passed, measured


def check_model(scale: Scale, *, engine: bool) -> tuple[bool, dict[str, Any]]:
    """Logits and gradients of a GPT on one pack, against the stock model in float64 on each document."""
    rng = np.random.default_rng(5)
    micro_batch = MicroBatch(documents=documents_from_lengths(scale.lengths))
    stored = [rng.integers(1, scale.model.vocab_size, size=n + 1) for n in scale.lengths]
    others = [rng.integers(1, scale.model.vocab_size, size=scale.lengths[0] + 1), *stored[1:]]
    measured: dict[str, Any] = {}
    passed = True
    for name, shape in (
        ("RoPE, GQA", scale.model),
        ("learned positions, MHA", replace(scale.model, position_embedding="learned_absolute", num_query_groups=4)),
    ):
        exact = run_one_by_one(stock_gpt(shape, torch.float64), stored, micro_batch)
        unit = difference(run_one_by_one(stock_gpt(shape, torch.bfloat16), stored, micro_batch), exact)
        model = packed_gpt(shape, torch.bfloat16, transformer_engine=engine)
        outcome = run_packed(model, stored, micro_batch, pad_to_multiple=64)
        ours = difference(outcome, exact)
        changed = run_packed(model, others, micro_batch, pad_to_multiple=64)
        independent = all(map(torch.equal, outcome.logits[1:], changed.logits[1:]))
        ratios = {"logits": ours.logits / unit.logits, "gradients": ours.gradients / unit.gradients}
        measured[name] = {**ratios, "error": asdict(ours), "independent": independent}
        passed &= independent and within_ratio(ratios)
    return passed, measured


def _kernel(scale: Scale, heads: tuple[int, int, int], *, engine: bool) -> Attention:
    """The attention of a packed layer on documents of `scale.lengths`: (T, N, H), (T, K, H), (T, K, H) -> (T, N, H)."""
    num_heads, num_kv_heads, head_size = heads
    micro_batch = MicroBatch(documents=documents_from_lengths(scale.lengths))
    plan = unsharded(scale.lengths)
    positions = torch.from_numpy(plan.position_ids(0)).cuda()
    packed = packed_seq_params(micro_batch, plan, 0, position_ids=positions, max_positions=max(scale.lengths))
    if not engine:
        return partial(
            packed_attention, segments=packed.segments, cu_seqlens=packed.cu_seqlens_q, max_seqlen=packed.max_seqlen_q
        )
    shape = SmallGpt(num_heads=num_heads, num_query_groups=num_kv_heads, hidden_size=num_heads * head_size)
    core = packed_gpt(shape, torch.bfloat16, transformer_engine=True).decoder.layers[0].self_attention.core_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = core(query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
        return out.reshape(query.shape)

    return attention


def _attention_ratios(
    attention: Attention, lengths: Sequence[int], heads: tuple[int, int, int]
) -> tuple[dict[str, float], bool]:
    """Errors of output, dq, dk, dv over PyTorch's own; whether another document 0 leaves all other output rows."""
    num_heads, num_kv_heads, head_size = heads
    generator = torch.Generator().manual_seed(9)
    query, key, value, grad, other = (
        torch.randn(sum(lengths), n, head_size, generator=generator).bfloat16().cuda()
        for n in (num_heads, num_kv_heads, num_kv_heads, num_heads, num_kv_heads)
    )
    oracle = partial(dense_attention, segments=tuple(accumulate(lengths, initial=0)))
    exact = with_gradients(oracle, query.double(), key.double(), value.double(), grad.double())
    unit = with_gradients(oracle, query, key, value, grad)
    ours = with_gradients(attention, query, key, value, grad)
    changed = torch.cat((other[: lengths[0]], value[lengths[0] :]))
    after = attention(query, key, changed)
    return error_ratios(ours, unit, exact), torch.equal(after[lengths[0] :], ours[0][lengths[0] :])


def _timed(name: str, rule: str, check: Callable[[], tuple[bool, dict[str, Any]]]) -> Result:
    begin_s = time.perf_counter()
    try:
        passed, measured = check()
    except Exception as error:
        traceback.print_exc()
        passed, measured = False, {"error": f"{type(error).__name__}: {error}"}
    return Result(
        name=name, passed=passed, rule=rule, measured=measured, duration_s=round(time.perf_counter() - begin_s, 2)
    )
