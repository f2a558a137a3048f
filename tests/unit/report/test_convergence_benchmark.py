"""The benchmark's command line and its processes; training and probing themselves are tested elsewhere."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from wlb.errors import ConfigError
from wlb.report.convergence_runs import Variant

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "convergence.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("convergence_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def jobs(benchmark, monkeypatch):
    module = sys.modules[benchmark.run_jobs.__module__]
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    return module


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--runs", "wlb"], "--runs must be different ones, plain among them, got wlb"),
        (["--runs", "plain,plain"], "--runs must be different ones"),
        (["--runs", "plain,fast"], "--runs must name packers out of"),
        (["--seeds", "1,x"], "--seeds must be different whole numbers > 0"),
        (["--thresholds", "0"], "--thresholds must be different whole numbers > 0"),
        (["--steps", "10"], r"--steps must be in \[80, 1000000000\], got 10"),
        (["--noise-steps", "2"], "--noise-steps must be in"),
        (["--heldout-percent", "0"], "--heldout-percent must be in"),
        (["--jobs", "0"], "--jobs must be in"),
    ],
)
def test_bad_options_are_refused(benchmark, argv, sentence):
    with pytest.raises(ConfigError, match=sentence):
        benchmark.parse_arguments(argv)


def test_runs_differ_in_their_packing_alone(benchmark):
    options = benchmark.parse_arguments(["--window", "1024"])
    assert options.threshold_list == (256, 640)
    plain, delayed = (
        benchmark.training_flags(options, Variant.named(name), 1) for name in ("plain", "makespan+delay64")
    )
    place = plain.index("--wlb-packing")
    assert plain[:place] == delayed[:place]
    assert plain[place:] == ["--wlb-packing", "plain"]
    other = benchmark.training_flags(options, Variant.named("plain"), 2)
    assert [(a, b) for a, b in zip(plain, other, strict=True) if a != b] == [("1", "2")]


def write_corpus(folder):
    from tests.harness.data import learnable_documents, write_index

    folder.mkdir()
    write_index(folder / "corpus_text_document", learnable_documents(count=50, seed=1, longest=40))
    return folder


def test_complete_runs_are_not_trained_again(benchmark, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    argv = ["--folder", str(tmp_path), "--corpus", str(corpus), "--steps", "80", "--runs", "plain,wlb", "--seeds", "3"]
    options = benchmark.parse_arguments(argv)
    experiment = benchmark.experiment_of(options)
    assert (len(experiment.lengths), experiment.first_heldout) == (50, 45)
    names = [job.name for job in benchmark.training_jobs(options, experiment)]
    assert names == ["plain_seed3", "wlb_seed3"]
    run = experiment.run("plain", 3)
    run.checkpoints.mkdir()
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("80")
    (job,) = benchmark.training_jobs(options, experiment)
    assert job.name == "wlb_seed3"
    flags = shlex.split(json.loads((experiment.run("wlb", 3).path / "settings.json").read_text())["flags"])
    assert not any(str(tmp_path) in flag for flag in flags)  # a folder that has moved is the same run
    assert job.command[2 : 2 + len(flags)] == flags


def test_one_failing_process_leaves_the_others_to_end(benchmark, jobs, tmp_path):
    def job(name, code):
        return jobs.Job(
            name=name, command=[sys.executable, "-c", code], log=tmp_path / f"{name}.log", progress=lambda: "-"
        )

    three = [job("first", "print('a')"), job("second", "raise SystemExit(3)"), job("third", "print('b')")]
    with pytest.raises(benchmark.RunsFailed, match=r"1 of 3 processes .* second \("):
        jobs.run_jobs(three, 2)
    assert (tmp_path / "first.log").read_text() == "a\n"
    assert (tmp_path / "third.log").read_text() == "b\n"


def test_an_interrupt_ends_the_processes(jobs, tmp_path, monkeypatch):
    started = []
    start = jobs._start

    def interrupted(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "_start", lambda job: started.append(start(job)) or started[-1])
    monkeypatch.setattr(jobs.time, "sleep", interrupted)
    code = "import time; time.sleep(60)"
    job = jobs.Job(name="a", command=[sys.executable, "-c", code], log=tmp_path / "log", progress=lambda: "-")
    with pytest.raises(KeyboardInterrupt):
        jobs.run_jobs([job], 1)
    assert [process.poll() is not None for process in started] == [True]


def test_a_folder_has_one_user(jobs, tmp_path):
    with (
        jobs.only_user_of(tmp_path),
        pytest.raises(ConfigError, match="must not be in use"),
        jobs.only_user_of(tmp_path),
    ):
        pass
    with jobs.only_user_of(tmp_path):
        pass
