"""A plan: attention of tensors of one layout, prepared once and run many times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends.protocol import INPUT_NAMES, Forward, Inputs
from tilewise.explanation.attention import explain
from tilewise.explanation.text import Explanation
from tilewise.frontend.arguments import Call, read_call, with_seed
from tilewise.operator.autograd import attention_op, eager_attention
from tilewise.operator.dispatch import forward_of
from tilewise.operator.eager import is_eager
from tilewise.operator.structure import Layout, layouts
from tilewise.spec.score import ScoreNumbers, Window
from tilewise.spec.tensors import PLAIN

NAMES = INPUT_NAMES[:6]


class AttentionPlan:
    """Attention of tensors of one layout, from `tilewise.plan`. It holds no tensor; threads may share it."""

    def __init__(self, call: Call, given: tuple[Tensor | None, ...], options: dict[str, Any], return_lse: bool):
        inputs = with_seed(call.inputs, call.score)
        self._settings = call[1:]  # score, deterministic, backend
        self._terms = ScoreNumbers.of(*call[1:])
        self._forward: Forward = forward_of(inputs, self._terms)
        self._layouts: tuple[Layout | None, ...] = layouts(*given)
        self._shapes = tuple([None if x is None else tuple(x.shape) for x in inputs[3:6]])
        self._grads = tuple([x is not None and x.requires_grad for x in given])
        self._options, self._return_lse = options, return_lse

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, mask: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Return o (B, H, M, Dv), or o and lse (B, H, M) if planned with ``return_lse``, as `tilewise.attention` does.

        Differentiable, also under `torch.compile`. With dropout each run draws its own seed. Autocast casts nothing
        here, and PyTorch's deterministic mode counts as it was when the call was planned.

        Args:
            q, k, v, bias, mask, sink: tensors with the shapes, strides, dtypes and device of those that were planned.

        Raises:
            ValueError: for a tensor of another layout, naming it, what came and what was planned.

        Examples:
            >>> q = torch.randn(2, 8, 128, 64)
            >>> planned = tilewise.plan(q, q, q, causal=True)
            >>> planned.run(q, q, q).shape
            torch.Size([2, 8, 128, 64])
        """
        given = (q, k, v, bias, mask, sink)
        if not all(x is None or isinstance(x, Tensor) for x in given) or layouts(*given) != self._layouts:
            raise self._mismatch(given)
        bias, mask, sink = [
            x if x is None or shape is None or x.dim() == len(shape) else x.view(shape)
            for x, shape in zip(given[3:], self._shapes, strict=True)
        ]
        inputs = with_seed(Inputs(q, k, v, bias, mask, sink), self._settings[0])
        if is_eager(inputs.tensors()):
            o, lse, _ = eager_attention(inputs, self._terms, self._forward, None, self._return_lse)
        else:
            o, lse, _ = attention_op(inputs, *self._settings, return_lse=self._return_lse)
        return (o, lse) if self._return_lse else o  # type: ignore[return-value]

    def explain(self) -> Explanation:
        """Return `tilewise.explain` of a run: backend, tiles, FLOPs, bytes. Masks count as if they hid nothing.

        Examples:
            >>> q = torch.randn(2, 8, 128, 64)
            >>> print(tilewise.plan(q, q, q).explain())
            attention on cpu, float32
            ...
        """
        device = "cpu"
        made: list[Tensor | None] = []
        for x, grad in zip(self._layouts, self._grads, strict=True):
            if x is None:
                made.append(None)
                continue
            shape, dtype, place, strides, _ = x
            made.append(torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=grad))
            if place.type == "cuda":
                major, minor = torch.cuda.get_device_capability(place)
                device = f"sm_{major}{minor}"
        q, k, v, bias, mask, sink = made
        assert q is not None
        assert k is not None
        assert v is not None
        return explain(q, k, v, bias=bias, mask=mask, sink=sink, device=device, **self._options)

    def __repr__(self) -> str:
        shapes = [f"{name} {tuple(x[0])}" for name, x in zip(NAMES, self._layouts, strict=True) if x is not None]
        return f"AttentionPlan({', '.join(shapes)})"

    def _mismatch(self, given: tuple[object, ...]) -> ValueError | TypeError:
        for name, x, planned in zip(NAMES, given, self._layouts, strict=True):
            if x is not None and not isinstance(x, Tensor):
                return TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
            (found,) = layouts(x)
            if found != planned:
                return ValueError(f"{name}: planned was {_words(planned)}, got {_words(found)}")
        raise AssertionError("all tensors are as planned")


def plan(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, mask: Tensor | None = None,
    sink: Tensor | None = None, causal: bool = False, window: Window | None = None, scale: float | None = None,
    softcap: float | None = None, dropout_p: float = 0.0, return_lse: bool = False, deterministic: bool | None = None,
    backend: str | None = None,
) -> AttentionPlan:  # fmt: skip
    """Return a plan of `tilewise.attention` for tensors of these layouts: what a server runs again.

    The arguments are read and checked once; nothing is computed. Calls of `tilewise.attention` find the same in a
    cache, so a plan is for those who want it explicit, and an error where a layout changes.

    Args:
        q, k, v: (B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv); only layouts are read.
        bias, mask, sink: tensors as for `tilewise.attention`; bias terms and tile masks cannot be planned.
        causal, window, scale, softcap, dropout_p, return_lse, deterministic, backend: as for `tilewise.attention`.

    Returns:
        AttentionPlan with ``run(q, k, v, bias=, mask=, sink=)`` and ``explain()``.

    Raises:
        ValueError, TypeError: as for `tilewise.attention`; ValueError under `torch.autocast` if it would cast q, k, v.

    Examples:
        >>> q, bias = torch.randn(2, 8, 128, 64), torch.randn(8, 128, 128, requires_grad=True)
        >>> planned = tilewise.plan(q, q, q, bias=bias)
        >>> planned.run(q, q, q, bias=bias).sum().backward()
        >>> planned
        AttentionPlan(q (2, 8, 128, 64), k (2, 8, 128, 64), v (2, 8, 128, 64), bias (8, 128, 128))
    """
    given = (q, k, v, bias, mask, sink)
    for name, x in zip(NAMES[3:5], given[3:5], strict=True):
        if type(x) not in PLAIN:
            raise TypeError(f"{name}: a plan takes a tensor, got {type(x).__name__}; call tilewise.attention with it")
    options = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
        "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    call = read_call(q, k, v, bias=bias, mask=mask, sink=sink, dropout_seed=None, **options)  # type: ignore[arg-type]
    if call.inputs.q.dtype != q.dtype:
        raise ValueError(
            f"q, k, v: autocast would cast {q.dtype} in each call; cast them, and plan outside of autocast"
        )
    options["deterministic"] = call.deterministic
    return AttentionPlan(call, given, options, return_lse)


def _words(x: Layout | None) -> str:
    if x is None:
        return "None"
    shape, dtype, device, strides, begin = x
    return f"{tuple(shape)} {dtype} on {device} with strides {tuple(strides)}" + (
        f", address % 16 = {begin}" * bool(begin)
    )
