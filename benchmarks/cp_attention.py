"""Times one attention layer, forward and backward, divided over context-parallel ranks by each sharder, for real.

    python benchmarks/cp_attention.py --cp 2 --pairs 5 --json OUT

Every rank is a process with one thread; keys and values travel over gloo. The layer is the quickstart's, the packs are
those that the quickstart trains (runs/quickstart/corpus, built if missing), or packs of --lengths in a shuffled order,
cut at --window. In a round every pack runs under every sharder and communication type once; which goes first rotates.
A pack takes its slowest rank's seconds, from a barrier on. What a plan needs is set up before: a model does that once a
micro-batch, not once a layer.

A round's ratio, its pair, is per_sequence's seconds over the sharder's, summed over packs, with the same communication
type; the result is the median over rounds. Where other programs run now and then, single packs are hit: `of medians`
takes every pack's median over rounds first, and `busy` the processor's seconds of the rank that computes most. Before
the rounds the packs that follow in the stream measure what a pair, a span, a received token and an exchange cost on
this machine: with these prices sharders divide the measured packs, and from them `predicted` follows. The CPU's kernel
has no tile of 128 rows; which one describes it best is fitted as well. `deviation` is the mean of |measured / predicted
- 1| over packs' medians.

Memory is that of gathered keys and values (communication type all_gather): rows of the buffer by the plan, and what
was alive, measured: while attention read it, at the worst moment (what is sent and what just arrived included), and
kept after the forward pass, without and with keep_gathered. Backward adds as many gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from wlb.attention import CommType
from wlb.attention.timed_ranks import AttentionRanks, Layer, RankTime
from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.data.index_file import index_lengths
from wlb.data.source import DocumentSource
from wlb.data.stream import DocumentStream
from wlb.errors import ConfigError, WlbError
from wlb.report.fits import MeasuredPlan, ShardTime, fit_shard_time
from wlb.sharding import SHARDERS, ShardCosts, Sharding, ShardPlan
from wlb.sharding.plan import plan_of_chunks
from wlb.simulate import load_lengths

ROOT = Path(__file__).resolve().parent.parent

Case = tuple[CommType, str, int]
"""Communication type, sharder, number of the pack."""
Plans = dict[Case, ShardPlan]

BASE = "per_sequence"
COMM_TYPES: tuple[CommType, ...] = ("all_gather", "p2p")
# So different that together they tell the price of a span from that of what is received.
_CALIBRATION_SHARDERS = ("per_sequence", "per_document", "hybrid")
_CALIBRATION_RUNS = 3
_COLUMNS = (
    ("type", "s"),
    ("sharder", "s"),
    ("ms", ".1f"),
    ("measured", ".3f"),
    ("of medians", ".3f"),
    ("busy", ".3f"),
    ("predicted", ".3f"),
    ("measured/predicted", ".3f"),
    ("deviation", ".3f"),
)
_MEMORY_COLUMNS = (
    ("sharder", "s"),
    ("received tokens", ".0f"),
    ("gathered rows", ".0f"),
    ("one copy", ".0f"),
    ("attending", ".0f"),
    ("peak", ".0f"),
    ("kept off", ".0f"),
    ("kept on", ".0f"),
    ("packs without", "d"),
)


class CorpusFailed(WlbError):
    """The corpus was not built; the script has said why."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--cp", type=int, default=2, help="context-parallel ranks, a process each")
    add("--pairs", type=int, default=5, help="rounds")
    add("--packs", type=int, default=8, help="measured packs")
    add("--calibration-packs", type=int, default=8, help="packs that prices come from")
    add("--window", type=int, default=8192, help="tokens of a pack")
    add("--lengths", type=Path, help="JSON list, or text with one length a line, instead of the corpus")
    add("--corpus", type=Path, default=ROOT / "runs/quickstart/corpus", help="built if missing")
    add("--seed", type=int, default=1, help="order of the documents")
    add("--sharders", default=",".join(SHARDERS), help=f"compared with {BASE}, comma-separated")
    add("--heads", type=int, default=2)
    add("--kv-heads", type=int, default=2)
    add("--head-size", type=int, default=32)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--timeout-s", type=float, default=120.0, help="for one pack on all ranks; then all are stopped")
    add("--json", type=Path, help="write the results here")
    options = parser.parse_args(argv)
    for name, least in (("cp", 2), ("pairs", 1), ("packs", 1), ("calibration_packs", 2), ("window", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(options, name)}")
    if options.window % options.cp:
        raise ConfigError(f"--window must be a multiple of --cp = {options.cp}, got {options.window}")
    if options.kv_heads < 1 or options.heads < 1 or options.heads % options.kv_heads:
        raise ConfigError(f"--heads must be a multiple of --kv-heads = {options.kv_heads}, got {options.heads}")
    names = options.sharders.split(",")
    if not set(names) <= set(SHARDERS):
        raise ConfigError(f"--sharders must be of {', '.join(SHARDERS)}, got {options.sharders}")
    options.sharders = list(dict.fromkeys([BASE, *names]))
    return options


def stream_packs(options: argparse.Namespace, num_packs: int) -> list[tuple[int, ...]]:
    """Lengths of the documents of each pack, as packer plain makes them of the stream."""
    if options.lengths is not None:
        lengths, label_tokens = load_lengths(options.lengths), 0
    else:
        script = [str(ROOT / "scripts/quickstart_corpus.sh"), str(options.corpus.resolve())]
        environment = os.environ | {"WLB_VENV": sys.prefix}
        if subprocess.run(script, env=environment, check=False, stdout=sys.stderr).returncode:
            raise CorpusFailed(f"corpus {options.corpus} must be built")
        lengths, label_tokens = index_lengths(options.corpus / "corpus_text_document"), 1
    source = DocumentSource(lengths=lengths, label_tokens=label_tokens)
    stream = DocumentStream([source], window_tokens=options.window, cut="stream", seed=options.seed)
    return [tuple(d.length for d in stream.take(options.window, arrival=0)) for _ in range(num_packs)]


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """The content of the JSON file."""
    packs = stream_packs(options, options.packs + options.calibration_packs)
    measured, others = packs[: options.packs], packs[options.packs :]
    layer = Layer(
        num_heads=options.heads, num_kv_heads=options.kv_heads, head_size=options.head_size, dtype=options.dtype
    )
    with (
        tempfile.TemporaryDirectory(prefix="cp-attention-") as folder,
        closing(AttentionRanks(options.cp, layer, Path(folder), timeout_s=options.timeout_s)) as ranks,
    ):
        calibrated = _calibrate(ranks, others, options)
        times = {comm_type: fit_shard_time(runs) for comm_type, runs in calibrated.items()}
        plans: Plans = {
            (comm_type, name, i): Sharding(name=name, cp_size=options.cp, costs=times[comm_type].costs).plan(pack)
            for comm_type, name, (i, pack) in product(COMM_TYPES, options.sharders, enumerate(measured))
        }
        timed = _measure(ranks, plans, options)
        memory = _memory(ranks, plans, options)
    return {
        "command": command,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load_average": os.getloadavg()},
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "layer": asdict(layer),
        "cp": options.cp,
        "window": options.window,
        "packs": [list(pack) for pack in measured],
        "prices": {
            comm_type: {**asdict(time), "deviation": time.deviation(calibrated[comm_type])}
            for comm_type, time in times.items()
        },
        "results": [
            result for comm_type, time in times.items() for result in _results(comm_type, plans, timed, time, options)
        ],
        "memory": memory,
        "seconds": [
            {
                "type": comm_type,
                "sharder": name,
                "pack": i,
                "seconds": [t.elapsed_s for t in rounds],
                "busy": [t.busy_s for t in rounds],
            }
            for (comm_type, name, i), rounds in timed.items()
        ],
    }


def _calibrate(
    ranks: AttentionRanks, packs: Sequence[tuple[int, ...]], options: argparse.Namespace
) -> dict[CommType, list[MeasuredPlan]]:
    """Medians of a few runs of every pack, by communication type."""
    costs = ShardCosts.for_model(
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        bytes_per_number=4 if options.dtype == "float32" else 2,
    )
    shardings = [Sharding(name=name, cp_size=options.cp, costs=costs) for name in _CALIBRATION_SHARDERS]
    divided = [plan for pack in packs for plan in (*(s.plan(pack) for s in shardings), _copies(pack, options.cp))]
    cases = list(product(COMM_TYPES, divided))
    found: list[list[float]] = [[] for _ in cases]
    for _ in _progress(range(_CALIBRATION_RUNS + 1), "calibration"):
        for (comm_type, plan), seconds in zip(cases, found, strict=True):
            seconds.append(max(t.elapsed_s for t in ranks.times(plan, comm_type)))
    measured: dict[CommType, list[MeasuredPlan]] = {comm_type: [] for comm_type in COMM_TYPES}
    for (comm_type, plan), seconds in zip(cases, found, strict=True):
        # The first run sets the plan up.
        measured[comm_type].append(MeasuredPlan(plan=plan, seconds=median(seconds[1:])))
    return measured


def _copies(pack: Sequence[int], cp_size: int) -> ShardPlan:
    """The first documents of a pack whole on every rank: the only plan that says what all costs without an exchange."""
    room = sum(pack) // cp_size
    held: list[int] = []
    for length in pack:
        held.append(min(length, room - sum(held)))
        if sum(held) == room:
            break
    pieces = [(rank, rank * len(held) + i, 0, n) for rank in range(cp_size) for i, n in enumerate(held)]
    return plan_of_chunks(held * cp_size, cp_size, pieces)


def _measure(ranks: AttentionRanks, plans: Plans, options: argparse.Namespace) -> dict[Case, list[RankTime]]:
    """Of the slowest and of the busiest rank, round by round."""
    variants = list(product(COMM_TYPES, options.sharders))
    for (comm_type, _, _), plan in _progress(plans.items(), "setting up"):
        ranks.times(plan, comm_type)
    found: dict[Case, list[RankTime]] = {case: [] for case in plans}
    for number, i in _progress(list(product(range(options.pairs), range(options.packs))), "rounds"):
        first = (number + i) % len(variants)
        for comm_type, name in (*variants[first:], *variants[:first]):
            case = (comm_type, name, i)
            times = ranks.times(plans[case], comm_type)
            found[case].append(RankTime(elapsed_s=max(t.elapsed_s for t in times), busy_s=max(t.busy_s for t in times)))
    return found


def _results(
    comm_type: CommType, plans: Plans, timed: dict[Case, list[RankTime]], time: ShardTime, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One a sharder."""
    packs = range(options.packs)
    rounds_s = {
        name: [
            sum(t.elapsed_s for t in of_packs)
            for of_packs in zip(*(timed[comm_type, name, i] for i in packs), strict=True)
        ]
        for name in options.sharders
    }
    medians = {
        name: [
            MeasuredPlan(plan=plans[comm_type, name, i], seconds=median(t.elapsed_s for t in timed[comm_type, name, i]))
            for i in packs
        ]
        for name in options.sharders
    }
    busy_s = {
        name: sum(median(t.busy_s for t in timed[comm_type, name, i]) for i in packs) for name in options.sharders
    }
    medians_s = {name: sum(m.seconds for m in of_packs) for name, of_packs in medians.items()}
    predicted_s = {name: sum(time.seconds(m.plan) for m in of_packs) for name, of_packs in medians.items()}

    def pairs(other: str, name: str) -> list[float]:
        return [theirs / mine for theirs, mine in zip(rounds_s[other], rounds_s[name], strict=True)]

    return [
        {
            "type": comm_type,
            "sharder": name,
            "ms": medians_s[name] / options.packs * 1e3,
            "measured": median(pairs(BASE, name)),
            "pairs": pairs(BASE, name),
            "of medians": medians_s[BASE] / medians_s[name],
            "busy": busy_s[BASE] / busy_s[name],
            "predicted": predicted_s[BASE] / predicted_s[name],
            "measured/predicted": median(pairs(BASE, name)) * predicted_s[name] / predicted_s[BASE],
            "deviation": time.deviation(medians[name]),
            "over": {other: median(pairs(other, name)) for other in options.sharders if other != name},
        }
        for name in options.sharders
    ]


def _memory(ranks: AttentionRanks, plans: Plans, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One a sharder: of every pack the rank with most, of these the mean; bytes where nothing else is said."""
    rows = []
    for name in _progress(options.sharders, "memory"):
        most = []
        for i in range(options.packs):
            plan = plans["all_gather", name, i]
            off, on = (ranks.memory(plan, keep_gathered=keep) for keep in (False, True))
            most.append(
                {
                    "received tokens": max(plan.received_tokens(rank) for rank in range(plan.cp_size)),
                    "gathered rows": max(m.gathered_rows for m in off),
                    "attending": max(m.attending_bytes for m in off),
                    "peak": max(m.peak_bytes for m in off),
                    "kept off": max(m.kept_bytes for m in off),
                    "kept on": max(m.kept_bytes for m in on),
                    "backward peak": max(m.backward_peak_bytes for m in off),
                }
            )
        row: dict[str, Any] = {key: fmean(m[key] for m in most) for key in most[0]}
        row["one copy"] = row["gathered rows"] * ranks.layer.row_bytes
        row["packs without"] = sum(m["gathered rows"] == 0 for m in most)
        rows.append({"sharder": name, **row})
    return rows


def _progress[T](items: Iterable[T], what: str) -> Iterable[T]:
    yield from tqdm(items, desc=what, file=sys.stderr)


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[dict[str, Any]]) -> str:
    cells = [[name for name, _ in columns], *([format(row[name], spec) for name, spec in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.rjust(width) for c, width in zip(row, widths, strict=True)) for row in cells)


def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    report = run(options, shlex.join([Path(sys.executable).name, "benchmarks/cp_attention.py", *argv]))
    if options.json is not None:
        with atomic_path(options.json) as path:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"$ {report['command']}")
    for comm_type, time in report["prices"].items():
        costs = time["costs"]
        print(
            f"{comm_type}: a pair takes {time['pair_s'] * 1e9:.2f} ns; in pairs, a span costs {costs['span_pairs']}, a "
            f"received token {costs['received_token_pairs']}, an exchange {costs['exchange_pairs']}; tiles of "
            f"{costs['tile_tokens']}; deviation on the packs fitted {time['deviation']:.3f}"
        )
    print(f"\n{options.pairs} rounds of {options.packs} packs, {BASE} / sharder:")
    print(_table(_COLUMNS, report["results"]))
    for result in report["results"]:
        if result["sharder"] == "hybrid":
            over = ", ".join(f"{name} {ratio:.3f} x" for name, ratio in result["over"].items())
            print(f"{result['type']}, hybrid over {over}")
    print("\ngathered keys and values, forward, bytes: the fullest rank, mean over packs")
    print(_table(_MEMORY_COLUMNS, report["memory"]))


if __name__ == "__main__":
    sys.exit(run_tool(main))
