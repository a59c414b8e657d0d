"""Choice of the backend of a product, and the reasons against the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tilewise.backends import declines_gpu, has_triton
from tilewise.backends.gluon.sm90 import declines_device
from tilewise.ops.gemm.config import declines_tma
from tilewise.ops.gemm.problem import Product


@dataclass(frozen=True)
class Choice:
    """Backend of a product; ``reasons`` has one for each backend that was rejected."""

    backend: str
    reasons: dict[str, str]


def choose(product: Product, backend: str = "auto") -> Choice:
    """Return the first backend that supports the product, or the given one; ValueError if none can run it. backend:
    "auto", a name, or "NAME or auto", for gradients: NAME if it can, else the first that can."""
    name, *otherwise = backend.split()
    if otherwise and _DECLINES[name](product) is None:
        return Choice(name, {})
    reasons: dict[str, str] = {}
    for candidate, declines in _DECLINES.items():
        if not otherwise and name not in ("auto", candidate):
            continue
        reason = declines(product)
        if reason is None:
            return Choice(candidate, reasons)
        reasons[candidate] = reason
    if name != "auto" and not otherwise:
        raise ValueError(f"backend: {name!r} cannot run this call: {reasons[name]}")
    raise ValueError("no backend can run this call: " + "; ".join(f"{b}: {why}" for b, why in reasons.items()))


def declines_cpu(product: Product) -> str | None:
    return None if product.device in ("cpu", "meta") else f"the tensors are on {product.device}"


def declines_triton(product: Product) -> str | None:
    if not has_triton():
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if product.device != "cuda" and not interpreted:
        return f"needs a CUDA device or TRITON_INTERPRET=1, the tensors are on {product.device}"
    reason = declines_gpu(product.capability)
    if reason is not None:
        return reason
    if product.dtype == torch.float64:
        return "has no float64"
    if interpreted and product.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly"
    return None


def declines_hopper(product: Product) -> str | None:
    reason = declines_device(product.device, product.capability, product.dtype)
    if reason is not None:
        return reason
    if product.c_dtype == torch.float64:
        return "reads c in float16, bfloat16 or float32, not float64"
    if max(product.rows, product.cols, product.inner) >= 2**30:
        return "counts rows and columns in 32 bits"
    if product.cols % 8:
        return f"writes y by TMA, in rows of a multiple of 16 bytes: not {product.cols} elements"
    return declines_tma(product)


_DECLINES = {"hopper": declines_hopper, "triton": declines_triton, "cpu": declines_cpu}
