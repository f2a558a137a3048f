"""What the launchers start parses: each command line goes through Megatron's and our own arguments, rules and plans.

Everything that happens before the first process group exists runs, for the cluster's number of processes, up to the
call of `megatron.training.pretrain`. Only what Transformer Engine itself answers for is left out, as it need not be
here: its patch (tests/patches checks that) and its fused rotation. That the CUDA path then trains only a GPU can show:
scripts/gpu_check.sh.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.data import write_index
from tests.harness.processes import RankFailure, run_ranks
from tests.launch.fakes import MODELS, NODES, ROOT, Call, Cluster, slurm_variables

ONE_NODE = {"TP": "8", "CP": "1", "PP": "1", "RECOMPUTE": "full"}


def _parsed(calls: list[tuple[list[str], dict[str, str], int]]) -> list[dict[str, Any]]:
    """For each (flags, environment, processes) what training would be given. Runs in a rank."""
    import os
    from contextlib import ExitStack

    import megatron.training
    from megatron.training.global_vars import get_args, unset_global_variables

    from megatron.wlb import context_parallel, environment
    from megatron.wlb.patches.registry import replace
    from megatron.wlb.trainer import run

    found: list[dict[str, Any]] = []

    def pretrain(_config: Any, provider: Any, _model_type: Any, _forward_step: Any) -> None:
        args = get_args()
        names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        found.append(
            {
                "layout": [getattr(args, name) for name in names] + [args.data_parallel_size],
                "shape": [args.num_layers, args.hidden_size, args.num_attention_heads, args.num_query_groups],
                "seq_length": args.seq_length,
                "packing": args.wlb_packing,
                "sharding": args.wlb_cp_sharding,
                "bf16": args.bf16,
                "sequence_parallel": args.sequence_parallel,
                "per_token": args.calculate_per_token_loss,
                "recompute": [args.recompute_granularity, args.recompute_modules],
                "handles_signal": args.exit_signal_handler,
                "global_batch_size": args.global_batch_size,
                "is_distributed": provider.is_distributed,
            }
        )

    with ExitStack() as undo:
        replace(undo, megatron.training, "pretrain", pretrain)
        replace(undo, environment, "has_package", lambda _name: True)
        replace(undo, context_parallel, "shards_transformer_engine", lambda _args: False)
        for flags, environment, num_processes in calls:
            os.environ.update(environment, WORLD_SIZE=str(num_processes), RANK="0", LOCAL_RANK="0")
            try:
                run([*flags, "--no-rope-fusion"])
            finally:
                unset_global_variables()
    return found


def _flags(call: Call) -> list[str]:
    return call.argv[call.argv.index(str(ROOT / "pretrain_gpt_wlb.py")) + 1 :]


def _environment(call: Call) -> dict[str, str]:
    """What the launcher set of what training reads."""
    return {name: value for name, value in call.env.items() if name.startswith(("CUDA_DEVICE", "NVTE_", "PYTORCH_"))}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], dict[str, str], int]]:
    """Name of a way to start -> what training is started with."""
    folder = tmp_path_factory.mktemp("commands")
    cluster = Cluster.build(folder)
    data = write_index(folder / "corpus", [list(range(1, 400))] * 100)
    for model in MODELS:
        nodes = {"NNODES": str(NODES[model]), "NODE_RANK": "0", "MASTER_ADDR": "node17"}
        assert cluster.train(model, "c", "t", "MOCK", data, **nodes).returncode == 0
        variables = slurm_variables(model)
        done = cluster.run(ROOT / "scripts/slurm/train.sbatch", model, "c", "t", "MOCK", "MOCK", **variables)
        assert done.returncode == 0, done.stderr
    assert cluster.train("7b_128k", "c", "t", "MOCK", "MOCK", **ONE_NODE).returncode == 0
    more = {"RECOMPUTE": "modules", "WLB_PACKING": "plain", "WLB_CP_SHARDING": "per_document", "PRECISION": "fp16"}
    twice = {"NNODES": "64", "NODE_RANK": "0", "MASTER_ADDR": "n", "TP": "8", "CP": "8", "GLOBAL_BATCH_SIZE": "64"}
    assert cluster.train("70b_128k", "c", "t", "MOCK", "MOCK", **more, **twice).returncode == 0
    calls = cluster.calls("python")
    worlds = [64, 64, 256, 256, 8, 512]
    names = ["7b torchrun", "7b slurm", "70b torchrun", "70b slurm", "7b one node", "70b inside nodes"]
    return {
        name: (_flags(call), _environment(call), world) for name, call, world in zip(names, calls, worlds, strict=True)
    }


@pytest.fixture(scope="module")
def parsed(commands: dict[str, tuple[list[str], dict[str, str], int]]) -> dict[str, dict[str, Any]]:
    return dict(zip(commands, run_ranks(_parsed, 1, list(commands.values()))[0], strict=True))


def test_every_command_line_passes_every_rule(parsed: dict[str, dict[str, Any]]) -> None:
    for name, found in parsed.items():
        assert found["seq_length"] == 131072, name
        assert found["per_token"], name
        assert found["sequence_parallel"], name
        assert found["handles_signal"], name
        assert found["is_distributed"], name


def test_models_and_layouts_are_those_of_the_paper(parsed: dict[str, dict[str, Any]]) -> None:
    """TP, CP, PP, DP; layers, hidden size, heads, key and value heads."""
    for way in ("torchrun", "slurm"):
        small, large = parsed[f"7b {way}"], parsed[f"70b {way}"]
        assert small["layout"] == [8, 2, 4, 1]
        assert small["shape"][:3] == [32, 4096, 32]
        assert large["layout"] == [16, 4, 4, 1]
        assert large["shape"] == [80, 8192, 64, 8]
        assert [run["packing"] for run in (small, large)] == ["makespan"] * 2
        assert [run["sharding"] for run in (small, large)] == ["hybrid"] * 2
        assert small["bf16"]
        assert large["bf16"]
    assert parsed["7b one node"]["layout"] == [8, 1, 1, 1]
    assert parsed["7b one node"]["recompute"][0] == "full"
    inside = parsed["70b inside nodes"]
    assert inside["layout"] == [8, 8, 4, 2]
    assert inside["global_batch_size"] == 64
    assert inside["recompute"] == ["selective", ["layernorm", "mlp"]]
    assert (inside["packing"], inside["sharding"], inside["bf16"]) == ("plain", "per_document", False)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--micro-batch-size", "2"], "--micro-batch-size must be 1 with --wlb-packing, got 2"),
        (["--attention-dropout", "0.1"], "--attention-dropout must be 0 with --wlb-packing, got 0.1"),
        (["--tp-comm-overlap"], "--tp-comm-overlap must be off"),
    ],
)
def test_a_flag_that_breaks_a_rule_is_found(
    flags: list[str], sentence: str, commands: dict[str, tuple[list[str], dict[str, str], int]]
) -> None:
    """The control: the rules of a CUDA cluster are asked, not skipped for want of one."""
    given, environment, world = commands["7b slurm"]
    with pytest.raises(RankFailure) as failure:
        run_ranks(_parsed, 1, [([*given, *flags], environment, world)])
    assert sentence in str(failure.value)
