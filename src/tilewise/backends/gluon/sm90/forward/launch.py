"""Prepare and launch the forward kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.backends import (
    Inputs,
    Outputs,
    allocation,
    clear_statistics,
    empty_low_bits,
    empty_output,
    is_elsewhere,
    output_layout,
    rows_first,
    saved_lse_dtype,
)
from tilewise.backends.gluon.masks import NOTHING_KNOWN, KnownMask, MaskSummary
from tilewise.backends.gluon.scheduler import ForwardSizes
from tilewise.backends.gluon.score import LOG2E, score_terms
from tilewise.backends.gluon.sm90.common.config import (
    L2_CACHE,
    PANEL,
    ForwardConfig,
    band_of,
    depth,
    forward_config,
    has_small_heads,
    most_registers,
    padded,
    panels,
    scatters,
    sees_few,
)
from tilewise.backends.gluon.sm90.common.toeplitz import Pairs
from tilewise.backends.gluon.sm90.common.traits import always_hides, bias_axes, hides, limits_of, multiprocessors
from tilewise.backends.gluon.sm90.common.underflow import Reach
from tilewise.backends.gluon.sm90.forward.documents import DocumentLists, DocumentSummary, as_packed, offsets_of
from tilewise.backends.gluon.sm90.forward.kernel import ForwardConstants, forward_kernel
from tilewise.backends.gluon.sm90.forward.nan_fixup import NanFixupConstants, nan_fixup_kernel, packed_nan_fixup_kernel
from tilewise.backends.gluon.sm90.forward.small_heads import small_heads_kernel
from tilewise.backends.gluon.tensors import descriptor, ragged
from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import Skewed, as_matrix, range_constants
from tilewise.backends.gluon.varlen import AT_SEMAPHORE, TileList
from tilewise.backends.gluon.varlen_values import PackedValues, laid_out
from tilewise.backends.kernels.block_mask import tile_how, tile_layout
from tilewise.backends.kernels.score import varied_limits
from tilewise.backends.kernels.statistics import RowResults, StatisticsHow
from tilewise.backends.kernels.tile_lists import Flat, TileListCache
from tilewise.backends.launch.launcher import (
    POINTER,
    Launch,
    Members,
    Record,
    Varied,
    Whole,
    constants,
    kinds,
    resized_launches,
    sink_layout,
    strided,
    strided_if_any,
    strided_rows,
)
from tilewise.backends.protocol import Structure
from tilewise.spec import tiles
from tilewise.spec.problem import Problem, RasterOrder

MOST_TILED = 4096  # cached entries per number of query tiles, at most
NO_MASK: Flat = (None,)
WAVES = 2  # query tiles per program that balance differences in length


class HopperForward:
    """Prepared forward without its tensors, for one problem and one layout of its tensors."""

    takes_rows = True

    def __init__(self, problem: Problem, inputs: Inputs):
        q, k, v, bias, mask, sink, parts, *_ = inputs
        problem = as_matrix(problem)
        self.config, self.raster = (config := forward_config(problem)), raster(problem)
        self.values: Skewed | PackedValues | None = None
        if parts is not None and parts.query is not None and problem.score.query is not None:
            if problem.totals is None:
                self.values = Skewed(parts.query, problem.score.query)
            else:
                self.values = PackedValues(problem, parts.query, config.block_m)
            bias = self.values.like
        self.pairs = None
        if parts is not None and parts.toeplitz is not None:
            self.pairs, bias = Pairs(problem, parts.toeplitz, 1.0 / problem.score.scale), parts.toeplitz
        self.programs = programs = multiprocessors(q.device) * config.programs  # programs that run at once
        self.value_dim = problem.value_dim
        self.shape, self.block_m = (problem.batch, problem.heads, problem.group), config.block_m
        sizes = _sizes(problem, config, programs)
        packed = inputs.lengths is not None
        terms = score_terms(problem)
        # With at most one tile per program there is nothing to gain.
        documents = as_packed(problem) if sizes.tiles > programs else None
        c = _compiled(problem, config, config.dynamic and (packed or sizes.tiles > programs), documents is not None)
        self.reach = Reach(problem, inputs, c) if c.UNDERFLOWS.value else None
        together = has_small_heads(problem)
        self.always_hides, self.banded = always_hides(problem), not problem.score.band.unlimited
        self.order = "" if self.raster.key_bytes else self.raster.order  # "" where lengths decide
        self.block_n = config.block_n
        self.tiled: dict[int, tuple[Any, ...]] = {}
        self.choices = self._choices(*band_of(problem), sizes.tiles > programs)
        box = ragged if packed else descriptor
        self.mask: TileListCache[KnownMask] | None = None
        self.documents: TileListCache[DocumentLists] | None = None
        self.as_packed: Launch | None = None
        if problem.mask is not None:
            summary = MaskSummary(problem, mask, q.device, config.block_n, config.warpgroups)
            if documents is None or inputs.tiles is None:
                self.mask = TileListCache(summary, problem)
            else:
                other = HopperForward(
                    documents, inputs._replace(mask=None, tiles=None, lengths=offsets_of(inputs.tiles))
                )
                both = DocumentSummary(problem, summary, config.block_m, other.block_m, sizes.tiles)
                self.documents, self.as_packed = TileListCache(both, problem), other.main
        o = empty_output(q, problem.value_dim, "meta")
        self.packed = None if inputs.lengths is None else TileList(problem, config.block_m, o)
        lse, rows = o.new_empty(o.shape[:3]), rows_first(o)
        self.layout_o, self.layout_lse = (o.shape, o.stride()), (lse.shape, lse.stride())
        self.rows = ((rows.shape, rows.stride()), (lse.shape[1:], lse.stride()[1:])) if packed else None
        o_low = empty_low_bits(o, problem)
        self.empty_low = None if o_low is None else allocation(o_low, q.device)
        self.lse_dtype = saved_lse_dtype(problem.dtype, inputs)
        is_matrix = c.BIAS.value == "matrix"
        self.dynamic = c.DYNAMIC.value
        self.main: Launch = Launch(
            small_heads_kernel if together else forward_kernel,
            min(sizes.tiles, programs),  # the next tile's loads overlap the end of the last
            (
                box(q, 64, c.BLOCK_D.value),
                box(k, config.block_n, c.BLOCK_D.value),
                box(v, config.block_n, c.BLOCK_DV.value),
                POINTER if self.pairs else box(bias, 64, config.block_n) if is_matrix else strided(bias),
                sink_layout(sink),
                POINTER,
                POINTER,
                POINTER,
                box(o, 64, c.BLOCK_DV.value),
                box(o_low, 64, c.BLOCK_DV.value),
                Record(RowResults, (POINTER, POINTER)),
                AT_SEMAPHORE if packed else POINTER,
            ),
            (terms._replace(exponent=LOG2E, inverse=1.0) if together or config.scale_in_q else terms, sizes, c),
            num_warps=4,
            **most_registers(config.programs, config.warpgroups + 1),
        )
        self.nan_fixup, self.looks = None, (1, 0, 1)
        if c.HIDES.value:
            r = _nan_fixup(problem, config)
            self.looks = r.BLOCK_M.value, sizes.heads * sizes.batch, r.SCAN.value
            tile_list = (POINTER,) if packed else ()
            pairs = strided(mask) if inputs.tiles is None else tile_layout()
            self.nan_fixup = Launch(
                packed_nan_fixup_kernel if packed else nan_fixup_kernel,
                min(_looks(sizes.queries, *self.looks), programs),
                (
                    *(strided_rows(x) for x in (q, k, v)),
                    strided(bias),
                    pairs,
                    sink_layout(sink),
                    POINTER,
                    *tile_list,
                    strided_rows(o),
                    strided_if_any(o_low),
                    Record(RowResults, (POINTER, POINTER)),
                ),
                (problem.head_dim, problem.value_dim, terms, sizes, r),
                num_warps=8,
            )
        # For `resized`, which uses `resized_launches` of these.
        self.statistics = problem.score.statistics if any(problem.score.statistics) else None
        self.resizable = inputs.parts is inputs.lengths is problem.mask is self.statistics is None
        self.has_more = bias is not None or sink is not None
        self.made: dict[tuple, Any] = {}
        self.bases = _bases(self.main, self.nan_fixup, bias is not None, sink is not None)

    def resized(self, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs) -> Resized | None:
        """Return this forward for other lengths; None if these need other compile-time constants."""
        _, M, N, layouts = structure
        row_tiles = -(-M // self.block_m)
        tiled = self.tiled.get(row_tiles) or self._tiled(row_tiles)
        programs, work_tiles, at_once, last_head, most, kind = tiled
        if self._choices(M, N, lo, hi, work_tiles > most) != self.choices:
            return None
        layout_o = output_layout(layouts[0], layouts[1], self.value_dim)
        first, last, ends = limits_of(lo, hi)
        looks, (batch, heads, group) = _looks(M, *self.looks), self.shape
        values = (
            programs, looks if looks < most else most, first, last,
            (batch, heads, group, M, N, row_tiles, work_tiles, at_once, last_head), *layout_o, *layouts,
        )  # fmt: skip
        if self.has_more:
            values += self._more(inputs)
        kind = kind, ends, M & 15 == 0, N & 15 == 0
        found = self.made.get(kind) or resized_launches(self.bases, self.made, kind, values)
        return Resized(self, layout_o, ((batch, heads, M), (heads * M, M, 1)), values, found)

    def _more(self, inputs: Inputs) -> tuple[tuple[int, ...], ...]:
        """Return shapes and strides of bias and sink."""
        bias, sink = inputs.bias, inputs.sink
        found = () if bias is None else (bias.shape, bias.stride())
        return found if sink is None else (*found, (*sink.shape, 1), (*sink.stride(), 1))

    def _tiled(self, row_tiles: int) -> tuple[Any, ...]:
        """Return sizes for a number of query tiles: programs, all sizes from tiles of queries on, programs that run at
        once, and `kinds` of the sizes."""
        sizes, kind = _tiled(*self.shape, row_tiles, self.programs)
        if len(self.tiled) >= MOST_TILED:
            self.tiled.clear()
        found = self.tiled[row_tiles] = min(sizes[1], self.programs), *sizes[1:], self.programs, kind
        return found

    def _choices(self, M: int, N: int, lo: int | None, hi: int | None, takes_more: bool) -> tuple[bool | str, ...]:
        """Return all compile-time choices that depend on lengths, for a problem without a mask and bias components.

        takes_more: a program has more than one query tile.
        """
        return (
            N % self.block_n != 0,
            self.always_hides or tiles.hides(M, N, lo, hi),
            self.banded and sees_few(M, N, lo, hi),
            takes_more,
            self.order or self.raster.at(M, N),
        )

    def __call__(self, inputs: Inputs) -> Outputs:
        q, k, v, bias, mask, sink, parts, seed, lengths, tiles = inputs
        if is_elsewhere(q):
            with torch.cuda.device(q.device):
                return self(inputs)
        layout_o, layout_lse = (self.layout_o, self.layout_lse) if self.rows is None or q.dim() == 4 else self.rows
        o = q.new_empty_strided(*layout_o)
        lse = q.new_empty_strided(*layout_lse, dtype=self.lse_dtype)
        o_low = None if self.empty_low is None else self.empty_low()
        statistics = None
        if self.statistics is not None:
            statistics = q.new_empty((*lse.shape, len(self.statistics.names)), dtype=torch.float32)
            if self.packed is not None:  # rows of no sequence
                clear_statistics(statistics, self.statistics)
        tile_count_semaphore, flat, known = None, NO_MASK, NOTHING_KNOWN
        if self.documents is not None and self.as_packed is not None:
            flat, lists = self.documents(mask, tiles)
            tile_count_semaphore, known = lists.counts.clone(), KnownMask(lists.bits, lists.tile_list)
            self.as_packed(
                q, k, v, None, sink, None, None, lists.packed_list, o, o_low, lse, statistics, tile_count_semaphore
            )
        elif self.mask is not None:
            flat, known = self.mask(mask, tiles)
        tile_list = known.tile_list
        if self.packed is not None and lengths is not None:
            tile_list = tile_count_semaphore = self.packed(lengths, o, lse=lse)
        elif self.dynamic and tile_count_semaphore is None:
            tile_count_semaphore = torch.zeros(1, dtype=torch.int32, device=q.device)
        if parts is not None and parts.query is not None:
            bias = laid_out(self.values, parts.query, tile_list)
        added = bias
        if self.pairs is not None and parts is not None and parts.toeplitz is not None:
            bias, added = parts.toeplitz, self.pairs(parts.toeplitz)
            if self.reach is not None:
                tile_list = self.reach(q, k, v, added)
        self.main(q, k, v, added, sink, seed, known.bits, tile_list, o, o_low, lse, statistics, tile_count_semaphore)
        if self.nan_fixup is not None:
            listed = () if self.packed is None else (tile_list,)
            self.nan_fixup(q, k, v, bias, *flat, sink, seed, *listed, o, o_low, lse, statistics)
        return Outputs(o, lse, o_low, statistics)


class Resized:
    """A `HopperForward` for other lengths, of a dense call without a mask and bias components."""

    __slots__ = ("kept", "launches", "layout_lse", "layout_o", "of", "varied")

    def __init__(
        self, of: HopperForward, layout_o: Any, layout_lse: Any, values: tuple[Any, ...], launches: Sequence[Whole]
    ) -> None:  # fmt: skip
        self.of, self.layout_o, self.layout_lse, self.varied, self.launches = of, layout_o, layout_lse, values, launches
        self.kept: tuple[dict[Any, Any], ...] = ({}, {})  # of each launch

    def __call__(self, inputs: Inputs) -> Outputs:
        q, k, v, bias, _, sink, _, seed, _, _ = inputs
        if is_elsewhere(q):
            with torch.cuda.device(q.device):
                return self(inputs)
        values, launches, (kept, fixup_cached) = self.varied, self.launches, self.kept
        o = q.new_empty_strided(*self.layout_o)
        lse = q.new_empty_strided(*self.layout_lse, dtype=self.of.lse_dtype)  # faster than new_empty
        count = torch.zeros(1, dtype=torch.int32, device=q.device) if self.of.dynamic else None
        launches[0].run(values, kept, q, k, v, bias, sink, seed, None, None, o, None, lse, None, count)
        if len(launches) > 1:
            launches[1].run(values, fixup_cached, q, k, v, bias, None, sink, seed, o, None, lse, None)
        return Outputs(o, lse)


def _sizes(problem: Problem, config: ForwardConfig, programs: int) -> ForwardSizes:
    p = problem
    if p.totals is not None:  # lengths come from work tiles; these are strides and upper bounds
        row_tiles = p.totals[0] // config.block_m + p.batch
        return ForwardSizes(1, p.heads, p.group, *p.totals, row_tiles, row_tiles * p.heads, 1, 0)
    return _sized(p.batch, p.heads, p.group, p.queries, p.keys, config.block_m, programs)


def _sized(
    batch: int, heads: int, group: int, queries: int, keys: int, block_m: int, programs: int
) -> ForwardSizes:  # fmt: skip
    """Return the sizes of a dense call."""
    found, _ = _tiled(batch, heads, group, -(-queries // block_m), programs)
    return ForwardSizes(batch, heads, group, queries, keys, *found)


def _tiled(
    batch: int, heads: int, group: int, row_tiles: int, programs: int
) -> tuple[tuple[int, int, int, int], tuple[Any, ...]]:  # fmt: skip
    """Return the sizes that a number of query tiles determines, from row_tiles on; and their `kinds`."""
    all_heads = heads * batch
    at_once = min(-(-WAVES * programs // (row_tiles * group)) * group, all_heads)
    last = (all_heads // at_once - 1) * at_once
    found = row_tiles, row_tiles * all_heads, at_once, last
    return found, kinds(found)


# Positions in the values of `HopperForward.resized`: programs of both launches, window limits, sizes; then layouts of
# tensors.
_MAIN, _NAN_FIXUP, _LO, _HI, _SIZES, _FIRST = range(6)


def _bases(main: Launch, nan_fixup: Launch | None, has_bias: bool, has_sink: bool) -> list[tuple[Launch, Varied]]:
    """Return the launches with the arguments that differ with lengths; see `resized_launches`."""
    o, q, k, v, end = range(_FIRST, _FIRST + 10, 2)
    bias = end if has_bias else None
    sink = end + 2 * has_bias if has_sink else None
    numbers: tuple[Members, ...] = varied_limits(main.numbers[0], _LO, _HI), _SIZES, None
    found = [(main, Varied((q, k, v, bias, sink, None, None, None, o, None, (None, None), None), _MAIN, numbers))]
    if nan_fixup is not None:
        numbers = None, None, varied_limits(nan_fixup.numbers[2], _LO, _HI), _SIZES, None
        found.append((nan_fixup, Varied((q, k, v, bias, None, sink, None, o, None, (None, None)), _NAN_FIXUP, numbers)))
    return found


def _looks(queries: int, block_m: int, heads: int, scan: int) -> int:
    """Return the programs of the NaN fix-up, each of which scans ``scan`` tiles of rows."""
    return -(-(-(-queries // block_m) * heads) // scan)


def _compiled(problem: Problem, config: ForwardConfig, dynamic: bool, documents: bool = False) -> ForwardConstants:
    bias, mask = problem.bias, problem.mask
    range_, far = range_constants(problem), toeplitz_constants(problem, 2 * config.block_n)
    loops = config.peeled or range_["RANGE_LO"] or far["FAR_LO"] or far["FAR_HI"]
    values = ForwardConstants(
        BLOCK_N=config.block_n,
        BLOCK_D=padded(problem.head_dim) if panels(problem) == 1 else PANEL,
        BLOCK_DV=padded(problem.value_dim),
        COLS_OF_QK=depth(problem.head_dim, padded(problem.head_dim)),
        PANELS=panels(problem),
        WARPGROUPS=config.warpgroups,
        Q_STAGES=config.q_stages,
        STAGES=config.stages,
        BIAS_STAGES=config.bias_stages,
        BIAS_FIRST=config.bias_first,
        LAZY=config.lazy,
        SUMS_BY_THREAD=config.sums_by_thread,
        PEELED=config.peeled,
        SKIPS_HIDDEN=config.skips_hidden,
        PAIRS=loops or bool(problem.score.dropout) or has_small_heads(problem),
        WORDS_LAST=config.words_last,
        O_IN_Q=config.o_in_q,
        O_IN_BIAS=config.o_in_bias,
        Q_IN_REGISTERS=config.q_in_registers,
        SCALE_IN_Q=config.scale_in_q,
        COMPUTING_REGISTERS=config.registers[0],
        LOADING_REGISTERS=config.registers[1],
        BIAS=bias_axes(problem).value,
        BIAS_BATCH=problem.bias_batch,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        **range_,
        SORTED=range_["RANGE_LO"] and not range_["RANGE_HI"] and config.bias_first and config.programs == 1,
        **far,
        MASK=mask is not None,
        MASK_BATCH=problem.mask_period,
        MASK_GROUP=1 if mask is None else problem.heads // mask.heads,
        MASK_ROWS=mask is not None and mask.rows > 1,
        HIDES_KEYS=has_small_heads(problem) and (mask is not None or problem.keys % config.block_n != 0),
        RAGGED=problem.totals is not None or problem.keys % config.block_n != 0,
        HIDES=hides(problem),
        ORDER=raster(problem).at(problem.queries, problem.keys).value,
        DYNAMIC=dynamic,
        PACKED=problem.totals is not None,
        DOCUMENTS=documents,
        STATISTICS=StatisticsHow(*problem.score.statistics),
    )
    return constants(values)


class Raster(NamedTuple):
    """Order in which tiles run side by side, for any lengths."""

    order: RasterOrder
    key_bytes: int  # keys and values of all that share a bias, per key; 0 where irrelevant
    pair_bytes: int  # bias that batch elements share, per query and key; 0 where heads share it

    def at(self, queries: int, keys: int) -> RasterOrder:
        if self.order == RasterOrder.HEADS:
            return RasterOrder.LONGEST_FIRST if self.key_bytes * keys > L2_CACHE else self.order
        shared = self.pair_bytes * queries * keys
        return RasterOrder.TILES if shared <= L2_CACHE // 2 < self.key_bytes * keys else self.order


def raster(problem: Problem) -> Raster:
    """Return `Problem.raster_order`, with two exceptions for a shared bias.

    If batch elements share a bias that fits the L2 cache, but their keys and values do not, the tiles of one head run
    together: else every query tile would read keys and values from memory again. So it would in the order of heads,
    where a mask `scatters` the visited tiles and keys and values do not fit: there few heads run together (one H100, 25
    % of blocks of 16,384 keys, D=128, 16 heads, a bias (1,1,M,N): 1.29 ms to 1.04).
    """
    p, bias, order = problem, problem.bias, problem.raster_order
    if bias is None or p.totals is not None or p.parts is not None:
        return Raster(order, 0, 0)
    key_bytes = (p.head_dim + p.value_dim) * p.dtype.itemsize
    if order == "heads" and scatters(p):
        return Raster(order, p.broadcast_group(bias).kv_heads * key_bytes, 0)
    if order != "batch":
        return Raster(order, 0, 0)
    return Raster(order, p.batch * key_bytes, bias.batch * bias.heads * bias.dtype.itemsize)


def _nan_fixup(problem: Problem, config: ForwardConfig) -> NanFixupConstants:
    toeplitz = None if problem.parts is None else problem.parts.toeplitz
    bias, mask = toeplitz or problem.bias, problem.mask
    block_d, block_dv = padded(problem.head_dim), padded(problem.value_dim)
    block_m = 64 if max(block_d, block_dv) < 128 else 32  # at most 24 bytes spill
    values = NanFixupConstants(
        BLOCK_M=block_m,
        BLOCK_N=32,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        SCAN=2048 // block_m,
        BIAS=bias is not None,
        BIAS_BATCH=problem.bias_batch,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        BIAS_COLS=bias is not None and bias.cols > 1,
        RELATIVE=problem.score.query is not None,
        TOEPLITZ=toeplitz is not None,
        MASK=mask is not None,
        MASK_BATCH=problem.mask_period,
        MASK_GROUP=1 if mask is None else problem.heads // mask.heads,
        MASK_COLS=mask is not None and mask.cols > 1,
        MASK_TILES=problem.tile_mask is not None,
        MASK_HOW=tile_how(problem, block_m, 32),
        LISTED=0 if problem.totals is None else config.block_m,
        STATISTICS=StatisticsHow(*problem.score.statistics),
    )
    return constants(values)
