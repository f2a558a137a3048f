"""What a shard plan costs the thread that launches kernels: milliseconds a micro-batch.

    python benchmarks/launching_thread.py --lengths FILE --cp 8 --json OUT

Micro-batches of one window are filled from the trace, and divided by each sharder. Compared: attention's index made by
the launching thread in its first layer, and made by the planning process and taken over with the step (what training
does). Both columns hold what happens to the plan itself (it crosses a process boundary either way) and the writing out
of row numbers for the device.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.data.sharded_step import pack_shard_plans, unpack_shard_plans
from wlb.documents import MicroBatch, documents_from_lengths
from wlb.errors import ConfigError
from wlb.sharding import SHARDERS, Sharding, ShardPlan
from wlb.sharding.index import GatherIndex, Index, gather_index, prepare, ring_index
from wlb.simulate import load_lengths


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="trace of document lengths")
    parser.add_argument("--window", type=int, default=131072)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.micro_batches < 1:
        raise ConfigError(f"--micro-batches must be >= 1, got {options.micro_batches}")
    return options


def micro_batches(lengths: list[int], window: int, count: int) -> list[MicroBatch]:
    """The first documents of the trace, each micro-batch filled to the window; what does not fit is cut off."""
    packs: list[list[int]] = [[]]
    for length in lengths:
        room = window - sum(packs[-1])
        packs[-1].append(min(length, room))
        if sum(packs[-1]) == window:
            if len(packs) == count:
                return [MicroBatch(documents=documents_from_lengths(pack)) for pack in packs]
            packs.append([])
    raise ConfigError(f"--lengths must hold {count} windows of {window} tokens, got {len(packs) - 1}")


def look_up(plan: ShardPlan, kind: str, rank: int) -> None:
    """What the first layer of a micro-batch does on the host, the copies to the device left out."""
    index: Index = gather_index(plan, rank, None) if kind == "all_gather" else ring_index(plan, rank, None)
    rows = index.exchanged_rows if isinstance(index, GatherIndex) else [step.send_rows for step in index.steps]
    for each in (*rows, *(phase.call.query_rows for phase in index.phases if phase.num_tasks)):
        if not each.are_all_in_order:
            each.numbers  # noqa: B018 (written out on first use)


def thread_ms(micro_batch: MicroBatch, sharding: Sharding, kind: Any, *, ahead: bool) -> float:
    """From the message of the planning process to everything looked up; the fastest of five."""
    rank = sharding.cp_size // 2
    best_s = float("inf")
    for _ in range(5):
        plan = sharding.plan(micro_batch.lengths)
        if ahead:
            prepare(plan, rank, [(kind, None)])
        message = pickle.dumps(pack_shard_plans([plan]))
        begin_s = time.perf_counter()
        (arrived,) = unpack_shard_plans(
            *pickle.loads(message), [micro_batch], cp_size=sharding.cp_size, pad_to_multiple=1
        )
        look_up(arrived, kind, rank)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s * 1e3


def main(argv: list[str]) -> None:
    options = parse_arguments(argv)
    packs = micro_batches(load_lengths(options.lengths).tolist(), options.window, options.micro_batches)
    cases = [(name, kind) for name in SHARDERS for kind in ("all_gather", "p2p")]
    rows = []
    for name, kind in tqdm(cases, file=sys.stderr):
        sharding = Sharding(name=name, cp_size=options.cp)
        in_place, prepared = (
            median(thread_ms(pack, sharding, kind, ahead=ahead) for pack in packs) for ahead in (False, True)
        )
        rows.append({"sharder": name, "comm_type": kind, "in_place_ms": in_place, "prepared_ms": prepared})
    command = shlex.join([Path(sys.executable).name, "benchmarks/launching_thread.py", *argv])
    documents = median(len(pack.documents) for pack in packs)
    if options.json is not None:
        with atomic_path(options.json) as path:
            result = {"command": command, "documents_median": documents, "rows": rows}
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"$ {command}")
    print(f"{len(packs)} micro-batches of {options.window} tokens, {documents:.0f} documents each, CP {options.cp}")
    print(f"{'sharder':14}{'comm type':12}{'in place':>10}{'prepared':>10}   ms on the launching thread")
    for row in rows:
        print(f"{row['sharder']:14}{row['comm_type']:12}{row['in_place_ms']:10.2f}{row['prepared_ms']:10.2f}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
