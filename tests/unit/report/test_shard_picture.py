"""What the picture of a plan draws: its rectangles, not its pixels."""

import pytest

from wlb.report.shard_picture import Stretch, draw, held, received, shard_figure
from wlb.report.shard_summary import AttentionShape, ShardSummary
from wlb.sharding import SHARDERS, ShardCosts

ATTENTION = AttentionShape()  # 16 KiB a token
LENGTHS = [(5, 3), (1, 1, 1, 1), (40, 1, 7, 16), (17, 2, 300, 61, 4)]


def summary(name, lengths, cp_size, num_padding=0):
    costs = ShardCosts(tile_tokens=1)
    plan = SHARDERS[name](lengths, cp_size, costs)
    return ShardSummary(name=name, plan=plan, costs=costs, num_padding=num_padding)


def stretches(*triples):
    return tuple(Stretch(document=d, start=a, stop=b) for d, a, b in triples)


def test_stretches_of_a_plan():
    """Rank 0 holds 0:[0, 2) 0:[4, 5) 1:[2, 3), rank 1 holds 0:[2, 4) 1:[0, 2); document 1 begins at token 5."""
    plan = summary("per_document", (5, 3), 2).plan
    assert held(plan, 0) == stretches((0, 0, 2), (0, 4, 5), (1, 7, 8))
    assert received(plan, 0) == stretches((0, 2, 4), (1, 5, 7))
    assert held(plan, 1) == stretches((0, 2, 4), (1, 5, 7))
    assert received(plan, 1) == stretches((0, 0, 2))


@pytest.mark.parametrize("name", SHARDERS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_stretches_are_what_the_plan_says(name, lengths, cp_size):
    plan = summary(name, lengths, cp_size).plan
    all_held = []
    for rank in range(cp_size):
        mine = [t for s in held(plan, rank) for t in range(s.start, s.stop)]
        others = [t for s in received(plan, rank) for t in range(s.start, s.stop)]
        assert mine == plan.pack_indices(rank).tolist()
        assert len(others) == len(set(others)) == plan.received_tokens(rank)
        assert not set(mine) & set(others)
        all_held += mine
    assert sorted(all_held) == list(range(sum(lengths)))


@pytest.fixture
def axes_of():
    """axes_of(summaries) -> the figure's axes: pack, legend, then ranks, work and received of each plan."""
    pytest.importorskip("matplotlib", reason="matplotlib is missing: nothing is drawn, pictures are not checked")
    return lambda *summaries: shard_figure(summaries, ATTENTION, "a title").axes


def rectangles(axes):
    """(left, right, line, colour) of every bar drawn over a line."""
    found = []
    for bars in axes.collections:
        if type(bars).__name__ != "PolyCollection":
            continue
        for path, colour in zip(bars.get_paths(), bars.get_facecolor(), strict=True):
            box = path.get_extents()
            centre = (box.y0 + box.y1) / 2
            found.append((box.x0, box.x1, round(centre, 6), tuple(round(255 * c) for c in colour[:3])))
    return found


BLUE, ORANGE, GREY = (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x8C, 0x8C, 0x8C)
NOTHING = (0xF4, 0xF4, 0xF4)


def pale(colour):
    return tuple(round(c + 0.72 * (255 - c)) for c in colour)


def test_draws_what_each_rank_holds_and_receives(axes_of):
    ranks = axes_of(summary("per_document", (5, 3), 2))[2]
    assert [r for r in rectangles(ranks) if r[3] != NOTHING] == [
        (2, 4, 0, pale(BLUE)),
        (5, 7, 0, pale(ORANGE)),
        (0, 2, 0, BLUE),
        (4, 5, 0, BLUE),
        (7, 8, 0, ORANGE),
        (0, 2, 1, pale(BLUE)),
        (2, 4, 1, BLUE),
        (5, 7, 1, ORANGE),
    ]
    assert [t.get_text() for t in ranks.get_yticklabels()] == ["rank 0", "rank 1"]
    assert ranks.get_title(loc="left") == (
        "per_document: imbalance 1.048, slowest rank 1.048 x ideal, worst rank receives 50% of the pack"
    )
    (borders,) = [c for c in ranks.collections if type(c).__name__ == "LineCollection"]
    assert [segment[0][0] for segment in borders.get_segments()] == [5]


def test_the_pack_shows_documents_and_padding(axes_of):
    pack = axes_of(summary("per_sequence", (5, 2, 1), 2, num_padding=1))[0]
    assert rectangles(pack) == [(0, 5, 0, BLUE), (5, 7, 0, ORANGE), (7, 8, 0, GREY)]
    assert [t.get_text() for t in pack.texts] == ["0: 5", "1: 2", "padding: 1"]


def test_documents_without_room_have_no_label(axes_of):
    pack = axes_of(summary("per_sequence", (900, 1, 99), 2))[0]
    assert [t.get_text() for t in pack.texts] == ["0: 900", "2: 99"]


def test_bars_are_exact_work_then_waste_and_what_is_received(axes_of):
    axes = axes_of(summary("per_sequence", (5, 3), 2), summary("per_document", (5, 3), 2))
    assert len(axes) == 2 + 2 * 3
    # (line, exact work over the mean, waste): 8 and 13 of 21 pairs; tiles of one token waste nothing.
    work = [(p.get_y() + p.get_height() / 2, p.get_width()) for p in axes[3].patches]
    assert [w for _, w in work] == pytest.approx([16 / 21, 0, 26 / 21, 0])
    assert [line for line, _ in work] == pytest.approx([0, 0, 1, 1])
    assert axes[3].patches[2].get_facecolor() != axes[3].patches[0].get_facecolor()  # the slowest stands out
    # MiB: 1 and 2 tokens, then 4 and 2, of 16 KiB.
    assert [p.get_width() for p in axes[4].patches] == [1 / 64, 2 / 64]
    assert [p.get_width() for p in axes[7].patches] == [4 / 64, 2 / 64]
    assert axes[3].get_xlim() == axes[6].get_xlim()
    assert axes[4].get_xlim() == axes[7].get_xlim()
    assert axes[2].get_xlim() == axes[5].get_xlim() == (0, 8)


def test_many_ranks_and_documents_and_nothing_received(axes_of):
    axes = axes_of(summary("per_sequence", (3,) * 128, 64))
    assert len([r for r in rectangles(axes[2]) if r[3] == NOTHING]) == 64
    assert [t.get_text() for t in axes[2].get_yticklabels()] == [f"rank {r}" for r in range(0, 64, 4)]
    axes = axes_of(summary("per_sequence", (4,), 1))
    assert [p.get_width() for p in axes[4].patches] == [0]
    assert axes[4].get_xlim() == (0, 1)


@pytest.mark.parametrize(("image_format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_files_are_of_the_format_asked_for_and_the_same_each_time(axes_of, tmp_path, image_format, start):
    plans = [summary("per_document", (50, 30), 2)]
    for name in ("one", "two"):
        draw(plans, ATTENTION, tmp_path / name, title="a title", image_format=image_format)
    one = (tmp_path / "one").read_bytes()
    assert one.startswith(start)
    assert one == (tmp_path / "two").read_bytes()
