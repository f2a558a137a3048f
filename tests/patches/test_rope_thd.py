"""RoPE of planned rows: by position in the document, fused or not, whatever ranks hold them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.wlb.packed_seq_params import PlannedRows, mark_planned, planned_rows
from megatron.wlb.patches import rope_thd
from megatron.wlb.patches.registry import applied
from tests.parity.sharded_cases import padded, plan_named
from wlb.errors import PlanLostError

HEAD_SIZE = 8
LENGTHS = (13, 1, 7, 4, 30)


def _angles(num_positions: int) -> torch.Tensor:
    """(P, H / 2)"""
    return torch.arange(num_positions)[:, None] * 10.0 ** -torch.arange(HEAD_SIZE // 2, dtype=torch.float64)


def _table(num_positions: int, *, interleaved: bool) -> torch.Tensor:
    """(P, 1, 1, H), as Megatron makes it."""
    angles = _angles(num_positions)
    table = angles.repeat_interleave(2, dim=1) if interleaved else torch.cat([angles, angles], dim=1)
    return table[:, None, None, :]


def _rotate(t: torch.Tensor, angles: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """(T, N, H) by (T, H / 2): pairs of numbers as complex ones. The definition, with no code of Megatron's."""
    pairs = t.unflatten(-1, (-1, 2)) if interleaved else t.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    numbers = torch.view_as_real(turned)
    return (numbers if interleaved else numbers.transpose(-1, -2)).flatten(-2)


class _FusedKernels:
    """Instead of Transformer Engine's, of which there are none without a GPU; counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_sequences = self.num_packs = 0
        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", self._sequence)
        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", self._pack)

    def _sequence(self, t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        """(S, 1, N, H) by the first S rows of (P, 1, 1, H)."""
        assert t.dim() == 4
        assert t.shape[1] == 1
        self.num_sequences += 1
        angles = freqs[: len(t), 0, 0, :: 2 if interleaved else 1][:, : HEAD_SIZE // 2]
        return _rotate(t.squeeze(1), angles, interleaved=interleaved).unsqueeze(1)

    def _pack(self, t: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self.num_packs += 1
        return t


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[_FusedKernels]:
    fused = _FusedKernels(monkeypatch)
    with applied([rope_thd.PATCH]):
        yield fused


def _config(*, fused: bool, interleaved: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        apply_rope_fusion=fused, rotary_interleaved=interleaved, multi_latent_attention=False, mrope_section=None
    )


def _cu_seqlens(plan: Any, rank: int) -> torch.Tensor:
    edges = torch.tensor((0, *plan.lengths)).cumsum(0).to(torch.int32)
    mark_planned(edges, PlannedRows(plan=plan, cp_rank=rank, position_ids=torch.from_numpy(plan.position_ids(rank))))
    return edges


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_are_rotated_by_their_position_in_the_document(
    kernels: _FusedKernels, fused: bool, interleaved: bool
) -> None:
    """Through the name by which attention knows it. Every rank of several plans, and the gradient."""
    table = _table(64, interleaved=interleaved)
    num_calls = 0
    for cp_size in (1, 2, 4):
        plan = plan_named("random", padded(LENGTHS, cp_size), cp_size, seed=cp_size)
        pack = torch.randn(plan.num_tokens, 3, HEAD_SIZE, dtype=torch.float64)
        positions = torch.cat([torch.arange(n) for n in plan.lengths])
        wanted = _rotate(pack, _angles(64)[positions], interleaved=interleaved)
        for rank in range(cp_size):
            held = torch.from_numpy(plan.pack_indices(rank))
            rows = pack[held].requires_grad_()
            config = _config(fused=fused, interleaved=interleaved)
            rotated = attention.apply_rotary_pos_emb(rows, table, config, _cu_seqlens(plan, rank), cp_group=object())
            torch.testing.assert_close(rotated, wanted[held], rtol=1e-12, atol=1e-12)
            # A rotation's gradient turns back: what came out comes back as what went in.
            (grad,) = torch.autograd.grad(rotated, rows, rotated.detach())
            torch.testing.assert_close(grad, rows.detach(), rtol=1e-12, atol=1e-12)
            num_calls += 1
    assert (kernels.num_sequences, kernels.num_packs) == (num_calls if fused else 0, 0)


class _Layer:
    """What rotates, as Megatron's attention calls it."""

    def __init__(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def rotate(self, rows: torch.Tensor, cu_seqlens: torch.Tensor | None, *, fused: bool) -> torch.Tensor:
        table, config = _table(64, interleaved=False), _config(fused=fused)
        rotated: torch.Tensor = attention.apply_rotary_pos_emb(rows, table, config, cu_seqlens, cp_group=object())
        return rotated


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lost", [torch.Tensor.clone, lambda cu_seqlens: cu_seqlens[:]])
def test_a_pack_that_lost_its_plan_is_refused(kernels: _FusedKernels, lost: Any, fused: bool) -> None:
    """Upstream would rotate by the positions of its own split; the error says in which layer, wherever that runs."""
    plan = plan_named("random", padded(LENGTHS, 2), 2, seed=1)
    rows = torch.randn(plan.rank_tokens, 3, HEAD_SIZE, dtype=torch.float64, requires_grad=True)
    cu_seqlens = _cu_seqlens(plan, 0)
    sentence = (
        r"rotary embedding of layer 7: cu_seqlens must carry the plan .* got a tensor of shape \(\d,\) without one"
    )
    with pytest.raises(PlanLostError, match=sentence):
        _Layer(7).rotate(rows, lost(cu_seqlens), fused=fused)
    with pytest.raises(PlanLostError, match=sentence):
        checkpoint(lambda rows: _Layer(7).rotate(rows, lost(cu_seqlens), fused=fused), rows, use_reentrant=True)
    with pytest.raises(PlanLostError, match=r"^rotary embedding: cu_seqlens"):
        attention.apply_rotary_pos_emb(rows, _table(64, interleaved=False), _config(fused=fused), lost(cu_seqlens))
    assert (kernels.num_sequences, kernels.num_packs) == (0, 0)


def test_packs_go_where_they_went_without_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without packing does not apply it."""
    fused = _FusedKernels(monkeypatch)
    rows = torch.randn(6, 3, HEAD_SIZE, dtype=torch.float64)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    edges = torch.tensor([0, 4, 6], dtype=torch.int32)
    table = _table(64, interleaved=False)
    attention.apply_rotary_pos_emb(rows, table, _config(fused=True), edges, cp_group=group)
    assert (fused.num_sequences, fused.num_packs) == (0, 1)


def test_a_sequence_that_is_no_pack_goes_where_it_went(kernels: _FusedKernels) -> None:
    """It is rotated from position 0."""
    rows = torch.randn(6, 3, HEAD_SIZE, dtype=torch.float64)
    table = _table(64, interleaved=False)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    rotated = attention.apply_rotary_pos_emb(rows.unsqueeze(1), table, _config(fused=True), cp_group=group)
    wanted = _rotate(rows, _angles(6), interleaved=False)
    torch.testing.assert_close(rotated.squeeze(1), wanted, rtol=1e-12, atol=1e-12)


def test_what_fused_kernels_do_not_take_is_not_fused(kernels: _FusedKernels) -> None:
    """A scale of YaRN's, and the order of multi-latent attention: upstream's own rules for a sequence hold."""
    plan = plan_named("random", padded(LENGTHS, 2), 2, seed=1)
    rows = torch.randn(plan.rank_tokens, 3, HEAD_SIZE, dtype=torch.float64)
    table = _table(64, interleaved=False)
    for options in ({"mscale": 1.5}, {"mla_rotary_interleaved": True}):
        both = [
            attention.apply_rotary_pos_emb(
                rows, table, _config(fused=fused), _cu_seqlens(plan, 0), cp_group=object(), **options
            )
            for fused in (False, True)
        ]
        assert torch.equal(*both)
    assert (kernels.num_sequences, kernels.num_packs) == (0, 0)


class _Gathers(TorchDispatchMode):
    """Counts the rows of a table that are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::index.Tensor"
        return func(*args, **(kwargs or {}))


def _layers(rows: torch.Tensor, table: torch.Tensor, cu_seqlens: torch.Tensor, *, fused: bool) -> torch.Tensor:
    """Queries and keys of three layers."""
    for _layer in range(3):
        query, key = (
            attention.apply_rotary_pos_emb(rows, table, _config(fused=fused), cu_seqlens, cp_group=object())
            for _ in range(2)
        )
        rows = query + 2 * key
    return rows


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recompute", ["stored", "reentrant", "not reentrant"])
def test_angles_are_gathered_once_a_micro_batch(kernels: _FusedKernels, recompute: str, fused: bool) -> None:
    """For queries and keys of all layers, forward and again in backward; each micro-batch by its own positions, also
    when another one runs in between, as pipelines do. Recompute hands on a detached table."""
    plans = [plan_named("random", padded(LENGTHS, 2), 2, seed=seed) for seed in (1, 2)]
    table = _table(64, interleaved=False)
    under_way, alone = [], []
    with _Gathers() as gathers:
        for plan in plans:
            rows = torch.randn(plan.rank_tokens, 3, HEAD_SIZE, dtype=torch.float64, requires_grad=True)
            cu_seqlens = _cu_seqlens(plan, 0)
            if recompute == "stored":
                out = _layers(rows, table, cu_seqlens, fused=fused)
            else:
                run = partial(_layers, cu_seqlens=cu_seqlens, fused=fused)
                out = checkpoint(run, rows, table, use_reentrant=recompute == "reentrant")
            under_way.append((rows, out))
        for _rows, out in reversed(under_way):
            out.sum().backward()
    assert gathers.count == len(plans)
    for plan, (rows, out) in zip(plans, under_way, strict=True):
        leaf = rows.detach().requires_grad_()
        angles = _angles(64)[torch.from_numpy(plan.position_ids(0))]
        wanted = leaf
        for _layer in range(3):
            wanted = 3 * _rotate(wanted, angles, interleaved=False)
        wanted.sum().backward()
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rows.grad, leaf.grad, rtol=1e-12, atol=1e-12)
        alone.append(leaf)
    assert not torch.equal(*(leaf.grad for leaf in alone))


def test_tables_are_told_apart_and_let_go(kernels: _FusedKernels) -> None:
    """Two used in turn, as queries and keys of layers with different bases; and one a layer, as multi-latent attention
    has, whose rows do not pile up while the micro-batch is on its way."""
    plan = plan_named("random", padded(LENGTHS, 2), 2, seed=1)
    cu_seqlens = _cu_seqlens(plan, 0)
    rows = planned_rows(cu_seqlens)
    assert rows is not None
    positions = rows.position_ids
    pair = [_table(64, interleaved=False), -_table(64, interleaved=False)]
    with _Gathers() as gathers:
        for _layer in range(3):
            for table in pair:
                torch.testing.assert_close(rows.angles(table), table[positions].clone())
    assert gathers.count == 2 + 6  # the six that are wanted
    # The start of a table is another one, though it lies at the same address.
    assert rows.angles(pair[0][:, :, :, :4]).shape[-1] == 4
    assert rows.angles(pair[0]).shape[-1] == HEAD_SIZE
    kept = []
    for layer in range(6):
        table = _table(64, interleaved=False) + layer
        first, second = rows.angles(table), rows.angles(table)
        assert first is second
        assert torch.equal(first, (_table(64, interleaved=False) + layer)[positions])
        kept.append(weakref.ref(first))
        del table, first, second
    assert [angles() is not None for angles in kept] == [False] * 4 + [True] * 2
    del rows, cu_seqlens
    gc.collect(0)
    assert [angles() for angles in kept] == [None] * 6


def test_a_table_that_is_learned_gets_its_gradient(kernels: _FusedKernels) -> None:
    plan = plan_named("random", padded(LENGTHS, 2), 2, seed=1)
    rows = planned_rows(_cu_seqlens(plan, 0))
    assert rows is not None
    table = _table(64, interleaved=False).requires_grad_()
    for _layer in range(2):
        rows.angles(table).sum().backward()
    counts = torch.bincount(rows.position_ids, minlength=64)
    assert table.grad is not None
    torch.testing.assert_close(table.grad[:, 0, 0, 0], 2.0 * counts.double())
