"""A CUDA device that is not there: tensors without data, and a count of what would make the host wait for it.

PyTorch's fake tensors say what each operator would give without running it. What a real device would have to be waited
for is counted: numbers read back (`.item()`, `.tolist()`, `bool(tensor)`), results whose size depends on data (boolean
masks, `nonzero`), and copies between host and device that are not asynchronous, among them those of memory that is not
pinned, and waits that are called by name.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wlb.attention import transport

aten = torch.ops.aten

_READ_BACK = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_SIZED_BY_DATA = {
    *(aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default, aten._unique2.default),
    *(aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor),
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}


class Syncs(TorchDispatchMode):
    """Counts them by (name, file, function) of the innermost caller outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str, str]] = Counter()
        self._pinned: WeakSet[Any] = WeakSet()

    @property
    def count(self) -> int:
        return self.found.total()

    def in_files(self, *parts: str) -> list[tuple[str, str, str]]:
        """Those whose caller's path has one of these parts."""
        return [where for where in self.found if any(part in where[1] for part in parts)]

    def add(self, name: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        self.found[name, frames[-1].filename, frames[-1].name] += 1

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """This tensor's memory counts as pinned from now on."""
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._pinned

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        pins = kwargs.pop("pin_memory", False)
        on_device = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
        if func in _READ_BACK and on_device:
            self.add(func.name())
        if func in _SIZED_BY_DATA and on_device:
            self.add(func.name())
        if func in _INDEXING and on_device:
            indices = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)]
            masks = any(t.dtype == torch.bool for t in indices)
            # One number into a mask needs no count of what the mask chooses.
            if (masks and (func is aten.index.Tensor or args[2].numel() > 1)) or any(not t.is_cuda for t in indices):
                self.add(func.name())
        result = func(*args, **kwargs)
        if func in _COPIES:
            self._see_copy(func, args, kwargs, result)
        if pins:
            self.pin(result)
        return result

    def _see_copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        source, target = (args[0], result) if func is aten._to_copy.default else (args[1], args[0])
        if source.device.type == target.device.type or source.numel() == 0:
            return
        asynchronous = kwargs.get("non_blocking", False) or (func is not aten._to_copy.default and args[2:3] == (True,))
        on_host = source if source.device.type == "cpu" else target
        if not (asynchronous and self.is_pinned(on_host)):
            self.add(f"{func.name()} {source.device.type} -> {target.device.type}")


class FakeStream:
    """Waits of streams are the device's business."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass


@contextmanager
def fake_cuda() -> Iterator[Syncs]:
    """Inside, `device="cuda"` gives tensors without data."""
    syncs = Syncs()

    def waits(name: str) -> Any:
        return lambda *_args, **_kwargs: syncs.add(name)

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        return syncs.pin(tensor.clone())

    cuda: dict[str, Any] = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: FakeStream(),
        "Stream": FakeStream,
        "stream": lambda _stream: nullcontext(),
        "synchronize": waits("synchronize"),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
    }
    with ExitStack() as undo:
        for name, value in cuda.items():
            undo.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
            setattr(torch.cuda, name, value)
        undo.callback(setattr, torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
        torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        undo.enter_context(syncs)
        # What was made for a real device, if there is one, must not be taken here, nor the other way round.
        transport._side_stream.cache_clear()
        undo.callback(transport._side_stream.cache_clear)
        yield syncs


def run_backward(output: torch.Tensor) -> None:
    """`output.sum().backward()` without PyTorch's engine, which asks the device for its streams.

    Gradients are added up at the leaves.
    """
    root = output.grad_fn
    waiting: Counter[Any] = Counter()  # edges into each node that have not brought a gradient
    nodes = [root]
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                if following not in waiting:
                    nodes.append(following)
                waiting[following] += 1
    inputs: dict[Any, dict[int, torch.Tensor]] = {root: {output.output_nr: torch.ones_like(output)}}
    ready = [root]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            arrived = inputs.pop(node, {})
            if hasattr(node, "variable"):
                leaf = node.variable
                if 0 in arrived:
                    leaf.grad = arrived[0] if leaf.grad is None else leaf.grad + arrived[0]
                continue
            results = _called(node, arrived)
            for (following, number), gradient in zip(node.next_functions, results, strict=False):
                if following is None:
                    continue
                if gradient is not None:
                    wanted = following._input_metadata[number]
                    gradient = gradient.sum_to_size(wanted.shape).to(wanted.dtype)  # as the engine does
                    there = inputs.setdefault(following, {})
                    there[number] = there[number] + gradient if number in there else gradient
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)


def _called(node: Any, arrived: dict[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    if not arrived:
        return [None] * len(node.next_functions)
    outputs = [arrived.get(i) for i in range(len(node._input_metadata))]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        results = node(*outputs)
        return results if isinstance(results, tuple) else (results,)
    results = node.apply(*outputs)
    results = list(results) if isinstance(results, tuple) else [results]
    # A function written in Python answers for arguments that are no tensors too; the graph does not have them.
    while len(results) > len(node.next_functions):
        results.remove(None)
    return results
