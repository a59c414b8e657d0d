"""Toeplitz biases on Hopper, without a GPU: which tiles read entries, what these are, where their gradient goes. The
kernels' own functions, run as Python on integers and tensors; those in Triton in its interpreter."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import hopper_toeplitz_child
import pytest
import torch

from tilewise.problem import Operand, PartOperands, Problem
from tilewise.score import tiles
from tilewise.score.terms import Band, Far, Score

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tilewise.backends.gluon import score, tile_scheduler
from tilewise.backends.gluon import sm90 as hopper
from tilewise.backends.gluon.sm90 import (
    backward_launch,
    backward_scheduler,
    config,
    forward_kernel,
    launch,
    mask_tiles,
    toeplitz_gradient,
    toeplitz_tiles,
)

BRAIN, FLOAT = torch.bfloat16, torch.float32


def problem(M, N, lo, hi, band=None, dim=64, linear=False, grad=True, heads=2, **more):
    """A vector for each of the query heads, which is one number up to the distance lo, and one from hi on."""
    return Problem(
        device="cuda", capability=(9, 0), dtype=BRAIN, batch=1, heads=heads, kv_heads=1, queries=M, keys=N,
        head_dim=dim, value_dim=dim, score=Score(0.25, None, band or Band(), toeplitz=Far(lo, hi, linear)),
        parts=PartOperands(toeplitz=Operand(FLOAT, 1, heads, 1, M + N - 1), grads=("toeplitz",) if grad else ()),
        **more,
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
IDS = [f"{p.queries}x{p.keys} {p.score.toeplitz} {p.score.band}" for p in PROBLEMS]


def numbers(terms):
    """With plain numbers in place of constants of the compiler."""
    return SimpleNamespace(**{name: getattr(x, "value", x) for name, x in terms._asdict().items()})


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
    gl = MagicMock()
    gl.minimum, gl.maximum, gl.cdiv = min, max, lambda x, y: -(-x // y)
    gl.where = lambda condition, x, y: (
        torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else x if condition else y
    )
    gl.arange = lambda start, end, layout: torch.arange(start, end).as_subclass(Tile)
    gl.convert_layout = lambda x, layout, assert_trivial: x
    gl.to_tensor = gl.cast = lambda x, *_: x
    gl.program_id = lambda axis: 0
    gl.join = lambda x, y: torch.stack([x, y], -1)
    gl.zeros = lambda shape, dtype, layout: torch.zeros(shape).as_subclass(Tile)
    gl.zeros_like, gl.exp2, gl.float32 = torch.zeros_like, torch.exp2, FLOAT
    gl.sum = lambda x, axis: x.sum(axis)
    for module in (tile_scheduler, backward_scheduler, forward_kernel, toeplitz_tiles, toeplitz_gradient, score):
        monkeypatch.setattr(module, "gl", gl)
    monkeypatch.setattr(tile_scheduler, "key_tiles", tiles.key_tiles)
    monkeypatch.setattr(backward_scheduler, "query_tiles", tiles.query_tiles)
    monkeypatch.setattr(toeplitz_gradient, "in_words", mask_tiles.in_words.fn)
    monkeypatch.setattr(toeplitz_tiles, "PAD", toeplitz_tiles.PAD.value)
    functions = {
        tile_scheduler: "work_tile_at work_tile_count entry_at first_entry first_full",
        toeplitz_tiles: "first_not_above first_below near_start far_start diagonal_of words",
        toeplitz_gradient: "near_queries place_of_lse on_line of_thread summed _halves _whole _one_on _places",
    }
    for module, names in functions.items():
        for name in names.split():
            function = getattr(module, name)
            function = getattr(function, "fn", function)
            for user in (tile_scheduler, forward_kernel, toeplitz_tiles, toeplitz_gradient):
                if hasattr(user, name):
                    monkeypatch.setattr(user, name, function)
    for module in (toeplitz_tiles, toeplitz_gradient):
        monkeypatch.setattr(module, "anew", lambda x: x)
    for name in ("head_and_tile", "heads_at_once", "groups_per_broadcast", "key_tile"):
        monkeypatch.setattr(backward_scheduler, name, getattr(backward_scheduler, name).fn)


# --- which tiles read entries ---


def side_of(p, row, rows, n0, cols):
    """Of the pairs of a tile: -1 all below the near distances, 1 all above, 0 else."""
    far = p.score.toeplitz
    least, most = n0 - (row + rows - 1), n0 + cols - 1 - row
    return -1 if most <= far.lo else 1 if least >= far.hi else 0


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("p", PROBLEMS, ids=IDS)
def test_the_forwards_loops(monkeypatch, p, dim):
    """Every tile that is visible is visited once; one that reads no entry lies on the side whose line it takes."""
    p = replace(p, head_dim=dim, value_dim=dim)
    terms, sizes, c = forward_arguments(p)
    names = "accumulator sums_of_rows slot_of use_of wait_full release release_after_loads tma times_v finish tma_store"
    for name in (*names.split(), "fence_async_shared", "warp_scheduler_barrier_arrive", "diagonal_of", "skip_tile"):
        monkeypatch.setattr(forward_kernel, name, MagicMock())
    monkeypatch.setattr(forward_kernel, "warpgroup_mma_wait", lambda *_, deps: deps)
    monkeypatch.setattr(forward_kernel, "next_tile_index", lambda tile_index, *_: tile_index + 1)
    monkeypatch.setattr(forward_kernel, "line_above", lambda *_: 1)
    monkeypatch.setattr(forward_kernel, "line_below", lambda *_: -1)
    monkeypatch.setattr(forward_kernel, "box_of", lambda first, count, b, h, row, c: [b, h, row, 0])
    visited, far = [], 0

    def attend(q, state, x, rings, words, step, tile, i, terms, sizes, c, WARPGROUP, FIRST, BAND, RANGE, toeplitz):
        nonlocal far
        entry = tile_scheduler.entry_at(i, tile, c)
        row, n0 = tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N
        assert BAND or not entry.partial
        assert RANGE != "outside" or toeplitz == side_of(p, row, 64, n0, c.BLOCK_N)
        far += RANGE == "outside"
        visited.append((tile.h, row, n0))
        return state

    monkeypatch.setattr(forward_kernel, "attend", attend)
    for warpgroup in range(c.WARPGROUPS):
        x = SimpleNamespace(sink=None, seed=None, bias=None, q=MagicMock(), o=None)
        forward_kernel.compute.fn(x, MagicMock(), None, terms, sizes, c, warpgroup)
    assert len(visited) == len(set(visited))
    lo, hi = tiles.limits(p.score.band)
    i, j = torch.arange(p.queries)[:, None], torch.arange(p.keys)
    seen = (j - i >= lo) & (j - i <= hi)
    for row, n0 in itertools.product(range(0, p.queries, 64), range(0, p.keys, c.BLOCK_N)):
        if seen[row : row + 64, n0 : n0 + c.BLOCK_N].any():
            assert (1, row, n0) in visited
    assert (far > 0) == ((c.FAR_LO or c.FAR_HI) and p.keys > c.BLOCK_N)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("p", PROBLEMS, ids=IDS)
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
            moves = c.TOEPLITZ == "number" and found != 0
            assert at == 100 + moves * (stride + (found == 1) * c.BLOCK_M)


# --- what becomes of a tile ---


class Memory:
    """A pointer into a vector, for tensors of indices."""

    def __init__(self, vector, at=0):
        self.vector, self.at = vector, at

    def __add__(self, offset):
        return Memory(self.vector, self.at + offset)


def words_of(vector, M, N):
    """As `pairs_kernel` writes them: an entry and the next."""
    pad = toeplitz_tiles.PAD
    wide = torch.nn.functional.pad(vector, (pad, pad + 1))
    return torch.stack([wide[:-1], wide[1:]], -1)


def bias_of(vector, M, N):
    return vector[torch.arange(N) - torch.arange(M)[:, None] + M - 1]


def test_the_entries_of_a_tile(monkeypatch):
    M, N = 300, 500
    vector = torch.randint(1, 999, (M + N - 1,)).float()
    whole, words = bias_of(vector, M, N), words_of(vector, M, N)
    gl = toeplitz_tiles.gl
    gl.load = lambda at: at.vector[at.at]
    gl.inline_asm_elementwise = lambda asm, constraints, args, **_: (args[0][..., 0], args[0][..., 1])
    sizes = SimpleNamespace(queries=M, keys=N)
    c = SimpleNamespace(TOEPLITZ_GROUP=1, TOEPLITZ_BATCH=False, BLOCK_N=128, SUBTILE_M=64, WARPS=8)
    diagonal = toeplitz_tiles.diagonal_of(Memory(words), 0, 0, 1, sizes, c)
    for row, n0 in itertools.product(range(0, M, 64), range(0, N, 128)):
        expected = whole[row : row + 64, n0 : n0 + 128]
        found = toeplitz_tiles.near_start(diagonal, row, n0, c)
        assert torch.equal(found[: expected.shape[0], : expected.shape[1]], expected)
        like = torch.zeros(128, 64).as_subclass(Tile)
        found = toeplitz_tiles.words(diagonal, n0 - row, like, True).T
        assert torch.equal(found[: expected.shape[0], : expected.shape[1]], expected)


def test_a_tile_on_a_line():
    c = SimpleNamespace(TOEPLITZ="line", BLOCK_N=128, SUBTILE_M=64, WARPS=8)
    line = toeplitz_tiles.Line(torch.tensor(3.0).as_subclass(Tile), torch.tensor(0.5).as_subclass(Tile), -20)
    distance = torch.arange(128) + 256 - (torch.arange(64)[:, None] + 640)
    expected = 3.0 + 0.5 * (distance + 20)
    toeplitz_tiles.gl.float32 = FLOAT
    start, shift = toeplitz_tiles.far_start(line, torch.tensor(640).as_subclass(Tile), 256, c)
    torch.testing.assert_close(torch.Tensor(start + shift[:, None]), expected, check_dtype=False)
    terms, s = SimpleNamespace(exponent=0.7), torch.randn(128, 64).as_subclass(Tile)
    lse = torch.randn(64) - 60
    corner = torch.tensor(256 - 640).as_subclass(Tile)
    p = toeplitz_gradient.on_line(s, lse.as_subclass(Tile), (line, None), corner, terms, c)
    torch.testing.assert_close(torch.Tensor(p).T, torch.exp2((torch.Tensor(s).T + expected) * 0.7 - lse[:, None]))


def test_sums_of_far_tiles():
    c = SimpleNamespace(TOEPLITZ="line", BLOCK_N=128, SUBTILE_M=64, WARPS=8)
    ds = torch.randint(-9, 9, (128, 64)).float()
    none = torch.zeros(8, 8, 4)
    line = toeplitz_tiles.Line(None, None, -100)
    sums = toeplitz_gradient.FarSums(none, none)
    sums = toeplitz_gradient.summed(sums, ds.as_subclass(Tile), (line, None), -300, c)
    distance = -300 + torch.arange(128)[:, None] - torch.arange(64)
    assert sums.total.sum() == ds.sum()
    assert sums.weighted.sum() == (ds * (distance + 100)).sum()


def test_diagonals_of_near_tiles():
    M, N, pad = 256, 384, toeplitz_tiles.PAD
    found, ds = torch.zeros(M + N - 1 + 2 * pad), torch.randint(-9, 9, (M, N)).float()

    def add(at, x, **_):
        index, x = torch.broadcast_tensors(torch.as_tensor(at.at), x)
        found.index_add_(0, index.reshape(-1), torch.Tensor(x).reshape(-1))

    toeplitz_gradient.gl.atomic_add = add
    sizes = SimpleNamespace(queries=M, keys=N, kv_heads=1, group=1)
    c = SimpleNamespace(TOEPLITZ_GROUP=1, TOEPLITZ_BATCH=False)
    for row, n0 in itertools.product(range(0, M, 64), range(0, N, 128)):
        tile = ds[row : row + 64, n0 : n0 + 128].T.clone().as_subclass(Tile)
        toeplitz_gradient.add_diagonals.fn(tile, Memory(found), 0, 0, n0 - row, sizes, c)
    expected = torch.zeros(M + N - 1)
    index = torch.arange(N) - torch.arange(M)[:, None] + M - 1
    expected.index_add_(0, index.reshape(-1), ds.reshape(-1))
    assert torch.equal(found[pad : pad + M + N - 1], expected)
    assert not found[:pad].any()
    assert not found[pad + M + N - 1 :].any()


# --- kernels in Triton ---


def test_words_in_memory(interpreter):
    """A finite entry stays finite in the units of the scores, whatever the strides of the vector; and the gradient that
    comes along is 0 all over."""
    vector, words, gradient = interpreter(hopper_toeplitz_child.words_in_memory, 0.25)
    pad = toeplitz_tiles.PAD
    low, high = words[..., 0], words[..., 1]
    assert torch.equal(low[:, pad:-pad], (vector[:, :, 0] * 4).clamp(-3.4028234663852886e38, 3.4028234663852886e38)
                       .where(vector[:, :, 0].isfinite(), vector[:, :, 0]).flatten(0, 1))  # fmt: skip
    assert torch.equal(low[:, 1:], high[:, :-1])
    assert not low[:, :pad].any()
    assert not low[:, -pad:].any()
    assert not gradient.any()


@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_of_far_tiles(interpreter, causal):
    lse, stats, below, above, block = interpreter(hopper_toeplitz_child.far_stats, causal)
    B, H, M = lse.shape
    rows = -(-M // block)
    tiles_of = stats.view(2, B, H, rows, 2, block)[1].movedim(3, 0).reshape(2, B, H, rows * block)[..., :M]
    for found, number in zip(tiles_of, (below, above), strict=True):
        if causal and number is above:
            continue
        expected = (lse - number) * 1.4426950408889634
        torch.testing.assert_close(found, expected.masked_fill(lse == -torch.inf, torch.inf))


@pytest.mark.parametrize(("M", "N", "causal"), [(130, 90, False), (70, 130, True)])
def test_rows_are_computed_again(interpreter, M, N, causal):
    o, lse, expected, of_rows = interpreter(hopper_toeplitz_child.repair, M, N, causal)
    torch.testing.assert_close(lse, of_rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-3)


# --- what is declined ---


def test_declines():
    p = PROBLEMS[0]
    assert hopper.declines(p) is hopper.declines(p, "backward") is None
    for changed, words in (
        (replace(p, score=replace(p.score, softcap=5.0)), "alone: not beside a softcap"),
        (replace(p, bias=Operand(BRAIN, 1, 1, 1, 1500)), "alone: not beside another bias"),
        (replace(p, head_dim=256), "up to 128 dimensions"),
        (replace(p, score=replace(p.score, toeplitz=None)), "where it is known what far distances have"),
        (replace(p, parts=PartOperands(toeplitz=Operand(torch.float64, 1, 2, 1, 2999))), "in float32, not float64"),
    ):
        assert words in hopper.declines(changed)
    assert "in any order" in hopper.declines(replace(p, deterministic=True), "backward")
    untrained = replace(p, deterministic=True, parts=replace(p.parts, grads=()))
    assert hopper.declines(untrained, "backward") is None
