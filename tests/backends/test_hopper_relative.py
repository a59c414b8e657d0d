"""A bias by distance on Hopper, without a GPU: which tiles read values, what becomes of them in registers, where their
gradient goes, and how values lie in memory. The kernels' own functions, run as Python on integers and tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import hopper_terms_child
import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, gluon, numbers

from tilewise.spec import relative as distances_of
from tilewise.spec import tiles
from tilewise.spec.operands import PART_WORDS, PartOperands, TensorSpec
from tilewise.spec.relative import Relative, gather, scatter, skewed, tile_kind
from tilewise.spec.score import Band, Distances, Score

pytest.importorskip("triton")

from tilewise.backends.gluon import relative, score, values
from tilewise.backends.gluon import scheduler as tile_scheduler
from tilewise.backends.gluon import varlen as packed
from tilewise.backends.gluon import varlen_values as packed_values
from tilewise.backends.gluon.sm90.backward import kernel as backward_kernel
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward import relative as range_tiles
from tilewise.backends.gluon.sm90.backward import scheduler as backward_scheduler
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.forward import bias as bias_tiles
from tilewise.backends.gluon.sm90.forward import kernel as forward_kernel
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.backends.kernels.statistics import RowResults

BRAIN, FLOAT = torch.bfloat16, torch.float32
VALUES = PART_WORDS["query"]


def problem(M, N, lo, count, band=None, dim=128, reverse=False, outside="zero", grad=True, **more):
    """Values of each of six query heads."""
    return kernel_stubs.problem(
        2, 6, 2, M, N, dim,
        score=Score(0.1, None, band or Band(), query=Distances("query", lo, count, reverse, outside)),
        parts=PartOperands(query=TensorSpec(BRAIN, 2, 6, M, count), grads=("query",) if grad else ()), **more,
    )  # fmt: skip


def inkling(M, N, count=1025, **more):
    """Causal, of distances up to 0."""
    return problem(M, N, N - M - count + 1, count, Band(None, N - M), **more)


PROBLEMS = [
    inkling(700, 700, 513),
    inkling(400, 900, 130),
    inkling(900, 400, 65),
    inkling(129, 129),
    inkling(500, 500, 1),
    problem(700, 700, -100, 201),
    problem(700, 900, 300, 65),
    problem(900, 400, -800, 300),
    problem(300, 500, -2000, 100),
    problem(400, 500, -399, 899),
    problem(400, 500, 50, 1000),
    problem(700, 700, -300, 100, Band(-500, 20)),
    problem(700, 700, -300, 301, Band(-300, 0), outside="hidden"),
    problem(700, 700, -30, 41, Band(-400, None)),
    problem(700, 700, -600, 700, Band(-290, 40)),  # a window inside the distances
    problem(300, 500, -100, 601, Band(-50, 260), outside="hidden"),
    problem(300, 900, 512, 129, Band(None, 640)),  # the tail of a longer sequence: tiles begin with the first entry
    problem(300, 400, 768, 65, Band(None, 832)),  # no pair has an entry
]
# Each with two of the three widths of tiles by turns, and each width with twelve of them.
by_turns = pytest.mark.parametrize(
    ("p", "dim"),
    [
        pytest.param(p, dim, id=f"{p.queries}x{p.keys} {p.score.query} {p.score.band}, {dim}")
        for n, p in enumerate(PROBLEMS)
        for dim in ((32, 64), (64, 128), (128, 32))[n % 3]
    ],
)


def forward_arguments(p):
    """``(terms, sizes, c)``."""
    p = values.as_matrix(p)
    chosen = config.forward_config(p)
    return numbers(score.score_terms(p)), launch._sizes(p, chosen, 132), numbers(launch._compiled(p, chosen, False))


def backward_arguments(p):
    p = values.as_matrix(p)
    chosen = config.backward_config(p)
    c = numbers(backward_launch._compiled(p, chosen, config.backward_width(p), False))
    return numbers(score.score_terms(p)), backward_launch._sizes(p, chosen, torch.device("meta"))[0], c


class Tile(torch.Tensor):
    """With what the kernels read of a tensor."""

    type = SimpleNamespace(layout=None)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the kernels as Python functions."""
    arange = lambda start, end, layout: torch.arange(start, end).as_subclass(Tile)  # noqa: E731
    gl = MagicMock(**vars(gluon(arange=arange, zeros=MagicMock())))
    modules = backward_kernel, backward_scheduler, forward_kernel, range_tiles, score
    kernel_stubs.replace(monkeypatch, relative, tile_scheduler, bias_tiles, *modules, gl=gl)
    monkeypatch.setattr(tile_scheduler, "key_tiles", tiles.key_tiles)
    monkeypatch.setattr(backward_scheduler, "query_tiles", tiles.query_tiles)
    kernel_stubs.replace(monkeypatch, relative, reach=distances_of.reach, state=distances_of.state)
    as_python(monkeypatch, relative, "range_state column_of in_range", range_tiles)
    for module, names in (
        (relative, "range_state column_of in_range"),
        (tile_scheduler, "head_at work_tile_at work_tile_count entry_at first_entry first_full"),
        (bias_tiles, "first_below_range first_not_inside without_range bias_box"),
    ):
        for name in names.split():
            users = (relative, tile_scheduler, bias_tiles, forward_kernel)
            as_python(monkeypatch, module, name, *(user for user in users if hasattr(user, name)))
    as_python(monkeypatch, score, "bias_of", bias_tiles)
    as_python(monkeypatch, packed, "box_of", bias_tiles, range_tiles)
    monkeypatch.setattr(packed, "RAGGED_AXIS", 1 << 30)
    as_python(monkeypatch, packed_values, "first_column", relative)
    as_python(monkeypatch, packed_values, "FRONT STEP")
    as_python(monkeypatch, range_tiles, "tile_state corner_of next_corner without_range places gradient_state")
    monkeypatch.setattr(range_tiles, "minus_zero", lambda: -0.0)
    as_python(monkeypatch, backward_scheduler, "head_and_tile heads_at_once groups_per_broadcast key_tile")
    for module in (relative, bias_tiles, range_tiles):
        monkeypatch.setattr(module, "CUT", distances_of.CUT)
    for name in ("reach", "state", "INSIDE"):
        monkeypatch.setattr(range_tiles, name, getattr(distances_of, name))


# --- which tiles read values ---


def kinds(p, rows, cols):
    """`tile_kind`, and whether a pair of the tile is visible."""
    M, N, band = p.queries, p.keys, p.score.band
    rows, cols = slice(rows.start, min(rows.stop, M)), slice(cols.start, min(cols.stop, N))
    kind = tile_kind(Relative(torch.empty(0), p.score.query), rows, cols)
    i, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(cols.start, cols.stop)
    lo, hi = tiles.limits(band)
    return kind, bool(((j - i >= lo) & (j - i <= hi)).any())


@by_turns
def test_the_forwards_roles_take_the_same_tiles(monkeypatch, p, dim):
    """What a loading warp fills is what its warpgroup waits for, one after the other; every visible pair with an entry
    is in such a tile; the loop that knows of no bias has none."""
    few = PartOperands(query=TensorSpec(BRAIN, 1, 2, p.queries, p.score.query.count))
    p = replace(p, head_dim=dim, value_dim=dim, batch=1, heads=2, kv_heads=1, parts=few)
    terms, sizes, c = forward_arguments(p)
    ranged = c.RANGE_LO or c.RANGE_HI
    filled, events = [], []  # where each slot's tile comes from, None for O's; what is taken and given back
    visited = []
    for module in (bias_tiles, forward_kernel):
        monkeypatch.setattr(module, "next_tile_index", lambda tile_index, *_: tile_index + 1)
    for name in ("slot_of", "use_of"):
        monkeypatch.setattr(bias_tiles, name, lambda pipeline, n, *_: n)
    monkeypatch.setattr(bias_tiles, "fill_at", lambda pipeline, n, use, source, at: filled.append((n, tuple(at))))
    monkeypatch.setattr(bias_tiles, "hand_out_slot", lambda pipeline, n, c, warpgroup: filled.append((n, None)))
    # of what computes, all but the loops
    names = "accumulator sums_of_rows slot_of use_of wait_full release release_after_loads tma times_v finish tma_store"
    for name in (*names.split(), "parts_of_q", "in_registers", "fence_async_shared", "warp_scheduler_barrier_arrive"):
        monkeypatch.setattr(forward_kernel, name, MagicMock())
    monkeypatch.setattr(forward_kernel, "warpgroup_mma_wait", lambda *_, deps: deps)
    monkeypatch.setattr(
        forward_kernel, "slot_for_o", lambda pipelines, n, *_: events.append(("take", n, None)) or MagicMock()
    )

    def skip_tile(pipelines, step, *_):
        if not ranged:
            events.extend([("take", step, "skipped"), ("release", step)])

    def mma_one_n_block(
        q, state, x, pipelines, words, step, tile, i, terms, sizes, c, WARPGROUP, FIRST, BAND, RANGE, toeplitz
    ):
        entry = tile_scheduler.entry_at(i, tile, c)
        row, n0 = tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N
        found = relative.range_state(row, 64, n0, c.BLOCK_N, terms) if ranged else distances_of.CUT
        assert BAND or not entry.cut
        assert RANGE != "outside" or found == distances_of.BELOW
        assert RANGE != "inside" or found == distances_of.INSIDE
        assert RANGE == "inside" or not c.SORTED or FIRST or (BAND and c.PEELED) or found != distances_of.INSIDE
        visited.append((tile.b, tile.h, row, n0))
        nth = state.taken if ranged or c.O_IN_BIAS else step
        if found >= distances_of.CUT:
            at = (tile.b, tile.h, row, n0 + terms.column)
            events.extend([("take", nth, at), ("release", nth)])
            state = state._replace(taken=state.taken + 1)
        if FIRST and c.O_IN_BIAS and nth > 0:
            events.append(("release", nth - 1))
        return state

    monkeypatch.setattr(forward_kernel, "box_of", lambda first, count, b, h, row, c: [b, h, row, 0])
    monkeypatch.setattr(forward_kernel, "skip_tile", skip_tile)
    monkeypatch.setattr(forward_kernel, "mma_one_n_block", mma_one_n_block)
    for warpgroup in range(c.WARPGROUPS):
        for found in (filled, events, visited):
            found.clear()
        x = SimpleNamespace(sink=None, seed=None, bias=None, q=MagicMock(), o=None, o_low=None)
        bias_tiles.load_bias.fn(x, MagicMock(), terms, sizes, c, warpgroup)
        forward_kernel.compute.fn(x, MagicMock(), RowResults(None, None), terms, sizes, c, warpgroup)
        check_ring(filled, events, c.BIAS_STAGES)
        read = {(b, h, row, col - terms.column) for _, at in filled if at for b, h, row, col in [at]}
        assert len(visited) == len(set(visited))
        every = 64 * c.WARPGROUPS
        for row, n0 in itertools.product(range(64 * warpgroup, p.queries, every), range(0, p.keys, c.BLOCK_N)):
            kind, seen = kinds(p, slice(row, row + 64), slice(n0, n0 + c.BLOCK_N))
            assert not seen or (0, 1, row, n0) in visited
            if seen and kind in ("inside", "cut"):
                assert (0, 1, row, n0) in read
            if kind == "zero" and (c.RANGE_LO and c.RANGE_HI) and n0 + c.BLOCK_N <= p.keys and row + 64 <= p.queries:
                assert (0, 1, row, n0) not in read


def check_ring(filled, events, stages):
    """One warp fills a pipeline's slots, in order, when they are free; others take them in that order and release
    them."""
    taken = [event[1:] for event in events if event[0] == "take"]
    assert [n for n, _ in filled] == [n for n, _ in taken] == list(range(len(filled)))
    assert all(at in (where, "skipped") for (_, where), (_, at) in zip(filled, taken, strict=True))
    ready, released = 0, set()
    for kind, n, *_ in events:
        while ready < len(filled) and (ready < stages or ready - stages in released):
            ready += 1
        assert kind == "release" or n < ready, f"waits for ever for tile {n}"
        if kind == "release":
            assert n not in released
            released.add(n)


@by_turns
def test_the_backward_knows_the_tile_that_follows(p, dim):
    """Its bias is read a step ahead, by where it is: tile after tile, head after head."""
    p = replace(p, head_dim=dim, value_dim=dim)
    terms, sizes, c = backward_arguments(p)
    for program in range(sizes.key_tiles):
        work = backward_scheduler.work_tile_of.fn(program, 0, terms, sizes, c)
        visits = [
            backward_scheduler.entry_at.fn(i, None, work, c)[0]
            for _ in range(sizes.group)
            for i in range(work.end - work.begin)
        ]
        if c.PEELED:  # the loops follow each other
            assert terms.HAS_LO or work.full_end == work.end
            assert terms.HAS_HI or terms.HAS_LO or c.RAGGED or work.full_begin == work.begin
        for m, following in itertools.pairwise(visits):
            assert range_tiles.next_corner(m, work, c) == work.n0 - following * c.BLOCK_M
        for m in visits:
            found = range_tiles.tile_state(work.n0 - m * c.BLOCK_M, terms, c) if c.RANGE_LO or c.RANGE_HI else 2
            kind, seen = kinds(p, slice(m * c.BLOCK_M, (m + 1) * c.BLOCK_M), slice(work.n0, work.n0 + c.BLOCK_N))
            assert found >= distances_of.CUT or kind == "zero" or not seen


@by_turns
def test_the_backwards_loops(monkeypatch, p, dim):
    """Each tile once, of each head; a loop that knows how its tiles lie to the range is right, and each tile that has a
    bias starts from its own, as it lies to the range."""
    few = PartOperands(query=TensorSpec(BRAIN, 1, 2, p.queries, p.score.query.count))
    p = replace(p, head_dim=dim, value_dim=dim, batch=1, heads=2, kv_heads=1, parts=few)
    terms, sizes, c = backward_arguments(p)
    names = "accumulator slot_of use_of wait_full warps_barrier operand counters_at signal_stored wait_zeroed sums_of"
    for name in (*names.split(), "hide_keys", "fence_async_shared", "drop_what_is_not_finite"):
        monkeypatch.setattr(backward_kernel, name, MagicMock())
    as_python(monkeypatch, backward_scheduler, "entry_at steps_of tile_list_of", backward_kernel)
    as_python(monkeypatch, range_tiles, "corner_of next_corner begin_of_part part_name", backward_kernel)
    monkeypatch.setattr(backward_kernel, "ABSENT", 0)

    def start(step, corner, how="any"):
        return step, corner, how

    def bwd_one_m_block(
        state, x, rows, dq_pipeline, shared, words, step, steps, work, h, m, kind, terms, sizes, c, *_, RANGE="any"
    ):
        corner = work.n0 - m * c.BLOCK_M
        found = range_tiles.tile_state(corner, terms, c) if c.RANGE_LO or c.RANGE_HI else distances_of.INSIDE
        visited.append((h, m))
        assert (kind != 0) == (m < work.full_begin or m >= work.full_end)
        if RANGE == "outside":
            assert found == distances_of.BELOW
            assert state.start == 0
            return state
        assert state.start[:2] == (step, corner)
        for how in (state.start[2], RANGE):
            assert found >= {"any": 0, "near": distances_of.CUT, "inside": distances_of.INSIDE}[how]
        if RANGE == "inside":  # its dS is stored as a whole
            assert range_tiles.gradient_state(corner, terms, c) == distances_of.INSIDE
        assert kind or not c.SORTED or {0: "outside", 2: "near", 3: "inside"}[found] == RANGE
        return state._replace(start=start(step + 1, range_tiles.next_corner(m, work, c), RANGE))

    first_start_of = MagicMock(side_effect=lambda rows, step, needed, corner, *_: start(step, corner))
    monkeypatch.setattr(backward_kernel, "first_start_of", first_start_of)
    monkeypatch.setattr(backward_kernel, "bwd_one_m_block", bwd_one_m_block)
    monkeypatch.setattr(backward_kernel, "begin_ahead", MagicMock())
    for program in range(sizes.key_tiles):
        work = backward_scheduler.work_tile_of.fn(program, 0, terms, sizes, c)
        monkeypatch.setattr(backward_kernel, "work_tile_at", lambda *_, work=work: work)
        visited, x = [], SimpleNamespace(k=MagicMock(), seed=None, tile_list=None)
        steps = backward_kernel.compute_work_tile.fn(
            program, 0, 5, x, None, None, None, None, MagicMock(), None, terms, sizes, c
        )
        assert visited == [(h, m) for h in range(2) for m in reversed(range(work.begin, work.end))]
        assert steps == 5 + len(visited)


# --- what becomes of a tile ---


def box(view, row, col, rows, cols):
    """What TMA reads: 0 outside."""
    found = torch.zeros(rows, cols)
    r, first, last = slice(row, min(row + rows, view.shape[0])), max(col, 0), min(col + cols, view.shape[1])
    if r.start < r.stop and first < last:
        found[: r.stop - r.start, first - col : last - col] = view[r, first:last]
    return found.as_subclass(Tile)


def add_box(view, row, col, tile):
    """TMA's reduce-add, each element on its own: elements of one box may share memory."""
    for r in range(min(tile.shape[0], view.shape[0] - row)):
        first, last = max(col, 0), min(col + tile.shape[1], view.shape[1])
        if first < last:
            view[row + r, first:last] += tile[r, first - col : last - col]


def store_box(view, row, col, tile):
    """TMA's store."""
    for r in range(min(tile.shape[0], view.shape[0] - row)):
        first, last = max(col, 0), min(col + tile.shape[1], view.shape[1])
        if first < last:
            view[row + r, first:last] = tile[r, first - col : last - col]


def drawn(p):
    """Numbers that no sum rounds, one row a query, in memory that is NaN between the rows; and their `Relative`."""
    generator = torch.Generator().manual_seed(0)
    like = torch.empty(1, 1, p.queries, p.score.query.count)
    like = like.to(BRAIN)  # whose 16 bytes are eight
    laid = values.empty_values(like, p.score.query)
    laid = torch.full(laid._base.shape, torch.nan)[:, :, : p.queries, : laid.shape[3]]
    entries = laid[..., values.front_of(p.score.query, BRAIN) :]
    entries.copy_(torch.randint(1, 999, like.shape, generator=generator).float())
    return laid, Relative(entries, p.score.query)


def seen_of(p):
    i, j = torch.arange(p.queries)[:, None], torch.arange(p.keys)
    lo, hi = tiles.limits(p.score.band)
    return (j - i >= lo) & (j - i <= hi)


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: f"{p.queries}x{p.keys} {p.score.query} {p.score.band}")
def test_a_tile_of_the_forward(p):
    terms, _, c = forward_arguments(p)
    laid, by_distance = drawn(p)
    view, expected, seen = skewed(laid)[0, 0], gather(by_distance, p.queries, p.keys)[0, 0], seen_of(p)
    assert terms.column % 8 == c.BLOCK_N % 8 == 0, "TMA's boxes begin at multiples of 16 bytes"
    for row, n0 in itertools.product(range(0, p.queries, 64), range(0, p.keys, c.BLOCK_N)):
        found = box(view, row, n0 + terms.column, 64, c.BLOCK_N)
        read = True
        if c.RANGE_LO or c.RANGE_HI:
            state = relative.range_state(row, 64, n0, c.BLOCK_N, terms)
            read = state >= distances_of.CUT
            if not read:
                found = torch.zeros(64, c.BLOCK_N)
            elif state == distances_of.CUT:
                found = bias_tiles.without_range(found, row - n0, terms, c)
        want, visible = expected[row : row + 64, n0 : n0 + c.BLOCK_N], seen[row : row + 64, n0 : n0 + c.BLOCK_N]
        found = found[: want.shape[0], : want.shape[1]]
        assert torch.equal(found[visible], want[visible])
        assert n0 + terms.column >= 0 or not read or not visible.any(), "TMA takes no negative column"


@pytest.mark.parametrize(("p", "dim"), [*((p, 128) for p in PROBLEMS), *((p, 64) for p in PROBLEMS[:9:2])], ids=str)
def test_tiles_of_the_backward(interpreter, p, dim):
    """What scores start from, and what dS adds to the values' gradient: each entry one number that is not 0."""
    p = replace(p, head_dim=dim, value_dim=dim)
    terms, _, c = backward_arguments(p)
    laid, by_distance = drawn(p)
    view, expected, seen = skewed(laid)[0, 0], gather(by_distance, p.queries, p.keys)[0, 0], seen_of(p)
    assert terms.column % 8 == c.BLOCK_N % 8 == 0, "TMA's boxes begin at multiples of 16 bytes"
    stored = 0
    ds = torch.randint(1, 999, (p.queries, p.keys), generator=torch.Generator().manual_seed(1)).float()
    ds = torch.where(seen, ds, torch.nan)  # as of a row that has seen NaN: what is hidden must not leave
    before = interpreter(hopper_terms_child.zeroed, p.queries, p.keys, p.score.query, p.score.band, dim)
    assert before.isnan().eq(before[:, :1].isnan()).all()
    assert not before[~before.isnan()].any()
    sums, touched = torch.zeros_like(laid), torch.zeros_like(laid)
    front = values.front_of(p.score.query, BRAIN)
    sums[..., front:] = before[:, 1:]
    for m0, n0 in itertools.product(range(0, p.queries, c.BLOCK_M), range(0, p.keys, c.BLOCK_N)):
        state = range_tiles.tile_state(n0 - m0, terms, c) if c.RANGE_LO or c.RANGE_HI else distances_of.INSIDE
        rows, cols = slice(m0, m0 + c.BLOCK_M), slice(n0, n0 + c.BLOCK_N)
        want, visible = expected[rows, cols], seen[rows, cols]
        tile = box(ds, m0, n0, c.BLOCK_M, c.BLOCK_N)
        gradient_state = range_tiles.gradient_state(n0 - m0, terms, c)
        for i in range(c.M_SUBTILES):
            part = slice(i * c.SUBTILE_M, (i + 1) * c.SUBTILE_M)
            found = box(view, m0, n0 + terms.column, c.BLOCK_M, c.BLOCK_N)[part]
            if state < distances_of.CUT:
                found = torch.zeros_like(found)
            elif state == distances_of.CUT:
                found = range_tiles.without_range(found.T, n0 - m0, i, terms, c).T
            if gradient_state == distances_of.CUT:
                tile[part] = range_tiles.of_entries.fn(tile[part].T, n0 - m0, i, terms, c).T
            found = found[: want[part].shape[0], : want.shape[1]]
            assert torch.equal(found[visible[part]], want[part][visible[part]])
        if gradient_state == distances_of.INSIDE:
            assert visible.any(), "a tile that no program visits"
            store_box(skewed(sums)[0, 0], m0, n0 + terms.column, tile)
            stored += 1
        elif visible.any() and gradient_state == distances_of.CUT:
            rest = torch.signbit(tile)  # nothing else is negative here
            assert (tile[rest] == 0).all()
            assert not tile.isnan().any()
            add_box(skewed(sums)[0, 0], m0, n0 + terms.column, tile)
        if visible.any() and gradient_state >= distances_of.CUT:
            add_box(skewed(touched)[0, 0], m0, n0 + terms.column, (tile != 0).float())
    assert touched.max() <= 1
    assert bool(stored) == before.isnan().any()
    assert torch.equal(sums[..., front:], scatter(by_distance, ds.nan_to_num()[None, None]))


class Slots:
    """A pipeline of tiles in shared memory, as tensors that remember nothing but what is stored."""

    def __init__(self, slots, rows, cols):
        self.of, self.dtype = torch.full((slots, rows * cols), torch.nan), torch.float32

    def index(self, n):
        return Slot(self.of[n], n)


class Slot:
    def __init__(self, x, n):
        self.x, self.n = x, n

    def reshape(self, shape):
        return Slot(self.x.view(*shape), self.n)

    def slice(self, start, length, dim):
        return Slot(self.x.narrow(dim, start, length), self.n)

    def permute(self, order):
        return Slot(self.x.permute(*order), self.n)

    def store(self, x):
        assert x.shape == self.x.shape
        self.x.copy_(x)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: f"{p.queries}x{p.keys} {p.score.query} {p.score.band}")
def test_how_a_gradient_leaves(monkeypatch, p, dim):
    """Pair by pair: a tile is stored where all pairs are visible and have an entry, and where some do what they have is
    added, from the slot behind the pipeline, once all of it is there."""
    p = replace(p, head_dim=dim, value_dim=dim)
    terms, _, c = backward_arguments(p)
    left, waits = [], []
    for name in ("tma_store", "tma_add"):
        monkeypatch.setattr(range_tiles, name, lambda to, at, slot, name=name: left.append((name, to, at, slot.n)))
    monkeypatch.setattr(range_tiles, "warps_barrier", lambda: waits.append(1))
    monkeypatch.setattr(range_tiles, "of_entries", range_tiles.of_entries.fn)
    (lo, hi), distances = tiles.limits(p.score.band), p.score.query
    lo, hi = max(lo, distances.lo), min(hi, distances.hi)
    ds = torch.arange(1.0, c.BLOCK_M * c.BLOCK_N + 1).view(c.BLOCK_M, c.BLOCK_N)
    for m0, n0 in itertools.product(range(0, p.queries, c.BLOCK_M), range(0, p.keys, c.BLOCK_N)):
        pipeline = Slots(c.STAGES + 1, c.BLOCK_M, c.BLOCK_N)
        left.clear()
        waits.clear()
        distance = n0 - m0 + torch.arange(c.BLOCK_N) - torch.arange(c.BLOCK_M)[:, None]
        has = (distance >= lo) & (distance <= hi)
        for i in range(c.M_SUBTILES):
            tile = ds[i * c.SUBTILE_M : (i + 1) * c.SUBTILE_M].T.as_subclass(Tile)
            range_tiles.keep_entries.fn(tile, pipeline, n0 - m0, i, terms, c)
        work = SimpleNamespace(n0=n0, seq=packed.SeqInfo(0, 0, p.queries, p.keys, 0))
        range_tiles.let_out.fn("dvalues", pipeline, 0, 1, 2, m0 // c.BLOCK_M, work, terms, c)
        at = [1, 2, m0, n0 + terms.column]
        if has.all():
            assert left == [("tma_store", "dvalues", at, 0)]
        elif has.any():
            assert left == [("tma_add", "dvalues", at, c.STAGES)]
            assert waits == [1]
            assert torch.equal(pipeline.of[c.STAGES].view_as(ds), torch.where(has, ds, 0.0))
        else:
            assert left == waits == []
        assert pipeline.of[: c.STAGES].isnan().all()


@pytest.mark.parametrize(("queries", "keys", "lo"), [(300, 300, -90), (70, 400, -5), (400, 70, 3), (70, 400, -1000)])
def test_a_packed_tile_counts_from_the_ends_of_its_sequence(queries, keys, lo):
    """Both passes, by the distances of a tile's first pair; and its box, by the row of its first query."""
    p = problem(4000, 4000, lo, 65, Band(None, 0))
    seq = packed.SeqInfo(1000, 2000, queries, keys, keys - queries)
    column = 256 + -(-(1000 - (keys - queries) - lo) // 8) * 8
    terms, _, c = backward_arguments(p)
    c.PACKED, c.BLOCK_M = True, 64
    for m, n0 in itertools.product(range(-(-queries // 64)), range(0, keys, c.BLOCK_N)):
        work = SimpleNamespace(n0=n0, seq=seq)
        first = n0 - (64 * m + keys - queries)  # key position less query position
        assert range_tiles.corner_of(m, work, c) == first
        at = [1 << 30, 1000 + queries, 3, (1 << 30) - queries + 64 * m, max(n0 + column, 0)]
        tile = SimpleNamespace(seq=seq, row0=64 * m, h=3, last=-(-keys // c.BLOCK_N) - 1, count=-(-keys // c.BLOCK_N))
        c.BIAS_GROUP = 1
        assert bias_tiles.bias_box(tile, 0, 64 * m, n0, terms, c) == at
        has = relative.range_state(64 * m + keys - queries, 64, n0, c.BLOCK_N, terms)
        assert has == range_tiles.tile_state(first, terms, c)
        c.RANGE_LO = True
        below = bias_tiles.first_below_range(tile, 0, terms, c, 0)
        lowest = 64 * m + keys - queries + terms.range_lo  # key of the first query's first entry
        assert below == sum(n0 + c.BLOCK_N > lowest for n0 in range(0, keys, c.BLOCK_N))


@pytest.mark.parametrize("band", [Band(-290, 40), Band(None, None)], ids=str)
def test_zeros_of_every_head(interpreter, band):
    """The same of each head of each batch element."""
    found = interpreter(hopper_terms_child.zeroed, 300, 300, Distances("query", -100, 201), band, 128, 3)
    assert found.shape[:2] == (3, 2)
    assert torch.equal(found.isnan(), found[:1, :1].isnan().expand_as(found))
    assert not found.nan_to_num().any()


# --- what is declined ---


# --- rows that are computed again ---


@pytest.mark.parametrize(
    ("M", "N", "lo", "count", "causal", "reverse"),
    [(70, 75, -20, 13, False, False), (139, 75, -90, 27, True, True), (70, 75, 2, 1, True, False)],
)
def test_rows_are_computed_again(interpreter, M, N, lo, count, causal, reverse):
    o, lse, expected, of_rows = interpreter(hopper_terms_child.repair_beside_values, M, N, lo, count, causal, reverse)
    torch.testing.assert_close(o, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, of_rows, rtol=1e-3, atol=1e-3)
