import importlib.util
import json
import sys
from pathlib import Path

import pytest

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


def test_compare_writes_report_and_picture(run, run_folders, manifest, tmp_path, capsys):
    plain, balanced = run_folders
    out = tmp_path / "a folder"
    argv = ["compare", "--plain", plain, "--balanced", balanced, "--corpus", manifest, "--layout", "pp2"]
    assert run(*argv, "--json", out / "report.json", "--png", out / "report.png") == 0
    report = json.loads((out / "report.json").read_text())
    assert report["layout"] == "pp2"
    assert report["predicted_from"] == "the first half of the plain run's steps"
    picture = (out / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    assert "x measured" in capsys.readouterr().out


def test_costs_may_come_from_another_run(run, run_folders, manifest, tmp_path):
    plain, balanced = run_folders
    argv = ["compare", "--plain", plain, "--balanced", balanced, "--corpus", manifest, "--fit-from", balanced]
    assert run(*argv, "--json", tmp_path / "report.json", "--png", tmp_path / "report.png") == 0
    assert json.loads((tmp_path / "report.json").read_text())["predicted_from"] == str(balanced)


def test_cost_prints_the_crossover_alone(run, run_folders, tmp_path, capsys):
    assert run("cost", run_folders[0], "--json", tmp_path / "cost.json") == 0
    assert capsys.readouterr().out == "25\n"
    assert json.loads((tmp_path / "cost.json").read_text())["crossover_tokens"] == pytest.approx(25)


def test_a_missing_run_is_a_sentence_and_no_output(run, manifest, tmp_path, capsys):
    argv = ["compare", "--plain", tmp_path / "no", "--balanced", tmp_path / "no", "--corpus", manifest]
    assert run(*argv, "--json", tmp_path / "report.json", "--png", tmp_path / "report.png") == 1
    assert capsys.readouterr().err.startswith("error: training log")
    assert not (tmp_path / "report.json").exists()
