"""Our kernels on emulated operators: they take float64 and run anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness.attention_operators import Calls, torch_operators
from tests.harness.engine_operators import EngineDtypes, engine_operators
from tests.harness.flash_operators import flash2_operators, flash3_operators
from wlb.attention import kernel_rows, sharded
from wlb.attention.cudnn_kernel import CudnnKernel
from wlb.attention.flash2_kernel import Flash2Kernel
from wlb.attention.flash3_kernel import Flash3Kernel
from wlb.attention.torch_kernel import TorchKernel


def _cudnn(release: str, **habits: Any) -> Callable[[Calls], Any]:
    return lambda calls: CudnnKernel(engine_operators(release, calls, **habits), EngineDtypes())


PACKED: dict[str, Callable[[Calls], Any]] = {
    "torch": lambda calls: TorchKernel(*torch_operators(calls)),
    "flash2-2.5": lambda calls: Flash2Kernel(*flash2_operators("2.5", calls)),
    "flash2-2.6": lambda calls: Flash2Kernel(*flash2_operators("2.6", calls)),
    "flash2-2.8": lambda calls: Flash2Kernel(*flash2_operators("2.8", calls)),
}
OFFSET: dict[str, Callable[[Calls], Any]] = {
    "flash3-beta": lambda calls: Flash3Kernel(*flash3_operators("beta", calls)),
    "flash3-3.0": lambda calls: Flash3Kernel(*flash3_operators("3.0", calls)),
    "cudnn-2.9.0": _cudnn("2.9.0"),
    "cudnn-2.13.0-before-9.6": _cudnn("2.13.0", is_lse_by_task=True),
    "cudnn-2.17.1": _cudnn("2.17.1"),
    "cudnn-2.20.2-before-9.6": _cudnn("2.20.2", is_lse_by_task=True),
}
EMULATED = PACKED | OFFSET


def use(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    """For all sharded attention."""
    monkeypatch.setattr(sharded, "kernel_for", lambda *_, **__: kernel)
    monkeypatch.setattr(kernel_rows, "DTYPES", (torch.float64, torch.bfloat16))


def use_emulated(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    """Install one of `EMULATED`; what it will be called with."""
    calls = Calls()
    use(monkeypatch, EMULATED[name](calls))
    return calls
