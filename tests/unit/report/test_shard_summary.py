"""What a plan means for each rank, on packs of a few tokens."""

import pytest

from wlb.errors import ConfigError
from wlb.report.shard_summary import AttentionShape, ShardSummary, mib_text, shards_text
from wlb.sharding import SHARDERS, ShardCosts, ShardPlan, Span

# 2 heads of 4 numbers of 2 bytes: a key and a value are 32 bytes.
ATTENTION = AttentionShape(num_attention_heads=2, num_query_groups=2, kv_channels=4, bytes_per_number=2)


def summary(name, lengths, cp_size, *, num_padding=0, **costs):
    costs = ShardCosts(**{"tile_tokens": 1, **costs})
    plan = SHARDERS[name](lengths, cp_size, costs)
    return ShardSummary(name=name, plan=plan, costs=costs, num_padding=num_padding)


def test_a_documents_share_of_each_rank():
    """Rank 0 holds 0:[0, 2) 0:[4, 5) 1:[2, 3), rank 1 holds 0:[2, 4) 1:[0, 2)."""
    found = summary("per_document", (5, 3), 2)
    zero, one = found.ranks
    assert (zero.num_tokens, one.num_tokens) == (4, 4)
    assert (zero.causal_pairs, one.causal_pairs) == (1 + 2 + 5 + 3, 3 + 4 + 1 + 2)
    assert (zero.received_tokens, one.received_tokens) == (2 + 2, 2)
    assert (zero.whole_documents, zero.split_documents) == (0, 2)
    assert found.ideal_pairs == 10.5
    assert found.imbalance == 22 / 21
    assert found.time_over_ideal == [22 / 21, 20 / 21]
    assert (found.slowest_rank, found.most_received_tokens, found.floor_over_ideal) == (0, 4, 1.0)


def test_tiles_count_in_full():
    """In tiles of 2: rank 0 computes 2 x 2, then 2 x 6, then 2 x 4 pairs; rank 1 computes 2 x 4 and 2 x 2."""
    found = summary("per_document", (5, 3), 2, tile_tokens=2)
    assert [share.tile_pairs for share in found.ranks] == [24, 12]
    assert found.time_over_ideal == [24 / 10.5, 12 / 10.5]
    # Nothing cut: 2 x 2 + 2 x 4 + 2 x 6 of the first document, 2 x 2 + 2 x 4 of the second.
    assert found.floor_over_ideal == 36 / 21


def test_whole_and_split_documents_and_padding():
    """Rank 0 holds document 0 and a token of 1; rank 1 the rest of 1, and the padding, which is no document."""
    plan = ShardPlan(
        lengths=(3, 3, 2),
        ranks=(
            (Span(document=0, start=0, stop=3), Span(document=1, start=0, stop=1)),
            (Span(document=1, start=1, stop=3), Span(document=2, start=0, stop=2)),
        ),
    )
    zero, one = ShardSummary(name="mine", plan=plan, costs=ShardCosts(), num_padding=2).ranks
    assert (zero.whole_documents, zero.split_documents) == (1, 1)
    assert (one.whole_documents, one.split_documents) == (0, 1)


def test_text_holds_a_row_for_each_rank_and_a_line_for_each_plan():
    plans = [summary("per_sequence", (5, 3), 2), summary("per_document", (5, 3), 2)]
    lines = [" ".join(line.split()) for line in shards_text(plans, ATTENTION).splitlines()]
    # MiB: 1, 2 and 4 tokens of 32 bytes.
    rows = {
        "per_sequence": [
            "0 4 0 2 8 0.762 0.762 1 = 3.05e-05 MiB 0:[0, 2) 1:[1, 3)",
            "1 4 0 2 13 1.238 1.238 2 = 6.1e-05 MiB 0:[2, 5) 1:[0, 1)",
        ],
        "per_document": [
            "0 4 0 2 11 1.048 1.048 4 = 0.000122 MiB 0:[0, 2) 0:[4, 5) 1:[2, 3)",
            "1 4 0 2 10 0.952 0.952 2 = 6.1e-05 MiB 0:[2, 4) 1:[0, 2)",
        ],
    }
    for name, expected in rows.items():
        at = lines.index(name)
        assert lines[at + 3 : at + 5] == expected
    # Slowest ranks compute 13 and 11 pairs; the worst receive 2 and 4 of 8 tokens.
    assert "per_sequence 1.238 rank 1 1.238 25% of the pack, 6.1e-05 MiB 9.16e-05 MiB 1.00" in lines
    assert "per_document 1.048 rank 0 1.048 50% of the pack, 0.000122 MiB 0.000183 MiB 1.18" in lines


def test_speed_counts_what_receiving_costs_when_it_has_a_price():
    """13 + 2 * 10 pairs against 11 + 4 * 10."""
    plans = [summary(name, (5, 3), 2, received_token_pairs=10) for name in ("per_sequence", "per_document")]
    text = shards_text(plans, ATTENTION)
    assert text.splitlines()[-1].split()[-1] == f"{33 / 51:.2f}"
    assert "--operations-per-byte" not in text
    assert "--operations-per-byte" in shards_text([summary("per_sequence", (5, 3), 2)], ATTENTION)


def test_spans_are_cut_short_unless_asked_for():
    plans = [summary("per_document", (4, 4, 4), 2)]
    assert "0:[0, 1) 0:[3, 4) 1:[0, 1) and 3 more" in shards_text(plans, ATTENTION)
    assert "0:[0, 1) 0:[3, 4) 1:[0, 1) 1:[3, 4) 2:[0, 1) 2:[3, 4)\n" in shards_text(plans, ATTENTION, all_spans=True)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.015625, "0.0156"), (12.76, "12.8"), (1792.2, "1,792")])
def test_mib_text(value, text):
    assert mib_text(value) == text


def test_attention_shape():
    assert (ATTENTION.token_bytes, ATTENTION.pair_flops) == (32, 32)
    with pytest.raises(ConfigError, match="num_query_groups must divide num_attention_heads = 6, got 4"):
        AttentionShape(num_attention_heads=6, num_query_groups=4)
    with pytest.raises(ConfigError, match="kv_channels must be >= 1, got 0"):
        AttentionShape(kv_channels=0)
