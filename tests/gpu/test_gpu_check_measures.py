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
        import megatron.wlb.gpu_check.sections  # noqa: F401


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_chunks_give_what_one_matrix_gives(chunk_rows: int) -> None:
    from megatron.wlb.gpu_check.rule import attention_by_chunks, with_gradients

    lengths = (9, 1, 6)
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 8), (2, 8), (2, 5), (4, 5))
    pack = tuple(torch.randn(16, *s, generator=generator, dtype=torch.float64) for s in shapes)
    segments = tuple(accumulate(lengths, initial=0))
    wanted = with_gradients(lambda q, k, v: dense_attention(q, k, v, segments), *pack)
    for ours, exact in zip(attention_by_chunks(pack, lengths, chunk_rows), wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_not_a_number_is_not_within_the_ratio() -> None:
    from megatron.wlb.gpu_check.rule import within_ratio

    assert within_ratio({"out": 2.0, "dq": 0.0})
    assert not within_ratio({"out": 1.0, "dq": float("nan")})
    assert not within_ratio({"out": 2.01, "dq": 1.0})


def test_ranks_receive_what_the_plan_says_and_no_more() -> None:
    from megatron.wlb.gpu_check.packs import Heads
    from megatron.wlb.gpu_check.sharding import _receives_as_planned

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
    from megatron.wlb.gpu_check.stopwatch import Stopwatch

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
    from megatron.wlb.gpu_check.packs import Heads, draw_pack
    from megatron.wlb.gpu_check.stopwatch import time_plan

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
    from megatron.wlb.gpu_check.rank_times import draw_lengths
    from megatron.wlb.gpu_check.sections import SCALES

    scale = SCALES["cuda"].times
    packs = [draw_lengths(scale, 131_072, seed=seed) for seed in range(20)]
    assert all(sum(lengths) == 131_072 and min(lengths) >= 1 for lengths in packs)
    assert draw_lengths(scale, 131_072, seed=7) == packs[7]
    assert len(set(packs)) == 20
    drawn = sorted(n for lengths in packs for n in lengths)
    assert 1500 < drawn[len(drawn) // 2] < 2400
    assert drawn[-1] > 32_768


def test_fit_finds_the_prices_that_made_the_times() -> None:
    from megatron.wlb.gpu_check.tiles import fitted_costs, suggested_costs

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


def test_profile_is_of_the_whole_model() -> None:
    """Two layers less one are a layer; embeddings, output layer and loss are counted once."""
    from megatron.wlb.gpu_check.cost import Passes, crossover_tokens, profile_of
    from wlb.cost import TransformerShape

    shape = TransformerShape(
        hidden_size=8,
        ffn_hidden_size=16,
        num_layers=10,
        num_attention_heads=2,
        num_query_groups=2,
        head_size=4,
        vocab_size=16,
        gated=True,
    )
    attention = {n: Passes(forward_s=1e-9 * n**2, backward_s=3e-9 * n**2) for n in (100, 200, 400)}
    attention[100] = Passes(forward_s=1e-9 * 220**2, backward_s=0.0)
    # 2 us a token and 30 us in each layer, 5 us a token and 100 us once.
    rest = {
        (layers, tokens): Passes(
            forward_s=layers * (2e-6 * tokens + 30e-6) + 5e-6 * tokens + 100e-6,
            backward_s=2 * (layers * (2e-6 * tokens + 30e-6) + 5e-6 * tokens + 100e-6),
        )
        for layers in (1, 2)
        for tokens in (64, 128, 512)
    }
    profile = profile_of(shape, attention, rest)
    assert profile.linear_token_s == pytest.approx(25e-6)
    assert profile.fixed_s == pytest.approx(400e-6)
    assert profile.attention_s(400, 400) == pytest.approx(10 * 1e-9 * 400**2)
    assert (profile.attention_backward_ratio, profile.rest_backward_ratio) == pytest.approx((3, 2))
    # Noise made the shortest dearer than the next one, which then costs as much: a table must not fall.
    assert profile.attention[0][1] == profile.attention[1][1]
    # (1 + 2) * 25e-6 * n = (1 + 3) * 1e-8 * n^2
    assert crossover_tokens(profile) == pytest.approx(1875)


def run_of(losses: list[float], lengths: list[list[int]], token_s: float) -> Any:
    from megatron.wlb.gpu_check.training_runs import Run
    from wlb.report.training_log import LoggedStep

    tokens = sum(map(sum, lengths))
    fields = {"tokens": tokens, "imbalance micro-batches": 1.0, "max delay (steps)": 0.0}
    steps = tuple(
        LoggedStep(step=i, num_steps=len(losses), elapsed_s=token_s * tokens, loss=loss, fields=fields)
        for i, loss in enumerate(losses)
    )
    return Run(steps=steps, lengths=[lengths] * len(losses))


def test_training_is_judged_by_losses_and_times_stand_beside_the_prediction() -> None:
    from megatron.wlb.gpu_check.training import judge
    from wlb.cost import ProfiledCost

    falling = [4.0 * 0.95**i for i in range(20)]
    profile = ProfiledCost(
        attention=((100, 1.0),), linear_token_s=0.0, attention_backward_ratio=1.0, rest_backward_ratio=1.0
    )

    def runs(exact: list[float] = falling, wlb: list[float] = falling) -> dict[str, Any]:
        return {
            "plain": [run_of(falling, [[100], [100]], 0.03), run_of(falling, [[100], [100]], 0.03)],
            # Half the pairs, so half the predicted passes: 2 of plain's 4 s; plain's other 2 of 6 s are no pass's.
            "exact": [run_of(exact, [[50, 50], [50, 50]], 0.015)],
            "delay": [run_of(falling, [[100], [100]], 0.03)],
            "wlb": [run_of(wlb, [[100], [100]], 0.03)],
        }

    passed, measured = judge(runs(), profile, "cpu")
    assert passed
    assert measured["exact"]["time per token over plain"] == pytest.approx(0.5)
    plain_s, exact_s = 4 + 2, 2 * (2 * profile.attention_s(50, 50)) * 2 + 2
    assert measured["exact"]["predicted"] == pytest.approx(exact_s / plain_s)
    assert measured["plain"]["runs"] == 2
    assert "predicted" not in judge(runs(), None, "cpu")[1]["exact"]

    apart = [*falling[:-1], falling[-1] * (1 + 1e-4)]
    assert not judge(runs(exact=apart), None, "cpu")[0]
    assert judge(runs(exact=apart), None, "cuda")[0], "bfloat16 rounds more than that"
    assert not judge(runs(wlb=[*falling[:-1], float("nan")]), None, "cpu")[0]
    assert not judge(runs(wlb=[4.0] * 20), None, "cpu")[0]


def test_late_messages_of_a_mailbox_are_delivered() -> None:
    from megatron.wlb.gpu_check.sharding import LateMailbox
    from megatron.wlb.gpu_check.te_route import KeepingMailbox, RepeatingMailbox

    rows = torch.arange(6.0).view(2, 3)
    late = LateMailbox(2)
    late.leave((0, 1, 1), rows)
    assert late.collect((0, 1, 1)) is rows
    keeping = KeepingMailbox(2)
    keeping.leave((0, 1, 1), rows)
    rows.zero_()
    repeating = RepeatingMailbox(keeping.kept)
    assert repeating.collect((0, 1, 1)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert repeating.num_delivered == 1


def test_a_kernel_that_fails_is_judged_where_training_would_choose_it(monkeypatch: Any, capsys: Any) -> None:
    from megatron.wlb.gpu_check import kernels
    from megatron.wlb.gpu_check.packs import Heads
    from wlb.errors import ConfigError

    small = Heads(num_heads=2, num_kv_heads=1, head_size=8, value_size=8)
    wide = Heads(num_heads=2, num_kv_heads=1, head_size=16, value_size=8)
    large = Heads(num_heads=2, num_kv_heads=1, head_size=32, value_size=32)
    chosen = {small: "fast", wide: "other", large: "other"}
    monkeypatch.setattr(kernels, "kernel_of", lambda heads, kernel: chosen[heads] if kernel == "auto" else kernel)

    def check(kind: str, heads: Heads) -> tuple[bool, dict[str, Any]]:
        if heads == wide:
            raise RuntimeError("no such shape")
        if heads == large:
            raise ConfigError("head_size must be <= 16, got 32")
        return True, {kind: {"out": 1.0}}

    kinds = {"small": small, "wide": wide, "large": large}
    passed, measured = kernels.by_kind(kinds, "fast", check)
    assert passed
    assert measured["wide"] == {"refused": "RuntimeError: no such shape"}
    assert measured["large"] == {"refused": "head_size must be <= 16, got 32"}
    assert not kernels.by_kind({"wide": wide, "large": large}, "fast", check)[0], "it took none"

    chosen[wide] = "fast"
    passed, measured = kernels.by_kind(kinds, "fast", check)
    assert not passed
    assert measured["wide"] == {"failed": "RuntimeError: no such shape"}
    assert "no such shape" in capsys.readouterr().err, "its place is told"
    assert not kernels.by_kind({"small": small, "wide": wide}, None, check)[0], "nobody else would have it"
