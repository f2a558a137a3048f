"""Stand-ins for what starts processes: each records its arguments and environment, then does what a test needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("7b_128k", "70b_128k")
NODES = {"7b_128k": 8, "70b_128k": 32}

# One line of JSON a call; BEHAVIOUR is what a fake does after that.
_RECORD = f"""#!{sys.executable} -SE
import json, os, signal, subprocess, sys, time
name = os.path.basename(sys.argv[0])
with open(os.environ["FAKE_CALLS"], "a") as calls:
    print(json.dumps({{"name": name, "argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid()}}), file=calls)
"""
# scancel signals the tasks of the job, as Slurm does; srun and the batch script do not see it.
_SCANCEL = """
signals = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("--signal=")]
for line in open(os.environ["FAKE_TASKS"]):
    os.kill(int(line), getattr(signal, "SIG" + signals[0]))
"""
_SCONTROL = """
if sys.argv[1:3] == ["show", "hostnames"]:
    print(os.environ.get("FAKE_HOST", "node17"), *[f"node{n}" for n in range(18, 50)], sep="\\n")
elif sys.argv[1] == os.environ.get("FAKE_SCONTROL_FAILS"):
    sys.exit(1)
"""
# srun starts its command once for each of FAKE_NUM_TASKS tasks and passes no signal on.
_SRUN = """
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
count = int(os.environ["FAKE_NUM_TASKS"])
tasks = []
with open(os.environ["FAKE_TASKS"], "w") as pids:
    for number in range(count):
        here = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number % 8)}
        if count > 1 or "FAKE_CLAIMED_TASKS" not in os.environ:
            here["SLURM_NTASKS"] = str(count)
        else:
            here["SLURM_NTASKS"] = os.environ["FAKE_CLAIMED_TASKS"]
        tasks.append(subprocess.Popen(command, env=os.environ | here))
        print(tasks[-1].pid, file=pids)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
# Training: FAKE_TRAIN says how it behaves when it is signalled.
_PYTHON = """
how = os.environ.get("FAKE_TRAIN", "ends")
if how == "fails":
    sys.exit(3)
if how != "ends":
    got = []
    signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    with open(os.environ["FAKE_READY"], "a") as ready:
        print("ready", file=ready, flush=True)
    deadline = time.monotonic() + 30
    while not got and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # saving
    with open(os.environ["FAKE_READY"], "a") as ready:
        print("saved" if got else "nobody told me", file=ready)
    sys.exit(0 if how == "saves" else 5)
"""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One recorded call of a stand-in."""

    name: str
    argv: list[str]
    env: dict[str, str]
    pid: int

    def value(self, option: str) -> str:
        """What follows `option`, or stands behind its `=`."""
        for place, word in enumerate(self.argv):
            if word == option:
                return self.argv[place + 1]
            if word.startswith(f"{option}="):
                return word.partition("=")[2]
        raise AssertionError(f"{option} is not in {self.argv}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A folder with the stand-ins and what they recorded."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> Cluster:
        (folder / "bin").mkdir(parents=True)
        fakes = {"srun": _SRUN, "scontrol": _SCONTROL, "scancel": _SCANCEL, "python": _PYTHON, "python3": _PYTHON}
        for name, behaviour in fakes.items():
            path = folder / "bin" / name
            path.write_text(_RECORD + behaviour)
            path.chmod(0o755)
        return cls(folder=folder)

    def environment(self, **more: str) -> dict[str, str]:
        """Nothing of the machine's own but what a shell needs, then `more`."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "WLB_VENV": str(self.folder),
            "FAKE_CALLS": str(self.folder / "calls.jsonl"),
            "FAKE_TASKS": str(self.folder / "tasks"),
            "FAKE_READY": str(self.folder / "ready"),
            "FAKE_NUM_TASKS": "1",
            **more,
        }

    def train(self, model: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run scripts/train_MODEL.sh in the folder."""
        return self.run(ROOT / f"scripts/train_{model}.sh", *arguments, **variables)

    def run(self, script: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *map(str, arguments)],
            env=self.environment(**variables),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self, name: str) -> list[Call]:
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for line in lines if (call := Call(**json.loads(line))).name == name]


def slurm_variables(model: str, **more: Any) -> dict[str, str]:
    """What Slurm sets for a batch script; the fake srun starts one task and says it is the first of all."""
    nodes = NODES[model]
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "wlb",
        "SLURM_JOB_NODELIST": f"node[17-{16 + nodes}]",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "FAKE_CLAIMED_TASKS": str(8 * nodes),
        **more,
    }
