"""Arguments -> patches applied -> megatron.training.pretrain."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from wlb.errors import WlbError


def main() -> None:
    """Train as the command line says. Exits with 1 and a sentence when it cannot be done."""
    try:
        run()
    except WlbError as error:
        print(f"error (rank {os.environ.get('RANK', 0)}): {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def run(argv: Sequence[str] | None = None) -> None:
    """Train; `argv` replaces the process's arguments.

    Raises:
        WlbError: an option, a file or a saved state cannot be used.
    """
    import megatron.core

    from megatron.wlb.environment import package_sentences, require_installed_core, require_packages

    # Before another Megatron's code is run.
    require_installed_core(megatron.core, next(iter(metadata.distributions(name="megatron-core")), None))

    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.utils import print_rank_0

    from megatron.wlb import stock
    from megatron.wlb.arguments import add_wlb_arguments, wlb_options
    from megatron.wlb.command_line import check_command_line
    from megatron.wlb.cpu import cpu_as_device
    from megatron.wlb.optimizer_state import check_loadable
    from megatron.wlb.patches import compile_helpers
    from megatron.wlb.patches.registry import applied

    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    check_command_line(sys.argv[1:])
    for sentence in package_sentences():
        print_rank_0(f"> {sentence}")
    with cpu_as_device() as on_cpu, applied([compile_helpers.PATCH]):
        args = parse_and_validate_args(add_wlb_arguments)
        require_packages(args)
        stock.check_supported(args)
        if not on_cpu and (sentence := check_loadable(args)):
            print_rank_0(f"> {sentence}")
        options = wlb_options(args)
        if options is None:
            _pretrain(args, stock.dataset_provider(args), stock.forward_step(args), layer_spec=None)
        else:
            _train_packed(args, options, on_cpu=on_cpu)


def _train_packed(args: Namespace, options: Any, *, on_cpu: bool) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_0

    from megatron.wlb.arguments import adapt_megatron_arguments
    from megatron.wlb.context_parallel import shards_transformer_engine
    from megatron.wlb.core_attention import GroupExchanges
    from megatron.wlb.data_provider import packed_dataset_provider, packer_options
    from megatron.wlb.layer_spec import packed_layer_spec
    from megatron.wlb.parallel import ParallelDims
    from megatron.wlb.patches import dataloader_state, log_line, moe_metrics, rope_thd, schedule, te_context_parallel
    from megatron.wlb.patches.registry import applied
    from megatron.wlb.pipeline import run_planned
    from megatron.wlb.step import packed_forward_step
    from megatron.wlb.step_clock import DeviceClock, HostClock
    from megatron.wlb.telemetry import Telemetry
    from megatron.wlb.token_files import open_token_files
    from wlb.packing import build_packer

    for sentence in adapt_megatron_arguments(args):
        print_rank_0(f"> --wlb-packing: {sentence}")
    files = open_token_files(args, vocab_size=args.padded_vocab_size)
    packer = packer_options(args, options, files)
    build_packer(options.packing, packer)  # caps that cannot hold are refused here, before any process group exists
    print_rank_0(
        f"> --wlb-packing {options.packing}: {_queues(packer.thresholds_tokens)}, documents cut "
        + ("where plain cuts them" if options.document_cut == "stream" else "only beyond --seq-length")
    )
    ranks = options.sharding.cp_size
    print_rank_0(
        f"> --wlb-cp-sharding {options.sharding.name}: "
        + (
            f"{ranks} ranks, --cp-comm-type {' '.join(args.cp_comm_type)}"
            if ranks > 1
            else "no effect on a single rank"
        )
    )
    steps: list[Any] = []
    telemetry = Telemetry(
        clock=HostClock() if on_cpu else DeviceClock(),
        log_interval=args.tensorboard_log_interval,
        iteration=lambda: (
            args.curr_iteration + 1,
            args.consumed_train_samples + get_num_microbatches() * args.data_parallel_size,
        ),
        writers=lambda: (get_tensorboard_writer(), get_wandb_writer()),
        timeline=options.timeline,
    )

    def run_schedule(chosen: Callable[..., Any], call: dict[str, Any]) -> Any:
        return run_planned(chosen, ParallelDims.current(), telemetry, call)

    def nominal_over_run() -> float:
        return get_num_microbatches() * args.data_parallel_size / steps[0].current_step().statistics.num_micro_batches

    patches = [
        rope_thd.PATCH,
        schedule.make_patch(run_schedule),
        log_line.make_patch(telemetry.log_suffix),
        moe_metrics.make_patch(nominal_over_run),
        dataloader_state.make_patch(lambda: ParallelDims.current().cp_rank == 0),
    ]
    exchanges, keep = GroupExchanges(), options.keep_gathered_kv
    if shards_transformer_engine(args):
        patches.append(te_context_parallel.make_patch(exchanges, keep_gathered=keep))
    provider = packed_dataset_provider(args, options, files, packer, ParallelDims.current, steps.append)
    with applied(patches):
        try:
            layer_spec = packed_layer_spec(exchanges, keep_gathered_kv=keep)
            _pretrain(args, provider, packed_forward_step, layer_spec=layer_spec)
        finally:
            for planned in steps:
                planned.close()
            telemetry.close()


def _queues(thresholds_tokens: Sequence[int]) -> str:
    """As flags, so that the next run can be given them."""
    if not thresholds_tokens:
        return "no queues of long documents"
    return f"queues of long documents: --wlb-thresholds {' '.join(map(str, thresholds_tokens))}"


def _pretrain(args: Namespace, provider: Any, forward_step: Any, *, layer_spec: Any) -> None:
    """layer_spec: of a packed run; None for a stock one."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    model = gpt_config_from_args(args)
    if layer_spec is not None:
        model.transformer_layer_spec = layer_spec
        model.transformer.variable_seq_lengths = True
    pretrain(pretrain_cfg_container_from_args(args, model), provider, ModelType.encoder_or_decoder, forward_step)
