"""A matrix product by raw wgmma, with operands laid out by TMA and descriptors from tilewise.layouts, on a Hopper GPU.

PTX text through the CUDA driver: no compiler is needed but the driver's own, and nothing stands between a descriptor
and the instruction that reads it. D = A·Bᵀ with A (M, K) and B (N, K), one tile of each; block b makes rows 64·b to
64·b + 63. `assemble` needs no GPU; `Proof` does. Used by tests/gpu/test_layouts.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.layouts import AtomOrder, Instruction, Major, Operand, Role, SwizzleMode, instructions

M, N = 128, 128
BLOCK_M, THREADS = 64, 128
B_AT = 32 * 1024  # where operand B begins in shared memory; A is at 0
BARRIER_AT = 96 * 1024  # past everything that a wrong descriptor of the tests can reach
SHARED = BARRIER_AT + 1024 + 64  # with room to align the beginning


class Kind(NamedTuple):
    """A type of operands: its width, wgmma's name for it, K of one instruction, and a TMA data type."""

    dtype: torch.dtype
    bits: int
    ptx: str
    depth: int
    tma: int
    transposes: bool


KINDS = {
    "bf16": Kind(torch.bfloat16, 16, "bf16", 16, 9, True),
    "e4m3": Kind(torch.float8_e4m3fn, 8, "e4m3", 32, 0, False),
    "tf32": Kind(torch.float32, 32, "tf32", 8, 7, False),
}


def entry(kind: str, a: Major, b: Major) -> str:
    return f"product_{kind}_{a.value}_{b.value}"


def ptx() -> str:
    """A module with one kernel for each kind and pair of major-nesses that wgmma has."""
    header = ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 shared[];\n"
    kernels = []
    for kind, facts in KINDS.items():
        for a in Major if facts.transposes else [Major.K]:
            for b in Major if facts.transposes else [Major.K]:
                kernels.append(_kernel(kind, a, b))
    return header + "".join(kernels)


def _kernel(kind: str, a: Major, b: Major) -> str:
    facts = KINDS[kind]
    registers = [f"%f{i}" for i in range(N // 2)]
    transposed = f", {int(a is Major.MN)}, {int(b is Major.MN)}" if facts.transposes else ""
    zero = "\n".join(f"  mov.f32 {r}, 0f00000000;" for r in registers)
    # Accumulator i of a thread is in row 8·(i/2 mod 2), column 8·(i/4) + i mod 2 of the thread's own corner.
    store = "\n".join(
        f"  st.global.f32 [%rd7+{4 * (N * 8 * (i // 2 % 2) + 8 * (i // 4) + i % 2)}], {r};"
        for i, r in enumerate(registers)
    )
    return f"""
.visible .entry {entry(kind, a, b)}(
  .param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128],
  .param .u64 copies, .param .u32 copies_a, .param .u32 copies_all, .param .u32 bytes,
  .param .u64 descriptors, .param .u32 steps, .param .u64 result, .param .u64 image)
.maxntid {THREADS}, 1, 1
{{
  .reg .pred %p<8>;
  .reg .b32 %r<32>;
  .reg .b64 %rd<24>;
  .reg .f32 %f<{N // 2}>;

  mov.u32 %r1, %tid.x;
  mov.u32 %r2, shared;
  add.u32 %r2, %r2, 1023;
  and.b32 %r2, %r2, 0xfffffc00;          // the operands begin here
  add.u32 %r3, %r2, {BARRIER_AT};
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra READY;
  mbarrier.init.shared.b64 [%r3], 1;
  fence.proxy.async;
  ld.param.u32 %r4, [bytes];
  mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], %r4;
  mov.b64 %rd2, map_a;
  cvta.param.u64 %rd2, %rd2;
  mov.b64 %rd3, map_b;
  cvta.param.u64 %rd3, %rd3;
  ld.param.u64 %rd4, [copies];
  cvta.to.global.u64 %rd4, %rd4;
  ld.param.u32 %r5, [copies_a];
  ld.param.u32 %r6, [copies_all];
  mov.u32 %r7, 0;
COPY:
  ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd4];   // leading, strided index, byte offset, unused
  add.u32 %r10, %r10, %r2;
  setp.lt.u32 %p2, %r7, %r5;
  selp.b64 %rd5, %rd2, %rd3, %p2;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd5, {{%r8, %r9}}], [%r3];
  add.u64 %rd4, %rd4, 16;
  add.u32 %r7, %r7, 1;
  setp.lt.u32 %p3, %r7, %r6;
  @%p3 bra COPY;
READY:
  bar.sync 0;
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;
  @!%p4 bra WAIT;

  ld.param.u64 %rd8, [image];
  cvta.to.global.u64 %rd8, %rd8;
  shl.b32 %r12, %r1, 2;
IMAGE:                                   // shared memory as TMA left it
  add.u32 %r13, %r2, %r12;
  ld.shared.u32 %r14, [%r13];
  cvt.u64.u32 %rd9, %r12;
  add.u64 %rd10, %rd8, %rd9;
  st.global.u32 [%rd10], %r14;
  add.u32 %r12, %r12, {4 * THREADS};
  setp.lt.u32 %p5, %r12, {2 * B_AT};
  @%p5 bra IMAGE;
  bar.sync 0;

{zero}
  ld.param.u64 %rd11, [descriptors];     // (block, step, A or B)
  cvta.to.global.u64 %rd11, %rd11;
  ld.param.u32 %r15, [steps];
  mov.u32 %r16, %ctaid.x;
  mul.lo.u32 %r17, %r16, %r15;
  mul.wide.u32 %rd12, %r17, 16;
  add.u64 %rd11, %rd11, %rd12;
  shr.u32 %r18, %r2, 4;                  // a descriptor's start address is relative to the operands' beginning
  cvt.u64.u32 %rd13, %r18;
  mov.u32 %r19, 0;
STEP:
  ld.global.v2.u64 {{%rd14, %rd15}}, [%rd11];
  add.u64 %rd14, %rd14, %rd13;
  add.u64 %rd15, %rd15, %rd13;
  setp.ne.u32 %p6, %r19, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n{N}k{facts.depth}.f32.{facts.ptx}.{facts.ptx}
    {{{", ".join(registers)}}},
    %rd14, %rd15, %p6, 1, 1{transposed};
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  add.u64 %rd11, %rd11, 16;
  add.u32 %r19, %r19, 1;
  setp.lt.u32 %p7, %r19, %r15;
  @%p7 bra STEP;

  // The thread's corner: row 64 block + 16 warp + lane / 4, column 2 (lane mod 4).
  shr.u32 %r20, %r1, 5;
  and.b32 %r21, %r1, 31;
  shr.u32 %r22, %r21, 2;
  and.b32 %r23, %r21, 3;
  mad.lo.u32 %r24, %r16, {BLOCK_M}, %r22;
  mad.lo.u32 %r24, %r20, 16, %r24;
  shl.b32 %r25, %r23, 1;
  mad.lo.u32 %r25, %r24, {N}, %r25;
  ld.param.u64 %rd6, [result];
  cvta.to.global.u64 %rd6, %rd6;
  mul.wide.u32 %rd7, %r25, 4;
  add.u64 %rd7, %rd6, %rd7;
{store}
  ret;
}}
"""


def assemble(ptxas: Path, folder: Path) -> str:
    """Assemble the module for sm_90a with this ptxas; what it said. Raises CalledProcessError if it refuses."""
    source = folder / "proof.ptx"
    source.write_text(ptx())
    command = [ptxas, "-arch=sm_90a", "-v", source, "-o", folder / "proof.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


# What is multiplied


@dataclasses.dataclass(frozen=True)
class Tile:
    """An operand with its values, of which small integers make every product exact."""

    kind: str
    operand: Operand
    values: torch.Tensor  # (MN, K), on the GPU

    @staticmethod
    def random(kind: str, operand: Operand, seed: int) -> Tile:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-3, 4, operand.shape, generator=generator).to(KINDS[kind].dtype)
        return Tile(kind, operand, values.cuda())

    def stored(self) -> torch.Tensor:
        """As it lies in global memory: (strided, leading), leading contiguous."""
        return (self.values if self.operand.major is Major.K else self.values.T).contiguous()

    def image(self) -> torch.Tensor:
        """The bytes that tilewise.layouts says shared memory holds."""
        values = self.values.cpu().flatten()
        values = values.view(torch.uint8) if self.operand.bits == 8 else values  # torch indexes no 8-bit floats
        flat = torch.empty_like(values)
        flat[places(self.operand)] = values
        return flat.view(torch.uint8)

    def copies(self, base: int) -> tuple[list[tuple[int, int, int, int]], tuple[int, int]]:
        """(leading index, strided index, byte offset, 0) of each TMA copy, and the box (leading, strided) of all.

        One copy for each column of atoms if they follow one another along the strided dimension, else one for each.
        """
        o = self.operand
        strided, leading = o.shape if o.major is Major.K else o.shape[::-1]
        rows = strided if o.order is AtomOrder.STRIDED_FIRST else 8
        found = []
        for x in range(0, leading, o.line):
            for y in range(0, strided, rows):
                found.append((x, y, base + o.byte_offset(*((y, x) if o.major is Major.K else (x, y))), 0))
        return found, (o.line, rows)


@functools.cache
def places(operand: Operand) -> torch.Tensor:
    """`Operand.offset` of every element, K fastest."""
    rows, columns = operand.shape
    return torch.tensor([operand.offset(mn, k) for mn in range(rows) for k in range(columns)])


def shares(operand: Operand, role: Role, base: int) -> list[Instruction]:
    return list(instructions(operand, "sm_90", role, BLOCK_M if role is Role.A else N, base))


# On the GPU


class Proof:
    """The module, loaded in torch's CUDA context."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes torch's context current
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self.module), ctypes.c_char_p(ptx().encode()))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            message = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(message))
            raise RuntimeError(f"{name}: {status}: {(message.value or b'').decode()}")

    def run(
        self, a: Tile, b: Tile, shares_a: list[Instruction], shares_b: list[Instruction]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(D, bytes of A, bytes of B in shared memory), read with the descriptors of these shares."""
        copies_a, box_a = a.copies(0)
        copies_b, box_b = b.copies(B_AT)
        stored_a, stored_b = a.stored(), b.stored()
        copies = torch.tensor([*copies_a, *copies_b], dtype=torch.int32, device="cuda")
        steps = len(shares_b)
        assert len(shares_a) == steps * M // BLOCK_M
        table = torch.tensor(
            [
                [_signed(share.descriptor.encode()), _signed(shares_b[n % steps].descriptor.encode())]
                for n, share in enumerate(shares_a)
            ],
            device="cuda",
        )
        result = torch.full((M, N), float("nan"), device="cuda")
        image = torch.zeros(2 * B_AT, dtype=torch.uint8, device="cuda")
        arguments = [
            self._tensor_map(a, stored_a, box_a),
            self._tensor_map(b, stored_b, box_b),
            ctypes.c_uint64(copies.data_ptr()),
            ctypes.c_uint32(len(copies_a)),
            ctypes.c_uint32(len(copies)),
            ctypes.c_uint32(a.operand.bytes + b.operand.bytes),
            ctypes.c_uint64(table.data_ptr()),
            ctypes.c_uint32(steps),
            ctypes.c_uint64(result.data_ptr()),
            ctypes.c_uint64(image.data_ptr()),
        ]
        function = ctypes.c_void_p()
        name = entry(a.kind, a.operand.major, b.operand.major)
        self._call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        self._call("cuFuncSetAttribute", function, 8, SHARED)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuLaunchKernel", function, M // BLOCK_M, 1, 1, THREADS, 1, 1, SHARED, stream, pointers, None)
        torch.cuda.synchronize()
        image = image.cpu()
        return result.cpu(), image[: a.operand.bytes], image[B_AT : B_AT + b.operand.bytes]

    def _tensor_map(self, tile: Tile, stored: torch.Tensor, box: tuple[int, int]) -> ctypes.Array:
        """A CUtensorMap of the stored tile; the driver wants it at a multiple of 64 bytes."""
        room = (ctypes.c_uint8 * 192)()
        aligned = (ctypes.c_uint8 * 128).from_buffer(room, -ctypes.addressof(room) % 64)
        strided, leading = stored.shape
        swizzles = {SwizzleMode.NONE: 0, SwizzleMode.B32: 1, SwizzleMode.B64: 2, SwizzleMode.B128: 3}
        self._call(
            "cuTensorMapEncodeTiled",
            aligned,
            KINDS[tile.kind].tma,
            2,
            ctypes.c_void_p(stored.data_ptr()),
            (ctypes.c_uint64 * 2)(leading, strided),
            (ctypes.c_uint64 * 1)(leading * stored.element_size()),
            (ctypes.c_uint32 * 2)(*box),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # no interleave
            swizzles[tile.operand.swizzle],
            0,  # no L2 promotion
            0,  # zeros outside, of which there are none
        )
        return aligned


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64."""
    return value - (1 << 64) if value >> 63 else value
