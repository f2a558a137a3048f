import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.unit.report.synthetic_run import BALANCED, PLAIN, write_run
from wlb.command_line import run_tool
from wlb.report import load_run

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "end_to_end.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("end_to_end_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trained(benchmark, monkeypatch, tmp_path):
    """Runs that were asked for, in order; the balanced run of pair 2 is slower than its costs say."""
    asked = []

    def train(options, name, *flags):
        asked.append((name, *flags))
        steps = BALANCED if name.endswith("wlb") else PLAIN
        return load_run(write_run(tmp_path / name, steps, outside_s=5.0 if name == "pair2_wlb" else 0.01))

    manifest = {"documents": 12, "tokens": 1200, "p50": 60, "p99": 100, "max": 100}
    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(benchmark, "build_corpus", lambda options: manifest)
    return asked


def test_pairs_alternate_and_the_median_counts(benchmark, trained, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert run_tool(benchmark.main, ["--pairs", "3", "--steps", "6", "--json", str(path)]) == 0
    assert trained[0] == ("calibration", "--seed", "2", "--wlb-packing", "plain")
    names = [name for name, *_ in trained[1:]]
    assert names == ["pair1_plain", "pair1_wlb", "pair2_wlb", "pair2_plain", "pair3_plain", "pair3_wlb"]
    assert trained[2][1:] == ("--seed", "1", "--wlb-packing", "wlb", "--wlb-crossover", "25")
    report = json.loads(path.read_text())
    ratios = [pair["speedup"] for pair in report["pairs"]]
    assert ratios[1] < 0.8 < ratios[0]
    assert report["speedup"] == pytest.approx(ratios[0])
    assert report["predicted_speedup"] == report["pairs"][1]["predicted_speedup"]
    assert report["measured_over_predicted"] == pytest.approx(report["speedup"] / report["predicted_speedup"])
    # Step by step two runs of three took what their costs say, so the slow one leaves no trace.
    assert report["speedup_of_step_medians"] == pytest.approx(ratios[0])
    out = capsys.readouterr().out
    assert "median of 3 pairs" in out
    assert "benchmarks/end_to_end.py" in report["command"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--pairs", "0"], "--pairs must be >= 1, got 0"),
        (["--steps", "2"], "--steps must be > 2, the warm-up, got 2"),
        (["--seed", "2"], "--calibration-seed must differ from --seed, or nothing is predicted; got 2"),
    ],
)
def test_bad_values_are_refused_before_training(benchmark, trained, argv, sentence, capsys):
    assert run_tool(benchmark.main, argv) == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert not trained
