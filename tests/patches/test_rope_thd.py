"""RoPE of planned rows: by position in the document, fused or not, whatever ranks hold them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention

from megatron.wlb.packed_seq_params import PlannedRows, mark_planned
from megatron.wlb.patches import rope_thd
from megatron.wlb.patches.registry import applied
from tests.parity.sharded_cases import padded, plan_named

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


def test_packs_without_a_plan_go_where_they_went(kernels: _FusedKernels) -> None:
    """To the kernel for packs with fusion; and a sequence that is no pack is rotated from position 0."""
    rows = torch.randn(6, 3, HEAD_SIZE, dtype=torch.float64)
    table = _table(64, interleaved=False)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    edges = torch.tensor([0, 4, 6], dtype=torch.int32)
    attention.apply_rotary_pos_emb(rows, table, _config(fused=True), edges, cp_group=group)
    assert (kernels.num_sequences, kernels.num_packs) == (0, 1)
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
