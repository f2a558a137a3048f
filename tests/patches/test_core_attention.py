"""Our core attention in Megatron's layers: its scale, the width of values, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.wlb import core_attention
from megatron.wlb.core_attention import GroupExchanges, PackedCoreAttention, packed_core_attention
from megatron.wlb.packed_seq_params import PlannedPackedSeqParams
from tests.parity.sharded_cases import HEADS, Tensors, errors, inputs, padded, plan_named, run_dense
from tests.patches.te_calls import WaitingMailbox, on_all_ranks
from wlb.errors import PlanLostError


def _config(**changes: Any) -> Any:
    usual = {
        "attention_dropout": 0.0,
        "kv_channels": 16,
        "apply_query_key_layer_scaling": False,
        "window_size": None,
        "window_attn_skip_freq": None,
        "context_parallel_size": 1,
        "experimental_attention_variant": None,
    }
    return SimpleNamespace(**usual | changes)


@pytest.mark.parametrize(("given", "scale"), [(None, 0.25), (0.5, 0.5)])
@pytest.mark.parametrize("scaling", [False, True])
def test_scaling_by_the_layers_number_cancels_out(given: float | None, scale: float, scaling: bool) -> None:
    """Megatron divides scores by it, and its softmax multiplies by it: scores keep their scale, here 1 / sqrt(16)."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    config = _config(apply_query_key_layer_scaling=scaling)
    number = 5
    layer = PackedCoreAttention(config, number, None, "self", softmax_scale=given)  # type: ignore[arg-type]
    scores = torch.randn(1, 1, 3, 4)
    upstream = FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=False,
        attn_mask_type=None,
        scaled_masked_softmax_fusion=False,
        mask_func=None,
        softmax_in_fp32=True,
        scale=number if scaling else None,
    )
    divided = scores * scale / (number if scaling else 1)
    torch.testing.assert_close(upstream(divided, None), (scores * layer.scale).softmax(dim=-1))


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_zeros_behind_values_of_multi_latent_attention_do_not_travel(
    comm_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own code widens the values and trims the output; what travels, and is computed with, has their size.
    Without the layer's word for it the zeros are taken for values, and all comes out the same."""
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    lengths, heads = padded((13, 1, 7, 4, 30), 2), HEADS["value-smaller"]
    plan = plan_named("random", lengths, 2, seed=4)
    pack = inputs(plan.num_tokens, heads, seed=4)
    wanted = run_dense(pack, lengths, scale=0.3)
    computed: set[tuple[int, int]] = set()
    attend = core_attention.sharded_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        computed.add((key.shape[-1], value.shape[-1]))
        return attend(query, key, value, *args, **kwargs)

    monkeypatch.setattr(core_attention, "sharded_attention", watched)
    for known, size in ((heads.value_size, heads.value_size), (None, heads.head_size)):
        computed.clear()
        mailbox = WaitingMailbox(2)

        def rank_results(rank: int, known: int | None = known, mailbox: WaitingMailbox = mailbox) -> Tensors:
            exchanges = GroupExchanges(lambda group: mailbox.exchange(int(group)))  # type: ignore[call-overload]
            core = packed_core_attention(exchanges, keep_gathered_kv=False)(
                *(_config(context_parallel_size=2), 1, None, "self"),  # type: ignore[arg-type]
                softmax_scale=0.3,
                k_channels=heads.head_size,
                v_channels=known,
                cp_comm_type=comm_type,
                pg_collection=SimpleNamespace(cp=rank),  # type: ignore[arg-type]
            )
            layer = SimpleNamespace(config=_config(), core_attention=core, attn_mask_type=None)
            packed = PlannedPackedSeqParams(qkv_format="thd", plan=plan, cp_rank=rank)
            held = torch.from_numpy(plan.pack_indices(rank))
            *qkv, grad = (t[held] for t in pack)
            leaves = [t.requires_grad_() for t in qkv]
            out = MultiLatentAttention._run_core_attention(layer, *leaves, None, packed_seq_params=packed)
            assert out.shape == grad.shape
            return (out.detach(), *torch.autograd.grad(out, leaves, grad))

        restore = torch.from_numpy(plan.restore)
        by_rank = on_all_ranks(2, rank_results)
        results = tuple(torch.cat(parts)[restore] for parts in zip(*by_rank, strict=True))
        assert max(errors(results, wanted)) <= 1e-12
        assert computed == {(heads.head_size, size)}


@pytest.mark.parametrize(("packed", "found"), [(None, "None"), (SimpleNamespace(), "SimpleNamespace")])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_that_lost_its_plan_is_named(packed: Any, found: str, training: bool) -> None:
    layer = PackedCoreAttention(_config(), 5, None, "self").train(training)  # type: ignore[arg-type]
    qkv = (torch.zeros(8, 2, 4) for _ in range(3))
    with pytest.raises(PlanLostError, match=f"attention of layer 5: packed_seq_params must carry .* got {found}"):
        layer(*qkv, None, packed_seq_params=packed)
