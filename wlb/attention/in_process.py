"""All ranks in one process: for tests, for measuring a plan on one device, and for showing what a plan does.

The same generators as in training, advanced in turn: each runs to where the others must have sent, then the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wlb.attention.call import Call
from wlb.attention.sharded import CommType, Path, checked_call, path_of, restored, tensors_to_save, with_unit_stride
from wlb.errors import ShardingError
from wlb.sharding.plan import ShardPlan

_Message = tuple[int, int, int]  # sender, receiver, number among the messages of the two


@dataclass(slots=True)
class Mailbox:
    """Where the ranks of one process leave rows for each other.

    sent_bytes: [sender][receiver], of everything so far. num_messages: likewise in all, from one rank to another.
    """

    size: int
    sent_bytes: list[list[int]] = field(init=False)
    num_messages: int = 0
    _rows: dict[_Message, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sent_bytes = [[0] * self.size for _ in range(self.size)]

    def exchange(self, rank: int) -> MailboxExchange:
        """The exchange of one rank."""
        return MailboxExchange(self, rank)

    def leave(self, message: _Message, rows: torch.Tensor) -> None:
        """For the receiver."""
        self.sent_bytes[message[0]][message[1]] += rows.numel() * rows.element_size()
        self.num_messages += 1
        self._rows[message] = rows

    def collect(self, message: _Message) -> torch.Tensor:
        """Raises LookupError if the sender has not sent yet."""
        if message not in self._rows:
            sender, receiver, number = message
            raise LookupError(f"rank {receiver} waits for message {number} of rank {sender}, which has not sent it")
        return self._rows.pop(message)

    @property
    def num_waiting(self) -> int:
        """Messages that nobody has collected."""
        return len(self._rows)


class MailboxExchange:
    """A `KvExchange` of one rank among those of a mailbox."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank
        self._numbers: Counter[tuple[int, int]] = Counter()

    @property
    def size(self) -> int:
        return self._mailbox.size

    @property
    def rank(self) -> int:
        return self._rank

    def all_to_all(
        self,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> _MailboxTransfer:
        """Rows of a rank for itself are refused: they need not travel."""
        assert send_counts[self._rank] == receive_counts[self._rank] == 0
        for peer, rows in enumerate(torch.split(sent, list(send_counts))):
            self._send(peer, rows)
        parts = enumerate(torch.split(received, list(receive_counts)))
        return _MailboxTransfer(self._mailbox, [t for peer, rows in parts for t in self._awaited(peer, rows)])

    def shift(self, sent: torch.Tensor, receiver: int, received: torch.Tensor, sender: int) -> _MailboxTransfer:
        self._send(receiver, sent)
        return _MailboxTransfer(self._mailbox, self._awaited(sender, received))

    def _send(self, peer: int, rows: torch.Tensor) -> None:
        if len(rows):
            self._mailbox.leave(self._next(self._rank, peer), rows)

    def _awaited(self, peer: int, rows: torch.Tensor) -> list[tuple[_Message, torch.Tensor]]:
        return [(self._next(peer, self._rank), rows)] if len(rows) else []

    def _next(self, sender: int, receiver: int) -> _Message:
        self._numbers[sender, receiver] += 1
        return sender, receiver, self._numbers[sender, receiver]


class _MailboxTransfer:
    def __init__(self, mailbox: Mailbox, awaited: list[tuple[_Message, torch.Tensor]]) -> None:
        self._mailbox, self._awaited = mailbox, awaited

    def wait(self) -> None:
        for message, rows in self._awaited:
            rows.copy_(self._mailbox.collect(message))


def in_lockstep[R](ranks: Sequence[Generator[None, None, R]]) -> list[R]:
    """Run the generators of all ranks, one step of each at a time; what they return, by rank."""
    results: dict[int, R] = {}
    while len(results) < len(ranks):
        for rank, generator in enumerate(ranks):
            if rank not in results:
                try:
                    next(generator)
                except StopIteration as end:
                    results[rank] = end.value
    return [results[rank] for rank in range(len(ranks))]


def all_ranks_attention(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    plan: ShardPlan,
    *,
    comm_type: CommType,
    scale: float | None = None,
    window_tokens: int | None = None,
    keep_gathered: bool = False,
    kernel: str = "auto",
    mailbox: Mailbox | None = None,
) -> list[torch.Tensor]:
    """`sharded_attention` of every rank of `plan`, in one process.

    Args:
        queries, keys, values: by rank, (T/cp, N, H), (T/cp, K, H), (T/cp, K, V).
        mailbox: counts what travels; one of its own by default.
        plan, comm_type, scale, window_tokens, keep_gathered, kernel: as in `sharded_attention`.

    Returns:
        By rank, (T/cp, N, V).

    Raises:
        ShardingError, ConfigError: as `sharded_attention`.
    """
    mailbox = mailbox or Mailbox(plan.cp_size)
    calls = [
        checked_call(
            query,
            key,
            value,
            plan,
            rank,
            mailbox.exchange(rank),
            comm_type=comm_type,
            scale=scale,
            window_tokens=window_tokens,
            keep_gathered=keep_gathered,
            kernel=kernel,
        )
        for rank, (query, key, value) in enumerate(zip(queries, keys, values, strict=True))
    ]
    if len(calls) != plan.cp_size:
        raise ShardingError(f"queries must hold a tensor for each of the {plan.cp_size} ranks, got {len(calls)}")
    out: tuple[torch.Tensor, ...] = _AllRanks.apply(path_of(comm_type), calls, *queries, *keys, *values)  # type: ignore[no-untyped-call]
    return list(out)


class _AllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, path: Path, calls: list[Call], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_rank = _by_rank([with_unit_stride(t) for t in tensors])
        saved = in_lockstep([path.forward(call, *qkv) for call, qkv in zip(calls, by_rank, strict=True)])
        ctx.save_for_backward(*(t for qkv, s in zip(by_rank, saved, strict=True) for t in (*qkv, *tensors_to_save(s))))
        ctx.path, ctx.calls = path, calls
        return tuple(s.out for s in saved)

    @staticmethod
    def backward(ctx: Any, *grad_outs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: activation recompute allows no second look
        per_rank = len(tensors) // len(ctx.calls)
        ranks = []
        for rank, (call, grad_out) in enumerate(zip(ctx.calls, grad_outs, strict=True)):
            query, key, value, *rest = tensors[rank * per_rank : (rank + 1) * per_rank]
            ranks.append(ctx.path.backward(call, restored(rest), query, key, value, grad_out.contiguous()))
        grads = in_lockstep(ranks)
        return None, None, *(g[i] for i in range(3) for g in grads)


def _by_rank(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    size = len(tensors) // 3
    return list(zip(tensors[:size], tensors[size : 2 * size], tensors[2 * size :], strict=True))
