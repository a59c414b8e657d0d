"""The formula in float64, and what comes of a call with all gradients: for the doors of structure models."""

from __future__ import annotations

import torch
from torch import Tensor


def tensors(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def formula(q, k, v, bias, mask=None, scale=None):
    """A row that sees nothing is 0."""
    s = torch.einsum("...md,...nd->...mn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    seen = (s > -torch.inf).any(-1, keepdim=True)
    return torch.einsum("...mn,...nd->...md", s.where(seen, 0.0).softmax(-1).where(seen, 0.0), v)


def value_and_gradients(function, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    found = function(*inputs)
    outputs = [found] if isinstance(found, Tensor) else [x for x in found if x is not None]
    loss = sum((x.double() * tensors(x.shape, seed=9)[0]).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def check(ours, theirs, tolerance=1e-10):
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


def check_rounded(ours, theirs, dtype):
    """Of numbers in half precision: a few roundings of the largest."""
    for x, y in zip(ours, theirs, strict=True):
        assert (x.double() - y).abs().max() <= 16 * torch.finfo(dtype).eps * y.abs().max()


def with_nan(x, dim, at):
    return x.index_fill(dim, torch.tensor(at), torch.nan)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
