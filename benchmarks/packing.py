"""Compares packers on a trace of document lengths: how even the work is, what a step takes, what planning costs.

    python benchmarks/packing.py --lengths FILE --window 131072 --pp 4 --dp 1 --micro-batches 4 --steps 100 \
        --crossover 36000 --overhead-tokens 1000 --cap-windows 1.5 --in-flight-windows 6 --seed 1 \
        --packers plain,greedy,wlb --json OUT
    python benchmarks/packing.py --lengths FILE --pp 4 --dp 1 --micro-batches 4 --packers plain,makespan \
        --max-delay-steps 0 --cap-windows 1.0 --in-flight-windows PP --shuffle numpy --json OUT

Times are predicted by the 1F1B model of wlb/schedule with the cost (d/B)^2 + d/B per document, B the crossover,
attention backward 2.5 x and the rest 2 x, and a fixed cost per micro-batch and stage: the linear time of
--overhead-tokens tokens there. Steps are counted once every outlier queue of the packer has released (its
warm-up), and the run then stops without draining; documents in, out and waiting are of the whole run.

For makespan the JSON also holds its search curve: the first --curve-steps steps planned with other numbers of
evaluations.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from wlb.cost import CrossoverCost
from wlb.data.atomic_files import atomic_path
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.errors import ConfigError, WlbError
from wlb.packing import DEFAULT_NUM_QUEUES, PACKERS, PackerOptions, StepShape, build_packer, derive_thresholds
from wlb.packing.makespan.packer import default_evaluations
from wlb.packing.packer import Packer
from wlb.simulate import Cluster, ReplayResult, load_lengths, replay

_TABLE = (
    ("imbalance_degree", "imbalance", ".3f"),
    ("step_time_over_ideal", "time/ideal", ".3f"),
    ("lower_bound_over_ideal", "bound", ".3f"),
    ("speedup_vs_plain", "speedup/token", ".3f"),
    ("mean_delay_steps", "delay", ".2f"),
    ("max_delay_steps", "max delay", "d"),
    ("step_tokens_cv", "tokens cv", ".3f"),
    ("max_micro_batch_tokens", "max tokens", "d"),
    ("max_in_flight_tokens", "in flight", "d"),
    ("micro_batches_mean", "micro-b.", ".1f"),
    ("plan_ms_median", "plan ms", ".2f"),
    ("documents_in", "docs in", "d"),
    ("documents_out", "out", "d"),
    ("documents_waiting", "waiting", "d"),
)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", type=Path, required=True, help="JSON list, or text with one length a line")
    parser.add_argument("--window", type=int, default=131072, help="tokens")
    parser.add_argument("--pp", type=int, default=4, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel replicas")
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
        "--max-delay-steps", type=int, choices=(0,), default=0, help="steps that makespan may hold documents back: 0"
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
    parser.add_argument("--packers", default=",".join(PACKERS), help="names, comma-separated")
    parser.add_argument("--cut", choices=("stream", "window"), help="document cut (default: each packer's own)")
    parser.add_argument("--num-queues", type=int, default=DEFAULT_NUM_QUEUES, help="of the derived thresholds, at most")
    parser.add_argument("--thresholds", help="tokens, comma-separated, instead of derived ones; 'none' delays nothing")
    parser.add_argument("--greedy-window-batches", type=int, default=1, help="global batches per greedy window")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(arguments)


def thresholds(options: argparse.Namespace, lengths: NDArray[Any]) -> tuple[int, ...]:
    if options.thresholds is None:
        return derive_thresholds(
            lengths, options.window, options.num_queues, num_micro_batches=options.dp * options.micro_batches
        )
    if options.thresholds == "none":
        return ()
    try:
        return tuple(int(t) for t in options.thresholds.split(","))
    except ValueError as error:
        raise ConfigError(f"--thresholds must be whole tokens or 'none', got {options.thresholds!r}") from error


def in_flight_tokens(options: argparse.Namespace) -> int | None:
    if options.in_flight_windows is None:
        return None
    try:
        windows = options.pp if options.in_flight_windows == "PP" else float(options.in_flight_windows)
    except ValueError as error:
        raise ConfigError(f"--in-flight-windows must be a number or PP, got {options.in_flight_windows!r}") from error
    return int(windows * options.window)


class Trace:
    """The documents of the file, from the beginning for every run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.lengths = load_lengths(options.lengths)
        self._ordered = self.lengths
        if options.shuffle == "numpy":
            self._ordered = self.lengths[np.random.default_rng(options.seed).permutation(len(self.lengths))]

    def stream(self, packer: Packer) -> DocumentStream:
        return DocumentStream(
            [DocumentSource(lengths=self._ordered, label_tokens=0)],
            window_tokens=self._options.window,
            cut=self._options.cut or packer.natural_cut,
            seed=self._options.seed,
            shuffle=self._options.shuffle == "stream",
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON file."""
    names = options.packers.split(",")
    trace = Trace(options)
    limit_tokens = in_flight_tokens(options)
    cluster = Cluster(
        cost=CrossoverCost(crossover_tokens=options.crossover, overhead_tokens=options.overhead_tokens),
        num_stages=options.pp,
        in_flight_tokens=limit_tokens,
        sends=options.sends,
    )
    packer_options = PackerOptions(
        shape=StepShape(
            window_tokens=options.window,
            micro_batches_per_replica=options.micro_batches,
            num_replicas=options.dp,
        ),
        cost=cluster.cost,
        cap_windows=options.cap_windows,
        thresholds_tokens=thresholds(options, trace.lengths),
        greedy_window_batches=options.greedy_window_batches,
        pipeline=cluster.model,
        in_flight_windows=None if limit_tokens is None else limit_tokens / options.window,
        search_evaluations=options.search_evaluations,
    )
    packers = {name: build_packer(name, packer_options) for name in names}
    results: dict[str, ReplayResult] = {}
    with tqdm(total=options.steps * len(packers), unit="step", file=sys.stderr) as progress:
        for name, packer in packers.items():
            progress.set_description(name)
            results[name] = replay(
                packer, trace.stream(packer), cluster, num_steps=options.steps, on_step=progress.update
            )
    report: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/packing.py", *sys.argv[1:]]),
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__},
        "documents_in_file": len(trace.lengths),
        "thresholds_tokens": list(packer_options.thresholds_tokens),
        "packers": {
            name: {
                **result.to_json(),
                "cut": options.cut or packers[name].natural_cut,
                "speedup_vs_plain": (
                    results["plain"].time_per_token / result.time_per_token if "plain" in results else None
                ),
            }
            for name, result in results.items()
        },
    }
    if "makespan" in names and options.curve_steps:
        report["packers"]["makespan"]["search_curve"] = search_curve(options, packer_options, trace, cluster)
    return report


def search_curve(
    options: argparse.Namespace, packer_options: PackerOptions, trace: Trace, cluster: Cluster
) -> list[dict[str, float]]:
    """Step time by number of evaluations, over the first steps."""
    assert packer_options.pipeline is not None
    most = packer_options.search_evaluations or default_evaluations(packer_options.shape, packer_options.pipeline)
    curve = []
    for evaluations in (0, most // 16, most // 4, most, 4 * most):
        packer = build_packer("makespan", replace(packer_options, search_evaluations=evaluations))
        result = replay(packer, trace.stream(packer), cluster, num_steps=min(options.steps, options.curve_steps))
        curve.append(
            {
                "evaluations": evaluations,
                "step_time_over_ideal": result.step_time_over_ideal,
                "lower_bound_over_ideal": result.lower_bound_over_ideal,
                "plan_ms_median": result.plan_ms_median,
            }
        )
    return curve


def table(report: dict[str, Any]) -> str:
    """The results, one packer a row."""
    rows = [["packer", *(title for _, title, _ in _TABLE)]]
    for name, result in report["packers"].items():
        rows.append(
            [name, *("-" if result[field] is None else format(result[field], spec) for field, _, spec in _TABLE)]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        report = run(options)
        print(f"$ {report['command']}")
        print(f"thresholds of the outlier queues: {report['thresholds_tokens']} tokens")
        print(table(report))
        if options.json is not None:
            with atomic_path(options.json) as path:
                path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except WlbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --json must be a file that can be written: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
