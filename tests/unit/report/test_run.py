from statistics import median

import pytest

from tests.unit.report.synthetic_run import BALANCED, PLAIN, forward_s, write_run
from wlb.errors import DataError
from wlb.report import fit_first_half
from wlb.report.run import TrainedRun, load_run


def makespan_s(step):
    """Two equal stages, two micro-batches: F0 F1 B0 B1 on the second stage behind F0, and B1 back on the first."""
    a, b = (forward_s(m) for m in step)
    # Stage 1: F0 B0 F1 B1 from a on; F1 is ready at a + b. Stage 0 ends with B1, after its own B0.
    stage1_b0 = a + a + 2 * a
    stage1_b1 = max(stage1_b0, a + b) + b + 2 * b
    stage0_b0 = max(stage1_b0, a + b) + 2 * a
    return max(stage1_b1, stage0_b0) + 2 * b


@pytest.fixture
def plain(run_folders):
    return load_run(run_folders[0])


def test_the_warm_up_counts_as_predicted_at_the_pace_of_the_other_steps(plain):
    model = fit_first_half(plain)
    all_s = sum(makespan_s(step) + 0.01 for step in PLAIN)
    assert plain.total_s(model) == pytest.approx(all_s)  # without the 5 seconds by which the first step is longer
    twice_as_slow = [2 * s.elapsed_s for s in plain.log.steps]
    assert plain.total_of(twice_as_slow, model) == pytest.approx(2 * all_s)
    assert plain.step_s_median == pytest.approx(median(makespan_s(step) + 0.01 for step in PLAIN[2:]))


def test_rates_are_of_all_tokens_and_operations(plain):
    model = fit_first_half(plain)
    summary = plain.summary(model)
    assert plain.tokens == 1040
    # Pairs of causal attention: half of the squares; 4 operations a pair, layer and channel. Forward times three.
    linear = 2 * 2 * (8 * 32 + 2 * 8 * 16) + 2 * 8 * 32
    squares = sum(n * n for step in PLAIN for m in step for n in m)
    assert sum(plain.step_flops) == pytest.approx(3 * (1040 * linear + 4 * 2 * 8 * squares / 2))
    assert summary["tokens_per_s"] == pytest.approx(1040 / plain.total_s(model))
    assert summary["packed_flops_per_s"] == pytest.approx(sum(plain.step_flops) / plain.total_s(model))


def test_the_typical_step_is_near_both_medians(plain):
    # Counted steps 2 to 5. Mega-operations 2.62, 2.55, 3.15, 3.36: median 2.88. Seconds for each of them 2.19, 1.97,
    # 2.12, 2.14: median 2.13. Step 4 is 9 % off the one and 1 % off the other; step 2, the next best, 9 % and 3 %.
    assert plain.typical_step().step == 4


def test_losses_stand_over_the_tokens_trained_before_and_in_the_step(plain):
    assert plain.losses()[0] == (150, 7.0)
    assert plain.losses()[-1] == (1040, 6.5)


def test_measured_imbalance_of_two_micro_batches(plain):
    a, b = forward_s([100]), forward_s([30, 20])
    assert plain.measured_imbalance()[0] == pytest.approx(2 * a / (a + b))
    c, d = forward_s([50, 50]), forward_s([40])
    assert plain.measured_imbalance()[1] == pytest.approx(2 * c / (c + d))


def test_log_and_time_line_must_agree(plain):
    with pytest.raises(DataError, match="same steps"):
        TrainedRun(log=plain.log, steps=plain.steps[1:])


def test_a_run_of_warm_up_alone_is_refused(tmp_path):
    folder = write_run(tmp_path / "short", BALANCED[:2])
    with pytest.raises(DataError, match=r"run .*short: a run must hold more than 2 steps to be timed, got 2"):
        load_run(folder)
