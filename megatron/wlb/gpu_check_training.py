"""Short training runs for the GPU check: each a process of its own, started as a person would start it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from megatron.wlb.environment import APEX, TRANSFORMER_ENGINE, has_package
from wlb.report.training_log import LoggedStep, parse_log

ITERATIONS = 20
_TIMEOUT_S = 400
_VOCAB_SIZE = 255
_ENTRY = Path(__file__).resolve().parents[2] / "pretrain_gpt_wlb.py"
# By how much the losses of two packings of the same documents may differ, relative, at any of the iterations.
_SAME_DOCUMENTS = {"cuda": 2e-3, "cpu": 1e-5}


@dataclass(frozen=True, kw_only=True)
class TrainingScale:
    """Sizes of the run. documents: how many are generated."""

    num_layers: int
    hidden_size: int
    num_heads: int
    window_tokens: int
    global_batch: int
    documents: int


def training_check(
    scale: TrainingScale, folder: Path, device: Literal["cuda", "cpu"]
) -> tuple[str, Callable[[], tuple[bool, dict[str, Any]]]]:
    """What must hold, and the check of it.

    Three runs of `ITERATIONS` steps train pieces of the same documents: plain; wlb without delayed documents, which
    trains in each step what plain trains, packed otherwise; wlb as it is.
    """
    rule = (
        f"losses finite and falling by a tenth in {ITERATIONS} steps; plain and undelayed wlb equal within "
        f"{_SAME_DOCUMENTS[device]:g} at every step"
    )
    return rule, partial(_check, scale, folder, device)


def _check(scale: TrainingScale, folder: Path, device: Literal["cuda", "cpu"]) -> tuple[bool, dict[str, Any]]:
    data = write_documents(folder / "documents", scale)
    # No document of a window reaches a threshold beyond it, so none waits.
    undelayed = ["wlb", "--wlb-thresholds", str(scale.window_tokens + 1)]
    runs = {"plain": ["plain"], "undelayed": undelayed, "wlb": ["wlb"]}
    processes: list[subprocess.Popen[bytes]] = []
    logs = {name: folder / f"{name}.log" for name in runs}
    try:
        for name, packing in runs.items():
            command = [*_launcher(), str(_ENTRY), *_arguments(scale, data, device), "--wlb-packing", *packing]
            with logs[name].open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=_ENTRY.parent))
            if device == "cuda":
                # One at a time: two on one device would share its memory and tell nothing of its speed.
                processes[-1].wait(_TIMEOUT_S)
        steps = {name: _steps(p, log) for p, (name, log) in zip(processes, logs.items(), strict=True)}
    finally:
        for process in processes:
            process.kill()
    losses = {name: [s.loss if s.loss is not None else float("nan") for s in run] for name, run in steps.items()}
    apart = max(abs(a / b - 1) for a, b in zip(losses["plain"], losses["undelayed"], strict=True))
    measured: dict[str, Any] = {
        name: {
            "first_loss": losses[name][0],
            "final_loss": fmean(losses[name][-3:]),
            "tokens": sum(int(s.fields["tokens"]) for s in run),
            "imbalance_degree": fmean(s.fields["imbalance micro-batches"] for s in run),
            "step_s_median": sorted(s.elapsed_s for s in run)[len(run) // 2],
        }
        for name, run in steps.items()
    }
    measured["plain_undelayed_apart"] = apart
    falls = all(
        len(run) == ITERATIONS and bool(np.isfinite(run).all()) and fmean(run[-3:]) < 0.9 * run[0]
        for run in losses.values()
    )
    return falls and apart <= _SAME_DOCUMENTS[device], measured


def write_documents(prefix: Path, scale: TrainingScale) -> Path:
    """Write an index of documents with a long tail of lengths and tokens that can be learned; returns `prefix`."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(11)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    longest = 2 * scale.window_tokens
    for _ in range(scale.documents):
        length = int(np.clip(rng.lognormal(np.log(scale.window_tokens / 12), 1.2), 2, longest))
        tokens = (np.cumsum(rng.integers(1, 4, size=length)) + rng.integers(_VOCAB_SIZE)) % (_VOCAB_SIZE - 1)
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def _arguments(scale: TrainingScale, data: Path, device: Literal["cuda", "cpu"]) -> list[str]:
    window = str(scale.window_tokens)
    args = [
        *("--num-layers", str(scale.num_layers), "--hidden-size", str(scale.hidden_size)),
        *("--num-attention-heads", str(scale.num_heads), "--seq-length", window, "--max-position-embeddings", window),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--micro-batch-size", "1"),
        *("--global-batch-size", str(scale.global_batch), "--train-iters", str(ITERATIONS), "--eval-iters", "0"),
        *("--eval-interval", "1000", "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine"),
        *("--clip-grad", "1.0", "--log-interval", "1", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(_VOCAB_SIZE), "--data-path", str(data), "--split", "100,0,0"),
        *("--wlb-document-cut", "stream"),
    ]
    apex = has_package(APEX)
    if not apex:
        args.append("--no-gradient-accumulation-fusion")
    if device == "cpu" or not has_package(TRANSFORMER_ENGINE):
        args += ["--transformer-impl", "local", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion"]
        args += ["--no-bias-dropout-fusion", "--no-rope-fusion"]
        if not apex:
            args.append("--no-persist-layer-norm")
    if device == "cpu":
        return [*args, "--distributed-backend", "gloo", "--use-cpu-initialization"]
    return [*args, "--bf16"]


def _launcher() -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    return [sys.executable, *run, "--master-port", str(port)]


def _steps(process: subprocess.Popen[bytes], log: Path) -> tuple[LoggedStep, ...]:
    code = process.wait(_TIMEOUT_S)
    text = log.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"training ended with exit code {code}; the end of {log}:\n{text[-3000:]}")
    return parse_log(text).steps
