"""The vectors of T5's table and ALiBi's slopes: one node of autograd's graph, one kernel each way, and calls that are
found by their settings instead of being read again."""

from __future__ import annotations

import pytest
import torch
from helpers import cached
from torch import Tensor

from tilewise import attention
from tilewise.bias import alibi, t5_bias
from tilewise.bias import autograd as node
from tilewise.bias.toeplitz import AlibiRule, T5Rule
from tilewise.spec.relative import Relative, window
from tilewise.spec.score import Distances

BRAIN, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
TABLES = [T5Rule(32, True, 128), T5Rule(32, False, 128), T5Rule(7, True, 20), T5Rule(2, False, 9)]
SLOPES = [AlibiRule("absolute"), AlibiRule("signed")]
# First distance and how many: more than two blocks of a kernel, near ones, far ones alone, one.
RANGES = [(-1500, 3001), (-3, 40), (200, 90), (-400, 100), (5, 1)]


def by_kernels(rule: T5Rule | AlibiRule, x: Tensor, first: int, width: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A rule's vector, and x's gradient from the vector's."""
    from tilewise.backends.kernels import vectors

    if isinstance(rule, T5Rule):
        vector, bounds = rule.vector(x, first, width), rule.bounds(x.device)
        return vector, vectors.table_gradient(gradient, bounds, first, x)
    signed, two = rule.form == "signed", x if x.dim() == 2 else x[None]
    return rule.vector(x, first, width), vectors.slopes_gradient(gradient, first, two, signed).view(x.shape)


def drawn(*shape, dtype=FLOAT):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def made_of(rule, heads=3, dtype=FLOAT):
    return drawn(rule.buckets, heads, dtype=dtype) if isinstance(rule, T5Rule) else drawn(2, heads, dtype=dtype)


def by_definition(rule, x, first, width):
    """In float64, differentiable."""
    distance = torch.arange(first, first + width)
    if isinstance(rule, T5Rule):
        return x.double()[rule.bucket(distance)].mT[None, :, None]
    two = x if x.dim() == 2 else x[None]
    return two.double()[..., None, None] * (distance if rule.form == "signed" else -distance.abs())


def gradient_of(rule, x, first, gradient):
    leaf = x.detach().double().requires_grad_()
    return torch.autograd.grad(by_definition(rule, leaf, first, gradient.shape[3]), leaf, gradient.double())[0]


def hold_gradient(found, rule, x, first, gradient, rounding):
    """rounding: of the result to x's dtype. What is summed is so large, and each sum in float32."""
    large = AlibiRule("absolute") if isinstance(rule, AlibiRule) else rule
    size = gradient_of(large, x, first, gradient.abs()).abs().max()
    assert found.dtype == x.dtype
    expected = gradient_of(rule, x, first, gradient)
    eps = 1e-14 if x.dtype == DOUBLE else 3e-7
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=eps * float(size))


@pytest.mark.parametrize(
    ("buckets", "bidirectional"),
    [*((n, True) for n in (4, 7, 8, 32, 65)), *((n, False) for n in (2, 3, 7, 8, 32, 65))],
)
def test_a_bucket_is_an_interval(buckets, bidirectional):
    """Which the kernel of the gradient takes it for."""
    for most in (buckets, 128, 1000):
        rule = T5Rule(buckets, bidirectional, most)
        distance = torch.arange(-1100, 1101)
        found = torch.full_like(distance, -1)
        for n, (begin, end) in enumerate(rule.bounds(torch.device("cpu")).tolist()):
            inside = (distance >= begin) & (distance < end)
            assert (found[inside] == -1).all(), "buckets overlap"
            found[inside] = n
        assert torch.equal(found, rule.bucket(distance))


@pytest.mark.parametrize("rule", TABLES + SLOPES, ids=str)
@pytest.mark.parametrize("dtype", [BRAIN, FLOAT, DOUBLE])
def test_the_node_is_the_definition(rule, dtype):
    for first, width in RANGES:
        x = made_of(rule, dtype=dtype).requires_grad_()
        vector = node.vector_of(rule, x, first, width)
        expected = by_definition(rule, x, first, width)
        assert vector.dtype == (DOUBLE if dtype == DOUBLE else FLOAT)
        torch.testing.assert_close(vector.double(), expected, rtol=1e-6, atol=0)
        assert type(vector.grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad", "more than one node"
        gradient = drawn(*vector.shape, dtype=vector.dtype)
        (found,) = torch.autograd.grad(vector, x, gradient)
        hold_gradient(found, rule, x, first, gradient, 4e-3 if dtype == BRAIN else 0)


@pytest.mark.parametrize("rule", TABLES[:2] + SLOPES, ids=str)
@pytest.mark.parametrize("dtype", [BRAIN, FLOAT])
def test_the_kernels_are_the_definition(interpreter, rule, dtype):
    for first, width in RANGES:
        x = made_of(rule, dtype=dtype)[:, ::2]  # strided
        shape = (1 if isinstance(rule, T5Rule) else 2, x.shape[1], 1, width)
        # As Hopper gives it: a part of a wider one, beside which anything may lie.
        gradient = torch.full((*shape[:3], width + 11), torch.nan)[..., 5 : 5 + width].copy_(drawn(*shape))
        vector, found = interpreter(by_kernels, rule, x, first, width, gradient)
        torch.testing.assert_close(vector, by_definition(rule, x, first, width).float(), rtol=1e-6, atol=0)
        hold_gradient(found, rule, x, first, gradient, 8e-3 if dtype == BRAIN else 0)  # the interpreter cuts bfloat16


class AsKernel:
    """A rule whose gradient is what a kernel's is: no operation that anybody could differentiate or batch."""

    def __init__(self, rule):
        self.composed, self.rule = rule.composed, rule

    def gradient(self, gradient, first, x):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(gradient)
        return self.rule.gradient(gradient.detach(), first, x)


@pytest.mark.parametrize("rule", [TABLES[2], *SLOPES], ids=str)
def test_gradients_of_gradients_and_batched_ones(rule):
    x = made_of(rule, heads=2, dtype=DOUBLE).requires_grad_()

    def vector(x):
        return node.vector_of(AsKernel(rule), x, -12, 20)

    assert torch.autograd.gradcheck(vector, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: vector(x) ** 2, x)
    with torch.autograd.forward_ad.dual_level():
        assert not node.is_node(x), "a node has no tangents"


def test_all_entries_are_not_copied():
    """A part of them would have a gradient that is copied into zeros."""
    values = drawn(1, 2, 1, 9)
    assert window(Relative(values, Distances("none", -4, 9)), -4, 9) is values
    assert window(Relative(values, Distances("none", -4, 9)), -4, 8).shape[-1] == 8


# --- calls like an earlier one ---


def tensors(M=24, N=24, heads=2, grad=True):
    return [drawn(1, heads, size, 8).requires_grad_(grad) for size in (M, N, N)]


def terms(x):
    """All that differ in a setting."""
    slopes, table = x
    return [
        lambda: t5_bias(table, True, 128), lambda: t5_bias(table, False, 128), lambda: t5_bias(table, True, 12),
        lambda: t5_bias(table, True, 128, query_start=7), lambda: t5_bias(table, True, 128, key_start=7),
        lambda: alibi(slopes), lambda: alibi(slopes, "signed"), lambda: alibi(slopes, query_start=7),
        lambda: alibi(slopes[None]), lambda: t5_bias(table[:9], True, 128), lambda: t5_bias(table[:, :1], True, 128),
    ]  # fmt: skip


@pytest.fixture
def unread(monkeypatch):
    """Refuses to read a call."""

    def refuse(*_, **__):
        raise AssertionError("a call like an earlier one was read")

    return lambda: monkeypatch.setattr("tilewise.api.read_call", refuse)


def outputs(q, k, v, bias, x, **options):
    o, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
    return [o, lse, *torch.autograd.grad((o * o).sum() + (lse * lse).sum(), [q, k, v, *x], allow_unused=True)]


def test_a_call_like_an_earlier_one_is_not_read(unread):
    q, k, v = tensors(24, 30)
    x = [drawn(2).requires_grad_(), drawn(32, 2).requires_grad_()]
    found = [outputs(q, k, v, make(), x) for make in terms(x)]
    unread()
    for make, expected in zip(terms(x), found, strict=True):
        for a, b in zip(outputs(q, k, v, make(), x), expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    for n, a in enumerate(found):
        for b in found[:n]:
            assert not torch.equal(a[0], b[0]) or n == 8, "settings that no key has"


def test_the_numbers_of_a_term_are_read_anew(unread):
    q, k, v = tensors(grad=False)
    table = drawn(32, 2)
    before = attention(q, k, v, bias=t5_bias(table, True))
    table.neg_()
    dense = table[T5Rule(32, True, 128).bucket(torch.arange(24) - torch.arange(24)[:, None])].permute(2, 0, 1)[None]
    expected = attention(q, k, v, bias=dense)
    unread()
    after = attention(q, k, v, bias=t5_bias(table, True))
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(before, after)


def test_two_layers_share_a_table_that_changes_in_between(unread):
    """As an optimizer that steps between a forward and a backward does; nothing of the table is saved."""
    q, k, v = tensors()
    table = drawn(32, 2).requires_grad_()

    def twice():
        return attention(attention(q, k, v, bias=t5_bias(table, True)), k, v, bias=t5_bias(table, True))

    (expected,) = torch.autograd.grad(twice().sum(), table)
    unread()
    o = twice()
    with torch.no_grad():
        table.add_(1.0)
    torch.testing.assert_close(torch.autograd.grad(o.sum(), table)[0], expected)


def test_dropout_draws_anew_and_a_mask_stays(unread):
    q, k, v = tensors(64, 64, grad=False)
    slopes, mask, sink = drawn(2), drawn(64, 64) > 0, drawn(2)
    options = {"mask": mask[None, None], "sink": sink, "dropout_p": 0.5, "causal": True}
    torch.manual_seed(0)
    found = [attention(q, k, v, bias=alibi(slopes), **options) for _ in range(2)]
    assert not torch.equal(*found)
    unread()
    torch.manual_seed(0)
    again = [attention(q, k, v, bias=alibi(slopes), **options) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_positions_on_the_device_are_read_each_time():
    q, k, v = tensors(grad=False)
    table = drawn(32, 2)
    start = torch.tensor([3])
    for value in (3, 50):
        start.fill_(value)
        for _ in range(2):
            found = attention(q, k, v, bias=t5_bias(table, True, query_start=start))
            torch.testing.assert_close(found, attention(q, k, v, bias=t5_bias(table, True, query_start=value)))
    assert not any(isinstance(y, torch.Tensor) for key in cached("vector") for y in key)
