"""Packed batches: every call equals its sequences one by one, and what a call meets on its way."""

from __future__ import annotations

import math

import pytest
import torch
import varlen_draws
from helpers import opcheck
from pairwise import pairwise
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint
from varlen_biases import BIASES, padded, t5, toeplitz
from varlen_helpers import (
    BRAIN,
    DOUBLE,
    DV,
    FLOAT,
    HALF,
    HKV,
    LONG,
    ONES,
    RUNS,
    SMALL,
    SQUARE,
    USED,
    Again,
    D,
    H,
    Lengths,
    New,
    call,
    gradients,
    hold,
    one_by_one,
    tensors,
)

from tilewise import attention, varlen_attention
from tilewise.backends import sequences
from tilewise.bias import RaggedBias, alibi
from tilewise.frontend import varlen
from tilewise.spec.score import ScoreNumbers

INF = math.inf
each_backend = pytest.mark.parametrize("backend", ["cpu", "reference"])


# --- lengths ---


@each_backend
@pytest.mark.parametrize("dtype", [DOUBLE, FLOAT, HALF, BRAIN], ids=str)
@pytest.mark.parametrize("terms", [{}, {"causal": True}], ids=str)
def test_adversarial_lengths(backend, dtype, terms):
    hold(LONG, dtype=dtype, backend=backend, dims=(16, 16), **terms)


EDGES = {
    "small": SMALL,
    "keys that do not count": USED,
    "square": SQUARE,
    "ones": ONES,
    "ones of keys": Lengths(ONES.keys, ONES.queries),
    "runs": RUNS,
    "runs without a gap": Lengths((2, 2, 0, 2, 2, 1, 1), (3, 3, 3, 3, 3, 0, 0)),
    "one": Lengths((5,), (7,)),
    "longest larger than needed": SMALL._replace(longer=60),
    "no sequence": Lengths((), ()),
    "no sequence, rows": Lengths((), (), past=3),
    "no queries": Lengths((0, 0), (3, 2)),
    "no keys": Lengths((3, 2), (0, 0)),
    "no rows": Lengths((0, 0, 0), (0, 0, 0)),
    "no key counts": Lengths((3, 2), (4, 1), used=(0, 0)),
}
each_edge = pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES)


@pytest.mark.parametrize(
    ("edge", "backend", "offsets_dtype"),
    pairwise(EDGES, ["cpu", "reference"], [torch.int32, torch.int64]),
    ids=str,
)
def test_lengths(edge, backend, offsets_dtype):
    lengths = EDGES[edge]
    for terms in ({}, {"causal": True}):
        o, lse = hold(lengths, dtype=DOUBLE, backend=backend, offsets_dtype=offsets_dtype, validate=True, **terms)
        past = slice(sum(lengths.queries), None)
        assert (o[past] == 0).all()
        assert (lse[:, past] == -INF).all()


@each_backend
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (5, 11)], ids=str)
def test_heads_and_dimensions(backend, heads, dims):
    hold(SMALL, heads=heads, dims=dims, backend=backend, causal=True)


@each_backend
@pytest.mark.parametrize("lengths", [SMALL, USED], ids=["small", "used"])
@pytest.mark.parametrize(
    "terms", [{"window": (2, 1)}, {"window": (3, None), "causal": True}, {"softcap": 2.0}, {"scale": 0.7}], ids=str
)
@pytest.mark.parametrize("dtype", [DOUBLE, BRAIN], ids=str)
def test_numbers_of_the_score(backend, lengths, terms, dtype):
    hold(lengths, dtype=dtype, backend=backend, **terms)


@each_backend
def test_slices_of_packed_projections(backend):
    """q, k and v of one tensor (total, 3, H, D), and its gradient."""
    qkv = torch.randn(SQUARE.total_q, 3, H, D, dtype=DOUBLE, requires_grad=True)
    found, exact = (f(qkv.unbind(1), SQUARE, causal=True, **terms)
                    for f, terms in ((call, {"backend": backend}), (one_by_one, {})))  # fmt: skip
    torch.testing.assert_close(found, exact)
    do, dlse = torch.randn_like(found[0]), torch.randn_like(found[1])
    torch.testing.assert_close(*(gradients(x, (qkv,), do, dlse) for x in (found, exact)))
    heads_first = qkv.detach().permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    torch.testing.assert_close(call(heads_first.unbind(1), SQUARE, causal=True, backend=backend), found)


# --- what is hidden ---


@each_backend
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_nan_stays_in_its_sequence(backend, dtype):
    """Of a neighbour, of keys that do not count, and of rows past the last sequence."""
    lengths = Lengths((4, 3, 5), (6, 8, 7), used=(5, 8, 6), past=2)
    qkv, do, dlse = tensors(lengths, dtype)
    clean = call(qkv, lengths, backend=backend)
    expected = gradients(clean, qkv, do, dlse)
    planted = [x.detach().clone() for x in qkv]
    for n, x in enumerate(planted):
        ends = (4, 7, 12) if n == 0 else (6, 14, 21)
        x[ends[0] : ends[1]] = x[ends[2] :] = math.nan  # sequence 1, and the end
        if n:
            x[5] = x[20] = math.nan
    planted = [x.requires_grad_() for x in planted]
    do = do.clone()
    do[12:] = math.nan  # nothing comes of these rows
    o, lse = call(planted, lengths, backend=backend)
    found = torch.autograd.grad((o, lse), planted, (do, dlse))
    for ours, theirs, axis in ((o, clean[0], 0), (lse, clean[1], 1)):
        for rows in (slice(0, 4), slice(7, 14)):
            assert torch.equal(ours.movedim(axis, 0)[rows], theirs.movedim(axis, 0)[rows])
    for n, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        middle = slice(4, 7) if n == 0 else slice(6, 14)
        keep = torch.ones(ours.shape[0], dtype=torch.bool)
        keep[middle] = False
        assert torch.equal(ours[keep], theirs[keep])
        assert (ours[12 if n == 0 else 21 :] == 0).all()
        if n:
            assert (ours[[5, 20]] == 0).all()


@each_backend
def test_a_row_that_sees_nothing(backend):
    mask = torch.ones(1, 1, SQUARE.max_q, 1, dtype=torch.bool)
    mask[:, :, 2] = False
    o, lse = hold(SQUARE, mask=mask, backend=backend)
    assert (o[[2, 6]] == 0).all()
    assert (lse[:, [2, 6]] == -INF).all()


# --- bias ---

each_bias = pytest.mark.parametrize("name", BIASES)


@each_bias
def test_bias(name):
    hold(SMALL, BIASES[name], DOUBLE)
    hold(USED, BIASES[name], DOUBLE, causal=True)


@pytest.mark.parametrize(
    "name", ["ragged", "padded 1kmn", "two along the keys and two along the queries", "everything"]
)
def test_bias_of_the_reference(name):
    """Whose sequences are those of the CPU: the same module hands them on, one by one."""
    hold(SMALL, BIASES[name], DOUBLE, "reference")
    hold(USED, BIASES[name], DOUBLE, "reference", causal=True)


@each_bias
def test_bias_of_sequences_of_equal_lengths(name):
    hold(RUNS, BIASES[name], DOUBLE, causal=True)


@each_bias
@pytest.mark.parametrize("dtypes", [(BRAIN, FLOAT), (HALF, HALF)], ids=str)
def test_bias_dtypes(name, dtypes):
    dtype, bias_dtype = dtypes
    if "low" in name or name == "everything":
        bias_dtype = dtype  # u and w become a part of q and k
    hold(USED, BIASES[name], dtype, bias_dtype=bias_dtype)


@pytest.mark.parametrize("name", ["ragged", "padded 1hmn", "along the queries", "query", "t5, starts", "everything"])
def test_bias_of_long_sequences(name):
    hold(LONG, {**BIASES, "padded 1hmn": padded("1hmn")}[name] if name != "t5, starts" else toeplitz(t5, 8, H))


@each_edge
@pytest.mark.parametrize("name", ["ragged", "along the keys", "along the queries", "query", "key", "t5", "padded bhmn"])
def test_bias_where_lengths_end(lengths, name):
    if name == "padded bhmn" and 0 in (lengths.B, lengths.max_q, lengths.max_k):
        return
    hold(lengths, BIASES[name], DOUBLE)


@pytest.mark.parametrize("name", ["ragged", "along the keys", "query", "t5", "padded b11n"])
def test_a_bias_alone_asks_for_a_gradient(name):
    new = New(SMALL)
    bias, parts = BIASES[name](new)
    qkv, do, dlse = tensors(SMALL)
    qkv = [x.detach() for x in qkv]
    found, exact = call(qkv, SMALL, bias=bias), one_by_one(qkv, SMALL, parts)
    for ours, truth in zip(*(gradients(x, new.leaves, do, dlse) for x in (found, exact)), strict=True):
        torch.testing.assert_close(ours, truth.to(ours.dtype))


def test_a_ragged_bias_in_another_order():
    """Matrices lie where the offsets say; nobody reads between them."""
    qkv, do, dlse = tensors(SQUARE, DOUBLE)
    values = torch.randn(H, 100, dtype=DOUBLE, requires_grad=True)
    begins = (60, 0, 40)

    def parts(s):
        return [values[:, begins[s.b] : begins[s.b] + s.m * s.n].unflatten(1, (s.m, s.n))[None]]

    bias = RaggedBias(values, torch.tensor([*begins, 0]))
    leaves = (*qkv, values)
    found, exact = call(qkv, SQUARE, bias=bias), one_by_one(qkv, SQUARE, parts)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(*(gradients(x, leaves, do, dlse) for x in (found, exact)))


def test_a_ragged_bias_that_has_gaps():
    """Equal lengths, and matrices that do not follow each other: no run."""
    lengths = Lengths((2, 2, 2), (3, 3, 3))
    qkv, do, dlse = tensors(lengths, DOUBLE)
    values = torch.randn(H, 30, dtype=DOUBLE, requires_grad=True)
    begins = (0, 6, 20)

    def parts(s):
        return [values[:, begins[s.b] : begins[s.b] + 6].unflatten(1, (2, 3))[None]]

    found, exact = (
        call(qkv, lengths, bias=RaggedBias(values, torch.tensor([*begins, 0]))),
        one_by_one(qkv, lengths, parts),
    )
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(*(gradients(x, (*qkv, values), do, dlse) for x in (found, exact)))


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        (Lengths((16,) * 512, (16,) * 512), [512]),
        (RUNS, [4, 2]),
        (SMALL, [1, 1, 1, 1]),
        (Lengths((600,) * 5, (700,) * 5), [2, 2, 1]),
    ],
    ids=["short", "runs", "small", "long"],
)
def test_sequences_of_equal_lengths_are_one_dense_batch(monkeypatch, lengths, batches):
    """In the forward and in the backward."""
    found, runs = [], sequences._runs
    monkeypatch.setattr(sequences, "_runs", lambda *x: (found.append(run.batch) or run for run in runs(*x)))
    qkv, do, dlse = tensors(lengths)
    gradients(call(qkv, lengths), qkv, do, dlse)
    assert found == 2 * batches


@each_backend
@pytest.mark.parametrize("axes", ["bhmn", "b11n", "1km1", "11mn"])
def test_mask(backend, axes):
    sizes = {"b": USED.B, "h": H, "k": HKV, "m": USED.max_q, "n": USED.max_k, "1": 1}
    mask = torch.rand([sizes[axis] for axis in axes], generator=torch.Generator().manual_seed(3)) < 0.7
    hold(USED, mask=mask, backend=backend)
    hold(RUNS, mask=mask[:, :, : RUNS.max_q, : RUNS.max_k], backend=backend)
    hold(USED, BIASES["ragged"], BRAIN, backend, mask=mask, causal=True, bias_dtype=FLOAT)


@each_backend
@pytest.mark.parametrize("shape", [(H,), (1,), (H, USED.total_q), (1, USED.total_q)], ids=str)
@pytest.mark.parametrize("dtype", [DOUBLE, BRAIN], ids=str)
def test_sink(backend, shape, dtype):
    sink = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=dtype)
    sink[..., 1 % sink.shape[-1]] = -INF
    hold(USED, sink=sink.requires_grad_(), dtype=dtype, backend=backend)
    hold(USED, BIASES["along the keys"], sink=sink, dtype=dtype, backend=backend, causal=True, softcap=3.0)


@each_backend
@pytest.mark.parametrize("lengths", [Lengths((0, 0), (3, 3), past=2), Lengths((3, 2), (0, 0), past=2)], ids=str)
def test_a_sink_where_there_is_nothing_to_compute(backend, lengths):
    """Rows past the last sequence have none."""
    sink = torch.randn(H, lengths.total_q, generator=torch.Generator().manual_seed(4), requires_grad=True)
    hold(lengths, sink=sink, backend=backend)
    qkv, do, dlse = tensors(lengths, DOUBLE)
    o, lse = call(qkv, lengths, sink=sink, backend=backend)
    inside = lengths.total_q - lengths.past
    dlse = dlse.to(lse.dtype)
    dlse[:, inside:] = math.nan
    (dsink,) = torch.autograd.grad((o, lse), sink, (do, dlse))
    assert (dsink[:, inside:] == 0).all()
    torch.testing.assert_close(dsink[:, :inside], dlse[:, :inside].to(sink.dtype))


@pytest.mark.parametrize("n", range(60))
def test_at_random(n):
    """Lengths, biases, mask, sink and numbers together; the first of 5,000 that were tried."""
    varlen_draws.drawn(n).hold()


# --- dropout ---


@each_backend
@pytest.mark.parametrize("name", [None, "alibi"])
def test_dropout_is_that_of_the_padded_batch(backend, name):
    """Sequence b drops what batch element b would."""
    lengths = Lengths((5, 0, 17, 17, 2), (5, 3, 17, 17, 20))
    (q, k, v), do, _ = tensors(lengths, DOUBLE)
    bias = None if name is None else BIASES[name](New(lengths, DOUBLE))[0]
    terms = {"bias": bias, "dropout_p": 0.4, "dropout_seed": (7, 8), "backend": backend}
    o, _ = call((q, k, v), lengths, **terms)
    found = torch.autograd.grad(o, (q, k, v), do)
    mask = torch.zeros(lengths.B, 1, lengths.max_q, lengths.max_k, dtype=torch.bool)
    apart, rows = [q.new_zeros(lengths.B, heads, n, d) for heads, n, d in
                   ((H, lengths.max_q, D), (HKV, lengths.max_k, D), (HKV, lengths.max_k, DV))], []  # fmt: skip
    for s in lengths.sequences():
        mask[s.b, :, : s.m, : s.n] = True
        for x, y, where in zip(apart, (q, k, v), (s.rows, s.cols, s.cols), strict=True):
            x[s.b, :, : where.stop - where.start] = y[where].transpose(0, 1)
    if name == "alibi":  # a padded batch counts from the last row of the longest: each says where it begins
        starts = torch.tensor([n - m for m, n in zip(lengths.queries, lengths.keys, strict=True)])
        terms["bias"] = alibi(bias.slopes, query_start=starts)
    padded_o = attention(*apart, mask=mask, **terms)
    rows = [padded_o[s.b, :, : s.m].transpose(0, 1) for s in lengths.sequences()]
    torch.testing.assert_close(o, torch.cat(rows))
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(rows), (q, k, v), do))


def test_dropout_without_a_seed_takes_one_of_torch():
    qkv, _, _ = tensors(SQUARE)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(call(qkv, SQUARE, dropout_p=0.5)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# --- what a call meets ---


@pytest.mark.parametrize("name", [None, "ragged", "along the keys", "query, starts", "t5", "everything"])
def test_gradcheck(name):
    lengths = Lengths((2, 0, 3), (3, 1, 2), used=(2, 1, 2), past=1)
    new, (qkv, _, _) = New(lengths, DOUBLE), tensors(lengths, DOUBLE, dims=(3, 2))
    sink = torch.randn(H, dtype=DOUBLE, requires_grad=True)
    if name is not None:
        BIASES[name](new)

    def f(q, k, v, sink, *leaves):
        bias = None if name is None else BIASES[name](Again(lengths, leaves))[0]
        o, lse = call((q, k, v), lengths, bias=bias, sink=sink)
        return o, lse.masked_fill(lse == -INF, 0.0)

    torch.autograd.gradcheck(f, (*qkv, sink, *new.leaves), fast_mode=True)


@pytest.mark.parametrize("name", ["ragged", "t5, starts", "everything"])
def test_compile(name):
    """Other offsets of the same totals run what was compiled."""
    graphs = []
    lengths = (SMALL, SMALL._replace(queries=(0, 7, 1, 1, 2, 5), keys=(1, 9, 3, 0, 4, 2)))
    longest = lengths[0].max_q, lengths[0].max_k
    assert longest == (lengths[1].max_q, lengths[1].max_k)

    def f(q, k, v, cu_q, cu_k, bias):
        return varlen_attention(q, k, v, cu_q, cu_k, *longest, bias=bias, causal=True, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=lambda *x: graphs.append(x) or aot_eager(*x))
    for x in lengths:
        new, (qkv, do, dlse) = New(x), tensors(x)
        bias = BIASES[name](new)[0]
        if isinstance(bias, RaggedBias):  # pairs of both lengths fit
            bias = RaggedBias(new(H, 200), bias.offsets)
            new.leaves = new.leaves[1:]
        leaves = (*qkv, *new.leaves)
        outputs = [g(*qkv, *x.arguments()[:2], bias) for g in (compiled, f)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(gradients(x, leaves, do, dlse) for x in outputs))
        if name == "everything":
            break  # its matrices are of other sizes
    assert len(graphs) == 1


def test_compile_of_other_lengths_and_longest():
    torch._dynamo.reset()
    compiled = torch.compile(varlen_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (SMALL, LONG, USED, SQUARE):
        qkv, _, _ = tensors(lengths)
        arguments = (*qkv, *lengths.arguments())
        torch.testing.assert_close(
            compiled(*arguments, causal=True, **lengths.seqused()),
            varlen_attention(*arguments, causal=True, **lengths.seqused()),
        )


def test_transforms():
    """vmap of every tensor that may have an axis more, lengths too, and grad inside of it."""
    lengths = Lengths((3, 2), (4, 1))
    cu_q, cu_k, *longest = lengths.arguments()
    (q, k, v), _, _ = tensors(lengths, DOUBLE)
    q = torch.randn(3, *q.shape, dtype=DOUBLE)
    slopes = torch.randn(3, H, dtype=DOUBLE)
    several_q = torch.stack([cu_q, torch.tensor([0, 1, 5], dtype=torch.int32), cu_q])

    def f(q, slopes, cu_q):
        return (
            varlen_attention(q, k.detach(), v.detach(), cu_q, cu_k, 5, longest[1], bias=alibi(slopes), causal=True)
            .square()
            .sum()
        )

    found = torch.vmap(torch.func.grad(f, argnums=(0, 1)))(q, slopes, several_q)
    for n in range(3):
        leaves = [x[n].detach().requires_grad_() for x in (q, slopes)]
        expected = torch.autograd.grad(f(*leaves, several_q[n]), leaves)
        torch.testing.assert_close([x[n] for x in found], list(expected))


@pytest.mark.parametrize("name", [None, "ragged", "everything"])
def test_the_operator(name):
    """What compilers and exporters are told."""
    new, (qkv, _, _) = New(USED), tensors(USED)
    bias = None if name is None else BIASES[name](new)[0]
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "settings_key", lambda **_: None)
        patch.setattr(varlen, "attention_op", lambda *x, **y: calls.append(x) or (qkv[0][None], qkv[0], None))
        call(qkv, USED, bias=bias, sink=torch.randn(H, USED.total_q, requires_grad=True))
    inputs, score, *_ = calls[0]
    terms = ScoreNumbers.of(score, False, "cpu")
    assert terms.score == score
    given = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs.flat()]
    opcheck(torch.ops.tilewise.attention.default, (*given, *terms), traced=name == "everything")


@pytest.mark.parametrize("name", [None, "ragged", "everything"])
def test_checkpoint(name):
    new, (qkv, do, dlse) = New(SMALL), tensors(SMALL)
    bias = None if name is None else BIASES[name](new)[0]
    leaves = (*qkv, *new.leaves)

    def f(*qkv):
        return call(qkv, SMALL, bias=bias, dropout_p=0.3)

    torch.manual_seed(5)
    found = checkpoint(f, *qkv, use_reentrant=False)
    torch.manual_seed(5)
    expected = f(*qkv)
    torch.testing.assert_close(*(gradients(x, leaves, do, dlse) for x in (found, expected)))


@pytest.mark.parametrize("name", [None, "ragged", "everything", "padded bhmn"])
def test_deterministic_repeats_bit_by_bit(name):
    new, (qkv, do, dlse) = New(SMALL), tensors(SMALL)
    bias = None if name is None else BIASES[name](new)[0]

    def results():
        outputs = call(qkv, SMALL, bias=bias, deterministic=True)
        return *outputs, *gradients(outputs, (*qkv, *new.leaves), do, dlse)

    assert all(map(torch.equal, results(), results()))


def test_autocast():
    new, (qkv, do, _) = New(SMALL), tensors(SMALL)
    bias, _ = BIASES["everything"](new)
    with torch.autocast("cpu", BRAIN):
        o, lse = call(qkv, SMALL, bias=bias)
    assert (o.dtype, lse.dtype) == (BRAIN, FLOAT)
    found = torch.autograd.grad(o, (*qkv, *new.leaves), do.to(BRAIN))
    assert {x.dtype for x in found} == {FLOAT}


def test_without_gradients_and_lse():
    qkv, _, _ = tensors(SMALL)
    o = varlen_attention(*qkv, *SMALL.arguments())
    assert isinstance(o, torch.Tensor)
    with torch.no_grad():
        assert torch.equal(varlen_attention(*qkv, *SMALL.arguments()), o)
    with torch.inference_mode():
        torch.testing.assert_close(varlen_attention(*qkv, *SMALL.arguments(), bias=torch.zeros(SMALL.total_k)), o)
