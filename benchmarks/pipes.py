"""Cycles that a scheduler takes for an instruction of a warp: of eight independent chains a thread, one or two warps.

python benchmarks/pipes.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHAINS, REPEATS, STEPS = 8, 16, 64
ASM = {  # of a register and two that stay
    "lop3": "lop3.b32 x, x, y, z, 0xe8;",
    "prmt": "prmt.b32 x, x, y, 0x2143;",
    "max.f32": "max.f32 x, x, y; min.f32 x, x, z;",
    "min.u16x2": "min.u16x2 x, x, y; max.u16x2 x, x, z;",
    "ex2": "ex2.approx.ftz.f32 x, x;",
    "cvt.bf16x2": "cvt.rn.bf16x2.f32 x, x, y;",
    "fma": "fma.rn.f32 x, x, y, z;",
    "add.f32": "add.f32 x, x, y;",
    "mad.lo": "mad.lo.u32 x, x, y, z;",
    "mul.hi": "mul.hi.u32 x, x, y;",
    "mul.wide + lop3": "mul.wide.u32 w, x, 0xd256d193; mov.b64 {a, b}, w; lop3.b32 x, a, b, z, 0x96;",
    "ex2 + mul.wide + lop3": "mul.wide.u32 w, x, 0xd256d193; mov.b64 {a, b}, w; lop3.b32 x, a, b, z, 0x96; "
    "ex2.approx.ftz.f32 y, y;",
    "lop3 + fma": "lop3.b32 x, x, 0x55555555, z, 0xe8; fma.rn.f32 y, y, y, z;",
    "lop3 + mad.lo": "lop3.b32 x, x, 0x55555555, z, 0xe8; mad.lo.u32 y, y, y, z;",
}
EACH = {"max.f32": 2, "min.u16x2": 2}


@triton.jit
def pipe_kernel(cycles, steps, CODE: tl.constexpr, SIZE: tl.constexpr):
    x = (tl.arange(0, SIZE) + steps).to(tl.uint32)
    tl.debug_barrier()
    begin = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [steps], tl.int64, False, 1)
    for _ in range(steps):
        x = tl.inline_asm_elementwise(CODE, "=r,r", [x], tl.uint32, False, 1)
    tl.debug_barrier()
    end = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [steps], tl.int64, False, 1)
    tl.store(cycles + tl.arange(0, SIZE), x.to(tl.int64))
    tl.debug_barrier()
    tl.store(cycles + tl.program_id(0), end - begin)


def code(asm: str) -> str:
    return (
        "{ .reg .b32 x, y, z, a, b; .reg .b64 w; mov.b32 x, $1; xor.b32 y, x, 0x3f812345; xor.b32 z, x, 0x7f4a7c15; "
        + asm * REPEATS
        + " xor.b32 $0, x, y; }"
    )


def main() -> None:
    print(torch.cuda.get_device_name())
    for name, asm in ASM.items():
        found = []
        for warps in (4, 8, 16):
            size = 32 * warps * CHAINS
            cycles = torch.zeros(size, dtype=torch.int64, device="cuda")
            for _ in range(3):
                pipe_kernel[(1,)](cycles, STEPS, code(asm), size, num_warps=warps)
            found.append(cycles[0].item() / (STEPS * REPEATS * CHAINS * EACH.get(name, 1)) / (warps / 4))
        print(
            f"{name:24}" + "  ".join(f"{x:5.2f}" for x in found),
            "cycles an instruction (or group), 1, 2, 4 warps a scheduler",
        )


if __name__ == "__main__":
    main()
