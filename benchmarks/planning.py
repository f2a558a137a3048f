"""How much planning slows the loop that launches small operators.

    python benchmarks/planning.py --lengths FILE --pp 4 --dp 4 --micro-batches 8 --json OUT

The loop stands for a training process: it launches small tensor operations, as many as fill `--step-s` seconds, and
takes a planned step before each round of them. Compared in turn, round by round: no planning at all, planning in a
process beside (what training does), planning in place, and planning in a thread. The figure is the median over rounds
of a step's seconds over those without planning. `operators` counts the operations alone, `step` also the wait for the
plan.
"""

from __future__ import annotations

import argparse
import json
import shlex
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from wlb.command_line import run_tool
from wlb.cost import CrossoverCost
from wlb.data.atomic_files import atomic_path
from wlb.data.index_file import IndexRows
from wlb.data.plan_process import ProcessSource
from wlb.data.plan_source import InlineSource, PlannerSpec
from wlb.errors import ConfigError
from wlb.packing import PACKERS, PackerOptions, StepShape
from wlb.schedule import PipelineModel
from wlb.simulate import load_lengths


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="trace of document lengths")
    parser.add_argument("--window", type=int, default=131072)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a replica")
    parser.add_argument("--packer", choices=sorted(PACKERS), default="makespan")
    parser.add_argument("--crossover", type=float, default=36000)
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a step without planning")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.rounds < 3:
        raise ConfigError(f"--rounds must be >= 3, got {options.rounds}")
    return options


def write_index(prefix: Path, lengths: np.ndarray) -> None:
    """An .idx of documents with these many positions; planning never looks at the .bin."""
    stored = (lengths + 1).astype("<i4")
    offsets = np.concatenate([[0], np.cumsum(stored[:-1], dtype=np.int64)]).astype("<i8")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(stored), len(stored) + 1))
        file.write(stored.tobytes() + offsets.tobytes() + np.arange(len(stored) + 1, dtype="<i8").tobytes())


class ThreadSource:
    """Plans in a thread of this process, one step ahead: what not to do."""

    def __init__(self, spec: PlannerSpec) -> None:
        self._steps: Queue[Any] = Queue(maxsize=1)
        source = InlineSource(spec)

        def plan() -> None:
            while True:
                self._steps.put(source.next_step())

        threading.Thread(target=plan, daemon=True).start()

    def next_step(self) -> Any:
        return self._steps.get()


def launch(count: int) -> float:
    """Seconds that `count` small operations take."""
    import torch

    values = torch.ones(64)
    begin_s = time.perf_counter()
    for _ in range(count):
        values = values * 1.0
    return time.perf_counter() - begin_s


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    lengths = np.minimum(np.asarray(load_lengths(options.lengths)), options.window)
    prefix = folder / "trace"
    write_index(prefix, lengths)
    cost = CrossoverCost(crossover_tokens=options.crossover, overhead_tokens=1000 * options.pp)
    shape = StepShape(
        window_tokens=options.window, micro_batches_per_replica=options.micro_batches, num_replicas=options.dp
    )
    spec = PlannerSpec(
        rows=(IndexRows(prefix=str(prefix), first=0, stop=len(lengths), weight=1.0, sequence_base=0),),
        window_tokens=options.window,
        cut="stream",
        seed=1,
        packer=options.packer,
        options=PackerOptions(shape=shape, cost=cost, pipeline=PipelineModel.equal_stages(cost, options.pp)),
        num_steps=None,
        replica=0,
        cost=cost,
        pad_to_multiple=1,
    )
    launch(20_000)
    count = int(options.step_s / launch(50_000) * 50_000)
    process = ProcessSource(spec, steps_ahead=2, rank=0)
    sources: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "process": process.next_step,
        "inline": InlineSource(spec).next_step,
        "thread": ThreadSource(spec).next_step,
    }
    # A thread plans on while others are measured; it is measured last, and stands still once its one step is ready.
    plan_ms: list[float] = []
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in tqdm(range(options.rounds), desc="rounds", file=sys.stderr):
        for name, next_step in sources.items():
            begin_s = time.perf_counter()
            step = next_step()
            operators_s = launch(count)
            rows[name].append((operators_s, time.perf_counter() - begin_s))
            if name == "process":
                plan_ms.append(step.plan_s * 1e3)
    process.close()
    kept = {name: values[1:] for name, values in rows.items()}  # the first round warms up

    def ratio(name: str, column: int) -> float:
        return median(a[column] / b[column] for a, b in zip(kept[name], kept["none"], strict=True))

    return {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/planning.py", *sys.argv[1:]]),
        "plan_ms_median": median(plan_ms),
        "step_s": median(s for _, s in kept["none"]),
        "ratios": {n: {"operators": ratio(n, 0), "step": ratio(n, 1)} for n in sources if n != "none"},
    }


def main(argv: list[str]) -> None:
    options = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    if options.json is not None:
        with atomic_path(options.json) as path:
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"$ {result['command']}")
    print(f"planning a step: {result['plan_ms_median']:.1f} ms; a step without planning: {result['step_s']:.3f} s")
    for name, ratios in result["ratios"].items():
        print(f"{name:8}  operators {ratios['operators']:.4f} x   step {ratios['step']:.4f} x")


if __name__ == "__main__":
    sys.exit(run_tool(main))
