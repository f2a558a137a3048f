"""The GPU check passes on a GPU; rehearsed on the CPU, it passes too and finds what is broken on purpose."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
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
    from megatron.wlb import core_attention, gpu_check
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied, replace
    from wlb.sharding.plan import unsharded

    scale = gpu_check.SCALES["cpu"]
    packed, sharded = gpu_check.packed_attention, core_attention.sharded_attention

    def merging(query: Any, key: Any, value: Any, segments: Any, **kwargs: Any) -> Any:
        return packed(query, key, value, (0, *segments[2:]), **kwargs)

    def merging_plan(query: Any, key: Any, value: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        first, second, *others = plan.lengths
        return sharded(query, key, value, unsharded((first + second, *others)), *args, **kwargs)

    @contextmanager
    def broken(name: str) -> Any:
        with ExitStack() as undo:
            if name == "merged":
                replace(undo, core_attention, "sharded_attention", merging_plan)
                replace(undo, gpu_check, "packed_attention", merging)
            if name == "reversed":
                _reverse_positions(undo)
            yield

    outcomes: dict[str, Any] = {}
    with cpu_as_device(), applied([rope_thd.PATCH]), single_process("gloo"):
        for name in ("intact", "merged", "reversed"):
            with broken(name):
                outcomes[name] = {
                    "attention": gpu_check.check_attention(scale, engine=False),
                    "model": gpu_check.check_model(scale, engine=False),
                }
    return outcomes


def _reverse_positions(undo: ExitStack) -> None:
    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace

    original = batch.packed_seq_params

    def reverse(micro_batch: Any, plan: Any, cp_rank: int, *, position_ids: Any, max_positions: int) -> Any:
        return original(micro_batch, plan, cp_rank, position_ids=position_ids.flip(0), max_positions=max_positions)

    replace(undo, batch, "packed_seq_params", reverse)


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    outcomes: dict[str, Any] = run_ranks(rehearse, 1)[0]
    return outcomes


@pytest.mark.parametrize("check", ["attention", "model"])
def test_passes_on_the_cpu(check: str, rehearsed: dict[str, Any]) -> None:
    passed, measured = rehearsed["intact"][check]
    assert passed, measured
    assert len(measured) >= 2


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


@pytest.mark.gpu
@needs_gpu
def test_kernels_and_model_pass_on_the_gpu() -> None:
    from pathlib import Path
    from subprocess import run

    root = Path(__file__).resolve().parents[2]
    done = run([root / "scripts" / "gpu_check.sh"], capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
