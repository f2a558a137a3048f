"""The solver packer by hand, against brute force, and what it refuses."""

import json
import random
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest

from wlb.cost import CrossoverCost, micro_batch_work_ns
from wlb.documents import documents_from_lengths, total_tokens
from wlb.errors import ConfigError, PackingError
from wlb.packing import PackerOptions, PackerState, StepShape, build_packer
from wlb.packing.greedy import GreedyPacker
from wlb.packing.placement import longest_first
from wlb.packing.solver import optimal, work_bound

COST = CrossoverCost(crossover_tokens=8)


def _square(length):
    return length * length


def _work_ns(length):
    return micro_batch_work_ns(COST, [length])


def _packer(*, lengths="variable", cap=None, per_replica=2, replicas=1, window=8, seconds=1.0, cost=COST):
    shape = StepShape(window_tokens=window, micro_batches_per_replica=per_replica, num_replicas=replicas)
    options = PackerOptions(shape=shape, cost=cost, cap_windows=cap, solver_lengths=lengths, solver_seconds=seconds)
    return build_packer("solver", options)


def _lengths(filled):
    return sorted(sorted(d.length for d in held) for held in filled)


def _solve(lengths, *, count, limit, work=_square, seconds=2.0, **more):
    documents = documents_from_lengths(lengths)
    return optimal(documents, num_micro_batches=count, limit_tokens=limit, work=work, seconds=seconds, **more)


def _least_possible_max(lengths, *, count, limit, work):
    """By trying every assignment; None if none keeps the cap."""
    best = None
    for assignment in product(range(count), repeat=len(lengths)):
        loads, tokens = [0] * count, [0] * count
        for n, j in zip(lengths, assignment, strict=True):
            loads[j] += work(n)
            tokens[j] += n
        if max(tokens) <= limit and (best is None or max(loads) < best):
            best = max(loads)
    return best


def test_equal_works_go_together_where_longest_first_parts_them():
    solution = _solve([5, 5, 4, 4, 4], count=2, limit=13)
    assert _lengths(solution.filled) == [[4, 4, 4], [5, 5]]
    assert (solution.largest_work, solution.bound_work, solution.is_proven) == (50, 50, True)


def test_the_cap_decides():
    # Squares alone would put 6 apart from everything else: 36 against 9 + 9 + 9 + 9, but that is 12 tokens.
    assert _lengths(_solve([6, 3, 3, 3, 3], count=2, limit=12).filled) == [[3, 3, 3, 3], [6]]
    tight = _solve([6, 3, 3, 3, 3], count=2, limit=9)
    assert _lengths(tight.filled) == [[3, 3, 3], [3, 6]]
    assert (tight.largest_work, tight.bound_work, tight.is_proven) == (45, 45, True)


@pytest.mark.parametrize("work", [_square, _work_ns])
def test_tiny_instances_have_the_objective_of_brute_force(work):
    rng = random.Random(11)
    seen = {"fits": 0, "does not fit": 0, "better than the start": 0}
    for _ in range(60):
        count = rng.choice([2, 3])
        lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 8 if count == 2 else 7))]
        limit = max(*lengths, 1, -(-sum(lengths) // count) + rng.choice([0, 1, 4]))
        best = _least_possible_max(lengths, count=count, limit=limit, work=work)
        if best is None:
            seen["does not fit"] += 1
            with pytest.raises(PackingError, match=f"must fit in {count} micro-batches of {limit} tokens"):
                _solve(lengths, count=count, limit=limit, work=work)
            continue
        solution = _solve(lengths, count=count, limit=limit, work=work)
        assert solution.is_proven
        assert solution.largest_work == solution.bound_work == best
        assert sorted(d.doc_id for held in solution.filled for d in held) == list(range(len(lengths)))
        assert len(solution.filled) == count
        assert max(total_tokens(held) for held in solution.filled) <= limit
        assert max(sum(work(d.length) for d in held) for held in solution.filled) == best
        assert len(lengths) < count or all(solution.filled)
        seen["fits"] += 1
        seen["better than the start"] += best > work_bound(sorted(map(work, lengths), reverse=True), count)
    assert min(seen.values()) >= 3, seen


def test_the_bound_holds_on_instances_that_brute_force_can_do():
    rng = random.Random(5)
    for _ in range(200):
        lengths = sorted((rng.randint(1, 30) for _ in range(rng.randint(1, 7))), reverse=True)
        count = rng.randint(1, 3)
        best = _least_possible_max(lengths, count=count, limit=10**6, work=_square)
        assert work_bound([n * n for n in lengths], count) <= best
    assert work_bound([], 2) == 0
    assert work_bound([7, 6, 5, 5, 4], 2) == 14  # the mean, 13.5; three of these five are together: 5 + 5 + 4


def test_a_search_is_repeatable_and_a_longer_one_is_no_worse():
    rng = random.Random(2)
    lengths = [int(rng.lognormvariate(7, 1)) + 1 for _ in range(40)]
    limit = sum(lengths) // 8 + max(lengths)
    short, again, longer = (_solve(lengths, count=8, limit=limit, seconds=s) for s in (0.1, 0.1, 0.6))
    assert short == again
    assert longer.largest_work <= short.largest_work
    assert max(short.bound_work, longer.bound_work) <= longer.largest_work


def test_none_worse_than_the_start_is_given_back():
    documents = documents_from_lengths([5, 5, 4, 4, 4])
    start = ((documents[0], documents[1]), tuple(documents[2:]))
    solution = optimal(
        documents, num_micro_batches=2, limit_tokens=13, work=_square, seconds=1e-9, tolerance=0, start=start
    )
    assert solution.largest_work == 50


def test_a_tolerance_ends_the_search_early():
    # 50 is the least; longest first finds 57 and the bound says 49.
    assert _solve([5, 5, 4, 4, 4], count=2, limit=13, tolerance=0.2).largest_work == 57


def test_without_documents_there_is_nothing_to_place():
    solution = _solve([], count=2, limit=8)
    assert solution.filled == ((), ())
    assert (solution.largest_work, solution.bound_work, solution.is_proven) == (0, 0, True)


def test_both_formulations_of_the_packer():
    documents = documents_from_lengths([7, 4, 4, 1])
    fixed, variable = _packer(lengths="fixed"), _packer()
    assert (fixed.cap_tokens, variable.cap_tokens) == (8, 12)
    plan, state = fixed.plan_step(fixed.initial_state(), documents)
    # Squares: 49 + 1 against 16 + 16. With a cap of 12 tokens, 7 is better off alone.
    assert _lengths(m.documents for m in plan.micro_batches) == [[1, 7], [4, 4]]
    assert state.waiting == ()
    plan, state = variable.plan_step(variable.initial_state(), documents)
    assert _lengths(m.documents for m in plan.micro_batches) == [[1, 4, 4], [7]]
    assert variable.wanted_tokens(state) == 16


def test_what_does_not_fit_is_carried_as_few_tokens_as_possible_and_comes_first():
    packer = _packer(lengths="fixed")
    documents = documents_from_lengths([6, 5, 3, 3, 2, 2])
    # 21 tokens for 16. Longest first fills 6 2 and 5 3 and leaves 3 and 2; nothing can leave less than 5.
    plan, state = packer.plan_step(packer.initial_state(), documents)
    assert plan.num_tokens == 16
    assert packer.wanted_tokens(state) == 16 - 5
    carried = {d.doc_id for d in state.carried}
    plan, state = packer.plan_step(state, documents_from_lengths([8, 8], arrival=1, first_id=6))
    assert carried <= {d.doc_id for m in plan.micro_batches for d in m.documents}


def test_the_solver_leaves_less_than_longest_first_does():
    documents = documents_from_lengths([2, 4, 3, 3, 2])
    solver = _packer(lengths="fixed", window=7)
    greedy = GreedyPacker(shape=solver.shape, cost=COST)
    left = [total_tokens(p.plan_step(p.initial_state(), documents)[0].waiting) for p in (greedy, solver)]
    # 14 tokens for 14. Longest first fills 4 2 and 3 3 and leaves a 2; 4 3 and 3 2 2 take all.
    assert left == [2, 0]


def test_documents_cut_at_window_ends_all_fit():
    rng = random.Random(4)
    lengths = []
    for _ in range(6):
        cuts = sorted({0, 64, *(rng.randint(1, 63) for _ in range(5))})
        lengths += [b - a for a, b in pairwise(cuts)]
    packer = _packer(lengths="fixed", window=64, per_replica=6, seconds=0.1)
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths(lengths))
    assert state.waiting == ()
    assert [m.num_tokens for m in plan.micro_batches] == [64] * 6


def test_the_last_step_trains_everything_on_equal_counts():
    packer = _packer(lengths="fixed", per_replica=1, replicas=2)
    plan, state = packer.plan_step(packer.initial_state(), documents_from_lengths([6, 6, 6]), steps_left=1)
    assert state.waiting == ()
    assert [len(replica) for replica in plan.replicas] == [2, 2]


def test_a_saved_state_goes_on_alike():
    packer = _packer(lengths="fixed")
    _, state = packer.plan_step(packer.initial_state(), documents_from_lengths([6, 5, 3, 3, 2, 2]))
    assert state.carried
    again = PackerState.from_json(json.loads(json.dumps(state.to_json())))
    more = documents_from_lengths([7, 3, 1], arrival=1, first_id=6)
    assert packer.plan_step(again, more) == packer.plan_step(state, more)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"lengths": "free"}, "lengths must be variable or fixed, got 'free'"),
        ({"lengths": "fixed", "cap": 1.5}, "cap_windows must be 1 where lengths are fixed, got 1.5"),
        ({"cap": 0.5}, "cap_windows must be >= 1, got 0.5"),
        ({"seconds": 0.0}, "seconds must be finite and > 0, got 0.0"),
        ({"seconds": float("nan")}, "seconds must be finite and > 0, got nan"),
    ],
)
def test_what_the_packer_refuses(changes, error):
    with pytest.raises(ConfigError, match=error):
        _packer(**changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"count": 0}, "num_micro_batches must be >= 1, got 0"),
        ({"seconds": -1.0}, "seconds must be finite and > 0, got -1.0"),
        ({"tolerance": 1.0}, r"tolerance must be in \[0, 1\), got 1.0"),
        ({"limit": 4}, r"length must be <= 4, .* got 5 \(document 0\)"),
        ({"work": lambda n: n * 2**50}, r"work of all documents must be below 2\*\*53 for packer solver, got"),
    ],
)
def test_what_a_search_refuses(changes, error):
    arguments = {"count": 2, "limit": 13, **changes}
    with pytest.raises((ConfigError, PackingError), match=error):
        _solve([5, 5, 4, 4, 4], **arguments)


def test_without_the_solver_installed_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ConfigError, match=r"needs the package ortools, .* pip install 'wlb-megatron\[solver\]'"):
        _packer()


REPOSITORY = Path(__file__).resolve().parents[3]
LENGTHS = REPOSITORY.parent / "shared" / "data" / "lengths" / "wlb_llm_128k.json"


def test_real_lengths_are_solved_within_a_thousandth():
    if not LENGTHS.is_file():
        pytest.skip(f"{LENGTHS.name} is not there: no check that the solver finishes on real lengths")
    lengths = random.Random(1).sample(json.loads(LENGTHS.read_text()), 24)
    cost = CrossoverCost(crossover_tokens=36000)
    documents = documents_from_lengths(lengths)
    packer = _packer(cap=1.5, window=sum(lengths) // 4 + 1, per_replica=4, cost=cost, seconds=2.0)
    plan, state = packer.plan_step(packer.initial_state(), documents)
    works = [micro_batch_work_ns(cost, [d.length]) for d in longest_first(documents)]
    bound = work_bound(works, 4)
    assert state.waiting == ()
    largest = max(micro_batch_work_ns(cost, m.lengths) for m in plan.micro_batches)
    # Longest first to least work is 0.2 % above the bound here.
    assert bound <= largest <= 1.001 * bound


def _measure(tmp_path, *options):
    lengths = tmp_path / "lengths.txt"
    rng = random.Random(3)
    lengths.write_text("\n".join(str(int(rng.lognormvariate(7, 1)) + 1) for _ in range(200)))
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "solver_gap.py"), "--lengths", str(lengths), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_benchmark_measures_gaps_to_finished_searches(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--micro-batches", "3", "--documents", "9,14", "--instances", "3"]
    done = _measure(tmp_path, *sizes, "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("$ ")
    report = json.loads(out.read_text())
    assert [(r["problem"], r["packer"], r["documents"]) for r in report["rows"]] == [
        (problem, packer, documents)
        for problem, packer in (
            ("fixed", "greedy"),
            ("replicas", "longest first"),
            ("replicas", "makespan"),
            ("variable", "wlb"),
        )
        for documents in (9, 14)
    ]
    finished = [i for i in report["instances"] if i["finished"]]
    assert len(finished) == len(report["instances"]) == 24
    for i in finished:
        # Within the tolerance of the bound: no packer can be better by more.
        assert i["bound_work"] <= i["solver_work"] <= i["bound_work"] / 0.999
        assert i["left"] > 0 or i["bound_work"] <= i["largest_work"]
    assert max(r["gap_max_percent"] for r in report["rows"] if r["gap_instances"]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--documents", "9,x"], "--documents must be whole numbers >= 1, comma-separated, got '9,x'"),
        (["--fill", "0"], "--fill must be in (0, 1], got 0.0"),
        (["--instances", "99"], "--lengths must hold 26928 documents for these instances, got 200"),
    ],
)
def test_the_benchmark_says_what_is_wrong(tmp_path, options, message):
    done = _measure(tmp_path, *options)
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr
