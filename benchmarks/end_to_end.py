"""Trains for real, plain and balanced in turn, and compares the measured gains with the predicted ones.

    python benchmarks/end_to_end.py --layout pp2 --pairs 5 --packers wlb,makespan --json OUT
    python benchmarks/end_to_end.py --layout cp2 --pairs 5 --json OUT

Every run trains the quickstart's GPT with 2 processes over gloo (scripts/quickstart_train.sh), with 4 at cp2pp2 and
cp2dp2, which want as many cores. All runs train the very same pieces of documents in as many steps. A round runs plain
and every other once; which of them goes first rotates from round to round. Before them short runs over other documents
(--calibration-seed), packed in micro-batches of many sizes, measure the costs: their fit goes to the packers
(--wlb-cost-profile) and predicts, from lengths alone, the seconds of the rounds' runs. The first steps of each run are
warm-up and are charged at the pace of the others (see docs/telemetry.md).

A run is named by its packer, with context parallelism also by its sharder: plain is packer plain divided per sequence,
`makespan` packing alone, `plain+hybrid` sharding alone, `makespan+hybrid` both. Costs then come from one short run a
sharder, and sharders weigh what travels as it was measured (--wlb-operations-per-byte). At cp2 packing alone is
predicted to gain close to nothing, by construction: all ranks run one micro-batch after the other, so none is ever
waited for, and more of them only cost more.

A packer's ratio in a round, its pair, is its run's rate over that of the plain run of the same round, per token and per
operation; the result is the median over rounds. Where other programs use the machine now and then, whole runs are hit:
the ratio of step medians, in which each step counts with its median over all runs that trained it, sees less of that
and is printed beside. Column `deviation` is the mean of |measured / predicted - 1| over a run's passes, the larger of
the pair's two: 0.03 to 0.06 on an idle machine; a pair with more than 0.1 says little. The corpus is the quickstart's
(runs/quickstart/corpus) and is built if it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError, WlbError
from wlb.packing import PACKERS
from wlb.report import BASE, WARM_UP_STEPS, StepModel, TrainedRun, compare, fit_runs, load_manifest, load_run
from wlb.sharding import SHARDERS

ROOT = Path(__file__).resolve().parent.parent
_LAYOUTS = ("pp2", "dp2", "tp2", "cp2", "cp2pp2", "cp2dp2")
_PACKERS, _CP_PACKERS = "wlb,makespan", "makespan,plain+hybrid,makespan+hybrid"
# So different that together they tell the price of a span from that of what is received.
_CALIBRATION_SHARDERS = ("per_sequence", "per_document", "hybrid")
_RATIOS = ("speedup", "speedup_work", "predicted_speedup", "predicted_speedup_work")
_COLUMNS = (
    ("pair", "d"),
    ("packer", "s"),
    ("plain_s", ".1f"),
    ("packer_s", ".1f"),
    ("deviation", ".3f"),
    *((name, ".3f") for name in _RATIOS),
)


_DELAYING = ("makespan", "two_stage")


class TrainingFailed(WlbError):
    """A training run ended with an error; its sentence has been printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A run by its algorithms.

    sharder: None leaves the default, per sequence. max_delay_steps: None leaves the packer's own.
    """

    packer: str
    sharder: str | None = None
    max_delay_steps: int | None = None

    @classmethod
    def named(cls, name: str) -> Variant:
        """Of `PACKER`, `PACKER+SHARDER`, `PACKER+delayK` or `PACKER+delayK+SHARDER`."""
        packer, *parts = name.split("+")
        delays = [int(part.removeprefix("delay")) for part in parts if _is_delay(part)]
        sharders = [part for part in parts if not _is_delay(part)]
        return cls(
            packer=packer,
            sharder=sharders[0] if sharders else None,
            max_delay_steps=delays[0] if delays else None,
        )

    @property
    def name(self) -> str:
        delay = [] if self.max_delay_steps is None else [f"delay{self.max_delay_steps}"]
        return "+".join([self.packer, *delay, *([] if self.sharder is None else [self.sharder])])

    @property
    def flags(self) -> list[str]:
        delay = [] if self.max_delay_steps is None else ["--wlb-max-delay-steps", str(self.max_delay_steps)]
        sharding = [] if self.sharder is None else ["--wlb-cp-sharding", self.sharder]
        return ["--wlb-packing", self.packer, *delay, *sharding]


def _is_delay(part: str) -> bool:
    return part.startswith("delay") and part.removeprefix("delay").isdigit()


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layout", choices=_LAYOUTS, default="pp2", help="how processes share the work")
    parser.add_argument("--pairs", type=int, default=5, help="rounds: runs of plain and of each packer")
    parser.add_argument(
        "--packers",
        help="compared with plain, each PACKER or with context parallelism PACKER+SHARDER; the last is the headline. "
        f"Default: {_PACKERS}, with context parallelism {_CP_PACKERS}",
    )
    parser.add_argument("--cp-comm-type", choices=("all_gather", "p2p"), default="all_gather", help="cp layouts only")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--calibration-steps", type=int, default=6, help="of the run that costs come from")
    parser.add_argument("--seed", type=int, default=1, help="order of the documents in all pairs")
    parser.add_argument("--calibration-seed", type=int, default=2, help="order of the documents that costs come from")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/end_to_end", help="for logs and time lines")
    parser.add_argument("--corpus", type=Path, default=ROOT / "runs/quickstart/corpus", help="built if missing")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(argv)
    if options.pairs < 1:
        raise ConfigError(f"--pairs must be >= 1, got {options.pairs}")
    options.has_cp = "cp" in options.layout
    options.packers = (options.packers or (_CP_PACKERS if options.has_cp else _PACKERS)).split(",")
    _check_packers(options.packers, has_cp=options.has_cp)
    for name in ("steps", "calibration_steps"):
        if getattr(options, name) <= WARM_UP_STEPS:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} must be > {WARM_UP_STEPS}, the warm-up, got {getattr(options, name)}")
    if options.calibration_seed == options.seed:
        raise ConfigError(f"--calibration-seed must differ from --seed, or nothing is predicted; got {options.seed}")
    return options


def _check_packers(names: list[str], *, has_cp: bool) -> None:
    known = sorted(set(PACKERS) - {BASE})
    rule = f"{', '.join(known)}, {' or '.join(_DELAYING)} with +delayK"
    if has_cp:
        known += [f"{packer}+{sharder}" for packer in PACKERS for sharder in SHARDERS]
        rule += f", or with + one of {', '.join(SHARDERS)} behind one of these or behind {BASE}"
    plain_names = ["+".join(part for part in name.split("+") if not _is_delay(part)) for name in names]
    delayed = [Variant.named(name) for name in names if any(map(_is_delay, name.split("+")))]
    if (
        len(set(names)) < len(names)
        or not set(plain_names) <= set(known)
        or not {variant.packer for variant in delayed} <= set(_DELAYING)
    ):
        raise ConfigError(f"--packers must be different ones of {rule}, got {','.join(names)}")


def train(options: argparse.Namespace, name: str, num_steps: int, *flags: str) -> TrainedRun:
    """One run in a folder of its own; prints its progress."""
    folder = (options.folder / options.layout / name).resolve()
    print(f"--- {name}: {num_steps} steps, {' '.join(flags)}", flush=True)
    script = [
        str(ROOT / "scripts/quickstart_train.sh"),
        str(folder),
        str(options.corpus.resolve()),
        options.layout,
        str(num_steps),
        *flags,
    ]
    if subprocess.run(script, env=_environment(), check=False).returncode:
        raise TrainingFailed(f"run {name} must end well; its log is {folder / 'log.txt'}")
    return load_run(folder)


def build_corpus(options: argparse.Namespace) -> dict[str, Any]:
    """The manifest of the quickstart's corpus."""
    script = [str(ROOT / "scripts/quickstart_corpus.sh"), str(options.corpus.resolve())]
    if subprocess.run(script, env=_environment(), check=False).returncode:
        raise TrainingFailed(f"corpus {options.corpus} must be built")
    return load_manifest(options.corpus / "manifest.json")


def _environment() -> dict[str, str]:
    """Runs use the environment that runs this benchmark."""
    return os.environ | {"WLB_VENV": sys.prefix}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON file."""
    manifest = build_corpus(options)
    model, flags = _calibrate(options)
    variants = [Variant.named(name) for name in (BASE, *options.packers)]
    pairs: list[dict[str, Any]] = []
    trained: dict[str, list[TrainedRun]] = {variant.name: [] for variant in variants}
    for i in range(options.pairs):
        first = i % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            more = ["--seed", str(options.seed), *variant.flags, *flags]
            trained[variant.name].append(train(options, f"pair{i + 1}_{variant.name}", options.steps, *more))
        pairs += _pairs(i + 1, {name: runs[-1] for name, runs in trained.items()}, model, manifest, options)
        print(_table(pairs[-len(options.packers) :]), flush=True)
    packers = {
        name: _result([p for p in pairs if p["packer"] == name], trained[BASE], trained[name], model)
        for name in options.packers
    }
    headline = options.packers[-1]
    window_tokens = trained[BASE][0].window_tokens
    return {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/end_to_end.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load_average": os.getloadavg()},
        "layout": options.layout,
        **({"cp_comm_type": options.cp_comm_type} if options.has_cp else {}),
        "steps": options.steps,
        "window": window_tokens,
        "crossover_over_window": model.crossover_tokens / window_tokens,
        **packers[headline],
        "headline": headline,
        "packers": packers,
        "calibration": {"seed": options.calibration_seed, "steps": options.calibration_steps},
        "cost": model.to_json(),
        "pairs": pairs,
    }


def _calibrate(options: argparse.Namespace) -> tuple[StepModel, list[str]]:
    """Costs from other documents than the rounds', and the flags that hand them to runs."""
    comm_type = ["--cp-comm-type", options.cp_comm_type] if options.has_cp else []
    runs = []
    for sharder in _CALIBRATION_SHARDERS if options.has_cp else (None,):
        variant = Variant(packer="makespan", sharder=sharder)
        name = "calibration" if sharder is None else f"calibration_{sharder}"
        flags = ["--seed", str(options.calibration_seed), *variant.flags, "--wlb-overhead-tokens", "0", *comm_type]
        runs.append(train(options, name, options.calibration_steps, *flags))
    model = fit_runs(runs, range(WARM_UP_STEPS, options.calibration_steps))
    cost_file = (options.folder / options.layout / "cost.json").resolve()
    with atomic_path(cost_file) as path:
        path.write_text(json.dumps(model.to_json(), indent=1) + "\n", encoding="utf-8")
    flags = ["--wlb-cost-profile", str(cost_file), *comm_type]
    if model.prices is not None:
        flags += ["--wlb-operations-per-byte", format(runs[0].operations_per_byte(model.prices), ".6g")]
    return model, flags


def _result(
    pairs: list[dict[str, Any]], plain: list[TrainedRun], packed: list[TrainedRun], model: StepModel
) -> dict[str, float]:
    """Medians over a packer's pairs."""
    result: dict[str, float] = {name: median(pair[name] for pair in pairs) for name in _RATIOS}
    return {
        **result,
        "speedup_of_step_medians": _step_medians_s(plain, model) / _step_medians_s(packed, model),
        "measured_over_predicted": result["speedup"] / result["predicted_speedup"],
        "measured_over_predicted_work": result["speedup_work"] / result["predicted_speedup_work"],
    }


def _step_medians_s(runs: list[TrainedRun], model: StepModel) -> float:
    """Seconds of a run each of whose steps takes its median over `runs`, which all trained the same steps."""
    steps = zip(*(run.log.steps for run in runs), strict=True)
    return runs[0].total_of([median(logged.elapsed_s for logged in step) for step in steps], model)


def _pairs(
    number: int,
    runs: dict[str, TrainedRun],
    model: StepModel,
    manifest: dict[str, Any],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A round's pairs, one a packer."""
    report = compare(
        runs[BASE],
        {name: runs[name] for name in options.packers},
        model,
        corpus=manifest,
        fitted_on=f"a run with seed {options.calibration_seed}",
    )
    plain = report["runs"][BASE]
    return [
        {
            "pair": number,
            "packer": name,
            "plain_s": plain["total_s"],
            "packer_s": report["runs"][name]["total_s"],
            "deviation": max(plain["pass_deviation"], report["runs"][name]["pass_deviation"]),
            **report["speedups"][name],
            **report["exactness"][name],
            "runs": {BASE: plain, name: report["runs"][name]},
        }
        for name in options.packers
    ]


def _table(pairs: list[dict[str, Any]]) -> str:
    rows = [[name for name, _ in _COLUMNS], *([format(p[name], spec) for name, spec in _COLUMNS] for p in pairs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: list[str]) -> None:
    options = parse_arguments(argv)
    report = run(options)
    if options.json is not None:
        with atomic_path(options.json) as path:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n$ {report['command']}")
    print(_table(report["pairs"]))
    for name, result in report["packers"].items():
        print(
            f"layout {options.layout}, median of {options.pairs} pairs, {name} over plain: "
            f"per token {result['speedup']:.3f} x (predicted {result['predicted_speedup']:.3f} x, "
            f"measured over predicted {result['measured_over_predicted']:.3f}), "
            f"per operation {result['speedup_work']:.3f} x (predicted {result['predicted_speedup_work']:.3f} x, "
            f"{result['measured_over_predicted_work']:.3f}); "
            f"ratio of step medians {result['speedup_of_step_medians']:.3f} x"
        )


if __name__ == "__main__":
    sys.exit(run_tool(main))
