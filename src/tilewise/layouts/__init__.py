"""Layouts of tensor-core operands in shared and tensor memory: computed, drawn, and written as in CuTe and Triton.

Pure Python, without torch and triton. docs/layouts.md teaches the subject.

int_tuple   nested tuples of integers
cute        CuTe's layout algebra: shape:stride, composition, complement, divide, product, inverses, swizzles
linear      linear layouts over F2, as in Triton
convert     conversion between the two
operand     an operand in shared memory: swizzle atoms, offsets, SBO and LBO
mma         instructions: descriptors of sm_90 and sm_100, shares, the hardware's rules
nvmma       the linear layouts of Gluon's NVMMASharedLayout
checks      bank conflicts of an access; comparison of two layouts
text        facts and drawings for a terminal
figure      the drawing, as lines, boxes and words; svg and png write it, page is the interactive one
tensor_memory, tensor_memory_views   operand A in tensor memory: lanes, columns, packing; its facts and drawings
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
from tilewise.layouts.tensor_memory import Cell, TensorMemoryOperand

__all__ = [
    "Access",
    "Arch",
    "AtomOrder",
    "Cell",
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
    "TensorMemoryOperand",
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


def __dir__() -> list[str]:
    return sorted(__all__)
