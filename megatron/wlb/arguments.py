"""The `--wlb-*` flags: added to Megatron's parser, checked against Megatron's own options.

Every combination that cannot work is refused here, before any process group exists, in a sentence that names
the option, the rule and the value.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.wlb.argument_rules import check_values, flag_name, refuse_unsupported
from megatron.wlb.context_parallel import mark_default_comm_type, mean_head_size, settle_comm_type, sharding_of
from megatron.wlb.virtual_stages import num_chunks, require_whole_groups
from wlb.cost import CrossoverCost, PipelineCosts, TransformerShape, equal_stages, load_pipeline_costs
from wlb.errors import ConfigError
from wlb.packing import DEFAULT_NUM_QUEUES, DEFAULT_SOLVER_SECONDS, PACKERS, natural_cut
from wlb.sharding import DEFAULT_OPERATIONS_PER_BYTE, SHARDERS, Sharding

_DEFAULT_PACKER = "makespan"
_DEFAULT_SHARDER = "hybrid"
# Of Megatron before 0.19, whose training loop still divides by it where none is given.
_DEFAULT_EVAL_INTERVAL_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WlbOptions:
    """What the `--wlb-*` flags say, checked."""

    packing: str
    sharding: Sharding
    keep_gathered_kv: bool
    document_cut: Literal["stream", "window"]
    cap_windows: float | None
    in_flight_windows: float | None
    search_evaluations: int | None
    max_delay_steps: int
    intake: Literal["algorithm1", "budget"]
    num_queues: int
    thresholds_tokens: tuple[int, ...] | None
    greedy_window_batches: int
    solver_lengths: Literal["variable", "fixed"]
    solver_seconds: float
    costs: PipelineCosts
    steps_ahead: int
    ledger: Path | None
    timeline: Path | None


def add_wlb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The `extra_args_provider` of Megatron's parser."""
    mark_default_comm_type(parser)
    group = parser.add_argument_group(title="workload balance")
    add = group.add_argument
    add(
        "--wlb-packing",
        nargs="?",
        const=_DEFAULT_PACKER,
        choices=sorted(PACKERS),
        help="Train packed micro-batches planned by this algorithm instead of fixed-length samples. Without a name: "
        f"{_DEFAULT_PACKER}. 'plain' packs in arrival order, the baseline of every comparison.",
    )
    add(
        "--wlb-cp-sharding",
        nargs="?",
        const=_DEFAULT_SHARDER,
        choices=list(SHARDERS),
        help=f"How context-parallel ranks divide a packed micro-batch. Without a name: {_DEFAULT_SHARDER}. Default "
        "with --wlb-packing: per_sequence, Megatron's head-tail split of the pack. Without --wlb-packing: implies "
        "--wlb-packing plain.",
    )
    add(
        "--wlb-keep-gathered-kv",
        action="store_true",
        help="Keep the keys and values received from other context-parallel ranks for the backward pass, instead of "
        "receiving them again (--cp-comm-type all_gather).",
    )
    add(
        "--wlb-operations-per-byte",
        type=float,
        help="Operations that attention computes in the time in which a context-parallel rank receives one byte: what "
        f"sharders weigh keys and values that travel with. Default: {DEFAULT_OPERATIONS_PER_BYTE:.0f}.",
    )
    add(
        "--wlb-document-cut",
        choices=["stream", "window"],
        help="'stream' cuts documents where plain packing would, so that runs of different packers train the same "
        "pieces; 'window' cuts only documents longer than --seq-length. Default: stream for plain, and for makespan "
        "and two_stage without --wlb-max-delay-steps; else window.",
    )
    add(
        "--wlb-cap-windows",
        type=float,
        help="Most tokens of a micro-batch, in multiples of --seq-length, for packers of variable length. Default: 1 "
        "for makespan and two_stage, which then need no more memory than plain; 1.5 for wlb, which cannot do with "
        "less, and for solver.",
    )
    add(
        "--wlb-in-flight-windows",
        type=float,
        help="Most tokens whose activations the first pipeline stage holds at once, in multiples of --seq-length, for "
        "packers makespan and two_stage. Default: what 1F1B holds for plain.",
    )
    add(
        "--wlb-search-evaluations",
        type=int,
        help="Candidate plans that packer makespan times in a step. Default: about 20 ms worth.",
    )
    add(
        "--wlb-max-delay-steps",
        type=int,
        default=0,
        help="Longest wait of a document, in steps, under makespan, two_stage, and wlb with --wlb-intake budget: long "
        "documents then wait until several can be trained together. Default 0: nothing waits, and each step trains the "
        "very pieces that plain would train in it.",
    )
    add(
        "--wlb-intake",
        choices=["algorithm1", "budget"],
        help="How packer wlb draws documents: as published, each step a full batch whatever its queues release "
        "(algorithm1, the default), or only what makes up the step's token budget (budget).",
    )
    add(
        "--wlb-num-queues",
        type=int,
        help="Outlier queues of packer wlb as published; their thresholds are derived from the lengths of the data. "
        f"Default: {DEFAULT_NUM_QUEUES}.",
    )
    add(
        "--wlb-thresholds",
        type=int,
        nargs="+",
        help="Shortest document of each outlier queue, in tokens, increasing. Default: for wlb as published by "
        "--wlb-num-queues; with --wlb-max-delay-steps those with the shortest predicted steps in a replay of a "
        "sample of the data.",
    )
    add("--wlb-greedy-window", type=int, help="Global batches over which packer greedy balances. Default: 1.")
    add(
        "--wlb-solver-lengths",
        choices=["variable", "fixed"],
        help="What packer solver makes small: the largest micro-batch's predicted time, under --wlb-cap-windows "
        "(variable), or its sum of squared lengths, under --seq-length (fixed). Default: variable.",
    )
    add(
        "--wlb-solver-seconds",
        type=float,
        help="How long packer solver may search in a step, counted in its own operations so that every rank stops at "
        f"the same plan: about so many seconds of one core. Default: {DEFAULT_SOLVER_SECONDS:g}.",
    )
    add(
        "--wlb-crossover",
        type=float,
        help="Document length, in tokens, at which attention takes as long as all else. Default: by counting "
        "floating-point operations of the model.",
    )
    add(
        "--wlb-overhead-tokens",
        type=float,
        default=1000,
        help="What a micro-batch costs a pipeline stage however short it is, as the time of so many tokens.",
    )
    add(
        "--wlb-cost-profile",
        type=Path,
        help="JSON of measured costs, of the model or of each pipeline stage (tools/report.py cost writes it); "
        "overrides --wlb-crossover and --wlb-overhead-tokens.",
    )
    add(
        "--wlb-plan-ahead",
        type=int,
        default=2,
        help="Steps that a process beside training plans ahead; 0 plans in the training process.",
    )
    add("--wlb-ledger", type=Path, help="Write the document ids of each step to this file, one JSON line a step.")
    add("--wlb-timeline", type=Path, help="Write when each rank worked and waited to files in this folder.")
    add(
        "--dataloader-save",
        help="Folder for the state of packing at each checkpoint. Default: --save.",
    )
    return parser


def wlb_options(args: Namespace) -> WlbOptions | None:
    """The checked options; None when --wlb-packing is off.

    Raises:
        ConfigError: a value breaks a rule, or an option of Megatron's cannot be combined with packing.
    """
    if args.wlb_packing is None and args.wlb_cp_sharding is not None:
        args.wlb_packing = "plain"
    settle_comm_type(args, packed=args.wlb_packing is not None)
    if args.wlb_packing is None:
        defaults = vars(add_wlb_arguments(argparse.ArgumentParser()).parse_args([]))
        for name, default in defaults.items():
            if name.startswith("wlb_") and getattr(args, name) != default:
                raise ConfigError(f"{flag_name(name)} needs --wlb-packing, got {getattr(args, name)} without it")
        return None
    refuse_unsupported(args)
    require_whole_groups(args)
    check_values(args)
    thresholds = None if args.wlb_thresholds is None else tuple(args.wlb_thresholds)
    return WlbOptions(
        packing=args.wlb_packing,
        sharding=sharding_of(
            args, name=args.wlb_cp_sharding or "per_sequence", operations_per_byte=args.wlb_operations_per_byte
        ),
        keep_gathered_kv=args.wlb_keep_gathered_kv,
        document_cut=(args.wlb_document_cut or natural_cut(args.wlb_packing, max_delay_steps=args.wlb_max_delay_steps)),
        cap_windows=args.wlb_cap_windows,
        in_flight_windows=args.wlb_in_flight_windows,
        search_evaluations=args.wlb_search_evaluations,
        max_delay_steps=args.wlb_max_delay_steps,
        intake=args.wlb_intake or "algorithm1",
        num_queues=DEFAULT_NUM_QUEUES if args.wlb_num_queues is None else args.wlb_num_queues,
        thresholds_tokens=thresholds,
        greedy_window_batches=args.wlb_greedy_window or 1,
        solver_lengths=args.wlb_solver_lengths or "variable",
        solver_seconds=DEFAULT_SOLVER_SECONDS if args.wlb_solver_seconds is None else args.wlb_solver_seconds,
        costs=_pipeline_costs(args),
        steps_ahead=args.wlb_plan_ahead,
        ledger=args.wlb_ledger,
        timeline=args.wlb_timeline,
    )


def adapt_megatron_arguments(args: Namespace) -> list[str]:
    """Set the options of Megatron's that packing needs; returns a sentence for each that the user did not set."""
    said = []
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        said.append(
            "--calculate-per-token-loss is switched on: micro-batches differ in length, and a mean of their means "
            "would weigh tokens unequally"
        )
    if args.eval_interval is None:
        args.eval_interval = _DEFAULT_EVAL_INTERVAL_STEPS
        said.append(f"--eval-interval is {_DEFAULT_EVAL_INTERVAL_STEPS}: Megatron's training loop needs one")
    if args.dataloader_save is None:
        args.dataloader_save = args.save
    args.dataloader_type = "external"
    if args.context_parallel_size > 1 and args.multi_latent_attention and args.apply_rope_fusion:
        args.apply_rope_fusion = False
        said.append(
            "--no-rope-fusion is switched on: the fused kernels of multi-latent attention rotate by the positions of "
            "Megatron's own split"
        )
    said.append(
        "--num-workers does not apply: planning reads lengths and each rank reads its own tokens from the memory map"
    )
    said.append(
        "--reset-position-ids, --reset-attention-mask and --eod-mask-loss hold for every packed run, given or not: "
        "positions and attention start anew in each document, and its last token is only ever a label"
    )
    return said


def _pipeline_costs(args: Namespace) -> PipelineCosts:
    num_stages, chunks = args.pipeline_model_parallel_size, num_chunks(args)
    if args.wlb_cost_profile is not None:
        return load_pipeline_costs(args.wlb_cost_profile, num_stages, num_chunks=chunks)
    crossover_tokens = args.wlb_crossover
    if crossover_tokens is None:
        crossover_tokens = TransformerShape(
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_layers=args.num_layers,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
            head_size=mean_head_size(args),
            vocab_size=args.padded_vocab_size or args.vocab_size or 0,
            gated=args.swiglu,
        ).crossover_tokens
    # Overhead is per stage: the whole model, if it were one stage, would pay it once for each.
    whole = CrossoverCost(crossover_tokens=crossover_tokens, overhead_tokens=args.wlb_overhead_tokens * num_stages)
    return equal_stages(whole, num_stages, num_chunks=chunks)
