"""Two caps on tokens, and which numbers of micro-batches a schedule takes: for packers that choose that number."""

from __future__ import annotations

from collections.abc import Callable

from wlb.errors import ConfigError
from wlb.packing.options import PackerOptions
from wlb.packing.packer import StepShape
from wlb.schedule.model import PipelineModel


def caps_of(options: PackerOptions, pipeline: PipelineModel) -> tuple[int, int]:
    """Most tokens of a micro-batch (one window), and in flight on the first stage (what plain holds): the defaults."""
    shape = options.shape
    cap_tokens = int((1.0 if options.cap_windows is None else options.cap_windows) * shape.window_tokens)
    if options.in_flight_windows is not None:
        return cap_tokens, int(options.in_flight_windows * shape.window_tokens)
    return cap_tokens, max(cap_tokens, plain_in_flight_tokens(shape, pipeline))


def plain_in_flight_tokens(shape: StepShape, pipeline: PipelineModel) -> int:
    """Tokens that the first stage holds when every micro-batch is a full window."""
    return pipeline.shape.first_stage_peak_tokens([shape.window_tokens] * shape.micro_batches_per_replica)


def require_caps(
    shape: StepShape,
    pipeline: PipelineModel,
    *,
    cap_tokens: int,
    in_flight_tokens: int,
    count_multiple: int,
    takes: Callable[[int], bool],
) -> None:
    """Raises ConfigError unless plain's own step keeps both caps and its count is one that `takes` allows."""
    if cap_tokens < shape.window_tokens:
        raise ConfigError(f"cap_tokens must be >= the window of {shape.window_tokens} tokens, got {cap_tokens}")
    if in_flight_tokens < cap_tokens:
        raise ConfigError(
            f"in_flight_tokens must be >= cap_tokens = {cap_tokens}, or a full micro-batch could never run, "
            f"got {in_flight_tokens}"
        )
    if count_multiple < 1:
        raise ConfigError(f"count_multiple must be >= 1, got {count_multiple}")
    if not takes(shape.micro_batches_per_replica):
        raise ConfigError(
            f"micro_batches_per_replica must be a multiple of count_multiple = {count_multiple} that the "
            f"schedule of {pipeline.shape.num_stages} stages with {pipeline.shape.num_chunks} chunks "
            f"takes, got {shape.micro_batches_per_replica}"
        )
