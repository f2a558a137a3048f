"""How every command-line tool ends: one sentence on stderr and an exit code that says what happened."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from wlb.errors import WlbError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def run_tool(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Run `main(argv)` and return the exit code.

    0 after a normal end; 1 with `error: <sentence>` on stderr after a `WlbError` or an `OSError` (disk full, no
    permission); 130 after Ctrl-C; 143 after SIGTERM, which is turned into an exception so that the
    clean-up of every open context runs. Any other exception is a bug and keeps its traceback.
    """
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        main(sys.argv[1:] if argv is None else argv)
    except WlbError as error:
        return _complain(str(error), EXIT_ERROR)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _complain(f"{name}{error.strerror or error}", EXIT_ERROR)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except _Terminated:
        return _complain("terminated", EXIT_TERMINATED)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


class _Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: no `except Exception` on the way may swallow it."""


def _raise_terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _complain(sentence: str, code: int) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return code
