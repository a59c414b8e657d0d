"""Shared-memory layouts of tensor-core operands: computed, drawn, and written in the languages of CuTe and of Triton.

Pure Python: needs neither torch nor triton. docs/layouts.md teaches the subject.

int_tuple   nested tuples of integers
cute        CuTe's layout algebra: shape:stride, composition, complement, divide, product, inverses, swizzles
linear      linear layouts over F2, as Triton has them
convert     between the two
operand     an operand in shared memory: swizzle atoms, offsets, SBO and LBO
mma         what an instruction is told and reads: descriptors of sm_90 and sm_100, shares, the hardware's rules
nvmma       the linear layouts of Gluon's NVMMASharedLayout
checks      bank conflicts of an access; whether two layouts agree
text        facts and drawings for a terminal
figure      the drawing, in lines, boxes and words; svg and png write it, page is the interactive one
"""

from __future__ import annotations

from tilewise.layouts.checks import (
    Access,
    Difference,
    element_addresses,
    first_difference,
    matrix_addresses,
    wavefronts,
)
from tilewise.layouts.cute import ComposedLayout, Layout, Swizzle
from tilewise.layouts.linear import LinearLayout
from tilewise.layouts.mma import Arch, Descriptor, Instruction, Role, check, check_base, instructions
from tilewise.layouts.nvmma import default_swizzle, nvmma_shared_layout
from tilewise.layouts.operand import AtomOrder, LayoutError, Major, Operand, SwizzleMode, element_bits

__all__ = [
    "Access",
    "Arch",
    "AtomOrder",
    "ComposedLayout",
    "Descriptor",
    "Difference",
    "Instruction",
    "Layout",
    "LayoutError",
    "LinearLayout",
    "Major",
    "Operand",
    "Role",
    "Swizzle",
    "SwizzleMode",
    "check",
    "check_base",
    "default_swizzle",
    "element_addresses",
    "element_bits",
    "first_difference",
    "instructions",
    "matrix_addresses",
    "nvmma_shared_layout",
    "wavefronts",
]
