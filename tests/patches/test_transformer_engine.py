"""Transformer Engine's real attention layers reach our attention with the plan, on two ranks over gloo.

They run where Transformer Engine imports, and no GPU is needed: its Python code runs, its kernels do not. CI does
without it: its PyTorch extension is built from source, which takes 20 minutes. `docs/transformer_engine.md` says how,
and how it is imported without a driver. Then

    LD_LIBRARY_PATH=<folder of the libcuda.so.1 made there> python -m pytest tests/patches/test_transformer_engine.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import transformer_engine as te
from tests.harness.processes import run_ranks
from tests.harness.transformer_engine_cases import LAYERS, NUM_LAYERS, RECOMPUTE, measure

BOUND = 0.015
"""Of errors in bfloat16, the only precision besides float16 that the layers take."""
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """By rank."""
    if reason := te.missing_because():
        pytest.skip(
            f"{reason}; lost: that Transformer Engine's own layers reach our attention with the plan (what its source "
            "says is still checked, and the replacement is called as its source calls it)"
        )
    # CUDA would be used where it is there, and half of this is pretence.
    return run_ranks(measure, te.CP_SIZE, timeout_s=TIMEOUT_S, env={"CUDA_VISIBLE_DEVICES": ""})


def test_every_layer_equals_the_oracle(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert len(outcome["layers"]) == len(te.KERNELS) * len(LAYERS) * len(te.COMM_TYPES) * len(te.PLANS)
        for name, measured in (outcome["layers"] | outcome["windows"]).items():
            assert measured["error"] <= BOUND, name
            assert measured["same bits"] == [True] * 4, name


@pytest.mark.parametrize("kernels", te.KERNELS)
def test_a_layer_may_be_deterministic_by_its_own_switch(kernels: str, outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        measured = outcome["deterministic"][kernels]
        assert measured["asked"] == [True]
        assert measured["error"] <= BOUND
        assert measured["same bits"] == [True] * 4


def test_another_plan_is_far_from_the_oracle(outcomes: list[dict[str, Any]]) -> None:
    """The control, on the rank that holds the end of the merged document."""
    assert max(outcome["another plan"] for outcome in outcomes) > 10 * BOUND


def test_the_replacement_is_handed_the_very_tensor(outcomes: list[dict[str, Any]]) -> None:
    """By a layer that chose its kernel itself; and Transformer Engine's ring is not reached."""
    for outcome in outcomes:
        for name, measured in (outcome["layers"] | outcome["windows"]).items():
            assert measured["same object"] == [True], name
            assert measured["originals"] == 0, name
            assert measured["chosen"], name


@pytest.mark.parametrize("kernels", te.KERNELS)
def test_calls_of_other_layers_reach_the_original(kernels: str, outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["originals"][kernels] == {name: (1, [True], True) for name in ("no plan", "a copy")}


@pytest.mark.parametrize("kernels", te.KERNELS)
def test_a_layer_of_ours_that_lost_its_plan_is_named(kernels: str, outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert sorted(outcome["lost"][kernels]) == ["a copy", "no plan"]
        for said in outcome["lost"][kernels].values():
            assert said.startswith("attention of layer 1: cu_seqlens_q must carry the plan")


def test_transformer_engines_recompute_keeps_the_plan(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["recomputed by transformer engine"] == {"seen": [[True], [True, True]], "same bits": [True] * 4}


@pytest.mark.parametrize("kernels", te.KERNELS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_model_keeps_the_plan(recompute: str, kernels: str, outcomes: list[dict[str, Any]]) -> None:
    """One layer passes keys round, the other gathers: every bit is that of our core attention."""
    num_calls = NUM_LAYERS * (1 if recompute == "stored" else 2)
    for outcome in outcomes:
        measured = outcome["models"][f"{kernels}, {recompute}"]
        assert measured["seen"] == [True] * num_calls
        assert measured["originals"] == 0
        assert measured["gradient"] > 0.1
        assert all(measured["same bits"].values()), measured["same bits"]


def test_what_transformer_engine_refuses_before_us(outcomes: list[dict[str, Any]]) -> None:
    """Why a pack has one longest length, whatever a rank's part of it needs, and layers are built with other words."""
    for outcome in outcomes:
        refused = outcome["refused"]
        assert {refused.pop(f"nothing of {kernels}") for kernels in te.KERNELS} == {""}
        assert len(refused) >= 3
        for name, said in refused.items():
            assert said == "No dot product attention backend is available, 0 calls", name


@pytest.mark.parametrize("kernels", te.KERNELS)
def test_the_gpu_check_takes_the_layers_to_our_attention(kernels: str, outcomes: list[dict[str, Any]]) -> None:
    """Rehearsed here, for the layers are not there in the check's own rehearsal on a CPU."""
    for outcome in outcomes:
        passed, measured = outcome["gpu check"][kernels]
        assert measured["layer"] == "Transformer Engine's"
        assert len(measured) == 1 + 2 * len(te.COMM_TYPES)
        assert passed, measured
