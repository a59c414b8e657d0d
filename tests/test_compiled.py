"""Where PyTorch's compilers meet a call: what they recompute, and backwards that they read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import attention, scaled_dot_product_attention, varlen_attention
from tilewise.bias import t5_bias


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [x.flatten(0, 1).transpose(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 9, 32])
    return varlen_attention(*rows, offsets, offsets, 23, 23, dropout_p=0.3)


DROPOUT = {
    "attention": lambda q, k, v: attention(q, k, v, dropout_p=0.3),
    "leading": lambda q, k, v: attention(q[None], k[None], v[None], dropout_p=0.3),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.3),
    "varlen": packed,
    "checkpoint": lambda *qkv: checkpoint(lambda *x: attention(*x, dropout_p=0.3), *qkv, use_reentrant=False),
}


@pytest.mark.parametrize(
    ("name", "budget"), [("attention", 0), ("attention", 0.5), ("attention", 1), *((x, 0.5) for x in [*DROPOUT][1:])]
)
def test_dropout_is_not_drawn_again_in_the_backward(name, budget):
    """o is linear in v: ⟨do, o⟩ is ⟨dv, v⟩, but where the backward drops others than the forward."""
    q, k, v = leaves(*[(2, 2, 32, 16)] * 3)

    def f(q, k, v):
        w = v.sin()
        return w, DROPOUT[name](q.sin(), k, w) + DROPOUT[name](q.cos(), k, w)

    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        w, o = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
        do = torch.randn_like(o)
        (dv,) = torch.autograd.grad(o, v, do)
    torch.testing.assert_close((dv / v.cos() * w).sum(), (do * o).sum(), rtol=1e-4, atol=1e-4)


def test_two_calls_draw_two_seeds():
    """A compiler that merges equal operators leaves these as they are; and both are those of eager calls."""
    q, k, v = leaves(*[(1, 2, 16, 8)] * 3)

    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)

    torch._dynamo.reset()
    found = []
    for g in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        found.append(g(q, k, v))
    assert not torch.equal(*found[1])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_decides_about_the_seed(randomness):
    q, k, v = (x.detach().expand(2, -1, -1, -1, -1) for x in leaves(*[(1, 2, 16, 8)] * 3))

    def f(q, k, v):
        return torch.vmap(lambda *x: attention(*x, dropout_p=0.5), randomness=randomness)(q, k, v)

    torch._dynamo.reset()
    o = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(o[0], o[1]) == (randomness == "same")


def test_compiled_autograd_sees_operators():
    """The backwards of eager calls are nodes of its graph, not what they are made of."""
    torch.manual_seed(0)
    found: list[str] = []

    def record(gm, _):
        found.extend(str(node.target) for node in gm.graph.nodes if "tilewise" in str(node.target))
        return gm.forward

    x = leaves(*[(2, 2, 16, 8)] * 3, (1, 2, 16, 16), *[(16, 2, 8)] * 3, *[(2, 3, 2, 6, 8)] * 3, (32, 2), (16, 8))
    q, k, v, bias, *rows = x[:7]
    offsets = torch.tensor([0, 5, 16])

    def losses():
        yield attention(q, k, v, bias=bias, causal=True, return_lse=True)[1]
        yield varlen_attention(*rows, offsets, offsets, 11, 11)
        yield attention(*x[7:10])
        yield attention(q, k, v, bias=t5_bias(x[10], bidirectional=True))
        yield tilewise.softmax(bias)
        yield tilewise.matmul(q, x[11].mT)

    expected = torch.autograd.grad(sum(y.square().sum() for y in losses()), x)
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend=record, fullgraph=True)):
        sum(y.square().sum() for y in losses()).backward()
    torch.testing.assert_close([y.grad for y in x], list(expected))
    names = [node.split(".")[1] for node in found]
    assert sorted(names) == ["attention_backward"] * 4 + ["matmul"] * 2 + ["softmax_backward"]
