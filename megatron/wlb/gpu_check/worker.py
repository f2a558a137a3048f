"""Runs sections of the GPU check one after another and tells of each on stdout: see `supervision`."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from megatron.wlb.gpu_check.results import Announcement, Result, load_results
from wlb.cost import TransformerShape
from wlb.errors import ConfigError

# What a section may take beyond its budget before it is stopped: checks run to their end, and slower devices exist.
_PATIENCE = 3.0
_LEAST_S = 90.0
# Of the seconds that are left, what is kept back for sections that take longer than they should.
_RESERVE = 0.12


def work(device: Literal["cuda", "cpu"], folder: Path, *, seconds: float, shape: TransformerShape) -> None:
    """Every section that has not ended yet; ends after one that leaves the device unusable.

    Args:
        folder: for `RESULTS_FILE`, and for data and logs of training runs.
        seconds: for all sections that are left, this start included; measuring is cut short to fit.
        shape: of the model whose costs are profiled.

    Raises:
        ConfigError: the device is not there.
    """
    deadline_s = time.monotonic() + seconds * (1 - _RESERVE)
    with warnings.catch_warnings(), _quiet_logging():
        # Upstream's notices of what it falls back to: the page says it, and what is lost by it.
        warnings.simplefilter("ignore")
        check_device(device)
        faulthandler.enable()
        _run(device, folder, deadline_s, shape, _take_stdout())


def check_device(device: str) -> None:
    """Raises ConfigError where the device is not what is there."""
    import torch

    if torch.cuda.is_available() != (device == "cuda"):
        have = "one" if torch.cuda.is_available() else "none"
        raise ConfigError(
            f"--device must be cuda where there is a CUDA device and cpu elsewhere, got {device}: "
            f"there is {have} (scripts/gpu_check.sh hides it for cpu)"
        )


def _run(
    device: Literal["cuda", "cpu"],
    folder: Path,
    deadline_s: float,
    shape: TransformerShape,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check.sections import environment, sections
    from megatron.wlb.parallel import single_process
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied

    results = load_results(folder)
    with cpu_as_device(), applied([rope_thd.PATCH]), single_process("nccl" if device == "cuda" else "gloo"):
        everything = sections(device, folder, shape)
        announced = [Announcement(name=s.name, kind=s.kind, rule=s.rule) for s in everything]
        tell({"hello": environment(device), "sections": [asdict(a) for a in announced]})
        ended = {r.name for r in results}
        left = [s for s in everything if s.name not in ended]
        while left:
            section = left.pop(0)
            shares = section.share + sum(s.share for s in left)
            budget_s = max(0.0, deadline_s - time.monotonic()) * section.share / shares
            tell({"begin": section.name, "budget_s": budget_s, "limit_s": max(_LEAST_S, _PATIENCE * budget_s)})
            results.append(run_section(section, budget_s, results))
            tell({"result": asdict(results[-1])})
            if not _device_is_usable():
                return


def run_section(section: Any, budget_s: float, results: Sequence[Result]) -> Result:
    """Of a `gpu_check.Section`; one that raises has failed."""
    begin_s = time.perf_counter()
    try:
        passed, measured = section.check(budget_s, results)
    except Exception as error:
        traceback.print_exc()
        passed, measured = False, {"error": f"{type(error).__name__}: {error}"}
    return Result(
        name=section.name,
        kind=section.kind,
        passed=bool(passed),
        rule=section.rule,
        measured=measured,
        duration_s=round(time.perf_counter() - begin_s, 2),
        budget_s=round(budget_s, 2),
    )


def _device_is_usable() -> bool:
    """Not after a kernel that wrote where it must not: every later call of the process fails."""
    import torch

    gc.collect()  # an exception's frames hold tensors
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _take_stdout() -> Callable[[dict[str, Any]], None]:
    """What writes messages to where stdout led; everything that prints goes to stderr from now on."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return tell


@contextmanager
def _quiet_logging() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
