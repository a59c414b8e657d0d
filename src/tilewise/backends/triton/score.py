"""Scores and visible pairs of a tile in the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.kernels.score import in_band, score_tile
from tilewise.backends.triton.blocks import dot_rows
from tilewise.backends.triton.relative import load_added
from tilewise.backends.triton.tensors import load_operand
from tilewise.backends.triton.tile_mask import listed_pairs


@triton.jit
def score_products(a, b, x, at, n0, cols, TAIL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c,
                   CLEAN: tl.constexpr = False):  # fmt: skip
    """Return a tile's scores from A Bᵀ, the softcap's derivative (`score_tile`), the bias in float32, and A Bᵀ.

    NEAR: some distance in the tile may have an entry. With BIAS_FIRST the accumulator starts from the bias, and scores
    are in the units of the product. Triton: with a bias by pointers, not pipelined in any case, row maxima and sums
    would else be computed in the layout of the bias load, with twice as many instructions.
    """
    if c.BIAS_FIRST:
        added = load_added(x, at, n0, cols, TAIL, NEAR, terms, sizes, c)
        ROWS: tl.constexpr = at.rows.shape[0] * cols.shape[0]
        COLS: tl.constexpr = at.rows.shape[1] * cols.shape[1]
        start = tl.broadcast_to(added * (1.0 / terms.scale), [ROWS, COLS])
        s = dot_rows(a, b, start, "head", CLEAN, sizes, c)
        slope = s
        products = s  # with the bias: no caller that reads the products has it first
    else:
        products = dot_rows(a, b, None, "head", CLEAN, sizes, c)
        added = products
        if c.BIAS:
            added = load_added(x, at, n0, cols, TAIL, NEAR, terms, sizes, c)
        s, slope = score_tile(products, added, terms, c.BIAS)
    return s, slope, added, products


@triton.jit
def visible_tile(x, at, n0, cols, terms, sizes, MASKED: tl.constexpr, PARTIAL: tl.constexpr, TAIL: tl.constexpr, c):
    """Return a tile's visible pairs: by the mask if MASKED, by window and end of the keys if PARTIAL.

    A mask is loaded unconditionally: a load that depends on the tile's state takes one more test, select and wait per
    element.
    """
    if PARTIAL:
        visible = (n0 + cols < sizes.keys) & (at.rows >= 0)
        if terms.HAS_LO or terms.HAS_HI or not MASKED:
            rows, columns = at.m0 + at.rows, n0 + cols
            if c.PACKED:  # the window is aligned to the last query and key
                rows += tl.maximum(x.start.diagonal, 0)
                columns += tl.maximum(-x.start.diagonal, 0)
            visible &= in_band(rows, columns, terms)
    else:  # all True; Triton then computes the mask in the layout of the scores
        visible = (at.rows >= 0) & (cols >= 0)
    if MASKED:
        if c.MASK_HOW.LAYOUT == "bits" or c.MASK_HOW.LAYOUT == "intervals":
            visible &= listed_pairs(x.mask, c.MASK_HOW, at, n0, cols, sizes)
        else:
            visible &= load_operand(x.mask, c.MASK_HOW, x.start, at, n0, cols, TAIL, sizes, c) != 0
    return visible
