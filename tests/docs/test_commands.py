"""Every command of every page is run, parsed, or listed with the reason why it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.command_table import WAYS, way_of
from tests.docs.pages import ROOT, commands, pages
from tests.docs.parsing import Launch, parsed
from tests.docs.sandbox import Sandbox, files_named

COMMANDS = [command for page in pages() for command in commands(page)]
KINDS = ("run", "parse")


def _pages_with(*, slow: bool) -> list[Path]:
    """Pages of which something is run or parsed that takes long, or that does not."""
    ways = [(c.page, way_of(c)) for c in COMMANDS]
    return list(dict.fromkeys(page for page, way in ways if way and way.how in KINDS and way.slow == slow))


def test_every_command_has_a_way_and_every_way_a_command() -> None:
    assert len(COMMANDS) > 40
    assert [str(c) for c in COMMANDS if way_of(c) is None] == [], "give them a row in tests/docs/command_table.py"
    assert [way.command for way in WAYS if not any(way_of(c) is way for c in COMMANDS)] == [], "rows without a command"


def test_whatever_is_not_run_as_it_stands_has_a_reason() -> None:
    assert [
        way.command for way in WAYS if (way.how != "run" or way.swaps) and way.how != "train" and not way.reason
    ] == []


def test_files_that_commands_name_exist() -> None:
    missing = [str(c) for c in COMMANDS for name in files_named(c.text) if not (ROOT / name).exists()]
    assert missing == []


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


def _check(page: Path, sandbox: Sandbox, *, slow: bool) -> None:
    done = 0
    for command in commands(page):
        way = way_of(command)
        if way is None or way.how not in KINDS or (way.slow and not slow):
            continue
        getattr(sandbox, way.how)(way.text(command))
        done += 1
    assert done


@pytest.mark.parametrize("page", _pages_with(slow=False), ids=lambda page: page.stem)
def test_commands(page: Path, sandbox: Sandbox) -> None:
    _check(page, sandbox, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", _pages_with(slow=True), ids=lambda page: page.stem)
def test_slow_commands(page: Path, sandbox: Sandbox) -> None:
    """All of the page, in its order: later commands read what earlier ones wrote."""
    _check(page, sandbox, slow=True)


def test_launches_of_training_are_parsed(sandbox: Sandbox) -> None:
    """The shell blocks that start training, as written, with a stand-in for torchrun; and what it was given."""
    texts = []
    for page in pages():
        block: list[str] = []
        for command in commands(page):
            way = way_of(command)
            if way is None or way.how != "train":
                continue
            # Arrays of a page stay for the launches after them.
            block.append(way.text(command))
            if "_ARGS=(" not in command.text:
                texts.append("\n".join(block))
                block.pop()
    for text in texts:
        sandbox.launch(text)
    launches = [Launch.of(line) for line in sandbox.launches()]
    assert len(launches) == len(texts) >= 4
    answers = parsed(launches)
    assert [f"{text}: {answer}" for text, answer in zip(texts, answers, strict=True) if isinstance(answer, str)] == []
    assert all(answer["packing"] for answer in answers)
