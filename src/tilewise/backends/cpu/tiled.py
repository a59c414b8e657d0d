"""Attention by tiles in plain torch: FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2.

Scores and sums are float32 (float64 for float64 inputs). No buffer grows with M·N. The query heads of a group are
stacked as rows of one tile, so K and V are never repeated; for short sequences several key/value heads share a tile.

NaN and infinity in a hidden value pass through a plain product (0 · nan = nan). If the result of the plain product is
not finite, it is recomputed with careful tiles, which exclude hidden values and are several times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import (
    Gradients,
    Inputs,
    Needs,
    Outputs,
    empty_low_bits,
    empty_output,
    empty_statistics,
    lse_dtype,
)
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
from tilewise.backends.cpu.statistics import RowStatistics
from tilewise.spec import dropout, reference, visibility
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.problem import Problem
from tilewise.spec.relative import Relative, add_gradient, tile_kind
from tilewise.spec.relative import tile as relative_tile
from tilewise.spec.rounding import low_bits, with_low_bits
from tilewise.spec.tiles import key_tiles, limits

# A float32 tile of this size is 1 MiB, which fits a core's private cache; several threads share a taller tile.
BLOCK_M, BLOCK_N, MAX_BLOCK_M = 512, 512, 2048
MANY_HEADS = 4  # times that size, for tiles of several heads without a tile mask: a tile costs 0.8 ms of Python
SMALL = 1 << 16  # scores per worker at least: fewer take as long as waking a worker


class Tiling(NamedTuple):
    """Size of a tile."""

    heads: int  # key/value heads (T)
    rows: int  # queries of each query head in their groups
    cols: int  # keys


def tiling(problem: Problem) -> Tiling:
    block_m = min(BLOCK_M * workers.threads_each(), MAX_BLOCK_M)
    most_rows, most_cols, alike = max(block_m // problem.group, 1), BLOCK_N, problem.batch * problem.kv_heads
    mask, of = problem.mask, problem.tile_mask
    if mask is not None and of is not None:  # larger tiles are less often empty; heads must have the same mask
        most_rows, most_cols = min(most_rows, of.block_m), min(most_cols, of.block_n)
        alike = 1 if mask.heads > 1 else problem.kv_heads if mask.batch > 1 else alike
    rows, cols = min(most_rows, problem.queries), min(most_cols, problem.keys)
    size = problem.group * rows * cols
    most = block_m * BLOCK_N * (MANY_HEADS if of is None else 1)
    heads = 1 if size >= BLOCK_M * BLOCK_N else max(most // size, 1)
    every, parts = problem.batch * problem.kv_heads, _parts(problem)
    heads = min(heads, alike)
    if of is None:  # a tile for each worker: with fewer heads, else with fewer rows
        heads = min(heads, -(-every // parts))
        if every < parts:
            rows = min(rows, -(-problem.queries * every // parts))
    return Tiling(heads, rows, cols)


def _parts(problem: Problem) -> int:
    """Return the number of workers for which the problem has enough scores."""
    scores = problem.batch * problem.heads * problem.queries * problem.keys
    return max(min(workers.count(), scores // SMALL), 1)


class _TiledCall(NamedTuple):
    """Properties of a call that all heads share."""

    problem: Problem
    inputs: Inputs
    size: Tiling
    stream: dropout.Stream | None  # Philox words of dropout, (B, Hkv, G, 1, 1)
    shared: dict[tuple[int, int], _Heads]  # by first batch element and head; see `share`

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs) -> _TiledCall:
        return cls(problem, inputs, tiling(problem), _stream(problem, inputs.seed), {})

    def share(self, every: list[Heads]) -> None:
        """Prepare the tiles of K and V once for heads whose rows are divided among jobs."""
        self.shared.update({(kv[0].start, kv[1].start): _Heads(self, kv) for kv in every})

    def heads(self, kv: Heads) -> _Heads:
        return self.shared.get((kv[0].start, kv[1].start)) or _Heads(self, kv)

    def all_heads(self) -> list[Heads]:
        """Return the heads of each tile: some heads of one batch element, or all heads of several."""
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
    outputs = Outputs(o, lse, empty_low_bits(o, problem), empty_statistics(o, problem))
    keep_freed_tiles()
    call = _TiledCall.of(problem, inputs)
    every = call.all_heads()
    turns = jobs.turns(len(every), len(call.row_blocks()), 2 * _parts(problem))
    if turns > 1:
        call.share(every)
    parts = [Job([kv], turn, turns) for kv in every for turn in range(turns)]
    workers.run([partial(_forward_job, call, outputs, job) for job in parts])
    return outputs


def _forward_job(call: _TiledCall, outputs: Outputs, job: Job) -> None:
    for kv in job.heads:
        heads = call.heads(kv)
        for rows in job.of(call.row_blocks()):
            o_i, m_i, l_i, statistics = _attend(heads, rows, careful=False)
            if heads.hides and not finite(o_i):
                o_i, m_i, l_i, statistics = _attend(heads, rows, careful=True)
            heads.put_rows(outputs.o, rows, o_i)
            assert outputs.lse is not None
            heads.put_rows(outputs.lse, rows, m_i + l_i.log())  # 13
            if outputs.o_low is not None:
                heads.put_rows(outputs.o_low, rows, low_bits(o_i, o_i.to(outputs.o.dtype)))
            if outputs.statistics is not None:
                heads.put_rows(outputs.statistics, rows, statistics)


def _attend(heads: _Heads, rows: slice, careful: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return O, m, l and statistics of a block of rows. Comments number the lines of Algorithm 1."""
    q = heads.rows(heads.inputs.q, rows) * heads.problem.score.scale  # 4
    m_i = q.new_full((*q.shape[:2], 1), -torch.inf)  # 5
    l_i = torch.zeros_like(m_i)
    acc = q.new_zeros(*q.shape[:2], heads.problem.value_dim)
    wanted, statistics = heads.problem.score.statistics, None
    if any(wanted):
        statistics = RowStatistics(wanted, m_i)
    for tile in heads.tiles(rows, careful):  # 6, 7
        s, transformed = heads.score_tile(q, tile)  # 8
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))  # 9
        if statistics is not None:
            if wanted.max_scores_unbiased and transformed is None and heads.has_bias:
                transformed = product(q, heads.k[tile.j].mT)
            statistics.add(s, transformed, m_i, m_new)
        p = exp_difference(s, m_new)
        alpha = exp_of_maxima(m_i, m_new)
        l_i = alpha * l_i + p.sum(-1, keepdim=True)
        acc = heads.weighted_sum(heads.with_dropout(p, tile), heads.v[tile.j], tile, alpha * acc)  # 10
        m_i = m_new
    sink = None if heads.inputs.sink is None else heads.sink(rows)
    found = None if statistics is None else statistics.found(m_i, sink)
    if sink is not None:  # one more score without a value
        m_new = torch.maximum(m_i, sink)
        alpha = exp_of_maxima(m_i, m_new)
        l_i = alpha * l_i + exp_difference(sink.clone(), m_new)  # sink may be the caller's memory
        acc, m_i = acc.mul_(alpha), m_new
    l_i.masked_fill_(l_i == 0, 1.0)  # fully masked rows: O = 0, LSE = -inf
    return acc / l_i, m_i, l_i, found  # 12


class _Backward(NamedTuple):
    """Arguments and gradient buffers of a backward."""

    call: _TiledCall
    outputs: Outputs
    cotangents: Outputs
    want: Gradients
    part_sums: dict[str, Tensor]  # see `_part_sums`


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    dq, dk, dv = (torch.empty_like(x) if need else None for x, need in zip(inputs[:3], needs[:3], strict=True))
    want = Gradients(dq, dk, dv, empty_dbias(problem, inputs) if needs.bias else None)
    keep_freed_tiles()
    call = _TiledCall.of(problem, inputs)
    work = _Backward(call, outputs, cotangents, want, _part_sums(problem, inputs, needs))
    blocks = len(call.row_blocks())
    every = call.all_heads()
    pieces = jobs.pieces(every, blocks, _parts(problem), want.bias, work.part_sums)
    if any(len(turns) > 1 for turns in pieces):
        call.share(every)
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
    """Return buffers of the bias components' gradients that are required, by name, in the tiles' dtype."""
    if inputs.parts is None:
        return {}
    dtype = lse_dtype(problem.dtype)
    return {name: torch.zeros_like(getattr(inputs.parts, name), dtype=dtype) for name in needs.parts}


class _Part:
    """Heads of one tile in a backward job. ``sums``: gradient buffers of bias components, by name."""

    def __init__(self, work: _Backward, job: Job, kv: Heads, sums: Sums) -> None:
        self.heads = work.call.heads(kv)
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
    """Add the gradients of a block of rows: Algorithm 2 with exchanged loops, so dQ is written once."""
    heads, (_, dk, dv) = part.heads, part.tiles
    scale = heads.problem.score.scale
    q = heads.rows(heads.inputs.q, rows) * scale
    do = heads.rows(cotangents.o, rows)
    lse, delta = heads.row_terms(outputs, cotangents, rows)
    row, total, fully_masked = lse, None, None
    if heads.hides and (lse == -torch.inf).any():
        # 0 · NaN = NaN: exclude a fully masked query's values and the gradient of its output.
        fully_masked = lse == -torch.inf
        q, do = q.masked_fill(fully_masked, 0.0), do.masked_fill(fully_masked, 0.0)
    if is_coarse(lse):
        # Rounding m + log(l) changes every P; with a bias of -1e9 at all keys it removes log(l). So recompute m and l.
        _, row, total, _ = _attend(heads, rows, part.careful)
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
    """Return ``total + p.mT @ x``, (T, cols, D), in place of ``total``.

    A large product is faster with ``x_t``, ``x`` transposed in memory: its first factor is contiguous along the summed
    axis. The result is then transposed too.
    """
    if x_t is None:
        return product(p.mT, x, total)
    return product(x_t, p, None if total is None else total.mT).mT


class _Tile(NamedTuple):
    """Tile of scores that is visited."""

    rows: slice
    j: int  # number of the tile of keys
    visible: Tensor | None  # broadcasts to (batches, heads, G, rows, cols); None: all pairs are visible
    careful: bool  # ``visible`` is always given, and excludes a bias of -inf too


class _Heads:
    """Inputs of T key/value heads and the G query heads of each one's group, tile by tile.

    A tile of scores is (T, R, cols), R = G·rows: the queries of a group's heads, head after head. A tile of q or do is
    (T, R, D), a tile of k or v (T, cols, D).
    """

    def __init__(self, call: _TiledCall, kv: Heads) -> None:
        problem, inputs, size, stream, _ = call
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
        self.has_bias = inputs.bias is not None or inputs.parts is not None
        self.hides = self.band_hides or self.has_bias or problem.mask is not None

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, Relative]]:
        """Return these heads' bias components: vectors along keys or queries, and relative-position biases."""
        parts, score = self.inputs.parts, self.problem.score
        if parts is None:
            return {}, {}
        relatives = {}
        for name, x in parts.relatives(score, self.problem.queries):
            shift = x.shift if x.shift is None or x.shift.shape[0] == 1 else x.shift[self.kv[0]]
            relatives[name] = x._replace(values=self.of_heads(x.values), shift=shift)
        return {name: self.of_heads(x) for name, x in parts.vectors()}, relatives

    def _tile_states(self) -> list[list[int]] | None:
        """Return the state of each tile, read from the tile mask at once; None if its tiles have another size."""
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
        """View these heads' and rows' elements of (B, H, M, ...) as (batches, heads, G, rows, ...)."""
        return x.unflatten(1, (self.problem.kv_heads, self.problem.group))[(*self.kv, slice(None), rows)]

    def rows(self, x: Tensor, rows: slice, low: Tensor | None = None) -> Tensor:
        """Return the tile of q, o or do, (T, R, D). low: `Outputs.o_low`, to undo the rounding of a 16-bit o."""
        tile, low = (None if y is None else self._row_block(y, rows).flatten(2, 3).flatten(0, 1) for y in (x, low))
        assert tile is not None
        return with_low_bits(tile, low).to(self.dtype).contiguous()

    def sink(self, rows: slice) -> Tensor:
        """Return the tile of the sink, (T, R, 1), a view if possible."""
        assert self.inputs.sink is not None
        return self.rows(self.inputs.sink.expand(self.inputs.q.shape[:3]).unsqueeze(-1), rows)

    def put_rows(self, x: Tensor, rows: slice, tile: Tensor | None) -> None:
        """Write a tile (T, R, D) to (B, H, M, D), or (T, R, 1) to (B, H, M); zeros for None."""
        place = self._row_block(x, rows)
        if tile is None:
            place.zero_()
        else:
            place.copy_(tile.view(place.shape))

    def row_terms(self, outputs: Outputs, cotangents: Outputs, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the LSE and ``D = rowsum(dO∘O) - dLSE``, (T, R, 1); D = 0 in fully masked rows."""
        assert outputs.lse is not None
        lse = self.rows(outputs.lse.unsqueeze(-1), rows)
        delta = (self.rows(cotangents.o, rows) * self.rows(outputs.o, rows, outputs.o_low)).sum(-1, keepdim=True)
        if cotangents.lse is not None:
            delta -= self.rows(cotangents.lse.unsqueeze(-1), rows)
        return lse, delta.masked_fill_(lse == -torch.inf, 0.0)

    def tiles(self, rows: slice, careful: bool) -> Iterator[_Tile]:
        """Yield the tiles that ``rows`` may see."""
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
                least, most = visible.view(torch.uint8).aminmax()  # much faster than all() and any()
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
        """Return the state of a tile under a tile mask, and the visible pairs if it is partial."""
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
        """Yield the bias components' tiles; each broadcasts to (batches, heads, G, rows, cols)."""
        for x in self.vectors.values():
            yield self._cols(self._rows_of(x, rows), j)
        for relative in self.relatives.values():
            found = relative_tile(relative, rows, self._keys(j))
            if found is not None:
                yield found

    def _keys(self, j: int) -> slice:
        """Return the keys of tile ``j``."""
        begin = j * self.tiling.cols
        return slice(begin, begin + self.k[j].shape[1])

    def operand_rows(self, x: Tensor, rows: slice) -> Tensor:
        """View a bias, mask or bias gradient as (batches, heads, G, rows, N); broadcast axes have size 1.

        A mask that repeats along the batch is copied."""
        x, (batches, heads) = self._by_group(x), self.kv
        own: slice | Tensor = batches
        if x.shape[0] not in (1, self.problem.batch):
            own = torch.arange(batches.start, batches.stop, device=x.device) % x.shape[0]
        where = (own, heads, slice(None), rows)  # one view: a second one takes as long as a small tile's product
        return x[tuple(slice(None) if size == 1 else part for part, size in zip(where, x.shape[:4], strict=True))]

    def _by_group(self, x: Tensor) -> Tensor:
        """View (B|1, H|Hkv|1, ...) as (B|1, Hkv|1, G|1, ...)."""
        p = self.problem
        return x.unflatten(1, (p.kv_heads, p.group)) if x.shape[1] == p.heads else x.unsqueeze(2)

    def of_heads(self, x: Tensor) -> Tensor:
        """View these heads of (B|1, H|Hkv|1, ...) as (batches, heads, G, ...), size 1 on broadcast axes."""
        x = self._by_group(x)
        return x[tuple(slice(None) if size == 1 else part for part, size in zip(self.kv, x.shape[:2], strict=True))]

    def _rows_of(self, x: Tensor, rows: slice) -> Tensor:
        return x if x.shape[3] == 1 else x[:, :, :, rows]

    def _cols(self, x: Tensor, j: int) -> Tensor:
        """Return the columns of tile ``j``."""
        return x if x.shape[-1] == 1 else x[..., j * self.tiling.cols : (j + 1) * self.tiling.cols]

    def _operand_tile(self, x: Tensor, rows: slice, j: int) -> Tensor:
        """View the tile of a bias or mask."""
        return self.operand_rows(self._cols(x, j), rows)

    def _over_heads(self, tile: Tensor) -> Tensor:
        """View a tile of scores as (batches, heads, G, rows, cols)."""
        return tile.view(*self.grid, -1, tile.shape[-1])

    def score_tile(self, q: Tensor, tile: _Tile) -> tuple[Tensor, Tensor | None]:
        """Return the scores, -inf where hidden, and with a softcap those before the bias. q: scaled.

        The order is product, softcap, bias, mask. Without a softcap the product is accumulated onto the bias.
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
        """Return the gradients with respect to scale · q·k and, in place of ``dp``, to the biased score."""
        db = self.only_visible(dp.sub_(delta).mul_(p), tile)  # reference.softmax_derivative
        if transformed is None:
            return db, db
        slope = reference.transform_derivative(transformed, self.problem.score)
        return (db if slope is None else self.only_visible(db * slope, tile)), db

    def only_visible(self, x: Tensor, tile: _Tile) -> Tensor:
        """Set ``x`` to 0 at the hidden pairs of a careful tile; in other tiles they are 0 or finite already."""
        if not tile.careful or tile.visible is None:
            return x
        # reshape, not view: the result may have the memory order of a transposed mask.
        return torch.where(tile.visible, self._over_heads(x), 0.0).reshape(x.shape)

    def kept(self, tile: _Tile) -> Tensor | None:
        """Return dropout's factors of a tile of probabilities, (T, R, cols); None without dropout."""
        if self.stream is None:
            return None
        threshold, at = self.problem.score.dropout, self.problem.score.origin
        rows, keys = (
            slice(x.start + first, x.stop + first)
            for x, first in ((tile.rows, at.query), (self._keys(tile.j), at.key))
        )  # fmt: skip
        found = dropout.kept_tile(self.stream, rows, keys, threshold)
        # Convert as bytes: bools take four times as long.
        found = found.view(torch.uint8).to(self.dtype).mul_(dropout.weight(threshold))
        return found.flatten(2, 3).flatten(0, 1)

    def with_dropout(self, p: Tensor, tile: _Tile) -> Tensor:
        """Apply dropout to a tile of probabilities, in place."""
        z = self.kept(tile)
        return p if z is None else p.mul_(z)

    def weighted_sum(self, p: Tensor, x: Tensor, tile: _Tile, start: Tensor | None) -> Tensor:
        """Return ``start + p @ x`` in place of ``start``; a careful tile's hidden pairs never add NaN."""
        if not tile.careful or tile.visible is None:
            return product(p, x, start)
        visible = tile.visible.expand_as(self._over_heads(p)).reshape(p.shape)
        out = reference.visible_product(p, visible, x)
        return out if start is None else start.add_(out)

    def add_to_bias(self, dbias: Tensor, tile: _Tile, db: Tensor) -> None:
        """Add db to dBias (rows of `operand_rows`), summed over broadcast axes; overwrite if none broadcasts."""
        db, place = self._over_heads(db), self._cols(dbias, tile.j)
        assert self.inputs.bias is not None
        if is_full(self.problem, self.inputs.bias):
            place.copy_(db)
        else:
            place.add_(db.sum_to_size(place.shape))

    def add_to_parts(self, sums: dict[str, Tensor], tile: _Tile, db: Tensor) -> None:
        """Add db to the bias components' gradients in ``sums``: along diagonals for relative-position biases."""
        db = self._over_heads(db)
        for name, total in sums.items():
            if name in self.relatives:
                add_gradient(total, db, self.relatives[name], tile.rows, self._keys(tile.j))
            else:
                place = self._cols(self._rows_of(total, tile.rows), tile.j)
                place.add_(db.sum_to_size(place.shape))
