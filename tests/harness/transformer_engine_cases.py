"""What two ranks do with Transformer Engine's attention layers, and what they find; `measure` does it all.

The numbers and facts that it returns are held against their bounds in `tests/patches/test_transformer_engine.py`.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.harness import transformer_engine as te
from wlb.sharding import ShardPlan
from wlb.sharding.plan import plan_of_chunks

LAYERS = ("transformer engine's", "megatron's")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "stored": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
NUM_LAYERS = 2


def measure() -> dict[str, Any]:
    """Every case, by name. Runs on both ranks."""
    with te.two_ranks() as exchanges:
        return {
            "layers": _layers(exchanges),
            "windows": _windows(exchanges),
            "originals": {kernels: _without_plans(exchanges, kernels, ours=False) for kernels in te.KERNELS},
            "lost": {kernels: _without_plans(exchanges, kernels, ours=True) for kernels in te.KERNELS},
            "recomputed by transformer engine": _recomputed_core(exchanges),
            "models": _models(exchanges),
            "deterministic": {kernels: _deterministic(exchanges, kernels) for kernels in te.KERNELS},
            "another plan": _another_plan(exchanges),
            "refused": _refused(exchanges),
            "gpu check": {kernels: te.gpu_check_route(kernels) for kernels in te.KERNELS},
        }


def _layer(exchanges: Any, kind: str, heads: Any, comm_type: str, window: tuple[int, int] | None = None) -> Any:
    from megatron.wlb.te_attention import LayerCommType

    if kind == "megatron's":
        return te.megatron_layer(exchanges, heads, comm_type, window=window)
    return te.te_layer(heads, LayerCommType("p2p", comm_type))


def _layers(exchanges: Any) -> dict[str, Any]:
    outcome = {}
    cases = product(te.KERNELS, LAYERS, te.COMM_TYPES, te.PLANS)
    for number, (kernels, kind, comm_type, name) in enumerate(cases):
        which = list(te.HEADS)[number % len(te.HEADS)]
        heads, plan = te.HEADS[which], te.plan_of(name)
        with te.pretended_gpu(kernels), te.patched(exchanges, keep_gathered=number % 2 == 1) as watch:
            layer = _layer(exchanges, kind, heads, comm_type)
            outcome[f"{kernels}, {kind}, {comm_type}, {name}, {which}"] = _one_call(
                exchanges, layer, watch, heads, plan, comm_type, kernels=kernels
            )
    return outcome


def _windows(exchanges: Any) -> dict[str, Any]:
    outcome = {}
    for kernels, comm_type in product(te.KERNELS, te.COMM_TYPES):
        heads, plan = te.HEADS["gqa"], te.plan_of("random")
        with te.pretended_gpu(kernels), te.patched(exchanges) as watch:
            layer = _layer(exchanges, "megatron's", heads, comm_type, window=(te.WINDOW_TOKENS - 1, 0))
            outcome[f"{kernels}, {comm_type}"] = _one_call(
                exchanges, layer, watch, heads, plan, comm_type, kernels=kernels, window_tokens=te.WINDOW_TOKENS
            )
    return outcome


def _one_call(
    exchanges: Any, layer: Any, watch: Any, heads: Any, plan: ShardPlan, comm_type: str, *, kernels: str, **options: Any
) -> dict[str, Any]:
    from wlb.attention import sharded_attention

    group = torch.distributed.group.WORLD
    pack, packed = te.draw(heads), te.planned(plan)
    qkv, grad = te.own_rows(pack, plan)
    results = te.results_of(te.call(layer, packed, qkv), qkv, grad)
    rank = torch.distributed.get_rank()
    direct = sharded_attention(*qkv, plan, rank, exchanges.of(group), comm_type=comm_type, **options)
    alone = te.results_of(direct, qkv, grad)
    ((_, keywords),) = watch.calls
    return {
        "error": te.errors_of(results, pack, plan, **options),
        "same object": watch.saw(packed.cu_seqlens_q),
        "originals": watch.num_originals,
        "same bits": [torch.equal(one, other) for one, other in zip(results, alone, strict=True)],
        "chosen": keywords.get("use_fused_attention", False) is (kernels == "fused"),
    }


def _without_plans(exchanges: Any, kernels: str, *, ours: bool) -> dict[str, Any]:
    """Without one, and with a copy of what carries one: a layer of another origin, whose ring is reached, or ours."""
    from dataclasses import replace

    heads, plan = te.HEADS["mha"], te.plan_of("per_document")
    qkv, _ = te.own_rows(te.draw(heads), plan)
    outcome = {}
    with te.pretended_gpu(kernels):
        for name in ("no plan", "a copy"):
            packed = te.planned(plan)
            cu_seqlens = packed.cu_seqlens_q.clone() if name == "a copy" else torch.tensor([0, 8, 12, 14]).int()
            packed = replace(packed, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
            with te.patched(exchanges) as watch:
                if ours:
                    outcome[name] = _error_of(_layer(exchanges, "megatron's", heads, "all_gather"), packed, qkv)
                    assert watch.num_originals == 0
                    continue
                out = te.call(te.te_layer(heads, "p2p"), packed, qkv)
            outcome[name] = (watch.num_originals, watch.saw(cu_seqlens), torch.equal(out.view_as(qkv[0]), 2 * qkv[0]))
    return outcome


def _error_of(layer: Any, packed: Any, qkv: Any) -> str:
    """Of a call in evaluation."""
    from wlb.errors import PlanLostError

    try:
        with torch.no_grad():
            te.call(layer.eval(), packed, qkv)
    except PlanLostError as error:
        return str(error)
    return ""


def _recomputed_core(exchanges: Any) -> dict[str, Any]:
    """With Transformer Engine's own recompute of its core, which it has for cuDNN."""
    heads, plan = te.HEADS["gqa"], te.plan_of("hybrid")
    qkv, grad = te.own_rows(te.draw(heads), plan)
    results, seen = [], []
    with te.pretended_gpu("fused"):
        for recompute in (False, True):
            packed = te.planned(plan)
            layer = _layer(exchanges, "transformer engine's", heads, "all_gather")
            with te.patched(exchanges) as watch:
                out = te.call(layer, packed, qkv, checkpoint_core_attention=recompute)
                results.append(te.results_of(out, qkv, grad))
            seen.append(watch.saw(packed.cu_seqlens_q))
    return {"seen": seen, "same bits": [torch.equal(was, now) for was, now in zip(*results, strict=True)]}


def _models(exchanges: Any) -> dict[str, Any]:
    """A GPT with Transformer Engine's attention in layers of PyTorch, against one with our core attention."""
    from megatron.wlb.patches import rope_thd
    from megatron.wlb.patches.registry import applied

    outcome = {}
    with applied([rope_thd.PATCH]):
        wanted, _ = _step(_gpt(exchanges, "ours", {}))
        for kernels, (name, options) in product(te.KERNELS, RECOMPUTE.items()):
            with te.pretended_gpu(kernels), te.patched(exchanges) as watch:
                found, packed = _step(_gpt(exchanges, "megatron's", options))
            outcome[f"{kernels}, {name}"] = {
                "seen": watch.saw(packed.cu_seqlens_q),
                "originals": watch.num_originals,
                "same bits": {key: torch.equal(found[key], value) for key, value in wanted.items()},
                "gradient": float(sum(t.double().norm() for t in found.values())),
            }
    return outcome


def _gpt(exchanges: Any, attention: str, options: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.wlb.core_attention import packed_core_attention
    from megatron.wlb.layer_spec import use_core_attention
    from megatron.wlb.te_attention import planned_te_attention

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    ours = packed_core_attention(exchanges, keep_gathered_kv=False)
    use_core_attention(layer, ours if attention == "ours" else planned_te_attention(exchanges))
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=te.CP_SIZE,
        cp_comm_type=["p2p", "all_gather"],
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        transformer_impl="local",
        **options,
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    block = TransformerBlockSubmodules(layer_specs=[layer] * NUM_LAYERS, layer_norm=WrappedTorchNorm)
    model = GPTModel(config, block, 64, 16, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    return model.bfloat16()


def _step(model: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """This rank's losses and gradients, and the parameters of its pack."""
    from megatron.wlb.batch import batch_on_device
    from wlb.data.collate import collate
    from wlb.documents import MicroBatch, documents_from_lengths

    plan, rank = te.plan_of("per_document"), torch.distributed.get_rank()
    micro_batch = MicroBatch(documents=documents_from_lengths(te.LENGTHS))
    rng = np.random.default_rng(5)
    stored = [rng.integers(1, 64, size=length + 1) for length in te.LENGTHS]
    tokens = collate(micro_batch, lambda s, i, n: stored[s][i : i + n], plan=plan, rank=rank, padding_token=0)
    batch = batch_on_device(micro_batch, tokens, plan, rank, max_positions=16)
    packed = batch["packed_seq_params"]
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
    (losses * batch["loss_mask"]).sum().backward()
    return {"losses": losses.detach(), **{name: p.grad for name, p in model.named_parameters()}}, packed


def _deterministic(exchanges: Any, kernels: str) -> dict[str, Any]:
    """A layer that is deterministic by Transformer Engine's own switch, and torch is not."""
    heads, plan = te.HEADS["gqa"], te.plan_of("random")
    with (
        patch.dict(os.environ, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}),
        te.pretended_gpu(kernels),
        te.patched(exchanges) as watch,
    ):
        layer = _layer(exchanges, "megatron's", heads, "all_gather")
        measured = _one_call(exchanges, layer, watch, heads, plan, "all_gather", kernels=kernels)
        return measured | {"asked": [keywords["deterministic"] for _, keywords in watch.calls]}


def _another_plan(exchanges: Any) -> float:
    """The control: error where the tensor carries a plan in which two documents are one."""
    heads, plan = te.HEADS["mha"], te.plan_of("per_document")
    first, second, *others = plan.lengths
    chunks = [
        (rank, max(s.document - 1, 0), s.start + (first if s.document == 1 else 0), s.num_tokens)
        for rank, spans in enumerate(plan.ranks)
        for s in spans
    ]
    merged = plan_of_chunks((first + second, *others), te.CP_SIZE, [(r, d, a, a + n) for r, d, a, n in chunks])
    pack = te.draw(heads)
    qkv, grad = te.own_rows(pack, plan)
    with te.pretended_gpu("fused"), te.patched(exchanges):
        out = te.call(_layer(exchanges, "megatron's", heads, "p2p"), te.planned(plan, carried=merged), qkv)
        return te.errors_of(te.results_of(out, qkv, grad), pack, plan)


def _refused(exchanges: Any) -> dict[str, str]:
    """What Transformer Engine says, before it reaches its context parallelism, to calls that we do not make."""
    from importlib.metadata import version

    heads, plan = te.HEADS["mha"], te.plan_of("per_document")
    qkv, _ = te.own_rows(te.draw(heads), plan)
    usual, longer = te.planned(plan), te.planned(plan, max_seqlen_kv=16)
    attempts: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
        "nothing of flash": ("flash", usual, "p2p", {}),
        "nothing of fused": ("fused", usual, "p2p", {}),
        "lengths of flash": ("flash", longer, "p2p", {}),
        "lengths of fused": ("fused", longer, "p2p", {}),
        "window of fused": ("fused", usual, "p2p", {"window_size": (2, 0)}),
    }
    if version("transformer_engine").startswith("2.17."):
        attempts["all_gather of fused"] = ("fused", usual, "all_gather", {})
    outcome = {}
    for name, (kernels, packed, word, options) in attempts.items():
        with te.pretended_gpu(kernels), te.patched(exchanges) as watch:
            try:
                te.call(te.te_layer(heads, word), packed, qkv, **options)
                outcome[name] = ""
            except ValueError as error:
                outcome[name] = f"{str(error).split(' for ')[0]}, {len(watch.calls)} calls"
    return outcome
