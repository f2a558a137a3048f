"""How each command of the documentation is checked. A command that no row fits fails the tests.

Ways, from strongest to weakest:

* run: as a reader would, in a scratch copy of the repository; `swaps` make it smaller, with the reason.
* parse: the tool's own parser takes the arguments; running it takes too long.
* train: a launch of training, with a stand-in for torchrun; its arguments go through Megatron's parser and ours.
* listed: cannot be run here, for the reason given; the files that it names must exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.docs.pages import Command

# A training script's flags, where a page says `<your flags>`.
YOUR_FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-4 --bf16 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 1000 --mock-data"
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row. `command`: a regular expression of how the command begins; the first row that fits counts."""

    command: str
    how: Literal["run", "parse", "train", "listed"]
    swaps: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    slow: bool = False

    def fits(self, command: Command) -> bool:
        return re.match(self.command, command.text) is not None

    def text(self, command: Command) -> str:
        """The command with the swaps made. Each must change something."""
        text = command.text
        for old, new in (*self.swaps, *PLACEHOLDERS):
            text = text.replace(old, new)
        return text


# Names that pages use for something of the reader's.
PLACEHOLDERS = (
    ("lengths FILE", "lengths lengths.txt"),
    ("json OUT", "json out.json"),
    ("out FILE", "out picture.png"),
    ("layout LAYOUT", "layout pp2"),
    ("cp CP ", "cp 2 "),
    ("NAME", "hybrid"),
    ("torchrun ... ", "torchrun --nproc-per-node 8 "),
    ("<your flags>", YOUR_FLAGS),
)

FEWER = "fewer steps: a minute's run or more becomes a second"

WAYS: Sequence[Way] = (
    # Tools.
    Way(
        command=r"python tools/show_plan\.py .*--sharder contiguous",
        how="listed",
        reason="after the reader's own change; tests/docs/test_extending.py makes it",
    ),
    Way(command=r"python tools/show_plan\.py .*--out docs/images", how="run", slow=True),
    Way(command=r"python tools/show_plan\.py", how="run"),
    Way(command=r"tools/show_plan\.py", how="run"),
    Way(command=r"python tools/show_packing\.py .* --packers greedy wlb solver", how="run", slow=True),
    Way(command=r"python tools/show_packing\.py .*--out", how="run", slow=True),
    Way(command=r"python tools/show_packing\.py", how="run"),
    Way(
        command=r"python tools/build_corpus\.py",
        how="run",
        swaps=((" runs/corpus", " runs/corpus --max-bytes 400000 --vocab-size 400"),),
        reason="10 s for 32 MB of text",
        slow=True,
    ),
    Way(command=r"python tools/text_to_jsonl\.py", how="run"),
    Way(
        command=r"python tools/train_tokenizer\.py",
        how="run",
        swaps=(("8000", "300"),),
        reason="the reader's texts are more than the test's",
        slow=True,
    ),
    Way(command=r"python tools/preprocess_data\.py", how="run", slow=True),
    Way(
        command=r"(\.venv/bin/)?python tools/check_patches\.py",
        how="run",
        swaps=((".venv/bin/", ""),),
        reason="the environment may be another",
        slow=True,
    ),
    Way(
        command=r"python tools/report\.py",
        how="parse",
        reason="needs finished runs; tests/unit/report/test_report_tool.py has some",
    ),
    Way(command=r"python -c ", how="run"),
    # Benchmarks.
    Way(
        command=r"python benchmarks/packing\.py .*--packers plain,snake",
        how="listed",
        reason="after the reader's own change; tests/docs/test_extending.py makes it",
    ),
    Way(
        command=r"python benchmarks/packing\.py .*--delay-curve",
        how="parse",
        reason="replays the data for eight bounds: minutes",
    ),
    Way(
        command=r"python benchmarks/packing\.py .*--max-delay-steps 16",
        how="run",
        swaps=(("--steps 60", "--steps 2 --thresholds 32768 65536".replace(" 65536", ",65536")),),
        reason="thresholds by replay take up to 20 s",
    ),
    Way(
        command=r"(python )?benchmarks/packing\.py --steps 30 --packers wlb,solver",
        how="run",
        swaps=(("benchmarks", "python benchmarks"), ("--steps 30", "--lengths FILE --steps 2 --solver-seconds 0.1")),
        reason=FEWER,
        slow=True,
    ),
    Way(
        command=r"python benchmarks/packing\.py .*--cp 8",
        how="run",
        swaps=(("--steps 60", "--steps 2"),),
        reason=FEWER,
        slow=True,
    ),
    Way(
        command=r"python benchmarks/packing\.py",
        how="run",
        swaps=(("--steps 100", "--steps 2 --curve-steps 0"), ("--steps 60", "--steps 2")),
        reason=FEWER,
    ),
    Way(
        command=r"python benchmarks/cp_sharding\.py",
        how="run",
        swaps=(("--packs 60", "--packs 2"), (" --seeds 1,2,3,4,5", "")),
        reason=FEWER,
    ),
    Way(
        command=r"python benchmarks/solver_gap\.py",
        how="run",
        swaps=(
            ("4,8", "2"),
            ("12,24,40,60", "6"),
            ("--instances 6", "--instances 1"),
            ("--seconds 2", "--seconds 0.1"),
        ),
        reason="the solver is slow by design",
        slow=True,
    ),
    Way(command=r"python benchmarks/planning\.py", how="parse", reason="times planning for a minute"),
    Way(command=r"python benchmarks/launching_thread\.py", how="run", slow=True),
    Way(command=r"python benchmarks/schedule\.py", how="parse", reason="times evaluations for a minute"),
    Way(command=r"python benchmarks/preprocess\.py", how="parse", reason="nine pairs of runs", slow=True),
    Way(command=r"python benchmarks/cp_attention\.py", how="parse", reason="needs the quickstart's corpus", slow=True),
    Way(command=r"python benchmarks/end_to_end\.py", how="parse", reason="an hour of training"),
    Way(command=r"(nice -n 19 )?python benchmarks/convergence\.py", how="parse", reason="hours of training"),
    # Scripts.
    Way(
        command=r"(LAYOUT=\w+ )?scripts/quickstart\.sh",
        how="listed",
        reason="trains for minutes; tests/unit/report/test_quickstart_scripts.py has a stand-in",
    ),
    Way(command=r"scripts/test\.sh", how="listed", reason="it runs these tests"),
    Way(command=r"scripts/setup\.sh", how="listed", reason="installs 5 GB"),
    Way(
        command=r"scripts/gpu_check\.sh",
        how="parse",
        swaps=(("scripts/gpu_check.sh", "python tools/gpu_check.py"),),
        reason="needs a GPU; tests/unit/tools/test_gpu_check.py rehearses it",
    ),
    Way(command=r"source \.venv/bin/activate", how="listed", reason="a reader's shell; tests run in an environment"),
    Way(command=r"pip (install|download|wheel)", how="listed", reason="installs packages"),
    Way(
        command=r"(SP=|export C|for name in Init|gcc |LD_LIBRARY_PATH=)",
        how="listed",
        reason="builds Transformer Engine: 20 minutes and the CUDA toolkit",
    ),
    Way(command=r"docker ", how="listed", reason="needs Docker and a base image of 20 GB"),
    # Training.
    Way(command=r"(\w+=\S+ )*scripts/train_\w+\.sh", how="train"),
    Way(
        command=r"(\w+=\S+ )*sbatch .*--wlb-cost-profile",
        how="train",
        swaps=((" --wlb-cost-profile cost.json", ""),),
        reason="there is no such file yet",
    ),
    Way(command=r"(\w+=\S+ )*sbatch ", how="train"),
    Way(command=r"torchrun ", how="train"),
    Way(command=r"[A-Z]+_ARGS=\(", how="train", reason="an array that the launch below it uses"),
)


def way_of(command: Command) -> Way | None:
    return next((way for way in WAYS if way.fits(command)), None)
