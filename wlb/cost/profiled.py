"""Cost from a measured table: attention seconds by document length, linear seconds per token.

The file is JSON::

    {"version": 1,
     "attention": [[1024, 0.00011], [2048, 0.00038], [4096, 0.0014]],
     "linear_token_s": 2.5e-7,
     "fixed_s": 0.0002}

and may also hold any field of `RatioCost`. Attention seconds are of the forward pass over one whole document.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any

from wlb.cost.model import RatioCost, causal_pairs, require_not_negative
from wlb.errors import ConfigError, DataError

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfiledCost(RatioCost):
    """Interpolates a table of measured attention seconds; monotone because the table is.

    attention: (length, forward seconds) pairs, lengths strictly increasing and > 0, seconds not decreasing.
    linear_token_s: seconds per token of everything else.
    fixed_micro_batch_s: seconds per micro-batch; `fixed_s` in the file.

    Between two lengths seconds are interpolated linearly (below the first one, from 0); beyond the last one they
    grow with the square of the length. A part of a document is charged as the whole document with as many
    (query, key) pairs.
    """

    attention: tuple[tuple[int, float], ...]
    linear_token_s: float
    fixed_micro_batch_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative("linear_token_s", self.linear_token_s)
        require_not_negative("fixed_s", self.fixed_micro_batch_s)
        if not self.attention:
            raise ConfigError("attention must hold at least one [length, seconds] pair, got none")
        previous_length, previous_s = 0, 0.0
        for length, seconds in self.attention:
            require_not_negative("attention seconds", seconds)
            if length <= previous_length:
                raise ConfigError(f"attention lengths must be > 0 and increase, got {length} after {previous_length}")
            if seconds < previous_s:
                raise ConfigError(
                    f"attention seconds must not decrease with length, got {seconds} at {length} after {previous_s}"
                )
            previous_length, previous_s = length, seconds

    @property
    def fixed_s(self) -> float:
        return self.fixed_micro_batch_s

    def attention_s(self, q_tokens: int, kv_tokens: int) -> float:
        whole = q_tokens == kv_tokens
        # For a whole document the square root is exact only up to rounding; its own length is exact.
        length = float(q_tokens) if whole else sqrt(2 * causal_pairs(q_tokens, kv_tokens))
        last_length, last_s = self.attention[-1]
        if length >= last_length:
            return last_s * (length / last_length) ** 2
        i = bisect_left(self.attention, length, key=lambda pair: pair[0])
        left_length, left_s = self.attention[i - 1] if i else (0, 0.0)
        right_length, right_s = self.attention[i]
        return left_s + (right_s - left_s) * (length - left_length) / (right_length - left_length)

    def linear_s(self, tokens: int) -> float:
        return tokens * self.linear_token_s

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        ratio_fields = {f.name: getattr(self, f.name) for f in fields(RatioCost)}
        return {
            "version": _VERSION,
            "attention": [list(pair) for pair in self.attention],
            "linear_token_s": self.linear_token_s,
            "fixed_s": self.fixed_micro_batch_s,
            **{name: value for name, value in ratio_fields.items() if value is not None},
        }

    @classmethod
    def from_json(cls, saved: Any, *, where: str = "cost table") -> ProfiledCost:
        """Raises DataError naming `where`, the field, the rule and the value."""
        if not isinstance(saved, dict):
            raise DataError(f"{where}: must be a JSON object, got {type(saved).__name__}")
        if saved.get("version") != _VERSION:
            raise DataError(f"{where}: version must be {_VERSION}, got {saved.get('version')!r}")
        optional = {f.name for f in fields(RatioCost)} | {"fixed_s"}
        unknown = sorted(set(saved) - optional - {"version", "attention", "linear_token_s"})
        if unknown:
            raise DataError(f"{where}: unknown field {unknown[0]!r}")
        missing = [name for name in ("attention", "linear_token_s") if name not in saved]
        if missing:
            raise DataError(f"{where}: must have the field {missing[0]!r}")
        pairs = saved["attention"]
        if not isinstance(pairs, list) or not all(
            isinstance(p, list) and len(p) == 2 and type(p[0]) is int and _is_number(p[1]) for p in pairs
        ):
            raise DataError(f"{where}: attention must be a list of [whole tokens, seconds] pairs")
        numbers = {name: saved[name] for name in saved if name not in ("version", "attention")}
        for name, value in numbers.items():
            if not _is_number(value):
                raise DataError(f"{where}: {name} must be a number, got {value!r}")
        fixed_s = numbers.pop("fixed_s", 0.0)
        try:
            return cls(attention=tuple((n, float(s)) for n, s in pairs), fixed_micro_batch_s=fixed_s, **numbers)
        except ConfigError as error:
            raise DataError(f"{where}: {error}") from error

    @classmethod
    def load(cls, path: Path | str) -> ProfiledCost:
        """Read a table. Raises DataError if the file is missing, is not JSON or breaks a rule."""
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cost table {path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"cost table {path}: must be JSON: {error}") from error
        return cls.from_json(saved, where=f"cost table {path}")

    def save(self, path: Path | str) -> None:
        """Write the table for `load`."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
