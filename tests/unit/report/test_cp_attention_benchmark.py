"""The benchmark's arithmetic, with ranks that take exactly what given prices say."""

import importlib.util
import json
import sys
from itertools import product
from pathlib import Path

import pytest

from wlb.attention.timed_ranks import RankMemory, RankTime
from wlb.command_line import run_tool
from wlb.report.fits import ShardTime
from wlb.sharding import SHARDERS, ShardCosts
from wlb.sharding.index import gather_index

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "cp_attention.py"
TIMES = {
    "all_gather": ShardTime(
        costs=ShardCosts(tile_tokens=16, span_pairs=3000, received_token_pairs=300, exchange_pairs=20_000),
        pair_s=1e-8,
        token_s=0.0,
        fixed_s=1e-3,
    ),
    "p2p": ShardTime(
        costs=ShardCosts(tile_tokens=16, span_pairs=6000, received_token_pairs=200, exchange_pairs=40_000),
        pair_s=1e-8,
        token_s=0.0,
        fixed_s=1e-3,
    ),
}
LENGTHS = (900, 30, 610, 5, 77, 240, 1300, 12, 350, 480, 60, 1700)


class Ranks:
    """Stands for `AttentionRanks`; asked: (communication type, plan) of every call."""

    last = None

    def __init__(self, cp_size, layer, folder, *, timeout_s):
        assert folder.is_dir()
        self.cp_size, self.layer, self.asked, self.is_closed = cp_size, layer, [], False
        Ranks.last = self

    def times(self, plan, comm_type):
        self.asked.append((comm_type, plan))
        first = sum(1 for asked in self.asked if asked == (comm_type, plan)) == 1
        # The first call sets up, and counts nowhere; one rank is faster.
        seconds = TIMES[comm_type].seconds(plan) + (9.0 if first else 0.0)
        return [RankTime(elapsed_s=seconds / (1 + r), busy_s=seconds / (2 + r)) for r in range(self.cp_size)]

    def memory(self, plan, *, keep_gathered):
        rows = [gather_index(plan, rank, None).gathered_rows for rank in range(self.cp_size)]
        return [
            RankMemory(
                gathered_rows=n,
                attending_bytes=n * self.layer.row_bytes,
                peak_bytes=2 * n * self.layer.row_bytes,
                kept_bytes=n * self.layer.row_bytes if keep_gathered else 0,
                backward_peak_bytes=3 * n * self.layer.row_bytes,
            )
            for n in rows
        ]

    def close(self):
        self.is_closed = True


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("cp_attention_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "AttentionRanks", Ranks)
    return module


@pytest.fixture
def measure(benchmark, tmp_path):
    """measure(*flags): the JSON of a benchmark on short packs."""

    def run(*flags):
        lengths, path = tmp_path / "lengths.json", tmp_path / "out.json"
        lengths.write_text(json.dumps(LENGTHS))
        argv = ["--lengths", str(lengths), "--window", "2048", "--packs", "3", "--pairs", "2", "--json", str(path)]
        assert run_tool(benchmark.main, [*argv, *flags]) == 0
        return json.loads(path.read_text())

    return run


def test_prices_of_other_packs_predict_the_measured_ratios(measure, capsys):
    report = measure()
    assert Ranks.last.is_closed
    assert [(r["type"], r["sharder"]) for r in report["results"]] == list(product(("all_gather", "p2p"), SHARDERS))
    for result in report["results"]:
        assert result["measured"] == pytest.approx(result["predicted"], rel=0.01)
        assert result["of medians"] == pytest.approx(result["measured"])
        assert result["busy"] == pytest.approx(result["measured"])
        assert result["deviation"] < 0.01
        assert len(result["pairs"]) == 2
        assert set(result["over"]) == set(SHARDERS) - {result["sharder"]}
    assert [r["measured"] for r in report["results"] if r["sharder"] == "per_sequence"] == [1, 1]
    for comm_type, price in report["prices"].items():
        assert price["costs"]["tile_tokens"] == 16
        assert price["costs"]["span_pairs"] == pytest.approx(TIMES[comm_type].costs.span_pairs, rel=0.05)
    out = capsys.readouterr().out
    assert "$ " in out
    assert "benchmarks/cp_attention.py" in out
    assert "all_gather, hybrid over per_sequence" in out


def test_calibration_packs_are_not_measured_and_the_order_rotates(measure):
    report = measure("--sharders", "hybrid", "--calibration-packs", "4")
    asked = Ranks.last.asked
    num_variants, num_packs = 2 * 2, 3
    rounds = asked[-2 * num_variants * num_packs :]
    measured = {plan.lengths for _, plan in rounds}
    assert measured == {tuple(pack) for pack in report["packs"]}
    calibration = asked[: -2 * num_variants * num_packs - num_variants * num_packs]
    assert measured.isdisjoint({plan.lengths for _, plan in calibration})
    assert {sum(plan.received_tokens(r) for r in range(2)) > 0 for _, plan in calibration} == {True, False}
    first = [rounds[i * num_variants] for i in range(2 * num_packs)]
    second_round = first[num_packs:]
    assert all(a[1].lengths == b[1].lengths and a != b for a, b in zip(first, second_round, strict=False))


def test_memory_is_that_of_the_fullest_rank(measure):
    report = measure()
    for row in report["memory"]:
        assert row["one copy"] == row["attending"] == row["kept on"] == row["gathered rows"] * 512
        assert row["kept off"] == 0
    rows = {row["sharder"]: row for row in report["memory"]}
    assert rows["hybrid"]["gathered rows"] <= rows["per_document"]["gathered rows"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--cp", "1"], "--cp must be >= 2, got 1"),
        (["--pairs", "0"], "--pairs must be >= 1, got 0"),
        (["--calibration-packs", "1"], "--calibration-packs must be >= 2, got 1"),
        (["--window", "8191"], "--window must be a multiple of --cp = 2, got 8191"),
        (["--heads", "3"], "--heads must be a multiple of --kv-heads = 2, got 3"),
        (["--sharders", "best"], "--sharders must be of per_sequence, per_document, adaptive, hybrid, got best"),
        (["--lengths", "no/such/file"], "lengths file no/such/file: cannot be read: No such file or directory"),
    ],
)
def test_bad_values_are_refused(benchmark, argv, sentence, capsys):
    Ranks.last = None
    assert run_tool(benchmark.main, argv) == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert Ranks.last is None
