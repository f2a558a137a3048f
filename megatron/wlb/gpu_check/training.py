"""Short training for the GPU check: plain, exact, delay and wlb; losses, and times beside the prediction."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any, Literal

import numpy as np

from megatron.wlb.gpu_check.training_runs import (
    ITERATIONS,
    PACKINGS,
    WARM_UP,
    Run,
    TrainingScale,
    train,
    write_documents,
)
from wlb.cost import ProfiledCost

# By how much the losses of two packings of the same documents may differ, relative, at any of the iterations.
_SAME_DOCUMENTS = {"cuda": 2e-3, "cpu": 1e-5}


def training_rule(device: Literal["cuda", "cpu"]) -> str:
    """What must hold."""
    return (
        f"losses finite and falling by a tenth in {ITERATIONS} steps; plain and exact equal within "
        f"{_SAME_DOCUMENTS[device]:g} at every step; no time decides anything"
    )


def check_training(
    scale: TrainingScale,
    folder: Path,
    device: Literal["cuda", "cpu"],
    profile: ProfiledCost | None,
    budget_s: float,
) -> tuple[bool, dict[str, Any]]:
    """Runs of `ITERATIONS` steps on pieces of the same documents, plain and each of `PACKINGS`.

    profile: of `scale.shape` on this device, which predicts step times; None leaves the prediction out.
    """
    deadline_s = monotonic() + budget_s
    data = write_documents(folder / "documents", scale)
    runs: dict[str, list[Run]] = {name: [] for name in PACKINGS}
    for number in range(scale.rounds):
        names = list(PACKINGS)[:: 1 if number % 2 == 0 else -1]
        for first in range(0, len(names), scale.together):
            some = names[first : first + scale.together]
            if number and monotonic() > deadline_s:
                break
            for name, run in train(scale, folder, data, device, some, number).items():
                runs[name].append(run)
    return judge(runs, profile, device)


def judge(
    runs: dict[str, list[Run]], profile: ProfiledCost | None, device: Literal["cuda", "cpu"]
) -> tuple[bool, dict[str, Any]]:
    """Whether the runs are as they must be, and what they measured."""
    plain = runs["plain"][0]
    same = (*runs["plain"], *runs["exact"])
    apart = max(abs(a / b - 1) for run in same for a, b in zip(plain.losses, run.losses, strict=True))
    outside_s = 0.0 if profile is None else _outside_s(plain, profile)
    plain_token_s = median(run.token_s() for run in runs["plain"])
    measured: dict[str, Any] = {}
    for name, some in runs.items():
        first = some[0]
        measured[name] = {
            "first loss": first.losses[0],
            "final loss": fmean(first.losses[-3:]),
            "tokens": sum(int(s.fields["tokens"]) for s in first.steps),
            "micro-batches": sum(map(len, first.lengths)),
            "imbalance": fmean(s.fields["imbalance micro-batches"] for s in first.steps),
            "max delay (steps)": max(s.fields["max delay (steps)"] for s in first.steps),
            "step ms": 1e3 * median(s.elapsed_s for run in some for s in run.steps[WARM_UP:]),
            "time per token over plain": median(run.token_s() for run in some) / plain_token_s,
            "runs": len(some),
        }
        if profile is not None:
            measured[name]["predicted"] = _predicted(first, profile, outside_s) / _predicted(plain, profile, outside_s)
    measured["plain and exact apart"] = apart
    falls = all(
        len(losses) == ITERATIONS and bool(np.isfinite(losses).all()) and fmean(losses[-3:]) < 0.9 * losses[0]
        for some in runs.values()
        for losses in (run.losses for run in some)
    )
    return falls and apart <= _SAME_DOCUMENTS[device], measured


def _passes_s(run: Run, profile: ProfiledCost) -> list[float]:
    """Predicted seconds of the passes of each step: on one device micro-batches follow each other."""
    return [sum(profile.forward_s(m) + profile.backward_s(m) for m in step) for step in run.lengths]


def _outside_s(plain: Run, profile: ProfiledCost) -> float:
    """Seconds of a step that are in no pass, such as the optimizer's: what is left of plain's."""
    left = [s.elapsed_s - p for s, p in zip(plain.steps, _passes_s(plain, profile), strict=True)]
    return max(0.0, median(left[WARM_UP:]))


def _predicted(run: Run, profile: ProfiledCost, outside_s: float) -> float:
    """As `Run.token_s`."""
    seconds = zip(_passes_s(run, profile), run.steps, strict=True)
    return median([(passes_s + outside_s) / s.fields["tokens"] for passes_s, s in seconds][WARM_UP:])
