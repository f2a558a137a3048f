"""Virtual pipeline stages and the distributed optimizer: losses of one process, the same documents on resume."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import RankFailure
from tests.harness.training import Layout, Run, train

ITERATIONS = 6
RELATIVE = 1e-5
# makespan: what a micro-batch costs beside its tokens must be small for a window of 64, or it would never make more.
# wlb: queues that the last step must empty, in more micro-batches than the steps before.
OPTIONS = {
    "plain": [],
    "makespan": ["--wlb-overhead-tokens", "2", "--wlb-crossover", "16"],
    "wlb": ["--wlb-thresholds", "24", "40", "--wlb-cap-windows", "1.2"],
}
EVALUATION = ["--eval-iters", "2", "--eval-interval", "3"]
VIRTUAL = Layout(pp=2, vpp=2)


def _packed(packer: str, data: Path, start: Path) -> list[Any]:
    return [
        *("--data-path", data, "--split", "90,10,0", "--wlb-packing", packer, "--wlb-document-cut", "stream"),
        *OPTIONS[packer],
        *("--load", start, "--finetune", "--no-load-optim", "--no-load-rng"),
    ]


@pytest.fixture(scope="module")
def one_process(toy_data: Path, start_checkpoint: Path) -> dict[str, Run]:
    return {
        packer: train([*_packed(packer, toy_data, start_checkpoint), *EVALUATION], iterations=ITERATIONS)
        for packer in ("plain", "makespan")
    }


def _validation_losses(run: Run) -> list[float]:
    lines = [line for line in run.log.splitlines() if "validation loss at iteration" in line]
    assert lines
    return [float(line.split("lm loss value:")[1].split("|")[0]) for line in lines]


@pytest.mark.parametrize("packer", ["plain", "makespan"])
@pytest.mark.parametrize("layout", [VIRTUAL, Layout(pp=2, vpp=2, dp=2)], ids=str)
def test_losses_and_gradient_norms_equal_one_process(
    layout: Layout, packer: str, toy_data: Path, start_checkpoint: Path, one_process: dict[str, Run]
) -> None:
    args = [*_packed(packer, toy_data, start_checkpoint), *EVALUATION]
    run = train(args, layout=layout, iterations=ITERATIONS)
    assert len(run.losses) == ITERATIONS
    assert run.losses == pytest.approx(one_process[packer].losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(one_process[packer].grad_norms, rel=RELATIVE)
    assert _validation_losses(run) == pytest.approx(_validation_losses(one_process[packer]), rel=RELATIVE)


def _ledger(path: Path) -> dict[int, Any]:
    """Step -> replicas; where a step was planned twice, the later line counts."""
    return {row["step"]: row["replicas"] for row in map(json.loads, path.read_text().splitlines())}


def test_a_last_step_is_filled_up_to_whole_groups(toy_data: Path, start_checkpoint: Path, tmp_path: Path) -> None:
    """wlb opens as many micro-batches as what waits needs; virtual stages want an even number of them."""
    ledgers = {name: tmp_path / name for name in ("one", "virtual")}
    args = _packed("wlb", toy_data, start_checkpoint)
    one = train([*args, "--wlb-ledger", ledgers["one"]], iterations=4)
    run = train([*args, "--wlb-ledger", ledgers["virtual"]], layout=VIRTUAL, iterations=4)
    needed, given = (_ledger(path)[3][0] for path in ledgers.values())
    assert len(needed) % 2 == 1
    assert given == [*needed, []]
    assert run.losses == pytest.approx(one.losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE)


@pytest.mark.parametrize(
    "options",
    [
        ["--microbatch-group-size-per-virtual-pipeline-stage", "3"],
        ["--overlap-p2p-communication-warmup-flush"],
    ],
    ids=lambda options: options[0],
)
def test_other_orders_of_the_schedule(
    options: list[str], toy_data: Path, start_checkpoint: Path, one_process: dict[str, Run]
) -> None:
    """Groups of three with a rest of two; messages that are asked for a pass earlier."""
    args = [*_packed("plain", toy_data, start_checkpoint), *EVALUATION, *options]
    run = train(args, layout=VIRTUAL, iterations=ITERATIONS)
    assert run.losses == pytest.approx(one_process["plain"].losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(one_process["plain"].grad_norms, rel=RELATIVE)


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start checkpoint for four stages of two chunks."""
    folder = tmp_path_factory.mktemp("eight")
    args = ["--mock-data", "--save", folder, "--save-interval", "1", "--num-layers", "8"]
    train(args, iterations=1)
    return folder


@pytest.mark.slow
def test_five_micro_batches_on_four_stages_of_two_chunks(toy_data: Path, eight_layers: Path) -> None:
    """Refused in groups of four, the default; right in a group of five."""
    args = [*_packed("plain", toy_data, eight_layers), "--num-layers", "8", "--global-batch-size", "5"]
    layout = Layout(pp=4, vpp=2)
    with pytest.raises(RankFailure, match=r"ConfigError: --global-batch-size must give .* got 5, which gives 5"):
        train(args, layout=layout, iterations=3)
    one = train(args, iterations=3)
    grouped = [*args, "--microbatch-group-size-per-virtual-pipeline-stage", "5"]
    run = train(grouped, layout=layout, iterations=3)
    assert run.losses == pytest.approx(one.losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE)


REFUSED = [
    (
        ["--global-batch-size", "3"],
        r"--global-batch-size must give each of 1 replicas a number of micro-batches that 2 stages with 2 chunks take: "
        r"whole groups of 2, or a rest of at least 2 .* got 3, which gives 3",
    ),
    (
        ["--eval-iters", "1", "--eval-global-batch-size", "5"],
        "--eval-global-batch-size must give each of 1 replicas .* got 5, which gives 5",
    ),
    (
        ["--microbatch-group-size-per-virtual-pipeline-stage", "1"],
        "--microbatch-group-size-per-virtual-pipeline-stage must be >= --pipeline-model-parallel-size 2, got 1",
    ),
    (["--wlb-timeline", "times"], "--wlb-timeline must be unset with virtual pipeline stages in this version"),
]


@pytest.mark.parametrize("packer", ["plain", "makespan"])
@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=lambda v: v[-2] if isinstance(v, list) else "")
def test_what_does_not_fit_is_refused_by_name(
    options: list[str], sentence: str, packer: str, toy_data: Path, start_checkpoint: Path
) -> None:
    with pytest.raises(RankFailure, match=f"ConfigError: {sentence}"):
        train([*_packed(packer, toy_data, start_checkpoint), *options], layout=VIRTUAL, iterations=1)


def test_a_schedule_of_batch_sizes_is_checked_at_every_size(toy_data: Path) -> None:
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain"]
    args += ["--step-batch-size-schedule", "0:3 256:4 768:8"]
    with pytest.raises(RankFailure, match=r"ConfigError: --step-batch-size-schedule must give .* which gives 3"):
        train(args, layout=VIRTUAL, iterations=1, without=("--global-batch-size",))


def _shapes_in_the_order_of_no_chunks(undo: ExitStack) -> None:
    """As if every micro-batch went through all chunks before the next."""
    from megatron.wlb.patches.registry import replace
    from wlb.schedule import PipelineShape

    original = PipelineShape.arrivals

    def arrivals(self: Any, stage: int, count: int) -> Any:
        return tuple(tuple(sorted(order)) for order in original(self, stage, count))

    replace(undo, PipelineShape, "arrivals", arrivals)


def test_shapes_in_another_order_are_noticed(toy_data: Path, start_checkpoint: Path) -> None:
    """The control: tensors of the wrong length end the run with an error, not with a hang or another loss."""
    args = _packed("makespan", toy_data, start_checkpoint)
    with pytest.raises(RankFailure) as failure:
        train(args, layout=VIRTUAL, iterations=2, sabotage=_shapes_in_the_order_of_no_chunks, timeout_s=30)
    assert "did not end in time" not in str(failure.value)


def _print_counted_work(undo: ExitStack) -> None:
    import megatron.training.training as training

    from megatron.wlb.patches.registry import replace

    original = training.num_floating_point_operations

    def counted(*args: Any, **kwargs: Any) -> Any:
        print("counted", kwargs["total_real_tokens_in_batch"], kwargs["seqlen_squared_sum_in_batch"])
        return original(*args, **kwargs)

    replace(undo, training, "num_floating_point_operations", counted)


def test_the_work_of_a_step_is_counted_once(toy_data: Path, start_checkpoint: Path) -> None:
    """Not once a chunk, and not that of evaluation."""
    args = [*_packed("plain", toy_data, start_checkpoint), "--log-throughput", "--eval-iters", "1"]
    counts = []
    for layout in (Layout(), VIRTUAL):
        run = train([*args, "--eval-interval", "1"], layout=layout, iterations=2, sabotage=_print_counted_work)
        counts.append({line for line in run.log.splitlines() if line.startswith("counted")})
    assert len(counts[0]) == 2
    assert counts[1] == counts[0]


@pytest.mark.parametrize("packer", ["plain", "makespan"])
def test_resumed_a_run_trains_the_documents_of_an_unbroken_one(packer: str, toy_data: Path, tmp_path: Path) -> None:
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", packer, *OPTIONS[packer]]
    planned, replanned = tmp_path / "unbroken", tmp_path / "broken"
    unbroken = train([*args, "--wlb-ledger", planned], layout=VIRTUAL, iterations=ITERATIONS)
    saving = [*args, "--wlb-ledger", replanned, "--save", tmp_path, "--load", tmp_path, "--save-interval", "3"]
    losses = train([*saving, "--exit-interval", "3"], layout=VIRTUAL, iterations=ITERATIONS).losses
    assert len(losses) == 3
    losses += train(saving, layout=VIRTUAL, iterations=ITERATIONS).losses
    assert losses == pytest.approx(unbroken.losses, rel=1e-6)
    assert len(_ledger(planned)) == ITERATIONS
    assert _ledger(replanned) == _ledger(planned)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        *(pytest.param(wide, marks=pytest.mark.slow) for wide in (Layout(pp=2, dp=2), Layout(pp=2, vpp=2, dp=2))),
    ],
    ids=str,
)
def test_the_distributed_optimizer_trains_alike(
    layout: Layout, toy_data: Path, start_checkpoint: Path, one_process: dict[str, Run]
) -> None:
    args = [*_packed("makespan", toy_data, start_checkpoint), *EVALUATION, "--use-distributed-optimizer"]
    run = train(args, layout=layout, iterations=ITERATIONS)
    assert run.losses == pytest.approx(one_process["makespan"].losses, rel=RELATIVE)
    assert run.grad_norms == pytest.approx(one_process["makespan"].grad_norms, rel=RELATIVE)


@pytest.mark.parametrize(
    ("layout", "later", "options"),
    [
        (Layout(dp=2), Layout(dp=2), []),
        pytest.param(
            VIRTUAL,
            Layout(pp=2, dp=2),
            ["--dist-ckpt-optim-fully-reshardable", "--no-load-rng"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_distributed_optimizer_is_resumed(
    layout: Layout, later: Layout, options: list[str], toy_data: Path, tmp_path: Path
) -> None:
    """Several steps are compared: what is lost of Adam's state shows from the second on."""
    args = ["--data-path", toy_data, "--split", "100,0,0", "--wlb-packing", "plain", "--use-distributed-optimizer"]
    unbroken = train(args, layout=layout, iterations=ITERATIONS)
    saving = [*args, *options, "--save", tmp_path, "--load", tmp_path, "--save-interval", "3"]
    first = train([*saving, "--exit-interval", "3"], layout=layout, iterations=ITERATIONS)
    second = train(saving, layout=later, iterations=ITERATIONS)
    assert (len(first.losses), len(second.losses)) == (3, ITERATIONS - 3)
    assert first.losses + second.losses == pytest.approx(unbroken.losses, rel=1e-6)
    assert first.grad_norms + second.grad_norms == pytest.approx(unbroken.grad_norms, rel=1e-6)
