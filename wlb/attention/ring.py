"""Keys and values of one other rank at a time, each transfer while the attention before it runs.

In step i rank r sends to rank r + i what that one needs of r's keys, and receives from r - i: a ring whose distance
grows, instead of one in which everyone hands on what it got from its neighbour. Relaying moves every row past every
rank, needed or not; under a plan most rows are needed by few ranks (those of whole documents by none), and both ends
know from the plan which. So rows go straight to where they are needed, and a step without any is left out.

The generators are as in `all_gather`. Every rank begins its transfers in the same order of steps, and so each pair of
ranks does too, which is what matches messages on every backend.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from wlb.attention.call import Call, Gradients, Saved, add_rows, key_and_value, num_row_numbers, pack_rows
from wlb.attention.device_rows import copy_to, on_device
from wlb.attention.exchange import Transfer
from wlb.attention.partial import Partial
from wlb.attention.transport import Transport
from wlb.sharding.index import RingIndex, RingStep, ring_index


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Rows that are there once `transfer` is over."""

    rows: torch.Tensor
    transfer: Transfer
    transport: Transport

    def wait(self) -> torch.Tensor:
        with self.transport.end():
            self.transfer.wait()
        return self.rows


def forward(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Generator[None, None, Saved]:
    """(T, N, H), (T, K, H), (T, K, V) -> output, and what backward needs."""
    index = ring_index(call.plan, call.rank, call.window)
    partial = Partial(query, value.shape[-1], index.phases)
    arrival = _start_step(call, index, 1, key, value)
    for phase in index.local:
        call.kernel.forward(partial, query, key, value, phase, call.scale)
    for step in index.steps:
        yield
        rows = arrival.wait() if arrival is not None else None
        arrival = _start_step(call, index, step.distance + 1, key, value)
        if rows is not None and step.phase.num_tasks:
            call.kernel.forward(partial, query, *key_and_value(rows, key, value), step.phase, call.scale)
        del rows  # before the next step's are waited for, and so before room is made for those after them
    return Saved(out=partial.out, log_sum_exp=partial.log_sum_exp)


def backward(
    call: Call, saved: Saved, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_out: torch.Tensor
) -> Generator[None, None, Gradients]:
    """dq (T, N, H), dk (T, K, H), dv (T, K, V)."""
    index = ring_index(call.plan, call.rank, call.window)
    grads = call.zero_grads(query, key, value)
    inputs = (saved.out, saved.log_sum_exp)
    arrival = _start_step(call, index, 1, key, value)
    for phase in index.local:
        call.kernel.backward(grads, grad_out, query, key, value, *inputs, phase, call.scale)
    returning: tuple[RingStep, _Arrival] | None = None
    for step in index.steps:
        yield
        rows = arrival.wait() if arrival is not None else None
        arrival = _start_step(call, index, step.distance + 1, key, value)
        grad_rows = None
        if rows is not None:
            step_key_and_value = key_and_value(rows, key, value)
            grad_rows = call.empty_rows(grads[0], *rows.shape).zero_()
            step_grads = (grads[0], *key_and_value(grad_rows, key, value))
            call.kernel.backward(step_grads, grad_out, query, *step_key_and_value, *inputs, step.phase, call.scale)
            del step_key_and_value, step_grads
        del rows  # as in forward; so do views of it
        _add_returned(grads, returning)
        returning = None if grad_rows is None else (step, _start_return(call, step, grad_rows))
        del grad_rows
    yield
    _add_returned(grads, returning)
    return call.cast(grads, query, key, value)


def _start_step(call: Call, index: RingIndex, distance: int, key: torch.Tensor, value: torch.Tensor) -> _Arrival | None:
    """None after the last step, and for a step in which this rank neither sends nor receives."""
    if distance == 1:
        copy_to(key.device, [s.send_rows for s in index.steps])
    if distance > len(index.steps) or index.steps[distance - 1].is_idle:
        return None
    step, row_numbers = index.steps[distance - 1], num_row_numbers(key, value)
    with call.transport.begin():
        sent = call.empty_rows(key, len(step.send_rows), row_numbers)
        pack_rows(key, value, step.send_rows, sent)
        received = call.empty_rows(key, step.num_received, row_numbers)
        return _shift(call, sent, received, distance)


def _start_return(call: Call, step: RingStep, grad_rows: torch.Tensor) -> _Arrival:
    """Gradients of what was received, the way back."""
    with call.transport.begin():
        returned = call.empty_rows(grad_rows, len(step.send_rows), grad_rows.shape[1])
        return _shift(call, grad_rows, returned, -step.distance)


def _shift(call: Call, sent: torch.Tensor, received: torch.Tensor, distance: int) -> _Arrival:
    assert call.exchange is not None
    size = call.plan.cp_size
    receiver, sender = (call.rank + distance) % size, (call.rank - distance) % size
    return _Arrival(received, call.exchange.shift(sent, receiver, received, sender), call.transport)


def _add_returned(grads: Gradients, returning: tuple[RingStep, _Arrival] | None) -> None:
    if returning is not None:
        step, arrival = returning
        returned = arrival.wait()
        add_rows(grads[1:], on_device(step.send_rows, returned.device), returned)
