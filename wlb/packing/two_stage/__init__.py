"""Hydraulis' two stages: documents to replicas, then micro-batches inside each replica, both by closed forms.

Read in this order: `packer` (what it promises), `dispatch` (stage 1), `fill` (stage 2), `level` (its local search).
"""
