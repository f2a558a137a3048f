"""What the makespan packer promises beyond every packer: both caps, plain's own pieces, and how near the best it is."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.cost import CrossoverCost, ScaledCost
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.documents import documents_from_lengths
from wlb.packing import PackerOptions, StepShape, build_packer
from wlb.schedule import PipelineModel, PipelineShape, model_timeline, pass_graph

WINDOW = 64
COST = CrossoverCost(crossover_tokens=20, overhead_tokens=1)


def _head_heavy(num_stages, num_chunks):
    """Stretches that differ: an embedding in front, a loss head behind."""
    stretches = num_stages * num_chunks
    shares = [1.2, *([1.0] * (stretches - 2)), 1.6] if stretches > 1 else [1.0]
    return PipelineModel(
        shape=PipelineShape(num_stages=num_stages, num_chunks=num_chunks),
        stretch_costs=tuple(ScaledCost(whole=COST, share=s / stretches) for s in shares),
    )


def _makespan(pipeline, *, per_replica, replicas, evaluations=200, name="makespan", **more):
    return build_packer(
        name,
        PackerOptions(
            shape=StepShape(window_tokens=WINDOW, micro_batches_per_replica=per_replica, num_replicas=replicas),
            cost=COST,
            pipeline=pipeline,
            search_evaluations=evaluations,
            **more,
        ),
    )


def _plan(packer, documents):
    return packer.plan_step(packer.initial_state(), documents)[0]


def _time_s(plan, pipeline):
    return model_timeline(plan, pipeline).makespan_s


shapes = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)])
many_lengths = st.lists(st.one_of(st.integers(1, WINDOW), st.integers(1, 8)), min_size=1, max_size=80)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=many_lengths,
    shape=shapes,
    groups=st.integers(1, 3),
    replicas=st.integers(1, 3),
    equal=st.booleans(),
    multiple=st.integers(1, 2),
    in_flight=st.sampled_from([None, 1.0, 1.5, 3.0]),
)
def test_caps_counts_and_pieces(lengths, shape, groups, replicas, equal, multiple, in_flight):
    num_stages, num_chunks = shape
    pipeline = _head_heavy(num_stages, num_chunks)
    options = {"per_replica": groups * multiple * (num_stages if num_chunks > 1 else 1), "replicas": replicas}
    packer = _makespan(pipeline, **options, equal_counts=equal, count_multiple=multiple, in_flight_windows=in_flight)
    plain = _makespan(pipeline, **options, name="plain")
    state, plain_state = packer.initial_state(), plain.initial_state()
    sources = [DocumentSource(lengths=np.array(lengths), label_tokens=0)]
    streams = [DocumentStream(sources, window_tokens=WINDOW, cut="stream", seed=3) for _ in range(2)]
    for step in range(3):
        arrivals = streams[0].take(packer.wanted_tokens(state), arrival=step)
        plain_arrivals = streams[1].take(plain.wanted_tokens(plain_state), arrival=step)
        plan, state = packer.plan_step(state, arrivals)
        plain_plan, plain_state = plain.plan_step(plain_state, plain_arrivals)
        # the very pieces of plain, and nothing waits
        pieces = [
            sorted((d for m in p.micro_batches for d in m.documents), key=lambda d: d.doc_id)
            for p in (plan, plain_plan)
        ]
        assert pieces[0] == pieces[1]
        assert plan.waiting == ()
        # both caps, and counts that the schedule takes
        held = [pipeline.shape.first_stage_peak_tokens([m.num_tokens for m in r]) for r in plan.replicas]
        assert max(m.num_tokens for m in plan.micro_batches) <= WINDOW
        assert max(held) <= packer.in_flight_tokens
        if in_flight is None:
            assert packer.in_flight_tokens == max(
                pipeline.shape.first_stage_peak_tokens([m.num_tokens for m in r]) for r in plain_plan.replicas
            )
        counts = [len(r) for r in plan.replicas]
        assert all(pipeline.shape.takes(c) and c % multiple == 0 for c in counts)
        assert not equal or len(set(counts)) == 1
        # never slower than plain, where plain keeps the cap
        if in_flight is None:
            assert _time_s(plan, pipeline) <= _time_s(plain_plan, pipeline) * (1 + 1e-6)


@pytest.mark.parametrize(("num_stages", "replicas"), [(1, 2), (4, 1), (4, 2)])
def test_a_larger_budget_never_gives_a_slower_step(num_stages, replicas):
    rng = random.Random(11)
    lengths = [min(WINDOW, 1 + int(rng.lognormvariate(1.5, 1.2))) for _ in range(70)]
    pipeline = PipelineModel.equal_stages(COST, num_stages)
    times = []
    for evaluations in (0, 1, 63, 64, 65, 200, 900, 901, 3000, 12000):
        packer = _makespan(pipeline, per_replica=6, replicas=replicas, evaluations=evaluations)
        plan = _plan(packer, documents_from_lengths(lengths))
        assert plan == _plan(packer, documents_from_lengths(lengths))  # deterministic
        assert plan == _plan(
            _makespan(pipeline, per_replica=6, replicas=replicas, evaluations=evaluations),
            documents_from_lengths(lengths),
        )
        assert sorted(d.doc_id for m in plan.micro_batches for d in m.documents) == list(range(70))
        assert max(m.num_tokens for m in plan.micro_batches) <= WINDOW
        assert max(pipeline.shape.first_stage_peak_tokens([m.num_tokens for m in r]) for r in plan.replicas) <= (
            packer.in_flight_tokens
        )
        times.append(_time_s(plan, pipeline))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))
    assert num_stages == 1 or times[-1] < times[0]


def _ordered_partitions(items: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put the items into micro-batches and those in an order."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for partition in _ordered_partitions(rest):
        for i in range(len(partition)):
            yield (*partition[:i], (first, *partition[i]), *partition[i + 1 :])
        for i in range(len(partition) + 1):
            yield (*partition[:i], (first,), *partition[i:])


def _best_replica_s(lengths, pipeline, in_flight_tokens):
    """Seconds of the fastest way to train these documents in one replica, by trying all."""
    by_count: dict[int, list[tuple[tuple[int, ...], ...]]] = {}
    for partition in _ordered_partitions(lengths):
        tokens = [sum(m) for m in partition]
        if max(tokens) <= WINDOW and pipeline.shape.first_stage_peak_tokens(tokens) <= in_flight_tokens:
            by_count.setdefault(len(partition), []).append(partition)
    seconds = cache(lambda m: (pipeline.forward_s(m)[0], pipeline.backward_s(m)[0]))  # equal stages
    best_s = float("inf")
    for count, partitions in by_count.items():
        graph = pass_graph(pipeline.shape, count, instant_messages=True)
        pairs = np.array([[seconds(m) for m in p] for p in partitions])  # (C, N, 2)
        durations_s = np.concatenate([pairs[:, :, 0].T, pairs[:, :, 1].T])
        best_s = min(best_s, float(graph.makespans(durations_s, graph.rows([0] * pipeline.shape.num_stages)).min()))
    return best_s


def _best_step_s(lengths, pipeline, in_flight_tokens, *, replicas):
    if replicas == 1:
        return _best_replica_s(lengths, pipeline, in_flight_tokens)
    best_of = cache(lambda part: _best_replica_s(part, pipeline, in_flight_tokens) if part else 0.0)
    best_s = float("inf")
    for mask in range(2 ** (len(lengths) - 1)):  # the first document is in the first replica
        parts = [tuple(n for i, n in enumerate(lengths) if (mask >> i & 1) == side) for side in (0, 1)]
        best_s = min(best_s, max(best_of(tuple(sorted(p))) for p in parts))
    return best_s


@pytest.mark.parametrize(
    ("num_stages", "replicas", "num_documents", "tries"),
    [
        (1, 2, 5, 6),
        (2, 1, 6, 12),
        (4, 1, 6, 12),
        pytest.param(2, 1, 8, 2, marks=pytest.mark.slow),
        (2, 2, 6, 6),
        (4, 2, 6, 6),
    ],
)
def test_gap_to_the_best_possible_step(num_stages, replicas, num_documents, tries):
    pipeline = PipelineModel.equal_stages(COST, num_stages)
    gaps = []
    for seed in range(tries):
        rng = random.Random(seed)
        lengths = tuple(min(WINDOW, 4 + int(rng.lognormvariate(2.3, 0.9))) for _ in range(num_documents))
        packer = _makespan(pipeline, per_replica=num_documents, replicas=replicas, evaluations=2000)
        plan = _plan(packer, documents_from_lengths(lengths))
        best_s = _best_step_s(lengths, pipeline, packer.in_flight_tokens, replicas=replicas)
        gaps.append(_time_s(plan, pipeline) / best_s - 1)
        assert gaps[-1] > -1e-6, (seed, lengths)
    print(f"{num_stages} stages, {replicas} replicas, {num_documents} documents: gaps {gaps}")
    assert fmean(gaps) <= 0.03
