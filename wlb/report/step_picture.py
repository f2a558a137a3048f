"""One planned step, packer beside packer: what each micro-batch holds, and when each stage runs it.

Colours are of the set by Okabe and Ito, as in `wlb.report.picture`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.documents import StepPlan
from wlb.metrics import imbalance_degree
from wlb.report.lanes import Lane, StepLanes
from wlb.schedule.model import PipelineModel
from wlb.schedule.step_time import model_timeline

_FORWARD, _BACKWARD, _WAIT = "#56B4E9", "#E69F00", "#EDEDED"
_DOCUMENTS = ("#BBD9EE", "#E3EEF6")  # of a micro-batch's documents, in turn
_OUTLIER, _WORK = "#009E73", "#000000"  # green: no hue of the time lines
_OUTLIER_SHARE = 0.25  # of the window, from which a document is drawn in the outliers' colour
_MOST_SEGMENTS = 40  # documents of a micro-batch drawn one by one, the longest ones
_LABEL_SHARE = 0.02  # of the time axis: narrower passes stay without a number


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step and what the timing model says of it.

    plan: lengths decide everything. lanes: when each stage runs which micro-batch, in predicted seconds.
    forward_s: predicted forward seconds of each micro-batch through the whole model, replica after replica.
    ideal_s: the same work spread evenly over all ranks without a bubble.
    """

    plan: StepPlan
    lanes: StepLanes
    forward_s: tuple[float, ...]
    ideal_s: float

    @classmethod
    def of(cls, plan: StepPlan, model: PipelineModel) -> PlannedStep:
        """Predict `plan` on `model`, the pipeline of one replica with its costs."""
        timeline = model_timeline(plan, model)
        lanes = tuple(
            Lane(
                name=f"replica {r + 1}, stage {s + 1}" if len(plan.replicas) > 1 else f"stage {s + 1}",
                passes=tuple((p.kind, p.micro_batch, p.start_s, p.end_s) for p in passes),
            )
            for r, replica in enumerate(timeline.replicas)
            for s, passes in enumerate(replica.stages)
        )
        lengths = [m.lengths for m in plan.micro_batches]
        return cls(
            plan=plan,
            lanes=StepLanes(lanes=lanes),
            forward_s=tuple(sum(model.forward_s(m)) for m in lengths),
            ideal_s=sum(sum(model.forward_s(m)) + sum(model.backward_s(m)) for m in lengths) / len(lanes),
        )

    @property
    def time_over_ideal(self) -> float:
        return self.lanes.end_s / self.ideal_s

    @property
    def imbalance(self) -> float:
        return imbalance_degree(self.forward_s)

    def sentence(self, name: str) -> str:
        """What the step comes to, in one line."""
        return (
            f"{name}: {len(self.plan.micro_batches)} micro-batches, {self.plan.num_tokens:,} tokens, imbalance "
            f"{self.imbalance:.2f}, {self.time_over_ideal:.2f} of ideal, ranks wait {self.lanes.waiting_share:.0%}, "
            f"mean delay {self.plan.mean_delay_steps():.2f} steps, {len(self.plan.waiting)} documents wait"
        )


def step_table(name: str, step: PlannedStep) -> list[str]:
    """Lines of text: every micro-batch in the order in which its replica runs it."""
    mean_s = sum(step.forward_s) / len(step.forward_s)
    lines = [step.sentence(name), "  replica  micro-batch   tokens  documents  longest   work/mean"]
    forward_s = iter(step.forward_s)
    for r, replica in enumerate(step.plan.replicas):
        for k, m in enumerate(replica):
            lines.append(
                f"  {r + 1:7}  {k + 1:11}  {m.num_tokens:7,}  {len(m.documents):9,}  {m.max_seqlen:7,}  "
                f"{next(forward_s) / mean_s:10.2f}"
            )
    return lines


def draw_steps(
    steps: Mapping[str, PlannedStep], path: Path, *, window_tokens: int, title: str, image_format: str
) -> None:
    """Write a row of two panels for each packer: contents of its micro-batches, and its time line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    limit_s = 1.02 * max(step.lanes.end_s for step in steps.values())
    most_tokens = 1.12 * max(m.num_tokens for step in steps.values() for m in step.plan.micro_batches)
    with plt.rc_context({"font.size": 9, "axes.titlesize": 9, "svg.hashsalt": "wlb", "svg.fonttype": "none"}):
        lanes = max(len(step.lanes.lanes) for step in steps.values())
        figure = plt.figure(figsize=(14, 0.9 + len(steps) * max(1.7, 0.34 * lanes)), layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold")
        grid = figure.add_gridspec(len(steps), 2, width_ratios=(1, 1.5))
        for row, (name, step) in enumerate(steps.items()):
            contents, time_line = (figure.add_subplot(grid[row, column]) for column in (0, 1))
            _draw_contents(contents, step, window_tokens, most_tokens)
            _draw_time_line(time_line, step, limit_s)
            contents.set_title(f"{name}: tokens (bars), work over the mean (dots)", loc="left")
            # The sentence without its name, and without the number of micro-batches that the bars show.
            time_line.set_title(step.sentence(name).partition("tokens, ")[2], loc="left")
            if row == len(steps) - 1:
                contents.set_xlabel("micro-batches in the order in which they run")
                time_line.set_xlabel("predicted time; blue forward, orange backward, hatched waiting")
        metadata = {"Date": None} if image_format == "svg" else {}
        # The renaming that follows needs the format said: the temporary name need not end in it.
        figure.savefig(path, format=image_format, dpi=80, metadata=metadata)
        plt.close(figure)


def _draw_contents(axes: Any, step: PlannedStep, window_tokens: int, most_tokens: float) -> None:
    places: list[float] = []
    place = 0.0
    for replica in step.plan.replicas:
        for m in replica:
            _draw_micro_batch(axes, place, sorted(m.lengths, reverse=True), window_tokens)
            places.append(place)
            place += 1
        place += 0.6  # a gap between replicas
    axes.axhline(window_tokens, color="#666666", linewidth=1, linestyle="--")
    axes.set_ylim(0, most_tokens)
    axes.set_xticks([])
    axes.set_yticks([0, window_tokens // 2, window_tokens], ["0", "half", "window"])
    work = axes.twinx()
    mean_s = sum(step.forward_s) / len(step.forward_s)
    work.plot(places, [s / mean_s for s in step.forward_s], linestyle="none", marker="o", markersize=4, color=_WORK)
    work.axhline(1, color=_WORK, linewidth=0.6)
    work.set_ylim(0, max(2.0, 1.1 * max(step.forward_s) / mean_s))


def _draw_micro_batch(axes: Any, place: float, lengths: Sequence[int], window_tokens: int) -> None:
    """A stacked bar, the longest document at the bottom."""
    bottom = 0
    for i, length in enumerate(lengths[:_MOST_SEGMENTS]):
        colour = _OUTLIER if length >= _OUTLIER_SHARE * window_tokens else _DOCUMENTS[i % 2]
        axes.bar(place, length, bottom=bottom, width=0.84, color=colour, edgecolor="white", linewidth=0.4)
        bottom += length
    if rest := sum(lengths[_MOST_SEGMENTS:]):
        axes.bar(place, rest, bottom=bottom, width=0.84, color=_DOCUMENTS[1])


def _draw_time_line(axes: Any, step: PlannedStep, limit_s: float) -> None:
    for y, lane in enumerate(step.lanes.lanes):
        axes.barh(y, step.lanes.end_s, height=0.74, color=_WAIT, hatch="///", edgecolor="#BDBDBD", linewidth=0)
        for kind, k, start_s, stop_s in lane.passes:
            colour = _FORWARD if kind == "forward" else _BACKWARD
            axes.barh(y, stop_s - start_s, left=start_s, height=0.74, color=colour, edgecolor="black", linewidth=0.5)
            if stop_s - start_s > _LABEL_SHARE * limit_s:
                axes.text((start_s + stop_s) / 2, y, str(k + 1), ha="center", va="center", fontsize=7)
    axes.axvline(step.lanes.end_s, color="black", linewidth=1.2)
    axes.set_yticks(range(len(step.lanes.lanes)), [lane.name for lane in step.lanes.lanes])
    axes.set_ylim(len(step.lanes.lanes) - 0.5, -0.5)
    axes.set_xlim(0, limit_s)
    axes.set_xticks([])
