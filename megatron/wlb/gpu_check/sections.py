"""What a person runs first on a GPU machine: does the packed path compute there what it should, and what does it cost?

Kernels and model are held against a float64 oracle by the ratio rule: in bfloat16 they may err at most twice as
much as PyTorch's own operations in bfloat16 do. Without a GPU the same checks run on the CPU, as a rehearsal.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron.wlb.environment import OPTIONAL_PACKAGES, TRANSFORMER_ENGINE, has_package
from megatron.wlb.gpu_check.attention import check_attention
from megatron.wlb.gpu_check.cost import COST_RULE, check_cost
from megatron.wlb.gpu_check.exchange import EXCHANGE_RULE, check_exchange
from megatron.wlb.gpu_check.hygiene import ALLOCATOR_RULE, SYNCS_RULE, check_allocator, check_syncs
from megatron.wlb.gpu_check.kernels import Outcome, kernel_obstacles, usable_kernels
from megatron.wlb.gpu_check.memory import MEMORY_RULE, check_memory
from megatron.wlb.gpu_check.model import difference, packed_gpt, run_one_by_one, run_packed, stock_gpt
from megatron.wlb.gpu_check.rank_times import TIMES_RULE, check_rank_times
from megatron.wlb.gpu_check.results import Result, measured_by
from megatron.wlb.gpu_check.rule import RULE, within_ratio
from megatron.wlb.gpu_check.scales import SCALES, Scale
from megatron.wlb.gpu_check.sharding import LONG_RULE, SHARDING_RULE, check_long_pack, check_sharding
from megatron.wlb.gpu_check.te_route import TE_ROUTE_RULE, check_te_route
from megatron.wlb.gpu_check.tiles import TILES_RULE, check_tiles, suggested_costs
from megatron.wlb.gpu_check.training import check_training, training_rule
from wlb.cost import ProfiledCost, TransformerShape
from wlb.documents import MicroBatch, documents_from_lengths

TRAINED_SHAPE = "trained here"
GIVEN_SHAPE = "given"


@dataclass(frozen=True, kw_only=True)
class Section:
    """check: given seconds and the results so far, whether it passed and what it measured.

    share: of the time that is left, beside those of the sections that are left; about seconds on a large GPU.
    """

    name: str
    kind: str
    rule: str
    share: float
    check: Callable[[float, Sequence[Result]], Outcome]


def environment(device: str) -> dict[str, Any]:
    """What the checks run on. kernels: why each cannot be used here; empty for those that can."""
    cuda = device == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "compute_capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "packages": {p.name: {"found": p.found, "version": p.version, "lost": p.lost} for p in OPTIONAL_PACKAGES},
        "kernels": kernel_obstacles(),
    }


def sections(device: Literal["cuda", "cpu"], folder: Path, shape: TransformerShape) -> list[Section]:
    """In the order in which they run: what must be right first, then what is measured.

    folder: for the data and logs of training runs. shape: of the model whose costs are profiled.
    """
    scale = SCALES[device]
    engine = device == "cuda" and has_package(TRANSFORMER_ENGINE)
    kernels = usable_kernels()
    found: list[Section] = []

    def add(kind: str, of: str, rule: str, share: float, check: Callable[[float, Sequence[Result]], Outcome]) -> None:
        found.append(Section(name=f"{kind}, {of}" if of else kind, kind=kind, rule=rule, share=share, check=check))

    def attention(kernel: str | None) -> Callable[[float, Sequence[Result]], Outcome]:
        return lambda _s, _r: check_attention(scale.lengths, scale.heads, kernel=kernel)

    def model(engine: bool) -> Callable[[float, Sequence[Result]], Outcome]:
        return lambda _s, _r: check_model(scale, engine=engine)

    def sharded(kernel: str) -> Callable[[float, Sequence[Result]], Outcome]:
        return lambda _s, _r: check_sharding(scale.sharding, kernel=kernel)

    def rank_times(budget_s: float, results: Sequence[Result]) -> Outcome:
        calibrated = suggested_costs(measured_by(results, "kernel time by rows of queries"))
        return check_rank_times(scale.times, calibrated, budget_s)

    for kernel in kernels:
        add("attention", kernel, RULE, 4, attention(kernel))
    if engine:
        add("attention", TRANSFORMER_ENGINE, RULE, 6, attention(None))
    for name, uses_engine in {"PyTorch": False, **({TRANSFORMER_ENGINE: True} if engine else {})}.items():
        add("GPT packed = one by one", name, RULE, 6, model(uses_engine))
    for kernel in kernels:
        add("sharded attention", kernel, SHARDING_RULE, 25, sharded(kernel))
    add("sharded attention, long pack", "", LONG_RULE, 25, lambda _s, _r: check_long_pack(scale.sharding, kernels))
    add(
        "Transformer Engine's route at CP 2",
        "",
        TE_ROUTE_RULE,
        10,
        lambda _s, _r: check_te_route(scale.sharding.lengths, scale.sharding.tile_tokens, scale.sharding.heads),
    )
    of_two = (scale.sharding.lengths, scale.sharding.heads["GQA"], scale.sharding.tile_tokens)
    add("NCCL to itself", "", EXCHANGE_RULE, 8, lambda _s, _r: check_exchange(scale.exchange, *of_two))
    add("host syncs", "", SYNCS_RULE, 8, lambda _s, _r: check_syncs(scale.hygiene, engine=engine))
    shapes = {TRAINED_SHAPE: scale.training.shape, GIVEN_SHAPE: shape}
    add("cost profile", "", COST_RULE, 50, lambda s, _r: check_cost(scale.cost, scale.times, shapes, s, engine=engine))
    add(
        "training",
        "",
        training_rule(device),
        140,
        lambda s, r: check_training(scale.training, folder, device, trained_profile(r), s),
    )
    add("kernel time by rows of queries", "", TILES_RULE, 20, lambda _s, _r: check_tiles(scale.tiles))
    add(
        "slowest rank over that of per_sequence",
        "",
        TIMES_RULE,
        80,
        lambda s, r: check_rank_times(
            scale.times, suggested_costs(measured_by(r, "kernel time by rows of queries")), s
        ),
    )
    add("gathered keys and values", "", MEMORY_RULE, 10, lambda _s, _r: check_memory(scale.times))
    add(
        "allocator", "", ALLOCATOR_RULE, 15, lambda s, _r: check_allocator(scale.hygiene, scale.times, s, engine=engine)
    )
    return found


def trained_profile(results: Sequence[Result]) -> ProfiledCost | None:
    """Of the model that the training runs train; None where its costs were not measured."""
    measured = measured_by(results, "cost profile").get(TRAINED_SHAPE)
    return None if measured is None else ProfiledCost.from_json(measured["profile"])


def check_model(scale: Scale, *, engine: bool) -> Outcome:
    """Logits and gradients of a GPT on one pack, against the stock model in float64 on each document."""
    rng = np.random.default_rng(5)
    micro_batch = MicroBatch(documents=documents_from_lengths(scale.lengths))
    stored = [rng.integers(1, scale.model.vocab_size, size=n + 1) for n in scale.lengths]
    others = [rng.integers(1, scale.model.vocab_size, size=scale.lengths[0] + 1), *stored[1:]]
    measured: dict[str, Any] = {}
    passed = True
    for name, shape in (
        ("RoPE, GQA", scale.model),
        ("learned positions, MHA", replace(scale.model, position_embedding="learned_absolute", num_query_groups=4)),
    ):
        exact = run_one_by_one(stock_gpt(shape, torch.float64), stored, micro_batch)
        unit = difference(run_one_by_one(stock_gpt(shape, torch.bfloat16), stored, micro_batch), exact)
        model = packed_gpt(shape, torch.bfloat16, transformer_engine=engine)
        outcome = run_packed(model, stored, micro_batch, pad_to_multiple=64)
        ours = difference(outcome, exact)
        changed = run_packed(model, others, micro_batch, pad_to_multiple=64)
        independent = all(map(torch.equal, outcome.logits[1:], changed.logits[1:]))
        ratios = {"logits": ours.logits / unit.logits, "gradients": ours.gradients / unit.gradients}
        measured[name] = {**ratios, "error": asdict(ours), "independent": independent}
        passed &= independent and within_ratio(ratios)
    return passed, measured
