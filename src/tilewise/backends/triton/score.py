"""A tile of scores in the Triton kernels, and which of its pairs are visible."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.kernels.score import in_band, score_tile
from tilewise.backends.triton.relative import load_added
from tilewise.backends.triton.tensors import dot, load_operand
from tilewise.backends.triton.tile_mask import listed_pairs


@triton.jit
def score_products(a, b, x, at, n0, cols, TAIL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c):
    """The scores of a tile, A B with all that comes after and is added; the softcap's derivative, see `score_tile`; and
    what was added, in float32.

    NEAR: it may meet distances that have an entry. With BIAS_FIRST the product starts from what is added, and the
    scores are in the units of the product: a tile that is read by pointers, where no pipeline is lost by that, would
    else have Triton take the maximum and the sum of its rows in the layout in which it is read, in twice as many
    instructions.
    """
    if c.BIAS_FIRST:
        added = load_added(x, at, n0, cols, TAIL, NEAR, terms, sizes, c)
        s = dot(a, b, tl.broadcast_to(added * (1.0 / terms.scale), [a.shape[0], b.shape[1]]), c)
        slope = s
    else:
        products = dot(a, b, None, c)
        added = products
        if c.BIAS:
            added = load_added(x, at, n0, cols, TAIL, NEAR, terms, sizes, c)
        s, slope = score_tile(products, added, terms, c.BIAS)
    return s, slope, added


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
            rows, columns = at.m0 + at.rows, n0 + cols
            if c.PACKED:  # the band is counted from the last query and key
                rows += tl.maximum(x.start.diagonal, 0)
                columns += tl.maximum(-x.start.diagonal, 0)
            visible &= in_band(rows, columns, terms)
    else:  # always; in the layout of the scores it makes Triton take the mask there too
        visible = (at.rows >= 0) & (cols >= 0)
    if MASKED:
        if c.MASK_HOW.LAYOUT == "bits" or c.MASK_HOW.LAYOUT == "intervals":
            visible &= listed_pairs(x.mask, c.MASK_HOW, at, n0, cols, sizes)
        else:
            visible &= load_operand(x.mask, c.MASK_HOW, x.start, at, n0, cols, TAIL, sizes, c) != 0
    return visible
