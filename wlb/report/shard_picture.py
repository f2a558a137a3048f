"""The picture of a pack over context-parallel ranks: who holds what, who works, who receives.

A row of panels for each plan, all on the same scales. In the wide panel a line is a rank and x is the pack: tokens that
the rank holds are in the colour of their document, keys and values that it receives from others in a pale tint of
it. Beside it, bars of attention work and of received keys and values.

Colours are of the set by Okabe and Ito, which people with any kind of colour vision tell apart; neighbours differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.report.shard_summary import AttentionShape, ShardSummary, mib, mib_text
from wlb.sharding.plan import ShardPlan

_DOCUMENTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")  # over and over again
_PADDING, _NOTHING, _WORK, _SLOWEST, _RECEIVED = "#8C8C8C", "#F4F4F4", "#7A7A7A", "#D55E00", "#44546A"
_PALE = 0.72  # how far a received stretch is mixed with white
_BAR = 0.74  # height; ranks are 1 apart
_LABEL_CHARACTERS = 125  # that fit across the pack; narrower documents stay without a label
_MOST_LABELLED = 16  # ranks of a panel whose lines are labelled: more would touch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens [start, stop) of the pack, all of one document."""

    document: int
    start: int
    stop: int


def held(plan: ShardPlan, rank: int) -> tuple[Stretch, ...]:
    """What `rank` holds, where it lies in the pack."""
    starts = plan.starts.tolist()
    return tuple(
        Stretch(document=s.document, start=starts[s.document] + s.start, stop=starts[s.document] + s.stop)
        for s in plan.ranks[rank]
    )


def received(plan: ShardPlan, rank: int) -> tuple[Stretch, ...]:
    """Of which tokens `rank` needs keys and values from others: the gaps before its last query of each document."""
    starts = plan.starts.tolist()
    gaps = []
    document, at = -1, 0
    for s in plan.ranks[rank]:
        if s.document != document:
            document, at = s.document, 0
        if at < s.start:
            gaps.append(Stretch(document=document, start=starts[document] + at, stop=starts[document] + s.start))
        at = s.stop
    return tuple(gaps)


def draw(
    summaries: Sequence[ShardSummary], attention: AttentionShape, path: Path, *, title: str, image_format: str
) -> None:
    """Write the picture of plans of one pack to `path`.

    image_format: "png" or "svg", whatever the name ends in: a temporary name may end in anything.
    """
    import matplotlib

    style: Any = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
    # A fixed salt keeps an SVG of the same plans the same file.
    style["svg.hashsalt"] = "wlb"
    with matplotlib.rc_context(style):
        figure = shard_figure(summaries, attention, title)
        # No date, for the same reason.
        figure.savefig(path, format=image_format, dpi=130, metadata={"Date": None} if image_format == "svg" else None)


def shard_figure(summaries: Sequence[ShardSummary], attention: AttentionShape, title: str) -> Any:
    """The matplotlib Figure: axes of the pack, then for each plan those of ranks, work and received."""
    from matplotlib.figure import Figure

    first = summaries[0]
    rank_inches = min(3.0, 0.55 + 0.27 * first.plan.cp_size)
    figure = Figure(figsize=(15, 2.1 + len(summaries) * (rank_inches + 0.5)), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    grid = figure.add_gridspec(
        1 + len(summaries), 3, width_ratios=[5.6, 2, 1.7], height_ratios=[0.45, *[rank_inches] * len(summaries)]
    )
    pack = figure.add_subplot(grid[0, 0])
    _draw_pack(pack, first)
    _legend(figure.add_subplot(grid[0, 1:]))
    work_limit = 1.22 * max(max(s.time_over_ideal) for s in summaries)
    most = max(s.most_received_tokens for s in summaries)
    received_limit = 1.35 * mib(most, attention) or 1.0  # nothing received at all: an empty panel
    for row, summary in enumerate(summaries, start=1):
        ranks = figure.add_subplot(grid[row, 0], sharex=pack)
        _draw_ranks(ranks, summary)
        work = figure.add_subplot(grid[row, 1])
        _draw_work(work, summary, work_limit)
        kv = figure.add_subplot(grid[row, 2])
        _draw_received(kv, summary, attention, received_limit)
        for axes in (ranks, work, kv):
            axes.set_ylim(summary.plan.cp_size - 0.5, -0.5)
            axes.set_yticks([])
        labelled = _labelled(summary.plan.cp_size)
        ranks.set_yticks(labelled, [f"rank {r}" for r in labelled])
        if row == len(summaries):
            ranks.set_xlabel("token of the pack")
            work.set_xlabel("attention work, mean = 1")
            kv.set_xlabel("MiB of keys and values received")
    return figure


def _labelled(cp_size: int) -> range:
    return range(0, cp_size, -(-cp_size // _MOST_LABELLED))


def _colour(summary: ShardSummary, document: int) -> str:
    return _PADDING if document >= summary.num_documents else _DOCUMENTS[document % len(_DOCUMENTS)]


def _pale(colour: str) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * _PALE):02X}" for c in channels)


def _draw_pack(axes: Any, summary: ShardSummary) -> None:
    """Every document where it lies, with its number and, where there is room, its tokens."""
    plan = summary.plan
    starts = plan.starts.tolist()
    colours = [_colour(summary, d) for d in range(len(plan.lengths))]
    axes.broken_barh(list(zip(starts, plan.lengths, strict=True)), (-0.5, 1), facecolors=colours, linewidth=0)
    for document, (start, length) in enumerate(zip(starts, plan.lengths, strict=True)):
        room = _LABEL_CHARACTERS * length / plan.num_tokens
        number = "padding" if document >= summary.num_documents else f"{document}"
        for label in (f"{number}: {length:,}", number):
            if len(label) + 1 < room:
                ink = "white" if colours[document] in (_DOCUMENTS[0], _PADDING) else "black"
                axes.text(start + length / 2, 0, label, ha="center", va="center", fontsize=9, color=ink)
                break
    axes.set_ylim(-0.5, 0.5)
    axes.set_xlim(0, plan.num_tokens)
    axes.set_yticks([0], ["pack"])
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title("document: tokens", loc="left", fontsize=10)


def _draw_ranks(axes: Any, summary: ShardSummary) -> None:
    plan = summary.plan
    borders = plan.starts.tolist()[1:]
    # Behind the bars; finer where there are many, so that they do not turn into a grey surface.
    axes.vlines(
        borders, -0.5, plan.cp_size - 0.5, color="#9A9A9A", linewidth=min(0.8, 40 / len(plan.lengths)), zorder=0
    )
    for rank in range(plan.cp_size):
        y = (rank - _BAR / 2, _BAR)
        axes.broken_barh([(0, plan.num_tokens)], y, facecolors=_NOTHING, linewidth=0, zorder=-1)
        for stretches, tint in ((received(plan, rank), _pale), (held(plan, rank), str)):
            axes.broken_barh(
                [(s.start, s.stop - s.start) for s in stretches],
                y,
                facecolors=[tint(_colour(summary, s.document)) for s in stretches],
                linewidth=0,
            )
    axes.tick_params(left=False)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.set_title(
        f"{summary.name}: imbalance {summary.imbalance:.3f}, slowest rank {max(summary.time_over_ideal):.3f} x ideal, "
        f"worst rank receives {summary.most_received_tokens / plan.num_tokens:.0%} of the pack",
        loc="left",
        fontweight="bold",
    )


def _draw_work(axes: Any, summary: ShardSummary, limit: float) -> None:
    for rank, (share, time_over_ideal) in enumerate(zip(summary.ranks, summary.time_over_ideal, strict=True)):
        colour = _SLOWEST if rank == summary.slowest_rank else _WORK
        exact = share.causal_pairs / summary.ideal_pairs
        axes.barh(rank, exact, height=_BAR, color=colour)
        axes.barh(rank, time_over_ideal - exact, left=exact, height=_BAR, color=_pale(colour))
        _number(axes, rank, time_over_ideal, f"{time_over_ideal:.2f}", limit, len(summary.ranks))
    axes.axvline(1, color="black", linewidth=1.2, linestyle=":")
    axes.set_xlim(0, limit)


def _draw_received(axes: Any, summary: ShardSummary, attention: AttentionShape, limit: float) -> None:
    for rank, share in enumerate(summary.ranks):
        value = mib(share.received_tokens, attention)
        axes.barh(rank, value, height=_BAR, color=_RECEIVED)
        _number(axes, rank, value, mib_text(value), limit, len(summary.ranks))
    axes.set_xlim(0, limit)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _number(axes: Any, rank: int, value: float, text: str, limit: float, cp_size: int) -> None:
    if rank in _labelled(cp_size):
        # White behind it, as the line of the mean may pass there; but not over the bars of ranks without a label.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5} if cp_size <= _MOST_LABELLED else None
        axes.text(value + 0.015 * limit, rank, text, va="center", fontsize=9, bbox=box)


def _legend(axes: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_axis_off()
    axes.legend(
        handles=[
            Patch(facecolor=_DOCUMENTS[0], label="held"),
            Patch(facecolor=_pale(_DOCUMENTS[0]), label="keys and values received"),
            Patch(facecolor=_WORK, label="work"),
            Patch(facecolor=_pale(_WORK), label="wasted in part-filled tiles"),
            Patch(facecolor=_SLOWEST, label="slowest rank"),
            Line2D([], [], color="black", linestyle=":", label="mean"),
        ],
        loc="center left",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
