"""Every name, signature and call site of Transformer Engine on which the patch of its context parallelism relies."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megatron.wlb.patches import te_context_parallel
from megatron.wlb.patches.te_context_parallel import POSITIONAL
from tests.patches.te_source import FUNCTION, TeSource, assigned, function_named, parameters, reachable

CALLERS = ("FlashAttention", "FusedAttention")
LAYERS = ("DotProductAttention", *CALLERS)

# What holds in every planned call, by the names that all these functions use.
PLANNED: dict[str, Any] = {
    **dict.fromkeys(("qkv_format", "q_format", "kv_format"), "thd"),
    **dict.fromkeys(("inference_params", "thd_mask_policies", "score_mod", "alibi_slopes"), None),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"), 128),
    **dict.fromkeys(("fp8", "pad_between_seqs", "deterministic", "is_training"), False),
    "context_parallel": True,
    "attn_mask_type": "padding_causal",
    "core_attention_bias_type": "no_bias",
    "softmax_type": "vanilla",
    "window_size": (-1, 0),
    "cp_comm_type": "p2p",
    "num_heads": 8,
    "num_gqa_groups": 2,
}
COMMON_KEYWORDS = {
    **dict.fromkeys(("softmax_scale", "attn_bias", "window_size", "fp8_meta", "quantizers", "softmax_offset"), "None"),
    **dict.fromkeys(("deterministic", "use_fused_attention", "fp8", "pad_between_seqs", "use_flash_attn_3"), "False"),
    **dict.fromkeys(("fp8_output", "return_max_logit"), "False"),
    "qkv_format": "'bshd'",
    "attn_mask_type": "'causal'",
    "attn_bias_type": "'no_bias'",
    "softmax_type": "'vanilla'",
    "layer_number": "1",
}
SINCE: dict[str, dict[str, str]] = {
    "2.19": {
        "use_flash_attn_4": "False",
        "load_balancing_strategy": "CPLoadBalancingStrategy.DUAL_CHUNK_SWAP",
    },
    "2.20": {"softcap": "0.0"},
}


def _is_since(source: TeSource, version: str) -> bool:
    return Version(source.version) >= Version(version)


def test_the_function_has_the_parameters_and_defaults_that_were_read(te_source: TeSource) -> None:
    found = parameters(te_source.dispatcher)
    assert tuple(found)[:15] == POSITIONAL
    assert [found[name] for name in POSITIONAL] == [None] * 15
    keywords = {name: default for name, default in found.items() if name not in POSITIONAL}
    later = [more for version, more in SINCE.items() if _is_since(te_source, version)]
    assert keywords == COMMON_KEYWORDS | {name: default for more in later for name, default in more.items()}


def test_the_callers_know_it_by_the_one_name_that_is_replaced(te_source: TeSource) -> None:
    """Imported by name into `backends`, used nowhere else, bound nowhere else."""
    imports = [
        (n.module, n.level)
        for n in te_source.modules["backends"].body
        if isinstance(n, ast.ImportFrom) and any(a.name == FUNCTION and a.asname is None for a in n.names)
    ]
    assert imports == [("transformer_engine.pytorch.attention.dot_product_attention.context_parallel", 0)]
    uses = {
        name: sum(isinstance(n, ast.Name) and n.id == FUNCTION for n in ast.walk(tree))
        for name, tree in te_source.modules.items()
    }
    assert {name: n for name, n in uses.items() if n} == {"backends": len(CALLERS)}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_caller_passes_15_by_position_and_the_rest_by_keyword(te_source: TeSource, caller: str) -> None:
    call = te_source.call_site(caller)
    positional = [ast.unparse(a) for a in call.args]
    assert len(positional) == 15
    assert positional[4:8] == ["cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"]
    assert positional[10] == "self.attention_dropout if self.training else 0.0"
    assert positional[11:] == ["cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"]
    keywords = {k.arg for k in call.keywords}
    wanted = {
        *("softmax_scale", "qkv_format", "attn_mask_type", "deterministic", "window_size", "quantizers"),
        *("pad_between_seqs", "fp8_output"),
    }
    if caller == "FlashAttention":
        wanted |= {"use_flash_attn_3"} | ({"use_flash_attn_4"} if _is_since(te_source, "2.19") else set())
        wanted |= {"softcap"} if _is_since(te_source, "2.20") else set()
    else:
        wanted |= {"attn_bias_type", "attn_bias", "use_fused_attention", "fp8", "fp8_meta", "softmax_type"}
        wanted |= {"softmax_offset", "layer_number", "return_max_logit"}
    wanted |= {"load_balancing_strategy"} if _is_since(te_source, "2.19") else set()
    assert keywords == wanted


@pytest.mark.parametrize("caller", CALLERS)
def test_what_it_returns_is_flattened_to_tokens_by_numbers(te_source: TeSource, caller: str) -> None:
    """(T, N, V) -> (T, N * V): so the replacement returns what `sharded_attention` does."""
    statements = [ast.unparse(s) for s in reachable(te_source.forward_of(caller).body, PLANNED)]
    flattened = {
        "FlashAttention": "output = output.reshape(output.shape[0], -1)",
        "FusedAttention": "return output.view(*output.shape[:-2], -1)",
    }
    assert flattened[caller] in statements


@pytest.mark.parametrize("layer", LAYERS)
def test_cu_seqlens_and_the_communication_type_arrive_as_they_came(te_source: TeSource, layer: str) -> None:
    """No statement that a planned call can reach binds them anew: they are the same objects, with what they carry."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cp_comm_type")
    body = te_source.forward_of(layer).body
    assert assigned(reachable(body, PLANNED), names) == []
    # Without packing both are made anew from the batch's shape: the check sees an assignment where there is one.
    unpacked = PLANNED | dict.fromkeys(("qkv_format", "q_format", "kv_format"), "bshd") | {"cu_seqlens_q": None}
    assert len(assigned(reachable(body, unpacked), names)) > 0


def test_the_layer_hands_them_on(te_source: TeSource) -> None:
    """By keyword of the same name, to the attention of either kind."""
    calls = {
        n.func.attr: {k.arg: ast.unparse(k.value) for k in n.keywords}
        for s in reachable(
            te_source.forward_of("DotProductAttention").body, PLANNED | {"checkpoint_core_attention": False}
        )
        for n in ast.walk(s)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        if n.func.attr in ("flash_attention", "fused_attention")
    }
    assert sorted(calls) == ["flash_attention", "fused_attention"]
    for keywords in calls.values():
        assert keywords["cu_seqlens_q"] == "cu_seqlens_q"
        assert keywords["cu_seqlens_kv"] == "cu_seqlens_kv"
        assert keywords["cp_comm_type"] == "self.cp_comm_type"
        assert keywords["cp_group"] == "self.cp_group"


def test_only_flash_attention_leaves_out_which_layer_calls(te_source: TeSource) -> None:
    """Why the choice of a layer comes with its `cp_comm_type` and not by its number."""
    assert [c for c in CALLERS if "layer_number" in {k.arg for k in te_source.call_site(c).keywords}] == [CALLERS[1]]


def test_the_layer_finds_out_about_padding_on_the_host_unless_told(te_source: TeSource) -> None:
    """`PackedSeqParams.pad_between_seqs` is False, so no layer compares two tensors."""
    body = te_source.forward_of("DotProductAttention").body
    assert assigned(reachable(body, PLANNED), ("pad_between_seqs",)) == []
    found_out = assigned(reachable(body, PLANNED | {"pad_between_seqs": None}), ("pad_between_seqs",))
    # Since 2.19 it asks whether there are padded lengths at all, which costs nothing.
    assert any("torch.equal" in statement for statement in found_out) is not _is_since(te_source, "2.19")
    assert len(found_out) > 0


def _switched_off(source: TeSource, **facts: Any) -> set[str]:
    """Backends that the layer's choice surely takes from a call with context parallelism."""
    body = function_named(source.modules["utils"], "get_attention_backend").body
    of_context_parallelism = [s for s in body if isinstance(s, ast.If) and "context_parallel" in ast.unparse(s.test)]
    assert len(of_context_parallelism) >= 3
    known = PLANNED | {"use_flash_attention": True, "use_fused_attention": True, "use_unfused_attention": True}
    known |= {"use_flash_attention_2": True, "use_flash_attention_3": True, "use_flash_attention_4": False}
    known |= {"return_max_logit": False} | facts
    off = assigned(reachable(of_context_parallelism, known), tuple(n for n in known if n.startswith("use_")))
    return {statement.split(" = ")[0] for statement in off if statement.endswith(" = False")} - {
        "use_unfused_attention"
    }


def test_with_p2p_the_layer_lets_planned_calls_through(te_source: TeSource) -> None:
    """Whatever --cp-comm-type says, this is what the layer is built with."""
    assert _switched_off(te_source) == set()
    both = {"use_flash_attention", "use_fused_attention"}
    assert _switched_off(te_source, max_seqlen_kv=256) == both  # why both maxima of a plan are equal
    assert _switched_off(te_source, attn_mask_type="padding_causal_bottom_right") == both


def test_all_gather_would_lose_a_backend_in_some_versions(te_source: TeSource) -> None:
    """Of the versions read, 2.17.1 filters; others refuse or take it later on."""
    lost = {"use_fused_attention"} if te_source.version == "2.17.1" else set()
    assert _switched_off(te_source, cp_comm_type="all_gather") == lost
    refuses = "\n".join(
        ast.unparse(n) for n in ast.walk(te_source.modules["context_parallel"]) if isinstance(n, ast.Assert)
    )
    assert ("qkv_format != 'thd'" in refuses) or _is_since(te_source, "2.20")


def test_a_window_needs_a2a_for_cudnn_since_2_17(te_source: TeSource) -> None:
    lost = {"use_fused_attention"} if Version(te_source.version) >= Version("2.17") else set()
    assert _switched_off(te_source, window_size=(7, 0)) == lost
    assert _switched_off(te_source, window_size=(7, 0), cp_comm_type="a2a") == set()
    odd = _switched_off(te_source, window_size=(7, 0), cp_comm_type="a2a", num_heads=3)
    assert odd == lost


def _megatron_layer() -> ast.ClassDef:
    import megatron.core

    (folder,) = (Path(p) for p in megatron.core.__path__)
    tree = ast.parse((folder / "extensions" / "transformer_engine.py").read_text())
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "TEDotProductAttention")
    return found


def test_megatron_hands_on_the_fields_of_the_base_class_that_the_layer_takes(te_source: TeSource) -> None:
    """All of them are parameters of Transformer Engine's layer; the plan's own fields are not among them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron.wlb.packed_seq_params import PlannedPackedSeqParams

    layer = _megatron_layer()
    facts = {"get_te_version": lambda: Version(te_source.version), "PkgVersion": Version, "packed_seq_params": object()}
    statements = [
        ast.unparse(s) for name in ("__init__", "forward") for s in reachable(function_named(layer, name).body, facts)
    ]
    (kept,) = (s for s in statements if s.startswith("self.kept_packed_seq_params = "))
    assert "dataclasses.fields(PackedSeqParams)" in kept
    discarded = {s.split("'")[1] for s in statements if s.startswith("self.kept_packed_seq_params.discard(")}
    assert {"cp_group", "local_cp_size", "seq_idx"} <= discarded
    handed_on = {f.name for f in fields(PackedSeqParams)} - discarded
    assert {"cu_seqlens_q", "cu_seqlens_kv", "pad_between_seqs", "max_seqlen_q"} <= handed_on
    assert handed_on <= set(parameters(te_source.forward_of("DotProductAttention")))
    ours = {f.name for f in fields(PlannedPackedSeqParams)} - {f.name for f in fields(PackedSeqParams)}
    assert ours == {"micro_batch", "plan", "cp_rank"}


def test_megatron_builds_the_layer_with_the_communication_type_as_it_came() -> None:
    facts = {"cp_comm_type": "p2p", "is_te_min_version": lambda *_args, **_kw: True}
    statements = [ast.unparse(s) for s in reachable(function_named(_megatron_layer(), "__init__").body, facts)]
    assert "extra_kwargs['cp_comm_type'] = cp_comm_type" in statements
    assert [s for s in statements if "cp_comm_type'] = 'p2p'" in s] == []


def test_fused_rope_rotates_a_sequence_by_the_table_it_is_given(te_source: TeSource) -> None:
    """What Megatron's fused branch without `cu_seqlens` calls, which is where planned rows go."""
    found = parameters(function_named(te_source.modules["rope"], "apply_rotary_pos_emb"))
    assert {"t", "freqs", "tensor_format", "interleaved", "fused", "cu_seqlens", "cp_size"} <= set(found)
    assert found["cu_seqlens"] == "None"
    assert found["cp_size"] == "1"


def test_the_patch_covers_the_versions_that_were_read() -> None:
    from packaging.specifiers import SpecifierSet

    from megatron.wlb.core_attention import GroupExchanges
    from tests.patches.te_source import VERSIONS

    versions = SpecifierSet(te_context_parallel.make_patch(GroupExchanges(), keep_gathered=False).versions)
    assert all(versions.contains(v) for v in VERSIONS)
    assert not versions.contains("2.8.1")
    assert not versions.contains("2.21.0")
