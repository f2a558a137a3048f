#!/usr/bin/env python3
"""Build the quickstart's corpus: documents, tokenizer, .bin/.idx and a manifest, from the installed Python's files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="Folder for the corpus; a complete earlier build in it is kept.")
    parser.add_argument(
        "--folders", nargs="+", type=Path, default=[], help="Take documents from here, not from the installed Python."
    )
    parser.add_argument("--seed", type=int, default=1, help="Of the choice of documents and the tokenizer's sample.")
    parser.add_argument("--max-documents", type=int, default=20_000)
    parser.add_argument("--max-bytes", type=int, default=32_000_000, help="Text to take, about 3 bytes a token.")
    parser.add_argument("--max-document-bytes", type=int, default=1_000_000, help="Leave out larger files.")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="Processes that tokenize.")
    return parser


def main(argv: Sequence[str]) -> None:
    """Build as `argv` says, or say that it was built before."""
    args = make_parser().parse_args(argv)
    from megatron.wlb.preprocess_corpus import CorpusConfig, build_corpus

    config = CorpusConfig(
        folder=args.output,
        folders=tuple(args.folders),
        seed=args.seed,
        max_documents=args.max_documents,
        max_bytes=args.max_bytes,
        max_document_bytes=args.max_document_bytes,
        vocab_size=args.vocab_size,
        workers=args.workers,
    )
    manifest, built = build_corpus(config)
    how = f"built in {manifest['build_s']:.0f} s" if built else "complete, kept"
    print(
        f"{config.folder}: {how}: {manifest['documents']} documents, {manifest['tokens']} tokens; tokens per document: "
        f"p50 {manifest['p50']}, p99 {manifest['p99']}, max {manifest['max']}"
    )


if __name__ == "__main__":
    sys.exit(run_tool(main))
