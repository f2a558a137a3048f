"""A training run as a value: what each rank reports of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.processes import run_ranks

# A GPT that runs in a second: no dropout, no fused kernels, weights large enough that wrong angles or a leak
# between documents move the loss visibly.
MODEL_ARGS = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size", "64"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--position-embedding-type", "rope"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--init-method-std", "0.25"),
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--weight-decay", "0.1", "--clip-grad", "1.0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--untie-embeddings-and-output-weights"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--make-vocab-size-divisible-by", "32"),
]
CPU_ARGS = [
    *("--distributed-backend", "gloo", "--use-cpu-initialization", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    *("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
    *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000", "--ckpt-format", "torch_dist"),
    *("--distributed-timeout-minutes", "1", "--num-workers", "0"),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run reported: one entry per iteration.

    losses: full precision, of the last pipeline stage. grad_norms: the same on every rank. log: of the last rank.
    """

    losses: list[float]
    grad_norms: list[float]
    log: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions.

    ep: experts are divided inside the data-parallel ranks. vpp: model chunks of a pipeline stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def args(self) -> list[str]:
        args = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        args += ["--context-parallel-size", str(self.cp), "--expert-model-parallel-size", str(self.ep)]
        if self.vpp > 1:
            args += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        return args

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "dp": self.dp, "cp": self.cp, "ep": self.ep}
        return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"


def train(
    args: Sequence[str | Path],
    *,
    layout: Layout | None = None,
    iterations: int,
    sabotage: Callable[[ExitStack], None] | None = None,
    timeout_s: float = 120.0,
    writer_process: bool = False,
    without: tuple[str, ...] = (),
) -> Run:
    """Run the entry point on forked ranks.

    without: flags of MODEL_ARGS and CPU_ARGS that are left out, with their values.
    writer_process: let Megatron start the process through which it hands over what a checkpoint's writers return;
        without, a queue of this process serves, five seconds faster.
    sabotage: called in each rank before training, to break something on purpose; undone with the stack.
    """
    layout = layout or Layout()
    ours = [*MODEL_ARGS, *CPU_ARGS]
    for flag in without:
        place = ours.index(flag)
        del ours[place : place + 2]
    argv = [*ours, *layout.args, "--train-iters", str(iterations), *map(str, args)]
    results = run_ranks(_train_rank, layout.world_size, argv, sabotage, writer_process, timeout_s=timeout_s)
    losses, _, log = results[-1]
    return Run(losses=losses, grad_norms=results[0][1], log=log)


def _train_rank(
    argv: list[str], sabotage: Callable[[ExitStack], None] | None, writer_process: bool
) -> tuple[list[float], list[float], str]:
    import io
    import queue
    from contextlib import redirect_stdout

    import megatron.training.training as training
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron.wlb.patches.registry import replace
    from megatron.wlb.trainer import run

    losses: list[float] = []
    grad_norms: list[float] = []
    original = training.training_log

    def training_log(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if loss_dict:
            losses.append(float(loss_dict["lm loss"]))
        grad_norms.append(float(args[6]))
        return original(loss_dict, *args, **kwargs)

    printed = io.StringIO()
    with ExitStack() as undo:
        replace(undo, training, "training_log", training_log)
        if not writer_process:
            replace(undo, filesystem_async, "_results_queue", queue.Queue())
        if sabotage is not None:
            sabotage(undo)
        try:
            with redirect_stdout(_Tee(printed)):
                run(argv)
        except SystemExit as end:
            if end.code not in (0, None):
                raise
    return losses, grad_norms, printed.getvalue()


class _Tee:
    """Writes to the rank's log and to a buffer."""

    def __init__(self, buffer: Any) -> None:
        import sys

        self._targets = (sys.stdout, buffer)

    def write(self, text: str) -> int:
        return max(t.write(text) for t in self._targets)

    def flush(self) -> None:
        for target in self._targets:
            target.flush()
