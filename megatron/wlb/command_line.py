"""Mistakes of a command line that are answered in a sentence before Megatron's parser sees it.

Megatron prints its whole usage, hundreds of lines a rank, for a flag that it does not know, and an assertion without
the flags' names for two sources of data.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches

from megatron.wlb.arguments import add_wlb_arguments
from wlb.errors import ConfigError

_OURS = "--wlb"
# Each a source of its own; the flags of one go together.
_DATA_SOURCES = (
    ("--mock-data",),
    ("--data-path",),
    ("--train-data-path", "--valid-data-path", "--test-data-path"),
)


def check_command_line(argv: Sequence[str]) -> None:
    """Look at the words of a command line, without the program's name.

    Raises:
        ConfigError: a `--wlb-*` flag that does not exist, or more than one source of data.
    """
    words = [word.partition("=")[0] for word in argv if word.startswith("--")]
    known = [flag for flag in add_wlb_arguments(argparse.ArgumentParser())._option_string_actions if _OURS in flag]
    for word in words:
        if word.startswith(_OURS) and word not in known:
            nearest = get_close_matches(word, known, n=1, cutoff=0)
            raise ConfigError(f"--wlb-* flags must exist, got {word}: was {nearest[0]} meant?")
    sources = [flag for flags in _DATA_SOURCES if (flag := next((f for f in flags if f in words), None))]
    if len(sources) > 1:
        raise ConfigError(f"data must come from one source, got {' and '.join(sources)}: give one of them only")
