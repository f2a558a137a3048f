"""What sharding one pack means for each context-parallel rank, in numbers and as text for a terminal.

Documents of 5 and 3 tokens over 2 ranks, each document cut head-tail; a tile of 1 token wastes nothing::

    rank   holds                        causal pairs      of mean   receives
    0      0:[0, 2) 0:[4, 5) 1:[2, 3)   1 + 2 + 5 + 3     1.05      2 of document 0, 2 of document 1
    1      0:[2, 4) 1:[0, 2)            3 + 4 + 1 + 2     0.95      2 of document 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from wlb.errors import ConfigError
from wlb.metrics import imbalance_degree
from wlb.sharding.cost import ShardCosts
from wlb.sharding.plan import ShardPlan, Span, span_pairs

_MIB = 1 << 20
_SHOWN_SPANS = 3  # of a rank, in its row


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention layer, all heads: what a token's key and value weigh, and what a (query, key) pair costs.

    num_attention_heads: query heads. num_query_groups: key and value heads. kv_channels: numbers of a head.
    bytes_per_number: of one number of a key or value.

    Raises:
        ConfigError: a value is below 1, or num_query_groups does not divide num_attention_heads.
    """

    num_attention_heads: int = 32
    num_query_groups: int = 32
    kv_channels: int = 128
    bytes_per_number: int = 2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"num_query_groups must divide num_attention_heads = {self.num_attention_heads}, "
                f"got {self.num_query_groups}"
            )

    @property
    def token_bytes(self) -> int:
        """A key and a value."""
        return 2 * self.num_query_groups * self.kv_channels * self.bytes_per_number

    @property
    def pair_flops(self) -> int:
        """Score and weighted value: two products of two operations."""
        return 4 * self.num_attention_heads * self.kv_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank's part of one attention layer, forward.

    num_tokens: held. whole_documents, split_documents: documents of which it holds all, or only a part; padding is
        none. spans: what it holds, padding included.
    causal_pairs: exact (query, key) pairs. tile_pairs: those that the kernel computes, in whole tiles.
    received_tokens: tokens whose keys and values other ranks hold.
    """

    num_tokens: int
    whole_documents: int
    split_documents: int
    spans: tuple[Span, ...]
    causal_pairs: int
    tile_pairs: int
    received_tokens: int


@dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """A plan, and what it means for each rank.

    name: of the sharder. num_padding: tokens of the last document of the plan that are padding, 0 or all of it.
    """

    name: str
    plan: ShardPlan
    costs: ShardCosts
    num_padding: int

    @property
    def num_documents(self) -> int:
        """Without padding."""
        return len(self.plan.lengths) - (self.num_padding > 0)

    @cached_property
    def ranks(self) -> tuple[RankShare, ...]:
        return tuple(map(self._share, range(self.plan.cp_size)))

    @cached_property
    def ideal_pairs(self) -> float:
        """Exact causal pairs of a rank if all had equally many."""
        return sum(share.causal_pairs for share in self.ranks) / self.plan.cp_size

    @property
    def imbalance(self) -> float:
        """max * n / sum of the ranks' causal pairs: 1 is perfect."""
        return imbalance_degree([share.causal_pairs for share in self.ranks])

    @property
    def time_over_ideal(self) -> list[float]:
        """Of each rank: pairs that its kernel computes over `ideal_pairs`."""
        return [share.tile_pairs / self.ideal_pairs for share in self.ranks]

    @property
    def slowest_rank(self) -> int:
        """With the most pairs to compute in whole tiles; the first of them."""
        return max(range(self.plan.cp_size), key=lambda rank: self.ranks[rank].tile_pairs)

    @property
    def floor_over_ideal(self) -> float:
        """`time_over_ideal` of every rank if no document were cut and whole tiles could be dealt evenly."""
        tiles = sum(self.costs.tile_pairs(0, length) for length in self.plan.lengths)
        return tiles / self.plan.cp_size / self.ideal_pairs

    @property
    def most_received_tokens(self) -> int:
        """Of the rank that receives most."""
        return max(share.received_tokens for share in self.ranks)

    def _share(self, rank: int) -> RankShare:
        spans = self.plan.ranks[rank]
        documents = [s for s in spans if s.document < self.num_documents]
        whole = sum(s.num_tokens == self.plan.lengths[s.document] for s in documents)
        return RankShare(
            num_tokens=sum(s.num_tokens for s in spans),
            whole_documents=whole,
            split_documents=len({s.document for s in documents}) - whole,
            spans=spans,
            causal_pairs=self.plan.causal_pairs(rank),
            tile_pairs=sum(self.costs.tile_pairs(s.start, s.stop) for s in spans),
            received_tokens=self.plan.received_tokens(rank),
        )


def shards_text(summaries: Sequence[ShardSummary], attention: AttentionShape, *, all_spans: bool = False) -> str:
    """The pack, a table of ranks for each plan, and a line for each plan to compare them. Plans are of one pack.

    all_spans: every span of every rank, not only the first few.
    """
    first = summaries[0]
    plan, costs = first.plan, first.costs
    pairs = sum(span_pairs(0, length) for length in plan.lengths)
    padding = f", {first.num_padding:,} of them padding at the tail" if first.num_padding else ""
    lines = [
        f"pack: {pack_text(first)}{padding}; longest document {max(plan.lengths[: first.num_documents]):,}; "
        f"{plan.cp_size} ranks of {plan.rank_tokens:,}",
        f"one attention layer, forward: {pairs:,} causal pairs, {pairs * attention.pair_flops / 1e12:.3g} TFLOP; "
        f"a token's key and value are {attention.token_bytes:,} bytes",
        "ideal: all ranks compute equally many pairs and none in vain; whole kernel tiles of "
        f"{costs.tile_tokens} tokens, nothing cut, would take {first.floor_over_ideal:.3f} x that",
    ]
    for summary in summaries:
        lines += ["", summary.name, *_aligned([_RANK_HEAD, *_rank_rows(summary, attention, all_spans)], left={8})]
    lines += ["", *_aligned([_plan_head(first), *(_plan_row(s, first, attention) for s in summaries)], left={0})]
    if costs.received_token_pairs == 0:
        lines.append("(speed counts attention alone: --operations-per-byte 0 makes receiving free)")
    return "\n".join(lines)


_RANK_HEAD = ["rank", "tokens", "docs whole", "split", "causal pairs", "of mean", "time/ideal", "received", "holds"]


def _rank_rows(summary: ShardSummary, attention: AttentionShape, all_spans: bool) -> Iterator[list[str]]:
    for rank, (share, time_over_ideal) in enumerate(zip(summary.ranks, summary.time_over_ideal, strict=True)):
        yield [
            f"{rank}",
            f"{share.num_tokens:,}",
            f"{share.whole_documents:,}",
            f"{share.split_documents:,}",
            f"{share.causal_pairs:,}",
            f"{share.causal_pairs / summary.ideal_pairs:.3f}",
            f"{time_over_ideal:.3f}",
            f"{share.received_tokens:,} = {mib_text(mib(share.received_tokens, attention))} MiB",
            _spans_text(share.spans, len(share.spans) if all_spans else _SHOWN_SPANS),
        ]


def _spans_text(spans: Sequence[Span], shown: int) -> str:
    text = " ".join(f"{s.document}:[{s.start}, {s.stop})" for s in spans[:shown])
    left = len(spans) - shown
    return f"{text} and {left:,} more" if left > 0 else text


def _plan_head(first: ShardSummary) -> list[str]:
    return [
        "sharder",
        "imbalance",
        "slowest",
        "time/ideal",
        "worst receives",
        "all receive",
        f"speed, {first.name} = 1",
    ]


def _plan_row(summary: ShardSummary, first: ShardSummary, attention: AttentionShape) -> list[str]:
    most, plan = summary.most_received_tokens, summary.plan
    received = sum(share.received_tokens for share in summary.ranks)
    return [
        summary.name,
        f"{summary.imbalance:.3f}",
        f"rank {summary.slowest_rank}",
        f"{max(summary.time_over_ideal):.3f}",
        f"{most / plan.num_tokens:.0%} of the pack, {mib_text(mib(most, attention))} MiB",
        f"{mib_text(mib(received, attention))} MiB",
        f"{first.costs.slowest_pairs(first.plan) / summary.costs.slowest_pairs(plan):.2f}",
    ]


def pack_text(summary: ShardSummary) -> str:
    """Documents and tokens, with padding."""
    count = summary.num_documents
    return f"{count:,} document{'' if count == 1 else 's'}, {summary.plan.num_tokens:,} tokens"


def mib(tokens: int, attention: AttentionShape) -> float:
    """Of the keys and values of so many tokens in one layer."""
    return tokens * attention.token_bytes / _MIB


def mib_text(value: float) -> str:
    """Three digits at least: 0.0156, 12.8, 1,792."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _aligned(rows: list[list[str]], left: set[int]) -> Iterator[str]:
    """Columns as wide as their widest cell; numbers to the right, the columns in `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = [
            cell.ljust(w) if c in left else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if i == 0:
            yield "-" * (sum(widths) + 2 * (len(widths) - 1))
