"""Attention of a sequence that is split over several processes, on torch.distributed: context parallelism.

context_parallel_attention   attention, of this rank's queries and all keys
explain_context_parallel     which method it would take, and what each sends, holds and computes
shard, unshard               a whole tensor's part of this rank, and back

docs/distributed.md says which method is for what.
"""

from __future__ import annotations

from tilewise.distributed import operator  # noqa: F401  # registers it
from tilewise.distributed.api import context_parallel_attention, explain_context_parallel
from tilewise.distributed.placement import shard, unshard

__all__ = ["context_parallel_attention", "explain_context_parallel", "shard", "unshard"]
