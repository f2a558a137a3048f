"""The picture of a convergence report: training loss, held-out differences, weights of tokens, gradient noise.

Colours are of the set by Okabe and Ito; runs differ in markers too, seeds in line style.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wlb.report.convergence import ALL

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # of variants, plain first
_MARKERS = ("o", "s", "D", "^", "v", "P")
_LINES = ("-", "--", ":", "-.")  # of seeds
_BAND = "#DDDDDD"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of a report (`wlb.report.convergence.report_of`) to `path` as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = {
        name: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, name in enumerate(report["runs"])
    }
    with plt.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(2, 2, figsize=(14, 9.5), layout="constrained")
        seeds = len(next(iter(report["runs"].values())))
        figure.suptitle(
            f"{report['steps']:,} steps of {report['budget_tokens']:,} tokens, window {report['window_tokens']:,}, "
            f"{seeds} seed{'s' * (seeds > 1)}",
            fontsize=15,
            fontweight="bold",
        )
        _draw_losses(axes[0, 0], report, styles)
        _draw_differences(axes[0, 1], report, styles)
        _draw_weights(axes[1, 0], report, styles)
        _draw_noise(axes[1, 1], report, styles)
        # The renaming that follows needs the format said: the temporary name need not end in .png.
        figure.savefig(path, format="png", dpi=110)
        plt.close(figure)


def _draw_losses(axes: Any, report: dict[str, Any], styles: dict[str, dict[str, str]]) -> None:
    for name, by_seed in report["runs"].items():
        for i, (seed, run) in enumerate(by_seed.items()):
            tokens, losses = zip(*run["loss_curve"], strict=True)
            style = {"color": styles[name]["color"], "linestyle": _LINES[i % len(_LINES)]}
            axes.plot([t / 1e6 for t in tokens], losses, label=f"{name}, seed {seed}", linewidth=1.3, **style)
    axes.set_title("training loss", loc="left")
    axes.set_xlabel("million tokens trained")
    axes.set_ylabel("loss per token")
    axes.legend(frameon=False, fontsize=8)


def _draw_differences(axes: Any, report: dict[str, Any], styles: dict[str, dict[str, str]]) -> None:
    labels = [*report["buckets"], ALL]
    last = str(report["steps"])
    for i, label in enumerate(labels):
        if (floor := report["seed_spread"].get(label)) is not None:
            axes.fill_between(
                [i - 0.45, i + 0.45],
                -floor,
                floor,
                color=_BAND,
                linewidth=0,
                label="plain, sd over seeds" if i == 0 else None,
            )
    shown = [
        (name, seed, run["heldout"][last])
        for name, by_seed in report["runs"].items()
        if name != report["base"]
        for seed, run in by_seed.items()
        if last in run["heldout"]
    ]
    for j, (name, seed, heldout) in enumerate(shown):
        points = [
            (i, heldout[label]["difference"])
            for i, label in enumerate(labels)
            if "difference" in heldout.get(label, {})
        ]
        if points:
            axes.errorbar(
                [i + _offset(j, len(shown)) for i, _ in points],
                [d["value"] for _, d in points],
                [d["standard_error"] for _, d in points],
                linestyle="none",
                markersize=5,
                fillstyle="full" if seed == next(iter(report["runs"][name])) else "none",
                label=f"{name}, seed {seed}",
                **styles[name],
            )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels, rotation=20)
    axes.set_title(f"held-out loss at the end, less that of {report['base']} with the same seed", loc="left")
    axes.set_xlabel("document length, tokens")
    axes.set_ylabel("loss per token (lower is better)")
    if shown:
        axes.legend(frameon=False, fontsize=8)


def _draw_weights(axes: Any, report: dict[str, Any], styles: dict[str, dict[str, str]]) -> None:
    runs = report["runs"]
    for j, (name, by_seed) in enumerate(runs.items()):
        weights = next(iter(by_seed.values()))["weights"]
        points = [(i, w) for i, w in enumerate(weights) if w is not None]
        axes.errorbar(
            [i + _offset(j, len(runs)) for i, _ in points],
            [w["mean"] for _, w in points],
            [w["standard_deviation"] for _, w in points],
            linestyle="none",
            markersize=5,
            label=name,
            **styles[name],
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(report["buckets"])), report["buckets"], rotation=20)
    axes.set_title("weight of a trained token in its step's loss (bars: sd over tokens)", loc="left")
    axes.set_xlabel("document length, tokens")
    axes.set_ylabel("token budget / tokens of the step")
    axes.legend(frameon=False, fontsize=8)


def _draw_noise(axes: Any, report: dict[str, Any], styles: dict[str, dict[str, str]]) -> None:
    shown = [
        (name, seed, run["gradient_noise"])
        for name, by_seed in report["runs"].items()
        for seed, run in by_seed.items()
        if run["gradient_noise"]
    ]
    step = report["steps"] / 60
    for j, (name, seed, noise) in enumerate(shown):
        ratios = [n["noise_over_signal"] for n in noise.values()]
        axes.errorbar(
            [int(i) + step * (j - (len(shown) - 1) / 2) for i in noise],
            [r["value"] for r in ratios],
            [r["standard_error"] for r in ratios],
            linestyle="none",
            markersize=5,
            fillstyle="full" if seed == next(iter(report["runs"][name])) else "none",
            label=f"{name}, seed {seed}",
            **styles[name],
        )
    axes.set_title(f"gradient noise of {report['noise_steps']} steps, at the weights of {report['base']}", loc="left")
    axes.set_xlabel("weights after so many steps")
    axes.set_ylabel("tr(S) / |G|²")
    axes.set_ylim(bottom=0)
    if shown:
        axes.legend(frameon=False, fontsize=8)


def _offset(number: int, count: int) -> float:
    """Places side by side within a bucket's width."""
    return 0.7 * ((number + 0.5) / count - 0.5)
