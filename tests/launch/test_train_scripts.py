"""The launchers scripts/train_*.sh: what they start, and what they refuse."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from tests.launch.fakes import MODELS, NODES, ROOT, Cluster
from wlb.packing import PACKERS
from wlb.sharding import SHARDERS


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.build(tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The four positional arguments, with files that exist, in a folder with a space."""
    folder = tmp_path / "some data"
    folder.mkdir()
    for name in ("tokenizer.model", "corpus.idx", "corpus.bin"):
        (folder / name).touch()
    return [folder / "ckpt", folder / "tb", folder / "tokenizer.model", folder / "corpus"]


@pytest.mark.parametrize("model", MODELS)
def test_one_command_a_node_starts_torchrun(model: str, cluster: Cluster, files: list[Path]) -> None:
    nodes = {"NNODES": str(NODES[model]), "NODE_RANK": "3", "MASTER_ADDR": "node17", "MASTER_PORT": "2900"}
    done = cluster.train(model, *files, **nodes)
    assert done.returncode == 0, done.stderr
    (call,) = cluster.calls("python")
    assert call.argv[:2] == ["-m", "torch.distributed.run"]
    wanted = {"--nnodes": nodes["NNODES"], "--node-rank": "3", "--nproc-per-node": "8", "--master-addr": "node17"}
    assert {option: call.value(option) for option in wanted} == wanted
    assert call.value("--master-port") == "2900"
    assert str(ROOT / "pretrain_gpt_wlb.py") in call.argv
    assert call.value("--save") == call.value("--load") == str(files[0]), "a job that starts again goes on"
    assert call.value("--tensorboard-dir") == str(files[1])
    assert call.value("--tokenizer-model") == str(files[2])
    assert call.value("--tokenizer-type") == "SentencePieceTokenizer"
    assert call.value("--data-path") == str(files[3])
    assert "--exit-signal-handler" in call.argv
    assert files[0].is_dir()
    assert files[1].is_dir()
    assert call.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert call.env["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert int(call.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 30


def test_one_node_needs_no_address(cluster: Cluster) -> None:
    done = cluster.train("7b_128k", "c", "t", "MOCK", "MOCK", TP="4", CP="2", PP="1")
    assert done.returncode == 0, done.stderr
    (call,) = cluster.calls("python")
    assert [call.value(o) for o in ("--nnodes", "--node-rank", "--master-addr")] == ["1", "0", "127.0.0.1"]
    assert call.value("--tokenizer-type") == "NullTokenizer"
    assert "--mock-data" in call.argv
    assert "--data-path" not in call.argv


@pytest.mark.parametrize("model", MODELS)
def test_the_process_of_a_task_is_training_itself(model: str, cluster: Cluster) -> None:
    """srun signals the process it started: no shell and no torchrun may stand in between."""
    variables = {"LAUNCHER": "task", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NTASKS": str(8 * NODES[model])}
    done = cluster.train(model, "c", "t", "MOCK", "MOCK", **variables, MASTER_ADDR="node17", MASTER_PORT="2900")
    assert done.returncode == 0, done.stderr
    (call,) = cluster.calls("python")
    assert call.argv[0] == str(ROOT / "pretrain_gpt_wlb.py")
    ranks = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": variables["SLURM_NTASKS"]}
    assert {name: call.env[name] for name in ranks} == ranks
    assert (call.env["MASTER_ADDR"], call.env["MASTER_PORT"]) == ("node17", "2900")


def test_numbers_come_from_the_environment_and_flags_come_last(cluster: Cluster) -> None:
    numbers = {
        "SEQ_LENGTH": "65536",
        "NUM_LAYERS": "24",
        "HIDDEN_SIZE": "2048",
        "LR": "1e-4",
        "TRAIN_ITERS": "77",
        "GLOBAL_BATCH_SIZE": "64",
        "WLB_PACKING": "wlb",
        "WLB_CP_SHARDING": "adaptive",
        "VOCAB_SIZE": "512",
        "WLB_MAX_DELAY_STEPS": "0",
        "SAVE_INTERVAL": "9",
        "PRECISION": "fp16",
        "RECOMPUTE": "full",
    }
    one_node = {"TP": "2", "CP": "2", "PP": "2"}
    done = cluster.train("7b_128k", "c", "t", "MOCK", "MOCK", "--", "--seed", "5", **numbers, **one_node)
    assert done.returncode == 0, done.stderr
    (call,) = cluster.calls("python")
    for name in ("SEQ_LENGTH", "NUM_LAYERS", "HIDDEN_SIZE", "LR", "TRAIN_ITERS", "GLOBAL_BATCH_SIZE", "WLB_PACKING"):
        assert call.value("--" + name.lower().replace("_", "-")) == numbers[name]
    assert call.value("--tensor-model-parallel-size") == "2"
    assert call.value("--recompute-granularity") == "full"
    assert "--fp16" in call.argv
    assert "--bf16" not in call.argv
    assert call.argv[-2:] == ["--seed", "5"]


def test_a_blend_is_one_argument(cluster: Cluster, files: list[Path], tmp_path: Path) -> None:
    for name in ("a.idx", "a.bin", "b.idx", "b.bin"):
        (tmp_path / name).touch()
    one_node = {"TP": "8", "CP": "1", "PP": "1"}
    done = cluster.train("7b_128k", *files[:3], "0.7 a .3 b", "--lr-warmup-iters", "1", **one_node)
    assert done.returncode == 0, done.stderr
    (call,) = cluster.calls("python")
    place = call.argv.index("--data-path")
    assert call.argv[place + 1 : place + 6] == ["0.7", "a", ".3", "b", "--split"]


def test_a_dry_run_prints_the_command_and_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.train("7b_128k", "c", "t", "MOCK", "MOCK", TP="8", CP="1", PP="1", DRY_RUN="1")
    assert done.returncode == 0
    assert "torch.distributed.run --nnodes 1" in done.stdout
    before, _, _ = done.stdout.partition(" -m torch")
    env, *variables, _python = shlex.split(before)
    assert env == "env"
    exported = dict(word.split("=", 1) for word in variables)
    assert exported["CUDA_DEVICE_MAX_CONNECTIONS"] == exported["PYTHONUNBUFFERED"] == "1"
    assert exported["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert "expandable_segments:True" in exported["PYTORCH_CUDA_ALLOC_CONF"]
    assert "--wlb-packing makespan" in done.stdout
    assert not cluster.calls("python")
    assert not (tmp_path / "c").exists()


ONE_NODE = {"TP": "8", "CP": "1", "PP": "1"}
REFUSED = [
    ([], {}, "CHECKPOINT_DIR must be given as argument 1, got"),
    (["c", "t", "MOCK"], {}, "DATA_PREFIX must be given as argument 4, got"),
    (["c", "t", "MOCK", "--bf16"], {}, "DATA_PREFIX must be given as argument 4, got --bf16"),
    (["c", "t", "nowhere.model", "MOCK"], {}, "TOKENIZER_MODEL must be a file, a folder or MOCK, got nowhere.model"),
    (["c", "t", "MOCK", "nowhere"], {}, "DATA_PREFIX must name .bin/.idx data or be MOCK, but nowhere.idx is not a"),
    (["c", "t", "MOCK", "0.5 nowhere"], {}, "but nowhere.idx is not a file"),
    (["c", "t", "MOCK", "MOCK"], {"TP": "3"}, "must be a multiple of TP x CP x PP = 3 x 1 x 1 = 3, got 1 x 8"),
    (["c", "t", "MOCK", "MOCK"], {"GPUS_PER_NODE": "0"}, "must be a multiple of TP x CP x PP = 8 x 1 x 1 = 8, got 1 x"),
    (["c", "t", "MOCK", "MOCK"], {"NNODES": "2"}, "MASTER_ADDR must name the first node and NODE_RANK this one with"),
    (["c", "t", "MOCK", "MOCK"], {"PRECISION": "int4"}, "PRECISION must be bf16, fp16 or fp32, got int4"),
    (["c", "t", "MOCK", "MOCK"], {"RECOMPUTE": "some"}, "RECOMPUTE must be none, modules or full, got some"),
    (["c", "t", "MOCK", "MOCK"], {"LAUNCHER": "mpi"}, "LAUNCHER must be torchrun or task, got mpi"),
    (["c", "t", "MOCK", "MOCK"], {"LAUNCHER": "task"}, "error: SLURM_NTASKS must be set with LAUNCHER=task: srun"),
    (
        ["c", "t", "MOCK", "MOCK"],
        {"LAUNCHER": "task", "SLURM_NTASKS": "8", "MASTER_ADDR": "n", "MASTER_PORT": "29"},
        "error: SLURM_PROCID must be set with LAUNCHER=task",
    ),
    (
        ["c", "t", "MOCK", "MOCK"],
        {"NODE_RANK": "9", "NNODES": "8", "MASTER_ADDR": "n"},
        "from 0 to 7 with NNODES=8, got 9",
    ),
    (["c", "t", "MOCK", "MOCK"], {"NODE_RANK": "x"}, "NODE_RANK must be a number from 0 to 0 with NNODES=1, got x"),
    (
        ["c", "t", "MOCK", "MOCK"],
        {"WLB_PACKING": "makspan"},
        f"must be one of {' '.join(sorted(PACKERS))}, got makspan",
    ),
    (["c", "t", "MOCK", "MOCK"], {"WLB_CP_SHARDING": "hybird"}, f"must be one of {' '.join(SHARDERS)}, got hybird"),
    (["c", "t", "MOCK", "0.7 a 0.3"], {}, "a weight of a blend must be followed by a prefix, got 0.3 at its end"),
    (["c", "t", "MOCK", "0.7 0.3 a"], {}, "a weight of a blend must be followed by a prefix, got 0.7 0.3"),
    (["c", "t", "MOCK", "0.7 a b"], {}, "all prefixes of a blend must have a weight, or none, got 1 for 2 in 0.7 a b"),
    (["c", "t", "MOCK", "a.bin"], {}, "but a.bin.idx is not a file: give the prefix without .bin"),
    (["c", "t", "MOCK", "MOCK"], {"WLB_VENV": "nowhere"}, "WLB_VENV must name a virtual environment, but nowhere/bin"),
]


@pytest.mark.parametrize(("arguments", "variables", "sentence"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_mistakes_are_refused_in_a_sentence(
    arguments: list[str], variables: dict[str, str], sentence: str, cluster: Cluster, tmp_path: Path
) -> None:
    for name in ("a.idx", "a.bin", "b.idx", "b.bin"):
        (tmp_path / name).touch()
    done = cluster.train("7b_128k", *arguments, **(ONE_NODE | variables))
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not cluster.calls("python")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("script", "arguments"), [("quickstart_train.sh", ["f", "c", "pp2", "1"]), ("quickstart_corpus.sh", ["f"])]
)
def test_the_quickstarts_parts_say_that_the_environment_is_missing(
    script: str, arguments: list[str], cluster: Cluster, tmp_path: Path
) -> None:
    """In a copy, as this checkout may have one."""
    (tmp_path / "copy/scripts").mkdir(parents=True)
    copy = tmp_path / "copy/scripts" / script
    shutil.copy(ROOT / "scripts" / script, copy)
    done = cluster.run(copy, *arguments, WLB_VENV="")
    assert done.returncode == 2
    assert done.stderr == "error: .venv/bin/python must be there: run scripts/setup.sh first, or set WLB_VENV\n"
    done = cluster.run(copy, *arguments, WLB_VENV="nowhere")
    assert "error: WLB_VENV must name a virtual environment, but nowhere/bin/python is not there" in done.stderr


def test_the_allocator_understands_its_settings(cluster: Cluster) -> None:
    """A misspelt key stops a CUDA run at its first allocation; torch's parser needs no device."""
    cluster.train("7b_128k", "c", "t", "MOCK", "MOCK", **ONE_NODE)
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(cluster.calls("python")[0].env["PYTORCH_CUDA_ALLOC_CONF"])
        with pytest.raises(ValueError, match="roundups"):
            torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:15")
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
