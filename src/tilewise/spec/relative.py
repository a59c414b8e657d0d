"""Relative position bias tile by tile: the values that a tile of scores reads, and the gradient of these values.

An entry of a row of ``values`` belongs to one distance, the position of the key minus the position of the query. That
is ``j - i`` plus a constant: part of ``lo`` if the host knows it, else the ``shift``, one number per batch element. A
row of values belongs to a query, to a key, or to all:

    axis "query"    bias[i, j] = values[i, j - i + shift - lo]      Shaw, Transformer-XL, DeBERTa c2p
    axis "key"      bias[i, j] = values[j, j - i + shift - lo]      DeBERTa p2c
    axis "none"     bias[i, j] = values[0, j - i + shift - lo]      T5, ALiBi: a Toeplitz matrix

A tile of R rows and C columns meets R + C - 1 distances. `window` returns the values of each row for them in ascending
order. The tile of the bias is a skewed view of the window (relative shift), and its gradient is written through the
same view:

    window of a query row, distances     -2 -1  0  1  2  3         tile of 3 x 4 scores, distances
    query 0                                     a  b  c  d          0  1  2  3        a b c d
    query 1                                  e  f  g  h            -1  0  1  2   =    e f g h
    query 2                               p  q  r  s               -2 -1  0  1        p q r s

Only `gather` and `scatter`, for the reference and tests, take memory of M·N. See docs/maths.md, "A bias by distance".
Values may have any leading axes, since backends may split batches and heads.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.spec.integers import larger, smaller
from tilewise.spec.score import Band, Distances

Kind = Literal["inside", "cut", "zero", "hidden", "clamp"]

# States of the distances that a tile meets, against those that have an entry; see `state`.
BELOW, ABOVE, CUT, INSIDE = 0, 1, 2, 3

FOLD = 32  # rows of a tile after `_flattened`


class Relative(NamedTuple):
    """Relative position bias in the form that all backends take.

    values: (B|1, H|Hkv|1, M, R) for axis "query", (.., N, R) for "key", (.., 1, R) for "none"; float. Leading axes may
    differ where a backend splits batches and heads.
    shift: int64 (B|1,) along the first axis of the values, added to ``j - i``; None is 0.
    buckets: int64 (count,), the entry of each distance from ``lo`` on; None if each distance has its own entry, R =
    count.
    """

    values: Tensor
    distances: Distances
    shift: Tensor | None = None
    buckets: Tensor | None = None


# --- integers: the distances of a tile ---


def reach(row0, rows, col0, cols):
    """Return the least and the largest ``j - i`` of a tile of scores; like `state` it can be compiled for a kernel."""
    return col0 - (row0 + rows - 1), col0 + cols - 1 - row0


def state(least, most, lo, hi):
    """Return the state of distances ``least .. most`` against ``lo .. hi``: BELOW, ABOVE, CUT by an end, or INSIDE."""
    return 2 * ((most >= lo) & (least <= hi)) + 1 * ((least >= lo) & (most <= hi)) + 1 * (least > hi)


def tile_kind(relative: Relative, rows: slice, cols: slice) -> Kind:
    """Return what a tile of scores reads; a tensor of shifts is taken as a whole.

    "inside" and "cut" tiles read values. A tile without any entry adds nothing ("zero"), is fully masked ("hidden"), or
    reads one entry per row of values ("clamp").
    """
    found = _state(relative, rows, cols)
    return "inside" if found == INSIDE else "cut" if found == CUT else relative.distances.outside


def hidden_band(relative: Relative) -> Band | None:
    """Return the band left by ``outside="hidden"``; None if nothing is hidden or only the device knows shifts."""
    distances = relative.distances
    if distances.outside != "hidden" or relative.shift is not None:
        return None
    return Band(distances.lo, distances.hi)


def _state(relative: Relative, rows: slice, cols: slice) -> int:
    least, most = reach(rows.start, rows.stop - rows.start, cols.start, cols.stop - cols.start)
    shift = relative.shift
    first, last = (0, 0) if shift is None else (int(x) for x in shift.aminmax())
    return state(least + first, most + last, relative.distances.lo, relative.distances.hi)


# --- windows: the values of a tile by ascending distance ---


def window(relative: Relative, first: int, width: int) -> Tensor:
    """Return the values of each row for ``j - i = first .. first + width - 1``, (..., rows, width).

    The gradient of the values is deterministic: a copy, a sum for a clamped end, or the transpose of `_take`.
    """
    values, distances, shift, buckets = relative
    if shift is not None or buckets is not None:
        index, inside = _entries(relative, first, width)
        taken = _take(values, index)
        if distances.outside == "clamp":
            return taken
        return torch.where(inside, taken, 0.0 if distances.outside == "zero" else -torch.inf)
    left, start, middle, right = overlap(distances, first, width)
    none_beyond = isinstance(left, int) and isinstance(right, int) and left == right == 0
    # No narrow if all values are used: its gradient would be copied into zeros.
    whole = none_beyond and isinstance(middle, int) and middle == values.shape[-1]
    inner = values if whole else values.narrow(-1, start, middle)
    if distances.reverse:
        inner = inner.flip(-1)
    if none_beyond:
        return inner
    return torch.cat([_beyond(relative, False, left), inner, _beyond(relative, True, right)], -1)


def add_window(accumulator: Tensor, gradient: Tensor, relative: Relative, first: int) -> None:
    """Add the gradient of a `window` to ``accumulator``, shaped like the rows of values of the window.

    Leading axes of size 1 in the accumulator are summed over. Outside, gradients go to the clamped ends or are dropped.
    """
    distances = relative.distances
    width, R = gradient.shape[-1], accumulator.shape[-1]
    if relative.shift is not None or relative.buckets is not None:
        index, inside = _entries(relative, first, width)
        if distances.outside != "clamp":
            gradient = torch.where(inside, gradient, 0.0)
        lead = torch.broadcast_shapes(gradient.shape, index.shape)
        gradient, index = gradient.expand(lead), index.expand(lead)
        summed = accumulator.new_zeros(*lead[:-1], R).scatter_add_(-1, index, gradient.to(accumulator.dtype))
        accumulator.add_(summed.sum_to_size(accumulator.shape))
        return
    gradient = gradient.sum_to_size(*accumulator.shape[:-1], width)
    left, start, middle, right = overlap(distances, first, width)
    parts = gradient.split([left, middle, right], -1)
    inner = parts[1].flip(-1) if distances.reverse else parts[1]
    accumulator.narrow(-1, start, middle).add_(inner)
    if distances.outside == "clamp":
        for part, high in ((parts[0], False), (parts[2], True)):
            accumulator.narrow(-1, _end(relative, high), 1).add_(part.sum(-1, keepdim=True))


def overlap(distances: Distances, least: int, width: int) -> tuple[int, int, int, int]:
    """Split ``width`` distances from ``least`` on: (count below entries, first entry, count inside, count above)."""
    left = smaller(larger(distances.lo - least, 0), width)
    right = smaller(larger(least + width - 1 - distances.hi, 0), width)
    start = smaller(larger(least - distances.lo, 0), distances.count)
    middle = width - left - right
    return left, distances.count - start - middle if distances.reverse else start, middle, right


def _end(relative: Relative, high: bool) -> int:
    """Return the index of the entry of the least or of the largest (``high``) distance, without buckets."""
    return relative.distances.count - 1 if high != relative.distances.reverse else 0


def _beyond(relative: Relative, high: bool, width: int) -> Tensor:
    """Return (..., rows, width), the values for distances beyond the entries."""
    values, outside = relative.values, relative.distances.outside
    if outside == "clamp":
        return values.narrow(-1, _end(relative, high), 1).expand(*values.shape[:-1], width)
    return values.new_full((*values.shape[:-1], width), 0.0 if outside == "zero" else -torch.inf)


def _entries(relative: Relative, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return `_entry_of` for ``j - i`` from ``first`` on: (1, ..., 1, width), or (n, 1, ..., width) with n shifts."""
    device, lead = relative.values.device, relative.values.dim() - 2
    distance = torch.arange(first, first + width, device=device)
    if relative.shift is not None:
        distance = distance + relative.shift.view(-1, *[1] * (lead + 1))
    return _entry_of(relative, distance)


def _entry_of(relative: Relative, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry of each distance, clamped to the nearest end, and True where it is inside."""
    distances = relative.distances
    entry = distance - distances.lo
    inside = (entry >= 0) & (entry < distances.count)
    entry = entry.clamp(0, distances.count - 1)
    if distances.reverse:
        entry = distances.count - 1 - entry
    return entry if relative.buckets is None else relative.buckets[entry], inside


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[..., index]``, (..., rows, width), with a gradient that adds in a fixed order.

    On the CPU that is the gradient of `torch.gather`, scatter_add, as indexing adds from several threads; on a GPU it
    is the gradient of indexing, as scatter_add uses atomics.
    """
    lead = torch.broadcast_shapes(values.shape[:-1], index.shape[:-1])
    values = values.expand(*lead, values.shape[-1])
    if values.is_cpu:
        return values.gather(-1, index.expand(*lead, index.shape[-1]))
    grid = [
        torch.arange(size, device=values.device).view(-1, *[1] * (len(lead) - axis)) for axis, size in enumerate(lead)
    ]
    return values[(*grid, index)]


# --- tiles ---


def skewed(values: Tensor) -> Tensor:
    """View values (..., rows, R) as (..., rows, rows + R - 1), whose element (r, c) is entry ``c - r`` of row r.

    For axis "query" entries are at column ``c = j + shift - lo``, so that a tile of this view is a tile of the bias,
    where ``0 <= c - r < R``; elsewhere it shows values of other rows. The view stays within the memory of the values.
    TMA can read it if its row stride, the values' minus 1, is a multiple of 16 bytes: the layout of
    `tilewise.bias.relative_logits`.

    Raises:
        ValueError: rows that overlap or whose elements are not contiguous.
    """
    rows, R = values.shape[-2:]
    step, one = values.stride()[-2:]
    if (one != 1 and R > 1) or (step < R and rows > 1):
        raise ValueError(f"values: expected rows of contiguous elements, got strides {(step, one)} with {R} entries")
    size, strides = (*values.shape[:-1], rows + R - 1), (*values.stride()[:-2], step - 1, 1)
    return values.as_strided(size, strides, values.storage_offset())


def tile(relative: Relative, rows: slice, cols: slice) -> Tensor | None:
    """Return what is added to the scores of queries ``rows`` and keys ``cols``; None for nothing.

    Broadcastable to (..., rows, cols), in the values' dtype: constant along one axis if clamped, a single -inf if
    hidden. A tile inside of ascending values per query is a view.
    """
    values, distances, _, _ = relative
    height, width = rows.stop - rows.start, cols.stop - cols.start
    found = _state(relative, rows, cols)
    own = _own(relative, rows, cols)
    if found in (BELOW, ABOVE) and distances.outside != "clamp":
        return None if distances.outside == "zero" else values.new_full((1,) * values.dim(), -torch.inf)
    if found in (BELOW, ABOVE) and relative.buckets is None:
        end = own.values.narrow(-1, _end(relative, found == ABOVE), 1)
        return end.mT if distances.axis == "key" else end
    if found == INSIDE and _is_plain(relative):
        return _part_of_skewed(own, rows, cols)
    first = cols.start - (rows.stop - 1)
    laid = window(own, first, height + width - 1)
    if distances.axis == "query":
        return _skew(laid, width)
    # Distances fall as queries ascend: flip the window of a key, and the rows of a Toeplitz tile.
    if distances.axis == "key":
        return _skew(laid.flip(-1), height).mT
    laid = laid.contiguous()
    return laid.as_strided((*laid.shape[:-2], height, width), (*laid.stride()[:-2], 1, 1)).flip(-2)


def add_gradient(accumulator: Tensor, gradient: Tensor, relative: Relative, rows: slice, cols: slice) -> None:
    """Add the gradient of a `tile`, dS (..., rows, cols), to ``accumulator``, shaped like the values.

    Both are float32 (float64 for float64 inputs). Leading axes of size 1 in the accumulator are summed over. The tile
    is skewed so that each distance has a column, and columns are added: a sum along diagonals.
    """
    distances = relative.distances
    height, width = rows.stop - rows.start, cols.stop - cols.start
    found = _state(relative, rows, cols)
    place = _own(relative._replace(values=accumulator), rows, cols).values
    if found in (BELOW, ABOVE) and distances.outside != "clamp":
        return
    if found in (BELOW, ABOVE) and relative.buckets is None:
        along = {"query": (-1,), "key": (-2,), "none": (-2, -1)}[distances.axis]
        summed = gradient.sum(along, keepdim=True)
        summed = summed.mT if distances.axis == "key" else summed
        place.narrow(-1, _end(relative, found == ABOVE), 1).add_(summed.sum_to_size(*place.shape[:-1], 1))
        return
    if found == INSIDE and _is_plain(relative._replace(values=accumulator)):
        view = _part_of_skewed(relative._replace(values=place), rows, cols)
        view.add_(gradient.sum_to_size(view.shape))
        return
    first = cols.start - (rows.stop - 1)
    if distances.axis == "none" and height > FOLD:
        gradient = _flattened(gradient)
        height, width = FOLD, gradient.shape[-1]
        first = cols.stop - width - (rows.start + FOLD - 1)
    lead = gradient.shape[:-2]
    if distances.axis == "key":
        laid = gradient.new_zeros(*lead, width, height + width - 1)
        _skew(laid, height).copy_(gradient.mT)
        laid = laid.flip(-1)
    else:
        laid = gradient.new_zeros(*lead, height, height + width - 1)
        _skew(laid, width).copy_(gradient)
        if distances.axis == "none":
            laid = laid.sum(-2, keepdim=True)
    add_window(place, laid, relative, first)


def _flattened(gradient: Tensor) -> Tensor:
    """Return a gradient of ``FOLD`` rows with equal sums along diagonals: blocks of rows are shifted left and added."""
    width, blocks = gradient.shape[-1], gradient.split(FOLD, -2)
    found = gradient.new_zeros(*gradient.shape[:-2], FOLD, width + FOLD * (len(blocks) - 1))
    for n, block in enumerate(reversed(blocks)):
        found[..., : block.shape[-2], FOLD * n : FOLD * n + width] += block
    return found


def _is_plain(relative: Relative) -> bool:
    """True if `skewed` values are the bias: an ascending, contiguous row per query, and no shift on the device."""
    values, distances = relative.values, relative.distances
    return (
        distances.axis == "query" and not distances.reverse and relative.buckets is None
        and relative.shift is None
        and (values.stride(-1) == 1 or values.shape[-1] == 1)
        and (values.stride(-2) >= values.shape[-1] or values.shape[-2] == 1)
    )  # fmt: skip


def _part_of_skewed(own: Relative, rows: slice, cols: slice) -> Tensor:
    """Return the tile of `skewed` values for a tile of scores inside; its elements do not overlap in memory."""
    begin = cols.start - rows.start - own.distances.lo
    return skewed(own.values)[..., begin : begin + cols.stop - cols.start]


def _own(relative: Relative, rows: slice, cols: slice) -> Relative:
    """Return ``relative`` with the rows of values that belong to a tile."""
    axis = relative.distances.axis
    part = rows if axis == "query" else cols if axis == "key" else slice(None)
    return relative._replace(values=relative.values[..., part, :])


def _skew(laid: Tensor, width: int) -> Tensor:
    """View windows (..., rows, rows + width - 1) as (..., rows, width); each row starts a column before the last."""
    laid = laid.contiguous()
    rows, W = laid.shape[-2:]
    size, strides = (*laid.shape[:-1], width), (*laid.stride()[:-2], W - 1, 1)
    return laid.as_strided(size, strides, laid.storage_offset() + rows - 1)


# --- whole matrices, for the reference and for tests ---


def gather(relative: Relative, M: int, N: int) -> Tensor:
    """Return the whole bias (B|1, H|Hkv|1, M, N) in the values' dtype, by definition."""
    values, distances = relative.values, relative.distances
    index, inside = _matrix(relative, M, N)
    B = max(values.shape[0], index.shape[0])
    if distances.axis == "key":
        full = values.expand(B, -1, -1, -1).gather(-1, index.mT.expand(B, values.shape[1], N, M)).mT
    else:
        rows = values.expand(B, -1, M, -1)
        full = rows.gather(-1, index.expand(B, values.shape[1], M, N))
    if distances.outside == "clamp":
        return full
    return torch.where(inside, full, 0.0 if distances.outside == "zero" else -torch.inf)


def scatter(relative: Relative, gradient: Tensor) -> Tensor:
    """Return the gradient of the values of `gather`, in their shape, from that of all scores (B, H, M, N)."""
    values, distances = relative.values, relative.distances
    B, H, M, N = gradient.shape
    index, inside = _matrix(relative, M, N)
    if distances.outside != "clamp":
        gradient = torch.where(inside, gradient, 0.0)
    index = index.expand(B, H, M, N)
    if distances.axis == "key":
        gradient, index = gradient.mT, index.mT
    summed = gradient.new_zeros(*gradient.shape[:-1], values.shape[-1]).scatter_add_(-1, index, gradient)
    if values.shape[1] not in (1, H):  # the heads of a group share values
        summed = summed.unflatten(1, (values.shape[1], -1)).sum(2)
    return summed.sum_to_size(values.shape)


def _matrix(relative: Relative, M: int, N: int) -> tuple[Tensor, Tensor]:
    """Return the entry of each pair, (B|1, 1, M, N), and True where it is inside."""
    device = relative.values.device
    distance = (torch.arange(N, device=device) - torch.arange(M, device=device)[:, None])[None, None]
    return _entry_of(relative, distance if relative.shift is None else distance + relative.shift.view(-1, 1, 1, 1))
