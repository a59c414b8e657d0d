"""Far tiles on Hopper whose probabilities are 0, without a GPU: how far a head reaches, which tiles are left out, and
that results do not change. The kernels in Triton run in its interpreter, the schedule as Python on integers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import hopper_terms_child
import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, gluon

from tilewise.backends import Inputs
from tilewise.spec import tiles
from tilewise.spec.bias_components import Parts
from tilewise.spec.operands import PartOperands, TensorSpec
from tilewise.spec.score import Band, Far, Score

pytest.importorskip("triton")

from test_hopper_toeplitz import backward_arguments, forward_arguments

from tilewise.backends.gluon import scheduler as tile_scheduler
from tilewise.backends.gluon import sm90 as hopper
from tilewise.backends.gluon import toeplitz
from tilewise.backends.gluon.sm90.backward import scheduler as backward_scheduler
from tilewise.backends.gluon.sm90.common import config

HALF, FLOAT = torch.float16, torch.float32
UNKNOWN = 1 << 29
SCALE = 0.25


def problem(M=1500, N=1500, lo=0, hi=0, band=None, B=2, heads=4, kv_heads=2, dim=64, linear=True, shared=False, **more):
    vector = TensorSpec(FLOAT, 1 if shared else B, 1 if shared else heads, 1, M + N - 1)
    score = Score(SCALE, None, band or Band(), toeplitz=Far(lo, hi, linear))
    more = {"parts": PartOperands(toeplitz=vector, grads=("toeplitz",)), "score": score, **more}
    return kernel_stubs.problem(B, heads, kv_heads, M, N, dim, **more)


def drawn(p, below, above):
    """Inputs, with a vector that is drawn between far distances, and beyond falls on lines by (B|1, H|1), and do."""
    generator = torch.Generator().manual_seed(p.queries + p.keys)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    far, distance = p.score.toeplitz, torch.arange(1 - p.queries, p.keys)
    q = normal(p.batch, p.heads, p.queries, p.head_dim).to(HALF)
    k, v = (normal(p.batch, p.kv_heads, p.keys, p.head_dim).to(HALF) for _ in range(2))
    near = normal(p.parts.toeplitz.batch, p.parts.toeplitz.heads, 1, len(distance))
    lines = below[:, :, None, None] * (distance - far.lo) + 1, 2 - above[:, :, None, None] * (distance - far.hi)
    vector = torch.where(distance <= far.lo, lines[0], torch.where(distance >= far.hi, lines[1], near))
    return Inputs(q, k, v, None, None, None, Parts(toeplitz=vector)), normal(*q.shape).to(HALF)


# --- how far a head reaches ---


def expected(p, inputs, do, union):
    """By float64, distance by distance; what is unknown is ±UNKNOWN."""
    q, k, v = (x.double() for x in inputs[:3])
    vector = inputs.parts.toeplitz.double().expand(p.batch, p.heads, 1, -1)
    far, sure = p.score.toeplitz, toeplitz.sure_distance(p)
    found = torch.empty(p.batch, p.heads, 2, dtype=torch.int64)
    distance = torch.arange(1 - p.queries, p.keys)
    for b in range(p.batch):
        for h in range(p.heads):
            hk, w = h // p.group, vector[b, h, 0]
            largest = SCALE * q[b, h].norm(dim=-1).max() * k[b, hk].norm(dim=-1).max()
            needed = 2 * 1.01 * largest + 120 + max(0.0, math.log(v[b, hk].norm(dim=-1).max().nan_to_num(math.inf)))
            finite = all(
                x.isfinite().all() for x in (q[b, h], k[b, hk], v[b, hk], *(() if do is None else (do[b, h],)))
            )
            for side, (at, end) in enumerate(((far.lo, 0), (far.hi, -1))):
                ends = w[[at + p.queries - 1, end, sure + p.queries - 1]]
                falls = ends.isfinite().all() and finite and ends[1] < ends[0]
                counts = distance[w >= ends[2] - needed]
                reach = counts[0 if side == 0 else -1] if falls else distance[end] - (1, -1)[side]
                outside = reach == distance[0] if side == 0 else reach == distance[-1]
                known = falls and not outside
                reach = min(int(reach), far.lo) if side == 0 else max(int(reach), far.hi)
                found[b, h, side] = reach if known else (-UNKNOWN, UNKNOWN)[side]
    if union:
        found = torch.stack([found[..., 0].unflatten(1, (-1, p.group)).amin(2),
                             found[..., 1].unflatten(1, (-1, p.group)).amax(2)], -1)  # fmt: skip
    return found


def spoil(name, inputs, do, sure):
    """Something in batch element 0, head 1, with key/value head 0, or in all vectors' third."""
    vector = inputs.parts.toeplitz
    if name in ("q nan", "q inf", "do nan"):
        (do if name[0] == "d" else inputs.q)[0, 1, 7, 3] = math.nan if name.endswith("nan") else math.inf
    elif name in ("k nan", "k inf", "v nan", "v inf", "v large"):
        (inputs.k if name[0] == "k" else inputs.v)[0, 0, -1, 5] = {"nan": math.nan, "inf": math.inf}.get(name[2:], 6e4)
    elif name == "rising":
        vector[:, 2] = -vector[:, 2]
    elif name == "level":
        vector[:, 2] = 3.0
    elif name in ("sure inf", "sure -inf"):
        vector[:, 2, :, inputs.q.shape[2] - 1 + sure] = math.inf if name == "sure inf" else -math.inf
    elif name in ("far inf", "far -inf"):  # where the lines begin
        vector[:, 2, :, inputs.q.shape[2] - 1 + torch.tensor([-30, 190])] = math.inf if name == "far inf" else -math.inf
    elif name in ("end -inf", "end nan"):
        vector[:, 2, :, [0, -1]] = -math.inf if name == "end -inf" else math.nan
    elif name == "large":
        vector[:, 2] = vector[:, 2] * 1e6 + 3e7


FORWARD = ["", "q nan", "q inf", "k inf", "v nan", "v inf", "v large", "rising", "level", "sure -inf", "sure inf",
           "far inf", "far -inf", "end -inf", "end nan", "large"]  # fmt: skip
BACKWARD = ["", "k nan", "do nan", "v inf", "sure -inf"]


@pytest.mark.parametrize(("spoilt", "backward"), [*((x, False) for x in FORWARD), *((x, True) for x in BACKWARD)])
def test_how_far_a_head_reaches(interpreter, spoilt, backward):
    """Never less than what counts, and little more: of the steepest head a few distances, of the flattest all."""
    p = problem(1030, 1530, lo=-30, hi=190, dim=24)
    below = torch.tensor([[1.0, 2.0, 0.5, 90.0], [0.7, 1.5, 0.6, 1e-3]])
    inputs, do = drawn(p, below, below.flip(1))
    spoil(spoilt, inputs, do, toeplitz.sure_distance(p))
    found = interpreter(hopper_terms_child.reaches, p, inputs, do if backward else None).long()
    wanted = expected(p, inputs, do if backward else None, backward)
    unknown = wanted.abs() == UNKNOWN
    assert (found[unknown].abs() >= 1029).all()
    lo, hi = (wanted - found)[..., 0], (found - wanted)[..., 1]
    for more, known in ((lo, ~unknown[..., 0]), (hi, ~unknown[..., 1])):
        assert known.any()
        assert (more[known] >= 0).all()
        assert (more[known] <= 8).all()


@pytest.mark.parametrize("shared", [False, True])
def test_near_distances_count(interpreter, shared):
    """However steep the lines are; and the distance at which all queries see a key need not be 0."""
    p = problem(1030, 1530, lo=-30, hi=190, dim=24, shared=shared)
    assert toeplitz.sure_distance(p) == 80
    steep = torch.full((1, 1) if shared else (2, 4), 500.0)
    inputs, _ = drawn(p, steep, steep)
    found = interpreter(hopper_terms_child.reaches, p, inputs, None).long()
    assert (found[..., 0] <= -30).all()
    assert (found[..., 0] >= -35).all()
    assert (found[..., 1] >= 190).all()
    assert (found[..., 1] <= 195).all()


def test_who_asks(monkeypatch):
    """Calls of many queries and keys beside a line, whose every query sees a key at the same distance."""

    def asks(p):
        found = forward_arguments(p)[2].UNDERFLOWS
        assert found == backward_arguments(p)[2].UNDERFLOWS
        assert ("underflow" in hopper.tiles(p)) == found
        return found

    p = problem()
    for yes in (p, problem(band=Band(None, 0)), problem(1024, 9000), problem(band=Band(-900, None)), problem(dim=128)):
        assert asks(yes)
        assert config.forward_config(yes).dynamic
    mask = TensorSpec(torch.bool, 1, 1, 1500, 1500)
    parts = {"parts": None, "score": Score(SCALE, None, Band())}
    for no in (problem(1023, 1500), problem(1500, 1100), problem(linear=False), problem(band=Band(None, -1)),
               problem(band=Band(1, None)), replace(p, mask=mask), replace(p, **parts),
               problem(1024, 1500, lo=1499, hi=1499, band=Band(0, 3))):  # fmt: skip
        assert not asks(no)
    monkeypatch.undo()
    assert [asks(problem(M, 4200)) for M in (4095, 4096)] == [False, True]


# --- which tiles are left out ---


class Memory:
    """A pointer to integers."""

    def __init__(self, numbers, at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, offset):
        return Memory(self.numbers, self.at + offset)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the schedulers as Python functions; small calls ask for a reach, too."""
    monkeypatch.setattr(toeplitz, "UNDERFLOW_FROM", 1024)
    gl = gluon(load=lambda pointer: pointer.numbers[pointer.at])
    kernel_stubs.replace(monkeypatch, tile_scheduler, backward_scheduler, gl=gl)
    monkeypatch.setattr(tile_scheduler, "key_tiles", tiles.key_tiles)
    monkeypatch.setattr(backward_scheduler, "query_tiles", tiles.query_tiles)
    names = "head_at keys_within_reach work_tile_at entry_at first_entry first_full"
    as_python(monkeypatch, tile_scheduler, names)
    names = "head_and_tile heads_at_once groups_per_broadcast key_tile within_reach work_tile_of first_within_reach"
    as_python(monkeypatch, backward_scheduler, names)


class Visit(NamedTuple):
    b: int
    h: int
    row0: int
    rows: int
    n0: int
    cols: int


def forward_visits(p, reach, on=True):
    """In order, tiles of a warpgroup's queries and keys, and whether a band or the end of the keys may cut one."""
    terms, sizes, c = forward_arguments(p)
    assert c.UNDERFLOWS
    c.UNDERFLOWS = on
    x = SimpleNamespace(tile_list=Memory(reach.flatten().tolist()))
    for t in range(sizes.tiles):
        tile = tile_scheduler.work_tile_at(t, x, terms, sizes, c)
        assert tile.count > 0
        for w in range(c.WARPGROUPS):
            first = tile_scheduler.first_entry(tile, terms, c, w)
            assert first < tile.count
            if c.PEELED:
                assert tile_scheduler.first_full(tile, first) <= tile.count
            for i in range(first, tile.count):
                entry = tile_scheduler.entry_at(i, tile, c)
                yield Visit(tile.b, tile.h, tile.row0 + 64 * w, 64, entry.n * c.BLOCK_N, c.BLOCK_N), entry.cut


def backward_visits(p, reach, on=True):
    """In order, of query heads, too; a tile of keys by itself where it visits nothing."""
    terms, sizes, c = backward_arguments(p)
    assert c.UNDERFLOWS
    c.UNDERFLOWS = on
    order = {}
    x = Memory(reach.flatten().tolist())
    for program in range(sizes.key_tiles * sizes.kv_heads * sizes.batch):
        tile = backward_scheduler.work_tile_of(program, 0, terms, sizes, c, x)
        assert 0 <= tile.begin <= tile.end <= sizes.row_tiles
        for h in range(tile.hk * sizes.group, (tile.hk + 1) * sizes.group):
            for m in range(tile.end - 1, tile.begin - 1, -1):
                first, *_ = tiles.key_tiles(m * c.BLOCK_M, min(c.BLOCK_M, p.queries - m * c.BLOCK_M), p.keys, terms.lo,
                                            terms.hi, c.BLOCK_N)  # fmt: skip
                if on:
                    first = backward_scheduler.first_within_reach(first, m * c.BLOCK_M, tile, x, sizes, c)
                # In the order of tiles of keys, each has as many before it as `dq_accum.add_dq` waits for.
                before = order.setdefault((tile.b, h, m), [])
                assert (tile.n0 // c.BLOCK_N - first) == len(before)
                before.append(tile.n0)
                partial = m < tile.full_begin or m >= tile.full_end
                yield Visit(tile.b, h, m * c.BLOCK_M, c.BLOCK_M, tile.n0, c.BLOCK_N), partial


def counts_of(p, visits, reach, heads):
    """How many visits there are: one of every tile with a pair within reach that the band shows, and few others."""
    lo, hi = tiles.limits(p.score.band)
    row0, n0 = torch.arange(0, p.queries, 64)[:, None], torch.arange(0, p.keys, 64)
    least, most = n0 - (row0 + 63).clamp(max=p.queries - 1), (n0 + 63).clamp(max=p.keys - 1) - row0
    visited = torch.zeros(p.batch, p.heads, -(-p.queries // 64) + 2, -(-p.keys // 64) + 1, dtype=torch.int8)
    count = 0
    for visit, partial in visits:
        last = visit.n0 + visit.cols - 1
        cut = visit.n0 - (visit.row0 + visit.rows - 1) < lo or last - visit.row0 > hi or last >= p.keys
        assert partial or not cut or visit.row0 + visit.rows > p.queries
        visited[
            visit.b, visit.h, visit.row0 // 64 : (visit.row0 + visit.rows) // 64, visit.n0 // 64 : last // 64 + 1
        ] += 1
        count += 1
    assert visited.max() == 1
    visited = visited[..., : row0.shape[0], : n0.shape[0]]
    reach = reach.repeat_interleave(p.heads // heads, 1)[..., None, None]
    from_, to = reach[:, :, 0], reach[:, :, 1]
    assert visited[(most >= from_.clamp(min=lo)) & (least <= to.clamp(max=hi))].all()
    assert not visited[(most < from_ - 300) | (least > to + 300)].any()
    return count


BANDS = [Band(), Band(None, 0), Band(-1100, None), Band(-1100, 1050), Band(None, 600)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("M", "N", "lo", "hi"), [(1500, 1500, 0, 0), (1030, 1600, -60, 61), (1024, 1100, 70, 71)])
def test_no_tile_within_reach_is_left_out(M, N, lo, hi, band, dim):
    generator = torch.Generator().manual_seed(M + dim)
    if band.hi == 0:
        band = Band(None, N - M)
    p = problem(M, N, lo, hi, band, B=1, dim=dim)
    for spread in (3, 300):
        sure = toeplitz.sure_distance(p)
        steps = torch.randint(0, spread, (2, 1, 4), generator=generator)
        # as of `underflow.Reach`: on either side of the near distances, and of the one that all queries see
        reach = torch.stack([min(lo, sure) - steps[0], max(hi, sure) + steps[1]], -1)
        count = counts_of(p, forward_visits(p, reach), reach, 4)
        union = torch.stack([reach[..., 0].view(1, 2, 2).amin(2), reach[..., 1].view(1, 2, 2).amax(2)], -1)
        count += counts_of(p, backward_visits(p, union), union, 2)
        whole = sum(1 for _ in forward_visits(p, reach, False)) + sum(1 for _ in backward_visits(p, union, False))
        assert count < (0.7 if spread == 3 else 1.0) * whole


def test_the_order_of_heads():
    """The last first, of all batch elements, those that share keys side by side; each comes once."""
    for band in (Band(), Band(None, 0)):
        p = problem(band=band, heads=6, B=3)
        terms, sizes, c = forward_arguments(p)
        reach = torch.tensor([[-UNKNOWN, UNKNOWN]]).expand(18, 2)
        x = SimpleNamespace(tile_list=Memory(reach.flatten().tolist()))
        work = [tile_scheduler.work_tile_at(t, x, terms, sizes, c) for t in range(sizes.tiles)]
        assert len({(t.b, t.h, t.row0) for t in work}) == len(work) == 18 * sizes.row_tiles
        heads = list(dict.fromkeys((t.b, t.h) for t in work))
        assert heads == [(b, h + 3 * hk) for hk in (1, 0) for b in (2, 1, 0) for h in (2, 1, 0)]


# --- and nothing changes ---


def scores(p, inputs, visit):
    """Of a tile, in float32, and which of it is seen."""
    rows = torch.arange(visit.row0, min(visit.row0 + visit.rows, p.queries))
    cols = torch.arange(visit.n0, min(visit.n0 + visit.cols, p.keys))
    distance = cols - rows[:, None]
    lo, hi = tiles.limits(p.score.band)
    q, k = inputs.q[visit.b, visit.h, rows].float(), inputs.k[visit.b, visit.h // p.group, cols].float()
    w = inputs.parts.toeplitz[visit.b, visit.h, 0]
    s = q @ k.T * SCALE + w[distance + p.queries - 1]
    return s.masked_fill((distance < lo) | (distance > hi), -math.inf), rows, cols


def forward(p, inputs, visits):
    """O and the LSE, by the online softmax of its kernel, tile by tile; and how many there are."""
    m = torch.full((p.batch, p.heads, p.queries), -math.inf)
    l, o, count = torch.zeros_like(m), torch.zeros(*m.shape, p.head_dim), 0  # noqa: E741
    for visit, _ in visits:
        count += 1
        if visit.row0 >= p.queries:
            continue
        s, rows, cols = scores(p, inputs, visit)
        of = visit.b, visit.h, rows
        new = torch.maximum(m[of], s.amax(1))
        new = torch.where(new - m[of] <= 8 * math.log(2), m[of], new)
        base = new.masked_fill(new == -math.inf, 0.0)
        alpha, part = torch.exp(m[of] - base), torch.exp(s - base[:, None])
        m[of], l[of] = new, l[of] * alpha + part.sum(1)
        v = inputs.v[visit.b, visit.h // p.group, cols].float()
        o[of] = o[of] * alpha[:, None] + part.to(torch.bfloat16).float() @ v
    return o / l[..., None], m + l.log(), count


def backward(p, inputs, do, o, lse, visits):
    """dQ, dK, dV, and of the bias what each distance has, tile by tile."""
    dq, count = torch.zeros(inputs.q.shape), 0
    dk, dv = torch.zeros(inputs.k.shape), torch.zeros(inputs.v.shape)
    dw = torch.zeros(p.batch, p.heads, p.queries + p.keys - 1)
    delta = (do.float() * o).sum(-1)
    for visit, _ in visits:
        count += 1
        if visit.row0 >= p.queries:
            continue
        s, rows, cols = scores(p, inputs, visit)
        of, of_keys = (visit.b, visit.h, rows), (visit.b, visit.h // p.group, cols)
        part = torch.exp(s - lse[of][:, None])
        dv[of_keys] += part.T @ do[of].float()
        ds = part * (do[of].float() @ inputs.v[of_keys].float().T - delta[of][:, None])
        dq[of] += SCALE * ds @ inputs.k[of_keys].float()
        dk[of_keys] += SCALE * ds.T @ inputs.q[of].float()
        dw[visit.b, visit.h].index_add_(0, (cols - rows[:, None] + p.queries - 1).flatten(), ds.flatten())
    return dq, dk, dv, dw, count


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_changes(interpreter, causal):
    """With what the kernels find of steep heads and of a flat one: equal bits, by fewer tiles."""
    p = problem(1040, 1100, lo=-5, hi=70, band=Band(None, 60) if causal else None, B=1)
    slopes = torch.tensor([[3.0, 1.0, 0.9, 1e-3]])
    inputs, do = drawn(p, slopes, slopes)
    found = interpreter(hopper_terms_child.reaches, p, inputs, None)
    unions = interpreter(hopper_terms_child.reaches, p, inputs, do)
    *ours, fewer = forward(p, inputs, forward_visits(p, found))
    *other, most = forward(p, inputs, forward_visits(p, found, False))
    assert fewer < 0.9 * most
    for x, y in zip(ours, other, strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)
    *ours, fewer = backward(p, inputs, do, *other, backward_visits(p, unions))
    *other, most = backward(p, inputs, do, *other, backward_visits(p, unions, False))
    assert fewer < 0.95 * most
    for x, y in zip(ours, other, strict=True):
        assert torch.equal(x, y)
