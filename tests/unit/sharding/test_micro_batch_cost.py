"""Seconds of divided micro-batches: by hand, for every kind of cost model, and the estimate against the exact."""

import pickle

import numpy as np
import pytest

from wlb.cost import CrossoverCost, FittedCost, ProfiledCost, QuadraticTime, ScaledCost
from wlb.schedule import PipelineModel
from wlb.sharding import SHARDERS, Division, ShardCosts, Sharding
from wlb.sharding.micro_batch_cost import EvenCost, ShardedCost, evenly_shared, sharded, statistics_cost

CROSSOVER = CrossoverCost(crossover_tokens=8, overhead_tokens=4)
FITTED = FittedCost(
    forward=QuadraticTime(square_s=2e-9, token_s=3e-6, micro_batch_s=0.01),
    backward=QuadraticTime(square_s=5e-9, token_s=7e-6, micro_batch_s=0.02),
)
NO_FORWARD_ATTENTION = FittedCost(
    forward=QuadraticTime(square_s=0, token_s=3e-6, micro_batch_s=0.01),
    backward=QuadraticTime(square_s=5e-9, token_s=7e-6, micro_batch_s=0.02),
)
PROFILED = ProfiledCost(
    attention=((1024, 1e-4), (4096, 1.3e-3), (65536, 0.3)), linear_token_s=2.5e-7, fixed_micro_batch_s=2e-4
)
MODELS = {"crossover": CROSSOVER, "fitted": FITTED, "profiled": PROFILED}


def _division(name="per_sequence", *, cp=2, tile=1, received=0, typical=131072):
    costs = ShardCosts(tile_tokens=tile, received_token_pairs=received)
    return Division(sharding=Sharding(name=name, cp_size=cp, costs=costs), pad_to_multiple=cp, typical_tokens=typical)


def test_by_hand():
    cost = ShardedCost(whole=CROSSOVER, division=_division())
    # attention of 5 and 3 tokens: 34 / 64 s for 17 pairs, of which the slower rank computes 13; 4 tokens each; 4 fixed
    attention_s, rest_s = 34 / 64 * 13 / 17, 4 / 8 + 4 / 8
    assert cost.forward_s([5, 3]) == pytest.approx(attention_s + rest_s)
    assert cost.backward_s([5, 3]) == pytest.approx(2.5 * attention_s + 2 * rest_s)
    # the token of padding counts as a token
    assert cost.forward_s([4, 3]) > cost.fixed_s + 4 / 8
    # an empty micro-batch: one token of padding a rank
    assert cost.forward_s([]) == pytest.approx(5 / 8)
    assert cost.backward_s([]) == pytest.approx(2 * 5 / 8)


@pytest.mark.parametrize("model", MODELS)
def test_one_long_document_is_divided_as_evenly_as_can_be(model):
    whole = MODELS[model]
    cost = ShardedCost(whole=whole, division=_division(cp=4))
    for passes in ("forward_s", "backward_s"):
        one_rank, empty = getattr(whole, passes)([60000]), getattr(whole, passes)([])
        assert getattr(cost, passes)([60000]) == pytest.approx((one_rank - empty) / 4 + empty, rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_the_slowest_rank_waits_as_long_in_the_backward_pass(model):
    whole = MODELS[model]
    even, uneven = (
        ShardedCost(whole=whole, division=_division(name, cp=4)) for name in ("per_document", "per_sequence")
    )
    lengths = [20000] + [500] * 80
    extra_s = [getattr(uneven, p)(lengths) - getattr(even, p)(lengths) for p in ("forward_s", "backward_s")]
    assert extra_s[0] > 0
    assert extra_s[1] == pytest.approx(2.5 * extra_s[0], rel=1e-3)


def test_attention_that_only_the_backward_pass_has_is_divided_too():
    cost = ShardedCost(whole=NO_FORWARD_ATTENTION, division=_division(cp=4))
    assert cost.backward_s([60000]) == pytest.approx((5e-9 * 60000**2 + 7e-6 * 60000) / 4 + 0.02, rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_the_estimate_is_additive_and_document_work_is_its_part(model):
    cost = EvenCost(whole=MODELS[model], division=_division("per_document", cp=4, tile=128))
    lengths = [9000, 512, 512, 70, 1]
    for passes in (cost.forward_s, cost.backward_s):
        empty_s = passes([])
        assert passes(lengths) - empty_s == pytest.approx(sum(passes([n]) - empty_s for n in lengths))
    assert cost.forward_s([9000]) == pytest.approx(cost.attention_s(9000, 9000) + cost.linear_s(9000) + cost.fixed_s)
    assert cost.attention_s(0, 0) == 0
    assert cost.attention_s(100, 9000) < cost.attention_s(9000, 9000)


def _packs(seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        lengths, room = [], 131072
        while room:
            lengths.append(int(min(room, 1 + rng.lognormal(7.7, 1.3))))
            room -= lengths[-1]
        yield tuple(sorted(lengths, reverse=True))


# Most by which the exact seconds exceed the estimate. per_sequence cannot be estimated a document at a time: what a
# long document costs depends on what it lies beside.
EXCESS = {"per_sequence": 2.0, "per_document": 1.06, "adaptive": 1.15, "hybrid": 1.05}


@pytest.mark.parametrize("name", SHARDERS)
@pytest.mark.parametrize("cp", [2, 8])
def test_the_estimate_is_a_little_below_the_exact_seconds(name, cp):
    division = _division(name, cp=cp, tile=128)
    whole = CrossoverCost(crossover_tokens=36000, overhead_tokens=1000)
    exact, estimate = ShardedCost(whole=whole, division=division), EvenCost(whole=whole, division=division)
    seconds = [(exact.forward_s(p), estimate.forward_s(p)) for p in _packs(3)]
    assert len(seconds) == 5
    for exact_s, estimate_s in seconds:
        assert 0.999 * estimate_s <= exact_s <= EXCESS[name] * estimate_s
    # and no rank is ever faster than an equal share of the undivided work
    ideal = [(whole.forward_s(p) - whole.fixed_s) / cp + whole.fixed_s for p in _packs(3)]
    assert all(i <= e for i, (e, _) in zip(ideal, seconds, strict=True))


def test_a_stage_of_a_divided_model_is_a_divided_stage():
    division = _division(tile=4)
    stage_of_divided = ScaledCost(whole=ShardedCost(whole=CROSSOVER, division=division), share=0.25)
    divided_stage = ShardedCost(whole=ScaledCost(whole=CROSSOVER, share=0.25), division=division)
    for lengths in ([], [5, 3], [9, 9, 2]):
        assert stage_of_divided.forward_s(lengths) == pytest.approx(divided_stage.forward_s(lengths))
        assert stage_of_divided.backward_s(lengths) == pytest.approx(divided_stage.backward_s(lengths))


def test_one_plan_serves_all_stages_and_both_passes(monkeypatch):
    asked = []
    monkeypatch.setitem(SHARDERS, "counted", lambda *a: asked.append(a) or SHARDERS["per_sequence"](*a))
    stages = tuple(ScaledCost(whole=CROSSOVER, share=s) for s in (0.2, 0.3, 0.5))
    model = sharded(PipelineModel.equal_stages(CROSSOVER, 3), _division("counted"))
    model = sharded(PipelineModel(shape=model.shape, stretch_costs=stages), _division("counted"))
    assert len(model.classes()[0]) == 3
    model.forward_s((5, 3))
    model.backward_s((5, 3))
    assert len(asked) == 1


def test_pipelines_of_one_rank_stay_what_they_are():
    model = PipelineModel.equal_stages(CROSSOVER, 4)
    assert sharded(model, None) is model
    assert evenly_shared(model, None) is model
    assert statistics_cost(CROSSOVER, None, num_micro_batches=4) is CROSSOVER


def test_ranks_send_their_shares_at_the_same_time():
    whole = CrossoverCost(crossover_tokens=8, latency_s=1.0, bytes_per_s=10.0)
    cost = ShardedCost(whole=whole, division=_division(cp=4))
    assert (cost.communication_s(0), cost.communication_s(400)) == (0, 11)


def test_statistics_are_exact_where_plans_are_quick():
    for name, count, kind in (
        ("per_sequence", 64, ShardedCost),
        ("per_sequence", 65, EvenCost),
        ("hybrid", 4, EvenCost),
    ):
        assert isinstance(statistics_cost(CROSSOVER, _division(name), num_micro_batches=count), kind)


@pytest.mark.parametrize("kind", [ShardedCost, EvenCost])
def test_costs_travel_to_another_process(kind):
    cost = kind(whole=FITTED, division=_division("per_document", cp=4))
    before = cost.forward_s([50, 7]), cost.backward_s([50, 7])
    copy = pickle.loads(pickle.dumps(cost))
    assert copy == cost
    assert (copy.forward_s([50, 7]), copy.backward_s([50, 7])) == before
