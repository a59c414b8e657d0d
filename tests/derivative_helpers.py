"""Attention in PyTorch's own operators, and every first and second derivative of a function by every way to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from helpers import SLACK, Case, Tensors, _of_heads, dropout_mask, kept_share, rows_of, tensors, visible
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import attention

Function = Callable[..., tuple[Tensor, Tensor]]


def plain(case: Case, x: Tensors, added: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """o and lse in the inputs' dtype, with 0 as the lse of a row that sees nothing. added: biases (B, H, M, N).

    No torch.softmax: the tangent that PyTorch gives it cannot be differentiated again.
    """
    scale = 1 / math.sqrt(case.D) if case.scale is None else case.scale
    s = (x.q @ _of_heads(x.k, case.H).mT) * scale
    if case.softcap is not None:
        s = torch.tanh(s / case.softcap) * case.softcap
    seen = visible(case, x)
    for bias in [*([] if x.bias is None else [_of_heads(x.bias, case.H)]), *added]:
        s, seen = s + bias, seen & (bias != -math.inf)
    sink = x.q.new_full((1, 1, 1), -math.inf) if x.sink is None else rows_of(x.sink)
    column = sink.expand(s.shape[:3])[..., None].to(s.dtype)
    s, seen = torch.cat([s, column], -1), torch.cat([seen, column != -math.inf], -1)
    fully_masked = ~seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen, -math.inf).masked_fill(fully_masked, 0.0)
    e = torch.where(seen, (s - s.detach().amax(-1, keepdim=True)).exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    total = total.masked_fill(fully_masked, 1.0)
    p = (e / total)[..., : case.N]
    if case.dropout_p:
        p = torch.where(dropout_mask(case).to(p.device), p / (kept_share(case.dropout_p) or 1.0), 0.0)
    lse = total.log() + s.detach().amax(-1, keepdim=True)
    return p.to(x.v.dtype) @ _of_heads(x.v, case.H), lse.masked_fill(fully_masked, 0.0).squeeze(-1)


def no_lse(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """With 0 as the lse of a row that sees nothing, which has none to differentiate."""
    o, lse = outputs
    return o, lse.masked_fill(lse == -math.inf, 0.0)


def tangents_like(leaves: Sequence[Tensor], seed: int = 7) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in leaves)


def _loss(function: Function) -> Callable[..., Tensor]:
    return lambda *leaves: sum(x.double().sin().sum() for x in function(*leaves))


def _gradients(function: Function, leaves: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return torch.func.grad(_loss(function), argnums=tuple(range(len(leaves))))


def jvp(function: Function, leaves: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.func.jvp(function, tuple(leaves), tuple(tangents))[1]


def forward_over_reverse(function: Function, leaves: Sequence[Tensor], tangents: Sequence[Tensor]):
    return torch.func.jvp(_gradients(function, leaves), tuple(leaves), tuple(tangents))[1]


def reverse_over_forward(function: Function, leaves: Sequence[Tensor], tangents: Sequence[Tensor]):
    """Gradients by the leaves and by their tangents."""
    n = len(leaves)

    def total(*x):
        return sum(y.double().sin().sum() for y in torch.func.jvp(function, x[:n], x[n:])[1])

    return torch.func.grad(total, argnums=tuple(range(2 * n)))(*leaves, *tangents)


def reverse_over_reverse(function: Function, leaves: Sequence[Tensor], tangents: Sequence[Tensor]):
    """Gradients of ⟨tangents, gradients⟩ by the leaves and by the cotangents of o and the lse, in eager mode."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    outputs = function(*leaves)
    cotangents = [x.detach().cos().requires_grad_() for x in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True)
    total = sum((g * t).double().sum() for g, t in zip(grads, tangents, strict=True))
    return torch.autograd.grad(total, [*leaves, *cotangents], allow_unused=True, materialize_grads=True)


def gradient_of_gradient(function: Function, leaves: Sequence[Tensor], tangents: Sequence[Tensor]):
    """The same by the leaves, with the cotangents of a loss, by transforms, which alone are compiled."""

    def total(*leaves):
        grads = _gradients(function, leaves)(*leaves)
        return sum((g * t).double().sum() for g, t in zip(grads, tangents, strict=True))

    return torch.func.grad(total, argnums=tuple(range(len(leaves))))(*leaves)


def hold_tangents(
    case: Case, given: str = "qkvbs", device: str = "cpu", backend: str | None = None, fused: bool = True
) -> None:  # fmt: skip
    """The tangents of o and the lse, of which ``given`` have one, by the rule of helpers.py: letters of "qkvbs".

    Values planted in hidden keys are in their tangents too. fused: whether a kernel computes them.
    """
    names = [name for name in ("q", "k", "v", "bias", "sink") if name[0] in given]
    x, clean = tensors(case, device), tensors(case, device, planted=False)
    names = [name for name in names if getattr(x, name) is not None]
    leaves, fair = ([getattr(y, name) for name in names] for y in (x, clean))
    moved = tangents_like(fair)
    planted = [torch.where(a.isnan() | (a != b), a, t) for a, b, t in zip(leaves, fair, moved, strict=True)]

    def theirs(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        wide = leaves[0].dtype == torch.float64
        others = [y.double() if wide and y is not None and y.is_floating_point() else y for y in clean]
        return plain(case, Tensors(*others)._replace(**dict(zip(names, leaves, strict=True))))

    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, leaves, planted)
        y = x._replace(**dict(zip(names, duals, strict=True)))
        terms = {"mask": y.mask, "sink": y.sink, "backend": backend, **case.terms}
        with runs_kernel(fused):
            outputs = no_lse(attention(y.q, y.k, y.v, bias=y.bias, return_lse=True, **terms))
        found = [forward_ad.unpack_dual(z).tangent for z in outputs]
    other = jvp(theirs, fair, moved)
    exact = jvp(theirs, [z.double() for z in fair], [z.double() for z in moved])
    for z, unfused, right in zip(found, other, exact, strict=True):
        z = torch.zeros_like(unfused) if z is None else z
        error, allowed = ((y.double() - right).abs().max() for y in (z, unfused))
        assert error <= 2 * allowed + SLACK * right.abs().max(), f"{error:.3g}, of unfused torch {allowed:.3g}"


@contextmanager
def runs_kernel(expected: bool = True) -> Iterator[None]:
    """Tangents are computed by Triton's kernel, or never are."""
    from tilewise.backends.triton.tangents.launch import TritonTangents

    call, found = TritonTangents.__call__, []
    TritonTangents.__call__ = lambda self, *tensors: found.append(self) or call(self, *tensors)  # type: ignore[method-assign]
    try:
        yield
    finally:
        TritonTangents.__call__ = call  # type: ignore[method-assign]
    assert bool(found) == expected


WAYS = {
    "jvp": jvp,
    "forward over reverse": forward_over_reverse,
    "reverse over forward": reverse_over_forward,
    "reverse over reverse": reverse_over_reverse,
}


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator returns, but for views."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if not function.is_view:
            tensors = found if isinstance(found, (tuple, list)) else [found]
            self.elements = max(self.elements, *(x.numel() for x in tensors if isinstance(x, Tensor)), 0)
        return found
