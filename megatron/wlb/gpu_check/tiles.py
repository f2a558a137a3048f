"""Seconds per pair of the attention kernel by rows of queries, and the prices in `ShardCosts` that fit them best.

Adaptive sharding predicts a kernel's time from such a table (WLB-LLM, arXiv 2503.17924, section 4.3): short spans waste
the kernel's tiles. Here spans of R queries at the end of documents of S keys, as many as fill the device.

Shapes: R queries of a span, S keys of its document, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron.wlb.gpu_check.packs import Heads
from megatron.wlb.gpu_check.stopwatch import Stopwatch, let_launches_queue_up
from wlb.attention.kernels import Kernel, kernel_for
from wlb.attention.partial import Partial, accumulation_dtype
from wlb.sharding import ShardCosts
from wlb.sharding.phases import PhaseBuilder
from wlb.sharding.plan import span_pairs
from wlb.sharding.tasks import Keys, Task

TILES_RULE = "times finite and above 0; no time decides anything"

_FORWARD, _BOTH = "suggested, forward", "suggested, forward and backward"

_Shape = tuple[int, int]  # (R, S)


@dataclass(frozen=True, kw_only=True)
class TilesScale:
    """num_rows, num_keys: R, S to time. all_keys: keys of all spans together. tile_tokens: among which is chosen."""

    num_rows: tuple[int, ...]
    num_keys: tuple[int, ...]
    all_keys: int
    heads: Heads
    tile_tokens: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """seconds = pair_s x (pairs of whole tiles + span_pairs x spans); error: root mean square of the relative one."""

    tile_tokens: int
    span_pairs: int
    pair_s: float
    error: float


def check_tiles(scale: TilesScale) -> tuple[bool, dict[str, Any]]:
    """Picoseconds a pair, forward and backward, by rows and keys; what `ShardCosts` should be to predict them."""
    times: dict[str, dict[_Shape, float]] = {"forward": {}, "backward": {}}
    for rows in scale.num_rows:
        for keys in scale.num_keys:
            forward_s, backward_s = _time_spans(scale, rows, keys)
            times["forward"][rows, keys] = forward_s
            times["backward"][rows, keys] = backward_s
    measured: dict[str, Any] = {}
    for name, by_shape in times.items():
        for rows in scale.num_rows:
            measured[f"{rows} rows, {name}, ps a pair"] = {
                f"{keys} keys": 1e12 * by_shape[rows, keys] / (num_spans(scale, keys) * span_pairs(keys - rows, keys))
                for keys in scale.num_keys
            }
    both = {shape: times["forward"][shape] + times["backward"][shape] for shape in times["forward"]}
    for name, by_shape in ((_FORWARD, times["forward"]), (_BOTH, both)):
        fit = fitted_costs(by_shape, {keys: num_spans(scale, keys) for keys in scale.num_keys}, scale.tile_tokens)
        measured[name] = {
            "tile_tokens": fit.tile_tokens,
            "span_pairs": fit.span_pairs,
            "ps a pair": 1e12 * fit.pair_s,
            "relative error": fit.error,
        }
    return all(0 < t < math.inf for by_shape in times.values() for t in by_shape.values()), measured


def suggested_costs(measured: dict[str, Any]) -> ShardCosts:
    """What `check_tiles` suggests for both passes; the default where it failed."""
    suggested = measured.get(_BOTH)
    if suggested is None:
        return ShardCosts()
    return ShardCosts(tile_tokens=suggested["tile_tokens"], span_pairs=suggested["span_pairs"])


def num_spans(scale: TilesScale, keys: int) -> int:
    """Timed in one call."""
    return max(1, scale.all_keys // keys)


def fitted_costs(times_s: Mapping[_Shape, float], spans: Mapping[int, int], tile_tokens: Sequence[int]) -> Fit:
    """Least squares of relative errors for each candidate of tile_tokens; the best of them.

    times_s: by (R, S). spans: in one call, by S.
    """
    fits = []
    for tile in tile_tokens:
        costs = ShardCosts(tile_tokens=tile)
        # (shapes, 2) pairs of whole tiles, spans
        work = np.array([(spans[s] * costs.tile_pairs(s - r, s), spans[s]) for r, s in times_s], dtype=np.float64)
        seconds = np.array(list(times_s.values()))
        pair_s, span_s = np.linalg.lstsq(work / seconds[:, None], np.ones(len(work)), rcond=None)[0]
        if span_s < 0:  # a span is never a gain
            relative = work[:, 0] / seconds
            pair_s, span_s = relative.sum() / (relative @ relative), 0.0
        error = float(np.sqrt(np.mean((work @ (pair_s, span_s) / seconds - 1) ** 2)))
        fits.append(Fit(tile_tokens=tile, span_pairs=round(span_s / pair_s), pair_s=float(pair_s), error=error))
    return min(fits, key=lambda fit: fit.error)


def _time_spans(scale: TilesScale, rows: int, keys: int) -> tuple[float, float]:
    """Median seconds of a forward and a backward call."""
    heads, spans = scale.heads, num_spans(scale, keys)
    tasks = [Task(i * rows, (i + 1) * rows, keys - rows, (Keys(i * keys, (i + 1) * keys, 0),)) for i in range(spans)]
    phase = PhaseBuilder(spans * rows, None).phase(tasks, num_keys=spans * keys, causal=True)
    query, key, value, grad = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in (
            (spans * rows, heads.num_heads, heads.head_size),
            (spans * keys, heads.num_kv_heads, heads.head_size),
            (spans * keys, heads.num_kv_heads, heads.value_size),
            (spans * rows, heads.num_heads, heads.value_size),
        )
    )
    kernel: Kernel = kernel_for(query.device)
    scale_factor = 1 / math.sqrt(heads.head_size)
    exact = accumulation_dtype(query.dtype)
    grads = tuple(torch.zeros(t.shape, dtype=exact, device=t.device) for t in (query, key, value))
    seconds = []
    for _ in range(1 + scale.repeats):  # the first run warms up
        watch = Stopwatch(query.device)
        partial = Partial(query, heads.value_size, (phase,))
        let_launches_queue_up(query.device)
        with watch.lap("forward"):
            kernel.forward(partial, query, key, value, phase, scale_factor)
        results = (partial.out, partial.log_sum_exp)
        with watch.lap("backward"):
            kernel.backward(grads, grad, query, key, value, *results, phase, scale_factor)  # type: ignore[arg-type]
        seconds.append(watch.seconds())
    return median(s["forward"] for s in seconds[1:]), median(s["backward"] for s in seconds[1:])
