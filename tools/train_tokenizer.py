#!/usr/bin/env python3
"""Train a SentencePiece tokenizer on JSON lines, for --tokenizer-type SentencePieceTokenizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.wlb.preprocess_sentencepiece import SentencePieceConfig, train_sentencepiece
from wlb.command_line import run_tool
from wlb.data.json_lines import find_inputs


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="JSON lines, plain or gzip: a path or a glob in quotes.")
    parser.add_argument("--json-key", default="text", help="Key whose string is the text.")
    parser.add_argument("--model-prefix", required=True, help="Writes PREFIX.model and PREFIX.vocab.")
    parser.add_argument("--vocab-size", required=True, type=int, help="Pieces, special ones and bytes included.")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe")
    parser.add_argument("--sample-bytes", type=int, default=8_000_000, help="Train on a sample of at most this size.")
    parser.add_argument("--seed", type=int, default=1, help="Of the sample.")
    return parser


def main(argv: Sequence[str]) -> None:
    """Train as `argv` says."""
    args = make_parser().parse_args(argv)
    config = SentencePieceConfig(
        inputs=find_inputs(args.input),
        json_key=args.json_key,
        model=Path(f"{args.model_prefix}.model"),
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        sample_bytes=args.sample_bytes,
        seed=args.seed,
    )
    pieces = train_sentencepiece(config)
    print(f"{config.model}: {pieces} pieces")


if __name__ == "__main__":
    sys.exit(run_tool(main))
