"""The parts of the GPU check that measure: the oracle of long packs, the stopwatch, the packs, the fit of prices."""

from __future__ import annotations

import time
import warnings
from itertools import accumulate
from typing import Any

import pytest
import torch

from wlb.attention import Mailbox, dense_attention
from wlb.sharding import ShardCosts
from wlb.sharding.plan import plan_of_chunks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a CUDA device: tests/gpu/test_gpu_check.py runs the whole check there"
)


@pytest.fixture(autouse=True, scope="module")
def modules() -> None:
    with warnings.catch_warnings():
        # Upstream's own, on import: what it falls back to.
        warnings.simplefilter("ignore")
        import megatron.wlb.gpu_check  # noqa: F401


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_chunks_give_what_one_matrix_gives(chunk_rows: int) -> None:
    from megatron.wlb.gpu_check_rule import attention_by_chunks, with_gradients

    lengths = (9, 1, 6)
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 8), (2, 8), (2, 5), (4, 5))
    pack = tuple(torch.randn(16, *s, generator=generator, dtype=torch.float64) for s in shapes)
    segments = tuple(accumulate(lengths, initial=0))
    wanted = with_gradients(lambda q, k, v: dense_attention(q, k, v, segments), *pack)
    for ours, exact in zip(attention_by_chunks(pack, lengths, chunk_rows), wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_not_a_number_is_not_within_the_ratio() -> None:
    from megatron.wlb.gpu_check_rule import within_ratio

    assert within_ratio({"out": 2.0, "dq": 0.0})
    assert not within_ratio({"out": 1.0, "dq": float("nan")})
    assert not within_ratio({"out": 2.01, "dq": 1.0})


def test_ranks_receive_what_the_plan_says_and_no_more() -> None:
    from megatron.wlb.gpu_check_sharding import Heads, _receives_as_planned

    plan = plan_of_chunks((6,), 2, [(0, 0, 0, 2), (1, 0, 2, 5), (0, 0, 5, 6)])
    heads = Heads(num_heads=2, num_kv_heads=1, head_size=8, value_size=4)
    # Rank 0 needs tokens 2, 3, 4, rank 1 tokens 0, 1: 12 numbers of 2 bytes each.
    assert _receives_as_planned(plan, heads, [72, 48])
    assert not _receives_as_planned(plan, heads, [72, 72])
    assert not _receives_as_planned(plan, heads, [48, 48])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_laps_are_summed_by_name_in_seconds(device: str) -> None:
    """Events of a CUDA device are played by the CPU's."""
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check_stopwatch import Stopwatch

    with cpu_as_device():
        watch = Stopwatch(torch.device(device))
        with watch.lap("whole"):
            for _ in range(2):
                with watch.lap("part"):
                    time.sleep(0.02)
        seconds = watch.seconds()
    assert 0.04 <= seconds["part"] <= seconds["whole"] < 4


def test_copies_between_ranks_are_left_out(monkeypatch: Any) -> None:
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.gpu_check_sharding import Heads, draw_pack
    from megatron.wlb.gpu_check_stopwatch import time_plan

    collect = Mailbox.collect

    def slow(self: Mailbox, message: tuple[int, int, int]) -> torch.Tensor:
        time.sleep(0.1)
        return collect(self, message)

    monkeypatch.setattr(Mailbox, "collect", slow)
    plan = plan_of_chunks((16,), 2, [(0, 0, 0, 4), (1, 0, 4, 12), (0, 0, 12, 16)])
    for comm_type in ("all_gather", "p2p"):
        begin_s = time.perf_counter()
        with cpu_as_device():
            pack = draw_pack(16, Heads(num_heads=2, num_kv_heads=1, head_size=8, value_size=8), seed=1)
            times, outs = time_plan(pack, plan, comm_type)
        assert time.perf_counter() - begin_s > 0.6, "each rank waits in forward, and for keys and gradients in backward"
        assert 0 < times.attention_s <= times.all_s < 0.3, times
        assert [out.shape for out in outs] == [(8, 2, 8)] * 2


def test_packs_are_drawn_from_their_seed() -> None:
    from megatron.wlb.gpu_check import SCALES
    from megatron.wlb.gpu_check_rank_times import draw_lengths

    scale = SCALES["cuda"].times
    packs = [draw_lengths(scale, 131_072, seed=seed) for seed in range(20)]
    assert all(sum(lengths) == 131_072 and min(lengths) >= 1 for lengths in packs)
    assert draw_lengths(scale, 131_072, seed=7) == packs[7]
    assert len(set(packs)) == 20
    drawn = sorted(n for lengths in packs for n in lengths)
    assert 1500 < drawn[len(drawn) // 2] < 2400
    assert drawn[-1] > 32_768


def test_fit_finds_the_prices_that_made_the_times() -> None:
    from megatron.wlb.gpu_check_tiles import fitted_costs, suggested_costs

    spans = {4096: 16, 16_384: 4}
    costs = ShardCosts(tile_tokens=128)
    shapes = [(r, s) for r in (64, 128, 192, 512) for s in spans]
    times = {(r, s): 2e-12 * spans[s] * (costs.tile_pairs(s - r, s) + 30_000) for r, s in shapes}
    fit = fitted_costs(times, spans, (64, 128, 256))
    assert (fit.tile_tokens, fit.span_pairs) == (128, 30_000)
    assert fit.pair_s == pytest.approx(2e-12)
    assert fit.error < 1e-9
    cheaper = {(r, s): 2e-12 * spans[s] * (costs.tile_pairs(s - r, s) - 100_000) for r, s in shapes}
    assert fitted_costs(cheaper, spans, (128,)).span_pairs == 0
    assert suggested_costs({"error": "RuntimeError: no such kernel"}) == ShardCosts()
