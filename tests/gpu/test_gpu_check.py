"""The GPU check passes on a GPU; rehearsed on the CPU, it passes too and finds what is broken on purpose."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.processes import run_ranks

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: Transformer Engine's and PyTorch's variable-length kernels stay unchecked",
)


def rehearse() -> dict[str, Any]:
    """Outcomes of the CPU checks as they are, with documents merged, and with positions reversed. Runs in a rank."""
    from megatron.wlb import core_attention
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check import attention, sections
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches import rope_thd, te_context_parallel
    from megatron.wlb.patches.registry import applied, replace
    from wlb.sharding.plan import unsharded

    scale = sections.SCALES["cpu"]
    sharded = core_attention.sharded_attention

    def merging(query: Any, key: Any, value: Any, plan: Any, *_args: Any, **kwargs: Any) -> Any:
        first, second, *others = plan.lengths
        merged = unsharded((first + second, *others))
        if plan.cp_size > 1:
            # Of the rank's own rows alone: enough for a plan that is not the one that was given.
            merged = unsharded((plan.rank_tokens,))
        for given in ("plan", "rank", "exchange"):
            kwargs.pop(given, None)
        return sharded(query, key, value, merged, 0, None, **(kwargs | {"comm_type": "all_gather"}))

    @contextmanager
    def broken(name: str) -> Any:
        with ExitStack() as undo:
            if name == "merged":
                for module in (core_attention, attention):
                    replace(undo, module, "sharded_attention", merging)
            if name == "reversed":
                _reverse_positions(undo)
            yield

    outcomes: dict[str, Any] = {}
    with cpu_as_device(), applied([rope_thd.PATCH]), single_process("gloo"):
        for name in ("intact", "merged", "reversed"):
            with broken(name):
                outcomes[name] = {
                    "attention": sections.check_attention(scale.lengths, scale.heads, kernel="auto"),
                    "model": sections.check_model(scale, engine=False),
                }
        outcomes["intact"] |= _further_checks(scale)
        with ExitStack() as undo:
            _wait_in_attention(undo)
            replace(undo, te_context_parallel, "sharded_attention", merging)
            outcomes["broken"] = _further_checks(scale)
        outcomes["refused"] = sections.check_attention(scale.lengths, scale.heads, kernel="torch")
        outcomes["sections"] = [s.name for s in sections.sections("cpu", Path("unused"), scale.training.shape)]
    return outcomes


def _further_checks(scale: Any) -> dict[str, Any]:
    from megatron.wlb.gpu_check.cost import check_cost
    from megatron.wlb.gpu_check.hygiene import check_allocator, check_syncs
    from megatron.wlb.gpu_check.te_route import check_te_route

    shapes = {"model": scale.training.shape}
    return {
        "syncs": check_syncs(scale.hygiene, engine=False),
        "allocator": check_allocator(scale.hygiene, scale.times, 1.0, engine=False),
        "cost": check_cost(scale.cost, scale.times, shapes, 1.0, engine=False),
        "te_route": check_te_route(scale.sharding.lengths, scale.sharding.tile_tokens, scale.sharding.heads),
    }


def _wait_in_attention(undo: ExitStack) -> None:
    """Each exchange looks at a value of what it sends, as an innocent check of it would."""
    from megatron.wlb.patches.registry import replace
    from wlb.attention import all_gather

    original = all_gather.pack_rows

    def looking(key: Any, value: Any, rows: Any, packed: Any) -> None:
        original(key, value, rows, packed)
        assert not packed[:1].isnan().any().item()

    replace(undo, all_gather, "pack_rows", looking)


def _reverse_positions(undo: ExitStack) -> None:
    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace

    original = batch.packed_seq_params

    def reverse(*args: Any, position_ids: Any, **kwargs: Any) -> Any:
        return original(*args, position_ids=position_ids.flip(0), **kwargs)

    replace(undo, batch, "packed_seq_params", reverse)


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    outcomes: dict[str, Any] = run_ranks(rehearse, 1)[0]
    return outcomes


@pytest.mark.parametrize("check", ["attention", "model", "syncs", "allocator", "cost", "te_route"])
def test_passes_on_the_cpu(check: str, rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["intact"][check]
    assert passed, measured
    assert measured


@pytest.mark.parametrize("check", ["attention", "model"])
def test_finds_merged_documents(check: str, rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["merged"][check]
    assert not passed
    assert not any(case["independent"] for case in measured.values())


def test_finds_wrong_positions(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["reversed"]["model"]
    assert not passed
    rope = measured["RoPE, GQA"]
    assert rope["logits"] > 2


def test_finds_attention_that_waits_for_the_device(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["broken"]["syncs"]
    assert not passed
    gathered = measured["CP 4, all_gather"]
    # 4 ranks that gather in both passes, and 2 micro-batches with a new plan.
    assert gathered["known plan"] >= 8
    assert gathered["new plan"] >= 16
    assert measured["CP 1, all_gather"]["known plan"] == 0, "one rank sends nothing"


def test_finds_a_route_that_takes_another_plan(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["broken"]["te_route"]
    assert not passed
    assert measured["layer"] == "a call as Transformer Engine makes it"
    assert rehearsed["intact"]["te_route"][1]["GQA, p2p"]["messages"] > 0


def test_the_cost_profile_is_a_cost_file(rehearsed: dict[str, Any], tmp_path: Path) -> None:
    from wlb.cost import load_pipeline_costs

    profile = rehearsed["intact"]["cost"][1]["model"]["profile"]
    (tmp_path / "cost.json").write_text(json.dumps(profile))
    costs = load_pipeline_costs(tmp_path / "cost.json", 2)
    assert costs.whole.forward_s([256]) > 0
    assert costs.stretches[0].forward_s([256]) == pytest.approx(costs.whole.forward_s([256]) / 2)


def test_a_kernel_that_takes_nothing_has_failed(rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["refused"]
    assert not passed
    assert all("needs a CUDA device" in case["refused"] for case in measured.values())


def test_sections_have_names_of_their_own(rehearsed: dict[str, Any]) -> None:
    names = rehearsed["sections"]
    assert len(set(names)) == len(names) >= 12


@pytest.mark.gpu
@needs_gpu
def test_kernels_and_model_pass_on_the_gpu() -> None:
    from subprocess import run

    root = Path(__file__).resolve().parents[2]
    done = run([root / "scripts" / "gpu_check.sh"], capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
