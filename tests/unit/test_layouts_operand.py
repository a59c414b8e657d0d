"""tilewise.layouts: operands, descriptors and checks. Laws by enumeration, and the numbers of the published source."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from processes import python

from tilewise import layouts
from tilewise.layouts import (
    Arch,
    AtomOrder,
    Cell,
    Descriptor,
    LayoutError,
    Major,
    Operand,
    Role,
    SwizzleMode,
    TensorMemoryOperand,
    element_addresses,
    element_bits,
    first_difference,
    instructions,
    matrix_addresses,
    wavefronts,
)
from tilewise.layouts.mma import canonical, canonical_layout, descriptor_strides

CASES = list(itertools.product(SwizzleMode, Major, (4, 8, 16, 32), AtomOrder))
GRIDS = [(1, 1), (2, 3)]


def name(value):
    return getattr(value, "name", None) or str(value)


def operand(swizzle, major, bits, order, grid):
    """One of ``grid`` atoms."""
    atom = Operand((8, 8 * swizzle.width // bits)[:: 1 if major is Major.K else -1], bits, swizzle, major).atom_shape
    return Operand((atom[0] * grid[0], atom[1] * grid[1]), bits, swizzle, major, order)


def formula(o, mn, k):
    """From the definition, in bits: atom, line, XORed unit, place inside the unit."""
    s, p = (mn, k) if o.major is Major.K else (k, mn)
    width = o.swizzle.width
    per_line = 8 * width // o.bits
    rows = o.shape[0] // 8 if o.major is Major.K else o.shape[1] // 8
    columns = o.shape[1] // per_line if o.major is Major.K else o.shape[0] // per_line
    row, column = s // 8, p // per_line
    atom = column * rows + row if o.order is AtomOrder.STRIDED_FIRST else row * columns + column
    line, bit = s % 8, p % per_line * o.bits
    unit = (bit // 128) ^ (line // (128 // width) if width > 16 else 0)
    return 8 * (atom * 8 * width + line * width + unit * 16) + bit % 128


@pytest.mark.parametrize(("swizzle", "major", "bits", "order"), CASES, ids=name)
def test_laws(swizzle, major, bits, order):
    # One atom in 4 bits is large, and 2 x 3 of them have everything that one has.
    for grid in GRIDS if bits > 4 else GRIDS[1:]:
        o = operand(swizzle, major, bits, order, grid)
        cute = o.cute()
        elements = list(itertools.product(range(o.shape[0]), range(o.shape[1])))
        places = {element: o.offset(*element) for element in elements}
        # A bijection, with `coordinates` its inverse.
        assert sorted(places.values()) == list(range(len(elements)))
        assert all(o.coordinates(place) == element for element, place in places.items())
        # The direct formula and the CuTe form are the same function.
        assert all(bits * place == formula(o, *element) for element, place in places.items())
        assert all(cute(*element) == place for element, place in places.items())
        # Atoms are contiguous, and so are 16-byte units.
        rows, columns = o.atom_shape
        in_atom = 8 * o.line
        for element, place in places.items():
            atom = places[element[0] // rows * rows, element[1] // columns * columns]
            assert atom % in_atom == 0
            assert place // in_atom == atom // in_atom
        for unit in o.units():
            step = (0, 1) if major is Major.K else (1, 0)
            inside = [places[unit[0] + i * step[0], unit[1] + i * step[1]] for i in range(o.unit)]
            assert inside == list(range(inside[0], inside[0] + o.unit))
            assert inside[0] % o.unit == 0


@pytest.mark.parametrize(("swizzle", "major", "bits", "order"), CASES, ids=name)
def test_the_linear_form(swizzle, major, bits, order):
    o = operand(swizzle, major, bits, order, (2, 2))
    linear = o.linear()
    assert all(linear(offset=i) == o.coordinates(i) for i in range(o.shape[0] * o.shape[1]))
    with pytest.raises(LayoutError, match="powers of two"):
        operand(swizzle, major, bits, order, (3, 1)).linear()


@pytest.mark.parametrize(("swizzle", "major", "bits", "order"), CASES, ids=name)
def test_sbo_and_lbo_are_the_distances_between_atoms(swizzle, major, bits, order):
    o = operand(swizzle, major, bits, order, (3, 4))
    rows, columns = o.atom_shape
    for i, j in itertools.product(range(3), range(4)):
        here = o.byte_offset(i * rows, j * columns)
        down = o.byte_offset((i + 1) * rows, j * columns) - here if i < 2 else None
        right = o.byte_offset(i * rows, (j + 1) * columns) - here if j < 3 else None
        strided, leading = (down, right) if major is Major.K else (right, down)
        assert strided in (None, o.sbo)
        assert leading in (None, o.lbo)


def test_a_swizzle_spreads_a_column_over_all_banks():
    """What it is for: 8 units, one from each line of an atom, without two in the same banks."""
    for swizzle, lines in ((SwizzleMode.B128, 8), (SwizzleMode.B64, 8), (SwizzleMode.B32, 8)):
        o = Operand((8, swizzle.width // 2), 16, swizzle)
        for unit in range(swizzle.width // 16):
            places = {o.byte_offset(row, 8 * unit) % 128 for row in range(lines)}
            assert len(places) == 8


# The source's own numbers


def test_the_basis_list_of_the_source():
    o = Operand((128, 256), 16, SwizzleMode.B128, Major.K)
    assert str(o.atom().linear()) == (
        " - offset=1 -> (0, 1)\n   offset=2 -> (0, 2)\n   offset=4 -> (0, 4)\n   offset=8 -> (0, 8)\n"
        "   offset=16 -> (0, 16)\n   offset=32 -> (0, 32)\n   offset=64 -> (1, 8)\n   offset=128 -> (2, 16)\n"
        "   offset=256 -> (4, 32)\nwhere out dims are: [dim0 (size 8), dim1 (size 64)]"
    )


def test_the_eight_row_table_of_the_source():
    """Where in an atom's 8 lines of 128 bytes the units of the first instruction lie."""
    first = next(instructions(Operand((64, 64), 16, SwizzleMode.B128, Major.K)))
    table = [[None] * 8 for _ in range(8)]
    for number, place in enumerate(first.units()[:16]):
        table[place // 128][place % 128 // 16] = number
    _ = None
    assert table == [
        [0, 1, _, _, _, _, _, _],
        [3, 2, _, _, _, _, _, _],
        [_, _, 4, 5, _, _, _, _],
        [_, _, 7, 6, _, _, _, _],
        [_, _, _, _, 8, 9, _, _],
        [_, _, _, _, 11, 10, _, _],
        [_, _, _, _, _, _, 12, 13],
        [_, _, _, _, _, _, 15, 14],
    ]


CANONICAL = {
    (Major.MN, SwizzleMode.NONE): ("((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))", "Swizzle<0,4,3>"),
    (Major.MN, SwizzleMode.B32): ("((T,2,m),(8,k)):((1,T,LBO),(2T,SBO))", "Swizzle<1,4,3>"),
    (Major.MN, SwizzleMode.B64): ("((T,4,m),(8,k)):((1,T,LBO),(4T,SBO))", "Swizzle<2,4,3>"),
    (Major.MN, SwizzleMode.B128): ("((T,8,m),(8,k)):((1,T,LBO),(8T,SBO))", "Swizzle<3,4,3>"),
    (Major.K, SwizzleMode.NONE): ("((8,m),(T,2)):((1T,SBO),(1,LBO))", "Swizzle<0,4,3>"),
    (Major.K, SwizzleMode.B32): ("((8,m),(T,2)):((2T,SBO),(1,T))", "Swizzle<1,4,3>"),
    (Major.K, SwizzleMode.B64): ("((8,m),(T,2)):((4T,SBO),(1,T))", "Swizzle<2,4,3>"),
    (Major.K, SwizzleMode.B128): ("((8,m),(T,2)):((8T,SBO),(1,T))", "Swizzle<3,4,3>"),
}


@pytest.mark.parametrize(("major", "swizzle"), CANONICAL, ids=name)
def test_canonical_layouts(major, swizzle):
    """All eight rows, K-major without the factor k; the numbers are the words with T, m, k, SBO and LBO put in."""
    o = operand(swizzle, major, 16, AtomOrder.STRIDED_FIRST, (8, 16) if major is Major.K else (8, 2))
    words, permutation = CANONICAL[major, swizzle]
    assert canonical(o) == words
    assert str(o.swizzle.swizzle) == permutation
    first = next(instructions(o, rows=64))
    lbo, sbo = first.descriptor.leading_byte_offset, first.descriptor.stride_byte_offset
    t, w = 8, swizzle.width // 16
    sizes = {"T": t, "m": 8 if major is Major.K else 64 // (t * w), "k": 2, "LBO": lbo // 2, "SBO": sbo // 2}
    shape, stride = words.replace("1T", "T").replace("2T", "2*T").replace("4T", "4*T").replace("8T", "8*T").split(":")
    layout = canonical_layout(o, 64, 16, lbo, sbo).layout
    assert layout.shape == eval(shape, {}, sizes)
    in_elements = eval(stride, {}, sizes)
    assert layout.stride == tuple(tuple(16 * d for d in mode) for mode in in_elements)


# Instructions and descriptors

READABLE = [
    (arch, swizzle, major, bits, order)
    for arch, (swizzle, major, bits, order) in itertools.product(Arch, CASES)
    if (major is Major.K and not (bits == 4 and arch is Arch.SM_90))
    or (major is Major.MN and (bits == 16 or (bits == 8 and arch is Arch.SM_100)))
]


@pytest.mark.parametrize(("arch", "swizzle", "major", "bits", "order"), READABLE, ids=name)
def test_what_the_descriptors_reach_is_the_operand(arch, swizzle, major, bits, order):
    """Following 64 bits as the hardware does ends where `Operand.byte_offset` says, and each unit is read once."""
    depth = 256 // bits
    k = max(2 * depth, 2 * (8 * swizzle.width // bits if major is Major.K else 8))
    o = Operand((128, k), bits, swizzle, major, order)
    for role, base in ((Role.A, 0), (Role.B, 4096)):
        seen = []
        for share in instructions(o, arch, role, base=base):
            d = Descriptor.decode(share.descriptor.encode(), arch)
            assert d == share.descriptor
            read = replace(share, descriptor=d).units()
            strided, leading = (share.rows, share.depth) if major is Major.K else (share.depth, share.rows)
            wanted = []
            for s in range(strided):
                for p in range(0, leading, o.unit):
                    mn, at = (s, p) if major is Major.K else (p, s)
                    wanted.append(o.byte_offset(share.mn + mn, share.k + at))
            assert read == wanted
            seen += read
        assert sorted(seen) == list(range(0, o.bytes, 16))


def test_the_descriptor_of_the_usual_tile():
    """By hand: SBO 1024 bytes is 64 units at bit 32, LBO 1 at bit 16, the swizzle's code 1 at bit 62."""
    o = Operand((128, 64), 16, SwizzleMode.B128, Major.K)
    steps = list(instructions(o, base=2048))
    assert steps[0].descriptor.encode() == 1 << 62 | 64 << 32 | 1 << 16 | 2048 >> 4
    assert [s.descriptor.start_address for s in steps] == [2048 + 8192 * m + 32 * k for m in range(2) for k in range(4)]
    blackwell = next(instructions(o, Arch.SM_100, base=2048))
    assert blackwell.rows == 128
    assert blackwell.descriptor.encode() == 2 << 61 | 1 << 46 | 64 << 32 | 1 << 16 | 2048 >> 4
    assert [(f.name, f.low, f.high, f.value) for f in blackwell.descriptor.fields()] == [
        ("start address", 0, 13, 128),
        ("leading byte offset", 16, 29, 1),
        ("stride byte offset", 32, 45, 64),
        ("constant", 46, 48, 1),
        ("base offset", 49, 51, 0),
        ("leading offset mode", 52, 52, 0),
        ("reserved", 53, 60, 0),
        ("swizzle mode", 61, 63, 2),
    ]


def test_without_a_swizzle_an_mn_major_operand_has_its_strides_the_other_way_round():
    o = Operand((64, 32), 16, SwizzleMode.NONE, Major.MN)
    assert (o.sbo, o.lbo) == (128, 512)
    assert descriptor_strides(o) == (128, 512)  # LBO along K, SBO along MN
    assert descriptor_strides(replace(o, major=Major.K)) == (1024, 128)


def test_plain_values_are_taken_as_well():
    assert Operand([128, 64], 16, 64, "mn", "leading") == Operand(
        (128, 64), 16, SwizzleMode.B64, Major.MN, AtomOrder.LEADING_FIRST
    )


def test_swizzle_codes():
    def codes(arch):
        o = Operand((64, 128), 16, SwizzleMode.B128)
        modes = [replace(o, swizzle=mode) for mode in SwizzleMode]
        return [next(instructions(m, arch)).descriptor.encode() >> (62 if arch is Arch.SM_90 else 61) for m in modes]

    assert codes(Arch.SM_90) == [0, 3, 2, 1]
    assert codes(Arch.SM_100) == [0, 6, 4, 2]


def test_rows_of_an_instruction():
    def rows(shape, arch=Arch.SM_90, role=Role.A, **options):
        return {share.rows for share in instructions(Operand(shape, 16, **options), arch, role)}

    assert rows((128, 64)) == {64}
    assert rows((128, 64), Arch.SM_100) == {128}
    assert rows((192, 64), Arch.SM_100) == {64}
    assert rows((512, 64), role=Role.B) == {256}
    assert rows((176, 64), role=Role.B) == {176}
    assert rows((192, 64), role=Role.B, major="mn") == {192}


# Errors

USUAL = Operand((128, 64), 16)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Operand((100, 64), 16), r"shape\[MN\]: must be a multiple of 8, got 100: .* whole swizzle atoms"),
        (lambda: Operand((128, 96), 16), r"shape\[K\]: must be a multiple of 64, got 96"),
        (lambda: Operand((96, 64), 16, major="mn"), r"shape\[MN\]: must be a multiple of 64, got 96"),
        (lambda: Operand((128, 64), 64), "dtype: must have 4, 8, 16 or 32 bits"),
        (lambda: element_bits("float64"), "dtype: must have .* got 'float64'"),
        (lambda: Operand((128, 64), 16, 96), "swizzle: must be one of 0, 32, 64, 128, got 96"),
        (lambda: Operand((128, 64), 16, major="m"), "major: must be one of k, mn, got 'm'"),
        (lambda: Operand((128, 64), 16, order="rows"), "order: must be one of strided, leading, got 'rows'"),
        (lambda: Operand((128,), 16), r"shape: must be \(MN, K\)"),
        (lambda: Operand((0, 64), 16), "two positive sizes"),
        (lambda: USUAL.offset(128, 0), r"element: must be inside the tile .*, got \(128, 0\)"),
        (lambda: USUAL.coordinates(128 * 64), "offset: must be inside the operand of 8192 elements, got 8192"),
        (lambda: list(instructions(Operand((128, 128), 8, major="mn"))), "sm_90.* transposes 16-bit operands only"),
        (lambda: list(instructions(Operand((128, 128), 32, major="mn"))), "sm_90.* transposes 16-bit operands only"),
        (lambda: list(instructions(Operand((128, 128), 32, major="mn"), "sm_100")), "transposes tf32 only under"),
        (lambda: list(instructions(Operand((256, 256), 4, major="mn"), "sm_100")), "does not transpose packed 4-bit"),
        (lambda: list(instructions(Operand((256, 256), 4))), "bits: must be 8, 16 or 32 for wgmma"),
        (lambda: list(instructions(Operand((64, 8), 16, 0))), r"shape\[K\]: must be a multiple of 16, got 8"),
        (lambda: list(instructions(USUAL, base=512)), "address: must be a multiple of 1024, got 512: the pattern"),
        (lambda: list(instructions(replace(USUAL, swizzle=32), base=128)), "must be a multiple of 256, got 128"),
        (lambda: list(instructions(Operand((96, 64), 16))), r"rows: must divide shape\[MN\]=96 .*, got 64"),
        (lambda: list(instructions(USUAL, rows=128)), "rows: must be 64, got 128"),
        (lambda: list(instructions(USUAL, role="b", rows=12)), "rows: must be a multiple of 8 up to 256, got 12"),
        (lambda: list(instructions(Operand((192, 64), 16, major="mn"), role="b", rows=96)), "must divide .*, got 96"),
        (lambda: list(instructions(Operand((4096, 64), 16))), "at most 262144 bytes, got 524288"),
        (lambda: Descriptor(Arch.SM_90, 8, 0, 0, SwizzleMode.NONE), "start_address: must be a multiple of 16, got 8"),
        (lambda: Descriptor(Arch.SM_90, 0, 1 << 18, 0, SwizzleMode.NONE), "leading_byte_offset: must be below 262144"),
        (lambda: Descriptor(Arch.SM_90, 0, 0, 0, SwizzleMode.NONE, 8), "base_offset: must be below 8"),
        (lambda: Descriptor.decode(1 << 46, Arch.SM_90), "no field"),
        (lambda: Descriptor.decode(0, Arch.SM_100), "bits 46 to 48 must be 1, got 0"),
        (lambda: Descriptor.decode(1 << 61 | 1 << 46, Arch.SM_100), "swizzle mode 1 has no 16-byte units"),
        (lambda: wavefronts([0], 3), "width: must be 1, 2, 4, 8 or 16"),
        (lambda: wavefronts([0] * 33, 4), "at most 32, got 33"),
        (lambda: wavefronts([0, 4], 8), r"addresses\[1\]: must be a multiple of 8, got 4"),
        (lambda: matrix_addresses(USUAL, 0, 4), "k: must be a multiple of 8, got 4"),
        (lambda: matrix_addresses(USUAL, 0, 0, 3), "matrices: must be 1, 2 or 4"),
        (lambda: first_difference(USUAL, USUAL, (64, 64)), r"shape: must be that of both layouts, got \(64, 64\)"),
    ],
)  # fmt: skip
def test_errors_say_which_rule_is_broken(make, words):
    with pytest.raises(LayoutError, match=words):
        make()


def test_dtypes():
    import torch

    assert [element_bits(d) for d in (torch.bfloat16, torch.float8_e4m3fn, "tf32", "FP4", 16)] == [16, 8, 32, 4, 16]


# Checks


def test_wavefronts():
    assert wavefronts([4 * lane for lane in range(32)], 4) == layouts.Access(1, 1)
    assert wavefronts([0] * 32, 4) == layouts.Access(1, 1)  # a broadcast
    assert wavefronts([128 * lane for lane in range(32)], 4) == layouts.Access(32, 1)
    assert wavefronts([8 * lane for lane in range(32)], 4) == layouts.Access(2, 1)
    assert wavefronts([2 * lane for lane in range(32)], 2) == layouts.Access(1, 1)
    assert wavefronts([8 * lane for lane in range(32)], 8) == layouts.Access(2, 2)
    assert wavefronts([16 * lane for lane in range(32)], 16) == layouts.Access(4, 4)
    assert wavefronts([128 * lane for lane in range(32)], 16) == layouts.Access(32, 4)
    # The four groups of 8 lanes that read 16 bytes each do not share, even if they want the same.
    assert wavefronts([16 * (lane % 8) for lane in range(32)], 16) == layouts.Access(4, 4)
    assert wavefronts([8 * (lane % 16) for lane in range(32)], 8) == layouts.Access(2, 2)
    assert wavefronts([None] * 31 + [0], 4) == layouts.Access(1, 1)
    assert wavefronts([], 4) == layouts.Access(0, 0)
    assert not wavefronts([0, 128], 4).conflict_free


@pytest.mark.parametrize("major", Major, ids=name)
def test_ldmatrix_has_no_conflicts_in_any_swizzle(major):
    for swizzle in SwizzleMode:
        o = Operand((128, 128), 16, swizzle, major)
        for mn, k in itertools.product(range(0, 128, 48), repeat=2):
            assert wavefronts(matrix_addresses(o, mn, k), 16) == layouts.Access(4, 4)


def test_without_an_atom_ldmatrix_conflicts():
    """A row-major tile of 128-byte rows: the 8 rows of a matrix are in the same banks."""
    rows = [128 * row for row in range(8)]
    assert wavefronts(rows, 16) == layouts.Access(8, 1)
    o = Operand((64, 64), 16)
    assert matrix_addresses(o, 0, 0, 1) == [144 * row for row in range(8)]
    assert matrix_addresses(o, 0, 0, 2)[8:] == [1024 + 144 * row for row in range(8)]
    assert matrix_addresses(replace(o, major="mn"), 0, 0, 4)[16:24] == [(128 * k + 16) ^ (16 * k) for k in range(8)]


def test_a_column_read_element_by_element():
    """32 rows of one column: a 128-byte swizzle has 8 different units for them, 4 rows in each."""
    o = Operand((128, 64), 16)
    column = element_addresses(o, [(row, 0) for row in range(32)])
    assert wavefronts(column, 2) == layouts.Access(4, 1)
    assert element_addresses(o, [None, (1, 0)]) == [None, 144]


def test_layouts_that_agree_and_differ():
    o = Operand((32, 128), 16)
    for other in (o.cute(), o.linear(), o.offset, o):
        assert first_difference(o, other, o.shape) is None
    difference = first_difference(o, replace(o, swizzle=SwizzleMode.B64), o.shape)
    assert difference is not None
    assert difference.element == (0, 32)
    assert str(difference) == "element (0, 32) is at offset 32 in the first layout, 1024 in the second"
    assert first_difference(o, replace(o, order="leading"), o.shape).element == (0, 64)


# The house


def test_needs_neither_torch_nor_triton():
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = sys.modules['numpy'] = None\n"
    code += "import tilewise.layouts as t; print(t.Operand((128, 64), 16).linear()(offset=64))"
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("(1, 8)", "")


@pytest.mark.parametrize("public", layouts.__all__)
def test_public_names_have_docstrings(public):
    assert getattr(layouts, public).__doc__


# Operand A in tensor memory


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize(("rows", "lane"), [(128, 0), (64, 0), (64, 16)])
def test_laws_of_tensor_memory(rows, lane, bits):
    a = TensorMemoryOperand((rows, 3 * 256 // bits), bits, lane << 16 | 40)
    assert (a.columns, a.allocation, a.depth) == (24, 32, 256 // bits)
    cells = {(m, k): a.cell(m, k) for m, k in itertools.product(range(rows), range(a.shape[1]))}
    assert len(set(cells.values())) == len(cells)
    for (m, k), cell in cells.items():
        assert a.coordinates(cell) == (m, k)
        # 16 rows of a warp's 32 lanes with M = 64, all with M = 128; K fills a column from its lowest bit.
        assert cell.lane == (m if rows == 128 else 32 * (m // 16) + m % 16 + lane)
        assert 32 * (cell.column - 40) + cell.bit == bits * k
    # What holds no element.
    assert [a.coordinates(Cell(x, 40, 0)) is None for x in range(128)] == [
        rows == 64 and x // 16 % 2 != lane // 16 for x in range(128)
    ]
    outside = [Cell(lane, 39, 0), Cell(lane, 64, 0), Cell(lane, 40, bits // 2), Cell(128, 40, 0), Cell(lane, 40, 32)]
    assert all(a.coordinates(cell) is None for cell in outside)
    # An instruction reads 32 bytes of K from its address on.
    for number, address in enumerate(a.addresses()):
        cell = a.cell(0, number * a.depth)
        assert (cell.lane << 16 | cell.column, cell.bit) == (address, 0)
    assert a.depth * len(a.addresses()) == a.shape[1]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("rows", [64, 128])
def test_the_linear_form_of_tensor_memory(rows, bits):
    a = TensorMemoryOperand((rows, 64), bits)
    linear = a.linear()
    for m, k in itertools.product(range(rows), range(64)):
        cell = a.cell(m, k)
        assert linear(row=cell.lane, col=(32 * cell.column + cell.bit) // bits) == (m, k)
    with pytest.raises(LayoutError, match="powers of two"):
        TensorMemoryOperand((rows, 96), bits).linear()


def test_the_example_of_tensor_memory():
    assert TensorMemoryOperand((64, 64), 16).cell(17, 5) == Cell(lane=33, column=2, bit=16)
    assert TensorMemoryOperand((128, 512), 16, 256).allocation == 256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((96, 64), 16), r"shape\[M\]: must be 64 or 128 in tensor memory, got 96"),
        (((128, 24), 16), r"shape\[K\]: must be a multiple of 16, got 24"),
        (((128, 64), 4), "bits: must be 8, 16 or 32 for tensor memory, got 4"),
        (((128, 64), 16, 16 << 16), "address: must have lane 0 in its upper 16 bits, got 0x100000"),
        (((64, 64), 16, 8 << 16), "address: must have lane 0 or 16 in its upper 16 bits, got 0x80000"),
        (((128, 64), 16, 481), "address: must leave 32 of 512 columns, got 0x1e1"),
        (((128, 0), 16), "two positive sizes"),
    ],
)
def test_what_tensor_memory_does_not_hold(arguments, words):
    with pytest.raises(LayoutError, match=words):
        TensorMemoryOperand(*arguments)


def test_elements_outside_of_tensor_memorys_tile():
    with pytest.raises(LayoutError, match=r"element: must be inside the tile \(64, 64\), got \(64, 0\)"):
        TensorMemoryOperand((64, 64), 16).cell(64, 0)
