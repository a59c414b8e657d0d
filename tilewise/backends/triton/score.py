"""Which pairs of a tile are visible, in the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.score import in_band
from tilewise.backends.triton.tensors import load_operand


@triton.jit
def visible_tile(x, at, n0, cols, mixed, terms, sizes, PARTIAL: tl.constexpr, TAIL: tl.constexpr, c):
    """Which pairs of a tile are visible: inside the keys, in the band, by the mask.

    PARTIAL: the band may cut it. mixed: where there are lists of tiles, whether the mask has to be read.
    """
    visible = (n0 + cols < sizes.keys) & (at.rows >= 0)
    if PARTIAL:
        visible &= in_band(at.m0 + at.rows, n0 + cols, terms)
    if c.LISTS:
        wanted = mixed != 0
        visible &= (load_operand(x.mask, c.MASK_HOW, at, n0, cols, True, sizes, c, wanted) != 0) | (mixed == 0)
    elif c.MASK:
        visible &= load_operand(x.mask, c.MASK_HOW, at, n0, cols, TAIL, sizes, c) != 0
    return visible
