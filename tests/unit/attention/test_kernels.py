"""Which kernel is chosen, and what is said where it cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.harness.attention_operators import Calls, torch_operators
from tests.harness.engine_operators import EngineDtypes, engine_operators
from tests.harness.flash_operators import flash2_operators, flash3_operators
from tests.parity.sharded_cases import HEADS, Heads, inputs, plan_named, run_sharded
from wlb.attention import kernels, sharded_attention
from wlb.attention.cpu_kernel import CpuKernel
from wlb.attention.cudnn_kernel import CudnnKernel
from wlb.attention.flash2_kernel import Flash2Kernel
from wlb.attention.flash3_kernel import Flash3Kernel
from wlb.attention.kernel_rows import parameter_names, unused
from wlb.attention.kernels import KERNELS, available_kernels, kernel_for
from wlb.attention.torch_kernel import TorchKernel
from wlb.errors import ConfigError
from wlb.sharding.plan import unsharded

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Claims a GPU of a capability and packages that are installed."""
    kernels._obstacle.cache_clear()
    kernels._made.cache_clear()

    def claim(capability: tuple[int, int], *installed: str) -> None:
        def maker(name: str) -> Any:
            def make() -> Any:
                if name not in installed:
                    raise ModuleNotFoundError(f"No module named '{name}'")
                kernel = TorchKernel()
                kernel.name = name
                return kernel

            return make

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        for name in KERNELS:
            monkeypatch.setitem(KERNELS, name, maker(name))
        kernels._obstacle.cache_clear()
        kernels._made.cache_clear()

    yield claim
    kernels._obstacle.cache_clear()
    kernels._made.cache_clear()


def _auto(heads: Heads | None = None, window: int | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    if heads is None:
        return kernel_for(CUDA).name  # type: ignore[attr-defined, no-any-return]
    query, value = torch.empty(1, 1, heads.head_size, dtype=dtype), torch.empty(1, 1, heads.value_size, dtype=dtype)
    return kernel_for(CUDA, query=query, value=value, window_tokens=window).name  # type: ignore[attr-defined, no-any-return]


def test_on_a_cpu() -> None:
    assert isinstance(kernel_for(CPU), CpuKernel)
    assert available_kernels(CPU) == dict.fromkeys(
        ("flash3", "cudnn", "flash2", "torch"), "needs a CUDA device, got cpu"
    )
    with pytest.raises(ConfigError, match="can be used on cpu, got flash2, which needs a CUDA device, got cpu"):
        kernel_for(CPU, "flash2")
    with pytest.raises(ConfigError, match="kernel must be one of auto, flash3, cudnn, flash2, torch, got 'fast'"):
        kernel_for(CPU, "fast")
    tensors = [torch.zeros(4, 1, 8) for _ in range(3)]
    with pytest.raises(ConfigError, match="got torch, which needs a CUDA device"):
        sharded_attention(*tensors, unsharded((4,)), 0, None, comm_type="all_gather", kernel="torch")


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), ("flash3", "cudnn", "flash2", "torch"), "flash3"),
        ((10, 0), ("flash3", "cudnn", "flash2", "torch"), "cudnn"),
        ((9, 0), ("cudnn", "flash2", "torch"), "cudnn"),
        ((8, 0), ("flash3", "flash2", "torch"), "flash2"),
        ((9, 0), ("torch",), "torch"),
    ],
)
def test_what_auto_takes(machine: Any, capability: tuple[int, int], installed: tuple[str, ...], chosen: str) -> None:
    machine(capability, *installed)
    assert _auto() == _auto(HEADS["gqa"]) == chosen


def test_auto_passes_by_what_does_not_suit(machine: Any) -> None:
    machine((10, 0), "cudnn", "flash2", "torch")
    latent = Heads(head_size=192, value_size=128)
    assert _auto(HEADS["gqa"]) == "cudnn"
    assert _auto(HEADS["gqa"], window=5) == "flash2"
    assert _auto(latent) == "flash2"
    assert kernel_for(CUDA, "cudnn").name == "cudnn"  # type: ignore[attr-defined]
    assert _auto(HEADS["gqa"], dtype=torch.float32) == "torch", "which then says what it does not take"


def test_why_a_kernel_cannot_be_used(machine: Any) -> None:
    machine((10, 0), "torch")
    assert available_kernels(CUDA) == {
        "flash3": "needs compute capability 9.0, got 10.0",
        "cudnn": "cannot be imported: No module named 'cudnn'",
        "flash2": "cannot be imported: No module named 'flash2'",
        "torch": "",
    }
    with pytest.raises(ConfigError, match=r"got cudnn, which cannot be imported: No module named 'cudnn'"):
        kernel_for(CUDA, "cudnn")
    machine((7, 5), "torch")
    with pytest.raises(ConfigError, match=r"got auto, and none can: flash3 needs compute capability 8\.0 or later"):
        kernel_for(CUDA)


def test_a_package_of_which_a_library_is_missing(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((9, 0), "torch")

    def broken() -> Any:
        raise OSError("libcudnn.so: cannot open shared object file")

    monkeypatch.setitem(KERNELS, "cudnn", broken)
    kernels._obstacle.cache_clear()
    assert "libcudnn.so" in available_kernels(CUDA)["cudnn"]


def test_the_packages_that_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names under which they are installed."""
    forward, backward = flash2_operators("2.8", Calls())
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    assert Flash2Kernel()._forward is forward
    for module in ("flash_attn_interface", "flash_attn_3.flash_attn_interface"):
        for name in ("flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        interface = ModuleType(module)
        forward, backward = flash3_operators("3.0", Calls())
        interface._flash_attn_forward, interface._flash_attn_backward = forward, backward  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn_3", ModuleType("flash_attn_3"))
        monkeypatch.setitem(sys.modules, module, interface)
        assert KERNELS["flash3"]()._forward is forward  # type: ignore[attr-defined]


def _of_another_release(q: Any, k: Any, v: Any, softmax_scale: Any, causal: bool) -> None:
    """As flash-attn had it before variable lengths came into the same function."""


@pytest.mark.parametrize("name", ["flash3", "cudnn", "flash2", "torch"])
def test_a_release_that_cannot_be_called_is_passed_by(name: str, monkeypatch: pytest.MonkeyPatch, machine: Any) -> None:
    machine((9, 0), "torch")
    known = {
        "flash3": (Flash3Kernel, flash3_operators("beta", Calls())),
        "flash2": (Flash2Kernel, flash2_operators("2.8", Calls())),
        "torch": (TorchKernel, torch_operators(Calls())),
    }
    for direction in (0, 1):

        def made(direction: int = direction) -> Any:
            if name == "cudnn":
                operators = engine_operators("2.20.2", Calls())
                setattr(operators, ("fused_attn_fwd", "fused_attn_bwd")[direction], _of_another_release)
                return CudnnKernel(operators, EngineDtypes())
            kernel, operators = known[name]
            return kernel(*(_of_another_release if i == direction else op for i, op in enumerate(operators)))

        monkeypatch.setitem(KERNELS, name, made)
        kernels._obstacle.cache_clear()
        kernels._made.cache_clear()
        obstacle = available_kernels(CUDA)[name]
        assert obstacle.startswith("cannot be imported: _of_another_release has other parameters than those of the")
        if name != "torch":
            assert _auto() == "torch"
        with pytest.raises(ConfigError, match="_of_another_release has other parameters"):
            kernel_for(CUDA, name)


def test_what_has_no_default_and_is_not_passed_gets_none() -> None:
    def operator(q: Any, new: Any, scale: Any, also_new: Any, known: float = 1.0, *more: Any, **others: Any) -> None:
        """As releases add parameters."""

    assert unused(operator, 1, "scale") == {"new": None, "also_new": None}
    assert unused(operator, 2, "scale", "also_new", "known", "of others") == {}
    with pytest.raises(ImportError, match="operator has other parameters"):
        unused(operator, 2, "new")
    forward, backward = flash3_operators("beta", Calls())
    kernel = Flash3Kernel(forward, backward)
    assert len(kernel._unused_forward) == 14
    assert set(kernel._unused_forward.values()) == {None}
    assert kernel._unused_backward == {}


def test_parameters_of_a_custom_operator_of_torch() -> None:
    """flash-attn wraps its functions, which then take anything by their own signature."""

    @torch.library.custom_op("wlb_tests::flash_like", mutates_args=("dq",))
    def flash_like(q: torch.Tensor, dq: torch.Tensor, window_size_left: int = -1) -> torch.Tensor:
        return q.clone()

    assert parameter_names(flash_like) == {"q", "dq", "window_size_left"}
    assert parameter_names(lambda q, window_size: None) == {"q", "window_size"}
    assert unused(flash_like, 1) == {"dq": None}
    assert unused(flash_like, 1, "dq", "window_size_left") == {}
    with pytest.raises(ImportError, match=r"has other parameters than those of the known releases.*'window_size'"):
        unused(flash_like, 2, "window_size")


def test_what_flash_attention_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from wlb.attention import sharded

    monkeypatch.setattr(sharded, "kernel_for", lambda *_, **__: TorchKernel())
    single, large = inputs(8, HEADS["mha"], seed=3, dtype=torch.float32), Heads(head_size=264)
    with pytest.raises(ConfigError, match=r"kernel torch takes bfloat16 or float16, got torch\.float32"):
        run_sharded(single, plan_named("per_sequence", (8,), 2), "all_gather")
    with pytest.raises(ConfigError, match="head sizes up to 256, got 264 and 8"):
        run_sharded(inputs(8, large, seed=3, dtype=torch.bfloat16), plan_named("per_sequence", (8,), 2), "p2p")
    half = tuple(t.bfloat16() for t in single)
    with pytest.raises(ConfigError, match="window_tokens needs comm_type all_gather on CUDA, got p2p with a window"):
        run_sharded(half, plan_named("per_sequence", (8,), 2), "p2p", window_tokens=3)
