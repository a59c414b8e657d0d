"""explain(): backend, tiles and work of a product, without running it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tilewise.backends import float32_precision
from tilewise.explanation.shared import Lines, dtype_name, on_device
from tilewise.ops.gemm.config import c_first, c_spread, hopper_config, triton_config
from tilewise.ops.gemm.plan import Choice, choose
from tilewise.ops.gemm.problem import Product, check_arguments, describe, output_shape
from tilewise.quantities import count, number, quantity


@dataclass(frozen=True, repr=False)
class MatmulExplanation(Lines):
    """Result of `explain`; ``str()`` and ``repr()`` return it as text.

    Attributes:
        choice: the backend, and the reason against each backend before it.
        product: the product after merging batch axes.
        tiles: the backend's tiles, as text.
        flops: 2 per multiply-add.
        bytes: least memory traffic: each operand read once and the result written once.
    """

    choice: Choice
    product: Product
    tiles: str
    flops: int
    bytes: int

    def lines(self) -> Iterator[str]:
        p = self.product
        batch = math.prod(p.kept) * math.prod(p.summed)
        matrices = "" if batch == 1 else f"{batch} times "
        sizes = f"{p.rows} x {p.inner} by {p.inner} x {p.cols}"
        yield f"product    {matrices}{sizes}, {dtype_name(p.dtype)}, C: {c_spread(p)}"
        yield f"backend    {self.choice.backend}: {self.tiles}"
        for name, reason in self.choice.reasons.items():
            yield f"           not {name}: {reason}"
        intensity = number(self.flops / self.bytes)
        yield f"work       {quantity(self.flops, 'FLOP')}, {quantity(self.bytes, 'B')}, {intensity} FLOP/byte"


def explain(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    backend: str | None = None,
    device: str | None = None,
) -> MatmulExplanation:
    """Return the backend, tiles and work of a call of `tilewise.matmul`. Nothing is computed.

    Args:
        a, b, c, alpha, beta, backend: as for `tilewise.matmul`; tensors may be on the meta device.
        device: plan for another device than the tensors': "cpu", a GPU such as "H100", or a compute
            capability such as "sm_90".

    Returns:
        MatmulExplanation; print it.

    Raises:
        ValueError, TypeError: as for `tilewise.matmul`; an invalid device; an empty product; a batch that would first
            be copied (see `tilewise.matmul`).
    """
    check_arguments(a, b, c, alpha, beta, backend)
    if alpha == 0.0 or 0 in (*a.shape, *b.shape):
        raise ValueError("a, b: there is no product to compute")
    c = None if beta == 0.0 else c
    product = describe(a, b, c, ())
    if product is None:
        raise ValueError("a, b: more than two batch axes remain, so that the operands would be copied first")
    if device is not None:
        product = on_device(product, device)
    choice = choose(product, "auto" if backend is None else backend)
    operands = sum(x.numel() * x.element_size() for x in (a, b, c) if x is not None)
    moved = operands + math.prod(output_shape(a, b, ())) * a.element_size()
    return MatmulExplanation(choice, product, _tiles(product, choice.backend, alpha, beta), product.flops, moved)


def _tiles(product: Product, backend: str, alpha: float, beta: float) -> str:
    if backend == "cpu":
        return "PyTorch's own addmm or baddbmm"
    if backend == "triton":
        t = triton_config(product, float32_precision(product.dtype))
        pipeline = f"{count(t.num_warps, 'warp')}, {count(t.num_stages, 'stage')}"
        return f"tiles of {t.block_m} x {t.block_n}, steps of {t.block_k}, {pipeline}"
    h = hopper_config(product)
    words = f"tiles of {2 * h.rows} x {h.block_n}, steps of {h.block_k}, {h.stages} stages, persistent programs"
    if c_spread(product) == "none":
        return words
    return f"{words}, C {'first' if c_first(product, alpha, beta) else 'last'}"
