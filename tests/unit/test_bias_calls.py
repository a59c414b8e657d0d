"""Bias terms in a call: which places they take together, what PyTorch sees of them, errors by name."""

import ast
import copy
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from bias_helpers import HKV, INF, B, H, normal, per_head
from torch.utils import _pytree

import tilewise.bias
from tilewise.bias import RelativeBias, alibi, low_rank_bias, relative_logits, swin_bias, t5_bias
from tilewise.bias.canonical import Slots, canonical, dense
from tilewise.spec.relative import gather
from tilewise.spec.score import Band

# --- several terms ---


def test_toeplitz_terms_are_one_vector():
    M, N = 12, 17
    terms = (
        t5_bias(normal(8, H), True, 10),
        RelativeBias(normal(B, HKV, 1, 5), lo=-2, query_start=torch.tensor([3, 8])),
        RelativeBias(normal(1, 1, 1, 40), lo=-20, outside=-INF),
        alibi(normal(H)),
    )
    slots = canonical(terms, B, H, HKV, M, N)
    want = sum(dense(x, B, H, M, N, HKV) for x in terms)
    torch.testing.assert_close(gather(slots.toeplitz, M, N), want)
    assert slots._replace(toeplitz=None, band=Band(), far=None) == canonical((), B, H, HKV, M, N)


def test_toeplitz_terms_in_any_order():
    """Of one head, of each group's and of every query head, of one batch element and of all."""
    M, N = 5, 8
    terms = (
        RelativeBias(normal(1, 1, 1, 7), lo=-3),
        RelativeBias(normal(B, HKV, 1, 5), lo=-2, outside="clamp"),
        t5_bias(normal(8, H), True, 10),
    )
    want = sum(dense(x, B, H, M, N, HKV) for x in terms)
    for order in itertools.permutations(terms):
        values = canonical(order, B, H, HKV, M, N).toeplitz
        torch.testing.assert_close(gather(values, M, N), want)


def test_each_place_once():
    M, N = 6, 9
    matrix, cols, rows = normal(B, H, M, N), normal(B, 1, 1, N), normal(H, M, 1)
    query, key = RelativeBias(normal(1, H, M, 5), lo=-2), RelativeBias(normal(1, H, N, 5), lo=-2, on="key")
    low_rank = low_rank_bias(normal(1, H, M, 3), normal(1, HKV, N, 3))
    slots = canonical((matrix, cols, rows, query, key, alibi(normal(H)), low_rank), B, H, HKV, M, N)
    assert slots.matrix is matrix
    assert slots.cols is cols
    assert slots.rows.shape == (1, H, M, 1)
    assert slots.query.values is query.values
    assert slots.key.values is key.values
    assert slots.low_rank is low_rank
    for part, words in (
        (query, "a RelativeBias with values per query once, got two; add their values"),
        (key, "a RelativeBias with values per key once"),
        (low_rank, "a low_rank_bias once, got two; concatenate their u and w"),
    ):
        with pytest.raises(ValueError, match=f"^bias: takes {words}"):
            canonical((part, part), B, H, HKV, M, N)


def test_of_one_query_a_matrix_and_a_bias_along_the_keys_look_alike():
    pair, keys = normal(B, H, 1, 9), normal(B, 1, 1, 9)
    slots = canonical((pair, keys), B, H, H, 1, 9)
    assert slots.cols is pair
    assert slots.matrix is keys
    third = canonical((pair, keys, keys), B, H, H, 1, 9)
    assert third.matrix is keys
    torch.testing.assert_close(third.cols, pair + keys)


@pytest.mark.parametrize(("dtypes", "sum_dtype"), [
    ((torch.float16, torch.bfloat16), torch.float32), ((torch.float16, torch.float16), torch.float32),
    ((torch.float32, torch.float64), torch.float64),
])  # fmt: skip
def test_tensors_of_one_place_are_added(dtypes, sum_dtype):
    """Also of unlike shapes and numbers of heads; the sum has no more rounding than float32."""
    M, N = 6, 9
    for one, other, place in (
        ((B, 1, M, N), (HKV, M, N), "matrix"), ((M, N), (1, H, M, N), "matrix"), ((B, 1, 1, N), (H, 1, N), "cols"),
        ((HKV, M, 1), (B, H, M, 1), "rows"),
    ):  # fmt: skip
        x, y = (normal(*shape).to(dtype) for shape, dtype in zip((one, other), dtypes, strict=True))
        slots = canonical((x, y), B, H, HKV, M, N)
        assert slots._replace(**{place: None}) == Slots(), "nothing else"
        found = getattr(slots, place)
        assert found.dtype == sum_dtype
        exact = sum(dense(z, B, H, M, N, HKV) for z in (x, y))
        torch.testing.assert_close(dense(found, B, H, M, N, HKV), exact, rtol=1e-7, atol=1e-7)


def test_of_one_query_values_are_read_as_they_are():
    values = normal(B, H, 1, 5)
    slots = canonical((RelativeBias(values, lo=-4), normal(1, 1, 1, 30)), B, H, H, 1, 30)
    assert slots.query.values is values
    assert slots.toeplitz is None
    summed = canonical((RelativeBias(values, lo=-4), alibi(normal(H))), B, H, H, 1, 30)
    assert summed.query is None
    assert summed.toeplitz.values.shape == (B, H, 1, 30)


def test_no_queries_or_keys():
    for M, N in ((0, 5), (5, 0), (0, 0), (1, 0)):
        for term in (alibi(normal(H)), t5_bias(normal(8, H), True), RelativeBias(normal(1, 1, 1, 3), lo=-1)):
            assert dense(term, B, H, M, N).shape == (B, H, M, N)
            slots = canonical((term, alibi(normal(H))), B, H, H, M, N)
            assert slots.toeplitz.values.shape[3] == max(M + N - 1, 0)


def test_low_rank_attention():
    """As a bias in a matrix, with all gradients."""
    tensors = [
        normal(*shape) for shape in ((B, H, 9, 5), (B, HKV, 12, 5), (B, HKV, 12, 4), (1, H, 9, 3), (B, 1, 12, 3))
    ]
    found = []
    for extended in (True, False):
        q, k, v, u, w = inputs = [x.clone().requires_grad_() for x in tensors]
        term = low_rank_bias(u, w)
        if extended:
            o = tilewise.attention(q, k, v, bias=term, scale=0.4)
        else:
            o = tilewise.attention(q, k, v, bias=dense(term, B, H, 9, 12, HKV), scale=0.4)
        found.append([o, *torch.autograd.grad(o, inputs, torch.ones_like(o) * tensors[3].sum())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("D", [64, 96])  # a scale that is a power of two, and one by which u / scale is rounded
def test_low_rank_attention_of_16_bits_follows_the_error_rule(D):
    shapes = (B, H, 50, D), (B, H, 70, D), (B, H, 70, D), (B, H, 50, 5), (B, H, 70, 5)
    tensors, do = [normal(*shape, dtype=torch.bfloat16) for shape in shapes], normal(B, H, 50, D, dtype=torch.bfloat16)
    scale = D**-0.5

    def results(attend, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        o = attend(*inputs)
        return [x.double() for x in (o, *torch.autograd.grad(o, inputs, do.to(dtype)))]

    def ours(q, k, v, u, w):
        return tilewise.attention(q, k, v, bias=low_rank_bias(u, w), scale=scale)

    def unfused(q, k, v, u, w):
        return torch.softmax(q @ k.mT * scale + u @ w.mT, -1) @ v

    found, allowed = results(ours, torch.bfloat16), results(unfused, torch.bfloat16)
    for x, y, exact in zip(found, allowed, results(unfused, torch.float64), strict=True):
        assert (x - exact).abs().max() <= 2 * (y - exact).abs().max()


def test_low_rank():
    M, N, D = 6, 9, 5
    q, k = normal(B, H, M, D), normal(B, HKV, N, D)
    u, w = normal(1, H, M, 3), normal(B, HKV, N, 3)
    term = low_rank_bias(u, w)
    want = dense(term, B, H, M, N, HKV)
    torch.testing.assert_close(want, u @ per_head(w).mT)
    wider, longer, scale = term.extended(q, k, 0.3)
    assert wider.shape[3] == longer.shape[3] == 8
    torch.testing.assert_close(scale * wider @ per_head(longer).mT, 0.3 * q @ per_head(k).mT + want)
    with pytest.raises(ValueError, match=r"^LowRankBias: becomes part of .* softcap="):
        tilewise.attention(q, k, k, bias=term, softcap=2.0)
    with pytest.raises(TypeError, match=r"^LowRankBias.u, w: dtype must be q's torch.float32, got torch.float64"):
        tilewise.attention(q.float(), k.float(), k.float(), bias=term)


# --- small frozen values that PyTorch sees through ---


def every_term():
    starts = {"query_start": torch.tensor([1, 2])}
    return [
        RelativeBias(normal(B, H, 6, 5), lo=-2, outside=-INF, buckets=torch.tensor([4, 0, 1]), **starts),
        t5_bias(normal(8, H), False, 20, key_start=3),
        alibi(normal(B, H), "signed", **starts),
        low_rank_bias(normal(1, H, 6, 3), normal(1, H, 9, 3)),
    ]


@pytest.mark.parametrize("term", every_term(), ids=lambda x: type(x).__name__)
def test_pytrees(term):
    leaves, spec = _pytree.tree_flatten(term)
    tensors = [getattr(term, x.name) for x in dataclasses.fields(term)]
    assert [id(x) for x in leaves] == [id(x) for x in tensors if isinstance(x, torch.Tensor)]
    back = _pytree.tree_unflatten(leaves, spec)
    assert all(getattr(back, x.name) is getattr(term, x.name) for x in dataclasses.fields(term))
    assert torch.equal(dense(back, B, H, 6, 9), dense(term, B, H, 6, 9))
    assert _pytree.tree_structure(copy.deepcopy(term)) == spec
    keys = [str(path[0]) for path, _ in _pytree.tree_flatten_with_path(term)[0]]
    assert keys == [f".{x.name}" for x in dataclasses.fields(term) if isinstance(getattr(term, x.name), torch.Tensor)]
    shapes = _pytree.tree_map(lambda x: x.shape, term)  # placeholders are not checked, and shown
    assert "torch.Size" in repr(shapes)
    assert dataclasses.replace(term) is not term
    with pytest.raises(dataclasses.FrozenInstanceError):
        term.outside = 0.0


def test_reprs_are_short():
    words = [repr(x) for x in every_term()]
    assert words == [
        "RelativeBias((2, 4, 6, 5) float64, lo=-2, outside=-inf, query_start (2,), buckets (3,) int64)",
        "T5Bias((8, 4) float64, unidirectional, max_distance=20, key_start=3)",
        "Alibi((2, 4) float64, signed, query_start (2,))",
        "LowRankBias((1, 4, 6, 3) float64, (1, 4, 9, 3) float64)",
    ]


def test_transforms_and_checkpoints_see_the_tensors():
    values = normal(3, H, 6, 5)
    term = RelativeBias(values, lo=-2)
    ds = normal(H, 6, 9)

    def loss(term):
        return (dense(term, 1, H, 6, 9) * ds).sum()

    each = torch.func.vmap(torch.func.grad(loss))(_pytree.tree_map(lambda x: x.unsqueeze(1), term))
    want = torch.stack([torch.func.grad(loss)(RelativeBias(x[None], lo=-2)).values for x in values])
    torch.testing.assert_close(each.values, want)
    values.requires_grad_()
    full = torch.utils.checkpoint.checkpoint(lambda x: dense(x, 3, H, 6, 9), term, use_reentrant=False)
    full.backward(ds.expand(3, -1, -1, -1))
    torch.testing.assert_close(values.grad, want[:, 0])
    moved = torch.distributed.utils._apply_to_tensors(torch.Tensor.float, (term, 3))
    assert moved[0].values.dtype == torch.float32


def test_a_compiler_sees_the_tensors():
    """One graph; a new value of a start on the device is no new graph, nor another term of the same kind."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def function(term, table, states, values, buckets, start):
        terms = (
            term,
            t5_bias(table, True, 10, query_start=start),
            RelativeBias(values, lo=-3, outside=-INF),
            relative_logits(states, values[0, 0].expand(3, -1), lo=0, reverse=True, query_start=start),
            RelativeBias(values.expand(-1, -1, 9, -1), lo=-3, on="key", buckets=buckets, reverse=True),
        )
        slots = canonical(terms, B, H, H, 6, 9)
        return slots.toeplitz.values, slots.query.values, slots.query.shift, slots.key.buckets

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    tensors = normal(8, H).requires_grad_(), normal(B, H, 6, 3), normal(1, H, 1, 5), torch.tensor([1, 2, 4])
    for start in (torch.tensor([1, 4]), torch.tensor([7, 0])):
        arguments = alibi(normal(H).requires_grad_(), query_start=start), *tensors, start
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert len(graphs) == 1
    torch._dynamo.reset()


# --- errors ---

VALUES = torch.zeros(B, H, 6, 5)
CALL = (B, H, HKV, 6, 9)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RelativeBias([1.0], lo=0), TypeError, "RelativeBias.values: expected a torch.Tensor, got list"),
        (
            lambda: RelativeBias(VALUES[0, 0], lo=0),
            ValueError,
            r"RelativeBias.values: expected 3 or 4 dimensions \(B|1",
        ),
        (lambda: RelativeBias(VALUES.int(), lo=0), TypeError, "RelativeBias.values: dtype must be float16"),
        (lambda: RelativeBias(VALUES[..., :0], lo=0), ValueError, "RelativeBias.values: needs one entry or more"),
        (lambda: RelativeBias(VALUES, lo=0.5), TypeError, "RelativeBias.lo: expected an int, got float"),
        (lambda: RelativeBias(VALUES, lo=0, reverse=1), TypeError, "RelativeBias.reverse: expected a bool, got 1"),
        (lambda: RelativeBias(VALUES, lo=0, outside=1.0), ValueError, "RelativeBias.outside: must be 0.0, -inf or "),
        (lambda: RelativeBias(VALUES, lo=0, on="row"), ValueError, "RelativeBias.on: must be 'query' or 'key', got"),
        (lambda: RelativeBias(VALUES, lo=0, query_start=1.0), TypeError, "RelativeBias.query_start: expected an int"),
        (
            lambda: RelativeBias(VALUES, lo=0, key_start=torch.zeros(2)),
            TypeError,
            "RelativeBias.key_start: dtype must be int32 or int64, got torch.float32",
        ),
        (
            lambda: RelativeBias(VALUES, lo=0, key_start=torch.zeros(2, 1, dtype=torch.int64)),
            ValueError,
            r"RelativeBias.key_start: expected an int or a tensor \(B,\), got shape \(2, 1\)",
        ),
        (
            lambda: RelativeBias(VALUES, lo=0, buckets=torch.tensor([0, 5])),
            ValueError,
            "RelativeBias.buckets: entries must be 0 to 4, got 0 to 5",
        ),
        (lambda: RelativeBias(VALUES, lo=0, buckets=torch.zeros(3)), TypeError, "RelativeBias.buckets: dtype must be "),
        (lambda: t5_bias(torch.zeros(3, H), True), ValueError, "T5Bias.table: needs 4 buckets or more"),
        (
            lambda: t5_bias(torch.zeros(32, H), True, 8),
            ValueError,
            "T5Bias.max_distance: must be above the 8 distances",
        ),
        (lambda: t5_bias(torch.zeros(32, H), None), TypeError, "T5Bias.bidirectional: expected a bool, got None"),
        (lambda: alibi(torch.zeros(H), "causal"), ValueError, "Alibi.form: must be 'absolute' or 'signed', got"),
        (lambda: alibi(torch.zeros(1, 1, H)), ValueError, "Alibi.slopes: expected 1 or 2 dimensions"),
        (lambda: low_rank_bias(VALUES, VALUES[..., :2]), ValueError, "LowRankBias.u, w: expected the same rank r"),
        (lambda: low_rank_bias(VALUES, VALUES.half()), TypeError, "LowRankBias.w: dtype must equal u's"),
        (lambda: swin_bias(torch.zeros(9, H), (2, 3)), ValueError, "table: expected 15 rows for a window of 2 x 3"),
        (lambda: swin_bias(torch.zeros(9, H), 2), TypeError, r"window: expected a pair \(Wh, Ww\), got 2"),
        (lambda: relative_logits(VALUES, torch.zeros(4, 3), lo=0), ValueError, "proj: shape .* states' 5 rows"),
        (lambda: relative_logits(VALUES, torch.zeros(5, 3).half(), lo=0), TypeError, "proj: dtype must equal states'"),
    ],
)
def test_a_term_names_what_is_wrong(make, error, words):
    with pytest.raises(error, match=f"^{words}"):
        make()


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        (
            RelativeBias(torch.zeros(B, 3, 6, 5), lo=0),
            ValueError,
            r"RelativeBias.values: shape \(2, 3, 6, 5\) is not .B\|1, H\|Hkv\|1, M\|1, R. = .2\|1, 4\|2\|1, 6\|1, 5.",
        ),
        (RelativeBias(VALUES, lo=0, on="key"), ValueError, r"RelativeBias.values: .* \(B\|1, H\|Hkv\|1, N\|1, R\)"),
        (
            RelativeBias(VALUES, lo=0, query_start=torch.zeros(3, dtype=torch.int64)),
            ValueError,
            r"RelativeBias.query_start: shape \(3,\) is not \(B\|1,\) = \(2\|1,\)",
        ),
        (t5_bias(torch.zeros(32, 3), True), ValueError, r"T5Bias.table: shape \(32, 3\) is not \(buckets, H\|1\)"),
        (alibi(torch.zeros(3, H)), ValueError, r"Alibi.slopes: shape \(3, 4\) is not \(B\|1, H\|1\) = \(2\|1, 4\|1\)"),
        (low_rank_bias(VALUES, VALUES), ValueError, r"LowRankBias.w: .* \(B\|1, Hkv\|1, N, r\) = \(2\|1, 2\|1, 9, 5\)"),
        (torch.zeros(6, 8), ValueError, r"bias: shape \(6, 8\) does not broadcast to \(2\|1, 4\|2\|1, 6\|1, 9\|1\)"),
        (torch.zeros(6, 9, dtype=torch.bool), TypeError, "bias: dtype must be float16"),
        ((torch.zeros(6, 9), "alibi"), TypeError, "bias: expected tensors and terms of tilewise.bias, got str"),
    ],
)
def test_a_call_names_what_does_not_fit_it(bias, error, words):
    with pytest.raises(error, match=f"^{words}"):
        canonical(bias, *CALL)


def test_devices():
    other = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"^RelativeBias.query_start: must be on cpu, got meta"):
        RelativeBias(VALUES, lo=0, query_start=other)
    with pytest.raises(ValueError, match=r"^RelativeBias.values: must be on meta, got cpu"):
        canonical(RelativeBias(VALUES, lo=0), *CALL, device=torch.device("meta"))


def test_the_terms_import_nothing_of_a_call():
    allowed = {f"tilewise.{name}" for name in ("bias", "spec", "backends", "operator")}
    for path in Path(tilewise.bias.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("tilewise"):
                assert ".".join(node.module.split(".")[:2]) in allowed, (path.name, node.module)
