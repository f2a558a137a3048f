"""What dividing micro-batches costs, found again from the seconds of plans that cost just that."""

import random

import pytest

from wlb.cost import FittedCost, QuadraticTime
from wlb.errors import DataError
from wlb.report.fits import MeasuredPlan, ShardTime, fit_divided, fit_shard_time
from wlb.sharding import Division, ShardCosts, Sharding
from wlb.sharding.micro_batch_cost import ShardedCost

TRUE = ShardTime(
    costs=ShardCosts(tile_tokens=32, span_pairs=4000, received_token_pairs=700, exchange_pairs=30_000),
    pair_s=12e-9,
    token_s=2e-7,
    fixed_s=1e-3,
)


def plans(seed, cp_size=2):
    """Of packs of 2,048 to 8,192 tokens, divided by every kind of sharder; some need no exchange."""
    rng = random.Random(seed)
    made = []
    for tokens in (2048, 4096, 8192, 8192):
        pack, left = [], tokens
        while left:
            pack.append(min(left, 1 + int(rng.lognormvariate(6.5, 1.2))))
            left -= pack[-1]
        made += [Sharding(name=name, cp_size=cp_size).plan(pack) for name in ("per_sequence", "per_document", "hybrid")]
        halves = (*pack[: len(pack) // 2], tokens)
        made.append(Sharding(name="hybrid", cp_size=cp_size).plan((*halves, *halves)))
    assert {sum(p.received_tokens(r) for r in range(cp_size)) > 0 for p in made} == {True, False}
    return made


def measured(time, seed, noise=0.0):
    rng = random.Random(seed)
    return [MeasuredPlan(plan=p, seconds=time.seconds(p) * rng.gauss(1, noise)) for p in plans(seed)]


@pytest.mark.parametrize("seed", range(4))
def test_prices_are_found_again(seed):
    time = fit_shard_time(measured(TRUE, seed))
    assert time.costs.tile_tokens == TRUE.costs.tile_tokens
    assert time.pair_s == pytest.approx(TRUE.pair_s, rel=1e-3)
    assert time.costs.span_pairs == pytest.approx(TRUE.costs.span_pairs, rel=1e-2)
    assert time.costs.received_token_pairs == pytest.approx(TRUE.costs.received_token_pairs, rel=1e-2)
    assert time.deviation(measured(TRUE, seed + 100)) < 1e-3  # packs that it has not seen


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_a_run_that_was_held_up_leave_the_predicted_ratio_right(seed):
    runs = measured(TRUE, seed, noise=0.03)
    runs[3] = MeasuredPlan(plan=runs[3].plan, seconds=3 * runs[3].seconds)
    time = fit_shard_time(runs)
    others = plans(seed + 100)
    for i in range(0, len(others), 4):  # of one pack: per sequence, per document, hybrid
        base, *sharded = others[i : i + 3]
        ratios = [time.seconds(base) / time.seconds(p) for p in sharded]
        assert ratios == pytest.approx([TRUE.seconds(base) / TRUE.seconds(p) for p in sharded], rel=0.06), (
            f"seed {seed}"
        )


def test_too_few_plans_or_seconds_without_attention_are_refused():
    runs = measured(TRUE, 1)
    with pytest.raises(DataError, match="at least 6 plans, got 5"):
        fit_shard_time(runs[:5])
    with pytest.raises(DataError, match="finite and > 0, got 0"):
        fit_shard_time([*runs, MeasuredPlan(plan=runs[0].plan, seconds=0)])
    with pytest.raises(DataError, match="must grow with attention"):
        fit_shard_time([MeasuredPlan(plan=m.plan, seconds=1.0) for m in runs])


def test_costs_of_undivided_micro_batches_are_found_from_divided_ones():
    whole = FittedCost(
        forward=QuadraticTime(square_s=3e-9, token_s=7e-6, micro_batch_s=7e-3),
        backward=QuadraticTime(square_s=8e-9, token_s=1e-5, micro_batch_s=1e-2),
    )
    sharding = Sharding(name="hybrid", cp_size=2)
    division = Division(sharding=sharding, pad_to_multiple=2, typical_tokens=8192, prices=TRUE.costs)
    micro_batches = [(5000, 1000, 700), (300, 301), (8192,), (2000, 2001, 2002), (100,) * 20]
    divided = ShardedCost(whole=whole, division=division)
    fitted = fit_divided(
        [division.plan(division.padded_lengths(m)) for m in micro_batches],
        TRUE.costs,
        [divided.forward_s(m) for m in micro_batches],
        [divided.backward_s(m) for m in micro_batches],
    )
    for found, true in ((fitted.forward, whole.forward), (fitted.backward, whole.backward)):
        assert found.square_s == pytest.approx(true.square_s, rel=1e-6)
        assert found.token_s == pytest.approx(true.token_s, rel=1e-6)
        assert found.micro_batch_s == pytest.approx(true.micro_batch_s, rel=1e-6)
