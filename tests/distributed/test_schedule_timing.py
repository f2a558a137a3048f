"""The timing model against Megatron's own schedules: real processes, real messages, passes that sleep.

Every rank runs Megatron's schedule with a model that sleeps for a given time in each pass and notes when. The model
must predict the order of all passes exactly and every start and end within a tolerance that a shared machine needs.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.harness.processes import run_ranks
from wlb.schedule import PipelineShape, replica_timeline

UNIT_S = 0.010
# Between two passes a rank runs Megatron's code and hands messages over, which the model charges nothing for.
LATE_S = 0.012
LATE_PER_PASS_S = 0.0013
# Where other programs take the processor, passes start late: another try tells that from a wrong model.
TRIES = 4


@dataclass(frozen=True)
class Case:
    """sleeps: per micro-batch, forward units; a backward sleeps twice as long."""

    num_stages: int
    num_chunks: int
    sends: Any
    sleeps: tuple[int, ...]

    @property
    def shape(self) -> PipelineShape:
        return PipelineShape(num_stages=self.num_stages, num_chunks=self.num_chunks, sends=self.sends)


def _case(num_stages: int, count: int, *, num_chunks: int = 1, sends: Any = "blocking") -> Case:
    rng = random.Random(1000 * num_stages + 10 * count + num_chunks)
    return Case(num_stages, num_chunks, sends, tuple(rng.choice((1, 1, 2, 4)) for _ in range(count)))


def _cases(num_stages: int, counts: range | tuple[int, ...]) -> list[Case]:
    cases = [_case(num_stages, count) for count in counts]
    if num_stages > 1:
        whole = [count for count in counts if count % num_stages == 0]
        cases += [_case(num_stages, count, num_chunks=2, sends="overlapped") for count in whole]
        if num_stages > 2:  # Megatron refuses blocking exchanges between two ranks with virtual stages
            cases += [_case(num_stages, count, num_chunks=2) for count in whole]
    return cases


def _run_cases(cases: list[Case]) -> list[list[tuple[str, int, int, float, float]]]:
    """On every rank: per case its passes (kind, micro-batch, chunk, start, end), seconds since all ranks began."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    from megatron.wlb.cpu import cpu_as_device

    class TimedSleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, _weight: Any, note: Any, sleep_s: float) -> Any:
            ctx.note, ctx.sleep_s = note, sleep_s
            begin_s = time.perf_counter()
            time.sleep(sleep_s)
            note("forward", begin_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            begin_s = time.perf_counter()
            time.sleep(2 * ctx.sleep_s)
            ctx.note("backward", begin_s)
            return gradient, None, None, None

    class SleepingChunk(torch.nn.Module):
        def __init__(self, config: Any, chunk: int, notes: list[Any]) -> None:
            super().__init__()
            self.config, self.chunk, self.notes = config, chunk, notes
            self.model_type = ModelType.encoder_or_decoder
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.input: Any = None

        def set_input_tensor(self, tensors: Any) -> None:
            self.input = tensors[0]

        def forward(self, micro_batch: int, sleep_s: float) -> Any:
            x = torch.zeros(2, 1, 4) if self.input is None else self.input

            def note(kind: str, begin_s: float) -> None:
                self.notes.append((kind, micro_batch, self.chunk, begin_s, time.perf_counter()))

            return TimedSleep.apply(x, self.weight, note, sleep_s)

    def forward_step(iterator: Any, model: Any) -> Any:
        micro_batch, units = next(iterator)
        return model(micro_batch, units * UNIT_S), lambda output: (output.sum(), {})

    def run(case: Case) -> list[Any]:
        config = TransformerConfig(
            num_layers=case.num_stages * case.num_chunks,
            hidden_size=4,
            num_attention_heads=1,
            pipeline_model_parallel_size=case.num_stages,
            virtual_pipeline_model_parallel_size=case.num_chunks if case.num_chunks > 1 else None,
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True,
            overlap_p2p_comm=case.sends == "overlapped",
            batch_p2p_comm=case.sends != "overlapped",
        )
        notes: list[Any] = []
        chunks = [SleepingChunk(config, chunk, notes) for chunk in range(case.num_chunks)]
        iterators = [iter(enumerate(case.sleeps)) for _ in chunks]
        if case.num_chunks > 1:
            schedule, model, iterator = schedules.forward_backward_pipelining_with_interleaving, chunks, iterators
        else:
            plain = schedules.forward_backward_pipelining_without_interleaving
            schedule = plain if case.num_stages > 1 else schedules.forward_backward_no_pipelining
            model, iterator = chunks[0], iterators[0]
        dist.barrier()
        begin_s = time.perf_counter()
        schedule(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=model,
            num_microbatches=len(case.sleeps),
            seq_length=2,
            micro_batch_size=1,
            forward_only=False,
        )
        return [(kind, i, chunk, start_s - begin_s, end_s - begin_s) for kind, i, chunk, start_s, end_s in notes]

    with cpu_as_device():
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=cases[0].num_stages)
        run(cases[0])  # the first messages open connections
        return [run(case) for case in cases]


def _compare(case: Case, ranks: list[list[tuple[str, int, int, float, float]]], sends: Any = None) -> float:
    """Asserts the order; returns by how many seconds the worst start or end is off the model.

    sends: of the model to compare with, where it is not the case's.
    """
    # What each pass really took, sleeping longer than asked included: only waiting is left to predict.
    took_s = {
        (kind, i, chunk * case.num_stages + rank): end_s - start_s
        for rank, passes in enumerate(ranks)
        for kind, i, chunk, start_s, end_s in passes
    }
    seconds = {
        kind: [[took_s[kind, i, v] for v in range(case.shape.num_virtual_stages)] for i in range(len(case.sleeps))]
        for kind in ("forward", "backward")
    }
    shape = replace(case.shape, sends=sends or case.sends)
    predicted = replica_timeline(seconds["forward"], seconds["backward"], shape=shape)
    worst_s = 0.0
    for rank, passes in enumerate(ranks):
        assert [p[:3] for p in passes] == [(p.kind, p.micro_batch, p.chunk) for p in predicted.stages[rank]], case
        for (_, _, _, start_s, end_s), p in zip(passes, predicted.stages[rank], strict=True):
            worst_s = max(worst_s, abs(start_s - p.start_s), abs(end_s - p.end_s))
    return worst_s


def _tolerance_s(case: Case) -> float:
    longest_chain = 2 * case.num_chunks * (len(case.sleeps) + case.num_stages)
    return LATE_S + LATE_PER_PASS_S * longest_chain


def _check(cases: list[Case], controls: dict[Case, str]) -> None:
    """Every case as Megatron runs it, and that a model with the other kind of messages would be refused.

    controls: for some cases, `sends` of a model that must not fit.
    """
    left, worst_s = list(cases), {}
    for _ in range(TRIES):
        by_rank = run_ranks(_run_cases, left[0].num_stages, left)
        for number, case in enumerate(left):
            ranks = [by_case[number] for by_case in by_rank]
            worst_s[case] = min(_compare(case, ranks), worst_s.get(case, float("inf")))
            if case in controls:
                assert _compare(case, ranks, controls[case]) > _tolerance_s(case), f"the control fits: {case}"
        left = [case for case in left if worst_s[case] > _tolerance_s(case)]
        if not left:
            return
    raise AssertionError(f"off by {[(case, worst_s[case], _tolerance_s(case)) for case in left]} seconds")


def _controls(num_stages: int) -> dict[Case, str]:
    if num_stages != 4:
        return {}
    return {
        Case(4, 1, "blocking", (4, 1, 4, 1, 4, 2, 4, 1, 1)): "buffered",
        Case(4, 2, "overlapped", (4, 1, 4, 1)): "blocking",
        Case(4, 2, "blocking", (4, 1, 2, 1, 4, 1, 1, 2)): "overlapped",
    }


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_order_and_times_are_megatrons(num_stages: int) -> None:
    _check([*_cases(num_stages, (1, 4)), *_controls(num_stages)], _controls(num_stages))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_order_and_times_are_megatrons_at_every_count(num_stages: int) -> None:
    _check(_cases(num_stages, range(1, 10)), {})
