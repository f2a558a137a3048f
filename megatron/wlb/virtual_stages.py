"""Virtual pipeline stages: what Megatron's options say about them, and the counts of micro-batches they take."""

from __future__ import annotations

from argparse import Namespace

from megatron.wlb.batch_schedule import batch_sizes
from wlb.errors import ConfigError
from wlb.schedule import PipelineShape

_GROUP_FLAG = "--microbatch-group-size-per-virtual-pipeline-stage"


def num_chunks(args: Namespace) -> int:
    """Model chunks of a pipeline stage; 1 without virtual stages."""
    return int(args.virtual_pipeline_model_parallel_size or 1)


def pipeline_shape(args: Namespace) -> PipelineShape:
    """The pipeline of a replica as Megatron runs it.

    Raises:
        ConfigError: groups of micro-batches smaller than the pipeline.
    """
    chunks = num_chunks(args)
    if chunks == 1:
        return PipelineShape(num_stages=args.pipeline_model_parallel_size)
    group = args.microbatch_group_size_per_vp_stage
    if group is not None and group < args.pipeline_model_parallel_size:
        raise ConfigError(
            f"{_GROUP_FLAG} must be >= --pipeline-model-parallel-size {args.pipeline_model_parallel_size}, got {group}"
        )
    return PipelineShape(
        num_stages=args.pipeline_model_parallel_size,
        num_chunks=chunks,
        group_size=group,
        sends="overlapped" if args.overlap_p2p_comm else "blocking",
    )


def require_whole_groups(args: Namespace) -> None:
    """Virtual stages run micro-batches in groups: refuse batch sizes that cannot be divided so.

    This holds for packers that choose their own counts as well: what they may hold in memory is what plain would hold
    with the nominal count.

    Raises:
        ConfigError: naming the batch size, what it gives a replica and what would fit.
    """
    shape = pipeline_shape(args)
    if shape.num_chunks == 1:
        return
    option = "--step-batch-size-schedule" if args.step_batch_size_schedule is not None else "--global-batch-size"
    sizes = [(option, size) for size in batch_sizes(args)]
    if args.eval_iters:
        sizes.append(("--eval-global-batch-size", args.eval_global_batch_size))
    for name, size in sizes:
        count = size // args.data_parallel_size
        if not shape.takes(count):
            raise ConfigError(
                f"{name} must give each of {args.data_parallel_size} replicas a number of micro-batches that "
                f"{shape.num_stages} stages with {shape.num_chunks} chunks take: whole groups of {shape.group}, or a "
                f"rest of at least {shape.num_stages} ({_GROUP_FLAG} sets the group), got {size}, which gives {count}"
            )
