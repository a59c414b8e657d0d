"""Attention of a sequence that is split over several processes, on torch.distributed: context parallelism.

context_parallel_attention   attention, of this rank's queries and all keys
context_parallel_varlen_attention   the same of a packed batch
explain_context_parallel, explain_context_parallel_varlen
                             which method it would take, and what each sends, holds and computes
shard, unshard               a whole tensor's part of this rank, and back
triangle_attention           of a pair representation whose rows are split
transpose_shards             its transposed, by an all-to-all

docs/distributed.md says which method is for what.
"""

from __future__ import annotations

from tilewise.distributed import operator  # noqa: F401  # registers it
from tilewise.distributed.api import context_parallel_attention, explain_context_parallel
from tilewise.distributed.packed import context_parallel_varlen_attention, explain_context_parallel_varlen
from tilewise.distributed.placement import shard, unshard
from tilewise.distributed.triangle import transpose_shards, triangle_attention

__all__ = [
    "context_parallel_attention",
    "context_parallel_varlen_attention",
    "explain_context_parallel",
    "explain_context_parallel_varlen",
    "shard",
    "transpose_shards",
    "triangle_attention",
    "unshard",
]
