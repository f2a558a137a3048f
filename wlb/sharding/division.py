"""What dividing a micro-batch over context-parallel ranks costs its slowest rank: exactly, and estimated per document.

The exact price needs a plan of the micro-batch. Packers that compare many thousand micro-batches add up what each
document would cost if all ranks were equally busy, and ask for plans of the few that they choose between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from wlb.errors import ConfigError
from wlb.sharding.cost import ShardCosts
from wlb.sharding.plan import ShardPlan
from wlb.sharding.registry import Sharding

PLAN_ENTRIES = 256
PRICE_ENTRIES = 2048
_COPIES_PER_RANK = 4
# Sharders that search take milliseconds a plan, the others well below one.
_QUICK_PLANS = {"per_sequence": 400, "per_document": 120, "adaptive": 100}
_FEW_PLANS = 16


@dataclass(frozen=True, kw_only=True)
class Division:
    """Prices of micro-batches under one sharding, in (query, key) pairs.

    sharding: how they are divided.
    pad_to_multiple: tokens to which the tail of a micro-batch is padded, a multiple of the ranks.
    typical_tokens: of a micro-batch; only the estimates depend on it.
    prices: what plans cost, where that is known better than the costs with which the sharder compares them.

    Raises:
        ConfigError: there is one rank, pad_to_multiple is no positive multiple of the ranks, or typical_tokens is
            below 1.
    """

    sharding: Sharding
    pad_to_multiple: int
    typical_tokens: int
    prices: ShardCosts | None = None
    # By padded lengths; insertion order is age. One plan serves every pipeline stage and both passes, the price of
    # many candidates is wanted again, and plans of those chosen are wanted once more to be executed.
    _plans: dict[tuple[int, ...], ShardPlan] = field(default_factory=dict, init=False, repr=False, compare=False)
    _slowest: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _even: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, sharding: Sharding, *, pad_to_multiple: int, typical_tokens: int) -> Division | None:
        """None where one rank takes every micro-batch whole."""
        if sharding.cp_size == 1:
            return None
        return cls(sharding=sharding, pad_to_multiple=pad_to_multiple, typical_tokens=typical_tokens)

    def __post_init__(self) -> None:
        if self.cp_size < 2:
            raise ConfigError(f"cp_size of a division must be >= 2, got {self.cp_size}")
        if self.pad_to_multiple < 1 or self.pad_to_multiple % self.cp_size:
            raise ConfigError(
                f"pad_to_multiple must be a positive multiple of cp_size = {self.cp_size}, got {self.pad_to_multiple}"
            )
        if self.typical_tokens < 1:
            raise ConfigError(f"typical_tokens must be >= 1, got {self.typical_tokens}")

    @property
    def cp_size(self) -> int:
        return self.sharding.cp_size

    @property
    def costs(self) -> ShardCosts:
        """What plans cost."""
        return self.sharding.costs if self.prices is None else self.prices

    def priced(self, prices: ShardCosts) -> Division:
        """The same plans at other prices."""
        return replace(self, prices=prices)

    @property
    def quick_plans(self) -> int:
        """Plans of a 128K micro-batch over 8 ranks that take about 120 ms of one core."""
        return _QUICK_PLANS.get(self.sharding.name, _FEW_PLANS)

    @property
    def is_quick(self) -> bool:
        """Whether a plan takes about a millisecond or less."""
        return self.quick_plans > _FEW_PLANS

    def padded_tokens(self, num_tokens: int) -> int:
        """Of a micro-batch that holds so many; an empty one is padding."""
        return max(1, -(-num_tokens // self.pad_to_multiple)) * self.pad_to_multiple

    def padded_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """With the padding, if any, as a last document."""
        num_tokens = sum(lengths)
        padding = self.padded_tokens(num_tokens) - num_tokens
        return (*lengths, padding) if padding else tuple(lengths)

    def plan(self, lengths: Sequence[int]) -> ShardPlan:
        """What `Sharding.plan` gives, padding included in the lengths. The last PLAN_ENTRIES are remembered."""
        lengths = tuple(lengths)
        if lengths not in self._plans:
            _remember(self._plans, lengths, self.sharding.plan(lengths), PLAN_ENTRIES)
        return self._plans[lengths]

    def slowest_pairs(self, lengths: Sequence[int]) -> int:
        """Pairs of the slowest rank, receiving keys and values included, of a micro-batch of such documents.

        The last PRICE_ENTRIES answers are remembered.
        """
        padded = self.padded_lengths(lengths)
        if padded not in self._slowest:
            pairs = self.costs.slowest_pairs(self.plan(padded))
            _remember(self._slowest, padded, pairs, PRICE_ENTRIES)
        return self._slowest[padded]

    def even_pairs(self, length: int) -> float:
        """Pairs that a document adds to every rank of a micro-batch whose ranks are equally busy.

        Pairs per token are interpolated between documents of a whole power of two of tiles, and measured there on a
        micro-batch of equal documents: so the estimate has the tiles that the sharder wastes and the keys that it
        sends, whatever the sharder does. Below a tile nothing gets cheaper.
        """
        tile = self.costs.tile_tokens
        length = max(length, tile)
        low = tile << ((length // tile).bit_length() - 1)
        low_pairs, high_pairs = self._even_pairs_per_token(low), self._even_pairs_per_token(2 * low)
        return length * (low_pairs + (high_pairs - low_pairs) * (length - low) / low)

    @cached_property
    def order_matters(self) -> bool:
        """Whether the order of documents in a micro-batch changes its price: asked of one with a long document."""
        unit = 2 * self.costs.tile_tokens * self.cp_size
        prices = [self.slowest_pairs(lengths) for lengths in ((5 * unit, unit, unit), (unit, 5 * unit, unit))]
        return prices[0] != prices[1]

    def _even_pairs_per_token(self, length: int) -> float:
        """Of one rank, for documents of this length."""
        pairs = self._even.get(length)
        if pairs is None:
            copies = max(1, min(self.typical_tokens // length, _COPIES_PER_RANK * self.cp_size))
            plan = self.sharding.plan(self.padded_lengths((length,) * copies))
            all_pairs = sum(self.costs.rank_pairs(plan, rank) for rank in range(self.cp_size))
            pairs = self._even[length] = all_pairs / (copies * length * self.cp_size)
        return pairs


def _remember[V](memo: dict[tuple[int, ...], V], key: tuple[int, ...], value: V, entries: int) -> None:
    if len(memo) >= entries:
        del memo[next(iter(memo))]
    memo[key] = value
