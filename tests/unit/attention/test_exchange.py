"""A group's exchange connects its ranks first where the backend of CUDA tensors needs that."""

from __future__ import annotations

from typing import Any

from tests.harness.processes import run_ranks


def connect() -> dict[str, Any]:
    """By group: what carries its CUDA tensors, the word for the group, and all-reduces that an exchange makes. gloo
    takes the place of NCCL. Runs in a rank."""
    import torch.distributed as dist

    from megatron.wlb.cpu import cpu_as_device
    from wlb.attention import GroupExchange, exchange

    dist.init_process_group("gloo")
    groups = {
        "plain": dist.group.WORLD,
        **{words: dist.new_group([0], backend=words) for words in ("cpu:gloo,cuda:gloo", "cpu:gloo")},
    }
    all_reduce = dist.all_reduce
    calls: list[Any] = []

    def counting(tensor: Any, group: Any = None) -> None:
        calls.append(group)
        all_reduce(tensor, group=group)

    found: dict[str, Any] = {}
    dist.all_reduce = counting
    with cpu_as_device():
        for backends in (frozenset({"gloo"}), exchange.CONNECTING_BACKENDS):
            exchange.CONNECTING_BACKENDS = backends
            for name, group in groups.items():
                calls.clear()
                GroupExchange(group)
                assert all(called is group for called in calls)
                found[f"{name}, {', '.join(backends)}"] = len(calls)
    words = {name: (exchange.cuda_backend(group), dist.get_backend(group)) for name, group in groups.items()}
    dist.destroy_process_group()
    return {"calls": found, "words": words}


def test_a_group_is_connected_by_the_backend_of_its_cuda_tensors() -> None:
    found = run_ranks(connect, 1)[0]
    assert found["words"] == {
        "plain": ("gloo", "gloo"),
        "cpu:gloo,cuda:gloo": ("gloo", "cpu:gloo,cuda:gloo"),  # the group's word is no backend's name
        "cpu:gloo": (None, "cpu:gloo"),
    }
    assert found["calls"] == {
        "plain, gloo": 1,
        "cpu:gloo,cuda:gloo, gloo": 1,
        "cpu:gloo, gloo": 0,
        "plain, nccl": 0,
        "cpu:gloo,cuda:gloo, nccl": 0,
        "cpu:gloo, nccl": 0,
    }
