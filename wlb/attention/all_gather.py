"""One exchange of all missing keys and values, attention on the gathered ones (Llama 3; WLB-LLM, section 4).

Forward and backward are generators that yield where the other ranks must have sent before this one can go on. A
process that holds one rank runs them to their end; one that holds all ranks advances them in turn.

Shapes: T tokens of the shard, G gathered rows, W = K * (H + V) numbers of a row's key and value, N query heads, K
key/value heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from wlb.attention.call import Call, Gradients, Saved, add_rows, key_and_value, num_row_numbers, pack_rows
from wlb.attention.device_rows import copy_to, on_device
from wlb.attention.exchange import Transfer
from wlb.attention.partial import Partial
from wlb.sharding.index import GatherIndex, gather_index


def forward(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Generator[None, None, Saved]:
    """(T, N, H), (T, K, H), (T, K, V) -> output, and what backward needs."""
    index = gather_index(call.plan, call.rank, call.window)
    arriving = _start_gather(call, index, key, value)
    partial = Partial(query, value.shape[-1], index.phases)
    call.kernel.forward(partial, query, key, value, index.local, call.scale)
    yield
    gathered = _gathered(call, index, arriving, key, value)
    remote_key, remote_value = key_and_value(gathered, key, value)
    call.kernel.forward(partial, query, remote_key, remote_value, index.remote, call.scale)
    return Saved(
        out=partial.out,
        log_sum_exp=partial.log_sum_exp,
        gathered=gathered if call.keep_gathered else None,
    )


def backward(
    call: Call, saved: Saved, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_out: torch.Tensor
) -> Generator[None, None, Gradients]:
    """dq (T, N, H), dk (T, K, H), dv (T, K, V)."""
    index = gather_index(call.plan, call.rank, call.window)
    arriving = _start_gather(call, index, key, value) if saved.gathered is None else None
    grads = call.zero_grads(query, key, value)
    inputs = (saved.out, saved.log_sum_exp)
    # Two transfers want to hide behind the local part where keys come again: a part of it for each.
    divides = arriving is not None and call.transport.hides_transfers
    *beside_gather, beside_return = index.local_parts if divides else (index.local,)
    for phase in beside_gather:
        call.kernel.backward(grads, grad_out, query, key, value, *inputs, phase, call.scale)
    if arriving is not None:
        yield
    grad_gathered = _backward_remote(call, index, saved, arriving, grads, query, key, value, grad_out)
    returning = _start_return(call, index, grad_gathered)
    call.kernel.backward(grads, grad_out, query, key, value, *inputs, beside_return, call.scale)
    yield
    own_rows, own_places = (on_device(rows, query.device) for rows in (index.own_rows, index.own_places))
    add_rows(grads[1:], own_rows, grad_gathered.index_select(0, own_places))
    if index.exchanges:
        _add_returned(call, index, grads, returning)
    # Not earlier: the side stream reads what compute owns, which only now waits for it.
    del grad_gathered, returning
    return call.cast(grads, query, key, value)


def _backward_remote(
    call: Call,
    index: GatherIndex,
    saved: Saved,
    arriving: _Arriving | None,
    grads: Gradients,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor,
) -> torch.Tensor:
    """Adds to dq; returns the gradients of gathered rows, (G, W).

    What was gathered is let go with this frame, before there are two more buffers of gradients. The stream that owns it
    allocates next inside `begin`, after a wait for this.
    """
    gathered = saved.gathered if arriving is None else _gathered(call, index, arriving, key, value)
    assert gathered is not None
    remote_key, remote_value = key_and_value(gathered, key, value)
    grad_gathered = call.empty_rows(grads[0], *gathered.shape).zero_()
    remote_grads = (grads[0], *key_and_value(grad_gathered, key, value))
    inputs = (saved.out, saved.log_sum_exp)
    call.kernel.backward(remote_grads, grad_out, query, remote_key, remote_value, *inputs, index.remote, call.scale)
    return grad_gathered


class _Arriving:
    """(R, W) rows on their way. Given away once, so that neither they nor what was sent for them stay alive here.

    ahead: (G, W) the buffer into which they will go, where it must exist before they arrive; given away too.
    """

    def __init__(self, received: torch.Tensor, transfer: Transfer | None, ahead: torch.Tensor | None = None) -> None:
        self._rows: torch.Tensor | None = received
        self._transfer = transfer
        self._ahead = ahead

    def take_ahead(self) -> torch.Tensor | None:
        """The buffer; None where there is none yet."""
        ahead, self._ahead = self._ahead, None
        return ahead

    def take(self) -> torch.Tensor:
        """Wait for them."""
        if self._transfer is not None:
            self._transfer.wait()
        rows, self._rows, self._transfer = self._rows, None, None
        assert rows is not None, "taken already"
        return rows


def _start_gather(call: Call, index: GatherIndex, key: torch.Tensor, value: torch.Tensor) -> _Arriving:
    row_numbers = num_row_numbers(key, value)
    if not index.exchanges:
        return _Arriving(key.new_empty(0, row_numbers), None)
    assert call.exchange is not None
    copy_to(key.device, index.exchanged_rows)
    with call.transport.begin():
        sent = call.empty_rows(key, len(index.send_rows), row_numbers)
        pack_rows(key, value, index.send_rows, sent)
        received = call.empty_rows(key, len(index.places), row_numbers)
        transfer = call.exchange.all_to_all(sent, index.send_counts, received, index.receive_counts)
        ahead = None
        if call.transport.allocates_ahead and not index.arrives_in_order:
            ahead = call.empty_rows(key, index.gathered_rows, row_numbers)
            _put_own(index, key, value, ahead)
        return _Arriving(received, transfer, ahead)


def _gathered(
    call: Call, index: GatherIndex, arriving: _Arriving, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """(G, W) each document's keys and values in order."""
    if not index.exchanges:
        return arriving.take()
    with call.transport.end():
        received = arriving.take()
        if index.arrives_in_order:
            return received
        ahead = arriving.take_ahead()
        gathered = call.empty_rows(received, index.gathered_rows, received.shape[1]) if ahead is None else ahead
        gathered[on_device(index.places, gathered.device)] = received
        del received  # before the rank's own rows are copied
        if ahead is None:
            _put_own(index, key, value, gathered)
    return gathered


def _put_own(index: GatherIndex, key: torch.Tensor, value: torch.Tensor, gathered: torch.Tensor) -> None:
    """The rank's own rows to where they belong in (G, W)."""
    own = gathered.new_empty(len(index.own_rows), gathered.shape[1])
    pack_rows(key, value, index.own_rows, own)
    gathered[on_device(index.own_places, gathered.device)] = own


def _start_return(call: Call, index: GatherIndex, grad_gathered: torch.Tensor) -> _Arriving:
    """Gradients of what was received, the way back: (S, W) of what was sent."""
    if not index.exchanges:
        return _Arriving(grad_gathered, None)
    assert call.exchange is not None
    with call.transport.begin():
        sent = call.empty_rows(grad_gathered, len(index.places), grad_gathered.shape[1])
        torch.index_select(grad_gathered, 0, on_device(index.places, grad_gathered.device), out=sent)
        returned = call.empty_rows(grad_gathered, len(index.send_rows), grad_gathered.shape[1])
        transfer = call.exchange.all_to_all(sent, index.receive_counts, returned, index.send_counts)
        return _Arriving(returned, transfer)


def _add_returned(call: Call, index: GatherIndex, grads: Gradients, returning: _Arriving) -> None:
    """Rank by rank: within one's part no row is there twice, so the sum has one order on every device."""
    with call.transport.end():
        returned = returning.take()
    sent_rows, counts = on_device(index.send_rows, returned.device), list(index.send_counts)
    for rows, part in zip(torch.split(sent_rows, counts), torch.split(returned, counts), strict=True):
        add_rows(grads[1:], rows, part)
