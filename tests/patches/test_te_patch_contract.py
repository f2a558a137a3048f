"""What the patch of Transformer Engine's context parallelism asks of the function that it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.wlb.core_attention import GroupExchanges
from megatron.wlb.patches import te_context_parallel
from megatron.wlb.patches.registry import applied, check
from megatron.wlb.patches.te_context_parallel import POSITIONAL, make_patch
from tests.parity.sharded_cases import plan_named
from tests.patches.te_calls import WaitingMailbox, cu_seqlens_of, home_of, stand_in
from tests.patches.te_source import FUNCTION
from wlb.errors import ConfigError, PatchError

VERSION = "2.17.1"  # the function is made up and its source does not matter


def _signature(extra: str, *, positional: tuple[str, ...] = POSITIONAL, without: str = "") -> str:
    keywords = (*te_context_parallel._READ, *te_context_parallel._REQUIRED, *te_context_parallel._WITHOUT_EFFECT)
    defaults = [f"{k}={te_context_parallel._REQUIRED.get(k)!r}" for k in keywords if k != without]
    return f"{FUNCTION}({', '.join([*positional, *defaults])}{extra})"


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        (_signature(", new_option=None"), ""),
        (_signature("", positional=(*POSITIONAL[:4], "cu_seqlens", *POSITIONAL[5:])), "wanted 15 leading parameters"),
        (_signature(", *, needed"), "wanted a default for each parameter after them, found none for needed"),
        (_signature("", without="window_size"), "wanted parameters window_size, found none of these names"),
    ],
)
def test_the_contract_is_checked_before_anything_is_replaced(tmp_path: Path, signature: str, problem: str) -> None:
    patch = make_patch(GroupExchanges(), keep_gathered=False)
    with stand_in(VERSION, tmp_path, signature=signature) as backends:
        state = check(patch)
        assert state.version == VERSION
        assert (problem in state.problem) if problem else state.problem == ""
        original = getattr(backends, FUNCTION)
        if problem:
            with pytest.raises(PatchError, match="does not fit: wanted"), applied([patch]):
                pytest.fail("the block must not run")
        else:
            with applied([patch]):
                assert getattr(backends, FUNCTION) is not original
        assert getattr(backends, FUNCTION) is original is getattr(home_of(backends), FUNCTION)


def test_a_function_that_backends_defines_itself_is_not_the_one(tmp_path: Path) -> None:
    with stand_in(VERSION, tmp_path, signature=_signature("")) as backends:
        other = getattr(home_of(backends), FUNCTION)
        exec(compile(f"def {_signature('')}: return None", "backends", "exec"), vars(backends))
        problem = te_context_parallel._contract_problem(backends, getattr(backends, FUNCTION))
        assert problem == "wanted a function of context_parallel that backends imports by name, found another"
        assert te_context_parallel._contract_problem(backends, other) == ""


def test_a_keyword_that_nobody_has_read_passes_at_its_default_only(tmp_path: Path) -> None:
    plan = plan_named("per_document", (8, 8), 1)
    args = dict.fromkeys(POSITIONAL) | {"cu_seqlens_q": cu_seqlens_of(plan, 0), "dropout_p": 0.0, "cp_comm_type": "p2p"}
    args |= {"cu_seqlens_kv": args["cu_seqlens_q"], "cp_group": 0} | dict.fromkeys("qkv", torch.randn(16, 2, 4))
    exchanges = GroupExchanges(WaitingMailbox(1).exchange)
    with (
        stand_in(VERSION, tmp_path, signature=_signature(", new_option=None")) as backends,
        applied([make_patch(exchanges, keep_gathered=False)]),
    ):
        function = getattr(backends, FUNCTION)
        assert function(*args.values(), new_option=None).shape == (16, 2, 4)
        with pytest.raises(ConfigError, match=r"new_option .* must be at its default, None .* got 3"):
            function(*args.values(), new_option=3)
