"""What a section of the GPU check hands back, and what a worker tells the process that watches it. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wlb.data.atomic_files import atomic_path

RESULTS_FILE = "results.json"
"""In the folder of a check: the sections that have ended, for the next worker and for whoever stops the check."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One section of the check.

    kind: by which the page knows how to write it in a few lines.
    rule: when it passes. measured: numbers by name, or under "error" what went wrong.
    budget_s: seconds that it was given; measuring stops after them, checking does not.
    """

    name: str
    kind: str
    passed: bool
    rule: str
    measured: dict[str, Any]
    duration_s: float
    budget_s: float


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A section that a worker is going to run."""

    name: str
    kind: str
    rule: str

    def failed(self, error: str, *, duration_s: float = 0.0, budget_s: float = 0.0) -> Result:
        """Its result where nobody else can give one."""
        return Result(
            name=self.name,
            kind=self.kind,
            passed=False,
            rule=self.rule,
            measured={"error": error},
            duration_s=round(duration_s, 2),
            budget_s=round(budget_s, 2),
        )


def save_results(results: Sequence[Result], folder: Path) -> None:
    """For `load_results`."""
    with atomic_path(folder / RESULTS_FILE) as path:
        path.write_text(json.dumps([asdict(r) for r in results]), encoding="utf-8")


def load_results(folder: Path) -> list[Result]:
    """None where the check has just begun."""
    path = folder / RESULTS_FILE
    return [Result(**r) for r in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def measured_by(results: Iterable[Result], kind: str) -> dict[str, Any]:
    """What the last section of a kind measured; empty where none has, or where it failed to."""
    found = [r.measured for r in results if r.kind == kind and "error" not in r.measured]
    return found[-1] if found else {}
