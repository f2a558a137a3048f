"""One plan and one batch a micro-batch for all model chunks of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.wlb import batch
from megatron.wlb.batch import PackedSteps

STEPS = [SimpleNamespace(micro_batches=("a", "b", "c"), ledger_line=""), SimpleNamespace(micro_batches=("d",))]


class _Source:
    def __init__(self) -> None:
        self.given = 0

    def next_step(self) -> Any:
        self.given += 1
        return STEPS[self.given - 1]

    def state(self) -> dict[str, Any]:
        return {"given": self.given}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Micro-batches of which a batch was made."""
    names: list[str] = []

    def make_batch(self: PackedSteps, i: int) -> dict[str, Any]:
        names.append(self.current_step().micro_batches[i])
        return {"name": names[-1]}

    monkeypatch.setattr(batch.PackedSteps, "_make_batch", make_batch)
    return names


def _steps(num_chunks: int) -> PackedSteps:
    dims: Any = SimpleNamespace(is_first_stage=True, is_last_stage=False, cp_rank=0)
    return PackedSteps(
        _Source(),  # type: ignore[arg-type]
        dims,
        lambda *_: None,  # type: ignore[arg-type, return-value]
        num_chunks=num_chunks,
        padding_token=0,
        vocab_size=1,
        max_positions=1,
    )


def test_chunks_share_batches(made: list[str]) -> None:
    """Two chunks in groups of two, then a rest of one."""
    steps = _steps(2)
    steps.begin_step()
    first, second = steps.chunk(0), steps.chunk(1)
    order = [first, first, second, second, first, second]
    assert [next(chunk)["name"] for chunk in order] == ["a", "b", "a", "b", "c", "c"]
    assert made == ["a", "b", "c"]
    assert not steps._batches, "nothing is kept of a step that every chunk has run"


def test_one_chunk_keeps_nothing(made: list[str]) -> None:
    steps = _steps(1)
    steps.begin_step()
    assert [next(steps.chunk(0))["name"] for _ in range(3)] == ["a", "b", "c"] == made
    assert not steps._batches


def test_a_step_that_a_chunk_has_not_finished_is_noticed(made: list[str]) -> None:
    steps = _steps(2)
    steps.begin_step()
    for _ in range(3):
        next(steps.chunk(0))
    next(steps.chunk(1))
    with pytest.raises(AssertionError, match=r"never trained: chunks got \[3, 1\] of 3"):
        steps.begin_step()


def test_the_state_is_the_same_from_every_chunk() -> None:
    steps = _steps(2)
    steps.begin_step()
    assert steps.chunk(0).save_state() == steps.chunk(1).save_state() == {"train": {"given": 1}}
