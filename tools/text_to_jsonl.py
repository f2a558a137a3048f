#!/usr/bin/env python3
"""Folders of text files -> JSON lines, one document a file: {"text": ..., "source": path in its folder}."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.wlb.preprocess_progress import Progress
from wlb.command_line import run_tool
from wlb.data.json_lines import write_json_lines
from wlb.data.text_files import ReadCounts, TextDocument, find_text_files, read_documents
from wlb.errors import ConfigError, DataError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="Searched with their sub-folders, never through links.")
    parser.add_argument("--output", required=True, type=Path, help="JSON lines to write; gzip if it ends with .gz.")
    parser.add_argument("--suffixes", nargs="+", default=[], help="Keep only such files, e.g. .py .md; default all.")
    parser.add_argument("--max-bytes", type=int, default=None, help="Leave out larger files.")
    parser.add_argument("--log-interval", type=int, default=1000, help="Documents between two progress lines.")
    return parser


def main(argv: Sequence[str]) -> None:
    """Convert as `argv` says and print what was read and what was left out."""
    args = make_parser().parse_args(argv)
    for flag in ("max_bytes", "log_interval"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be >= 1, got {value}")
    output = args.output.resolve()
    # An output of an earlier run that lies in one of the folders is no document.
    files = [f for f in find_text_files(args.folders, suffixes=args.suffixes) if f.path.resolve() != output]
    counts = ReadCounts()
    with Progress("reading", total_bytes=0, log_interval=args.log_interval) as progress:
        documents = read_documents(files, counts=counts, max_file_bytes=args.max_bytes)
        write_json_lines(args.output, _records(documents, counts, progress, folders=args.folders))
    encodings = ", ".join(f"{count} {name}" for name, count in counts.encodings.most_common())
    print(f"{args.output}: {counts.documents} documents, {counts.text_bytes} bytes ({encodings})")
    if counts.skipped:
        print("left out: " + ", ".join(f"{count} {reason}" for reason, count in counts.skipped.most_common()))


def _records(
    documents: Iterable[TextDocument], counts: ReadCounts, progress: Progress, *, folders: Sequence[Path]
) -> Iterator[dict[str, object]]:
    done_bytes = 0
    for document in documents:
        yield document.record()
        progress.update(num_bytes=counts.text_bytes - done_bytes, documents=1)
        done_bytes = counts.text_bytes
    if counts.documents == 0:
        raise DataError(f"folders must hold at least one text file, got none in {', '.join(map(str, folders))}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
