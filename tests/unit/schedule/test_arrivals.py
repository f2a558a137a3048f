"""What a stage receives, in order: the other end of what its neighbours send."""

from __future__ import annotations

import pytest

from wlb.schedule import PipelineShape
from wlb.schedule.program import Post

SHAPES = [
    PipelineShape(num_stages=num_stages, num_chunks=num_chunks, group_size=group_size, sends=sends)
    for num_stages in (2, 3, 4)
    for num_chunks in (1, 2, 3)
    for group_size in ((None, num_stages + 1) if num_chunks > 1 else (None,))
    for sends in (("blocking", "overlapped") if num_chunks > 1 else ("blocking",))
]


def _sent(shape: PipelineShape, stage: int, count: int, channel: str) -> tuple[int, ...]:
    posts = [i for i in shape.program(stage % shape.num_stages, count) if isinstance(i, Post)]
    return tuple(p.micro_batch for p in posts if p.channel == channel and p.end == "send")


def _received(shape: PipelineShape, stage: int, count: int, channel: str) -> int:
    posts = [i for i in shape.program(stage, count) if isinstance(i, Post)]
    return sum(p.channel == channel and p.end == "receive" for p in posts)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_stages}x{s.num_chunks}-{s.group}-{s.sends}")
def test_arrivals_are_what_the_neighbours_send(shape: PipelineShape) -> None:
    counts = [count for count in range(1, 14) if shape.takes(count)]
    assert counts
    for count in counts:
        for stage in range(shape.num_stages):
            forward, backward = shape.arrivals(stage, count)
            assert forward == _sent(shape, stage - 1, count, "activation")
            assert backward == _sent(shape, stage + 1, count, "gradient")
            assert len(forward) == _received(shape, stage, count, "activation")
            assert len(backward) == _received(shape, stage, count, "gradient")


def test_two_stages_of_two_chunks() -> None:
    """Micro-batches 0 and 1 go through every chunk, then 2 and 3. Stage 0 begins each micro-batch, stage 1 ends it."""
    shape = PipelineShape(num_stages=2, num_chunks=2)
    assert shape.arrivals(0, 4) == ((0, 1, 2, 3), (0, 1, 0, 1, 2, 3, 2, 3))
    assert shape.arrivals(1, 4) == ((0, 1, 0, 1, 2, 3, 2, 3), (0, 1, 2, 3))


def test_without_virtual_stages() -> None:
    shape = PipelineShape(num_stages=3)
    assert shape.arrivals(0, 2) == ((), (0, 1))
    assert shape.arrivals(1, 2) == ((0, 1), (0, 1))
    assert shape.arrivals(2, 2) == ((0, 1), ())
