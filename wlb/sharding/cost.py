"""What a shard costs, in integers: (query, key) pairs that the attention kernel computes, and what must be fetched.

A kernel computes whole tiles: 128 query rows against keys in blocks of 128. A short span wastes most of its tiles,
which is why cutting every document over all ranks is not free. Time to receive keys and values is counted as the
pairs that could be computed meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wlb.errors import ConfigError
from wlb.sharding.plan import ShardPlan

DEFAULT_OPERATIONS_PER_BYTE = 2000.0
"""About 600 TFLOP/s of attention in bf16 and 300 GB/s: an H100 among eight on NVLink."""

# Attention's backward pass has five products where the forward pass has two.
_PASSES_OPERATIONS = 3.5
# In which gradients of keys and values go back, at least: they are added up in float32.
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """Prices in (query, key) pairs of one attention layer, forward.

    tile_tokens: rows and keys of a kernel tile.
    received_token_pairs: of receiving the key and the value of one token.
    span_pairs: of a span, however short.
    exchange_pairs: of receiving anything at all.
    """

    tile_tokens: int = 128
    received_token_pairs: int = 0
    span_pairs: int = 0
    exchange_pairs: int = 0

    def __post_init__(self) -> None:
        if self.tile_tokens < 1:
            raise ConfigError(f"tile_tokens must be >= 1, got {self.tile_tokens}")
        for name in ("received_token_pairs", "span_pairs", "exchange_pairs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")

    @classmethod
    def for_model(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        bytes_per_number: int = 2,
        keep_gathered: bool = False,
        operations_per_byte: float = DEFAULT_OPERATIONS_PER_BYTE,
        tile_tokens: int = 128,
    ) -> ShardCosts:
        """Of a model on a device: what a rank could compute while it receives.

        A token's K x (H_key + H_value) numbers travel in the forward pass, again in the backward pass unless they were
        kept, and back as float32 gradients. Computed for a pair: 3.5 x 2 x N x (H_key + H_value) operations. So head
        sizes cancel out, equal or not, and tensor parallelism too.

        num_heads, num_kv_heads: N, K, of one layer. K is N for multi-head attention.
        bytes_per_number: of one number of a key or a value.
        keep_gathered: whether what was received is kept for the backward pass.
        operations_per_byte: operations of attention that the device does while one byte arrives.

        Raises:
            ConfigError: a count is below 1, or operations_per_byte below 0.

        >>> ShardCosts.for_model(num_heads=32, num_kv_heads=8).received_token_pairs
        571
        """
        counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "bytes_per_number": bytes_per_number}
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(f"{name} must be >= 1, got {count}")
        if not 0 <= operations_per_byte < math.inf:
            raise ConfigError(f"operations_per_byte must be >= 0 and finite, got {operations_per_byte}")
        number_bytes = (1 if keep_gathered else 2) * bytes_per_number + max(_GRADIENT_BYTES, bytes_per_number)
        bytes_per_operation = num_kv_heads * number_bytes / (_PASSES_OPERATIONS * 2 * num_heads)
        return cls(tile_tokens=tile_tokens, received_token_pairs=round(operations_per_byte * bytes_per_operation))

    def tile_pairs(self, start: int, stop: int) -> int:
        """Pairs computed for the queries [start, stop) of a document: tiles of queries from `start`, each against the
        keys up to its last query, both rounded up to whole tiles.

        >>> ShardCosts(tile_tokens=4).tile_pairs(0, 6), ShardCosts(tile_tokens=4).tile_pairs(5, 6)
        (48, 32)
        """
        tile = self.tile_tokens
        full, rest = divmod(stop - start, tile)
        # Keys of full tile i end at start + (i + 1) * tile: ceil of that over the tile is base + i.
        base = -(-(start + tile) // tile)
        tiles = full * base + full * (full - 1) // 2
        if rest:
            tiles += -(-stop // tile)
        return tiles * tile * tile

    def attention_pairs(self, plan: ShardPlan, rank: int) -> int:
        """Of a rank's own spans, without what it receives."""
        return sum(self.span_pairs + self.tile_pairs(s.start, s.stop) for s in plan.ranks[rank])

    def exchange(self, received_tokens: int) -> int:
        """Pairs that could be computed while the keys and values of this many tokens arrive."""
        return self.exchange_pairs + received_tokens * self.received_token_pairs if received_tokens else 0

    def rank_pairs(self, plan: ShardPlan, rank: int) -> int:
        """What a rank spends by itself: attention, and receiving keys and values."""
        return self.attention_pairs(plan, rank) + self.exchange(plan.received_tokens(rank))

    def slowest_pairs(self, plan: ShardPlan) -> int:
        """The price of a plan: what receives most, then what computes most.

        An exchange is collective: what one rank receives others send, so none goes on before the slowest has its keys.
        """
        ranks = range(plan.cp_size)
        received = max(plan.received_tokens(rank) for rank in ranks)
        return max(self.attention_pairs(plan, rank) for rank in ranks) + self.exchange(received)
