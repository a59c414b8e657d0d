"""The order of dQ's sum in the Hopper backward: the kernels' own functions, run as Python on tensors of indices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernel_stubs import as_python, gluon, replace

from tilewise.layouts.checks import wavefronts
from tilewise.layouts.nvmma import nvmma_shared_layout

pytest.importorskip("triton")

from tilewise.backends.gluon.sm90.backward import dq as dq_accum
from tilewise.backends.gluon.sm90.backward import scheduler

# rows, columns of a part, warps: of heads of 32 by one and by two warpgroups, of 64, 128 and 256 dimensions, of strips
TILES = [(64, 32, 4), (64, 32, 8), (64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8), (128, 64, 8)]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the kernels as Python functions; that no register moves is for the compiler to check."""
    nothing = lambda *_: None  # noqa: E731
    replace(monkeypatch, dq_accum, gl=gluon(), DQ_COLS=32, in_order=nothing, accumulator=nothing)


def held(element, warp, register, rows, columns, warps):
    """Row and column of what a thread holds of wgmma's result: 16 rows to a warp, and of 64 rows a half of the columns
    to each of two warpgroups."""
    halves = 16 * warps // rows
    row = 16 * (warp % (rows // 16)) + 8 * (register // 2 % 2) + element // 4
    return row, warp // (rows // 16) * (columns // halves) + 8 * (register // 4) + 2 * (element % 4) + register % 2


@pytest.mark.parametrize(("rows", "columns", "warps"), TILES)
def test_neighbours_are_registers_then_lanes_then_warps(rows, columns, warps):
    tile = torch.arange(rows * columns).view(rows, columns)
    flat = dq_accum.as_threads_hold_it.fn(tile, warps)
    assert flat.shape == (rows * columns // 32, 32)
    order = flat.flatten().tolist()
    for register in range(rows * columns // (32 * warps)):
        for warp in range(warps):
            for element in range(32):
                place = 128 * (register // 4 * warps + warp) + 4 * element + register % 4
                row, column = held(element, warp, register, rows, columns, warps)
                assert order[place] == row * columns + column


@pytest.mark.parametrize(("rows", "columns", "warps"), TILES)
def test_rows_come_back(rows, columns, warps):
    tile = torch.arange(rows * columns).view(rows, columns)
    assert torch.equal(dq_accum.as_rows.fn(dq_accum.as_threads_hold_it.fn(tile, warps), rows, warps), tile)


def passes(rows, columns, places, width):
    """Of a warp's store of ``width`` elements an element into a float32 tile as TMA has it in shared memory."""
    offset_of = nvmma_shared_layout([rows, columns], "float32", 128).invert()
    return wavefronts([4 * offset_of(dim0=row, dim1=column)[0] for row, column in places], 4 * width)


@pytest.mark.parametrize(("rows", "columns", "warps"), TILES)
def test_no_bank_twice(rows, columns, warps):
    """A store of the order finds each bank once; one of rows, two elements at a time, finds half of them twice."""
    for warp in range(warps):
        for quad in range(rows * columns // (128 * warps)):
            first = 128 * (quad * warps + warp)
            stored = passes(
                rows * columns // 32, 32, [divmod(first + 4 * element, 32) for element in range(32)], 4
            )  # fmt: skip
            assert (stored.wavefronts, stored.ideal) == (4, 4)
            in_rows = passes(
                rows, columns, [held(element, warp, 4 * quad, rows, columns, warps) for element in range(32)], 2
            )
            assert (in_rows.wavefronts, in_rows.ideal) == (4, 2)


@pytest.mark.parametrize("biases", [False, 2])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("parts", [1, 3, 5, 17])
def test_earlier_heads_are_finished_and_their_places_zeroed(monkeypatch, parts, heads, biases):
    """dQ of the heads that a group's programs finish, from a pipeline of the sum: rows and columns past the end of a
    head are not written, and nothing of other heads is."""
    B, H, group, M, D, scale = 4, 4, 2, 150, 24, 0.5
    c = SimpleNamespace(BLOCK_M=64, BLOCK_D=32, WARPS=4, ELEMENTS=2, BIAS_BATCH=biases)
    sizes = SimpleNamespace(
        batch=B, kv_heads=H // group, group=group, queries=M, row_tiles=3, zeroed=6, broadcast_batch=2, run=1
    )
    # Batch element at each place of the pairs that programs have; with two biases each is for one element.
    element_of = {0: 0, 2: 1} if biases else {0: 0, 1: 1, 2: 2}
    expected = torch.randn(B, H, M, D, generator=torch.Generator().manual_seed(0))
    given = torch.zeros(B, H, 192, 32)
    given[:, :, :M, :D] = expected
    given[:, :, M:] = given[:, :, :, D:] = torch.nan  # as sums of what is not there might be

    def store(at, values, mask=None):
        if mask is None:
            sums[at] = values
        else:
            dq.flatten()[at[mask]] = values[mask]

    pending = []

    class Slot:
        def load(self, _):
            return self.values

    def slots(_, shape, __):
        made = [Slot() for _ in range(shape[0])]
        return SimpleNamespace(index=made.__getitem__)

    def copy(slot, at):
        slot.values = None
        pending.append((slot, at))

    def wait_group(count):  # what is waited for comes as late as it may
        while len(pending) > count:
            slot, at = pending.pop(0)
            slot.values = sums[at]

    class Pointer(int):
        dtype = SimpleNamespace(element_ty=torch.float32)

    stubs = {
        "arange": lambda begin, end, _: torch.arange(begin, end), "cast": lambda x, _: x, "int64": torch.int64,
        "cdiv": lambda x, y: -(-x // y), "minimum": min, "zeros": lambda shape, *_: torch.zeros(shape),
        "static_assert": lambda holds, _: None, "float32": None,
        "store": store, "SwizzledSharedLayout": lambda *_: None,
        "allocate_shared_memory": slots,
        "BlockedLayout": lambda *_: None, "SliceLayout": lambda *_: None,
        "convert_layout": lambda x, _, **__: x, "NVMMADistributedLayout": lambda *_: None, "static_range": range,
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(dq_accum.gl, name, stub, raising=False)
    copies = SimpleNamespace(commit_group=lambda: None, wait_group=wait_group)
    monkeypatch.setattr(dq_accum, "async_copy", copies)
    monkeypatch.setattr(dq_accum, "async_load", copy)
    monkeypatch.setattr(dq_accum.gl, "where", lambda c, x, y: x if c else y, raising=False)
    as_python(monkeypatch, dq_accum, "in_rows strips_at element_at")
    monkeypatch.setattr(scheduler, "gl", dq_accum.gl)
    dq = torch.zeros(B, H, M, D)
    layout = SimpleNamespace(pointer=Pointer(0), stride0=H * M * D, stride1=M * D, stride2=D)
    places, written = sizes.zeroed * group * sizes.row_tiles, 0
    for first in range(0, B * sizes.kv_heads, heads):
        found = []
        sums, left = torch.ones(places, 64 * 32), torch.ones(places, 64 * 32)
        for nth in range(first, first + heads):
            b, hk = nth // 2 // sizes.kv_heads * 2 + nth % 2, nth // 2 % sizes.kv_heads  # two elements
            found.append((b, slice(hk * group, (hk + 1) * group)))
            tiles = given[found[-1]].reshape(-1, 64, 32)
            at = nth % sizes.zeroed * len(tiles)
            sums[at : at + len(tiles)] = torch.stack([dq_accum.as_threads_hold_it.fn(x, 4).flatten() for x in tiles])
            left[at : at + len(tiles)] = 0
        sums = sums.flatten()
        for part in range(parts):
            dq_accum.finish_heads.fn(
                first, heads, part, parts, 0, layout, len(element_of), D, True, SimpleNamespace(scale=scale), sizes, c
            )
        assert torch.equal(sums, left.flatten())
        for place, of in found:
            if place in element_of:  # else nothing leaves
                written += group
                assert torch.equal(dq[element_of[place], of], expected[place, of] * scale)
        assert (dq != 0).all((2, 3)).sum() == written


@pytest.mark.parametrize("shape", [(2, 200, 136), (3, 129, 255), (1, 128, 384), (1, 7, 1)])
def test_dbias_is_cast_once_and_nothing_beside_it(monkeypatch, shape):
    """All pieces of it: from rows that are as long as a multiple of eight, as `last_heads_kernel` finds them."""
    heads, queries, keys = shape
    width = -(-keys // 8) * 8
    total = torch.randn(heads, queries, width, generator=torch.Generator().manual_seed(0))
    read = torch.full((heads * queries * width,), 0)
    cast = torch.full((heads * queries * keys + 8,), 7.0, dtype=torch.bfloat16)

    class Pointer(int):
        dtype = SimpleNamespace(element_ty=torch.bfloat16)

    def load(at, mask, other):
        assert at[mask].lt(read.numel()).all()
        read.index_put_((at[mask],), torch.ones(()).long(), accumulate=True)
        return torch.where(mask, total.flatten()[at.where(mask, 0)], other)

    def store(at, found, mask):
        assert cast[at[mask]].eq(7).all()
        cast[at[mask]] = found[mask]

    monkeypatch.setattr(dq_accum, "gl", gluon(load=load, store=store))
    monkeypatch.setattr(dq_accum, "CAST_ROWS", rows := dq_accum.CAST_ROWS.value)
    monkeypatch.setattr(dq_accum, "CAST_COLS", cols := dq_accum.CAST_COLS.value)
    strided = SimpleNamespace(pointer=0, stride1=queries * width, stride2=width)
    for piece in range(heads * -(-queries // rows) * -(-keys // cols)):
        dq_accum.cast_piece.fn(piece, strided, Pointer(0), SimpleNamespace(queries=queries, keys=keys))
    assert torch.equal(cast[:-8].view(shape), total[..., :keys].bfloat16())
    assert cast[-8:].eq(7).all()
    assert read.max() == 1
