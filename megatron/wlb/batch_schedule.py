"""Megatron's schedule of global batch sizes, as steps of a plan."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator


def final_batch_size(args: Namespace) -> int:
    """Global batch size, in windows, at the end of `--step-batch-size-schedule`; without one, `--global-batch-size`."""
    return batch_sizes(args)[-1]


def batch_sizes(args: Namespace) -> tuple[int, ...]:
    """Every global batch size of the run, in windows."""
    if args.step_batch_size_schedule is None:
        return (int(args.global_batch_size),)
    return tuple(int(size) for _, size in _calculator(args).schedule)


def batch_ramp(args: Namespace, *, first_step: int) -> tuple[tuple[int, int], ...]:
    """(step, micro-batches of a replica) wherever the batch size changes, from `first_step` on.

    first_step: step of the plan that comes next; it begins with `args.consumed_train_samples` samples. Empty without a
        schedule.
    """
    if args.step_batch_size_schedule is None:
        return ()
    calculator = _calculator(args)
    last_threshold = calculator.schedule[-1][0]
    ramp: list[tuple[int, int]] = []
    samples = args.consumed_train_samples
    for step in range(first_step, first_step + args.train_iters - args.iteration):
        calculator.update(samples, consistency_check=False)
        batch_size = calculator.get_current_running_global_batch_size()
        count = batch_size // args.data_parallel_size
        if not ramp or ramp[-1][1] != count:
            ramp.append((step, count))
        if samples >= last_threshold:
            break
        samples += batch_size
    return tuple(ramp)


def _calculator(args: Namespace) -> StepBatchsizeNumMicroBatchesCalculator:
    return StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
        rank=-1,  # only rank 0 logs, and Megatron's own calculator has done so
        schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
