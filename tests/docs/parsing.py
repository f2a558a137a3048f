"""Parses command lines of training up to the point where a cluster is needed, in a forked rank."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness.processes import run_ranks

ENTRY = "pretrain_gpt_wlb.py"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A call of torchrun: how many ranks it starts in all, and the trainer's arguments."""

    num_ranks: int
    argv: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Launch:
        """line: the arguments of torchrun, quoted as for a shell."""
        words = shlex.split(line)
        place = next(i for i, word in enumerate(words) if word.rpartition("/")[2] == ENTRY)
        options = iter(words[:place])
        sizes = {"nnodes": 1, "nproc-per-node": 1}
        for word in options:
            name, equals, value = word.removeprefix("--").replace("_", "-").partition("=")
            if name in sizes:
                sizes[name] = int(value if equals else next(options))
        return cls(num_ranks=sizes["nnodes"] * sizes["nproc-per-node"], argv=tuple(words[place + 1 :]))


def parsed(launches: Sequence[Launch]) -> list[dict[str, Any] | str]:
    """For each launch the options of packing, or the sentence with which it is refused.

    The options: "packing" (None where the run is stock), "sharding", "max_delay_steps", and Megatron's
    "data_parallel_size".
    """
    (answers,) = run_ranks(_parse_all, 1, [(launch.num_ranks, launch.argv) for launch in launches])
    return list(answers)


def _parse_all(launches: list[tuple[int, tuple[str, ...]]]) -> list[dict[str, Any] | str]:
    return [_parse(num_ranks, argv) for num_ranks, argv in launches]


def _parse(num_ranks: int, argv: tuple[str, ...]) -> dict[str, Any] | str:
    import io
    import sys
    from contextlib import redirect_stderr, redirect_stdout

    from megatron.training.arguments import parse_args, validate_args

    from megatron.wlb import stock
    from megatron.wlb.arguments import add_wlb_arguments, wlb_options
    from megatron.wlb.cpu import cpu_as_device
    from wlb.errors import ConfigError

    os.environ["WORLD_SIZE"] = str(num_ranks)
    sys.argv = [ENTRY, *argv]
    said = io.StringIO()
    try:
        with cpu_as_device(), redirect_stdout(io.StringIO()), redirect_stderr(said):
            # Without the tokenizer, whose files are the reader's.
            args = parse_args(add_wlb_arguments)
            validate_args(args)
            stock.check_supported(args)
            options = wlb_options(args)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except AssertionError as error:
        return f"AssertionError: {error}"
    return {
        "packing": None if options is None else options.packing,
        "sharding": None if options is None else options.sharding.name,
        "max_delay_steps": 0 if options is None else options.max_delay_steps,
        "data_parallel_size": args.data_parallel_size,
    }
