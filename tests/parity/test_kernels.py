"""Every kernel for CUDA, on operators that do what its library does: output, dq, dk, dv against the dense oracle.

The libraries' own operators are run by the GPU check.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.attention_operators import Calls
from tests.harness.emulated_kernels import EMULATED, OFFSET, PACKED, use, use_emulated
from tests.harness.engine_operators import EngineDtypes, engine_operators
from tests.parity.sharded_cases import (
    HEADS,
    Heads,
    Tensors,
    errors,
    inputs,
    padded,
    plan_named,
    random_plan,
    run_dense,
    run_sharded,
)
from wlb.attention import packed_attention
from wlb.attention.cudnn_kernel import CudnnKernel
from wlb.sharding import SHARDERS, phases
from wlb.sharding.plan import plan_of_chunks

EXACT = 1e-12
LENGTHS = (31, 17, 1, 3, 40)
PLANS = (*SHARDERS, "random")
COMM_TYPES = ("all_gather", "p2p")
WINDOWS = (None, 1, 5, 20)


def _windows(comm_type: str, cp_size: int) -> tuple[int | None, ...]:
    """None of these kernels takes a ring's phases under a window."""
    return WINDOWS if comm_type == "all_gather" or cp_size == 1 else (None,)


def _errors(plan_name: str, comm_type: str, cp_size: int, heads: Heads, window: int | None, seed: int) -> list[float]:
    lengths = padded(LENGTHS, cp_size)
    plan = plan_named(plan_name, lengths, cp_size, seed=seed)
    pack = inputs(plan.num_tokens, heads, seed=seed)
    wanted = run_dense(pack, lengths, window_tokens=window, scale=0.3)
    return errors(run_sharded(pack, plan, comm_type, window_tokens=window, scale=0.3), wanted)


@pytest.mark.parametrize("name", EMULATED)
def test_equals_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sharder, communication type, number of ranks, kind of heads and window at least once; all pairs: below."""
    calls = use_emulated(monkeypatch, name)
    kinds, names, windows = cycle(HEADS.values()), cycle(PLANS), cycle(WINDOWS)
    for cp_size in (1, 2, 3, 4, 8):
        for comm_type in COMM_TYPES:
            window = next(windows) if len(_windows(comm_type, cp_size)) > 1 else None
            assert max(_errors(next(names), comm_type, cp_size, next(kinds), window, cp_size)) <= EXACT
    assert calls.of("forward")
    assert calls.of("backward")


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", EMULATED)
def test_everything_equals_the_oracle(name: str, cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated(monkeypatch, name)
    for plan_name in PLANS:
        for comm_type in COMM_TYPES:
            for seed, heads in enumerate(HEADS.values()):
                for window in _windows(comm_type, cp_size):
                    assert max(_errors(plan_name, comm_type, cp_size, heads, window, seed)) <= EXACT


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 5, 11, 29, 64]), min_size=1, max_size=8),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    plan_name=st.sampled_from(PLANS),
    heads=st.sampled_from(sorted(HEADS)),
    window=st.one_of(st.none(), st.integers(1, 40)),
    comm_type=st.sampled_from(COMM_TYPES),
    name=st.sampled_from(sorted(EMULATED)),
    seed=st.integers(0, 2**31),
)
def test_any_lengths_under_any_plan(
    lengths: list[int],
    cp_size: int,
    plan_name: str,
    heads: str,
    window: int | None,
    comm_type: str,
    name: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_emulated(monkeypatch, name)
    all_lengths = padded(lengths, cp_size)
    plan = plan_named(plan_name, all_lengths, cp_size, seed=seed)
    pack = inputs(plan.num_tokens, HEADS[heads], seed=seed)
    window = None if comm_type == "p2p" and cp_size > 1 else window
    wanted = run_dense(pack, all_lengths, window_tokens=window)
    assert max(errors(run_sharded(pack, plan, comm_type, window_tokens=window), wanted)) <= EXACT


@pytest.mark.parametrize("name", ["torch", "flash3-3.0", "cudnn-2.17.1"])
def test_heads_of_multi_latent_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """192 and 128: flash-attn 3 and cuDNN have them, the others get zeros behind the values."""
    use_emulated(monkeypatch, name)
    heads = Heads(num_heads=2, num_kv_heads=2, head_size=192, value_size=128)
    pack = inputs(24, heads, seed=3)
    results = run_sharded(pack, plan_named("per_document", (17, 7), 2), "all_gather", scale=0.05)
    assert max(errors(results, run_dense(pack, (17, 7), scale=0.05))) <= EXACT


def _wrong(plan: Any, pack: Tensors, window: int | None = None) -> list[float]:
    """Errors of output, dq, dk, dv, infinite where anything is NaN."""
    wanted = run_dense(pack, plan.lengths, window_tokens=window)
    found = errors(run_sharded(pack, plan, "all_gather", window_tokens=window), wanted)
    return [e if e == e else float("inf") for e in found]


@pytest.mark.parametrize("name", [n for n in OFFSET if n.startswith("flash3")])
def test_two_tasks_that_write_the_same_keys_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: head and tail in one backward call. The second overwrites what the first owes their keys."""
    use_emulated(monkeypatch, name)
    plan = plan_named("per_document", (64,), 4)
    pack = inputs(64, HEADS["gqa"], seed=4)
    assert max(_wrong(plan, pack)) <= EXACT
    monkeypatch.setattr(phases, "calls_apart", lambda call: (call,))
    plan = plan_named("per_document", (64,), 4)  # what was made for the other one is kept with it
    out, dq, dk, dv = _wrong(plan, pack)
    assert max(out, dq) <= EXACT
    assert min(dk, dv) > 0.1


def test_a_mask_from_the_top_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what cuDNN's padding_causal would make of tasks with more keys than queries."""
    plan, pack = plan_named("per_document", (64,), 2), inputs(64, HEADS["gqa"], seed=5)
    for top_left in (False, True):
        operators = engine_operators("2.20.2", Calls(), top_left=top_left)
        use(monkeypatch, CudnnKernel(operators, EngineDtypes()))
        worst = min(_wrong(plan, pack, window=9))
        assert worst > 0.1 if top_left else worst <= EXACT


@pytest.mark.parametrize("name", EMULATED)
def test_a_row_of_no_task_is_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of rank 1's queries have no earlier keys, and not all gathered keys are seen by all: such rows are NaN."""
    use_emulated(monkeypatch, name)
    plan = plan_of_chunks((12, 8), 2, [(0, 0, 0, 4), (1, 0, 4, 8), (0, 0, 8, 12), (1, 1, 0, 6), (0, 1, 6, 8)])
    pack = inputs(20, HEADS["gqa"], seed=6)
    for comm_type in COMM_TYPES:
        assert max(errors(run_sharded(pack, plan, comm_type), run_dense(pack, plan.lengths))) <= EXACT


@pytest.mark.parametrize("name", EMULATED)
def test_who_copies_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document of 64 on 4 ranks, which hold 8 at its head and 8 at its tail, the last one 16 in the middle.

    They gather 56, 48, 40 and 24 keys. Heads see 0, 8 and 16 of them, which a kernel that copies takes once more.
    """
    calls = use_emulated(monkeypatch, name)
    run_sharded(inputs(64, HEADS["mha"], seed=7), plan_named("per_document", (64,), 4), "all_gather")
    own = {16}
    assert {call.key_rows for call in calls.made} == own | ({56, 24} if name in PACKED else {56, 48, 40, 24})


@pytest.mark.parametrize("name", EMULATED)
def test_whole_documents_are_taken_as_they_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_emulated(monkeypatch, name)
    query, key, value, _ = inputs(40, HEADS["gqa"], seed=1)
    packed_attention(query, key, value, (0, 31, 32, 40))
    (call,) = calls.made
    assert (call.query_rows, call.key_rows, call.key_address) == (40, 40, key.data_ptr())


@pytest.mark.parametrize("name", [n for n in OFFSET if n.startswith("cudnn")])
def test_gathered_keys_go_to_cudnn_as_they_lie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of one head size lie side by side in the gathered buffer; two layouts of Transformer Engine."""
    layouts: list[str] = []
    use_emulated(monkeypatch, name)
    from wlb.attention import cudnn_kernel

    original = cudnn_kernel._laid_out

    def noting(key: torch.Tensor, value: torch.Tensor) -> Any:
        layout = original(key, value)
        layouts.append(layout[0])
        assert layout[1].data_ptr() == key.data_ptr() or key.shape != value.shape
        return layout

    monkeypatch.setattr(cudnn_kernel, "_laid_out", noting)
    plan = plan_named("per_document", (64,), 2)
    run_sharded(inputs(64, HEADS["gqa"], seed=8), plan, "all_gather")
    assert set(layouts) == {"thd_thd_thd", "thd_t2hd"}
    layouts.clear()
    run_sharded(inputs(64, HEADS["value-smaller"], seed=8), plan, "all_gather")
    assert set(layouts) == {"thd_thd_thd"}


def test_gathering_takes_two_calls_a_rank_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds [0, 4) and [12, 16) of 16: itself, then the tail's 12 keys. Rank 1: itself, then 4 keys."""
    for name in ("torch", "flash2-2.8"):
        calls = use_emulated(monkeypatch, name)
        run_sharded(inputs(16, HEADS["gqa"], seed=2), plan_named("per_sequence", (16,), 2), "all_gather")
        assert sorted((c.query_rows, c.key_rows) for c in calls.of("forward")) == [(4, 12), (8, 4), (8, 8), (8, 8)]


@pytest.mark.parametrize("name", ["flash2-2.8", "flash3-3.0", "cudnn-2.20.2-before-9.6"])
@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_where_torch_is(name: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_emulated(monkeypatch, name)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: wanted)
    run_sharded(inputs(16, HEADS["gqa"], seed=2), random_plan((16,), 2, 1), "all_gather")
    assert {call.deterministic for call in calls.of("backward")} == {wanted}
