"""How many candidate orders and contents of a replica's step the timing model evaluates a second, on one core.

    python benchmarks/schedule.py --json OUT

One at a time, and 64 at once as the search does. The graph of a shape is built once and its time is given apart.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from wlb.data.atomic_files import atomic_path
from wlb.schedule import PipelineShape, pass_graph

_SHAPES = (
    (PipelineShape(num_stages=4), 4),
    (PipelineShape(num_stages=4), 16),
    (PipelineShape(num_stages=8), 32),
    (PipelineShape(num_stages=8, num_chunks=2, sends="overlapped"), 32),
    (PipelineShape(num_stages=8), 1024),
)


def measure(shape: PipelineShape, count: int, *, candidates: int, seconds: float) -> float:
    """Evaluations a second of `candidates` at once."""
    graph = pass_graph(shape, count, instant_messages=True)
    rows = graph.rows(range(shape.num_virtual_stages))
    forward = np.random.default_rng(0).integers(1, 10**9, (shape.num_virtual_stages * count, candidates))
    durations = np.concatenate([forward, 2 * forward])
    graph.makespans(durations, rows)
    done, begin_s = 0, time.perf_counter()
    while time.perf_counter() - begin_s < seconds:
        graph.makespans(durations, rows)
        done += candidates
    return done / (time.perf_counter() - begin_s)


def run(seconds: float) -> list[dict[str, Any]]:
    results = []
    for shape, count in _SHAPES:
        begin_s = time.perf_counter()
        pass_graph(shape, count, instant_messages=True)
        build_ms = (time.perf_counter() - begin_s) * 1e3
        results.append(
            {
                "num_stages": shape.num_stages,
                "num_chunks": shape.num_chunks,
                "micro_batches": count,
                "build_ms": build_ms,
                "evaluations_per_s": measure(shape, count, candidates=1, seconds=seconds),
                "evaluations_per_s_64_at_once": measure(shape, count, candidates=64, seconds=seconds),
            }
        )
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    results = run(options.seconds)
    command = shlex.join([Path(sys.executable).name, "benchmarks/schedule.py", *sys.argv[1:]])
    print(f"$ {command}")
    print("stages  chunks  micro-batches  build ms  evaluations/s  64 at once/s")
    for r in results:
        print(
            f"{r['num_stages']:6}  {r['num_chunks']:6}  {r['micro_batches']:13}  {r['build_ms']:8.1f}  "
            f"{r['evaluations_per_s']:13,.0f}  {r['evaluations_per_s_64_at_once']:12,.0f}"
        )
    if options.json is not None:
        with atomic_path(options.json) as path:
            path.write_text(json.dumps({"command": command, "shapes": results}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
