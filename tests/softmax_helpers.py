"""One call of softmax as a value, how its tensors are made, and the error rule of helpers.py for P, dx and dbias.

    max|y - ref64| <= 2 · max|same computation in plain torch, same dtype - ref64| + slack

The reference is plain torch in float64; nothing of tilewise takes part in it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from helpers import poisoned_memory
from torch import Tensor

from tilewise import softmax
from tilewise.ops.row_softmax import BiasLike, SoftmaxNeeds

SLACK = 1e-5  # of the largest element of the reference
FEW = 100


@dataclass(frozen=True)
class Case:
    """A call and its backward.

    bias, mask: the axes that they have, a 1 in the place of each that they broadcast: "11" for (1, N).
    layout: contiguous; transposed: the first axis is innermost; sliced: rows of odd length at an odd offset;
    expanded: stride 0 along the first axis.
    blind: the first row sees nothing. planted: a value behind the mask, in x, bias and dP. hidden: a tenth of the bias
    is -inf.
    """

    shape: tuple[int, ...]
    dim: int = -1
    dtype: torch.dtype = torch.float16
    scale: float = 0.7
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    mask: str | None = None
    layout: str = "contiguous"
    blind: bool = False
    hidden: bool = False
    planted: float | None = None

    def operand(self, axes: str) -> tuple[int, ...]:
        return tuple(1 if a == "1" else n for a, n in zip(axes, self.shape, strict=True))

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape)), f"dim {self.dim}", str(self.dtype).removeprefix("torch.")]
        for name in ("bias", "mask", "layout", "planted"):
            value = getattr(self, name)
            if value not in (None, "contiguous"):
                words.append(f"{name} {value}")
        words += [name for name in ("blind", "hidden") if getattr(self, name)]
        if self.bias_dtype is not None:
            words.append("bias " + str(self.bias_dtype).removeprefix("torch."))
        return ", ".join(words)


class Tensors(NamedTuple):
    x: Tensor
    bias: Tensor | None
    mask: Tensor | None
    dp: Tensor


class Results(NamedTuple):
    p: Tensor
    dx: Tensor
    dbias: Tensor | None


def lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        order = [*range(1, x.dim()), 0]
        return x.permute(order).contiguous().permute([order.index(n) for n in range(x.dim())])
    if layout == "sliced":
        buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 5 + x.shape[-1] % 2), math.nan)
        view = buffer[..., 3 : 3 + x.shape[-1]]
        view.copy_(x)
        return view
    if layout == "expanded":
        return x[:1].clone().expand_as(x)
    assert layout == "contiguous"
    return x.contiguous()


def tensors(case: Case, device: str = "cpu", draw: int = 0) -> tuple[Tensors, Tensors]:
    """Inputs and dP, and the same without planted values; equal for equal cases and draws."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr(case).encode()) + draw)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, dp = 3 * normal(*case.shape), normal(*case.shape)
    bias = mask = None
    if case.bias is not None:
        bias = normal(*case.operand(case.bias)).to(case.bias_dtype or case.dtype)
        if case.hidden:
            bias.masked_fill_(torch.rand(bias.shape, generator=generator, device=device) < 0.1, -math.inf)
    if case.mask is not None:
        mask = torch.rand(case.operand(case.mask), generator=generator, device=device) < 0.7
    x, dp = x.to(case.dtype), dp.to(case.dtype)
    if case.layout == "expanded":
        x, dp = x[:1].expand_as(x), dp[:1].expand_as(dp)
    if case.blind:
        blind = x if mask is None else mask
        blind.movedim(case.dim, -1)[(0,) * (len(case.shape) - 1)] = False if mask is not None else -math.inf
    clean = (x, bias, mask, dp)
    if case.planted is not None:
        assert mask is not None
        hidden = ~mask.expand(case.shape)
        x, dp = x.masked_fill(hidden, case.planted), dp.masked_fill(hidden, case.planted)
        if bias is not None and case.bias == case.mask:
            bias = bias.masked_fill(~mask, case.planted)

    def made(x: Tensor, bias: Tensor | None, mask: Tensor | None, dp: Tensor) -> Tensors:
        return Tensors(lay_out(x, case.layout), bias, mask, lay_out(dp, case.layout))

    return made(x, bias, mask, dp), made(*clean)


def unfused(case: Case, t: Tensors, dtype: torch.dtype) -> Results:
    """Plain torch in ``dtype``; rows that see nothing are zeros, as plain torch cannot say."""
    x = t.x.to(dtype).detach().requires_grad_()
    bias = None
    s = x * case.scale
    if t.bias is not None:
        bias = t.bias.to(dtype if dtype == torch.float64 else t.bias.dtype).detach().requires_grad_()
        s = (s + bias).to(dtype)
    if t.mask is not None:
        s = s.masked_fill(~t.mask, -math.inf)
    blind = (s == -math.inf).all(case.dim, keepdim=True)
    p = torch.softmax(s.masked_fill(blind, 0.0), case.dim).masked_fill(blind, 0.0)
    wanted = [y for y in (x, bias) if y is not None]
    dx, *dbias = torch.autograd.grad(p, wanted, t.dp.to(dtype))
    return Results(p.detach(), dx, dbias[0] if dbias else None)


def public(case: Case, t: Tensors) -> Results:
    """Through `tilewise.softmax` and autograd."""
    x = t.x.detach().requires_grad_()
    bias = None if t.bias is None else t.bias.detach().requires_grad_()
    p = softmax(x, scale=case.scale, bias=bias, mask=t.mask, dim=case.dim)
    wanted = [y for y in (x, bias) if y is not None]
    dx, *dbias = torch.autograd.grad(p, wanted, t.dp)
    return Results(p.detach(), dx, dbias[0] if dbias else None)


def by_kernels(case: Case, t: Tensors) -> Results:
    """The Triton kernels' own two functions: in Triton's interpreter, where the tensors are on the CPU."""
    from tilewise.ops.row_softmax.triton import launch

    dim = case.dim % len(case.shape)
    p = launch.forward(t.x, case.scale, t.bias, t.mask, dim)
    bias = None if t.bias is None else BiasLike(tuple(t.bias.shape), t.bias.dtype)
    dx, dbias = launch.backward(t.dp, p, case.scale, bias, dim, SoftmaxNeeds(True, bias is not None))
    assert dx is not None
    return Results(p, dx, dbias)


def check(case: Case, function=public, device: str = "cpu") -> None:
    """Hold a function to the error rule in poisoned memory, each result on its own."""
    given, clean = tensors(case, device)
    with poisoned_memory(device):
        results = function(case, given)
    exact = unfused(case, clean, torch.float64)
    yardstick = errors(unfused(case, clean, case.dtype), exact)
    assert (results.p.shape, results.p.dtype) == (clean.x.shape, case.dtype)
    assert (results.dx.shape, results.dx.dtype) == (clean.x.shape, case.dtype)
    if clean.bias is not None:
        assert (results.dbias.shape, results.dbias.dtype) == (clean.bias.shape, clean.bias.dtype)
    zero = exact.p == 0
    for name in ("p", "dx"):
        assert (getattr(results, name)[zero] == 0).all(), f"{name}: not 0 where nothing is seen"
    for name, error in errors(results, exact).items():
        reference = getattr(exact, name)
        allowed = 2 * yardstick[name] + SLACK * reference.abs().max().item()
        if error > allowed:  # what few results need
            allowed += 2 * max(more_draws(case, device, exact)[name] - yardstick[name], 0.0)
            if name == "dbias":
                allowed += noise(case, exact, clean)
        assert error <= allowed, f"{case}: {name} is off by {error:.3e}, allowed {allowed:.3e}"


def more_draws(case: Case, device: str, exact: Results) -> dict[str, float]:
    """Plain torch's largest errors in seven more draws, where some result has few elements: the largest of few errors
    says little about their size."""
    results = {name: y for name, y in zip(Results._fields, exact, strict=True) if y is not None}
    few = min(y.numel() for y in results.values()) < FEW
    drawn = [tensors(case, device, draw)[1] for draw in range(1, 8 if few else 1)]
    found = [errors(unfused(case, x, case.dtype), unfused(case, x, torch.float64)) for x in drawn]
    return {name: max((x[name] for x in found), default=0.0) for name in results}


def noise(case: Case, exact: Results, t: Tensors) -> float:
    """What rounding P does to a sum of dS: independent errors of dP∘P, four standard deviations.

    Plain torch sums rounded gradients, which may by chance cancel to less, above all along rows, where the sum is 0.
    """
    terms = (exact.p * t.dp.double()).square()
    largest = terms.sum_to_size(exact.dbias.shape).max().item()
    return 2 * torch.finfo(case.dtype).eps * math.sqrt(largest)


def errors(results: Results, exact: Results) -> dict[str, float]:
    found = {}
    for name, y, reference in zip(Results._fields, results, exact, strict=True):
        if reference is not None:
            found[name] = (y.double() - reference).abs().max().item()
            assert math.isfinite(found[name]), f"{name}: not finite"
    return found
