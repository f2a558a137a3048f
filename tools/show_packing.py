#!/usr/bin/env python3
"""Show what packers make of the same documents, before a run: prints one step, and draws it with --out.

    python tools/show_packing.py --data-prefix corpus_text_document --window 8192 --pp 2 --micro-batches 4
    python tools/show_packing.py --lengths-file lengths.txt --pp 4 --packers plain wlb makespan --step 20 --out step.png

It plans the steps up to --step as training would and predicts that one: lengths alone decide. Lengths in a file are
training positions; a stored document of L tokens has L - 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.cost import CrossoverCost
from wlb.data.atomic_files import atomic_path
from wlb.data.index_file import check_index, index_lengths
from wlb.data.planner import draw_arrivals
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.errors import ConfigError
from wlb.packing import PACKERS, PackerOptions, StepShape, build_packer, derive_thresholds, natural_cut
from wlb.packing.delay_thresholds import choose_thresholds
from wlb.report.step_picture import PlannedStep, draw_steps, step_table
from wlb.schedule import PipelineModel
from wlb.simulate.trace import load_lengths

_PICTURES = ("png", "svg")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--lengths-file", type=Path, metavar="FILE", help="JSON list, or text with one length a line.")
    data.add_argument("--data-prefix", metavar="PREFIX", help="PREFIX.idx and PREFIX.bin of a data set.")
    add = parser.add_argument
    add("--window", type=int, default=131072, help="Tokens: --seq-length of training. Default %(default)s.")
    add("--pp", type=int, default=4, help="Pipeline stages. Default %(default)s.")
    add("--dp", type=int, default=1, help="Data-parallel replicas. Default %(default)s.")
    add("--micro-batches", type=int, default=4, help="Of a replica in a plain step. Default %(default)s.")
    add(
        "--packers", nargs="+", default=["plain", "makespan"], help=f"Of {', '.join(PACKERS)}. Default: plain makespan."
    )
    add("--max-delay-steps", type=int, default=0, help="As --wlb-max-delay-steps. Default %(default)s.")
    add("--thresholds", type=int, nargs="+", help="As --wlb-thresholds. Default: found as training finds them.")
    add("--cap-windows", type=float, help="As --wlb-cap-windows.")
    add("--crossover", type=float, default=36000.0, help="As --wlb-crossover. Default %(default)s, a 7B model's.")
    add("--overhead-tokens", type=float, default=1000.0, help="As --wlb-overhead-tokens. Default %(default)s.")
    add("--cut", choices=["stream", "window"], help="As --wlb-document-cut. Default: each packer's own.")
    add("--seed", type=int, default=1234, help="Order of the documents. Default %(default)s.")
    add("--step", type=int, default=20, help="Which step, from 0: queues need some to fill. Default %(default)s.")
    add("--out", type=Path, metavar="FILE", help="Draw the picture here: .png or .svg.")
    return parser


def main(argv: Sequence[str]) -> None:
    """Print the step of each packer, then draw them.

    Raises:
        ConfigError, DataError: a sentence about the argument, before anything is printed.
    """
    args = make_parser().parse_args(argv)
    if args.step < 0:
        raise ConfigError(f"--step must be >= 0, got {args.step}")
    for packer in args.packers:
        if packer not in PACKERS:
            raise ConfigError(f"--packers must be of {', '.join(PACKERS)}, got {packer}")
    if args.cap_windows is not None:
        least, rule = (args.window + 1, "> 1 with wlb") if "wlb" in args.packers else (args.window, ">= 1")
        if not least <= args.cap_windows * args.window < float("inf"):
            raise ConfigError(f"--cap-windows must be {rule} and finite, got {args.cap_windows}")
    image_format = _image_format(args.out)
    source, name = _source(args)
    cost = CrossoverCost(crossover_tokens=args.crossover, overhead_tokens=args.overhead_tokens)
    options = PackerOptions(
        shape=StepShape(window_tokens=args.window, micro_batches_per_replica=args.micro_batches, num_replicas=args.dp),
        cost=cost,
        max_delay_steps=args.max_delay_steps,
        pipeline=PipelineModel.equal_stages(cost, args.pp),
    )
    steps = {packer: _planned(packer, options, source, args) for packer in dict.fromkeys(args.packers)}
    title = (
        f"{name}, step {args.step}: {_counted(args.dp, 'replica')} of {_counted(args.pp, 'stage')}, "
        f"window {args.window:,}, seed {args.seed}"
    )
    print(title)
    for packer, step in steps.items():
        print("\n" + "\n".join(step_table(packer, step)))
    if image_format is not None:
        with atomic_path(args.out) as path:
            draw_steps(steps, path, window_tokens=args.window, title=title, image_format=image_format)
        print(f"\npicture: {args.out}")


def _planned(name: str, options: PackerOptions, source: DocumentSource, args: argparse.Namespace) -> PlannedStep:
    packer = build_packer(name, _options_of(name, options, source, args))
    stream = DocumentStream(
        [source],
        window_tokens=args.window,
        cut=args.cut or natural_cut(name, max_delay_steps=args.max_delay_steps),
        seed=args.seed,
    )
    state = packer.initial_state()
    for _ in range(args.step + 1):
        plan, state = packer.plan_step(state, draw_arrivals(packer, state, stream))
    assert options.pipeline is not None
    return PlannedStep.of(plan, options.pipeline)


def _options_of(name: str, options: PackerOptions, source: DocumentSource, args: argparse.Namespace) -> PackerOptions:
    """With the cap and the thresholds that this packer takes."""
    if name in ("plain", "greedy"):
        return options
    options = replace(options, cap_windows=args.cap_windows)
    if name == "solver" or (name != "wlb" and not args.max_delay_steps):
        return options
    positions = source.lengths - source.label_tokens
    positions = positions[positions > 0]
    if args.thresholds is not None:
        thresholds = tuple(args.thresholds)
    elif name == "wlb":
        thresholds = derive_thresholds(positions, args.window, num_micro_batches=options.shape.num_micro_batches)
    else:
        thresholds = choose_thresholds(options, positions).chosen.thresholds_tokens
    return replace(options, thresholds_tokens=thresholds)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _source(args: argparse.Namespace) -> tuple[DocumentSource, str]:
    if args.lengths_file is not None:
        return DocumentSource(lengths=load_lengths(args.lengths_file), label_tokens=0), args.lengths_file.name
    check_index(args.data_prefix)
    return DocumentSource(lengths=index_lengths(args.data_prefix), label_tokens=1), Path(args.data_prefix).name


def _image_format(out: Path | None) -> str | None:
    if out is None:
        return None
    image_format = out.suffix.removeprefix(".").lower()
    if image_format not in _PICTURES:
        raise ConfigError(f"--out must end in .png or .svg, got {out}")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--out needs matplotlib to draw {out}: install the extra wlb-megatron[report]")
    return image_format


if __name__ == "__main__":
    sys.exit(run_tool(main))
