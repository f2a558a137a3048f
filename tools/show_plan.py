#!/usr/bin/env python3
"""Show which context-parallel rank holds which tokens of which document, before a run: prints, and draws with --out.

    python tools/show_plan.py --lengths 90000 30000 8000 2000 1072 --cp 8 --out plan.png
    python tools/show_plan.py --data-prefix corpus_text_document --window 131072 --pack 3 --seed 1234 --cp 8

All sharders are shown side by side, for the same pack. Lengths are training positions; a stored document of L tokens
has L - 1. Like in the trainer, a pack is padded at its tail to a multiple of --cp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.data.index_file import check_index, index_lengths
from wlb.data.stream import DocumentSource, DocumentStream
from wlb.errors import ConfigError
from wlb.report.shard_summary import AttentionShape, ShardSummary, pack_text, shards_text
from wlb.sharding import DEFAULT_OPERATIONS_PER_BYTE, SHARDERS, ShardCosts, Sharding
from wlb.simulate.trace import load_lengths

_SHAPE, _COSTS = AttentionShape(), ShardCosts()
_PICTURES = ("png", "svg")
_DEFAULT_WINDOW = 131072


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="The documents of the pack, in order.")
    data.add_argument("--lengths-file", type=Path, metavar="FILE", help="JSON list, or text with one length a line.")
    data.add_argument("--data-prefix", metavar="PREFIX", help="PREFIX.idx and PREFIX.bin of a data set.")
    pick = parser.add_argument_group("which pack of a file or data set: as --wlb-packing plain fills its micro-batches")
    pick.add_argument(
        "--window", type=int, help=f"Tokens of a pack; documents are cut at it. Default {_DEFAULT_WINDOW}."
    )
    pick.add_argument("--pack", type=int, help="Number of the pack, from 0. Default 0.")
    pick.add_argument(
        "--seed", type=int, help="Shuffle as the training stream does with this seed. Default: unshuffled."
    )
    parser.add_argument("--cp", type=int, required=True, metavar="N", help="Context-parallel ranks.")
    parser.add_argument(
        "--sharder", nargs="+", default=list(SHARDERS), metavar="NAME", help=f"Of {', '.join(SHARDERS)}. Default: all."
    )
    model = parser.add_argument_group("the attention layer, all heads; with tensor parallelism, give one rank's heads")
    model.add_argument(
        "--num-attention-heads", type=int, default=_SHAPE.num_attention_heads, help="Default %(default)s."
    )
    model.add_argument("--num-query-groups", type=int, help="Key and value heads. Default: as many as attention heads.")
    model.add_argument(
        "--kv-channels", type=int, default=_SHAPE.kv_channels, help="Size of a head. Default %(default)s."
    )
    model.add_argument(
        "--bytes-per-number",
        type=int,
        default=_SHAPE.bytes_per_number,
        help="Of keys and values. Default %(default)s, bf16.",
    )
    costs = parser.add_argument_group("costs with which sharders compare plans")
    costs.add_argument(
        "--tile-tokens", type=int, default=_COSTS.tile_tokens, help="Of the attention kernel. Default %(default)s."
    )
    costs.add_argument(
        "--operations-per-byte",
        type=float,
        default=DEFAULT_OPERATIONS_PER_BYTE,
        help="Operations of attention that are computed while a byte of keys and values arrives: the trainer's "
        "--wlb-operations-per-byte. 0: receiving is free. Default %(default)s.",
    )
    parser.add_argument("--spans", action="store_true", help="Print every span of every rank, not only the first few.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="Draw the picture here: .png or .svg.")
    return parser


def main(argv: Sequence[str]) -> None:
    """Print the plans, then draw them.

    Raises:
        ConfigError, DataError, ShardingError: a sentence about the argument, before anything is printed.
    """
    args = make_parser().parse_args(argv)
    image_format = _image_format(args.out)
    attention = AttentionShape(
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_attention_heads if args.num_query_groups is None else args.num_query_groups,
        kv_channels=args.kv_channels,
        bytes_per_number=args.bytes_per_number,
    )
    costs = ShardCosts.for_model(
        num_heads=attention.num_attention_heads,
        num_kv_heads=attention.num_query_groups,
        bytes_per_number=attention.bytes_per_number,
        operations_per_byte=args.operations_per_byte,
        tile_tokens=args.tile_tokens,
    )
    for name in args.sharder:
        if name not in SHARDERS:
            raise ConfigError(f"--sharder must be of {', '.join(SHARDERS)}, got {name}")
    if args.cp < 1:
        raise ConfigError(f"--cp must be >= 1, got {args.cp}")
    shardings = [Sharding(name=name, cp_size=args.cp, costs=costs) for name in dict.fromkeys(args.sharder)]
    lengths, origin = _pack(args)
    num_padding = -sum(lengths) % args.cp
    padded = (*lengths, num_padding) if num_padding else lengths
    summaries = [
        ShardSummary(name=s.name, plan=s.plan(padded), costs=costs, num_padding=num_padding) for s in shardings
    ]
    print(origin)
    print(shards_text(summaries, attention, all_spans=args.spans))
    if image_format is not None:
        from wlb.report.shard_picture import draw  # Loads matplotlib: only here.

        title = f"{origin}: {pack_text(summaries[0])} over {args.cp} context-parallel ranks"
        with atomic_path(args.out) as path:
            draw(summaries, attention, path, title=title, image_format=image_format)
        print(f"\npicture: {args.out}")


def _image_format(out: Path | None) -> str | None:
    if out is None:
        return None
    image_format = out.suffix.removeprefix(".").lower()
    if image_format not in _PICTURES:
        raise ConfigError(f"--out must end in .png or .svg, got {out}")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--out needs matplotlib to draw {out}: install the extra wlb-megatron[report]")
    return image_format


def _pack(args: argparse.Namespace) -> tuple[tuple[int, ...], str]:
    """Lengths of the pack's documents, and in words where they come from."""
    if args.lengths is not None:
        for name in ("window", "pack", "seed"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name} must be left out with --lengths, which is one pack, got {getattr(args, name)}"
                )
        for length in args.lengths:
            if length < 1:
                raise ConfigError(f"--lengths must be >= 1, got {length}")
        return tuple(args.lengths), "pack given by --lengths"
    window = _DEFAULT_WINDOW if args.window is None else args.window
    number = 0 if args.pack is None else args.pack
    if window < 1:
        raise ConfigError(f"--window must be >= 1, got {window}")
    if number < 0:
        raise ConfigError(f"--pack must be >= 0, got {number}")
    if args.lengths_file is not None:
        name = args.lengths_file.name
        source = DocumentSource(lengths=load_lengths(args.lengths_file), label_tokens=0)
    else:
        name = Path(args.data_prefix).name
        check_index(args.data_prefix)
        source = DocumentSource(lengths=index_lengths(args.data_prefix), label_tokens=1)
    stream = DocumentStream(
        [source], window_tokens=window, cut="stream", seed=args.seed or 0, shuffle=args.seed is not None
    )
    num_packs = -(-stream.epoch_tokens // window)
    if number >= num_packs:
        raise ConfigError(f"--pack must be below {num_packs}, the packs of {window:,} tokens in {name}, got {number}")
    # Nothing is kept of the packs before: a stream only stands somewhere.
    for _ in range(number):
        stream.take(window, arrival=0)
    left = stream.epoch_tokens - number * window
    documents = stream.take(window, arrival=0, at_most_tokens=min(window, left))
    origin = f"{name}, pack {number}" + ("" if args.seed is None else f", seed {args.seed}")
    return tuple(d.length for d in documents), origin


if __name__ == "__main__":
    sys.exit(run_tool(main))
