"""Compares sharders on packs of a trace of document lengths: how even context-parallel ranks are, and what travels.

    python benchmarks/cp_sharding.py --lengths FILE --window 131072 --cp 8 --packs 60 --seeds 1,2,3,4,5 --json OUT

Packs are what Megatron would train: the lengths in the order of numpy's default_rng(seed).permutation, again and again,
cut to the window, concatenated and cut into windows. Ideal is the exact causal (query, key) pairs over the ranks;
the floor has whole kernel tiles, nothing cut and perfect balance. Of every pack the slowest rank counts; numbers are
medians over seeds of means over packs, planning time the median over all packs, of one core.

work imbalance: causal pairs of the busiest rank over the mean rank's. time/ideal: pairs in 128-row, 128-key tiles of
the slowest rank over ideal. received: tokens whose keys and values the rank that needs most receives, over those of the
pack. predicted/ideal: what sharders compare: tiles, and receiving at the price of --heads, --kv-heads and
--operations-per-byte. The defaults are Llama-3-8B's heads on an H100 with NVLink.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError
from wlb.sharding import DEFAULT_OPERATIONS_PER_BYTE, SHARDERS, ShardCosts, ShardPlan, sharder_named
from wlb.sharding.plan import span_pairs
from wlb.simulate import load_lengths

_TABLE = (
    ("work_imbalance", "work imbalance", ".3f"),
    ("tile_time_over_ideal", "time/ideal", ".4f"),
    ("kv_received_fraction", "received", ".3f"),
    ("predicted_over_ideal", "predicted/ideal", ".3f"),
    ("token_spread", "token spread", ".0f"),
    ("plan_ms_median", "plan ms", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackNumbers:
    """Of one plan of one pack. token_spread: tokens of the fullest rank beyond those of the emptiest."""

    work_imbalance: float
    tile_time_over_ideal: float
    kv_received_fraction: float
    predicted_over_ideal: float
    token_spread: int

    @classmethod
    def of(cls, plan: ShardPlan, costs: ShardCosts) -> PackNumbers:
        ranks = range(plan.cp_size)
        tiles = ShardCosts(tile_tokens=costs.tile_tokens)
        pairs = [plan.causal_pairs(rank) for rank in ranks]
        tokens = [sum(s.num_tokens for s in spans) for spans in plan.ranks]
        ideal = sum(pairs) / plan.cp_size
        return cls(
            work_imbalance=max(pairs) / ideal,
            tile_time_over_ideal=max(tiles.attention_pairs(plan, rank) for rank in ranks) / ideal,
            kv_received_fraction=max(plan.received_tokens(rank) for rank in ranks) / plan.num_tokens,
            predicted_over_ideal=costs.slowest_pairs(plan) / ideal,
            token_spread=max(tokens) - min(tokens),
        )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", type=Path, required=True, help="JSON list, or text with one length a line")
    parser.add_argument("--window", type=int, default=131072, help="tokens of a pack")
    parser.add_argument("--cp", type=int, default=8, help="context-parallel ranks")
    parser.add_argument("--packs", type=int, default=60, help="packs of each seed")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="orders of the documents, comma-separated")
    parser.add_argument("--sharders", default=",".join(SHARDERS), help="names, comma-separated")
    parser.add_argument("--heads", type=int, default=32, help="query heads of a layer")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads of a layer")
    parser.add_argument("--bytes-per-number", type=int, default=2, help="of keys and values; 2 is bf16")
    parser.add_argument(
        "--operations-per-byte",
        type=float,
        default=DEFAULT_OPERATIONS_PER_BYTE,
        help="operations of attention that a device does while one byte arrives",
    )
    parser.add_argument("--tile-tokens", type=int, default=128, help="rows and keys of a kernel tile")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(arguments)


def packs(lengths: NDArray[np.int64], *, window_tokens: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Documents of one full window after the other, without end."""
    draw = np.random.default_rng(seed)
    pack: list[int] = []
    room = window_tokens
    while True:
        for length in np.minimum(draw.permutation(lengths), window_tokens).tolist():
            left = length
            while left:
                pack.append(min(left, room))
                left -= pack[-1]
                room -= pack[-1]
                if not room:
                    yield tuple(pack)
                    pack, room = [], window_tokens


def seeds_of(options: argparse.Namespace) -> list[int]:
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds must be whole numbers, comma-separated, got {options.seeds!r}") from error
    if min(seeds) < 0:
        raise ConfigError(f"--seeds must be >= 0, got {min(seeds)}")
    return seeds


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """The content of the JSON file."""
    for name in ("window", "cp", "packs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be >= 1, got {getattr(options, name)}")
    if options.window % options.cp:
        raise ConfigError(f"--window must be a multiple of --cp = {options.cp}, got {options.window}")
    seeds = seeds_of(options)
    sharders = {name: sharder_named(name) for name in options.sharders.split(",")}
    costs = ShardCosts.for_model(
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        bytes_per_number=options.bytes_per_number,
        operations_per_byte=options.operations_per_byte,
        tile_tokens=options.tile_tokens,
    )
    lengths = load_lengths(options.lengths)
    numbers: dict[str, list[list[PackNumbers]]] = {name: [] for name in sharders}
    plan_ms: dict[str, list[float]] = {name: [] for name in sharders}
    floors: list[list[float]] = []
    with tqdm(total=len(seeds) * options.packs, unit="pack", file=sys.stderr) as progress:
        for seed in seeds:
            floors.append([])
            for of_sharder in numbers.values():
                of_sharder.append([])
            for pack in islice(packs(lengths, window_tokens=options.window, seed=seed), options.packs):
                floors[-1].append(sum(costs.tile_pairs(0, n) for n in pack) / sum(span_pairs(0, n) for n in pack))
                for name, sharder in sharders.items():
                    begin_s = time.thread_time()
                    plan = sharder(pack, options.cp, costs)
                    plan_ms[name].append((time.thread_time() - begin_s) * 1e3)
                    numbers[name][-1].append(PackNumbers.of(plan, costs))
                progress.update()
    floor = statistics.median(map(statistics.fmean, floors))
    return {
        "command": command,
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__},
        "received_token_pairs": costs.received_token_pairs,
        "floor": {
            "work_imbalance": 1.0,
            "tile_time_over_ideal": floor,
            "kv_received_fraction": 0.0,
            "predicted_over_ideal": floor,
            "token_spread": 0,
            "plan_ms_median": None,
        },
        "sharders": {
            name: {
                **{field: _median_of_means(of_sharder, field) for field, _, _ in _TABLE[:-1]},
                "plan_ms_median": statistics.median(plan_ms[name]),
                "plan_ms_max": max(plan_ms[name]),
            }
            for name, of_sharder in numbers.items()
        },
        "hybrid_predicted_slower_packs": _slower_packs(numbers),
    }


def _median_of_means(of_seeds: Sequence[Sequence[PackNumbers]], field: str) -> float:
    return statistics.median(statistics.fmean(getattr(pack, field) for pack in of_packs) for of_packs in of_seeds)


def _slower_packs(numbers: dict[str, list[list[PackNumbers]]]) -> int | None:
    """Packs on which hybrid is predicted slower than the better static plan; None unless all three were run."""
    if not {"hybrid", "per_sequence", "per_document"} <= numbers.keys():
        return None
    every = {name: [pack.predicted_over_ideal for seed in seeds for pack in seed] for name, seeds in numbers.items()}
    static = map(min, every["per_sequence"], every["per_document"])
    return sum(mine > best for mine, best in zip(every["hybrid"], static, strict=True))


def table(report: dict[str, Any]) -> str:
    """The results, one sharder a row."""
    rows = [["sharder", *(title for _, title, _ in _TABLE)]]
    for name, result in {**report["sharders"], "floor": report["floor"]}.items():
        rows.append(
            [name, *("-" if result[field] is None else format(result[field], spec) for field, _, spec in _TABLE)]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: Sequence[str]) -> None:
    options = parse_arguments(arguments)
    report = run(options, shlex.join([Path(sys.executable).name, "benchmarks/cp_sharding.py", *arguments]))
    print(f"$ {report['command']}")
    print(f"receiving a token's key and value is worth {report['received_token_pairs']} pairs")
    print(table(report))
    if report["hybrid_predicted_slower_packs"] is not None:
        print(
            f"packs on which hybrid is predicted slower than the better static plan: "
            f"{report['hybrid_predicted_slower_packs']}"
        )
    if options.json is not None:
        with atomic_path(options.json) as path:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_tool(main))
