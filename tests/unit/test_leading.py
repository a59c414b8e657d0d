"""`tilewise.attention` of more leading dimensions than a batch, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right

import tilewise
from tilewise import TileMask, api, attention
from tilewise.bias import RelativeBias, alibi, t5_bias
from tilewise.frontend import leading

B, N, H, M, K, D = 2, 3, 4, 5, 7, 6


def tensors(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def qkv(lead=(B, N), Hkv=H, **options):
    return tensors((*lead, H, M, D), (*lead, Hkv, K, D), (*lead, Hkv, K, D), **options)


def formula(q, k, v, bias=0.0, mask=None, sink=None):
    """``o`` and ``lse``; a row that sees nothing is 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = torch.einsum("...md,...nd->...mn", q, k) / q.shape[-1] ** 0.5 + bias
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if sink is not None:
        sink = sink[..., None] if sink.dim() > 1 else sink[:, None, None]
        s = torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1)
    p = s.softmax(-1).nan_to_num(0.0)
    return p[..., : k.shape[-2]] @ v, s.logsumexp(-1)


def value_and_gradients(function, inputs):
    inputs = [x.clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_() for x in inputs]
    o, lse = function(*inputs)
    weights = tensors(o.shape, lse.shape, seed=9)
    seen = lse.isfinite()
    loss = (o * weights[0]).sum() + (lse.where(seen, 0.0) * weights[1]).sum()
    return [o, lse, *torch.autograd.grad(loss, inputs)]


def check(ours, theirs, tolerance=1e-10):
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


def count_calls(monkeypatch):
    """How many 4-dimensional calls there have been, by their batch sizes."""
    calls, read = [], leading.read_call

    def counted(q, *args, **kwargs):
        calls.append(q.shape[0])
        return read(q, *args, **kwargs)

    monkeypatch.setattr(api, "read_call", counted)
    monkeypatch.setattr(leading, "read_call", counted)
    monkeypatch.setattr(api, "cached_call", lambda *_: None)
    return calls


# The shape of a bias or mask, and the batch sizes of the calls that it takes.
SHAPES = {
    "full": ((B, N, H, M, K), [B * N]),
    "of all": ((1, 1, H, M, K), [B * N]),
    "along the keys": ((B, N, 1, 1, K), [B * N]),
    "shared along the inner": ((B, 1, H, M, K), [N] * B),
    "shared along the outer": ((1, N, H, M, K), [N] * B),
    "two dimensions": ((M, K), [B * N]),
    "four dimensions": ((N, 1, 1, K), [N] * B),
}


REPEATED = ("shared along the outer", "four dimensions")  # as a mask: one call
IN_RUNS = "shared along the inner"  # as a bias: one call


@pytest.mark.parametrize("shape", SHAPES)
def test_bias(shape, monkeypatch):
    calls = count_calls(monkeypatch)
    inputs = [*qkv(), *tensors(SHAPES[shape][0], seed=1)]
    ours = value_and_gradients(lambda *x: attention(*x[:3], bias=x[3], return_lse=True), inputs)
    assert calls == ([B * N] if shape == IN_RUNS else SHAPES[shape][1])
    check(ours, value_and_gradients(formula, inputs))


@pytest.mark.parametrize("shape", SHAPES)
def test_mask(shape, monkeypatch):
    """Also rows that see nothing, and NaN in what is hidden."""
    calls = count_calls(monkeypatch)
    mask = tensors(SHAPES[shape][0], seed=2)[0] > 0
    mask[..., 2] = False
    mask[..., :1, :] &= mask.shape[-2] == 1
    inputs = qkv()
    planted = [inputs[0], *(x.clone().index_fill_(-2, torch.tensor(2), torch.nan) for x in inputs[1:])]
    ours = value_and_gradients(lambda *x: attention(*x, mask=mask, return_lse=True), planted)
    assert calls == ([B * N] if shape in REPEATED else SHAPES[shape][1])
    check(ours, value_and_gradients(lambda *x: formula(*x, mask=mask), inputs))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("lead", "of_mask"),
    [
        ((4, 3), (1, 3, 1, M, K)),
        ((4, 3), (3, 4, 1, K)),
        ((2, 3, 2), (1, 3, 2, 1, M, K)),
        ((2, 1, 3), (1, 1, 3, H, M, K)),
        ((2, 2, 3), (1, 1, 3, H, M, 1)),
    ],
)
def test_a_mask_that_repeats_along_the_batch(backend, lead, of_mask, monkeypatch):
    """As of the windows of a batch of images, beside a bias that all share: one call, the second time as well."""
    calls = count_calls(monkeypatch)
    mask = tensors(of_mask, seed=2)[0] > 0
    inputs = [*qkv(lead, Hkv=2), *tensors((*(1 for _ in lead), H, M, K), seed=1)]

    def ours(q, k, v, bias):
        return attention(q, k, v, bias=bias, mask=mask, backend=backend, return_lse=True)

    check(value_and_gradients(ours, inputs), value_and_gradients(lambda *x: formula(*x, mask), inputs))
    assert calls == [torch.Size(lead).numel()]
    monkeypatch.undo()
    others = [*qkv(lead, Hkv=2, seed=5), *tensors((*(1 for _ in lead), H, M, K), seed=6)]
    value_and_gradients(ours, inputs)
    monkeypatch.setattr(api, "attention_of_leading", None)
    if mask.dim() == len(lead) + 3:
        check(value_and_gradients(ours, others), value_and_gradients(lambda *x: formula(*x, mask), others))


def test_dropout_beside_a_mask_that_repeats():
    """One call, so a seed says what it drops, as beside the same mask of each batch element."""
    mask = tensors((1, N, 1, M, K), seed=2)[0] > 0
    options = {"dropout_p": 0.4, "dropout_seed": (3, 4)}
    ours, theirs = (
        value_and_gradients(lambda *x, m=m: attention(*x, mask=m, return_lse=True, **options), qkv())
        for m in (mask, mask.repeat(B, 1, 1, 1, 1))
    )
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("in_runs", [False, True])
def test_onnx_and_vmap_of_one_call(monkeypatch, in_runs):
    """Beside a mask that repeats along the batch, and a bias that runs of it share."""
    mask = tensors((1, N, 1, M, K), seed=2)[0] > 0
    bias = tensors((B, 1, 1, M, K), seed=4)[0] if in_runs else 0.0
    inputs = qkv()
    expected = formula(*inputs, bias, mask=mask)[0].nan_to_num(0.0)
    bias = bias if in_runs else None
    many = [torch.stack([x, 2 * x]) for x in inputs]
    found = torch.func.vmap(lambda *x: attention(*x, bias=bias, mask=mask))(*many)
    torch.testing.assert_close(found[0], expected)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)

    class Module(nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, bias=bias, mask=mask)

    program = torch.export.export(Module(), tuple(inputs))
    assert "tilewise" not in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs), expected)


@pytest.mark.parametrize("rows", [1, M])
def test_a_mask_of_five_dimensions_is_for_more_leading_dimensions(rows):
    q, k, v = (x.flatten(0, 1) for x in qkv())
    mask = torch.ones(1, N, 1, rows, K, dtype=torch.bool)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"mask: expected at most 4 dimensions, got shape \(1, 3, 1, \d, 7\)"):
            attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match=r"mask: requires grad"):
        attention(*qkv(), mask=torch.ones(1, N, 1, rows, K).requires_grad_())
    with pytest.raises(TypeError, match=r"mask: dtype must be bool"):
        attention(*qkv(), mask=torch.ones(1, N, 1, rows, K))


def test_bias_and_mask_that_are_shared_along_unlike_dimensions(monkeypatch):
    """As of triangle attention: the fewest calls that leave each tensor whole or shared; grouped heads too."""
    calls = count_calls(monkeypatch)
    mask = tensors((B, N, 1, 1, K), seed=2)[0] > 0
    inputs = [*qkv(Hkv=2), *tensors((B, 1, H, M, K), (1, 1, 2, 1, K), seed=1)]

    def ours(q, k, v, pair, keys):
        return attention(q, k, v, bias=(pair, keys), mask=mask, return_lse=True)

    def theirs(q, k, v, pair, keys):
        return formula(q, k, v, pair + keys.repeat_interleave(2, 2), mask)

    check(value_and_gradients(ours, inputs), value_and_gradients(theirs, inputs))
    assert calls == [B * N]


@pytest.mark.parametrize(
    ("lead", "shape", "expected"),
    [
        ((2, 3, 2), (2, 3, 1, 1, 1, K), [6] * 2),
        ((2, 3, 2), (1, 3, 2, 1, M, K), [6] * 2),
        ((3, 1, 2), (3, 1, 1, H, M, K), [6]),
        ((3, 1, 2), (1, 1, 2, H, M, K), [3] * 2),
        ((1, 3), (1, 1, H, M, K), [3]),
        ((1, 1, 1), (1, 1, 1, H, M, K), [1]),
    ],
)
def test_leading_dimensions(lead, shape, expected, monkeypatch):
    calls = count_calls(monkeypatch)
    inputs = [*qkv(lead), *tensors(shape, seed=1)]
    ours = value_and_gradients(lambda *x: attention(*x[:3], bias=x[3], return_lse=True), inputs)
    assert calls == expected
    check(ours, value_and_gradients(formula, inputs))


@pytest.mark.parametrize("sink", [(H,), (B, N, H, M), (1, N, H, 1), (1, 1, 1, M)])
def test_sink(sink):
    inputs = [*qkv(), *tensors(sink, seed=3)]
    ours = value_and_gradients(lambda *x: attention(*x[:3], sink=x[3], return_lse=True), inputs)
    check(ours, value_and_gradients(lambda *x: formula(*x[:3], sink=x[3]), inputs))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), [B * N]),  # (N, B, ...) in memory
        (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), [B * N]),  # heads last
        (lambda x: torch.cat([x, x], 1)[:, :N], [N] * B),
        (lambda x: torch.stack([x, x], -1)[..., 0].contiguous(), [B * N]),
        (lambda x: x[:1, :1].expand(B, N, -1, -1, -1), [B * N]),
    ],
)
@pytest.mark.parametrize("shape", [None, (B, 1, H, M, K)])
def test_layouts(layout, expected, shape, monkeypatch):
    """Nothing is copied: what the calls are given lies where the tensors of this one lie."""
    calls, inputs = count_calls(monkeypatch), [layout(x) for x in qkv()]
    seen, fold = [], leading._Way.apart
    monkeypatch.setattr(leading._Way, "apart", lambda *args: seen.append((args[1], fold(*args))) or seen[-1][1])
    bias = None if shape is None else tensors(shape, seed=1)[0]
    o, lse = attention(*inputs, bias=bias, return_lse=True)
    rows = inputs[0].stride(0) >= N * inputs[0].stride(1) and expected == [B * N]
    assert calls == (expected if bias is None else [B * N] if rows else [N] * B)
    for x, parts in seen:
        assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)
    check([o, lse], formula(*inputs, 0.0 if bias is None else bias))


def test_the_output_lies_as_the_query():
    """Heads last, also where it is put together: code that goes on with (..., M, H, D) copies nothing."""
    inputs = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv()]
    for shape in ((1, 1, H, M, K), (B, 1, H, M, K)):
        o = attention(*inputs, bias=tensors(shape)[0])
        assert o.transpose(2, 3).is_contiguous()
        assert attention(*qkv(), bias=tensors(shape)[0]).is_contiguous()


@pytest.mark.parametrize("lead", [(0, 3), (2, 0), (0, 0), (3, 0, 2)])
def test_empty_leading_dimensions(lead):
    q, k, v, bias = (x.requires_grad_() for x in (*qkv(lead), *tensors((1,) * (len(lead) - 1) + (lead[-1], H, M, K))))
    for _ in range(2):
        o, lse = attention(q, k, v, bias=bias, return_lse=True)
        assert (o.shape, lse.shape) == ((*lead, H, M, D), (*lead, H, M))
        for x, gradient in zip((q, k, v, bias), torch.autograd.grad(o.sum() + lse.sum(), (q, k, v, bias)), strict=True):
            assert gradient.shape == x.shape
            assert not gradient.any()


@pytest.mark.parametrize(("heads", "queries", "keys"), [(0, M, K), (H, 0, K), (H, M, 0)])
def test_other_empty_dimensions(heads, queries, keys):
    q, k, v = tensors((B, N, heads, queries, D), (B, N, heads, keys, D), (B, N, heads, keys, D))
    o, lse = attention(q, k, v, bias=torch.zeros(B, 1, 1, 1, 1), return_lse=True)
    assert (o.shape, lse.shape) == ((B, N, heads, queries, D), (B, N, heads, queries))
    assert not o.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = qkv(dtype=dtype)
    bias = tensors((B, 1, H, M, K), seed=1, dtype=torch.float32)[0]
    o, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    check([o], formula(*(x.double() for x in (q, k, v, bias)))[:1], 8 * torch.finfo(dtype).eps)


# --- other arguments ---


def test_terms_and_tile_masks_are_shared():
    table, slopes = nn.Parameter(torch.randn(8, H)), torch.rand(H)
    q, k, v = (x.float() for x in qkv())
    (matrix,) = tensors((B, 1, H, M, K), dtype=torch.float32)
    values = torch.randn(1, H, M, 5)
    bias = (t5_bias(table, bidirectional=True), alibi(slopes), RelativeBias(values, lo=-2), matrix)
    mask = TileMask.sliding_window(M, K, (3, 0))
    o = attention(q, k, v, bias=bias, mask=mask)
    each = [attention(q[b], k[b], v[b], bias=(*bias[:3], matrix[b]), mask=mask) for b in range(B)]
    torch.testing.assert_close(o, torch.stack(each), rtol=0, atol=0)
    o.sum().backward()
    assert table.grad.shape == table.shape


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (1, 1), "scale": 0.3}, {"softcap": 2.0}], ids=str)
def test_numbers(options):
    q, k, v = qkv()
    (bias,) = tensors((B, 1, H, M, K))
    each = [attention(q[b], k[b], v[b], bias=bias[b], backend="reference", **options) for b in range(B)]
    check([attention(q, k, v, bias=bias, **options)], [torch.stack(each)])


def test_causal_bias():
    q, k, v = qkv()
    check(
        [attention(q, k, v, mask=causal_lower_right(M, K)), attention(q, k, v, bias=causal_lower_right(M, K))],
        [attention(q, k, v, causal=True)] * 2,
    )


def test_dropout_counts_sequences_in_order():
    """Whatever the memory's order: the same as with the leading dimensions flattened by hand."""
    q, k, v = qkv()
    options = {"dropout_p": 0.5, "dropout_seed": (7, 8)}
    flat = attention(*(x.flatten(0, 1) for x in (q, k, v)), **options).unflatten(0, (B, N))
    check([attention(q, k, v, **options)], [flat])
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    check([attention(*turned, dropout_p=0.0, dropout_seed=(7, 8))], [attention(q, k, v)])
    with pytest.raises(NotImplementedError, match=r"dropout_seed: .* 2 parts, for the leading dimensions \(2, 3\)"):
        attention(*turned, **options)


def test_dropout_of_parts_is_not_repeated():
    q, k, v = (x[:1, :1].expand(B, N, -1, -1, -1) for x in qkv())
    bias = torch.zeros(B, 1, H, M, K, dtype=torch.float64)
    torch.manual_seed(3)
    o = attention(q, k, v, bias=bias, dropout_p=0.5)
    rows = o.reshape(B * N, -1)
    assert len({tuple(row.tolist()) for row in rows}) == B * N
    torch.manual_seed(3)
    check([attention(q, k, v, bias=bias, dropout_p=0.5)], [o])


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic):
    inputs = [*qkv(), *tensors((B, 1, H, M, K), seed=1)]
    mask = tensors((B, N, 1, 1, K), seed=2)[0] > 0

    def ours(q, k, v, bias):
        return attention(q, k, v, bias=bias, mask=mask, return_lse=True)

    compiled = torch.compile(ours, fullgraph=True, backend="eager", dynamic=dynamic)
    theirs = value_and_gradients(lambda *x: formula(*x, mask=mask), inputs)
    check(value_and_gradients(compiled, inputs), theirs)


def test_gradcheck():
    inputs = [x.requires_grad_() for x in tensors((2, 2, 1, 2, 2), (2, 2, 1, 3, 2), (2, 2, 1, 3, 2), (2, 1, 1, 2, 3))]
    assert torch.autograd.gradcheck(lambda q, k, v, bias: attention(q, k, v, bias=bias), inputs)


def test_symbolic_trace():
    class Module(nn.Module):
        def forward(self, q, k, v):
            return tilewise.attention(q, k, v, causal=True)

    q, k, v = qkv()
    check([torch.fx.symbolic_trace(Module())(q, k, v)], [attention(q, k, v, causal=True)])


# --- errors ---

ERRORS = {
    "k has other dimensions": ({"k": (N, H, K, D)}, r"k: expected 5 dimensions .* as q has, got shape \(3, 4, 7, 6\)"),
    "v has other leading": ({"v": (B, 1, H, K, D)}, r"v: leading dimensions must equal q's \(2, 3\), got .*\(2, 1, 4"),
    "k has other heads": ({"k": (B, N, 3, K, D), "v": (B, N, 3, K, D)}, r"k, v: the 3 key/value heads must divide"),
    "v has another length": ({"v": (B, N, H, K + 1, D)}, "v: length must equal k's 7, got 8"),
    "bias": ({"bias": (B, 2, H, M, K)}, r"bias: shape \(2, 2, 4, 5, 7\) .* to \(2\|1, 3\|1, 4\|1, 5\|1, 7\|1\)"),
    "bias has six": ({"bias": (1, B, N, H, M, K)}, r"bias: shape \(1, 2, 3, 4, 5, 7\) does not broadcast"),
    "bias of the whole batch": ({"bias": (B * N, H, M, K)}, r"bias: shape \(6, 4, 5, 7\) does not broadcast"),
    "sink of heads": ({"sink": (3,)}, "sink: expected one logit for each head"),
    "sink": ({"sink": (N, H, M)}, r"sink: .* for each query, \(2\|1, 3\|1, 4\|1, 5\|1\), got shape \(3, 4, 5\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    change, match = ERRORS[name]
    given = dict(zip("qkv", qkv(), strict=True)) | {key: torch.zeros(s).double() for key, s in change.items()}
    with pytest.raises(ValueError, match=match):
        attention(**given)


def test_errors_of_masks():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"mask: shape \(3, 2, 1, 1, 7\) does not broadcast to"):
        attention(q, k, v, mask=torch.ones(N, B, 1, 1, K, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask: dtype must be bool"):
        attention(q, k, v, mask=torch.ones(B, N, 1, 1, K))
    with pytest.raises(ValueError, match=r"mask: .*leading dimensions \(2, 3\).* batch size 1, got 6"):
        attention(q[..., :1, :], k[..., :1, :], v[..., :1, :], mask=TileMask.documents(torch.zeros(B * N, 1).int()))


def test_errors_of_terms():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"RelativeBias.values: shape \(6, 4, 5, 3\) is not .* = \(1, 4\|1, 5\|1, 3\)"):
        attention(q, k, v, bias=RelativeBias(torch.zeros(B * N, H, M, 3), lo=-1))


# --- a call like an earlier one ---


@pytest.mark.parametrize("masked", [False, True])
def test_a_usual_call_is_not_folded_again(masked, monkeypatch):
    """Other numbers in tensors that lie as earlier ones did, where leading dimensions are one as they stand."""
    mask = torch.arange(K) < K - 1 if masked else None
    mask = None if mask is None else mask.expand(B, N, 1, 1, K).contiguous()
    inputs, others = ([*qkv(seed=seed), *tensors((1, 1, H, M, K), seed=seed)] for seed in (1, 2))
    ours = lambda q, k, v, bias: attention(q, k, v, bias=bias, mask=mask, return_lse=True)  # noqa: E731
    value_and_gradients(ours, inputs)
    theirs = value_and_gradients(lambda *x: formula(*x, mask), others)
    monkeypatch.setattr(api, "attention_of_leading", None)
    check(value_and_gradients(ours, others), theirs)
    leaves = [x.requires_grad_() for x in others]
    o = attention(*leaves[:3], bias=leaves[3], mask=mask)
    check([o], theirs[:1])
    assert o.shape == (B, N, H, M, D)
    whole = formula(*leaves, mask)[0]
    second = [torch.autograd.grad(x.square().sum(), leaves[0], create_graph=True)[0] for x in (o, whole)]
    second = [torch.autograd.grad(x.square().sum(), leaves)[0] for x in second]
    torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)
    for unusual in ({"causal": True}, {"bias": leaves[3][0]}, {"softcap": 1.0}, {"return_lse": True, "backend": "cpu"}):
        with pytest.raises(TypeError, match="NoneType"):
            attention(*leaves[:3], **{"bias": leaves[3], "mask": mask, **unusual})


def test_a_cached_call_of_one_batch_element(monkeypatch):
    """Leading dimensions of size 1 are one view, too."""
    q, k, v = (torch.randn(1, 1, 2, 5, 8) for _ in range(3))
    bias = torch.randn(1, 1, 2, 5, 5)
    first = attention(q, k, v, bias=bias)
    monkeypatch.setattr(api, "attention_of_leading", None)
    assert torch.equal(attention(q, k, v, bias=bias), first)


def test_usual_calls_that_are_not_one_view(monkeypatch):
    """A bias that is shared along the outer dimension takes a call for each index of the other, the second time too; a
    sink has its gradient then."""
    inputs = [*qkv(), *tensors((1, N, H, M, K))]
    ours = lambda q, k, v, bias: attention(q, k, v, bias=bias, return_lse=True)  # noqa: E731
    found = [value_and_gradients(ours, inputs) for _ in range(2)]
    for x in found:
        check(x, value_and_gradients(formula, inputs))
    sinks = [*qkv(), *tensors((H,))]
    ours_of_sinks = lambda q, k, v, sink: attention(q, k, v, sink=sink, return_lse=True)  # noqa: E731
    for _ in range(2):
        check(
            value_and_gradients(ours_of_sinks, sinks),
            value_and_gradients(lambda q, k, v, s: formula(q, k, v, sink=s), sinks),
        )
    calls = []
    attend = api.attention_of_leading
    monkeypatch.setattr(api, "attention_of_leading", lambda *x, **more: calls.append(1) or attend(*x, **more))
    ours(*inputs)
    assert calls == [1]


@pytest.mark.parametrize(
    ("of_bias", "of_mask", "calls", "words"),
    [
        ((1, 1, H, M, K), (1, N, 1, M, K), 1, "mask (3, 1, 5, 7) bool, repeated along the batch"),
        ((B, N, H, M, K), (B, N, 1, 1, K), 1, "mask (6, 1, 1, 7) bool"),
        (
            (B, 1, H, M, K),
            (B, N, 1, 1, K),
            1,
            "bias (2, 4, 5, 7) float32, with its gradient, each for 3 batch elements",
        ),
        ((1, N, H, M, K), (B, N, 1, 1, K), 2, "one of 2 calls, for the leading dimensions do not merge into one"),
    ],
)
def test_explain(of_bias, of_mask, calls, words):
    """One of the calls of four dimensions, and how many there are."""
    q, k, v = qkv(dtype=torch.float32)
    bias = torch.zeros(of_bias, requires_grad=True)
    mask = torch.arange(K).expand(of_mask) != 2
    found = tilewise.explain(q, k, v, bias=bias, mask=mask, causal=True)
    assert (found.calls, found.plan.problem.batch * calls) == (calls, B * N)
    assert f"  {words}" in str(found).splitlines()
    flat = [x.flatten(0, 1)[: B * N // calls] for x in (q, k, v)]
    whole = {"bias": bias.expand(B, N, H, M, K), "mask": mask.expand(B, N, 1, M, K)}
    whole = {name: x.flatten(0, 1)[: B * N // calls] for name, x in whole.items()}
    expected = tilewise.explain(*flat, **whole, causal=True)
    assert found.mask.pairs == pytest.approx(expected.mask.pairs)
    assert found.forward.flops == expected.forward.flops
    assert found.plan.backend == expected.plan.backend
