"""How far a long job is: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Bytes read of bytes to read, and documents done, on stderr. Use as a context.

    total_bytes: 0 if it is not known (a pipe): no percentage then.
    log_interval: documents between two lines when stderr is not a terminal.
    """

    def __init__(self, label: str, *, total_bytes: int, log_interval: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._stream = stream or sys.stderr
        self._begin_s = time.monotonic()
        self._bytes = self._documents = 0
        self._next_line = log_interval
        self._bar: tqdm | None = None
        if self._stream.isatty():
            tqdm.monitor_interval = 0  # its thread would be alive while workers are forked
            self._bar = tqdm(
                desc=label, total=total_bytes or None, unit="B", unit_scale=True, file=self._stream, dynamic_ncols=True
            )

    def update(self, *, num_bytes: int, documents: int) -> None:
        """`num_bytes` and `documents` more are done."""
        self._bytes += num_bytes
        self._documents += documents
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._documents} documents", refresh=False)
            self._bar.update(num_bytes)
        elif self._documents >= self._next_line:
            self._next_line = (self._documents // self._log_interval + 1) * self._log_interval
            elapsed_s = max(time.monotonic() - self._begin_s, 1e-9)
            share = f", {100 * self._bytes / self._total_bytes:.0f} %" if self._total_bytes else ""
            print(
                f"{self._label}: {self._documents} documents ({self._documents / elapsed_s:.0f} documents/s, "
                f"{self._bytes / elapsed_s / 1e6:.2f} MB/s{share})",
                file=self._stream,
                flush=True,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
