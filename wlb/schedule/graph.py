"""A replica's step as a graph of what must end before what, evaluated for many candidates at once.

Every pass, and every message that takes time, is a node; a node ends its own duration after the last of its
predecessors. The graph depends on the pipeline's shape and the number of micro-batches only, so a search over
contents and orders builds it once. Nodes are sorted by depth: a whole depth is one numpy operation over all
candidates, and a candidate costs microseconds. Everything is `max` and `+`, so integer durations give exact
times, the same on every machine.

C candidates, V model stretches (`PipelineShape.num_virtual_stages`), M micro-batches, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.errors import ConfigError
from wlb.schedule.order import Pass
from wlb.schedule.program import PipelineShape, Post, Wait

_Clock = tuple[int, ...]  # nodes that have ended; the time is the latest of their ends


@dataclass(frozen=True, kw_only=True)
class PassGraph:
    """One replica's step for one number of micro-batches.

    levels: per depth from 1 on, (first node, end, predecessors (K, nodes of the depth)).
    node_kind: (N,) 0 forward, 1 backward, 2 message. node_stretch, node_micro_batch: (N,).
    pass_nodes: per stage, the nodes of its passes in the order in which they run.
    passes: per stage, those passes.
    last_nodes: the nodes with which a stage ends.
    """

    num_micro_batches: int
    levels: tuple[tuple[int, int, NDArray[np.intp]], ...]
    node_kind: NDArray[np.intp]
    node_stretch: NDArray[np.intp]
    node_micro_batch: NDArray[np.intp]
    pass_nodes: tuple[tuple[int, ...], ...]
    passes: tuple[tuple[Pass, ...], ...]
    last_nodes: NDArray[np.intp]

    def rows(self, stretch_class: Sequence[int]) -> NDArray[np.intp]:
        """(N,) row of each node's duration in the array that `ends` takes.

        stretch_class: (V,) class of each model stretch; stretches of a class have equal durations. With K classes
            the rows are M forwards of class 0, of class 1, ..., then the backwards in the same way, then M messages.
        """
        classes = np.asarray(stretch_class, dtype=np.intp)
        num_classes = int(classes.max()) + 1
        block = np.where(self.node_kind == 2, 2 * num_classes, self.node_kind * num_classes)
        block = block + np.where(self.node_kind == 2, 0, classes[self.node_stretch])
        return block * self.num_micro_batches + self.node_micro_batch

    def ends(self, durations: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
        """(N, C) end of every node. durations: (rows, C), integers or floats; rows: of `rows`."""
        ends: NDArray[Any] = durations.take(rows, axis=0)  # (N, C): durations that become ends, depth by depth
        for begin, end, predecessors in self.levels:
            ready = ends.take(predecessors[0], axis=0)
            for more in predecessors[1:]:
                np.maximum(ready, ends.take(more, axis=0), out=ready)
            ends[begin:end] += ready
        return ends

    def critical_path(self, ends: Sequence[int] | Sequence[float]) -> list[int]:
        """Nodes of one chain of waiting that leads to the end of the step, last node first.

        ends: (N,) of one candidate. Every node of the chain starts when the one behind it in the list ends.
        """
        node = max(self.last_nodes.tolist(), key=ends.__getitem__)
        path = [node]
        for begin, end, predecessors in reversed(self.levels):
            if begin <= node < end:
                node = max(predecessors[:, node - begin].tolist(), key=ends.__getitem__)
                path.append(node)
        return path

    def makespans(self, durations: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
        """(C,) end of each candidate's last pass."""
        spans: NDArray[Any] = self.ends(durations, rows)[self.last_nodes].max(axis=0)
        return spans


@lru_cache(maxsize=256)
def pass_graph(shape: PipelineShape, num_micro_batches: int, *, instant_messages: bool) -> PassGraph:
    """The graph of a replica's step.

    instant_messages: sending takes no time, so that messages need no nodes of their own.

    Raises ConfigError if the schedule cannot run so many micro-batches.
    """
    if num_micro_batches and not shape.takes(num_micro_batches):
        raise ConfigError(
            f"num_micro_batches must be a multiple of {shape.group}, or leave a rest of at least {shape.num_stages}, "
            f"with virtual stages, got {num_micro_batches}"
        )
    return _Builder(shape, num_micro_batches, instant_messages=instant_messages).build()


class _Channel:
    """Messages that one rank sends to one neighbour: the clocks at which their ends were posted, what was made of them,
    and how many ends have been waited for."""

    def __init__(self) -> None:
        self.sends: list[tuple[_Clock, int]] = []
        self.receives: list[_Clock] = []
        self.arrivals: list[_Clock] = []
        self.awaited_sends = 0
        self.awaited_receives = 0


class _Builder:
    """Runs the ranks' programs against each other, as far as each can go, and notes what waits for what."""

    def __init__(self, shape: PipelineShape, count: int, *, instant_messages: bool) -> None:
        self._shape, self._count, self._instant = shape, count, instant_messages
        self._buffered = shape.sends == "buffered"
        self._predecessors: list[_Clock] = []
        self._labels: list[tuple[int, int, int]] = []  # kind, stretch, micro-batch
        ranks = range(shape.num_stages)
        ring = {"activation": [_Channel() for _ in ranks], "gradient": [_Channel() for _ in ranks]}
        self._outgoing = [{name: ring[name][rank] for name in ring} for rank in ranks]
        self._incoming = [
            {"activation": ring["activation"][rank - 1], "gradient": ring["gradient"][(rank + 1) % shape.num_stages]}
            for rank in ranks
        ]

    def build(self) -> PassGraph:
        ranks = range(self._shape.num_stages)
        programs = [list(self._shape.program(rank, self._count)) if self._count else [] for rank in ranks]
        position = [0] * len(programs)
        clocks: list[_Clock] = [()] * len(programs)
        pass_nodes: list[list[int]] = [[] for _ in programs]
        passes: list[list[Pass]] = [[] for _ in programs]
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(programs):
                clock, begin = clocks[rank], position[rank]
                for index in range(begin, len(program)):
                    instruction = program[index]
                    if isinstance(instruction, Pass):
                        stretch = instruction.chunk * self._shape.num_stages + rank
                        kind = 0 if instruction.kind == "forward" else 1
                        node = self._add(clock, (kind, stretch, instruction.micro_batch))
                        clock = (node,)
                        pass_nodes[rank].append(node)
                        passes[rank].append(instruction)
                    elif isinstance(instruction, Post):
                        self._post(rank, instruction, clock)
                    else:
                        arrival = self._awaited(rank, instruction)
                        if arrival is None:
                            break
                        clock = self._latest(clock, arrival)
                    position[rank] = index + 1
                clocks[rank] = clock
                moved |= position[rank] > begin
        assert all(p == len(program) for p, program in zip(position, programs, strict=True)), "the programs deadlock"
        return self._sorted(pass_nodes, passes)

    def _add(self, predecessors: _Clock, label: tuple[int, int, int]) -> int:
        self._predecessors.append(predecessors)
        self._labels.append(label)
        return len(self._labels) - 1

    def _post(self, rank: int, post: Post, clock: _Clock) -> None:
        if post.end == "send":
            channel = self._outgoing[rank][post.channel]
            channel.sends.append((clock, post.micro_batch))
        else:
            channel = self._incoming[rank][post.channel]
            channel.receives.append(clock)
        number = len(channel.arrivals)
        if number == len(channel.sends) or (number == len(channel.receives) and not self._buffered):
            return
        clock, micro_batch = channel.sends[number]
        if not self._buffered:
            clock = self._latest(clock, channel.receives[number])
        channel.arrivals.append(clock if self._instant else (self._add(clock, (2, 0, micro_batch)),))

    def _awaited(self, rank: int, wait: Wait) -> _Clock | None:
        """When the oldest post not waited for is done; None if that is not known yet."""
        if wait.end == "send":
            if self._buffered:
                return ()
            channel = self._outgoing[rank][wait.channel]
            if channel.awaited_sends == len(channel.arrivals):
                return None
            channel.awaited_sends += 1
            return channel.arrivals[channel.awaited_sends - 1]
        channel = self._incoming[rank][wait.channel]
        if channel.awaited_receives == len(channel.arrivals):
            return None
        channel.awaited_receives += 1
        return channel.arrivals[channel.awaited_receives - 1]

    def _latest(self, a: _Clock, b: _Clock) -> _Clock:
        """The later of two clocks, without nodes that are known to end before another of them."""
        if not a or a == b:
            return b
        if not b:
            return a
        nodes = dict.fromkeys(a + b)
        before: set[int] = set()
        for node in nodes:
            before.update(self._predecessors[node])
        return tuple(node for node in nodes if node not in before)

    def _sorted(self, pass_nodes: list[list[int]], passes: list[list[Pass]]) -> PassGraph:
        depth: list[int] = []
        for predecessors in self._predecessors:
            depth.append(1 + max((depth[p] for p in predecessors), default=-1))
        order = np.argsort(np.array(depth, dtype=np.intp), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        bounds = np.searchsorted(np.array(depth, dtype=np.intp)[order], np.arange(1, max(depth, default=0) + 2))
        levels = []
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            clocks = [self._predecessors[node] for node in order[begin:end].tolist()]
            width = max(len(clock) for clock in clocks)
            padded = np.array([clock + clock[:1] * (width - len(clock)) for clock in clocks], dtype=np.intp)
            levels.append((begin, end, np.ascontiguousarray(place[padded].T)))
        labels = np.array(self._labels, dtype=np.intp).reshape(-1, 3)[order]
        return PassGraph(
            num_micro_batches=self._count,
            levels=tuple(levels),
            node_kind=labels[:, 0],
            node_stretch=labels[:, 1],
            node_micro_batch=labels[:, 2],
            pass_nodes=tuple(tuple(place[nodes].tolist()) for nodes in pass_nodes),
            passes=tuple(tuple(p) for p in passes),
            last_nodes=place[[nodes[-1] for nodes in pass_nodes if nodes]],
        )
