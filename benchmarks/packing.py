"""Compares packers on a trace of document lengths: how even the work is, what a step takes, what planning costs.

    python benchmarks/packing.py --lengths FILE --window 131072 --pp 4 --dp 1 --micro-batches 4 --steps 100 \
        --crossover 36000 --overhead-tokens 1000 --cap-windows 1.5 --in-flight-windows 6 --seed 1 \
        --packers plain,greedy,wlb --json OUT
    python benchmarks/packing.py --lengths FILE --pp 4 --dp 1 --micro-batches 4 --packers plain,makespan \
        --max-delay-steps 0 --cap-windows 1.0 --in-flight-windows PP --shuffle numpy --json OUT
    python benchmarks/packing.py --lengths FILE --cp 8 --cp-sharding hybrid --packers plain,makespan:blind,makespan

Times are predicted by the 1F1B model of wlb/schedule with the cost (d/B)^2 + d/B per document, B the crossover,
attention backward 2.5 x and the rest 2 x, and a fixed cost per micro-batch and stage: the linear time of
--overhead-tokens tokens there. Steps are counted once every outlier queue of the packer has released (its
warm-up), and the run then stops without draining; documents in, out and waiting are of the whole run.

With --cp a micro-batch takes as long as its slowest context-parallel rank under --cp-sharding, with keys and values to
receive priced as for Llama-2-7B, and packers know it unless :blind is behind their name.

With --max-delay-steps, packers that can hold documents back do, each within the budget of every step. wlb as published
then keeps its own caps if those given are too small for it; its row says what it held.

For makespan the JSON also holds its search curve: the first --curve-steps steps planned with other numbers of
evaluations.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.packing_arguments import (
    division,
    given_thresholds,
    in_flight_tokens,
    packer_names,
    parse_arguments,
)
from wlb.cost import CrossoverCost
from wlb.data.atomic_files import atomic_path
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.errors import ConfigError, WlbError
from wlb.packing import (
    PackerOptions,
    StepShape,
    build_packer,
    derive_thresholds,
    natural_cut,
)
from wlb.packing.delay_thresholds import (
    ChosenThresholds,
    choose_thresholds,
    front_table,
    threshold_remarks,
)
from wlb.packing.makespan.packer import default_evaluations
from wlb.packing.packer import Packer
from wlb.report.delay_curve import delay_table, draw_delay_curve
from wlb.simulate import Cluster, ReplayResult, load_lengths, replay

_CURVE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)
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


def derived_thresholds(options: argparse.Namespace, lengths: NDArray[Any]) -> tuple[int, ...]:
    return derive_thresholds(
        lengths, options.window, options.num_queues, num_micro_batches=options.dp * options.micro_batches
    )


def build(name: str, packer_options: PackerOptions) -> Packer:
    """A packer by its name, `:blind` behind it where it must not know the division."""
    packer, blind, _ = name.partition(":")
    return build_packer(packer, replace(packer_options, division=None) if blind else packer_options)


class Trace:
    """The documents of the file, from the beginning for every run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.lengths = load_lengths(options.lengths)
        self._ordered = self.lengths
        if options.shuffle == "numpy":
            self._ordered = self.lengths[np.random.default_rng(options.seed).permutation(len(self.lengths))]

    def stream(self, cut: Literal["stream", "window"]) -> DocumentStream:
        return DocumentStream(
            [DocumentSource(lengths=self._ordered, label_tokens=0)],
            window_tokens=self._options.window,
            cut=cut,
            seed=self._options.seed,
            shuffle=self._options.shuffle == "stream",
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON file."""
    names = packer_names(options)
    if options.delay_curve is not None and find_spec("matplotlib") is None:
        raise ConfigError("--delay-curve needs matplotlib, which is not installed: pip install '.[report]'")
    trace = Trace(options)
    limit_tokens = in_flight_tokens(options)
    cluster = Cluster(
        cost=CrossoverCost(crossover_tokens=options.crossover, overhead_tokens=options.overhead_tokens),
        num_stages=options.pp,
        in_flight_tokens=limit_tokens,
        sends=options.sends,
        division=division(options),
    )
    packer_options = PackerOptions(
        shape=StepShape(
            window_tokens=options.window,
            micro_batches_per_replica=options.micro_batches,
            num_replicas=options.dp,
        ),
        cost=cluster.cost,
        cap_windows=options.cap_windows,
        max_delay_steps=options.max_delay_steps,
        wlb_intake=options.wlb_intake,
        greedy_window_batches=options.greedy_window_batches,
        pipeline=cluster.undivided,
        in_flight_windows=None if limit_tokens is None else limit_tokens / options.window,
        search_evaluations=options.search_evaluations,
        solver_lengths=options.solver_lengths,
        solver_seconds=options.solver_seconds,
        # Not the cluster's: what replaying remembers would make planning look faster.
        division=division(options),
        shard_plans=options.shard_plans,
    )
    choice = given_thresholds(options)
    tried: ChosenThresholds | None = None
    if choice is None and options.max_delay_steps:
        tried = choose_thresholds(packer_options, trace.lengths, max_mean_delay_steps=options.mean_delay_steps)
    by_replay = choice if tried is None else tried.chosen.thresholds_tokens
    packers, own_caps = {}, set()
    for name in names:
        delays = options.max_delay_steps and (not name.startswith("wlb") or options.wlb_intake == "budget")
        tokens = by_replay if delays else choice
        if tokens is None:
            tokens = derived_thresholds(options, trace.lengths)
        built = replace(packer_options, thresholds_tokens=tokens)
        if name == "wlb" and options.max_delay_steps and not delays and (options.cap_windows or 2) <= 1:
            own_caps.add(name)
            built = replace(built, cap_windows=None)
            print("wlb: as published cannot keep a cap of one window; it runs under its own, 1.5", file=sys.stderr)
        elif name.startswith("wlb") and (options.cap_windows or 2) * options.window < options.window + 1:
            raise ConfigError(f"--cap-windows must be > 1 with wlb, got {options.cap_windows}: leave it out")
        packers[name] = build(name, built)
        for sentence in threshold_remarks(packers[name].thresholds_tokens, trace.lengths, options.window):
            print(f"{name}: {sentence}", file=sys.stderr)
    cuts = {name: cut_of(options, name) for name in names}
    results: dict[str, ReplayResult] = {}
    with tqdm(total=options.steps * len(packers), unit="step", file=sys.stderr) as progress:
        for name, packer in packers.items():
            progress.set_description(name)
            results[name] = replay(
                packer,
                trace.stream(cuts[name]),
                replace(cluster, in_flight_tokens=None) if name in own_caps else cluster,
                num_steps=options.steps,
                on_step=progress.update,
            )
    report: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/packing.py", *sys.argv[1:]]),
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__},
        "documents_in_file": len(trace.lengths),
        "thresholds_tokens": list(derived_thresholds(options, trace.lengths) if choice is None else choice),
        "thresholds_tried": None if tried is None else [asdict(t) for t in tried.tried],
        "thresholds_front": None if tried is None else front_table(tried),
        "packers": {
            name: {
                **result.to_json(),
                "cut": cuts[name],
                "thresholds_tokens": list(packers[name].thresholds_tokens),
                "speedup_vs_plain": (
                    results["plain"].time_per_token / result.time_per_token if "plain" in results else None
                ),
            }
            for name, result in results.items()
        },
    }
    if "makespan" in names and options.curve_steps:
        delaying = replace(packer_options, thresholds_tokens=by_replay or ())
        report["packers"]["makespan"]["search_curve"] = search_curve(options, delaying, trace, cluster)
    if options.delay_curve is not None:
        report["delay_curve"] = delay_curve(options, packer_options, trace, cluster)
    return report


def cut_of(options: argparse.Namespace, name: str) -> Literal["stream", "window"]:
    cut: Literal["stream", "window"] | None = options.cut
    return cut or natural_cut(name.partition(":")[0], max_delay_steps=options.max_delay_steps)


def delay_curve(
    options: argparse.Namespace, packer_options: PackerOptions, trace: Trace, cluster: Cluster
) -> list[dict[str, Any]]:
    """Makespan by the bound of a document's wait, thresholds chosen for each; 0 trains plain's pieces."""
    plain = replay(
        build_packer("plain", packer_options), trace.stream(options.cut or "stream"), cluster, num_steps=options.steps
    )
    curve: list[dict[str, Any]] = []
    for bound in tqdm(_CURVE_BOUNDS, desc="delay curve", file=sys.stderr):
        bounded = replace(packer_options, max_delay_steps=bound)
        tokens = given_thresholds(options) if bound else ()
        if tokens is None:
            choice = choose_thresholds(bounded, trace.lengths, max_mean_delay_steps=options.mean_delay_steps)
            tokens = choice.chosen.thresholds_tokens
        packer = build_packer("makespan", replace(bounded, thresholds_tokens=tokens))
        cut = options.cut or natural_cut("makespan", max_delay_steps=bound)
        result = replay(packer, trace.stream(cut), cluster, num_steps=options.steps)
        curve.append(
            {
                "max_delay_steps": bound,
                "thresholds_tokens": list(tokens),
                "step_time_over_ideal": result.step_time_over_ideal,
                "speedup_vs_plain": plain.time_per_token / result.time_per_token,
                "mean_delay_steps": result.mean_delay_steps,
                "longest_wait_steps": result.max_delay_steps,
                "step_tokens_cv": result.step_tokens_cv,
            }
        )
    return curve


def search_curve(
    options: argparse.Namespace, packer_options: PackerOptions, trace: Trace, cluster: Cluster
) -> list[dict[str, float]]:
    """Step time by number of evaluations, over the first steps."""
    assert packer_options.pipeline is not None
    most = packer_options.search_evaluations or default_evaluations(packer_options.shape, packer_options.pipeline)
    curve = []
    for evaluations in (0, most // 16, most // 4, most, 4 * most):
        packer = build_packer("makespan", replace(packer_options, search_evaluations=evaluations))
        result = replay(
            packer,
            trace.stream(cut_of(options, "makespan")),
            cluster,
            num_steps=min(options.steps, options.curve_steps),
        )
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
    options = parse_arguments(arguments, __doc__)
    try:
        report = run(options)
        print(f"$ {report['command']}")
        if report["thresholds_front"] is not None:
            print(f"thresholds by replay:\n{report['thresholds_front']}")
        for name, result in report["packers"].items():
            if result["thresholds_tokens"]:
                print(f"thresholds of the outlier queues of {name}: {result['thresholds_tokens']} tokens")
        print(table(report))
        if options.delay_curve is not None:
            print(delay_table(report["delay_curve"]))
            draw_delay_curve(report["delay_curve"], options.delay_curve)
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
