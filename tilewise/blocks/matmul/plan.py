"""Which backend computes a product, and why the others do not."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from tilewise.blocks.matmul.problem import Product


@dataclass(frozen=True)
class Choice:
    """The backend of a product; ``reasons`` has one for each backend that was passed over."""

    backend: str
    reasons: dict[str, str]


def choose(product: Product, backend: str = "auto") -> Choice:
    """The first backend that takes the product, or the one asked for; ValueError where that one cannot."""
    reasons: dict[str, str] = {}
    for name, declines in (("hopper", declines_hopper), ("triton", declines_triton), ("cpu", declines_cpu)):
        if backend not in ("auto", name):
            continue
        reason = declines(product)
        if reason is None:
            return Choice(name, reasons)
        reasons[name] = reason
    words = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f'backend: "{backend}" cannot run this call ({words})')


def declines_cpu(product: Product) -> str | None:
    return None if product.device in ("cpu", "meta") else f"the tensors are on {product.device}"


def declines_triton(product: Product) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if product.device != "cuda" and not interpreted:
        return f"needs a CUDA device or TRITON_INTERPRET=1, the tensors are on {product.device}"
    if product.capability is not None and product.capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, product.capability))}"
    if product.dtype == torch.float64:
        return "has no float64"
    if interpreted and product.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly"
    return None


def declines_hopper(product: Product) -> str | None:
    return "has no kernel yet"
