"""From a Problem and its tensors to kernel launches."""

from __future__ import annotations

from functools import partial

import torch

from tilewise.backends import Inputs, Outputs, allocation, device_of, empty_output, output_layout
from tilewise.backends.gluon.masks import KnownMask, MaskSummary
from tilewise.backends.gluon.packed import TileList
from tilewise.backends.gluon.packed_values import PackedValues, laid_out
from tilewise.backends.gluon.score import LOG2E, score_terms
from tilewise.backends.gluon.sm90.config import Config, forward_config, most_registers, padded, sees_few
from tilewise.backends.gluon.sm90.dbias import bias_axes
from tilewise.backends.gluon.sm90.forward_kernel import ForwardConstants, forward_kernel
from tilewise.backends.gluon.sm90.repair_kernel import RepairConstants, packed_repair_kernel, repair_kernel
from tilewise.backends.gluon.sm90.toeplitz_tiles import Pairs
from tilewise.backends.gluon.tensors import descriptor, ragged
from tilewise.backends.gluon.tile_scheduler import ForwardSizes
from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import Sheared, as_matrix, range_constants
from tilewise.backends.kept_lists import KeptLists, flat_and_lists
from tilewise.backends.launcher import POINTER, Launch, Place, constants, sink_layout, strided
from tilewise.backends.score import limited
from tilewise.backends.tile_mask import tile_how, tile_layout
from tilewise.problem import Problem

WAVES = 2  # tiles of queries for each program that differ in length and balance each other


class Forward:
    """A forward with everything but its tensors, for one problem and one layout of these."""

    def __init__(self, problem: Problem, inputs: Inputs):
        q, k, v, bias, mask, sink, parts, *_ = inputs
        problem = as_matrix(problem)
        self.config = config = forward_config(problem)
        self.values: Sheared | PackedValues | None = None
        if parts is not None and parts.query is not None and problem.score.query is not None:
            if problem.totals is None:
                self.values = Sheared(parts.query, problem.score.query)
            else:
                self.values = PackedValues(problem, parts.query, config.block_m)
            bias = self.values.like
        self.pairs = None
        if parts is not None and parts.toeplitz is not None:
            self.pairs, bias = Pairs(problem, parts.toeplitz, 1.0 / problem.score.scale), parts.toeplitz
        self.programs = programs = multiprocessors(q.device) * config.programs  # that run at once
        sizes = _sizes(problem, config, programs)
        packed = inputs.lengths is not None
        terms = score_terms(problem)
        c = _compiled(problem, config, config.dynamic and (packed or sizes.tiles > programs))
        self.choices = _choices(problem, config, sizes, programs)
        box = ragged if packed else descriptor
        self.mask = None
        if problem.mask is not None:
            self.mask = KeptLists(MaskSummary(problem, mask, q.device, config.block_n, config.warpgroups), problem)
        o = empty_output(q, problem.value_dim, "meta")
        self.packed = None if inputs.lengths is None else TileList(problem, config.block_m, o)
        self.empty_o = allocation(o, q.device)
        self.empty_lse = allocation(q.new_empty(q.shape[:3], dtype=torch.float32, device="meta"), q.device)
        is_matrix = c.BIAS.value == "matrix"
        self.dynamic = c.DYNAMIC.value
        self.main = Launch(
            forward_kernel,
            min(sizes.tiles, programs),  # the next tile's loads run under the end of the last
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
                POINTER,
                POINTER,
            ),
            (terms._replace(exponent=LOG2E, inverse=1.0) if config.scale_in_q else terms, sizes, c),
            num_warps=4,
            **most_registers(config.programs, config.warpgroups + 1),
        )
        self.repair = None
        self.resizable = inputs.parts is None and inputs.lengths is None and problem.mask is None
        if c.HIDES.value:
            r = _repair(problem, config)
            looks = _looks(problem, sizes, r)
            tile_list = (POINTER,) if packed else ()
            pairs = strided(mask) if inputs.tiles is None else tile_layout()
            self.repair = Launch(
                packed_repair_kernel if packed else repair_kernel,
                min(looks, programs),
                (
                    *(strided(x) for x in (q, k, v, bias)),
                    pairs,
                    sink_layout(sink),
                    POINTER,
                    *tile_list,
                    strided(o),
                    POINTER,
                ),
                (problem.head_dim, problem.value_dim, terms, sizes, r),
                num_warps=8,
            )

    def resized(self, problem: Problem, inputs: Inputs) -> Forward | None:
        """For other lengths; None where these ask for something else that is compiled in."""
        config, (q, k, v, bias, _, sink, *_) = self.config, inputs
        sizes = _sizes(problem, config, self.programs)
        if _choices(problem, config, sizes, self.programs) != self.choices:
            return None
        new = object.__new__(Forward)
        new.__dict__.update(self.__dict__)
        device, o = q.device, Place(*output_layout(q, problem.value_dim), q.element_size())
        new.empty_o = partial(torch.empty_strided, o.shape, o.strides, dtype=q.dtype, device=device)
        new.empty_lse = partial(torch.empty, o.shape[:3], dtype=torch.float32, device=device)
        rows = Place.of(q), Place.of(k), Place.of(v), None if bias is None else Place.of(bias)
        sink_row = None if sink is None else Place.of(sink[..., None])
        band = problem.score.band
        terms, _, c = self.main.numbers
        new.main = self.main.resized(
            min(sizes.tiles, self.programs),
            (*rows, sink_row, None, None, None, o, None, None),
            (limited(terms, band), sizes, c),
        )
        if self.repair is not None:
            d, dv, terms, _, r = self.repair.numbers
            new.repair = self.repair.resized(
                min(_looks(problem, sizes, r), self.programs),
                (*rows, None, sink_row, None, o, None),
                (d, dv, limited(terms, band), sizes, r),
            )
        return new

    def __call__(self, inputs: Inputs) -> Outputs:
        q, k, v, bias, mask, sink, parts, seed, lengths, tiles = inputs
        with device_of(q):
            o, lse = self.empty_o(), self.empty_lse()
            flat, known = flat_and_lists(self.mask, mask, tiles, KnownMask())
            tile_list = known.tile_list
            tile_count_semaphore = None
            if self.packed is not None and lengths is not None:
                tile_list, tile_count_semaphore = self.packed(lengths, o, lse=lse)
            elif self.dynamic:
                tile_count_semaphore = torch.zeros(1, dtype=torch.int32, device=q.device)
            if parts is not None and parts.query is not None:
                bias = laid_out(self.values, parts.query, tile_list)
            added = bias
            if self.pairs is not None and parts is not None and parts.toeplitz is not None:
                bias, added = parts.toeplitz, self.pairs(parts.toeplitz)
            self.main(q, k, v, added, sink, seed, known.bits, tile_list, o, lse, tile_count_semaphore)
            if self.repair is not None:
                listed = () if self.packed is None else (tile_list,)
                self.repair(q, k, v, bias, *flat, sink, seed, *listed, o, lse)
        return Outputs(o, lse)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _sizes(problem: Problem, config: Config, programs: int) -> ForwardSizes:
    p = problem
    if p.totals is not None:  # a work tile knows its sequence's lengths; these are strides, and the most that could be
        row_tiles = p.totals[0] // config.block_m + p.batch
        return ForwardSizes(1, p.heads, p.group, *p.totals, row_tiles, row_tiles * p.heads, 1, 0)
    row_tiles = -(-p.queries // config.block_m)
    heads = p.heads * p.batch
    at_once = min(-(-WAVES * programs // (row_tiles * p.group)) * p.group, heads)
    last = (heads // at_once - 1) * at_once
    return ForwardSizes(p.batch, p.heads, p.group, p.queries, p.keys, row_tiles, row_tiles * heads, at_once, last)


def _choices(problem: Problem, config: Config, sizes: ForwardSizes, programs: int) -> tuple[bool, ...]:
    """All that depends on lengths in what is compiled in, of a problem without a mask and parts."""
    return (
        problem.keys % config.block_n != 0,
        hides(problem),
        not problem.score.band.unlimited and sees_few(problem),
        sizes.tiles > programs,
    )


def _looks(problem: Problem, sizes: ForwardSizes, r: RepairConstants) -> int:
    """Programs of the repair, each of which looks at so many tiles of rows."""
    looks = -(-sizes.queries // r.BLOCK_M.value) * problem.heads * sizes.batch
    return -(-looks // r.SCAN.value)


def _compiled(problem: Problem, config: Config, dynamic: bool) -> ForwardConstants:
    bias, mask = problem.bias, problem.mask
    range_, far = range_constants(problem), toeplitz_constants(problem, 2 * config.block_n)
    loops = config.peeled or range_["RANGE_LO"] or far["FAR_LO"] or far["FAR_HI"]
    values = ForwardConstants(
        BLOCK_N=config.block_n,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.value_dim),
        WARPGROUPS=config.warpgroups,
        Q_STAGES=config.q_stages,
        STAGES=config.stages,
        BIAS_STAGES=config.bias_stages,
        BIAS_FIRST=config.bias_first,
        LAZY=config.lazy,
        SUMS_BY_THREAD=config.sums_by_thread,
        PEELED=config.peeled,
        SKIPS_HIDDEN=config.skips_hidden,
        PAIRS=loops or bool(problem.score.dropout),
        O_IN_Q=config.o_in_q,
        O_IN_BIAS=config.o_in_bias,
        Q_IN_REGISTERS=config.q_in_registers,
        SCALE_IN_Q=config.scale_in_q,
        COMPUTING_REGISTERS=config.registers[0],
        LOADING_REGISTERS=config.registers[1],
        BIAS=bias_axes(problem),
        BIAS_BATCH=bias is not None and bias.batch > 1,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        **range_,
        **far,
        MASK=mask is not None,
        MASK_BATCH=mask is not None and mask.batch > 1,
        MASK_GROUP=1 if mask is None else problem.heads // mask.heads,
        MASK_ROWS=mask is not None and mask.rows > 1,
        RAGGED=problem.totals is not None or problem.keys % config.block_n != 0,
        HIDES=hides(problem),
        ORDER=problem.raster_order,
        DYNAMIC=dynamic,
        PACKED=problem.totals is not None,
    )
    return constants(values)


def _repair(problem: Problem, config: Config) -> RepairConstants:
    toeplitz = None if problem.parts is None else problem.parts.toeplitz
    bias, mask = toeplitz or problem.bias, problem.mask
    block_d, block_dv = padded(problem.head_dim), padded(problem.value_dim)
    block_m = 64 if max(block_d, block_dv) < 128 else 32  # none of these spills
    values = RepairConstants(
        BLOCK_M=block_m,
        BLOCK_N=32,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        SCAN=2048 // block_m,
        BIAS=bias is not None,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        BIAS_COLS=bias is not None and bias.cols > 1,
        RELATIVE=problem.score.query is not None,
        TOEPLITZ=toeplitz is not None,
        MASK=mask is not None,
        MASK_GROUP=1 if mask is None else problem.heads // mask.heads,
        MASK_COLS=mask is not None and mask.cols > 1,
        MASK_TILES=problem.tile_mask is not None,
        MASK_HOW=tile_how(problem, block_m, 32),
        LISTED=0 if problem.totals is None else config.block_m,
    )
    return constants(values)


def hides(problem: Problem) -> bool:
    """Whether the forward kernel may multiply a pair that is hidden, or a bias that its units cannot hold."""
    toeplitz = problem.parts is not None and problem.parts.toeplitz is not None
    if problem.mask is not None or toeplitz or bias_axes(problem) in ("matrix", "cols"):
        return True
    if problem.totals is not None:  # a band counts from each sequence's end, and its lengths lie on the device
        return not problem.score.band.unlimited
    return problem.pairs != problem.batch * problem.heads * problem.queries * problem.keys
