"""Arguments of benchmarks/packing.py, and the values that follow from one of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from wlb.errors import ConfigError
from wlb.packing import DEFAULT_NUM_QUEUES, DEFAULT_SOLVER_SECONDS, PACKERS
from wlb.packing.delay_thresholds import DEFAULT_MEAN_DELAY_STEPS
from wlb.sharding import SHARDERS, Division, ShardCosts, Sharding


def parse_arguments(arguments: list[str] | None, description: str | None) -> argparse.Namespace:
    """Everything that a person may choose."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", type=Path, required=True, help="JSON list, or text with one length a line")
    parser.add_argument("--window", type=int, default=131072, help="tokens")
    parser.add_argument("--pp", type=int, default=4, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel replicas")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks that divide each micro-batch")
    parser.add_argument("--cp-sharding", choices=tuple(SHARDERS), help="how (default: per_sequence)")
    parser.add_argument("--shard-plans", type=int, help="shard plans that makespan makes in a step (default: 120 ms)")
    parser.add_argument("--micro-batches", type=int, default=4, help="per data-parallel rank and step")
    parser.add_argument("--steps", type=int, default=100, help="counted steps")
    parser.add_argument("--crossover", type=float, default=36000.0, help="tokens at which attention = the rest")
    parser.add_argument("--overhead-tokens", type=float, default=1000.0, help="fixed cost of a micro-batch")
    parser.add_argument(
        "--cap-windows",
        type=float,
        help="most tokens of a variable-length micro-batch (default: the packer's own, wlb 1.5, makespan 1)",
    )
    parser.add_argument(
        "--in-flight-windows",
        help="most tokens that the first stage may hold, a number or PP for --pp (default: no limit, and for makespan "
        "what plain holds); a step beyond it is an error",
    )
    parser.add_argument(
        "--max-delay-steps",
        type=int,
        default=0,
        help="longest wait of a document under makespan, two_stage, and wlb with --wlb-intake budget",
    )
    parser.add_argument(
        "--wlb-intake",
        choices=("algorithm1", "budget"),
        default="algorithm1",
        help="how wlb draws and releases: as published, or within the budget of every step",
    )
    parser.add_argument(
        "--mean-delay-steps",
        type=float,
        default=DEFAULT_MEAN_DELAY_STEPS,
        help="limit of the mean delay when thresholds for --max-delay-steps are chosen",
    )
    parser.add_argument(
        "--delay-curve", type=Path, help="draw makespan's step time by --max-delay-steps 0 to 64 to this PNG file"
    )
    parser.add_argument("--search-evaluations", type=int, help="candidates that makespan times (default: about 20 ms)")
    parser.add_argument("--curve-steps", type=int, default=10, help="steps of makespan's search curve; 0 leaves it out")
    parser.add_argument(
        "--sends",
        choices=("blocking", "buffered"),
        default="blocking",
        help="whether a rank waits until its message is taken, as Megatron's does",
    )
    parser.add_argument("--seed", type=int, default=1, help="order of the documents")
    parser.add_argument(
        "--shuffle",
        choices=("stream", "numpy"),
        default="stream",
        help="order of the documents: the training stream's, or numpy's default_rng(seed).permutation",
    )
    parser.add_argument(
        "--packers",
        default=",".join(name for name in PACKERS if name != "solver"),
        help="names, comma-separated (default: all but solver, which is slow); NAME:blind is not told how "
        "ranks divide a micro-batch",
    )
    parser.add_argument("--cut", choices=("stream", "window"), help="document cut (default: each packer's own)")
    parser.add_argument("--num-queues", type=int, default=DEFAULT_NUM_QUEUES, help="of the derived thresholds, at most")
    parser.add_argument(
        "--thresholds",
        help="tokens, comma-separated, or 'none'; default: derived for wlb as published, for others chosen by a replay "
        "of the lengths in another order",
    )
    parser.add_argument("--greedy-window-batches", type=int, default=1, help="global batches per greedy window")
    parser.add_argument(
        "--solver-lengths", choices=("variable", "fixed"), default="variable", help="what solver solves"
    )
    parser.add_argument(
        "--solver-seconds", type=float, default=DEFAULT_SOLVER_SECONDS, help="that solver may search in a step"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(arguments)


def packer_names(options: argparse.Namespace) -> list[str]:
    """Of --packers. Raises ConfigError for one that there is not, and where --cap-windows is too small for it."""
    names: list[str] = options.packers.split(",")
    for name in names:
        packer, colon, kind = name.partition(":")
        if colon and kind != "blind":
            raise ConfigError(f"--packers must be names, or names with :blind, got {name!r}")
        if packer not in PACKERS:
            raise ConfigError(f"--packers must be of {', '.join(PACKERS)}, got {packer!r}")
    if options.cap_windows is not None and not 1 <= options.cap_windows < float("inf"):
        raise ConfigError(f"--cap-windows must be >= 1 and finite, got {options.cap_windows}")
    return names


def given_thresholds(options: argparse.Namespace) -> tuple[int, ...] | None:
    """Of --thresholds; None where they are to be found. Raises ConfigError unless they are whole numbers."""
    if options.thresholds is None:
        return None
    if options.thresholds == "none":
        return ()
    try:
        return tuple(int(t) for t in options.thresholds.split(","))
    except ValueError as error:
        raise ConfigError(f"--thresholds must be whole tokens or 'none', got {options.thresholds!r}") from error


def in_flight_tokens(options: argparse.Namespace) -> int | None:
    """Of --in-flight-windows; None without a limit. Raises ConfigError unless it is a number or PP."""
    if options.in_flight_windows is None:
        return None
    try:
        windows = options.pp if options.in_flight_windows == "PP" else float(options.in_flight_windows)
        return int(windows * options.window)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"--in-flight-windows must be a number or PP, got {options.in_flight_windows!r}") from error


def division(options: argparse.Namespace) -> Division | None:
    """Of --cp and --cp-sharding; None for one rank."""
    costs = ShardCosts.for_model(num_heads=32, num_kv_heads=32)  # of the model whose crossover is the default
    sharding = Sharding(name=options.cp_sharding or "per_sequence", cp_size=options.cp, costs=costs)
    return Division.of(sharding, pad_to_multiple=options.cp, typical_tokens=options.window)
