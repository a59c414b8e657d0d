"""A dBias that programs add to as their tiles of dS come, on Hopper: whether they do, onto which of its sums, and who
zeroes it. The kernels' own functions, run as Python."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, gluon, numbers

from tilewise.spec.operands import TensorSpec, TileOperand
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

from tilewise.backends.gluon import score
from tilewise.backends.gluon.sm90.backward import dbias, dbias_reduce
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward import scheduler as scheduler
from tilewise.backends.gluon.sm90.common import config


def problem(B, H, Hkv, axes, M=300, N=700, dtype=torch.bfloat16, **changes):
    found = kernel_stubs.problem(B, H, Hkv, M, N, bias_grad=True, bias=f"{axes}mn")
    return replace(found, **{"bias": replace(found.bias, dtype=dtype), **changes})


@pytest.mark.parametrize(
    ("p", "how", "sums"),
    [
        (problem(4, 2, 2, "bh"), "store", 0),
        (problem(4, 2, 2, "1h"), "accumulate", 1),
        (problem(8, 2, 2, "1h"), "accumulate", 1),
        (problem(3, 2, 2, "1h"), "accumulate", 1),
        (problem(9, 2, 2, "1h"), "reduce", 0),  # no halves of nine
        (problem(10, 2, 2, "1h"), "accumulate", 2),
        (problem(1, 16, 16, "11"), "accumulate", 2),
        (problem(1, 16, 2, "11"), "accumulate", 2),
        (problem(1, 16, 1, "11"), "reduce", 0),  # all of them one program's
        (problem(2, 16, 2, "11"), "reduce", 0),
        (problem(2, 8, 2, "1k"), "accumulate", 1),
        (problem(4, 2, 2, "1h", deterministic=True), "reduce", 0),
        (problem(4, 2, 2, "1h", bias_grad=False), "none", 1),
        (problem(40, 2, 2, "1h", dtype=torch.float32), "accumulate", 1),
        (problem(4, 2, 2, "1h", dtype=torch.float16), "reduce", 0),  # unfused torch rounds once
    ],
)
def test_who_adds(p, how, sums):
    assert dbias.reduction(p) == how
    assert config.dbias_sums(p) == sums


@pytest.mark.parametrize(
    ("p", "all_before"),
    [
        (problem(64, 4, 2, "bk", deterministic=True), True),  # no program zeroes sums while it reduces
        (problem(64, 32, 1, "b1"), True),
        (problem(64, 4, 4, "1h"), True),
        (problem(64, 4, 4, "bh"), False),
    ],
)
def test_sums_of_dq_that_no_later_program_zeroes_are_zeroed_before(p, all_before):
    sizes, _ = kernel_arguments(p)
    assert (sizes.zeroed == sizes.batch * sizes.kv_heads) == all_before


@pytest.fixture
def plain(monkeypatch):
    """The functions of the kernels as Python functions, on tensors."""
    gl = gluon(multiple_of=lambda x, _: x, max_constancy=lambda x, _: x)
    kernel_stubs.replace(monkeypatch, scheduler, dbias_reduce, gl=gl)
    names = "head_and_tile heads_at_once groups_per_broadcast groups listed_head_and_tile tile_of_mask"
    as_python(monkeypatch, scheduler, names)
    key_tile = lambda b, hk, n0, *more: SimpleNamespace(b=b, hk=hk, n0=n0, place=more[4])  # noqa: E731
    monkeypatch.setattr(scheduler, "key_tile", key_tile)
    as_python(monkeypatch, scheduler, "work_tile_of groups bias_of_tile", dbias_reduce)
    return gl


def kernel_arguments(p):
    chosen = config.backward_config(p)
    c = backward_launch._compiled(p, chosen, 64, True, dbias.zeroes_ahead(p))
    sizes, _ = backward_launch._sizes(p, chosen, torch.device("meta"))
    return sizes, numbers(c)


@pytest.mark.parametrize(
    ("B", "H", "Hkv", "bias"),
    [
        (16, 2, 2, "1h"), (10, 4, 2, "1h"), (1, 16, 16, "11"), (3, 16, 4, "b1"), (2, 8, 8, "11"),
        (20, 4, 2, "2h"), (6, 8, 8, "31"),
    ],
)  # fmt: skip
def test_each_sum_has_eight_at_most(plain, B, H, Hkv, bias):
    p = problem(B, H, Hkv, bias)
    sizes, c = kernel_arguments(p)
    assert c.DBIAS_SUMS == 2
    added = Counter()
    for b, hk in itertools.product(range(B), range(Hkv)):
        work_tile = SimpleNamespace(b=torch.tensor(b), hk=torch.tensor(hk))
        first = int(scheduler.first_of_sum.fn(work_tile, sizes, c))
        assert first in (0, p.bias.batch)
        for h in range(hk * p.group, (hk + 1) * p.group):
            added[first + score.bias_of.fn(b, B, c), h // c.BIAS_GROUP] += 1
    assert len(added) == 2 * p.bias.batch * p.bias.heads
    assert max(added.values()) <= 8


@pytest.mark.parametrize(
    ("B", "bias", "D", "how", "deterministic"),
    [
        (40, "2h", 64, "reduce", True), (40, "21", 64, "reduce", True), (24, "3k", 64, "accumulate", False),
        (8, "bh", 64, "store", False), (80, "2h", 32, "batched", False), (81, "3k", 32, "batched", False),
    ],
)  # fmt: skip
def test_programs_of_a_group_share_their_bias_and_key_tile(plain, monkeypatch, B, bias, D, how, deterministic):
    """Each tile comes once, and each group adds to the sum of the last one before it with the same bias and tile."""
    as_python(monkeypatch, scheduler, "work_tile_of group_of group_before bias_of_tile element_at")
    p = problem(B, 4, 4, bias, 260, 520, deterministic=deterministic, head_dim=D, value_dim=D)
    assert dbias.reduction(p) == how
    sizes, c = kernel_arguments(p)
    of_tile = lambda w: (scheduler.bias_of_tile(w, sizes, c), w.hk * p.group // c.BIAS_GROUP, w.n0)  # noqa: E731
    found, last = [], {}
    for group in range(scheduler.groups(sizes, c)):
        programs = [scheduler.work_tile_of(group, i, None, sizes, c) for i in range(c.GROUP_PROGRAMS)]
        found += [(w.b, w.hk, w.n0) for w in programs if w.b < B]
        assert all(of_tile(w)[0] == score.bias_of.fn(w.b, B, c) for w in programs if w.b < B)
        assert len({of_tile(w) for w in programs}) == 1
        if how == "reduce":
            assert scheduler.group_before(group, sizes, c) == last.get(of_tile(programs[0]), -1)
        last[of_tile(programs[0])] = group
    assert sorted(found) == list(itertools.product(range(B), range(4), range(0, 520, c.BLOCK_N)))


def test_two_sums_are_added_in_float32():
    p = problem(10, 2, 2, "1h", M=30, N=40)
    assert config.dbias_sums(p) == 2
    bias, found = torch.zeros(1, 2, 30, 40, dtype=torch.bfloat16), torch.randn(2, 2, 30, 40).bfloat16()
    dbias_found = dbias.bias_gradient(p, bias, found, None, None)
    assert torch.equal(dbias_found, (found[:1].float() + found[1:].float()).bfloat16())


MASK, BITS = TensorSpec(torch.bool, 1, 1, 4096, 4096), TileOperand(128, 128, "bits")


def masked(**changes):
    """Sixteen heads of 128 dimensions share a bias beside a mask."""
    changes = {"mask": MASK, "tile_mask": BITS, "head_dim": 128, "value_dim": 128} | changes
    return problem(1, 16, 16, "11", 4096, 4096, **changes)


@pytest.mark.parametrize(
    ("p", "programs"),
    [
        (masked(), 8),  # of so many the L2 cache has room for Q, dO and dq_accum
        (masked(queries=16384), 2),
        (masked(queries=16384, bias_grad=False), 2),
        (masked(queries=16384, head_dim=64, value_dim=64), 4),
        (masked(queries=1 << 20), 1),
        (masked(queries=16384, score=Score(0.1, None, Band(None, 0))), 2),
        (masked(queries=16384, mask=None, tile_mask=None), 0),
        (masked(queries=16384, tile_mask=None), 0),  # nobody knows, nor do neighbours of intervals need it
        (masked(queries=16384, tile_mask=TileOperand(128, 128, "intervals", True)), 0),
        (masked(queries=16384, deterministic=True), 0),
        (masked(queries=16384, deterministic=True, bias_grad=False), 0),  # dQ has an order of its own
        (masked(queries=16384, batch=2), 0),  # the pipeline has an order of its own
        (masked(queries=16384, bias=TensorSpec(torch.bfloat16, 1, 16, 16384, 4096)), 0),  # nobody shares it
    ],
)
def test_few_heads_run_together_beside_a_mask(p, programs):
    assert config.longest_first(p) == (programs > 0)
    if programs:
        assert dbias.broadcast_group(p).programs == programs
        assert config.backward_config(p).head_swizzle == 1


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize(("mask", "Hkv"), [("11", 16), ("1h", 16), ("b1", 4)])
def test_each_tile_comes_once_and_in_the_order_of_the_list(plain, monkeypatch, mask, Hkv, sorts):
    """Programs of a group have one tile, whose place is that of the mask of the first who share the bias. Tiles that
    come as they lie come to all of these before the next."""
    monkeypatch.setattr(config, "L2_CACHE", 2 * 16 // Hkv * 5000 * 128 * 8)  # two heads at once
    B, H, M, N = 3, 16, 5000, 700
    of = TensorSpec(torch.bool, B if mask[0] == "b" else 1, H if mask[1] == "h" else 1, M, N)
    p = problem(B, H, Hkv, "b1", M, N, mask=of, tile_mask=BITS, head_dim=128, value_dim=128)
    sizes, c = kernel_arguments(p)
    tiles, matrices = sizes.key_tiles, of.batch * of.heads
    assert c.GROUP_PROGRAMS == 2
    order = torch.stack([torch.randperm(tiles) for _ in range(matrices)])
    lists = torch.full((matrices, tiles, 2 + sizes.row_tiles), -1)
    lists[..., -1] = order if sorts else -1 - torch.arange(tiles)
    lists[..., 0] = torch.arange(matrices * tiles).view(matrices, tiles)  # how many are listed: of each another number
    plain.load = lambda at: int(lists.view(-1)[at])
    monkeypatch.setattr(scheduler, "mask_of", lambda b, h, heads, c: (c.MASK_BATCH * b * heads + h) // c.MASK_GROUP)
    found = []
    for group, member in itertools.product(range(B * Hkv * tiles // c.GROUP_PROGRAMS), range(c.GROUP_PROGRAMS)):
        work = scheduler.work_tile_of.fn(group, member, None, sizes, c, 0)
        found.append((work.b, work.hk, work.n0 // c.BLOCK_N))
        matrix = work.b if mask[0] == "b" else 0
        nth = group % (Hkv // 2 * tiles)
        assert found[-1][2] == (order[matrix, nth % tiles] if sorts else nth // (Hkv // 2))
        h = work.hk * p.group
        count, listed = scheduler.tile_list_of.fn(0, work, h, sizes, c)
        assert count == (h if mask[1] == "h" else matrix) * tiles + found[-1][2]
        assert int(lists.view(-1)[listed - 1]) == count
    assert sorted(found) == list(itertools.product(range(B), range(Hkv), range(tiles)))


@pytest.mark.parametrize(
    ("B", "H", "Hkv", "bias", "dtype"),
    [
        (4, 24, 24, "1h", torch.bfloat16), (4, 48, 24, "1h", torch.bfloat16), (4, 48, 24, "1k", torch.float32),
        (60, 4, 4, "b1", torch.bfloat16), (2, 60, 60, "1h", torch.float32),
    ],
)  # fmt: skip
def test_programs_zero_dbias_before_it_is_added_to(plain, monkeypatch, B, H, Hkv, bias, dtype):
    """Every element once, by programs that began as much earlier as a GPU runs at once, but for what the host does."""
    p = problem(B, H, Hkv, bias, M=30, N=400, dtype=dtype)
    sizes, c = kernel_arguments(p)
    assert c.ZEROES_DBIAS
    zeroed = torch.zeros(p.bias.shape, dtype=torch.int32)
    head_of_bias = zeroed.unflatten(1, (sizes.kv_heads // sizes.broadcast_heads, -1)).flatten(0, 1)
    head_of_bias[: math.ceil(sizes.lag / sizes.key_tiles)] += 1
    counted = Counter()

    def store(at, _, mask):
        zeroed.view(-1)[at[mask]] += 1

    element = SimpleNamespace(primitive_bitwidth=8 * dtype.itemsize)

    class Pointer(int):
        dtype = SimpleNamespace(element_ty=element)

    strides = dict(zip(("stride0", "stride1", "stride2", "stride3"), zeroed.stride(), strict=True))
    to = SimpleNamespace(pointer=Pointer(0), **strides)
    plain.store = store
    monkeypatch.setattr(dbias_reduce, "counters_at", lambda *_: SimpleNamespace(dbias_zeroed=0))
    monkeypatch.setattr(dbias_reduce, "count_up", lambda at: counted.update([at]))
    count = sizes.key_tiles * B * Hkv
    for tile_index in range(count):
        dbias_reduce.zero_later_group.fn(to, tile_index, None, None, sizes, c)
    groups = count // c.GROUP_PROGRAMS
    assert counted == dict.fromkeys(range(sizes.lag, groups), c.GROUP_PROGRAMS)
    host = head_of_bias[: math.ceil(sizes.lag / sizes.key_tiles)]
    assert (host >= 1).all()
    assert (head_of_bias[len(host) :] == 1).all()
    waited = []
    monkeypatch.setattr(dbias_reduce, "wait_count", lambda at, many: waited.append((at, many)))
    for tile_index in range(count):
        dbias_reduce.wait_dbias_zeroed.fn(tile_index, SimpleNamespace(dbias_zeroed=0), sizes, c)
    assert Counter(at for at, _ in waited) == counted
