"""What gathered keys and values hold, in one process that holds one of two ranks at a time."""

import threading
from collections.abc import Generator

import pytest
import torch

from wlb.attention import Mailbox, sharded_attention
from wlb.attention.gather_memory import GatherMemory
from wlb.attention.in_process import in_lockstep
from wlb.attention.sharded import checked_call, path_of
from wlb.sharding import Sharding, ShardPlan
from wlb.sharding.index import gather_index
from wlb.sharding.plan import plan_of_chunks, unsharded

NUMBERS = 2 * 2 * 4  # 2 key/value heads of 4 numbers
ROW_BYTES = 4 * NUMBERS


def test_tensors_of_rows_count_while_their_memory_lives():
    with GatherMemory(8) as memory:
        rows = torch.zeros(3, 8)
        torch.zeros(3, 9), torch.zeros(3, 8, 1)  # of another width, of another shape
        view = rows.view(torch.uint8)
        del rows
        assert memory.live_bytes == 3 * 8 * 4  # held by the view
        torch.empty(2, 8)
        del view
        assert memory.live_bytes == 0
        assert memory.peak_bytes == 5 * 8 * 4
        memory.reset()
        assert memory.peak_bytes == 0


def attended(rows: torch.Tensor) -> None:
    key, value = (t.view(1, -1, 2, 4).transpose(1, 2) for t in rows.split(8, dim=1))
    torch.nn.functional.scaled_dot_product_attention(key, key, value, is_causal=True)


def test_what_an_exchange_lets_go_a_moment_later_is_not_held_while_attending():
    with GatherMemory(NUMBERS) as memory:
        rows = torch.zeros(4, NUMBERS)
        sent = [torch.zeros(3, NUMBERS)]
        thread = threading.Timer(0.05, sent.clear)
        thread.start()
        attended(rows)
        thread.join()
        assert memory.attending_bytes == 4 * ROW_BYTES
        assert memory.peak_bytes == 7 * ROW_BYTES
        held = torch.zeros(3, NUMBERS)
        attended(rows)
        assert memory.attending_bytes == 7 * ROW_BYTES
        del held


class Sent(Mailbox):
    """What is sent is no longer the sender's."""

    def leave(self, message, rows):
        super().leave(message, torch.from_numpy(rows.numpy().copy()))


def forward(plan: ShardPlan, rank: int, *, keep_gathered: bool) -> tuple[GatherMemory, object]:
    """The forward pass of `rank`, once the other has sent all that it will."""
    mailbox = Sent(2)
    shape = (plan.rank_tokens, 2, 4)
    calls = []
    for r in range(2):
        tensors = [torch.randn(shape) for _ in range(3)]
        call = checked_call(
            *tensors,
            plan,
            r,
            mailbox.exchange(r),
            comm_type="all_gather",
            scale=None,
            window_tokens=None,
            keep_gathered=keep_gathered,
        )
        calls.append((call, tensors))
    path = path_of("all_gather")
    other, tensors = calls[1 - rank]
    started = path.forward(other, *tensors)
    next(started)  # has sent; what it holds is not followed
    memory = GatherMemory(NUMBERS)
    with memory:
        call, tensors = calls[rank]
        (saved,) = in_lockstep([path.forward(call, *tensors)])
    return memory, saved


@pytest.mark.parametrize("name", ["per_sequence", "per_document", "hybrid"])
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_holds_one_copy_of_what_it_gathers(name, rank):
    plan = Sharding(name=name, cp_size=2).plan((600, 300, 41, 1, 58))
    gathered_bytes = gather_index(plan, rank, None).gathered_rows * ROW_BYTES
    assert gathered_bytes > 0
    kept, saved = forward(plan, rank, keep_gathered=True)
    assert kept.attending_bytes == kept.live_bytes == gathered_bytes
    del saved
    dropped, _saved = forward(plan, rank, keep_gathered=False)
    assert dropped.attending_bytes == gathered_bytes
    assert dropped.live_bytes == 0


class Watched(Generator):
    """The generator of one rank, whose memory is followed while it runs."""

    def __init__(self, generator, memory):
        self._generator, self._memory = generator, memory

    def send(self, value):
        with self._memory:
            return self._generator.send(value)

    def throw(self, *error):
        return self._generator.throw(*error)


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p"])
def test_backward_lets_keys_go_before_gradients_leave(comm_type):
    plan = Sharding(name="per_document", cp_size=2).plan((600, 300, 41, 1, 58))
    mailbox, path, memory = Sent(2), path_of(comm_type), GatherMemory(NUMBERS)
    ranks = []
    for rank in range(2):
        tensors = [torch.randn(plan.rank_tokens, 2, 4) for _ in range(3)]
        exchange = mailbox.exchange(rank)
        options = {"comm_type": comm_type, "scale": None, "window_tokens": None, "keep_gathered": False}
        ranks.append((checked_call(*tensors, plan, rank, exchange, **options), tensors))
    saved = in_lockstep([path.forward(call, *tensors) for call, tensors in ranks])
    started = [path.backward(call, s, *t, torch.ones_like(s.out)) for (call, t), s in zip(ranks, saved, strict=True)]
    in_lockstep([Watched(started[0], memory), started[1]])
    index = gather_index(plan, 0, None)
    sent, received = len(index.send_rows), len(index.places)
    if comm_type == "all_gather":
        # Gradients of the gathered rows, those of them that leave, and room for those that return.
        rows = index.gathered_rows + received + sent
        assert rows >= 2 * index.gathered_rows, "keys and gradients while attention runs are no more"
    else:
        rows = 2 * received  # keys and their gradients, which are sent as they are
        assert rows > received + sent
    assert memory.peak_bytes == rows * ROW_BYTES
    assert memory.live_bytes == 0


def test_views_of_other_tensors_do_not_count():
    other = torch.zeros(2, 4, 4)
    with GatherMemory(NUMBERS) as memory:
        other.view(2, NUMBERS).add_(1)
    assert memory.peak_bytes == 0


def test_whole_documents_hold_nothing():
    plan = plan_of_chunks((5, 3, 4, 4), 2, [(0, 0, 0, 5), (0, 1, 0, 3), (1, 2, 0, 4), (1, 3, 0, 4)])
    memory, _ = forward(plan, 0, keep_gathered=True)
    assert (memory.peak_bytes, memory.attending_bytes, memory.live_bytes) == (0, 0, 0)


def test_one_rank_holds_nothing():
    tensors = [torch.randn(7, 2, 4) for _ in range(3)]
    with GatherMemory(NUMBERS) as memory:
        sharded_attention(*tensors, unsharded((5, 2)), 0, None, comm_type="all_gather")
    assert memory.peak_bytes == 0
