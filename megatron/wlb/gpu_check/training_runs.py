"""The short training runs of the GPU check: each a process of its own, of the script that a person would start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch

from megatron.wlb.environment import APEX, TRANSFORMER_ENGINE, has_package
from wlb.cost import TransformerShape
from wlb.ports import free_port
from wlb.report.training_log import LoggedStep, parse_log

ITERATIONS = 20
WARM_UP = 4
PACKINGS: dict[str, list[str]] = {
    # All but delay cut documents where plain does, so that they train the same pieces.
    "plain": ["plain", "--wlb-document-cut", "stream"],
    "exact": ["makespan", "--wlb-document-cut", "stream"],
    "delay": ["makespan", "--wlb-max-delay-steps", "8"],
    "wlb": ["wlb", "--wlb-document-cut", "stream"],
}
_TIMEOUT_S = 240
_VOCAB_SIZE = 255
_PADDED_VOCAB_SIZE = 256
_FFN_MULTIPLE = 4
_ENTRY = Path(__file__).resolve().parents[3] / "pretrain_gpt_wlb.py"


@dataclass(frozen=True, kw_only=True)
class TrainingScale:
    """Sizes of the run. documents: how many are generated.

    rounds: of all runs, the second in the opposite order, so that a device that slows down does so for all.
    together: runs at one time.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    window_tokens: int
    global_batch: int
    documents: int
    rounds: int
    together: int

    @property
    def shape(self) -> TransformerShape:
        """Of the model: as Megatron's defaults have it, with --swiglu."""
        return TransformerShape(
            hidden_size=self.hidden_size,
            ffn_hidden_size=_FFN_MULTIPLE * self.hidden_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_query_groups=self.num_heads,
            head_size=self.hidden_size // self.num_heads,
            vocab_size=_PADDED_VOCAB_SIZE,
            gated=True,
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run printed, and the lengths of the documents of each micro-batch, by step."""

    steps: tuple[LoggedStep, ...]
    lengths: list[list[list[int]]]

    @property
    def losses(self) -> list[float]:
        return [s.loss if s.loss is not None else float("nan") for s in self.steps]

    def token_s(self) -> float:
        """Median over steps of seconds per token, warm-up left out."""
        return median(s.elapsed_s / s.fields["tokens"] for s in self.steps[WARM_UP:])


def train(
    scale: TrainingScale, folder: Path, data: Path, device: Literal["cuda", "cpu"], names: Sequence[str], number: int
) -> dict[str, Run]:
    """Runs of these `PACKINGS` at the same time; `number` tells their files in `folder` from those of other rounds."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    files = {name: (folder / f"{name}{number}.log", folder / f"{name}{number}.jsonl") for name in names}
    try:
        for name, (log, ledger) in files.items():
            flags = [*PACKINGS[name], "--wlb-ledger", str(ledger)]
            command = [sys.executable, str(_ENTRY), *_arguments(scale, data, device), "--wlb-packing", *flags]
            with log.open("wb") as file:
                processes[name] = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, cwd=_ENTRY.parent, env=_environment()
                )
        return {name: _run_of(processes[name], *files[name]) for name in names}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _run_of(process: subprocess.Popen[bytes], log: Path, ledger: Path) -> Run:
    code = process.wait(_TIMEOUT_S)
    text = log.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"training ended with exit code {code}; the end of {log.name}:\n{text[-3000:]}")
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    lengths = [[[d[3] for d in documents] for documents in row["replicas"][0]] for row in rows]
    return Run(steps=parse_log(text).steps, lengths=lengths[:ITERATIONS])


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
        *("--ffn-hidden-size", str(_FFN_MULTIPLE * scale.hidden_size), "--num-attention-heads", str(scale.num_heads)),
        *("--seq-length", window, "--max-position-embeddings", window),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--micro-batch-size", "1"),
        *("--global-batch-size", str(scale.global_batch), "--train-iters", str(ITERATIONS), "--eval-iters", "0"),
        *("--eval-interval", "1000", "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine"),
        *("--clip-grad", "1.0", "--log-interval", "1", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(_VOCAB_SIZE), "--make-vocab-size-divisible-by", "128"),
        *("--data-path", str(data), "--split", "100,0,0"),
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


def _environment() -> dict[str, str]:
    """Of a single rank, as a launcher would set it: a launcher of each run's own would take seconds to load."""
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return os.environ | rank
