"""attention() under the transforms of torch.func: as PyTorch's own operators, or refused."""

import math

import pytest
import torch

from tilewise import attention


def plain(q, k, v, bias=None, mask=None):
    """O and LSE in PyTorch's own operators, which every transform knows; as many key heads as query heads."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def tiled(q, k, v, bias=None, mask=None):
    return attention(q, k, v, bias=bias, mask=mask, return_lse=True)


def loss_of(function):
    def loss(*inputs):
        o, lse = function(*inputs)
        return o.square().sum() + lse.sin().sum()

    return loss


def samples(n):
    """``n`` calls' q, k, v, bias and mask, stacked; every query sees the first key. See `test_sinks` for sinks."""
    torch.manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), (1, 4, 1, 7))
    mask = torch.rand(n, 2, 1, 5, 7) < 0.6
    mask[..., 0] = True
    return [*(torch.randn(n, *shape, dtype=torch.float64) for shape in shapes), mask]


def _vjp(function, inputs):
    outputs, backward = torch.func.vjp(function, *inputs)
    return backward(tuple(o.sin() for o in outputs))


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(loss_of(f), argnums=(0, 1, 2, 3)),
    "grad of the bias": lambda f: torch.func.grad(loss_of(f), argnums=3),
    "vjp": lambda f: lambda *inputs: _vjp(lambda *qkvb: f(*qkvb, inputs[4]), inputs[:4]),
    "jacrev": lambda f: torch.func.jacrev(lambda *inputs: f(*inputs)[0].sum((0, 1, 3)), argnums=(0, 3)),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    inputs = [x[0] for x in samples(1)]
    found, expected = (TRANSFORMS[name](f)(*inputs) for f in (tiled, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "in_dims",
    [
        (0, 0, 0, 0, 0), (0, None, None, None, None), (None, None, None, 0, None), (1, 4, None, 3, 2),
        (2, None, 1, -1, -2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", ["values", "gradients of each", "gradient of all"])
def test_vmap(order, in_dims):
    def transformed(f):
        if order == "values":
            return torch.vmap(f, in_dims)
        if order == "gradients of each":
            return torch.vmap(torch.func.grad(loss_of(f), argnums=(0, 1, 2, 3)), in_dims)
        return torch.func.grad(loss_of(torch.vmap(f, in_dims)), argnums=(0, 1, 2, 3))

    inputs = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(samples(3), in_dims, strict=True)]
    found, expected = (transformed(f)(*inputs) for f in (tiled, plain))
    torch.testing.assert_close(found, expected)


def test_a_batch_of_cotangents():
    q, k, v = (x[0].requires_grad_() for x in samples(1)[:3])
    cotangents = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(f(q, k, v)[0], (q, k, v), cotangents, is_grads_batched=True) for f in (tiled, plain)
    )
    torch.testing.assert_close(found, expected)
