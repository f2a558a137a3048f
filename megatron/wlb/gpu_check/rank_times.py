"""Attention time of the slowest context-parallel rank, measured on one device, beside what `ShardCosts` predicts.

What is measured is what the shapes of a plan cost a rank, not its communication: see `stopwatch`.

Shapes: T tokens of the pack, N query heads, V head size of values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from megatron.wlb.gpu_check.packs import Heads, Tensors, draw_pack, in_pack_order
from megatron.wlb.gpu_check.stopwatch import time_plan
from wlb.attention import CommType, packed_attention
from wlb.sharding import SHARDERS, ShardCosts

ROW_TOLERANCE = 0.02
TIMES_RULE = (
    f"every row of every rank within {ROW_TOLERANCE:.0%} of the same row of packed attention on one rank; "
    "no time decides anything"
)
_BASELINE = "per_sequence"


@dataclass(frozen=True, kw_only=True)
class TimesScale:
    """Packs to time, and for how long.

    pack_tokens, num_packs: sizes, and packs of each. A pack is documents in the order in which they are drawn, the
        last one cut: lengths are lognormal around median_tokens with sigma 0.9, but one in fifty is log-uniform in
        tail_tokens.
    repeats: timed runs of each plan, after one that warms up.
    """

    pack_tokens: tuple[int, ...]
    num_packs: int
    cp_sizes: tuple[int, ...]
    heads: Heads
    tile_tokens: int
    median_tokens: int
    tail_tokens: tuple[int, int]
    repeats: int

    @property
    def costs(self) -> ShardCosts:
        """With which training plans layers of such heads."""
        return ShardCosts.for_model(
            num_heads=self.heads.num_heads, num_kv_heads=self.heads.num_kv_heads, tile_tokens=self.tile_tokens
        )


def check_rank_times(scale: TimesScale, calibrated: ShardCosts, budget_s: float) -> tuple[bool, dict[str, Any]]:
    """Time of the slowest rank over that under per-sequence sharding: medians over packs and repeats.

    Plans are those of training; the predictions are of attention alone, which is what is measured: with the tiles that
    sharders assume, and with prices that were fitted to this device.

    budget_s: one pack of each size is always timed, the largest first, and none is begun after it.
    """
    deadline_s = time.monotonic() + budget_s
    # By (pack tokens, CP, exchange), then by sharder and quantity: a number for each pack and repeat.
    samples: dict[tuple[int, int, str], dict[str, dict[str, list[float]]]] = {}
    worst_row_error = 0.0
    rounds = 0
    for number in range(scale.num_packs):
        if number and time.monotonic() > deadline_s:
            break
        rounds += 1
        for num_tokens in scale.pack_tokens:
            lengths = draw_lengths(scale, num_tokens, seed=number)
            pack = draw_pack(num_tokens, scale.heads, seed=number)
            query, key, value, _ = pack
            wanted = packed_attention(query, key, value, tuple(accumulate(lengths, initial=0)))
            for cp_size in scale.cp_sizes:
                for comm_type in get_args(CommType):
                    by_sharder = samples.setdefault((num_tokens, cp_size, comm_type), {})
                    row_errors = _time_sharders(
                        scale, lengths, cp_size, comm_type, pack, wanted, calibrated, by_sharder
                    )
                    # Not max(): it may pass over a NaN.
                    worst_row_error = float(np.max([worst_row_error, *row_errors]))
    measured: dict[str, Any] = {
        f"{tokens} tokens, CP {cp_size}, {comm_type}": _summary(by_sharder)
        for (tokens, cp_size, comm_type), by_sharder in samples.items()
    }
    measured |= {"packs of each size": rounds, "worst row error": worst_row_error}
    return worst_row_error <= ROW_TOLERANCE, measured


def draw_lengths(scale: TimesScale, num_tokens: int, *, seed: int) -> tuple[int, ...]:
    """Of the documents of a pack, as `TimesScale` says."""
    rng = np.random.default_rng((num_tokens, seed))
    lengths: list[int] = []
    room = num_tokens
    while room:
        if rng.random() < 0.02:
            length = np.exp(rng.uniform(*np.log(scale.tail_tokens)))
        else:
            length = rng.lognormal(np.log(scale.median_tokens), 0.9)
        lengths.append(min(room, max(1, round(float(length)))))
        room -= lengths[-1]
    return tuple(lengths)


def _time_sharders(
    scale: TimesScale,
    lengths: Sequence[int],
    cp_size: int,
    comm_type: CommType,
    pack: Tensors,
    wanted: torch.Tensor,
    calibrated: ShardCosts,
    samples: dict[str, dict[str, list[float]]],
) -> list[float]:
    """Adds to `samples`; returns the largest relative error of a row (N, V) under each sharder."""
    predictions = {"predicted": ShardCosts(tile_tokens=scale.tile_tokens), "calibrated": calibrated}
    plans = {name: shard(lengths, cp_size, scale.costs) for name, shard in SHARDERS.items()}
    errors = []
    for plan in plans.values():
        _, outs = time_plan(pack, plan, comm_type)
        out = in_pack_order(outs, plan).float()
        errors.append(float(((out - wanted).flatten(1).norm(dim=1) / wanted.float().flatten(1).norm(dim=1)).max()))
    for repeat in range(scale.repeats):
        # Forth and back, so that a device that slows down does so for all.
        names = list(plans)[:: 1 if repeat % 2 == 0 else -1]
        times = {name: time_plan(pack, plans[name], comm_type)[0] for name in names}
        for name, plan in plans.items():
            values = {
                "ms": 1000 * times[name].attention_s,
                "attention": times[name].attention_s / times[_BASELINE].attention_s,
                "all": times[name].all_s / times[_BASELINE].all_s,
                **{
                    prediction: costs.slowest_pairs(plan) / costs.slowest_pairs(plans[_BASELINE])
                    for prediction, costs in predictions.items()
                },
            }
            for quantity, value in values.items():
                samples.setdefault(name, {}).setdefault(quantity, []).append(value)
    return errors


def _summary(samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    medians = {name: {q: median(values) for q, values in by.items()} for name, by in samples.items()}
    baseline = medians.pop(_BASELINE)
    return {f"{_BASELINE} ms": baseline["ms"], **medians}
