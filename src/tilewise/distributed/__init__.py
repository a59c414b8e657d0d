"""Context parallelism: attention of a sequence that is split over processes, on torch.distributed.

context_parallel_attention          attention of this rank's queries over all keys
context_parallel_varlen_attention   the packed (varlen) variant
explain_context_parallel, explain_context_parallel_varlen
                                    the chosen method, and what each method sends, holds and computes
shard, unshard                      this rank's part of a whole tensor, and the whole tensor back
triangle_attention                  triangle attention of a pair representation whose rows are split
transpose_shards                    the transposed pair representation, by an all-to-all

docs/distributed.md says when to use which method.
"""

from __future__ import annotations

from tilewise.distributed.api import (
    context_parallel_attention,
    context_parallel_varlen_attention,
    explain_context_parallel,
    explain_context_parallel_varlen,
)
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


def __dir__() -> list[str]:
    return sorted(__all__)
