"""Matrix product of tiles for the Triton kernels of attention and of `tilewise.matmul`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

_INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))  # Triton's interpreter does not run inline PTX


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr, KEEPS: tl.constexpr):
    """Return acc + A B; ``acc`` may be None.

    PRECISION: of float32 tiles, "tf32", "tf32x3" or "ieee". KEEPS: rounded tiles may be reused from registers.
    """
    return tl.dot(_operand(a, PRECISION, KEEPS), _operand(b, PRECISION, KEEPS), acc, input_precision=PRECISION)


@triton.jit
def _operand(tile, PRECISION: tl.constexpr, KEEPS: tl.constexpr):
    """Round a float32 tile to TF32, as cuBLAS does; tensor cores truncate, which triples the error."""
    if PRECISION == "tf32" and tile.dtype == tl.float32:
        if _INTERPRET:
            bits = tile.to(tl.int32, bitcast=True)
            tile = tl.where(tile == tile, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), tile)
        else:
            tile = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [tile], tl.float32, KEEPS, 1)
    return tile
