"""Packed batches on Hopper: the list of work tiles and the rows computed again, in Triton's interpreter, and where a
ragged box lies, in integers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, gluon, numbers
from torch import Tensor
from varlen_helpers import HALF, Lengths

from tilewise import varlen_attention
from tilewise.bias import RelativeBias
from tilewise.frontend.varlen import read_packed

pytest.importorskip("triton")

SHORT = Lengths((70, 0, 3, 140, 1), (33, 1, 0, 80, 64), past=3)  # more queries than keys, and fewer
MANY = Lengths(tuple(n % 5 for n in range(300)), tuple(n * 7 % 11 for n in range(300)))
SOME = Lengths(tuple(n % 5 for n in range(30)), tuple(n * 7 % 11 for n in range(30)))
USED = Lengths((129, 65, 5), (300, 70, 64), used=(257, 70, 0), past=1, longer=40)


HEADS, KV_HEADS, DIM = 4, 2, 24


class Call(NamedTuple):
    """bias: along the "keys", the "queries", or None. sink: for each head "h", each query "hm", or None. values: of a
    bias by distance, (the least distance, entries of each query)."""

    lengths: Lengths
    bias: str | None = None
    sink: str | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    values: tuple[int, int] | None = None
    reverse: bool = False
    heads: int = HEADS  # of the values
    start: int | None = None  # of the queries

    def tensors(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """q, k, v; and what else `varlen_attention` takes."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(HALF)

        x = self.lengths
        q, (k, v) = normal(x.total_q, HEADS, DIM), normal(2, x.total_k, KV_HEADS, DIM)
        bias = {None: None, "keys": normal(HEADS, x.total_k), "queries": normal(HEADS, x.total_q, 1)}[self.bias]
        if self.values is not None:
            lo, count = self.values
            first = 1 - lo - count if self.reverse else lo
            values = normal(x.total_q, self.heads, count)
            bias = RelativeBias(values, lo=first, reverse=self.reverse, query_start=self.start)
        sink = {None: None, "h": normal(HEADS), "hm": normal(HEADS, x.total_q)}[self.sink]
        options = {"bias": bias, "sink": sink, "causal": self.causal, "window": self.window, "softcap": self.softcap}
        return (q, k, v), options

    def read(self) -> tuple[Any, Any]:
        """The problem and its inputs."""
        from tilewise.spec.problem import Problem
        from tilewise.spec.seqlens import Lengths as Tensors

        qkv, options = self.tensors()
        cu_q, cu_k, *longest = self.lengths.arguments()
        call = read_packed(
            *qkv, Tensors(cu_q, cu_k, self.lengths.seqused().get("seqused_k")), tuple(longest), mask=None,
            dropout_p=0.0, dropout_seed=None, deterministic=False, backend=None, **options,
        )  # fmt: skip
        grads = ("query",) * (self.values is not None)
        return Problem.of(*call.inputs, call.score, bias_grad=bool(self.bias), part_grads=grads), call.inputs

    def forward(self) -> tuple[Any, Any]:
        """The prepared forward, and its inputs."""
        from tilewise.backends.gluon.sm90.forward.launch import HopperForward

        problem, inputs = self.read()
        return HopperForward(problem, inputs), inputs


def tile_list(x: Call, others: dict[str, tuple[int, ...]] | None = None) -> tuple[Tensor, Tensor, Tensor, int]:
    """The list, O and the LSE, which were NaN, and the queries of a tile. others: offsets in place of these."""
    from tilewise.backends.gluon.varlen import SEMAPHORE

    run, inputs = x.forward()
    o, lse = torch.full_like(inputs.q, torch.nan), torch.full(inputs.q.shape[:3], torch.nan)
    given = {name: torch.tensor(offsets, dtype=torch.int32) for name, offsets in (others or {}).items()}
    found = run.packed(inputs.lengths._replace(**given), o, lse=lse)
    assert found[SEMAPHORE] == 0
    return found, o, lse, 64 * run.main.numbers[2].WARPGROUPS.value


def repair(x: Call, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O and the LSE before and after, and which rows were broken and are to be computed again."""
    run, inputs = x.forward()
    qkv, options = x.tensors()
    o, lse = varlen_attention(
        *qkv, *x.lengths.arguments(), **x.lengths.seqused(), **options, return_lse=True, backend="cpu"
    )
    o, lse = o.transpose(0, 1)[None], lse[None]
    spoilt = torch.rand(lse.shape, generator=torch.Generator().manual_seed(1)) < share
    spoilt[:, :, x.lengths.total_q - x.lengths.past :] = False
    after, after_lse = o.clone(), lse.clone()
    after[spoilt], after_lse[spoilt] = 7.0, torch.nan
    found = run.packed(inputs.lengths, o.clone(), lse=lse.clone())
    bias = inputs.bias if x.values is None else run.values.laid_out(inputs.parts.query, found)
    run.nan_fixup(*inputs[:3], bias, *inputs[4:6], None, found, after, None, after_lse, None)
    return o, lse, after, after_lse, spoilt


def tiles_of_heads(x: Call, by_keys: bool, block: int = 64) -> tuple[Tensor, Tensor]:
    """The list of tiles of queries, or of keys; and what it comes to for all heads, (first query,
    first key, tile, head) each."""
    from probe_kernels import tiles_of_heads_kernel

    from tilewise.backends.gluon.varlen import TileList

    problem, inputs = x.read()
    rows = inputs.k if by_keys else inputs.q
    found = TileList(problem, block, rows, by_keys=by_keys)(inputs.lengths, rows.clone())
    out = torch.full((int(found[0]) * HEADS, 4), -1, dtype=torch.int32)
    if len(out):
        tiles_of_heads_kernel[(len(out),)](found, out, HEADS, block, by_keys)
    return found, out


def lists_of_a_backward(x: Call) -> list[tuple[Tensor, ...]]:
    """For queries, then for keys, what one kernel makes and what `TileList` makes: a list and two tensors that it
    zeroes in part."""
    from tilewise.backends.gluon.varlen import BothLists, TileList

    problem, inputs = x.read()
    q, k = inputs.q, inputs.k
    rows, keys = [[torch.full_like(like, torch.nan) for _ in range(4)] for like in (q, k)]
    row_list, key_list = BothLists(problem, 64, 128, q, q, k, k)(inputs.lengths, *rows[:2], *keys[:2])
    expected_rows = TileList(problem, 64, q, q)(inputs.lengths, *rows[2:])
    expected_keys = TileList(problem, 128, k, k, by_keys=True)(inputs.lengths, *keys[2:])
    return [(row_list, *rows[:2]), (expected_rows, *rows[2:]), (key_list, *keys[:2]), (expected_keys, *keys[2:])]


def sums_before(x: Call, lag: int) -> tuple[Tensor, Tensor, Any, Any]:
    """Which numbers of the sum of dQ, (tiles, numbers), the preprocess zeroes if ``lag`` work tiles are under way at
    once; of each work tile of keys its `SumOfHead`; sizes, and what is compiled in."""
    from probe_kernels import sums_of_heads_kernel

    from tilewise.backends import Needs, Outputs
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    problem, inputs = x.read()
    outputs = Outputs(inputs.q, inputs.q[..., 0].float())
    run = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, False))
    c = numbers(run.main.numbers[2])
    value_dim, sizes, *rest = run.before.numbers
    assert sizes.zeroed == 1 << 29  # all, by heads of this dimension
    c.ZEROED_BY_TILE = True
    sizes = sizes._replace(zeroed=lag + -(-problem.keys // c.BLOCK_N))
    run.before.numbers = (value_dim, sizes, *rest)
    stats, counts, dq_accum = run.buffers(inputs.q)
    dq_accum.fill_(torch.nan)
    row_list, key_list = run.lists(inputs.lengths, inputs.q.clone(), None, inputs.k.clone(), inputs.v.clone())
    run.before(*outputs[:1], None, outputs.o, outputs.lse, outputs.lse[..., None], None, stats, dq_accum, counts, None,
               row_list, key_list)  # fmt: skip
    assert (counts == 0).all()
    found = torch.full((int(key_list[0]) * KV_HEADS, 6), -1, dtype=torch.int32)
    sums_of_heads_kernel[(len(found),)](key_list, found, KV_HEADS, c.BLOCK_M, c.BLOCK_N)
    return dq_accum.reshape(-1, c.BLOCK_M * c.BLOCK_D) == 0, found, sizes, c


def _box(layout: Any, x: Tensor, at: list[int]) -> list[tuple[int, slice, slice]]:
    """Where TMA finds the rows of a box in the memory ``x`` of a descriptor's tensor: (row, columns, elements)."""
    *_, rows, cols = layout.block_shape
    assert at[4] >= 0, "TMA takes no negative column"
    assert at[4] % 8 == 0, "TMA's boxes begin at multiples of 16 bytes"
    found = []
    for row in range(rows):
        begin = [*at[:3], at[3] + row]
        if all(0 <= i < n for i, n in zip(begin, layout.shape, strict=False)):
            base = sum(i * stride for i, stride in zip(begin, layout.strides, strict=False))
            base = base * x.itemsize % 2**64 // x.itemsize
            count = min(cols, layout.shape[4] - at[4])
            assert 0 <= base + at[4] <= base + at[4] + count <= x.numel(), "outside of the memory"
            found.append((row, slice(0, count), slice(base + at[4], base + at[4] + count)))
    return found


def values_by_distance(x: Call) -> tuple[int, Tensor, Tensor]:
    """How many entries were compared of those that a backward reads; the gradient that comes of a dS for each pair, and
    what it is, (1, H, T, R)."""
    from helpers import poisoned_memory

    from tilewise.backends import Needs, Outputs
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward
    from tilewise.backends.gluon.tensors import ragged
    from tilewise.backends.gluon.varlen import SeqInfo, box_of
    from tilewise.backends.gluon.varlen_values import first_column

    problem, inputs = x.read()
    outputs = Outputs(inputs.q, inputs.q[..., 0].float())
    run = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, False, query=True))
    terms, _, c = run.main.numbers
    c = c._replace(PACKED=True)
    values, lo, hi = inputs.parts.query, terms.inner_lo, terms.inner_hi
    ascending = values.flip(3) if x.reverse else values
    layout = ragged(run.values.like, c.BLOCK_M.value, c.BLOCK_N.value)
    dvalues = torch.full(run.dvalues.shape, torch.nan, dtype=HALF).transpose(1, 2).contiguous().transpose(1, 2)
    with poisoned_memory():
        tile_list, _ = run.lists(inputs.lengths, inputs.q.clone(), dvalues, inputs.k.clone(), inputs.v.clone())
        laid = run.values.laid_out(values, tile_list)
        gradient = run.values.empty_gradient(values, tile_list)
    assert laid.isnan().any()
    expected, compared = torch.zeros_like(dvalues), 0
    least, count = x.values
    for s in x.lengths.sequences():
        seq = SeqInfo(s.q0, s.k0, s.m, s.n, s.n - s.m)
        column = first_column.fn(seq, least)
        column = getattr(column, "value", column)
        i, j = torch.arange(s.m + c.BLOCK_M.value)[:, None], torch.arange(s.n + c.BLOCK_N.value)
        distance = j - i - seq.diagonal
        has = (distance >= lo) & (distance <= hi)
        for h in range(HEADS):
            ds = torch.randint(1, 200, distance.shape, generator=torch.Generator().manual_seed(h)).to(HALF)
            ds[:, s.n :] = 0.0  # keys that there are not
            own = distance[: s.m]
            entry = (own - least).clamp(0, count - 1)
            inside = (own >= least) & (own < least + count)
            wanted = ascending[0, h, s.q0 : s.q0 + s.m].gather(1, entry)
            of_pairs = torch.where(has[: s.m], ds[: s.m], 0.0)
            expected[0, h, s.q0 : s.q0 + s.m].scatter_add_(1, entry, of_pairs)
            for m0 in range(0, s.m, c.BLOCK_M.value):
                for n0 in range(0, s.n, c.BLOCK_N.value):
                    tile = has[m0 : m0 + c.BLOCK_M.value, n0 : n0 + c.BLOCK_N.value]
                    if not tile[: s.m - m0, : s.n - n0].any():
                        continue
                    at = box_of.fn(s.q0, s.m, 0, h, m0, c, n0 + column)
                    for row, cols, elements in _box(layout, laid, [int(getattr(a, "value", a)) for a in at]):
                        assert m0 + row < s.m, "a row of another sequence"
                        own_row = slice(n0, n0 + c.BLOCK_N.value)
                        seen = inside[m0 + row, own_row] & (j[own_row] < s.n)
                        compared += int(seen.sum())
                        assert not seen[cols.stop :].any()
                        found, right = laid[elements], wanted[m0 + row, own_row][cols]
                        assert torch.equal(found[seen[cols]], right[seen[cols]])
                        out = ds[m0 + row, n0 : n0 + c.BLOCK_N.value]
                        if tile.all():  # stored, by a walk over tiles that some pair is visible in
                            gradient[elements] = out[cols]
                        else:
                            gradient[elements] += torch.where(tile[row], out, -0.0)[cols]
    run.values.gradient(gradient, tile_list, dvalues)
    if x.reverse:
        expected = expected.flip(3)
    return compared, dvalues, expected


def some_see_nothing(x: Call, others: dict[str, tuple[int, ...]]) -> bool:
    """What a backward says. others: offsets that are a tensor of their own; else equal ones are one tensor."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    problem, inputs = x.read()
    lengths = inputs.lengths
    if torch.equal(lengths.cu_q, lengths.cu_k):
        lengths = lengths._replace(cu_k=lengths.cu_q)
    given = {name: torch.tensor(offsets, dtype=torch.int32) for name, offsets in others.items()}
    return HopperBackward._some_see_nothing(SimpleNamespace(problem=problem), lengths._replace(**given))


@pytest.mark.parametrize("lengths", [SHORT, MANY, USED], ids=["short", "many", "used"])
def test_tiles_are_listed(interpreter, lengths):
    """Each tile of queries once, sequences of most keys first and the last queries of each; rows of none are zero, with
    an LSE of -inf."""
    found, o, lse, block = interpreter(tile_list, Call(lengths))
    sequences = sorted(lengths.sequences(), key=lambda s: (-s.n, s.b))
    expected = [[m, s.q0, s.k0, s.m, s.n] for s in sequences for m in reversed(range(-(-s.m // block)))]
    assert found[0] == len(expected)
    assert found[8:].unflatten(0, (-1, 8))[: len(expected), :5].tolist() == expected
    inside = torch.zeros(lengths.total_q, dtype=torch.bool)
    inside[: lengths.total_q - lengths.past] = True
    assert o[:, :, inside].isnan().all()
    assert lse[:, :, inside].isnan().all()
    assert not o[:, :, ~inside].any()
    assert (lse[:, :, ~inside] == -torch.inf).all()


def test_sequences_that_overlap_fit_the_list(interpreter):
    lengths = Lengths((210,) * 5, (33,) * 5, longer=840)
    found, *_ = interpreter(tile_list, Call(lengths), {"cu_q": (0, 1050, 0, 1050, 0, 1050)})
    assert 0 < int(found[0]) <= found[8:].numel() // 8


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("lengths", [SHORT, USED], ids=["short", "used"])
def test_each_tile_and_head_comes_once(interpreter, lengths, by_keys):
    """Of a sequence all of one head, then those of the next; a list of keys has the sequences of most queries first."""
    found, out = interpreter(tiles_of_heads, Call(lengths), by_keys)
    sequences = sorted(lengths.sequences(), key=lambda s: (-(s.m if by_keys else s.n), s.b))
    expected = []
    for s in sequences:
        tiles = range(-(-(s.n if by_keys else s.m) // 64))
        order = tiles if by_keys else tiles[::-1]
        expected += [[s.q0, s.k0, tile, head] for head in range(HEADS) for tile in order]
    assert out.tolist() == expected
    assert int(found[0]) * HEADS == len(expected)


@pytest.mark.parametrize("lengths", [SHORT, USED], ids=["short", "used"])
def test_a_backward_makes_both_lists_at_once(interpreter, lengths):
    rows, expected_rows, keys, expected_keys = interpreter(lists_of_a_backward, Call(lengths))
    for found, expected in ((rows, expected_rows), (keys, expected_keys)):
        entries = 8 + 8 * int(expected[0][0])
        used = torch.arange(entries) % 8 < 6  # of an entry; and of the head, which is all written
        used[:8] = True
        assert torch.equal(found[0][:entries][used], expected[0][:entries][used])
        for tensor, right in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(tensor, right, rtol=0, atol=0, equal_nan=True)
    assert lengths.past == 0 or all((x == 0).any() and x.isnan().any() for x in rows[1:])


@pytest.mark.parametrize(
    ("lengths", "lag"),
    [(SHORT, 1), (USED, 1), (USED, 3), (SOME, 4), (USED, 1 << 28)],
    ids=["short", "used", "used, later", "many", "all before"],
)
def test_each_sum_is_zeroed_once_and_before(interpreter, monkeypatch, lengths, lag):
    """By the preprocess, or by work tiles that come earlier than all of a head's; and those of the head wait for all
    of them."""
    from tilewise.backends.gluon.sm90.backward import dq as dq_accum
    from tilewise.backends.gluon.varlen import SumOfHead

    before, sums, sizes, c = interpreter(sums_before, Call(lengths, causal=True), lag)
    sums, times = [SumOfHead(*row) for row in sums.tolist()], before.to(torch.int32)
    counted, waited = {}, []
    gl = gluon(
        arange=lambda *_: 0, zeros=lambda shape, *_: shape[0],
        store=lambda at, n: times.view(-1)[at : at + n].add_(1),
    )  # fmt: skip
    stubs = {
        "gl": gl,
        "work_tile_count": lambda *_: len(sums),
        "sum_of_head": lambda tile_list, t, *_: sums[t],
        "counters_at": lambda *_: SimpleNamespace(zeroed=0),
        "count_up": lambda at: counted.setdefault(at, []).append(t),
        "wait_count": lambda at, count: waited.append((at, count)),
    }
    kernel_stubs.replace(monkeypatch, dq_accum, **stubs)
    x, later = SimpleNamespace(tile_list=None), 0
    for t, of in enumerate(sums):
        dq_accum.zero_ahead.fn(t, x, 0, None, sizes, c)
        seq = SimpleNamespace(keys=of.parts * c.BLOCK_N - 3)
        work_tile = SimpleNamespace(n0=of.part * c.BLOCK_N, seq=seq, hk=of.hk, first_tile=of.place)
        dq_accum.wait_zeroed.fn(t, work_tile, x, SimpleNamespace(zeroed=0), sizes, c)
        assert len(waited) == (of.first >= sizes.zeroed)
        for at, count in waited:
            later += 1
            assert len(counted[at]) == count == of.parts
            assert max(counted[at]) <= of.first - lag
        waited.clear()
    assert later or lengths is not SOME
    expected = torch.zeros_like(times)
    for s in lengths.sequences():
        for h in range(HEADS):
            first = h * sizes.row_tiles + s.q0 // c.BLOCK_M + s.b
            expected[first : first + -(-s.m // c.BLOCK_M)] = 1
    assert torch.equal(times, expected)


def test_offsets_that_are_none(interpreter):
    """Whatever stands in them, a tile lies inside its tensors, and rows that no sequence has are zero."""
    lengths = Lengths((70, 70, 70), (33, 33, 33))
    found, o, _, block = interpreter(tile_list, Call(lengths), {"cu_q": (-5, 300, 20, 90)})
    tiles = found[8:].unflatten(0, (-1, 8))[: int(found[0])].tolist()
    assert tiles
    for m, q0, k0, queries, keys, *_ in tiles:
        assert 0 <= q0 <= q0 + queries <= lengths.total_q
        assert 0 <= k0 <= k0 + keys <= lengths.total_k
        assert m * block < queries
    reached = torch.zeros(lengths.total_q, dtype=torch.bool)
    for _, q0, _, queries, *_ in tiles:
        reached[q0 : q0 + queries] = True
    assert not o[:, :, ~reached].any()


@pytest.mark.parametrize(
    "call",
    [
        Call(SHORT, causal=True),
        Call(USED, window=(40, 20), softcap=2.0),
        Call(SHORT, bias="keys", sink="hm"),
        Call(USED, bias="queries", causal=True),
        Call(MANY, bias="keys", causal=True, sink="h"),
    ],
    ids=["causal", "window", "keys", "queries", "many"],
)
def test_rows_are_computed_again(interpreter, call):
    """Those that are NaN in the LSE, and no other."""
    _hold_repair(interpreter, call)


def _hold_repair(interpreter, call):
    o, lse, after, after_lse, spoilt = interpreter(repair, call, 0.2)
    assert spoilt.any()
    assert torch.equal(after[~spoilt], o[~spoilt])
    assert torch.equal(after_lse[~spoilt], lse[~spoilt])
    torch.testing.assert_close(after[spoilt], o[spoilt], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(after_lse[spoilt], lse[spoilt], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "call",
    [
        Call(SHORT, values=(-40, 41), causal=True),
        Call(SHORT, values=(-30, 71)),
        Call(SHORT, values=(-31, 32), causal=True),  # words of two from here on
        Call(USED, values=(-261, 300), window=(250, 20)),
        Call(Lengths((200, 130), (200, 150)), values=(3, 150), window=(None, 90)),
        Call(Lengths((200, 9), (330, 300)), values=(-300, 301), causal=True, reverse=True),
    ],
    ids=["causal", "full", "even", "window", "ahead", "reverse"],
)
def test_values_by_distance_are_tiles(interpreter, call):
    """Each tile that TMA reads has the entries of its pairs, beside other sequences' values and NaN; and through the
    same boxes each entry gets the dS of its pair, and 0 where no visible pair has it."""
    compared, found, expected = interpreter(values_by_distance, call)
    assert compared > 500
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "call",
    [
        Call(SHORT, values=(-40, 41), causal=True),
        Call(USED, values=(-261, 300), window=(250, 20), sink="h"),
        Call(Lengths((200, 9), (130, 300)), values=(-100, 301), reverse=True),
    ],
    ids=["causal", "window", "reverse"],
)
def test_rows_beside_values_are_computed_again(interpreter, call):
    _hold_repair(interpreter, call)


@pytest.mark.parametrize(
    "terms", [{"causal": True}, {"window": (3, None)}, {"window": (None, 3)}, {"window": (9, 9)}, {}]
)
@pytest.mark.parametrize(("queries", "keys"), [(5, 1), (1, 5), (12, 4), (4, 12), (7, 7)])
def test_what_a_band_hides_from_a_sequence_is_looked_for(queries, keys, terms):
    """A band counts from each sequence's last query and key: it may hide pairs of some where it hides none of the
    longest lengths taken as one sequence."""
    from tilewise.backends.gluon.sm90.common.traits import hides

    problem, _ = Call(Lengths((queries, 1), (keys, 1)), **terms).read()
    lo, hi = problem.score.band.lo, problem.score.band.hi
    hidden = any(
        (lo is not None and j - i < lo + n - m) or (hi is not None and j - i > hi + n - m)
        for m, n in ((queries, keys), (1, 1))
        for i in range(m)
        for j in range(n)
    )
    assert hides(problem) or not hidden
    assert hides(problem) == bool(terms)


@pytest.mark.parametrize("bias", [None, "keys", "queries"])
def test_programs_take_whichever_tile_is_next(bias):
    """The host does not know how many tiles there are, nor how long each is."""
    from tilewise.backends.gluon.sm90 import tiles
    from tilewise.backends.gluon.sm90.common.config import forward_config

    problem, _ = Call(SHORT, bias=bias).read()
    assert forward_config(problem).dynamic
    assert "dynamic tile scheduler" in tiles(problem)


@pytest.mark.parametrize(("bias", "axes"), [("keys", "cols"), ("queries", "rows")])
def test_one_key_or_query_of_each_sequence(bias, axes):
    """Each has a number of its own: a bias along them is none of one number."""
    problem, _ = Call(Lengths((1, 1, 1), (1, 1, 1)), bias=bias).read()
    assert problem.bias.axes == axes


@pytest.mark.parametrize(("heads", "total", "dim"), [(16, 32768, 128), (1, 5, 8), (3, 1 << 20, 256)])
def test_a_ragged_box_ends_with_its_sequence(heads, total, dim):
    """A coordinate is inside exactly for rows of the sequence, and its address, modulo 2^64, is the row's."""
    from tilewise.backends.gluon.tensors import ragged
    from tilewise.backends.gluon.varlen import RAGGED_AXIS, box_of

    x = torch.empty(total, heads, dim, dtype=torch.float16, device="meta").transpose(0, 1)[None]
    box = ragged(x, 64, max(32, dim))
    assert RAGGED_AXIS == 1 << 30
    first, count = total // 3, total // 2
    for row, h in ((0, 0), (count - 1, heads - 1), (count, 0), (count + 70, 0)):
        at = box_of.fn(first, count, 0, h, row, type("Packed", (), {"PACKED": True}))
        assert all(i >= 0 for i in at)
        assert (at[3] < box.shape[3]) == (row < count)
        assert all(at[n] < box.shape[n] for n in (0, 1, 2, 4))
        address = sum(i * stride for i, stride in zip(at, box.strides, strict=True)) * x.element_size()
        expected = (h * x.stride(1) + (first + row) * x.stride(2)) * x.element_size()
        assert address % 2**64 == expected
    assert all(stride * x.element_size() % 16 == 0 for stride in box.strides[:4])
    assert all(0 < stride * x.element_size() < 2**40 for stride in box.strides[:4])


@pytest.mark.parametrize(
    ("call", "forward", "backward"),
    [
        (Call(SHORT, bias="keys", causal=True), None, None),
        (Call(SHORT, bias="queries", softcap=9.0), None, None),
        (Call(SHORT, values=(-40, 41), causal=True), None, None),
        (Call(USED, values=(-40, 41), window=(300, 9)), None, None),
        (Call(SHORT, values=(-40, 41), heads=1), None, "where no two batch elements or heads share them"),
        (Call(SHORT, values=(-40, 41), start=0), "whose last query is at its last key", None),
        (Call(SHORT, values=(-40, 41), softcap=9.0), "alone: not beside a softcap", None),
        (Call(SHORT, values=(-40, 41), sink="h"), None, None),
    ],
)
def test_declines(call, forward, backward):
    from tilewise.backends.gluon import sm90

    problem, _ = call.read()
    problem = replace(problem, device="cuda", capability=(9, 0))
    for work, words in (("forward", forward), ("backward", backward))[: 1 if forward else 2]:
        found = sm90.declines(problem, work)
        assert found is None if words is None else words in found


def test_a_bias_of_the_keys_is_that_of_the_sequence(monkeypatch):
    """What forward and backward read and where sums go, by their places; nothing of the sequence that follows."""
    from tilewise.backends.gluon.sm90.common import key_bias
    from tilewise.backends.gluon.varlen import SeqInfo
    from tilewise.backends.launch.launcher import Strided

    class Places(torch.Tensor):
        """Which stands for a pointer, and for what is loaded from there."""

        def store(self, x):
            self.copy_(x)

    left, full = [], []
    gl = gluon(
        load=lambda at, mask, other: torch.where(mask, at, other),
        store=lambda at, x, mask: left.append((at[mask].tolist(), x[mask].tolist())),
    )  # fmt: skip
    kernel_stubs.replace(
        monkeypatch, key_bias, gl=gl, accumulator=lambda *_: None, LOG2E=1.0, warps_barrier=lambda: None,
        in_units=lambda bias, inverse: bias * inverse,
        mbarrier=SimpleNamespace(arrive=lambda at, count: full.append((at, count))),
    )  # fmt: skip
    as_python(monkeypatch, key_bias, "bias_of_keys")
    c = SimpleNamespace(BLOCK_N=64, SUBTILE_M=64, WARPS=8, BIAS_GROUP=2, SHARES_KEYS=False, ORDERED=False)
    sizes = SimpleNamespace(kv_heads=2, group=2, keys=1000)
    work = SimpleNamespace(b=0, h=torch.tensor(3), n0=64, seq=SeqInfo(70, 200, 10, 100, 90))
    x = SimpleNamespace(bias=Strided(0, 0, 1000, 0, 1), dbias=torch.zeros((), dtype=torch.int64))
    shared = SimpleNamespace(added=torch.zeros(64).as_subclass(Places))
    expected = [*range(1264, 1300), *[0] * 28]
    key_bias.keep_bias_of_keys.fn(x, shared, work, work.h, c)
    assert shared.added.tolist() == expected
    slots = [torch.zeros(64).as_subclass(Places) for _ in range(2)]
    index = [SimpleNamespace(index=lambda slot, of=of: of[slot]) for of in (slots, "ab")]
    pipelines = SimpleNamespace(bias=SimpleNamespace(slots=index[0]), k=SimpleNamespace(full=index[1]))
    key_bias.load_bias_of_keys.fn(x, pipelines, 1, work, 64, SimpleNamespace(inverse=2.0), c)
    assert [slot.tolist() for slot in slots] == [[0] * 64, [2 * place for place in expected]]
    assert full == [("b", 1)]
    sums = torch.tensor([2.0, 3.0, 4.0, -8.0]) * torch.arange(64.0)[:, None]  # of four threads each
    key_bias.store_sums.fn(sums, x, work, torch.tensor(3), sizes, c)
    c.ORDERED = True  # they have met
    key_bias.store_sums.fn(sums.sum(1), x, work, torch.tensor(3), sizes, c)
    assert left == 2 * [([*range(3264, 3300)], [*range(36)])]


@pytest.mark.parametrize(
    ("call", "other", "some"),
    [
        (Call(Lengths((5, 0, 3), (5, 0, 3)), causal=True), {}, False),
        (Call(Lengths((5, 0, 3), (5, 0, 3)), window=(2, 1)), {}, False),
        (Call(Lengths((5, 0, 3), (5, 0, 3))), {"cu_k": (0, 5, 5, 8)}, True),
        (Call(Lengths((5, 2, 3), (5, 0, 3))), {}, True),
        (Call(Lengths((5, 3), (5, 3), used=(2, 3))), {}, True),
    ],
)
def test_queries_that_see_nothing_are_thought_of(call, other, some):
    """Where a tile of queries has one tile of keys or none, dQ of none is 0 before; not where each sees itself."""
    assert some_see_nothing(call, other) == some
