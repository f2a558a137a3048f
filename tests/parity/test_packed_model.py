"""A packed micro-batch through a real GPT equals its documents one by one through Megatron's stock path."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import tiny_gpt
from tests.harness.processes import run_ranks

BOUNDS = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    results: dict[str, Any] = run_ranks(tiny_gpt.measure, 1)[0]
    return results


@pytest.mark.parametrize("pad_to", tiny_gpt.PAD_TO)
@pytest.mark.parametrize("dtype", tiny_gpt.DTYPES)
@pytest.mark.parametrize("shape", tiny_gpt.SHAPES)
def test_logits_and_gradients_equal_the_documents_one_by_one(
    shape: str, dtype: str, pad_to: int, measured: dict[str, Any]
) -> None:
    errors = measured["equal"][shape, dtype, pad_to]
    assert set(errors) == {"logits", "gradients", "worst_parameter", "loss"}
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.parametrize("shape", tiny_gpt.SHAPES)
def test_bfloat16_errs_at_most_twice_as_much_as_megatron_in_bfloat16(shape: str, measured: dict[str, Any]) -> None:
    ratios = measured["bfloat16"][shape]
    assert 0 < ratios["logits"] <= 2
    assert 0 < ratios["gradients"] <= 2


@pytest.mark.parametrize("shape", tiny_gpt.SHAPES)
def test_padding_changes_nothing(shape: str, measured: dict[str, Any]) -> None:
    padding = measured["padding"][shape]
    assert padding["padding_tokens"] == -sum(tiny_gpt.LENGTHS) % 48 > 0
    assert padding["num_tokens"] == padding["num_tokens_bare"] == sum(tiny_gpt.LENGTHS)
    assert padding["loss_change"] <= 1e-6  # Megatron's cross entropy is float32


@pytest.mark.parametrize("shape", tiny_gpt.SHAPES)
def test_nan_in_padding_does_not_reach_the_loss(shape: str, measured: dict[str, Any]) -> None:
    padding = measured["padding"][shape]
    assert padding["nan_losses_of_padding"] == padding["padding_tokens"]
    assert padding["nan_losses_of_documents"] == 0
    assert padding["poisoned_loss_change"] <= 1e-12


@pytest.mark.parametrize("dtype", tiny_gpt.DTYPES)
@pytest.mark.parametrize("shape", tiny_gpt.SHAPES)
def test_another_document_0_moves_no_bit_of_the_others(shape: str, dtype: str, measured: dict[str, Any]) -> None:
    assert measured["independent"][shape][dtype] == [False] + [True] * (len(tiny_gpt.LENGTHS) - 1)


@pytest.mark.parametrize("case", tiny_gpt.LENGTHS_OF_TABLE)
def test_rotation_is_right_when_the_rope_table_is_as_long_as_the_pack(case: str, measured: dict[str, Any]) -> None:
    """Upstream then takes the table for one row per packed token, and rotates by positions in the pack.

    Attention sees differences of positions only, so at context parallelism 1 its result moves by no more than the
    rounding of float32 angles: the control is the rotation itself.
    """
    table = measured["table"][case]
    assert table["pack_tokens"] == table["table_tokens"] == tiny_gpt.TABLE_LENGTH
    assert table["patched_rotation"] <= 1e-15
    assert table["unpatched_rotation"] > 1e-1
    assert table["patched"] <= 1e-10 < table["unpatched"] < 1e-6


def test_the_comparison_sees_wrong_positions(measured: dict[str, Any]) -> None:
    assert all(table["backwards"] > 1e-2 for table in measured["table"].values())


def test_labels_come_from_the_document_also_where_it_was_cut(measured: dict[str, Any]) -> None:
    """The last position of a piece is taught the token that follows it in the stored sequence."""
    cut = measured["cut"]
    assert cut["labels"] == [*range(12, 19), *range(41, 46), *range(2, 12), 0, 0]
    assert cut["error"] <= 1e-10
    assert cut["loss_change"] <= 1e-10
    assert cut["rolled_loss_change"] > 1e-2


def test_the_comparison_sees_merged_documents(measured: dict[str, Any]) -> None:
    assert measured["merged"] > 1e-2
