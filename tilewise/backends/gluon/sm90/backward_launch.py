"""From a Problem, its results and their cotangents to the launches of the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, allocation, device_of
from tilewise.backends.gluon.masks import KnownMask, MaskSummary
from tilewise.backends.gluon.packed import TileList
from tilewise.backends.gluon.preprocess import packed_preprocess_kernel, preprocess_kernel
from tilewise.backends.gluon.score import score_terms
from tilewise.backends.gluon.sm90.backward_kernel import BackwardConstants, backward_kernel
from tilewise.backends.gluon.sm90.backward_scheduler import BackwardSizes, counters
from tilewise.backends.gluon.sm90.config import BackwardConfig, backward_config, backward_width, most_registers
from tilewise.backends.gluon.sm90.dbias import (
    adds,
    bias_axes,
    bias_gradient,
    bias_gradient_allocation,
    broadcast_group,
    reduction,
)
from tilewise.backends.gluon.sm90.dbias_reduce import (
    COLS,
    ROWS,
    dbias_reduce_kernel,
    group_list_kernel,
    pieces_of_tile,
)
from tilewise.backends.gluon.sm90.dq_accum import DQ_COLS, packed_postprocess_kernel, postprocess_kernel
from tilewise.backends.gluon.sm90.launch import hides, multiprocessors
from tilewise.backends.gluon.sm90.toeplitz_gradient import ToeplitzGradient
from tilewise.backends.gluon.sm90.toeplitz_tiles import Pairs
from tilewise.backends.gluon.sm90.zero_kernel import zeros_launch
from tilewise.backends.gluon.tensors import boxes, descriptor, ragged, vector
from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import Sheared, as_matrix, range_constants
from tilewise.backends.kept_lists import Flat, KeptLists, flat_and_lists
from tilewise.backends.launcher import POINTER, Launch, constants, strided
from tilewise.backends.sinks import SinkGradient
from tilewise.problem import Problem


class Backward:
    """A backward with everything but its tensors, for one problem and one layout of these.

    Every gradient is computed, also where nobody needs it.
    """

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs):
        q, k, v, bias, mask, sink, parts, *_ = inputs
        self.values = None
        if parts is not None and parts.query is not None and problem.score.query is not None:
            self.values = Sheared(parts.query, problem.score.query)
            problem, bias = as_matrix(problem), self.values.like
        self.problem, self.needs, self.row_list = problem, needs, None
        config = backward_config(problem)
        width, block_m, block_n = backward_width(problem), config.block_m, config.block_n
        self.block_m = block_m
        row_warps = 8 if width == 256 else 4  # of the kernels before and after
        p = problem
        sizes, groups = _sizes(problem, config, inputs.q.device)
        batch = 1 if p.totals is not None else p.batch
        row_programs = sizes.row_tiles * p.heads * batch
        do, dlse = cotangents
        # float32: of each tile of queries the LSE in base 2, then −delta; the sum of dQ
        # of a Toeplitz bias that again, of far tiles
        toeplitz = None if parts is None else parts.toeplitz
        stats_of_tile = 2 * block_m if toeplitz is None else 4 * block_m
        stats = torch.empty(stats_of_tile * row_programs, dtype=torch.float32, device="meta")
        dq_accum = torch.empty(
            row_programs * block_m * width // DQ_COLS.value, DQ_COLS.value, dtype=torch.float32, device="meta"
        )
        dq, dk, dv = (torch.empty_like(x, device="meta") for x in (q, k, v))
        self.empty_dbias = bias_gradient_allocation(problem, bias)
        dbias = None if self.empty_dbias is None else self.empty_dbias(device="meta")
        self.adds = reduction(problem) == "add"
        if self.adds and self.values is not None:
            dbias = self.values.gradient_like
        # the ring of dS of a bias that is shared
        ring = None
        if bias is not None and reduction(problem) == "reduce":
            places = sizes.ring * broadcast_group(problem).programs
            ring = torch.empty(places, p.group * sizes.row_tiles, block_m, block_n, dtype=bias.dtype, device="meta")
        self.empty_ring = None if ring is None else allocation(ring, q.device)
        counted = counters(sizes, groups, p.deterministic, ring is not None)
        counts = torch.empty(counted, dtype=torch.int32, device="meta")
        self.empty_stats, self.empty_dq_accum, self.empty_counts, self.empty_dq, self.empty_dk, self.empty_dv = (
            allocation(x, q.device) for x in (stats, dq_accum, counts, dq, dk, dv)
        )
        self.summary, self.mask = None, None
        if p.mask is not None:
            self.summary = MaskSummary(problem, mask, q.device, block_n, 1, by_keys=True)
            self.mask = KeptLists(self._known_mask, problem)
        dlse_rows = None if dlse is None else dlse[..., None]
        work_tiles, programs = sizes.key_tiles * p.kv_heads * batch, multiprocessors(q.device) * config.programs
        packed = p.totals is not None
        dynamic = packed or (config.dynamic and reduction(p) != "reduce" and work_tiles > programs)
        if packed:
            self.row_list, self.key_list = TileList(p, block_m, dq), TileList(p, block_n, dk, dv, by_keys=True)
            self.gaps = inputs.lengths is not None and inputs.lengths.used_k is not None
        rows_listed, box = (POINTER,) * packed, ragged if packed else descriptor
        terms, c, axes = score_terms(problem), _compiled(problem, config, width, dynamic), bias_axes(problem)
        self.pairs = None
        if toeplitz is not None:
            self.pairs = Pairs(problem, toeplitz, 1.0 / p.score.scale)
            self.toeplitz = ToeplitzGradient(problem, toeplitz, sizes, terms, c, row_programs)
        if self.adds and self.values is not None:
            self.zeros = zeros_launch(self.values.gradient_plain, p.keys, terms, block_m, block_n)
        self.of_rows, self.of_pairs = axes == "rows", axes in ("matrix", "cols")
        self.before = Launch(
            packed_preprocess_kernel if packed else preprocess_kernel,
            row_programs,
            (
                strided(outputs.o),
                strided(do),
                POINTER,
                strided(dlse_rows),
                strided(bias if self.of_rows else None),
                POINTER,
                POINTER,
                POINTER,
                *rows_listed,
            ),
            (p.value_dim, sizes, counted, c.BIAS_GROUP.value, dlse is not None, self.of_rows, block_m, width),
            num_warps=row_warps,
        )
        dbias_tiles = [POINTER, strided(None if ring is None else dbias), POINTER, POINTER]
        if ring is not None:
            dbias_tiles[0] = boxes(ring, [c.GROUP_PROGRAMS.value, 1, ROWS.value, COLS.value], ring.stride())
        self.main = Launch(
            backward_kernel,
            min(programs, work_tiles) if dynamic else work_tiles,
            (
                box(q, block_m, width),
                box(k, block_n, width),
                box(v, block_n, width),
                box(do, block_m, width),
                strided(bias) if axes == "cols" else descriptor(bias if axes == "matrix" else None, block_m, block_n),
                vector(stats, block_m),
                boxes(dq_accum, [block_m * width // config.dq_parts // DQ_COLS.value, DQ_COLS.value], dq_accum.stride())
                if config.dq_by_tma
                else POINTER,
                box(dk, block_n, width),
                box(dv, block_n, width),
                POINTER
                if c.DBIAS.value == "sum" or toeplitz is not None
                else descriptor(dbias if ring is None else ring, block_m, block_n),
                POINTER if self.summary is None else vector(self.summary.bits_like, 2 * block_n),
                POINTER,
                *dbias_tiles,
            ),
            (terms, sizes, c),
            num_warps=4 * config.warpgroups,
            launch_pdl=True,
            **most_registers(config.programs, config.warpgroups + 1),
        )
        self.list_groups = None
        if ring is not None and p.mask is not None:  # which of its tiles are stored
            self.list_groups = Launch(group_list_kernel, groups, (POINTER, POINTER), (terms, sizes, c), num_warps=4)
            lists = torch.empty(groups, 1 + p.group * sizes.row_tiles, dtype=torch.int32, device="meta")
            self.empty_lists = allocation(lists, q.device)
        last, parts = min(sizes.lag, groups), pieces_of_tile(block_m, block_n)
        self.reduce_group = Launch(
            dbias_reduce_kernel, last * parts, dbias_tiles, (groups - last, parts, terms, sizes, c), num_warps=2
        )  # fmt: skip
        # Beside the last programs of `main`, unless they are most of it: what waits disturbs them.
        beside = work_tiles >= 4 * programs and not packed
        self.after = Launch(
            packed_postprocess_kernel if packed else postprocess_kernel,
            row_programs,
            (POINTER, strided(dq), POINTER),
            (p.head_dim, p.score.scale, sizes, config.dq_parts, block_m, width),
            num_warps=4 * config.warpgroups,
            launch_pdl=beside,
        )
        self.sink_gradient = None
        if needs.sink and sink is not None and outputs.lse is not None:  # after a tile's LSE stands its -delta
            self.sink_gradient = SinkGradient(sink, outputs.lse, block_m, 2 * block_m, block_m, negative=True)

    def _known_mask(self, mask: Flat) -> KnownMask:
        assert self.summary is not None
        known = self.summary(mask)
        if self.list_groups is not None:
            known = known._replace(group_lists=self.empty_lists())
            self.list_groups(known.states, known.group_lists)
        return known

    def __call__(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        q, k, v, bias, mask, sink, parts, _, lengths, tiles = inputs
        o, lse = outputs
        do, dlse = cotangents
        needs = self.needs
        with device_of(q):
            stats, dq_accum, counts = self.empty_stats(), self.empty_dq_accum(), self.empty_counts()
            dq, dk, dv = self.empty_dq(), self.empty_dk(), self.empty_dv()
            rows_listed: tuple[Tensor, ...] = ()
            key_list = None
            if self.row_list is not None and lengths is not None:
                rows_listed, (key_list, _) = self.row_list(lengths, dq)[:1], self.key_list(lengths, dk, dv)
                if self.gaps:  # keys that do not count
                    dk.zero_()
                    dv.zero_()
            dbias = None if self.empty_dbias is None else self.empty_dbias(device=q.device)
            values = None
            if self.values is not None and parts is not None and parts.query is not None:
                values = parts.query
                bias = self.values.laid_out(values)
                if self.adds:
                    dbias = self.values.empty_gradient(values)
                    self.zeros(self.values.entries(dbias))
            dtoeplitz, pairs = None, None
            if self.pairs is not None and parts is not None and parts.toeplitz is not None and lse is not None:
                pairs = self.pairs(parts.toeplitz)
                dtoeplitz = self.toeplitz.begin(lse, pairs, stats)
            self.before(o, do, lse, dlse, bias if self.of_rows else None, stats, dq_accum, counts, *rows_listed)
            ring = None if self.empty_ring is None else self.empty_ring()
            _, known = flat_and_lists(self.mask, mask, tiles, KnownMask())
            tile_list = known.tile_list
            if key_list is not None:
                tile_list = key_list
            dbias_tiles = (
                dq_accum if ring is None else ring, None if ring is None else dbias, counts, known.group_lists
            )  # fmt: skip
            of_pairs = bias if self.of_pairs else pairs
            found = (dbias if ring is None else ring) if self.pairs is None else dtoeplitz
            self.main(q, k, v, do, of_pairs, stats, dq_accum, dk, dv, found, known.bits, tile_list, *dbias_tiles)
            self.after(dq_accum, dq, *(rows_listed or (counts,)))  # next, because it begins while `main` still runs
            if ring is not None:
                self.reduce_group(*dbias_tiles)
            dquery = None
            if self.adds and self.values is not None and values is not None and dbias is not None:
                dquery = self.values.gradient(dbias, values)
            if needs.bias and bias is not None:
                dbias = bias_gradient(self.problem, bias, dbias, lse, dlse)
            if dtoeplitz is not None:
                dtoeplitz = self.toeplitz.end(dtoeplitz)
            dsink = None
            if self.sink_gradient is not None and sink is not None and lse is not None:
                dsink = self.sink_gradient(sink, lse, stats)
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
    """Sizes, and how many groups of programs there are."""
    p, broadcast = problem, broadcast_group(problem)
    if p.totals is not None:  # a work tile knows its sequence's lengths; these are strides, and the most that could be
        row_tiles, key_tiles = p.totals[0] // config.block_m + p.batch, p.totals[1] // config.block_n + p.batch
        sizes = BackwardSizes(1, p.kv_heads, p.group, *p.totals, row_tiles, key_tiles, 1, 1, 1, 1, p.kv_heads)
        return sizes, 0
    row_tiles, key_tiles = -(-p.queries // config.block_m), -(-p.keys // config.block_n)
    groups = key_tiles * p.kv_heads * p.batch // broadcast.programs
    # A group has about ended when one starts that is as many groups later as a GPU runs at once.
    lag = -(-multiprocessors(device) * config.programs // broadcast.programs)
    ring = min(2 * lag + 2, groups)
    # Where a bias is shared, heads are not in their order. Else the programs of a head have begun when those of a head
    # start that is as much later as a GPU runs at once, and one more; `backward_scheduler.head_and_tile` may mix some
    # heads.
    heads = p.batch * p.kv_heads
    zeroed = heads if broadcast.batch * broadcast.heads > 1 else -(-lag // key_tiles) + 1
    zeroed = -(-zeroed // config.head_swizzle) * config.head_swizzle
    sizes = BackwardSizes(p.batch, p.kv_heads, p.group, p.queries, p.keys, row_tiles, key_tiles, broadcast.batch,
                          broadcast.heads, ring, lag, min(zeroed, heads))  # fmt: skip
    return sizes, groups


def _compiled(problem: Problem, config: BackwardConfig, width: int, dynamic: bool) -> BackwardConstants:
    bias, mask, axes = problem.bias, problem.mask, bias_axes(problem)
    values = BackwardConstants(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=width,
        M_SUBTILES=config.m_subtiles,
        SUBTILE_M=config.block_m // config.m_subtiles,
        STAGES=config.stages,
        DO_STAGES=config.do_stages,
        PEELED=config.peeled,
        DQ_PARTS=config.dq_parts,
        DQ_BY_TMA=config.dq_by_tma,
        AHEAD=config.ahead,
        K_IN_REGISTERS=config.k_in_registers,
        V_IN_REGISTERS=config.v_in_registers,
        WARPS=4 * config.warpgroups,
        SHARES_KEYS=config.shares_keys,
        LOADING_REGISTERS=config.loading_registers,
        BIAS="none" if axes == "rows" else axes,
        BIAS_APART=axes == "matrix" and bias is not None and bias.dtype != problem.dtype,
        BIAS_BATCH=bias is not None and bias.batch > 1,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        **range_constants(problem),
        **toeplitz_constants(problem, 2 * config.block_m),
        DTOEPLITZ=problem.parts is not None and "toeplitz" in problem.parts.grads,
        GROUP_BROADCASTS=bias is not None and bias.heads < problem.heads and problem.group > 1,
        DBIAS=reduction(problem),
        MASK=mask is not None,
        MASK_BATCH=mask is not None and mask.batch > 1,
        MASK_GROUP=1 if mask is None else problem.heads // mask.heads,
        MASK_ROWS=mask is not None and mask.rows > 1,
        GROUP_PROGRAMS=broadcast_group(problem).programs,
        SUM_BYTES=config.sum_bytes,
        ADDS=adds(problem),
        ORDERED=problem.deterministic,
        DEFERRED_RELEASE=config.deferred_release,
        RAGGED=problem.totals is not None or problem.keys % config.block_n != 0,
        HIDES=hides(problem),
        HEAD_SWIZZLE=config.head_swizzle,
        KEY_STAGES=config.key_stages if dynamic else 1,
        DYNAMIC=dynamic,
        PACKED=problem.totals is not None,
    )
    return constants(values)
