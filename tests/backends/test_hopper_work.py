"""Which program of the Hopper backward has which tile, and who adds up whose dBias: the kernels' own functions, run as
Python on integers. A mistake here would be a program that waits for ever."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, band_terms, gluon, numbers
from pairwise import pairwise

from tilewise.spec import tiles
from tilewise.spec.score import Band

pytest.importorskip("triton")

from tilewise.backends.gluon import score
from tilewise.backends.gluon.sm90.backward import dbias, dbias_reduce
from tilewise.backends.gluon.sm90.backward import dq as dq_accum
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward import scheduler as scheduler
from tilewise.backends.gluon.sm90.backward import warps as producers
from tilewise.backends.gluon.sm90.common import config


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the kernels as Python functions."""
    kernel_stubs.replace(monkeypatch, scheduler, dbias_reduce, gl=gluon())
    monkeypatch.setattr(scheduler, "query_tiles", tiles.query_tiles)
    names = (
        "head_and_tile group_of heads_at_once key_tile groups_per_broadcast groups done_at head_of row_tile element_at"
    )
    as_python(monkeypatch, scheduler, names)
    as_python(monkeypatch, dbias_reduce, "ROWS COLS")


def problem(B, H, Hkv, M, N, bias, band=None, deterministic=False, mask=None, D=64):
    more = {"bias": bias, "bias_grad": True, "mask": mask, "deterministic": deterministic}
    return kernel_stubs.problem(B, H, Hkv, M, N, D, band, **more)


def kernel_arguments(p):
    """``(terms, sizes, c)`` with plain numbers in place of constants of the compiler."""
    c = numbers(backward_launch._compiled(p, config.backward_config(p), p.head_dim, False))
    sizes, groups = backward_launch._sizes(p, config.backward_config(p), torch.device("meta"))
    assert scheduler.groups(sizes, c) == groups
    return band_terms(p.score.band), sizes, c


BANDS = [None, Band(None, 3), Band(-200, 70), Band(-50, None), Band(300, 400)]
PROBLEMS = [
    problem(B, group * Hkv, Hkv, M, N, bias, band, deterministic)
    for (B, group, Hkv), (M, N), bias, (band, deterministic) in itertools.product(
        [(4, 1, 3), (12, 1, 2), (3, 2, 2), (1, 4, 8), (16, 1, 1)],
        [(239, 432), (64, 1023), (700, 129)],
        ["1hmn", "b1mn", "11mn", "bkmn", "1kmn", "bhmn"],
        [*((band, False) for band in BANDS), (None, True), (BANDS[1], True)],
    )
]


def bias_of(p, w, g=0):
    """The bias that a program's query head ``g`` reads."""
    head = (w.hk * p.group + g) // (p.heads // p.bias.heads)
    return (w.b if p.bias.batch > 1 else 0, head)


def test_every_tile_has_one_program_and_sharers_are_one_group():
    for p in PROBLEMS:
        terms, sizes, c = kernel_arguments(p)
        seen = set()
        for group in range(scheduler.groups(sizes, c)):
            members = [scheduler.work_tile_of.fn(group, r, terms, sizes, c) for r in range(c.GROUP_PROGRAMS)]
            assert len({(w.n0, w.begin, w.end, *bias_of(p, w)) for w in members}) == 1
            seen |= {(w.b, w.hk, w.n0) for w in members}
        heads = itertools.product(range(p.batch), range(p.kv_heads), range(0, p.keys, c.BLOCK_N))
        assert seen == set(heads)
        assert len(seen) == scheduler.groups(sizes, c) * c.GROUP_PROGRAMS
        assert c.GROUP_PROGRAMS in (1, 2, 4, 8)
        shared = (p.bias.batch, p.bias.heads) != (p.batch, p.heads)
        assert (c.DBIAS in ("accumulate", "reduce")) == shared


def test_a_group_is_found_by_its_work():
    for p in PROBLEMS:
        _, sizes, c = kernel_arguments(p)
        heads = p.batch * p.kv_heads // c.GROUP_PROGRAMS
        places = {scheduler.head_and_tile(group, sizes, c): group for group in range(scheduler.groups(sizes, c))}
        assert set(places) == set(itertools.product(range(heads), range(sizes.key_tiles)))
        for (head, tile), group in places.items():
            assert scheduler.group_of(head, tile, sizes, c) == group


def test_groups_that_share_a_bias_form_a_chain():
    for p in PROBLEMS:
        terms, sizes, c = kernel_arguments(p)
        chains = {}
        for group in range(scheduler.groups(sizes, c)):
            w = scheduler.work_tile_of.fn(group, 0, terms, sizes, c)
            before = scheduler.group_before.fn(group, sizes, c)
            assert before == chains.get((w.n0, *bias_of(p, w)), -1)
            chains[w.n0, *bias_of(p, w)] = group
        assert (c.DBIAS == "reduce" and len(chains) < scheduler.groups(sizes, c)) == c.ADDS


@pytest.mark.parametrize("of_kernel", [False, True])
def test_pieces_cover_a_group(monkeypatch, of_kernel):
    """Every piece is added up once, by the parts of a group's programs or of the kernel for the last groups."""
    monkeypatch.setattr(dbias_reduce, "_piece", dbias_reduce._piece.fn)
    for p in PROBLEMS:
        terms, sizes, c = kernel_arguments(p)
        w = scheduler.work_tile_of.fn(0, 0, terms, sizes, c)
        per_tile = (c.BLOCK_M // dbias_reduce.ROWS) * (c.BLOCK_N // dbias_reduce.COLS)
        parts = per_tile if of_kernel else c.GROUP_PROGRAMS
        each = per_tile // parts
        count = sizes.group * (w.end - w.begin) * each
        found = {}
        for part in range(parts):
            m, g, sum_of = w.end - 1, 0, set()
            for u in range(count):
                step, j, _ = dbias_reduce._piece(u, w, None, sizes, each, c)
                assert step == scheduler.step_of.fn(m, g, w)
                row, col = dbias_reduce._place_in_tile.fn(j, part, each, c)
                sum_of.add((m, *bias_of(p, w, g), row, col))
                if not c.GROUP_BROADCASTS or g == p.group - 1:
                    (element,) = sum_of  # one element of dBias is added up at a time
                    found[element] = found.get(element, 0) + 1
                    sum_of = set()
                m, g = dbias_reduce._tile_after.fn(u, m, g, w, sizes, each, c)
            assert not sum_of
        heads = 1 if c.GROUP_BROADCASTS else p.group
        assert len(found) == heads * (w.end - w.begin) * per_tile
        assert set(found.values()) <= {1}


def test_sums_are_zeroed_by_programs_that_begin_before():
    """A program waits until those of a head that comes earlier have zeroed its own head's sum of dQ."""
    many = [
        problem(B, group * Hkv, Hkv, M, N, "bhmn", band, deterministic)
        for (B, group, Hkv), (M, N), (band, deterministic) in itertools.product(
            [(40, 1, 4), (90, 2, 2), (300, 1, 1)],
            [(239, 100), (239, 432), (239, 3000), (8000, 3000)],
            [*((band, False) for band in BANDS), (None, True)],
        )
    ]
    some = False
    for p in [*PROBLEMS, *many]:
        terms, sizes, c = kernel_arguments(p)
        if c.DBIAS == "reduce" or c.GROUP_PROGRAMS > 1:
            assert sizes.zeroed == p.batch * p.kv_heads
            continue
        if c.DBIAS == "accumulate":
            continue
        programs = {}
        for n in range(scheduler.groups(sizes, c)):
            w = scheduler.work_tile_of.fn(n, 0, terms, sizes, c)
            head, tile = scheduler.head_and_tile(n, sizes, c)
            assert (head, tile) == (w.b * p.kv_heads + w.hk, w.n0 // c.BLOCK_N)
            programs.setdefault(head, []).append(n)
        assert all(len(found) == sizes.key_tiles for found in programs.values())
        for head in range(sizes.zeroed, p.batch * p.kv_heads):
            some = True
            assert max(programs[head - sizes.zeroed]) < min(programs[head])
    assert some


@pytest.mark.parametrize("mask", ["b11n", "111n"])
def test_work_tiles_whose_keys_all_lanes_hide_have_no_step(monkeypatch, mask):
    """One element that sees a key is enough; elements without a batch element see none, and read no list."""
    B, Hkv = 43, 2
    terms, sizes, c = kernel_arguments(problem(B, 2 * Hkv, Hkv, 780, 400, "1hmn", mask=mask, D=32))
    assert c.HIDES_KEYS
    assert not c.MASK
    masks = B if mask == "b11n" else 1
    counts = torch.rand(masks, sizes.key_tiles, generator=torch.Generator().manual_seed(0)).lt(0.4).int()
    lists = torch.full((masks * sizes.key_tiles, 1 + sizes.row_tiles), -1)
    lists[:, 0] = counts.flatten() * sizes.row_tiles
    monkeypatch.setattr(scheduler.gl, "static_range", range, raising=False)
    monkeypatch.setattr(
        scheduler.gl, "load", lambda at, mask, other: int(lists.flatten()[at]) if mask else other, raising=False
    )
    monkeypatch.setattr(scheduler, "tile_of_mask", scheduler.tile_of_mask.fn)
    monkeypatch.setattr(scheduler, "mask_of", score.mask_of.fn)
    monkeypatch.setattr(score, "gl", SimpleNamespace(cast=lambda value, _: value, int64=None))
    x = SimpleNamespace(tile_list=0, k=SimpleNamespace(shape=[B]))
    found = set()
    for n in range(sizes.key_tiles * sizes.batch * Hkv):
        whole = scheduler.work_tile_of.fn(n // c.GROUP_PROGRAMS, n % c.GROUP_PROGRAMS, terms, sizes, c)
        cut = scheduler.unless_hidden.fn(whole, x, sizes, c)
        elements = [b for b in range(whole.b // 3 * 3, whole.b // 3 * 3 + 3) if b < B]
        seen = any(counts[b % masks, whole.n0 // 64] for b in elements)
        assert cut == whole._replace(end=whole.end if seen else whole.begin)
        found.add(seen)
    assert found == {True, False}


@pytest.mark.parametrize(
    ("B", "Hkv", "N"),
    [
        (43, 4, 776), (300, 1, 768), (32, 2, 4000), (32, 1, 8000), (64, 4, 255), (128, 4, 128), (256, 3, 128),
        (43, 4, 256),
    ],
)  # fmt: skip
def test_heads_of_lanes_take_turns_in_the_sum_of_dq(monkeypatch, B, Hkv, N):
    """A head's place in the pipeline is zero when its programs add to it: those of lower numbers have finished the dQ
    of the head that had it, which programs of yet lower numbers have added up."""
    finished: dict[int, list] = {}  # by head, which program finished which part
    waited, counted, cast = [], [], []
    monkeypatch.setattr(dq_accum, "cast_piece", lambda piece, *_: cast.append(piece))
    monkeypatch.setattr(dq_accum, "head_and_tile", scheduler.head_and_tile)
    monkeypatch.setattr(dq_accum, "counters_at", scheduler.counters_at.fn)
    monkeypatch.setattr(dq_accum, "wait_count", lambda at, count: waited.append((at, count)))
    monkeypatch.setattr(dq_accum, "count_up", counted.append)
    monkeypatch.setattr(
        dq_accum, "finish_heads",
        lambda nth, heads, part, parts, *_: [
            finished.setdefault(nth + i, []).append((n, part, parts)) for i in range(heads)
        ],
    )  # fmt: skip
    monkeypatch.setattr(dq_accum, "gl", SimpleNamespace(program_id=lambda _: n))
    x = SimpleNamespace(dq=None, k=SimpleNamespace(shape=[0] * 4))
    p = problem(B, 2 * Hkv, Hkv, 780, N, "1hmn", D=32)
    terms, sizes, c = kernel_arguments(p)
    heads, tiles = sizes.batch * Hkv, sizes.key_tiles
    assert c.ELEMENTS == 3
    assert sizes.zeroed <= B * Hkv  # places, which the preprocess zeroes, of heads that there are
    assert sizes.zeroed % (2 * c.ELEMENTS) == 0
    short = sizes.zeroed // c.ELEMENTS * tiles <= 3 * 132  # all heads have less than the programs that run at once need
    assert not short or sizes.zeroed > B * Hkv - 2 * Hkv - 2 * c.ELEMENTS
    seen = set()
    added: dict[int, list[int]] = {}  # by head, the programs that add to it
    zeroed: dict[int, list[int]] = {}  # by head, those that zero its place
    for n in range(tiles * heads):
        w = scheduler.work_tile_of.fn(n // c.GROUP_PROGRAMS, n % c.GROUP_PROGRAMS, terms, sizes, c)
        head = scheduler.head_of(w, sizes, c)
        first = head % sizes.zeroed * sizes.group * sizes.row_tiles
        assert scheduler.tile_of_sum.fn(w, w.hk * sizes.group + 1, 2, sizes, c) == first + sizes.row_tiles + 2
        added.setdefault(head, []).append(n)
        if w.b < B:  # of an element without a batch element nothing is stored
            seen.add((w.b, w.hk, w.n0))
        if n % c.ELEMENTS:
            continue
        dq_accum.finish_earlier_heads.fn(n // c.ELEMENTS, x, None, 0, terms, sizes, c)
        if waited:
            ((at, count),) = waited
            assert (at - heads) % c.ELEMENTS == 0
            for done in range(at - heads, at - heads + c.ELEMENTS):
                assert count == len(added[done]) == tiles
                assert finished[done][-1][0] == n
                assert short or max(added[done]) // c.ELEMENTS < n // c.ELEMENTS - 132  # programs that run at once
        for at in counted:
            zeroed.setdefault(at, []).append(n)
        waited.clear()
        counted.clear()
    assert set(added) == set(range(heads))
    assert seen == {*itertools.product(range(B), range(Hkv), range(0, N, c.BLOCK_N))}
    for head, programs in added.items():
        if head >= sizes.zeroed:
            of_group = zeroed[head // c.ELEMENTS * c.ELEMENTS]
            assert len(of_group) == tiles
            assert max(of_group) // c.ELEMENTS < min(programs) // c.ELEMENTS
            assert [program for program, *_ in finished[head - sizes.zeroed]] == of_group
    for n in range(sizes.zeroed // 2 * sizes.group * sizes.row_tiles):  # noqa: B007
        dq_accum.last_heads_kernel.fn(None, None, None, None, None, None, terms, sizes, c)
    for n in range(n + 1, n + 4):  # noqa: B007, B020
        dq_accum.last_heads_kernel.fn(None, None, None, None, None, None, terms, sizes, c)
    assert cast == [0, 1, 2]  # pieces of dBias
    assert set(finished) == set(range(heads))
    for found in finished.values():
        (parts,) = {parts for *_, parts in found}
        assert sorted(part for _, part, _ in found) == list(range(parts))


def test_only_programs_in_the_order_of_their_heads_zero_sums(monkeypatch):
    """Others, which share a bias, trainable or not, do not know which head comes later."""
    called = []
    monkeypatch.setattr(producers, "zero_ahead", lambda *arguments: called.append("zeroes"))
    monkeypatch.setattr(producers, "reduce_earlier_group", lambda *arguments: called.append("adds up"))
    monkeypatch.setattr(producers, "gl", SimpleNamespace(program_id=lambda _: 0, to_tensor=lambda x: x))
    monkeypatch.setattr(producers, "work_tile_count", lambda *_: 1)
    monkeypatch.setattr(producers, "next_tile_index", lambda tile_index, t, *_: t)
    monkeypatch.setattr(producers, "fetch_keys", lambda *arguments: None)
    for p, trainable in itertools.product(PROBLEMS, [False, True]):
        p = replace(p, bias_grad=trainable)
        terms, sizes, c = kernel_arguments(p)
        producers.background.fn(None, None, None, None, None, None, None, None, terms, sizes, c)
        shared = p.bias.batch * p.bias.heads < p.batch * p.heads
        assert called == (["adds up"] if c.DBIAS == "reduce" else ["zeroes"] if c.GROUP_PROGRAMS == 1 else [])
        many = p.deterministic or p.batch * p.heads // (p.bias.batch * p.bias.heads) > 16
        assert ("none" if not trainable else "store" if not shared else "reduce" if many else "accumulate") == c.DBIAS
        assert sizes.zeroed == p.batch * p.kv_heads or c.GROUP_PROGRAMS == 1
        called.clear()


@pytest.mark.parametrize("deterministic", [False, True])
def test_counters_do_not_overlap(deterministic):
    for bias, group in itertools.product(["bhmn", "1hmn", "11mn"], [1, 3]):
        p = problem(4, 2 * group, 2, 700, 1023, bias, deterministic=deterministic)
        _, sizes, c = kernel_arguments(p)
        groups, dbias_tiles = scheduler.groups(sizes, c), c.DBIAS == "reduce"
        at = scheduler.counters_at.fn(0, sizes, c)
        assert (at.zeroed, at.done, at.dq_semaphores) == (0, 8, 16)
        assert at.ended == at.dq_semaphores + deterministic * 4 * p.heads * sizes.row_tiles
        assert at.summed == at.ended + groups
        assert scheduler.counters(sizes, groups, deterministic, dbias_tiles) == at.ended + (
            2 * groups if dbias_tiles else 1
        )
        assert dbias_tiles or at.tile_count_semaphore == at.ended
        assert at.dbias_zeroed == at.tile_count_semaphore + 1
        assert scheduler.counters(sizes, groups, deterministic, False, zeroes=True) == at.dbias_zeroed + groups


def test_turns_count_the_tiles_of_keys_before():
    """What `add_dq` waits for: programs of one head that visit a tile of queries have turns 0, 1, 2, ..."""
    for p in PROBLEMS:
        terms, sizes, c = kernel_arguments(p)
        dq_semaphores = {}
        for group in range(scheduler.groups(sizes, c)):
            for member in range(c.GROUP_PROGRAMS):
                w = scheduler.work_tile_of.fn(group, member, terms, sizes, c)
                for m in range(w.begin, w.end):
                    m0 = m * c.BLOCK_M
                    rows = min(c.BLOCK_M, p.queries - m0)
                    first = tiles.key_tiles(m0, rows, p.keys, terms.lo, terms.hi, c.BLOCK_N)[0]
                    dq_order = w.n0 // c.BLOCK_N - first
                    assert dq_order == dq_semaphores.get((w.b, w.hk, m), 0), (
                        "lower programs first: they are started first"
                    )
                    dq_semaphores[w.b, w.hk, m] = dq_order + 1


def test_no_program_waits_for_a_later_one():
    """A group's place in the pipeline is free when earlier groups have been added up; the last groups are the
    kernel's."""
    for p in PROBLEMS:
        _, sizes, c = kernel_arguments(p)
        count = scheduler.groups(sizes, c)
        last = min(sizes.lag, count)
        for group in range(count):
            if group >= sizes.ds_buffer_groups:
                assert group - sizes.ds_buffer_groups + sizes.lag < group
                assert group - sizes.ds_buffer_groups < count - last
        assert dbias.broadcast_group(p).programs == c.GROUP_PROGRAMS


def lists_of_groups(monkeypatch, states, p):
    """What `group_list_kernel` writes, run with tensors in place of the kernel's: ``(lists, terms, sizes, c)``."""

    def load(at, mask=True, other=0):
        return torch.where(mask, states.flatten()[torch.where(mask, at, 0)], other)

    def store(at, value, mask=True):
        mask = torch.as_tensor(mask)
        lists.flatten()[torch.as_tensor(at)[mask]] = torch.as_tensor(value, dtype=torch.int32)[mask]

    gl = gluon(
        load=load, store=store, zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        associative_scan=lambda x, axis, combine: torch.cumsum(x, axis), program_id=lambda axis: group,
    )  # fmt: skip
    kernel_stubs.replace(monkeypatch, scheduler, dbias_reduce, score, gl=gl)
    as_python(monkeypatch, scheduler, "step_of tile_of_mask work_tile_of", dbias_reduce)
    as_python(monkeypatch, dbias_reduce, "_stored_by list_of_group")
    monkeypatch.setattr(dbias_reduce, "LISTED", 4)  # fewer than there are tiles of queries
    as_python(monkeypatch, score, "mask_of", scheduler)
    terms, sizes, c = kernel_arguments(p)
    lists = torch.full((scheduler.groups(sizes, c), 1 + sizes.group * sizes.row_tiles), -1, dtype=torch.int32)
    for group in range(len(lists)):  # noqa: B007  (`program_id` reads it)
        dbias_reduce.group_list_kernel.fn(0, 0, terms, sizes, c)
    return lists, terms, sizes, c


MASKS = ["bhmn", "b1mn", "1kmn", "11mn", "bk1n", "b1m1", "1111"]


@pytest.mark.parametrize(("mask", "bias", "band"), pairwise(MASKS, ["1hmn", "b1mn", "11mn", "bkmn"], BANDS), ids=str)
def test_what_a_mask_hides_from_all_sharers_is_not_added_up(monkeypatch, mask, bias, band):
    """The lists have every tile that a program stores, in the order in which they are added up, and say who stores
    it."""
    generator = torch.Generator().manual_seed(0)
    for B, group, Hkv in [(4, 1, 3), (3, 2, 2), (1, 4, 8), (16, 1, 2)]:
        p = problem(B, group * Hkv, Hkv, 439, 432, bias, band, deterministic=True, mask=mask)
        if dbias.reduction(p) != "reduce":
            continue
        config_ = config.backward_config(p)
        shape = p.mask.batch, p.mask.heads, -(-p.keys // config_.block_n), -(-p.mask.rows // config_.block_m)
        states = torch.randint(0, 3, shape, generator=generator, dtype=torch.int8)
        states *= torch.rand(shape, generator=generator) < 0.4
        with monkeypatch.context() as patched:
            lists, terms, sizes, c = lists_of_groups(patched, states, p)
            members_of = [
                [scheduler.work_tile_of.fn(n, r, terms, sizes, c) for r in range(c.GROUP_PROGRAMS)]
                for n in range(len(lists))
            ]
        for found, members in zip(lists.tolist(), members_of, strict=True):
            stored = {}
            for r, w in enumerate(members):
                for m, g in itertools.product(range(w.begin, w.end), range(group)):
                    head = (w.hk * group + g) // (p.heads // p.mask.heads)
                    of = states[w.b if p.mask.batch > 1 else 0, head, w.n0 // c.BLOCK_N]
                    stored[m, g] = stored.get((m, g), 0) | bool(of[m if len(of) > 1 else 0]) << r
            rows = range(members[0].end - 1, members[0].begin - 1, -1)
            if c.GROUP_BROADCASTS:
                some = [m for m in rows if any(stored[m, g] for g in range(group))]
                order = list(itertools.product(some, range(group)))
            else:
                order = [(m, g) for g in range(group) for m in rows if stored[m, g]]
            entries = [scheduler.step_of.fn(m, g, members[0]) * 256 + stored[m, g] for m, g in order]
            assert found[: 1 + len(order)] == [len(order), *entries]
            assert set(found[1 + len(order) :]) <= {-1}


def test_a_program_has_no_work_before_it_runs(monkeypatch):
    """One that stays takes its first from the counter, too, and hands all that it takes to its other roles."""
    tile_indices, handed, loaded = itertools.count(2), [], []  # others have taken two

    def load_queries(tile_index, step, *_):
        loaded.append(tile_index)
        return step + 1, next(tile_indices)

    gl = SimpleNamespace(to_tensor=lambda x: x)  # a program that stays need not know its number
    stubs = {
        "gl": gl, "let_next_begin": lambda: None, "load_queries": load_queries, "work_tile_count": lambda *_: 6,
        "fetch_tile_index": lambda _: next(tile_indices),
        "counters_at": lambda *_: SimpleNamespace(tile_count_semaphore=None),
        "hand_out_tile_index": lambda _, nth, tile_index: handed.append((nth, tile_index)),
    }  # fmt: skip
    kernel_stubs.replace(monkeypatch, producers, **stubs)
    producers.load.fn(None, None, None, None, None, None, SimpleNamespace(DYNAMIC=True))
    assert loaded == [2, 3, 4, 5]
    assert handed == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6)]
