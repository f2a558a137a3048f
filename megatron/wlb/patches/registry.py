"""Replaces upstream names: checked before anything is written, undone in reverse order whatever happens.

A target is `module:attribute`. A patch fits when the installed distribution is in its version range *and* the
target is what it was written against: one upstream function had five different bodies in five releases, so a version
alone says little. A patch that reads a target's body asks for a digest of its source; one that only stands in for a
function over many releases states the contract of its calls instead. All patches are checked before the first one is
applied.
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
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from wlb.errors import PatchError

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a patch needs of its target where the body does not matter.

    name: in the table of patches.
    problem: (target's module, original) -> what does not hold, in words; "" when all does.
    """

    name: str
    problem: Callable[[ModuleType, Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One upstream name to replace.

    target: "package.module:name".
    distribution, versions: what was read when this was written, e.g. "megatron-core", ">=0.19.2,<0.20".
    source_digest: `digest_of` the original; or
    contract: what must hold of it.
    reason: what breaks without it, in a sentence.
    make: original -> replacement.
    rebind_aliases: also replace the name in modules that did `from module import name`. Off where only this
        one module must see the replacement.
    optional: runs that need the patch also need the distribution; others do without both.
    """

    target: str
    distribution: str
    versions: str
    source_digest: str = ""
    contract: Contract | None = None
    reason: str
    make: Callable[[Any], Any]
    rebind_aliases: bool = True
    optional: bool = False

    def __post_init__(self) -> None:
        if bool(self.source_digest) == (self.contract is not None):
            raise PatchError(f"patch of {self.target} must have a source_digest or a contract, and not both")

    @property
    def wanted(self) -> str:
        """The digest, or the name of the contract."""
        return self.contract.name if self.contract else self.source_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchState:
    """What `check` found. `problem` is empty when the patch fits. digest: of the installed target."""

    patch: Patch
    version: str
    digest: str
    problem: str

    @property
    def absent(self) -> bool:
        """There is nothing to fit, and nothing that a run could miss."""
        return self.patch.optional and not self.version


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
    except Exception as error:  # a package whose compiled half or driver is missing raises anything
        problem = f"{module_name} cannot be imported from {patch.distribution} {version}: {error}"
        return PatchState(patch=patch, version=version, digest="", problem=problem)
    if original is _MISSING:
        problem = f"{module_name} has no {name} in {patch.distribution} {version}"
        return PatchState(patch=patch, version=version, digest="", problem=problem)
    module = sys.modules[module_name]
    digest = digest_of(original)
    problem = ""
    if not SpecifierSet(patch.versions).contains(version, prereleases=True):
        problem = f"wanted {patch.distribution} {patch.versions}, found {version}"
    elif patch.contract:
        broken = patch.contract.problem(module, original)
        problem = broken and f"{broken} ({patch.distribution} {version})"
    elif digest != patch.source_digest:
        problem = f"wanted source {patch.source_digest}, found {digest} ({patch.distribution} {version})"
    if problem:
        # The version is what is installed; a checkout on PYTHONPATH may stand before it.
        problem += f" in {getattr(module, '__file__', module_name)}"
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
