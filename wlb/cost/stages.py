"""Costs of the stages of a pipeline, and the file that hands them to a run.

The file is JSON, as `tools/report.py cost` writes it from a run's time line::

    {"stages": [{"forward": {"square_s": 3.5e-9, "token_s": 6.8e-6, "micro_batch_s": 0.004},
                 "backward": {"square_s": 8.5e-9, "token_s": 1.5e-5, "micro_batch_s": 0.006}},
                ...]}

or a `ProfiledCost` of the whole model, of which equal stages have equal shares. Other keys are not read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.cost.fitted import FittedCost, QuadraticTime
from wlb.cost.model import CostModel, ScaledCost
from wlb.cost.profiled import ProfiledCost
from wlb.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """whole: cost of the model on one rank.

    stretches: of each stretch of layers in the order in which a micro-batch goes forward through them: the pipeline
        stages, or with virtual stages chunk v // num_stages of stage v % num_stages.
    """

    whole: CostModel
    stretches: tuple[CostModel, ...]


def equal_stages(whole: CostModel, num_stages: int, *, num_chunks: int = 1) -> PipelineCosts:
    """Each of `num_chunks` chunks of each stage has an equal share of the model."""
    num_stretches = num_stages * num_chunks
    return PipelineCosts(whole=whole, stretches=(_share(whole, num_stretches),) * num_stretches)


def load_pipeline_costs(path: str | Path, num_stages: int, *, num_chunks: int = 1) -> PipelineCosts:
    """Read a cost file for a pipeline of `num_stages`, each with `num_chunks` model chunks.

    A file of another number of stages still says what the whole model costs, which is then shared equally. What a
    stage costs is shared equally by its chunks.

    Raises:
        DataError: the file is missing, no JSON or incomplete.
        ConfigError: a value in it breaks a rule.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cost file {path} must be readable JSON: {error}") from error
    if not isinstance(content, dict) or "stages" not in content:
        return equal_stages(ProfiledCost.load(Path(path)), num_stages, num_chunks=num_chunks)
    try:
        stages = [_fitted(stage) for stage in content["stages"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"cost file {path} must give forward and backward times of each stage: {error!r}") from error
    except ConfigError as error:
        raise ConfigError(f"cost file {path}: {error}") from error
    if not stages:
        raise DataError(f"cost file {path} must hold at least one stage, got none")
    whole = _sum(stages)
    if len(stages) != num_stages:
        return equal_stages(whole, num_stages, num_chunks=num_chunks)
    return PipelineCosts(whole=whole, stretches=tuple(_share(stage, num_chunks) for stage in stages) * num_chunks)


def stages_to_json(stages: Sequence[FittedCost]) -> list[dict[str, Any]]:
    """The value of `stages` in the file."""
    return [{"forward": _times(s.forward), "backward": _times(s.backward)} for s in stages]


def _share(cost: CostModel, parts: int) -> CostModel:
    return cost if parts == 1 else ScaledCost(whole=cost, share=1 / parts)


def _times(time: QuadraticTime) -> dict[str, float]:
    return {"square_s": time.square_s, "token_s": time.token_s, "micro_batch_s": time.micro_batch_s}


def _fitted(stage: dict[str, Any]) -> FittedCost:
    return FittedCost(forward=QuadraticTime(**stage["forward"]), backward=QuadraticTime(**stage["backward"]))


def _sum(stages: Sequence[FittedCost]) -> FittedCost:
    def total(times: list[QuadraticTime]) -> QuadraticTime:
        return QuadraticTime(
            square_s=sum(t.square_s for t in times),
            token_s=sum(t.token_s for t in times),
            micro_batch_s=sum(t.micro_batch_s for t in times),
        )

    return FittedCost(forward=total([s.forward for s in stages]), backward=total([s.backward for s in stages]))
