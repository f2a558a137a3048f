"""Files that exist only when they are complete: written under a temporary name, renamed at the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_BLOCKED_WHILE_RENAMING = {signal.SIGINT, signal.SIGTERM}


class AtomicFiles:
    """A set of output files that appears whole or not at all.

    Use as a context. On a normal exit every file that was asked for gets its final name, in the order of the
    calls of `path_for`; after any exception, an interrupt included, the temporary files are removed and
    files of the same name from an earlier run are left as they were.

    >>> with AtomicFiles() as files:                            # doctest: +SKIP
    ...     files.path_for(Path("corpus.bin")).write_bytes(b"...")
    ...     files.path_for(Path("corpus.idx")).write_bytes(b"...")
    """

    def __init__(self) -> None:
        self._temporary: dict[Path, Path] = {}

    def path_for(self, final: Path) -> Path:
        """The temporary path, in the same folder, to write what becomes `final`.

        The folder is made if it is missing. Asking twice for one file is a ValueError: two writers would collide.
        """
        if final in self._temporary:
            raise ValueError(f"final must be asked for once, got {final} twice")
        final.parent.mkdir(parents=True, exist_ok=True)
        # The process id keeps two runs with one output apart; the last to finish wins, whole.
        temporary = final.with_name(f".{final.name}.{os.getpid()}.partial")
        self._temporary[final] = temporary
        return temporary

    def __enter__(self) -> AtomicFiles:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self._rename()
        finally:
            for temporary in self._temporary.values():
                temporary.unlink(missing_ok=True)

    def _rename(self) -> None:
        with _signals_held_back():
            # The last file vouches for the others (an .idx for its .bin, a manifest for a folder). A machine that
            # dies between two renames must not leave an old voucher beside new data.
            if len(self._temporary) > 1:
                for final in reversed(self._temporary):
                    if final.suffix == ".idx":
                        final.unlink(missing_ok=True)
            for final, temporary in self._temporary.items():
                os.replace(temporary, final)


@contextmanager
def atomic_path(final: Path) -> Iterator[Path]:
    """One file: the temporary path to write, renamed to `final` when the block ends without an exception."""
    with AtomicFiles() as files:
        yield files.path_for(final)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Ctrl-C between two renames would split a pair of files: deliver it after the last."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_WHILE_RENAMING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
