"""Runs of the convergence benchmark: what their names mean, how far they are, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError, DataError, StateError
from wlb.packing import PACKERS
from wlb.report.training_log import LoggedStep, parse_iteration

Cut = Literal["stream", "window"]
_DELAY = "delay"
# Packer wlb has queues without a bound on their delay; it takes one only with its other intake.
_ALWAYS_QUEUES = {"wlb"}
_FLAGS_OF_DELAY = {"wlb": ["--wlb-intake", "budget"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to pack. max_delay_steps: 0 leaves the packer's own; cut: None likewise."""

    packer: str
    max_delay_steps: int = 0
    cut: Cut | None = None

    @classmethod
    def named(cls, name: str) -> Variant:
        """Of `PACKER[+delayK][+stream|+window]`.

        >>> Variant.named("makespan+delay64")
        Variant(packer='makespan', max_delay_steps=64, cut=None)

        Raises:
            ConfigError: the packer or an option is unknown, or given twice.
        """
        packer, *options = name.split("+")
        if packer not in PACKERS:
            raise ConfigError(f"--runs must name packers out of {', '.join(sorted(PACKERS))}, got {packer} in {name}")
        max_delay_steps, cut = 0, None
        for option in options:
            digits = option.removeprefix(_DELAY)
            if option.startswith(_DELAY) and digits.isdecimal() and int(digits) > 0 and not max_delay_steps:
                max_delay_steps = int(digits)
            elif option in get_args(Cut) and cut is None:
                cut = option
            else:
                rule = "behind + must stand delayK with K > 0 or one of stream and window, each once"
                raise ConfigError(f"--runs: {rule}, got {option} in {name}")
        return cls(packer=packer, max_delay_steps=max_delay_steps, cut=cut)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        delay = [f"{_DELAY}{self.max_delay_steps}"] if self.max_delay_steps else []
        return "+".join([self.packer, *delay, *([self.cut] if self.cut else [])])

    def flags(self, thresholds_tokens: tuple[int, ...]) -> list[str]:
        """Of pretrain_gpt_wlb.py; thresholds of the outlier queues where the variant has queues."""
        flags = ["--wlb-packing", self.packer]
        if self.max_delay_steps:
            flags += ["--wlb-max-delay-steps", str(self.max_delay_steps), *_FLAGS_OF_DELAY.get(self.packer, [])]
        if self.max_delay_steps or self.packer in _ALWAYS_QUEUES:
            flags += ["--wlb-thresholds", *map(str, thresholds_tokens)]
        if self.cut is not None:
            flags += ["--wlb-document-cut", self.cut]
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run's files: log.txt, ledger.jsonl, settings.json, checkpoints/, and what is computed from checkpoints."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def heldout(self, iteration: int) -> Path:
        return self.path / f"heldout_{iteration:07d}.json"

    def gradients(self, iteration: int) -> Path:
        return self.path / f"gradients_{iteration:07d}.json"

    def weights(self, iteration: int) -> Path:
        """The file that Megatron's `torch` format writes for a run of one process."""
        return self.checkpoints / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"

    def trained_iterations(self) -> int:
        """Of the last whole checkpoint; 0 where there is none."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.is_file() else 0

    def prepare(self, settings: dict[str, Any]) -> None:
        """Make the folder ready to begin, or to go on from its last checkpoint.

        Raises:
            StateError: what is there was trained with other settings.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "settings.json"
        if file.is_file():
            stored = json.loads(file.read_text())
            changed = sorted(name for name in {*stored, *settings} if stored.get(name) != settings.get(name))
            if changed:
                name = changed[0]
                raise StateError(
                    f"run folder {self.path} must be empty or hold a run of the same settings, got {name} "
                    f"{stored.get(name)}, now {settings.get(name)}"
                )
        else:
            with atomic_path(file) as path:
                path.write_text(json.dumps(settings, indent=1) + "\n")
        self._drop_untrained()

    def _drop_untrained(self) -> None:
        """Cut from the ledger the steps that come again: also a line that was being written when the run ended."""
        if not self.ledger.is_file():
            return
        trained = self.trained_iterations()
        kept = {row["step"]: line for line, row in _rows(self.ledger) if row["step"] < trained}
        with atomic_path(self.ledger) as path:
            path.write_text("".join(kept[step] for step in sorted(kept)))

    def logged_steps(self) -> tuple[LoggedStep, ...]:
        """In order, each once: of a step that was trained again after an interruption the last one counts.

        Raises:
            DataError: the log holds no step, or not every step up to the last.
        """
        steps: dict[int, LoggedStep] = {}
        if self.log.is_file():
            with self.log.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if (step := parse_iteration(line)) is not None:
                        steps[step.step] = step
        if not steps or sorted(steps) != list(range(len(steps))):
            raise DataError(f"log {self.log}: must hold every step from 0 on, got {len(steps)} steps")
        return tuple(steps[i] for i in range(len(steps)))

    def ledger_steps(self) -> tuple[NDArray[np.int64], ...]:
        """Per step, (documents, 3) int64: sequence, start and length of each document trained in it.

        Raises:
            DataError: the ledger is missing, or not every step up to the last is in it.
        """
        rows = {row["step"]: row["replicas"] for _, row in _rows(self.ledger)} if self.ledger.is_file() else {}
        if not rows or sorted(rows) != list(range(len(rows))):
            raise DataError(f"ledger {self.ledger}: must hold every step from 0 on, got {len(rows)} steps")
        return tuple(
            np.array([d[1:] for replica in rows[i] for m in replica for d in m], dtype=np.int64).reshape(-1, 3)
            for i in range(len(rows))
        )


def _rows(ledger: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines of a ledger, as text and parsed."""
    with ledger.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line, json.loads(line)
