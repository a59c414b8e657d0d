"""Toeplitz biases on Hopper, without a GPU: which tiles read entries, what these are, where their gradient goes. The
kernels' own functions, run as Python on integers and tensors; those in Triton in its interpreter."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import hopper_terms_child
import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, gluon, numbers

from tilewise.backends import Needs, Outputs
from tilewise.spec import tiles
from tilewise.spec.operands import PartOperands, TensorSpec
from tilewise.spec.score import Band, Far, Score

pytest.importorskip("triton")

from tilewise.backends.gluon import scheduler as tile_scheduler
from tilewise.backends.gluon import score
from tilewise.backends.gluon import sm90 as hopper
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward import masks as mask_tiles
from tilewise.backends.gluon.sm90.backward import scheduler as backward_scheduler
from tilewise.backends.gluon.sm90.backward import toeplitz as toeplitz_gradient
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.common import toeplitz as toeplitz_tiles
from tilewise.backends.gluon.sm90.forward import kernel as forward_kernel
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.backends.kernels.statistics import RowResults

BRAIN, FLOAT = torch.bfloat16, torch.float32


def problem(M, N, lo, hi, band=None, dim=64, linear=False, grad=True, heads=2, **more):
    """A vector for each of the query heads, which is one number up to the distance lo, and one from hi on."""
    vector = TensorSpec(FLOAT, 1, heads, 1, M + N - 1)
    return kernel_stubs.problem(
        1, heads, 1, M, N, dim, score=Score(0.25, None, band or Band(), toeplitz=Far(lo, hi, linear)),
        parts=PartOperands(toeplitz=vector, grads=("toeplitz",) if grad else ()), **more,
    )  # fmt: skip


PROBLEMS = [
    problem(1500, 1500, -94, 94),
    problem(1500, 1500, -94, 94, Band(None, 0)),
    problem(700, 700, 0, 0, linear=True),
    problem(1500, 1100, 0, 0, Band(None, -400), linear=True),
    problem(700, 1300, -200, 900),
    problem(1300, 700, -900, -300),
    problem(700, 700, -3000, 3000),
    problem(700, 700, 699, 700),  # all below
    problem(700, 700, -700, -699),  # all above
    problem(1500, 1500, -94, 94, Band(-400, 300)),
    problem(1500, 1500, -94, 94, Band(-900, None)),
    problem(1, 900, -94, 94),
    problem(900, 1, -94, 94),
]
# Each with two of the three widths of tiles by turns, and each width with two thirds of them.
by_turns = pytest.mark.parametrize(
    ("p", "dim"),
    [
        pytest.param(p, dim, id=f"{p.queries}x{p.keys} {p.score.toeplitz} {p.score.band}, {dim}")
        for n, p in enumerate(PROBLEMS)
        for dim in ((32, 64), (64, 128), (128, 32))[n % 3]
    ],
)


def forward_arguments(p):
    """``(terms, sizes, c)``."""
    chosen = config.forward_config(p)
    return numbers(score.score_terms(p)), launch._sizes(p, chosen, 132), numbers(launch._compiled(p, chosen, False))


def backward_arguments(p):
    chosen = config.backward_config(p)
    c = numbers(backward_launch._compiled(p, chosen, config.backward_width(p), False))
    return numbers(score.score_terms(p)), backward_launch._sizes(p, chosen, torch.device("meta"))[0], c


class Tile(torch.Tensor):
    """With what the kernels read of a tensor."""

    type = SimpleNamespace(layout=None)

    def split(self):
        return self[..., 0], self[..., 1]

    def permute(self, order):
        return super().permute(*order)

    def expand_dims(self, axis):
        return self.unsqueeze(axis)

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the kernels as Python functions."""
    gl = MagicMock(**vars(gluon(
        arange=lambda start, end, layout: torch.arange(start, end).as_subclass(Tile),
        join=lambda x, y: torch.stack([x, y], -1), zeros_like=torch.zeros_like,
        zeros=lambda shape, dtype, layout: torch.zeros(shape).as_subclass(Tile),
        broadcast=lambda x, y: [t.as_subclass(Tile) for t in torch.broadcast_tensors(x, y)],
    )))  # fmt: skip
    modules = tile_scheduler, backward_scheduler, forward_kernel, toeplitz_tiles, toeplitz_gradient, score
    kernel_stubs.replace(monkeypatch, *modules, gl=gl)
    monkeypatch.setattr(tile_scheduler, "key_tiles", tiles.key_tiles)
    monkeypatch.setattr(backward_scheduler, "query_tiles", tiles.query_tiles)
    as_python(monkeypatch, mask_tiles, "in_words", toeplitz_gradient)
    as_python(monkeypatch, toeplitz_tiles, "PAD")
    functions = {
        tile_scheduler: "head_at work_tile_at work_tile_count entry_at first_entry first_full",
        toeplitz_tiles: "first_not_above first_below near_start far_start far_shift diagonal_of words",
        toeplitz_gradient: "near_queries place_of_lse on_line of_thread of_thread_by_distance by_places summed "
        "_like _halves _halves_of_places _whole _one_on _turned _goes_around _of_neighbours _shared _exchanged _index",
    }
    for module, names in functions.items():
        for name in names.split():
            users = (tile_scheduler, forward_kernel, toeplitz_tiles, toeplitz_gradient)
            as_python(monkeypatch, module, name, *(user for user in users if hasattr(user, name)))
    kernel_stubs.replace(monkeypatch, toeplitz_tiles, toeplitz_gradient, anew=lambda x: x)
    as_python(monkeypatch, backward_scheduler, "head_and_tile heads_at_once groups_per_broadcast key_tile")


# --- which tiles read entries ---


def side_of(p, row, rows, n0, cols):
    """Of the pairs of a tile: -1 all below the near distances, 1 all above, 0 else."""
    far = p.score.toeplitz
    least, most = n0 - (row + rows - 1), n0 + cols - 1 - row
    return -1 if most <= far.lo else 1 if least >= far.hi else 0


@by_turns
def test_the_forwards_loops(monkeypatch, p, dim):
    """Every tile that is visible is visited once; one that reads no entry lies on the side whose line it takes."""
    p = replace(p, head_dim=dim, value_dim=dim)
    terms, sizes, c = forward_arguments(p)
    names = "accumulator sums_of_rows slot_of use_of wait_full release release_after_loads tma times_v finish tma_store"
    for name in (
        *names.split(),
        "parts_of_q",
        "in_registers",
        "fence_async_shared",
        "warp_scheduler_barrier_arrive",
        "diagonal_of",
        "skip_tile",
        "prefetch_near",
    ):
        monkeypatch.setattr(forward_kernel, name, MagicMock())
    monkeypatch.setattr(forward_kernel, "warpgroup_mma_wait", lambda *_, deps: deps)
    monkeypatch.setattr(forward_kernel, "next_tile_index", lambda tile_index, *_: tile_index + 1)
    monkeypatch.setattr(forward_kernel, "line_above", lambda *_: 1)
    monkeypatch.setattr(forward_kernel, "line_below", lambda *_: -1)
    monkeypatch.setattr(forward_kernel, "box_of", lambda first, count, b, h, row, c: [b, h, row, 0])
    visited, far = [], 0

    def mma_one_n_block(
        q, state, x, pipelines, words, step, tile, i, terms, sizes, c, WARPGROUP, FIRST, BAND, RANGE, toeplitz
    ):
        nonlocal far
        entry = tile_scheduler.entry_at(i, tile, c)
        row, n0 = tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N
        assert BAND or not entry.cut
        assert RANGE != "outside" or toeplitz == side_of(p, row, 64, n0, c.BLOCK_N)
        far += RANGE == "outside"
        visited.append((tile.h, row, n0))
        return state

    monkeypatch.setattr(forward_kernel, "mma_one_n_block", mma_one_n_block)
    for warpgroup in range(c.WARPGROUPS):
        x = SimpleNamespace(sink=None, seed=None, bias=None, q=MagicMock(), o=None, o_low=None)
        forward_kernel.compute.fn(x, MagicMock(), RowResults(None, None), terms, sizes, c, warpgroup)
    assert len(visited) == len(set(visited))
    lo, hi = tiles.limits(p.score.band)
    i, j = torch.arange(p.queries)[:, None], torch.arange(p.keys)
    seen = (j - i >= lo) & (j - i <= hi)
    for row, n0 in itertools.product(range(0, p.queries, 64), range(0, p.keys, c.BLOCK_N)):
        if seen[row : row + 64, n0 : n0 + c.BLOCK_N].any():
            assert (1, row, n0) in visited
    assert (far > 0) == ((c.FAR_LO or c.FAR_HI) and p.keys > c.BLOCK_N)


@by_turns
def test_the_backwards_loops(p, dim):
    """What comes first lies below, what comes last above, and takes the LSE that goes with it."""
    p = replace(p, head_dim=dim, value_dim=dim)
    terms, sizes, c = backward_arguments(p)
    stride = sizes.kv_heads * sizes.group * sizes.row_tiles * 2 * c.BLOCK_M
    for program in range(sizes.key_tiles):
        work = backward_scheduler.work_tile_of.fn(program, 0, terms, sizes, c)
        begin, end = toeplitz_gradient.near_queries(work, terms, c)
        assert work.begin <= begin <= end <= work.end
        for m in range(work.begin, work.end):
            side = side_of(p, m * c.BLOCK_M, c.BLOCK_M, work.n0, c.BLOCK_N)
            found = -1 if m >= end else 1 if m < begin else 0
            assert found in (0, side)
            if (c.FAR_LO, c.FAR_HI) == (True, True):
                assert found == side
            at = toeplitz_gradient.place_of_lse(100, m, begin, end, sizes, c)
            assert at == 100 + (found != 0) * (stride + (found == 1) * c.BLOCK_M)


# --- what becomes of a tile ---


class Memory:
    """A pointer into a vector, for tensors of indices."""

    def __init__(self, vector, at=0):
        self.vector, self.at = vector, at

    def __add__(self, offset):
        return Memory(self.vector, self.at + offset)


def words_of(vector, step):
    """As `pairs_kernel` writes them: an entry and the next, or the one before."""
    pad = toeplitz_tiles.PAD
    wide = torch.nn.functional.pad(vector, (pad, pad))
    return torch.stack([wide, wide.roll(-step)], -1)


def bias_of(vector, M, N):
    return vector[torch.arange(N) - torch.arange(M)[:, None] + M - 1]


def test_the_entries_of_a_tile(monkeypatch):
    M, N = 300, 500
    vector = torch.randint(1, 999, (M + N - 1,)).float()
    whole = bias_of(vector, M, N)
    gl = toeplitz_tiles.gl
    gl.load = lambda at: at.vector[at.at]
    gl.inline_asm_elementwise = lambda asm, constraints, args, **_: (args[0][..., 0], args[0][..., 1])
    sizes = SimpleNamespace(queries=M, keys=N)
    c = SimpleNamespace(TOEPLITZ_GROUP=1, TOEPLITZ_BATCH=False, BLOCK_N=128, SUBTILE_M=64, WARPS=8)
    diagonal, before = (
        toeplitz_tiles.diagonal_of(Memory(words_of(vector, step)), 0, 0, 1, sizes, c) for step in (1, -1)
    )
    for row, n0 in itertools.product(range(0, M, 64), range(0, N, 128)):
        expected = whole[row : row + 64, n0 : n0 + 128]
        found = toeplitz_tiles.near_start(diagonal, row, n0, c)
        assert torch.equal(found[: expected.shape[0], : expected.shape[1]], expected)
        like = torch.zeros(128, 64).as_subclass(Tile)
        for at, step in ((before, -1), (diagonal, 1)):
            found = toeplitz_tiles.words(at, n0 - row, like, True, step).T
            assert torch.equal(found[: expected.shape[0], : expected.shape[1]], expected)


@pytest.mark.parametrize("grad", [False, True])
def test_the_order_of_the_backwards_words(monkeypatch, grad):
    """That in which its kernel takes them: a product that comes ahead has a tile's first subtile added, as they lie."""
    monkeypatch.setattr(toeplitz_tiles, "PAD", SimpleNamespace(value=toeplitz_tiles.PAD))
    problem, inputs = hopper_terms_child.toeplitz_call(hopper_terms_child.Toeplitz(grad=grad))
    outputs = Outputs(torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3], device="meta"))
    run = backward_launch.HopperBackward(
        problem, inputs, outputs, outputs, Needs(True, True, True, False, toeplitz=grad)
    )
    taken = []
    monkeypatch.setattr(
        toeplitz_gradient, "words", lambda diagonal, corner, like, keys_in_rows, step: taken.append(step)
    )
    c = numbers(backward_launch._compiled(problem, config.backward_config(problem), 64, False))
    toeplitz_gradient.start_of_words.fn(None, 0, c)
    assert taken == [run.pairs.step] == [-1 if grad else 1]


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)])
def test_what_is_asked_for_ahead(kinds):
    """Of entries that near tiles read, those next to each far side, of the vector and no others."""
    M, N, asked = 900, 700, []
    gl, sizes = toeplitz_tiles.gl, SimpleNamespace(queries=M, keys=N)
    gl.maximum, gl.minimum = (lambda x, y: x.clamp(min=y)), (lambda x, y: x.clamp(max=y))
    gl.inline_asm_elementwise = lambda asm, constraints, args, **_: asked.append(args[0].at)
    c = SimpleNamespace(FAR_LO=kinds[0], FAR_HI=kinds[1], BLOCK_N=128)
    terms = SimpleNamespace(far_lo=-94, far_hi=94 if kinds[1] else N)
    for warps in (4, 8):
        toeplitz_tiles.prefetch_near.fn(Memory(None), 64, warps, terms, sizes, c)
        found = asked.pop()
        assert len(found) == 32 * warps
        assert found.min() >= 1 - M
        assert found.max() <= N - 1
        near = torch.arange(-94 - 190, 95 + 190)
        assert ((near[:, None] - found).abs().amin(1) <= 32 // warps).all()


def test_a_tile_on_a_line(monkeypatch):
    c = SimpleNamespace(TOEPLITZ="line", BLOCK_N=128, SUBTILE_M=64, WARPS=8)
    line = toeplitz_tiles.Line(torch.tensor(3.0).as_subclass(Tile), torch.tensor(0.5).as_subclass(Tile), -20)
    distance = torch.arange(128) + 256 - (torch.arange(64)[:, None] + 640)
    expected = 3.0 + 0.5 * (distance + 20)
    gl, kept = toeplitz_tiles.gl, SimpleNamespace()
    gl.float32, gl.bfloat16, gl.allocate_shared_memory = FLOAT, BRAIN, lambda *_: kept
    kept.store = lambda x: setattr(kept, "permute", x.permute)
    columns = toeplitz_tiles.new_columns.fn(c)
    monkeypatch.setattr(
        toeplitz_tiles, "warpgroup_mma", lambda a, b, start, use_acc, is_async: start + a.float() @ b.float()
    )
    for slope in (0.5, -math.pi / 3, 1e-3):
        sloping = line._replace(slope=torch.tensor(slope).as_subclass(Tile))
        start = torch.Tensor(toeplitz_tiles.far_start(sloping, columns, c))
        torch.testing.assert_close(start, (slope * torch.arange(128)).expand(64, -1), rtol=2e-7, atol=0)
    start = toeplitz_tiles.far_start(line, columns, c)
    shift = toeplitz_tiles.far_shift(line, torch.tensor(640).as_subclass(Tile), 256, c)
    torch.testing.assert_close(torch.Tensor(start + shift[:, None]), expected, check_dtype=False)
    # The second subtile of a tile, whose LSE has what belongs to its queries.
    terms, s = SimpleNamespace(exponent=0.7), torch.randn(128, 64).as_subclass(Tile)
    lse = torch.randn(64) - 60
    corner = torch.tensor(256 - (640 - 64)).as_subclass(Tile)
    known = (lse + 0.7 * 0.5 * (torch.arange(64) + 64)).as_subclass(Tile)
    p = toeplitz_gradient.on_line(s, known, (line, None), corner, terms, c)
    torch.testing.assert_close(torch.Tensor(p).T, torch.exp2((torch.Tensor(s).T + expected) * 0.7 - lse[:, None]))


def test_sums_of_far_tiles():
    c = SimpleNamespace(TOEPLITZ="line", BLOCK_N=128, SUBTILE_M=64, WARPS=8)
    ds = torch.randint(-9, 9, (128, 64)).float()
    none = torch.zeros(8, 8, 4).as_subclass(Tile)
    line = toeplitz_tiles.Line(None, None, -100)
    sums = toeplitz_gradient.FarSums(none, none)
    sums = toeplitz_gradient.summed(sums, ds.as_subclass(Tile), (line, None), -300, c)
    distance = -300 + torch.arange(128)[:, None] - torch.arange(64)
    assert sums.total.sum() == ds.sum()
    assert sums.weighted.sum() == (ds * (distance + 100)).sum()
    of_lanes = (ds * (distance + 100)).view(8, 2, 8, 8, 4, 2).sum((1, 3, 5))  # what each thread has of it
    assert torch.equal(torch.Tensor(sums.weighted), of_lanes)


def from_lane(x, element):
    """Of [w, g, n, t, ...], whose elements of one warp are those of equal w and one n, four threads a g."""
    index = torch.meshgrid(*(torch.arange(size) for size in x.shape), indexing="ij")
    return torch.Tensor(x)[(index[0], element // 4, index[2], element % 4, *index[4:])].as_subclass(Tile)


def test_diagonals_of_near_tiles(monkeypatch):
    M, N, pad = 256, 384, toeplitz_tiles.PAD
    found, ds = torch.zeros(M + N - 1 + 2 * pad), torch.randint(-9, 9, (M, N)).float()
    monkeypatch.setattr(toeplitz_gradient, "_from_element", from_lane)
    gl, added = toeplitz_gradient.gl, []

    def add(at, x, mask=True, **_):
        index, x, mask = torch.broadcast_tensors(torch.as_tensor(at.at), x, torch.as_tensor(mask))
        index, mask = index.reshape(-1), mask.reshape(-1)
        found.index_add_(0, index[mask], torch.Tensor(x).reshape(-1)[mask])
        added.append(int(mask.sum()))

    gl.atomic_add, gl.static_range, gl.int32 = add, range, torch.int32
    sizes = SimpleNamespace(queries=M, keys=N, kv_heads=1, group=1)
    c = SimpleNamespace(TOEPLITZ_GROUP=1, TOEPLITZ_BATCH=False)
    for row, n0 in itertools.product(range(0, M, 64), range(0, N, 128)):
        tile = ds[row : row + 64, n0 : n0 + 128].T.clone().as_subclass(Tile)
        toeplitz_gradient.add_diagonals.fn(tile, Memory(found), 0, 0, n0 - row, sizes, c)
    assert sum(added) == (M // 64) * (N // 128) * 8 * 80, "one for each distance of a warp, and one more"
    expected = torch.zeros(M + N - 1)
    index = torch.arange(N) - torch.arange(M)[:, None] + M - 1
    expected.index_add_(0, index.reshape(-1), ds.reshape(-1))
    assert torch.equal(found[pad : pad + M + N - 1], expected)
    assert not found[:pad].any()
    assert not found[pad + M + N - 1 :].any()


# --- kernels in Triton ---


@pytest.mark.parametrize("step", [1, -1])
def test_words_in_memory(interpreter, step):
    """A finite entry stays finite in the units of the scores, whatever the strides of the vector; and the gradient that
    comes along is 0 all over."""
    vector, words, gradient = interpreter(hopper_terms_child.words_in_memory, 0.25, step)
    pad = toeplitz_tiles.PAD
    low, high = words[..., 0], words[..., 1]
    assert torch.equal(low[:, pad:-pad], (vector[:, :, 0] * 4).clamp(-3.4028234663852886e38, 3.4028234663852886e38)
                       .where(vector[:, :, 0].isfinite(), vector[:, :, 0]).flatten(0, 1))  # fmt: skip
    assert torch.equal(low[:, 1:], high[:, :-1]) if step == 1 else torch.equal(low[:, :-1], high[:, 1:])
    assert not low[:, :pad].any()
    assert not low[:, -pad:].any()
    assert not gradient.any()


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_of_far_tiles(interpreter, causal, linear):
    """A number is taken out of it; of a line, whose slopes are 1/4 and -1/2, what queries have."""
    lse, stats, below, above, block = interpreter(hopper_terms_child.far_stats, causal, linear)
    B, H, M = lse.shape
    rows = -(-M // block)
    tiles_of = stats.view(2, B, H, rows, 2, block)[1].movedim(3, 0).reshape(2, B, H, rows * block)[..., :M]
    if linear:
        below, above = (-slope * (torch.arange(M) % block) for slope in (0.25, -0.5))
    for found, less in zip(tiles_of, (below, above), strict=True):
        if causal and less is above:
            continue
        expected = (lse - less) * 1.4426950408889634
        torch.testing.assert_close(found, expected.masked_fill(lse == -torch.inf, torch.inf), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("M", "N", "causal"), [(130, 90, False), (70, 130, True)])
def test_rows_are_computed_again(interpreter, M, N, causal):
    o, lse, expected, of_rows = interpreter(hopper_terms_child.repair_beside_toeplitz, M, N, causal)
    torch.testing.assert_close(lse, of_rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-3)


# --- what is declined ---


def test_declines():
    p = PROBLEMS[0]
    assert hopper.declines(p) is hopper.declines(p, "backward") is None
    for changed, words in (
        (replace(p, score=replace(p.score, softcap=5.0)), "alone: not beside a softcap"),
        (replace(p, bias=TensorSpec(BRAIN, 1, 1, 1, 1500)), "alone: not beside another bias"),
        (replace(p, head_dim=256), "up to 128 dimensions"),
        (replace(p, score=replace(p.score, toeplitz=None)), "where it is known what far distances have"),
        (replace(p, parts=PartOperands(toeplitz=TensorSpec(torch.float64, 1, 2, 1, 2999))), "in float32, not float64"),
    ):
        assert words in hopper.declines(changed)
    assert "in any order" in hopper.declines(replace(p, deterministic=True), "backward")
    untrained = replace(p, deterministic=True, parts=replace(p.parts, grads=()))
    assert hopper.declines(untrained, "backward") is None
