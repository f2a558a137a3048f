"""Whether the state of the distributed optimizer can be loaded on CUDA.

Megatron-Core 0.19 falls back to PyTorch's Adam where there is neither Transformer Engine nor Apex. A distributed
optimizer then trains and saves, but loading a checkpoint fails an assertion without words. On the CPU
`cpu_optimizer.py` repairs that.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron.wlb.environment import APEX, TRANSFORMER_ENGINE, has_package
from wlb.errors import ConfigError


def check_loadable(args: Namespace) -> str:
    """Refuse what would fail after minutes of start-up; returns what a run that saves should know, or nothing.

    Raises:
        ConfigError: the run would load state of a distributed optimizer that it cannot load.
    """
    if not args.use_distributed_optimizer or has_package(TRANSFORMER_ENGINE) or has_package(APEX):
        return ""
    wanted = f"{TRANSFORMER_ENGINE} or {APEX}, with neither of which Megatron-Core can load its state"
    loads = args.load is not None and (Path(args.load) / "latest_checkpointed_iteration.txt").is_file()
    if loads and not (args.finetune or args.no_load_optim):
        raise ConfigError(
            f"--use-distributed-optimizer with a checkpoint in --load needs {wanted} (--no-load-optim goes on with a "
            f"new optimizer), got {args.load}"
        )
    if args.save is None or args.no_save_optim:
        return ""
    return f"--use-distributed-optimizer: this run's checkpoints can be resumed only with {wanted}"
