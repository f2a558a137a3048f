"""Seconds of a micro-batch that context-parallel ranks divide: of the slowest of them, for whom all others wait.

A cost model of the undivided model says what attention of whole documents takes. The slowest rank takes the same
seconds per (query, key) pair for the pairs that its shard costs it (`ShardCosts.rank_pairs`), which are more than an
equal share: tiles that cuts waste, unequal shards, keys and values to receive. Everything else is divided by tokens,
which are equal, and what a micro-batch costs however short it is, is not divided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from wlb.cost.model import CostModel, causal_pairs
from wlb.schedule.model import PipelineModel
from wlb.sharding.division import Division

# Micro-batches of a step that are planned exactly only to be reported; every rank does it.
_MOST_EXACT = 64
# Two documents of half of it are what tells attention from the rest in the backward pass.
_REFERENCE_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class _DividedCost(ABC):
    """whole: of any stretch of layers, undivided. division: of the micro-batches."""

    whole: CostModel
    division: Division

    @property
    def fixed_s(self) -> float:
        return self.whole.fixed_s

    def attention_s(self, q_tokens: int, kv_tokens: int) -> float:
        """Estimated: a rank's equal share of the document's pairs."""
        return self.whole.attention_s(q_tokens, kv_tokens) * self._even_share(kv_tokens) if q_tokens else 0.0

    def linear_s(self, tokens: int) -> float:
        return self.whole.linear_s(tokens) / self.division.cp_size

    def communication_s(self, num_bytes: int) -> float:
        """num_bytes: of all ranks, each of which sends its equal share at the same time."""
        return self.whole.communication_s(-(-num_bytes // self.division.cp_size))

    @abstractmethod
    def forward_s(self, lengths: Iterable[int]) -> float: ...

    @abstractmethod
    def backward_s(self, lengths: Iterable[int]) -> float: ...

    def _backward_attention_s(self, lengths: tuple[int, ...]) -> float:
        """Of the undivided documents."""
        fixed_s, token_s = self._backward_rest_s
        return max(0.0, self.whole.backward_s(lengths) - fixed_s - token_s * sum(lengths))

    def _even_share(self, length: int) -> float:
        """Of a document's attention seconds that each rank takes."""
        return self.division.even_pairs(length) / _pairs(length)

    @cached_property
    def _backward_rest_s(self) -> tuple[float, float]:
        """Backward seconds of an empty micro-batch, and of all but attention for one token.

        Halving a document halves its attention and leaves the rest, in both passes: how the differences compare is how
        attention's passes compare.
        """
        whole, halves = (_REFERENCE_TOKENS,), (_REFERENCE_TOKENS // 2,) * 2
        fixed_s = self.whole.backward_s(())
        forward_s = self.whole.forward_s(whole) - self.whole.forward_s(halves)
        backward_s = self.whole.backward_s(whole) - self.whole.backward_s(halves)
        # A fit may find no attention in the forward pass; half of the pairs are gone.
        ratio = self.whole.attention_s(*whole * 2) / forward_s if forward_s > 0 else 2
        attention_s = backward_s * ratio
        rest_s = self.whole.backward_s(whole) - fixed_s - attention_s
        return fixed_s, max(0.0, rest_s) / _REFERENCE_TOKENS


@dataclass(frozen=True, kw_only=True)
class ShardedCost(_DividedCost):
    """Of the very shards: `forward_s` and `backward_s` plan the micro-batch. Implements `CostModel`.

    Not additive: a document costs more in one micro-batch than in another. `attention_s` and `linear_s` are those of
    `EvenCost`. The order of lengths is that of the documents in the micro-batch: some sharders cut by it.
    """

    def forward_s(self, lengths: Iterable[int]) -> float:
        lengths = tuple(lengths)
        attention_s = sum(self.whole.attention_s(n, n) for n in lengths)
        return attention_s * self._share(lengths) + self.linear_s(self._tokens(lengths)) + self.fixed_s

    def backward_s(self, lengths: Iterable[int]) -> float:
        lengths = tuple(lengths)
        fixed_s, token_s = self._backward_rest_s
        rest_s = token_s * self._tokens(lengths) / self.division.cp_size + fixed_s
        return self._backward_attention_s(lengths) * self._share(lengths) + rest_s

    def _share(self, lengths: tuple[int, ...]) -> float:
        """Of the micro-batch's attention seconds that the slowest rank takes."""
        return self.division.slowest_pairs(lengths) / sum(map(_pairs, lengths)) if lengths else 0.0

    def _tokens(self, lengths: tuple[int, ...]) -> int:
        return self.division.padded_tokens(sum(lengths))


@dataclass(frozen=True, kw_only=True)
class EvenCost(_DividedCost):
    """As if all ranks were equally busy: what a document adds does not depend on the others. Implements `CostModel`."""

    def forward_s(self, lengths: Iterable[int]) -> float:
        lengths = tuple(lengths)
        return sum(self.attention_s(n, n) for n in lengths) + self.linear_s(sum(lengths)) + self.fixed_s

    def backward_s(self, lengths: Iterable[int]) -> float:
        lengths = tuple(lengths)
        fixed_s, token_s = self._backward_rest_s
        attention_s = sum(self._backward_attention_s((n,)) * self._even_share(n) for n in lengths)
        return attention_s + token_s * sum(lengths) / self.division.cp_size + fixed_s


def statistics_cost(whole: CostModel, division: Division | None, *, num_micro_batches: int) -> CostModel:
    """What the micro-batches of all replicas are compared with once a step: exact where plans are quick and few.

    Sharders that search balance so well that the estimate is within a few percent of the exact time.
    """
    if division is None:
        return whole
    is_exact = division.is_quick and num_micro_batches <= _MOST_EXACT
    return (ShardedCost if is_exact else EvenCost)(whole=whole, division=division)


def sharded(model: PipelineModel, division: Division | None) -> PipelineModel:
    """The pipeline with the exact cost of divided micro-batches; unchanged without a division."""
    return _divided(model, ShardedCost, division)


def evenly_shared(model: PipelineModel, division: Division | None) -> PipelineModel:
    """The pipeline with the additive estimate of divided micro-batches; unchanged without a division."""
    return _divided(model, EvenCost, division)


def _divided(
    model: PipelineModel, kind: type[ShardedCost] | type[EvenCost], division: Division | None
) -> PipelineModel:
    if division is None:
        return model
    return replace(model, stretch_costs=tuple(kind(whole=cost, division=division) for cost in model.stretch_costs))


def _pairs(length: int) -> float:
    return causal_pairs(length, length)
