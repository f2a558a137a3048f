"""One function over a stream of items by several processes, results in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from wlb.errors import WlbError

# Items handed out per worker and not yet taken back: one in work, one behind it, one finished out of turn.
_AHEAD_PER_WORKER = 3

_function: Callable[[Any], Any] | None = None  # set in a worker, never in the process that starts them


@contextmanager
def ordered_workers[T, R](
    function: Callable[[T], R], *, workers: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """A `map` over `workers` processes that lasts as long as the block.

    Items are drawn as they are needed, so an endless input takes bounded memory. With one worker the function
    runs in this process. Workers are forks: what `function` holds (a tokenizer) is neither pickled nor loaded again.
    If the block is left by an exception, the workers are killed; if this process dies, they end by themselves.

    An exception of `function` is raised here, in turn. A worker that is killed from outside raises WlbError.
    """
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    if workers == 1:
        yield lambda items: map(function, items)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("fork"), initializer=_start, initargs=(function,)
    )
    try:
        yield lambda items: _in_order(pool, items, ahead=workers * _AHEAD_PER_WORKER)
    except BrokenProcessPool as error:
        raise WlbError("a worker process was killed, perhaps for lack of memory: use fewer --workers") from error
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order[T, R](pool: ProcessPoolExecutor, items: Iterable[T], *, ahead: int) -> Iterator[R]:
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(_submit(pool, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _submit(pool: ProcessPoolExecutor, item: Any) -> Future[Any]:
    with warnings.catch_warnings():
        # Python warns of a fork beside threads. Those alive here are idle numeric pools, which no worker uses.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pool.submit(_call, item)


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # The parent hears Ctrl-C too and kills the workers; a traceback from each of them would bury its message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
