"""What waits for what where transfers run on a stream of their own: recorded from streams that only remember."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wlb.attention import Mailbox, all_gather, all_ranks_attention, call, device_rows, ring
from wlb.attention.in_process import in_lockstep
from wlb.attention.sharded import checked_call, path_of
from wlb.attention.transport import SideStream
from wlb.sharding.index import ring_index
from wlb.sharding.plan import ShardPlan, plan_of_chunks

# Three ranks hold 4 tokens each, head-tail: every rank needs keys of others.
PLAN = plan_of_chunks((12,), 3, [(r, 0, 2 * c, 2 * c + 2) for r in range(3) for c in (r, 5 - r)])
RANK = 1


class Recorder:
    """One device: what was launched, on which stream, and what had to be over by then.

    log: "name @ stream" and "stream waits for stream", in the order of the host.
    after: of each name, everything that is sure to be over when it runs.
    alive: of each name, the watched memory that somebody held when it was launched.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.after: dict[str, set[str]] = {}
        self.alive: dict[str, set[str]] = {}
        self._memory: dict[str, StorageWeakRef] = {}
        self.current = self.compute = _Stream("compute", self)
        self._over: dict[str, set[str]] = defaultdict(set)
        self._counts: dict[str, int] = defaultdict(int)

    def launch(self, name: str) -> None:
        self._counts[name] += 1
        name = f"{name} {self._counts[name]}"
        stream = self.current.name
        self.log.append(f"{name} @ {stream}")
        self.after[name] = set(self._over[stream])
        self.alive[name] = {n for n, weak in self._memory.items() if not weak.expired()}
        self._over[stream].add(name)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        self._memory[f"{name} {self._counts['remote']}"] = StorageWeakRef(tensor.untyped_storage())

    def wait(self, one: str, other: str) -> None:
        self.log.append(f"{one} waits for {other}")
        self._over[one] |= self._over[other]

    @contextmanager
    def enter(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class _Stream:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder

    def wait_stream(self, other: _Stream) -> None:
        self._recorder.wait(self.name, other.name)


class _Transfer:
    def __init__(self, transfer: Any, recorder: Recorder) -> None:
        self._transfer, self._recorder = transfer, recorder

    def wait(self) -> None:
        self._recorder.launch("arrived")
        self._transfer.wait()


class _Exchange:
    """Of a mailbox, recording."""

    def __init__(self, exchange: Any, recorder: Recorder) -> None:
        self._exchange, self._recorder = exchange, recorder
        self.size, self.rank = exchange.size, exchange.rank

    def all_to_all(self, *args: Any) -> _Transfer:
        self._recorder.launch("exchange")
        return _Transfer(self._exchange.all_to_all(*args), self._recorder)

    def shift(self, *args: Any) -> _Transfer:
        self._recorder.launch("exchange")
        return _Transfer(self._exchange.shift(*args), self._recorder)


class _Kernel:
    """Records which buffer of keys it reads: the rank's own, or what has arrived."""

    def __init__(self, kernel: Any, recorder: Recorder, key: torch.Tensor) -> None:
        self._kernel, self._recorder, self._key = kernel, recorder, key

    def _named(self, key: torch.Tensor) -> str:
        return "local" if key.data_ptr() == self._key.data_ptr() else "remote"

    def forward(self, partial: Any, query: Any, key: torch.Tensor, *others: Any) -> None:
        self._recorder.launch(self._named(key))
        if self._named(key) == "remote":
            self._recorder.watch("keys", key)
        self._kernel.forward(partial, query, key, *others)

    def backward(self, grads: Any, grad_out: Any, query: Any, key: torch.Tensor, *others: Any) -> None:
        self._recorder.launch(self._named(key))
        if self._named(key) == "remote":
            self._recorder.watch("keys", key)
            self._recorder.watch("gradients", grads[1])
        self._kernel.backward(grads, grad_out, query, key, *others)


_RUNNING: list[Recorder] = []


@pytest.fixture(autouse=True)
def _packing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(name: str, said: str) -> None:
        original = getattr(call, name)

        def recorded(*args: Any) -> None:
            if _RUNNING:
                _RUNNING[-1].launch(said)
            original(*args)

        for module in (all_gather, ring):
            monkeypatch.setattr(module, name, recorded)

    record("pack_rows", "pack")
    record("add_rows", "add")


def _recorded(generator: Any, recorder: Recorder) -> Any:
    """The generator, whose packing goes to `recorder`."""
    while True:
        _RUNNING.append(recorder)
        try:
            next(generator)
        except StopIteration as end:
            return end.value
        finally:
            _RUNNING.pop()
        yield


def run(
    comm_type: Any, *, keep_gathered: bool = False, transport: type[SideStream] = SideStream, plan: ShardPlan = PLAN
) -> tuple[Recorder, Recorder, list[torch.Tensor]]:
    """Forward and backward of all ranks; what RANK did in each, and its output and gradients."""
    mailbox, path = Mailbox(plan.cp_size), path_of(comm_type)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(plan.rank_tokens, 2, 4, generator=generator) for _ in range(3 * plan.cp_size)]
    by_rank = [tensors[3 * r : 3 * r + 3] for r in range(plan.cp_size)]
    recorders = [[Recorder() for _ in by_rank] for _ in range(2)]
    calls: list[list[Any]] = [[], []]
    exchanges = [mailbox.exchange(r) for r in range(plan.cp_size)]
    for direction in range(2):
        for rank, qkv in enumerate(by_rank):
            recorder = recorders[direction][rank]
            checked = checked_call(
                *qkv,
                plan,
                rank,
                exchanges[rank],
                comm_type=comm_type,
                scale=None,
                window_tokens=None,
                keep_gathered=keep_gathered,
            )
            calls[direction].append(
                replace(
                    checked,
                    exchange=_Exchange(exchanges[rank], recorder),
                    kernel=_Kernel(checked.kernel, recorder, qkv[1]),
                    transport=transport(_Stream("side", recorder), lambda r=recorder: r.current, recorder.enter),
                )
            )
    saved = in_lockstep(
        [_recorded(path.forward(c, *qkv), r) for c, qkv, r in zip(calls[0], by_rank, recorders[0], strict=True)]
    )
    grads = in_lockstep(
        [
            _recorded(path.backward(c, s, *qkv, torch.ones_like(s.out)), r)
            for c, s, qkv, r in zip(calls[1], saved, by_rank, recorders[1], strict=True)
        ]
    )
    return recorders[0][RANK], recorders[1][RANK], [saved[RANK].out, *grads[RANK]]


def test_gathering_forward() -> None:
    forward, _, _ = run("all_gather")
    assert forward.log == [
        "side waits for compute",
        "pack 1 @ side",
        "exchange 1 @ side",
        "pack 2 @ side",  # the rank's own rows
        "local 1 @ compute",
        "arrived 1 @ side",
        "compute waits for side",
        "remote 1 @ compute",
    ]


def test_gathering_backward() -> None:
    _, backward, _ = run("all_gather")
    assert backward.log == [
        "side waits for compute",
        "pack 1 @ side",
        "exchange 1 @ side",
        "pack 2 @ side",
        "local 1 @ compute",  # beside the gather
        "arrived 1 @ side",
        "compute waits for side",
        "remote 1 @ compute",
        "side waits for compute",
        "exchange 2 @ side",
        "local 2 @ compute",  # beside the way back
        "add 1 @ compute",  # of the rank's own keys in the gathered buffer
        "arrived 2 @ side",
        "compute waits for side",
        *(f"add {i} @ compute" for i in (2, 3, 4)),
    ]


def test_what_is_kept_is_not_gathered_again() -> None:
    _, backward, _ = run("all_gather", keep_gathered=True)
    assert backward.log[0] == "remote 1 @ compute"
    assert [line for line in backward.log if "exchange" in line] == ["exchange 1 @ side"]
    assert [line for line in backward.log if "local" in line] == ["local 1 @ compute"], "one transfer to hide"


def test_the_local_part_is_not_divided_where_nothing_is_hidden() -> None:
    class InTurn(SideStream):
        hides_transfers = False

    _, backward, _ = run("all_gather", transport=InTurn)
    assert [line for line in backward.log if "local" in line] == ["local 1 @ compute"]
    # Whole documents: nothing is sent.
    _, backward, _ = run("all_gather", plan=plan_of_chunks((4, 4), 2, [(0, 0, 0, 4), (1, 1, 0, 4)]))
    assert backward.log == ["remote 1 @ compute", "local 1 @ compute", "add 1 @ compute"]


def test_ring_forward() -> None:
    forward, _, _ = run("p2p")
    assert forward.log == [
        "side waits for compute",
        "pack 1 @ side",
        "exchange 1 @ side",
        "local 1 @ compute",
        "local 2 @ compute",
        "arrived 1 @ side",
        "compute waits for side",
        "side waits for compute",
        "pack 2 @ side",
        "exchange 2 @ side",
        "remote 1 @ compute",  # beside the next transfer
        "arrived 2 @ side",
        "compute waits for side",
        "remote 2 @ compute",
    ]


def test_arrived_keys_are_let_go_before_gradients_leave() -> None:
    """And what the side stream reads of compute's memory is held until compute has waited for it."""
    _, backward, _ = run("all_gather")
    assert backward.alive["exchange 2"] == {"gradients 1"}
    assert backward.alive["arrived 2"] == {"gradients 1"}
    assert "gradients 1" in backward.alive["add 2"], "compute has waited only now"
    _, backward, _ = run("all_gather", keep_gathered=True)
    assert backward.alive["exchange 1"] == {"keys 1", "gradients 1"}, "autograd's own"


def test_the_ring_holds_two_ranks_keys() -> None:
    forward, backward, _ = run("p2p")
    assert forward.alive["arrived 2"] == set()
    # Exchanges 1 and 2 bring keys, 3 and 4 take gradients back.
    assert backward.log.index("exchange 3 @ side") > backward.log.index("remote 1 @ compute")
    assert backward.alive["exchange 3"] == {"gradients 1"}
    assert "keys 2" not in backward.alive["exchange 4"]


def test_the_ring_copies_all_row_numbers_at_once_where_its_first_step_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends to ranks 2 and 3 only."""
    together: list[int] = []
    to_device = device_rows.to_device

    def counting(arrays: Any, device: Any) -> Any:
        together.append(len(arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(device_rows, "to_device", counting)
    pieces = [(0, 0, 0, 2), (2, 0, 2, 4), (0, 1, 0, 2), (3, 1, 2, 4), (1, 2, 0, 4), (2, 3, 0, 2), (3, 4, 0, 2)]
    plan = plan_of_chunks((4, 4, 4, 2, 2), 4, pieces)
    first, *others = ring_index(plan, 0, None).steps
    assert first.is_idle
    assert not any(step.is_idle for step in others)
    run("p2p", plan=plan)
    assert [number for number in together if number] == [3, 3, 3, 3], "once a rank"


def problems(forward: Recorder, backward: Recorder, *, hidden: dict[str, str], comm_type: str) -> list[str]:
    """What is not ordered that must be, and what is ordered that must not be.

    hidden: of a transfer in the backward pass, the attention beside which it runs.
    """
    found = []
    for recorder in (forward, backward):
        # The n-th transfer is over, on the side stream and then on the other, before what needs it.
        for name, after in recorder.after.items():
            kind, number = name.split()
            if kind == "remote" and f"arrived {number}" not in after:
                found.append(f"{name} may run before its keys have arrived")
    if forward.after["local 1"] & {"exchange 1", "arrived 1"}:
        found.append("local 1 waits for the transfer")
    for transfer, attention in hidden.items():
        if transfer in backward.after[attention]:
            found.append(f"{attention} waits for {transfer}")
        # Of the host too: what is launched before the transfer has begun leaves less to run beside it.
        launched = [line.split(" @ ")[0] for line in backward.log]
        if launched.index(attention) < launched.index(transfer):
            found.append(f"{attention} runs before {transfer}")
    if comm_type == "all_gather":
        if "remote 1" not in backward.after["exchange 2"]:
            found.append("gradients may leave before they are computed")
        if "arrived 2" not in backward.after["add 2"]:
            found.append("gradients may be added before they have arrived")
    return found


HIDDEN = {"all_gather": {"exchange 1": "local 1", "exchange 2": "local 2"}, "p2p": {"exchange 1": "local 1"}}


class NoFirstWait(SideStream):
    @contextmanager
    def begin(self) -> Iterator[None]:
        with self._enter(self._side):
            yield


class NoSecondWait(SideStream):
    @contextmanager
    def end(self) -> Iterator[None]:
        with self._enter(self._side):
            yield


class WaitsEarly(SideStream):
    """Compute waits as soon as a transfer has begun."""

    @contextmanager
    def begin(self) -> Iterator[None]:
        with super().begin():
            yield
        self._current().wait_stream(self._side)


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_transfers_are_ordered_and_hidden(comm_type: str) -> None:
    forward, backward, _ = run(comm_type)
    assert problems(forward, backward, hidden=HIDDEN[comm_type], comm_type=comm_type) == []


@pytest.mark.parametrize(
    ("transport", "comm_type", "problem"),
    [
        (NoFirstWait, "all_gather", "gradients may leave before they are computed"),
        (NoSecondWait, "all_gather", "remote 1 may run before its keys have arrived"),
        (NoSecondWait, "all_gather", "gradients may be added before they have arrived"),
        (NoSecondWait, "p2p", "remote 1 may run before its keys have arrived"),
        (WaitsEarly, "all_gather", "local 1 waits for the transfer"),
        (WaitsEarly, "all_gather", "local 1 waits for exchange 1"),
        (WaitsEarly, "all_gather", "local 2 waits for exchange 2"),
        (WaitsEarly, "p2p", "local 1 waits for the transfer"),
    ],
)
def test_a_wait_too_few_or_too_early_is_found(transport: type[SideStream], comm_type: str, problem: str) -> None:
    forward, backward, _ = run(comm_type, transport=transport)
    assert problem in problems(forward, backward, hidden=HIDDEN[comm_type], comm_type=comm_type)


@pytest.mark.parametrize(("comm_type", "keep_gathered"), [("all_gather", False), ("all_gather", True), ("p2p", False)])
def test_results_are_those_without_a_stream(comm_type: Any, keep_gathered: bool) -> None:
    """Buffers are allocated ahead and rounded up there, and nothing else may change."""
    _, _, results = run(comm_type, keep_gathered=keep_gathered)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(4, 2, 4, generator=generator).requires_grad_() for _ in range(9)]
    outs = all_ranks_attention(tensors[0::3], tensors[1::3], tensors[2::3], PLAN, comm_type=comm_type)
    torch.cat(outs).sum().backward()
    wanted = [outs[RANK], *(t.grad for t in tensors[3 * RANK : 3 * RANK + 3])]
    assert all(torch.equal(one, two) for one, two in zip(results, wanted, strict=True))
