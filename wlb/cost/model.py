"""What a cost model answers, and the integers in which work is compared.

A model covers a stretch of layers on one rank, usually the whole network; `ScaledCost` makes one pipeline
stage of it. Attention grows with the square of a document, everything else with its tokens (WLB-LLM,
arXiv 2503.17924, the Wa and Wl of section 4.1), and every micro-batch costs something however short it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from wlb.errors import ConfigError

ATTENTION_BACKWARD_RATIO = 2.5  # five matrix products against the two of the forward pass
REST_BACKWARD_RATIO = 2.0  # gradients of input and of weight: two products for one

_NS_PER_S = 1_000_000_000


class CostModel(Protocol):
    """Seconds of one rank's work. Every method is non-negative and monotone in each argument."""

    @property
    def fixed_s(self) -> float:
        """Forward seconds of a micro-batch that do not depend on what is in it."""
        ...

    def attention_s(self, q_tokens: int, kv_tokens: int) -> float:
        """Forward seconds of causal attention of the last `q_tokens` of a document's first `kv_tokens`."""
        ...

    def linear_s(self, tokens: int) -> float:
        """Forward seconds of everything else, for `tokens` tokens."""
        ...

    def communication_s(self, num_bytes: int) -> float:
        """Seconds to move `num_bytes` to another rank; 0 bytes take 0 seconds."""
        ...

    def forward_s(self, lengths: Iterable[int]) -> float:
        """Forward seconds of one micro-batch of documents of these lengths, `fixed_s` included."""
        ...

    def backward_s(self, lengths: Iterable[int]) -> float:
        """Backward seconds of that micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class RatioCost(ABC):
    """Base of the models whose backward pass is a multiple of the forward pass.

    attention_backward_ratio, rest_backward_ratio: backward seconds over forward seconds.
    latency_s, bytes_per_s: of one message between ranks; bytes_per_s None means that moving data is free.
    """

    attention_backward_ratio: float = ATTENTION_BACKWARD_RATIO
    rest_backward_ratio: float = REST_BACKWARD_RATIO
    latency_s: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("attention_backward_ratio", "rest_backward_ratio", "latency_s"):
            require_not_negative(name, getattr(self, name))
        if self.bytes_per_s is not None:
            require_positive("bytes_per_s", self.bytes_per_s)

    @property
    @abstractmethod
    def fixed_s(self) -> float: ...

    @abstractmethod
    def attention_s(self, q_tokens: int, kv_tokens: int) -> float: ...

    @abstractmethod
    def linear_s(self, tokens: int) -> float: ...

    def communication_s(self, num_bytes: int) -> float:
        return message_s(num_bytes, latency_s=self.latency_s, bytes_per_s=self.bytes_per_s)

    def forward_s(self, lengths: Iterable[int]) -> float:
        attention_s, rest_s = self._parts_s(lengths)
        return attention_s + rest_s

    def backward_s(self, lengths: Iterable[int]) -> float:
        attention_s, rest_s = self._parts_s(lengths)
        return self.attention_backward_ratio * attention_s + self.rest_backward_ratio * rest_s

    def _parts_s(self, lengths: Iterable[int]) -> tuple[float, float]:
        attention_s, tokens = 0.0, 0
        for n in lengths:
            attention_s += self.attention_s(n, n)
            tokens += n
        return attention_s, self.linear_s(tokens) + self.fixed_s


@dataclass(frozen=True, kw_only=True)
class ScaledCost:
    """`share` of another model's work, for example one of four equal pipeline stages: share 1 / 4.

    Messages keep their size, so `communication_s` is not scaled.
    """

    whole: CostModel
    share: float

    def __post_init__(self) -> None:
        require_not_negative("share", self.share)

    @property
    def fixed_s(self) -> float:
        return self.share * self.whole.fixed_s

    def attention_s(self, q_tokens: int, kv_tokens: int) -> float:
        return self.share * self.whole.attention_s(q_tokens, kv_tokens)

    def linear_s(self, tokens: int) -> float:
        return self.share * self.whole.linear_s(tokens)

    def communication_s(self, num_bytes: int) -> float:
        return self.whole.communication_s(num_bytes)

    def forward_s(self, lengths: Iterable[int]) -> float:
        return self.share * self.whole.forward_s(lengths)

    def backward_s(self, lengths: Iterable[int]) -> float:
        return self.share * self.whole.backward_s(lengths)


def document_work_ns(cost: CostModel, length: int) -> int:
    """Forward nanoseconds of one document, as the integer in which packers compare work, at least 1.

    Rounded per document and then added, so a sum never depends on the order of its terms.
    """
    return max(1, round((cost.attention_s(length, length) + cost.linear_s(length)) * _NS_PER_S))


def micro_batch_work_ns(cost: CostModel, lengths: Iterable[int]) -> int:
    """Sum of `document_work_ns`: what differs between micro-batches. `fixed_s` is the same for all."""
    return sum(document_work_ns(cost, n) for n in lengths)


def causal_pairs(q_tokens: int, kv_tokens: int) -> float:
    """(query, key) pairs of the last `q_tokens` rows of a causal triangle of `kv_tokens`, the diagonal half counted.

    >>> causal_pairs(4, 4), causal_pairs(2, 4)
    (8.0, 6.0)
    """
    if not 0 <= q_tokens <= kv_tokens:
        raise ConfigError(f"q_tokens must be in [0, kv_tokens = {kv_tokens}], got {q_tokens}")
    return q_tokens * (kv_tokens - q_tokens / 2)


def message_s(num_bytes: int, *, latency_s: float, bytes_per_s: float | None) -> float:
    """Latency plus bytes over bandwidth; nothing to send takes no time."""
    if num_bytes < 0:
        raise ConfigError(f"num_bytes must be >= 0, got {num_bytes}")
    if num_bytes == 0:
        return 0.0
    return latency_s + (0.0 if bytes_per_s is None else num_bytes / bytes_per_s)


def require_not_negative(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and >= 0."""
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} must be finite and >= 0, got {value}")


def require_positive(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and > 0."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be finite and > 0, got {value}")
