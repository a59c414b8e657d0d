"""Costs of methods, in one process: nothing is sent, so ranks need no process group."""

from __future__ import annotations

import torch

from tilewise.distributed.layout import Ranks, Split
from tilewise.distributed.methods import choose, method_of
from tilewise.distributed.operands import Arguments, CallOptions, read


def test_on_two_axes_a_rank_sends_what_both_methods_send():
    """A rank of 2 x 4 makes a hop of the ring, and trades 3 of 4 parts of q, k, v and o."""
    across, inside = (Ranks(None, 0, Split(size, 1), "cpu") for size in (2, 4))
    ranks = Ranks(None, 0, Split(8, 1), "cpu", (across, inside))
    q, k, v = (torch.zeros(1, heads, 64, 32, requires_grad=True) for heads in (8, 4, 4))
    given = Arguments((q, k, v), None, None, None, None, CallOptions(False, None, None, None, None, None), {})
    call, tensors = read(ranks, given)
    keys, queries = 2 * 4 * 64 * 32 * 4, 8 * 64 * 32 * 4
    traded = (2 * queries + keys) * 3 // 4
    cost = method_of("ring", call, tensors).cost(call, tensors)
    assert (cost.method, cost.declines, cost.last_bytes) == ("ring", None, keys)
    assert (cost.forward_bytes, cost.backward_bytes) == (keys + traded, 3 * keys + traded)
    assert choose(call, tensors, "auto") == "ring"
    odd, tensors = read(ranks, given._replace(qkv=(q[:, :6], k[:, :3], v[:, :3])))
    assert method_of("ring", odd, tensors).cost(odd, tensors).declines == (
        "the 6 query heads do not divide by the 4 of its second axis"
    )
