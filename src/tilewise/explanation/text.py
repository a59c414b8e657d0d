"""The explanation of a call of attention, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tilewise.explanation.shared import Lines, dtype_name
from tilewise.explanation.work import BACKWARD_PASSES, FORWARD_PASSES, TILE, Limits, MaskShare, TileShare, Work, _matrix
from tilewise.planner import TANGENTS, Plan
from tilewise.quantities import count, duration, number, percent, quantity
from tilewise.spec.dropout import NUMBERS, weight
from tilewise.spec.operands import PART_WORDS
from tilewise.spec.problem import Problem
from tilewise.spec.rounding import LOW_BYTES, keeps_low_bits
from tilewise.topk.gather import Gather


@dataclass(frozen=True, repr=False)
class Explanation(Lines):
    """Result of `explain`; ``str()`` and ``repr()`` return it as text.

    Attributes:
        plan: the backend, the problem, and the reason against each other backend.
        tiles: the backend's tiles, as text.
        forward: work of the forward.
        backward: work of the backward, with gradients of q, k and v, and of bias, its terms and sink if they require
            grad.
        limits: limits of the device, or None if unknown.
        mask: share of the scores that the mask leaves; None without a mask, or if it has no elements (on the meta
            device).
        tile_mask: numbers of tiles of a TileMask; None without one, or if it has no elements.
        gather: how the selected keys of a dynamic mask are gathered, or why they are not.
        called: the problem of the call if keys are gathered; ``plan`` then has the problem with gathered keys.
        calls: number of calls like this one that compute attention with more leading dimensions.
    """

    plan: Plan
    tiles: str
    forward: Work
    backward: Work
    limits: Limits | None
    mask: MaskShare | None = None
    tile_mask: TileShare | None = None
    gather: Gather | str | None = None
    called: Problem | None = None
    calls: int = 1

    @property
    def problem(self) -> Problem:
        return self.plan.problem if self.called is None else self.called

    @property
    def bound(self) -> Literal["compute", "memory"] | None:
        """Resource that limits the forward; None if the device's limits are unknown."""
        return None if self.limits is None else self.limits.bound(self.forward)

    @property
    def tangent_flops(self) -> int:
        """FLOPs of the tangents of o and the LSE, beside those of the forward: for each visible pair S and its tangent
        over 3 D dimensions, o and its tangent over 3 Dv."""
        return 3 * self.forward.flops

    @property
    def second_flops(self) -> int:
        """FLOPs of the derivative of the backward: those of the tangents, then S, its tangent, dQ and dK over 7 D
        dimensions, dP, its tangent and dV over 3 Dv."""
        D, Dv = self.problem.head_dim, self.problem.value_dim
        return self.forward.flops * (10 * D + 6 * Dv) // max(D + Dv, 1)

    def lines(self) -> Iterator[str]:
        return _lines(self)


def _lines(e: Explanation) -> Iterator[str]:
    p = e.problem
    where = p.device if p.capability is None else f"{p.device} (compute capability {p.capability[0]}.{p.capability[1]})"
    yield f"attention on {where}, {dtype_name(p.dtype)}"
    if e.calls != 1:
        yield f"  one of {count(e.calls, 'call')}, for the leading dimensions do not merge into one"
    if p.totals is not None:
        queries, keys = p.totals
        yield f"  {count(p.batch, 'sequence')} of at most {p.queries} queries and {count(p.keys, 'key')}"
        yield f"  q ({queries}, {p.heads}, {p.head_dim})"
        yield f"  k ({keys}, {p.kv_heads}, {p.head_dim})"
        yield f"  v ({keys}, {p.kv_heads}, {p.value_dim})"
    else:
        yield f"  q ({p.batch}, {p.heads}, {p.queries}, {p.head_dim})"
        yield f"  k ({p.batch}, {p.kv_heads}, {p.keys}, {p.head_dim})"
        yield f"  v ({p.batch}, {p.kv_heads}, {p.keys}, {p.value_dim})"
    for name, x in (("bias", p.bias), ("mask", p.mask if p.tile_mask is None else None)):
        if x is not None:
            grad = ", with its gradient" if name == "bias" and p.bias_grad else ""
            repeats = ", repeated along the batch" if name == "mask" and p.mask_repeats else ""
            if name == "bias" and p.bias_in_runs:
                repeats = f", each for {p.batch // x.batch} batch elements"
            yield f"  {name} {x.shape} {dtype_name(x.dtype)}{grad}{repeats}"
    if p.parts is not None:
        for name, x in p.parts.named():
            grad = ", with its gradient" if name in p.parts.grads else ""
            yield f"  {PART_WORDS[name]} {x.shape} {dtype_name(x.dtype)}{_by_distance(p, name)}{grad}"
    if p.sink is not None:
        grad = ", with its gradient" if p.sink_grad else ""
        yield f"  sink {p.sink.shape[:3]} {dtype_name(p.sink.dtype)}{grad}: one more logit in each row's softmax"
    if p.score.dropout:
        share, others = percent(p.score.dropout / NUMBERS), number(weight(p.score.dropout))
        kept = ""
        if keeps_low_bits(p.dtype, p.score.dropout):
            kept = f"; the low bits of o are stored, in {LOW_BYTES} bytes an element"
        yield f"  dropout: {share} of the probabilities are 0, the others {others} times as large{kept}"
    if not p.score.band.unlimited and p.totals is None:
        total = p.batch * p.heads * p.queries * p.keys
        yield f"  causal or window: {percent(p.pairs / max(total, 1))} of the scores are visible"
    if p.tile_mask is not None and p.mask is not None:
        size, at = p.tile_mask, e.tile_mask
        found = ""
        if at is not None:
            alone = "" if p.score.band.unlimited else " without causal or window"
            found = f": {at.visible} of {count(at.tiles, 'tile')} visible{alone}, {at.partial} of them in part"
        yield f"  TileMask {p.mask.shape} in tiles of {size.block_m} x {size.block_n}{found}"
    if isinstance(e.gather, Gather):
        chunks, rows, cols, _ = e.gather
        of = f"each of {chunks} chunks of {rows} queries" if chunks > 1 else "all queries"
        yield f"  selected keys are gathered: for {of} {'at most ' * (chunks > 1)}{cols} of {p.keys}"
    elif e.gather is not None:
        yield f"  selected keys are not gathered: {e.gather}"
    if e.mask is not None:
        of, tiles = ("the scores", "tiles") if p.score.band.unlimited else ("these", "their tiles")
        pairs, where = percent(e.mask.pairs), f"{percent(e.mask.tiles)} of {tiles} of {TILE} x {TILE}"
        yield f"  mask: leaves {pairs} of {of}, in {where}"
    yield f"backend {e.plan.backend}: {e.tiles}"
    if e.plan.backward != e.plan.backend:
        yield f"  gradients by {e.plan.backward}: {e.plan.backend} {e.plan.backward_declined}"
    for name, reason in e.plan.declined:
        yield f"  not {name}: {reason}"
    if e.forward.flops == 0:
        yield f"no query sees a key: o is 0 and lse {'-inf' if p.sink is None else 'the sink'}"
        return
    for name, work, passes in _passes(e):
        yield f"{name}: {quantity(work.flops, 'FLOP')}, at least {quantity(work.bytes, 'B')} of memory traffic"
        yield f"  {number(work.intensity)} FLOP/byte{_bound(e.limits, work)}"
        *first, last = passes
        stored = f"{', '.join(first)} and {last}"
        yield f"  storing {stored} would add {quantity(work.unfused_bytes, 'B')} of traffic"
    unfused, unsupported = "tiles in PyTorch's operators", e.plan.tangents_declined
    way = f"in {TANGENTS[e.plan.backend]}'s kernel" if unsupported is None else f"{unfused}: {unsupported}"
    yield f"tangents: {quantity(e.tangent_flops, 'FLOP')}, {way}"
    yield f"second derivatives: {quantity(e.second_flops, 'FLOP')}, {unfused}, not fused yet"
    if e.limits is None:
        where = "this CPU's speed is not measured" if p.capability is None else "unknown for this GPU and dtype"
        yield f"limits: {where}; with limits=(FLOP/s, bytes/s) the bound and the least time are shown"
    else:
        speed, bandwidth, source = e.limits
        yield f"limits: {quantity(speed, 'FLOP/s')}, {quantity(bandwidth, 'B/s')} ({source})"


def _by_distance(p: Problem, name: str) -> str:
    """Return the relative positions of the values, if the host knows them, and the value of other pairs."""
    distances = {"query": p.score.query, "key": p.score.key}.get(name)
    if distances is None or p.parts is None:
        return ""
    known = f"for j - i = {distances.lo} to {distances.hi}"
    where = "from positions on the device" if name in p.parts.shifts else known
    beyond = {"zero": "0 beyond", "hidden": "hidden beyond", "clamp": "the end's beyond"}[distances.outside]
    return f", {where}, {beyond}"


def traffic_table(e: Explanation) -> list[str]:
    """Return a table of memory traffic: of the fused call, and of one that stores and reads the score matrices."""
    lines = [f"{'memory traffic':24}{'fused':>10}{'unfused':>12}"]
    matrix = quantity(_matrix(e.problem), "B")
    for name, work, passes in _passes(e):
        lines.append(_traffic(name, work.bytes, work.bytes + work.unfused_bytes, partial(quantity, unit="B")))
        if e.limits is not None:
            fused, unfused = (x / e.limits.bytes_per_second for x in (work.bytes, work.bytes + work.unfused_bytes))
            lines.append(_traffic("  takes at least", fused, unfused, duration))
        for operand, times in passes.items():
            total = quantity(times * _matrix(e.problem), "B")
            lines.append(f"  {operand:2} {times} times {matrix:11}{'–':>8}{total:>12}")
    return lines


def _traffic(name: str, fused: float, unfused: float, words: Callable[[float], str]) -> str:
    ratio = f" {number(unfused / fused):>7} x" if fused else ""
    return f"{name:24}{words(fused):>10}{words(unfused):>12}{ratio}"


def _passes(e: Explanation) -> Iterator[tuple[str, Work, dict[str, int]]]:
    yield "forward", e.forward, FORWARD_PASSES
    yield "backward", e.backward, BACKWARD_PASSES


def _bound(known: Limits | None, work: Work) -> str:
    if known is None:
        return ""
    return (
        f": {known.bound(work)}-bound, the break-even is at {number(known.break_even)}; "
        f"at least {duration(known.seconds(work))}"
    )
