"""Toeplitz bias in the kernels: a vector per head with one entry for each distance ``j - i``.

Tiles beyond `tilewise.spec.score.Far` have one number, or a line: no entry is read for them. Other tiles load their
entries from memory into the accumulator registers from which the product starts. They load two neighbours of a row at
once, at any parity: one 64-bit word stores each entry with the next one (in the backward the previous one), in the
units of the scores (`pairs_kernel`). `PAD` words of zeros precede the first and follow the last, for tiles that extend
past the queries or keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends import allocation
from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.launch.launcher import POINTER, Launch, strided
from tilewise.spec.problem import Problem

PAD = tl.constexpr(256)  # a tile never extends more rows or columns past the last query or key
BLOCK = tl.constexpr(1024)
MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def pairs_kernel(vector, pairs, gradient, count, inverse, heads, step):
    """Write words of each entry of a `Strided` vector (B, H, 1, count) and the entry ``step`` further, times
    ``inverse``. Finite entries stay finite. gradient: None, or a tensor with as many elements, which is zeroed."""
    width = count + 2 * PAD
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks
    at = vector.pointer + tl.cast(row // heads, tl.int64) * vector.stride0
    at += tl.cast(row % heads, tl.int64) * vector.stride1
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    entry = place - PAD
    low = tl.load(at + entry.to(tl.int64) * vector.stride3, mask=(entry >= 0) & (entry < count), other=0.0)
    entry += step
    high = tl.load(at + entry.to(tl.int64) * vector.stride3, mask=(entry >= 0) & (entry < count), other=0.0)
    low = _scaled(low.to(tl.float32), inverse).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = _scaled(high.to(tl.float32), inverse).to(tl.uint32, bitcast=True).to(tl.uint64)
    to = tl.cast(row, tl.int64) * width + place
    tl.store(pairs + to, (low | (high << 32)).to(tl.int64), mask=place < width)
    if gradient is not None:
        tl.store(gradient + to, tl.zeros([BLOCK], tl.float32), mask=place < width)


@triton.jit
def _scaled(x, inverse):
    y = x * inverse
    y = tl.where((tl.abs(y) == float("inf")) & (tl.abs(x) != float("inf")), tl.where(x < 0, -MOST, MOST), y)
    return y


class Pairs:
    """Launch of `pairs_kernel` for vectors of one layout.

    step: from the first to the second entry of a word; 1 in the forward, -1 in a backward, whose tiles are transposed,
    unless the next K·Qᵀ is issued ahead.
    """

    def __init__(self, problem: Problem, vector: Tensor, inverse: float, step: int = 1):
        B, H, _, count = vector.shape
        self.step, width = step, count + 2 * PAD.value
        self.empty = allocation(torch.empty(B * H, width, dtype=torch.int64, device="meta"), vector.device)
        programs = B * H * triton.cdiv(width, BLOCK.value)
        layouts = strided(vector), POINTER, POINTER
        self.launch = Launch(pairs_kernel, programs, layouts, (count, inverse, H, step), num_warps=4)

    def __call__(self, vector: Tensor, gradient: Tensor | None = None) -> Tensor:
        """gradient: a contiguous float32 tensor to zero, with an element per word."""
        pairs = self.empty()
        self.launch(vector, pairs, gradient)
        return pairs


class Line(NamedTuple):
    """Bias of far distances: ``value`` at the distance ``at``, and ``slope`` more for each further one."""

    value: Any
    slope: Any
    at: Any


@gluon.jit
def diagonal_of(pairs, b, h, heads, sizes, c):
    """Return the address of the word of distance 0 of a query head."""
    head = h // c.TOEPLITZ_GROUP
    if c.TOEPLITZ_BATCH:
        head += b * (heads // c.TOEPLITZ_GROUP)
    width = sizes.queries + sizes.keys - 1 + 2 * PAD
    return pairs + (gl.cast(head, gl.int64) * width + (sizes.queries - 1 + PAD))


@gluon.jit
def entry_of(diagonal, distance):
    word = gl.load(diagonal + distance)
    return word.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def line_of(diagonal, at, end, c):
    """Return the `Line` of the far distances, between ``at`` and ``end``."""
    value = entry_of(diagonal, at)
    slope = 0.0
    if c.TOEPLITZ == "line":
        span = end - at
        rise = (entry_of(diagonal, end) - value) / gl.where(span == 0, 1, span).to(gl.float32)
        slope = gl.where((span == 0) | (gl.abs(value) == float("inf")), 0.0, rise)
    return Line(value, slope, at)


@gluon.jit
def line_below(diagonal, terms, sizes, c):
    if c.FAR_LO:
        return line_of(diagonal, terms.far_lo, 1 - sizes.queries, c)
    else:
        return 0


@gluon.jit
def line_above(diagonal, terms, sizes, c):
    if c.FAR_HI:
        return line_of(diagonal, terms.far_hi, sizes.keys - 1, c)
    else:
        return 0


@gluon.jit
def words(diagonal, corner, like, KEYS_IN_ROWS: gl.constexpr, STEP: gl.constexpr):
    """Return the entries of a tile in the layout of ``like``.

    corner: the tile's first key minus its first query. STEP: as for `pairs_kernel`. Addresses differ between the
    elements of a thread by a constant of each load, as in `forward.masks.banded`.
    """
    R: gl.constexpr = like.shape[0]
    C: gl.constexpr = like.shape[1]
    first, _ = like.reshape([R, C // 8, 4, 2]).split()
    L: gl.constexpr = first.type.layout
    rows = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    eights = gl.arange(0, C // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    twos = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    if KEYS_IN_ROWS:
        at = (diagonal + (corner if STEP < 0 else corner - 1)) + (rows - 2 * twos) + (0 - 8 * eights)
    else:
        at = (diagonal + corner) + (2 * twos - rows) + 8 * eights
    low, high = gl.inline_asm_elementwise(
        "mov.b64 {$0, $1}, $2;", "=f,=f,l", [gl.load(at)], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    found = gl.join(high, low) if KEYS_IN_ROWS and STEP > 0 else gl.join(low, high)
    return gl.convert_layout(found.reshape([R, C]), like.type.layout, assert_trivial=True)


@gluon.jit
def prefetch_near(diagonal, ROWS: gl.constexpr, WARPS: gl.constexpr, terms, sizes, c):
    """Prefetch the entries of the near tiles of ROWS queries, at most 1,024 words: else warps wait for memory in each
    tile."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words = gl.arange(0, 32 * WARPS, L) * (32 // WARPS)
    if c.FAR_HI:
        distance = terms.far_hi + (c.BLOCK_N + ROWS - 1) - words
    else:
        distance = terms.far_lo - (c.BLOCK_N + ROWS - 1) + words
    distance = gl.maximum(gl.minimum(distance, sizes.keys - 1), 1 - sizes.queries)
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [diagonal + distance], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def near_start(diagonal, row0, n0, c):
    """Return the initial accumulator of Q·Kᵀ for the queries from row0 and the keys from n0 on."""
    return words(diagonal, n0 - row0, gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N)), False, 1)


@gluon.jit
def anew(x):
    """Return ``x``, opaque to the compiler, so that values computed from it for all columns are not hoisted into
    registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def new_columns(c):
    """Return the key indices of a tile, [BLOCK_N, 16], in the columns that `far_start` multiplies by a slope."""
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.BLOCK_N, 16], gl.bfloat16)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    columns = gl.allocate_shared_memory(gl.bfloat16, [c.BLOCK_N, 16], S)
    key = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, L))[:, None]
    place = gl.arange(0, 16, gl.SliceLayout(0, L))[None, :]
    columns.store(gl.where(place < 3, key, 0).to(gl.bfloat16))
    return columns


@gluon.jit
def far_start(far, columns, c):
    """Issue the initial accumulator of a far tile on a line, the slope times each key's index, by tensor cores. A
    multiplication per score would delay the next product after a softmax. A slope is split into three bfloat16 numbers,
    24 bits together; a key's index is one."""
    S: gl.constexpr = accumulator(64, c.BLOCK_N)
    L: gl.constexpr = accumulator(64, 16)
    slope = anew(far.slope)
    high = slope.to(gl.bfloat16).to(gl.float32)
    middle = (slope - high).to(gl.bfloat16).to(gl.float32)
    low = (slope - high) - middle
    place = gl.arange(0, 16, gl.SliceLayout(0, L))[None, :] + gl.zeros([64, 16], gl.int32, L)
    parts = gl.where(place == 0, high, gl.where(place == 1, middle, gl.where(place == 2, low, 0.0))).to(gl.bfloat16)
    parts = gl.convert_layout(parts, gl.DotOperandLayout(0, S, 2), assert_trivial=True)
    none = gl.zeros([64, c.BLOCK_N], gl.float32, S)
    return warpgroup_mma(parts, columns.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def far_shift(far, row0, n0, c):
    """Return the number to add to each row of a far tile."""
    shift = far.value
    if c.TOEPLITZ == "line":
        rows = gl.arange(0, 64, gl.SliceLayout(1, accumulator(64, c.BLOCK_N)))
        shift = (shift + far.slope * (n0 - row0 - far.at).to(gl.float32)) - far.slope * rows.to(gl.float32)
    return shift


@gluon.jit
def first_not_above(tile, first, terms, c, WARPGROUP: gl.constexpr):
    """Return the first entry from ``first`` on that is not entirely above the near distances; tiles run from the last
    key."""
    lowest = gl.maximum(tile.row0 + 64 * WARPGROUP + 63 + terms.far_hi, 0)
    return gl.minimum(gl.maximum(tile.last + 1 - gl.cdiv(lowest, c.BLOCK_N), first), tile.count)


@gluon.jit
def first_below(tile, first, terms, c, WARPGROUP: gl.constexpr):
    """Return the first entry from ``first`` on from which all are entirely below the near distances."""
    end = gl.maximum(tile.row0 + 64 * WARPGROUP + terms.far_lo + 1, 0) // c.BLOCK_N
    return gl.minimum(gl.maximum(tile.last + 1 - end, first), tile.count)
