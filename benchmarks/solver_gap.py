"""How far fast packers are from the best placing there is, on steps small enough for a solver to finish.

    python benchmarks/solver_gap.py --lengths FILE --micro-batches 4,8 --documents 12,24,40,60 --instances 10 \
        --seconds 5 --seed 1 --json OUT

An instance is the next D documents of the file in the order of numpy's default_rng(seed).permutation, those longer
than --max-tokens shortened to it, and N micro-batches. The window is as long as makes the documents fill --fill of N
windows, and no shorter than the longest document. Three problems, each the least largest of N sums of work:

    fixed       sum d^2, a micro-batch within one window: greedy's problem
    variable    predicted forward time, a micro-batch within --cap-windows: that of wlb without queues
    replicas    predicted forward and backward time of N replicas without a pipeline, whose micro-batches are within one
                window and as many as they like: makespan's problem there. Longest first is what it starts from

The solver is finished when its placing is within --tolerance of what it proved no placing can beat. Gaps are a
packer's largest work over the solver's, of finished instances in which the packer left no document over. "one doc."
counts instances whose longest document alone is the best there is: nothing can be gained there. Times are of the
processor: solver and packers run on one thread, and others on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tqdm import tqdm

from wlb.cost import CrossoverCost
from wlb.cost.model import document_work_ns
from wlb.data.atomic_files import atomic_path
from wlb.documents import Document, StepPlan, documents_from_lengths, total_tokens
from wlb.errors import ConfigError, PackingError, WlbError
from wlb.packing import PackerOptions, StepShape, build_packer
from wlb.packing.placement import longest_first, place
from wlb.packing.solver import optimal, require_solver
from wlb.simulate import load_lengths

_NS_PER_S = 1_000_000_000
_TABLE = (
    ("problem", "problem", "s"),
    ("micro_batches", "N", "d"),
    ("documents", "documents", "d"),
    ("instances", "instances", "d"),
    ("finished", "finished", "d"),
    ("set_by_one_document", "one doc.", "d"),
    ("packer", "packer", "s"),
    ("gap_mean_percent", "gap %", ".2f"),
    ("gap_max_percent", "largest", ".2f"),
    ("gap_instances", "of", "d"),
    ("plan_cpu_ms_median", "packer ms", ".2f"),
    ("solver_cpu_ms_median", "solver ms", ".0f"),
    ("solver_cpu_ms_max", "longest", ".0f"),
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Documents, the sums to make small, and the packer that is measured.

    plan: the packer's groups of documents, of which the largest sum counts.
    """

    name: str
    packer: str
    work: Callable[[int], int]
    limit_tokens: int
    plan: Callable[[], Sequence[Sequence[Document]]]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", type=Path, required=True, help="JSON list, or text with one length a line")
    parser.add_argument("--micro-batches", default="4,8", help="numbers of micro-batches, comma-separated")
    parser.add_argument("--documents", default="12,24,40,60", help="numbers of documents, comma-separated")
    parser.add_argument("--instances", type=int, default=10, help="of each size")
    parser.add_argument("--max-tokens", type=int, default=131072, help="longest document")
    parser.add_argument("--fill", type=float, default=0.95, help="share of N windows that the documents fill")
    parser.add_argument("--cap-windows", type=float, default=1.5, help="most tokens of a micro-batch, variable length")
    parser.add_argument("--crossover", type=float, default=36000.0, help="tokens at which attention = the rest")
    parser.add_argument("--seconds", type=float, default=5.0, help="that the solver may search, in its operations")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="share of the largest work left unproven")
    parser.add_argument("--seed", type=int, default=1, help="order of the documents")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(arguments)


def numbers(flag: str, text: str) -> list[int]:
    values = [int(t) if t.isascii() and t.isdigit() else 0 for t in text.split(",")]
    if min(values) < 1:
        raise ConfigError(f"{flag} must be whole numbers >= 1, comma-separated, got {text!r}")
    return values


def problems(options: argparse.Namespace, documents: Sequence[Document], count: int) -> Iterator[Problem]:
    """The three problems of one instance."""
    cost = CrossoverCost(crossover_tokens=options.crossover)
    tokens = total_tokens(documents)
    window_tokens = max(max(d.length for d in documents), int(tokens / count / options.fill) + 1)

    def packed(name: str, *, replicas: int) -> StepPlan:
        shape = StepShape(
            window_tokens=window_tokens, micro_batches_per_replica=count // replicas, num_replicas=replicas
        )
        cap_windows = options.cap_windows if name == "wlb" else None
        packer = build_packer(name, PackerOptions(shape=shape, cost=cost, cap_windows=cap_windows))
        return packer.plan_step(packer.initial_state(), documents)[0]

    def micro_batches(name: str) -> Callable[[], Sequence[Sequence[Document]]]:
        return lambda: [m.documents for m in packed(name, replicas=1).micro_batches]

    def step_ns(length: int) -> int:
        idle_s = cost.fixed_s + cost.backward_s(())
        return max(1, round((cost.forward_s([length]) + cost.backward_s([length]) - idle_s) * _NS_PER_S))

    def replicas() -> Sequence[Sequence[Document]]:
        return [[d for m in r for d in m.documents] for r in packed("makespan", replicas=count).replicas]

    def by_length() -> Sequence[Sequence[Document]]:
        ordered = longest_first(documents)
        placement = place(ordered, num_micro_batches=count, limit_tokens=tokens, work=step_ns, fallback="any")
        return placement.filled

    def work_ns(length: int) -> int:
        return document_work_ns(cost, length)

    cap_tokens = int(options.cap_windows * window_tokens)
    squares = {"work": lambda n: n * n, "limit_tokens": window_tokens}
    yield Problem(name="fixed", packer="greedy", plan=micro_batches("greedy"), **squares)
    yield Problem(name="variable", packer="wlb", work=work_ns, limit_tokens=cap_tokens, plan=micro_batches("wlb"))
    yield Problem(name="replicas", packer="longest first", work=step_ns, limit_tokens=tokens, plan=by_length)
    yield Problem(name="replicas", packer="makespan", work=step_ns, limit_tokens=tokens, plan=replicas)


def measure(options: argparse.Namespace, documents: Sequence[Document], count: int) -> Iterator[dict[str, Any]]:
    """One instance: what each packer and the solver make of it."""
    solved: dict[str, dict[str, Any]] = {}
    for problem in problems(options, documents, count):
        if problem.name not in solved:
            solved[problem.name] = solve(options, documents, count, problem)
        begin_s = time.process_time()
        groups = problem.plan()
        plan_ms = (time.process_time() - begin_s) * 1e3
        yield {
            "problem": problem.name,
            "packer": problem.packer,
            "micro_batches": count,
            "documents": len(documents),
            "largest_work": max(sum(problem.work(d.length) for d in group) for group in groups),
            "is_one_document": solved[problem.name]["solver_work"] == max(problem.work(d.length) for d in documents),
            "left": len(documents) - sum(map(len, groups)),
            "plan_ms": plan_ms,
            **solved[problem.name],
        }


def solve(options: argparse.Namespace, documents: Sequence[Document], count: int, problem: Problem) -> dict[str, Any]:
    begin_s = time.process_time()
    try:
        solution = optimal(
            documents,
            num_micro_batches=count,
            limit_tokens=problem.limit_tokens,
            work=problem.work,
            seconds=options.seconds,
            tolerance=options.tolerance,
        )
    except PackingError as error:  # the documents do not fit, or not in the time given
        found: dict[str, Any] = {"solver_work": None, "bound_work": None, "finished": False, "solver_said": str(error)}
    else:
        found = {
            "solver_work": solution.largest_work,
            "bound_work": solution.bound_work,
            "finished": solution.is_proven,
        }
    return {**found, "solver_ms": (time.process_time() - begin_s) * 1e3}


def summary(instances: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each problem, packer and size."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for i in instances:
        groups.setdefault((i["problem"], i["packer"], i["micro_batches"], i["documents"]), []).append(i)
    rows = []
    for (problem, packer, micro_batches, documents), group in sorted(groups.items()):
        gaps = [100 * (i["largest_work"] / i["solver_work"] - 1) for i in group if i["finished"] and i["left"] == 0]
        rows.append(
            {
                "problem": problem,
                "packer": packer,
                "micro_batches": micro_batches,
                "documents": documents,
                "instances": len(group),
                "finished": sum(i["finished"] for i in group),
                "set_by_one_document": sum(i["is_one_document"] for i in group),
                "gap_instances": len(gaps),
                "gap_mean_percent": fmean(gaps) if gaps else None,
                "gap_max_percent": max(gaps, default=None),
                "plan_cpu_ms_median": median(i["plan_ms"] for i in group),
                "solver_cpu_ms_median": median(i["solver_ms"] for i in group),
                "solver_cpu_ms_max": max(i["solver_ms"] for i in group),
            }
        )
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON file."""
    require_solver()
    counts = numbers("--micro-batches", options.micro_batches)
    sizes = numbers("--documents", options.documents)
    if options.instances < 1:
        raise ConfigError(f"--instances must be >= 1, got {options.instances}")
    if not 0 < options.fill <= 1:
        raise ConfigError(f"--fill must be in (0, 1], got {options.fill}")
    lengths = load_lengths(options.lengths)
    needed = len(counts) * options.instances * sum(sizes)
    if needed > len(lengths):
        raise ConfigError(f"--lengths must hold {needed} documents for these instances, got {len(lengths)}")
    order = np.random.default_rng(options.seed).permutation(len(lengths))
    drawn = iter(np.minimum(lengths[order], options.max_tokens).tolist())
    tasks = [(count, size) for count in counts for size in sizes for _ in range(options.instances)]
    instances = []
    for count, size in tqdm(tasks, unit="instance", file=sys.stderr):
        documents = documents_from_lengths([next(drawn) for _ in range(size)])
        instances.extend(measure(options, documents, count))
    return {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/solver_gap.py", *sys.argv[1:]]),
        "versions": {"python": sys.version.split()[0], "ortools": version("ortools")},
        "rows": summary(instances),
        "instances": instances,
    }


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[title for _, title, _ in _TABLE]]
    cells += [["-" if row[f] is None else format(row[f], spec) for f, _, spec in _TABLE] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        report = run(options)
        print(f"$ {report['command']}")
        print(table(report["rows"]))
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
