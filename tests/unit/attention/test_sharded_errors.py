"""A plan that does not fit is refused before anything is sent, with rank, rule and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wlb.attention import Mailbox, all_ranks_attention, sharded_attention
from wlb.attention.in_process import in_lockstep
from wlb.errors import ConfigError, ShardingError
from wlb.sharding import per_sequence

PLAN = per_sequence.shard((5, 3), 2)


def _attention(shapes: Any = ((4, 4, 8), (4, 2, 8), (4, 2, 6)), **changed: Any) -> torch.Tensor:
    box = Mailbox(changed.pop("size", 2))
    arguments = {"plan": PLAN, "rank": 1, "exchange": box.exchange(changed.pop("own_rank", 1)), **changed}
    query, key, value = (torch.zeros(shape) for shape in shapes)
    options = {"comm_type": "all_gather", **arguments}
    try:
        return sharded_attention(query, key, value, **options)
    finally:
        assert box.num_messages == 0


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"rank": 2}, r"rank must be in \[0, 2\), the ranks of the plan, got 2"),
        ({"rank": -1}, r"rank must be in \[0, 2\), the ranks of the plan, got -1"),
        ({"exchange": None}, "exchange is required on rank 1 for a plan of 2 ranks, got None"),
        ({"size": 4}, "exchange must be that of rank 1 of 2, as the plan has them, got rank 1 of 4"),
        ({"own_rank": 0}, "exchange must be that of rank 1 of 2, as the plan has them, got rank 0 of 2"),
        (
            {"shapes": ((4, 4, 8), (5, 2, 8), (4, 2, 8))},
            r"key must be \(tokens, heads, size\) with the plan's 4 tokens of rank 1, got \(5, 2, 8\)",
        ),
        ({"shapes": ((8, 4, 8), (8, 2, 8), (8, 2, 8))}, r"query must be .* 4 tokens of rank 1, got \(8, 4, 8\)"),
        ({"shapes": ((4, 4, 8), (4, 2, 8), (4, 16))}, r"value must be .* 4 tokens of rank 1, got \(4, 16\)"),
        ({"shapes": ((4, 4, 8), (4, 2, 6), (4, 2, 8))}, "key must have the head size of query, 8, got 6"),
        ({"shapes": ((4, 4, 8), (4, 2, 8), (4, 4, 8))}, "value must have the heads of key, 2, got 4"),
        ({"shapes": ((4, 4, 8), (4, 3, 8), (4, 3, 8))}, "heads of query must be a multiple of those of key, 3, got 4"),
    ],
)
def test_a_plan_that_does_not_fit(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardingError, match=text):
        _attention(**changed)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"comm_type": "a2a"}, "comm_type must be one of all_gather, p2p, got 'a2a'"),
        ({"window_tokens": 0}, "window_tokens must be >= 1, got 0"),
        ({"comm_type": "p2p", "keep_gathered": True}, "keep_gathered is of comm_type all_gather, got p2p"),
    ],
)
def test_options_that_cannot_be_used(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _attention(**changed)


def test_a_rank_whose_partner_has_not_sent_does_not_hang() -> None:
    with pytest.raises(LookupError, match="rank 1 waits for message 1 of rank 0, which has not sent it"):
        _waits_alone()


def _waits_alone() -> None:
    box = Mailbox(2)
    empty, rows = torch.empty(0, 3), torch.empty(2, 3)
    box.exchange(1).shift(empty, 0, rows, 0).wait()


def test_all_ranks_need_a_tensor_each() -> None:
    tensors = [torch.zeros(4, 4, 8)]
    with pytest.raises(ShardingError, match="queries must hold a tensor for each of the 2 ranks, got 1"):
        all_ranks_attention(tensors, tensors, tensors, PLAN, comm_type="all_gather")


def test_lockstep_lets_each_go_one_step_at_a_time() -> None:
    said: list[str] = []

    def rank(name: str, steps: int) -> Any:
        for step in range(steps):
            said.append(f"{name}{step}")
            yield
        return name

    assert in_lockstep([rank("a", 2), rank("b", 3)]) == ["a", "b"]
    assert said == ["a0", "b0", "a1", "b1", "b2"]
