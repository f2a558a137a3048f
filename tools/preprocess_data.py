#!/usr/bin/env python3
"""JSON lines -> Megatron's .bin/.idx, with the flags of Megatron's tool of the same name. See docs/data.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.data.json_lines import find_inputs
from wlb.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """Our flags, then the tokenizer flags of Megatron's training script."""
    from megatron.wlb.preprocess_tokenizer import add_tokenizer_arguments

    parser = argparse.ArgumentParser(description=__doc__)
    data = parser.add_argument_group("input")
    data.add_argument("--input", required=True, help="JSON lines, plain or gzip: a path or a glob in quotes.")
    data.add_argument("--json-keys", nargs="+", default=["text"], help="Keys whose strings are documents.")
    data.add_argument("--skip-bad-lines", action="store_true", help="Leave out lines that hold no document.")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="Writes PREFIX_KEY_document.bin and .idx.")
    output.add_argument("--append-eod", action="store_true", help="End each document with the tokenizer's eod token.")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=int, default=1, help="Processes that tokenize.")
    runtime.add_argument("--log-interval", type=int, default=1000, help="Documents between two progress lines.")
    runtime.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="Must divide --workers, as in Megatron; files are never split here, so it changes nothing else.",
    )
    runtime.add_argument(
        "--keep-sequential-samples", action="store_true", help="Always on: documents keep the order of the input."
    )
    add_tokenizer_arguments(parser)
    return parser


def main(argv: Sequence[str]) -> None:
    """Preprocess as `argv` says and print a summary."""
    from megatron.wlb.preprocess import PreprocessConfig, preprocess
    from megatron.wlb.preprocess_tokenizer import text_tokenizer

    args = make_parser().parse_args(argv)
    if args.partitions < 1 or args.workers % args.partitions != 0:
        raise ConfigError(f"--partitions must divide --workers ({args.workers}), got {args.partitions}")
    config = PreprocessConfig(
        inputs=find_inputs(args.input),
        output_prefix=args.output_prefix,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        log_interval=args.log_interval,
        skip_bad_lines=args.skip_bad_lines,
    )
    report = preprocess(config, text_tokenizer(args))
    for key in config.json_keys:
        empty = f", {report.empty[key]} empty documents left out" if report.empty[key] else ""
        print(
            f"{config.path_prefix(key)}.bin/.idx: {report.documents[key]} documents, {report.tokens[key]} tokens "
            f"({report.dtype}){empty}"
        )
    print(f"{report.num_lines} lines in {report.seconds:.1f} s")
    if report.num_bad_lines:
        print(f"{report.num_bad_lines} bad lines left out: {report.bad_lines_text()}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
