"""Runs that trained the same documents, one plain and one or more balanced, side by side: the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb.errors import ConfigError, DataError
from wlb.report.prediction import StepModel, fit_steps
from wlb.report.run import WARM_UP_STEPS, TrainedRun

CORPUS_FIELDS = ("documents", "tokens", "p50", "p99", "max")

BASE = "plain"
_DELAY_TOLERANCE = 0.02
"""Name of the run that the others are compared with."""


def fit_first_half(run: TrainedRun) -> StepModel:
    """Costs from the first half of a run, warm-up left out: what comes after it is predicted, not fitted.

    The micro-batches of a plain run all have the window's length, so its fit takes a micro-batch's fixed time for
    time per token. It predicts runs of equally many micro-batches; others want costs from a run whose sizes vary.
    """
    last = WARM_UP_STEPS + max(1, (len(run.steps) - WARM_UP_STEPS) // 2)
    return fit_range(run, range(WARM_UP_STEPS, last))


def fit_range(run: TrainedRun, steps: range) -> StepModel:
    """Costs from the steps of a run at these places."""
    return fit_runs([run], steps)


def fit_runs(runs: Sequence[TrainedRun], steps: range) -> StepModel:
    """Costs from the steps at these places of several runs of one layout.

    With context parallelism the runs should differ in how they divide micro-batches, or nothing tells what that costs.
    """
    chosen = [(run, i) for run in runs for i in steps]
    return fit_steps(
        [run.steps[i] for run, i in chosen],
        [run.log.steps[i].elapsed_s for run, i in chosen],
        [run.division for run, _ in chosen],
    )


def compare(
    plain: TrainedRun,
    balanced: Mapping[str, TrainedRun],
    model: StepModel,
    *,
    corpus: Mapping[str, Any],
    fitted_on: str,
) -> dict[str, Any]:
    """The report.

    balanced: the runs to compare with the plain one, by name; the last is the headline.
    model: what predicts; fitted_on says in words on which data it was fitted.
    corpus: the corpus's manifest.

    Raises:
        ConfigError: no balanced run, or one is named "plain".
        DataError: the runs did not train the same pieces of documents (as many tokens, where documents may be delayed),
            or the manifest lacks a field.
    """
    if not balanced or BASE in balanced:
        raise ConfigError(f"balanced must hold at least one run and none named {BASE!r}, got {list(balanced)}")
    for name, run in balanced.items():
        require_comparable(plain, run, name)
    missing = [name for name in CORPUS_FIELDS if name not in corpus]
    if missing:
        raise DataError(f"the corpus manifest must have the field {missing[0]!r}")
    headline = list(balanced)[-1]
    runs = {name: run.summary(model) for name, run in {BASE: plain, **balanced}.items()}
    flops = {name: sum(run.step_flops) for name, run in {BASE: plain, **balanced}.items()}
    speedups = {name: _speedups(runs[BASE], runs[name], flops[BASE], flops[name]) for name in balanced}
    window = plain.window_tokens
    return {
        "corpus": {name: corpus[name] for name in CORPUS_FIELDS},
        "window": window,
        "crossover_over_window": model.crossover_tokens / window,
        "runs": runs,
        **speedups[headline],
        "headline": headline,
        "speedups": speedups,
        "exactness": {name: exactness(plain, run) for name, run in balanced.items()},
        "crossover_by_operations_over_window": plain.shape.crossover_tokens / window,
        "overhead_tokens": model.overhead_tokens,
        "warm_up_steps": WARM_UP_STEPS,
        "predicted_from": fitted_on,
        "cost": model.to_json(),
    }


def _speedups(plain: dict[str, Any], run: dict[str, Any], plain_flops: float, flops: float) -> dict[str, float]:
    predicted = plain["predicted_s"] / run["predicted_s"]
    return {
        "speedup": run["tokens_per_s"] / plain["tokens_per_s"],
        "speedup_work": run["packed_flops_per_s"] / plain["packed_flops_per_s"],
        "predicted_speedup": predicted * run["tokens"] / plain["tokens"],
        "predicted_speedup_work": predicted * flops / plain_flops,
    }


def require_comparable(plain: TrainedRun, run: TrainedRun, name: str) -> None:
    """Raise DataError unless both runs trained pieces of the same lengths, whatever the order.

    Delay under a budget cuts elsewhere, at the latest where the last step is cut to measure: of such a run only the
    tokens must be as many, within the tolerance of its budget. Attention's work then differs, and the speedup per
    operation tells from that per token.
    """
    pieces = [sum(_pieces(r), Counter[int]()) for r in (plain, run)]
    counts = [p.total() for p in pieces]
    tokens = [sum(length * n for length, n in p.items()) for p in pieces]
    if run.log.arguments.get("wlb_max_delay_steps", "0") not in ("0", "None"):
        if abs(tokens[1] - tokens[0]) > _DELAY_TOLERANCE * tokens[0]:
            raise DataError(
                f"runs plain and {name} must train as many tokens within {_DELAY_TOLERANCE:.0%} (same seed, "
                f"same steps), got {tokens[0]} and {tokens[1]}"
            )
    elif pieces[0] != pieces[1]:
        raise DataError(
            f"runs plain and {name} must train the same pieces of documents (same seed, same steps, "
            f"--wlb-document-cut stream), got {counts[0]} pieces of {tokens[0]} tokens and {counts[1]} of {tokens[1]}"
        )


def exactness(plain: TrainedRun, run: TrainedRun) -> dict[str, Any]:
    """Whether each step of both runs trained the same pieces, and if so how far their losses are apart.

    max_loss_difference: largest |loss / plain's loss - 1| of a step, where both printed one; None if steps differ.
    Equal gradients but for rounding leave equal losses but for rounding, which grows slowly from step to step.
    """
    same = _pieces(plain) == _pieces(run)
    pairs = [(a.loss, b.loss) for a, b in zip(plain.log.steps, run.log.steps, strict=False)]
    differences = [abs(loss / base - 1) for base, loss in pairs if base and loss is not None]
    return {
        "same_pieces_in_every_step": same,
        "max_loss_difference": max(differences) if same and differences else None,
    }


def _pieces(run: TrainedRun) -> list[Counter[int]]:
    """Lengths of the pieces of each step."""
    return [Counter(n for m in s.plan.micro_batches for n in m.lengths) for s in run.steps]


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
