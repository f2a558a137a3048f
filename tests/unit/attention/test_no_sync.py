"""On CUDA the host waits for nothing, in no layer and no micro-batch; and buffers come in few sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.fake_cuda import FakeStream, fake_cuda, run_backward
from tests.harness.fake_training import FakeExchange, fake_kernel, micro_batch_of
from wlb.attention import device_rows, sharded, sharded_attention
from wlb.attention.transport import HostTransport, SideStream, Transport
from wlb.sharding import Sharding

CP_SIZE, RANK, LAYERS = 4, 1, 3
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 32
WAYS = [("all_gather", False), ("all_gather", True), ("p2p", False)]


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "kernel_for", lambda *_args, **_kwargs: fake_kernel())


def _train(lengths: Sequence[int], comm_type: Any, *, keep_gathered: bool = False) -> None:
    """Forward and backward of a few layers that are nothing but attention."""
    batch, plan = micro_batch_of(lengths, CP_SIZE, RANK)
    assert batch["tokens"].shape == (1, plan.rank_tokens)
    assert batch["packed_seq_params"].cu_seqlens_q.device.type == "cuda"
    hidden, key, value = (
        torch.randn(plan.rank_tokens, heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    first = hidden
    for _ in range(LAYERS):
        hidden = sharded_attention(
            hidden,
            key,
            value,
            plan,
            RANK,
            FakeExchange(CP_SIZE, RANK),
            comm_type=comm_type,
            keep_gathered=keep_gathered,
        )
    run_backward(hidden)
    assert all(t.grad is not None and t.grad.device.type == "cuda" for t in (first, key, value))


@pytest.mark.parametrize(("comm_type", "keep_gathered"), WAYS)
def test_layers_and_micro_batches_wait_for_nothing(comm_type: str, keep_gathered: bool) -> None:
    with fake_cuda() as syncs:
        for lengths in ((700, 300, 41, 1, 58, 1000, 20), (9, 1300, 2, 17)):
            _train(lengths, comm_type, keep_gathered=keep_gathered)
    assert not syncs.found


def test_index_rows_go_to_the_device_once_for_all_layers() -> None:
    copies: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and result.is_cuda:
                copies.append(result.numel())
            return result

    def count(layers: int) -> int:
        monkeypatch.setitem(globals(), "LAYERS", layers)
        copies.clear()
        with fake_cuda(), Copies():
            _train((700, 300, 41), "all_gather")
        return len(copies)

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert count(1) == count(4) > 0


def _unpinned(arrays: Any, device: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]


def test_rows_that_are_not_pinned_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "to_device", _unpinned)
    with fake_cuda() as syncs:
        _train((700, 300, 41), "all_gather")
    assert syncs.in_files("attention/device_rows.py") or syncs.in_files("test_no_sync.py")


def _on_device() -> torch.Tensor:
    return torch.zeros(4, 3, device="cuda")


def _mask_with_values() -> None:
    rows = _on_device()
    rows[rows > 0] = torch.zeros(2, device="cuda")


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: _on_device().sum().item(),
    "tolist": lambda: _on_device().tolist(),
    "truth": lambda: bool(_on_device().sum() > 0),
    "equal": lambda: torch.equal(_on_device(), _on_device()),
    "mask": lambda: _on_device()[_on_device() > 0],
    "mask with values": _mask_with_values,
    "nonzero": lambda: _on_device().nonzero(),
    "host index": lambda: _on_device()[torch.tensor([1, 2])],
    "to the host": lambda: _on_device().cpu(),
    "to unpinned memory": lambda: _on_device().to("cpu", non_blocking=True),
    "from unpinned memory": lambda: torch.zeros(3).cuda(non_blocking=True),
    "blocking copy": lambda: torch.zeros(3).pin_memory().cuda(),
    "from a list": lambda: torch.tensor([1, 2], device="cuda"),
    "synchronize": lambda: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_way_to_wait_is_counted(name: str) -> None:
    with fake_cuda() as syncs, suppress(RuntimeError):  # what depends on data has no fake result
        WAITS[name]()
    assert syncs.count == 1


def test_what_does_not_wait_is_not_counted() -> None:
    with fake_cuda() as syncs:
        rows, numbers = _on_device(), torch.zeros(2, dtype=torch.int64, device="cuda")
        rows[numbers] = torch.ones(2, 3, device="cuda")
        rows[rows > 0] = 1.0
        rows.index_select(0, numbers)
        torch.where(rows > 0, rows, torch.zeros_like(rows))
        torch.zeros(3).pin_memory().cuda(non_blocking=True)
    assert syncs.count == 0


class _RowSizes(TorchDispatchMode):
    """Rows of every allocated (rows, W), of a head with one number of key and of value."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "new_empty" in func.name() and result.dim() == 2 and result.shape[1] == 2 and result.numel():
            self.found.add(result.shape[0])
        return result


def _sizes(transport: Transport) -> set[int]:
    rng = np.random.default_rng(4)
    sizes = _RowSizes()
    for _ in range(20):
        lengths = np.maximum(1, rng.lognormal(6, 1, size=rng.integers(3, 9))).astype(int).tolist()
        plan = Sharding(name="hybrid", cp_size=CP_SIZE).plan((*lengths, -sum(lengths) % CP_SIZE or CP_SIZE))
        shapes = [(plan.rank_tokens, heads, 1) for heads in (2, 1, 1)]
        query, key, value = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        for comm_type in ("all_gather", "p2p"):
            exchange: Any = FakeExchange(CP_SIZE, RANK)
            with sizes:
                sharded_attention(
                    query, key, value, plan, RANK, exchange, comm_type=comm_type, transport=transport
                ).sum().backward()
    return sizes.found


def test_buffers_of_many_lengths_have_few_sizes() -> None:
    """At most eight sizes between two powers of two."""
    rounded = _sizes(SideStream(FakeStream(), FakeStream, lambda _stream: nullcontext()))
    exact = _sizes(HostTransport())
    octaves = np.log2(max(rounded) / min(rounded))
    assert len(rounded) <= 8 * octaves + 1
    assert len(exact) > 2 * len(rounded)
    assert max(rounded) <= max(exact) * 9 / 8


def test_syncs_name_their_caller() -> None:
    with fake_cuda() as syncs:
        torch.cuda.synchronize()
    assert list(syncs.found) == [("synchronize", __file__, "test_syncs_name_their_caller")]
