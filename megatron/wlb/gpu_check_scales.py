"""How large the checks are: worth a GPU, or a rehearsal on the CPU, whose times say nothing about a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.wlb.gpu_check_model import SmallGpt
from megatron.wlb.gpu_check_rank_times import TimesScale
from megatron.wlb.gpu_check_sharding import Heads, ShardingScale
from megatron.wlb.gpu_check_tiles import TilesScale
from megatron.wlb.gpu_check_training import TrainingScale


@dataclass(frozen=True, kw_only=True)
class Scale:
    """lengths: of the documents of a pack: one giant, single tokens, primes and equal ones."""

    lengths: tuple[int, ...]
    head_sizes: tuple[int, ...]
    model: SmallGpt
    sharding: ShardingScale
    times: TimesScale
    tiles: TilesScale
    training: TrainingScale


# What a GPU has of an 8B model under tensor parallelism of 4.
_HEADS = Heads(num_heads=8, num_kv_heads=2, head_size=128, value_size=128)
_SMALL_HEADS = Heads(num_heads=2, num_kv_heads=1, head_size=16, value_size=16)

SCALES = {
    "cuda": Scale(
        lengths=(1500, 1, 7, 129, 300, 128, 128, 1, 54),
        head_sizes=(64, 128),
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
        times=TimesScale(
            pack_tokens=(32_768, 65_536, 131_072),
            num_packs=5,
            cp_sizes=(2, 4, 8),
            heads=_HEADS,
            tile_tokens=128,
            median_tokens=1900,
            tail_tokens=(16_384, 131_072),
            repeats=2,
            budget_s=60.0,
        ),
        tiles=TilesScale(
            num_rows=(64, 128, 136, 192, 256, 384, 512, 1024),
            num_keys=(4096, 16_384, 32_768),
            all_keys=2**20,
            heads=_HEADS,
            tile_tokens=(64, 128, 192, 256),
            repeats=3,
        ),
        training=TrainingScale(
            num_layers=4, hidden_size=512, num_heads=8, window_tokens=2048, global_batch=8, documents=1500
        ),
    ),
    "cpu": Scale(
        lengths=(90, 1, 7, 13, 16, 16, 1, 3),
        head_sizes=(16,),
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
        times=TimesScale(
            pack_tokens=(256, 512),
            num_packs=1,
            cp_sizes=(2, 4, 8),
            heads=_SMALL_HEADS,
            tile_tokens=16,
            median_tokens=24,
            tail_tokens=(64, 512),
            repeats=2,
            budget_s=5.0,
        ),
        tiles=TilesScale(
            num_rows=(16, 32, 48, 64, 128),
            num_keys=(256, 1024),
            all_keys=2048,
            heads=_SMALL_HEADS,
            tile_tokens=(16, 32, 64),
            repeats=2,
        ),
        training=TrainingScale(
            num_layers=2, hidden_size=64, num_heads=2, window_tokens=256, global_batch=4, documents=400
        ),
    ),
}
