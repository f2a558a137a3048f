"""Reads what a training run printed: Megatron's arguments and one line an iteration, ours at its end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from wlb.cost import TransformerShape
from wlb.errors import DataError

_ARGUMENT = re.compile(r"^\s*(\w+) \.{2,} (.*?)\s*$")
_PADDED_VOCABULARY = re.compile(r"padded vocab .*\(new size: (\d+)\)")
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|(.*)")
_FIELD = re.compile(r"([^|:]+): *([^|]+?) *\|")
_ELAPSED_MS = "elapsed time per iteration (ms)"
_LOSS = "lm loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One iteration's line.

    step: from 0, as in the plan; Megatron's iteration is one more.
    num_steps: of the run.
    elapsed_s: of the whole iteration, optimizer included.
    loss: mean over tokens; None where no loss was printed (a skipped iteration).
    fields: every `name: number` of the line, as numbers.
    """

    step: int
    num_steps: int
    elapsed_s: float
    loss: float | None
    fields: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """arguments: Megatron's own print of every option, as text. steps: in order."""

    arguments: dict[str, str]
    steps: tuple[LoggedStep, ...]

    def integer(self, name: str) -> int:
        """Argument `name`. Raises DataError if the log does not hold it as a whole number."""
        try:
            return int(self.arguments[name])
        except (KeyError, ValueError):
            raise DataError(
                f"the log must hold argument {name} as a whole number, got {self.arguments.get(name)!r}"
            ) from None

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks; 1 where the log does not say."""
        return self.integer("context_parallel_size") if "context_parallel_size" in self.arguments else 1

    @property
    def shape(self) -> TransformerShape:
        """The model that was trained."""
        heads = self.integer("num_attention_heads")
        grouped = self.arguments.get("group_query_attention") == "True"
        return TransformerShape(
            hidden_size=self.integer("hidden_size"),
            ffn_hidden_size=self.integer("ffn_hidden_size"),
            num_layers=self.integer("num_layers"),
            num_attention_heads=heads,
            num_query_groups=self.integer("num_query_groups") if grouped else heads,
            head_size=self.integer("kv_channels"),
            vocab_size=self.integer("padded_vocab_size"),
            gated=self.arguments.get("swiglu") == "True",
        )


def parse_iteration(line: str) -> LoggedStep | None:
    """The step that a line of the log reports; None for every other line.

    >>> parse_iteration(" iteration 2/ 9 | elapsed time per iteration (ms): 500.0 | lm loss: 7.5E+00 |").loss
    7.5
    """
    found = _ITERATION.search(line)
    if found is None:
        return None
    fields = {}
    for name, text in _FIELD.findall(found[3]):
        try:
            fields[name.strip()] = float(text)
        except ValueError:
            continue
    if _ELAPSED_MS not in fields:
        return None
    return LoggedStep(
        step=int(found[1]) - 1,
        num_steps=int(found[2]),
        elapsed_s=fields[_ELAPSED_MS] / 1e3,
        loss=fields.get(_LOSS),
        fields=fields,
    )


def parse_log(text: str) -> TrainingLog:
    """Everything of a log that reports need. What is not recognised is passed over."""
    arguments: dict[str, str] = {}
    steps = []
    for line in text.splitlines():
        step = parse_iteration(line)
        if step is not None:
            steps.append(step)
        elif (found := _ARGUMENT.match(_without_rank(line))) is not None:
            arguments.setdefault(found[1], found[2])
        elif (found := _PADDED_VOCABULARY.search(line)) is not None:
            # Options are printed before the tokenizer has been asked for its size.
            arguments["padded_vocab_size"] = found[1]
    return TrainingLog(arguments=arguments, steps=tuple(steps))


def load_log(path: Path) -> TrainingLog:
    """Raises DataError if the file cannot be read or holds no iteration."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"training log {path}: cannot be read: {error.strerror}") from error
    log = parse_log(text)
    if not log.steps:
        raise DataError(f"training log {path}: must hold at least one iteration, got none")
    return log


def _without_rank(line: str) -> str:
    """torchrun may put `[default0]:` before each line."""
    return re.sub(r"^\[\w+\]:", "", line)
