"""A kernel of hopper_packed_child.py, in a module of its own, where Triton finds what it calls."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gluon.packed import listed_tile_and_head


@triton.jit
def tiles_of_heads_kernel(tile_list, out, heads, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr):
    t = tl.program_id(0)
    seq, tile, head, _ = listed_tile_and_head(tile_list, t, heads, BLOCK, BY_KEYS)
    tl.store(out + 4 * t, seq.first_query)
    tl.store(out + 4 * t + 1, seq.first_key)
    tl.store(out + 4 * t + 2, tile)
    tl.store(out + 4 * t + 3, head)
