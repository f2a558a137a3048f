"""What Transformer Engine's Python source says, read by `ast`: the wheel needs no GPU, no compiler and no import."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

VERSIONS = ("2.9.0", "2.13.0", "2.17.1", "2.19.0", "2.20.2")
FUNCTION = "attn_forward_func_with_cp"
FETCH_TIMEOUT_S = 60.0
_FOLDER = "transformer_engine/pytorch"
_FILES = {
    **{
        n: f"attention/dot_product_attention/{n}.py"
        for n in ("backends", "context_parallel", "dot_product_attention", "utils")
    },
    "rope": "attention/rope.py",
    "fused_attn": "cpp_extensions/fused_attn.py",
    "constants": "constants.py",
}


def fetch(cache: Path) -> dict[str, str]:
    """Put the sources of all versions into `cache`, at once; by version, why one could not be had."""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fetching = {v: _pip_download(v, Path(folder) / v) for v in VERSIONS if not (cache / v).exists()}
        failures = {}
        for version, process in fetching.items():
            try:
                _, said = process.communicate(timeout=FETCH_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                said = f"pip took longer than {FETCH_TIMEOUT_S:.0f} s"
            wheels = list((Path(folder) / version).glob("*.whl"))
            if process.returncode == 0 and wheels:
                _unpack(wheels[0], cache / version)
            else:
                failures[version] = said.strip().splitlines()[-1] if said.strip() else "pip failed"
        return failures


def _pip_download(version: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    return subprocess.Popen(
        [*command, f"transformer_engine=={version}", "--dest", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _unpack(wheel: Path, target: Path) -> None:
    """Beside the target and moved there at the end, so that a broken run leaves no half of it."""
    unpacked = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked, [f"{_FOLDER}/{file}" for file in _FILES.values()])
    try:
        os.replace(unpacked / _FOLDER, target)
    except OSError:
        if not target.exists():  # else another test process was faster
            raise
        shutil.rmtree(unpacked)


@dataclass(frozen=True)
class TeSource:
    """The modules of one version that the patch has to do with."""

    version: str
    folder: Path

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        return {name: ast.parse((self.folder / file).read_text()) for name, file in _FILES.items()}

    @property
    def dispatcher(self) -> ast.FunctionDef:
        """The function that the patch replaces."""
        return function_named(self.modules["context_parallel"], FUNCTION)

    def forward_of(self, class_name: str) -> ast.FunctionDef:
        """`forward` of an attention class."""
        home = "dot_product_attention" if class_name == "DotProductAttention" else "backends"
        (found,) = (n for n in self.modules[home].body if isinstance(n, ast.ClassDef) and n.name == class_name)
        return function_named(found, "forward")

    def call_site(self, class_name: str) -> ast.Call:
        """The one call of the function in a `forward`."""
        (call,) = (
            n
            for n in ast.walk(self.forward_of(class_name))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == FUNCTION
        )
        return call


def function_named(owner: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef:
    """Defined directly in a module or class."""
    (found,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found


def parameters(function: ast.FunctionDef) -> dict[str, str | None]:
    """Names in order, with the source of their default."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + [
        ast.unparse(d) for d in function.args.defaults
    ]
    keyword_only = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return dict(zip((a.arg for a in arguments), defaults, strict=True)) | {
        a.arg: None if d is None else ast.unparse(d) for a, d in keyword_only
    }


def truth(test: ast.expr, facts: Mapping[str, Any]) -> bool | None:
    """What a condition comes to under known values of some names; None if it depends on others."""
    if isinstance(test, ast.BoolOp):
        decided_by = isinstance(test.op, ast.Or)
        values = [truth(v, facts) for v in test.values]
        if decided_by in values:
            return decided_by
        return None if None in values else not decided_by
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = truth(test.operand, facts)
        return None if value is None else not value
    try:
        return bool(eval(compile(ast.Expression(test), "condition", "eval"), {"__builtins__": {}}, dict(facts)))
    except Exception:
        return None


def reachable(body: Sequence[ast.stmt], facts: Mapping[str, Any]) -> Iterator[ast.stmt]:
    """Statements that may run when the facts hold; compound ones are opened, functions are not."""
    for statement in body:
        if isinstance(statement, ast.If):
            value = truth(statement.test, facts)
            if value is not False:
                yield from reachable(statement.body, facts)
            if value is not True:
                yield from reachable(statement.orelse, facts)
        elif isinstance(statement, ast.With | ast.For | ast.While):
            yield from reachable(statement.body, facts)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, *(h.body for h in statement.handlers), statement.orelse, statement.finalbody):
                yield from reachable(part, facts)
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement


def assigned(statements: Iterator[ast.stmt], names: Sequence[str]) -> list[str]:
    """Source of the statements that bind one of `names` anew."""
    return [
        ast.unparse(s)
        for s in statements
        if any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in names for n in ast.walk(s))
    ]
