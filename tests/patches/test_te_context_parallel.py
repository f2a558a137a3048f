"""Calls as Transformer Engine's layers make them, through the replacement: planned ones are right, others untouched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.wlb.core_attention import GroupExchanges
from megatron.wlb.packed_seq_params import PlannedRows, mark_planned
from megatron.wlb.patches import te_context_parallel
from megatron.wlb.patches.registry import applied, check
from megatron.wlb.patches.te_context_parallel import POSITIONAL, make_patch
from megatron.wlb.te_attention import LayerCommType
from tests.parity.sharded_cases import HEADS, Tensors, errors, inputs, padded, plan_named, run_dense
from tests.patches.te_calls import WaitingMailbox, arguments, home_of, on_all_ranks, signature_in, stand_in
from tests.patches.te_source import FUNCTION, TeSource
from wlb.errors import ConfigError, PatchError, ShardingError
from wlb.sharding import ShardPlan

CALLERS = ("FlashAttention", "FusedAttention")
VERSION = "2.17.1"  # where the function is made up and its source does not matter
LENGTHS = (13, 1, 7, 4, 30)
EXACT = 1e-12


@pytest.fixture
def patched(te_source: TeSource, tmp_path: Path) -> Any:
    """(cp_size) -> `backends` with the patch applied, whose groups are ranks of one process."""
    with ExitStack() as stack:

        def apply(cp_size: int = 1, *, keep_gathered: bool = False) -> Any:
            backends = stack.enter_context(stand_in(te_source.version, tmp_path, signature=signature_in(te_source)))
            mailbox = WaitingMailbox(cp_size)
            exchanges = GroupExchanges(lambda group: mailbox.exchange(int(group)))
            stack.enter_context(applied([make_patch(exchanges, keep_gathered=keep_gathered)]))
            return backends

        yield apply


def cu_seqlens_of(plan: ShardPlan, rank: int) -> torch.Tensor:
    """As `packed_seq_params` makes it."""
    edges = torch.tensor((0, *plan.lengths)).cumsum(0).to(torch.int32)
    position_ids = torch.from_numpy(plan.position_ids(rank))
    mark_planned(edges, PlannedRows(plan=plan, cp_rank=rank, position_ids=position_ids))
    return edges


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
    ({"self_deterministic": True}, r"deterministic .* must be False"),
    ({"window_size": (4, 2)}, r"window_size .* must be \(keys before, 0\).* got \(4, 2\)"),
    ({"cp_group": [0, 1]}, r"cp_group .* must be one group"),
    ({"cp_comm_type": "a2a"}, r"comm_type must be one of all_gather, p2p, got 'a2a'"),
    ({"cu_seqlens_kv": torch.zeros(2, dtype=torch.int32)}, r"cu_seqlens_kv .* must carry the plan of cu_seqlens_q"),
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
    if te_source.version == "2.20.2":
        with pytest.raises(ConfigError, match=r"softcap .* must be at its default, 0.0 .* got 30.0"):
            call(CALLERS[0], softcap=30.0)
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
    caller: str,
    values: dict[str, Any],
    kernel: str,
) -> None:
    """On the device, for which tensors without memory stand here."""
    backends = patched(1)
    seen: list[str] = []
    monkeypatch.setattr(
        te_context_parallel, "sharded_attention", lambda *_args, **kwargs: seen.append(kwargs["kernel"])
    )
    plan = plan_named("per_document", (8, 8), 1)
    qkv = tuple(torch.empty(16, 2, 4, device="meta") for _ in range(3))
    planned_call(te_source, caller, backends, plan, 0, qkv, **values)()
    unread = "use_flash_attn_4" in values and te_source.version != "2.20.2"  # earlier callers do not pass it
    assert seen == ["flash2" if unread else kernel]


def _signature(extra: str, *, positional: tuple[str, ...] = POSITIONAL, without: str = "") -> str:
    keywords = (*te_context_parallel._READ, *te_context_parallel._REQUIRED, *te_context_parallel._WITHOUT_EFFECT)
    defaults = [f"{k}={te_context_parallel._REQUIRED.get(k)!r}" for k in keywords if k != without]
    return f"{FUNCTION}({', '.join([*positional, *defaults])}{extra})"


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        (_signature(", new_option=None"), ""),
        (_signature("", positional=(*POSITIONAL[:4], "cu_seqlens", *POSITIONAL[5:])), "wanted 15 leading parameters"),
        (_signature(", *, needed"), "wanted a default for each parameter after them, found none for needed"),
        (_signature("", without="window_size"), "wanted parameters window_size, found none of these names"),
    ],
)
def test_the_contract_is_checked_before_anything_is_replaced(tmp_path: Path, signature: str, problem: str) -> None:
    patch = make_patch(GroupExchanges(), keep_gathered=False)
    with stand_in(VERSION, tmp_path, signature=signature) as backends:
        state = check(patch)
        assert state.version == VERSION
        assert (problem in state.problem) if problem else state.problem == ""
        original = getattr(backends, FUNCTION)
        if problem:
            with pytest.raises(PatchError, match="does not fit: wanted"), applied([patch]):
                pytest.fail("the block must not run")
        else:
            with applied([patch]):
                assert getattr(backends, FUNCTION) is not original
        assert getattr(backends, FUNCTION) is original is getattr(home_of(backends), FUNCTION)


def test_a_function_that_backends_defines_itself_is_not_the_one(tmp_path: Path) -> None:
    with stand_in(VERSION, tmp_path, signature=_signature("")) as backends:
        other = getattr(home_of(backends), FUNCTION)
        exec(compile(f"def {_signature('')}: return None", "backends", "exec"), vars(backends))
        problem = te_context_parallel._contract_problem(backends, getattr(backends, FUNCTION))
        assert problem == "wanted a function of context_parallel that backends imports by name, found another"
        assert te_context_parallel._contract_problem(backends, other) == ""


def test_a_keyword_that_nobody_has_read_passes_at_its_default_only(tmp_path: Path) -> None:
    plan = plan_named("per_document", (8, 8), 1)
    args = dict.fromkeys(POSITIONAL) | {"cu_seqlens_q": cu_seqlens_of(plan, 0), "dropout_p": 0.0, "cp_comm_type": "p2p"}
    args |= {"cu_seqlens_kv": args["cu_seqlens_q"], "cp_group": 0} | dict.fromkeys("qkv", torch.randn(16, 2, 4))
    exchanges = GroupExchanges(WaitingMailbox(1).exchange)
    with (
        stand_in(VERSION, tmp_path, signature=_signature(", new_option=None")) as backends,
        applied([make_patch(exchanges, keep_gathered=False)]),
    ):
        function = getattr(backends, FUNCTION)
        assert function(*args.values(), new_option=None).shape == (16, 2, 4)
        with pytest.raises(ConfigError, match=r"new_option .* must be at its default, None .* got 3"):
            function(*args.values(), new_option=3)
