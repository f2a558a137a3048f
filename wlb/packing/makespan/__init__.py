"""Packing for the shortest predicted step.

Read in this order: `packer` (what it promises), `start` and `fill` (a plan that is good at once), `search` and `moves`
(better ones), `replica`, `timer` and `work` (what a candidate costs, in integer nanoseconds), `sharded` (what it
costs where context-parallel ranks divide micro-batches).
"""
