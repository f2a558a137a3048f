"""Context-parallel ranks train what one process trains: every sharder and communication type, every layout."""

from __future__ import annotations

import re
from contextlib import ExitStack
from itertools import cycle, product
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.harness.gradients import summed_gradients
from tests.harness.processes import RankFailure
from tests.harness.training import Layout, Run, train
from wlb.attention import CommType
from wlb.sharding import SHARDERS

ITERATIONS = 10
RELATIVE = 1e-5
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2", "--moe-z-loss-coeff", "1e-3"),
    "--disable-bias-linear",
]
# All combinations at CP 2, then one each by rotation.
COMM_TYPES = get_args(CommType)
WAYS = list(product(SHARDERS, COMM_TYPES))
LAYOUTS = [
    (Layout(cp=4), []),
    (Layout(cp=2, tp=2), ["--sequence-parallel"]),
    (Layout(cp=2, pp=2), []),
    (Layout(cp=2, pp=2, vpp=2), []),
    (Layout(cp=2, dp=2), []),
    (Layout(cp=2, dp=2), ["--use-distributed-optimizer"]),
]
# Each is a part of another one, or close to it.
SLOW_LAYOUTS = [str(Layout(cp=2, pp=2)), str(Layout(cp=2, dp=2))]


@pytest.fixture(scope="module")
def packed(toy_data: Path, start_checkpoint: Path) -> list[Any]:
    return [
        *("--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain"),
        *("--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"),
    ]


@pytest.fixture(scope="module")
def one_process(packed: list[Any]) -> Run:
    return train(packed, iterations=ITERATIONS)


def _way(sharder: str, comm_type: str) -> list[str]:
    return ["--wlb-cp-sharding", sharder, "--cp-comm-type", comm_type]


def _assert_equal(run: Run, wanted: Run) -> None:
    assert len(run.losses) == len(wanted.losses) > 0
    assert run.losses == pytest.approx(wanted.losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(wanted.grad_norms, rel=RELATIVE)


@pytest.mark.parametrize(
    ("sharder", "comm_type"),
    [
        # adaptive takes the plan of one of the two static sharders
        pytest.param(*way, marks=pytest.mark.slow if "adaptive" in way or way == ("per_sequence", "p2p") else [])
        for way in WAYS
    ],
)
def test_two_ranks_equal_one_process(sharder: str, comm_type: str, packed: list[Any], one_process: Run) -> None:
    _assert_equal(train([*packed, *_way(sharder, comm_type)], layout=Layout(cp=2), iterations=ITERATIONS), one_process)


@pytest.mark.parametrize(
    ("layout", "options", "way"),
    [
        pytest.param(
            layout,
            options,
            way,
            id="-".join((str(layout), *options, *way)),
            marks=pytest.mark.slow if str(layout) in SLOW_LAYOUTS and not options else [],
        )
        for (layout, options), way in zip(LAYOUTS, cycle(reversed(WAYS)), strict=False)
    ],
)
def test_every_layout_equals_one_process(
    layout: Layout, options: list[str], way: tuple[str, str], packed: list[Any], one_process: Run
) -> None:
    _assert_equal(train([*packed, *options, *_way(*way)], layout=layout, iterations=ITERATIONS), one_process)


@pytest.mark.parametrize("packer", [pytest.param("wlb", marks=pytest.mark.slow), "makespan"])
def test_balanced_packs_too(packer: str, toy_data: Path, start_checkpoint: Path, packed: list[Any]) -> None:
    """Packing that knows the sharding trains the same documents in the step; other micro-batches, equal sums."""
    more = ["--wlb-packing", packer]
    if packer == "makespan":
        more += ["--wlb-document-cut", "stream", "--wlb-overhead-tokens", "2", "--wlb-crossover", "16"]
    one = train([*packed, *more], iterations=ITERATIONS)
    two = train([*packed, *more, "--wlb-cp-sharding"], layout=Layout(cp=2, pp=2), iterations=ITERATIONS)
    _assert_equal(two, one)


def test_expert_parallelism_over_context_parallel_ranks(toy_data: Path, tmp_path: Path) -> None:
    """Experts are divided among the very ranks that divide the tokens; auxiliary losses count the whole micro-batch."""
    train(["--mock-data", *EXPERTS, "--save", tmp_path, "--save-interval", "1"], iterations=1)
    args = [
        *("--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain", *EXPERTS),
        *("--load", tmp_path, "--finetune", "--no-load-optim", "--no-load-rng"),
    ]
    one = train(args, iterations=ITERATIONS)
    for sharder, comm_type in zip(("hybrid", "adaptive"), COMM_TYPES, strict=True):
        _assert_equal(train([*args, *_way(sharder, comm_type)], layout=Layout(cp=2, ep=2), iterations=ITERATIONS), one)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("hybrid", "all_gather"), id="hybrid-all_gather"),
        pytest.param(("per_document", "p2p"), id="per_document-p2p", marks=pytest.mark.slow),
    ],
)
def test_gradients_in_float64_equal_one_process(way: tuple[str, str], packed: list[Any], tmp_path: Path) -> None:
    one = summed_gradients(tmp_path / "one", packed, layout=Layout(), iterations=2)
    two = summed_gradients(tmp_path / "two", [*packed, *_way(*way)], layout=Layout(cp=2), iterations=2)
    (wanted, *_), files = one.values(), list(two.values())
    assert len(wanted) > 20
    assert len(files) >= 2
    worst = max(float((files[0][name] - g).norm() / g.norm()) for name, g in wanted.items())
    assert worst < 1e-10


VARIANTS = {
    "grouped-query": ["--group-query-attention", "--num-query-groups", "1"],
    "sliding-window": ["--window-size", "5,0", "--window-attn-skip-freq", "2"],
    "scaled-rope": ["--use-rope-scaling", "--rope-scaling-factor", "4.0", "--rotary-base", "100"],
    "partial-rope": ["--rotary-percent", "0.5", "--rotary-interleaved"],
    "multi-latent": [
        *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "8", "--qk-head-dim", "8"),
        *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "6", "--rope-type", "rope"),
    ],
    "multi-latent-yarn": [
        *("--multi-latent-attention", "--kv-lora-rank", "8", "--qk-head-dim", "8"),
        *("--qk-pos-emb-head-dim", "4", "--v-head-dim", "12", "--rope-type", "yarn", "--rotary-scaling-factor", "4"),
    ],
    "learned-positions": ["--position-embedding-type", "learned_absolute"],
    "recompute-attention": ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"],
    "recompute-layers": [
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ],
    "keep-gathered": ["--wlb-keep-gathered-kv"],
    "types-by-layer": ["--cp-comm-type", "p2p", "all_gather", "all_gather", "p2p"],
}


USUAL = ("sliding-window", "multi-latent-yarn", "recompute-layers")


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.slow) for name in VARIANTS]
)
def test_models_of_every_kind_equal_one_process(variant: str, toy_data: Path) -> None:
    """Kinds of attention and of positions, and activations that are computed again: two ranks against one."""
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain"]
    without = ("--position-embedding-type",) if variant == "learned-positions" else ()
    options = [option for option in VARIANTS[variant] if option != "--wlb-keep-gathered-kv"]
    one = train([*args, *options], iterations=4, without=without)
    ways = [_way("hybrid", "all_gather"), _way("per_document", "p2p")]
    if variant == "keep-gathered":
        ways.pop()
    if variant == "types-by-layer":
        ways = [["--wlb-cp-sharding", "hybrid"]]
    for way in ways:
        two = train([*args, *VARIANTS[variant], *way], layout=Layout(cp=2), iterations=4, without=without)
        _assert_equal(two, one)


def test_evaluation_equals_one_process(toy_data: Path, start_checkpoint: Path) -> None:
    """The validation loss is a mean over tokens, however ranks divide them."""
    args = [
        *("--data-path", toy_data, "--split", "90,10,0", "--wlb-packing", "plain"),
        *("--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"),
        *("--eval-iters", "2", "--eval-interval", "2"),
    ]
    runs = [
        train([*args, *_way("hybrid", "all_gather")], layout=layout, iterations=4)
        for layout in (Layout(), Layout(cp=2), Layout(cp=2, dp=2))
    ]
    losses = [re.findall(r"validation loss at iteration (\d+) .*lm loss value: (\S+)", run.log) for run in runs]
    assert [iteration for iteration, _ in losses[0]] == ["2", "4", "4"]
    for other in losses[1:]:
        assert [float(x) for _, x in other] == pytest.approx([float(x) for _, x in losses[0]], rel=RELATIVE)


def _wrong_positions(undo: ExitStack) -> None:
    """Positions of a rank's tokens as if its shard were the whole of each document."""
    import torch

    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace

    original = batch.packed_seq_params

    def local(*args: Any, position_ids: Any, **kwargs: Any) -> Any:
        return original(*args, position_ids=torch.arange(len(position_ids)), **kwargs)

    replace(undo, batch, "packed_seq_params", local)


def _leak_between_documents(undo: ExitStack) -> None:
    """One document for the whole pack; the split per sequence gives each rank the same tokens as before."""
    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace
    from wlb.sharding import Sharding

    original = batch.packed_seq_params

    def leaking(micro_batch: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        merged = Sharding(name="per_sequence", cp_size=plan.cp_size).plan((plan.num_tokens,))
        return original(micro_batch, merged, *args, **kwargs)

    replace(undo, batch, "packed_seq_params", leaking)


def _labels_rolled_after_sharding(undo: ExitStack) -> None:
    from dataclasses import replace as changed

    import numpy as np

    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace

    original = batch.collate

    def rolled(*args: Any, **kwargs: Any) -> Any:
        packed = original(*args, **kwargs)
        return changed(packed, labels=np.roll(packed.tokens, -1))

    replace(undo, batch, "collate", rolled)


@pytest.mark.parametrize("sabotage", [_wrong_positions, _leak_between_documents, _labels_rolled_after_sharding])
def test_the_comparison_sees_what_it_must(sabotage: Any, packed: list[Any], one_process: Run) -> None:
    """The control: each fault that context parallelism can have is far beyond the tolerance of what is compared."""
    run = train(packed, layout=Layout(cp=2), iterations=1, sabotage=sabotage)
    pairs = [(run.losses[0], one_process.losses[0]), (run.grad_norms[0], one_process.grad_norms[0])]
    assert max(abs(seen / wanted - 1) for seen, wanted in pairs) > 100 * RELATIVE, pairs


def _rank_one_divides_otherwise(undo: ExitStack) -> None:
    import os
    from dataclasses import replace as changed

    from megatron.wlb import data_provider
    from megatron.wlb.patches.registry import replace

    original = data_provider.ProcessSource

    def source(spec: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            sharding = changed(spec.sharding, name="per_document")
            spec = changed(spec, sharding=sharding, options=changed(spec.options, division=None))
        return original(spec, **kwargs)

    replace(undo, data_provider, "ProcessSource", source)


def test_ranks_that_divide_otherwise_are_named_with_the_document(packed: list[Any]) -> None:
    sentence = (
        r"PlanMismatchError: ranks \[1\] divide the micro-batches of step 0 otherwise .* the first difference is "
        r"\[\d+, \d+\) of document \d+ of micro-batch 0 for CP rank \d on rank 1, .* on rank 0"
    )
    with pytest.raises(RankFailure, match=sentence):
        train(packed, layout=Layout(cp=2), iterations=2, sabotage=_rank_one_divides_otherwise, timeout_s=40)


def _plan_of_other_documents(undo: ExitStack) -> None:
    from dataclasses import replace as changed

    from megatron.wlb import batch
    from megatron.wlb.patches.registry import replace
    from wlb.sharding import Sharding

    original = batch.PackedSteps.begin_step

    def begin_step(self: Any) -> Any:
        step = original(self)
        merged = tuple(Sharding(name="per_sequence", cp_size=p.cp_size).plan((p.num_tokens,)) for p in step.shard_plans)
        self._step = changed(step, shard_plans=merged)
        return self._step

    replace(undo, batch.PackedSteps, "begin_step", begin_step)


def test_a_plan_of_other_documents_stops_with_the_document(packed: list[Any]) -> None:
    sentence = r"ShardingError: rank \d: the shard plan must fit its micro-batch, but document 0 has \d+ tokens and"
    with pytest.raises(RankFailure, match=sentence):
        train(packed, layout=Layout(cp=2), iterations=2, sabotage=_plan_of_other_documents, timeout_s=40)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cp-comm-type", "a2a"], "--cp-comm-type must be all_gather or p2p with --wlb-packing, got a2a"),
        (["--cp-comm-type", "p2p", "p2p"], "--cp-comm-type must be one word, or one for each of 4 layers"),
        (["--attention-dropout", "0.1"], "--attention-dropout must be 0 with --wlb-packing, got 0.1"),
        (["--mtp-num-layers", "1"], "--mtp-num-layers must be unset with --wlb-packing, got 1"),
        (["--wlb-cp-sharding", "zigzag"], "argument --wlb-cp-sharding: invalid choice: 'zigzag'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_divided_is_refused_by_name(options: list[str], sentence: str, packed: list[Any]) -> None:
    with pytest.raises(RankFailure) as failure:
        train([*packed, *options], layout=Layout(cp=2), iterations=1)
    assert sentence in str(failure.value)
    assert "iteration        1/" not in str(failure.value), "training had begun"


def test_sharding_alone_means_plain_packs(packed: list[Any], one_process: Run) -> None:
    place = packed.index("--wlb-packing")
    without_packing = [*packed[:place], *packed[place + 2 :], "--wlb-cp-sharding"]
    run = train(without_packing, layout=Layout(cp=2), iterations=2)
    assert run.losses == pytest.approx(one_process.losses[:2], rel=RELATIVE)


def test_megatrons_default_is_told_from_the_users_choice() -> None:
    """Not given, packed runs gather; given, the user's word holds, also where it is Megatron's default."""
    import argparse

    from megatron.wlb.context_parallel import mark_default_comm_type, settle_comm_type

    parser = argparse.ArgumentParser()
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    mark_default_comm_type(parser)
    for argv, packed, settled in (
        ([], True, ["all_gather"]),
        ([], False, ["p2p"]),
        (["--cp-comm-type", "p2p"], True, ["p2p"]),
    ):
        args = parser.parse_args(argv)
        settle_comm_type(args, packed=packed)
        assert args.cp_comm_type == settled
        assert type(args.cp_comm_type) is list
