#!/usr/bin/env python3
"""Check the packed path on this machine: kernels and model against a float64 oracle, short training runs, and costs.

Sections run in a process of their own: what one of them does to its device or its process costs none of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.wlb.gpu_check.page import NOT_CHECKED, footer, header, section
from megatron.wlb.gpu_check.results import Result, measured_by
from megatron.wlb.gpu_check.supervision import supervise
from wlb.command_line import run_tool
from wlb.cost import TransformerShape
from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError, WlbError

SECONDS = {"cuda": 465.0, "cpu": 420.0}
"""For the whole check: nothing is begun after them, and what runs then is stopped."""


MODELS = {
    # Of 8B parameters.
    "cuda": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14_336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "vocab_size": 128_256,
    },
    "cpu": {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "vocab_size": 256,
    },
}


class CheckFailed(WlbError):
    """At least one section did not pass."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu is a rehearsal for CI.")
    parser.add_argument("--json", type=Path, help="Write all that was measured here, after each section.")
    parser.add_argument("--cost-profile", type=Path, help="Write what --wlb-cost-profile takes, for the model below.")
    parser.add_argument("--seconds", type=float, help=f"For the whole check; by default {SECONDS}.")
    parser.add_argument("--wheels", type=Path, help="Taken by scripts/gpu_check.sh: packages that python lacks.")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    model = parser.add_argument_group("model whose costs are profiled", "As in training; each has a default.")
    for name in MODELS["cuda"]:
        model.add_argument(flag_of(name), type=int, help=", ".join(f"{d}: {m[name]}" for d, m in MODELS.items()))
    model.add_argument("--no-swiglu", action="store_true", help="The MLP has no gate.")
    model.add_argument("--tensor-model-parallel-size", type=int, default=1, help="The costs are of one of these ranks.")
    return parser


def shape_of(args: argparse.Namespace) -> TransformerShape:
    """What one tensor-parallel rank has of the model. Raises ConfigError if it cannot be divided."""
    given = {name: getattr(args, name) for name in MODELS[args.device] if getattr(args, name) is not None}
    sizes = MODELS[args.device] | given
    ranks = args.tensor_model_parallel_size
    for name in ("ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size"):
        if ranks < 1 or sizes[name] % ranks:
            raise ConfigError(
                f"--tensor-model-parallel-size must be >= 1 and divide {flag_of(name)} {sizes[name]}, got {ranks}"
            )
        sizes[name] //= ranks
    return TransformerShape(head_size=sizes.pop("kv_channels"), gated=not args.no_swiglu, **sizes)


def flag_of(name: str) -> str:
    """`num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def main(argv: Sequence[str]) -> None:
    """Run every section and print a page.

    Raises:
        ConfigError: the device is not there, or the model cannot be. CheckFailed: naming what failed, once all has run.
    """
    args = make_parser().parse_args(argv)
    if args.wheels is not None:
        raise ConfigError(f"--wheels must be given to scripts/gpu_check.sh, which installs them, got {args.wheels}")
    shape = shape_of(args)
    if args.worker is not None:
        from megatron.wlb.gpu_check.worker import work

        work(args.device, args.worker, seconds=args.seconds, shape=shape)
        return
    begin_s = time.monotonic()
    results: list[Result] = []
    environment: dict[str, Any] = {}
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    total_s = args.seconds or SECONDS[args.device]
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-") as folder,
        # Closed at once where this is interrupted: a worker holds the device.
        closing(supervise([*command, "--worker", folder], Path(folder), total_s=total_s)) as told,
    ):
        for message in told:
            if isinstance(message, Result):
                results.append(message)
                print("\n".join(["", *section(message)]), flush=True)
            else:
                environment = message
                print("\n".join(header(environment)), flush=True)
            _save(args, environment, results, time.monotonic() - begin_s, complete=False)
    _save(args, environment, results, time.monotonic() - begin_s, complete=True)
    print("\n".join(["", *footer(results, environment["device"], time.monotonic() - begin_s)]))
    if failed := [result.name for result in results if not result.passed]:
        raise CheckFailed(f"{len(failed)} of {len(results)} sections failed: {'; '.join(failed)}")


def _save(
    args: argparse.Namespace, environment: dict[str, Any], results: list[Result], seconds: float, *, complete: bool
) -> None:
    """What there is so far, so that a check that is stopped leaves what it found."""
    if args.json is not None:
        page = {
            "device": args.device,
            "environment": environment,
            "passed": complete and all(r.passed for r in results),
            "complete": complete,
            "seconds": round(seconds, 1),
            "not_checked": NOT_CHECKED,
            "sections": [asdict(r) for r in results],
        }
        with atomic_path(args.json) as path:
            path.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    profile = measured_by(results, "cost profile").get("given")
    if args.cost_profile is not None and profile is not None:
        with atomic_path(args.cost_profile) as path:
            path.write_text(json.dumps(profile["profile"], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_tool(main))
