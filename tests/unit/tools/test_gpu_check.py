import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from megatron.wlb.gpu_check import supervision
from megatron.wlb.gpu_check.page import NOT_CHECKED, header, section
from megatron.wlb.gpu_check.results import Result
from wlb.cost import load_pipeline_costs
from wlb.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "python": "3.12.1",
    "torch": "2.13.0",
    "cuda": "13.0",
    "device": "a device",
    "memory_bytes": 80 * 2**30,
    "packages": {
        "One": {"found": True, "version": "1.0", "lost": "much"},
        "Two": {"found": False, "version": "", "lost": "little"},
    },
    "kernels": {"flash2": "needs flash-attn", "torch": ""},
}
PROFILE = {
    "version": 1,
    "attention": [[1024, 0.001]],
    "linear_token_s": 1e-6,
    "fixed_s": 0.001,
    "attention_backward_ratio": 2.5,
    "rest_backward_ratio": 2.0,
}
COST = {
    "given": {
        "profile": PROFILE,
        "crossover tokens": 2000.0,
        "crossover tokens by counting": 3000.0,
        "attention forward TFLOP/s": 300.0,
        "mixed pack tokens": 8192,
        "mixed pack predicted over measured": 0.98,
    }
}


def result(name, passed=True, kind="attention", measured=None):
    measured = {"MHA": {"out": 0.5, "dq": 1.25, "independent": True}} if measured is None else measured
    return Result(
        name=name, kind=kind, passed=passed, rule="must hold", measured=measured, duration_s=0.1, budget_s=1.0
    )


@pytest.fixture
def results_are(monkeypatch):
    """results_are(...): what the tool will be told by its workers."""

    def use(*results):
        def supervise(*_args, **_kwargs):
            yield ENVIRONMENT
            yield from results

        monkeypatch.setattr(supervision, "supervise", supervise)

    return use


def test_exits_with_1_and_names_what_failed(run, tmp_path, capsys, results_are):
    results_are(result("check 0"), result("check 1", passed=False))
    assert run("gpu_check", "--device", "cpu", "--json", tmp_path / "out.json") == 1
    printed = capsys.readouterr()
    assert printed.err.strip() == "error: 1 of 2 sections failed: check 1"
    assert "ok   check 0" in printed.out
    assert "FAIL check 1" in printed.out
    page = json.loads((tmp_path / "out.json").read_text())
    assert (page["passed"], page["complete"]) == (False, True)
    assert [s["passed"] for s in page["sections"]] == [True, False]
    assert page["environment"] == ENVIRONMENT


def test_exits_with_0_when_all_passed_and_says_what_is_lost_and_not_checked(run, tmp_path, capsys, results_are):
    results_are(result("check"))
    assert run("gpu_check", "--device", "cpu", "--json", tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    for line in (*header(ENVIRONMENT), NOT_CHECKED, "1 of 1 sections passed on a device"):
        assert line in printed
    assert "Two: not found; lost: little" in printed
    assert "kernel flash2: needs flash-attn" in printed
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is True


def test_a_check_that_is_stopped_leaves_what_it_found(run, tmp_path, monkeypatch):
    def stopped(*_args, **_kwargs):
        yield ENVIRONMENT
        yield result("check 0")
        raise KeyboardInterrupt

    monkeypatch.setattr(supervision, "supervise", stopped)
    assert run("gpu_check", "--device", "cpu", "--json", tmp_path / "out.json") == 130
    page = json.loads((tmp_path / "out.json").read_text())
    assert (page["passed"], page["complete"]) == (False, False)
    assert [s["name"] for s in page["sections"]] == ["check 0"]


def test_writes_the_profile_that_training_reads(run, tmp_path, capsys, results_are):
    results_are(result("cost profile", kind="cost profile", measured=COST))
    assert run("gpu_check", "--device", "cpu", "--cost-profile", tmp_path / "cost.json") == 0
    costs = load_pipeline_costs(tmp_path / "cost.json", 4)
    assert costs.whole.linear_s(1000) == pytest.approx(0.001)
    assert "crossover 2000 tokens, 3000 by counting" in capsys.readouterr().out


def test_model_of_a_tensor_parallel_rank(run, capsys):
    assert run("gpu_check", "--device", "cpu", "--tensor-model-parallel-size", "3") == 1
    assert "must be >= 1 and divide --ffn-hidden-size 64, got 3" in capsys.readouterr().err


def test_the_page_shows_the_worst_case_and_what_was_not_taken():
    nan = float("nan")
    measured = {"MHA": {"out": 3.0}, "GQA": {"out": 0.5, "dq": nan}, "window": {"refused": "no window"}}
    text = "\n".join(section(result("attention, torch", passed=False, measured=measured)))
    assert "rule: must hold" in text
    assert "largest ratio nan of 2 allowed (GQA: dq); 3 ratios" in text
    assert "window: not taken: no window" in text


def test_the_page_shows_the_end_of_an_error():
    lines = section(result("training", passed=False, kind="training", measured={"error": "\n".join("abcdefghij")}))
    assert lines[0] == "FAIL training (0.1 s)"
    assert [line.strip() for line in lines[1:]] == list("efghij")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_asks_for_a_device_that_is_not_there():
    from megatron.wlb.gpu_check.worker import check_device

    with pytest.raises(ConfigError, match="--device must be cuda where there is a CUDA device and cpu elsewhere"):
        check_device("cuda")
    check_device("cpu")


def write_wheel(folder, name, version):
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_are_taken_where_the_machine_has_nothing(run, tmp_path, capsys):
    assert run("missing_wheels", tmp_path) == 1
    assert "must name a folder that holds wheels" in capsys.readouterr().err
    missing = [write_wheel(tmp_path, "gpu_check_probe", "1.0"), write_wheel(tmp_path, "megatron_core", "0.0.1")]
    write_wheel(tmp_path, "numpy", "0.1")
    write_wheel(tmp_path, "torch", "99.0")
    write_wheel(tmp_path, "nvidia_cublas", "99.0")
    assert run("missing_wheels", tmp_path) == 0
    assert capsys.readouterr().out.split() == [str(path) for path in missing]


@pytest.mark.slow
def test_the_script_takes_wheels_for_one_check_only(tmp_path):
    """With --help, which needs every import of the tool and no check."""
    wheels = tmp_path / "with a space"
    wheels.mkdir()
    write_wheel(wheels, "gpu_check_probe", "1.0")
    environment = os.environ | {"WLB_VENV": sys.prefix, "TMPDIR": str(tmp_path)}
    script = [ROOT / "scripts" / "gpu_check.sh", "--wheels", wheels.name, "--help"]
    done = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "for this check: gpu_check_probe-1.0" in done.stderr
    assert "--cost-profile" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [wheels.name], "nothing is left behind"


@pytest.mark.slow
def test_the_script_says_what_is_missing(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--wheels", tmp_path / "nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: --wheels must name a folder")
