#!/usr/bin/env python3
"""Print the wheels of a folder that this Python lacks, one a line: what `pip install --no-deps` should add to it."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.errors import ConfigError

# These fit the driver and each other as the machine has them.
NEVER = ("torch", "triton", "nvidia", "transformer_engine", "flash_attn", "apex")


def missing_wheels(folder: Path) -> list[Path]:
    """Wheels of packages that are not installed, and megatron-core's also where another version is; none of `NEVER`.

    Raises ConfigError if the folder holds no wheel.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ConfigError(f"--wheels must name a folder that holds wheels, got {folder}")
    return [w for w in wheels if not w.name.lower().startswith(NEVER) and not _is_installed(w)]


def _is_installed(wheel: Path) -> bool:
    name, version, *_ = wheel.name.split("-")
    try:
        # Another numpy or protobuf than the machine's would not fit what the machine has built on its own.
        return importlib.metadata.version(name) == version or name.lower() != "megatron_core"
    except importlib.metadata.PackageNotFoundError:
        return False


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError as `missing_wheels`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for wheel in missing_wheels(parser.parse_args(argv).folder):
        print(wheel)


if __name__ == "__main__":
    sys.exit(run_tool(main))
