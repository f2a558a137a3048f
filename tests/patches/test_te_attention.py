"""How Transformer Engine's attention layers are built for packed runs, and what is refused before one is."""

from __future__ import annotations

import copy
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.wlb.arguments import adapt_megatron_arguments
from megatron.wlb.context_parallel import attention_rules, mean_head_size
from megatron.wlb.core_attention import GroupExchanges, PackedCoreAttention
from megatron.wlb.te_attention import LayerCommType, planned_te_attention


class _TeLayer:
    """Instead of `TEDotProductAttention`, which cannot be built without a GPU."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        cp_comm_type: str,
        pg_collection: Any,
        v_channels: int | None = None,
    ) -> None:
        self.v_channels = v_channels
        self.config, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.cp_comm_type, self.cp_group = cp_comm_type, pg_collection.cp


@pytest.fixture
def te_layer(monkeypatch: pytest.MonkeyPatch) -> type[_TeLayer]:
    from megatron.core.extensions import transformer_engine

    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", _TeLayer)
    return _TeLayer


def _config(**changes: Any) -> SimpleNamespace:
    usual = {
        "tensor_model_parallel_size": 2,
        "num_attention_heads": 16,
        "num_query_groups": 4,
        "multi_latent_attention": False,
        "window_size": None,
        "window_attn_skip_freq": None,
    }
    return SimpleNamespace(**usual | changes)


def _layer(exchanges: GroupExchanges, config: Any, word: str | None, *, number: int = 1, group: str = "group") -> Any:
    return planned_te_attention(exchanges)(
        config, number, attn_mask_type="causal", cp_comm_type=word, pg_collection=SimpleNamespace(cp=group)
    )


def test_the_layer_is_built_with_p2p_and_carries_the_users_word(te_layer: type[_TeLayer]) -> None:
    """One exchange for all layers of a group, made with the first of them."""
    made: list[str] = []
    exchanges = GroupExchanges(lambda group: made.append(group) or len(made))  # type: ignore[arg-type,func-returns-value]
    words = ["all_gather", "p2p", None]
    layers = [_layer(exchanges, _config(), word, number=1 + i) for i, word in enumerate(words)]
    layers.append(_layer(exchanges, _config(), "p2p", group="other"))
    assert all(isinstance(layer, te_layer) for layer in layers)
    assert [layer.cp_comm_type for layer in layers] == ["p2p"] * 4
    assert [layer.cp_comm_type.planned for layer in layers] == ["all_gather", "p2p", "all_gather", "p2p"]
    assert [layer.layer_number for layer in layers] == [1, 2, 3, 1]
    assert [layer.cp_comm_type.layer_number for layer in layers] == [1, 2, 3, 1]
    assert made == ["group", "other"]
    assert (exchanges.of("group"), exchanges.of("other")) == (1, 2)  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.parametrize(
    ("changes", "number", "word"),
    [
        ({}, 1, "a2a"),
        ({"num_attention_heads": 6, "num_query_groups": 6}, 1, "p2p"),  # 3 heads a rank
        ({"num_query_groups": 2}, 1, "p2p"),
        ({"num_query_groups": 2, "multi_latent_attention": True}, 1, "a2a"),
        ({"window_attn_skip_freq": 4}, 3, "a2a"),
        ({"window_attn_skip_freq": 4}, 4, "p2p"),  # a layer that sees everything
    ],
)
def test_a_layer_with_a_window_is_built_with_a2a_where_its_heads_allow(
    te_layer: type[_TeLayer], changes: dict[str, Any], number: int, word: str
) -> None:
    layer = _layer(GroupExchanges(lambda _group: None), _config(window_size=(7, 0), **changes), None, number=number)  # type: ignore[arg-type,return-value]
    assert layer.cp_comm_type == word
    assert layer.cp_comm_type.planned == "all_gather"


def test_a_copied_layer_keeps_the_users_word() -> None:
    word = copy.deepcopy(LayerCommType("p2p", "all_gather", 3, 128))
    assert isinstance(word, LayerCommType)
    assert (word, word.planned, word.layer_number, word.value_size) == ("p2p", "all_gather", 3, 128)


def test_a_layer_says_how_wide_its_values_are(te_layer: type[_TeLayer]) -> None:
    """Multi-latent attention names it, for its values come widened; others have the size of their keys."""
    exchanges = GroupExchanges(lambda _group: None)  # type: ignore[arg-type,return-value]
    group = SimpleNamespace(cp="group")
    layer = planned_te_attention(exchanges)(
        _config(multi_latent_attention=True), 1, attn_mask_type="causal", pg_collection=group, v_channels=128
    )
    assert layer.cp_comm_type.value_size == layer.v_channels == 128
    assert _layer(exchanges, _config(), None).cp_comm_type.value_size is None


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex are not installed")
@pytest.mark.parametrize(
    ("implementation", "cp_size", "wanted"),
    [
        ("transformer_engine", 1, "stock"),
        ("transformer_engine", 2, _TeLayer),
        ("local", 1, PackedCoreAttention),
        ("local", 2, PackedCoreAttention),
    ],
)
def test_which_attention_a_layer_gets(
    te_layer: type[_TeLayer], monkeypatch: pytest.MonkeyPatch, implementation: str, cp_size: int, wanted: Any
) -> None:
    from megatron.wlb import layer_spec

    submodules = SimpleNamespace(core_attention="stock")
    layer = SimpleNamespace(submodules=SimpleNamespace(self_attention=SimpleNamespace(submodules=submodules)))
    monkeypatch.setattr(layer_spec, "default_layer_spec", lambda _config, _stage: layer)
    transformer = SimpleNamespace(transformer_impl=implementation, context_parallel_size=cp_size)
    exchanges = GroupExchanges()
    layer_spec.packed_layer_spec(exchanges, keep_gathered_kv=True)(SimpleNamespace(transformer=transformer), None)  # type: ignore[arg-type]
    chosen: Any = submodules.core_attention
    if wanted == "stock":
        assert chosen == "stock"
    else:
        assert issubclass(chosen, wanted)
    if wanted is PackedCoreAttention:
        assert (chosen.exchanges, chosen.keep_gathered_kv) == (exchanges, True)
        assert PackedCoreAttention.exchanges is None


def _arguments(**changes: Any) -> Namespace:
    usual = {
        "transformer_impl": "transformer_engine",
        "context_parallel_size": 2,
        "num_layers": 4,
        "cp_comm_type": ["all_gather"],
        "distributed_backend": "nccl",
        "bf16": True,
        "fp16": False,
        "attention_dropout": 0.0,
        "softmax_type": "vanilla",
        "qk_clip": False,
        "log_max_attention_logit": False,
        "attention_backend": SimpleNamespace(name="auto"),
        "deterministic_mode": False,
        "multi_latent_attention": False,
        "kv_channels": 128,
    }
    return Namespace(**usual | changes)


def _refused(**changes: Any) -> list[str]:
    return [
        f"{option} {rule}, got {value}" for option, value, bad, rule in attention_rules(_arguments(**changes)) if bad
    ]


@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
@pytest.mark.parametrize("words", [["p2p"], ["p2p", "all_gather", "p2p", "p2p"]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_choices_of_the_user_that_hold_with_transformer_engine(
    backend: str, words: list[str], deterministic: bool
) -> None:
    chosen = SimpleNamespace(name=backend)
    assert _refused(attention_backend=chosen, cp_comm_type=words, deterministic_mode=deterministic) == []


def test_packers_price_the_mean_of_unequal_head_sizes() -> None:
    """A pair costs 2 * (192 + 128) operations a head, whatever hidden size over heads is."""
    latent = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    assert mean_head_size(_arguments(**latent, kv_channels=56)) == 160
    assert mean_head_size(_arguments(kv_channels=56)) == 56


_WITH = "with --transformer-impl transformer_engine and context parallelism"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"attention_backend": SimpleNamespace(name="unfused")},
            f"--attention-backend must be auto, flash or fused {_WITH}, got unfused",
        ),
        ({"fp8_dot_product_attention": True}, "--fp8-dot-product-attention must be off, got True"),
        ({"fp8_multi_head_attention": True}, "--fp8-multi-head-attention must be off, got True"),
        ({"attention_dropout": 0.1}, "--attention-dropout must be 0, got 0.1"),
        ({"softmax_type": "learnable"}, "--softmax-type must be vanilla, got learnable"),
        ({"log_max_attention_logit": True}, "--log-max-attention-logit must be off, got True"),
        ({"cp_comm_type": ["a2a"]}, "--cp-comm-type must be all_gather or p2p, got a2a"),
    ],
)
def test_what_a_planned_call_would_refuse_is_refused_before_training(changes: dict[str, Any], sentence: str) -> None:
    assert _refused(**changes) == [sentence]


def test_without_context_parallelism_the_layer_s_own_rules_hold() -> None:
    unfused = SimpleNamespace(name="unfused")
    assert _refused(context_parallel_size=1, attention_backend=unfused, deterministic_mode=True) == []
    assert _refused(transformer_impl="local", attention_backend=unfused, deterministic_mode=True) == []


@pytest.mark.parametrize(
    ("cp_size", "latent", "fused"), [(1, False, True), (2, False, True), (1, True, True), (2, True, False)]
)
def test_rope_stays_fused_except_where_multi_latent_attention_is_sharded(
    cp_size: int, latent: bool, fused: bool
) -> None:
    args = Namespace(
        calculate_per_token_loss=True,
        dataloader_save="folder",
        eval_interval=100,
        context_parallel_size=cp_size,
        multi_latent_attention=latent,
        apply_rope_fusion=True,
    )
    said = adapt_megatron_arguments(args)
    assert args.apply_rope_fusion is fused
    assert sum("--no-rope-fusion is switched on" in sentence for sentence in said) == (not fused)
