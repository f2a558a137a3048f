"""Attention over packed documents: each document attends to itself, causally."""

from wlb.attention.dense import dense_attention
from wlb.attention.packed import packed_attention

__all__ = ["dense_attention", "packed_attention"]
