"""The data set provider of a packed run: three iterators over planned steps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training.utils import print_rank_0

from megatron.wlb.arguments import WlbOptions
from megatron.wlb.batch import PackedIterator, PackedSteps
from megatron.wlb.batch_schedule import batch_ramp, final_batch_size
from megatron.wlb.checkpoint import load_state, saved_state_path
from megatron.wlb.core_attention import window_tokens
from megatron.wlb.delay_thresholds import as_saved, with_thresholds
from megatron.wlb.parallel import ParallelDims
from megatron.wlb.token_files import TokenFiles
from megatron.wlb.virtual_stages import num_chunks, pipeline_shape
from wlb.data.plan_process import ProcessSource
from wlb.data.plan_source import InlineSource, PlannerSpec, PlanSource
from wlb.packing import PackerOptions, StepShape
from wlb.schedule import PipelineModel
from wlb.sharding import Division
from wlb.sharding.index import IndexKind
from wlb.sharding.micro_batch_cost import statistics_cost

PADDING_TOKEN = 0  # any valid id: padding is never trained


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


def division_of(args: Namespace, options: WlbOptions) -> Division | None:
    """What packers and statistics know of how context-parallel ranks divide a micro-batch."""
    return Division.of(options.sharding, pad_to_multiple=pad_multiple(args), typical_tokens=args.seq_length)


def packer_options(args: Namespace, options: WlbOptions, files: TokenFiles) -> PackerOptions:
    """What the training packer is built from; thresholds follow from the training split where none are given."""
    shape = step_shape(args, batch_size=final_batch_size(args))
    packer = PackerOptions(
        shape=shape,
        cost=options.costs.whole,
        cap_windows=options.cap_windows,
        thresholds_tokens=options.thresholds_tokens or (),
        max_delay_steps=options.max_delay_steps,
        wlb_intake=options.intake,
        greedy_window_batches=options.greedy_window_batches,
        pipeline=PipelineModel(shape=pipeline_shape(args), stretch_costs=options.costs.stretches),
        in_flight_windows=options.in_flight_windows,
        search_evaluations=options.search_evaluations,
        solver_lengths=options.solver_lengths,
        solver_seconds=options.solver_seconds,
        equal_counts=replicas_meet_in_every_micro_batch(args),
        division=division_of(args, options),
    )
    return with_thresholds(packer, options, files)


def replicas_meet_in_every_micro_batch(args: Namespace) -> bool:
    """Whether a collective joins data-parallel ranks inside a micro-batch: with unequal counts it would hang."""
    return bool(
        args.expert_model_parallel_size > 1
        or args.expert_tensor_parallel_size > args.tensor_model_parallel_size
        # Sharded weights are gathered from the other replicas before each use.
        or args.use_torch_fsdp2
        or args.use_megatron_fsdp
    )


def packed_dataset_provider(
    args: Namespace,
    options: WlbOptions,
    files: TokenFiles,
    packer: PackerOptions,
    dims: Callable[[], ParallelDims],
    on_train_steps: Callable[[PackedSteps], None],
) -> Callable[..., tuple[PackedIterator | None, ...]]:
    """The provider that `megatron.training.pretrain` calls once the checkpoint is loaded.

    on_train_steps: told the training steps when they exist.
    """

    def plan() -> tuple[PackedSteps, PackedSteps | None, PackedSteps | None]:
        here = dims()
        restored = _restored_state(args)
        evaluated = {
            name: _steps(
                args, InlineSource(_evaluation_spec(args, options, files, split, here, restored.get(name))), files, here
            )
            for name, split in (("valid", 1), ("test", 2))
            if args.eval_iters and files.rows[split]
        }
        train_packer = as_saved(packer, options, restored.get("train"))
        saved_step = restored["train"]["packer_state"]["step"] if restored else 0
        spec = PlannerSpec(
            rows=files.rows[0],
            window_tokens=args.seq_length,
            cut=options.document_cut,
            seed=args.seed,
            packer=options.packing,
            options=train_packer,
            num_steps=saved_step + args.train_iters - args.iteration,
            replica=here.dp_rank,
            cost=statistics_cost(
                options.costs.whole, packer.division, num_micro_batches=packer.shape.num_micro_batches
            ),
            pad_to_multiple=pad_multiple(args),
            sharding=options.sharding,
            cp_rank=here.cp_rank,
            index_uses=index_uses(args),
            keeps_ledger=options.ledger is not None and here.rank == 0,
            restored=restored.get("train"),
            ramp=batch_ramp(args, first_step=saved_step),
        )
        source: PlanSource = InlineSource(spec)
        if options.steps_ahead:
            source = ProcessSource(spec, steps_ahead=options.steps_ahead, rank=here.rank)
        train = _steps(
            args,
            source,
            files,
            here,
            save_companions=lambda: {name: steps.state() for name, steps in evaluated.items()},
            ledger=_ledger(options.ledger) if spec.keeps_ledger and options.ledger else None,
        )
        on_train_steps(train)
        return train, evaluated.get("valid"), evaluated.get("test")

    splits: list[PackedSteps | None] = []

    def provide(_num_samples: Any, vp_stage: int | None = None) -> tuple[PackedIterator | None, ...]:
        # With virtual stages this is called once a model chunk, in order: the first call plans for all of them.
        chunk = vp_stage or 0
        if chunk == 0:
            splits[:] = plan()
        return tuple(None if steps is None else steps.chunk(chunk) for steps in splits)

    # Every rank plans; Megatron must not ask tensor-parallel rank 0 alone.
    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def index_uses(args: Namespace) -> tuple[tuple[IndexKind, int | None], ...]:
    """What the model's attention layers will ask of each plan; nothing where Transformer Engine follows none."""
    if args.transformer_impl == "transformer_engine" and args.context_parallel_size == 1:
        return ()
    words = args.cp_comm_type * (args.num_layers // len(args.cp_comm_type))
    uses = ((word, window_tokens(args, layer)) for layer, word in enumerate(words, start=1))
    return tuple(dict.fromkeys(uses))


def _evaluation_spec(
    args: Namespace,
    options: WlbOptions,
    files: TokenFiles,
    split: int,
    dims: ParallelDims,
    restored: dict[str, Any] | None,
) -> PlannerSpec:
    """Evaluation packs plainly, so that its loss does not depend on how training packs."""
    shape = step_shape(args, batch_size=getattr(args, "eval_global_batch_size", None) or args.global_batch_size)
    return PlannerSpec(
        rows=files.rows[split],
        window_tokens=args.seq_length,
        cut="stream",
        seed=args.seed,
        packer="plain",
        options=PackerOptions(shape=shape, cost=options.costs.whole),
        num_steps=None,
        replica=dims.dp_rank,
        cost=statistics_cost(
            options.costs.whole, division_of(args, options), num_micro_batches=shape.num_micro_batches
        ),
        pad_to_multiple=pad_multiple(args),
        sharding=options.sharding,
        cp_rank=dims.cp_rank,
        index_uses=index_uses(args),
        restored=restored,
    )


def _steps(args: Namespace, source: PlanSource, files: TokenFiles, dims: ParallelDims, **more: Any) -> PackedSteps:
    return PackedSteps(
        source,
        dims,
        files.read,
        num_chunks=num_chunks(args),
        padding_token=PADDING_TOKEN,
        vocab_size=args.padded_vocab_size,
        max_positions=args.seq_length,
        **more,
    )


def _restored_state(args: Namespace) -> dict[str, Any]:
    if args.iteration == 0 or args.load is None:
        return {}
    # The weights come from --load: a folder that is only written to may hold an older run's state.
    folders = list(dict.fromkeys([args.load, args.dataloader_save or args.load]))
    path = next(filter(None, (saved_state_path(folder, args.iteration) for folder in folders)), None)
    if path is None:
        print_rank_0(
            f"WARNING: no packing state of iteration {args.iteration} in {' or '.join(folders)}: the document stream "
            "starts at its beginning. That is right for a checkpoint written without --wlb-packing; otherwise "
            "--dataloader-save must name the folder that holds the state"
        )
        return {}
    print_rank_0(f"> packing goes on from {path}")
    return load_state(path)


def _ledger(path: Path) -> Callable[[str], object]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Line by line: what a run has trained is on disk when it is stopped.
    return path.open("a", buffering=1).write
