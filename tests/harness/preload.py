"""What every rank needs, imported once. Nothing here may start a thread or a process group."""

import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.training.arguments
    import megatron.training.checkpointing
    import megatron.training.training

import megatron.wlb.batch
import megatron.wlb.data_provider
import megatron.wlb.layer_spec
import megatron.wlb.pipeline
import megatron.wlb.step
import megatron.wlb.stock
import megatron.wlb.telemetry
import megatron.wlb.token_files
import megatron.wlb.trainer  # noqa: F401
