"""The data set provider of a packed run: three iterators over planned steps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from megatron.training.utils import print_rank_0

from megatron.wlb.arguments import WlbOptions
from megatron.wlb.batch import PackedIterator
from megatron.wlb.checkpoint import load_state, saved_state_path
from megatron.wlb.parallel import ParallelDims
from megatron.wlb.token_files import TokenFiles
from wlb.cost import CostModel
from wlb.data.planner import StepPlanner
from wlb.data.stream import DocumentStream
from wlb.packing import PackerOptions, StepShape, build_packer, derive_thresholds

PADDING_TOKEN = 0  # any valid id: padding is never trained
_THRESHOLD_SAMPLE = 200_000


def step_shape(args: Namespace, *, batch_size: int) -> StepShape:
    """The size of a step; `batch_size` is the global batch in windows."""
    return StepShape(
        window_tokens=args.seq_length,
        micro_batches_per_replica=batch_size // args.data_parallel_size,
        num_replicas=args.data_parallel_size,
    )


def pad_multiple(args: Namespace) -> int:
    """Tokens to which the tail of a micro-batch is padded: what the parallel dimensions and FP8 recipes ask."""
    shards = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    unit = 1
    if args.fp8 is not None:
        unit = 32 if args.fp8_recipe == "mxfp8" else 16
    if args.fp4 is not None:
        unit = 32
    return shards * unit


def packer_options(args: Namespace, options: WlbOptions, files: TokenFiles) -> PackerOptions:
    """What the training packer is built from; thresholds follow from the training split where none are given."""
    shape = step_shape(args, batch_size=args.global_batch_size)
    thresholds = options.thresholds_tokens
    if thresholds is None:
        thresholds = ()
        if options.packing == "wlb":
            lengths = np.concatenate([_sample(s.lengths, s.rows) for s in files.sources[0]])
            thresholds = derive_thresholds(
                lengths - 1, shape.window_tokens, options.num_queues, num_micro_batches=shape.num_micro_batches
            )
    return PackerOptions(
        shape=shape,
        cost=options.cost,
        cap_windows=options.cap_windows,
        thresholds_tokens=thresholds,
        greedy_window_batches=options.greedy_window_batches,
    )


def packed_dataset_provider(
    args: Namespace,
    options: WlbOptions,
    files: TokenFiles,
    packer: PackerOptions,
    dims: Callable[[], ParallelDims],
    on_train_iterator: Callable[[PackedIterator], None],
) -> Callable[..., tuple[Any, Any, Any]]:
    """The provider that `megatron.training.pretrain` calls once the checkpoint is loaded.

    on_train_iterator: told the training iterator when it exists.
    """

    def provide(_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        here = dims()
        restored = _restored_state(args)
        evaluated = {
            name: _evaluation_iterator(args, files, split, here, restored.get(name), options.cost)
            for name, split in (("valid", 1), ("test", 2))
            if args.eval_iters and files.sources[split]
        }

        def companions() -> dict[str, Any]:
            return {name: iterator.planner.state() for name, iterator in evaluated.items()}

        stream = _stream(args, files, 0, options.document_cut)
        saved_step = restored["train"]["packer_state"]["step"] if restored else 0
        planner = StepPlanner(
            stream=stream,
            packer=build_packer(options.packing, packer),
            num_steps=saved_step + args.train_iters - args.iteration,
            ledger=_ledger(options.ledger) if here.rank == 0 else None,
        )
        if restored:
            planner.restore(restored["train"])
        train = _iterator(args, planner, files, here, companions)
        on_train_iterator(train)
        return train, evaluated.get("valid"), evaluated.get("test")

    # Every rank plans; Megatron must not ask tensor-parallel rank 0 alone.
    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def _stream(args: Namespace, files: TokenFiles, split: int, cut: Literal["stream", "window"]) -> DocumentStream:
    return DocumentStream(files.sources[split], window_tokens=args.seq_length, cut=cut, seed=args.seed)


def _evaluation_iterator(
    args: Namespace, files: TokenFiles, split: int, dims: ParallelDims, restored: dict[str, Any] | None, cost: CostModel
) -> PackedIterator:
    """Evaluation packs plainly, so that its loss does not depend on how training packs."""
    shape = step_shape(args, batch_size=getattr(args, "eval_global_batch_size", None) or args.global_batch_size)
    packer = build_packer("plain", PackerOptions(shape=shape, cost=cost))
    planner = StepPlanner(stream=_stream(args, files, split, "stream"), packer=packer, num_steps=None)
    if restored is not None:
        planner.restore(restored)
    return _iterator(args, planner, files, dims, dict)


def _iterator(
    args: Namespace,
    planner: StepPlanner,
    files: TokenFiles,
    dims: ParallelDims,
    companions: Callable[[], dict[str, Any]],
) -> PackedIterator:
    return PackedIterator(
        planner,
        dims,
        files.read,
        pad_to_multiple=pad_multiple(args),
        padding_token=PADDING_TOKEN,
        vocab_size=args.padded_vocab_size,
        max_positions=args.seq_length,
        save_companions=companions,
    )


def _restored_state(args: Namespace) -> dict[str, Any]:
    if args.iteration == 0 or args.load is None:
        return {}
    path = saved_state_path(args.dataloader_save or args.load, args.iteration) or saved_state_path(
        args.load, args.iteration
    )
    if path is None:
        print_rank_0(
            f"WARNING: no packing state beside iteration {args.iteration} of {args.load}: the checkpoint was written "
            "without --wlb-packing, and the document stream starts at its beginning"
        )
        return {}
    print_rank_0(f"> packing goes on from {path}")
    return load_state(path)


def _ledger(path: Path | None) -> Callable[[str], object] | None:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    # Line by line: what was planned is on disk when a run is stopped.
    return path.open("a", buffering=1).write


def _sample(lengths: np.ndarray, rows: range) -> np.ndarray:
    """An even sample of stored lengths, bounded, the same on every rank."""
    return np.asarray(lengths[rows.start : rows.stop : len(rows) // _THRESHOLD_SAMPLE + 1], dtype=np.int64)
