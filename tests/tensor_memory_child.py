"""Compiles, for Blackwell, kernels that store operand A into tensor memory and multiply; child process of a test.

Prints the PTX of each case of standard input, a list of [M, K, bits, what]: A's elements are their own row or column.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_mma,
)

N = 64
DTYPES = {8: (gl.float8e5, gl.int8), 16: (gl.bfloat16, gl.int16), 32: (gl.float32, gl.int32)}


@gluon.jit
def kernel(
    out, M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr, INT: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    place: gl.constexpr = TensorMemoryLayout((M, K), 1)
    registers: gl.constexpr = get_tmem_reg_layout(DTYPE, (M, K), place, 4, STORE)
    zero = gl.full((M, K), 0, gl.int32, registers)
    value = zero + gl.arange(0, K, gl.SliceLayout(0, registers))[None, :]
    if ROWS:
        value = zero + gl.arange(0, M, gl.SliceLayout(1, registers))[:, None]
    a = allocate_tensor_memory(DTYPE, [M, K], place)
    a.store(value.to(INT).to(DTYPE, bitcast=True))
    b = gl.allocate_shared_memory(DTYPE, [N, K], gl.NVMMASharedLayout.get_default_for([N, K], DTYPE))
    into: gl.constexpr = TensorMemoryLayout((M, N), 1)
    d = allocate_tensor_memory(gl.float32, [M, N], into)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, 1)
    tcgen05_mma(a, b.permute((1, 0)), d, use_acc=False, mbarriers=[barrier])
    mbarrier.wait(barrier, 0)
    from_d: gl.constexpr = get_tmem_reg_layout(gl.float32, (M, N), into, 4)
    row = gl.arange(0, M, gl.SliceLayout(1, from_d))[:, None]
    gl.store(out + row * N + gl.arange(0, N, gl.SliceLayout(0, from_d))[None, :], d.load(from_d))


def ptx(rows: int, k: int, bits: int, what: str) -> str:
    dtype, integer = DTYPES[bits]
    constants = {
        "M": rows, "K": k, "N": N, "ROWS": what == "row", "DTYPE": dtype, "INT": integer,
        "STORE": "32x32b" if rows == 128 else "16x64b",
    }  # fmt: skip
    signature = {"out": "*fp32"} | dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options={"num_warps": 4}).asm["ptx"]


if __name__ == "__main__":
    print(json.dumps([ptx(*case) for case in json.load(sys.stdin)]))
