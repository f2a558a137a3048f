"""What our cuDNN kernel calls is in Transformer Engine as it was read, and emulated operators are like it."""

from __future__ import annotations

import ast

import pytest

from tests.harness.engine_operators import ENGINE_PARAMETERS
from tests.patches.te_source import TeSource, function_named, parameters

OPERATORS = ("fused_attn_fwd", "fused_attn_bwd")


@pytest.mark.parametrize(("operator", "number"), [(name, i) for i, name in enumerate(OPERATORS)])
def test_emulated_operators_have_its_signatures(te_source: TeSource, operator: str, number: int) -> None:
    found = parameters(function_named(te_source.modules["fused_attn"], operator))
    names, num_required = ENGINE_PARAMETERS[te_source.version][number]
    assert list(found) == names.split()
    assert [name for name, default in found.items() if default is None] == names.split()[:num_required]


def test_defaults_that_the_kernel_relies_on(te_source: TeSource) -> None:
    wanted = {
        "dropout": "0.0",
        "attn_bias_type": "'no_bias'",
        "softmax_type": "'vanilla'",
        "bottom_right_diagonal": "None",
        "cuda_graph": "False",
        "return_max_logit": "False",
        "qkv_scale_inv_format": "None",
    }
    for operator in OPERATORS:
        found = parameters(function_named(te_source.modules["fused_attn"], operator))
        assert {name: default for name, default in found.items() if name in wanted} == {
            name: default for name, default in wanted.items() if name in found
        }


def _keys(te_source: TeSource, table: str) -> set[str]:
    """Of a dict, or names of an enumeration, at the top of the module."""
    for node in te_source.modules["fused_attn"].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
        if isinstance(node, ast.ClassDef) and node.name == table:
            assert ast.unparse(node.bases[0]) == "IntEnum"
            return {ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)}
    raise AssertionError(f"no {table} in {te_source.version}")


def test_words_that_the_kernel_uses(te_source: TeSource) -> None:
    assert "F16_arbitrary_seqlen" in _keys(te_source, "FusedAttnBackend")
    assert {"thd_thd_thd", "thd_t2hd"} <= _keys(te_source, "QKVLayout")
    assert {"padding", "padding_causal", "padding_causal_bottom_right"} <= _keys(te_source, "AttnMaskType")


def test_codes_of_dtypes_where_backward_wants_them(te_source: TeSource) -> None:
    backward = parameters(function_named(te_source.modules["fused_attn"], "fused_attn_bwd"))
    names = {ast.unparse(n.targets[0]) for n in te_source.modules["constants"].body if isinstance(n, ast.Assign)}
    assert "dqkv_dtype" not in backward or "TE_DType" in names


def test_what_forward_gives_besides_the_output(te_source: TeSource) -> None:
    """The log-sum-exp first, as the kernel takes it: the last statement hands on what came behind the output."""
    last = function_named(te_source.modules["fused_attn"], "fused_attn_fwd").body[-1]
    assert isinstance(last, ast.Return)
    assert ast.unparse(last) == "return (output_tensors[0], output_tensors[1:])"
