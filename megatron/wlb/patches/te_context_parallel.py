"""transformer_engine.pytorch.attention.dot_product_attention.backends:attn_forward_func_with_cp

The one function by which Transformer Engine's attention layers reach their context parallelism, under the name by which
both their callers know it. It divides every document into 2 * cp equal chunks and knows no other split. A call whose
`cu_seqlens_q` carries a plan is attended as the plan says. Without one, a call of a layer of ours has lost it, and is
refused; every other goes to the original as it came.
Seams that failed: a core attention of ours in the layer spec does without the layer's checks and its choice of a
kernel; the layer has no hook behind these.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron.wlb.core_attention import GroupExchanges, with_padding, without_padding
from megatron.wlb.packed_seq_params import PlannedRows, plan_lost, planned_rows
from megatron.wlb.patches.registry import Contract, Patch
from megatron.wlb.te_attention import LayerCommType
from wlb.attention import CommType, sharded_attention
from wlb.attention.kernels import kernel_for
from wlb.errors import ConfigError

_LOGGER = logging.getLogger(__name__)

POSITIONAL = (
    *("is_training", "q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "dropout_p"),
    *("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"),
)
"""What both callers pass by position, in Transformer Engine 2.9 to 2.20."""

_READ = ("softmax_scale", "window_size", "use_fused_attention", "use_flash_attn_3", "deterministic")

# Keyword -> the only value under a plan. The first ones are in all of 2.9 to 2.20.
_REQUIRED: dict[str, object] = {
    "qkv_format": "thd",
    "attn_mask_type": "padding_causal",
    "attn_bias_type": "no_bias",
    "attn_bias": None,
    "fp8": False,
    "fp8_output": False,
    "pad_between_seqs": False,
    "softmax_type": "vanilla",
    "softmax_offset": None,
    "return_max_logit": False,
}

# Whatever they are, they change nothing: they belong to fp8, which is refused, or say which layer it is.
_WITHOUT_EFFECT = ("fp8_meta", "quantizers", "layer_number")

# Since 2.19. Everything else that may come is refused unless it is at its default: see `_refuse_unknown`.
_READ_LATER = ("use_flash_attn_4",)


def make_patch(exchanges: GroupExchanges, *, keep_gathered: bool) -> Patch:
    """
    Args:
        exchanges: of the context-parallel groups of the run.
        keep_gathered: as in `sharded_attention`, for layers that gather.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        defaults = {p.name: p.default for p in signature.parameters.values()}
        say_once = _Once()

        def attn_forward_func_with_cp(*args: Any, **kwargs: Any) -> Any:
            # By name: whichever arguments a release passes by position, no plan goes unseen.
            call = defaults | signature.bind(*args, **kwargs).arguments
            word = call["cp_comm_type"]
            rows = planned_rows(call["cu_seqlens_q"])
            if rows is None:
                if isinstance(word, LayerCommType):
                    raise plan_lost(_layer(word), "cu_seqlens_q", call["cu_seqlens_q"])
                return original(*args, **kwargs)
            _refuse_unsupported(call, rows, defaults)
            value_size = None
            # A layer that is not of our spec means by its word what it says; what we have no path for is refused.
            comm_type: CommType = word
            if isinstance(word, LayerCommType):
                comm_type, value_size = word.planned, word.value_size
            value = without_padding(call["v"], value_size)
            window = _window_tokens(call["window_size"])
            if call.get("use_flash_attn_4", False):
                say_once(lambda: _instead_of_flash4(call["q"], value, window))
            out = sharded_attention(
                call["q"],
                call["k"],
                value,
                rows.plan,
                rows.cp_rank,
                exchanges.of(call["cp_group"]),
                comm_type=comm_type,
                scale=call["softmax_scale"],
                window_tokens=window,
                keep_gathered=keep_gathered and comm_type == "all_gather",
                kernel=_kernel(call),
                deterministic=call["deterministic"],
            )
            return with_padding(out, call["v"])

        return attn_forward_func_with_cp

    return Patch(
        target="transformer_engine.pytorch.attention.dot_product_attention.backends:attn_forward_func_with_cp",
        distribution="transformer_engine",
        versions=">=2.9,<2.21",
        contract=Contract(name="15-positional", problem=_contract_problem),
        reason="its context parallelism divides every document into 2 * cp equal chunks, and knows no plan",
        make=make,
        rebind_aliases=False,
        optional=True,
    )


def _contract_problem(backends: ModuleType, original: Any) -> str:
    """Also where it comes from: were it defined elsewhere, the callers might have another one as well."""
    parameters = inspect.signature(original).parameters
    leading = tuple(parameters)[: len(POSITIONAL)]
    if leading != POSITIONAL:
        return f"wanted {len(POSITIONAL)} leading parameters {', '.join(POSITIONAL)}, found {', '.join(leading)}"
    if bare := [name for name in tuple(parameters)[len(POSITIONAL) :] if parameters[name].default is inspect._empty]:
        return f"wanted a default for each parameter after them, found none for {', '.join(bare)}"
    if missing := [name for name in (*_READ, *_REQUIRED, *_WITHOUT_EFFECT) if name not in parameters]:
        return f"wanted parameters {', '.join(missing)}, found none of these names"
    home = inspect.getmodule(original)
    if home is None or home is backends or getattr(home, original.__name__, None) is not original:
        return "wanted a function of context_parallel that backends imports by name, found another"
    return ""


def _refuse_unsupported(call: Mapping[str, Any], rows: PlannedRows, defaults: Mapping[str, Any]) -> None:
    def refuse(name: str, rule: str) -> None:
        raise ConfigError(
            f"{name} of Transformer Engine's attention must be {rule} for a planned micro-batch, got {call[name]!r}"
        )

    for name, value in _REQUIRED.items():
        # By identity first: a bias is a tensor, which does not compare to one truth.
        if call[name] is not value and (isinstance(call[name], torch.Tensor) or call[name] != value):
            refuse(name, repr(value))
    if call["dropout_p"] != 0:
        refuse("dropout_p", "0")
    of_keys = planned_rows(call["cu_seqlens_kv"])
    if of_keys is None:
        raise plan_lost(_layer(call["cp_comm_type"]), "cu_seqlens_kv", call["cu_seqlens_kv"])
    if of_keys is not rows:
        raise ConfigError("cu_seqlens_kv of a planned micro-batch must carry the plan of cu_seqlens_q, got another")
    if isinstance(call["cp_group"], list):
        refuse("cp_group", "one group (cp_comm_type a2a+p2p has two)")
    window = call["window_size"]
    if window is not None and tuple(window) != (-1, -1) and window[1] != 0:
        refuse("window_size", "(keys before, 0): a query sees no key behind its own")
    _refuse_unknown(call, defaults, refuse)


def _refuse_unknown(call: Mapping[str, Any], defaults: Mapping[str, Any], refuse: Callable[[str, str], None]) -> None:
    """Keywords that nobody has read pass at their default, which is how the function worked before it had them.

    Refused when a call uses one, rather than when the patch is applied: a release within the range would be lost to
    every run for an option that none of them uses, and calls without a plan may use it.
    """
    known = {*POSITIONAL, *_READ, *_READ_LATER, *_REQUIRED, *_WITHOUT_EFFECT}
    for name in call.keys() - known:
        default = defaults.get(name, inspect.Parameter.empty)
        if call[name] is not default and (isinstance(call[name], torch.Tensor) or call[name] != default):
            refuse(name, f"at its default, {default!r}")


def _layer(word: str) -> str:
    """Of which a call is; the caller for flash-attention hands over no number of it."""
    number = word.layer_number if isinstance(word, LayerCommType) else None
    return "attention" if number is None else f"attention of layer {number}"


class _Once:
    """Logs the first sentence, on one rank."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, sentence: Callable[[], str]) -> None:
        if not self._said:
            log_single_rank(_LOGGER, logging.WARNING, sentence())
            self._said = True


def _instead_of_flash4(query: torch.Tensor, value: torch.Tensor, window_tokens: int | None) -> str:
    kernel = kernel_for(query.device, query=query, value=value, window_tokens=window_tokens)
    return (
        "Transformer Engine chose FlashAttention 4 for attention with context parallelism; planned micro-batches have "
        f"no kernel of it, and are computed by {type(kernel).__name__}"
    )


def _window_tokens(window: tuple[int, int] | None) -> int | None:
    """Keys that a query sees, its own included. Transformer Engine counts those before its own, -1 for all."""
    return None if window is None or window[0] < 0 else window[0] + 1


def _kernel(call: Mapping[str, Any]) -> str:
    """The one that Transformer Engine chose, by our name. There is none of ours for FlashAttention 4."""
    if call["q"].device.type == "cpu" or call.get("use_flash_attn_4", False):
        return "auto"
    if call["use_fused_attention"]:
        return "cudnn"
    return "flash3" if call["use_flash_attn_3"] else "flash2"
