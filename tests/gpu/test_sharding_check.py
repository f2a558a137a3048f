"""The GPU check of sharded attention, rehearsed on the CPU: it passes, and finds what is broken on purpose."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness.processes import run_ranks

pytestmark = pytest.mark.slow  # 20 s of checks that scripts/gpu_check.sh --device cpu runs as they are

CHECKS = ("sharded", "long", "times", "memory")


def rehearse() -> dict[str, Any]:
    """Outcomes by what is broken, then by check. Runs in a rank."""
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check.memory import check_memory
    from megatron.wlb.gpu_check.rank_times import check_rank_times
    from megatron.wlb.gpu_check.sections import SCALES
    from megatron.wlb.gpu_check.sharding import check_long_pack, check_sharding
    from wlb.sharding import ShardCosts

    def outcomes_of(scale: Any) -> dict[str, Any]:
        return {
            "sharded": check_sharding(scale.sharding, kernel="auto"),
            "long": check_long_pack(scale.sharding, ["auto"]),
            "times": check_rank_times(scale.times, ShardCosts(), budget_s=0.0),
            "memory": check_memory(scale.times),
        }

    whole = SCALES["cpu"]
    few_heads = {kind: whole.sharding.heads[kind] for kind in ("MHA", "GQA")}
    few = replace(
        whole,
        sharding=replace(whole.sharding, heads=few_heads, cp_sizes=(4,)),
        times=replace(whole.times, pack_tokens=(512,), cp_sizes=(4,), repeats=1),
    )
    breaks: dict[str, Any] = {
        "merged": _merge_documents,
        "shifted": _shift_sent_rows,
        "lost gradients": _lose_returned_gradients,
        "one row too many": _gather_one_row_too_many,
    }
    with cpu_as_device():
        outcomes: dict[str, Any] = {"nothing": outcomes_of(whole)}
    for name, break_it in breaks.items():
        with cpu_as_device(), ExitStack() as undo:
            break_it(undo)
            outcomes[name] = outcomes_of(few)
    return outcomes


def _merge_documents(undo: ExitStack) -> None:
    """Every sharder takes the first two documents for one."""
    from megatron.wlb.gpu_check import rank_times, sharding
    from megatron.wlb.patches.registry import replace
    from wlb.sharding import SHARDERS

    def merged(shard: Any) -> Any:
        return lambda lengths, cp_size, costs: shard((lengths[0] + lengths[1], *lengths[2:]), cp_size, costs)

    sharders = {name: merged(shard) for name, shard in SHARDERS.items()}
    for module in (rank_times, sharding):
        replace(undo, module, "SHARDERS", sharders)


def _shift_sent_rows(undo: ExitStack) -> None:
    """What a rank sends, and what it gathers of its own, is the row before the one that is wanted."""
    from megatron.wlb.patches.registry import replace
    from wlb.attention import all_gather, ring

    original = all_gather.pack_rows

    def shifted(key: Any, value: Any, rows: Any, packed: Any) -> None:
        original(key.roll(1, 0), value.roll(1, 0), rows, packed)

    for module in (all_gather, ring):
        replace(undo, module, "pack_rows", shifted)


def _lose_returned_gradients(undo: ExitStack) -> None:
    """Gradients of keys and values that other ranks used are not added up."""
    from megatron.wlb.patches.registry import replace
    from wlb.attention import all_gather, ring

    for module in (all_gather, ring):
        replace(undo, module, "add_rows", lambda _grads, _rows, _added: None)


def _gather_one_row_too_many(undo: ExitStack) -> None:
    """The gathered buffer holds its last row twice."""
    from megatron.wlb.patches.registry import replace
    from wlb.attention import all_gather

    original = all_gather._gathered

    def gathered(*args: Any) -> torch.Tensor:
        rows = original(*args)
        return torch.cat((rows, rows[-1:]))

    replace(undo, all_gather, "_gathered", gathered)


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    outcomes: dict[str, Any] = run_ranks(rehearse, 1)[0]
    return outcomes


@pytest.mark.parametrize("check", CHECKS)
def test_passes_as_it_is(check: str, rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["nothing"][check]
    assert passed, measured
    assert len(measured) >= 8


def test_runs_every_kind_of_heads_on_every_number_of_ranks(rehearsed: dict[str, Any]) -> None:
    kinds, sizes = ("MHA", "GQA", "MLA-like", "window"), (1, 2, 4, 8)
    assert set(rehearsed["nothing"]["sharded"][1]) == {f"{kind}, CP {size}" for kind in kinds for size in sizes}


@pytest.mark.parametrize("check", ["sharded", "long", "times"])
@pytest.mark.parametrize("broken", ["merged", "shifted"])
def test_finds_wrong_output(broken: str, check: str, rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed[broken][check]
    assert not passed, measured


def test_says_which_plans_let_documents_see_each_other(rehearsed: dict[str, Any]) -> None:
    _, measured = rehearsed["merged"]["sharded"]
    for name in ("per_sequence", "per_document", "adaptive", "hybrid"):
        for comm_type in ("all_gather", "p2p"):
            assert f"{name}, {comm_type}: documents see each other" in measured["GQA, CP 4"]["failed"]


def test_finds_gradients_alone(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["lost gradients"]["sharded"]
    assert not passed
    failed = measured["MHA, CP 4"]["failed"]
    assert "hybrid, p2p: dk" in failed
    assert "hybrid, all_gather: dv" in failed
    assert ": out" not in failed
    assert not rehearsed["lost gradients"]["long"][0]


def test_finds_a_buffer_that_is_larger_than_planned(rehearsed: dict[str, Any]) -> None:
    assert not rehearsed["one row too many"]["memory"][0]
    assert rehearsed["one row too many"]["times"][0], "the results are right: only the buffer is too large"
