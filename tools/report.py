#!/usr/bin/env python3
"""Report on finished runs: measure costs from one, or compare a plain run with balanced ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.errors import ConfigError
from wlb.report import WARM_UP_STEPS, TrainedRun, compare, fit_first_half, fit_range, load_manifest, load_run, table


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cost = commands.add_parser(
        "cost",
        help="Fit costs to the micro-batches of a run; prints the crossover length in tokens, for --wlb-crossover.",
    )
    cost.add_argument("run", type=Path, help="Folder with log.txt and timeline/.")
    cost.add_argument("--json", type=Path, help="Write all fitted costs here.")
    both = commands.add_parser("compare", help="Compare runs that trained the same documents.")
    both.add_argument("--plain", type=Path, required=True, help="Folder of the plain run.")
    both.add_argument(
        "--balanced",
        nargs="+",
        required=True,
        metavar="NAME=FOLDER",
        help="Balanced runs, each with the name that the report gives it; the last is the headline.",
    )
    both.add_argument("--corpus", type=Path, required=True, help="manifest.json of the corpus.")
    both.add_argument(
        "--fit-from",
        type=Path,
        help="Fit the predicting costs on this run, best one whose micro-batches vary in size. Default: the first half "
        "of the plain run, which cannot tell what a micro-batch costs however short it is.",
    )
    both.add_argument("--layout", default="", help="Name of the layout, for the title of the picture.")
    both.add_argument("--json", type=Path, required=True, help="Write the report here.")
    both.add_argument("--png", type=Path, required=True, help="Write the picture here.")
    return parser


def main(argv: Sequence[str]) -> None:
    args = make_parser().parse_args(argv)
    if args.command == "cost":
        _cost(args)
    else:
        _compare(args)


def _cost(args: argparse.Namespace) -> None:
    run = load_run(args.run)
    model = fit_range(run, range(WARM_UP_STEPS, len(run.steps)))
    if args.json is not None:
        _write_json(args.json, model.to_json())
    print(round(model.crossover_tokens))


def _compare(args: argparse.Namespace) -> None:
    folders = _named_folders(args.balanced)
    plain, balanced = load_run(args.plain), {name: load_run(folder) for name, folder in folders.items()}
    if args.fit_from is None:
        model, fitted_on = fit_first_half(plain), "the first half of the plain run's steps"
    else:
        other = load_run(args.fit_from)
        model, fitted_on = (
            fit_range(other, range(WARM_UP_STEPS, len(other.steps))),
            _origin(args.fit_from, other, plain),
        )
    report = compare(plain, balanced, model, corpus=load_manifest(args.corpus), fitted_on=fitted_on)
    if args.layout:
        report["layout"] = args.layout
    from wlb.report.picture import draw  # Loads matplotlib: only here.

    with atomic_path(args.png) as path:
        draw(report, plain, balanced, model, path)
    _write_json(args.json, report)
    print(table(report))
    print(f"\nreport:  {args.json}\npicture: {args.png}")


def _named_folders(values: Sequence[str]) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for value in values:
        name, separator, folder = value.partition("=")
        if not (name and separator and folder):
            raise ConfigError(f"--balanced must be NAME=FOLDER, got {value}")
        if name in folders or name == "plain":
            raise ConfigError(f"--balanced must name each run once and none 'plain', got {' '.join(values)}")
        folders[name] = Path(folder)
    return folders


def _origin(folder: Path, other: TrainedRun, plain: TrainedRun) -> str:
    """Where costs come from, in words; with another seed the predicted documents are not those fitted on."""
    seed = other.log.arguments.get("seed")
    if seed is None or seed == plain.log.arguments.get("seed"):
        return str(folder)
    return f"another seed's documents ({folder}, seed {seed})"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_tool(main))
