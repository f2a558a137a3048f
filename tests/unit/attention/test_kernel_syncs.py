"""No kernel makes the host wait for the device, and a phase's arrays go there in one copy, once for all layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.attention_operators import with_parameters
from tests.harness.engine_operators import ENGINE_PARAMETERS
from tests.harness.fake_cuda import fake_cuda, run_backward
from tests.harness.fake_training import FakeExchange
from tests.harness.flash_operators import FLASH2_PARAMETERS, FLASH3_PARAMETERS
from wlb.attention import sharded, sharded_attention
from wlb.attention.cudnn_kernel import CudnnKernel
from wlb.attention.flash2_kernel import Flash2Kernel
from wlb.attention.flash3_kernel import Flash3Kernel
from wlb.sharding import Sharding

CP_SIZE, RANK, LAYERS = 4, 1, 3


def _flash(kernel: Any, parameters: Any, *, by_task: bool = False) -> Any:
    def forward(a: Any) -> Any:
        q, v = a["q"], a["v"]
        shape = (len(a["cu_seqlens_q"]) - 1, q.shape[1], a["max_seqlen_q"]) if by_task else (q.shape[1], len(q))
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(shape, dtype=torch.float32)
        return (None, None, None, None, out, lse, None, None) if by_task else (out, lse, None, None)

    return kernel(*(with_parameters(*p, f) for p, f in zip(parameters, (forward, lambda _: None), strict=True)))


def _cudnn(*, by_task: bool = False) -> CudnnKernel:
    def forward(a: Any) -> Any:
        q, v = a["q"], a["v"]
        shape = (len(a["cu_seqlens_q"]) - 1, q.shape[1], a["max_seqlen_q"], 1) if by_task else (len(q), q.shape[1], 1)
        return q.new_empty(*q.shape[:2], v.shape[2]), [q.new_empty(shape, dtype=torch.float32), None]

    def backward(a: Any) -> Any:
        return tuple(torch.empty_like(a[name]) for name in "qkv")

    forward_parameters, backward_parameters = ENGINE_PARAMETERS["2.20.2"]
    return CudnnKernel(
        SimpleNamespace(
            fused_attn_fwd=with_parameters(*forward_parameters, forward),
            fused_attn_bwd=with_parameters(*backward_parameters, backward),
            FusedAttnBackend={"F16_arbitrary_seqlen": 1},
        )
    )


KERNELS = {
    "flash3": lambda: _flash(Flash3Kernel, FLASH3_PARAMETERS["3.0"]),
    "flash2": lambda: _flash(Flash2Kernel, FLASH2_PARAMETERS["2.8"]),
    "flash2 before 2.6": lambda: _flash(Flash2Kernel, FLASH2_PARAMETERS["2.5"], by_task=True),
    "cudnn": _cudnn,
    "cudnn before 9.6": lambda: _cudnn(by_task=True),
}


class _Copies(TorchDispatchMode):
    """Counts those from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and result.is_cuda:
            self.count += 1
        return result


def _train(layers: int, comm_type: Any, window: int | None) -> int:
    """Copies to the device in forward and backward of a few layers that are nothing but attention."""
    plan = Sharding(name="per_document", cp_size=CP_SIZE).plan((700, 300, 40, 24, 1000, 40))
    shapes = ((8, 32), (2, 32), (2, 32))
    hidden, key, value = (
        torch.randn(plan.rank_tokens, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    )
    with _Copies() as copies:
        for _ in range(layers):
            exchange = FakeExchange(CP_SIZE, RANK)
            hidden = sharded_attention(
                hidden, key, value, plan, RANK, exchange, comm_type=comm_type, window_tokens=window
            )
        run_backward(hidden)
    return copies.count


@pytest.mark.parametrize(("comm_type", "window"), [("all_gather", None), ("all_gather", 90), ("p2p", None)])
@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_waits(name: str, comm_type: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS[name]()
    monkeypatch.setattr(sharded, "kernel_for", lambda *_, **__: kernel)
    with fake_cuda() as syncs:
        once = _train(1, comm_type, window)
        several = _train(LAYERS, comm_type, window)
    assert not syncs.found
    assert 0 < once == several


@pytest.mark.parametrize("name", ["flash3", "flash2", "cudnn"])
def test_each_phase_is_one_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the exchange, local and remote phase, and the two parts of the local one in the backward pass."""
    kernel = KERNELS[name]()
    monkeypatch.setattr(sharded, "kernel_for", lambda *_, **__: kernel)
    with fake_cuda():
        assert _train(1, "all_gather", None) == 5
