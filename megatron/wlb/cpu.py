"""Lets Megatron run where there is no CUDA device, over gloo. Does nothing where there is one.

Megatron asks `torch.cuda` for devices, streams, events, memory and random states, and creates tensors on
"cuda". Inside `cpu_as_device()` all of these answer for the CPU: a device named "cuda" means the CPU, a
stream is the one program order there is, an event a time stamp. What is replaced is put back on leaving.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from megatron.wlb.cpu_optimizer import replace_state_loading
from megatron.wlb.patches.registry import replace

# Every tensor factory that takes a `device`.
_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm", "empty_strided", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like"),
)
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


class CpuStream:
    """Program order: everything issued earlier has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, _stream: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent()
        event.record()
        return event


class CpuEvent:
    """A time stamp."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, _stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, _stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._recorded_s - self._recorded_s) * 1e3


@contextmanager
def cpu_as_device() -> Iterator[bool]:
    """Make the CPU answer for CUDA inside the block; yields whether it had to."""
    if torch.cuda.is_available():
        yield False
        return
    with ExitStack() as undo:
        _replace_cuda_module(undo)
        _replace_random_states(undo)
        _replace_factories(undo)
        _replace_moves(undo)
        _replace_all_to_all(undo)
        _replace_megatron(undo)
        yield True


def is_cuda_name(device: Any) -> bool:
    """Whether `device` (a name, a torch.device or an ordinal) means a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _replace_cuda_module(undo: ExitStack) -> None:
    stream = CpuStream()
    properties = SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1)
    peak_bytes: Callable[..., int] = lambda *_a, **_k: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "device": lambda *_a: nullcontext(),
        "get_device_name": lambda *_a: "cpu",
        "get_device_capability": lambda *_a: (0, 0),
        "get_device_properties": lambda *_a: properties,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "is_current_stream_capturing": lambda: False,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "stream": lambda *_a: nullcontext(),
        "current_stream": lambda *_a: stream,
        "default_stream": lambda *_a: stream,
        "set_stream": _nothing,
        "memory_stats": lambda *_a, **_k: defaultdict(int),
        "memory_allocated": lambda *_a: 0,
        "memory_reserved": lambda *_a: 0,
        "max_memory_allocated": peak_bytes,
        "max_memory_reserved": peak_bytes,
        "reset_peak_memory_stats": _nothing,
        "mem_get_info": lambda *_a: (0, 0),
        "device_memory_used": lambda *_a: 0,
        "check_error": _nothing,
    }
    for name, answer in answers.items():
        replace(undo, torch.cuda, name, answer)
    for name in ("range_push", "range_pop", "mark"):
        replace(undo, torch.cuda.nvtx, name, _nothing)
    # Data loaders ask this one before they pin memory.
    replace(undo, torch.accelerator, "is_available", lambda: False)
    # Compiling for the CPU takes minutes and needs a C++ compiler; Megatron decorates with torch.compile on import.
    undo.enter_context(torch.compiler.set_stance("force_eager"))


def _replace_random_states(undo: ExitStack) -> None:
    """The default CPU generator stands for the device's, so dropout draws from the tracker that is forked."""

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    for owner in (torch.cuda, torch.cuda.random):
        replace(undo, owner, "get_rng_state", get_state)
        replace(undo, owner, "set_rng_state", set_state)
        replace(undo, owner, "manual_seed", torch.default_generator.manual_seed)
        # torch.manual_seed calls this one after it has seeded the very same generator.
        replace(undo, owner, "manual_seed_all", _nothing)
    from megatron.core.tensor_parallel import random as megatron_random

    replace(undo, megatron_random, "_get_cuda_rng_state", get_state)
    replace(undo, megatron_random, "_set_cuda_rng_state", set_state)


def _replace_factories(undo: ExitStack) -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs and is_cuda_name(kwargs["device"]):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        replace(undo, torch, name, on_cpu(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        replace(undo, torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))


def _replace_moves(undo: ExitStack) -> None:
    tensor_to, tensor_type, module_to = torch.Tensor.to, torch.Tensor.type, torch.nn.Module.to

    def stay(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    def onto_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and is_cuda_name(args[0]):
                args = ("cpu", *args[1:])
            if is_cuda_name(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return move(self, *args, **kwargs)

        return to

    def type_name(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        # Megatron's optimizers tell precisions apart by these names.
        if dtype is None:
            return _CUDA_TYPE_NAMES.get(self.dtype, tensor_type(self))
        return tensor_type(self, dtype, **kwargs)

    replace(undo, torch.Tensor, "to", onto_cpu(tensor_to))
    replace(undo, torch.nn.Module, "to", onto_cpu(module_to))
    replace(undo, torch.Tensor, "type", type_name)
    for owner in (torch.Tensor, torch.nn.Module):
        replace(undo, owner, "cuda", stay)
    replace(undo, torch.Tensor, "pin_memory", stay)


def _replace_all_to_all(undo: ExitStack) -> None:
    """Token dispatchers of mixtures of experts give split sizes as a tensor, which gloo's binding does not take."""
    original = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        outputs, inputs = (s.tolist() if torch.is_tensor(s) else s for s in (output_split_sizes, input_split_sizes))
        return original(output, input, outputs, inputs, **kwargs)

    replace(undo, torch.distributed, "all_to_all_single", all_to_all_single)


def _replace_megatron(undo: ExitStack) -> None:
    from megatron.training import initialize, training

    # Its warm-up of fused kernels would draw from the generator that now also initialises weights.
    for module in (initialize, training):
        replace(undo, module, "set_jit_fusion_options", _nothing)
    _replace_norm(undo)
    replace_state_loading(undo)


def _replace_norm(undo: ExitStack) -> None:
    """Megatron's wrapper of PyTorch's norms refuses sequence parallelism.

    All that it needs is the mark by which the gradients of such parameters are summed over tensor-parallel ranks.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def make_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        alone = copy(config)
        alone.sequence_parallel = False
        norm: torch.nn.Module = original(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    replace(undo, WrappedTorchNorm, "__new__", make_norm)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
