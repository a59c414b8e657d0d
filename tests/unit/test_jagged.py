"""Jagged nested tensors, against a dense call for each sequence."""

import re

import memory_helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import DROPOUT_SEED

from tilewise import attention, scaled_dot_product_attention
from tilewise.bias import RaggedBias, alibi

H, HKV, D, DV = 4, 2, 8, 6
QUERIES, KEYS = (3, 5, 1, 0), (4, 5, 7, 2)


def jagged(lengths, *sizes, seed=0, dtype=torch.float64, **options):
    """(B, j, *sizes), with a gradient."""
    gen = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, *sizes, generator=gen, dtype=torch.float64).to(dtype) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True, **options)


def like(x, *sizes, seed=0):
    """With the offsets of x, and so with its ragged size."""
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(x.values().shape[0], *sizes, generator=gen, dtype=x.dtype)
    return torch.nested.nested_tensor_from_jagged(values.requires_grad_(), x.offsets())


def leaves(queries=QUERIES, keys=KEYS):
    k = jagged(keys, HKV, D, seed=1)
    return jagged(queries, H, D), k, like(k, HKV, DV, seed=2)


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def dense(x):
    return [part.detach()[None] for part in x.unbind()]


OPTIONS = [
    {}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (1, None), "softcap": 2.0, "scale": 0.2},
    {"dropout_p": 0.4, "dropout_seed": DROPOUT_SEED},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_sequence_is_a_call_of_its_own(options):
    inputs = leaves()
    o, lse = attention(*heads_first(*inputs), **options, return_lse=True)
    assert (o + heads_first(like(inputs[0], H, DV))[0]).shape == o.shape  # q's ragged size
    assert lse.shape == o.shape[:3]
    parts = zip(*(dense(x) for x in heads_first(*inputs)), o.unbind(), lse.unbind(), strict=True)
    for b, (q, k, v, part, part_lse) in enumerate(parts):
        if "dropout_p" in options:  # counted by its number
            q, k, v = (x.expand(b + 1, -1, -1, -1) for x in (q, k, v))
        expected, expected_lse = attention(q, k, v, **options, return_lse=True)
        torch.testing.assert_close(part, expected[-1])
        torch.testing.assert_close(part_lse, expected_lse[-1])


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_gradients(options):
    inputs = leaves()
    o, lse = attention(*heads_first(*inputs), **options, return_lse=True)
    found = torch.autograd.grad(o.values().sin().sum() + lse.values().cos().sum(), inputs)
    alone = [[x.detach().requires_grad_() for x in y.unbind()] for y in inputs]
    total = 0.0
    for parts in zip(*alone, strict=True):
        o, lse = attention(*(x.transpose(0, 1)[None] for x in parts), **options, return_lse=True)
        total = total + o.sin().sum() + lse.cos().sum()
    for x, gradient, parts in zip(inputs, found, alone, strict=True):
        assert gradient.shape == x.shape  # with its ragged size
        torch.testing.assert_close(gradient.values(), torch.cat(torch.autograd.grad(total, parts, retain_graph=True)))


def test_biases_and_masks():
    """As `varlen_attention` takes them: padded, packed, one matrix a sequence, terms."""
    inputs = leaves()
    q, k, v = heads_first(*inputs)
    gen = torch.Generator().manual_seed(3)
    B, M, N = len(QUERIES), max(QUERIES), max(KEYS)
    padded = torch.randn(B, H, M, N, generator=gen, dtype=torch.float64)
    along_keys = torch.randn(1, sum(KEYS), generator=gen, dtype=torch.float64)
    pairs = torch.tensor([0, *(m * n for m, n in zip(QUERIES, KEYS, strict=True))]).cumsum(0)
    ragged = RaggedBias(torch.randn(H, int(pairs[-1]), generator=gen, dtype=torch.float64), pairs)
    mask = torch.rand(B, 1, M, N, generator=gen) < 0.7
    slopes = alibi(torch.rand(H, generator=gen, dtype=torch.float64))
    packed = attention(q, k, v, bias=along_keys)
    cases = (
        attention(q, k, v, bias=padded, mask=mask), packed, attention(q, k, v, bias=ragged),
        attention(q, k, v, bias=slopes), scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        scaled_dot_product_attention(q, k, v, padded, enable_gqa=True),
    )  # fmt: skip
    outputs = [x.unbind() for x in cases]
    begin = 0
    for b, (m, n) in enumerate(zip(QUERIES, KEYS, strict=True)):
        part = [dense(x)[b] for x in (q, k, v)]
        own, own_mask = padded[b : b + 1, :, :m, :n], mask[b : b + 1, :, :m, :n]
        expected = (
            attention(*part, bias=own, mask=own_mask), attention(*part, bias=along_keys[:, begin : begin + n]),
            attention(*part, bias=ragged.values[:, pairs[b] : pairs[b + 1]].view(1, H, m, n)),
            attention(*part, bias=slopes), attention(*part, mask=own_mask), attention(*part, bias=own),
        )  # fmt: skip
        for i, x in enumerate(expected):
            torch.testing.assert_close(outputs[i][b], x[0], msg=f"case {i}")
        begin += n


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.3}, {"scale": 0}], ids=str)
def test_pytorchs_signature(options):
    x = jagged((3, 5, 1), H, D)
    q, k, v = heads_first(x, like(x, H, D, seed=1), like(x, H, DV, seed=2))
    o = scaled_dot_product_attention(q, k, v, **options)
    for part, *parts in zip(o.unbind(), *(dense(x) for x in (q, k, v)), strict=True):
        torch.testing.assert_close(part, F.scaled_dot_product_attention(*parts, **options)[0])
    (gradient,) = torch.autograd.grad(o.values().sum(), x)
    assert gradient.shape == x.shape


def test_in_the_other_layout_and_without_a_known_maximum():
    """Components (H, n, D), so that values lie as (H, total, D); offsets alone say where sequences are."""
    x = jagged((3, 5, 1), H, D)
    straight = torch.nested.nested_tensor(
        [part.detach().transpose(0, 1).contiguous() for part in x.unbind()], layout=torch.jagged
    )
    unknown = torch.nested.nested_tensor_from_jagged(x.detach().values(), x.offsets().int()).transpose(1, 2)
    assert unknown._maybe_max_seqlen is None
    expected = attention(*heads_first(x, x, x)).values()
    torch.testing.assert_close(attention(straight, straight, straight).values(), expected)
    torch.testing.assert_close(attention(unknown, unknown, unknown).values(), expected)


def test_equal_lengths_of_other_offsets():
    x, other = jagged((3, 5, 1), H, D), jagged((3, 5, 1), H, D)
    q, k = heads_first(x, other)
    expected = scaled_dot_product_attention(q, q, q, is_causal=True).values()
    torch.testing.assert_close(scaled_dot_product_attention(q, k, q, is_causal=True).values(), expected)


def test_under_autocast():
    x = jagged((3, 5, 1), H, D, dtype=torch.float32)
    q, k = heads_first(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k, q.bfloat16())
    assert o.dtype == torch.bfloat16
    o.values().sum().backward()
    assert x.grad.dtype == torch.float32


def test_compiled():
    """In one graph, also with other lengths."""

    def layer(x, scale):
        q, k, v = heads_first(x, x * scale, x + scale)
        o = attention(q, k, v, causal=True)
        return (o + q).transpose(1, 2).flatten(-2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ((3, 5, 1), (2, 9, 4, 1)):
        x = jagged(lengths, H, D)
        results = []
        for function in (layer, compiled):
            y = function(x, 0.5)
            results.append((y.values(), torch.autograd.grad(y.values().sin().sum(), x)[0].values()))
        torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals():
    q, k, v = heads_first(*leaves((3, 5, 1), (4, 5, 7)))
    plain = torch.zeros(3, H, 5, D, dtype=torch.float64)
    holes = torch.nested.narrow(
        torch.zeros(3, 7, HKV, D), 1, torch.tensor([0, 1, 0]), torch.tensor([4, 3, 2]), layout=torch.jagged
    ).transpose(1, 2)
    strided = torch.nested.nested_tensor([torch.zeros(H, 3, D)] * 3, layout=torch.strided)
    other, narrow = (heads_first(x)[0] for x in (jagged((3, 2, 1), HKV, DV), jagged((4, 5, 7), HKV, 0)))
    for call, error, message in (
        (lambda: attention(q, plain, plain), TypeError, "q: expected a dense tensor .* got a nested tensor"),
        (lambda: attention(plain, k, v), TypeError, "k: expected a dense tensor .* got a nested tensor"),
        (lambda: attention(strided, strided, strided), TypeError, "q: expected a dense tensor"),
        (lambda: attention(q.transpose(1, 2), k, v), ValueError,
         re.escape("q: expected a jagged tensor (batch, heads, j, head_dim), got (3, j, 4, 8); transpose(1, 2)")),
        (lambda: attention(q, k.transpose(1, 2).flatten(-2), v), ValueError, r"k: expected .* got \(3, j, 16\)"),
        (lambda: attention(q, holes, holes), NotImplementedError, r"k: a jagged tensor with holes .*k.contiguous\(\)"),
        (lambda: attention(q, k, other), ValueError, "v: its sequences must be as long as k's"),
        (lambda: attention(q, k.float(), v), TypeError, "k: dtype must equal q's torch.float64, got torch.float32"),
        (lambda: attention(q, k, narrow), ValueError, "v: head dimension must be 1 or more, got 0"),
        (lambda: attention(q, k, v, bias=q), TypeError, "bias: expected a dense tensor"),
        (lambda: attention(q, k, v, mask=torch.ones(2, 1, 5, 7, dtype=torch.bool)), ValueError, "mask: "),
        (lambda: scaled_dot_product_attention(q, k, v), ValueError,
         "key: number of heads must equal query's 4, got 2; enable_gqa=True"),
        (lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), ValueError,
         "is_causal: is aligned top-left"),
        (lambda: scaled_dot_product_attention(q, k, v, q, enable_gqa=True), TypeError, "attn_mask: expected a dense"),
        (lambda: scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True), ValueError, "query: expected"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            call()


def test_no_heads():
    k = jagged(KEYS, 0, D, seed=1)
    o = attention(*heads_first(jagged(QUERIES, 0, D), k, like(k, 0, DV)), causal=True)
    assert o.shape[:2] == (len(QUERIES), 0)
    assert o.shape[3] == DV
    o.values().sum().backward()
    assert k.grad is not None


@pytest.mark.parametrize("name", memory_helpers.NESTED)
def test_no_tensor_outlives_its_call(name):
    n = 35 + list(memory_helpers.NESTED).index(name)
    assert memory_helpers.leftovers(memory_helpers.NESTED[name], n, "cpu") == []
