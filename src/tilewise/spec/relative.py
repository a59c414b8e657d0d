"""A bias by distance, tile by tile: which values a tile of scores reads, and which of them its gradient goes to.

Query ``i`` stands at a position, key ``j`` at another, and an entry of a row of ``values`` belongs to one distance
between the two. That is ``j - i`` plus a constant, which is counted in ``lo`` where the host knows it; else it is the
``shift``, one number for each batch element. A row of values belongs to a query, to a key, or to all:

    axis "query"    bias[i, j] = values[i, j - i + shift - lo]      Shaw, Transformer-XL, DeBERTa c2p
    axis "key"      bias[i, j] = values[j, j - i + shift - lo]      DeBERTa p2c
    axis "none"     bias[i, j] = values[0, j - i + shift - lo]      T5, ALiBi: a Toeplitz matrix

A tile of R rows and C columns meets R + C - 1 distances. `window` lays out what each row of values has for them,
ascending; a tile is a skewed view of that, and its gradient is written through the same view:

    window of a query row, distances     -2 -1  0  1  2  3         tile of 3 x 4 scores, distances
    query 0                                     a  b  c  d          0  1  2  3        a b c d
    query 1                                  e  f  g  h            -1  0  1  2   =    e f g h
    query 2                               p  q  r  s               -2 -1  0  1        p q r s

Nothing here grows with M·N but `gather` and `scatter`, which the reference and the tests are for. docs/maths.md derives
it, "A bias by distance". Values may have any leading axes, for a backend cuts batches and heads as it likes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.spec.integers import larger, smaller
from tilewise.spec.score import Band, Distances

Kind = Literal["inside", "cut", "zero", "hidden", "clamp"]

# How the distances that a tile meets lie to those that have an entry; what `state` returns.
BELOW, ABOVE, CUT, INSIDE = 0, 1, 2, 3

FOLD = 32  # rows to which a tile is flattened before it is summed along its diagonals


class Relative(NamedTuple):
    """A bias by distance as every backend takes it.

    values: (B|1, H|Hkv|1, M, R) for axis "query", (.., N, R) for "key", (.., 1, R) for "none"; float. A backend may
    pass a part of its batches and heads, under any leading axes.
    shift: what is added to ``j - i``, an int64 tensor (B|1,) along the first axis of the values; None: nothing.
    buckets: int64 (count,), the entry of each distance from ``lo`` on; None: the first distance has the first entry,
    and R is count.
    """

    values: Tensor
    distances: Distances
    shift: Tensor | None = None
    buckets: Tensor | None = None


# --- integers: what a tile meets ---


def reach(row0, rows, col0, cols):
    """The least and the largest ``j - i`` of the scores ``row0 .. row0 + rows - 1`` by ``col0 .. col0 + cols - 1``.

    Plain arithmetic, as `state` is, so that a kernel can be given the same source.
    """
    return col0 - (row0 + rows - 1), col0 + cols - 1 - row0


def state(least, most, lo, hi):
    """Of distances ``least .. most`` beside ``lo .. hi``: BELOW or ABOVE them all, CUT by an end, or INSIDE."""
    return 2 * ((most >= lo) & (least <= hi)) + 1 * ((least >= lo) & (most <= hi)) + 1 * (least > hi)


def tile_kind(relative: Relative, rows: slice, cols: slice) -> Kind:
    """What a tile of scores asks for: "inside" and "cut" read values; a tile that meets no distance with an entry gets
    nothing ("zero"), is "hidden" as a whole, or has one entry in each row of values ("clamp").

    With a tensor of shifts this is said of all of them together.
    """
    found = _state(relative, rows, cols)
    return "inside" if found == INSIDE else "cut" if found == CUT else relative.distances.outside


def hidden_band(relative: Relative) -> Band | None:
    """The band that ``outside="hidden"`` leaves visible, so that tiles beyond it are not even visited; None where it
    hides nothing, or where only the device knows the shifts."""
    distances = relative.distances
    if distances.outside != "hidden" or relative.shift is not None:
        return None
    return Band(distances.lo, distances.hi)


def _state(relative: Relative, rows: slice, cols: slice) -> int:
    least, most = reach(rows.start, rows.stop - rows.start, cols.start, cols.stop - cols.start)
    shift = relative.shift
    first, last = (0, 0) if shift is None else (int(x) for x in shift.aminmax())
    return state(least + first, most + last, relative.distances.lo, relative.distances.hi)


# --- windows: the distances of a tile, side by side ---


def window(relative: Relative, first: int, width: int) -> Tensor:
    """(..., rows, width): what each row of values has for ``j - i = first .. first + width - 1``, by operations that
    autograd differentiates.

    The gradient of the values is deterministic: without a gather it is a copy and, of a clamped end, a sum; and a
    gather is the one whose transpose adds in a fixed order, see `_take`.
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
    # All of them as they are: a part's gradient would be copied into zeros.
    whole = none_beyond and isinstance(middle, int) and middle == values.shape[-1]
    inner = values if whole else values.narrow(-1, start, middle)
    if distances.reverse:
        inner = inner.flip(-1)
    if none_beyond:
        return inner
    return torch.cat([_beyond(relative, False, left), inner, _beyond(relative, True, right)], -1)


def add_window(accumulator: Tensor, gradient: Tensor, relative: Relative, first: int) -> None:
    """`window` backwards: add the gradient of a window to ``accumulator``, which has the rows of values it was made of.

    Leading axes along which the accumulator has size 1 are summed over. What is outside goes to the two ends where they
    are clamped, and nowhere else.
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
    """Of ``width`` distances from ``least`` on: how many lie below those with an entry, the first entry of those inside
    and their number, how many lie above. Of integers that a compiler may not know yet."""
    left = smaller(larger(distances.lo - least, 0), width)
    right = smaller(larger(least + width - 1 - distances.hi, 0), width)
    start = smaller(larger(least - distances.lo, 0), distances.count)
    middle = width - left - right
    return left, distances.count - start - middle if distances.reverse else start, middle, right


def _end(relative: Relative, high: bool) -> int:
    """Where the entry of the least or of the largest distance stands; without buckets."""
    return relative.distances.count - 1 if high != relative.distances.reverse else 0


def _beyond(relative: Relative, high: bool, width: int) -> Tensor:
    """(..., rows, width): what distances beyond the entries have."""
    values, outside = relative.values, relative.distances.outside
    if outside == "clamp":
        return values.narrow(-1, _end(relative, high), 1).expand(*values.shape[:-1], width)
    return values.new_full((*values.shape[:-1], width), 0.0 if outside == "zero" else -torch.inf)


def _entries(relative: Relative, first: int, width: int) -> tuple[Tensor, Tensor]:
    """For ``j - i = first .. first + width - 1`` the entry of each, that of the nearest end outside, and whether it is
    inside: (1, ..., 1, width), or (n, 1, ..., width) with n shifts."""
    device, lead = relative.values.device, relative.values.dim() - 2
    distance = torch.arange(first, first + width, device=device)
    if relative.shift is not None:
        distance = distance + relative.shift.view(-1, *[1] * (lead + 1))
    return _entry_of(relative, distance)


def _entry_of(relative: Relative, distance: Tensor) -> tuple[Tensor, Tensor]:
    """The entry of each distance, of the nearest end outside, and whether it is inside."""
    distances = relative.distances
    entry = distance - distances.lo
    inside = (entry >= 0) & (entry < distances.count)
    entry = entry.clamp(0, distances.count - 1)
    if distances.reverse:
        entry = distances.count - 1 - entry
    return entry if relative.buckets is None else relative.buckets[entry], inside


def _take(values: Tensor, index: Tensor) -> Tensor:
    """``values[..., index]`` (..., rows, width), differentiable, with a gradient that adds in a fixed order.

    On the CPU `torch.gather` has such a gradient, scatter_add, but not indexing, whose threads add by turns; on a GPU
    it is the other way round.
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
    """The view (..., rows, rows + R - 1) of values (..., rows, R) whose element (r, c) is entry ``c - r`` of row r.

    So entries stand at column ``c = j + shift - lo`` for axis "query", whatever the shift: an ordinary tile of this
    view is a tile of the bias. It holds where ``0 <= c - r < R``; elsewhere other rows' values show. The view stays
    within the memory of the values, and TMA reads it where its row stride, the values' less 1, is a multiple of 16
    bytes: the layout that `tilewise.bias.relative_logits` makes.

    Raises:
        ValueError: rows that overlap or whose elements are apart.
    """
    rows, R = values.shape[-2:]
    step, one = values.stride()[-2:]
    if (one != 1 and R > 1) or (step < R and rows > 1):
        raise ValueError(f"values: expected rows of contiguous elements, got strides {(step, one)} with {R} entries")
    size, strides = (*values.shape[:-1], rows + R - 1), (*values.stride()[:-2], step - 1, 1)
    return values.as_strided(size, strides, values.storage_offset())


def tile(relative: Relative, rows: slice, cols: slice) -> Tensor | None:
    """What the scores of queries ``rows`` and keys ``cols`` get added, in the values' dtype; None: nothing.

    Broadcastable to (..., rows, cols): a clamped tile is constant along one axis, a hidden one is -inf alone. Of a tile
    inside, ascending values per query are not copied.
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
    # Columns descend with the distance: for a key as the queries ascend, for a Toeplitz matrix in its rows from below.
    if distances.axis == "key":
        return _skew(laid.flip(-1), height).mT
    laid = laid.contiguous()
    return laid.as_strided((*laid.shape[:-2], height, width), (*laid.stride()[:-2], 1, 1)).flip(-2)


def add_gradient(accumulator: Tensor, gradient: Tensor, relative: Relative, rows: slice, cols: slice) -> None:
    """`tile` backwards: add dS (..., rows, cols) of a tile to ``accumulator``, which has the shape of the values.

    Both in float32 (float64 for float64 inputs). Leading axes along which the accumulator has size 1 are summed over. A
    sum along diagonals: the tile is skewed, so that each distance has a column, and columns are what is added.
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
    """Return a gradient of ``FOLD`` rows with the same sums along diagonals: every block of rows is added to the first,
    as many columns before it as its rows are below. To skew the whole tile takes seven times as long."""
    width, blocks = gradient.shape[-1], gradient.split(FOLD, -2)
    found = gradient.new_zeros(*gradient.shape[:-2], FOLD, width + FOLD * (len(blocks) - 1))
    for n, block in enumerate(reversed(blocks)):
        found[..., : block.shape[-2], FOLD * n : FOLD * n + width] += block
    return found


def _is_plain(relative: Relative) -> bool:
    """Whether `skewed` values are the bias: one ascending row a query, contiguous, and a shift that is known."""
    values, distances = relative.values, relative.distances
    return (
        distances.axis == "query" and not distances.reverse and relative.buckets is None
        and relative.shift is None
        and (values.stride(-1) == 1 or values.shape[-1] == 1)
        and (values.stride(-2) >= values.shape[-1] or values.shape[-2] == 1)
    )  # fmt: skip


def _part_of_skewed(own: Relative, rows: slice, cols: slice) -> Tensor:
    """The tile of `skewed` values of a tile of scores inside; no two of its elements share memory."""
    begin = cols.start - rows.start - own.distances.lo
    return skewed(own.values)[..., begin : begin + cols.stop - cols.start]


def _own(relative: Relative, rows: slice, cols: slice) -> Relative:
    """With the rows of values that belong to a tile."""
    axis = relative.distances.axis
    part = rows if axis == "query" else cols if axis == "key" else slice(None)
    return relative._replace(values=relative.values[..., part, :])


def _skew(laid: Tensor, width: int) -> Tensor:
    """(..., rows, width) of windows (..., rows, rows + width - 1): each row begins one column before the row above.

    The view is written through too; elements of it never share memory.
    """
    laid = laid.contiguous()
    rows, W = laid.shape[-2:]
    size, strides = (*laid.shape[:-1], width), (*laid.stride()[:-2], W - 1, 1)
    return laid.as_strided(size, strides, laid.storage_offset() + rows - 1)


# --- whole matrices, for the reference and for tests ---


def gather(relative: Relative, M: int, N: int) -> Tensor:
    """The whole bias (B|1, H|Hkv|1, M, N) in the values' dtype, by definition: one gather."""
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
    """`gather` backwards: the gradient of the values, in their shape, from that of all scores (B, H, M, N), whose dtype
    it has."""
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
    """The entry of each pair, (B|1, 1, M, N), and whether it is inside."""
    device = relative.values.device
    distance = (torch.arange(N, device=device) - torch.arange(M, device=device)[:, None])[None, None]
    return _entry_of(relative, distance if relative.shift is None else distance + relative.shift.view(-1, 1, 1, 1))
