"""One call of the product as a value, and the error rule that its result and gradients are held to.

max|x - ref64| <= 2 · max|same computation in plain torch, same dtype - ref64| + slack
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import torch
from helpers import poisoned_memory
from torch import Tensor

from tilewise import matmul

SLACK = 1e-5  # of the largest element of the reference
FEW = 100  # elements of a result
LAYOUTS = ("contiguous", "transposed", "sliced", "padded", "heads_last", "expanded")


@dataclass(frozen=True)
class Product:
    """A call of `tilewise.matmul` and of its backward.

    a_batch, b_batch: leading dimensions. c: its shape as letters of the result's axes, "mn" a matrix, "n" a row, "m1" a
    column, "1" for all, "b" in front for each batch dimension of the result. a_layout, b_layout: see `lay_out`.
    """

    M: int = 65
    N: int = 72
    K: int = 40
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    c: str | None = None
    dtype: torch.dtype = torch.float32
    c_dtype: torch.dtype | None = None
    alpha: float = 1.0
    beta: float = 1.0
    a_layout: str = "contiguous"
    b_layout: str = "contiguous"
    c_layout: str = "contiguous"
    grads: str = "abc"

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.a_batch, self.b_batch))

    def c_shape(self) -> tuple[int, ...]:
        sizes = {"m": (self.M,), "n": (self.N,), "1": (1,), "b": self.batch}
        return tuple(n for axis in self.c for n in sizes[axis])

    def __str__(self) -> str:
        """What differs from the default, as a test id."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={str(value).removeprefix('torch.')}")
        return ", ".join(words) or "default"


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in memory as ``layout`` says; memory between them is NaN.

    transposed: the matrix lies column by column. sliced: rows of odd length at an odd offset. padded: rows of 16-byte
    multiples that hold more. heads_last: the last batch axis lies between rows and columns. expanded: columns of
    stride 0, equal values.
    """
    if layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "heads_last":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x
    if layout == "expanded":
        return x[..., :1].clone().expand_as(x)
    rows, cols = x.shape[-2:] if x.dim() > 1 else (1, x.shape[-1])
    if layout == "padded":
        buffer = x.new_full((*x.shape[:-2], rows + 3, (cols + 23) // 16 * 16), torch.nan)
        view = buffer[..., :rows, :cols]
    else:
        assert layout == "sliced"
        buffer = x.new_full((*x.shape[:-2], rows + 3, cols + 5 + cols % 2), torch.nan)
        view = buffer[..., 1 : rows + 1, 1 : cols + 1]
    view = view.copy_(x.expand(view.shape))
    return view if x.dim() > 1 else view[..., 0, :]


def operands(case: Product, device: str = "cpu", draw: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Random a, b, c and dY, the same for equal cases and draws."""
    seed = zlib.crc32(repr(case).encode()) + draw
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        if generator is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    a = lay_out(normal(*case.a_batch, case.M, case.K), case.a_layout)
    b = lay_out(normal(*case.b_batch, case.K, case.N), case.b_layout)
    c = None
    if case.c is not None:
        c = lay_out(normal(*case.c_shape(), dtype=case.c_dtype or case.dtype), case.c_layout)
    return a, b, c, normal(*case.batch, case.M, case.N)


def differentiate(case: Product, inputs: tuple[Tensor | None, ...], function) -> dict[str, Tensor]:
    """``function(a, b, c)``, and the gradients that the case asks for."""
    *leaves, dy = inputs
    leaves = {
        name: x if x is None else x.detach().requires_grad_(name in case.grads)
        for name, x in zip("abc", leaves, strict=True)
    }
    y = function(*leaves.values())
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    found = torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype)) if wanted else ()
    return {"y": y.detach()} | {f"d{name}": g for name, g in zip(wanted, found, strict=True)}


def plain(case: Product, a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """The same by torch's own operators."""
    y = a @ b
    if case.alpha != 1.0:
        y = y * case.alpha
    return y if c is None else (y + case.beta * c).to(y.dtype)


def check(case: Product, backend: str | None = None, device: str = "cpu") -> None:
    """Hold the result and the gradients to the error rule, in poisoned memory."""
    inputs = operands(case, device)
    exact, yardstick = _references(case, inputs)
    errors = _errors(yardstick, exact)
    with poisoned_memory(device):
        results = differentiate(
            case, inputs, lambda a, b, c: matmul(a, b, c=c, alpha=case.alpha, beta=case.beta, backend=backend)
        )
    assert results.keys() == exact.keys()
    assert results["y"].is_contiguous()
    for name, error in _errors(results, exact).items():
        assert results[name].shape == exact[name].shape, name
        assert results[name].dtype == yardstick[name].dtype, name
        largest = exact[name].abs().max().item() if exact[name].numel() else 0.0
        allowed = 2 * errors[name] + SLACK * largest
        if error > allowed and min(x.numel() for x in exact.values()) < FEW:
            for draw in range(1, 8):  # the largest of few errors says little about their size: more of them
                again, other = _references(case, operands(case, device, draw))
                errors = {name: max(error, _errors(other, again)[name]) for name, error in errors.items()}
            allowed = 2 * errors[name] + SLACK * largest
        assert error <= allowed, (
            f"{case}: {name} is off by {error:.3e}, allowed {allowed:.3e} (torch {errors[name]:.3e}, "
            f"largest {largest:.3e})"
        )


def _references(case: Product, inputs: tuple[Tensor | None, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results in float64, and those of torch in the inputs' own dtypes."""

    def function(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
        return plain(case, a, b, c)

    exact = tuple(None if x is None else x.double() for x in inputs)
    return differentiate(case, exact, function), differentiate(case, inputs, function)


def _errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each."""
    return {name: (x.double() - exact[name]).abs().max().item() if x.numel() else 0.0 for name, x in results.items()}


def check_negated(backend: str) -> None:
    """Operands, an addend and a gradient whose memory holds their negatives."""
    shapes = ((9, 7), (7, 8), (9, 8), (9, 8))
    a, b, c, dy = (torch.randn(shape, dtype=torch.complex64).conj().imag for shape in shapes)
    leaves = [x.detach().requires_grad_() for x in (a, b, c)]
    assert all(x.is_neg() for x in (*leaves, dy))
    y = matmul(leaves[0], leaves[1], c=leaves[2], backend=backend)
    ours = (y, *torch.autograd.grad(y, leaves, dy))
    y = leaves[0] @ leaves[1] + leaves[2]
    for x, exact in zip(ours, (y, *torch.autograd.grad(y, leaves, dy)), strict=True):
        torch.testing.assert_close(x, exact)


def check_tf32(backend: str, setting: str, value: bool | str) -> None:
    """float32 products by tf32 are those of the nearest numbers of ten mantissa bits, not of what lies below them; of
    two equally near ones, those away from zero, as PTX's cvt.rna has it."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(17, 90, generator=generator), torch.rand(90, 19, generator=generator)
    a[:, 3] = 1 + 2.0**-11  # equally near to 1 and to 1 + 2**-10
    b[5] = -1 - 3 * 2.0**-11
    before = getattr(torch.backends.cuda.matmul, setting)
    setattr(torch.backends.cuda.matmul, setting, value)
    try:
        y = matmul(a, b, backend=backend)
    finally:
        setattr(torch.backends.cuda.matmul, setting, before)

    def nearest(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp((mantissa.abs() * 2**11 + 0.5).floor().copysign(mantissa), exponent - 11)

    # Products of eleven bits are exact in float32; a sum of ninety of them is off by an eps for each of its terms.
    bound = 90 * torch.finfo(torch.float32).eps * (nearest(a).abs() @ nearest(b).abs())
    assert ((y - nearest(a) @ nearest(b)).abs() <= bound).all()
