"""Where PyTorch's compilers meet a call: what they recompute, and backwards that they read."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import attention, scaled_dot_product_attention, varlen_attention
from tilewise.bias import RelativeBias, alibi, low_rank_bias, t5_bias
from tilewise.operator.custom_op import fake_gradients_like, gradients_like


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


# --- what a fake operator promises ---


class Checked(TorchDispatchMode):
    """Hold each call of tilewise's operators to what its fake promises: shapes, dtypes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tilewise":
            torch.library.opcheck(function, args, test_utils="test_faketensor")
            self.calls += 1
        return function(*args, **kwargs or {})


def layouts(*shape: int) -> list[Tensor]:
    """Tensors of a shape that lie in many orders, are expanded along an axis, or are a part of larger ones."""
    n = len(shape)
    torch.manual_seed(0)
    found = [torch.randn(2 * shape[0], *shape[1:-1], 2 * shape[-1])[: shape[0], ..., 1::2]]
    for order in [*permutations(range(n))][:: 3 if n == 4 else 1]:  # heads last among them
        found.append(torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(n)]))
    for axis in range(n):
        found.append(torch.randn([1 if i == axis else size for i, size in enumerate(shape)]).expand(shape))
    return found


Q = torch.linspace(-1, 1, 2 * 4 * 15 * 8).view(2, 4, 15, 8)
OFFSETS = torch.tensor([0, 5, 15])
PROMISES = {
    "q": ((2, 4, 15, 8), lambda x: attention(x, Q, Q)),
    "k, v": ((2, 4, 15, 8), lambda x: attention(Q, x, x)),
    "bias": ((2, 4, 15, 15), lambda x: attention(Q, Q, Q, bias=x)),
    "shared bias": ((1, 4, 15, 15), lambda x: attention(Q, Q, Q, bias=x)),
    "sink": ((2, 4, 15), lambda x: attention(Q, Q, Q, sink=x)),
    "values of a query": ((2, 4, 15, 9), lambda x: attention(Q, Q, Q, bias=RelativeBias(x, lo=-4))),
    "values of a key": ((2, 4, 15, 9), lambda x: attention(Q, Q, Q, bias=RelativeBias(x, lo=-4, on="key"))),
    "shared values": ((1, 4, 1, 29), lambda x: attention(Q, Q, Q, bias=RelativeBias(x, lo=-14))),
    "T5": ((32, 4), lambda x: attention(Q, Q, Q, bias=t5_bias(x, bidirectional=True))),
    "alibi": ((2, 4), lambda x: attention(Q, Q, Q, bias=alibi(x))),
    "low rank": ((2, 4, 15, 3), lambda x: attention(Q, Q, Q, bias=low_rank_bias(x, x))),
    "rows": ((15, 4, 8), lambda x: varlen_attention(x, x, x, OFFSETS, OFFSETS, 10, 10)),
    "T5 of rows": (
        (32, 4),
        lambda x: varlen_attention(*[Q[0].transpose(0, 1)] * 3, OFFSETS, OFFSETS, 10, 10,
                                   bias=t5_bias(x, bidirectional=True)),
    ),
    "softmax": ((2, 4, 15, 15), tilewise.softmax),
    "bias of a softmax": ((1, 4, 15, 15), lambda x: tilewise.softmax(Q @ Q.mT, bias=x)),
    "matmul": ((2, 4, 15, 8), lambda x: tilewise.matmul(x, Q.mT)),
    "c of matmul": ((15, 15), lambda x: tilewise.matmul(Q, Q.mT, c=x)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMISES)
def test_operators_return_what_their_fakes_promise(name):
    shape, f = PROMISES[name]
    for x in layouts(*shape):
        x = x.detach().requires_grad_()
        with Checked() as checked:
            o = f(x)
            torch.autograd.grad(o, x, torch.ones_like(o))
        assert checked.calls


def test_a_gradient_that_lies_otherwise_is_copied():
    """As those of some kernels do; one that lies as promised is returned as it is."""
    x, grad = torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2), torch.randn(2, 4, 3, 5)
    found = gradients_like([x, grad, None], [grad, grad, None], x)
    promised = fake_gradients_like([x, grad, None], [True, True, False], x)
    assert [y.stride() for y in found] == [y.stride() for y in promised]
    assert torch.equal(found[0], grad)
    assert found[1] is grad


# --- transforms of torch.func within a compiled function ---

K, V = Q[:, :2].cos(), Q[:, :2].sin()
TRANSFORMED = {
    "attention": lambda x: attention(x, K, V, bias=x @ x.mT, causal=True, return_lse=True)[1].sum(),
    "varlen": lambda x: varlen_attention(*[x[0].transpose(0, 1)] * 3, OFFSETS, OFFSETS, 10, 10).square().sum(),
    "softmax": lambda x: tilewise.softmax(x, scale=2.0).square().sum(),
    "matmul": lambda x: tilewise.matmul(x, x.cos().mT).square().sum(),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_compiled_grad(name):
    torch._dynamo.reset()
    f = torch.func.grad(TRANSFORMED[name])
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(Q), f(Q))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_compiled_grad_within_vmap():
    torch._dynamo.reset()
    f = torch.vmap(torch.func.grad(lambda x: attention(x[None], K[:1], V[:1]).square().sum()))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(Q), f(Q))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own use
def test_what_compiled_transforms_lack_is_said():
    """And nested ones drop no derivative: those of a product are right in any order."""

    def forward_over_reverse(f):
        return lambda x: torch.func.jvp(torch.func.grad(f), (x,), (x,))[1]

    def second(f):
        return torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())

    for f, missing in (
        (forward_over_reverse(TRANSFORMED["softmax"]), "has no forward-mode derivative"),
        (second(TRANSFORMED["softmax"]), "has no second derivative"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=missing):
            torch.compile(f, fullgraph=True, backend="aot_eager")(Q)
    for f in (
        second(TRANSFORMED["matmul"]),
        second(TRANSFORMED["varlen"]),
        forward_over_reverse(TRANSFORMED["varlen"]),
    ):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(Q), f(Q))
