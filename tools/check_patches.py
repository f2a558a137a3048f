#!/usr/bin/env python3
"""Compare every patch with the installed packages; exits with 1 when one was written against something else.

What a patch wants is the digest of its target's source, or the name of a contract that the target must keep. A package
that training does without, like Transformer Engine, may be "not installed"."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wlb.command_line import run_tool
from wlb.errors import PatchError


def main(argv: Sequence[str]) -> None:
    """Print the table.

    Raises:
        PatchError: naming target, wanted and found of each patch that does not fit.
    """
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    with warnings.catch_warnings():
        # Upstream's own, on import: what is lost without Apex or Transformer Engine is said at training's start.
        warnings.simplefilter("ignore")
        from megatron.wlb.patches.catalogue import every_patch, patch_table
        from megatron.wlb.patches.registry import check

        states = [check(patch) for patch in every_patch()]
    print(patch_table(states))
    drifted = [f"{s.patch.target}: {s.problem}" for s in states if s.problem and not s.absent]
    if drifted:
        raise PatchError(f"{len(drifted)} of {len(states)} patches do not fit: {'; '.join(drifted)}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
