"""A scratch copy of the repository in which commands of the documentation run."""

from __future__ import annotations

import os
import runpy
import shlex
import struct
import subprocess
import sys
from argparse import ArgumentParser
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import ROOT, words_of

_LINKED = ("wlb", "megatron", "tools", "benchmarks", "scripts", "docker", "pretrain_gpt_wlb.py", "constraints.txt")
_SHELL_ONLY = set("><|;&$")
_TIMEOUT_S = 120.0


# Each writes the trainer's arguments, after those of torchrun that say how many ranks there are.
_STAND_INS = {
    "torchrun": 'printf "%q " "$@" >>"$record"\necho >>"$record"\n',
    # Slurm sets SLURM_NTASKS from --nodes and the script's eight tasks a node.
    "sbatch": """nodes=8
while [[ $1 == -* ]]; do
    if [[ $1 == --nodes=* ]]; then nodes=${1#--nodes=}; fi
    shift
done
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST='node[0-7]' SLURM_NTASKS=$((8 * nodes)) SLURM_SUBMIT_DIR=$PWD
exec bash "$@"
""",
    "srun": """while [[ $1 == -* ]]; do shift; done
printf '%s ' --nproc-per-node "$SLURM_NTASKS" >>"$record"
DRY_RUN=1 SLURM_PROCID=0 SLURM_LOCALID=0 "$@" >>"$record"
""",
    "scontrol": "if [[ $1 == show ]]; then echo node0; fi\n",
}


class _ArgumentsTaken(BaseException):
    """The parser took the arguments; nothing more is wanted."""


class Sandbox:
    """A folder with the repository's code by link, empty `docs/images` and `runs`, and a reader's own files.

    `lengths.txt` (400 lengths), `notes/` and `papers/` (a few texts), small `runs/corpus` and `data/`, and
    stand-ins for the programs that start a cluster's ranks, which write down how they were called.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        for name in _LINKED:
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        for name in ("docs/images", "runs", "notes", "papers", "bin"):
            (folder / name).mkdir(parents=True)
        rng = np.random.default_rng(7)
        lengths = np.where(rng.random(400) < 0.05, rng.integers(16384, 131072, 400), rng.integers(50, 6000, 400))
        (folder / "lengths.txt").write_text("\n".join(map(str, lengths)) + "\n")
        for i in range(40):
            text = "".join(f"Line {j} of note {i}: {(i * 37 + j * 11) % 97} apples.\n" for j in range(3 + i))
            (folder / ("notes" if i % 2 else "papers") / f"{i}.md").write_text(text)
        (folder / "runs/corpus").mkdir()
        (folder / "data").mkdir()
        (folder / "data/tokenizer.model").touch()
        for prefix in ("runs/corpus/corpus_text_document", "data/web_text_document", "data/code_text_document"):
            _write_index(folder / prefix, lengths[:300] // 40 + 2)
        self._record = folder / "launches"
        for name, body in _STAND_INS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/usr/bin/env bash\nset -euo pipefail\nrecord={shlex.quote(str(self._record))}\n{body}")
            path.chmod(0o755)

    def launches(self) -> list[str]:
        """Arguments of every call of torchrun so far, quoted as for a shell."""
        return self._record.read_text().splitlines() if self._record.exists() else []

    def launch(self, text: str) -> None:
        """Start training as a page says, up to the trainer's arguments."""
        # Scripts that start torchrun through Python print that command instead.
        line = self._shell(f"DRY_RUN=1\nexport DRY_RUN\n{text}" if "scripts/train_" in text else text)
        if "scripts/train_" in text:
            with self._record.open("a") as record:
                record.write(line)

    def run(self, text: str) -> None:
        """Run a command as it stands; a Python script of the repository in this process, where imports are warm.

        Raises:
            AssertionError: with the end of what it printed, when it fails.
        """
        words = words_of(text)
        if words[0].endswith(".py"):
            words.insert(0, "python")
        if words[0] == "python" and words[1].endswith(".py") and not _SHELL_ONLY & set(text):
            code, printed = self._call(words[1], words[2:])
        else:
            self._shell(text)
            return
        assert code == 0, f"exit code {code} of: {text}\n{printed[-2000:]}"

    def parse(self, text: str) -> None:
        """Let the script's own parser take the arguments, and stop there."""
        words = words_of(text)
        original = ArgumentParser.parse_args

        def parse_args(parser: ArgumentParser, *args: Any, **kwargs: Any) -> None:
            original(parser, *args, **kwargs)
            raise _ArgumentsTaken

        with self._monkeypatch.context() as patched:
            patched.setattr(ArgumentParser, "parse_args", parse_args)
            try:
                code, printed = self._call(words[1], words[2:])
            except _ArgumentsTaken:
                return
        raise AssertionError(f"the parser was not reached, exit code {code}: {text}\n{printed[-2000:]}")

    def _call(self, script: str, argv: list[str]) -> tuple[int, str]:
        printed = StringIO()
        with self._monkeypatch.context() as patched:
            patched.chdir(self.folder)
            patched.setattr(sys, "argv", [script, *argv])
            patched.setattr(sys, "path", [str(self.folder), *sys.path])
            try:
                with redirect_stdout(printed), redirect_stderr(printed):
                    runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                return (end.code if isinstance(end.code, int) else int(end.code is not None)), printed.getvalue()
        return 0, printed.getvalue()

    def _shell(self, text: str) -> str:
        """What it printed to stdout."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode} of: {text}\n{(done.stdout + done.stderr)[-2000:]}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return os.environ | {
            "PATH": path,
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "WLB_VENV": sys.prefix,
            "MPLBACKEND": "Agg",
        }


def _write_index(prefix: Path, lengths: Any) -> None:
    """Documents of these stored lengths, all tokens 0: without Megatron, whose import takes ten seconds."""
    ends = np.cumsum(lengths)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1)
    offsets = 2 * np.concatenate([[0], ends[:-1]])
    parts = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    prefix.with_suffix(".bin").write_bytes(bytes(2 * int(ends[-1])))


def files_named(text: str) -> list[str]:
    """Files of the repository that a command names."""
    folders = ("scripts/", "tools/", "benchmarks/", "docker/", "tests/")
    return [w for w in shlex.split(text) if w.startswith(folders) or w == "pretrain_gpt_wlb.py"]
