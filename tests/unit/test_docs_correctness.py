"""Every test that docs/correctness.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "correctness.md"
# Rows of the tables: what users report has a guard and at least one test.
ROW = re.compile(r"^\| (?!fault |---)(.+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _tests_of(path: str) -> set[str]:
    file = ROOT / path
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_named_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 40
    assert [f"{path}::{name}" for path, name in named if name not in _tests_of(path)] == []
    assert all(name.startswith("test_") for _, name in named)


def test_every_row_names_a_test_and_nothing_else() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) >= 29
    for fault, _, tests in rows:
        assert NAMED.findall(tests), fault
        assert NAMED.sub("", tests).strip(", ") == "", fault
