"""Attention with bias terms: against float64 attention with the whole bias, and through all that a call meets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from bias_helpers import HKV, INF, B, H
from helpers import opcheck
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import attention, explain
from tilewise.backends import triton
from tilewise.backends.cpu import tiled
from tilewise.backends.gluon import sm90
from tilewise.bias import RelativeBias, alibi, low_rank_bias, relative_logits, swin_bias, t5_bias
from tilewise.bias.canonical import dense
from tilewise.frontend.arguments import read_call
from tilewise.operator import onnx as plain
from tilewise.spec import relative
from tilewise.spec.score import Distances, ScoreNumbers

BRAIN, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
M, N, D = 13, 18, 8


# --- terms by name, made of leaves ---


class Made:
    """ScoreNumbers, and the leaves that they are made of."""

    def __init__(self, dtype=FLOAT, seed=0, M=M, N=N):
        self.leaves, self.dtype, self.M, self.N = [], dtype, M, N
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=None):
        x = torch.randn(shape, generator=self.generator, dtype=DOUBLE).to(dtype or self.dtype).requires_grad_()
        self.leaves.append(x)
        return x


class Again(Made):
    """With leaves that are there."""

    def __init__(self, leaves, M, N):
        super().__init__(M=M, N=N)
        self.given = iter(leaves)

    def __call__(self, *shape, dtype=None):
        return next(self.given)


def by_query(new, heads=H, batch=B, R=7, lo=-3, **settings):
    return RelativeBias(new(batch, heads, new.M, R), lo=lo, **settings)


def by_key(new, heads=H, batch=B, R=7, lo=-3, **settings):
    return RelativeBias(new(batch, heads, new.N, R), lo=lo, on="key", **settings)


def for_all(new, heads=H, batch=1, R=7, lo=-3, **settings):
    return RelativeBias(new(batch, heads, 1, R), lo=lo, **settings)


BUCKETS = torch.tensor([3, 0, 0, 1, 2, 2, 4])
TERMS = {
    "query": by_query,
    "query, short": lambda new: by_query(new, R=2, lo=0, reverse=True),
    "query, longer than the keys": lambda new: by_query(new, R=50, lo=-20, batch=1),
    "query, the same for each": lambda new: RelativeBias(new(B, H, 1, 20).expand(-1, -1, new.M, -1), lo=-9),
    "query, hidden outside": lambda new: by_query(new, outside=-INF, heads=HKV),
    "query, all hidden": lambda new: by_query(new, outside=-INF, lo=900),
    "query, clamped": lambda new: by_query(new, outside="clamp", heads=1, reverse=True),
    "query, buckets": lambda new: by_query(new, R=5, buckets=BUCKETS, outside="clamp"),
    "query, starts": lambda new: by_query(new, outside=-INF, query_start=torch.tensor([4, 9]), R=9),
    "query, start of all": lambda new: by_query(new, query_start=torch.tensor(7), batch=1),
    "key": by_key,
    "key, hidden outside": lambda new: by_key(new, outside=-INF, query_start=2, key_start=1),
    "key, clamped": lambda new: by_key(new, outside="clamp", heads=HKV, reverse=True, batch=1),
    "key, buckets and starts": lambda new: by_key(new, R=5, buckets=BUCKETS, key_start=torch.tensor([1, 0]), heads=1),
    "all": for_all,
    "all, hidden outside": lambda new: for_all(new, outside=-INF, batch=B, heads=HKV, R=9),
    "all, starts": lambda new: for_all(new, outside="clamp", query_start=torch.tensor([4, 9]), heads=1),
    "t5": lambda new: t5_bias(new(8, H), True, 10),
    "t5, decoder": lambda new: t5_bias(new(8, H), False, 10, query_start=torch.tensor([4, 9])),
    "alibi": lambda new: alibi(new(H)),
    "alibi, signed, of the batch": lambda new: alibi(new(B, H), "signed"),
    "relative logits": lambda new: relative_logits(new(B, H, new.M, 3), new(3, 6), lo=0, reverse=True),
    "low rank": lambda new: low_rank_bias(new(B, H, new.M, 3), new(1, HKV, new.N, 3)),
    "low rank, one head": lambda new: low_rank_bias(new(1, 1, new.M, 1), new(B, 1, new.N, 1)),
    "cols and rows": lambda new: (new(B, 1, 1, new.N), new(H, new.M, 1)),
    "matrix, cols and rows": lambda new: (new(1, HKV, new.M, new.N), new(B, H, 1, new.N), new(1, 1, new.M, 1)),
    "two or three for each place": lambda new: (
        new(B, 1, new.M, new.N), new(1, H, new.M, new.N), new(HKV, new.M, new.N), new(B, 1, 1, new.N),
        new(1, HKV, 1, new.N), new(H, new.M, 1), new(1, 1, new.M, 1),
    ),
    "matrix, keys, query and all": lambda new: (
        new(B, 1, new.M, new.N), new(1, H, 1, new.N), by_query(new), t5_bias(new(8, H), True, 10),
    ),
    "everything": lambda new: (
        new(1, H, new.M, new.N), new(B, 1, 1, new.N), new(H, new.M, 1), by_query(new, HKV, outside="clamp"),
        by_key(new, 1, outside=-INF, R=20, lo=-9), alibi(new(H)), for_all(new), t5_bias(new(8, 1), True, 10),
        low_rank_bias(new(1, H, new.M, 2), new(1, 1, new.N, 2)),
    ),
}  # fmt: skip
each_term = pytest.mark.parametrize("name", TERMS)


def whole(bias, M=M, N=N):
    """The bias as one matrix, float64, by definition."""
    parts = bias if isinstance(bias, tuple) else (bias,)
    return sum(dense(x, B, H, M, N, HKV) for x in parts)


def tensors(dtype=FLOAT, M=M, N=N, seed=1):
    new = Made(dtype, seed)
    q, k, v = new(B, H, M, D), new(B, HKV, N, D), new(B, HKV, N, D)
    return (q, k, v), new(B, H, M, D).detach(), new(B, H, M, dtype=DOUBLE if dtype == DOUBLE else FLOAT).detach()


def unfused(q, k, v, bias, causal=False, softcap=None, sink=None):
    """Attention in q's dtype; a row that sees nothing is 0, its lse -inf."""
    group = H // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).mT).to(torch.promote_types(q.dtype, FLOAT)) / math.sqrt(D)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s + bias.to(s.dtype)
    if causal:
        m, n = s.shape[-2:]
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), -INF)
    blind = (s == -INF).all(-1, keepdim=True)
    lse = s.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -INF)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return p.to(q.dtype) @ v.repeat_interleave(group, 1), lse


def gradients(outputs, leaves, do, dlse):
    o, lse = outputs
    loss = (o * do.to(o.dtype)).sum() + (lse * dlse.to(lse.dtype)).masked_fill(lse == -INF, 0.0).sum()
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def hold(make, dtype=FLOAT, M=M, N=N, backend="cpu", table_dtype=None, **options):
    """The error rule for o, lse and every gradient: at most twice the error of unfused torch in the same dtype."""
    new = Made(table_dtype or dtype, M=M, N=N)
    bias, (qkv, do, dlse) = make(new), tensors(dtype, M, N)
    leaves = (*qkv, *new.leaves)
    found = attention(*qkv, bias=bias, return_lse=True, backend=backend, **options)
    exact = unfused(*(x.double() for x in qkv), whole(bias, M, N), **options)
    other = unfused(*qkv, whole(bias, M, N).to(torch.promote_types(dtype, FLOAT)), **options)
    results = [(*x, *gradients(x, leaves, do, dlse)) for x in (found, exact, other)]
    assert [x.dtype for x in results[0]] == [dtype, torch.promote_types(dtype, FLOAT), *(x.dtype for x in leaves)]
    for ours, truth, theirs in zip(*([x.detach() for x in each] for each in results), strict=True):
        assert torch.equal(ours == -INF, truth == -INF)
        ours, truth, theirs = (x.double().masked_fill(truth == -INF, 0.0) for x in (ours, truth, theirs))
        slack = {DOUBLE: 1e-13, FLOAT: 1e-5, HALF: 1e-3, BRAIN: 8e-3}[coarser(dtype, table_dtype)]
        error, allowed = float((ours - truth).abs().max()), 2 * float((theirs - truth).abs().max())
        assert error <= allowed + slack * max(1.0, float(truth.abs().max()))


def coarser(dtype, other):
    return min((dtype, other or dtype), key=lambda x: torch.finfo(x).bits)


@each_term
def test_every_term(name):
    hold(TERMS[name])
    hold(TERMS[name], causal=True, backend="reference")


@each_term
@pytest.mark.parametrize("sizes", [(20, 15), (1, 15), (20, 1)], ids=str)
def test_tile_by_tile(monkeypatch, name, sizes):
    """Tiles of a few queries and keys; the cap comes before the bias."""
    monkeypatch.setattr(tiled, "MAX_BLOCK_M", 8)
    monkeypatch.setattr(tiled, "BLOCK_N", 6)
    hold(TERMS[name], M=sizes[0], N=sizes[1])
    if "low" not in name and name != "everything" and 1 not in sizes:
        hold(TERMS[name], M=sizes[0], N=sizes[1], softcap=3.0, causal=True)


@each_term
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_dtypes(name, dtype):
    hold(TERMS[name], dtype)
    if "low" not in name and name != "everything":
        hold(TERMS[name], dtype, table_dtype=FLOAT)
        hold(TERMS[name], FLOAT, table_dtype=dtype)


@each_term
def test_gradcheck(name):
    """Of the term's leaves, those of q, k and v beside them: `hold` has them all."""
    new, (qkv, _, _) = Made(DOUBLE, M=3, N=4), tensors(DOUBLE, 3, 4)
    TERMS[name](new)

    def f(q, *leaves):
        o, lse = attention(q, *qkv[1:], bias=TERMS[name](Again(leaves, 3, 4)), return_lse=True)
        return o, lse.masked_fill(lse == -INF, 0.0)

    torch.autograd.gradcheck(f, (qkv[0], *new.leaves), fast_mode=True)


@pytest.mark.parametrize("make", [by_query, by_key, for_all], ids=["query", "key", "all"])
@pytest.mark.parametrize("heads", [H, HKV, 1])
@pytest.mark.parametrize("batch", [B, 1])
def test_each_broadcast(make, heads, batch):
    hold(lambda new: make(new, heads, batch))
    hold(lambda new: make(new, heads, batch, outside="clamp", query_start=torch.tensor([2, 7])))


# --- what is hidden ---


def test_nan_beyond_the_range_and_behind_it():
    """Entries that no pair has are not read, and a hidden key takes its NaN with it."""
    (q, k, v), do, _ = tensors()
    values = torch.randn(1, H, M, 60)
    beyond = values.clone()
    beyond[..., :8] = beyond[..., 50:] = math.nan  # entries of distances -30 .. 29; pairs have -17 .. 12
    expected = attention(q, k, v, bias=RelativeBias(values, lo=-30))
    torch.testing.assert_close(attention(q, k, v, bias=RelativeBias(beyond, lo=-30)), expected, rtol=0, atol=0)
    planted, other = (x.clone() for x in (k.detach(), v.detach()))
    planted[:, :, :4] = other[:, :, :4] = math.nan
    planted, other = planted.requires_grad_(), other.requires_grad_()
    for on, rows in (("query", M), ("key", N)):
        values = torch.randn(1, H, rows, 12, requires_grad=True)
        # Query i stands at i + 5 and sees the keys from there on: none of the first four.
        hidden = RelativeBias(values, lo=0, outside=-INF, on=on, query_start=torch.tensor([5, 5]))
        o = attention(q, planted, other, bias=hidden)
        torch.testing.assert_close(o, attention(q, k, v, bias=hidden))
        found = torch.autograd.grad(o, (q, planted, other, values), do)
        expected = torch.autograd.grad(attention(q, k, v, bias=hidden), (q, k, v, values), do)
        torch.testing.assert_close(found, expected)


def test_tiles_that_a_term_hides_are_not_visited(monkeypatch):
    monkeypatch.setattr(tiled, "MAX_BLOCK_M", 8)
    monkeypatch.setattr(tiled, "BLOCK_N", 6)
    seen, score_tile = [], tiled._Heads.score_tile
    monkeypatch.setattr(tiled._Heads, "score_tile", lambda self, q, x: seen.append(x.j) or score_tile(self, q, x))
    (q, k, v), _, _ = tensors(M=24, N=24)

    def count(**settings):
        seen.clear()
        attention(q, k, v, bias=RelativeBias(torch.randn(1, H, 24, 3), lo=-2, **settings))
        return len(seen)

    everything = count()
    assert count(outside=-INF) < everything
    assert count(outside=-INF) == count(outside=-INF, query_start=torch.tensor([0, 0]))


def test_a_tile_is_folded_before_its_diagonals_are_summed(monkeypatch):
    """To `FOLD` rows, whether they divide the tile's or not, and where distances beyond the entries are met."""
    for rows, cols in ((slice(0, 24), slice(0, 24)), (slice(7, 30), slice(3, 8)), (slice(20, 31), slice(1, 40))):
        for outside in (0.0, "clamp"):
            values = torch.zeros(1, 2, 1, 40, dtype=torch.float64)
            kept = relative.Relative(values, Distances("none", -20, 40, "clamp" if outside == "clamp" else "zero"))
            ds = torch.randn(3, 2, rows.stop - rows.start, cols.stop - cols.start, dtype=torch.float64)
            found = []
            for fold in (1000, 4):
                monkeypatch.setattr(relative, "FOLD", fold)
                found.append(torch.zeros_like(values))
                relative.add_gradient(found[-1], ds, kept, rows, cols)
            assert found[0].any()
            torch.testing.assert_close(*found)


# --- what a call meets ---


@each_term
def test_a_tuple_of_one_is_the_term(name):
    new, (qkv, _, _) = Made(), tensors()
    bias = TERMS[name](new)
    expected = attention(*qkv, bias=bias)
    assert torch.equal(attention(*qkv, bias=[*bias] if isinstance(bias, tuple) else (bias,)), expected)


def test_decoding_is_the_last_rows():
    """By a start that is an int or a tensor, with causal attention's own default."""
    (q, k, v), _, _ = tensors(M=N)
    values, table = torch.randn(1, H, N, 9), torch.randn(8, H)
    terms = RelativeBias(values, lo=-8), t5_bias(table, False, 10), alibi(table[0])
    full = attention(q, k, v, causal=True, bias=terms)
    for n in (1, 3):
        for start in (None, N - n, torch.tensor(N - n), torch.tensor([N - n] * B)):
            bias = (
                RelativeBias(values[:, :, -n:], lo=-8, query_start=start),
                t5_bias(table, False, 10, query_start=start),
                alibi(table[0], query_start=start),
            )
            found = attention(q[:, :, -n:], k, v, causal=True, bias=bias)
            torch.testing.assert_close(found, full[:, :, -n:])


@pytest.mark.parametrize(
    "name",
    ["query, starts", "key, buckets and starts", "everything"],
)
def test_compile(name):
    """A term is an argument; a second length does not graph-break, a second call does not compile."""
    new = Made()
    bias, (qkv, do, dlse) = TERMS[name](new), tensors()

    def f(q, k, v, bias):
        return attention(q, k, v, bias=bias, causal=True, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    leaves = (*qkv, *new.leaves)
    for _ in range(2):
        found, expected = (g(*qkv, bias) for g in (compiled, f))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(gradients(x, leaves, do, dlse) for x in (found, expected)))


def test_compile_what_makes_a_term():
    (q, k, v), do, _ = tensors()
    states, proj = torch.randn(B, H, M, 3, requires_grad=True), torch.randn(3, 6, requires_grad=True)

    def f(q, k, v, states, proj):
        bias = relative_logits(states, proj, lo=0, reverse=True, outside=-INF)
        return attention(q, k, v, bias=(bias, alibi(proj[0, :H])), causal=True)

    leaves = (q, k, v, states, proj)
    outputs = [g(*leaves) for g in (torch.compile(f, fullgraph=True, backend="aot_eager"), f)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(o, leaves, do) for o in outputs))


def test_other_starts_and_lengths_compile_once():
    frames = []

    def f(q, k, v, values, start):
        return attention(q, k, v, bias=RelativeBias(values, lo=-3, query_start=start))

    torch._dynamo.reset()
    compiled = torch.compile(
        f, fullgraph=True, dynamic=True, backend=lambda graph, _: frames.append(graph) or graph.forward
    )
    for start in (4, 5, 9, 17):
        (q, k, v), _, _ = tensors(M=M, N=N + start)
        values = torch.randn(1, H, M, 7 + start)
        torch.testing.assert_close(compiled(q, k, v, values, start), f(q, k, v, values, start))
    assert len(frames) == 1


@each_term
def test_checkpoint(name):
    new = Made()
    bias, (qkv, do, dlse) = TERMS[name](new), tensors()
    leaves = (*qkv, *new.leaves)

    def f(*qkv):
        return attention(*qkv, bias=bias, return_lse=True)

    found, expected = checkpoint(f, *qkv, use_reentrant=False), f(*qkv)
    torch.testing.assert_close(*(gradients(x, leaves, do, dlse) for x in (found, expected)))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(in_dims):
    q, values = torch.randn(3, B, H, M, D, dtype=DOUBLE), torch.randn(3, 1, H, M, 7, dtype=DOUBLE)
    _, k, v = tensors(DOUBLE)[0]

    def loss(backend):
        def f(q, values):
            return attention(q, k, v, bias=RelativeBias(values, lo=-3), backend=backend).square().sum()

        return torch.vmap(torch.func.grad(f, argnums=(0, 1)), in_dims)

    given = [x if dim == 0 else x[0] for x, dim in zip((q, values), in_dims, strict=True)]
    torch.testing.assert_close(loss("cpu")(*given), loss("reference")(*given))


@each_term
def test_deterministic_repeats_bit_by_bit(name):
    new = Made()
    bias, (qkv, do, dlse) = TERMS[name](new), tensors()

    def results():
        outputs = attention(*qkv, bias=bias, return_lse=True, deterministic=True)
        return *outputs, *gradients(outputs, (*qkv, *new.leaves), do, dlse)

    assert all(map(torch.equal, results(), results()))


@each_term
def test_the_operator(name):
    """What compilers and exporters are told, and PyTorch's own operators for ONNX."""
    new, (qkv, _, _) = Made(), tensors()
    bias = TERMS[name](new)
    call = call_of(*qkv, bias=bias)
    terms = ScoreNumbers.of(call.score, False, "cpu")
    assert terms.score == call.score
    if name in ("everything", "query, starts", "key, buckets and starts", "cols and rows"):
        inputs = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in call.inputs.flat()]
        opcheck(torch.ops.tilewise.attention.default, (*inputs, *terms), traced=name == "everything")
    found = plain.attention(*call.inputs, call.score)
    torch.testing.assert_close(found, attention(*qkv, bias=bias, return_lse=True))


def call_of(q, k, v, **options):
    usual = {"mask": None, "sink": None, "causal": False, "window": None, "dropout_p": 0.0, "dropout_seed": None}
    return read_call(q, k, v, **usual, deterministic=None, backend=None, **options)


def test_gradients_only_for_what_asks_for_one():
    (q, k, v), do, _ = tensors()
    q, k, v = (x.detach() for x in (q, k, v))
    values, others = (torch.randn(1, H, n, 7, requires_grad=n == M) for n in (M, N))
    bias = (RelativeBias(values, lo=-3), RelativeBias(others, lo=-3, on="key"), torch.randn(1, 1, M, N))
    o = attention(q, k, v, bias=bias)
    o.backward(do)
    assert values.grad is not None
    assert others.grad is None
    with torch.no_grad():
        torch.testing.assert_close(attention(q, k, v, bias=bias), o.detach())


def test_without_queries_or_keys():
    for m, n in ((0, 5), (5, 0)):
        for name in ("query", "key", "t5", "alibi", "cols and rows", "low rank"):
            new, (qkv, do, dlse) = Made(M=m, N=n), tensors(M=m, N=n)
            outputs = attention(*qkv, bias=TERMS[name](new), return_lse=True)
            found = gradients(outputs, (*qkv, *new.leaves), do, dlse)
            assert all(x.eq(0).all() for x in (outputs[0], *found))


def test_beside_mask_window_sink_and_softcap():
    (q, k, v), do, dlse = tensors()
    mask, sink, new = torch.rand(B, 1, M, N) < 0.7, torch.randn(H, requires_grad=True), Made()
    bias = TERMS["matrix, keys, query and all"](new)
    options = {"mask": mask, "sink": sink, "window": (9, 2), "softcap": 3.0, "scale": 0.7, "return_lse": True}
    found, expected = (attention(q, k, v, bias=bias, **options, backend=backend) for backend in ("cpu", "reference"))
    torch.testing.assert_close(found, expected)
    leaves = (q, k, v, sink, *new.leaves)
    torch.testing.assert_close(*(gradients(x, leaves, do, dlse) for x in (found, expected)), rtol=1e-4, atol=1e-5)


def test_low_rank_keeps_the_scale_of_q():
    (q, k, v), _, _ = tensors()
    u, w = torch.randn(1, H, M, 3), torch.randn(1, HKV, N, 3)
    for scale in (None, 0.3):
        bias = u @ w.repeat_interleave(H // HKV, 1).mT
        found = attention(q, k, v, bias=low_rank_bias(u, w), scale=scale)
        torch.testing.assert_close(found, attention(q, k, v, bias=bias, scale=scale))


def test_autocast():
    (q, k, v), _, _ = tensors()
    u, w = torch.randn(1, H, M, 3, requires_grad=True), torch.randn(1, HKV, N, 3)
    values = torch.randn(1, H, M, 7, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k, v, bias=(low_rank_bias(u, w), RelativeBias(values, lo=-3)))
    assert o.dtype == BRAIN
    o.float().sum().backward()
    assert (u.grad.dtype, values.grad.dtype, q.grad.dtype) == (FLOAT, FLOAT, FLOAT)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"must be q's torch.float64, got .*32"):
        attention(*(x.double() for x in (q, k, v)), bias=low_rank_bias(u, w))


def test_swin_is_a_tensor():
    table = torch.randn(9, H, requires_grad=True)
    q, k, v = (torch.randn(B, H, 4, D) for _ in range(3))
    attention(q, k, v, bias=swin_bias(table, (2, 2))).sum().backward()
    assert table.grad.shape == table.shape


# --- plans ---


def test_explain():
    (q, k, v), _, _ = tensors()
    values = torch.randn(1, H, M, 50, dtype=HALF, requires_grad=True)
    table = torch.randn(8, H, requires_grad=True)
    bias = (torch.zeros(M, N), torch.zeros(N), RelativeBias(values, lo=-20, outside="clamp"), t5_bias(table, True, 10))
    e, without = explain(q, k, v, bias=bias), explain(q, k, v, bias=bias[0])
    for words in (
        "  bias (1, 1, 13, 18) float32\n",
        "  a bias along the keys (1, 1, 1, 18) float32\n",
        "  a bias by distance with values per query (1, 4, 13, 50) float16, for j - i = -15 to 34, the end's beyond, "
        "with its gradient\n",
        "  a bias by distance alone (1, 4, 1, 30) float32, with its gradient\n",
        "(PyTorch's fused kernel takes a bias in one tensor)",
    ):
        assert words in str(e), str(e)
    assert (e.forward.flops, e.backward.flops) == (without.forward.flops, without.backward.flops)
    read, written = 18 * 4 + 4 * 13 * 30 * 2 + 4 * 30 * 4, 4 * 13 * 30 * 2 + 4 * 30 * 4
    assert e.forward.bytes - without.forward.bytes == read
    assert e.backward.bytes - without.backward.bytes == read + written
    starts = RelativeBias(values, lo=-20, outside=-INF, query_start=torch.tensor([1, 2]))
    words = "float16, from positions on the device, hidden beyond, with its gradient"
    assert words in str(explain(q, k, v, bias=starts))


def test_backends_without_kernels_say_so():
    meta = {"device": "meta", "dtype": BRAIN}
    q, k, v = (torch.empty(2, 4, 4096, 128, **meta) for _ in range(3))
    values = torch.empty(2, 4, 4096, 1025, **meta)
    relative = RelativeBias(values, lo=-1024)
    cols, matrix = torch.empty(2, 1, 1, 4096, **meta), torch.empty(4096, 4096, **meta)
    why = "has no kernel for {} yet"
    beside = "has no kernel for a bias along the keys beside another bias yet: add them to that one, as one tensor"
    for bias, reason in (
        (relative, None),
        (RelativeBias(values, lo=-1024, outside="clamp"),
         "reads a bias by distance with values per query that is 0 outside its distances, or masked by the window: not "
         "'clamp'"),
        (alibi(torch.empty(4, **meta)), None),
        ((relative, alibi(torch.empty(4, **meta))), why.format(
            "a bias by distance with values per query and a bias by distance alone")),
        ((matrix, cols), beside),
    ):  # fmt: skip
        problem = explain(q, k, v, bias=bias, device="cpu").problem
        problem = replace(problem, device="cuda", capability=(9, 0))
        assert (triton.declines(problem), sm90.declines(problem)) == (None, reason)
        plan = explain(q, k, v, bias=bias, device="sm_90").plan
        if reason is None:
            assert (plan.backend, plan.backward) == ("hopper", "hopper")
        else:
            assert (plan.backend, plan.backward, plan.declined[0]) == ("triton", "triton", ("hopper", reason))


def test_what_is_one_tensor_goes_to_every_backend():
    meta = {"device": "meta", "dtype": BRAIN}
    q, k, v = (torch.empty(2, 4, 4096, 64, **meta) for _ in range(3))
    shapes = ((2, 4, 4096, 4096), (1, 1, 1, 4096), (1, 4, 4096, 1))
    low_rank = low_rank_bias(torch.empty(1, 4, 4096, 8, **meta), torch.empty(1, 4, 4096, 8, **meta))
    for bias in (*((torch.empty(shape, **meta),) for shape in shapes), low_rank):
        plan = explain(q, k, v, bias=bias, device="sm_90").plan
        assert (plan.backend, plan.problem.parts) == ("hopper", None)
        alone = None if bias is low_rank else bias[0]
        assert plan.problem.bias == explain(q, k, v, bias=alone, device="cpu").problem.bias


# --- errors ---

BAD = [
    (lambda: RelativeBias(torch.zeros(1, H, M + 1, 5), lo=0), ValueError,
     "RelativeBias.values: shape (1, 4, 14, 5) is not (B|1, H|Hkv|1, M|1, R) = (2|1, 4|2|1, 13|1, 5)"),
    (lambda: alibi(torch.zeros(3)), ValueError, "Alibi.slopes: shape (3,) is not (H|1) = (4|1)"),
    (lambda: (torch.zeros(M, N), "alibi"), TypeError, "bias: expected tensors and terms of tilewise.bias, got str"),
    (lambda: (torch.zeros(M, N + 1),), ValueError,
     "bias: shape (13, 19) does not broadcast to (2|1, 4|2|1, 13|1, 18|1)"),
    (lambda: RelativeBias(torch.zeros(1, H, M, 5, device="meta"), lo=0), ValueError,
     "RelativeBias.values: must be on cpu, got meta"),
    (lambda: "alibi", TypeError, "bias: expected a torch.Tensor, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_errors(make, error, message):
    (q, k, v), _, _ = tensors()
    for function in (attention, explain):
        with pytest.raises(error) as found:
            function(q, k, v, bias=make())
        assert str(found.value) == message


def test_errors_of_other_arguments_come_first():
    (q, k, v), _, _ = tensors()
    bias = RelativeBias(torch.zeros(1, H, 99, 5), lo=0)
    with pytest.raises(ValueError, match=r"^q: expected 4 dimensions"):
        attention(q[0], k, v, bias=bias)
    with pytest.raises(ValueError, match=r"^k: batch size"):
        attention(q, k[:1], v, bias=bias)
    with pytest.raises(ValueError, match=r"^LowRankBias: becomes part of q @ k.mT, and a bias does not"):
        attention(q, k, v, bias=low_rank_bias(torch.zeros(1, H, M, 2), torch.zeros(1, 1, N, 2)), softcap=2.0)


def test_errors_of_the_operator():
    """Who calls it by its name is told too."""
    (q, k, v), _, _ = tensors()
    call = call_of(q, k, v, bias=RelativeBias(torch.zeros(1, H, M, 5), lo=0, query_start=torch.tensor([1, 2])))
    terms, parts = ScoreNumbers.of(call.score, False, "cpu"), call.inputs.parts
    for change, words in (
        ({"query": None}, "values per query and their distances go together"),
        ({"query": torch.zeros(1, H, M, 4)}, "values per query: 5 distances with 4 entries"),
        ({"query": torch.zeros(1, 3, M, 5)}, r"values per query: shape \(1, 3, 13, 5\) does not fit the call"),
        ({"query_shift": torch.zeros(3)}, r"values per query: expected a shift \(2|1,\), got shape \(3,\)"),
        ({"toeplitz": torch.zeros(1, 1, 1, 9)}, r"values per all: shape \(1, 1, 1, 9\) does not fit the call"),
    ):
        inputs = call.inputs._replace(parts=parts._replace(**change))
        with pytest.raises(ValueError, match=f"^bias: {words}"):
            torch.ops.tilewise.attention(*inputs.flat(), *terms)


def test_tilewise_bias_is_there():
    assert tilewise.bias.RelativeBias is RelativeBias
