"""Trains for real, plain and balanced in turn, and compares the measured gain with the predicted one.

    python benchmarks/end_to_end.py --layout pp2 --pairs 5 --json OUT

Every run trains the quickstart's GPT with 2 processes over gloo (scripts/quickstart_train.sh). Plain and balanced
runs train the very same pieces of documents in as many steps; which of the two goes first alternates from pair to
pair. Before them one plain run over documents in another order (--calibration-seed) measures the costs: its fit gives
the packer its crossover and predicts, from lengths alone, the seconds of the pairs' runs. The first steps of each run
are warm-up and are charged at the pace of the others (see docs/telemetry.md).

A pair's ratio is the balanced run's rate over the plain one's, per token and per operation; the result is the median
over pairs. Where other programs use the machine now and then, whole runs are hit: the ratio of step medians, in which
each step counts with its median over all runs that trained it, sees less of that and is printed beside. Column
`deviation` is the mean of |measured / predicted - 1| over a run's passes, the larger of the pair's two: 0.03 to 0.06 on
an idle machine; a pair with more than 0.1 says little. The corpus is the quickstart's (runs/quickstart/corpus) and is
built if it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError, WlbError
from wlb.report import WARM_UP_STEPS, StepModel, TrainedRun, compare, fit_range, load_manifest, load_run

ROOT = Path(__file__).resolve().parent.parent
_PACKINGS = ("plain", "wlb")
_COLUMNS = (
    ("pair", "d"),
    ("plain_s", ".1f"),
    ("wlb_s", ".1f"),
    ("deviation", ".3f"),
    ("speedup", ".3f"),
    ("speedup_work", ".3f"),
    ("predicted_speedup", ".3f"),
    ("predicted_speedup_work", ".3f"),
)
_RATIOS = _COLUMNS[4:]


class TrainingFailed(WlbError):
    """A training run ended with an error; its sentence has been printed."""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layout", choices=("pp2", "dp2", "tp2"), default="pp2", help="how 2 processes share the work")
    parser.add_argument("--pairs", type=int, default=5, help="plain and balanced runs")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--seed", type=int, default=1, help="order of the documents in all pairs")
    parser.add_argument("--calibration-seed", type=int, default=2, help="order of the documents that costs come from")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/end_to_end", help="for logs and time lines")
    parser.add_argument("--corpus", type=Path, default=ROOT / "runs/quickstart/corpus", help="built if missing")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(argv)
    if options.pairs < 1:
        raise ConfigError(f"--pairs must be >= 1, got {options.pairs}")
    if options.steps <= WARM_UP_STEPS:
        raise ConfigError(f"--steps must be > {WARM_UP_STEPS}, the warm-up, got {options.steps}")
    if options.calibration_seed == options.seed:
        raise ConfigError(f"--calibration-seed must differ from --seed, or nothing is predicted; got {options.seed}")
    return options


def train(options: argparse.Namespace, name: str, *flags: str) -> TrainedRun:
    """One run in a folder of its own; prints its progress."""
    folder = (options.folder / options.layout / name).resolve()
    print(f"--- {name}: {options.steps} steps, {' '.join(flags)}", flush=True)
    script = [
        str(ROOT / "scripts/quickstart_train.sh"),
        str(folder),
        str(options.corpus.resolve()),
        options.layout,
        str(options.steps),
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
    calibration = train(options, "calibration", "--seed", str(options.calibration_seed), "--wlb-packing", "plain")
    model = fit_range(calibration, range(WARM_UP_STEPS, options.steps))
    crossover = str(round(model.crossover_tokens))
    pairs: list[dict[str, Any]] = []
    trained: dict[str, list[TrainedRun]] = {packing: [] for packing in _PACKINGS}
    for i in range(options.pairs):
        runs = {}
        for packing in _PACKINGS if i % 2 == 0 else _PACKINGS[::-1]:
            flags = ["--seed", str(options.seed), "--wlb-packing", packing, "--wlb-crossover", crossover]
            runs[packing] = train(options, f"pair{i + 1}_{packing}", *flags)
            trained[packing].append(runs[packing])
        pairs.append(_pair(i + 1, runs, model, manifest, options))
        print(_table(pairs[-1:]), flush=True)
    result = {name: median(pair[name] for pair in pairs) for name, _ in _RATIOS}
    return {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/end_to_end.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "load_average": os.getloadavg()},
        "layout": options.layout,
        "steps": options.steps,
        "window": calibration.window_tokens,
        "crossover_over_window": model.crossover_tokens / calibration.window_tokens,
        **result,
        "speedup_of_step_medians": (_step_medians_s(trained["plain"], model) / _step_medians_s(trained["wlb"], model)),
        "measured_over_predicted": result["speedup"] / result["predicted_speedup"],
        "measured_over_predicted_work": result["speedup_work"] / result["predicted_speedup_work"],
        "cost": model.to_json(),
        "pairs": pairs,
    }


def _step_medians_s(runs: list[TrainedRun], model: StepModel) -> float:
    """Seconds of a run each of whose steps takes its median over `runs`, which all trained the same steps."""
    steps = zip(*(run.log.steps for run in runs), strict=True)
    return runs[0].total_of([median(logged.elapsed_s for logged in step) for step in steps], model)


def _pair(
    number: int,
    runs: dict[str, TrainedRun],
    model: StepModel,
    manifest: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    report = compare(
        runs["plain"],
        runs["wlb"],
        model,
        corpus=manifest,
        fitted_on=f"a plain run with seed {options.calibration_seed}",
    )
    return {
        "pair": number,
        "plain_s": report["runs"]["plain"]["total_s"],
        "wlb_s": report["runs"]["wlb"]["total_s"],
        "deviation": max(r["pass_deviation"] for r in report["runs"].values()),
        **{name: report[name] for name, _ in _RATIOS},
        "runs": report["runs"],
    }


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
    print(
        f"layout {options.layout}, median of {options.pairs} pairs, balanced over plain: "
        f"per token {report['speedup']:.3f} x (predicted {report['predicted_speedup']:.3f} x, "
        f"measured over predicted {report['measured_over_predicted']:.3f}), "
        f"per operation {report['speedup_work']:.3f} x (predicted {report['predicted_speedup_work']:.3f} x, "
        f"{report['measured_over_predicted_work']:.3f}); "
        f"ratio of step medians {report['speedup_of_step_medians']:.3f} x"
    )


if __name__ == "__main__":
    sys.exit(run_tool(main))
