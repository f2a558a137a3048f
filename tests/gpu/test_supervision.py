"""Sections of the GPU check run in a process that may crash, hang or end; none of it loses another section."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.wlb.gpu_check.results import Result, load_results, measured_by
from megatron.wlb.gpu_check.supervision import CheckNotStarted, supervise

SECTIONS = ("first", "second", "third")


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    """worker(body) -> command of a worker that runs `body` for each section that is left, with its `name`."""

    def write(body: str, hello: str = "tell({'hello': {'device': 'none'}, 'sections': sections})") -> list[str]:
        script = tmp_path / "worker.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import json, os, signal, sys, time
                def tell(message):
                    print(json.dumps(message), flush=True)
                sections = [{{"name": n, "kind": "kind", "rule": "must hold"}} for n in {SECTIONS}]
                {hello}
                ended = {{r["name"] for r in json.load(open(sys.argv[1] + "/results.json"))}}
                for name in [n for n in {SECTIONS} if n not in ended]:
                    tell({{"begin": name, "budget_s": 1.0, "limit_s": 1.0}})
                """
            )
            + textwrap.indent(textwrap.dedent(body), "    ")
            + textwrap.indent(
                textwrap.dedent(
                    """
                    result = {"name": name, "kind": "kind", "passed": True, "rule": "must hold", "measured": {name: 1},
                              "duration_s": 0.1, "budget_s": 1.0}
                    tell({"result": result})
                    """
                ),
                "    ",
            )
        )
        return [sys.executable, str(script), str(tmp_path)]

    return write


def run(command: list[str], folder: Path, total_s: float = 30.0) -> tuple[Any, dict[str, Result]]:
    hello, *results = supervise(command, folder, total_s=total_s)
    assert all(isinstance(r, Result) for r in results)
    return hello, {r.name: r for r in results}  # type: ignore[union-attr]


def test_passes_on_what_the_worker_tells(worker: Any, tmp_path: Path) -> None:
    hello, results = run(worker("pass"), tmp_path)
    assert hello == {"device": "none"}
    assert {name: (r.passed, r.measured) for name, r in results.items()} == {n: (True, {n: 1}) for n in SECTIONS}


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with SIGSEGV"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("time.sleep(60)", "ran past 1 s and was stopped"),
    ],
)
def test_a_section_that_takes_its_process_along_loses_no_other(
    does: str, says: str, worker: Any, tmp_path: Path
) -> None:
    _, results = run(worker(f"if name == 'second':\n    {does}"), tmp_path)
    assert list(results) == list(SECTIONS)
    assert [r.passed for r in results.values()] == [True, False, True]
    assert results["second"].measured == {"error": says}
    assert [r.name for r in load_results(tmp_path)] == ["first", "second"], "what the second worker passed over"


def test_a_worker_may_end_between_sections(worker: Any, tmp_path: Path) -> None:
    _, results = run(worker("if name != 'first' and 'first' not in ended:\n    sys.exit()"), tmp_path)
    assert [r.passed for r in results.values()] == [True, False, True]


def test_what_a_section_started_ends_with_it(worker: Any, tmp_path: Path) -> None:
    """As a training run would, which holds the device's memory."""
    body = f"""
    import subprocess
    if name == 'first':
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
        open({str(tmp_path / "child")!r}, 'w').write(str(child.pid))
        time.sleep(60)
    """
    run(worker(body), tmp_path)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} still runs")


def test_no_section_begins_when_the_time_is_over(worker: Any, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    _, results = run(worker("time.sleep(0.9 if name == 'first' else 60)"), tmp_path, total_s=1.5)
    assert time.monotonic() - begin_s < 20
    assert [r.passed for r in results.values()] == [True, False, False]
    assert results["third"].measured == {"error": "not begun: the 2 s of the check were over"}


def test_a_worker_that_never_speaks_is_an_error(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckNotStarted, match="must start, but it ended with exit code 5"):
        run(worker("pass", hello="sys.exit(5)"), tmp_path)


def test_a_worker_that_cannot_start_again_fails_what_is_left(worker: Any, tmp_path: Path) -> None:
    hello = "tell({'hello': {}, 'sections': sections}) if not os.path.exists(sys.argv[1] + '/once') else sys.exit(7)"
    body = "open(sys.argv[1] + '/once', 'w')\nos._exit(1)"
    _, results = run(worker(body, hello=hello), tmp_path)
    assert [r.measured["error"] for r in results.values()] == [
        "ended with exit code 1",
        *["not begun: the process that runs the checks ended with exit code 7"] * 2,
    ]


def test_results_are_found_by_kind_unless_they_failed() -> None:
    def result(kind: str, measured: dict[str, Any]) -> Result:
        return Result(name=kind, kind=kind, passed=True, rule="", measured=measured, duration_s=0, budget_s=0)

    results = [result("a", {"x": 1}), result("b", {"error": "no"})]
    assert measured_by(results, "a") == {"x": 1}
    assert measured_by(results, "b") == {}
    assert measured_by(results, "c") == {}
