#!/usr/bin/env python3
"""Preprocessing per worker against a bare loop over the same tokenizer.

The bare loop is the least that turns JSON lines into tokens: for each line, `json.loads`, tokenize, append the
ids to an array. The tool does that and more: bad lines, the vocabulary's bounds, the type of a stored token, the
index, the files. Both read the same file from a warm cache, in this process, in alternation; both include
parsing. The ratio is tool / bare of each pair, so 1.10 is 10 % slower; the median of the pairs is the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.wlb.preprocess import PreprocessConfig, preprocess
from megatron.wlb.preprocess_sentencepiece import SentencePieceConfig, train_sentencepiece
from megatron.wlb.preprocess_tokenizer import TextTokenizer, sentencepiece_tokenizer
from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.data.json_lines import write_json_lines
from wlb.data.text_files import ReadCounts, TextFile, read_documents
from wlb.errors import ConfigError

TARGET_RATIO = 1.10


def bare_loop(path: Path, tokenizer: TextTokenizer) -> int:
    """Tokens of the corpus at `path`."""
    tokens = array("i")
    with open(path, "rb") as lines:
        for line in lines:
            tokens.extend(tokenizer.ids(json.loads(line)["text"]))
    return len(tokens)


def write_corpus(path: Path, *, text_bytes: int) -> ReadCounts:
    """Sources of the standard library, about `text_bytes` of them."""
    import sysconfig

    folder = Path(sysconfig.get_path("stdlib"))
    files = [TextFile(path=p, source=p.name) for p in sorted(folder.glob("*.py"))]
    counts = ReadCounts()

    def records():
        for document in read_documents(files, counts=counts):
            yield document.record()
            if counts.text_bytes >= text_bytes:
                return

    write_json_lines(path, records())
    return counts


def measure(path: Path, tokenizer: TextTokenizer, *, pairs: int) -> dict[str, list[float]]:
    """Seconds of each turn; which of the two goes first alternates."""
    config = PreprocessConfig(inputs=(path,), output_prefix=str(path.with_suffix("")), log_interval=1 << 40)
    tokens = {}

    def time_bare() -> float:
        begin_s = time.perf_counter()
        tokens["bare"] = bare_loop(path, tokenizer)
        return time.perf_counter() - begin_s

    def time_tool() -> float:
        begin_s = time.perf_counter()
        tokens["tool"] = preprocess(config, tokenizer).tokens["text"]
        return time.perf_counter() - begin_s

    seconds: dict[str, list[float]] = {"bare": [], "tool": []}
    turns = {"bare": time_bare, "tool": time_tool}
    for pair in range(-1, pairs):  # the first pair warms up
        for name in ("bare", "tool") if pair % 2 else ("tool", "bare"):
            elapsed_s = turns[name]()
            if pair >= 0:
                seconds[name].append(elapsed_s)
    if tokens["bare"] != tokens["tool"]:
        raise AssertionError(f"both must give the same tokens, got {tokens}")
    seconds["tokens"] = [tokens["tool"]]
    return seconds


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="unigram is the faster one.")
    parser.add_argument("--json", type=Path, help="Write the result here.")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        raise ConfigError(f"--pairs must be >= 1, got {args.pairs}")
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder, "corpus.jsonl"), Path(folder, "tokenizer.model")
        counts = write_corpus(path, text_bytes=args.text_bytes)
        train_sentencepiece(
            SentencePieceConfig(inputs=(path,), model=model, vocab_size=args.vocab_size, model_type=args.model_type)
        )
        seconds = measure(path, sentencepiece_tokenizer(str(model)), pairs=args.pairs)
    ratios = [tool / bare for tool, bare in zip(seconds["tool"], seconds["bare"], strict=True)]
    result = {
        "command": "python benchmarks/preprocess.py " + " ".join(argv),
        "model_type": args.model_type,
        "documents": counts.documents,
        "text_bytes": counts.text_bytes,
        "tokens": seconds["tokens"][0],
        "bare_s_median": median(seconds["bare"]),
        "tool_s_median": median(seconds["tool"]),
        "ratios": ratios,
        "ratio_median": median(ratios),
        "target_ratio": TARGET_RATIO,
    }
    print(result["command"])
    print(
        f"{counts.documents} documents, {result['tokens']} tokens ({args.model_type}): bare "
        f"{counts.text_bytes / result['bare_s_median'] / 1e6:.2f} MB/s, "
        f"tool {counts.text_bytes / result['tool_s_median'] / 1e6:.2f} MB/s"
    )
    print(
        f"ratio tool / bare: median {result['ratio_median']:.3f} of {args.pairs} pairs, "
        f"{min(ratios):.3f} to {max(ratios):.3f} (target <= {TARGET_RATIO:.2f})"
    )
    if args.json is not None:
        with atomic_path(args.json) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_tool(main))
