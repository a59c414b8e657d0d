"""Launches of the backward, for a Problem, its outputs and their cotangents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, allocation, device_of, empty_mended, rows_first
from tilewise.backends.gluon.masks import NOTHING_KNOWN, KnownMask, MaskSummary
from tilewise.backends.gluon.preprocess import ZEROED_AT_ONCE, Lists, packed_preprocess_kernel, preprocess_kernel
from tilewise.backends.gluon.score import kept_weight, score_terms
from tilewise.backends.gluon.sm90.backward.batched import batched_kernel
from tilewise.backends.gluon.sm90.backward.dbias import (
    DBiasMode,
    adds,
    bias_gradient,
    bias_gradient_allocation,
    broadcast_group,
    reduction,
    sums_sparsely,
    zeroes_ahead,
)
from tilewise.backends.gluon.sm90.backward.dbias_reduce import (
    COLS,
    ROWS,
    dbias_reduce_kernel,
    group_list_kernel,
    pieces_of_tile,
)
from tilewise.backends.gluon.sm90.backward.dq import (
    CAST_COLS,
    CAST_ROWS,
    DQ_COLS,
    last_heads_kernel,
    packed_postprocess_kernel,
    postprocess_kernel,
)
from tilewise.backends.gluon.sm90.backward.kernel import BackwardConstants, Given, backward_kernel
from tilewise.backends.gluon.sm90.backward.resized import ResizedBackward, backward_bases, resized_backward
from tilewise.backends.gluon.sm90.backward.scheduler import BackwardSizes, counters
from tilewise.backends.gluon.sm90.backward.sizes import band_hides_end, choices, leaves_queries_out, runs_beside, sized
from tilewise.backends.gluon.sm90.backward.sparse_sum import SparseSum
from tilewise.backends.gluon.sm90.backward.toeplitz import ToeplitzGradient
from tilewise.backends.gluon.sm90.backward.zero import zeros_launch
from tilewise.backends.gluon.sm90.common.config import (
    BackwardConfig,
    backward_config,
    backward_width,
    band_of,
    columns_of_dq,
    dbias_sums,
    depth,
    longest_first,
    most_registers,
    value_width,
)
from tilewise.backends.gluon.sm90.common.toeplitz import Pairs
from tilewise.backends.gluon.sm90.common.traits import always_hides, bias_axes, hides, multiprocessors
from tilewise.backends.gluon.sm90.common.underflow import Reach
from tilewise.backends.gluon.tensors import boxes, descriptor, ragged, vector
from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import Skewed, as_matrix, ends, range_constants
from tilewise.backends.gluon.varlen import BothLists
from tilewise.backends.gluon.varlen_values import PackedValues, laid_out
from tilewise.backends.kernels.sinks import SinkGradient
from tilewise.backends.kernels.tile_lists import Flat, TileListCache
from tilewise.backends.launch.launcher import POINTER, Launch, Record, constants, strided, strided_if_any, strided_rows
from tilewise.backends.protocol import Structure
from tilewise.spec.operands import BiasKind
from tilewise.spec.problem import Problem
from tilewise.spec.seqlens import Lengths


class HopperBackward:
    """Backward prepared for a problem and layouts of tensors; it computes every gradient, required or not."""

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs):
        q, k, v, bias, mask, sink, parts, *_ = inputs
        problem = as_matrix(problem)
        self.config = config = backward_config(problem)
        self.values: Skewed | PackedValues | None = None
        self.dvalues: Tensor | None = None  # packed batch: layout of the gradient of the values
        if parts is not None and parts.query is not None and problem.score.query is not None:
            if problem.totals is None:
                self.values = Skewed(parts.query, problem.score.query)
            else:
                self.values = PackedValues(problem, parts.query, config.block_m)
            bias = self.values.like
        self.problem, self.needs, self.lists = problem, needs, None
        self.width = width = backward_width(problem)
        block_m, block_n = config.block_m, config.block_n
        self.multiprocessors = multiprocessors(q.device)
        self.block_m, self.dq_stored, self.elements = block_m, config.dq_stored, config.elements > 1
        self.zeroes_dq = self.dq_stored and problem.totals is None and leaves_queries_out(*band_of(problem))
        row_warps = 8 if width == 256 else 4  # of preprocess and postprocess
        p = problem
        sizes, groups = _sizes(problem, config, inputs.q.device)
        batch = 1 if p.totals is not None else p.batch
        row_programs = sizes.row_tiles * p.heads * batch
        work_tiles, programs = sizes.key_tiles * p.kv_heads * batch, multiprocessors(q.device) * config.programs
        packed = p.totals is not None
        dynamic = packed or (config.dynamic and reduction(p) != DBiasMode.REDUCE and work_tiles > programs)
        # Programs zero dBias of later groups, the host that of the first: of so many heads, with a group per key tile.
        ahead = dynamic and zeroes_ahead(problem)
        self.zeroed_heads = -(-sizes.lag // sizes.key_tiles) if ahead else 0
        self.heads_alone = sizes.kv_heads // sizes.broadcast_heads  # with a bias of their own
        do, dlse, *_ = cotangents
        mended = empty_mended(outputs, do)
        self.empty_mended = None if mended is None else allocation(mended, q.device)
        # Before the counters, a number for each query tile, of absent batch elements too.
        tiles = row_programs + (config.elements - 1) * sizes.row_tiles * p.heads
        self.flags = 0 if mended is None else -(-tiles // 32) * 32
        # float32, for each query tile: LSE in base 2 and −delta; for a Toeplitz bias also two LSEs of far tiles
        toeplitz = None if parts is None else parts.toeplitz
        stats_of_tile = 2 * block_m if toeplitz is None else 4 * block_m
        stats = torch.empty(stats_of_tile * row_programs, dtype=torch.float32, device="meta")
        sum_tiles = _sum_heads(problem, config, sizes) * p.group * sizes.row_tiles
        dq_accum = torch.empty(
            sum_tiles * block_m * width // DQ_COLS.value, DQ_COLS.value, dtype=torch.float32, device="meta"
        )
        dq, dk, dv = (torch.empty_like(x, device="meta") for x in (q, k, v))
        self.empty_dbias = bias_gradient_allocation(problem, bias, ahead)
        dbias = None if self.empty_dbias is None else self.empty_dbias(device="meta")
        self.adds = reduction(problem) == DBiasMode.ADD
        if self.adds and isinstance(self.values, Skewed):
            dbias = self.values.gradient_like
        elif self.adds:
            dbias = bias  # like the copied values
        # dS buffer for a shared bias
        ds_buffer = None
        if bias is not None and reduction(problem) == DBiasMode.REDUCE:
            places = sizes.ds_buffer_groups * broadcast_group(problem).programs
            ds_buffer = torch.empty(
                places, p.group * sizes.row_tiles, block_m, block_n, dtype=bias.dtype, device="meta"
            )
        self.empty_ds_buffer = None if ds_buffer is None else allocation(ds_buffer, q.device)
        counted = counters(sizes, groups, p.deterministic, ds_buffer is not None, ahead, packed)
        # Batched: the float32 dBias follows the counters and is zeroed with them, if an int32 can index both plus one
        # step of all programs of the preprocess.
        self.dbias_layout: tuple[Any, ...] | None = None
        first = -(-counted // 32) * 32
        if (
            self.elements
            and dbias is not None
            and first + dbias.shape[0] * dbias.stride(0) + ZEROED_AT_ONCE.value * row_programs < 2**31
        ):
            self.dbias_layout = dbias.shape, dbias.stride(), self.flags + first
            counted = first + dbias.shape[0] * dbias.stride(0)
        self.sizes = stats.shape[0], counted, dq_accum.shape[0]
        self.layouts = tuple([(x.shape, x.stride()) for x in (dq, dk, dv)])
        rows = map(rows_first, (dq, dk, dv) if packed else ())
        self.rows, self.takes_rows = tuple([(x.shape, x.stride()) for x in rows]), bias is None  # see `bias_gradient`
        self.summary, self.mask = None, None
        if p.mask is not None:
            sorts = longest_first(problem)
            self.summary = MaskSummary(problem, mask, q.device, block_n, 1, by_keys=True, longest_first=sorts)
            self.mask = TileListCache(self._known_mask, problem)
        dlse_rows = None if dlse is None else dlse[..., None]
        weight = kept_weight(problem)
        terms, axes = score_terms(problem), bias_axes(problem)
        c = _compiled(problem, config, width, dynamic, ahead, mended is not None)
        if self.adds and isinstance(self.values, Skewed):
            self.zeros = zeros_launch(self.values, p.keys, terms, block_m, block_n)
        elif self.adds and isinstance(self.values, PackedValues) and parts is not None and parts.query is not None:
            self.dvalues = self.values.prepare_gradient(parts.query, terms, block_n)
        # For `resized`, which supports only q, k and v and their gradients.
        self.always_hides, self.banded = always_hides(problem), not problem.score.band.unlimited
        self.dynamic, self.programs = dynamic, programs
        self.made: dict[tuple, Any] = {}
        self.tiled: dict[tuple[int, int], Any] = {}
        self.resizable = not packed and bias is sink is p.mask is p.parts is None
        self.choices = choices(problem, config, self.always_hides, *band_of(problem), work_tiles, programs)
        if packed:
            self.lists = BothLists(p, block_m, block_n, dq, self.dvalues, dk, dv)
            self.gaps = inputs.lengths is not None and inputs.lengths.used_k is not None
        box = ragged if packed else descriptor
        self.pairs = None
        if toeplitz is not None:
            self.pairs = Pairs(problem, toeplitz, 1.0 / p.score.scale, 1 if config.ahead else -1)
            self.toeplitz = ToeplitzGradient(problem, toeplitz, sizes, terms, c, row_programs)
        self.reach = Reach(problem, inputs, c, do) if c.UNDERFLOWS.value else None
        self.of_rows, self.of_pairs = axes == BiasKind.ROWS, axes in (BiasKind.MATRIX, BiasKind.COLS)
        along_rows = bias if self.of_rows else None
        tiled: tuple[Any, ...] = (block_m, width, block_n) if packed else (self.of_rows, block_m, width)
        self.before = Launch(
            packed_preprocess_kernel if packed else preprocess_kernel,
            row_programs,
            (
                strided_rows(outputs.o),
                strided_if_any(outputs.o_low),
                strided_rows(do),
                POINTER,
                strided(dlse_rows),
                strided_if_any(along_rows) if packed else strided(along_rows),
                POINTER,
                POINTER,
                POINTER,
                strided_if_any(mended),
                *((Record(Lists, (POINTER, POINTER)),) if packed else ()),
            ),
            (p.value_dim, sizes, counted, weight, c.BIAS_GROUP.value, dlse is not None, *tiled),
            num_warps=row_warps,
        )
        dbias_tiles = [
            POINTER,
            strided(dbias if self.elements or ds_buffer is not None or ahead else None),
            POINTER,
            POINTER,
        ]
        if ds_buffer is not None:
            dbias_tiles[0] = boxes(ds_buffer, [c.GROUP_PROGRAMS.value, 1, ROWS.value, COLS.value], ds_buffer.stride())
        self.main = Launch(
            batched_kernel if self.elements else backward_kernel,
            min(programs, work_tiles) if dynamic else work_tiles,
            (
                box(q, block_m, width),
                box(k, block_n, width),
                box(v, block_n, value_width(p)),
                box(do, block_m, value_width(p)),
                strided(bias)
                if axes == BiasKind.COLS
                else box(bias if axes == BiasKind.MATRIX else None, block_m, block_n),
                vector(stats, block_m),
                box(dq, block_m, width) if self.dq_stored else self._sum_of_dq(dq_accum, config, width),
                box(dk, block_n, width),
                box(dv, block_n, value_width(p)),
                strided(dq)
                if self.elements
                else POINTER
                if c.DBIAS.value == "sum" or toeplitz is not None
                else box(dbias if ds_buffer is None else ds_buffer, block_m, block_n),
                Record(Given, (POINTER, POINTER)),
                POINTER if self.summary is None or self.elements else vector(self.summary.bits_like, 2 * block_n),
                box(mended, block_m, value_width(p)),
                *dbias_tiles,
            ),
            (terms, sizes, c),
            num_warps=4 * config.warpgroups,
            launch_pdl=True,
            **most_registers(config.programs, config.elements * config.warpgroups + 1),
        )
        self.list_groups = self.reduce_group = None
        if ds_buffer is not None and p.mask is not None:  # lists of the stored tiles
            self.list_groups = Launch(group_list_kernel, groups, (POINTER, POINTER), (terms, sizes, c), num_warps=4)
            lists = torch.empty(groups, 1 + p.group * sizes.row_tiles, dtype=torch.int32, device="meta")
            self.empty_lists = allocation(lists, q.device)
        self.sparse_sum = None
        if bias is not None and dbias is not None and sums_sparsely(p):
            self.sparse_sum = SparseSum(p, bias, dbias, block_n)
        if ds_buffer is not None:
            last, pieces = min(sizes.lag, groups), pieces_of_tile(block_m, block_n)
            self.reduce_group = Launch(
                dbias_reduce_kernel, last * pieces, dbias_tiles, (groups - last, pieces, terms, sizes, c), num_warps=2
            )  # fmt: skip
        beside = packed or runs_beside(work_tiles, programs)
        self.after = (
            None
            if self.dq_stored
            else Launch(
                packed_postprocess_kernel if packed else postprocess_kernel,
                row_programs,
                (POINTER, strided_rows(dq), POINTER),
                (p.head_dim, p.score.scale, sizes, config.dq_parts, block_m, width, columns_of_dq(p, config)),
                num_warps=4 * config.warpgroups,
                launch_pdl=beside,
            )
        )
        if self.elements and dbias is not None:
            pieces = dbias.shape[0] * dbias.shape[1] * -(-p.queries // CAST_ROWS.value) * -(-p.keys // CAST_COLS.value)
            self.after = Launch(
                last_heads_kernel,
                sum_tiles // 2 + pieces,
                (POINTER, strided(dq), strided(dbias), POINTER),
                (p.batch, p.head_dim, terms, sizes, c),
                num_warps=1,
            )
        self.shape = sizes.batch, sizes.kv_heads, sizes.group, sizes.lag
        self.bases = backward_bases(self, dlse is not None) if self.resizable else []
        self.sink_gradient = None
        if needs.sink and sink is not None and outputs.lse is not None:
            self.sink_gradient = SinkGradient(sink, outputs.lse.shape, block_m, 2 * block_m, block_m, negated=True)

    def resized(
        self, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs, outputs: Outputs,
        cotangents: Outputs, needs: Needs,
    ) -> ResizedBackward | None:  # fmt: skip
        """Return this backward for other lengths, or None if these need other constants."""
        return resized_backward(self, structure, lo, hi)

    def buffers(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return row statistics, counters and dq_accum (if unused, the first), uninitialised, on its device."""
        stats_size, counted, accum = self.sizes
        stats = like.new_empty(stats_size, dtype=torch.float32)
        counts = like.new_empty(self.flags + counted, dtype=torch.int32)
        if self.flags:
            counts = counts[self.flags :]
        if self.dq_stored:
            return stats, counts, stats
        return stats, counts, like.new_empty((accum, DQ_COLS.value), dtype=torch.float32)

    def _sum_of_dq(self, dq_accum: Tensor, config: BackwardConfig, width: int) -> Any:
        if not config.dq_by_tma:
            return POINTER
        rows = config.block_m * columns_of_dq(self.problem, config) // DQ_COLS.value
        return boxes(dq_accum, [rows, DQ_COLS.value], dq_accum.stride())

    def _some_see_nothing(self, lengths: Lengths) -> bool:
        """True if a packed batch may have query tiles that no key tile visits."""
        p, band = self.problem, self.problem.score.band
        assert lengths.cu_q is not None
        assert lengths.cu_k is not None
        same = lengths.cu_q.data_ptr() == lengths.cu_k.data_ptr() and lengths.used_k is None and p.queries == p.keys
        return not (same and (band.lo is None or band.lo <= 0) and (band.hi is None or band.hi >= 0))

    def _known_mask(self, mask: Flat) -> KnownMask:
        assert self.summary is not None
        known = self.summary(mask)
        if self.list_groups is not None:
            known = known._replace(group_lists=self.empty_lists())
            self.list_groups(known.states, known.group_lists)
        return known

    def __call__(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        q, k, v, bias, mask, sink, parts, seed, lengths, tiles = inputs
        o, lse, o_low, _ = outputs
        do, dlse, *_ = cotangents
        needs = self.needs
        with device_of(q):
            stats, counts, dq_accum = self.buffers(q)
            layouts = self.layouts if q.dim() == 4 else self.rows
            dq, dk, dv = [torch.empty_strided(*x, dtype=q.dtype, device=q.device) for x in layouts]
            rows_listed: tuple[Tensor, ...] = ()
            key_list, dquery = None, None
            if self.lists is not None and lengths is not None:
                dquery = None if self.dvalues is None else torch.empty_like(self.dvalues, device=q.device)
                row_list, key_list = self.lists(lengths, dq, dquery, dk, dv)
                rows_listed = (row_list,)
                if self.gaps:  # keys past used_k
                    dk.zero_()
                    dv.zero_()
            dbias = None
            if self.dbias_layout is not None:
                dbias = counts.view(torch.float32).as_strided(*self.dbias_layout)
            elif self.empty_dbias is not None:
                dbias = self.empty_dbias(device=q.device)
            if dbias is not None and self.zeroed_heads:
                dbias.unflatten(1, (self.heads_alone, -1)).flatten(0, 1)[: self.zeroed_heads].zero_()
            values = None
            if self.values is not None and parts is not None and parts.query is not None:
                values = parts.query
                bias = laid_out(self.values, values, *rows_listed or (None,))
                if self.adds and isinstance(self.values, Skewed):
                    dbias = self.values.empty_gradient(values)
                    self.zeros(dbias)
                elif self.adds and isinstance(self.values, PackedValues):
                    dbias = self.values.empty_gradient(values, rows_listed[0])
            dtoeplitz, pairs, reach = None, None, None
            if self.pairs is not None and parts is not None and parts.toeplitz is not None and lse is not None:
                pairs, dtoeplitz = self.toeplitz.begin(self.pairs, parts.toeplitz, lse, stats)
                if self.reach is not None:  # before the preprocess, during which `main` may already start
                    reach = self.reach(q, k, v, pairs, do)
            if self.zeroes_dq or (self.dq_stored and lengths is not None and self._some_see_nothing(lengths)):
                dq.zero_()
            sums = None if self.dq_stored else dq_accum
            of_rows = bias if self.of_rows else None
            both_lists = (*rows_listed, key_list) if rows_listed else ()
            mended = None if self.empty_mended is None else self.empty_mended()
            self.before(o, o_low, do, lse, dlse, of_rows, stats, sums, counts, mended, *both_lists)
            ds_buffer = None if self.empty_ds_buffer is None else self.empty_ds_buffer()
            known = NOTHING_KNOWN if self.mask is None else self.mask(mask, tiles)[1]
            if self.sparse_sum is not None and known.states is not None and dbias is not None:
                self.sparse_sum.zero(known.states, dbias)
            tile_list = known.tile_list
            if key_list is not None:
                tile_list = key_list
            elif reach is not None:
                tile_list = reach
            by_pointer = self.elements or ds_buffer is not None or self.zeroed_heads
            dbias_tiles = (
                dq_accum if ds_buffer is None else ds_buffer, dbias if by_pointer else None, counts, known.group_lists,
            )  # fmt: skip
            of_pairs = bias if self.of_pairs else pairs
            found = (dbias if ds_buffer is None else ds_buffer) if self.pairs is None else dtoeplitz
            if self.elements:
                found = dq
            leaves = dq if self.dq_stored else dq_accum
            self.main(
                q, k, v, do, of_pairs, stats, leaves, dk, dv, found, seed, tile_list, known.bits, mended, *dbias_tiles
            )  # fmt: skip
            if self.elements and bias is not None and self.after is not None:
                total, dbias = dbias, torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
                self.after(dq_accum, dq, total, dbias)
            elif self.after is not None:  # next, because it may start while `main` still runs
                self.after(dq_accum, dq, *(rows_listed or (counts,)))
            if self.reduce_group is not None:
                self.reduce_group(*dbias_tiles)
            if self.adds and values is not None and dbias is not None:
                if isinstance(self.values, PackedValues) and dquery is not None:
                    self.values.gradient(dbias, rows_listed[0], dquery)
                elif isinstance(self.values, Skewed):
                    dquery = self.values.gradient(dbias, values)
            if self.sparse_sum is not None and known.states is not None and dbias is not None:
                dbias = self.sparse_sum.result(known.states, dbias)
            elif needs.bias and bias is not None:
                dbias = bias_gradient(self.problem, bias, dbias, lse, dlse)
            if dtoeplitz is not None:
                dtoeplitz = self.toeplitz.end(dtoeplitz)
            dsink = None
            if self.sink_gradient is not None and sink is not None:
                dsink = self.sink_gradient(sink, stats, stats)
        return Gradients(
            dq if needs.q else None,
            dk if needs.k else None,
            dv if needs.v else None,
            dbias if needs.bias else None,
            dsink,
            query=dquery if needs.query else None,
            toeplitz=dtoeplitz if needs.toeplitz else None,
        )


def _sizes(problem: Problem, config: BackwardConfig, device: torch.device) -> tuple[BackwardSizes, int]:
    """Return the `BackwardSizes` and the number of groups of programs."""
    p, broadcast = problem, broadcast_group(problem)
    if p.totals is not None:  # work tiles know their sequence's lengths; these are strides and upper bounds
        row_tiles, key_tiles = p.totals[0] // config.block_m + p.batch, p.totals[1] // config.block_n + p.batch
        # A work tile zeroes the dq_accum of the one that starts ``zeroed`` later. Where computing warps add to
        # dq_accum, waiting for that spills registers: the preprocess then zeroes everything.
        zeroed = multiprocessors(device) * config.programs + -(-p.keys // config.block_n)
        if config.dq_stored or not config.dq_by_tma:
            zeroed = 1 << 29
        return BackwardSizes(1, p.kv_heads, p.group, *p.totals, row_tiles, key_tiles, 1, 1, 1, 1, zeroed, 1), 0
    batch, run = p.batch, 1
    if config.elements > 1 and p.bias is not None:
        batch = p.bias.batch * broadcast.batch
        run = p.batch // p.bias.batch if p.bias_in_runs else 1
    shape = batch, p.kv_heads, p.group, broadcast.batch, broadcast.heads, broadcast.programs
    # With a shared bias heads are not in order, and with `reduce_earlier_group` no warps are left to zero sums.
    before = broadcast.batch * broadcast.heads > 1 or reduction(p) == DBiasMode.REDUCE
    return sized(config, shape, p.queries, p.keys, multiprocessors(device), run=run, zeroed_before=before)


def _sum_heads(problem: Problem, config: BackwardConfig, sizes: BackwardSizes) -> int:
    """Return the number of key/value heads that dq_accum holds."""
    if config.elements > 1:
        return sizes.zeroed
    if config.dq_stored:
        return 0
    return problem.kv_heads * (1 if problem.totals is not None else problem.batch)


def working_memory(problem: Problem, device: torch.device) -> dict[str, int]:
    """Return the bytes that the backward of a dense call allocates beside inputs and gradients, by buffer."""
    p, config = as_matrix(problem), backward_config(as_matrix(problem))
    sizes, _ = _sizes(p, config, device)
    tiles = p.group * sizes.row_tiles
    found = {
        "statistics of rows": 2 * config.block_m * tiles * p.kv_heads * p.batch * 4,
        "dq_accum": _sum_heads(p, config, sizes) * tiles * config.block_m * backward_width(p) * 4,
    }
    if p.bias is not None and reduction(p) == DBiasMode.REDUCE:
        tile = config.block_m * config.block_n * p.bias.dtype.itemsize
        found["dS buffer"] = sizes.ds_buffer_groups * broadcast_group(p).programs * tiles * tile
    if p.bias is not None and adds(p) and p.bias.dtype != torch.float32:
        found["float32 dBias"] = p.bias.batch * p.bias.heads * p.bias.rows * p.bias.cols * 4
    return found


def _ragged(problem: Problem, config: BackwardConfig) -> bool:
    """True if the last key tile may reach past the end of the keys."""
    return problem.totals is not None or problem.keys % config.block_n != 0


def _hides_end(problem: Problem, config: BackwardConfig) -> bool:
    """True if keys past the end need a comparison of their own."""
    queries, keys = (0, 0) if problem.totals is not None else (problem.queries, problem.keys)
    return _ragged(problem, config) and not band_hides_end(queries, keys, problem.score.band.hi)


def _sorts(problem: Problem, config: BackwardConfig) -> bool:
    """True if query tiles outside, across and inside the range of relative positions have a loop each.

    The range then has only a lower end, so far from the window's end that no tile is cut by both."""
    found, distances, band = ends(problem), problem.score.query, problem.score.band
    if distances is None or not found.lo or found.hi or band.lo is not None or not config.peeled or config.ahead:
        return False
    if problem.totals is not None:  # 1.5 KB of registers would spill
        return False
    return band.hi is None or band.hi - distances.lo >= config.block_m + config.block_n


def _compiled(
    problem: Problem, config: BackwardConfig, width: int, dynamic: bool, ahead: bool = False, mends: bool = False
) -> BackwardConstants:
    bias, mask, axes = problem.bias, problem.mask, bias_axes(problem)
    values = BackwardConstants(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=width,
        BLOCK_DV=value_width(problem),
        COLS_OF_QK=depth(problem.head_dim, backward_width(problem)),
        COLS_OF_V=depth(problem.value_dim, value_width(problem)),
        COLS_OF_DQ=columns_of_dq(problem, config),
        M_SUBTILES=config.m_subtiles,
        SUBTILE_M=config.block_m // config.m_subtiles,
        STAGES=config.stages,
        DO_STAGES=config.do_stages,
        PEELED=config.peeled,
        DQ_PARTS=config.dq_parts,
        DQ_BY_TMA=config.dq_by_tma or config.dq_stored,
        DQ_STORED=config.dq_stored,
        AHEAD=config.ahead,
        K_IN_REGISTERS=config.k_in_registers,
        V_IN_REGISTERS=config.v_in_registers,
        WARPS=4 * config.warpgroups,
        ELEMENTS=config.elements,
        SHARES_KEYS=config.shares_keys,
        LOADING_REGISTERS=config.loading_registers,
        COMPUTING_REGISTERS=config.computing_registers,
        BIAS=(BiasKind.NONE if axes == BiasKind.ROWS else axes).value,
        BIAS_APART=axes == BiasKind.MATRIX and bias is not None and bias.dtype != problem.dtype,
        BIAS_BATCH=problem.bias_batch,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        **range_constants(problem),
        SORTED=_sorts(problem, config),
        **toeplitz_constants(problem, 2 * config.block_m),
        DTOEPLITZ=problem.parts is not None and "toeplitz" in problem.parts.grads,
        ZEROES_DBIAS=ahead,
        GROUP_BROADCASTS=bias is not None and bias.heads < problem.heads and problem.group > 1,
        DBIAS=reduction(problem).value,
        DBIAS_SUMS=max(1, dbias_sums(problem)),
        MASK=mask is not None and config.elements == 1,
        HIDES_KEYS=mask is not None and config.elements > 1,
        MASK_BATCH=problem.mask_period,
        MASK_GROUP=1 if mask is None else problem.heads // mask.heads,
        LONGEST_FIRST=longest_first(problem),
        MASK_ROWS=mask is not None and mask.rows > 1,
        GROUP_PROGRAMS=broadcast_group(problem).programs,
        SUM_BYTES=config.sum_bytes,
        ADDS=adds(problem),
        ORDERED=problem.deterministic and not config.dq_stored,
        DEFERRED_RELEASE=config.deferred_release and not config.dq_stored,
        RAGGED=_ragged(problem, config),
        HIDES_END=_hides_end(problem, config),
        HIDES=hides(problem),
        HEAD_SWIZZLE=config.head_swizzle,
        KEY_STAGES=config.key_stages if dynamic else 1,
        VALUE_STAGES=config.value_stages if dynamic else 1,
        DYNAMIC=dynamic,
        ZEROED_BY_TILE=problem.totals is not None and config.dq_by_tma and not config.dq_stored,
        MENDS=mends,
        PACKED=problem.totals is not None,
    )
    return constants(values)
