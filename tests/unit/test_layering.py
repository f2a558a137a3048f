"""Imports go one way, and what only one file may read is read by that file only."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = {"wlb"}
PLANNERS = {"numpy", *OWN}

# What each part of the library may import, besides the standard library. The most specific entry counts.
ALLOWED = {
    "wlb": PLANNERS,
    "wlb/attention": {*PLANNERS, "torch"},
    "wlb/packing/solver": {*PLANNERS, "ortools"},
    "wlb/report": {*PLANNERS, "matplotlib"},
    "megatron/wlb": {"megatron", "numpy", "packaging", "sentencepiece", "torch", "tqdm", "transformer_engine", *OWN},
}


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} holds no source"
    return files


def _allowed(path: Path) -> set[str]:
    relative = path.relative_to(ROOT).as_posix()
    folder = max((f for f in ALLOWED if relative.startswith(f + "/")), key=len)
    return ALLOWED[folder]


@pytest.mark.parametrize("path", [*_sources("wlb"), *_sources("megatron/wlb")], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    outside = {name.split(".")[0] for name in _imports(path)} - set(sys.stdlib_module_names) - {"__future__"}
    assert outside <= _allowed(path)


def test_planners_load_no_torch() -> None:
    """Not even through another module: a plan can be made where only numpy is."""
    import subprocess

    modules = [
        "wlb.documents",
        "wlb.cost",
        "wlb.packing",
        "wlb.schedule",
        "wlb.sharding",
        "wlb.simulate",
        "wlb.data.plan_process",
    ]
    code = f"import sys; import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "reader"),
    [("parallel_state", "megatron/wlb/parallel.py"), ("get_args", "megatron/wlb/arguments.py")],
)
def test_only_one_file_reads(name: str, reader: str) -> None:
    for path in [*_sources("megatron/wlb"), *_sources("wlb")]:
        if path != ROOT / reader:
            upstream = [imported for imported in _imports(path) if imported.startswith("megatron.")]
            assert not any(name in imported.split(".") for imported in upstream), path


def test_the_installed_megatron_is_in_use() -> None:
    """A `megatron/__init__.py` here would hide the installed `megatron.training`."""
    import megatron.core

    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert ROOT / "megatron" not in Path(megatron.core.__file__).parents
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if "megatron-core" in line)
    assert metadata.version("megatron-core") == pinned.split("==")[1]
