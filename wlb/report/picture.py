"""The picture of a comparison: who worked and who waited, measured and predicted, imbalance and losses.

Colours are of the set by Okabe and Ito, which people with any kind of colour vision tell apart; passes differ in
hatching and runs in markers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wlb.report.comparison import BASE
from wlb.report.lanes import StepLanes, measured_lanes, predicted_lanes
from wlb.report.measured import MeasuredStep
from wlb.report.prediction import StepModel
from wlb.report.run import TrainedRun

_FORWARD, _BACKWARD, _WAIT = "#56B4E9", "#E69F00", "#EDEDED"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000")  # of runs, plain first, then over again
_MARKERS = ("o", "s", "D", "^", "v")
_MOST_TIMELINES = 3
_LABEL_SHARE = 0.016  # of the time axis: narrower bars stay without a number


def draw(
    report: dict[str, Any], plain: TrainedRun, balanced: Mapping[str, TrainedRun], model: StepModel, path: Path
) -> None:
    """Write the picture of `report` to `path` as PNG.

    Imbalance and losses are of all runs; time lines of plain, the headline, and others while there is room.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = {BASE: plain, **balanced}
    styles = {
        name: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, name in enumerate(runs)
    }
    steps = shown_steps(report, runs)
    with plt.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(14, 5.9 + 2.3 * len(steps)), layout="constrained")
        grid = figure.add_gridspec(len(steps) + 1, 2, height_ratios=[*[1] * len(steps), 1.45])
        figure.suptitle(_title(report), fontsize=15, fontweight="bold")
        models = {name: run.modelled(model) for name, run in runs.items()}
        limit_s = _draw_timelines(figure, grid, steps, models, styles)
        for axes in figure.axes:
            axes.set_xlim(0, limit_s)
        _draw_imbalance(figure.add_subplot(grid[len(steps), 0]), report, runs, model, styles)
        _draw_losses(figure.add_subplot(grid[len(steps), 1]), report, runs, styles)
        # The renaming that follows needs the format said: the temporary name need not end in .png.
        figure.savefig(path, format="png", dpi=130)
        plt.close(figure)


def shown_steps(report: dict[str, Any], runs: Mapping[str, TrainedRun]) -> dict[str, MeasuredStep]:
    """The step of each run whose time line is drawn: plain first, the headline last.

    Of a run that trained plain's pieces in every step it is the very step that is shown of plain.
    """
    headline = report["headline"]
    others = [name for name in runs if name not in (BASE, headline)][: _MOST_TIMELINES - 2]
    steps = {BASE: runs[BASE].typical_step()}
    for name in (*others, headline):
        if report["exactness"][name]["same_pieces_in_every_step"]:
            steps[name] = next(s for s in runs[name].steps if s.step == steps[BASE].step)
        else:
            steps[name] = runs[name].typical_step()
    return steps


def _title(report: dict[str, Any]) -> str:
    name = report["headline"]
    plain, balanced = report["runs"][BASE], report["runs"][name]
    layout = f", layout {report['layout']}" if report.get("layout") else ""
    return (
        f"Same {plain['documents']:,} pieces of documents, {plain['tokens']:,} tokens, {plain['steps']} steps{layout}\n"
        f"{name} over plain: {report['speedup']:.2f} x measured, {report['predicted_speedup']:.2f} x predicted   |   "
        f"ranks wait {plain['waiting_share_of_ranks']:.0%} → {balanced['waiting_share_of_ranks']:.0%}   |   "
        f"final loss {plain['final_loss']:.2f} and {balanced['final_loss']:.2f}"
    )


def _draw_timelines(
    figure: Any,
    grid: Any,
    steps: dict[str, MeasuredStep],
    models: Mapping[str, StepModel],
    styles: Mapping[str, dict[str, str]],
) -> float:
    """Two time lines a run, all on one time axis; returns its end."""
    hows = ("measured", "predicted")
    drawn: dict[tuple[str, str], StepLanes] = {}
    for name, step in steps.items():
        drawn[name, "measured"] = measured_lanes(step)
        drawn[name, "predicted"] = predicted_lanes(step, models[name])
    limit_s = 1.02 * max(lanes.end_s for lanes in drawn.values())
    for row, (name, step) in enumerate(steps.items()):
        for column, how in enumerate(hows):
            axes = figure.add_subplot(grid[row, column])
            lanes, tokens = drawn[name, how], step.plan.num_tokens
            _draw_lanes(axes, lanes, limit_s)
            axes.set_title(
                f"{name}, step {step.step + 1}, {how}: {tokens:,} tokens in {lanes.end_s:.2f} s, "
                f"{lanes.end_s * 1e6 / tokens:.0f} ms per 1,000; ranks wait {lanes.waiting_share:.0%}",
                loc="left",
                color=styles[name]["color"],
                fontsize=10,
            )
            if row == len(steps) - 1:
                axes.set_xlabel("seconds from the start of a typical step")
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


def _draw_imbalance(
    axes: Any,
    report: dict[str, Any],
    runs: Mapping[str, TrainedRun],
    model: StepModel,
    styles: Mapping[str, dict[str, str]],
) -> None:
    for name, run in runs.items():
        values = report["runs"][name]
        axes.plot(
            [s.step + 1 for s in run.steps],
            run.imbalance(model),
            markersize=5,
            label=f"{name}, mean {values['imbalance_degree']:.2f}, {values['micro_batches']} micro-batches",
            **styles[name],
        )
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    title = "Imbalance of a step: slowest micro-batch over the mean"
    if len({r["micro_batches"] for r in report["runs"].values()}) > 1:
        title += "\n(where their number is free, uneven ones may be faster)"
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0.95)
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend(frameon=False)


def _draw_losses(
    axes: Any, report: dict[str, Any], runs: Mapping[str, TrainedRun], styles: Mapping[str, dict[str, str]]
) -> None:
    for name, run in runs.items():
        points = run.losses()
        axes.plot(
            [tokens / 1e3 for tokens, _ in points],
            [loss for _, loss in points],
            # Curves that coincide must both be seen: plain's points are rings around the others'.
            markersize=10 if name == BASE else 5,
            fillstyle="none" if name == BASE else "full",
            label=name + _loss_note(report, name),
            **styles[name],
        )
    axes.set_title("Loss: the same documents", loc="left")
    axes.set_xlabel("thousand tokens trained")
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend(frameon=False)


def _loss_note(report: dict[str, Any], name: str) -> str:
    if name == BASE:
        return ""
    found = report["exactness"][name]
    if not found["same_pieces_in_every_step"]:
        return ", in another order"
    difference = found["max_loss_difference"]
    if not difference:
        return ": plain's in every step"
    return f": plain's in every step, losses within {difference:.0e}"
