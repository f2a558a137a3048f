"""The cost file of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wlb.cost import CrossoverCost
from wlb.cost.fitted import FittedCost, QuadraticTime
from wlb.cost.stages import equal_stages, load_pipeline_costs, stages_to_json
from wlb.errors import ConfigError, DataError

FIRST = FittedCost(
    forward=QuadraticTime(square_s=1.0, token_s=2.0, micro_batch_s=3.0),
    backward=QuadraticTime(square_s=4.0, token_s=5.0, micro_batch_s=6.0),
)
SECOND = FittedCost(
    forward=QuadraticTime(square_s=10.0, token_s=20.0, micro_batch_s=30.0),
    backward=QuadraticTime(square_s=40.0, token_s=50.0, micro_batch_s=60.0),
)


def _write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_stages_come_back_and_add_up(tmp_path: Path) -> None:
    path = _write(tmp_path / "cost.json", {"stages": stages_to_json([FIRST, SECOND]), "crossover_tokens": 2})
    costs = load_pipeline_costs(path, 2)
    assert costs.stretches == (FIRST, SECOND)
    assert costs.whole.forward_s([1]) == 66.0  # 11 + 22 + 33
    assert costs.whole.backward_s([2]) == 352.0  # 4 * 44 + 2 * 55 + 66


def test_chunks_of_a_stage_share_it_equally(tmp_path: Path) -> None:
    """Two stages of two chunks: a micro-batch goes through the first chunk of both, then through the second."""
    path = _write(tmp_path / "cost.json", {"stages": stages_to_json([FIRST, SECOND])})
    costs = load_pipeline_costs(path, 2, num_chunks=2)
    assert [s.forward_s([1]) for s in costs.stretches] == [3.0, 30.0, 3.0, 30.0]
    assert costs.whole.forward_s([1]) == 66.0
    other = load_pipeline_costs(path, 3, num_chunks=2)
    assert [s.forward_s([1]) for s in other.stretches] == pytest.approx([11.0] * 6)


def test_another_number_of_stages_shares_the_whole(tmp_path: Path) -> None:
    path = _write(tmp_path / "cost.json", {"stages": stages_to_json([FIRST, SECOND])})
    costs = load_pipeline_costs(path, 4)
    assert [s.forward_s([1]) for s in costs.stretches] == [16.5] * 4


def test_a_profile_of_the_whole_model(tmp_path: Path) -> None:
    profile = {"version": 1, "attention": [[4, 8.0]], "linear_token_s": 1.0, "fixed_s": 2.0}
    costs = load_pipeline_costs(_write(tmp_path / "profile.json", profile), 2)
    assert costs.whole.forward_s([4]) == 14.0
    assert costs.stretches[0].forward_s([4]) == 7.0


def test_equal_stages_of_one_is_the_whole() -> None:
    whole = CrossoverCost(crossover_tokens=4)
    assert equal_stages(whole, 1).stretches == (whole,)


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        ({"stages": []}, DataError, "at least one stage, got none"),
        ({"stages": [{"forward": {}}]}, DataError, "must give forward and backward times"),
        ({"stages": [{"forward": {"square_s": 1}, "backward": {}}]}, DataError, "must give forward and backward"),
        ({"attention": []}, DataError, "."),
    ],
)
def test_incomplete_files(content: Any, error: type[Exception], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=sentence):
        load_pipeline_costs(_write(tmp_path / "cost.json", content), 1)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json must be readable JSON"):
        load_pipeline_costs(tmp_path / "gone.json", 1)


def test_negative_time(tmp_path: Path) -> None:
    stage = {
        "forward": {"square_s": -1.0, "token_s": 0.0, "micro_batch_s": 0.0},
        "backward": {"square_s": 0.0, "token_s": 0.0, "micro_batch_s": 0.0},
    }
    with pytest.raises(ConfigError, match=r"cost\.json: square_s must be finite and >= 0, got -1"):
        load_pipeline_costs(_write(tmp_path / "cost.json", {"stages": [stage]}), 1)
