"""A planned layer whose plan does not arrive says so, and one whose plan arrives another way still finds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.wlb.patches.te_context_parallel import POSITIONAL
from megatron.wlb.te_attention import LayerCommType
from tests.parity.sharded_cases import plan_named
from tests.patches.te_calls import arguments, cu_seqlens_of, home_of
from tests.patches.te_source import FUNCTION, TeSource
from wlb.errors import PlanLostError

CALLERS = ("FlashAttention", "FusedAttention")

LOST = {
    "a copy": torch.Tensor.clone,
    "a view": lambda cu_seqlens: cu_seqlens[:],
    "no packed sequence": lambda _cu_seqlens: None,
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lost", LOST)
def test_a_layer_of_a_packed_run_that_lost_its_plan_is_named(
    te_source: TeSource, patched: Any, lost: str, training: bool, caller: str
) -> None:
    """In training and in evaluation. The original would attend by its own split of a sequence, without a word."""
    backends = patched(2)
    plan = plan_named("per_document", (8, 8), 2)
    qkv = tuple(torch.zeros(8, 2, 4) for _ in range(3))
    marked = cu_seqlens_of(plan, 0)
    cu_seqlens = LOST[lost](marked)
    found = "None" if cu_seqlens is None else r"a tensor of shape \(3,\) without one"
    args, kwargs = arguments(
        te_source,
        caller,
        backends,
        **dict(zip(("query_layer", "key_layer", "value_layer"), qkv, strict=True)),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cp_group=0,
        cp_comm_type=LayerCommType("p2p", "all_gather", 5),
        self_training=training,
    )
    function = getattr(backends, FUNCTION)
    with pytest.raises(PlanLostError, match=f"attention of layer 5: cu_seqlens_q must carry the plan .* got {found}"):
        function(*args, **kwargs)
    # As in a release that passes fewer arguments by position.
    with pytest.raises(PlanLostError, match="attention of layer 5: cu_seqlens_q must carry"):
        function(*args[:4], **dict(zip(POSITIONAL[4:], args[4:], strict=True)), **kwargs)
    with pytest.raises(PlanLostError, match="attention of layer 5: cu_seqlens_kv must carry"):
        function(*args[:4], marked, *args[5:], **kwargs)
    assert home_of(backends).calls == []


def test_a_plan_is_seen_whatever_is_passed_by_position(te_source: TeSource, patched: Any) -> None:
    backends = patched(1)
    plan = plan_named("per_document", (8, 8), 1)
    qkv = tuple(torch.randn(16, 2, 4) for _ in range(3))
    word = LayerCommType("p2p", "all_gather")
    cu_seqlens = cu_seqlens_of(plan, 0)
    variables = dict(zip(("query_layer", "key_layer", "value_layer"), qkv, strict=True))
    variables |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "cp_group": 0, "cp_comm_type": word}
    args, kwargs = arguments(te_source, CALLERS[0], backends, **variables)
    function = getattr(backends, FUNCTION)
    wanted = function(*args, **kwargs)
    for count in (14, 4, 0):
        named = dict(zip(POSITIONAL[count:], args[count:], strict=True))
        assert torch.equal(function(*args[:count], **named, **kwargs), wanted)
    assert home_of(backends).calls == []
