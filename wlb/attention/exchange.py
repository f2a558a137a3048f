"""How rows get from rank to rank. Injected into the attention, so that one process can hold all ranks.

Shapes: S rows sent, R rows received, W numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Transfer(Protocol):
    """Rows on their way."""

    def wait(self) -> None:
        """Returns when what is received may be read, and what is sent may be written."""
        ...


class KvExchange(Protocol):
    """The context-parallel ranks, seen from one of them. All ranks make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(
        self,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> Transfer:
        """Begin to send (S, W) rows, ordered by receiver, and to fill (R, W) ones, ordered by sender."""
        ...

    def shift(self, sent: torch.Tensor, receiver: int, received: torch.Tensor, sender: int) -> Transfer:
        """Begin to send (S, W) rows to one rank and to fill (R, W) from another; without rows there is no message."""
        ...


CONNECTING_BACKENDS = frozenset({"nccl"})
"""Those that connect the ranks of a group in its first call."""


def cuda_backend(group: dist.ProcessGroup) -> str | None:
    """What carries CUDA tensors: a group may have one backend for each kind of device, as `cpu:gloo,cuda:nccl` has.

    A group made for one backend alone says likewise for which devices it is.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get("cuda")


class GroupExchange:
    """Over a torch.distributed process group. All its ranks must make one together: see below."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size, self._rank = group.size(), group.rank()
        if cuda_backend(group) in CONNECTING_BACKENDS:
            # For the first call of a group these wait for all its ranks; a ring step may have messages for some only.
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def all_to_all(
        self,
        sent: torch.Tensor,
        send_counts: Sequence[int],
        received: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> Transfer:
        work = dist.all_to_all_single(
            _bytes(received),
            _bytes(sent),
            output_split_sizes=list(receive_counts),
            input_split_sizes=list(send_counts),
            group=self._group,
            async_op=True,
        )
        return _GroupTransfer([work], sent)

    def shift(self, sent: torch.Tensor, receiver: int, received: torch.Tensor, sender: int) -> Transfer:
        # By rank in the group: its ranks are not those of the world.
        operations = []
        if len(sent):
            operations.append(dist.P2POp(dist.isend, _bytes(sent), group=self._group, group_peer=receiver))
        if len(received):
            operations.append(dist.P2POp(dist.irecv, _bytes(received), group=self._group, group_peer=sender))
        return _GroupTransfer(dist.batch_isend_irecv(operations) if operations else [], sent)


class _GroupTransfer:
    def __init__(self, works: Sequence[dist.Work], sent: torch.Tensor) -> None:
        # What is sent must not be freed before it has left.
        self._works, self._sent = works, sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """(R, W) -> (R, bytes), the same memory: gloo does not know every dtype, and everyone knows bytes."""
    assert rows.is_contiguous()
    return rows.view(torch.uint8)
