#!/usr/bin/env python3
"""Check the packed path on this machine: kernels and model against a float64 oracle, then short training runs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError, WlbError


class CheckFailed(WlbError):
    """At least one check did not pass."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu is a rehearsal for CI.")
    parser.add_argument("--json", type=Path, help="Write all that was measured here.")
    return parser


def main(argv: Sequence[str]) -> None:
    """Run every check and print a page.

    Raises:
        ConfigError: the device is not there. CheckFailed: naming what failed, once everything has run.
    """
    args = make_parser().parse_args(argv)
    with warnings.catch_warnings(), _quiet_logging():
        # Upstream's notices of what it falls back to: the page says it, and what is lost by it.
        warnings.simplefilter("ignore")
        _check(args)


def _check(args: argparse.Namespace) -> None:
    import torch

    if torch.cuda.is_available() != (args.device == "cuda"):
        have = "one" if torch.cuda.is_available() else "none"
        raise ConfigError(
            f"--device must be cuda where there is a CUDA device and cpu elsewhere, got {args.device}: "
            f"there is {have} (scripts/gpu_check.sh hides it for cpu)"
        )
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.environment import package_sentences
    from megatron.wlb.gpu_check import environment, run_checks
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied

    facts = environment(args.device)
    print(f"python {facts['python']}, torch {facts['torch']}, CUDA {facts['cuda']}, on {facts['device']}")
    print("\n".join(package_sentences()), flush=True)
    results = []
    backend = "nccl" if args.device == "cuda" else "gloo"
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-") as folder,
        cpu_as_device(),
        applied([rope_thd.PATCH]),
        single_process(backend),
    ):
        for result in run_checks(args.device, Path(folder)):
            results.append(result)
            print(f"\n{'ok  ' if result.passed else 'FAIL'} {result.name} ({result.duration_s:.1f} s)")
            print(f"     rule: {result.rule}")
            for name, value in result.measured.items():
                print(f"     {name}: {_text(value)}")
            sys.stdout.flush()
    failed = [result.name for result in results if not result.passed]
    if args.json is not None:
        page = {"device": args.device, "environment": facts, "passed": not failed, "checks": [*map(asdict, results)]}
        with atomic_path(args.json) as path:
            path.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(results) - len(failed)} of {len(results)} checks passed on {facts['device']}")
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(results)} checks failed: {'; '.join(failed)}")


@contextmanager
def _quiet_logging() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(v)}" for name, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run_tool(main))
