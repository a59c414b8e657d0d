"""Tracer of FlexAttention's score_mod: `traced` calls it once, with a symbol in place of the score.

Operations on the score must be those that `tilewise.attention` computes, in its order: a factor, the softcap, what is
added, and what is hidden. Any other raises an error at its line in the score_mod.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.integrations.score_mod.symbols import (
    NUMBERS,
    Affine,
    Index,
    Indexing,
    Symbol,
    dtype_of,
    record,
    unsupported,
    words,
)

Addend = tuple[float, Any]  # a number, and the Index, captured number or number that it multiplies
_ORDER = "tilewise computes softcap(scale * score) + bias, then hides"


class TracedScore(Symbol):
    """A score so far: ``factor * score``, or ``cap * tanh(factor * score)``, plus the sum of ``addends``.

    factor: numerator and denominator.
    visible: bool conditions; the score is -inf unless all are True.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, factor: tuple[float, float] = (1.0, 1.0),
        cap: float | None = None, addends: tuple[Addend, ...] = (), visible: tuple[Index, ...] = (),
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.factor, self.cap = device, dtype, factor, cap
        self.addends, self.visible = addends, visible

    def in_words(self) -> str:
        return "the changed score" if self.addends or self.visible or self.cap is not None else "the score"

    def with_visible(self, condition: Any) -> TracedScore:
        if not isinstance(condition, Index):
            raise unsupported(f"torch.where of {words(condition)}", "a condition reads b, h, q_idx or kv_idx")
        return TracedScore(self.device, self.dtype, self.factor, self.cap, self.addends, (*self.visible, condition))

    def operation(self, name: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in ("full_like", "zeros_like", "ones_like"):
            return args[1] if name == "full_like" else float(name == "ones_like")
        rule = _RULES.get(name)
        if rule is None or (kwargs and name != "to"):
            raise unsupported(
                f"{name} of {', '.join(words(x) for x in args)}",
                "a score may be multiplied by a positive number, soft-capped by tanh, added to, and hidden by "
                "torch.where(visible, score, -float('inf'))",
            )
        return rule(function, args, kwargs)

    # --- rules ---

    def plus(self, x: Any, sign: float) -> TracedScore:
        if isinstance(x, TracedScore):
            raise unsupported("adds two scores", "multiply the score by a number")
        score = self
        if isinstance(x, Index) and x.name == "where" and sign > 0 and any(is_minus_inf(y) for y in x.args[1:]):
            condition, x = visible_part(x.args)
            score = self.with_visible(condition)
        return TracedScore(
            score.device, score.dtype, score.factor, score.cap, (*score.addends, (sign, x)), score.visible
        )

    def times(self, x: Any, divide: bool) -> TracedScore:
        if not isinstance(x, NUMBERS) or isinstance(x, bool):
            what = "divided" if divide else "multiplied"
            raise unsupported(
                f"the score is {what} by {words(x)}",
                "pass a Python number, or multiply the queries by a factor of heads or queries",
            )
        if not (x > 0 and math.isfinite(x)):
            raise unsupported(f"the score is multiplied or divided by {x}", "a factor must be positive and finite")
        factor, cap = self.factor, self.cap
        if cap is not None:
            cap = cap / x if divide else cap * x
        else:
            factor = (factor[0], factor[1] * x) if divide else (factor[0] * x, factor[1])
        addends = tuple((c / x if divide else c * x, y) for c, y in self.addends)
        return TracedScore(self.device, self.dtype, factor, cap, addends, self.visible)

    def tanh(self) -> TracedScore:
        if self.cap is not None:
            raise unsupported("tanh of a tanh", _ORDER)
        if self.addends or self.visible:
            raise unsupported("tanh of a score with a bias or a mask", _ORDER)
        return TracedScore(self.device, self.dtype, self.factor, 1.0)


def _add(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    score, x = (args[0], args[1]) if isinstance(args[0], TracedScore) else (args[1], args[0])
    return score.plus(x, 1.0)


def _sub(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    if not isinstance(args[0], TracedScore):
        raise unsupported("the score is subtracted", "its factor must be positive")
    return args[0].plus(args[1], -1.0)


def _mul(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    score, x = (args[0], args[1]) if isinstance(args[0], TracedScore) else (args[1], args[0])
    return score.times(x, divide=False)


def _div(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    if not isinstance(args[0], TracedScore):
        raise unsupported("divides by the score", "a score may be multiplied by a positive number")
    return args[0].times(args[1], divide=True)


def _tanh(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    score: TracedScore = args[0]
    return score.tanh()


def _to(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    score: TracedScore = args[0]
    dtype = dtype_of(function, args, kwargs)
    others = [x for x in (*args[1:], *kwargs.values()) if x is not dtype and x != score.device]
    if others or dtype not in (None, score.dtype, torch.float32, torch.float64):
        raise unsupported(f"conversion of the score to {words((*others, dtype)[0])}", "scores are float32 or float64")
    return score


def _where(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    condition, first, second = args
    if isinstance(condition, TracedScore):
        raise unsupported("a condition on the score", "conditions are of b, h, q_idx, kv_idx and captured tensors")
    if isinstance(first, TracedScore) and isinstance(second, TracedScore):
        return _either(condition, first, second)
    condition, score = visible_part(args)
    return score.with_visible(condition)


def _masked_fill(function: Any, args: tuple, kwargs: dict[str, Any]) -> TracedScore:
    score, condition, value = args
    return _where(function, (condition, value, score), kwargs)


def _either(condition: Any, first: TracedScore, second: TracedScore) -> TracedScore:
    """Return where of two scores that differ in what is added to them."""
    same = len(first.visible) == len(second.visible)
    same = same and all(x is y for x, y in zip(first.visible, second.visible, strict=True))
    if not same or (first.factor, first.cap) != (second.factor, second.cap):
        raise unsupported("torch.where of two scores with different factors, caps or masks", _ORDER)
    shared = 0
    while shared < min(len(first.addends), len(second.addends)) and first.addends[shared] is second.addends[shared]:
        shared += 1
    more = [_sum(x.addends[shared:]) for x in (first, second)]
    addend = record(torch.where, (condition, *more), {})
    return TracedScore(
        first.device, first.dtype, first.factor, first.cap, (*first.addends[:shared], (1.0, addend)), first.visible
    )


def _sum(addends: tuple[Addend, ...]) -> Any:
    total: Any = None
    for coefficient, x in addends:
        part = x if coefficient == 1 else coefficient * x
        total = part if total is None else total + part
    return 0.0 if total is None else total


_RULES: dict[str, Callable[..., TracedScore]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "tanh": _tanh, "to": _to, "where": _where,
    "masked_fill": _masked_fill, "positive": lambda function, args, kwargs: args[0],
}  # fmt: skip


def visible_part(args: tuple) -> tuple[Any, Any]:
    """Return the condition under which ``torch.where(*args)`` is not -inf, and its value there."""
    condition, first, second = args
    if is_minus_inf(second):
        return condition, first
    if is_minus_inf(first):
        return record(operator.invert, (condition,), {}), second
    other = second if isinstance(first, TracedScore) else first
    raise unsupported(
        f"torch.where replaces the score by {words(other)}",
        "what is hidden is -float('inf'); one more logit per row is sink= of tilewise.attention",
    )


def is_minus_inf(x: Any) -> bool:
    if isinstance(x, Index):
        return x.name == "full_like" and is_minus_inf(x.args[1])
    if isinstance(x, Tensor):  # a number that can be read without synchronization
        return x.dim() == 0 and x.is_cpu and not torch.compiler.is_compiling() and x.item() == -math.inf
    return isinstance(x, float) and x == -math.inf


def traced(score_mod: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> TracedScore:
    """Return what ``score_mod`` does to a score of this dtype.

    Raises:
        NotImplementedError: naming the operation that no argument of `tilewise.attention` computes.
    """
    names = ("b", "h", "q", "kv")
    forms = (Affine(1, 0, 0, 0, 0), Affine(0, 1, 0, 0, 0), Affine(0, 0, 1, 0, 0), Affine(0, 0, 0, 1, 0))
    indices = [Index(x, None, (), {}, device, form) for x, form in zip(names, forms, strict=True)]
    with Indexing():
        found = score_mod(TracedScore(device, dtype), *indices)
    if not isinstance(found, TracedScore):
        raise unsupported(
            f"returns {words(found)} in place of a score",
            "return the score, changed",
        )
    return found
