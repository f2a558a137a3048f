"""One exchange of all missing keys and values, attention on the gathered ones (Llama 3; WLB-LLM, section 4).

Forward and backward are generators that yield where the other ranks must have sent before this one can go on. A
process that holds one rank runs them to their end; one that holds all ranks advances them in turn.

Shapes: T tokens of the shard, G gathered rows, W = K * (H + V) numbers of a row's key and value, N query heads, K
key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from wlb.attention.call import Call, Gradients, Saved, add_rows, key_and_value, kv_rows
from wlb.attention.device_rows import on_device
from wlb.attention.exchange import Transfer
from wlb.attention.partial import Partial
from wlb.sharding.index import GatherIndex, gather_index
from wlb.sharding.rows import Rows


def forward(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Generator[None, None, Saved]:
    """(T, N, H), (T, K, H), (T, K, V) -> output, and what backward needs."""
    index = gather_index(call.plan, call.rank, call.window)
    arriving = _start_gather(call, index, key, value)
    partial = Partial(query, value.shape[-1], index.phases)
    call.kernel.forward(partial, query, key, value, index.local, call.scale)
    yield
    gathered = _gathered(index, arriving, key, value)
    remote_key, remote_value = key_and_value(gathered, key, value)
    call.kernel.forward(partial, query, remote_key, remote_value, index.remote, call.scale)
    return Saved(
        out=partial.out.to(query.dtype),
        log_sum_exp=partial.log_sum_exp,
        gathered=gathered if call.keep_gathered else None,
    )


def backward(
    call: Call, saved: Saved, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_out: torch.Tensor
) -> Generator[None, None, Gradients]:
    """dq (T, N, H), dk (T, K, H), dv (T, K, V)."""
    index = gather_index(call.plan, call.rank, call.window)
    grads = call.zero_grads(query, key, value)
    inputs = (saved.out, saved.log_sum_exp)
    gathered = saved.gathered
    if gathered is None:
        arriving = _start_gather(call, index, key, value)
        yield
        gathered = _gathered(index, arriving, key, value)
    remote_key, remote_value = key_and_value(gathered, key, value)
    grad_gathered = torch.zeros_like(gathered, dtype=grads[0].dtype)  # (G, W)
    remote_grads = (grads[0], *key_and_value(grad_gathered, key, value))
    call.kernel.backward(remote_grads, grad_out, query, remote_key, remote_value, *inputs, index.remote, call.scale)
    returned, transfer = _start_return(call, index, grad_gathered)
    # One of the two transfers can hide behind the local part: gradients are twice as wide as bfloat16 keys.
    call.kernel.backward(grads, grad_out, query, key, value, *inputs, index.local, call.scale)
    yield
    add_rows(grads[1:], index.own_rows, _take(grad_gathered, index.own_places))
    if transfer is not None:
        transfer.wait()
        # Rank by rank: within one's part no row is there twice, so the sum has one order on every device.
        done = 0
        for rows in index.rows_by_receiver:
            add_rows(grads[1:], rows, returned[done : done + len(rows)])
            done += len(rows)
    return call.cast(grads, query, key, value)


class _Arriving:
    """(R, W) rows on their way. Given away once, so that neither they nor what was sent for them stay alive here."""

    def __init__(self, received: torch.Tensor, transfer: Transfer | None) -> None:
        self._rows: torch.Tensor | None = received
        self._transfer = transfer

    def take(self) -> torch.Tensor:
        """Wait for them."""
        if self._transfer is not None:
            self._transfer.wait()
        rows, self._rows, self._transfer = self._rows, None, None
        assert rows is not None, "taken already"
        return rows


def _start_gather(call: Call, index: GatherIndex, key: torch.Tensor, value: torch.Tensor) -> _Arriving:
    sent = kv_rows(key, value, index.send_rows)
    received = sent.new_empty(len(index.places), sent.shape[1])
    if not index.exchanges:
        return _Arriving(received, None)
    assert call.exchange is not None
    return _Arriving(received, call.exchange.all_to_all(sent, index.send_counts, received, index.receive_counts))


def _gathered(index: GatherIndex, arriving: _Arriving, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(G, W) each document's keys and values in order."""
    received = arriving.take()
    if len(index.places) == index.gathered_rows and index.places.are_all_in_order:
        return received
    gathered = received.new_empty(index.gathered_rows, received.shape[1])
    gathered[on_device(index.places, gathered.device)] = received
    del received  # before the rank's own rows are copied
    gathered[on_device(index.own_places, gathered.device)] = kv_rows(key, value, index.own_rows)
    return gathered


def _start_return(call: Call, index: GatherIndex, grad_gathered: torch.Tensor) -> tuple[torch.Tensor, Transfer | None]:
    returned = grad_gathered.new_empty(len(index.send_rows), grad_gathered.shape[1])
    if not index.exchanges:
        return returned, None
    assert call.exchange is not None
    sent = _take(grad_gathered, index.places)
    return returned, call.exchange.all_to_all(sent, index.receive_counts, returned, index.send_counts)


def _take(buffer: torch.Tensor, rows: Rows) -> torch.Tensor:
    return buffer.index_select(0, on_device(rows, buffer.device))
