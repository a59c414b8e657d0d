"""What runs in the child process of test_hopper_packed.py: kernels in plain Triton of packed batches, as Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from varlen_helpers import HALF, Lengths

from tilewise import varlen_attention
from tilewise.bias import RelativeBias
from tilewise.frontend.varlen import read_packed

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
            dropout_p=0.0, dropout_seed=None, deterministic=False, backend=None, validate=False, **options,
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
    run, inputs = x.forward()
    o, lse = torch.full_like(inputs.q, torch.nan), torch.full(inputs.q.shape[:3], torch.nan)
    given = {name: torch.tensor(offsets, dtype=torch.int32) for name, offsets in (others or {}).items()}
    found, semaphore = run.packed(inputs.lengths._replace(**given), o, lse=lse)
    assert semaphore[0] == 0
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
    found, _ = run.packed(inputs.lengths, o.clone(), lse=lse.clone())
    bias = inputs.bias if x.values is None else run.values.laid_out(inputs.parts.query, found)
    run.nan_fixup(*inputs[:3], bias, *inputs[4:6], None, found, after, None, after_lse)
    return o, lse, after, after_lse, spoilt


def tiles_of_heads(x: Call, by_keys: bool, block: int = 64) -> tuple[Tensor, Tensor]:
    """The list of tiles of queries, or of keys; and what it comes to for all heads, (first query,
    first key, tile, head) each."""
    from hopper_packed_kernel import tiles_of_heads_kernel

    from tilewise.backends.gluon.varlen import TileList

    problem, inputs = x.read()
    rows = inputs.k if by_keys else inputs.q
    found, _ = TileList(problem, block, rows, by_keys=by_keys)(inputs.lengths, rows.clone())
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
    expected_rows, _ = TileList(problem, 64, q, q)(inputs.lengths, *rows[2:])
    expected_keys, _ = TileList(problem, 128, k, k, by_keys=True)(inputs.lengths, *keys[2:])
    return [(row_list, *rows[:2]), (expected_rows, *rows[2:]), (key_list, *keys[:2]), (expected_keys, *keys[2:])]


def sums_before(x: Call, lag: int) -> tuple[Tensor, Tensor, Any, Any]:
    """Which numbers of the sum of dQ, (tiles, numbers), the preprocess zeroes if ``lag`` work tiles are under way at
    once; of each work tile of keys its `SumOfHead`; sizes, and what is compiled in."""
    from hopper_packed_kernel import sums_of_heads_kernel

    from tilewise.backends import Needs, Outputs
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    problem, inputs = x.read()
    outputs = Outputs(inputs.q, inputs.q[..., 0].float())
    run = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, False))
    c = SimpleNamespace(**{name: value.value for name, value in run.main.numbers[2]._asdict().items()})
    value_dim, sizes, *rest = run.before.numbers
    assert sizes.zeroed == 1 << 29  # all, by heads of this dimension
    c.ZEROED_BY_TILE = True
    sizes = sizes._replace(zeroed=lag + -(-problem.keys // c.BLOCK_N))
    run.before.numbers = (value_dim, sizes, *rest)
    stats, counts, dq_accum = run.buffers(inputs.q.device)
    dq_accum.fill_(torch.nan)
    row_list, key_list = run.lists(inputs.lengths, inputs.q.clone(), None, inputs.k.clone(), inputs.v.clone())
    run.before(*outputs[:1], None, outputs.o, outputs.lse, outputs.lse[..., None], None, stats, dq_accum, counts,
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
