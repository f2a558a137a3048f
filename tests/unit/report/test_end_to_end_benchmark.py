import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.report.synthetic_run import (
    BALANCED,
    CP_MORE,
    CP_PLAIN,
    CP_PRICES,
    MAKESPAN,
    PLAIN,
    cp_division,
    forward_s,
    write_cp_run,
    write_run,
)
from wlb.command_line import run_tool
from wlb.cost import load_pipeline_costs
from wlb.packing import PACKERS
from wlb.report import load_run

BALANCERS = ", ".join(sorted(set(PACKERS) - {"plain"})) + ", makespan or two_stage with +delayK"
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "end_to_end.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("end_to_end_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trained(benchmark, monkeypatch, tmp_path):
    """Runs that were asked for, in order; makespan's run of round 2 is slower than its costs say."""
    asked = []
    steps_of = {"plain": PLAIN, "wlb": BALANCED, "makespan": MAKESPAN, "calibration": MAKESPAN}

    def train(options, name, num_steps, *flags):
        asked.append((name, num_steps, *flags))
        outside_s = 5.0 if name == "pair2_makespan" else 0.01
        return load_run(write_run(tmp_path / name, steps_of[name.split("_")[-1]], outside_s=outside_s))

    manifest = {"documents": 12, "tokens": 1200, "p50": 60, "p99": 100, "max": 100}
    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(benchmark, "build_corpus", lambda options: manifest)
    return asked


@pytest.fixture
def measure(benchmark, trained, tmp_path):
    """measure(*flags): the JSON of a benchmark with runs of 6 steps."""

    def run(*flags):
        path = tmp_path / "out.json"
        argv = [*flags, "--steps", "6", "--folder", str(tmp_path / "runs"), "--json", str(path)]
        assert run_tool(benchmark.main, argv) == 0
        return json.loads(path.read_text())

    return run


def test_costs_come_from_other_documents_in_micro_batches_of_many_sizes(measure, trained, tmp_path):
    measure("--pairs", "1")
    assert trained[0] == ("calibration", 6, "--seed", "2", "--wlb-packing", "makespan", "--wlb-overhead-tokens", "0")
    cost_file = tmp_path / "runs/pp2/cost.json"
    assert trained[3] == (
        "pair1_makespan",
        6,
        "--seed",
        "1",
        "--wlb-packing",
        "makespan",
        "--wlb-cost-profile",
        str(cost_file),
    )
    costs = load_pipeline_costs(cost_file, 2)
    assert costs.stretches[0].forward_s([100]) == pytest.approx(forward_s([100]))


def test_the_order_rotates_and_the_median_counts(measure, trained, capsys):
    report = measure("--pairs", "3")
    assert [name for name, *_ in trained[1:]] == [
        *("pair1_plain", "pair1_wlb", "pair1_makespan"),
        *("pair2_wlb", "pair2_makespan", "pair2_plain"),
        *("pair3_makespan", "pair3_plain", "pair3_wlb"),
    ]
    ratios = {
        name: [pair["speedup"] for pair in report["pairs"] if pair["packer"] == name] for name in ("wlb", "makespan")
    }
    assert ratios["makespan"][1] < 0.8 < ratios["makespan"][0]
    assert ratios["wlb"][1] == pytest.approx(ratios["wlb"][0])  # against the same round's plain run
    for name, packer in report["packers"].items():
        assert packer["speedup"] == pytest.approx(ratios[name][0])
        assert packer["measured_over_predicted"] == pytest.approx(packer["speedup"] / packer["predicted_speedup"])
        # Step by step two runs of three took what their costs say, so the slow one leaves no trace.
        assert packer["speedup_of_step_medians"] == pytest.approx(ratios[name][0])
    assert report["headline"] == "makespan"
    assert {name: report[name] for name in report["packers"]["makespan"]} == report["packers"]["makespan"]
    assert [p["same_pieces_in_every_step"] for p in report["pairs"][:2]] == [False, True]
    out = capsys.readouterr().out
    assert "median of 3 pairs, wlb over plain" in out
    assert "median of 3 pairs, makespan over plain" in out
    assert "benchmarks/end_to_end.py" in report["command"]


def test_one_packer_alternates_with_plain(measure, trained):
    report = measure("--pairs", "2", "--packers", "wlb")
    assert [name for name, *_ in trained[1:]] == ["pair1_plain", "pair1_wlb", "pair2_wlb", "pair2_plain"]
    assert list(report["packers"]) == ["wlb"]
    assert report["headline"] == "wlb"


@pytest.fixture
def cp_trained(benchmark, monkeypatch, tmp_path):
    """As `trained`, of two context-parallel ranks."""
    asked = []

    def train(options, name, num_steps, *flags):
        asked.append((name, *flags))
        value = dict(zip(flags[::2], flags[1::2], strict=True))
        steps = CP_PLAIN if value["--wlb-packing"] == "plain" else CP_MORE
        given = value.get("--wlb-operations-per-byte")
        more = {} if given is None else {"operations_per_byte": float(given)}
        return load_run(write_cp_run(tmp_path / name, steps, sharder=value.get("--wlb-cp-sharding"), **more))

    manifest = {"documents": 12, "tokens": 1200, "p50": 60, "p99": 100, "max": 100}
    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(benchmark, "build_corpus", lambda options: manifest)
    return asked


def test_context_parallel_runs_differ_in_packing_in_sharding_and_in_both(benchmark, cp_trained, tmp_path):
    path = tmp_path / "out.json"
    argv = ["--layout", "cp2", "--pairs", "2", "--steps", "6", "--cp-comm-type", "p2p", "--json", str(path)]
    assert run_tool(benchmark.main, [*argv, "--folder", str(tmp_path / "runs")]) == 0
    report = json.loads(path.read_text())

    names = [name for name, *_ in cp_trained]
    assert names[:3] == [f"calibration_{sharder}" for sharder in ("per_sequence", "per_document", "hybrid")]
    variants = ["plain", "makespan", "plain+hybrid", "makespan+hybrid"]
    assert names[3:7] == [f"pair1_{name}" for name in variants]
    assert names[7:] == [f"pair2_{name}" for name in (*variants[1:], variants[0])]
    assert all(("--cp-comm-type", "p2p") in pairwise(flags) for _, *flags in cp_trained)
    _, *flags = cp_trained[6]
    both = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (both["--wlb-packing"], both["--wlb-cp-sharding"]) == ("makespan", "hybrid")
    assert "--wlb-cp-sharding" not in cp_trained[3]
    given = float(both["--wlb-operations-per-byte"])
    weight = cp_division("hybrid", operations_per_byte=given).sharding.costs.received_token_pairs
    assert weight == pytest.approx(CP_PRICES.received_token_pairs, rel=0.05)

    assert report["headline"] == "makespan+hybrid"
    for name in variants[1:]:
        result = report["packers"][name]
        assert result["speedup"] == pytest.approx(result["predicted_speedup"], rel=0.01)
    assert report["packers"]["plain+hybrid"]["speedup"] > 1.05
    assert report["cost"]["prices"]["tile_tokens"] == CP_PRICES.tile_tokens


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--pairs", "0"], "--pairs must be >= 1, got 0"),
        (["--steps", "2"], "--steps must be > 2, the warm-up, got 2"),
        (["--calibration-steps", "2"], "--calibration-steps must be > 2, the warm-up, got 2"),
        (
            ["--packers", "wlb,wlb"],
            f"--packers must be different ones of {BALANCERS}, got wlb,wlb",
        ),
        (
            ["--packers", "plain"],
            f"--packers must be different ones of {BALANCERS}, got plain",
        ),
        (
            ["--packers", "best"],
            f"--packers must be different ones of {BALANCERS}, got best",
        ),
        (
            ["--packers", "plain+hybrid"],
            f"--packers must be different ones of {BALANCERS}, got plain+hybrid",
        ),
        (
            ["--layout", "cp2", "--packers", "plain"],
            f"--packers must be different ones of {BALANCERS}, or with + one of per_sequence, per_document, "
            "adaptive, hybrid behind one of these or behind plain, got plain",
        ),
        (
            ["--packers", "wlb+delay4"],
            f"--packers must be different ones of {BALANCERS}, got wlb+delay4",
        ),
        (["--seed", "2"], "--calibration-seed must differ from --seed, or nothing is predicted; got 2"),
    ],
)
def test_bad_values_are_refused_before_training(benchmark, trained, argv, sentence, capsys):
    assert run_tool(benchmark.main, argv) == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert not trained
