"""Description of a product by integers, and all errors about shapes, dtypes and devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.spec.tensors import check_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("hopper", "triton", "cpu")


def check_arguments(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, backend: str | None) -> None:
    """Raise a ValueError or TypeError that names the argument at fault."""
    check_tensor("a", a)
    check_tensor("b", b)
    if c is not None:
        check_tensor("c", c)
    for name, x in (("a", a), ("b", b)):
        if x.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if b.dtype != a.dtype:
        raise TypeError(f"b: dtype must equal a's, got {b.dtype} with a {a.dtype}")
    if a.dtype == torch.float64 and a.device.type == "cuda":
        raise ValueError(f"a, b: float64 runs on the CPU only, the tensors are on {a.device}")
    for name, other in (("b", b), ("c", c)):
        if other is not None and other.device != a.device:
            raise ValueError(f"{name}: must be on a's device {a.device}, got {other.device}")
    if b.shape[-2] != a.shape[-1]:
        raise ValueError(
            f"b: must have as many rows as a has columns, {a.shape[-1]}, got {b.shape[-2]} "
            f"(shapes {tuple(a.shape)} and {tuple(b.shape)})"
        )
    batch = broadcast(a, b)
    if c is not None:
        if c.dtype not in DTYPES:
            raise TypeError(f"c: dtype must be float16, bfloat16, float32 or float64, got {c.dtype}")
        shape = (*batch, a.shape[-2], b.shape[-1])
        sizes = zip(reversed(c.shape), reversed(shape), strict=False)
        if c.dim() > len(shape) or any(n not in (1, size) for n, size in sizes):
            raise ValueError(f"c: shape {tuple(c.shape)} does not broadcast to the product's {shape}")
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    limit = torch.finfo(wide).max
    for name, number in (("alpha", alpha), ("beta", beta)):
        if isinstance(number, bool) or not isinstance(number, (Real, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
        if not -limit <= number <= limit:
            raise ValueError(f"{name}: must be finite in {str(wide).removeprefix('torch.')}, got {number}")
    if backend is not None and backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: must be one of {', '.join(BACKENDS)}, auto or None, got {backend!r}")


def broadcast(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the batch shape that a's and b's leading dimensions broadcast to."""
    longer, shorter = sorted((tuple(a.shape[:-2]), tuple(b.shape[:-2])), key=len, reverse=True)
    padded = (1,) * (len(longer) - len(shorter)) + shorter
    for n, m in zip(longer, padded, strict=True):
        if n != m and n != 1 and m != 1:
            raise ValueError(
                f"b: batch dimensions {tuple(b.shape[:-2])} do not broadcast with a's {tuple(a.shape[:-2])}"
            )
    return tuple(m if n == 1 else n for n, m in zip(longer, padded, strict=True))


def output_shape(a: Tensor, b: Tensor, summed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the result; axes in ``summed``, counted from its end, have size 1."""
    shape = (*broadcast(a, b), a.shape[-2], b.shape[-1])
    return tuple(1 if axis - len(shape) in summed else n for axis, n in enumerate(shape))


class Axis(NamedTuple):
    """Axis of the batch; strides are in elements, 0 for a tensor that broadcasts along it."""

    size: int
    summed: bool
    a: int
    b: int
    c: int
    y: int


@dataclass(frozen=True)
class Product:
    """Y[g] = alpha · Σ_r A[g, r] B[g, r] + beta · C[g], with at most two batch axes, each kept or summed. Strides are
    in elements; ``c_strides`` is None without c. Hashable: a key of prepared launches."""

    rows: int  # M
    cols: int  # N
    inner: int  # K
    batch: tuple[Axis, Axis]
    a_strides: tuple[int, int]  # along M, K
    b_strides: tuple[int, int]  # along K, N
    c_strides: tuple[int, int] | None  # along M, N; 0 where c broadcasts
    dtype: torch.dtype
    c_dtype: torch.dtype | None
    device: str  # torch's device type
    capability: tuple[int, int] | None  # of a CUDA device
    aligned: tuple[bool, bool, bool]  # a, b, c: True if the address is a multiple of 16 bytes

    @property
    def kept(self) -> tuple[int, int]:
        """Sizes of the batch axes that the result has."""
        first, second = self.batch
        return 1 if first.summed else first.size, 1 if second.summed else second.size

    @property
    def summed(self) -> tuple[int, int]:
        """Sizes of the batch axes that are summed."""
        first, second = self.batch
        return first.size if first.summed else 1, second.size if second.summed else 1

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.inner * math.prod(axis.size for axis in self.batch)


def describe(a: Tensor, b: Tensor, c: Tensor | None, summed: tuple[int, ...]) -> Product | None:
    """Return the product of tensors that are not empty. None if more than two batch axes remain after merging."""
    batch, M, K, N = broadcast(a, b), a.shape[-2], a.shape[-1], b.shape[-1]
    shape = (*batch, M, N)
    strides = {
        "a": _strides(a, (*batch, M, K)),
        "b": _strides(b, (*batch, K, N)),
        "c": (0,) * len(shape) if c is None else _strides(c, shape),
        "y": _contiguous(output_shape(a, b, summed)),
    }
    axes = [Axis(n, i - len(shape) in summed, *(s[i] for s in strides.values())) for i, n in enumerate(batch) if n > 1]
    kept = _merge([axis for axis in axes if not axis.summed])
    reduced = _merge([axis._replace(y=0) for axis in axes if axis.summed])
    row = Axis(M, False, strides["a"][-2], 0, strides["c"][-2], N)
    # batch axes that b broadcasts are merged into the rows of one matrix
    while kept and kept[-1].b == 0 and (merged := _joined(kept[-1], row)) is not None:
        row = merged
        kept.pop()
    column = Axis(K, True, strides["a"][-1], strides["b"][-2], 0, 0)
    while reduced and reduced[-1].c == 0 and (merged := _joined(reduced[-1], column)) is not None:
        column = merged
        reduced.pop()
    found = kept + reduced
    if len(found) > 2:
        return None
    one = Axis(1, False, 0, 0, 0, 0)
    first, second = [one] * (2 - len(found)) + found
    cuda = a.device.type == "cuda"
    return Product(
        rows=row.size, cols=N, inner=column.size, batch=(first, second),
        a_strides=(row.a, column.a), b_strides=(column.b, strides["b"][-1]),
        c_strides=None if c is None else (row.c, strides["c"][-1]),
        dtype=a.dtype, c_dtype=None if c is None else c.dtype,
        device=a.device.type, capability=torch.cuda.get_device_capability(a.device) if cuda else None,
        aligned=(_aligned(a), _aligned(b), c is None or _aligned(c)),
    )  # fmt: skip


def _strides(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of ``x`` broadcast to ``shape``: 0 along broadcast axes."""
    missing = len(shape) - x.dim()
    own = tuple(0 if n == 1 and m > 1 else s for n, m, s in zip(x.shape, shape[missing:], x.stride(), strict=True))
    return (0,) * missing + own


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _joined(outer: Axis, inner: Axis) -> Axis | None:
    """Return two neighbouring axes as one if every tensor has a uniform stride along both, else None."""
    if inner.size == 1:
        return outer
    if any(o != inner.size * i for o, i in zip(outer[2:], inner[2:], strict=True)):
        return None
    return inner._replace(size=outer.size * inner.size)


def _merge(axes: list[Axis]) -> list[Axis]:
    merged: list[Axis] = []
    for axis in axes:
        both = _joined(merged[-1], axis) if merged else None
        if both is None:
            merged.append(axis)
        else:
            merged[-1] = both
    return merged


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0
