"""Ranks that time attention: real processes, stopped whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from wlb.attention.timed_ranks import AttentionRanks, Layer, RankFailed
from wlb.sharding import Sharding
from wlb.sharding.plan import plan_of_chunks

LAYER = Layer(num_heads=2, num_kv_heads=2, head_size=8, dtype="float32")
CUT = Sharding(name="per_document", cp_size=2).plan((64, 32, 32))
WHOLE = plan_of_chunks((8, 8), 2, [(0, 0, 0, 8), (1, 1, 0, 8)])


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AttentionRanks]:
    ranks = AttentionRanks(2, LAYER, tmp_path, timeout_s=request.param)
    processes = list(ranks._processes)
    try:
        yield ranks
    finally:
        ranks.close()
    assert not any(p.is_alive() for p in processes)


@pytest.mark.parametrize("ranks", [60], indirect=True)
def test_times_and_memory_until_a_rank_raises(ranks: AttentionRanks) -> None:
    for comm_type in ("all_gather", "p2p"):
        for plan in (CUT, WHOLE):
            times = ranks.times(plan, comm_type)
            assert len(times) == 2
            assert all(t.busy_s > 0 and t.elapsed_s > 0 for t in times)
    for keep in (True, False):
        for rank, memory in enumerate(ranks.memory(CUT, keep_gathered=keep)):
            gathered_bytes = memory.gathered_rows * LAYER.row_bytes
            assert memory.gathered_rows >= CUT.received_tokens(rank) > 0
            assert memory.attending_bytes == gathered_bytes
            assert memory.kept_bytes == (gathered_bytes if keep else 0)
            assert memory.backward_peak_bytes >= 2 * gathered_bytes
        assert [m.peak_bytes for m in ranks.memory(WHOLE, keep_gathered=keep)] == [0, 0]
    three = Sharding(name="per_document", cp_size=3).plan((30, 30))
    with pytest.raises(RankFailed, match=r"rank [01] failed: ShardingError: .*as the plan has them"):
        ranks.times(three, "all_gather")


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_ranks_that_do_not_answer_or_died_are_named(ranks: AttentionRanks) -> None:
    ranks.times(WHOLE, "p2p")
    os.kill(ranks._processes[0].pid, signal.SIGSTOP)
    with pytest.raises(RankFailed, match=r"must answer within 3 s, but \[0, 1\] did not"):
        ranks.times(WHOLE, "p2p")
    os.kill(ranks._processes[1].pid, signal.SIGKILL)
    ranks._processes[1].join()
    with pytest.raises(RankFailed, match="rank 1 must be alive, but it ended"):
        ranks.times(WHOLE, "p2p")
