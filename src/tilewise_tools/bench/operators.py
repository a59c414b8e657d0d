"""Cases and providers of softmax and matmul: inputs, reference results and work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise.explanation.work import Work


class OperatorInputs(NamedTuple):
    """Leaves by name, in the order of their gradients, and the gradient of the output."""

    named: dict[str, Tensor]
    do: Tensor

    @property
    def names(self) -> list[str]:
        return list(self.named)

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.named.values())


def wide_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the reference result: float32 for 16-bit dtypes, else float64."""
    return torch.float32 if getattr(torch, dtype).itemsize == 2 else torch.float64


@dataclass(frozen=True)
class SoftmaxCase:
    """Softmax and its backward for ``rows`` contiguous rows of ``keys`` elements."""

    family: str
    rows: int
    keys: int
    dtype: str = "bfloat16"
    backward: bool = True
    host: bool = False
    operator: str = "softmax"

    @property
    def name(self) -> str:
        return f"{self.family} N{self.keys}"

    def inputs(self, device: torch.device, seed: int = 0) -> OperatorInputs:
        x, do = _normal(device, seed, self.dtype, (self.rows, self.keys), (self.rows, self.keys))
        return OperatorInputs({"x": x.requires_grad_()}, do)

    def exact(self, inputs: OperatorInputs) -> dict[str, Tensor]:
        wide = wide_dtype(self.dtype)
        with torch.no_grad():
            p = torch.softmax(inputs.named["x"], -1, dtype=wide)
            dx = inputs.do.to(wide)
            delta = torch.linalg.vecdot(p, dx)[:, None]
            dx.sub_(delta).mul_(p)
        return {"o": p, "dx": dx}

    def work(self, which: str) -> Work:
        """Return the work of a pass, five operations per element.

        The forward reads x and writes P; the backward reads P and dP and writes dx.
        """
        size = self.rows * self.keys
        return Work(5 * size, (2 if which == "forward" else 3) * size * getattr(torch, self.dtype).itemsize, 0)


@dataclass(frozen=True)
class MatmulCase:
    """``a @ b`` of (m, k) and (k, n), plus c (m, n) if ``added``, and the backward: da, db and dc."""

    family: str
    m: int
    n: int
    k: int
    added: bool = False
    dtype: str = "bfloat16"
    backward: bool = True
    host: bool = False
    operator: str = "matmul"

    @property
    def keys(self) -> int:
        return self.k

    @property
    def name(self) -> str:
        return f"{self.family} {self.m}x{self.n}x{self.k}"

    def inputs(self, device: torch.device, seed: int = 0) -> OperatorInputs:
        y = (self.m, self.n)
        a, b, do, c = _normal(device, seed, self.dtype, (self.m, self.k), (self.k, self.n), y, y)
        named = {"a": a, "b": b, "c": c} if self.added else {"a": a, "b": b}
        return OperatorInputs({name: x.requires_grad_() for name, x in named.items()}, do)

    def exact(self, inputs: OperatorInputs) -> dict[str, Tensor]:
        wide = wide_dtype(self.dtype)
        with torch.no_grad():
            a, b, do = (x.to(wide) for x in (inputs.named["a"], inputs.named["b"], inputs.do))
            found = {"o": a @ b, "da": do @ b.mT, "db": a.mT @ do}
            if self.added:
                found["o"] += inputs.named["c"]
                found["dc"] = do
        return found

    def work(self, which: str) -> Work:
        """Return the work of a pass.

        The forward reads a, b, c and writes y; the backward reads dY, a, b and writes da and db (dc is dY).
        """
        a, b, y = self.m * self.k, self.k * self.n, self.m * self.n
        passes, size = (1 if which == "forward" else 2), getattr(torch, self.dtype).itemsize
        moved = passes * (a + b) + y * (2 if self.added and which == "forward" else 1)
        return Work(2 * passes * self.m * self.n * self.k, moved * size, 0)


def _normal(device: torch.device, seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    return [torch.empty(shape, device=device, dtype=kind).normal_(generator=generator) for shape in shapes]


def cases(device: str, quick: bool) -> Iterator[SoftmaxCase | MatmulCase]:
    """Yield the cases of a device type; on a GPU softmax has tensors of 1 GiB."""
    if device == "cuda":
        for dtype in ("bfloat16", "float32"):
            for length in (1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17):
                if not quick or (dtype, length) == ("bfloat16", 1 << 14):
                    rows = (1 << 30) // (length * getattr(torch, dtype).itemsize)
                    yield SoftmaxCase(f"softmax {dtype}", rows, length, dtype)
        for m, n, k in ((4096, 4096, 4096), *([] if quick else [(8192, 8192, 8192), (8192, 8192, 512)])):
            yield MatmulCase("matmul", m, n, k)
            yield MatmulCase("matmul plus c", m, n, k, added=True)
    else:
        for length in (1 << 10,) if quick else (1 << 10, 1 << 14):
            yield SoftmaxCase("softmax float32", (1 << 22) // length, length, "float32")
        yield MatmulCase("matmul plus c", 512, 512, 512, added=True, dtype="float32")


def computers() -> Iterator[tuple[str, str, Callable[[Any, OperatorInputs], Callable[[], Tensor]]]]:
    """Yield (operator, name, factory of a case's forward) for each provider; autograd gives the backward."""
    yield "softmax", "tilewise-softmax", lambda case, x: lambda: tilewise.softmax(x.named["x"])
    yield "softmax", "torch-softmax", lambda case, x: lambda: torch.softmax(x.named["x"], -1)
    yield "softmax", "torch-softmax-compiled", _compiled_softmax
    yield "matmul", "tilewise-matmul", lambda case, x: lambda: tilewise.matmul(*x.leaves[:2], c=x.named.get("c"))
    yield "matmul", "torch-matmul", _torch_matmul


def _compiled_softmax(case: Any, x: OperatorInputs) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, -1), dynamic=False)
    return lambda: compiled(x.named["x"])


def _torch_matmul(case: Any, x: OperatorInputs) -> Callable[[], Tensor]:
    a, b = x.leaves[:2]
    return (lambda: torch.addmm(x.named["c"], a, b)) if case.added else (lambda: torch.mm(a, b))
