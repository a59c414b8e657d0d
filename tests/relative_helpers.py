"""Bias terms beside a `helpers.Case`, made from a few words, and held to the error rule of helpers.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from forced import forced_splits
from helpers import (
    FEW,
    SLACK,
    Case,
    Tensors,
    _largest,
    _noise_of_cancelling,
    _of_heads,
    poisoned_memory,
    tensors,
    unfused,
    visible,
)
from torch import Tensor

from tilewise import attention
from tilewise.bias import RelativeBias, alibi, t5_bias
from tilewise.bias.canonical import dense


@dataclass(frozen=True)
class Term:
    """kind: "query", "key" or "all", whose rows of values count; "t5", "alibi"; "cols", "rows", a tensor.

    axes: of the values, "bh" to "11", with "k" for Hkv heads. R: entries; ``lo`` of the first. buckets: so many
    distances share the entries. starts: position tensors, "one" for all or one for each element of the "batch".
    layout: how the values lie in memory, see `laid_out`; unless contiguous, the buckets lie apart. hides: a tenth of
    the values is -inf. planted: a value in entries that no pair has.
    """

    kind: str = "query"
    axes: str = "bh"
    R: int = 40
    lo: int = -30
    reverse: bool = False
    outside: float | str = 0.0
    buckets: int | None = None
    starts: str | None = None
    start: int = 0  # added to the usual start of the queries
    dtype: torch.dtype | None = None
    layout: str = "contiguous"
    hides: bool = False
    planted: float | None = None

    def __str__(self) -> str:
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        words = [f"{name} {str(x).removeprefix('torch.')}" for name, x, usual in fields if x != usual]
        return ", ".join(words) or "usual"

    def leaf(self, c: Case, device: str, generator: torch.Generator | None) -> Tensor:
        """What the term is made of."""
        B, H = ({"b": c.B, "h": c.H, "k": c.kv_heads, "1": 1}[axis] for axis in self.axes)
        shapes = {
            "query": (B, H, c.M, self.R), "key": (B, H, c.N, self.R), "all": (B, H, 1, self.R),
            "t5": (self.R, H), "alibi": (H,), "cols": (B, H, 1, c.N), "rows": (B, H, c.M, 1),
        }  # fmt: skip
        dtype = self.dtype or c.dtype
        if generator is None:
            return torch.empty(shapes[self.kind], dtype=dtype, device=device)
        x = torch.randn(shapes[self.kind], generator=generator, device=device).to(dtype)
        if self.kind == "alibi":  # small enough for the LSE, of which float32 has seven digits
            x *= 0.05
        if self.hides:
            x.masked_fill_(torch.rand(x.shape, generator=generator, device=device) < 0.1, -math.inf)
        return x

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values in memory as ``layout`` says, NaN between them."""
        if self.layout == "contiguous":
            return x
        if self.layout == "heads_last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "expanded":
            return x.narrow(2, 0, 1).contiguous().expand_as(x)
        pad, first = (16 - x.shape[3] % 8, 0) if self.layout == "padded" else (3, 1)
        buffer = x.new_full((*x.shape[:3], x.shape[3] + pad), math.nan)
        view = buffer[..., first : first + x.shape[3]]
        return view.copy_(x)

    def of(self, leaf: Tensor, c: Case) -> RelativeBias | Tensor:
        if self.kind in ("cols", "rows"):
            return leaf
        start: int | Tensor | None = None if self.start == 0 and self.starts is None else c.N - c.M + self.start
        if self.starts is not None:
            start = torch.tensor(start, device=leaf.device)
            if self.starts == "batch":
                start = start + 5 * torch.arange(c.B, device=leaf.device)
        if self.kind == "t5":
            return t5_bias(leaf, not c.causal, 40, query_start=start)
        if self.kind == "alibi":
            return alibi(leaf, query_start=start)
        buckets = None
        if self.buckets is not None:
            buckets = torch.arange(self.buckets, device=leaf.device) * 7 % self.R
            if self.layout != "contiguous":
                buckets = buckets.repeat_interleave(2)[::2]
        return RelativeBias(
            leaf, lo=self.lo, reverse=self.reverse, outside=self.outside, query_start=start, buckets=buckets,
            on="key" if self.kind == "key" else "query",
        )  # fmt: skip


def made(c: Case, terms: tuple[Term, ...], device: str, draw: int = 0) -> list[Tensor]:
    """The leaves of the terms, the same for equal cases and draws."""
    generator = torch.Generator(device).manual_seed(len(terms) + c.M + 1000 * c.N + 10**6 * draw)
    leaves = [term.leaf(c, device, generator) for term in terms]
    return [x[:, :, :1].expand_as(x) if t.layout == "expanded" else x for t, x in zip(terms, leaves, strict=True)]


def _planted(c: Case, term: Term, leaf: Tensor) -> Tensor:
    """With ``planted`` in all entries that no pair reads."""
    if term.planted is None:
        return leaf
    probe = torch.zeros_like(leaf, dtype=torch.float64).requires_grad_()
    (used,) = torch.autograd.grad(dense(term.of(probe, c), c.B, c.H, c.M, c.N, c.kv_heads).sum(), probe)
    assert (used == 0).any(), "planted: every entry has a pair"
    return leaf.masked_fill(used == 0, term.planted)


def check(c: Case, terms: tuple[Term, ...], backend: str, device: str = "cpu", wanted: str = "all") -> dict[str, float]:
    """Hold a backend to the error rule for o, lse and every gradient; returns error / allowed error of each.

    wanted: "all" inputs ask for a gradient, the "terms" alone, or nothing ("").
    """
    clean, leaves = tensors(c, device, planted=False), made(c, terms, device)
    x = tensors(c, device)
    names = ["o", "lse", "dq", "dk", "dv", "dbias", "dsink", *(f"d{n} {t.kind}" for n, t in enumerate(terms))]
    given = [term.laid_out(_planted(c, term, leaf)) for term, leaf in zip(terms, leaves, strict=True)]

    def ours(x: Tensors, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        parts = tuple(term.of(leaf, c) for term, leaf in zip(terms, leaves, strict=True))
        bias = parts if x.bias is None else (x.bias, *parts)
        return attention(x.q, x.k, x.v, bias=bias, mask=x.mask, sink=x.sink, **c.terms, return_lse=True,
                         deterministic=c.deterministic, backend=backend)  # fmt: skip

    def whole(x: Tensors, leaves: list[Tensor]) -> Tensor:
        total = 0.0 if x.bias is None else _of_heads(x.bias, c.H).double()
        for term, leaf in zip(terms, leaves, strict=True):
            total = total + dense(term.of(leaf, c), c.B, c.H, c.M, c.N, c.kv_heads)
        return total

    def reference(x: Tensors, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        return attention(x.q, x.k, x.v, bias=whole(x, leaves), mask=x.mask, sink=x.sink, **c.terms, return_lse=True,
                         backend="reference")  # fmt: skip

    def plain(x: Tensors, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        return unfused(c, x._replace(bias=whole(x, leaves).float()))

    with poisoned_memory(device):
        found = _differentiate(c, x, given, ours, wanted)
    exact, theirs = _both(c, clean, leaves, reference, plain, wanted)
    seen = visible(c, clean._replace(bias=whole(clean, leaves).expand(c.B, c.H, c.M, c.N)))
    _hold_shapes(found, [None, None, x.q, x.k, x.v, x.bias, x.sink, *given])

    @functools.cache
    def noise() -> dict[int, float]:
        return _noise_of_delta(c, clean, leaves, terms, exact, seen, whole) if wanted else {}

    @functools.cache
    def more_draws() -> list[float]:
        """Plain torch's largest errors in seven more draws: the largest of few says little about their size."""
        results = [y for y in exact if y is not None]
        few = any(y.numel() < FEW or 0 < y.count_nonzero() < FEW for y in results)
        drawn = [(tensors(c, device, planted=False, draw=n), made(c, terms, device, n)) for n in range(1, 8) if few]
        errors = [_both(c, *again, reference, plain, wanted)[1] for again in drawn]
        return [max(each) for each in zip(theirs, *errors, strict=True)]

    ratios = {}
    infinite = exact[1] == -math.inf
    assert torch.equal(found[1] == -math.inf, infinite), "lse: -inf is the mark of rows that see nothing"
    for n, (name, ours_, truth, yardstick) in enumerate(zip(names, found, exact, theirs, strict=True)):
        if truth is None:
            assert ours_ is None, f"{name}: a gradient that nobody asked for"
            continue
        if name == "lse":
            ours_, truth = (y.masked_fill(infinite, 0.0) for y in (ours_, truth))
        error, largest = _largest(ours_.double() - truth), _largest(truth)
        allowed = 2 * yardstick + SLACK * largest
        if error > allowed:  # what few results need, and takes longer than all before
            allowed = 2 * more_draws()[n] + SLACK * largest + noise().get(n, 0.0)
        assert math.isfinite(error), f"{c}: {name} is not finite"
        assert error <= allowed, (
            f"{c}; {'; '.join(map(str, terms))}: {name} is off by {error:.3e}, allowed {allowed:.3e} "
            f"(noise {noise().get(n, 0.0):.1e}, largest element {largest:.3e})"
        )
        ratios[name] = error / allowed if error else 0.0
    return ratios


def check_split(c: Case, terms: tuple[Term, ...], splits: int, device: str = "cpu") -> dict[str, float]:
    """`check` of the triton backend's forward in so many splits."""
    with forced_splits(splits):
        return check(c, terms, "triton", device, "")


def _both(c, x, leaves, reference, plain, wanted) -> tuple[list[Tensor | None], list[float]]:
    """What is exact, and the largest error of each result of plain torch in the case's dtype."""
    doubles = Tensors(*(y.double() if y is not None and y.is_floating_point() else y for y in x))
    exact = _differentiate(c, doubles, [y.double() for y in leaves], reference, wanted)
    theirs = _differentiate(c, x, leaves, plain, wanted)
    errors = []
    for a, b in zip(theirs, exact, strict=True):
        infinite = None if b is None else b == -math.inf
        errors.append(
            0.0 if b is None else _largest(a.double().masked_fill(infinite, 0.0) - b.masked_fill(infinite, 0.0))
        )
    return exact, errors


Function = Callable[[Tensors, list[Tensor]], tuple[Tensor, Tensor]]


def _differentiate(c: Case, x: Tensors, leaves: list[Tensor], function: Function, wanted: str) -> list[Tensor | None]:
    """o, lse, and the gradients of q, k, v, bias, sink and the leaves."""
    fixed = [x.q, x.k, x.v, x.bias, x.sink]
    fixed = [None if y is None else y.detach().requires_grad_(wanted == "all") for y in fixed]
    leaves = [y.detach().requires_grad_(wanted != "") for y in leaves]
    q, k, v, bias, sink = fixed
    o, lse = function(x._replace(q=q, k=k, v=v, bias=bias, sink=sink), leaves)
    every = [*fixed, *leaves]
    asked = [y for y in every if y is not None and y.requires_grad]
    if not asked:
        return [o, lse, *([None] * len(every))]
    pairs = [(o, x.do), (lse, x.dlse)][: 2 if c.lse else 1]
    outputs, cotangents = zip(*((y, d.to(y.dtype)) for y, d in pairs if y.requires_grad), strict=True)
    grads = iter(torch.autograd.grad(outputs, asked, cotangents))
    return [o.detach(), lse.detach(), *(next(grads) if y is not None and y.requires_grad else None for y in every)]


def _hold_shapes(found: list[Tensor | None], like: list[Tensor | None]) -> None:
    for x, y in zip(found[2:], like[2:], strict=True):
        assert x is None or y is None or (x.shape, x.dtype) == (y.shape, y.dtype)


def _noise_of_delta(c, clean, leaves, terms, exact, seen, whole) -> dict[int, float]:
    """What the rounding of O does to gradients that many pairs of a row share, by the place of the result: four
    standard deviations of what a random rounding, the same for all pairs of a row, leaves of P∘noise in them."""
    x = Tensors(*(y.double() if y is not None and y.is_floating_point() else y for y in clean))
    sigma = 0.5 * torch.finfo(c.dtype).eps * (x.do * exact[0]).square().sum(-1).sqrt()
    leaves = [y.double().detach().requires_grad_() for y in leaves]
    places = [7 + n for n in range(len(leaves))]
    if x.bias is not None:
        x = x._replace(bias=x.bias.detach().requires_grad_())
        leaves, places = [*leaves, x.bias], [*places, 5]
    total = whole(x, leaves[: len(terms)]).expand(c.B, c.H, c.M, c.N)
    scale = 1 / math.sqrt(c.D) if c.scale is None else c.scale
    s = (x.q @ _of_heads(x.k, c.H).mT) * scale
    if c.softcap is not None:
        s = torch.tanh(s / c.softcap) * c.softcap
    s = (s + total.detach()).masked_fill(~seen, -math.inf)
    lse = exact[1].masked_fill(exact[1] == -math.inf, math.inf)
    p = torch.exp(s - lse[..., None])
    found = dict.fromkeys(places, 0.0)
    for _ in range(8):
        noise = p * (sigma * torch.randn(sigma.shape, device=sigma.device, dtype=sigma.dtype))[..., None]
        grads = torch.autograd.grad(total, leaves, noise, retain_graph=True)
        found = {place: max(found[place], 4 * _largest(g)) for place, g in zip(places, grads, strict=True)}
    if not c.lse and c.sink is None and seen.sum(-1).max() <= 1:  # what is left of dP - D where the two are equal
        alone = torch.finfo(torch.float32).eps * (x.do * exact[0]).abs().sum(-1, keepdim=True) * seen
        for place, g in zip(places, torch.autograd.grad(total, leaves, alone), strict=True):
            found[place] += _largest(g)
        for place, name in ((2, "dq"), (3, "dk")):
            found[place] = _noise_of_cancelling(c, name, exact[0], x, seen)
    return found
