"""Replaces upstream names: checked before anything is written, undone in reverse order whatever happens.

A target is `module:attribute`. A patch fits when the installed distribution is in its version range *and* the
target's source has the digest it was written against: one upstream function had five different bodies in five
releases, so a version alone says little. All patches are checked before the first one is applied.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from wlb.errors import PatchError

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One upstream name to replace.

    target: "package.module:name".
    distribution, versions: what was read when this was written, e.g. "megatron-core", ">=0.19.2,<0.20".
    source_digest: `digest_of` the original.
    reason: what breaks without it, in a sentence.
    make: original -> replacement.
    rebind_aliases: also replace the name in modules that did `from module import name`. Off where only this
        one module must see the replacement.
    """

    target: str
    distribution: str
    versions: str
    source_digest: str
    reason: str
    make: Callable[[Any], Any]
    rebind_aliases: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchState:
    """What `check` found. `problem` is empty when the patch fits."""

    patch: Patch
    version: str
    digest: str
    problem: str


def digest_of(function: Any) -> str:
    """First 16 hex digits of the SHA-256 of a function's or class's source."""
    return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()[:16]


def check(patch: Patch) -> PatchState:
    """Compare a patch with what is installed; imports the target's module, changes nothing."""
    try:
        version = metadata.version(patch.distribution)
    except metadata.PackageNotFoundError:
        return PatchState(patch=patch, version="", digest="", problem=f"{patch.distribution} is not installed")
    module_name, _, name = patch.target.partition(":")
    try:
        original = getattr(importlib.import_module(module_name), name, _MISSING)
    except ImportError as error:
        problem = f"{module_name} cannot be imported from {patch.distribution} {version}: {error}"
        return PatchState(patch=patch, version=version, digest="", problem=problem)
    if original is _MISSING:
        problem = f"{module_name} has no {name} in {patch.distribution} {version}"
        return PatchState(patch=patch, version=version, digest="", problem=problem)
    digest = digest_of(original)
    problem = ""
    if not SpecifierSet(patch.versions).contains(version, prereleases=True):
        problem = f"wanted {patch.distribution} {patch.versions}, found {version}"
    elif digest != patch.source_digest:
        problem = f"wanted source {patch.source_digest}, found {digest} ({patch.distribution} {version})"
    return PatchState(patch=patch, version=version, digest=digest, problem=problem)


@contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply all of `patches` inside the block.

    Raises:
        PatchError: one does not fit what is installed; nothing was changed.
    """
    misfits = [s for s in map(check, patches) if s.problem]
    if misfits:
        raise PatchError("; ".join(f"patch of {s.patch.target} does not fit: {s.problem}" for s in misfits))
    with ExitStack() as undo:
        for patch in patches:
            module_name, _, name = patch.target.partition(":")
            module = importlib.import_module(module_name)
            original = getattr(module, name)
            replacement = patch.make(original)
            owners = [module, *_aliases(original, name, module)] if patch.rebind_aliases else [module]
            for owner in owners:
                replace(undo, owner, name, replacement)
        yield


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set `owner.name` until `undo` closes; a name that was not there is removed again."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def _aliases(original: Any, name: str, home: Any) -> list[Any]:
    """Loaded modules other than `home` in which `name` is the very same object."""
    modules = [m for m in list(sys.modules.values()) if m is not None and m is not home]
    return [m for m in modules if vars(m).get(name) is original] if modules else []
