"""Workload-balanced packing and sharding of variable-length documents. Imports no Megatron."""

__version__ = "0.1.0"
