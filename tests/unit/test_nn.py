"""Modules: torch.nn.MultiheadAttention with a bias beside PyTorch's own, grouped heads, parameters of biases."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tilewise
from tilewise.nn import AlibiSlopes, Attention, MultiheadAttention, T5RelativeBias

E, H, B, L, S = 16, 4, 2, 6, 9
DOUBLE = torch.float64


def pair(**options):
    """PyTorch's module and ours, with equal parameters."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, **options, dtype=DOUBLE)
    ours = MultiheadAttention(E, H, **options, dtype=DOUBLE)
    for x in theirs.parameters():
        nn.init.normal_(x, std=0.3)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    return theirs, ours


def rows(length, features=E, batch_first=False, batch=B):
    shape = (batch, length, features) if batch_first else (length, batch, features)
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


def compare(theirs, ours, inputs, leaves=(), **more):
    found = []
    for layer in (theirs, ours):
        y, weights = layer(*inputs, need_weights=False, **more)
        wanted = [*{id(x): x for x in inputs}.values(), *leaves, *layer.parameters()]
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), wanted)))
        assert weights is None
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"batch_first": True}, {"bias": False}, {"kdim": 5, "vdim": 7, "batch_first": True}, {"add_bias_kv": True},
        {"add_zero_attn": True, "batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True},
    ],
    ids=str,
)  # fmt: skip
def test_it_is_pytorchs(options):
    theirs, ours = pair(**options)
    first = options.get("batch_first", False)
    query, key = rows(L, batch_first=first), rows(S, options.get("kdim", E), first)
    value = rows(S, options.get("vdim", E), first)
    compare(theirs, ours, (query, key, value))
    padding = torch.arange(S) >= torch.tensor([[S], [5]])
    hidden = torch.rand(L, S) < 0.3
    hidden[:, 0] = False
    compare(theirs, ours, (query, key, value), key_padding_mask=padding, attn_mask=hidden)
    added = torch.randn(B * H, L, S, dtype=DOUBLE, requires_grad=True)
    of_keys = torch.randn(B, S, dtype=DOUBLE)
    compare(theirs, ours, (query, key, value), (added,), attn_mask=added, key_padding_mask=of_keys)
    if not {"kdim", "vdim"} & options.keys():
        x = rows(L, batch_first=first)
        compare(theirs, ours, (x, x, x))
        causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=DOUBLE)
        compare(theirs, ours, (x, x, x), attn_mask=causal)
        torch.testing.assert_close(ours(x, x, x, attn_mask=causal), ours(x, x, x, is_causal=True))
        if not {"add_bias_kv", "add_zero_attn"} & options.keys():  # which PyTorch hides, given the hint alone
            compare(theirs, ours, (x, x, x), attn_mask=causal, is_causal=True)


def test_a_bias_is_not_copied(monkeypatch):
    taken = []
    compute = tilewise.attention
    monkeypatch.setattr("tilewise.nn.multihead.attention", lambda *x, **more: taken.append(more) or compute(*x, **more))
    _, ours = pair()
    bias, x = torch.randn(1, H, L, L, dtype=DOUBLE), rows(L)
    ours(x, x, x, attn_bias=bias)
    assert taken[0]["bias"] is bias


@pytest.mark.parametrize("batch_first", [False, True])
def test_without_a_batch(batch_first):
    theirs, ours = pair(batch_first=batch_first)
    x = torch.randn(L, E, dtype=DOUBLE, requires_grad=True)
    compare(theirs, ours, (x, x, x), key_padding_mask=torch.arange(L) > 3)


@pytest.mark.parametrize("add_bias_kv", [False, True])
def test_a_trained_bias(add_bias_kv):
    """As a float attn_mask of PyTorch's class; a tensor, a term and a tuple. Keys of add_bias_kv have no bias."""
    theirs, ours = pair(batch_first=True, add_bias_kv=add_bias_kv)
    x = rows(L, batch_first=True)
    bias = torch.randn(B, H, L, L, dtype=DOUBLE, requires_grad=True)
    y, _ = ours(x, x, x, attn_bias=bias)
    z, _ = theirs(x, x, x, attn_mask=bias.flatten(0, 1), need_weights=False)
    torch.testing.assert_close(y, z)
    (found,), (expected,) = (torch.autograd.grad(o.square().sum(), bias) for o in (y, z))
    torch.testing.assert_close(found, expected)
    if not add_bias_kv:
        position = T5RelativeBias(H, bidirectional=True)
        y, _ = ours(x, x, x, attn_bias=(position(), bias))
        y.sum().backward()
        assert position.weight.grad.shape == (32, H)


def test_is_causal_alone():
    _, ours = pair(batch_first=True)
    x = rows(L, batch_first=True)
    hidden = ~torch.ones(L, L, dtype=torch.bool).tril()
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], ours(x, x, x, attn_mask=hidden)[0])
    with pytest.raises(ValueError, match="is_causal: needs as many queries as keys, got 6 and 9"):
        ours(x, rows(S, batch_first=True), rows(S, batch_first=True), is_causal=True)


def test_dropout_of_training():
    ours = MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(B, L, E)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_errors():
    ours = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, L, E)
    with pytest.raises(ValueError, match="need_weights: weights are not stored"):
        ours(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match=r"attn_mask: shape \(6, 5\) does not fit scores of shape \(1, 1, 6, 6\)"):
        ours(x, x, x, attn_mask=torch.zeros(L, 5))
    with pytest.raises(ValueError, match=r"key_padding_mask: shape \(6,\) does not fit"):
        ours(x, x, x, key_padding_mask=torch.zeros(L, dtype=torch.bool))
    with pytest.raises(ValueError, match="bias: shape"):
        ours(x, x, x, attn_bias=torch.zeros(3, L, L))
    with pytest.raises(TypeError, match="bias: dtype must be float"):
        ours(x, x, x, attn_bias=torch.zeros(L, L, dtype=torch.bool))
    y = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match="not nested"):
        ours(y, y, y)


def test_in_a_transformer_layer():
    """In place of PyTorch's module, with its mask arguments; compiled too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, dim_feedforward=32, dropout=0.0, batch_first=True)
    other = copy.deepcopy(layer)
    other.self_attn = MultiheadAttention(E, H, batch_first=True)
    other.load_state_dict(layer.state_dict())
    x, padding = torch.randn(B, L, E), torch.arange(L) >= torch.tensor([[L], [4]])
    expected = layer(x, src_key_padding_mask=padding)
    torch.testing.assert_close(other(x, src_key_padding_mask=padding), expected)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, src_key_padding_mask=padding), expected)


def rotated(x):
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def test_grouped_heads():
    layer = Attention(E, H, num_kv_heads=2, dtype=DOUBLE)
    assert {name: tuple(x.shape) for name, x in layer.named_parameters()} == {
        "q_proj.weight": (E, E), "k_proj.weight": (8, E), "v_proj.weight": (8, E), "o_proj.weight": (E, E)
    }  # fmt: skip
    x, slopes = torch.randn(B, L, E, dtype=DOUBLE), AlibiSlopes(H)
    y = layer(x, lambda q, k: (rotated(q), rotated(k)), bias=slopes(), causal=True)
    q, k, v = (p(x).view(B, L, -1, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    k, v = (z.repeat_interleave(2, 1) for z in (k, v))
    distance = (torch.arange(L)[None] - torch.arange(L)[:, None]).double()
    s = rotated(q) @ rotated(k).mT / 2 - slopes.slopes.double()[:, None, None] * distance.abs()
    o = s.masked_fill(distance > 0, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(y, layer.o_proj(o.transpose(1, 2).flatten(2)))
    with pytest.raises(ValueError, match="num_kv_heads: must divide the 4 query heads, got 3"):
        Attention(E, H, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_heads: must divide embed_dim=16"):
        Attention(E, 3)
    with pytest.raises(ValueError, match="return_lse"):
        layer(x, return_lse=True)


def test_parameters_of_biases():
    position = T5RelativeBias(H, bidirectional=False, num_buckets=8, max_distance=20)
    q, k, v = (torch.randn(B, H, L, 4) for _ in range(3))
    o = tilewise.attention(q, k, v, bias=position(query_start=0), causal=True)
    term = tilewise.bias.t5_bias(position.weight, False, 20, query_start=0)
    torch.testing.assert_close(o, tilewise.attention(q, k, v, bias=term, causal=True))
    assert list(position.state_dict()) == ["weight"]
    assert [*AlibiSlopes(H).parameters()] == []
    trained = AlibiSlopes(H, trained=True)
    tilewise.attention(q, k, v, bias=trained()).square().sum().backward()
    assert trained.slopes.grad.shape == (H,)
    with pytest.raises(ValueError, match="table"):
        T5RelativeBias(H, bidirectional=True, num_buckets=3)
