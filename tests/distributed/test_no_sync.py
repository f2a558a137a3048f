"""A GPT trains on a CUDA device without the host waiting for it: counted on a device that is not there."""

from __future__ import annotations

from tests.harness import fake_training
from tests.harness.processes import run_ranks


def test_no_micro_batch_waits_for_the_device() -> None:
    """With context parallelism, from the batch to the gradients; and Megatron's own RoPE of packed sequences does."""
    found = run_ranks(fake_training.gpt_syncs, 1)[0]
    assert [dict(f) for f in found["ours"]] == [{}] * len(fake_training.LENGTHS)
    assert all(f.total() > 0 for f in found["without rope_thd"])
    assert all("rope_utils" in file for f in found["without rope_thd"] for _, file, _ in f)
