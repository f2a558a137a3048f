"""Compares runs of the convergence benchmark: see benchmarks/convergence.py for what is compared and how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import DataError
from wlb.report.comparison import BASE
from wlb.report.convergence_measures import (
    Buckets,
    gradient_noise,
    loss_curve,
    mean_loss,
    mean_loss_difference,
    spread,
    token_weights,
)
from wlb.report.convergence_runs import RunFolder

CHECKPOINTS = 20  # of a run: what an interruption costs is at most one twentieth of it
ALL = "all"
_CURVE_POINTS = 40
# Logs print seven digits of a loss; its sums run in another order.
_PROBE_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What was trained where.

    names: of variants, the base among them. lengths: (sequences,) positions of every stored sequence.
    first_heldout: sequences from here on are not trained.
    """

    folder: Path
    names: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    window_tokens: int
    budget_tokens: int
    noise_steps: int
    lengths: NDArray[np.int64]
    first_heldout: int

    def run(self, name: str, seed: int) -> RunFolder:
        return RunFolder(path=self.folder / f"{name}_seed{seed}")

    @property
    def buckets(self) -> Buckets:
        return Buckets.of_window(self.window_tokens)

    @property
    def save_interval(self) -> int:
        return self.steps // CHECKPOINTS

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Iterations whose checkpoints are evaluated: quarters of the run, its end among them."""
        return (*(self.save_interval * i for i in range(CHECKPOINTS // 4, CHECKPOINTS, CHECKPOINTS // 4)), self.steps)

    @property
    def differentiated(self) -> tuple[int, ...]:
        """Iterations at whose weights gradients are taken, of the steps that follow."""
        return tuple(i for i in self.evaluated if i + self.noise_steps <= self.steps)

    def complete(self) -> Iterator[tuple[str, int]]:
        """Runs that have been trained to their end, as (name, seed)."""
        for seed in self.seeds:
            for name in self.names:
                if self.run(name, seed).trained_iterations() >= self.steps:
                    yield name, seed

    def missing_tasks(self, name: str, seed: int, *, prefix: str) -> list[dict[str, Any]]:
        """What megatron/wlb/convergence_probe.py has yet to compute of a complete run.

        prefix: of the index. Gradients wait until plain of the same seed is complete, at whose weights they are taken.
        """
        run, base = self.run(name, seed), self.run(BASE, seed)
        tasks: list[dict[str, Any]] = [
            {
                "kind": "heldout",
                "weights": str(run.weights(iteration)),
                "output": str(run.heldout(iteration)),
                "prefix": prefix,
                "first": self.first_heldout,
                "stop": len(self.lengths),
            }
            for iteration in self.evaluated
            if not run.heldout(iteration).is_file()
        ]
        wanted = [i for i in self.differentiated if not run.gradients(i).is_file()]
        if wanted and base.trained_iterations() >= self.steps:
            steps = run.ledger_steps()
            tasks += [
                {
                    "kind": "gradients",
                    "weights": str(base.weights(iteration)),
                    "output": str(run.gradients(iteration)),
                    "prefix": prefix,
                    "steps": [step.tolist() for step in steps[iteration : iteration + self.noise_steps]],
                }
                for iteration in wanted
            ]
        return tasks


def report_of(experiment: Experiment) -> dict[str, Any]:
    """Everything that page and picture show of the runs that are complete.

    Raises:
        DataError: no run of plain is complete, a file is damaged, or the probe does not see what training saw.
    """
    complete = list(experiment.complete())
    if BASE not in (name for name, _ in complete):
        raise DataError(f"run {BASE} must be complete for a report, got {[f'{n}_seed{s}' for n, s in complete]}")
    runs: dict[str, dict[str, Any]] = {}
    for name, seed in complete:
        runs.setdefault(name, {})[str(seed)] = _run_report(experiment, name, seed)
    wanted = [f"{name}_seed{seed}" for seed in experiment.seeds for name in experiment.names]
    return {
        "base": BASE,
        "steps": experiment.steps,
        "window_tokens": experiment.window_tokens,
        "budget_tokens": experiment.budget_tokens,
        "noise_steps": experiment.noise_steps,
        "buckets": experiment.buckets.labels,
        "heldout": _heldout_counts(experiment),
        "incomplete": [run for run in wanted if run not in {f"{name}_seed{seed}" for name, seed in complete}],
        "seed_spread": _seed_spread(runs[BASE], str(experiment.steps)),
        "largest_probe_error": max(_probe_errors(experiment, complete), default=None),
        "runs": runs,
    }


def _run_report(experiment: Experiment, name: str, seed: int) -> dict[str, Any]:
    run = experiment.run(name, seed)
    logged, ledger = run.logged_steps(), run.ledger_steps()
    if not len(logged) == len(ledger) == experiment.steps:
        raise DataError(
            f"run {run.path}: log and ledger must hold {experiment.steps} steps, got {len(logged)} and {len(ledger)}"
        )
    losses = [np.nan if step.loss is None else step.loss for step in logged]
    tokens = [int(step[:, 2].sum()) for step in ledger]
    norms = [step.fields["grad norm"] for step in logged[-experiment.steps // 4 :]]
    (_, last), *_ = loss_curve(
        losses[-experiment.save_interval :], tokens[-experiment.save_interval :], experiment.steps
    )
    return {
        "trained_tokens": sum(tokens),
        "step_tokens": spread(tokens),
        "mean_delay_steps": float(np.mean([step.fields["mean delay (steps)"] for step in logged])),
        "max_delay_steps": max(step.fields["max delay (steps)"] for step in logged),
        "waiting_tokens_at_end": logged[-1].fields["waiting tokens"],
        "last_training_loss": last,
        "loss_curve": loss_curve(losses, tokens, max(1, experiment.steps // _CURVE_POINTS)),
        "gradient_norm_last_quarter": spread(norms),
        "weights": token_weights(ledger, experiment.lengths, experiment.buckets, experiment.budget_tokens),
        "heldout": {
            str(i): _heldout(experiment, name, seed, i) for i in experiment.evaluated if run.heldout(i).is_file()
        },
        "gradient_noise": {
            str(i): asdict(gradient_noise(np.array(stored["inner_products"]), np.array(stored["tokens"])))
            for i in experiment.differentiated
            if (stored := _stored(run.gradients(i)))
        },
    }


def _heldout(experiment: Experiment, name: str, seed: int, iteration: int) -> dict[str, Any]:
    """Per bucket and over all: mean loss, and by how much it exceeds that of plain with the same seed."""
    documents = _documents(experiment.run(name, seed).heldout(iteration))
    base_file = experiment.run(BASE, seed).heldout(iteration)
    base = _documents(base_file) if name != BASE and base_file.is_file() else None
    result: dict[str, Any] = {}
    for label, members in _members(experiment, documents).items():
        result[label] = {"loss": mean_loss(documents[members])}
        if base is not None:
            result[label]["difference"] = asdict(mean_loss_difference(documents[members], base[members]))
    return result


def _members(experiment: Experiment, documents: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Label -> which documents; buckets of fewer than two are left out."""
    numbers = experiment.buckets.numbers(documents[:, 1].astype(np.int64))
    masks = {label: numbers == i for i, label in enumerate(experiment.buckets.labels)}
    return {label: mask for label, mask in masks.items() if mask.sum() > 1} | {ALL: np.ones(len(documents), dtype=bool)}


def _seed_spread(base_runs: dict[str, Any], iteration: str) -> dict[str, float]:
    """Per bucket, the standard deviation of plain's held-out loss over seeds; empty with fewer than two."""
    heldouts = [run["heldout"][iteration] for run in base_runs.values() if iteration in run["heldout"]]
    if len(heldouts) < 2:
        return {}
    return {label: float(np.std([h[label]["loss"] for h in heldouts], ddof=1)) for label in heldouts[0]}


def _heldout_counts(experiment: Experiment) -> dict[str, list[int]]:
    lengths = experiment.lengths[experiment.first_heldout :]
    numbers = experiment.buckets.numbers(lengths)
    count = len(experiment.buckets.labels)
    return {
        "documents": np.bincount(numbers, minlength=count).tolist(),
        "tokens": np.bincount(numbers, weights=lengths, minlength=count).astype(int).tolist(),
    }


def _probe_errors(experiment: Experiment, complete: list[tuple[str, int]]) -> Iterator[float]:
    """Relative difference between the loss that training logged and the probe's of the same step at the same weights.

    Raises:
        DataError: one is larger than rounding explains.
    """
    for name, seed in complete:
        if name != BASE:
            continue
        run = experiment.run(name, seed)
        logged = run.logged_steps()
        for iteration in experiment.differentiated:
            if stored := _stored(run.gradients(iteration)):
                seen, trained = stored["losses"][0], logged[iteration].loss
                error = abs(seen / trained - 1) if trained else float("inf")
                if error > _PROBE_TOLERANCE:
                    raise DataError(
                        f"the probe's loss of step {iteration} of {run.path.name} must be the {trained} that training "
                        f"logged, to {_PROBE_TOLERANCE:.0e}, got {seen}"
                    )
                yield error


def _documents(path: Path) -> NDArray[np.float64]:
    return np.array(_stored(path)["documents"], dtype=np.float64).reshape(-1, 3)


def _stored(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}
