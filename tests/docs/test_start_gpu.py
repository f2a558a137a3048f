"""docs/start_gpu.md: its short run trains on a CPU, smaller, with the flags that stand in for fused kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, code_blocks
from tests.docs.parsing import ENTRY, Launch
from tests.docs.sandbox import Sandbox

PAGE = ROOT / "docs" / "start_gpu.md"
# A model of a second's run, in float32 so that losses can be compared closely.
SWAPS = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "192",
    "--num-attention-heads": "2",
    "--seq-length": "512",
    "--max-position-embeddings": "512",
    "--train-iters": "2",
    "--vocab-size": "200",
}
CPU = ("--distributed-backend", "gloo", "--use-cpu-initialization")


def _stand_ins() -> list[str]:
    """The page's flags for a machine without Transformer Engine and Apex."""
    (text,) = [block.text for block in code_blocks(PAGE) if block.text.startswith("--transformer-impl")]
    return text.split()


@pytest.mark.slow
def test_the_short_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(tmp_path, monkeypatch)
    (block,) = [block.text for block in code_blocks(PAGE) if block.language == "bash"]
    sandbox.launch(block)
    plain, packed = (Launch.of(line) for line in sandbox.launches())
    assert packed.argv == plain.argv[:-1], "the two runs differ in the packer alone"
    losses = [_losses(launch, tmp_path) for launch in (plain, packed)]
    assert len(losses[0]) == int(SWAPS["--train-iters"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _losses(launch: Launch, folder: Path) -> list[float]:
    """Of each step, as logged."""
    argv = [word for word in launch.argv if word != "--bf16"]
    for name, value in SWAPS.items():
        argv[argv.index(name) + 1] = value
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "1",
                str(ROOT / ENTRY),
            ),
            *(*argv, *_stand_ins(), *CPU),
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [float(loss) for loss in re.findall(r"iteration +\d+/.*lm loss: (\S+)", done.stdout + done.stderr)]
