"""Triton as an outside judge of tilewise.layouts, without a GPU: Gluon's own linear layouts, and its ptxas.

Gluon is asked in a child process, because a layout that it does not like ends the process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import wgmma_proof
from processes import python

from tilewise.backends.gluon.sm90.common import config as hopper_config
from tilewise.layouts import (
    LayoutError,
    LinearLayout,
    Major,
    Operand,
    SwizzleMode,
    TensorMemoryOperand,
    default_swizzle,
    nvmma_shared_layout,
)
from tilewise.spec import operands, problem
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")
TRITON_VERSION = importlib.metadata.version("triton")
# Before 3.7 the compiler tells the linear layouts of registers only, and aborts when asked for those of memory.
JUDGES = pytest.mark.skipif(
    tuple(map(int, TRITON_VERSION.split(".")[:2])) < (3, 7), reason="Triton 3.7 is the first that tells these layouts"
)

CHILD = """
import json, sys
from triton._C.libtriton import gluon_ir, ir, linear_layout
from triton.experimental.gluon import language as gl

context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
answers = []
for shape, bits, swizzle, transposed, dtype in json.load(sys.stdin):
    if swizzle is None:
        layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, dtype), transposed=transposed)
    else:
        layout = gl.NVMMASharedLayout(swizzle, bits, len(shape), transposed)
    linear = builder.to_linear_layout(layout._to_ir(builder), shape)
    bases = [("offset", linear.offset_bases), ("block", linear.block_bases)]
    names = [f"dim{d}" for d in range(len(shape))]
    text = str(linear_layout.LinearLayout.from_bases(bases, names, shape, True))
    answers.append([linear.offset_bases, linear.block_bases, linear.alignment, layout.swizzle_byte_width, text])
print(json.dumps(answers))
"""


def ask(questions):
    """What Gluon says of each (shape, bits, swizzle or None, transposed, dtype)."""
    answers = json.loads(python("-c", CHILD, input=json.dumps(questions)).stdout)
    assert len(answers) == len(questions)
    return answers


def expected(answer, shape):
    bases, block = answer[:2]
    return LinearLayout.of({"offset": bases, "block": block}, {f"dim{d}": size for d, size in enumerate(shape)})


SHAPES = [
    *itertools.product((8, 16, 64, 128, 256, 512), (16, 32, 64, 128, 256, 512)),
    (64,), (1, 64, 128), (2, 64, 128), (4, 8, 64), (2, 2, 32, 64), (64, 4, 32), (1024, 8), (16, 1024), (8, 2, 128),
    (512, 2, 512), (2, 512, 512), (2, 4, 256, 64),
]  # fmt: skip


@JUDGES
def test_gluon_has_the_same_linear_layouts():
    questions = []
    for shape, bits, swizzle, transposed in itertools.product(SHAPES, (8, 16, 32), SwizzleMode, (False, True)):
        try:
            nvmma_shared_layout(shape, bits, swizzle, transposed)
        except LayoutError:  # smaller than an atom, or three dimensions transposed
            continue
        questions.append([list(shape), bits, int(swizzle), transposed, None])
    assert len(questions) > 600
    for (shape, bits, swizzle, transposed, _), answer in zip(questions, ask(questions), strict=True):
        ours = nvmma_shared_layout(shape, bits, swizzle, transposed)
        assert ours == expected(answer, shape), f"{shape}, {bits} bits, swizzle {swizzle}, transposed {transposed}"
        assert SwizzleMode(swizzle).alignment == answer[2]
        assert f"\n{ours}" == answer[4]


@JUDGES
def test_gluon_lays_operands_out_as_the_model_does():
    """K-major is Gluon's usual layout, MN-major its transposed one; K of an MN-major one is one TMA box at most."""
    operands = [
        Operand(shape, bits, swizzle, major)
        for shape in itertools.product((128, 256), repeat=2)
        for bits in (8, 16, 32)
        for swizzle in SwizzleMode
        for major in Major
        if swizzle
    ]
    # Without a swizzle Gluon's tile is row-major, which is the interleaved layout if a row is one unit.
    operands += [Operand((rows, 128 // bits), bits, 0) for rows in (8, 64, 256) for bits in (8, 16, 32)]
    questions = [[list(o.shape), o.bits, int(o.swizzle), o.major is Major.MN, None] for o in operands]
    for o, answer in zip(operands, ask(questions), strict=True):
        theirs = expected(answer, o.shape)
        assert o.linear().inputs[0] == theirs.inputs[0], str(o)
        assert o.linear().outputs == theirs.outputs


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TILES = [list(shape) for shape in itertools.product((64, 128), (32, 64, 128, 256))]


@JUDGES
def test_default_layouts_of_the_tiles_of_attention():
    """What the Hopper kernels ask Gluon for, with and without the leading 1 of a TMA block."""
    questions = [
        [[*front, *shape], 16, None, transposed, dtype]
        for shape in TILES
        for dtype in DTYPES
        for front, transposed in (([], False), ([], True), ([1], False))
    ]
    others = [
        [[8, 8], 16, None, False, "float16"],
        [[4, 64], 16, None, False, "bfloat16"],
        [[64, 16], 8, None, True, "int8"],
    ]
    for (shape, _, _, transposed, dtype), answer in zip(questions + others, ask(questions + others), strict=True):
        assert nvmma_shared_layout(shape, DTYPES.get(dtype, dtype), transposed=transposed) == expected(answer, shape)
        assert default_swizzle(shape, dtype, transposed) == answer[3]


@JUDGES
def test_layouts_of_the_hopper_backend():
    """Every 16-bit tile that its configurations put into shared memory, as its descriptors have it."""
    shapes = set()
    for D, biased in itertools.product((32, 64, 128, 256), (False, True)):
        bias = operands.TensorSpec(torch.bfloat16, 1, 8, 512, 512) if biased else None
        call = problem.Problem(
            device="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=2, heads=8, kv_heads=8, queries=512, keys=512,
            head_dim=D, value_dim=D, score=Score(0.1, None, Band()), bias=bias, bias_grad=biased,
        )  # fmt: skip
        c = hopper_config.forward_config(call)
        shapes |= {(64, hopper_config.padded(D)), (c.block_n, hopper_config.padded(D)), (64, c.block_n)}
        b, width = hopper_config.backward_config(call), hopper_config.backward_width(call)
        shapes |= {(b.block_m, width), (b.block_n, width), (b.block_m, b.block_n)}
    questions = [[[1, 1, *shape], 16, None, False, "bfloat16"] for shape in sorted(shapes)]
    for (shape, *_), answer in zip(questions, ask(questions), strict=True):
        assert nvmma_shared_layout(shape, "bf16") == expected(answer, shape)


def test_bad_tiles():
    with pytest.raises(LayoutError, match=r"powers of two, as Triton's tiles are, got \(96, 64\)"):
        nvmma_shared_layout((96, 64), "bf16")
    with pytest.raises(LayoutError, match="8 rows of 64 elements or more, got"):
        nvmma_shared_layout((4, 64), "bf16", 128)
    with pytest.raises(LayoutError, match="8 bits or more"):
        nvmma_shared_layout((64, 64), "fp4")
    with pytest.raises(LayoutError, match="must be False for 3 dimensions"):
        nvmma_shared_layout((2, 64, 64), "bf16", transposed=True)


# Operand A in tensor memory

TENSOR_MEMORY_CHILD = """
import json, sys
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
answers = []
for rows, k in json.load(sys.stdin):
    linear = builder.to_linear_layout(TensorMemoryLayout((rows, k), 1)._to_ir(builder), [rows, k])
    answers.append([linear.rows, linear.cols])
print(json.dumps(answers))
"""


@JUDGES
def test_gluon_has_the_same_layout_of_tensor_memory():
    """Of a tile of one instruction's M and any K, packed, which is what Triton asks of A."""
    shapes = [(rows, k) for rows in (64, 128) for k in (32, 64, 128, 256)]
    answers = json.loads(python("-c", TENSOR_MEMORY_CHILD, input=json.dumps(shapes)).stdout)
    for (rows, k), (lanes, elements) in zip(shapes, answers, strict=True):
        theirs = LinearLayout.of({"row": lanes, "col": elements}, {"dim0": rows, "dim1": k})
        for bits in (8, 16, 32):  # Gluon counts elements, of any number of bits
            assert TensorMemoryOperand((rows, k), bits).linear() == theirs, f"{rows} x {k}"


THREADS = torch.arange(128)
# Lane of a warp's 32 and column of register r, in thread t of a warp: PTX's matrix fragments of tcgen05.st.
FRAGMENTS = {
    "32x32b": lambda t, r: (t, r),
    "16x64b": lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
}


def permuted(x, y, selector):
    """PTX's prmt: four of the eight bytes of x and y."""
    octets = [word >> 8 * place & 255 for word in (x, y) for place in range(4)]
    return sum(octets[int(selector[0]) >> 4 * place & 7] << 8 * place for place in range(4))


FUNCTIONS = {
    "add": lambda x, y: x + y, "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y, "shr": lambda x, y: x >> y, "bfe": lambda x, y, z: x >> y & (1 << z) - 1,
    "cvt": lambda x: x, "shfl": lambda x, lane, *_: x[THREADS // 32 * 32 + lane], "prmt": permuted,
}  # fmt: skip


def first_store(ptx):
    """(shape, address less the operand's, registers) of the first tcgen05.st, with a number for each of 128 threads.

    A small interpreter of straight PTX: 32-bit integers, the operand at address 0.
    """
    values = {}

    def read(word):
        return values[word] if word in values else torch.full((128,), int(word.rstrip("U"), 0))

    for line in ptx.splitlines():
        line = line.split("//")[0].strip()
        if store := re.search(r"tcgen05\.st\.\S*?\.(\w+)\.x\d+\.b32 \[(\S+) \+ 0\], \{(.*)\}", line):
            return store[1], values[store[2]], [read(word) for word in store[3].split(", ")]
        if not (parts := re.match(r"([a-z]+)\.(\S+)\s+(.*);", line)):
            continue
        name, kind, words = parts[1], parts[2], re.findall(r"\{[^}]*\}|[^\s,]+", parts[3])
        if words[-1] == "%tid.x":
            values[words[0]] = THREADS
        elif line.startswith("ld.shared.b32"):  # the address that tcgen05.alloc has written
            values[words[0]] = 0 * THREADS
        elif name == "mov" and words[1].startswith("{"):
            low, high = map(read, words[1][1:-1].split(", "))
            values[words[0]] = low | high << 16
        elif name == "mov" and words[0].startswith("{"):
            low, high = words[0][1:-1].split(", ")
            values |= {low: read(words[1]) & 0xFFFF, high: read(words[1]) >> 16}
        elif name == "mov" and kind == "b32" and re.fullmatch(r"-?\d+", words[1]):
            values[words[0]] = read(words[1])
        elif name in FUNCTIONS and all(word in values or re.fullmatch(r"-?\w+", word) for word in words[1:]):
            values[words[0]] = FUNCTIONS[name](*map(read, words[1:])) & (0xFFFF if "16" in kind[:3] else 0xFFFFFFFF)
    raise AssertionError("nothing is stored into tensor memory")


@JUDGES
def test_kernels_for_blackwell_have_the_operand_there(tmp_path):
    """Compiled, not run: what tcgen05.st writes, by PTX's fragments, and where tcgen05.mma reads A.

    Every element of A is stored where the model has it, and the instructions along K begin at the model's addresses.
    """
    tiles = [TensorMemoryOperand((rows, 1024 // bits), bits) for rows in (64, 128) for bits in (8, 16, 32)]
    cases = [(*a.shape, a.bits, what) for a in tiles for what in ("row", "column")]
    child = Path(__file__).parents[1] / "tensor_memory_child.py"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    answers = json.loads(python(child, input=json.dumps(cases), env=environment).stdout)
    for (rows, k, bits, what), ptx in zip(cases, answers, strict=True):
        a = TensorMemoryOperand((rows, k), bits)
        shape, address, registers = first_store(ptx)
        assert torch.equal(address, THREADS // 32 * 32 << 16)  # each warp has its own lanes
        found = {}
        for number, values in enumerate(registers):
            for thread, value in enumerate(values.tolist()):
                lane, column = FRAGMENTS[shape](thread % 32, number)
                found[thread // 32 * 32 + lane, column] = value
        assert 32 * len(found) == rows * k * bits
        for m, element in itertools.product(range(rows), range(k)):
            cell = a.cell(m, element)
            value = found[cell.lane, cell.column] >> cell.bit & (1 << bits) - 1
            assert value == (m if what == "row" else element), f"{a}: {what} {value} in place of {m, element}"
        read = re.findall(r"tcgen05\.mma\.\S+ \[ %\w+ \+ 0 \], \[ %\w+ \+ (\d+) \]", ptx)
        assert list(map(int, read)) == a.addresses()


# The proof on the GPU, as far as it goes without one


def assemblers():
    found = {"installed": Path(importlib.util.find_spec("triton").origin).parent}
    found["3.6.0"] = Path(sys.prefix) / "triton-3.6.0" / "triton"
    return found


@pytest.mark.parametrize("version", ["installed", "3.6.0"])
def test_the_proof_assembles_for_hopper(version, tmp_path):
    ptxas = assemblers()[version] / "backends" / "nvidia" / "bin" / "ptxas"
    if not ptxas.is_file():
        pytest.skip(f"no ptxas of Triton {version} here")
    said = wgmma_proof.assemble(ptxas, tmp_path)
    assert said.count("Compiling entry function") == 6
    assert said.count("0 bytes spill stores") == 6
    assert "warning" not in said.lower()
    assert "serializ" not in said


@pytest.mark.parametrize("kind", wgmma_proof.KINDS)
def test_the_proof_copies_every_element_once(kind):
    """TMA's copies, done by hand: boxes one after another, lines swizzled by their address."""
    facts = wgmma_proof.KINDS[kind]
    for swizzle, major, order in itertools.product(SwizzleMode, Major, ("strided", "leading")):
        if major is Major.MN and not facts.transposes:
            continue
        o = Operand((128, 8 * 128 // facts.bits), facts.bits, swizzle, major, order)
        values = torch.arange(o.shape[0] * o.shape[1]).remainder(251).reshape(o.shape).to(facts.dtype)
        tile = wgmma_proof.Tile(kind, o, values)
        stored = tile.stored().view(torch.uint8)
        memory = torch.zeros(o.bytes, dtype=torch.uint8)
        copies, (leading, strided) = tile.copies(0)
        width = leading * facts.bits // 8
        for x, y, place, _ in copies:
            for row in range(strided):
                for unit in range(0, width, 16):
                    to = swizzle.swizzle(place + row * width + unit)
                    at = x * facts.bits // 8 + unit
                    memory[to : to + 16] = stored[y + row, at : at + 16]
        assert torch.equal(memory, tile.image()), str(o)
