"""From a Problem and its tensors to kernel launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise.backends import Inputs, Outputs, device_of, empty_output, output_layout
from tilewise.backends.gluon.masks import KnownMask, MaskSummary
from tilewise.backends.gluon.packed import TileList
from tilewise.backends.gluon.packed_values import PackedValues, laid_out
from tilewise.backends.gluon.score import LOG2E, score_terms
from tilewise.backends.gluon.sm90.config import (
    L2_CACHE,
    Config,
    band_of,
    forward_config,
    most_registers,
    padded,
    sees_few,
)
from tilewise.backends.gluon.sm90.dbias import bias_axes
from tilewise.backends.gluon.sm90.forward_kernel import ForwardConstants, forward_kernel
from tilewise.backends.gluon.sm90.repair_kernel import RepairConstants, packed_repair_kernel, repair_kernel
from tilewise.backends.gluon.sm90.toeplitz_tiles import Pairs
from tilewise.backends.gluon.tensors import descriptor, ragged
from tilewise.backends.gluon.tile_scheduler import ForwardSizes
from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import Sheared, as_matrix, range_constants
from tilewise.backends.kept_lists import KeptLists, flat_and_lists
from tilewise.backends.launcher import (
    ENDS,
    PLACE,
    POINTER,
    Launch,
    constants,
    kinds,
    place,
    resized_launches,
    sink_layout,
    strided,
)
from tilewise.backends.protocol import Structure
from tilewise.backends.score import limited
from tilewise.backends.tile_mask import tile_how, tile_layout
from tilewise.problem import Problem
from tilewise.score import tiles

WAVES = 2  # tiles of queries for each program that differ in length and balance each other


class Forward:
    """A forward with everything but its tensors, for one problem and one layout of these."""

    def __init__(self, problem: Problem, inputs: Inputs):
        q, k, v, bias, mask, sink, parts, *_ = inputs
        problem = as_matrix(problem)
        self.config, self.raster = (config := forward_config(problem)), raster(problem)
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
        self.shape, self.block_m = (problem.batch, problem.heads, problem.group), config.block_m
        sizes = _sizes(problem, config, programs)
        packed = inputs.lengths is not None
        terms = score_terms(problem)
        c = _compiled(problem, config, config.dynamic and (packed or sizes.tiles > programs))
        self.always_hides, self.banded = always_hides(problem), not problem.score.band.unlimited
        self.choices = self._choices(*band_of(problem), sizes.tiles)
        box = ragged if packed else descriptor
        self.mask = None
        if problem.mask is not None:
            self.mask = KeptLists(MaskSummary(problem, mask, q.device, config.block_n, config.warpgroups), problem)
        o = empty_output(q, problem.value_dim, "meta")
        self.packed = None if inputs.lengths is None else TileList(problem, config.block_m, o)
        self.layout_o = o.shape, o.stride()
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
        # For `resized`: row widths of descriptors, and `resized_launches` of these.
        self.resizable = inputs.parts is None and inputs.lengths is None and problem.mask is None
        self.widths = place(q.shape, (), q.element_size())[-1], place(o.shape, (), q.element_size())[-1]
        self.has_more = bias is not None or sink is not None
        self.made: dict[tuple, list[Any]] = {}
        if c.HIDES.value:
            r = _repair(problem, config)
            looks = _looks(sizes, r)
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
        launches = (self.main,) if self.repair is None else (self.main, self.repair)
        self.bases = tuple(zip(launches, _places(bias is not None, sink is not None), strict=False))

    def resized(self, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs) -> Resized | None:
        """For other lengths; None where these ask for something else that is compiled in."""
        _, M, N, (q_shape, q_strides, k_shape, k_strides, v_shape, v_strides) = structure
        sizes = _sized(*self.shape, M, N, self.block_m, self.programs)
        if self._choices(M, N, lo, hi, sizes.tiles) != self.choices:
            return None
        o_shape, o_strides = layout_o = output_layout(q_shape, q_strides, v_shape[3])
        wide, value_wide = self.widths
        given = (
            *q_shape, *q_strides, wide, *k_shape, *k_strides, wide, *v_shape, *v_strides, value_wide,
            *o_shape, *o_strides, value_wide, *(self._more(inputs) if self.has_more else ()), *ENDS,
        )  # fmt: skip
        first, last = tiles.clipped(lo, hi)
        terms, _, c = self.main.numbers
        if self.banded:
            terms = limited(terms, first, last)
        launches: list[tuple[int, tuple[Any, ...]]] = [(min(sizes.tiles, self.programs), (terms, sizes, c))]
        if self.repair is not None:
            d, dv, terms, _, r = self.repair.numbers
            if self.banded:
                terms = limited(terms, first, last)
            launches.append((min(_looks(sizes, r), self.programs), (d, dv, terms, sizes, r)))
        found = resized_launches(self.bases, self.made, kinds((*sizes, first, last)), given, launches)
        return Resized(self, layout_o, found[0], found[1] if self.repair is not None else None)

    def _more(self, inputs: Inputs) -> tuple[int, ...]:
        """How bias and sink lie."""
        bias, sink = inputs.bias, inputs.sink
        found = () if bias is None else place(bias.shape, bias.stride(), bias.element_size())
        return found if sink is None else found + place((*sink.shape, 1), (*sink.stride(), 1), 1)

    def _choices(self, M: int, N: int, lo: int | None, hi: int | None, tiles_of_rows: int) -> tuple[bool | str, ...]:
        """All that depends on lengths in what is compiled in, of a problem without a mask and parts."""
        return (
            N % self.config.block_n != 0,
            self.always_hides or tiles.hides(M, N, lo, hi),
            self.banded and sees_few(M, N, lo, hi),
            tiles_of_rows > self.programs,
            self.raster.at(M, N),
        )

    def __call__(self, inputs: Inputs) -> Outputs:
        q, k, v, bias, mask, sink, parts, seed, lengths, tiles = inputs
        with device_of(q):
            o = torch.empty_strided(*self.layout_o, dtype=q.dtype, device=q.device)
            lse = torch.empty(self.layout_o[0][:3], dtype=torch.float32, device=q.device)
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


class Resized:
    """A `Forward` for other lengths, of a call without a mask, parts of a bias and lengths of sequences."""

    __slots__ = ("layout_o", "main", "of", "repair")

    def __init__(self, of: Forward, layout_o: Any, main: Any, repair: Any) -> None:
        self.of, self.layout_o, self.main, self.repair = of, layout_o, main, repair

    def __call__(self, inputs: Inputs) -> Outputs:
        q, k, v, bias, _, sink, _, seed, *_ = inputs
        with device_of(q):
            device, (shape, strides) = q.device, self.layout_o
            o = torch.empty_strided(shape, strides, dtype=q.dtype, device=device)
            lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
            count = torch.zeros(1, dtype=torch.int32, device=device) if self.of.dynamic else None
            self.main(q, k, v, bias, sink, seed, None, None, o, lse, count)
            if self.repair is not None:
                self.repair(q, k, v, bias, None, sink, seed, o, lse)
        return Outputs(o, lse)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _sizes(problem: Problem, config: Config, programs: int) -> ForwardSizes:
    p = problem
    if p.totals is not None:  # a work tile knows its sequence's lengths; these are strides, and the most that could be
        row_tiles = p.totals[0] // config.block_m + p.batch
        return ForwardSizes(1, p.heads, p.group, *p.totals, row_tiles, row_tiles * p.heads, 1, 0)
    return _sized(p.batch, p.heads, p.group, p.queries, p.keys, config.block_m, programs)


def _sized(
    batch: int, heads: int, group: int, queries: int, keys: int, block_m: int, programs: int
) -> ForwardSizes:  # fmt: skip
    """Of a call that is no packed batch."""
    row_tiles, all_heads = -(-queries // block_m), heads * batch
    at_once = min(-(-WAVES * programs // (row_tiles * group)) * group, all_heads)
    last = (all_heads // at_once - 1) * at_once
    found = batch, heads, group, queries, keys, row_tiles, row_tiles * all_heads, at_once, last
    return tuple.__new__(ForwardSizes, found)


def _places(has_bias: bool, has_sink: bool) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Where tensors begin among how they lie, of the main launch and the repair."""
    q, k, v, o, end = (PLACE * n for n in range(5))
    bias = end if has_bias else None
    sink = end + PLACE * has_bias if has_sink else None
    return (q, k, v, bias, sink, None, None, None, o, None, None), (q, k, v, bias, None, sink, None, o, None)


def _looks(sizes: ForwardSizes, r: RepairConstants) -> int:
    """Programs of the repair, each of which looks at so many tiles of rows."""
    looks = -(-sizes.queries // r.BLOCK_M.value) * sizes.heads * sizes.batch
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
        WORDS_LAST=config.words_last,
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
        ORDER=raster(problem).at(problem.queries, problem.keys),
        DYNAMIC=dynamic,
        PACKED=problem.totals is not None,
    )
    return constants(values)


class Raster(NamedTuple):
    """Which tiles of scores run side by side, at any lengths."""

    order: str  # as of `Problem.raster_order`
    key_bytes: int  # of a head's keys and values in all batch elements, for each key; 0 where that does not matter
    pair_bytes: int  # of the bias that these share, for each query and key

    def at(self, queries: int, keys: int) -> str:
        shared = self.pair_bytes * queries * keys
        return "tiles" if shared <= L2_CACHE // 2 < self.key_bytes * keys else self.order


def raster(problem: Problem) -> Raster:
    """`Problem.raster_order`, but tiles of one head also beside a bias that batch elements share, where the L2 cache
    has room for all of that and not for the head's keys and values: in the order of the batch every tile of queries
    would read these from memory again."""
    p, bias, order = problem, problem.bias, problem.raster_order
    if order != "batch" or bias is None or p.totals is not None or p.parts is not None:
        return Raster(order, 0, 0)
    key_bytes = p.batch * (p.head_dim + p.value_dim) * p.dtype.itemsize
    return Raster(order, key_bytes, bias.batch * bias.heads * bias.dtype.itemsize)


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
    return always_hides(problem) or tiles.hides(*band_of(problem))


def always_hides(problem: Problem) -> bool:
    """Whatever the lengths."""
    toeplitz = problem.parts is not None and problem.parts.toeplitz is not None
    if problem.mask is not None or toeplitz or bias_axes(problem) in ("matrix", "cols"):
        return True
    # Of a packed batch a band counts from each sequence's end, and its lengths lie on the device.
    return problem.totals is not None and not problem.score.band.unlimited
