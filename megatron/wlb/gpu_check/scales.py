"""How large the checks are: worth a GPU, or a rehearsal on the CPU, whose times say nothing about a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.wlb.gpu_check.cost import CostScale
from megatron.wlb.gpu_check.exchange import ExchangeScale
from megatron.wlb.gpu_check.hygiene import HygieneScale
from megatron.wlb.gpu_check.model import SmallGpt
from megatron.wlb.gpu_check.packs import Heads
from megatron.wlb.gpu_check.rank_times import TimesScale
from megatron.wlb.gpu_check.sharding import ShardingScale
from megatron.wlb.gpu_check.tiles import TilesScale
from megatron.wlb.gpu_check.training_runs import TrainingScale


@dataclass(frozen=True, kw_only=True)
class Scale:
    """lengths: of the documents of a pack: one giant, single tokens, primes and equal ones. heads: by kind."""

    lengths: tuple[int, ...]
    heads: dict[str, Heads]
    model: SmallGpt
    sharding: ShardingScale
    exchange: ExchangeScale
    times: TimesScale
    tiles: TilesScale
    cost: CostScale
    hygiene: HygieneScale
    training: TrainingScale


# What a GPU has of an 8B model under tensor parallelism of 4.
_HEADS = Heads(num_heads=8, num_kv_heads=2, head_size=128, value_size=128)
_SMALL_HEADS = Heads(num_heads=2, num_kv_heads=1, head_size=16, value_size=16)


def _kinds(head_sizes: tuple[int, ...], mla_like: tuple[int, int], window_tokens: int) -> dict[str, Heads]:
    """Of packed attention on one rank; mla_like: size of queries and keys, and of values."""
    kinds = {
        f"{kind} {size}": Heads(num_heads=8, num_kv_heads=n, head_size=size, value_size=size)
        for size in head_sizes
        for kind, n in (("MHA", 8), ("GQA", 2), ("MQA", 1))
    }
    size = head_sizes[0]
    return kinds | {
        "MLA-like": Heads(num_heads=4, num_kv_heads=4, head_size=mla_like[0], value_size=mla_like[1]),
        "window": Heads(num_heads=8, num_kv_heads=2, head_size=size, value_size=size, window_tokens=window_tokens),
    }


SCALES = {
    "cuda": Scale(
        lengths=(1500, 1, 7, 129, 300, 128, 128, 1, 54),
        heads=_kinds((64, 128), (192, 128), 200),
        model=SmallGpt(hidden_size=256, max_positions=2048, vocab_size=512, init_std=0.05, weight_dtype=torch.bfloat16),
        sharding=ShardingScale(
            lengths=(1500, 1, 7, 129, 300, 128, 128, 1, 54),
            tile_tokens=32,
            heads={
                "MHA": Heads(num_heads=8, num_kv_heads=8, head_size=64, value_size=64),
                "GQA": _HEADS,
                "MLA-like": Heads(num_heads=4, num_kv_heads=4, head_size=192, value_size=128),
                "window": Heads(num_heads=8, num_kv_heads=2, head_size=64, value_size=64, window_tokens=200),
            },
            cp_sizes=(2, 4, 8),
            long_lengths=(80_000, 24_001, 12_007, 8_000, 4_096, 2_000, 900, 65, 3),
            long_heads=Heads(num_heads=4, num_kv_heads=2, head_size=64, value_size=64),
            long_cp_size=8,
            chunk_rows=1024,
        ),
        exchange=ExchangeScale(num_rows=(20_000, 0, 65_536, 1, 1000, 4097), row_numbers=512, rounds=120),
        times=TimesScale(
            pack_tokens=(131_072, 65_536, 32_768),
            num_packs=5,
            cp_sizes=(2, 4, 8),
            heads=_HEADS,
            tile_tokens=128,
            median_tokens=1900,
            tail_tokens=(16_384, 131_072),
            repeats=2,
        ),
        tiles=TilesScale(
            num_rows=(64, 128, 136, 192, 256, 384, 512, 1024),
            num_keys=(4096, 16_384, 32_768),
            all_keys=2**20,
            heads=_HEADS,
            tile_tokens=(64, 128, 192, 256),
            repeats=3,
        ),
        cost=CostScale(
            attention_tokens=65_536,
            document_tokens=(512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
            rest_tokens=(1024, 4096, 8192),
            repeats=5,
            draw_on_device=True,
        ),
        hygiene=HygieneScale(
            cp_sizes=(1, 4),
            heads=_HEADS,
            sync_lengths=((3000, 1000, 96), (2500, 1500, 96), (4000, 64, 32), (2000, 2000, 96)),
            tile_tokens=32,
            model=SmallGpt(
                num_layers=4, hidden_size=1024, num_heads=8, vocab_size=8192, max_positions=16_384, init_std=0.02
            ),
            num_micro_batches=50,
            most_tokens=16_384,
        ),
        training=TrainingScale(
            num_layers=4,
            hidden_size=512,
            num_heads=8,
            window_tokens=2048,
            global_batch=8,
            documents=1500,
            rounds=2,
            together=1,
        ),
    ),
    "cpu": Scale(
        lengths=(90, 1, 7, 13, 16, 16, 1, 3),
        heads=_kinds((16,), (24, 16), 20),
        model=SmallGpt(max_positions=128, weight_dtype=torch.bfloat16),
        sharding=ShardingScale(
            lengths=(90, 1, 7, 13, 16, 16, 1, 16),
            tile_tokens=4,
            heads={
                "MHA": Heads(num_heads=4, num_kv_heads=4, head_size=16, value_size=16),
                "GQA": Heads(num_heads=4, num_kv_heads=1, head_size=16, value_size=16),
                "MLA-like": Heads(num_heads=2, num_kv_heads=2, head_size=24, value_size=16),
                "window": Heads(num_heads=4, num_kv_heads=2, head_size=16, value_size=16, window_tokens=20),
            },
            cp_sizes=(2, 4, 8),
            long_lengths=(250, 100, 77, 50, 30, 5),
            long_heads=_SMALL_HEADS,
            long_cp_size=8,
            chunk_rows=64,
        ),
        exchange=ExchangeScale(num_rows=(100, 0, 257, 1, 64), row_numbers=32, rounds=20),
        times=TimesScale(
            pack_tokens=(512, 256),
            num_packs=1,
            cp_sizes=(2, 4, 8),
            heads=_SMALL_HEADS,
            tile_tokens=16,
            median_tokens=24,
            tail_tokens=(64, 512),
            repeats=2,
        ),
        tiles=TilesScale(
            num_rows=(16, 32, 48, 64, 128),
            num_keys=(256, 1024),
            all_keys=2048,
            heads=_SMALL_HEADS,
            tile_tokens=(16, 32, 64),
            repeats=2,
        ),
        cost=CostScale(
            attention_tokens=256, document_tokens=(32, 64, 256), rest_tokens=(256, 1024), repeats=2, draw_on_device=True
        ),
        hygiene=HygieneScale(
            cp_sizes=(1, 4),
            heads=_SMALL_HEADS,
            sync_lengths=((100, 20, 8), (80, 40, 8), (96, 16, 16)),
            tile_tokens=4,
            model=SmallGpt(max_positions=256),
            num_micro_batches=6,
            most_tokens=256,
        ),
        training=TrainingScale(
            num_layers=2,
            hidden_size=64,
            num_heads=2,
            window_tokens=256,
            global_batch=4,
            documents=400,
            rounds=1,
            together=2,
        ),
    ),
}
