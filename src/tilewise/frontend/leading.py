"""`tilewise.attention` with more leading dimensions than a batch: merged by views, or split into several calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs
from tilewise.bias.low_rank import LowRankBias
from tilewise.bias.terms import Term
from tilewise.frontend.arguments import Bias, Call, Mask, Seed, check_inputs, read_call, with_seed
from tilewise.frontend.call_cache import cache_call
from tilewise.masks.block_sparse import tile_mask_of
from tilewise.operator.autograd import Found, attention_op
from tilewise.spec.checks import check_broadcast, check_sink
from tilewise.spec.operands import Sizes
from tilewise.spec.tensors import check_tensor, is_causal_bias, is_dtensor

Size = tuple[int, ...]


def attention_of_leading(
    attend: Callable[..., Found], q: Tensor, k: Tensor, v: Tensor, *, bias: Bias, mask: Mask, sink: Tensor | None,
    dropout_p: float, dropout_seed: Seed, return_lse: bool, arguments: tuple | None, **options: Any,
) -> Found:  # fmt: skip
    """Return ``attend`` of q (..., H, M, D); ``attend`` takes (B, H, M, D). Errors as for `tilewise.attention`.

    No tensor is copied or expanded. A single call suffices if views can merge each tensor's leading dimensions, in
    row-major order or in the order of q's strides; each tensor must be full, or broadcast, along all of them. A mask
    may also broadcast along the first of them only, and one matrix bias along the last of them only. Otherwise the
    dimensions that give the fewest calls are split.
    arguments: the key under which ``attend`` caches a call, or None.
    """
    split = split_leading(q, k, v, bias=bias, mask=mask, sink=sink, ordered=dropout_p != 0)
    way, whole = split.way, split.whole
    if way.calls > 1 and dropout_seed is not None and dropout_p != 0:
        raise NotImplementedError(
            f"dropout_seed: says what one call drops, and this one is computed in {way.calls} parts, for the leading "
            f"dimensions {tuple(way.lead)} of some tensor do not merge into one; leave dropout_seed out, and each part "
            "draws one of its own"
        )
    options |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    if whole:
        check_inputs(q, k, v, bias, mask if isinstance(mask, Tensor) else None, sink)
    if arguments is not None and way.in_order and _are_tensors(bias, mask):
        (flattened,) = split.calls
        given = Inputs(q, k, v, bias, mask, sink)  # type: ignore[arg-type]
        cached = cache_call(given, arguments, return_lse, read_flattened(flattened, options))
        if cached is not None:
            return cached
    found: list[Found] = []
    for inputs in split.calls:
        if whole:
            call = read_flattened(inputs, options)
            found.append(attention_op(with_seed(call.inputs, call.score), *call[1:], return_lse=return_lse))
        else:
            named = dict(zip(("bias", "mask", "sink"), inputs[3:6], strict=True))
            found.append(attend(*inputs[:3], **named, return_lse=return_lse, **options))
    o, lse, statistics = zip(*found, strict=True)
    return (
        way.together(o), way.together(lse) if return_lse else None,
        None if statistics[0] is None else way.together(statistics),
    )  # fmt: skip


class LeadingSplit(NamedTuple):
    """Calls that compute attention with more leading dimensions, with the caller's kinds of bias and mask.

    whole: there is one call, whose mask (1, n, H, M, N) or bias (n, 1, H, M, N) has an axis more, see `spec.checks`.
    """

    way: _Way
    calls: list[Inputs]
    whole: bool


def split_leading(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias, mask: Mask, sink: Tensor | None, ordered: bool
) -> LeadingSplit:
    """Return views of the tensors for each of the fewest calls. ordered: batch elements must be counted in row-major
    order (for dropout). Errors as for `tilewise.attention`."""
    lead = _check_qkv(q, k, v)
    H, M, N = q.shape[-3], q.shape[-2], k.shape[-2]
    limits = _Limits(lead, Sizes(1, H, k.shape[-3], M, N))
    several = isinstance(bias, (tuple, list))
    terms = [limits.bias(x, q) for x in (bias if isinstance(bias, (tuple, list)) else [bias])]
    given = [q, k, v, limits.mask(mask), limits.sink(sink), *terms]
    tensors = {i: x for i, x in enumerate(given) if _has_leading(x, len(lead))}
    way = _way_of(lead, list(tensors.values()), ordered)
    apart: dict[int, Tensor] = {}
    if way.calls > 1:
        matrix = _only_matrix(terms, limits.sizes)
        ways = {3: _Way.repeated} | ({} if matrix is None else {5 + matrix: _Way.in_runs})
        ways = {i: how for i, how in ways.items() if i in tensors}
        for chosen in [[i] for i in ways] + [list(ways)] * (len(ways) > 1):
            one = _way_of(lead, [x for i, x in tensors.items() if i not in chosen], ordered)
            found = {i: ways[i](one, tensors[i]) for i in chosen}
            if all(x is not None for x in found.values()):
                way, apart = one, {i: x for i, x in found.items() if x is not None}
                break
    parts = {i: [apart[i]] if i in apart else way.apart(x) for i, x in tensors.items()}
    calls = []
    for n in range(way.calls):
        own_q, own_k, own_v, own_mask, own_sink, *own = [parts[i][n] if i in parts else x for i, x in enumerate(given)]
        calls.append(Inputs(own_q, own_k, own_v, tuple(own) if several else own[0], own_mask, own_sink))  # type: ignore[arg-type]
    return LeadingSplit(way, calls, bool(apart))


def read_flattened(inputs: Inputs, options: dict[str, Any]) -> Call:
    """Return `read_call` of one of the calls, in which a bias or a mask may have an axis more, see `LeadingSplit`."""
    q, k, v, bias, mask, sink, *_ = inputs
    given: Any = bias
    terms = given if isinstance(given, (tuple, list)) else [given]
    matrices = [x for x in terms if isinstance(x, Tensor) and x.dim() == 5]
    if matrices:  # read with the first in its place, which becomes the bias whatever else there is
        read = tuple([x[0] if x is matrices[0] else x for x in terms])
        given = read if isinstance(given, (tuple, list)) else read[0]
    repeats = isinstance(mask, Tensor) and mask.dim() == 5
    call = read_call(q, k, v, bias=given, mask=None if repeats else mask, sink=sink, **options)
    if matrices:
        call = call._replace(inputs=call.inputs._replace(bias=matrices[0]))
    return call._replace(inputs=call.inputs._replace(mask=mask)) if repeats else call


def _only_matrix(terms: Sequence[Any], sizes: Sizes) -> int | None:
    """Return the index of the only matrix of queries and keys; None without one, or if others are added to it."""
    found = [i for i, x in enumerate(terms) if isinstance(x, Tensor) and tuple(x.shape[-2:]) == (sizes.M, sizes.N)]
    alone = not any(isinstance(x, LowRankBias) for x in terms) and min(sizes.M, sizes.N) > 1
    return found[0] if len(found) == 1 and alone else None


class _Way(NamedTuple):
    """Split of the leading dimensions ``lead``: one call per index of ``split``. ``merged``, in this order, are its
    batch."""

    lead: Size
    split: Size
    merged: Size

    @property
    def calls(self) -> int:
        return _product([self.lead[i] for i in self.split])

    @property
    def in_order(self) -> bool:
        """True if one call suffices, with the leading dimensions merged in row-major order, by views."""
        return not self.split and 0 not in self.lead and self.merged == tuple(range(len(self.merged)))

    def repeated(self, mask: Tensor) -> Tensor | None:
        """Return a view (1, n, ...) of a mask that is shared along the first merged dimensions and full along the
        others, so that it repeats along the batch; None for other masks, or if there are several calls."""
        sizes = [self.lead[i] for i in self.merged]
        if self.split or 0 in sizes:
            return None
        x = mask.permute(*self.merged, *range(len(self.merged), mask.dim()))
        dims = [i for i, size in enumerate(sizes) if size != 1]
        while dims and x.shape[dims[0]] == 1:
            del dims[0]
        if not dims or not _merges(x, tuple(dims), tuple(sizes)) or x.shape[dims[0]] == 1:
            return None
        return x.reshape(1, _product([sizes[i] for i in dims]), *x.shape[len(sizes) :])

    def in_runs(self, bias: Tensor) -> Tensor | None:
        """Return a view (n, 1, ...) of a bias that is full along the first merged dimensions and shared along the
        others, so that runs of batch elements share it; None for other biases, or if there are several calls."""
        sizes = [self.lead[i] for i in self.merged]
        if self.split or 0 in sizes:
            return None
        x = bias.permute(*self.merged, *range(len(self.merged), bias.dim()))
        dims = [i for i, size in enumerate(sizes) if size != 1]
        while dims and x.shape[dims[-1]] == 1:
            del dims[-1]
        if not dims or not _merges(x, tuple(dims), tuple(sizes)) or x.shape[dims[0]] == 1:
            return None
        return x.reshape(_product([sizes[i] for i in dims]), 1, *x.shape[len(sizes) :])

    def apart(self, x: Tensor) -> list[Tensor]:
        """Return views (batch or 1, ...) of ``x``, one for each call."""
        if 0 in self.lead:  # if one size is 0, expanding copies nothing
            n = len(self.lead)
            return [x.expand(*self.lead, *x.shape[n:]).reshape(0, *x.shape[n:])]
        order = (*self.split, *self.merged)
        if order != tuple(range(len(order))):
            x = x.permute(*order, *range(len(order), x.dim()))
        parts = [x]
        for i in self.split:
            # unbind: its backward stacks the gradients once; indexing would give each one the size of x.
            rows = [part.unbind(0) if part.shape[0] != 1 else (part[0],) * self.lead[i] for part in parts]
            parts = list(chain.from_iterable(rows))
        n = len(self.merged)
        return [part.view(_product(part.shape[:n]), *part.shape[n:]) for part in parts]

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Return (..., H, M, Dv) or (..., H, M) from the results of the calls, with their memory layout."""
        n = len(self.merged)
        parts = [x.view(*(self.lead[i] for i in self.merged), *x.shape[1:]) for x in parts]
        if not self.split:
            x = parts[0]
        else:
            swapped = parts[0].dim() > n + 2 and parts[0].stride(-3) < parts[0].stride(-2)  # (M, H, Dv) in memory
            x = torch.stack([x.transpose(-3, -2) for x in parts] if swapped else list(parts))
            x = x.transpose(-3, -2) if swapped else x
            x = x.view(*(self.lead[i] for i in self.split), *x.shape[1:])
        order = (*self.split, *self.merged)
        if order == tuple(range(len(order))):
            return x
        return x.permute(*(order.index(i) for i in range(len(order))), *range(len(order), x.dim()))


def _way_of(lead: Size, tensors: Sequence[Tensor], ordered: bool) -> _Way:
    """Return the split with the fewest calls. ordered: batch elements must be counted in row-major order (for
    dropout)."""
    every = tuple(range(len(lead)))
    if _product(lead) < 2:
        return _Way(lead, (), every)
    long = [i for i in every if lead[i] != 1]
    best = _Way(lead, every, ())  # no merged dimensions
    for split in chain.from_iterable(combinations(long, count) for count in range(len(long))):
        if _product([lead[i] for i in split]) >= best.calls:
            continue
        merged = tuple([i for i in every if i not in split])
        if all(_merges(x, merged, lead) for x in tensors):
            best = _Way(lead, split, merged)
        elif not ordered:
            merged = _as_in_memory(tensors[0], merged)
            best = _Way(lead, split, merged) if all(_merges(x, merged, lead) for x in tensors) else best
        if best.calls == 1:
            break
    return best


def _as_in_memory(x: Tensor, dims: Size) -> Size:
    """Return ``dims`` in the order of decreasing strides. Symbolic sizes can be compared but not sorted by a key."""
    found: list[int] = []
    for i in dims:
        at = sum([x.stride(j) >= x.stride(i) for j in found])
        found.insert(at, i)
    return tuple(found)


def _merges(x: Tensor, dims: Size, lead: Size) -> bool:
    """True if ``x`` broadcasts along all of ``dims``, or is full along all of them and a view can merge them."""
    dims = tuple([i for i in dims if lead[i] != 1])
    full = [i for i in dims if x.shape[i] != 1]
    if len(full) < len(dims):
        return not full
    return all(x.stride(i) == x.stride(j) * x.shape[j] for i, j in pairwise(dims))


def _product(sizes: Sequence[int]) -> int:
    """Return math.prod of sizes that may be symbolic."""
    n = 1
    for size in sizes:
        n = n * size
    return n


# --- checks ---


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> Size:
    """Return the leading dimensions, checked to be equal; `Problem` checks the last three."""
    lead = tuple(q.shape[:-3])
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: a DTensor must have 4 dimensions, got shape {tuple(x.shape)}")
        if x.dim() != q.dim():
            raise ValueError(
                f"{name}: expected {q.dim()} dimensions (..., heads, length, head_dim) as q has, got shape "
                f"{tuple(x.shape)}"
            )
        if tuple(x.shape[:-3]) != lead:
            raise ValueError(f"{name}: leading dimensions must equal q's {lead}, got shape {tuple(x.shape)}")
    return lead


def _are_tensors(bias: Any, mask: Any) -> bool:
    """True if bias and mask are tensors or None."""
    return all(x is None or isinstance(x, Tensor) for x in (bias, mask))


def _has_leading(x: object, n: int) -> bool:
    """True for a tensor with more dimensions than a sink per head, except a CausalBias."""
    return isinstance(x, Tensor) and x.dim() > n and not is_causal_bias(x)


class _Limits(NamedTuple):
    """Checks of bias, mask and sink; tensors are returned with all leading dimensions, each full or 1."""

    lead: Size
    sizes: Sizes

    def bias(self, x: Any, q: Tensor) -> Any:
        if isinstance(x, Term):
            x.check(self.sizes, q.device)  # with batch size 1: shared by all leading dimensions
            return x
        return x if x is None else self._tensor("bias", x)

    def mask(self, x: Any) -> Any:
        if x is None or isinstance(x, Tensor):
            return x if x is None else self._tensor("mask", x)
        tiles = tile_mask_of("mask", x, self.sizes.M, self.sizes.N)
        if tiles is not None and tiles.shape[0] != 1:
            raise ValueError(
                f"mask: of queries with leading dimensions {self.lead} a TileMask or BlockMask must have batch size 1, "
                f"got {tiles.shape[0]}"
            )
        return x

    def sink(self, x: Any) -> Any:
        if x is None:
            return None
        check_tensor("sink", x)
        check_sink(x, self.sizes, x.device, lead=self.lead)
        return x

    def _tensor(self, name: str, x: Any) -> Tensor:
        check_tensor(name, x, may_be_causal=True)
        if is_causal_bias(x):
            return x
        check_broadcast(name, x, self.lead, self.sizes)
        missing = len(self.lead) + 3 - x.dim()
        return x[(None,) * missing] if missing else x
