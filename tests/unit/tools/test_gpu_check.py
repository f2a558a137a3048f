import json
import warnings

import pytest
import torch

from megatron.wlb import environment

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a CUDA device: tests/gpu runs the whole check, this rehearses its page"
)


@pytest.fixture
def gpu_check():
    with warnings.catch_warnings():
        # Upstream's own, on import: what it falls back to.
        warnings.simplefilter("ignore")
        from megatron.wlb import gpu_check

    return gpu_check


@pytest.fixture
def results_are(gpu_check, monkeypatch):
    """results_are(True, False): the checks that the tool will see."""

    def use(*passed):
        results = [
            gpu_check.Result(name=f"check {i}", passed=p, rule="must pass", measured={"error": 0.5}, duration_s=0.1)
            for i, p in enumerate(passed)
        ]
        monkeypatch.setattr(gpu_check, "run_checks", lambda _device, _folder: iter(results))

    return use


def test_exits_with_1_and_names_what_failed(run, tmp_path, capsys, results_are):
    results_are(True, False)
    assert run("gpu_check", "--device", "cpu", "--json", tmp_path / "out.json") == 1
    printed = capsys.readouterr()
    assert printed.err.strip() == "error: 1 of 2 checks failed: check 1"
    assert "ok   check 0" in printed.out
    assert "FAIL check 1" in printed.out
    page = json.loads((tmp_path / "out.json").read_text())
    assert page["passed"] is False
    assert [check["passed"] for check in page["checks"]] == [True, False]
    assert page["environment"]["torch"] == torch.__version__


def test_exits_with_0_when_all_passed_and_says_what_is_lost(run, tmp_path, capsys, results_are):
    results_are(True, True)
    assert run("gpu_check", "--device", "cpu", "--json", tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    for sentence in environment.package_sentences():
        assert sentence in printed
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is True


def test_asks_for_a_device_that_is_not_there(run, capsys):
    assert run("gpu_check") == 1
    assert "--device must be cuda where there is a CUDA device and cpu elsewhere, got cuda" in capsys.readouterr().err


def test_a_check_that_raises_has_failed(gpu_check, capsys):
    def broken():
        raise RuntimeError("no such kernel")

    result = gpu_check._timed("name", "rule", broken)
    assert not result.passed
    assert result.measured == {"error": "RuntimeError: no such kernel"}
    assert "no such kernel" in capsys.readouterr().err
