"""benchmarks/cp_sharding.py from the command line, and the numbers it must reach on third-party lengths."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cp_sharding import packs
from wlb.sharding import SHARDERS

REPOSITORY = Path(__file__).parents[3]
THIRD_PARTY = REPOSITORY.parent / "shared" / "data" / "lengths" / "wlb_llm_128k.json"
FIELDS = {
    "work_imbalance",
    "tile_time_over_ideal",
    "kv_received_fraction",
    "predicted_over_ideal",
    "token_spread",
    "plan_ms_median",
}


@pytest.fixture
def lengths_file(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(n) for n in np.minimum(rng.lognormal(6, 1.5, 400).astype(int) + 1, 20000)))
    return path


def _run(lengths, *more):
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "cp_sharding.py"), "--lengths", str(lengths)]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=250, check=False)


def _report(tmp_path, lengths, *more):
    done = _run(lengths, *more, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "out.json").read_text()), done


def test_the_table_and_the_json_hold_every_field(lengths_file, tmp_path):
    options = ["--window", "16384", "--cp", "4", "--packs", "6", "--seeds", "1,2"]
    report, done = _report(tmp_path, lengths_file, *options)
    assert list(report["sharders"]) == list(SHARDERS)
    assert {*report["floor"]} == FIELDS
    for name, result in report["sharders"].items():
        assert {*result} == {*FIELDS, "plan_ms_max"}
        assert f"\n{name.rjust(12)}" in done.stdout
        assert result["token_spread"] == 0
        assert result["tile_time_over_ideal"] >= report["floor"]["tile_time_over_ideal"] > 1
        assert result["work_imbalance"] >= 1
        assert 0 < result["plan_ms_median"] <= result["plan_ms_max"]
    assert report["hybrid_predicted_slower_packs"] == 0
    assert "benchmarks/cp_sharding.py --lengths" in report["command"]
    assert f"$ {report['command']}\n" in done.stdout
    hybrid = report["sharders"]["hybrid"]
    assert hybrid["predicted_over_ideal"] < 0.95 * report["sharders"]["adaptive"]["predicted_over_ideal"]


def test_without_the_static_plans_nothing_is_compared(lengths_file, tmp_path):
    options = ["--window", "4096", "--cp", "2", "--packs", "2", "--seeds", "1", "--sharders", "hybrid"]
    report, done = _report(tmp_path, lengths_file, *options)
    assert list(report["sharders"]) == ["hybrid"]
    assert report["hybrid_predicted_slower_packs"] is None
    assert "predicted slower" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cp", "0"], "--cp must be >= 1, got 0"),
        (["--window", "100", "--cp", "8"], "--window must be a multiple of --cp = 8, got 100"),
        (["--packs", "0"], "--packs must be >= 1, got 0"),
        (["--seeds", "1,x"], "--seeds must be whole numbers, comma-separated, got '1,x'"),
        (["--seeds=-1"], "--seeds must be >= 0, got -1"),
        (["--sharders", "other"], "sharder must be one of per_sequence"),
        (["--kv-heads", "0"], "num_kv_heads must be >= 1, got 0"),
    ],
)
def test_bad_options_are_named(lengths_file, options, message):
    done = _run(lengths_file, *options)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_packs_are_full_windows_of_the_lengths_in_order():
    lengths = np.array([3, 9, 4])
    order = np.minimum(np.random.default_rng(7).permutation(lengths), 6).tolist()
    made = list(islice(packs(lengths, window_tokens=6, seed=7), 8))
    assert all(sum(pack) == 6 for pack in made)
    pieces = [length for pack in made for length in pack]
    joined, index = [], 0
    for length in order:
        taken = 0
        while taken < length:
            taken += pieces[index]
            index += 1
        joined.append(taken)
    assert joined == order


@pytest.mark.parametrize(
    ("cp_size", "most_time", "most_received"), [(2, 1.046, 0.10), (4, 1.054, 0.16), (8, 1.072, 0.21), (16, 1.17, 0.28)]
)
@pytest.mark.slow
def test_hybrid_on_the_lengths_of_wlb_llm(tmp_path, cp_size, most_time, most_received):
    if not THIRD_PARTY.exists():
        pytest.skip(f"{THIRD_PARTY.name} is not beside the repository: hybrid's published targets are not checked")
    report, _ = _report(tmp_path, THIRD_PARTY, "--cp", str(cp_size), "--packs", "60", "--seeds", "1,2,3,4,5")
    assert report["floor"]["tile_time_over_ideal"] == pytest.approx(1.041, abs=1e-3)
    assert report["hybrid_predicted_slower_packs"] == 0
    hybrid = report["sharders"]["hybrid"]
    assert hybrid["tile_time_over_ideal"] <= most_time
    assert hybrid["kv_received_fraction"] <= most_received
