"""Cost without a measurement: from the crossover length, or from a transformer's shape."""

from __future__ import annotations

from dataclasses import dataclass

from wlb.cost.model import RatioCost, causal_pairs, require_not_negative, require_positive
from wlb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CrossoverCost(RatioCost):
    """Two terms: a document of d tokens takes (d / B)^2 attention and d / B other units, B the crossover length.

    At d = B attention takes as long as everything else. Plans depend on B alone; `linear_token_s` only sets the
    unit, and by default a document of B tokens takes one second for each part, so that a token is worth
    10^9 / B integer nanoseconds when work is compared.

    crossover_tokens: B, > 0.
    overhead_tokens: fixed cost of a micro-batch, as the linear time of so many tokens.
    linear_token_s: seconds per token of everything but attention; None means 1 / B.

    >>> CrossoverCost(crossover_tokens=4).forward_s([4, 2])  # (1 + 1) + (1/4 + 1/2)
    2.75
    """

    crossover_tokens: float
    overhead_tokens: float = 0.0
    linear_token_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("crossover_tokens", self.crossover_tokens)
        require_not_negative("overhead_tokens", self.overhead_tokens)
        if self.linear_token_s is not None:
            require_positive("linear_token_s", self.linear_token_s)

    @property
    def token_s(self) -> float:
        """Seconds of everything but attention for one token."""
        return 1 / self.crossover_tokens if self.linear_token_s is None else self.linear_token_s

    @property
    def fixed_s(self) -> float:
        return self.overhead_tokens * self.token_s

    def attention_s(self, q_tokens: int, kv_tokens: int) -> float:
        return 2 * causal_pairs(q_tokens, kv_tokens) / self.crossover_tokens * self.token_s

    def linear_s(self, tokens: int) -> float:
        return tokens * self.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder-only transformer, counted in floating-point operations of the forward pass.

    num_query_groups: key-value heads; equal to num_attention_heads without grouped queries.
    gated: the MLP has a gate (SwiGLU): three matrices instead of two.
    vocab_size: rows of the output layer; 0 leaves it out.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    gated: bool

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "ffn_hidden_size",
            "num_layers",
            "num_attention_heads",
            "num_query_groups",
            "head_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.vocab_size < 0:
            raise ConfigError(f"vocab_size must be >= 0, got {self.vocab_size}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"num_query_groups must divide num_attention_heads = {self.num_attention_heads}, "
                f"got {self.num_query_groups}"
            )

    @property
    def layer_flops_per_token(self) -> int:
        """Matrix products of one layer, attention's scores and values left out."""
        query_width = self.num_attention_heads * self.head_size
        key_width = self.num_query_groups * self.head_size
        attention = self.hidden_size * (2 * query_width + 2 * key_width)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        return 2 * (attention + mlp)

    @property
    def linear_flops_per_token(self) -> int:
        """Matrix products of all layers and of the output layer."""
        return self.num_layers * self.layer_flops_per_token + 2 * self.hidden_size * self.vocab_size

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and values of all layers for one (query, key) pair: two products of two operations."""
        return 4 * self.num_layers * self.num_attention_heads * self.head_size

    @property
    def crossover_tokens(self) -> float:
        """Length of the document whose causal attention takes as many operations as everything else."""
        return 2 * self.linear_flops_per_token / self.attention_flops_per_pair

    def forward_flops(self, lengths: list[int] | tuple[int, ...]) -> float:
        """Operations of one micro-batch: causal inside each document, none between documents."""
        pairs = sum(causal_pairs(n, n) for n in lengths)
        return self.attention_flops_per_pair * pairs + self.linear_flops_per_token * sum(lengths)

    def cost(self, *, flops_per_s: float = 1e12, overhead_tokens: float = 0.0) -> CrossoverCost:
        """A cost model in which every operation takes 1 / flops_per_s seconds."""
        require_positive("flops_per_s", flops_per_s)
        return CrossoverCost(
            crossover_tokens=self.crossover_tokens,
            overhead_tokens=overhead_tokens,
            linear_token_s=self.linear_flops_per_token / flops_per_s,
        )
