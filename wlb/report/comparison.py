"""Two runs that trained the same documents, plain and balanced, side by side: the report and its table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from wlb.errors import DataError
from wlb.report.prediction import StepModel, fit_steps
from wlb.report.run import WARM_UP_STEPS, TrainedRun

CORPUS_FIELDS = ("documents", "tokens", "p50", "p99", "max")

STEADY_DEVIATION = 0.1  # passes on an idle machine deviate from their fitted cost by 0.03 to 0.06 on average

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("steps", "steps", ",d"),
    ("documents", "documents, pieces counted", ",d"),
    ("tokens", "tokens", ",d"),
    ("tokens_per_s", "tokens a second", ",.0f"),
    ("packed_flops_per_s", "operations a second", ".3g"),
    ("step_s_median", "median step, seconds", ".2f"),
    ("imbalance_degree", "imbalance of micro-batches", ".3f"),
    ("waiting_share_of_ranks", "share of time that ranks wait", ".1%"),
    ("first_loss", "first loss", ".3f"),
    ("final_loss", "final loss", ".3f"),
    ("mean_delay_steps", "mean delay of a token, steps", ".2f"),
    ("waiting_tokens", "tokens left waiting at the end", ",d"),
    ("max_micro_batch_tokens", "largest micro-batch, tokens", ",d"),
)


def fit_first_half(run: TrainedRun) -> StepModel:
    """Costs from the first half of a run, warm-up left out: what comes after it is predicted, not fitted."""
    last = WARM_UP_STEPS + max(1, (len(run.steps) - WARM_UP_STEPS) // 2)
    return fit_range(run, range(WARM_UP_STEPS, last))


def fit_range(run: TrainedRun, steps: range) -> StepModel:
    """Costs from the steps of a run at these places."""
    return fit_steps([run.steps[i] for i in steps], [run.log.steps[i].elapsed_s for i in steps])


def compare(
    plain: TrainedRun, balanced: TrainedRun, model: StepModel, *, corpus: dict[str, Any], fitted_on: str
) -> dict[str, Any]:
    """The report.

    model: what predicts; fitted_on says in words on which data it was fitted.
    corpus: the corpus's manifest.

    Raises DataError if the runs did not train the same pieces of documents, or if the manifest lacks a field.
    """
    require_same_pieces(plain, balanced)
    missing = [name for name in CORPUS_FIELDS if name not in corpus]
    if missing:
        raise DataError(f"the corpus manifest must have the field {missing[0]!r}")
    runs = {"plain": plain.summary(model), "wlb": balanced.summary(model)}
    predicted_s = {name: run["predicted_s"] for name, run in runs.items()}
    window = plain.window_tokens
    return {
        "corpus": {name: corpus[name] for name in CORPUS_FIELDS},
        "window": window,
        "crossover_over_window": model.crossover_tokens / window,
        "runs": runs,
        "speedup": runs["wlb"]["tokens_per_s"] / runs["plain"]["tokens_per_s"],
        "speedup_work": runs["wlb"]["packed_flops_per_s"] / runs["plain"]["packed_flops_per_s"],
        "predicted_speedup": _rate(balanced.tokens, predicted_s["wlb"], plain.tokens, predicted_s["plain"]),
        "predicted_speedup_work": _rate(
            sum(balanced.step_flops), predicted_s["wlb"], sum(plain.step_flops), predicted_s["plain"]
        ),
        "crossover_by_operations_over_window": plain.shape.crossover_tokens / window,
        "warm_up_steps": WARM_UP_STEPS,
        "predicted_from": fitted_on,
        "cost": model.to_json(),
    }


def require_same_pieces(plain: TrainedRun, balanced: TrainedRun) -> None:
    """Raise DataError unless both runs trained pieces of the same lengths, whatever the order."""
    pieces = [
        Counter(d.length for s in run.steps for m in s.plan.micro_batches for d in m.documents)
        for run in (plain, balanced)
    ]
    if pieces[0] != pieces[1]:
        counts = [sum(p.values()) for p in pieces]
        tokens = [sum(length * n for length, n in p.items()) for p in pieces]
        raise DataError(
            "both runs must train the same pieces of documents (same seed, same steps, --wlb-document-cut stream), "
            f"got {counts[0]} pieces of {tokens[0]} tokens and {counts[1]} of {tokens[1]}"
        )


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    plain, balanced = report["runs"]["plain"], report["runs"]["wlb"]
    rows = [("", "plain", "wlb")]
    rows += [(title, format(plain[field], spec), format(balanced[field], spec)) for field, title, spec in _ROWS]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{widths[0]}}   {b:>{widths[1]}}   {c:>{widths[2]}}" for a, b, c in rows]
    lines.insert(1, "-" * len(lines[0]))
    corpus = report["corpus"]
    return "\n".join(
        [
            f"corpus: {corpus['documents']:,} documents, {corpus['tokens']:,} tokens; tokens of a document: "
            f"p50 {corpus['p50']:,}, p99 {corpus['p99']:,}, max {corpus['max']:,}",
            f"window: {report['window']:,} tokens; attention takes as long as all else at "
            f"{report['crossover_over_window']:.2f} windows (measured), "
            f"{report['crossover_by_operations_over_window']:.2f} (by operations)",
            "",
            *lines,
            "",
            f"wlb over plain, per token:     {report['speedup']:.3f} x measured, "
            f"{report['predicted_speedup']:.3f} x predicted",
            f"wlb over plain, per operation: {report['speedup_work']:.3f} x measured, "
            f"{report['predicted_speedup_work']:.3f} x predicted",
            f"(predicted with costs fitted on {report['predicted_from']})",
            *_busy_machine(plain, balanced),
        ]
    )


def _busy_machine(plain: dict[str, Any], balanced: dict[str, Any]) -> list[str]:
    """A sentence if equal passes took unequal time: then other programs had part of the machine."""
    deviation = max(plain["pass_deviation"], balanced["pass_deviation"])
    if deviation <= STEADY_DEVIATION:
        return []
    return [
        f"NOTE: passes took {deviation:.0%} more or less than their cost, where an idle machine stays below "
        f"{STEADY_DEVIATION:.0%}:",
        "other programs were running, and the measured ratios say little. Run again when the machine is idle.",
    ]


def load_manifest(path: Path) -> dict[str, Any]:
    """A corpus's manifest. Raises DataError if it cannot be read or is no JSON object."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"corpus manifest {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"corpus manifest {path}: must be JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise DataError(f"corpus manifest {path}: must be a JSON object, got {type(manifest).__name__}")
    return manifest


def _rate(amount: float, seconds: float, base_amount: float, base_seconds: float) -> float:
    return (amount / seconds) / (base_amount / base_seconds)
