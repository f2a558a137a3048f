"""The picture of a comparison: who worked and who waited, measured and predicted, imbalance and losses.

Colours are of the set by Okabe and Ito, which people with any kind of colour vision tell apart; passes differ in
hatching and runs in markers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.report.measured import MeasuredStep
from wlb.report.prediction import StepModel
from wlb.report.run import TrainedRun

_FORWARD, _BACKWARD, _WAIT = "#56B4E9", "#E69F00", "#EDEDED"
_RUN_COLOUR = {"plain": "#D55E00", "wlb": "#0072B2"}
_RUN_NAME = {"plain": "plain", "wlb": "balanced"}
_RUN_MARKER = {"plain": "o", "wlb": "s"}
_LABEL_SHARE = 0.016  # of the time axis: narrower bars stay without a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank's row: its name, and (kind, micro-batch, start, stop) of each pass, seconds from the step's start."""

    name: str
    passes: tuple[tuple[str, int, float, float], ...]

    @property
    def busy_s(self) -> float:
        return sum(stop - start for _, _, start, stop in self.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLanes:
    """Lanes of all ranks and the seconds at which the last pass ends."""

    lanes: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        return max(stop for lane in self.lanes for _, _, _, stop in lane.passes)

    @property
    def waiting_share(self) -> float:
        """Share of all lanes' seconds up to `end_s` that no pass fills."""
        return 1 - sum(lane.busy_s for lane in self.lanes) / (self.end_s * len(self.lanes))


def measured_lanes(step: MeasuredStep) -> StepLanes:
    """What the ranks did, from the first rank's start."""
    return StepLanes(
        lanes=tuple(
            Lane(
                name=_rank_name(step, i),
                passes=tuple(
                    (kind, k, start - step.begin_s, stop - step.begin_s)
                    for kind, passes in (("forward", rank.forward), ("backward", rank.backward))
                    for k, (start, stop) in enumerate(passes)
                ),
            )
            for i, rank in enumerate(step.ranks)
        )
    )


def predicted_lanes(step: MeasuredStep, model: StepModel) -> StepLanes:
    """What the model says that the same ranks do."""
    timeline = model.timeline(step)
    replica_of = {dp_rank: i for i, dp_rank in enumerate(sorted({r.dp_rank for r in step.ranks}))}
    return StepLanes(
        lanes=tuple(
            Lane(
                name=_rank_name(step, i),
                passes=tuple(
                    (p.kind, p.micro_batch, p.start_s, p.end_s)
                    for p in timeline.replicas[replica_of[rank.dp_rank]].stages[rank.pp_rank]
                ),
            )
            for i, rank in enumerate(step.ranks)
        )
    )


def draw(report: dict[str, Any], plain: TrainedRun, balanced: TrainedRun, model: StepModel, path: Path) -> None:
    """Write the picture of `report` to `path` as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = {"plain": plain, "wlb": balanced}
    steps = {name: run.typical_step() for name, run in runs.items()}
    with plt.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(14, 10.5), layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=[1, 1, 1.45])
        figure.suptitle(_title(report), fontsize=15, fontweight="bold")
        limit_s = _draw_timelines(figure, grid, steps, model)
        for axes in figure.axes:
            axes.set_xlim(0, limit_s)
        _draw_imbalance(figure.add_subplot(grid[2, 0]), report, runs, model)
        _draw_losses(figure.add_subplot(grid[2, 1]), runs)
        # The renaming that follows needs the format said: the temporary name need not end in .png.
        figure.savefig(path, format="png", dpi=130)
        plt.close(figure)


def _title(report: dict[str, Any]) -> str:
    plain, balanced = report["runs"]["plain"], report["runs"]["wlb"]
    layout = f", layout {report['layout']}" if report.get("layout") else ""
    return (
        f"Same {plain['documents']:,} pieces of documents, {plain['tokens']:,} tokens, {plain['steps']} steps{layout}\n"
        f"balanced over plain: {report['speedup']:.2f} x measured, {report['predicted_speedup']:.2f} x predicted   |   "
        f"imbalance {plain['imbalance_degree']:.2f} → {balanced['imbalance_degree']:.2f}   |   "
        f"final loss {plain['final_loss']:.2f} and {balanced['final_loss']:.2f}"
    )


def _draw_timelines(figure: Any, grid: Any, steps: dict[str, MeasuredStep], model: StepModel) -> float:
    """The four time lines on one time axis; returns its end."""
    lanes_of: tuple[tuple[str, Callable[[MeasuredStep], StepLanes]], ...] = (
        ("measured", measured_lanes),
        ("predicted", lambda step: predicted_lanes(step, model)),
    )
    drawn = {(name, how): lanes(step) for name, step in steps.items() for how, lanes in lanes_of}
    first, second = (step.step + 1 for step in steps.values())
    limit_s = 1.02 * max(lanes.end_s for lanes in drawn.values())
    for row, (name, step) in enumerate(steps.items()):
        for column, (how, _) in enumerate(lanes_of):
            axes = figure.add_subplot(grid[row, column])
            lanes, tokens = drawn[name, how], step.plan.num_tokens
            _draw_lanes(axes, lanes, limit_s)
            axes.set_title(
                f"{_RUN_NAME[name]}, {how}: {tokens:,} tokens in {lanes.end_s:.2f} s, "
                f"{lanes.end_s * 1e6 / tokens:.0f} ms per 1,000; ranks wait {lanes.waiting_share:.0%}",
                loc="left",
                color=_RUN_COLOUR[name],
                fontsize=10.5,
            )
            if row == 1:
                axes.set_xlabel(f"seconds from the start of a typical step (plain: {first}, balanced: {second})")
            if row == 0 and column == 1:
                _legend(axes)
    return limit_s


def _draw_lanes(axes: Any, lanes: StepLanes, limit_s: float) -> None:
    height = 0.72
    for y, lane in enumerate(lanes.lanes):
        axes.barh(y, lanes.end_s, height=height, color=_WAIT, hatch="///", edgecolor="#BDBDBD", linewidth=0)
        for kind, k, start_s, stop_s in lane.passes:
            colour = _FORWARD if kind == "forward" else _BACKWARD
            axes.barh(y, stop_s - start_s, left=start_s, height=height, color=colour, edgecolor="black", linewidth=0.8)
            if stop_s - start_s > _LABEL_SHARE * limit_s:
                axes.text((start_s + stop_s) / 2, y, str(k + 1), ha="center", va="center", fontsize=10)
    axes.axvline(lanes.end_s, color="black", linewidth=1.5)
    axes.set_yticks(range(len(lanes.lanes)), [lane.name for lane in lanes.lanes])
    axes.set_ylim(len(lanes.lanes) - 0.5, -0.5)


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    axes.legend(
        handles=[
            Patch(facecolor=_FORWARD, edgecolor="black", label="forward of micro-batch n"),
            Patch(facecolor=_BACKWARD, edgecolor="black", label="backward"),
            Patch(facecolor=_WAIT, edgecolor="#BDBDBD", hatch="///", label="waiting"),
        ],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.12),
        ncols=3,
        frameon=False,
    )


def _draw_imbalance(axes: Any, report: dict[str, Any], runs: dict[str, TrainedRun], model: StepModel) -> None:
    for name, run in runs.items():
        axes.plot(
            [s.step + 1 for s in run.steps],
            run.imbalance(model),
            color=_RUN_COLOUR[name],
            marker=_RUN_MARKER[name],
            markersize=5,
            label=f"{_RUN_NAME[name]}, mean {report['runs'][name]['imbalance_degree']:.2f}",
        )
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.set_title("Imbalance: slowest micro-batch over the mean (1 is perfect)", loc="left")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0.95)
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend(frameon=False)


def _draw_losses(axes: Any, runs: dict[str, TrainedRun]) -> None:
    for name, run in runs.items():
        points = run.losses()
        axes.plot(
            [tokens / 1e3 for tokens, _ in points],
            [loss for _, loss in points],
            color=_RUN_COLOUR[name],
            marker=_RUN_MARKER[name],
            markersize=5,
            label=_RUN_NAME[name],
        )
    axes.set_title("Loss: the same documents, in another order", loc="left")
    axes.set_xlabel("thousand tokens trained")
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend(frameon=False)


def _rank_name(step: MeasuredStep, i: int) -> str:
    rank = step.ranks[i]
    return f"rank {rank.rank}\n{''.join(_places(step, i))}"


def _places(step: MeasuredStep, i: int) -> Iterator[str]:
    """In what the rank differs from others."""
    rank = step.ranks[i]
    if step.num_stages > 1:
        yield f"stage {rank.pp_rank + 1}"
    if len({r.dp_rank for r in step.ranks}) > 1:
        yield f"{', ' if step.num_stages > 1 else ''}replica {rank.dp_rank + 1}"
