"""Trains a small GPT for thousands of steps under each way to pack, and compares what was learnt.

    nice -n 19 python benchmarks/convergence.py --runs plain,makespan,wlb,makespan+delay64 --seeds 1,2 \\
        --json OUT --png docs/images/convergence.png

A run is a packer with options, PACKER[+delayK][+stream|+window]: delayK is --wlb-max-delay-steps K, the last word
--wlb-document-cut. Runs of one seed begin with the same weights and read the same stream of documents in the same
order, with the same token budget a step, learning rate and number of steps. Each is one process; --jobs of them run
side by side. An interrupted benchmark goes on where it was: runs from their last checkpoint, all else from the files
that are missing.

Compared are
  training loss      as Megatron logs it, over tokens trained;
  held-out loss      of documents that no run trains, cut only where they are longer than the window, by bucket of
                     document length, from checkpoints, in one code path (megatron/wlb/convergence_probe.py);
  weight of a token  in its step's mean loss, over what it is in a step of exactly the token budget: budget / tokens
                     of the step, from the ledger;
  gradient noise     of whole steps, all at the same weights, those of plain with the same seed: tr(S) / |G|^2, S the
                     covariance of the gradients of --noise-steps successive steps, G their mean without its own
                     noise (McCandlish et al., arXiv 1812.06162, "simple noise scale", counted in steps).
Standard errors are over documents for held-out losses and by leaving out one step for gradient noise. What a
difference must exceed to mean anything is what makespan without delay shows: each of its steps trains the same tokens
as plain's, so that all its differences come from the order in which sums are rounded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.convergence_jobs import Job, RunsFailed, only_user_of, run_jobs
from wlb.command_line import run_tool
from wlb.data.atomic_files import atomic_path
from wlb.data.index_file import check_index, index_lengths
from wlb.errors import ConfigError
from wlb.report import BASE, load_manifest, parse_iteration
from wlb.report.convergence import CHECKPOINTS, Experiment, report_of
from wlb.report.convergence_runs import RunFolder, Variant
from wlb.report.convergence_table import table_of

ROOT = Path(__file__).resolve().parent.parent
_RUNS = "plain,makespan,wlb,makespan+delay64"
_MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "192", "--num-attention-heads", "2"),
    *("--position-embedding-type", "rope", "--no-position-embedding", "--normalization", "RMSNorm", "--swiglu"),
    *("--disable-bias-linear", "--make-vocab-size-divisible-by", "128"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
]
_CPU = [
    *("--distributed-backend", "gloo", "--use-cpu-initialization", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion"),
    *("--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
]
_TRAINING = [
    *("--micro-batch-size", "1", "--lr", "5e-3", "--min-lr", "5e-4", "--lr-decay-style", "cosine"),
    *("--lr-warmup-iters", "50", "--weight-decay", "0.1", "--clip-grad", "1.0", "--log-interval", "1"),
    *("--eval-iters", "0", "--eval-interval", "1000000", "--ckpt-format", "torch"),
]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", default=_RUNS, help=f"default: {_RUNS}; {BASE} must be among them")
    parser.add_argument("--seeds", default="1,2", help="of weights and of the order of documents; default: 1,2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--window", type=int, default=2048, help="tokens")
    parser.add_argument("--micro-batches", type=int, default=4, help="windows in a step's token budget")
    parser.add_argument("--thresholds", default=None, help="of outlier queues; default: 1/4 and 5/8 of the window")
    parser.add_argument("--heldout-percent", type=int, default=10, help="of documents, the last of the index")
    parser.add_argument("--noise-steps", type=int, default=32, help="successive steps for gradient noise")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/convergence", help="for logs and checkpoints")
    parser.add_argument("--corpus", type=Path, default=ROOT / "runs/quickstart/corpus", help="built if missing")
    parser.add_argument("--report-only", action="store_true", help="start nothing: report the runs that are complete")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--png", type=Path, help="draw them here")
    options = parser.parse_args(argv)
    options.variants = [Variant.named(name) for name in options.runs.split(",")]
    names = [v.name for v in options.variants]
    if len(set(names)) < len(names) or BASE not in names:
        raise ConfigError(f"--runs must be different ones, {BASE} among them, got {options.runs}")
    options.seed_list = _integers("--seeds", options.seeds)
    window = options.window
    thresholds = f"{window // 4},{window * 5 // 8}" if options.thresholds is None else options.thresholds
    options.threshold_list = _integers("--thresholds", thresholds)
    for name, low, high in (
        ("steps", CHECKPOINTS * 4, 10**9),
        ("window", 64, 10**9),
        ("micro_batches", 1, 10**6),
        ("heldout_percent", 1, 50),
        ("noise_steps", 3, 10**6),
        ("jobs", 1, 10**3),
    ):
        if not low <= getattr(options, name) <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be in [{low}, {high}], got {getattr(options, name)}")
    if options.png is not None and find_spec("matplotlib") is None:
        raise ConfigError(f"--png needs matplotlib to draw {options.png}: install the extra wlb-megatron[report]")
    return options


def _integers(flag: str, text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(n.isdecimal() and int(n) > 0 for n in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{flag} must be different whole numbers > 0 with commas between, got {text}")
    return tuple(map(int, numbers))


def experiment_of(options: argparse.Namespace) -> Experiment:
    """What is compared, on the corpus as it lies there."""
    prefix = options.corpus / "corpus_text_document"
    check_index(str(prefix))
    lengths = np.asarray(index_lengths(str(prefix)), dtype=np.int64) - 1
    kept = round(len(lengths) * (100 - options.heldout_percent) / 100)
    return Experiment(
        folder=options.folder,
        names=tuple(v.name for v in options.variants),
        seeds=options.seed_list,
        steps=options.steps,
        window_tokens=options.window,
        budget_tokens=options.window * options.micro_batches,
        noise_steps=options.noise_steps,
        lengths=lengths,
        first_heldout=kept,
    )


def training_flags(options: argparse.Namespace, variant: Variant, seed: int) -> list[str]:
    """Of pretrain_gpt_wlb.py, without paths: what makes a run what it is."""
    return [
        *_MODEL,
        *_CPU,
        *_TRAINING,
        *("--seq-length", str(options.window), "--max-position-embeddings", str(options.window)),
        *("--global-batch-size", str(options.micro_batches), "--train-iters", str(options.steps)),
        *("--save-interval", str(options.steps // CHECKPOINTS), "--seed", str(seed)),
        *("--split", f"{100 - options.heldout_percent},{options.heldout_percent},0"),
        *variant.flags(options.threshold_list),
    ]


def training_jobs(options: argparse.Namespace, experiment: Experiment) -> list[Job]:
    """Runs that are not complete, those of the first seed first."""
    jobs = []
    for seed in options.seed_list:
        for variant in options.variants:
            run = experiment.run(variant.name, seed)
            flags = training_flags(options, variant, seed)
            run.prepare({"flags": shlex.join(flags)})
            if run.trained_iterations() >= options.steps:
                continue
            corpus = options.corpus.resolve()
            paths = [
                *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(corpus / "tokenizer.model")),
                *("--data-path", str(corpus / "corpus_text_document"), "--wlb-ledger", str(run.ledger.resolve())),
                *("--save", str(run.checkpoints.resolve()), "--load", str(run.checkpoints.resolve())),
            ]
            command = [sys.executable, str(ROOT / "pretrain_gpt_wlb.py"), *flags, *paths]
            jobs.append(Job(name=run.path.name, command=command, log=run.log, progress=lambda run=run: _progress(run)))
    return jobs


def probe_jobs(experiment: Experiment, corpus: Path) -> list[Job]:
    """One a run, for the held-out losses and gradients that are missing."""
    jobs = []
    for name, seed in experiment.complete():
        run = experiment.run(name, seed)
        tasks = experiment.missing_tasks(name, seed, prefix=str(corpus.resolve() / "corpus_text_document"))
        if tasks:
            request = run.path / "probe.json"
            with atomic_path(request) as path:
                path.write_text(json.dumps({"tasks": tasks}) + "\n", encoding="utf-8")
            command = [sys.executable, "-m", "megatron.wlb.convergence_probe", str(request)]
            outputs = [Path(task["output"]) for task in tasks]
            jobs.append(
                Job(
                    name=f"probe of {run.path.name}",
                    command=command,
                    log=run.path / "probe.log",
                    progress=lambda o=outputs: f"{sum(p.is_file() for p in o)} of {len(o)} computed",
                )
            )
    return jobs


def _progress(run: RunFolder) -> str:
    last = None
    if run.log.is_file():
        with run.log.open("rb") as file:
            file.seek(max(0, run.log.stat().st_size - 8192))
            for line in file.read().decode(errors="replace").splitlines():
                last = parse_iteration(line) or last
    if last is None:
        return f"checkpoint at {run.trained_iterations()}"
    return f"step {last.step + 1} of {last.num_steps}, loss {last.loss}, {last.elapsed_s:.2f} s a step"


def _train_and_probe(options: argparse.Namespace) -> None:
    script = [str(ROOT / "scripts/quickstart_corpus.sh"), str(options.corpus.resolve())]
    if subprocess.run(script, env=os.environ | {"WLB_VENV": sys.prefix}, check=False).returncode:
        raise RunsFailed(f"corpus {options.corpus} must be built")
    experiment = experiment_of(options)
    failure = None
    try:
        run_jobs(training_jobs(options, experiment), options.jobs)
    except RunsFailed as error:
        failure = error  # what the other runs have is still worth computing
    run_jobs(probe_jobs(experiment, options.corpus), options.jobs)
    if failure is not None:
        raise failure


def main(argv: Sequence[str]) -> None:
    options = parse_arguments(argv)
    options.folder = options.folder.resolve()
    if not options.report_only:
        with only_user_of(options.folder):
            _train_and_probe(options)
    experiment = experiment_of(options)
    report = {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/convergence.py", *argv]),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "corpus": load_manifest(options.corpus / "manifest.json"),
        "thresholds": options.threshold_list,
        **report_of(experiment),
    }
    if options.json is not None:
        with atomic_path(options.json) as path:
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.png is not None:
        from wlb.report.convergence_picture import draw

        with atomic_path(options.png) as path:
            draw(report, path)
    print(f"\n$ {report['command']}\n{table_of(report)}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
