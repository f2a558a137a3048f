"""The report as text for a terminal: a column for each run, and what the balanced runs gain over the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wlb.report.comparison import BASE

STEADY_DEVIATION = 0.1  # passes on an idle machine deviate from their fitted cost by 0.03 to 0.06 on average
EQUAL_LOSSES = 1e-3  # relative; rounding in float32 stays far below it over a run of some dozen steps

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("steps", "steps", ",d"),
    ("documents", "documents, pieces counted", ",d"),
    ("tokens", "tokens", ",d"),
    ("micro_batches", "micro-batches", ",d"),
    ("max_micro_batch_tokens", "largest micro-batch, tokens", ",d"),
    ("tokens_per_s", "tokens a second", ",.0f"),
    ("packed_flops_per_s", "operations a second", ".3g"),
    ("step_s_median", "median step, seconds", ".2f"),
    ("waiting_share_of_ranks", "share of time that ranks wait", ".1%"),
    ("imbalance_degree", "imbalance of micro-batches", ".3f"),
    ("first_loss", "first loss", ".3f"),
    ("final_loss", "final loss", ".3f"),
    ("mean_delay_steps", "mean delay of a token, steps", ".2f"),
    ("waiting_tokens", "tokens left waiting at the end", ",d"),
)


def table(report: dict[str, Any]) -> str:
    """What `compare` found."""
    corpus = report["corpus"]
    return "\n".join(
        [
            f"corpus: {corpus['documents']:,} documents, {corpus['tokens']:,} tokens; tokens of a document: "
            f"p50 {corpus['p50']:,}, p99 {corpus['p99']:,}, max {corpus['max']:,}",
            f"window: {report['window']:,} tokens; attention takes as long as all else at "
            f"{report['crossover_over_window']:.2f} windows (measured), "
            f"{report['crossover_by_operations_over_window']:.2f} (by operations); "
            f"a micro-batch's fixed time is that of {report['overhead_tokens']:,.0f} tokens",
            "",
            *_columns(report["runs"]),
            "",
            *_ratios(report["speedups"]),
            f"(predicted with costs fitted on {report['predicted_from']})",
            *_exactness(report["exactness"]),
            *_free_counts(report["runs"]),
            *_busy_machine(report["runs"]),
        ]
    )


def _columns(runs: dict[str, Any]) -> Iterator[str]:
    rows = [["", *runs], *([title, *(format(r[field], spec) for r in runs.values())] for field, title, spec in _ROWS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, (title, *cells) in enumerate(rows):
        cells = [cell.rjust(max(10, width)) for cell, width in zip(cells, widths[1:], strict=True)]
        line = "   ".join([title.ljust(widths[0]), *cells])
        yield line
        if i == 0:
            yield "-" * len(line)


def _ratios(speedups: dict[str, dict[str, float]]) -> Iterator[str]:
    width = max(map(len, speedups))
    for name, s in speedups.items():
        yield (
            f"{name:<{width}} over plain: per token {s['speedup']:.3f} x measured, "
            f"{s['predicted_speedup']:.3f} x predicted; per operation {s['speedup_work']:.3f} x measured, "
            f"{s['predicted_speedup_work']:.3f} x predicted"
        )


def _exactness(exactness: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, found in exactness.items():
        difference = found["max_loss_difference"]
        if difference is None:
            continue
        text = f"{name} trained plain's very pieces in every step: "
        if difference == 0:
            yield text + "losses are plain's to the last digit that is printed"
        elif difference <= EQUAL_LOSSES:
            yield text + f"losses are plain's to within {difference:.1e} of them"
        else:
            yield f"NOTE: {text}losses should be plain's, but differ by up to {difference:.1e} of them"


def _free_counts(runs: dict[str, Any]) -> Iterator[str]:
    """A sentence for each run whose imbalance cannot be set beside plain's."""
    count = runs[BASE]["micro_batches"]
    for name, run in runs.items():
        if run["micro_batches"] != count:
            yield (
                f"{name} chose {run['micro_batches']:,} micro-batches where plain has {count:,}, and may well make "
                "them uneven: its imbalance is no loss of time, the share that ranks wait is"
            )


def _busy_machine(runs: dict[str, Any]) -> list[str]:
    """A sentence if equal passes took unequal time: then other programs had part of the machine."""
    deviation = max(run["pass_deviation"] for run in runs.values())
    if deviation <= STEADY_DEVIATION:
        return []
    return [
        f"NOTE: passes took {deviation:.0%} more or less than their cost, where an idle machine stays below "
        f"{STEADY_DEVIATION:.0%}:",
        "other programs were running, and the measured ratios say little. Run again when the machine is idle.",
    ]
