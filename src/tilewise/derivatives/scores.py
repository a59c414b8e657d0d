"""Tiles of scores and of their tangents, by the heads of a group: (batch, Hkv, G, rows, cols).

Numbers are float32, or float64 for float64 inputs. A tile is the largest buffer: none grows with M·N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, lse_dtype
from tilewise.backends.protocol import Tangents
from tilewise.spec import dropout, reference
from tilewise.spec.problem import Problem
from tilewise.spec.relative import Relative
from tilewise.spec.relative import tile as relative_tile
from tilewise.spec.tiles import key_tiles, limits
from tilewise.spec.visibility import HIDDEN

BLOCK = 512  # queries and keys of a tile
SCORES = 1 << 22  # of a tile, unless one batch element has more


class ScoreTile(NamedTuple):
    """Scores of some queries and keys, and their tangents; None is zero.

    k, v: (batch, Hkv, cols, D or Dv).
    product: tangent of the scaled product. capped: the product after the softcap.
    scores: with the biases, -inf where hidden. tangent: of the scores, 0 where hidden; broadcasts.
    visible: bool, None if all pairs are. kept: dropout's factors, None without dropout.
    """

    rows: slice
    cols: slice
    k: Tensor
    k_tangent: Tensor | None
    v: Tensor
    v_tangent: Tensor | None
    product: Tensor | None
    capped: Tensor
    scores: Tensor
    tangent: Tensor | None
    visible: Tensor | None
    kept: Tensor | None


class BatchBlock:
    """Some batch elements of a dense call, and tangents of its operands."""

    def __init__(self, problem: Problem, inputs: Inputs, tangents: Tangents, batch: slice) -> None:
        self.problem, self.inputs, self.batch = problem, inputs, batch
        self.dtype = lse_dtype(problem.dtype)
        self.q, self.q_tangent = self.of(inputs.q), self.maybe(tangents.q)
        keys = (inputs.k, tangents.k, inputs.v, tangents.v)
        self.keys = [None if x is None else x[batch].to(self.dtype) for x in keys]
        self.sink, self.sink_tangent = (
            None if x is None else self.of(x.unsqueeze(-1)) for x in (inputs.sink, tangents.sink)
        )  # fmt: skip
        self.added: list[tuple[Tensor, Tensor | None]] = []  # biases that broadcast
        self.relatives: dict[str, tuple[Relative, Relative | None]] = {}
        if inputs.bias is not None:
            tangent = None if tangents.bias is None else self.of_bias(tangents.bias)
            self.added.append((self.of_bias(inputs.bias), tangent))
        if inputs.parts is not None:
            self.added += [(self.of(x), self.maybe(getattr(tangents, name))) for name, x in inputs.parts.vectors()]
            for name, relative in inputs.parts.relatives(problem.score, problem.queries):
                self.relatives[name] = self._relative(relative, getattr(tangents, name))
        hides = not problem.score.band.unlimited or problem.mask is not None or self.added or self.relatives
        # 0 · NaN = NaN: products exclude hidden keys and values that are not finite, which takes longer.
        self.careful = bool(hides) and not all(bool(x.isfinite().all()) for x in self.keys if x is not None)
        self.stream = self._stream()

    def of(self, x: Tensor) -> Tensor:
        """View these batch elements of (B|1, H|Hkv|1, ...) as (batch|1, Hkv|1, G|1, ...).

        A mask that repeats along the batch is copied."""
        p = self.problem
        x = x.unflatten(1, (p.kv_heads, p.group)) if x.shape[1] == p.heads else x.unsqueeze(2)
        if x.shape[0] in (1, p.batch):
            return x if x.shape[0] == 1 else x[self.batch]
        return x[torch.arange(self.batch.start, self.batch.stop, device=x.device) % x.shape[0]]

    def of_bias(self, x: Tensor) -> Tensor:
        """View the bias, or its gradient, as `of`; `blocks` are within a run of batch elements that share one."""
        if self.problem.bias_in_runs:
            run = self.batch.start * x.shape[0] // self.problem.batch
            x = x[run : run + 1]
        return self.of(x)

    def maybe(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.of(x)

    def _relative(self, x: Relative, tangent: Tensor | None) -> tuple[Relative, Relative | None]:
        """Return a relative position bias of these batch elements, and its tangent, which hides nothing."""
        shift = x.shift if x.shift is None or x.shift.shape[0] == 1 else x.shift[self.batch]
        own = x._replace(values=self.of(x.values), shift=shift)
        if tangent is None:
            return own, None
        outside = "zero" if x.distances.outside == "hidden" else x.distances.outside
        return own, own._replace(values=self.of(tangent), distances=replace(x.distances, outside=outside))

    def _stream(self) -> dropout.Stream | None:
        p, seed = self.problem, self.inputs.seed
        if seed is None:
            return None
        b = torch.arange(self.batch.start, self.batch.stop, device=seed.device) + p.sequence
        h = torch.arange(p.heads, device=seed.device) + p.score.origin.head
        return dropout.stream(seed, b.view(-1, 1, 1, 1, 1), h.view(p.kv_heads, p.group, 1, 1))

    def row_blocks(self) -> list[slice]:
        return [slice(m, min(m + BLOCK, self.problem.queries)) for m in range(0, self.problem.queries, BLOCK)]

    def rows(self, x: Tensor | None, rows: slice) -> Tensor | None:
        """Return the rows of (batch, Hkv, G, M|1, ...) in the dtype of sums."""
        return None if x is None else (x if x.shape[3] == 1 else x[:, :, :, rows]).to(self.dtype)

    def tiles(self, rows: slice) -> Iterator[ScoreTile]:
        """Yield the tiles of scores that ``rows`` may see."""
        p = self.problem
        q, q_tangent = self.rows(self.q, rows), self.rows(self.q_tangent, rows)
        begin, full_begin, full_end, end = key_tiles(
            rows.start, rows.stop - rows.start, p.keys, *limits(p.score.band), BLOCK
        )
        for j in range(begin, end):
            cols = slice(j * BLOCK, min((j + 1) * BLOCK, p.keys))
            if not self._is_empty(rows, cols):
                assert q is not None
                visible = self._visible(rows, cols, cuts=not full_begin <= j < full_end)
                yield self._tile(q, q_tangent, rows, cols, visible)

    def _is_empty(self, rows: slice, cols: slice) -> bool:
        """True if a tile mask hides all pairs."""
        tiles = self.inputs.tiles
        if tiles is None or tiles.tiles is None:
            return False
        return tiles.state(tiles.within(self.of(tiles.tiles), rows, cols)) == HIDDEN

    def _visible(self, rows: slice, cols: slice, cuts: bool) -> Tensor | None:
        """Return the visible pairs, None for all. cuts: the band may hide some."""
        found, tiles = None, self.inputs.tiles
        if cuts:
            i, j = (torch.arange(x.start, x.stop, device=self.inputs.q.device) for x in (rows, cols))
            found = reference.in_band(i[:, None], j, self.problem.score.band)
        if tiles is not None and tiles.tiles is not None:
            within = tiles.within(self.of(tiles.tiles), rows, cols)
            seen = tiles.visible(within, self.maybe(tiles.begins), self.maybe(tiles.ends), rows, cols)
            found = seen if found is None else found & seen
        if self.inputs.mask is not None:
            seen = cut(self.of(self.inputs.mask), rows, cols)
            found = seen if found is None else found & seen
        return found

    def _tile(
        self, q: Tensor, q_tangent: Tensor | None, rows: slice, cols: slice, visible: Tensor | None
    ) -> ScoreTile:  # fmt: skip
        score = self.problem.score
        k, k_tangent, v, v_tangent = (None if x is None else x[:, :, cols] for x in self.keys)
        assert k is not None
        assert v is not None
        capped = reference.transform(score.scale * products(q, k), score)
        product = None if q_tangent is None else score.scale * products(q_tangent, k)
        product = plus(product, None if k_tangent is None else score.scale * products(q, k_tangent))
        slope = reference.transform_derivative(capped, score)
        tangent = product if slope is None or product is None else slope * product
        s = capped
        for x, x_tangent in self._biases(rows, cols):
            s = s + x
            tangent = plus(tangent, x_tangent)
            if self.careful:
                visible = x != -torch.inf if visible is None else visible & (x != -torch.inf)
        if visible is not None:
            s = torch.where(visible, s, -torch.inf)
            tangent = None if tangent is None else torch.where(visible, tangent, 0.0)
        kept = self._kept(rows, cols)
        return ScoreTile(rows, cols, k, k_tangent, v, v_tangent, product, capped, s, tangent, visible, kept)

    def _biases(self, rows: slice, cols: slice) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield what is added to a tile of scores, with its tangent."""
        for x, tangent in self.added:
            yield (
                cut(x, rows, cols).to(self.dtype),
                (None if tangent is None else cut(tangent, rows, cols).to(self.dtype)),
            )
        for relative, other in self.relatives.values():
            found = relative_tile(relative, rows, cols)
            moved = None if other is None else relative_tile(other, rows, cols)
            if found is not None:
                yield found.to(self.dtype), None if moved is None else moved.to(self.dtype)

    def _kept(self, rows: slice, cols: slice) -> Tensor | None:
        if self.stream is None:
            return None
        threshold, at = self.problem.score.dropout, self.problem.score.origin
        i, j = slice(rows.start + at.query, rows.stop + at.query), slice(cols.start + at.key, cols.stop + at.key)
        return dropout.kept_tile(self.stream, i, j, threshold).to(self.dtype) * dropout.weight(threshold)

    def weighted(self, p: Tensor, x: Tensor, tile: ScoreTile) -> Tensor:
        """Return ``p @ x`` for weights of a tile and its keys or values, or their tangents."""
        if not self.careful or tile.visible is None:
            return torch.einsum("bhgmn,bhnd->bhgmd", p, x)
        return reference.visible_product(p, tile.visible.expand_as(p), x.unsqueeze(2))


def blocks(problem: Problem, inputs: Inputs, tangents: Tangents) -> Iterator[BatchBlock]:
    """Yield the batch in blocks, whose tiles have about `SCORES` elements."""
    size = problem.heads * min(BLOCK, problem.queries) * min(BLOCK, problem.keys)
    step = max(SCORES // max(size, 1), 1)
    runs = problem.bias.batch if problem.bias is not None and problem.bias_in_runs else 1
    length = problem.batch // runs
    for first in range(0, problem.batch if problem.heads else 0, max(length, 1)):
        for b in range(first, first + length, step):
            yield BatchBlock(problem, inputs, tangents, slice(b, min(b + step, first + length)))


def products(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x @ y.mT`` for rows of queries (batch, Hkv, G, rows, D) and of keys (batch, Hkv, cols, D)."""
    return torch.einsum("bhgmd,bhnd->bhgmn", x, y)


def plus(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return the sum of two tensors, of which None is zero."""
    return y if x is None else x if y is None else x + y


def cut(x: Tensor, rows: slice, cols: slice) -> Tensor:
    """Return the part of (..., M|1, N|1) that a tile reads."""
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., cols]
