"""Which pairs of a tile are visible, in the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.score import in_band
from tilewise.backends.triton.tensors import load_operand


@triton.jit
def visible_tile(x, at, n0, cols, terms, sizes, MASKED: tl.constexpr, PARTIAL: tl.constexpr, TAIL: tl.constexpr, c):
    """Which pairs of a tile are visible: by the mask where it is MASKED, in the band and inside the keys where it is
    PARTIAL.

    A mask is read without asking whether this tile needs it: a load under a condition of its own tile is a test, a
    selection and a wait more for each element of those that do.
    """
    if PARTIAL:
        visible = (n0 + cols < sizes.keys) & (at.rows >= 0)
        if terms.HAS_LO or terms.HAS_HI or not MASKED:
            visible &= in_band(at.m0 + at.rows, n0 + cols, terms)
    else:  # always; in the layout of the scores it makes Triton take the mask there too
        visible = (at.rows >= 0) & (cols >= 0)
    if MASKED:
        visible &= load_operand(x.mask, c.MASK_HOW, at, n0, cols, TAIL, sizes, c) != 0
    return visible
