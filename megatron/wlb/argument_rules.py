"""What the `--wlb-*` flags cannot be, and what of Megatron's they cannot be combined with."""

from __future__ import annotations

from argparse import Namespace
from math import inf

from megatron.wlb.context_parallel import attention_rules
from wlb.errors import ConfigError
from wlb.packing.solver import require_solver
from wlb.packing.thresholds import MAX_QUEUES

# Flags that only some packers read; with another packer they are refused, never ignored.
_READ_BY = {
    "wlb_cap_windows": ("wlb", "makespan", "two_stage", "solver"),
    "wlb_in_flight_windows": ("makespan", "two_stage"),
    "wlb_search_evaluations": ("makespan",),
    "wlb_num_queues": ("wlb",),
    "wlb_intake": ("wlb",),
    "wlb_thresholds": ("wlb", "makespan", "two_stage"),
    "wlb_greedy_window": ("greedy",),
    "wlb_solver_lengths": ("solver",),
    "wlb_solver_seconds": ("solver",),
}


def check_values(args: Namespace) -> None:
    """Rules of our own flags, each in a sentence that names the flag as the user gave it."""
    for name, packers in _READ_BY.items():
        value = getattr(args, name)
        if value is not None and args.wlb_packing not in packers:
            raise ConfigError(
                f"{flag_name(name)} is read by {' and '.join(packers)} only, got {value} with packer {args.wlb_packing}"
            )
    fixed_lengths = args.wlb_solver_lengths == "fixed"
    default_cap = 1.5 if args.wlb_packing in ("wlb", "solver") and not fixed_lengths else 1.0
    cap: float = default_cap if args.wlb_cap_windows is None else args.wlb_cap_windows
    in_flight, thresholds, bound = args.wlb_in_flight_windows, args.wlb_thresholds, args.wlb_max_delay_steps
    rules: list[tuple[str, object, bool, str]] = [
        ("wlb_max_delay_steps", bound, bound >= 0, "must be >= 0"),
        (
            "wlb_max_delay_steps",
            bound,
            not bound or args.wlb_packing in ("makespan", "two_stage") or args.wlb_intake == "budget",
            "is read by makespan and two_stage, and by wlb with --wlb-intake budget",
        ),
        ("wlb_intake", args.wlb_intake, args.wlb_intake != "budget" or bound >= 1, "needs --wlb-max-delay-steps >= 1"),
        (
            "wlb_num_queues",
            args.wlb_num_queues,
            args.wlb_num_queues is None or args.wlb_intake != "budget",
            "is read by --wlb-intake algorithm1 only",
        ),
        (
            "wlb_thresholds",
            thresholds and " ".join(map(str, thresholds)),
            not thresholds or args.wlb_packing == "wlb" or bound >= 1,
            f"needs --wlb-max-delay-steps >= 1 with packer {args.wlb_packing}",
        ),
        ("wlb_plan_ahead", args.wlb_plan_ahead, args.wlb_plan_ahead >= 0, "must be >= 0"),
        (
            "wlb_overhead_tokens",
            args.wlb_overhead_tokens,
            0 <= args.wlb_overhead_tokens < inf,
            "must be finite and >= 0",
        ),
        ("wlb_crossover", args.wlb_crossover, 0 < (args.wlb_crossover or 1) < inf, "must be finite and > 0"),
        (
            "wlb_operations_per_byte",
            args.wlb_operations_per_byte,
            0 <= (args.wlb_operations_per_byte or 0) < inf,
            "must be finite and >= 0",
        ),
        (
            "wlb_keep_gathered_kv",
            True,
            not args.wlb_keep_gathered_kv or set(args.cp_comm_type) == {"all_gather"},
            "needs --cp-comm-type all_gather (a ring holds no gathered keys)",
        ),
        ("wlb_greedy_window", args.wlb_greedy_window, (args.wlb_greedy_window or 1) >= 1, "must be >= 1"),
        (
            "wlb_num_queues",
            args.wlb_num_queues,
            0 <= (args.wlb_num_queues or 0) <= MAX_QUEUES,
            f"must be in [0, {MAX_QUEUES}]",
        ),
        (
            "wlb_search_evaluations",
            args.wlb_search_evaluations,
            (args.wlb_search_evaluations or 0) >= 0,
            "must be >= 0",
        ),
        (
            "wlb_cap_windows",
            cap,
            args.wlb_packing != "wlb" or 1 < cap < inf,
            "must be > 1 with packer wlb, which otherwise carries over more in every step",
        ),
        (
            "wlb_cap_windows",
            cap,
            args.wlb_packing not in ("makespan", "two_stage") or 1 <= cap < inf,
            f"must be >= 1 with packer {args.wlb_packing}, or a window-long document has no place",
        ),
        (
            "wlb_cap_windows",
            cap,
            args.wlb_packing != "solver" or 1 <= cap < inf,
            "must be >= 1 with packer solver, or a window-long document has no place",
        ),
        ("wlb_cap_windows", cap, not fixed_lengths or cap == 1, "must be 1 with --wlb-solver-lengths fixed"),
        (
            "wlb_solver_seconds",
            args.wlb_solver_seconds,
            args.wlb_solver_seconds is None or 0 < args.wlb_solver_seconds < inf,
            "must be finite and > 0",
        ),
        (
            "wlb_in_flight_windows",
            in_flight,
            in_flight is None or cap <= in_flight < inf,
            f"must be >= the cap of a micro-batch, {cap} windows",
        ),
        (
            "wlb_thresholds",
            thresholds and " ".join(map(str, thresholds)),
            not thresholds or (list(thresholds) == sorted(set(thresholds)) and thresholds[0] > 0),
            "must be > 0 and increase strictly",
        ),
        (
            "wlb_thresholds",
            thresholds and thresholds[-1],
            not thresholds or thresholds[-1] < _tokens(cap, args),
            f"must stay below the cap of a micro-batch, {_tokens(cap, args)} tokens",
        ),
        (
            "wlb_thresholds",
            thresholds and thresholds[-1],
            not thresholds or not bound or thresholds[-1] <= args.seq_length,
            f"must be at most --seq-length, {args.seq_length}, the longest piece of a document",
        ),
    ]
    for name, value, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{flag_name(name)} {rule}, got {value}")
    if args.wlb_packing == "solver":
        require_solver()


def _tokens(windows: float, args: Namespace) -> int:
    return int(windows * args.seq_length) if windows < inf else args.seq_length


def flag_name(name: str) -> str:
    """`wlb_cap_windows` -> `--wlb-cap-windows`."""
    return "--" + name.replace("_", "-")


def refuse_unsupported(args: Namespace) -> None:
    """Options that assume one length for all samples, or that this version does not do yet."""
    rules: list[tuple[str, object, bool, str]] = [
        ("--micro-batch-size", args.micro_batch_size, args.micro_batch_size != 1, "must be 1"),
        (
            "--eval-micro-batch-size",
            getattr(args, "eval_micro_batch_size", 1),
            getattr(args, "eval_micro_batch_size", None) not in (None, 1),
            "must be 1",
        ),
        ("--spec", args.spec, args.spec is not None, "must be unset (packing brings its own)"),
        ("--cuda-graph-impl", args.cuda_graph_impl, args.cuda_graph_impl != "none", "must be none"),
        ("--mtp-num-layers", args.mtp_num_layers, bool(args.mtp_num_layers), "must be unset"),
        (
            "--position-embedding-type",
            args.position_embedding_type,
            args.position_embedding_type == "mrope",
            "must not be mrope",
        ),
        (
            "--dataloader-type",
            args.dataloader_type,
            args.dataloader_type not in (None, "single", "external"),
            "must be unset or external",
        ),
        (
            "--wlb-timeline",
            args.wlb_timeline,
            args.wlb_timeline is not None and args.virtual_pipeline_model_parallel_size is not None,
            "must be unset with virtual pipeline stages in this version (its reader knows one chunk a stage)",
        ),
        (
            "--rampup-batch-size",
            args.rampup_batch_size,
            args.rampup_batch_size is not None,
            "must be unset (Megatron ignores it: use --step-batch-size-schedule)",
        ),
        (
            "--wlb-greedy-window",
            args.wlb_greedy_window,
            args.step_batch_size_schedule is not None and (args.wlb_greedy_window or 1) > 1,
            "must be 1 with --step-batch-size-schedule",
        ),
        (
            "--moe-router-load-balancing-type",
            "global_aux_loss",
            bool(args.num_experts) and "global_aux_loss" in _words(args.moe_router_load_balancing_type),
            "must not be global_aux_loss (it takes all micro-batches to have one length)",
        ),
        (
            "--tensor-parallel-num-weight-shards",
            args.tensor_parallel_num_weight_shards,
            args.gtp_weight_remat_size > 1,
            "must be unset",
        ),
        ("--iterations-to-skip", args.iterations_to_skip, bool(args.iterations_to_skip), "must be unset"),
        ("--full-validation", True, bool(args.full_validation), "must be off"),
        ("--multiple-validation-sets", True, bool(args.multiple_validation_sets), "must be off"),
        (
            "--phase-transition-iterations",
            args.phase_transition_iterations,
            bool(args.phase_transition_iterations),
            "must be unset",
        ),
        ("--overlap-moe-expert-parallel-comm", True, bool(args.overlap_moe_expert_parallel_comm), "must be off"),
        (
            "--moe-token-dispatcher-type",
            args.moe_token_dispatcher_type,
            bool(args.num_experts) and args.moe_token_dispatcher_type == "allgather",
            "must not be allgather",
        ),
        (
            "--experimental-attention-variant",
            args.experimental_attention_variant,
            args.experimental_attention_variant is not None,
            "must be unset",
        ),
        ("--tp-comm-overlap", True, bool(args.tp_comm_overlap), "must be off (its buffers have one length)"),
        ("--use-legacy-models", True, bool(getattr(args, "use_legacy_models", False)), "must be off"),
    ]
    rules += attention_rules(args)
    for option, value, refused, rule in rules:
        if refused:
            raise ConfigError(f"{option} {rule} with --wlb-packing, got {value}")


def _words(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
