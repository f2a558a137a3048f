"""Patches are checked before anything is written, reach aliases, and are undone whatever happens."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.wlb.patches.registry import Contract, Patch, applied, check, digest_of
from wlb.errors import PatchError

HOME = """
def double(x):
    return 2 * x


def triple(x):
    return 3 * x


number = 7
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module with two functions, one module that imported them by name, and one with another `double`."""
    (tmp_path / "patched_home.py").write_text(HOME)
    (tmp_path / "patched_user.py").write_text("from patched_home import double, triple\n")
    (tmp_path / "patched_stranger.py").write_text("def double(x):\n    return 'another'\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("patched_home", "patched_user", "patched_stranger")
    modules = [importlib.import_module(name) for name in names]
    yield modules[0]
    for name in names:
        del sys.modules[name]


def _patch(home: ModuleType, name: str, **changes: Any) -> Patch:
    """Adds 100 to what the original returns."""
    patch = Patch(
        target=f"patched_home:{name}",
        distribution="pytest",
        versions=">=1",
        source_digest=digest_of(getattr(home, name)),
        reason="a test",
        make=lambda original: lambda x: original(x) + 100,
    )
    return replace(patch, **changes)


def _user() -> Any:
    return sys.modules["patched_user"]


def test_target_and_aliases_are_replaced_and_restored(home: Any) -> None:
    original = home.double
    stranger = sys.modules["patched_stranger"]
    with applied([_patch(home, "double")]):
        assert home.double(1) == 102
        assert _user().double is home.double
        assert stranger.double(1) == "another"
        assert home.triple(1) == _user().triple(1) == 3
    assert home.double is _user().double is original


def test_aliases_are_left_when_rebinding_is_off(home: Any) -> None:
    original = home.double
    with applied([_patch(home, "double", rebind_aliases=False)]):
        assert home.double(1) == 102
        assert _user().double is original
    assert home.double is original


def test_undone_in_reverse_order_after_an_exception(home: Any) -> None:
    """Two patches of one target nest; had they been undone in order, the first one's replacement would be left."""
    original = home.double
    outer = _patch(home, "double")
    inner = replace(outer, make=lambda current: lambda x: current(x) * 10)

    def stop_inside() -> None:
        with applied([outer, inner, _patch(home, "triple")]):
            assert home.double(1) == _user().double(1) == 1020
            assert home.triple(1) == 103
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        stop_inside()
    assert home.double is _user().double is original
    assert home.triple(1) == 3


def test_a_failing_replacement_leaves_nothing_behind(home: Any) -> None:
    original = home.double

    def fail(_original: Any) -> Any:
        raise RuntimeError("cannot make it")

    with (
        pytest.raises(RuntimeError, match="cannot make it"),
        applied([_patch(home, "double"), _patch(home, "triple", make=fail)]),
    ):
        pytest.fail("the block must not run")
    assert home.double is _user().double is original


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"source_digest": "0123456789abcdef"},
            r"patch of patched_home:double does not fit: wanted source 0123456789abcdef, found [0-9a-f]{16} \(pytest ",
        ),
        (
            {"versions": "<1"},
            r"patch of patched_home:double does not fit: wanted pytest <1, found \d[\d.]* in .*patched_home",
        ),
        ({"distribution": "no-such-distribution"}, "no-such-distribution is not installed"),
        ({"target": "patched_home:gone"}, "patched_home has no gone in pytest"),
        ({"target": "patched_nowhere:double"}, "patched_nowhere cannot be imported from pytest"),
        (
            {"source_digest": "", "contract": Contract(name="two", problem=lambda _home, f: f"wanted {f(1) + 1}")},
            r"patch of patched_home:double does not fit: wanted 3 \(pytest \d",
        ),
    ],
)
def test_a_mismatch_names_target_wanted_and_found(home: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PatchError, match=sentence), applied([_patch(home, "double", **changes)]):
        pytest.fail("the block must not run")


def test_nothing_is_applied_when_one_of_several_does_not_fit(home: Any) -> None:
    originals = home.double, home.triple
    made: list[Any] = []
    fits = _patch(home, "double", make=lambda original: made.append(original))
    misfits = [_patch(home, "triple", versions="<1"), _patch(home, "triple", source_digest="0" * 16)]
    with pytest.raises(PatchError) as raised, applied([fits, *misfits]):
        pytest.fail("the block must not run")
    assert str(raised.value).count("patch of patched_home:triple does not fit") == 2
    assert made == []
    assert (home.double, home.triple) == originals


def test_a_contract_stands_for_the_digest(home: Any) -> None:
    """It sees the target's module and the target; the digest found is shown all the same."""
    seen: list[Any] = []
    contract = Contract(name="anything", problem=lambda *found: str(seen.append(found) or ""))  # type: ignore[func-returns-value]
    patch = _patch(home, "double", source_digest="", contract=contract)
    state = check(patch)
    assert (patch.wanted, state.problem, state.digest) == ("anything", "", digest_of(home.double))
    assert seen == [(home, home.double)]
    with applied([patch]):
        assert home.double(1) == 102


@pytest.mark.parametrize("changes", [{"source_digest": ""}, {"contract": Contract(name="", problem=lambda *_: "")}])
def test_a_patch_says_in_one_way_what_it_was_written_against(home: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(PatchError, match="patched_home:double must have a source_digest or a contract, and not both"):
        _patch(home, "double", **changes)


def test_only_an_optional_distribution_may_be_absent(home: Any) -> None:
    """A run that needs the patch cannot do without, though."""
    nowhere = _patch(home, "double", distribution="no-such-distribution")
    optional = replace(nowhere, optional=True)
    assert [check(p).absent for p in (nowhere, optional)] == [False, True]
    assert not check(_patch(home, "double", optional=True)).absent
    with pytest.raises(PatchError, match="no-such-distribution is not installed"), applied([optional]):
        pytest.fail("the block must not run")


def test_a_package_that_fails_to_import_in_any_way_is_a_mismatch(home: Any, tmp_path: Path) -> None:
    (tmp_path / "patched_broken.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    state = check(_patch(home, "double", target="patched_broken:double"))
    assert "patched_broken cannot be imported from pytest" in state.problem
    assert "libcuda.so.1" in state.problem


def test_the_digest_is_that_of_the_source(home: Any) -> None:
    state = check(_patch(home, "double"))
    assert state.problem == ""
    assert state.digest == digest_of(home.double) != digest_of(home.triple)


def test_a_name_that_was_not_there_is_removed_again() -> None:
    from contextlib import ExitStack

    from megatron.wlb.patches.registry import replace as replaced

    owner = ModuleType("owner")
    with ExitStack() as undo:
        replaced(undo, owner, "new", 1)
        replaced(undo, owner, "new", 2)
        assert owner.new == 2
    assert not hasattr(owner, "new")
