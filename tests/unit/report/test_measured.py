import json

import pytest

from wlb.errors import DataError
from wlb.report.measured import load_timeline


def row(rank, *, step=0, pp_rank=0, dp_rank=0, lengths=((4, 2), (3,)), passes_s=((1, 2), (3, 4))):
    """Micro-batch k runs forward for passes_s[0][k] and backward for passes_s[1][k] seconds."""
    events, now_s = [["forward-backward", 0, 99]], 10.0
    for name, seconds in zip(("forward-compute", "backward-compute"), passes_s, strict=True):
        for s in seconds:
            events.append([name, now_s, now_s + s])
            now_s += s + 1
    return {
        "step": step,
        "rank": rank,
        "pp_rank": pp_rank,
        "dp_rank": dp_rank,
        "begin_s": 9.0 + rank,
        "end_s": now_s,
        "lengths": lengths,
        "events": events,
    }


@pytest.fixture
def write(tmp_path):
    def write_rows(*ranks):
        for i, rows in enumerate(ranks):
            (tmp_path / f"rank{i:03}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return tmp_path

    return write_rows


def test_the_kth_pass_is_of_micro_batch_k(write):
    (step,) = load_timeline(write([row(0)]))
    (rank,) = step.ranks
    assert rank.forward == ((10, 11), (12, 14))
    assert rank.backward == ((15, 18), (19, 23))
    assert rank.busy_s == 1 + 2 + 3 + 4
    assert step.passes_s(0) == [((4, 2), 1, 3), ((3,), 2, 4)]
    assert [m.lengths for m in step.plan.micro_batches] == [(4, 2), (3,)]


def test_replicas_add_their_micro_batches(write):
    (step,) = load_timeline(write([row(0)], [row(1, dp_rank=1, lengths=((9,), (8, 1)))]))
    assert [[m.lengths for m in r] for r in step.plan.replicas] == [[(4, 2), (3,)], [(9,), (8, 1)]]
    assert [lengths for lengths, _, _ in step.passes_s(0)] == [(4, 2), (3,), (9,), (8, 1)]
    assert step.begin_s == 9
    assert step.num_stages == 1


def test_ranks_that_share_a_micro_batch_count_once_from_the_last_start_to_the_last_end(write):
    """What the first one waits for the last is no work: seconds of passes in a row add up to what all took."""
    (step,) = load_timeline(write([row(0)], [row(1, passes_s=((7, 1), (1, 8)))]))
    assert step.plan.num_tokens == 9
    #   rank 0: forward 10-11, 12-14, backward 15-18, 19-23; rank 1: forward 10-17, 18-19, backward 20-21, 22-30
    assert step.passes_s(0) == [((4, 2), 17 - 10, 21 - 20), ((3,), 19 - 18, 30 - 22)]


def test_stages_are_told_apart(write):
    (step,) = load_timeline(write([row(0)], [row(1, pp_rank=1, passes_s=((5, 5), (6, 6)))]))
    assert step.num_stages == 2
    assert step.passes_s(1) == [((4, 2), 5, 6), ((3,), 5, 6)]


def test_steps_come_in_order(write):
    steps = load_timeline(write([row(0, step=1), row(0, step=0)]))
    assert [s.step for s in steps] == [0, 1]


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"must hold a file rank000\.jsonl or more, got none"):
        load_timeline(tmp_path)


def test_ranks_of_other_steps_are_refused(write):
    with pytest.raises(DataError, match=r"rank001\.jsonl: must hold the same steps as rank000\.jsonl \(2\), got 1"):
        load_timeline(write([row(0), row(0, step=1)], [row(1)]))


def test_a_step_twice_is_refused(write):
    with pytest.raises(DataError, match="line 2 repeats step 0"):
        load_timeline(write([row(0), row(0)]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1 must be a step's record"),
        ("{}\n", "KeyError"),
        (json.dumps(row(0, lengths=((4, 2),))), "2 events forward-compute for 1 micro-batches"),
    ],
)
def test_a_broken_line_is_named(tmp_path, text, reason):
    (tmp_path / "rank000.jsonl").write_text(text)
    with pytest.raises(DataError, match=reason):
        load_timeline(tmp_path)
