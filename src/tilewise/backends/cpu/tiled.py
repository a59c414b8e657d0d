"""Attention tile by tile in plain torch: FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2, with bias and masks.

A tile holds scores in float32 (float64 for float64 inputs), whatever the inputs' dtype, and so do all sums. No buffer
grows with M·N. The query heads of a group are stacked as rows of one tile, so that K and V are never repeated, and
several key/value heads share a tile when the sequences are short.

A plain product lets NaN and infinity in a hidden value through (0 · nan = nan). So it is tried first, and where it
gives something that is not finite, careful tiles, several times slower, find out what was visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_low_bits, empty_output, lse_dtype
from tilewise.backends.cpu import jobs, workers
from tilewise.backends.cpu.dbias import dbias_sum, empty_dbias, is_full
from tilewise.backends.cpu.jobs import Found, Heads, Job, KeyTiles, Sums
from tilewise.backends.cpu.parts import (
    band_hides,
    exp_difference,
    exp_of_maxima,
    finite,
    hide,
    is_coarse,
    keep_freed_tiles,
    product,
)
from tilewise.spec import dropout, reference, visibility
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.problem import Problem
from tilewise.spec.relative import Relative, add_gradient, tile_kind
from tilewise.spec.relative import tile as relative_tile
from tilewise.spec.rounding import low_bits, with_low_bits
from tilewise.spec.tiles import key_tiles, limits

# A float32 tile of this size is the 1 MiB that a core's own cache holds; more threads share a higher tile.
BLOCK_M, BLOCK_N, MAX_BLOCK_M = 512, 512, 2048
SMALL = 1 << 16  # scores: for fewer it takes as long to wake a worker


class Tiling(NamedTuple):
    """``heads`` key/value heads (T), ``rows`` queries of each query head of their groups, ``cols`` keys."""

    heads: int
    rows: int
    cols: int


def tiling(problem: Problem) -> Tiling:
    block_m = min(BLOCK_M * workers.threads_each(), MAX_BLOCK_M)
    most_rows, most_cols, alike = max(block_m // problem.group, 1), BLOCK_N, problem.batch * problem.kv_heads
    mask, of = problem.mask, problem.tile_mask
    if mask is not None and of is not None:  # a larger tile is hidden less often; heads with the same mask share one
        most_rows, most_cols = min(most_rows, of.block_m), min(most_cols, of.block_n)
        alike = 1 if mask.heads > 1 else problem.kv_heads if mask.batch > 1 else alike
    rows, cols = min(most_rows, problem.queries), min(most_cols, problem.keys)
    size = problem.group * rows * cols
    heads = 1 if size >= BLOCK_M * BLOCK_N else max(block_m * BLOCK_N // size, 1)
    every, parts = problem.batch * problem.kv_heads, _parts(problem)
    heads = min(heads, alike, -(-every // parts))  # a tile for each worker: of fewer heads, or of fewer rows
    if of is None and every < parts:
        rows = min(rows, -(-problem.queries * every // parts))
    return Tiling(heads, rows, cols)


def _parts(problem: Problem) -> int:
    """Return for how many workers the problem has enough scores."""
    scores = problem.batch * problem.heads * problem.queries * problem.keys
    return max(min(workers.count(), scores // SMALL), 1)


class _TiledCall(NamedTuple):
    """What all heads of a call share. ``stream``: the words of dropout, (B, Hkv, G, 1, 1)."""

    problem: Problem
    inputs: Inputs
    size: Tiling
    stream: dropout.Stream | None

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs) -> _TiledCall:
        return cls(problem, inputs, tiling(problem), _stream(problem, inputs.seed))

    def all_heads(self) -> list[Heads]:
        """(batches, key/value heads), as many as share a tile: of one batch, or all heads of several batches."""
        B, Hkv, T = self.problem.batch, self.problem.kv_heads, self.size.heads
        batches, heads = max(T // Hkv, 1), min(T, Hkv)
        return [
            (slice(b, min(b + batches, B)), slice(h, min(h + heads, Hkv)))
            for b in range(0, B, batches)
            for h in range(0, Hkv, heads)
        ]

    def row_blocks(self) -> list[slice]:
        M, step = self.problem.queries, self.size.rows
        return [slice(m, min(m + step, M)) for m in range(0, M, step)]


def _stream(problem: Problem, seed: Tensor | None) -> dropout.Stream | None:
    if seed is None:
        return None
    origin = problem.score.origin
    b = torch.arange(problem.sequence, problem.sequence + problem.batch, device=seed.device)
    h = torch.arange(origin.head, origin.head + problem.heads, device=seed.device)
    return dropout.stream(seed, b.view(-1, 1, 1, 1, 1), h.view(problem.kv_heads, problem.group, 1, 1))


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    o = empty_output(inputs.q, problem.value_dim)
    lse = inputs.q.new_empty(o.shape[:3], dtype=lse_dtype(o.dtype))
    outputs = Outputs(o, lse, empty_low_bits(o, problem))
    keep_freed_tiles()
    call = _TiledCall.of(problem, inputs)
    every = call.all_heads()
    turns = jobs.turns(len(every), len(call.row_blocks()), 2 * _parts(problem))
    parts = [Job([kv], turn, turns) for kv in every for turn in range(turns)]
    workers.run([partial(_forward_job, call, outputs, job) for job in parts])
    return outputs


def _forward_job(call: _TiledCall, outputs: Outputs, job: Job) -> None:
    for kv in job.heads:
        heads = _Heads(call, kv)
        for rows in job.of(call.row_blocks()):
            o_i, m_i, l_i = _attend(heads, rows, careful=False)
            if heads.hides and not finite(o_i):
                o_i, m_i, l_i = _attend(heads, rows, careful=True)
            heads.put_rows(outputs.o, rows, o_i)
            assert outputs.lse is not None
            heads.put_rows(outputs.lse, rows, m_i + l_i.log())  # 13
            if outputs.o_low is not None:
                heads.put_rows(outputs.o_low, rows, low_bits(o_i, o_i.to(outputs.o.dtype)))


def _attend(heads: _Heads, rows: slice, careful: bool) -> tuple[Tensor, Tensor, Tensor]:
    """O, m and l of a block of rows: Algorithm 1, whose lines the comments number."""
    q = heads.rows(heads.inputs.q, rows) * heads.problem.score.scale  # 4
    m_i = q.new_full((*q.shape[:2], 1), -torch.inf)  # 5
    l_i = torch.zeros_like(m_i)
    acc = q.new_zeros(*q.shape[:2], heads.problem.value_dim)
    for tile in heads.tiles(rows, careful):  # 6, 7
        s, _ = heads.score_tile(q, tile)  # 8
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))  # 9
        p = exp_difference(s, m_new)
        alpha = exp_of_maxima(m_i, m_new)
        l_i = alpha * l_i + p.sum(-1, keepdim=True)
        acc = heads.weighted_sum(heads.with_dropout(p, tile), heads.v[tile.j], tile, alpha * acc)  # 10
        m_i = m_new
    if heads.inputs.sink is not None:  # one more score, and no value
        sink = heads.sink(rows)
        m_new = torch.maximum(m_i, sink)
        alpha = exp_of_maxima(m_i, m_new)
        l_i = alpha * l_i + exp_difference(sink.clone(), m_new)  # it may be the caller's own memory
        acc, m_i = acc.mul_(alpha), m_new
    l_i.masked_fill_(l_i == 0, 1.0)  # rows that see nothing: O = 0, LSE = -inf
    return acc / l_i, m_i, l_i  # 12


class _Backward(NamedTuple):
    """What the backward has besides, and where its gradients go."""

    call: _TiledCall
    outputs: Outputs
    cotangents: Outputs
    want: Gradients
    part_sums: dict[str, Tensor]


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    dq, dk, dv = (torch.empty_like(x) if need else None for x, need in zip(inputs[:3], needs[:3], strict=True))
    want = Gradients(dq, dk, dv, empty_dbias(problem, inputs) if needs.bias else None)
    keep_freed_tiles()
    call = _TiledCall.of(problem, inputs)
    work = _Backward(call, outputs, cotangents, want, _part_sums(problem, inputs, needs))
    blocks = len(call.row_blocks())
    pieces = jobs.pieces(call.all_heads(), blocks, _parts(problem), want.bias, work.part_sums)
    found = iter(workers.run([partial(_backward_job, work, job) for turns in pieces for job in turns]))
    workers.run(jobs.puts([[next(found) for _ in turns] for turns in pieces], want, call.size.cols))
    if not work.part_sums:
        return want
    return want._replace(**{name: x.to(getattr(inputs.parts, name).dtype) for name, x in work.part_sums.items()})


def _backward_job(work: _Backward, job: Job) -> Found:
    call, want, dbias = work.call, work.want, work.want.bias
    found = Found([], Sums())
    own_bias = dbias is not None and (job.shared or (job.turns > 1 and dbias.shape[2] == 1))
    for kvs in jobs.groups(job.heads, () if dbias is None else (dbias,)):
        parts = [_Part(work, job, kv, found.sums) for kv in kvs]
        total = None
        for rows in job.of(call.row_blocks()):
            if dbias is not None:
                place = parts[0].heads.operand_rows(dbias, rows)
                if own_bias:
                    total = found.sums.of("bias", place, lse_dtype(call.problem.dtype))
                else:
                    total = dbias_sum(call.problem, place, total, dbias)
            for part in parts:
                _attend_backward(part, rows, work.outputs, work.cotangents, want, total)
            if total is not None and total is not place and not own_bias:
                place.copy_(total)
        if job.turns > 1:
            found.keys.extend(part.tiles for part in parts)
        else:
            for part in parts:
                jobs.put_keys(want, call.size.cols, [part.tiles])
    return found


def _part_sums(problem: Problem, inputs: Inputs, needs: Needs) -> dict[str, Tensor]:
    """By the names of those parts that need a gradient, where it is summed: in the tiles' dtype."""
    if inputs.parts is None:
        return {}
    dtype = lse_dtype(problem.dtype)
    return {name: torch.zeros_like(getattr(inputs.parts, name), dtype=dtype) for name in needs.parts}


class _Part:
    """Some heads in a job of the backward. ``sums``: where the gradients of bias parts are summed, by their names."""

    def __init__(self, work: _Backward, job: Job, kv: Heads, sums: Sums) -> None:
        self.heads = _Heads(work.call, kv)
        self.careful = self.heads.hides and not all(finite(x) for x in (*self.heads.k, *self.heads.v))
        self.tiles = KeyTiles(kv, [None] * len(self.heads.k), [None] * len(self.heads.v))
        self.sums = {}
        for name, x in work.part_sums.items():
            place = self.heads.of_heads(x)
            own = job.shared or (job.turns > 1 and name not in jobs.BY_ROWS)
            self.sums[name] = sums.of(name, place, x.dtype) if own else place


def _attend_backward(
    part: _Part, rows: slice, outputs: Outputs, cotangents: Outputs, want: Gradients, dbias: Tensor | None
) -> None:
    """Gradients of a block of rows: Algorithm 2 with its loops exchanged, so that dQ too is written once."""
    heads, (_, dk, dv) = part.heads, part.tiles
    scale = heads.problem.score.scale
    q = heads.rows(heads.inputs.q, rows) * scale
    do = heads.rows(cotangents.o, rows)
    lse, delta = heads.row_terms(outputs, cotangents, rows)
    row, total, fully_masked = lse, None, None
    if heads.hides and (lse == -torch.inf).any():
        # 0 · NaN: what a fully masked query holds, and the gradient of its output, take no part.
        fully_masked = lse == -torch.inf
        q, do = q.masked_fill(fully_masked, 0.0), do.masked_fill(fully_masked, 0.0)
    if is_coarse(lse):
        # The rounding of m + log(l) is an error of every P; where all keys have a bias of -1e9 only m is left of it.
        _, row, total = _attend(heads, rows, part.careful)
    q_t, do_t = (x.mT.contiguous() if x.shape[0] == 1 else None for x in (q, do))
    dq = None
    for tile in heads.tiles(rows, part.careful):
        s, capped = heads.score_tile(q, tile)
        p = heads.only_visible(exp_difference(s, row), tile)
        if total is not None:
            p.div_(total)
        if fully_masked is not None:
            p.masked_fill_(fully_masked, 0.0)
        z = heads.kept(tile)
        if want.v is not None:
            dv[tile.j] = _add_over_rows(dv[tile.j], p if z is None else p * z, do, do_t)
        if want.q is None and want.k is None and dbias is None and not part.sums:
            continue
        dp = product(do, heads.v[tile.j].mT)
        if z is not None:
            dp.mul_(z)
        ds, db = heads.score_tile_gradient(p, dp, delta, capped, tile)
        if dbias is not None:
            heads.add_to_bias(dbias, tile, db)
        if part.sums:
            heads.add_to_parts(part.sums, tile, db)
        if want.q is not None:
            dq = heads.weighted_sum(ds, heads.k[tile.j], tile, dq)
        if want.k is not None:
            dk[tile.j] = _add_over_rows(dk[tile.j], ds, q, q_t)
    if want.q is not None:
        heads.put_rows(want.q, rows, None if dq is None else dq.mul_(scale))


def _add_over_rows(total: Tensor | None, p: Tensor, x: Tensor, x_t: Tensor | None) -> Tensor:
    """``total + p.mT @ x``, (T, cols, D), in the place of ``total``.

    A large product is fastest when its first factor is contiguous along the sum: then ``x_t`` is ``x`` transposed in
    memory, and the sum lies so too. Of several small ones transposing takes longer than it saves.
    """
    if x_t is None:
        return product(p.mT, x, total)
    return product(x_t, p, None if total is None else total.mT).mT


class _Tile(NamedTuple):
    """Tile ``j`` of some rows. ``visible`` broadcasts to (batches, heads, G, rows, cols); None: every pair is.

    When ``careful``, ``visible`` is always given, and a bias of -inf hides like a mask.
    """

    rows: slice
    j: int
    visible: Tensor | None
    careful: bool


class _Heads:
    """T key/value heads with the G query heads of each one's group: their part of the inputs, tile by tile.

    A tile of scores is (T, R, cols), R = G·rows: the queries of a group's heads, one head after the other. A tile of q
    or do is (T, R, D), one of k or v (T, cols, D).
    """

    def __init__(self, call: _TiledCall, kv: Heads) -> None:
        problem, inputs, size, stream = call
        batches, heads = kv
        self.problem, self.inputs = problem, inputs
        self.dtype = lse_dtype(problem.dtype)
        self.tiling = size
        self.kv = (batches, heads)
        self.grid = (batches.stop - batches.start, heads.stop - heads.start, problem.group)
        self.k, self.v = self._key_tiles(inputs.k), self._key_tiles(inputs.v)
        self.band_hides = band_hides(problem)
        self.vectors, self.relatives = self._parts()
        self.stream = None if stream is None else dropout.Stream(*(x[self.kv] for x in stream))
        self.tile_states = self._tile_states()
        shows_all = inputs.bias is None and problem.mask is None and inputs.parts is None
        self.hides = self.band_hides or not shows_all

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Relative]]:
        """Of these heads what is added to the scores beside the bias: along the keys or queries, and by distance."""
        parts, score = self.inputs.parts, self.problem.score
        if parts is None:
            return {}, {}
        relatives = {}
        for name, x in parts.relatives(score, self.problem.queries):
            shift = x.shift if x.shift is None or x.shift.shape[0] == 1 else x.shift[self.kv[0]]
            relatives[name] = x._replace(values=self.of_heads(x.values), shift=shift)
        return {name: self.of_heads(x) for name, x in parts.vectors()}, relatives

    def _tile_states(self) -> list[list[int]] | None:
        """What a mask by tiles leaves of each tile, where its tiles are those of here: read at once, not one by one."""
        x, p = self.inputs.tiles, self.problem
        if x is None or x.tiles is None or (self.tiling.rows, self.tiling.cols) != (
            min(x.block[0], p.queries), min(x.block[1], p.keys)
        ):  # fmt: skip
            return None
        return x.states(self.of_heads(x.tiles))

    def _key_tiles(self, x: Tensor) -> list[Tensor]:
        blocks = x[self.kv].split(self.tiling.cols, dim=2)
        return [block.flatten(0, 1).to(self.dtype).contiguous() for block in blocks]

    def _row_block(self, x: Tensor, rows: slice) -> Tensor:
        """View of (B, H, M, ...) as (batches, heads, G, rows, ...)."""
        return x.unflatten(1, (self.problem.kv_heads, self.problem.group))[(*self.kv, slice(None), rows)]

    def rows(self, x: Tensor, rows: slice, low: Tensor | None = None) -> Tensor:
        """The tile of q, o or do; of what was rounded to 16 bits with the bits that this took."""
        tile, low = (None if y is None else self._row_block(y, rows).flatten(2, 3).flatten(0, 1) for y in (x, low))
        assert tile is not None
        return with_low_bits(tile, low).to(self.dtype).contiguous()

    def sink(self, rows: slice) -> Tensor:
        """(T, R, 1); a view where it can be."""
        assert self.inputs.sink is not None
        return self.rows(self.inputs.sink.expand(self.inputs.q.shape[:3]).unsqueeze(-1), rows)

    def put_rows(self, x: Tensor, rows: slice, tile: Tensor | None) -> None:
        """Write a tile to (B, H, M, D), or (T, R, 1) to (B, H, M); None: zeros."""
        place = self._row_block(x, rows)
        if tile is None:
            place.zero_()
        else:
            place.copy_(tile.view(place.shape))

    def row_terms(self, outputs: Outputs, cotangents: Outputs, rows: slice) -> tuple[Tensor, Tensor]:
        """LSE and ``D = rowsum(dO∘O) - dLSE``, (T, R, 1); a row that sees nothing has no gradient: its D is 0."""
        assert outputs.lse is not None
        lse = self.rows(outputs.lse.unsqueeze(-1), rows)
        delta = (self.rows(cotangents.o, rows) * self.rows(outputs.o, rows, outputs.o_low)).sum(-1, keepdim=True)
        if cotangents.lse is not None:
            delta -= self.rows(cotangents.lse.unsqueeze(-1), rows)
        return lse, delta.masked_fill_(lse == -torch.inf, 0.0)

    def tiles(self, rows: slice, careful: bool) -> Iterator[_Tile]:
        """The tiles of which ``rows`` may see something."""
        band, step = self.problem.score.band, self.tiling.cols
        lo, hi = limits(band)
        begin, full_begin, full_end, end = key_tiles(
            rows.start, rows.stop - rows.start, self.problem.keys, lo, hi, step
        )
        for j in range(begin, end):
            visible, state = None, visibility.WHOLE
            if self.inputs.tiles is not None:
                state, visible = self._of_tile_mask(self.inputs.tiles, rows, j)
            elif self.inputs.mask is not None:
                visible = self._operand_tile(self.inputs.mask, rows, j)
                least, most = visible.view(torch.uint8).aminmax()  # far faster than all() and any()
                state = visibility.WHOLE if least else visibility.MIXED if most else visibility.HIDDEN
            if not visibility.visited(j, begin, end, state):
                continue
            if self.relatives and self._hidden_by_distance(rows, j):
                continue
            if state != visibility.MIXED:
                visible = None
            if careful or (self.band_hides and visibility.is_cut(j, full_begin, full_end)):
                row = torch.arange(rows.start, rows.stop, device=self.inputs.q.device)
                col = torch.arange(j * step, j * step + self.k[j].shape[1], device=self.inputs.q.device)
                seen = reference.in_band(row[:, None], col, band)
                visible = seen if visible is None else visible & seen
                if careful and self.inputs.bias is not None:
                    visible = visible & (self._operand_tile(self.inputs.bias, rows, j) != -torch.inf)
                for part in self._part_tiles(rows, j) if careful else ():
                    visible = visible & (part != -torch.inf)
            yield _Tile(rows, j, visible, careful)

    def _of_tile_mask(self, x: TileTensors, rows: slice, j: int) -> tuple[int, Tensor | None]:
        """What it leaves of a tile for these heads, and which pairs of one that is mixed."""
        assert x.tiles is not None
        state = None if self.tile_states is None else self.tile_states[rows.start // self.tiling.rows][j]
        if state in (visibility.HIDDEN, visibility.WHOLE):
            return state, None
        cols = self._keys(j)
        tiles = x.within(self.of_heads(x.tiles), rows, cols)
        if state is None:
            state = x.state(tiles)
        if state != visibility.MIXED:
            return state, None
        begins, ends = (None if y is None else self.of_heads(y) for y in (x.begins, x.ends))
        return state, x.visible(tiles, begins, ends, rows, cols)

    def _hidden_by_distance(self, rows: slice, j: int) -> bool:
        return any(tile_kind(x, rows, self._keys(j)) == "hidden" for x in self.relatives.values())

    def _part_tiles(self, rows: slice, j: int) -> Iterator[Tensor]:
        """What the parts add to a tile of scores; each broadcasts to (batches, heads, G, rows, cols)."""
        for x in self.vectors.values():
            yield self._cols(self._rows_of(x, rows), j)
        for relative in self.relatives.values():
            found = relative_tile(relative, rows, self._keys(j))
            if found is not None:
                yield found

    def _keys(self, j: int) -> slice:
        """The keys of tile ``j``."""
        begin = j * self.tiling.cols
        return slice(begin, begin + self.k[j].shape[1])

    def operand_rows(self, x: Tensor, rows: slice) -> Tensor:
        """View of what a bias, mask or bias gradient has for these heads and rows; broadcast axes have size 1.

        (batches, heads, G, rows, N).
        """
        x = self._by_group(x)
        where = (*self.kv, slice(None), rows)  # one view: a second one takes as long as the product of a small tile
        return x[tuple(slice(None) if size == 1 else part for part, size in zip(where, x.shape[:4], strict=True))]

    def _by_group(self, x: Tensor) -> Tensor:
        """View of (B|1, H|Hkv|1, ...) as (B|1, Hkv|1, G|1, ...)."""
        p = self.problem
        return x.unflatten(1, (p.kv_heads, p.group)) if x.shape[1] == p.heads else x.unsqueeze(2)

    def of_heads(self, x: Tensor) -> Tensor:
        """View of what (B|1, H|Hkv|1, ...) has for these heads: (batches, heads, G, ...), 1 where it broadcasts."""
        x = self._by_group(x)
        return x[tuple(slice(None) if size == 1 else part for part, size in zip(self.kv, x.shape[:2], strict=True))]

    def _rows_of(self, x: Tensor, rows: slice) -> Tensor:
        return x if x.shape[3] == 1 else x[:, :, :, rows]

    def _cols(self, x: Tensor, j: int) -> Tensor:
        """The columns of tile ``j``."""
        return x if x.shape[-1] == 1 else x[..., j * self.tiling.cols : (j + 1) * self.tiling.cols]

    def _operand_tile(self, x: Tensor, rows: slice, j: int) -> Tensor:
        """The part of a bias or mask that belongs to a tile of scores."""
        return self._cols(self.operand_rows(x, rows), j)

    def _over_heads(self, tile: Tensor) -> Tensor:
        """View of a tile of scores as (batches, heads, G, rows, cols)."""
        return tile.view(*self.grid, -1, tile.shape[-1])

    def score_tile(self, q: Tensor, tile: _Tile) -> tuple[Tensor, Tensor | None]:
        """Scores for q times the scale, -inf where hidden; and those before the bias, where it waits for a transform.

        The order is that of the pipeline: product, softcap, bias, mask. Without a transform the bias comes first: the
        product is accumulated onto it.
        """
        k, score, transformed, start = self.k[tile.j], self.problem.score, None, None
        if self.inputs.bias is not None:
            start = q.new_empty(*q.shape[:2], k.shape[1])
            self._over_heads(start).copy_(self._operand_tile(self.inputs.bias, tile.rows, tile.j))
        for part in () if self.inputs.parts is None else self._part_tiles(tile.rows, tile.j):
            if start is None:
                start = q.new_empty(*q.shape[:2], k.shape[1])
                self._over_heads(start).copy_(part)
            else:
                self._over_heads(start).add_(part)
        if not score.transformed:
            s = product(q, k.mT, start)
        else:
            transformed = reference.transform(product(q, k.mT), score)
            s = transformed.clone() if start is None else start.add_(transformed)
        if tile.visible is not None:
            hide(self._over_heads(s), tile.visible)
        return s, transformed

    def score_tile_gradient(
        self, p: Tensor, dp: Tensor, delta: Tensor, transformed: Tensor | None, tile: _Tile
    ) -> tuple[Tensor, Tensor]:
        """`score_tile` backwards, the softmax first: dS with respect to scale · q·k, and to the biased score, in the
        place of ``dp``."""
        db = self.only_visible(dp.sub_(delta).mul_(p), tile)  # reference.softmax_derivative
        if transformed is None:
            return db, db
        slope = reference.transform_derivative(transformed, self.problem.score)
        return (db if slope is None else self.only_visible(db * slope, tile)), db

    def only_visible(self, x: Tensor, tile: _Tile) -> Tensor:
        """``x`` with 0 at hidden pairs of a careful tile; in any other they are 0 or finite."""
        if not tile.careful or tile.visible is None:
            return x
        # No view: of what is visible in the memory order of a transposed mask the result may have that order.
        return torch.where(tile.visible, self._over_heads(x), 0.0).reshape(x.shape)

    def kept(self, tile: _Tile) -> Tensor | None:
        """What dropout multiplies a tile of probabilities by, (T, R, cols); None where there is none."""
        if self.stream is None:
            return None
        threshold, at = self.problem.score.dropout, self.problem.score.origin
        rows, keys = (
            slice(x.start + first, x.stop + first)
            for x, first in ((tile.rows, at.query), (self._keys(tile.j), at.key))
        )  # fmt: skip
        found = dropout.kept_tile(self.stream, rows, keys, threshold)
        # As bytes: to convert bools takes four times as long.
        found = found.view(torch.uint8).to(self.dtype).mul_(dropout.weight(threshold))
        return found.flatten(2, 3).flatten(0, 1)

    def with_dropout(self, p: Tensor, tile: _Tile) -> Tensor:
        """In the place of ``p``."""
        z = self.kept(tile)
        return p if z is None else p.mul_(z)

    def weighted_sum(self, p: Tensor, x: Tensor, tile: _Tile, start: Tensor | None) -> Tensor:
        """``start + p @ x`` in the place of ``start``; in a careful tile a hidden pair adds nothing, not even NaN."""
        if not tile.careful or tile.visible is None:
            return product(p, x, start)
        visible = tile.visible.expand_as(self._over_heads(p)).reshape(p.shape)
        out = reference.visible_product(p, visible, x)
        return out if start is None else start.add_(out)

    def add_to_bias(self, dbias: Tensor, tile: _Tile, db: Tensor) -> None:
        """``dBias = dB``, summed over the axes along which the bias broadcasts, in rows of `operand_rows`."""
        db, place = self._over_heads(db), self._cols(dbias, tile.j)
        assert self.inputs.bias is not None
        if is_full(self.problem, self.inputs.bias):
            place.copy_(db)
        else:
            place.add_(db.sum_to_size(place.shape))

    def add_to_parts(self, sums: dict[str, Tensor], tile: _Tile, db: Tensor) -> None:
        """The same for those parts that ``sums`` names; of a bias by distance a sum along diagonals."""
        db = self._over_heads(db)
        for name, total in sums.items():
            if name in self.relatives:
                add_gradient(total, db, self.relatives[name], tile.rows, self._keys(tile.j))
            else:
                place = self._cols(self._rows_of(total, tile.rows), tile.j)
                place.add_(db.sum_to_size(place.shape))
