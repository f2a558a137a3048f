"""Transformer Engine's real attention layers on two ranks without a GPU: its Python runs, its kernels never do.

`measure` runs in each of two ranks over gloo and returns numbers and facts; the tests hold them against their bounds.
Beyond `cpu_as_device`, three things are pretended: that tensors are on CUDA, that the device has compute capability
9.0, and which kernels are there. Every check and every choice that Transformer Engine makes from these is its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from tests.parity.sharded_cases import Heads, Tensors, errors, inputs, padded, plan_named, run_dense
from wlb.sharding import SHARDERS

CP_SIZE = 2
LENGTHS = padded((7, 4, 2), CP_SIZE)
KERNELS = ("flash", "fused")
COMM_TYPES = ("all_gather", "p2p")
PLANS = (*SHARDERS, "random")
HEADS = {"mha": Heads(num_kv_heads=4), "gqa": Heads(), "mla": Heads(num_kv_heads=4, head_size=16, value_size=8)}
WINDOW_TOKENS = 3


@cache
def missing_because() -> str:
    """Why Transformer Engine's layers cannot be made here; empty where they can."""
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    # In a process of its own: importing loads CUDA's libraries, and may fail half-way.
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return said.stderr.strip().splitlines()[-1] if said.returncode else ""


@contextmanager
def two_ranks() -> Iterator[Any]:
    """A context-parallel group of two over gloo; yields its `GroupExchanges`."""
    from megatron.core import parallel_state

    from megatron.wlb.core_attention import GroupExchanges
    from megatron.wlb.cpu import cpu_as_device

    torch.set_num_threads(1)
    with cpu_as_device():
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
        parallel_state.initialize_model_parallel(context_parallel_size=CP_SIZE)
        yield GroupExchanges()
        torch.distributed.destroy_process_group()


@contextmanager
def pretended_gpu(kernels: str) -> Iterator[None]:
    """kernels: "flash" has flash-attention 2 and no cuDNN, "fused" cuDNN and no flash-attention."""
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as layer
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils

    from megatron.wlb.patches.registry import replace

    properties = SimpleNamespace(name="pretended", major=9, minor=0, total_memory=0, multi_processor_count=1)
    choices = extension.NVTE_Fused_Attn_Backend
    cudnn = choices.NVTE_F16_arbitrary_seqlen if kernels == "fused" else choices.NVTE_No_Backend
    with ExitStack() as undo:
        replace(undo, torch.Tensor, "is_cuda", property(lambda _tensor: True))
        replace(undo, torch.cuda, "get_device_properties", lambda *_args: properties)
        replace(undo, torch.cuda, "get_device_capability", lambda *_args: (9, 0))
        replace(undo, torch.cuda, "default_generators", (torch.default_generator,))
        replace(undo, extension, "get_fused_attn_backend", lambda *_args, **_kwargs: cudnn)
        for name in [n for n in vars(FlashAttentionUtils) if n.startswith("v2_")]:
            replace(undo, FlashAttentionUtils, name, kernels == "flash")
        replace(undo, FlashAttentionUtils, "version", FlashAttentionUtils.max_version)
        replace(undo, FlashAttentionUtils, "is_installed", kernels == "flash")
        # It remembers its last choice.
        layer._attention_backends["backend_selection_requires_update"] = True
        undo.callback(layer._attention_backends.__setitem__, "backend_selection_requires_update", True)
        yield


class Watch:
    """What reaches the replacement, and what it hands on to Transformer Engine's own context parallelism."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.num_originals = 0

    def apply(self, _is_training: bool, query: torch.Tensor, *_others: Any) -> torch.Tensor:
        """In the place of the ring, whose kernels need a GPU."""
        self.num_originals += 1
        return 2 * query

    def saw(self, cu_seqlens: torch.Tensor) -> list[bool]:
        """Of each call, whether all four cumulative lengths were this very object."""
        return [all(args[i] is cu_seqlens for i in (4, 5, 8, 9)) for args, _ in self.calls]


@contextmanager
def patched(exchanges: Any, *, keep_gathered: bool = False) -> Iterator[Watch]:
    """The replacement installed as in training, and watched."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel

    from megatron.wlb.patches.registry import applied, replace
    from megatron.wlb.patches.te_context_parallel import make_patch

    watch = Watch()
    with applied([make_patch(exchanges, keep_gathered=keep_gathered)]), ExitStack() as undo:
        replacement = backends.attn_forward_func_with_cp

        def watching(*args: Any, **kwargs: Any) -> Any:
            watch.calls.append((args, kwargs))
            return replacement(*args, **kwargs)

        replace(undo, backends, "attn_forward_func_with_cp", watching)
        replace(undo, context_parallel, "AttnFuncWithCPAndKVP2P", watch)
        yield watch


def te_layer(heads: Heads, word: str) -> Any:
    """Transformer Engine's own `DotProductAttention`. word: its `cp_comm_type`."""
    from transformer_engine.pytorch import DotProductAttention

    group = torch.distributed.group.WORLD
    return DotProductAttention(
        heads.num_heads,
        (heads.head_size, heads.value_size),
        num_gqa_groups=heads.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cp_group=group,
        cp_global_ranks=list(range(CP_SIZE)),
        cp_stream=torch.cuda.Stream(),
        cp_comm_type=word,
    )


def megatron_layer(exchanges: Any, heads: Heads, comm_type: str, *, window: tuple[int, int] | None) -> Any:
    """Megatron's `TEDotProductAttention`, as our layer spec builds it. window: keys before a query's own, and 0."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.wlb.te_attention import planned_te_attention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads.num_heads * heads.head_size,
        num_attention_heads=heads.num_heads,
        num_query_groups=heads.num_kv_heads,
        attention_dropout=0.0,
        context_parallel_size=CP_SIZE,
        window_size=window,
    )
    return planned_te_attention(exchanges)(
        config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        k_channels=heads.head_size,
        v_channels=heads.value_size,
        cp_comm_type=comm_type,
    )


def planned(plan: Any, *, carried: Any = None, max_seqlen_kv: int | None = None) -> Any:
    """Megatron's packed-sequence parameters of `plan`. carried: another plan, that `cu_seqlens` gets instead."""
    from dataclasses import replace

    from megatron.wlb.packed_seq_params import PlannedRows, mark_planned, packed_seq_params
    from wlb.documents import MicroBatch, documents_from_lengths

    rank = torch.distributed.get_rank()
    positions = torch.from_numpy(plan.position_ids(rank))
    micro_batch = MicroBatch(documents=documents_from_lengths(plan.lengths))
    packed = packed_seq_params(micro_batch, plan, rank, position_ids=positions, max_positions=sum(plan.lengths))
    if carried is not None:
        mark_planned(packed.cu_seqlens_q, PlannedRows(plan=carried, cp_rank=rank, position_ids=positions))
    return replace(packed, max_seqlen_kv=max_seqlen_kv or packed.max_seqlen_kv)


def call(layer: Any, packed: Any, qkv: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
    """(T/cp, N * V). Megatron's layer unpacks the parameters; Transformer Engine's own is called as Megatron's does."""
    from megatron.core.transformer.enums import AttnMaskType

    if hasattr(layer, "kept_packed_seq_params"):
        return layer(*qkv, None, AttnMaskType.causal, packed_seq_params=packed)
    names = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "pad_between_seqs")
    fields = {name: getattr(packed, name) for name in names}
    return layer(*qkv, None, attn_mask_type="padding_causal", **fields, **options)


def own_rows(pack: Tensors, plan: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value of this rank, to be differentiated; and the gradient of its output."""
    held = torch.from_numpy(plan.pack_indices(torch.distributed.get_rank()))
    *qkv, grad = (t[held] for t in pack)
    return [t.requires_grad_() for t in qkv], grad


def results_of(output: torch.Tensor, qkv: Sequence[torch.Tensor], grad: torch.Tensor) -> Tensors:
    """Output, dq, dk, dv."""
    for tensor in qkv:
        tensor.grad = None
    output.backward(grad.reshape(output.shape))  # Transformer Engine's recompute takes no other way
    return (output.detach().view_as(grad), *(t.grad for t in qkv))


def errors_of(results: Tensors, pack: Tensors, plan: Any, **options: Any) -> float:
    """Largest error of this rank's output, dq, dk, dv against float64, each over the largest value wanted."""
    wanted = run_dense(tuple(t.double() for t in pack), plan.lengths, **options)
    held = torch.from_numpy(plan.pack_indices(torch.distributed.get_rank()))
    return max(errors(results, tuple(w[held] for w in wanted)))


def draw(heads: Heads, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Query, key, value and gradient of the whole pack."""
    return inputs(sum(LENGTHS), heads, seed=3, dtype=dtype)


def plan_of(name: str) -> Any:
    """Of LENGTHS over the two ranks."""
    return plan_named(name, LENGTHS, CP_SIZE, seed=2)


def gpu_check_route(kernels: str) -> tuple[bool, dict[str, Any]]:
    """What the GPU check says of Transformer Engine's layers, each rank by itself."""
    from megatron.wlb.gpu_check.packs import Heads as GpuHeads
    from megatron.wlb.gpu_check.te_route import check_te_route

    heads = {name: GpuHeads(**asdict(HEADS[name])) for name in ("gqa", "mla")}
    with pretended_gpu(kernels):
        return check_te_route(LENGTHS, 1, heads)
