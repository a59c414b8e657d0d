"""Functions of the Hopper kernels as Python functions: what stands in for Gluon, for constants and for a call."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tilewise.spec import tiles
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score


def where(condition: Any, x: Any, y: Any) -> Any:
    """Of numbers, or of tensors."""
    return torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else x if condition else y


def gluon(**more: Any) -> SimpleNamespace:
    """Members of `gluon.language` on numbers and tensors; more: others, or in their place."""
    usual = dict(
        minimum=min, maximum=max, where=where, cdiv=lambda x, y: -(-x // y), exp2=torch.exp2,
        arange=lambda begin, end, *_: torch.arange(begin, end), zeros=lambda shape, *_: torch.zeros(shape),
        sum=lambda x, axis=None: x.sum(axis), static_range=range, program_id=lambda _: 0,
        static_assert=lambda *_: None,
        **dict.fromkeys(("constexpr", "cast", "to_tensor", "convert_layout"), lambda x, *_, **__: x),
        **dict.fromkeys(("BlockedLayout", "SliceLayout"), lambda *_: None),
        **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "bfloat16")},
    )  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


def replace(monkeypatch: Any, *modules: ModuleType, **stubs: Any) -> None:
    """Put what the keywords name into the modules."""
    for module in modules:
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)


def as_python(monkeypatch: Any, module: ModuleType, names: str, *users: ModuleType) -> None:
    """Put the Python functions of kernels' functions, and the values of constants, in their place, or into users."""
    for name in names.split():
        found = getattr(module, name)
        found = getattr(found, "fn", getattr(found, "value", found))
        replace(monkeypatch, *(users or [module]), **{name: found})


def numbers(terms: Any) -> SimpleNamespace:
    """A record with plain numbers in place of constants of the compiler."""
    return SimpleNamespace(**{name: getattr(x, "value", x) for name, x in terms._asdict().items()})


def band_terms(band: Band) -> SimpleNamespace:
    lo, hi = tiles.limits(band)
    return SimpleNamespace(lo=lo, hi=hi, HAS_LO=band.lo is not None, HAS_HI=band.hi is not None)


def problem(B: int, H: int, Hkv: int, M: int, N: int, D: int = 64, band: Band | None = None, **more: Any) -> Problem:
    """A call in bfloat16 on an H100; bias, mask: a `TensorSpec`, or its axes, letters or sizes."""
    sizes = {"b": B, "h": H, "k": Hkv, "m": M, "n": N}
    for name, dtype in (("bias", torch.bfloat16), ("mask", torch.bool)):
        if isinstance(axes := more.get(name), str):
            more[name] = TensorSpec(dtype, *(sizes.get(axis) or int(axis) for axis in axes))
    usual = {"dtype": torch.bfloat16, "head_dim": D, "value_dim": D, "score": Score(0.1, None, band or Band())}
    return Problem(
        device="cuda", capability=(9, 0), batch=B, heads=H, kv_heads=Hkv, queries=M, keys=N, **{**usual, **more}
    )
