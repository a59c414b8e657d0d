"""explain(): which backend computes a product, in which tiles and why, and its work, without running it."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from torch import Tensor

from tilewise.backends import float32_precision
from tilewise.ops.matmul.config import c_first, c_spread, hopper_config, triton_config
from tilewise.ops.matmul.plan import Choice, choose
from tilewise.ops.matmul.problem import Product, check_arguments, describe, output_shape
from tilewise.quantities import count, number, quantity


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``str()`` of it is the same in words.

    Attributes:
        choice: the backend, and for each that comes before it why not.
        product: what is computed, after axes of the batch were merged.
        tiles: the backend's tiles, in words.
        flops: 2 for a multiply and an add.
        bytes: the least traffic with the device's memory: each operand read once and the result written once.
    """

    choice: Choice
    product: Product
    tiles: str
    flops: int
    bytes: int

    def __str__(self) -> str:
        p = self.product
        batch = math.prod(p.kept) * math.prod(p.summed)
        matrices = "" if batch == 1 else f"{batch} times "
        name = str(p.dtype).removeprefix("torch.")
        lines = [
            f"product    {matrices}{p.rows} x {p.inner} by {p.inner} x {p.cols}, {name}, C: {c_spread(p)}",
            f"backend    {self.choice.backend}: {self.tiles}",
            *(f"           not {name}: {reason}" for name, reason in self.choice.reasons.items()),
            f"work       {quantity(self.flops, 'FLOP')}, {quantity(self.bytes, 'B')}, "
            f"{number(self.flops / self.bytes)} FLOP/byte",
        ]
        return "\n".join(lines)


def explain(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    backend: str | None = None,
    device: str | None = None,
) -> Explanation:
    """What `tilewise.matmul` would do with these arguments. Nothing is computed.

    Args:
        a, b, c, alpha, beta, backend: as for `tilewise.matmul`; tensors on the meta device serve as well.
        device: plan for another device than the tensors': "cpu", or a CUDA compute capability such as "sm_90".

    Returns:
        Explanation; print it.

    Raises:
        ValueError, TypeError: as `tilewise.matmul`; for a device of another form; where there is nothing to compute;
            for a batch that would first be copied (see `tilewise.matmul`).
    """
    check_arguments(a, b, c, alpha, beta, backend)
    if alpha == 0.0 or 0 in (*a.shape, *b.shape):
        raise ValueError("a, b: there is no product to compute")
    c = None if beta == 0.0 else c
    product = describe(a, b, c, ())
    if product is None:
        raise ValueError("a, b: more than two batch axes remain, so that the operands would be copied first")
    if device is not None:
        product = _on(product, device)
    choice = choose(product, "auto" if backend is None else backend)
    operands = sum(x.numel() * x.element_size() for x in (a, b, c) if x is not None)
    moved = operands + math.prod(output_shape(a, b, ())) * a.element_size()
    return Explanation(choice, product, _tiles(product, choice.backend, alpha, beta), product.flops, moved)


def _on(product: Product, device: str) -> Product:
    if device == "cpu":
        return dataclasses.replace(product, device="cpu", capability=None)
    capability = re.fullmatch(r"sm_(\d+)(\d)", device)
    if capability is None:
        raise ValueError(f"device: must be 'cpu' or a compute capability such as 'sm_90', got {device!r}")
    return dataclasses.replace(product, device="cuda", capability=(int(capability[1]), int(capability[2])))


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
