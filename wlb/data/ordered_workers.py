"""One function over a stream of items by several processes, results in the order of the items.

Each worker has a pipe of its own and at most one item, so neither side ever writes to one that does not read.
"""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from wlb.errors import WlbError

# Items handed out and not yet taken back, per worker: what finishes out of turn is held, up to this.
_AHEAD_PER_WORKER = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: ForkProcess
    connection: Connection


@contextmanager
def ordered_workers[T, R](
    function: Callable[[T], R], *, workers: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """A `map` over `workers` processes that lasts as long as the block.

    Items are drawn as they are needed, so an endless input takes bounded memory. With one worker the function
    runs in this process. Workers are forks: what `function` holds (a tokenizer) is neither pickled nor loaded again.
    They are killed when the block is left, by an exception or not, and end by themselves if this process dies.

    An exception of `function` is raised here, in turn. A worker that is killed from outside raises WlbError.
    """
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    if workers == 1:
        yield lambda items: map(function, items)
        return
    crew: list[_Worker] = []
    try:
        for _ in range(workers):
            crew.append(_start(function))
        yield lambda items: _in_order(crew, items)
    finally:
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.join()
            worker.connection.close()


def _in_order(crew: list[_Worker], items: Iterable[Any]) -> Iterator[Any]:
    source = iter(items)
    idle = list(crew)
    busy: dict[Connection, tuple[_Worker, int]] = {}
    finished: dict[int, tuple[Any, Exception | None]] = {}
    given = taken = 0
    more = True
    while True:
        while more and idle and given - taken < len(crew) * _AHEAD_PER_WORKER:
            try:
                item = next(source)
            except StopIteration:
                more = False
                break
            worker = idle.pop()
            with _naming_a_death():
                worker.connection.send(item)
            busy[worker.connection] = (worker, given)
            given += 1
        if taken in finished:
            result, error = finished.pop(taken)
            if error is not None:
                raise error
            taken += 1
            yield result
        elif busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, index = busy.pop(connection)
                with _naming_a_death():
                    finished[index] = connection.recv()
                idle.append(worker)
        else:
            return


@contextmanager
def _naming_a_death() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise WlbError("a worker process was killed, for lack of memory perhaps: use fewer --workers") from error


def _start(function: Callable[[Any], Any]) -> _Worker:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, ours, function), daemon=True)
    with warnings.catch_warnings():
        # Python warns of a fork beside threads. Those alive here are idle numeric pools, which no worker uses.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    # The worker's end must be open in the worker only, or its death would not be seen here.
    theirs.close()
    return _Worker(process, ours)


def _work(connection: Connection, parents_end: Connection, function: Callable[[Any], Any]) -> None:
    # The parent hears Ctrl-C too and kills the workers; a traceback from each of them would bury its message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parents_end.close()
    while True:
        try:
            item = connection.recv()
        except (EOFError, ConnectionError):  # the parent is gone
            return
        try:
            answer: tuple[Any, Exception | None] = (function(item), None)
        except Exception as error:
            answer = (None, error)
        try:
            connection.send(answer)
        except ConnectionError:
            return
