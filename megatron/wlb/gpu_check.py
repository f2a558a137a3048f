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
from megatron.wlb.gpu_check_model import (
    SmallGpt,
    difference,
    packed_gpt,
    relative_error,
    run_one_by_one,
    run_packed,
    stock_gpt,
)
from megatron.wlb.gpu_check_training import TrainingScale, training_check
from megatron.wlb.packed_seq_params import packed_seq_params
from wlb.attention import dense_attention, packed_attention
from wlb.documents import MicroBatch, documents_from_lengths

RATIO = 2.0
_RULE = f"error <= {RATIO:g} x PyTorch's own in bfloat16, both against float64; other documents keep every bit"
_Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the checks are: documents worth a GPU, or a rehearsal.

    lengths: of the documents of a pack: one giant, single tokens, primes and equal ones.
    """

    lengths: tuple[int, ...]
    head_sizes: tuple[int, ...]
    model: SmallGpt
    training: TrainingScale


SCALES = {
    "cuda": Scale(
        lengths=(1500, 1, 7, 129, 300, 128, 128, 1, 54),
        head_sizes=(64, 128),
        model=SmallGpt(hidden_size=256, max_positions=2048, vocab_size=512, init_std=0.05, weight_dtype=torch.bfloat16),
        training=TrainingScale(
            num_layers=4, hidden_size=512, num_heads=8, window_tokens=2048, global_batch=8, documents=1500
        ),
    ),
    "cpu": Scale(
        lengths=(90, 1, 7, 13, 16, 16, 1, 3),
        head_sizes=(16,),
        model=SmallGpt(max_positions=128, weight_dtype=torch.bfloat16),
        training=TrainingScale(
            num_layers=2, hidden_size=64, num_heads=2, window_tokens=256, global_batch=4, documents=400
        ),
    ),
}


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
        yield _timed(f"attention, {name}", _RULE, partial(check_attention, scale, engine=engine))
    for name, engine in kernels.items():
        yield _timed(f"GPT packed = one by one, {name}", _RULE, partial(check_model, scale, engine=engine))
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
            passed &= independent and max(ratios.values()) <= RATIO
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
        passed &= independent and max(ratios.values()) <= RATIO
    return passed, measured


def _kernel(scale: Scale, heads: tuple[int, int, int], *, engine: bool) -> _Attention:
    """The attention of a packed layer on documents of `scale.lengths`: (T, N, H), (T, K, H), (T, K, H) -> (T, N, H)."""
    num_heads, num_kv_heads, head_size = heads
    micro_batch = MicroBatch(documents=documents_from_lengths(scale.lengths))
    segments = tuple(micro_batch.cu_seqlens.tolist())
    positions = torch.cat([torch.arange(n) for n in scale.lengths]).cuda()
    packed = packed_seq_params(micro_batch, segments, positions, max_positions=max(scale.lengths))
    if not engine:
        return partial(
            packed_attention, segments=segments, cu_seqlens=packed.cu_seqlens_q, max_seqlen=packed.max_seqlen_q
        )
    shape = SmallGpt(num_heads=num_heads, num_query_groups=num_kv_heads, hidden_size=num_heads * head_size)
    core = packed_gpt(shape, torch.bfloat16, transformer_engine=True).decoder.layers[0].self_attention.core_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = core(query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
        return out.reshape(query.shape)

    return attention


def _attention_ratios(
    attention: _Attention, lengths: Sequence[int], heads: tuple[int, int, int]
) -> tuple[dict[str, float], bool]:
    """Errors of output, dq, dk, dv over PyTorch's own; whether another document 0 leaves all other output rows."""
    num_heads, num_kv_heads, head_size = heads
    generator = torch.Generator().manual_seed(9)
    query, key, value, grad, other = (
        torch.randn(sum(lengths), n, head_size, generator=generator).bfloat16().cuda()
        for n in (num_heads, num_kv_heads, num_kv_heads, num_heads, num_kv_heads)
    )
    oracle = partial(dense_attention, segments=tuple(accumulate(lengths, initial=0)))
    exact = _with_gradients(oracle, query.double(), key.double(), value.double(), grad.double())
    unit = _with_gradients(oracle, query, key, value, grad)
    ours = _with_gradients(attention, query, key, value, grad)
    ratios = {
        name: relative_error(o, e) / relative_error(u, e)
        for name, o, u, e in zip(("out", "dq", "dk", "dv"), ours, unit, exact, strict=True)
    }
    changed = torch.cat((other[: lengths[0]], value[lengths[0] :]))
    after = attention(query, key, changed)
    return ratios, torch.equal(after[lengths[0] :], ours[0][lengths[0] :])


def _with_gradients(
    attention: _Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    out = attention(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


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
