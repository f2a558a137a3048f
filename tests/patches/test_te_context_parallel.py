"""Calls as Transformer Engine's layers make them, through the replacement: planned ones are right, others untouched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

from megatron.wlb.patches import te_context_parallel
from megatron.wlb.te_attention import LayerCommType
from tests.parity.sharded_cases import HEADS, Tensors, errors, inputs, padded, plan_named, run_dense
from tests.patches.te_calls import (
    WaitingMailbox,
    arguments,
    cu_seqlens_of,
    home_of,
    on_all_ranks,
)
from tests.patches.te_source import FUNCTION, TeSource
from wlb.attention.cpu_kernel import CpuKernel
from wlb.errors import ConfigError, ShardingError
from wlb.sharding import ShardPlan

CALLERS = ("FlashAttention", "FusedAttention")
SINCE_FLASH4 = Version("2.19")
LENGTHS = (13, 1, 7, 4, 30)
EXACT = 1e-12


def planned_call(
    source: TeSource, caller: str, backends: Any, plan: ShardPlan, rank: int, qkv: Tensors, **values: Any
) -> Callable[[], torch.Tensor]:
    """One layer's call on one rank."""
    cu_seqlens = values.pop("cu_seqlens_q", None)
    cu_seqlens = cu_seqlens_of(plan, rank) if cu_seqlens is None else cu_seqlens
    query, key, value = qkv
    args, kwargs = arguments(
        source,
        caller,
        backends,
        **dict(zip(("query_layer", "key_layer", "value_layer"), (query, key, value), strict=True)),
        **{"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "cp_group": rank, "cp_comm_type": "p2p"} | values,
    )
    return lambda: getattr(backends, FUNCTION)(*args, **kwargs)


def run_all(pack: Tensors, plan: ShardPlan, one_rank: Callable[[int, Tensors], torch.Tensor]) -> Tensors:
    """Output, dq, dk, dv of all ranks, each on a thread of its own, in the order of the pack."""
    *qkv, grad = pack

    def rank_results(rank: int) -> Tensors:
        held = torch.from_numpy(plan.pack_indices(rank))
        leaves = tuple(t[held].requires_grad_() for t in qkv)
        out = one_rank(rank, leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad[held]))

    by_rank = on_all_ranks(plan.cp_size, rank_results)
    restore = torch.from_numpy(plan.restore)
    return tuple(torch.cat(parts)[restore] for parts in zip(*by_rank, strict=True))


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("caller", CALLERS)
def test_planned_calls_equal_the_oracle(te_source: TeSource, patched: Any, caller: str, cp_size: int) -> None:
    """Both communication types at once: each layer's own comes with its call, whatever word the layer is built with."""
    backends = patched(cp_size, keep_gathered=True)
    lengths = padded(LENGTHS, cp_size)
    for number, (planned, kind) in enumerate([("all_gather", "gqa"), ("p2p", "value-smaller"), ("all_gather", "mha")]):
        plan = plan_named("random", lengths, cp_size, seed=number)
        pack = inputs(plan.num_tokens, HEADS[kind], seed=number)
        word = LayerCommType("p2p", planned)

        call = partial(planned_call, te_source, caller, backends, plan, cp_comm_type=word, self_softmax_scale=0.3)
        results = run_all(pack, plan, lambda rank, qkv, call=call: call(rank, qkv)())
        assert max(errors(results, run_dense(pack, lengths, scale=0.3))) <= EXACT
    assert home_of(backends).calls == []


@pytest.mark.parametrize("caller", CALLERS)
def test_a_window_counts_the_keys_before_its_own(te_source: TeSource, patched: Any, caller: str) -> None:
    backends = patched(2)
    plan = plan_named("per_document", padded(LENGTHS, 2), 2)
    pack = inputs(plan.num_tokens, HEADS["gqa"], seed=5)
    word = LayerCommType("a2a", "all_gather")
    results = run_all(
        pack,
        plan,
        lambda rank, qkv: planned_call(
            te_source, caller, backends, plan, rank, qkv, cp_comm_type=word, window_size=(4, 0)
        )(),
    )
    assert max(errors(results, run_dense(pack, plan.lengths, window_tokens=5))) <= EXACT
    assert max(errors(results, run_dense(pack, plan.lengths, window_tokens=4))) > 1e-3


def test_the_oracle_sees_a_wrong_plan(te_source: TeSource, patched: Any) -> None:
    """Control: the rows of one plan, attended by another of the same documents."""
    backends = patched(2)
    lengths = padded(LENGTHS, 2)
    plan, other = (plan_named("random", lengths, 2, seed=seed) for seed in (1, 2))
    pack = inputs(plan.num_tokens, HEADS["gqa"], seed=5)
    results = run_all(pack, plan, lambda rank, qkv: planned_call(te_source, CALLERS[0], backends, other, rank, qkv)())
    assert max(errors(results, run_dense(pack, lengths))) > 1e-2


@pytest.mark.parametrize("caller", CALLERS)
def test_other_calls_go_to_the_original_as_they_came(te_source: TeSource, patched: Any, caller: str) -> None:
    """Without a plan: also with what a plan would refuse, and with a copy of a tensor that has one."""
    backends = patched(2)
    plan = plan_named("per_document", (8, 8), 2)
    qkv = tuple(torch.zeros(8, 2, 4) for _ in range(3))
    copy = cu_seqlens_of(plan, 0).clone()
    call = planned_call(
        te_source, caller, backends, plan, 0, qkv, cu_seqlens_q=copy, qkv_format="bshd", self_attention_dropout=0.1
    )
    assert call() == "original"
    (seen,) = home_of(backends).calls
    assert seen["cu_seqlens_q"] is copy
    assert seen["q"] is qkv[0]
    assert (seen["dropout_p"], seen["qkv_format"], seen["cp_comm_type"]) == (0.1, "bshd", "p2p")


def test_recomputed_layers_of_interleaved_micro_batches_find_their_own_plan(te_source: TeSource, patched: Any) -> None:
    """1F1B: two forward passes, then the backward pass of the first, which runs its attention again."""
    backends = patched(2)
    lengths = [padded(LENGTHS, 2), (20, 12)]
    plans = [plan_named("random", lengths[i], 2, seed=i) for i in range(2)]
    packs = [inputs(p.num_tokens, HEADS["gqa"], seed=i) for i, p in enumerate(plans)]

    def rank_results(rank: int) -> list[Tensors]:
        under_way = []
        for plan, (*qkv, grad) in zip(plans, packs, strict=True):
            held = torch.from_numpy(plan.pack_indices(rank))
            leaves = tuple(t[held].requires_grad_() for t in qkv)
            cu_seqlens = cu_seqlens_of(plan, rank)

            def attend(*qkv: torch.Tensor, plan: ShardPlan = plan, cu: torch.Tensor = cu_seqlens) -> torch.Tensor:
                return planned_call(te_source, CALLERS[1], backends, plan, rank, qkv, cu_seqlens_q=cu)()

            out = checkpoint(attend, *leaves, use_reentrant=False, preserve_rng_state=False)
            under_way.append((out, leaves, grad[held]))
        return [(out.detach(), *torch.autograd.grad(out, leaves, grad)) for out, leaves, grad in under_way]

    by_rank = on_all_ranks(2, rank_results)
    for i, (plan, pack) in enumerate(zip(plans, packs, strict=True)):
        restore = torch.from_numpy(plan.restore)
        results = tuple(torch.cat(parts)[restore] for parts in zip(*(r[i] for r in by_rank), strict=True))
        assert max(errors(results, run_dense(pack, lengths[i]))) <= EXACT


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"self_attention_dropout": 0.1}, r"dropout_p .* must be 0 .* got 0.1"),
    ({"qkv_format": "bshd"}, r"qkv_format .* must be 'thd' .* got 'bshd'"),
    ({"attn_mask_type": "padding"}, r"attn_mask_type .* must be 'padding_causal' .* got 'padding'"),
    ({"attn_mask_type": "padding_causal_bottom_right"}, r"attn_mask_type .* must be 'padding_causal'"),
    ({"fp8_output": True}, r"fp8_output .* must be False"),
    ({"window_size": (4, 2)}, r"window_size .* must be \(keys before, 0\).* got \(4, 2\)"),
    ({"cp_group": [0, 1]}, r"cp_group .* must be one group"),
    ({"cp_comm_type": "a2a"}, r"comm_type must be one of all_gather, p2p, got 'a2a'"),
    (
        {"cu_seqlens_kv": cu_seqlens_of(plan_named("per_document", (8, 8), 1), 0)},
        "cu_seqlens_kv .* must carry the plan of cu_seqlens_q, got another",
    ),
]
REFUSED_FUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp8": True}, r"fp8 .* must be False"),
    ({"core_attention_bias_type": "post_scale_bias"}, r"attn_bias_type .* must be 'no_bias'"),
    ({"core_attention_bias": torch.zeros(1)}, r"attn_bias .* must be None"),
    ({"pad_between_seqs": True}, r"pad_between_seqs .* must be False"),
    ({"self_softmax_type": "learnable"}, r"softmax_type .* must be 'vanilla' .* got 'learnable'"),
    ({"softmax_offset": torch.zeros(1)}, r"softmax_offset .* must be None"),
    ({"self_return_max_logit": True}, r"return_max_logit .* must be False"),
]


def test_what_a_plan_cannot_have_is_refused_by_name(te_source: TeSource, patched: Any) -> None:
    backends = patched(1)
    plan = plan_named("per_document", (8, 8), 1)
    qkv = tuple(torch.randn(16, 2, 4) for _ in range(3))

    def call(caller: str, **values: Any) -> Any:
        return planned_call(te_source, caller, backends, plan, 0, qkv, **values)()

    for caller, cases in ((CALLERS[0], REFUSED), (CALLERS[1], REFUSED + REFUSED_FUSED)):
        assert call(caller).shape == (16, 2, 4)
        for values, sentence in cases:
            with pytest.raises(ConfigError, match=sentence):
                call(caller, **values)
    if Version(te_source.version) >= Version("2.20"):
        with pytest.raises(ConfigError, match=r"softcap .* must be at its default, 0.0 .* got 30.0"):
            call(CALLERS[0], softcap=30.0)
    if Version(te_source.version) >= SINCE_FLASH4:
        other = home_of(backends).CPLoadBalancingStrategy.NO_LOAD_BALANCE
        with pytest.raises(ConfigError, match=r"load_balancing_strategy .* must be at its default"):
            call(CALLERS[1], load_balancing_strategy=other)
    with pytest.raises(ShardingError, match="as the plan has them"):
        planned_call(te_source, CALLERS[0], backends, plan_named("per_document", (8, 8), 2), 0, qkv)()
    assert home_of(backends).calls == []


@pytest.mark.parametrize(
    ("caller", "values", "kernel"),
    [
        ("FusedAttention", {}, "cudnn"),
        ("FlashAttention", {}, "flash2"),
        ("FlashAttention", {"use_flash_attn_3": True}, "flash3"),
        ("FlashAttention", {"use_flash_attn_4": True}, "auto"),
    ],
)
def test_the_kernel_is_the_one_that_the_layer_chose(
    te_source: TeSource,
    patched: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    caller: str,
    values: dict[str, Any],
    kernel: str,
) -> None:
    """On the device, for which tensors without memory stand here. Where it is another, that is said, and once."""
    backends = patched(1)
    seen: list[str] = []

    def attend(query: torch.Tensor, *_args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs["kernel"])
        return query

    monkeypatch.setattr(te_context_parallel, "sharded_attention", attend)
    monkeypatch.setattr(te_context_parallel, "kernel_for", lambda *_args, **_kwargs: CpuKernel())
    plan = plan_named("per_document", (8, 8), 1)
    qkv = tuple(torch.empty(16, 2, 4, device="meta") for _ in range(3))
    for _layer in range(2):
        planned_call(te_source, caller, backends, plan, 0, qkv, **values)()
    # Earlier callers do not pass it.
    unread = "use_flash_attn_4" in values and Version(te_source.version) < SINCE_FLASH4
    assert seen == ["flash2" if unread else kernel] * 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (kernel == "auto" and not unread)
    assert all("FlashAttention 4" in sentence and "computed by CpuKernel" in sentence for sentence in said)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_backward_is_deterministic_where_the_layer_is(
    te_source: TeSource, patched: Any, monkeypatch: pytest.MonkeyPatch, caller: str, comm_type: str
) -> None:
    """By its own switch (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0) and by torch's, which --deterministic-mode sets too.

    Kernels, and sums over rows that are there several times, go by torch's, which is as before when backward ends.
    """
    backends = patched(1)
    plan = plan_named("per_document", (8, 8), 1)
    seen: list[bool] = []
    backward = CpuKernel.backward

    def watched(*args: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        backward(*args)

    monkeypatch.setattr(CpuKernel, "backward", watched)
    word = LayerCommType("p2p", comm_type)  # type: ignore[arg-type]
    for by_layer, by_torch in ((False, False), (True, False), (True, True)):
        qkv = tuple(torch.randn(16, 2, 4).requires_grad_() for _ in range(3))
        seen.clear()
        torch.use_deterministic_algorithms(by_torch)
        try:
            call = planned_call(
                te_source, caller, backends, plan, 0, qkv, cp_comm_type=word, self_deterministic=by_layer
            )
            call().sum().backward()
            assert torch.are_deterministic_algorithms_enabled() is by_torch
        finally:
            torch.use_deterministic_algorithms(False)
        assert set(seen) == {by_layer or by_torch}
    monkeypatch.setattr(CpuKernel, "backward", lambda *_args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call().sum().backward()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_zeros_behind_values_do_not_travel(
    te_source: TeSource, patched: Any, monkeypatch: pytest.MonkeyPatch, caller: str, comm_type: str
) -> None:
    """As Megatron widens the values of multi-latent attention, and trims what comes back."""
    backends = patched(2)
    lengths = padded(LENGTHS, 2)
    heads = HEADS["value-smaller"]
    plan = plan_named("random", lengths, 2, seed=4)
    pack = inputs(plan.num_tokens, heads, seed=4)
    size, wide = heads.value_size, heads.head_size
    widths: set[int] = set()
    leave = WaitingMailbox.leave

    def watched(mailbox: WaitingMailbox, message: tuple[int, int, int], rows: torch.Tensor) -> None:
        widths.add(rows.shape[1])
        leave(mailbox, message, rows)

    monkeypatch.setattr(WaitingMailbox, "leave", watched)

    def attend(rank: int, qkv: Tensors, word: LayerCommType) -> torch.Tensor:
        query, key, value = qkv
        widened = torch.nn.functional.pad(value, (0, wide - size))
        out = planned_call(
            te_source, caller, backends, plan, rank, (query, key, widened), cp_comm_type=word, self_softmax_scale=0.3
        )()
        assert out.shape[-1] == wide
        return out[..., :size]

    wanted = run_dense(pack, lengths, scale=0.3)
    for known, row_size in ((size, size), (None, wide)):
        widths.clear()
        word = LayerCommType("p2p", comm_type, 1, known)  # type: ignore[arg-type]
        results = run_all(pack, plan, partial(attend, word=word))
        assert max(errors(results, wanted)) <= EXACT
        assert widths == {heads.num_kv_heads * (wide + row_size)}
