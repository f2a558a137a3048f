"""Calls of Transformer Engine's context parallelism as its layers make them, without its layers.

A package of that name is written to a folder: the function has the parameters of the version's source, and its body
only notes that it was called. What a layer passes is evaluated from the source of its call.
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron.wlb.packed_seq_params import PlannedRows, mark_planned
from tests.patches.te_source import FUNCTION, TeSource
from wlb.attention import Mailbox
from wlb.sharding import ShardPlan

PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"
WAIT_S = 30.0
_HOME = """
import enum


class CPLoadBalancingStrategy(enum.Enum):
    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


calls = []


def {signature}:
    calls.append(locals())
    return "original"
"""


@contextmanager
def stand_in(version: str, folder: Path, *, signature: str) -> Iterator[ModuleType]:
    """`backends` of an importable stand-in for a version; signature: of the function, with its name."""
    inner = folder / PACKAGE.replace(".", "/")
    inner.mkdir(parents=True)
    for package in (inner, *inner.parents[:3]):
        (package / "__init__.py").touch()
    (inner / "context_parallel.py").write_text(_HOME.format(signature=signature))
    (inner / "backends.py").write_text(f"from {PACKAGE}.context_parallel import {FUNCTION}\n")
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "transformer_engine"}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module(f"{PACKAGE}.backends")
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules.update(before)


def signature_in(source: TeSource) -> str:
    """Of the function, in a version."""
    return f"{FUNCTION}({ast.unparse(source.dispatcher.args)})"


def home_of(backends: ModuleType) -> Any:
    """The stand-in for `context_parallel`, which notes the calls of the original."""
    return sys.modules[backends.__name__.replace("backends", "context_parallel")]


def arguments(source: TeSource, caller: str, backends: ModuleType, **values: Any) -> tuple[list[Any], dict[str, Any]]:
    """What `FlashAttention` or `FusedAttention` passes when its own variables have `values`."""
    call = source.call_site(caller)
    layer = SimpleNamespace(
        training=True,
        attention_dropout=0.0,
        softmax_scale=None,
        deterministic=False,
        softmax_type="vanilla",
        layer_number=7,
        return_max_logit=False,
    )
    strategy = home_of(backends).CPLoadBalancingStrategy
    variables = {
        "self": layer,
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "window_size": (-1, 0),
        "core_attention_bias_type": "no_bias",
        **dict.fromkeys(("core_attention_bias", "softmax_offset", "cp_stream", "cp_global_ranks"), None),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), values.get("cu_seqlens_q")),
        **dict.fromkeys(("fp8", "fp8_output", "pad_between_seqs", "use_flash_attn_3", "use_flash_attn_4"), False),
        # A layer always has these, with fp8 or without.
        "fp8_meta": {"fp8_checkpoint": False},
        "quantizers": {"scaling_fwd": None},
        "softcap": 0.0,
        "load_balancing_strategy": strategy.DUAL_CHUNK_SWAP,
        "max_seqlen_q": 128,
        "max_seqlen_kv": 128,
    }
    for name in [n for n in values if n.startswith("self_")]:
        setattr(layer, name.removeprefix("self_"), values.pop(name))
    variables |= values

    def value(expression: ast.expr) -> Any:
        return eval(ast.unparse(expression), {}, variables)

    return [value(a) for a in call.args], {str(k.arg): value(k.value) for k in call.keywords}


def cu_seqlens_of(plan: ShardPlan, rank: int) -> torch.Tensor:
    """As `packed_seq_params` makes it."""
    edges = torch.tensor((0, *plan.lengths)).cumsum(0).to(torch.int32)
    position_ids = torch.from_numpy(plan.position_ids(rank))
    mark_planned(edges, PlannedRows(plan=plan, cp_rank=rank, position_ids=position_ids))
    return edges


class WaitingMailbox(Mailbox):
    """For ranks that are threads: whoever collects waits for the sender."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._arrived = threading.Condition()

    def leave(self, message: tuple[int, int, int], rows: torch.Tensor) -> None:
        with self._arrived:
            super().leave(message, rows.clone())  # the sender may go on and write to its own
            self._arrived.notify_all()

    def collect(self, message: tuple[int, int, int]) -> torch.Tensor:
        with self._arrived:
            if not self._arrived.wait_for(lambda: message in self._rows, timeout=WAIT_S):
                raise TimeoutError(f"message {message} did not arrive")
            return super().collect(message)


def on_all_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Run `function(rank)` on a thread for each rank; results by rank."""
    with ThreadPoolExecutor(size) as threads:
        return [f.result() for f in [threads.submit(function, rank) for rank in range(size)]]
