"""How long a replica takes for many candidate contents and orders at once, and whether both caps hold.

C candidates, N micro-batches, R rows of `work`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb.packing.makespan.work import Int64
from wlb.schedule.graph import PassGraph, pass_graph
from wlb.schedule.model import PipelineModel

NEVER = np.iinfo(np.int64).max
"""Time of a candidate that breaks a cap."""


class ReplicaTimer:
    """Times one replica's candidates on a pipeline, under two caps.

    cap_tokens: of a micro-batch. in_flight_tokens: on the first stage.
    """

    def __init__(self, model: PipelineModel, *, cap_tokens: int, in_flight_tokens: int) -> None:
        self._model = model
        self.cap_tokens = cap_tokens
        self.in_flight_tokens = in_flight_tokens
        self._of_stretch = model.classes()[1]
        # By number of micro-batches. Plain dictionaries, so that a packer can be sent to another process.
        self._graphs: dict[int, tuple[PassGraph, NDArray[np.intp]]] = {}
        self._held: dict[int, NDArray[np.float64]] = {}
        self._full_tokens: dict[int, int] = {}

    def times(self, durations: Int64, tokens: Int64) -> Int64:
        """(C,) nanoseconds of each candidate, NEVER where a cap is broken.

        durations: (R, N, C) of each micro-batch, in pipeline order. tokens: (N, C).
        """
        rows, count, candidates = durations.shape
        graph, node_rows = self.graph(count)
        spans: Int64 = graph.makespans(durations.reshape(rows * count, candidates), node_rows)
        spans[~self.fit(tokens)] = NEVER
        return spans

    @property
    def num_stages(self) -> int:
        return self._model.shape.num_stages

    @property
    def order_matters(self) -> bool:
        return self.num_stages > 1

    def critical_share(self, durations: Int64) -> Int64:
        """(N,) how many passes of each micro-batch lie on the critical path, backwards counted double.

        durations: (R, N) of one replica.
        """
        rows, count = durations.shape
        graph, node_rows = self.graph(count)
        ends = graph.ends(durations.reshape(rows * count, 1), node_rows)[:, 0].tolist()
        path = graph.critical_path(ends)
        weights = np.array((1.0, 2.0, 0.0))[graph.node_kind[path]]
        share = np.bincount(graph.node_micro_batch[path], weights=weights, minlength=count)
        return share.astype(np.int64)

    def fit(self, tokens: Int64) -> NDArray[np.bool_]:
        """(C,) whether both caps hold. tokens: (N, C)."""
        fits: NDArray[np.bool_] = tokens.max(axis=0) <= self.cap_tokens
        if self.may_overflow(tokens):
            chunks = self._model.shape.num_chunks
            # Exact: token counts and their sums are far below 2^53.
            held = self._held_by_forward(len(tokens)) @ tokens.astype(np.float64)
            fits &= held.max(axis=0) <= self.in_flight_tokens * chunks
        return fits

    def may_overflow(self, tokens: Int64) -> bool:
        """Whether the in-flight cap can be broken at all by micro-batches within the other cap."""
        if int(tokens.sum(axis=0).max()) <= self.in_flight_tokens:
            return False
        count = len(tokens)
        if count not in self._full_tokens:
            self._full_tokens[count] = self._model.shape.first_stage_peak_tokens([self.cap_tokens] * count)
        return self._full_tokens[count] > self.in_flight_tokens

    def graph(self, count: int) -> tuple[PassGraph, NDArray[np.intp]]:
        """The graph of so many micro-batches, and the row of each of its nodes' durations."""
        if count not in self._graphs:
            graph = pass_graph(self._model.shape, count, instant_messages=self._model.instant_messages)
            self._graphs[count] = graph, graph.rows(self._of_stretch)
        return self._graphs[count]

    def _held_by_forward(self, count: int) -> NDArray[np.float64]:
        """(forwards of the first stage, N): chunks of each micro-batch that it holds once that forward runs."""
        if count not in self._held:
            held = np.zeros(count)
            rows = []
            for p in self._model.shape.passes(0, count):
                if p.kind == "forward":
                    held[p.micro_batch] += 1
                    rows.append(held.copy())
                else:
                    held[p.micro_batch] -= 1
            self._held[count] = np.array(rows)
        return self._held[count]
