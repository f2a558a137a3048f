"""docs/extending.md: its packer and its sharder work, registered as it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

from tests.docs.pages import ROOT, code_blocks, commands
from tests.docs.sandbox import Sandbox

PAGE = ROOT / "docs" / "extending.md"
PACKER, SHARDER = [block.text for block in code_blocks(PAGE) if block.language == "python"]


def _defined(text, name, monkeypatch):
    """The page's class or function, in a module of its own."""
    module = ModuleType(f"extending_{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, str(PAGE), "exec", dont_inherit=True), module.__dict__)
    return getattr(module, name)


def _command(beginning):
    (text,) = [c.text for c in commands(PAGE) if c.text.startswith(beginning)]
    return text


def test_the_packer_runs_in_the_benchmark(tmp_path, monkeypatch):
    from wlb.packing import PACKERS

    monkeypatch.setitem(PACKERS, "snake", _defined(PACKER, "SnakePacker", monkeypatch))
    sandbox = Sandbox(tmp_path, monkeypatch)
    sandbox.run(_command("python benchmarks/packing.py") + " --steps 3 --search-evaluations 50 --json out.json")
    results = json.loads((tmp_path / "out.json").read_text())["packers"]
    assert 1 < results["snake"]["imbalance_degree"] < results["plain"]["imbalance_degree"]
    for result in results.values():
        assert result["documents_in"] == result["documents_out"] + result["documents_waiting"]


def test_the_sharder_runs_in_show_plan(tmp_path, monkeypatch):
    from wlb.sharding import SHARDERS, ShardCosts

    shard = _defined(SHARDER, "shard", monkeypatch)
    plan = shard((5, 3), 2, ShardCosts())
    assert [[(s.document, s.start, s.stop) for s in spans] for spans in plan.ranks] == [
        [(0, 0, 4)],
        [(0, 4, 5), (1, 0, 3)],
    ]
    monkeypatch.setitem(SHARDERS, "contiguous", shard)
    Sandbox(tmp_path, monkeypatch).run(_command("python tools/show_plan.py"))


@pytest.mark.slow
def test_property_tests_run_over_what_is_registered(tmp_path):
    """In a copy of the repository, with the files and the lines that the page asks for."""
    for folder in ("wlb", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "megatron", "tools", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "wlb/packing/snake.py").write_text(PACKER)
    (tmp_path / "wlb/sharding/contiguous.py").write_text(SHARDER)
    _insert(tmp_path / "wlb/packing/registry.py", '    "plain": PlainPacker,\n', '    "snake": SnakePacker,\n')
    _insert(
        tmp_path / "wlb/packing/registry.py",
        "from wlb.packing.plain import PlainPacker\n",
        "from wlb.packing.snake import SnakePacker\n",
    )
    _insert(
        tmp_path / "wlb/sharding/registry.py",
        '    "per_sequence": per_sequence.shard,\n',
        '    "contiguous": contiguous.shard,\n',
    )
    _insert(
        tmp_path / "wlb/sharding/registry.py",
        "from wlb.errors import ConfigError\n",
        "from wlb.sharding import contiguous\n",
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/property/test_packers.py"),
            *("tests/property/test_sharders.py", "-m", "not slow", "-k", "snake or contiguous"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def _insert(path, after, line):
    text = path.read_text()
    assert text.count(after) == 1
    path.write_text(text.replace(after, after + line))
