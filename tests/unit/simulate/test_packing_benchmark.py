"""benchmarks/packing.py from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[3]
FIELDS = {
    "imbalance_degree",
    "step_time_over_ideal",
    "lower_bound_over_ideal",
    "time_per_token",
    "speedup_vs_plain",
    "mean_delay_steps",
    "max_delay_steps",
    "step_tokens_cv",
    "max_micro_batch_tokens",
    "max_in_flight_tokens",
    "micro_batches_mean",
    "plan_ms_median",
    "documents_in",
    "documents_out",
    "documents_waiting",
}


@pytest.fixture
def lengths_file(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(n) for n in np.minimum(rng.lognormal(5, 1.2, 4000).astype(int) + 1, 5000)))
    return path


def _run(lengths_file, *more):
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "packing.py"), "--lengths", str(lengths_file)]
    small = ["--window", "4096", "--crossover", "1000", "--overhead-tokens", "10", "--steps", "20"]
    return subprocess.run([*command, *small, *more], capture_output=True, text=True, timeout=120, check=False)


def test_the_table_and_the_json_hold_every_field(lengths_file, tmp_path):
    packers = ["--packers", "plain,greedy,wlb"]
    done = _run(lengths_file, "--in-flight-windows", "6", "--dp", "2", *packers, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["packers"]) == ["plain", "greedy", "wlb"]
    for name, result in report["packers"].items():
        assert result.keys() >= FIELDS
        assert result["documents_in"] == result["documents_out"] + result["documents_waiting"]
        assert result["max_in_flight_tokens"] <= 6 * 4096
        assert result["micro_batches_mean"] == 8
        assert f"{name} " in done.stdout
    plain, _, wlb = report["packers"].values()
    assert plain["speedup_vs_plain"] == 1
    assert wlb["speedup_vs_plain"] == plain["time_per_token"] / wlb["time_per_token"]
    assert wlb["imbalance_degree"] < plain["imbalance_degree"]
    assert done.stdout.startswith("$ python")
    assert "wlb: 100%" in done.stderr


def test_the_same_pieces_for_every_packer_and_thresholds_by_hand(lengths_file, tmp_path):
    options = ["--cut", "stream", "--thresholds", "2000,3000", "--packers", "wlb", "--json", str(tmp_path / "out.json")]
    assert _run(lengths_file, *options).returncode == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["thresholds_tokens"] == [2000, 3000]
    assert report["packers"]["wlb"]["cut"] == "stream"
    assert report["packers"]["wlb"]["speedup_vs_plain"] is None  # plain was not asked for


@pytest.mark.parametrize("shuffle", ["stream", "numpy"])
def test_makespan_is_faster_with_the_same_documents_and_memory(lengths_file, tmp_path, shuffle):
    exact = [
        "--packers",
        "plain,makespan",
        "--max-delay-steps",
        "0",
        "--cap-windows",
        "1.0",
        "--in-flight-windows",
        "PP",
    ]
    more = ["--dp", "2", "--search-evaluations", "64", "--curve-steps", "5", "--shuffle", shuffle]
    done = _run(lengths_file, *exact, *more, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    plain, makespan = json.loads((tmp_path / "out.json").read_text())["packers"].values()
    for result in (plain, makespan):
        assert result["max_in_flight_tokens"] <= 4 * 4096
        assert result["max_micro_batch_tokens"] <= 4096
        assert (result["mean_delay_steps"], result["documents_waiting"], result["step_tokens_cv"]) == (0, 0, 0)
        assert 1 <= result["lower_bound_over_ideal"] <= result["step_time_over_ideal"]
    assert plain["documents_in"] == makespan["documents_in"]
    assert plain["lower_bound_over_ideal"] == pytest.approx(makespan["lower_bound_over_ideal"])
    assert makespan["speedup_vs_plain"] > 1.1
    curve = makespan["search_curve"]
    assert [point["evaluations"] for point in curve] == [0, 4, 16, 64, 256]
    times = [point["step_time_over_ideal"] for point in curve]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_context_parallel_ranks_known_and_unknown(lengths_file, tmp_path):
    packers = ["--packers", "plain,makespan:blind,makespan", "--search-evaluations", "64", "--curve-steps", "0"]
    divided = ["--cp", "4", "--cp-sharding", "per_sequence", "--shuffle", "numpy", "--steps", "5"]
    exact = ["--cap-windows", "1", "--in-flight-windows", "PP"]
    done = _run(lengths_file, *packers, *divided, *exact, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    plain, blind, knowing = json.loads((tmp_path / "out.json").read_text())["packers"].values()
    times = [r["step_time_over_ideal"] for r in (knowing, blind, plain)]
    assert times[0] < min(times[1:])
    assert len(set(times)) == 3
    assert len({r["documents_in"] for r in (plain, blind, knowing)}) == 1
    assert knowing["lower_bound_over_ideal"] == pytest.approx(plain["lower_bound_over_ideal"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--packers", "makespan:seeing"], "--packers must be names, or names with :blind, got 'makespan:seeing'"),
        (["--cp", "0"], "cp_size must be >= 1, got 0"),
        (["--cp", "4", "--shard-plans", "-1"], "shard_plans must be >= 0, got -1"),
        (["--packers", "best"], "--packers must be of plain, greedy, wlb, makespan, two_stage, solver, got 'best'"),
        (["--cap-windows", "1"], "--cap-windows must be > 1 with wlb, got 1.0"),
        (["--packers", "makespan", "--cap-windows", "0.5"], "--cap-windows must be >= 1 and finite, got 0.5"),
        (["--packers", "makespan", "--in-flight-windows", "0.5"], "in_flight_tokens must be >= cap_tokens = 4096"),
        (["--in-flight-windows", "many"], "--in-flight-windows must be a number or PP, got 'many'"),
        (["--in-flight-windows", "inf"], "--in-flight-windows must be a number or PP, got 'inf'"),
        (["--search-evaluations", "-1"], "search_evaluations must be >= 0, got -1"),
        (["--thresholds", "9,5"], "thresholds_tokens must increase strictly"),
        (["--thresholds", "9,x"], "--thresholds must be whole tokens or 'none', got '9,x'"),
        (["--in-flight-windows", "3"], "tokens in flight on the first stage must be <= 12288, got 16384 (step 0)"),
        (["--steps", "0"], "num_steps must be >= 1, got 0"),
        (["--lengths", "absent.json"], "lengths file absent.json: cannot be read"),
        (["--json", "/proc/none/out.json"], "--json must be a file that can be written"),
    ],
)
def test_bad_options_end_with_a_sentence(lengths_file, options, message):
    done = _run(lengths_file, *options)
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
