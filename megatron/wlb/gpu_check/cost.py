"""What a model costs on this device, as the file that `--wlb-cost-profile` takes.

Attention: a pack of equal documents, in the kernel that training would use. All else: one and two layers of the model
with attention taken out, embeddings, output layer and loss included, so that two layers less one are a layer.

Shapes: T tokens of a pack, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from megatron.wlb.gpu_check.attention import layer_attention
from megatron.wlb.gpu_check.model import SmallGpt, packed_batch, packed_gpt
from megatron.wlb.gpu_check.rank_times import TimesScale, draw_lengths
from megatron.wlb.gpu_check.stopwatch import Stopwatch, let_launches_queue_up
from wlb.cost import ProfiledCost, TransformerShape
from wlb.cost.least_squares import fit_seconds
from wlb.documents import MicroBatch, documents_from_lengths

COST_RULE = "the profiles are what --wlb-cost-profile reads; no time decides anything"


@dataclass(frozen=True, kw_only=True)
class CostScale:
    """attention_tokens: T of the packs of equal documents. document_tokens: their lengths, increasing.

    rest_tokens: T of the packs without attention. repeats: timed runs of each, after one that warms up; one where the
    time is over. draw_on_device: weights, see `SmallGpt`.
    """

    attention_tokens: int
    document_tokens: tuple[int, ...]
    rest_tokens: tuple[int, ...]
    repeats: int
    draw_on_device: bool


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of a forward and a backward pass."""

    forward_s: float
    backward_s: float


def check_cost(
    scale: CostScale, packs: TimesScale, shapes: dict[str, TransformerShape], budget_s: float, *, engine: bool
) -> tuple[bool, dict[str, Any]]:
    """By name of the shape: `profile`, the content of a cost file, and what says how far to trust it.

    packs: how the lengths of the pack are drawn on which the profile is tried.
    """
    measured = {}
    for name, shape in shapes.items():
        measured[name] = _measure(scale, packs, shape, monotonic() + budget_s / len(shapes), engine=engine)
        ProfiledCost.from_json(measured[name]["profile"], where=f"profile of {name}")
    return True, measured


def _measure(
    scale: CostScale, packs: TimesScale, shape: TransformerShape, deadline_s: float, *, engine: bool
) -> dict[str, Any]:
    model = packed_gpt(_two_layers(scale, shape), torch.bfloat16, transformer_engine=engine)
    rest = _time_rest(scale, model, deadline_s)
    attention = _time_attention(scale, model, shape, deadline_s)
    profile = profile_of(shape, attention, rest)
    num_tokens = max(tokens for _, tokens in rest)
    lengths = draw_lengths(packs, num_tokens, seed=0)
    whole = _time_model(model, lengths, scale.repeats, deadline_s)
    two_layers = profile_of(replace(shape, num_layers=2), attention, rest)
    longest = max(attention)
    flops = replace(shape, num_layers=1).attention_flops_per_pair * longest * (longest + 1) / 2
    return {
        "profile": profile.to_json(),
        "crossover tokens": crossover_tokens(profile),
        "crossover tokens by counting": shape.crossover_tokens,
        "attention forward TFLOP/s": flops / attention[longest].forward_s / 1e12,
        "mixed pack tokens": num_tokens,
        "mixed pack predicted over measured": (two_layers.forward_s(lengths) + two_layers.backward_s(lengths))
        / (whole.forward_s + whole.backward_s),
    }


def profile_of(
    shape: TransformerShape, attention: dict[int, Passes], rest: dict[tuple[int, int], Passes]
) -> ProfiledCost:
    """The cost of all layers of `shape` and its output layer on one rank.

    attention: of one layer for one document of each length. rest: by (layers, T).
    """
    # Of a layer's token, any token, a layer, a micro-batch.
    features = np.array([(layers * tokens, tokens, layers, 1) for layers, tokens in rest], dtype=np.float64)
    whole = np.array([(shape.num_layers, 1, 0, 0), (0, 0, shape.num_layers, 1)], dtype=np.float64)
    forward_s, backward_s = (
        whole @ fit_seconds(features, np.array(seconds))
        for seconds in ([p.forward_s for p in rest.values()], [p.backward_s for p in rest.values()])
    )
    per_batch = np.array([max(tokens for _, tokens in rest), 1.0])
    lengths = sorted(attention)
    # Noise must not make a longer document cheaper.
    table_s = np.maximum.accumulate([shape.num_layers * attention[n].forward_s for n in lengths])
    return ProfiledCost(
        attention=tuple(zip(lengths, table_s.tolist(), strict=True)),
        linear_token_s=float(forward_s[0]),
        fixed_micro_batch_s=float(forward_s[1]),
        attention_backward_ratio=attention[lengths[-1]].backward_s / attention[lengths[-1]].forward_s,
        rest_backward_ratio=float(backward_s @ per_batch / (forward_s @ per_batch)),
    )


def crossover_tokens(profile: ProfiledCost) -> float:
    """Length of the document whose attention takes as long as all else, both passes together.

    From the longest measured document: beyond it, and about below it, attention grows with the square.
    """
    length, forward_s = profile.attention[-1]
    pair_s = (1 + profile.attention_backward_ratio) * forward_s / length**2
    return (1 + profile.rest_backward_ratio) * profile.linear_token_s / pair_s


def _two_layers(scale: CostScale, shape: TransformerShape) -> SmallGpt:
    return SmallGpt(
        num_layers=2,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        gated=shape.gated,
        max_positions=max(scale.attention_tokens, *scale.rest_tokens),
        init_std=0.02,
        draw_on_device=scale.draw_on_device,
    )


def _time_attention(scale: CostScale, model: GPTModel, shape: TransformerShape, deadline_s: float) -> dict[int, Passes]:
    """Of one document by its length, in a pack of such documents; longest first: time may not last for all."""
    passes: dict[int, Passes] = {}
    for length in reversed(scale.document_tokens):
        if len(passes) > 1 and monotonic() > deadline_s:
            break
        count = max(1, scale.attention_tokens // length)
        attention = layer_attention(model, (length,) * count)
        heads = (shape.num_attention_heads, shape.num_query_groups, shape.num_query_groups)
        query, key, value = (
            torch.randn(length * count, n, shape.head_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for n in heads
        )
        grad = torch.randn_like(query)
        samples = []
        for run in range(1 + scale.repeats):
            if run > 1 and monotonic() > deadline_s:
                break
            watch = Stopwatch(query.device)
            let_launches_queue_up(query.device)
            with watch.lap("forward"):
                out = attention(query, key, value)
            with watch.lap("backward"):
                torch.autograd.grad(out, (query, key, value), grad)
            samples.append(watch.seconds())
        passes[length] = _median(samples, parts=count)
    return dict(sorted(passes.items()))


def _time_rest(scale: CostScale, model: GPTModel, deadline_s: float) -> dict[tuple[int, int], Passes]:
    """By (layers, T); T as far as memory goes, which the loss of a large vocabulary fills first."""
    passes: dict[tuple[int, int], Passes] = {}
    with _without_attention(model):
        for tokens in scale.rest_tokens:
            try:
                for layers in (2, 1):
                    with _first_layers(model, layers):
                        passes[layers, tokens] = _time_model(model, (tokens,), scale.repeats, deadline_s)
            except torch.OutOfMemoryError:
                if not passes:
                    raise
                break
    return passes


def _time_model(model: GPTModel, lengths: Sequence[int], repeats: int, deadline_s: float) -> Passes:
    """As training would see it: where launching is slower than the device, launching is what counts."""
    micro_batch = MicroBatch(documents=documents_from_lengths(lengths))
    rng = np.random.default_rng(5)
    stored = [rng.integers(1, model.vocab_size, size=n + 1) for n in lengths]
    batch = packed_batch(model, stored, micro_batch)
    samples = []
    for run in range(1 + repeats):
        if run > 1 and monotonic() > deadline_s:
            break
        model.zero_grad(set_to_none=True)
        watch = Stopwatch(batch["tokens"].device)
        with watch.lap("forward"):
            loss = model(
                batch["tokens"],
                batch["position_ids"],
                None,
                labels=batch["labels"],
                packed_seq_params=batch["packed_seq_params"],
            ).sum()
        with watch.lap("backward"):
            loss.backward()
        samples.append(watch.seconds())
    model.zero_grad(set_to_none=True)
    return _median(samples, parts=1)


def _median(samples: list[dict[str, float]], *, parts: int) -> Passes:
    """Without the first, which warmed up."""
    forward_s, backward_s = (median(s[name] for s in samples[1:]) / parts for name in ("forward", "backward"))
    return Passes(forward_s=forward_s, backward_s=backward_s)


class _NoAttention(torch.nn.Module):
    def forward(self, query: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return query.reshape(query.shape[0], -1)


@contextmanager
def _without_attention(model: GPTModel) -> Iterator[None]:
    attentions = [layer.self_attention for layer in model.decoder.layers]
    cores = [a.core_attention for a in attentions]
    for attention in attentions:
        attention.core_attention = _NoAttention()
    try:
        yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core_attention = core


@contextmanager
def _first_layers(model: GPTModel, count: int) -> Iterator[None]:
    layers = model.decoder.layers
    model.decoder.layers = layers[:count]
    try:
        yield
    finally:
        model.decoder.layers = layers
