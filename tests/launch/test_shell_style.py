"""Every shell script of the repository passes shellcheck."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
FOLDERS = ("scripts", ".ci", "tools", "docker")


def _shell_scripts() -> list[Path]:
    """By their first line: not every script has a telling name."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    return [
        path
        for path in files
        if path.read_bytes().split(b"\n", 1)[0].startswith((b"#!/usr/bin/env bash", b"# shellcheck shell=bash"))
    ]


def _shellcheck(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SHELLCHECK, "--external-sources", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_shell_script_passes_shellcheck() -> None:
    scripts = _shell_scripts()
    named = {path.relative_to(ROOT).as_posix() for path in scripts}
    assert {".ci/run", "scripts/slurm/train.sbatch", "scripts/launch_common.sh", "scripts/test.sh"} <= named
    checked = _shellcheck(*scripts)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_shellcheck_sees_a_fault(tmp_path: Path) -> None:
    """The control: an array that is written as a word."""
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nargs=(a b)\necho $args\n")
    assert "SC2128" in _shellcheck(tmp_path / "bad.sh").stdout
