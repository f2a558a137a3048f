"""Thresholds of outlier queues in a training run: given, found in the data, or those of the run that goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from megatron.training.utils import print_rank_0

from megatron.wlb.arguments import WlbOptions
from megatron.wlb.token_files import TokenFiles
from wlb.packing import PackerOptions, PackerState, derive_thresholds
from wlb.packing.delay_thresholds import choose_thresholds, front_table, threshold_remarks

_SAMPLE = 200_000


def with_thresholds(packer: PackerOptions, options: WlbOptions, files: TokenFiles) -> PackerOptions:
    """Thresholds for the queues, where there are any, with a word on those that the data makes useless."""
    if options.packing != "wlb" and not packer.max_delay_steps:
        return packer
    shape = packer.shape
    # Positions, one fewer than stored tokens.
    lengths = np.concatenate([_sample(r.lengths(), range(r.first, r.stop)) for r in files.rows[0]]) - 1
    if options.thresholds_tokens is None and packer.max_delay_steps:
        choice = choose_thresholds(packer, lengths)
        print_rank_0(f"> --wlb-thresholds by a replay of the training split:\n{front_table(choice)}")
        packer = replace(packer, thresholds_tokens=choice.chosen.thresholds_tokens)
    elif options.thresholds_tokens is None:
        derived = derive_thresholds(
            lengths, shape.window_tokens, options.num_queues, num_micro_batches=shape.num_micro_batches
        )
        packer = replace(packer, thresholds_tokens=derived)
    for sentence in threshold_remarks(packer.thresholds_tokens, lengths, shape.window_tokens):
        print_rank_0(f"WARNING: {sentence}")
    return packer


def as_saved(packer: PackerOptions, options: WlbOptions, restored: dict[str, Any] | None) -> PackerOptions:
    """With the thresholds of the run that is resumed, where they were chosen and not given."""
    if restored is None or options.thresholds_tokens is not None or not packer.max_delay_steps:
        return packer
    saved = tuple(json.loads(restored["packer"].get("thresholds_tokens", "[]")))
    if not saved and not PackerState.from_json(restored["packer_state"]).waiting:
        return packer  # of a run in which nothing waited
    if saved != packer.thresholds_tokens:
        print_rank_0(f"> --wlb-thresholds: those of the run that goes on, {' '.join(map(str, saved)) or 'none'}")
    return replace(packer, thresholds_tokens=saved)


def _sample(lengths: np.ndarray, rows: range) -> np.ndarray:
    """An even sample of stored lengths, bounded, the same on every rank."""
    return np.asarray(lengths[rows.start : rows.stop : len(rows) // _SAMPLE + 1], dtype=np.int64)
