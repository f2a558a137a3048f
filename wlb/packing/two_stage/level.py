"""A short local search that makes the largest of some micro-batches smaller.

D documents of a replica, N micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb.packing.makespan.work import StepWork

_ROUNDS = 16
_TRIED = 64  # documents of the largest micro-batch


def level(work: StepWork, micro_batches: Sequence[Sequence[int]], *, cap_tokens: int, close_to: int) -> list[list[int]]:
    """The same documents with a largest work no larger, each micro-batch within the cap as before.

    In each round a document of the micro-batch with most work goes to another one, or changes places with a
    document there: whichever makes the larger of the two smallest. close_to: stop at a largest work no larger.

    Documents of work 5 4 3 3 3 placed longest first are 5 3 | 4 3 3; the 3 and the 4 change places: 5 4 | 3 3 3.
    """
    documents = np.array([d for m in micro_batches for d in m], dtype=np.intp)
    owner = np.repeat(np.arange(len(micro_batches)), [len(m) for m in micro_batches])
    weight, tokens = work.total[documents], work.tokens[documents]
    loads, held = np.zeros(len(micro_batches), dtype=np.int64), np.zeros(len(micro_batches), dtype=np.int64)
    np.add.at(loads, owner, weight)
    np.add.at(held, owner, tokens)
    # Nothing, in each micro-batch, is a document of no work: changing places with it is a move.
    nothing = np.zeros(len(micro_batches), dtype=np.int64)
    other_weight, other_tokens = np.concatenate([weight, nothing]), np.concatenate([tokens, nothing])
    for _ in range(_ROUNDS):
        largest = int(loads.argmax())
        mine = np.flatnonzero(owner == largest)
        if loads[largest] <= close_to or len(mine) < 2:
            break
        mine = mine[np.argsort(-weight[mine], kind="stable")[:_TRIED]]
        other_owner = np.concatenate([owner, np.arange(len(micro_batches))])
        given = weight[mine][:, None] - other_weight  # (mine, D + N)
        received_tokens = tokens[mine][:, None] - other_tokens
        larger = np.maximum(loads[largest] - given, loads[other_owner] + given)
        fits = (held[other_owner] + received_tokens <= cap_tokens) & (held[largest] - received_tokens <= cap_tokens)
        larger[~fits | (other_owner == largest)] = loads[largest]
        row, column = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[row, column] >= loads[largest]:
            break
        target = int(other_owner[column])
        owner[mine[row]] = target
        if column < len(owner):
            owner[column] = largest
        loads[largest] -= given[row, column]
        loads[target] += given[row, column]
        held[largest] -= received_tokens[row, column]
        held[target] += received_tokens[row, column]
    return [documents[owner == i].tolist() for i in range(len(micro_batches))]
