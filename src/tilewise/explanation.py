"""explain(): what a call will do and what limits it, in words, without running it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewise.backends import lse_dtype
from tilewise.call import Bias, Call, Mask, Seed, read_call
from tilewise.gather import Gather, gather_of
from tilewise.jagged import are_jagged, packed_of
from tilewise.keywords import named_only, unexpected
from tilewise.ops.runtime.explanation import Lines, dtype_name, on_device
from tilewise.plan import Plan, make_plan
from tilewise.problem import PART_WORDS, Operand, Problem, irregular
from tilewise.quantities import count, duration, number, percent, quantity
from tilewise.score.dropout import NUMBERS, weight
from tilewise.score.lengths import Lengths, places
from tilewise.score.low_bits import LOW_BYTES, keeps_low_bits
from tilewise.score.parts import DIFFERENTIABLE, NO_PARTS
from tilewise.score.reference import in_band
from tilewise.score.terms import Numbers, Window, is_positive_float
from tilewise.score.tile_tensors import EMPTY, PARTIAL, TileTensors
from tilewise.score.tiles import key_tiles, query_tiles
from tilewise.score.tiles import limits as band_limits
from tilewise.tensors import PLAIN, check_tensor, plain_int, plain_ints
from tilewise.tile_mask import TileMask
from tilewise.varlen import read_packed


class Limits(NamedTuple):
    """What a device does at most, and where the numbers are from."""

    flops: float  # FLOP/s
    bytes_per_second: float
    source: str

    @property
    def break_even(self) -> float:
        """FLOP/byte above which the arithmetic takes longer than the memory traffic."""
        return self.flops / self.bytes_per_second

    def bound(self, work: Work) -> Literal["compute", "memory"]:
        return "compute" if work.intensity > self.break_even else "memory"

    def seconds(self, work: Work) -> float:
        """The least time that ``work`` can take."""
        return max(work.flops / self.flops, work.bytes / self.bytes_per_second)


class DataSheet(NamedTuple):
    """What a device is sold as, not what was measured: dense 16-bit tensor-core FLOP/s, and bytes/s of its memory."""

    model: str
    name: str  # a part of the device's name as CUDA gives it
    flops: float
    bytes_per_second: float


# NVIDIA's data sheets, by compute capability; the first is taken for a capability without a device.
DATA_SHEETS = {
    (8, 0): (DataSheet("A100 SXM 80 GB", "A100-SXM4-80GB", 312e12, 2.0e12),),
    (9, 0): (
        DataSheet("H100 SXM", "H100 80GB HBM3", 990e12, 3.35e12),
        DataSheet("H200 SXM", "NVIDIA H200", 990e12, 4.8e12),
    ),
}


# How often an implementation that stores them passes over matrices of B x H x M x N. Forward: S and P, each written and
# read once. Backward: P read for dV and for dS, dP written and read, dS written once and read for dQ and for dK.
FORWARD_PASSES = {"S": 2, "P": 2}
BACKWARD_PASSES = {"P": 2, "dP": 2, "dS": 3}


@dataclass(frozen=True)
class Work:
    """What one pass has to do.

    Attributes:
        flops: of the products alone, 2 for a multiply and an add; pairs that causal, window or a mask hides are not
            counted, but those of a mask whose elements are not known.
        bytes: the least traffic with the device's memory: each input read once and each result written once.
        unfused_bytes: what an implementation that stores the score matrix and its softmax (or their gradients) writes
            and reads in addition, in q's dtype: `FORWARD_PASSES` or `BACKWARD_PASSES`.
    """

    flops: int
    bytes: int
    unfused_bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.unfused_bytes + other.unfused_bytes)

    @property
    def intensity(self) -> float:
        """FLOP/byte; 0 where there is nothing to do."""
        return self.flops / self.bytes if self.bytes else 0.0


class MaskShare(NamedTuple):
    """What a mask leaves of the scores that causal and window leave: of these a share, and of their tiles one."""

    pairs: float
    tiles: float  # of `TILE` queries and keys, in which it leaves some score


class TileShare(NamedTuple):
    """What a TileMask says of its tiles, over all of its batch elements and heads, whatever causal and window hide."""

    block: tuple[int, int]  # queries and keys
    tiles: int
    visible: int
    partial: int  # of these, those whose pairs are looked at one by one


TILE = 128


@dataclass(frozen=True)
class Explanation(Lines):
    """What `explain` found; ``str()`` of it is the same in words.

    Attributes:
        plan: the backend, the problem, and for each other backend why not.
        tiles: the backend's tiles, in words.
        forward: the forward's work.
        backward: the backward's work, with gradients of q, k and v, and of bias, its terms and sink if they require
            grad.
        limits: of the device, or None if they are not known.
        mask: what the mask leaves; None where there is none, or a tensor without elements (on the meta device).
        tile_mask: what a TileMask says of its tiles; None where there is none, or one without elements.
        gather: of a dynamic mask, how the keys that are kept are gathered, or why they are not.
        called: the problem of the call where keys are gathered; that of ``plan`` is then the one on gathered keys.
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

    @property
    def problem(self) -> Problem:
        return self.plan.problem if self.called is None else self.called

    @property
    def bound(self) -> Literal["compute", "memory"] | None:
        """What limits the forward; None where the device's limits are not known."""
        return None if self.limits is None else self.limits.bound(self.forward)

    def lines(self) -> Iterator[str]:
        return _lines(self)


@partial(named_only, more=get_type_hints(Numbers), after="window")
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias = None,
    mask: Mask = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    device: str | None = None,
    limits: tuple[float, float] | None = None,
    **numbers: Unpack[Numbers],
) -> Explanation:
    """What `tilewise.attention` would do with these arguments: backend, tiles, FLOPs, bytes, and what limits them.

    Nothing is computed; of the tensors their shapes, dtypes, device and requires_grad are read, and of the mask its
    elements, if it has some. Under `torch.autocast` q, k and v are cast, as they are for the call.

    Args:
        q, k, v, bias, mask, sink, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend: as
            for `tilewise.attention`. Tensors on the meta device serve as well, together with ``device=``. A bias of low
            rank shows as what it becomes: wider q and k. Of jagged nested tensors the lengths are read, as
            `explain_varlen` does, and so need elements. Beside q on the meta device a TileMask may lie on the CPU.
        return_lse: changes nothing: the LSE is computed and written in any case.
        device: plan for another device than the tensors': "cpu", or a CUDA compute capability such as "sm_90".
        limits: ``(FLOP/s, bytes/s)`` of the device. Default: the data sheet's of an A100, H100 or H200 (SXM), for
            16-bit tensors; elsewhere they are not known, and the bound is given as a condition.

    Returns:
        Explanation; print it.

    Raises:
        ValueError, TypeError: as `tilewise.attention`, and for a device or limits of another form.

    Source: the roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009).
    """
    if unknown := [name for name in numbers if name not in Numbers.__annotations__]:
        raise unexpected("explain", unknown)
    if type(q) not in PLAIN and are_jagged(q, k, v):
        values, lengths, longest = packed_of(q, k, v)
        assert lengths.cu_q is not None
        assert lengths.cu_k is not None
        if q.is_meta:
            raise ValueError("q: its lengths are read, and need elements; on the meta device use explain_varlen")
        return explain_varlen(
            *values, lengths.cu_q, lengths.cu_k, *longest, bias=bias, mask=mask, sink=sink, causal=causal,
            window=window, dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic,
            backend=backend, device=device, limits=limits, **numbers,
        )  # fmt: skip
    listed = None
    if isinstance(mask, TileMask) and isinstance(q, Tensor) and q.is_meta and mask.device.type == "cpu":
        listed, mask = mask.tensors, mask.to("meta")
    with torch.enable_grad():  # what is made of a trained table asks for a gradient as the table does
        call = read_call(
            q, k, v, bias=bias, mask=mask, sink=sink, causal=causal, window=window, dropout_p=dropout_p,
            dropout_seed=dropout_seed, deterministic=deterministic, backend=backend, **numbers,
        )  # fmt: skip
    problem, name = _problem_of(call, device)
    known = _data_sheet(problem, name) if limits is None else _given_limits(limits)
    kept = mask.kept if isinstance(mask, TileMask) else None
    gather = None if kept is None else gather_of(problem, kept)
    computed = gather.problem(problem) if isinstance(gather, Gather) else problem
    plan = make_plan(computed, call.backend)
    tiles = "nothing to compute" if problem.empty else plan.module.tiles(computed)
    listed = call.inputs.tiles if listed is None else listed
    share = _mask_share(problem, call.inputs.mask, listed)
    forward, backward = forward_work(computed), backward_work(computed)
    if isinstance(gather, Gather):
        forward, backward = _gathered(problem, computed, forward, backward)
    if share is not None:
        forward, backward = replace(forward, flops=problem.flops), replace(backward, flops=problem.backward_flops)
        forward, backward = (replace(x, flops=round(x.flops * share.pairs)) for x in (forward, backward))
    read = sum(x.nbytes for x in call.inputs.tiles or () if x is not None)
    forward, backward = (replace(x, bytes=x.bytes + read) for x in (forward, backward))
    called = problem if isinstance(gather, Gather) else None
    return Explanation(plan, tiles, forward, backward, known, share, _tile_share(listed), gather, called)


def _gathered(problem: Problem, computed: Problem, forward: Work, backward: Work) -> tuple[Work, Work]:
    """Works of what is computed, with the gathering of keys and values, and the adding up of their gradients."""

    def keys_and_values(p: Problem) -> int:
        return p.batch * p.kv_heads * p.keys * (p.head_dim + p.value_dim) * p.dtype.itemsize

    copied, whole = keys_and_values(computed), keys_and_values(problem)
    return (
        replace(forward, bytes=forward.bytes + 2 * copied, unfused_bytes=_stored(problem, FORWARD_PASSES)),
        replace(backward, bytes=backward.bytes + copied + whole, unfused_bytes=_stored(problem, BACKWARD_PASSES)),
    )


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    device: str | None = None,
    limits: tuple[float, float] | None = None,
    **options: Any,
) -> Explanation:
    """`explain` of `tilewise.varlen_attention`: FLOPs and bytes of every sequence, added up.

    Args:
        q, k, v: as for `varlen_attention`; also on the meta device, together with ``device=``.
        cu_seqlens_q, cu_seqlens_k, seqused_k: as there. They are read, for which the host waits on a GPU, and so need
            elements: beside tensors on the meta device they lie on the CPU.
        max_seqlen_q, max_seqlen_k: as there.
        device, limits: as for `explain`.
        options: the other keywords of `varlen_attention`. What a mask hides is not looked at.

    Raises:
        ValueError, TypeError: as `varlen_attention`, and as `explain`.
    """
    allowed = inspect.signature(read_packed).parameters.keys() | Numbers.__annotations__.keys() | {"return_lse"}
    if unknown := [name for name in options if name not in allowed or name in ("lengths", "longest")]:
        raise unexpected("explain_varlen", unknown)
    options.pop("return_lse", None)  # changes nothing
    read = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
    for argument, x in zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), read, strict=False):
        if x is not None:
            check_tensor(argument, x)
            if x.is_meta:
                raise ValueError(f"{argument}: is read, and needs elements: pass it on the CPU beside meta tensors")
    moved = Lengths(*(None if x is None else x.to(q.device) for x in read))
    with torch.enable_grad():
        longest = plain_int(max_seqlen_q), plain_int(max_seqlen_k)
        call = read_packed(q, k, v, moved, longest, **options | {"window": plain_ints(options.get("window"))})
    problem, name = _problem_of(call, device)
    assert problem.totals is not None
    assert problem.score.packed is not None
    known = _data_sheet(problem, name) if limits is None else _given_limits(limits)
    plan = make_plan(problem, call.backend)
    tiles = "nothing to compute" if problem.empty else plan.module.tiles(problem)
    plain = replace(problem, bias=None, mask=None, sink=None, parts=None, totals=None, batch=1)
    forward = backward = Work(0, 0, 0)
    for place in places(read, problem.score.packed, problem.totals):
        band = problem.score.band.shifted(place.keys - place.queries)
        score = replace(problem.score, band=band, packed=None)
        own = replace(plain, queries=place.queries, keys=place.keys, score=score)
        forward, backward = forward + forward_work(own), backward + backward_work(own)
    given, grads = _operand_bytes(call, problem)
    forward = replace(forward, bytes=forward.bytes + given)
    return Explanation(plan, tiles, forward, replace(backward, bytes=backward.bytes + given + grads), known)


def _operand_bytes(call: Call, problem: Problem) -> tuple[int, int]:
    """Of a packed batch: bytes of what there is beside q, k and v, once, and of the gradients that are asked for."""
    inputs, parts = call.inputs, call.inputs.parts or NO_PARTS
    sizes = {"bias": inputs.bias, "mask": inputs.mask, "sink": inputs.sink, **parts._asdict()}
    found = {name: x.numel() * x.element_size() for name, x in sizes.items() if x is not None}
    asking = [*["bias"] * problem.bias_grad, *["sink"] * problem.sink_grad]
    asking += [] if problem.parts is None else problem.parts.grads
    return sum(found.values()), sum(found[name] for name in asking)


def _problem_of(call: Call, device: str | None) -> tuple[Problem, str | None]:
    """The problem of a call, and the name of the GPU that its tensors are on."""
    q, bias, sink = call.inputs.q, call.inputs.bias, call.inputs.sink
    parts = call.inputs.parts or NO_PARTS
    asking = [name for name in DIFFERENTIABLE if (x := getattr(parts, name)) is not None and x.requires_grad]
    problem = Problem.of(
        *call.inputs,
        call.score,
        bias_grad=bias is not None and bias.requires_grad,
        sink_grad=sink is not None and sink.requires_grad,
        part_grads=tuple(asking),
        deterministic=call.deterministic,
        irregular=irregular(*call.inputs[:4]),
    )
    if device is not None:
        return on_device(problem, device), None
    if q.is_meta:
        raise ValueError("device: needed for tensors on the meta device: 'cpu' or a compute capability such as 'sm_90'")
    return problem, torch.cuda.get_device_name(q.device) if q.is_cuda else None


def _tile_share(tiles: TileTensors | None) -> TileShare | None:
    if tiles is None or tiles.tiles is None or tiles.tiles.is_meta or is_fake(tiles.tiles):
        return None
    x = tiles.tiles
    return TileShare(tiles.block, x.numel(), int((x > EMPTY).sum()), int((x >= PARTIAL).sum()))


def _mask_share(problem: Problem, mask: Tensor | None, listed: TileTensors | None) -> MaskShare | None:
    """None where there is no mask, its elements are not known, or no score is left to it. A few rows at a time."""
    mask = mask if listed is None else listed.tiles
    if mask is None or mask.is_meta or is_fake(mask) or problem.pairs == 0:
        return None
    cols = torch.arange(problem.keys, device=mask.device)
    pairs = tiles = band_tiles = 0
    for row0 in range(0, problem.queries, TILE):
        rows = torch.arange(row0, min(row0 + TILE, problem.queries), device=mask.device)
        in_reach = in_band(rows[:, None], cols, problem.score.band)
        band_tiles += _count_tiles(in_reach)
        if listed is None:
            of_rows = mask if mask.shape[2] == 1 else mask[:, :, rows]
        else:
            of_rows = listed.rows_visible(slice(row0, row0 + rows.shape[0]), problem.keys)
        for of_batch in of_rows:
            seen = of_batch & in_reach
            pairs += int(seen.sum())
            tiles += _count_tiles(seen)
    matrices = mask.shape[0] * mask.shape[1]
    band_pairs = problem.pairs // (problem.batch * problem.heads)
    return MaskShare(pairs / (matrices * band_pairs), tiles / (matrices * band_tiles))


def _count_tiles(seen: Tensor) -> int:
    """How many tiles of a row of tiles, (..., up to TILE, N), have something in them."""
    keys = seen.any(-2)
    return int(torch.nn.functional.pad(keys, (0, -keys.shape[-1] % TILE)).unflatten(-1, (-1, TILE)).any(-1).sum())


def _data_sheet(problem: Problem, name: str | None) -> Limits | None:
    """The limits of the device called ``name``; without a name, those of the capability's first data sheet."""
    if problem.capability is None or problem.dtype.itemsize != 2:
        return None
    for sheet in DATA_SHEETS.get(problem.capability, ()):
        if name is None or sheet.name in name:
            return Limits(sheet.flops, sheet.bytes_per_second, f"data sheet of the {sheet.model}")
    return None


def _given_limits(pair: tuple[float, float]) -> Limits:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"limits: expected a pair (FLOP/s, bytes/s), got {pair!r}")
    for limit in pair:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise TypeError(f"limits: expected a pair (FLOP/s, bytes/s) of floats, got {pair!r}")
        if not is_positive_float(limit):
            raise ValueError(f"limits: must be positive and finite, got {pair!r}")
    return Limits(float(pair[0]), float(pair[1]), "limits as given")


def forward_work(problem: Problem) -> Work:
    """Reads the inputs; writes o and lse."""
    return Work(problem.flops, _read(problem) + _results(problem), _stored(problem, FORWARD_PASSES))


def backward_work(problem: Problem) -> Work:
    """Reads what the forward read and wrote, and dO; writes a gradient of the size of each input that has one."""
    size, heads = problem.dtype.itemsize, problem.batch * problem.heads
    do = heads * problem.queries * problem.value_dim * size
    dq = heads * problem.queries * problem.head_dim * size
    dk_dv = problem.batch * problem.kv_heads * problem.keys * (problem.head_dim + problem.value_dim) * size
    dbias = math.prod(problem.bias.shape) * problem.bias.dtype.itemsize if problem.bias and problem.bias_grad else 0
    dsink = math.prod(problem.sink.shape) * problem.sink.dtype.itemsize if problem.sink and problem.sink_grad else 0
    parts = problem.parts
    dparts = 0 if parts is None else sum(_part(problem, name, x) for name, x in parts.named() if name in parts.grads)
    traffic = _read(problem) + _results(problem) + do + dq + dk_dv + dbias + dsink + dparts
    return Work(problem.backward_flops, traffic, _stored(problem, BACKWARD_PASSES))


def _read(problem: Problem) -> int:
    """Bytes of q, k, v, bias and its terms, mask and sink, of each only what the band lets somebody see."""
    M, N = problem.queries, problem.keys
    lo, hi = band_limits(problem.score.band)
    first_key, _, _, last_key = key_tiles(0, M, N, lo, hi, 1)
    first_query, _, _, last_query = query_tiles(0, N, M, lo, hi, 1)
    queries = problem.batch * problem.heads * (last_query - first_query) * problem.head_dim
    keys = problem.batch * problem.kv_heads * (last_key - first_key) * (problem.head_dim + problem.value_dim)
    mask = problem.mask if problem.tile_mask is None else None  # whose tensors `explain` counts
    operands = sum(_operand(problem, x) for x in (problem.bias, mask) if x is not None)
    operands += 0 if problem.parts is None else sum(_part(problem, name, x) for name, x in problem.parts.named())
    operands += 0 if problem.sink is None else math.prod(problem.sink.shape) * problem.sink.dtype.itemsize
    return (queries + keys) * problem.dtype.itemsize + operands


def _operand(problem: Problem, x: Operand) -> int:
    full = x.rows == problem.queries and x.cols == problem.keys and problem.batch * problem.heads > 0
    pairs = problem.pairs // (problem.batch * problem.heads) if full else x.rows * x.cols
    return x.batch * x.heads * pairs * x.dtype.itemsize


def _part(problem: Problem, name: str, x: Operand) -> int:
    """Bytes of a part of the bias; of values by distance, where the host knows it, those that some pair reads."""
    distances, parts, cols = {"query": problem.score.query, "key": problem.score.key}.get(name), problem.parts, x.cols
    if distances is not None and parts is not None and name not in (*parts.shifts, *parts.buckets):
        least, most = max(distances.lo, 1 - problem.queries), min(distances.hi, problem.keys - 1)
        cols = max(most - least + 1, 1 if distances.outside == "clamp" else 0)
    return x.batch * x.heads * x.rows * cols * x.dtype.itemsize


def _results(problem: Problem) -> int:
    """Bytes of o and lse, with dropout also of o's low bits."""
    rows, element = problem.batch * problem.heads * problem.queries, problem.dtype.itemsize
    if keeps_low_bits(problem.dtype, problem.score.dropout):
        element += LOW_BYTES
    return rows * (problem.value_dim * element + lse_dtype(problem.dtype).itemsize)


def _stored(problem: Problem, passes: dict[str, int]) -> int:
    return sum(passes.values()) * _matrix(problem)


def _matrix(problem: Problem) -> int:
    """Bytes of one B x H x M x N matrix."""
    return problem.batch * problem.heads * problem.queries * problem.keys * problem.dtype.itemsize


def _lines(e: Explanation) -> Iterator[str]:
    p = e.problem
    where = p.device if p.capability is None else f"{p.device} (compute capability {p.capability[0]}.{p.capability[1]})"
    yield f"attention on {where}, {dtype_name(p.dtype)}"
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
            yield f"  {name} {x.shape} {dtype_name(x.dtype)}{grad}"
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
            kept = f"; the bits that rounding takes of o are kept, in {LOW_BYTES} bytes an element"
        yield f"  dropout: {share} of the probabilities are 0, the others {others} times as large{kept}"
    if not p.score.band.unlimited and p.totals is None:
        total = p.batch * p.heads * p.queries * p.keys
        yield f"  causal or window: {percent(p.pairs / max(total, 1))} of the scores are visible"
    if p.tile_mask is not None and p.mask is not None:
        size, at = p.tile_mask, e.tile_mask
        found = (
            "" if at is None else f": {at.visible} of {count(at.tiles, 'tile')} visible, {at.partial} of them in part"
        )
        yield f"  TileMask {p.mask.shape} in tiles of {size.block_m} x {size.block_n}{found}"
    if isinstance(e.gather, Gather):
        chunks, rows, cols, _ = e.gather
        of = f"each of {chunks} chunks of {rows} queries" if chunks > 1 else "all queries"
        yield f"  kept keys are gathered: for {of} {'at most ' * (chunks > 1)}{cols} of {p.keys}"
    elif e.gather is not None:
        yield f"  kept keys are not gathered: {e.gather}"
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
        yield f"  {number(work.intensity)} FLOP/byte: {_bound(e.limits, work)}"
        *first, last = passes
        stored = f"{', '.join(first)} and {last}"
        yield f"  storing {stored} would add {quantity(work.unfused_bytes, 'B')} of traffic"
    if e.limits is None:
        yield "limits: unknown device or dtype: give limits=(FLOP/s, bytes/s)"
    else:
        speed, bandwidth, source = e.limits
        yield f"limits: {quantity(speed, 'FLOP/s')}, {quantity(bandwidth, 'B/s')} ({source})"


def _by_distance(p: Problem, name: str) -> str:
    """Which pairs the values are for, if the host knows, and what others have."""
    distances = {"query": p.score.query, "key": p.score.key}.get(name)
    if distances is None or p.parts is None:
        return ""
    known = f"for j - i = {distances.lo} to {distances.hi}"
    where = "from positions on the device" if name in p.parts.shifts else known
    beyond = {"zero": "0 beyond", "hidden": "hidden beyond", "clamp": "the end's beyond"}[distances.outside]
    return f", {where}, {beyond}"


def traffic_table(e: Explanation) -> list[str]:
    """Lines of a table: memory traffic of the fused call, and of one that stores the score matrices and reads them."""
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
        return f"compute-bound where a device does fewer than {number(work.intensity)} FLOP in the time of one byte"
    return (
        f"{known.bound(work)}-bound, the break-even is at {number(known.break_even)}; "
        f"at least {duration(known.seconds(work))}"
    )
