"""docker/Dockerfile agrees with the repository: there is no Docker daemon in the tests, so it is read, not built."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.patches.te_source import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    Requirement(line).name: str(Requirement(line).specifier)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}


def _instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction, continuation lines joined and comments left out."""
    text = (ROOT / "docker/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def _of(name: str) -> list[str]:
    return [rest for instruction, rest in _instructions() if instruction == name]


def _arguments() -> dict[str, str]:
    return dict(rest.split("=", 1) for rest in _of("ARG"))


def _pip_installs() -> list[list[str]]:
    """The words after `pip install` of each, with build arguments filled in."""
    commands = [part for run in _of("RUN") for part in re.split(r"&&", run)]
    filled = [re.sub(r"\$\{(\w+)\}", lambda m: _arguments().get(m[1], m[0]), part) for part in commands]
    return [shlex.split(part.split("pip install", 1)[1]) for part in filled if "pip install" in part]


def test_the_image_is_nvidias_and_its_tag_can_be_chosen() -> None:
    assert _of("FROM") == ["nvcr.io/nvidia/pytorch:${NGC_TAG}"]
    assert re.fullmatch(r"\d\d\.\d\d-py3", _arguments()["NGC_TAG"])


def test_every_source_of_a_copy_exists_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [source for rest in _of("COPY") for source in rest.split()[:-1]]
    assert {"wlb", "megatron", "scripts", "benchmarks", "pretrain_gpt_wlb.py", "pyproject.toml", "LICENSE"} <= set(
        sources
    )
    for source in sources:
        assert (ROOT / source).exists(), f"COPY {source}"
        assert f"!{source}" in ignored, f"{source} is kept from the build by .dockerignore"
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources), "no more than is copied"


def test_nothing_of_the_base_is_replaced() -> None:
    installs = _pip_installs()
    assert len(installs) == 2
    assert all("--no-deps" in words for words in installs)
    names = {Requirement(word).name for word in installs[0] if not word.startswith("-")}
    required = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert names | {"torch", "numpy"} == required, "what the base brings, and what --no-deps leaves to us"
    assert installs[1][-1] == "."


def test_nothing_installed_without_dependencies_needs_another_package() -> None:
    """Else --no-deps would leave it broken."""
    base = {"torch", "numpy"}
    names = {Requirement(word).name for word in _pip_installs()[0] if not word.startswith("-")}
    for name in names:
        needed = [Requirement(line) for line in metadata.requires(name) or []]
        here = {need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})}
        assert here <= names | base, f"{name} needs {here}"


def test_megatron_is_the_version_that_is_tested() -> None:
    version = _arguments()["MEGATRON_CORE_VERSION"]
    assert PINS["megatron-core"] == f"=={version}"
    (wanted,) = [Requirement(line) for line in PROJECT["dependencies"] if line.startswith("megatron-core")]
    assert Version(version) in wanted.specifier


def test_the_image_imports_what_is_there() -> None:
    """The names of its smoke check, found without importing them."""
    (check,) = [run for run in _of("RUN") if "python -c" in run]
    code = check.split('python -c "', 1)[1].rsplit('"', 1)[0]
    compile(code, "smoke check", "exec")
    modules = {name.strip() for line in re.findall(r"import ([\w., ]+);", code) for name in line.split(",")}
    ours = sorted(name for name in modules if name.split(".")[0] in ("wlb",) or name.startswith("megatron.wlb"))
    assert {"wlb.attention", "megatron.wlb.trainer"} <= set(ours)
    for name in ours:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
    assert "package_sentences" in code


def test_the_commands_of_its_header_name_what_exists() -> None:
    header = (ROOT / "docker/Dockerfile").read_text().split("ARG", 1)[0]
    scripts = re.findall(r"scripts/[\w/.]+", header)
    assert len(scripts) >= 3
    assert all((ROOT / script.rstrip(".")).is_file() for script in scripts)
    runs = [line for line in re.sub(r"\\\n#\s+", "", header).splitlines() if "docker run" in line]
    assert len(runs) == 2
    assert all('-v "$PWD/runs:/runs"' in run and "/runs/" in run.split("wlb-megatron")[1] for run in runs), (
        "what it writes must outlive the container"
    )


@pytest.mark.parametrize("extra", ["gpu", "flash", "solver", "report", "dev"])
def test_extras_are_there_and_pinned_where_ci_installs_them(extra: str) -> None:
    requirements = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    assert requirements
    if extra in ("gpu", "flash"):
        assert all(requirement.specifier for requirement in requirements), "a kernel's interface moves between versions"
        return
    missing = {r.name for r in requirements if r.name != PROJECT["name"]} - set(PINS)
    assert not missing, f"constraints.txt must pin {missing}"


def test_the_gpu_extra_holds_the_versions_whose_source_is_checked() -> None:
    (engine,) = [Requirement(line) for line in PROJECT["optional-dependencies"]["gpu"]]
    assert engine.extras == {"pytorch", "core_cu13"}
    assert len(VERSIONS) > 1
    assert all(Version(version) in engine.specifier for version in VERSIONS)
    assert Version("2.21") not in engine.specifier
    assert Version("2.8") not in engine.specifier


def test_shellcheck_is_part_of_the_environment() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    assert subprocess.run([shellcheck, "--version"], capture_output=True, check=True).stdout
