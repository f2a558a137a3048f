"""docs/migrating.md: both launch scripts are accepted, and what it says is refused is refused by name."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, code_blocks
from tests.docs.parsing import Launch, parsed
from tests.docs.sandbox import Sandbox

PAGE = ROOT / "docs" / "migrating.md"


def _scripts():
    """(before, after) of the page's diff."""
    (diff,) = [block.text.splitlines() for block in code_blocks(PAGE) if block.language == "diff"]
    return tuple("\n".join(line[1:] for line in diff if not line.startswith(other)) for other in "+-")


def _refused():
    """Flags of the table of what is refused."""
    section = PAGE.read_text().split("## What is refused", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(--[^`]+)` \|", section, re.MULTILINE)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Of the scripts before and after, run with a stand-in for torchrun."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sandbox = Sandbox(tmp_path_factory.mktemp("migrating"), monkeypatch)
        for script in _scripts():
            # The same parser reads both: it knows every flag of pretrain_gpt.py.
            sandbox.launch(re.sub(r"\bpretrain_gpt\.py", "pretrain_gpt_wlb.py", script))
        return [Launch.of(line) for line in sandbox.launches()]


@pytest.fixture(scope="module")
def answers(launches):
    """Before, after, and after with each refused flag in turn, parsed in one rank."""
    before, after = launches
    worse = [Launch(num_ranks=after.num_ranks, argv=(*after.argv, *flags.split())) for flags in _refused()]
    return parsed([before, after, *worse])


def test_before_is_stock_and_after_is_packed(answers):
    before, after = answers[:2]
    assert before == {"packing": None, "sharding": None, "max_delay_steps": 0, "data_parallel_size": 2}
    assert after == {"packing": "makespan", "sharding": "hybrid", "max_delay_steps": 0, "data_parallel_size": 2}


def test_what_is_refused_is_refused_by_name(answers):
    refused = _refused()
    assert len(refused) > 10
    for flags, answer in zip(refused, answers[2:], strict=True):
        assert isinstance(answer, str), f"{flags} is accepted"
        named = [word for word in flags.split() if word.startswith("--") and word in answer]
        assert named, f"{flags}: {answer}"
        assert not answer.startswith("AssertionError"), f"{flags}: {answer}"
