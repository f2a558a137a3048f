import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.unit.report.synthetic_run import MAKESPAN, write_run
from wlb.command_line import run_tool

TOOL = Path(__file__).resolve().parents[3] / "tools" / "report.py"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("report_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return lambda *argv: run_tool(tool.main, [str(a) for a in argv])


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"documents": 12, "tokens": 1200, "p50": 60, "p99": 100, "max": 100}))
    return path


@pytest.fixture
def compare_argv(run_folders, manifest):
    plain, wlb, makespan = run_folders
    return ["compare", "--plain", plain, "--balanced", f"wlb={wlb}", f"makespan={makespan}", "--corpus", manifest]


def test_compare_writes_report_and_picture(run, compare_argv, tmp_path, capsys):
    out = tmp_path / "a folder"
    assert run(*compare_argv, "--layout", "pp2", "--json", out / "report.json", "--png", out / "report.png") == 0
    report = json.loads((out / "report.json").read_text())
    assert report["layout"] == "pp2"
    assert report["headline"] == "makespan"
    assert list(report["runs"]) == ["plain", "wlb", "makespan"]
    assert report["predicted_from"] == "the first half of the plain run's steps"
    picture = (out / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    printed = capsys.readouterr().out
    assert "wlb      over plain: per token" in printed
    assert "makespan over plain: per token" in printed


def test_one_balanced_run_is_enough(run, run_folders, manifest, tmp_path):
    argv = ["compare", "--plain", run_folders[0], "--balanced", f"mine={run_folders[1]}", "--corpus", manifest]
    assert run(*argv, "--json", tmp_path / "report.json", "--png", tmp_path / "report.png") == 0
    assert json.loads((tmp_path / "report.json").read_text())["headline"] == "mine"


def test_costs_may_come_from_another_run(run, run_folders, compare_argv, tmp_path):
    argv = [*compare_argv, "--json", tmp_path / "report.json", "--png", tmp_path / "report.png", "--fit-from"]
    assert run(*argv, run_folders[1]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["predicted_from"] == str(run_folders[1])
    other = write_run(tmp_path / "other", MAKESPAN, seed=7)
    assert run(*argv, other) == 0
    expected = f"another seed's documents ({other}, seed 7)"
    assert json.loads((tmp_path / "report.json").read_text())["predicted_from"] == expected


@pytest.mark.parametrize(
    ("balanced", "sentence"),
    [
        (["a"], "--balanced must be NAME=FOLDER, got a"),
        (["=a"], "--balanced must be NAME=FOLDER, got =a"),
        (["a="], "--balanced must be NAME=FOLDER, got a="),
        (["a=b", "a=c"], "--balanced must name each run once and none 'plain', got a=b a=c"),
        (["plain=b"], "--balanced must name each run once and none 'plain', got plain=b"),
    ],
)
def test_a_balanced_run_needs_a_name_of_its_own(run, run_folders, manifest, tmp_path, capsys, balanced, sentence):
    argv = ["compare", "--plain", run_folders[0], "--balanced", *balanced, "--corpus", manifest]
    assert run(*argv, "--json", tmp_path / "report.json", "--png", tmp_path / "report.png") == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_cost_prints_the_crossover_alone(run, run_folders, tmp_path, capsys):
    assert run("cost", run_folders[0], "--json", tmp_path / "cost.json") == 0
    assert capsys.readouterr().out == "25\n"
    assert json.loads((tmp_path / "cost.json").read_text())["crossover_tokens"] == pytest.approx(25)


def test_a_missing_run_is_a_sentence_and_no_output(run, manifest, tmp_path, capsys):
    argv = ["compare", "--plain", tmp_path / "no", "--balanced", f"wlb={tmp_path / 'no'}", "--corpus", manifest]
    assert run(*argv, "--json", tmp_path / "report.json", "--png", tmp_path / "report.png") == 1
    assert capsys.readouterr().err.startswith("error: training log")
    assert not (tmp_path / "report.json").exists()
