"""Kernel launches of the Triton forward and backward for a Problem and the layouts of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends import (
    Gradients,
    Inputs,
    Needs,
    Outputs,
    allocation,
    clear_statistics,
    device_of,
    empty_low_bits,
    empty_mended,
    empty_output,
    heads_first,
    rows_first,
    saved_lse_dtype,
)
from tilewise.backends.kernels.block_mask import tile_how, tile_layout
from tilewise.backends.kernels.score import INTERPRET
from tilewise.backends.kernels.sinks import SinkGradient
from tilewise.backends.kernels.statistics import RowResults, StatisticsHow
from tilewise.backends.kernels.tile_lists import TileListCache, flat_and_lists
from tilewise.backends.launch.launcher import (
    POINTER,
    Launch,
    Record,
    boxed,
    constants,
    sink_layout,
    strided,
    strided_if_any,
)
from tilewise.backends.protocol import Structure
from tilewise.backends.triton.backward import (
    OwnKeys,
    backward_kernel,
    finite_kernel,
    postprocess_kernel,
    preprocess_kernel,
)
from tilewise.backends.triton.bias_components import (
    bias_first,
    cast_part_gradients,
    empty_part_gradients,
    first_added,
    flat_gradients,
    flat_parts,
    has_far_tiles,
    is_added,
    kernel_terms,
    packed_layout,
    part_hows,
    parts_layout,
)
from tilewise.backends.triton.config import (
    Columns,
    TritonConfig,
    backward_config,
    by_blocks,
    columns,
    every_pair_alike,
    forward_config,
    precision,
    second_walk_stages,
    splits,
)
from tilewise.backends.triton.forward import forward_kernel, merge_kernel
from tilewise.backends.triton.masks import NO_LISTS, MaskLists, lists_pay
from tilewise.backends.triton.ordered import (
    bias_gradient_kernel,
    diagonal_gradient_kernel,
    distance_gradient_kernel,
    query_gradient_kernel,
)
from tilewise.backends.triton.reductions import (
    BiasReduction,
    bias_reduction,
    empty_bias_gradient,
    is_ordered,
    is_stored_whole,
    is_summed,
)
from tilewise.backends.triton.resized import (
    ResizedForward,
    forward_bases,
    forward_programs,
    ragged,
    resized_backward,
    resized_forward,
    smaller,
)
from tilewise.backends.triton.tensors import (
    Broadcast,
    ProblemSizes,
    begins_anywhere,
    broadcast,
    comes_by_elements,
    descriptor,
    wide,
)
from tilewise.backends.triton.varlen import flat_lengths, lengths_layout, packed_sink_gradient, tile_count
from tilewise.backends.triton.varlen_preprocess import packed_preprocess_kernel, programs
from tilewise.spec.operands import BiasKind, TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.tma import tensor_fits_tma

NO_STATISTICS = StatisticsHow(False, False, False)


class Constexprs(NamedTuple):
    """Compile-time parameters of the kernels; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any  # head dimension, padded to a power of two, or a block of it
    BLOCK_DV: Any  # value dimension, padded, or a block of it
    EVEN_D: Any  # BLOCK_D is the head dimension
    EVEN_DV: Any
    BY_BLOCKS: Any  # rows are read in blocks of columns, see `blocks`
    D_BLOCKS: Any  # number of blocks of the head dimension
    DV_BLOCKS: Any
    D_TILE: Any  # blocks of dQ and dK that one program computes
    DV_TILE: Any  # of dV
    COLUMN_TILES: Any  # programs for each tile of rows
    QUERIES_STAY: Any  # see config.TritonConfig
    RAGGED_M: Any  # the last tile of queries reaches past their end
    RAGGED_N: Any  # the last tile of keys reaches past their end
    TMA: Any  # q, k, v, do are read by TMA
    WIDE: Any  # offsets inside one tile need 64 bits
    BIAS: Any  # a bias or bias component is added to the scores
    BIAS_TENSOR: Any  # there is a bias tensor
    BIAS_FIRST: Any  # the accumulator of Q Kᵀ starts from the bias
    MASK: Any
    BIAS_HOW: Any  # `Broadcast`
    MASK_HOW: Any  # `Broadcast` or `TileHow`
    HIDES: Any  # some pair may be hidden, so hidden values that are not finite must be excluded
    ORDER: Any  # see tensors.program_tile
    PRECISION: Any  # of float32 products
    STAGES_AGAIN: Any  # see config.second_walk_stages
    STAGES_MASKED: Any  # of the loops that read a mask; fewer if two programs then fit a multiprocessor
    MARK: Any  # dtype that marks values that are not finite
    PACK_GQA: Any  # see config.TritonConfig
    HAS_PARTS: Any  # there are bias components (Triton 3.6 fails on fields of an absent record)
    PARTS: Any  # bias_components.PartHows
    PACKED: Any  # packed batch, see varlen
    FROM_START: Any  # its Toeplitz bias is counted from the first query and key
    FIRST: Any  # see bias_components.first_added
    FETCH: Any = False  # prefetch the next tile of a bias, see tensors.prefetch_bias
    FAR: Any = False  # tiles without an entry of relative-position biases have their own loop
    LISTS: Any = False  # a mask's tiles are visited by lists, see visibility
    SPLIT: Any = False  # several programs share the keys of a tile of queries
    STATISTICS: Any = NO_STATISTICS  # `StatisticsHow`
    DQ_TMA: Any = False
    DBIAS: Any = "none"  # the value of a `BiasReduction`
    DBIAS_TMA: Any = False
    DPARTS: Any = False  # some bias component requires a gradient
    WANT_Q: Any = False
    WANT_K: Any = False
    WANT_V: Any = False


class TritonForward:
    """Prepared forward of one problem, for all tensors of one layout."""

    takes_rows = True

    def __init__(self, problem: Problem, inputs: Inputs):
        q, k, v, bias, *_ = inputs
        self.problem = problem
        tma = uses_tma(problem, q, k, v)
        config = forward_config(problem, bias is not None and uses_tma(problem, bias), tma)
        # A packed batch has neither pack_gqa nor splits.
        self._prepare(config if problem.totals is None else replace(config, pack_gqa=False), inputs)

    def _prepare(self, config: TritonConfig, inputs: Inputs) -> None:
        problem, (q, k, v, bias, mask, sink, parts, *_) = self.problem, inputs
        self.config = config
        self.other: TritonForward | None = None  # in less shared memory, see `smaller`
        tma = uses_tma(problem, k, v) if config.pack_gqa else uses_tma(problem, q, k, v)
        shares = splits(problem, config)
        self.choices = ragged(problem, config)
        lists = problem.totals is None and lists_pay(problem, config)
        self.masked = None
        if lists:
            self.masked = TileListCache(
                MaskLists(problem, config, mask, q.device, by_rows=True, by_keys=False, even=False), problem
            )
        by_elements = comes_by_elements(problem, bias) and not config.pack_gqa
        statistics = problem.score.statistics
        first = bias_first(problem, by_elements) and not statistics.max_scores_unbiased
        c = compiled_constants(
            problem, config, inputs, tma, columns(problem, tma), q, k, v, bias, mask, *flat_parts(parts),
            BIAS_FIRST=first, SPLIT=shares > 1, LISTS=lists, FETCH=by_elements and config.maxnreg is None,
            STATISTICS=StatisticsHow(*statistics),
        )  # fmt: skip
        sizes = problem_sizes(problem, inputs)._replace(splits=shares)
        o = target = empty_output(q, problem.value_dim, "meta")
        self.layout_o, o_low = (o.shape, o.stride()), empty_low_bits(o, problem)
        rows = rows_first(o)
        self.rows = None if problem.totals is None else (rows.shape, rows.stride(), o.shape[1:3])
        self.empty_low = None if o_low is None else allocation(o_low, q.device)
        self.lse_dtype = saved_lse_dtype(problem.dtype, problem)
        self.statistics = len(statistics.names)
        rows_layout = Record(RowResults, (POINTER, POINTER))
        self.merge, self.shared = None, None
        if shares > 1:
            target = o.new_empty((shares * problem.batch, *o.shape[1:]), dtype=torch.float32)
            self.shared = target.shape
            self.merge = Launch(
                merge_kernel, q[..., 0].numel() * c.COLUMN_TILES.value,
                (POINTER, rows_layout, strided(o), strided_if_any(o_low), rows_layout, sink_layout(sink)), (sizes, c),
                num_warps=4, num_stages=3,
            )  # fmt: skip
        # For `resized`.
        given = self.statistics or lists or problem.totals or problem.tile_mask
        self.resizable = not given and parts is None
        self.group, self.banded = problem.group, not problem.score.band.unlimited
        self.has_more = bias is not None or mask is not None or sink is not None
        self.made: dict[tuple, Any] = {}
        self.main = Launch(
            forward_kernel,
            forward_programs(problem, config, shares),
            (
                *input_layouts(inputs, config, c, tma),
                sink_layout(sink if shares == 1 else None),
                POINTER,
                parts_layout(parts),
                POINTER,
                lengths_layout(inputs.lengths),
                strided(target),
                strided_if_any(o_low if shares == 1 else None),
                rows_layout,
            ),
            (kernel_terms(problem, inputs, first), sizes, c),
            **config.options,
        )
        self.bases = forward_bases(self, inputs)

    def resized(self, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs) -> ResizedForward | None:
        """Return a forward for other lengths; None if they need other compile-time parameters."""
        if self.other is not None:
            return self.other.resized(structure, lo, hi, inputs)
        return resized_forward(self, structure, lo, hi, inputs)

    def __call__(self, inputs: Inputs) -> Outputs:
        if self.other is not None:
            return self.other(inputs)
        q = inputs.q
        with device_of(q):
            shape, strides, lse_shape = *self.layout_o, self.layout_o[0][:3]
            if self.rows is not None and q.dim() == 3:
                shape, strides, lse_shape = self.rows
            o = torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device)
            lse = torch.empty(lse_shape, dtype=self.lse_dtype, device=q.device)
            o_low = None if self.empty_low is None else self.empty_low().as_strided(shape, strides)
            statistics = self._statistics(o, lse_shape)
            if self.problem.totals is not None and inputs.parts is not None:  # rows outside all sequences
                o.zero_()
                lse.fill_(-torch.inf)
            mask, (_, lists, _) = flat_and_lists(self.masked, inputs.mask, inputs.tiles, NO_LISTS)
            try:
                parts, lengths = flat_parts(inputs.parts), flat_lengths(inputs.lengths)
                if self.merge is None or self.shared is None:
                    given = (*inputs[:4], *mask, inputs.sink, inputs.seed, *parts, lists, *lengths)
                    self.main(*given, o, o_low, lse, statistics)
                else:
                    shares = torch.empty(self.shared, dtype=torch.float32, device=q.device)
                    share_lse = torch.empty(self.shared[:3], dtype=self.lse_dtype, device=q.device)
                    own = self._statistics(o, self.shared[:3])
                    given = (*inputs[:4], *mask, None, inputs.seed, *parts, lists, *lengths)
                    self.main(*given, shares, None, share_lse, own)
                    self.merge(shares, share_lse, own, o, o_low, lse, statistics, inputs.sink)
            except OutOfResources as error:
                q, k, v = inputs[:3] if q.dim() == 4 else map(heads_first, inputs[:3])
                self.other = smaller(self, error, inputs._replace(q=q, k=k, v=v))
                return self.other(inputs)
        return Outputs(o, lse, o_low, statistics)

    def _statistics(self, o: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Return `Outputs.statistics` for these rows; in a packed batch those of rows of no sequence."""
        if not self.statistics:
            return None
        found = torch.empty((*rows, self.statistics), dtype=torch.float32, device=o.device)
        return found if self.problem.totals is None else clear_statistics(found, self.problem.score.statistics)


class TritonBackward:
    """Prepared backward of one problem, for all tensors of one layout."""

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs):
        self.problem, self.needs = problem, needs
        mended = empty_mended(outputs, cotangents.o)
        self.empty_mended = None if mended is None else allocation(mended, inputs.q.device)
        config = backward_config(problem, uses_tma(problem, *inputs[:3], cotangents.o if mended is None else mended))
        self._prepare(config, inputs, outputs, cotangents)

    def _prepare(self, config: TritonConfig, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> None:
        problem, needs, (q, k, v, bias, mask, sink, parts, *_) = self.problem, self.needs, inputs
        do, dlse, *_ = cotangents
        mended = empty_mended(outputs, do)
        read_do = do if mended is None else mended
        self.config = config
        self.other: TritonBackward | None = None
        tma = uses_tma(problem, q, k, v, read_do)
        block_m = config.block_m
        m_tiles, n_tiles = triton.cdiv(problem.queries, block_m), triton.cdiv(problem.keys, config.block_n)
        row_tiles, row_batch = m_tiles * problem.batch, problem.batch
        column_tiles = columns(problem, tma, forward=False).tiles
        key_programs = n_tiles * problem.kv_heads * problem.batch
        padded = m_tiles * block_m
        if problem.totals is not None:
            row_tiles, row_batch = tile_count(problem, problem.totals[0], block_m), 1
            padded = row_tiles * block_m
            key_programs = tile_count(problem, problem.totals[1], config.block_n) * problem.kv_heads
        row_programs = row_tiles * problem.heads
        self.reduction = reduction = bias_reduction(problem) if needs.bias else BiasReduction.NONE
        ordered_bias = is_ordered(problem, reduction)

        stats = _meta(row_batch, problem.heads, padded)
        dq, dk, dv = (
            torch.empty_like(x, device="meta") if need else None for x, need in zip(inputs[:3], needs[:3], strict=True)
        )
        # dQ is summed over programs as dQᵀ, as the kernel computes it: its rows allow wide atomic adds.
        summed = needs.q and not problem.deterministic
        dq_accum = _meta(row_batch * problem.heads, problem.head_dim, padded) if summed else None
        dparts = empty_part_gradients(problem, parts, needs, torch.device("meta"))
        ordered_parts = {name: x for name, x in dparts.items() if problem.deterministic and is_summed(problem, name)}
        given = {name: x for name, x in dparts.items() if name not in ordered_parts}
        by_keys = summed or needs.k or needs.v or bool(given) or not (ordered_bias or reduction == BiasReduction.NONE)
        lists = problem.totals is None and lists_pay(problem, config)
        self.masked = None
        if lists:
            by_rows = needs.q and not summed
            self.masked = TileListCache(
                MaskLists(problem, config, mask, q.device, by_rows=by_rows, by_keys=by_keys, even=True), problem
            )
        dbias = empty_bias_gradient(problem, bias, reduction, torch.device("meta"))
        self.empty_stats = allocation(stats, q.device)
        self.empty_gradients = [None if x is None else allocation(x, q.device) for x in (dq, dk, dv, dq_accum)]

        by_elements = comes_by_elements(problem, bias)
        dbias_tma = (
            dbias is not None and reduction in (BiasReduction.STORE, BiasReduction.ADD) and uses_tma(problem, dbias)
        )
        first = bias_first(problem)
        c = compiled_constants(
            problem, config, inputs, tma, columns(problem, tma, forward=False),
            q, k, v, outputs.o, do, read_do, bias, mask, dq, dk, dv, dbias, *flat_parts(parts), *dparts.values(),
            flat=(by_elements or (INTERPRET and begins_anywhere(problem, bias))) and config.block_n % 32 == 0,
            BIAS_FIRST=first,
            LISTS=lists,
            FETCH=by_elements,
            DQ_TMA=tma and config.dq_tma,
            DBIAS=(BiasReduction.NONE if ordered_bias else reduction).value,
            DBIAS_TMA=dbias_tma,
            DPARTS=bool(given),
            WANT_Q=summed, WANT_K=needs.k, WANT_V=needs.v,
        )  # fmt: skip
        sizes = problem_sizes(problem, inputs, padded)
        numbers = (kernel_terms(problem, inputs, first), sizes, c)
        dq_accum_layout: Any = POINTER
        if dq_accum is not None and c.DQ_TMA.value:
            block = [1, c.BLOCK_D.value, block_m]
            dq_accum_layout = boxed(TensorDescriptor, dq_accum, dq_accum.stride(), block)
        dbias_layout: Any = strided(dbias)
        if dbias is not None and dbias_tma:
            dbias_layout = descriptor(dbias, block_m, config.block_n)
        stats_layout = _stats_layout(stats, block_m, tma)
        *qkv, bias_layout, mask_layout = input_layouts(inputs, config, c, tma)
        rows = (
            *qkv, rows_layout(read_do, block_m, c.BLOCK_DV, tma), stats_layout, stats_layout, bias_layout, mask_layout,
            POINTER,
        )  # fmt: skip
        rows_of_queries = (*rows, parts_layout(parts))
        lengths = lengths_layout(inputs.lengths)
        usual = {"num_warps": 8 if c.BY_BLOCKS.value else 4, "num_stages": 3}
        # The ordered kernels pipeline keys and values, whose tiles are larger: fewer stages fit.
        fewer = {"num_warps": config.num_warps, "num_stages": min(config.num_stages, 2)}

        before = (
            strided(outputs.o), strided_if_any(outputs.o_low), strided(do), POINTER,
            strided_if_any(None if dlse is None else dlse[..., None]),
        )  # fmt: skip
        rows_before: tuple[Any, ...] = (*before, POINTER, POINTER, POINTER, strided_if_any(mended))
        own = Record(OwnKeys, (strided(k), strided(v), POINTER, strided(dk), strided(dv)))
        self.finite = self.main = self.postprocess = self.query_gradient = self.bias_gradient = None
        # Gaps between the matrices of a ragged dBias must be zeroed.
        self.has_gaps = dbias is not None and problem.totals is not None and is_stored_whole(problem, reduction)
        if problem.totals is not None:
            self.preprocess = Launch(
                packed_preprocess_kernel, programs(sizes, block_m, config.block_n, dq, self.has_gaps),
                (*rows_before, lengths, own, strided_if_any(dq), strided_if_any(dbias if self.has_gaps else None)),
                (sizes, c), **usual,
            )  # fmt: skip
        else:
            self.preprocess = Launch(
                preprocess_kernel, row_programs, rows_before, (sizes, c), **usual
            )  # fmt: skip
            if c.HIDES.value:
                self.finite = Launch(
                    finite_kernel, key_programs, (strided(k), strided(v), POINTER), (sizes, c), **usual
                )
        finite = torch.empty(2, *k.shape[:3], dtype=torch.int8, device="meta")
        self.empty_finite = allocation(finite, q.device) if c.HIDES.value else None
        if by_keys:
            self.main = Launch(
                backward_kernel, key_programs * column_tiles,
                (
                    *rows, parts_layout(parts, given), POINTER, lengths, own, dq_accum_layout, dbias_layout,
                ),
                numbers, **config.options,
            )  # fmt: skip
        if dq_accum is not None:
            self.postprocess = Launch(
                postprocess_kernel, row_programs, (POINTER, strided(dq), lengths), numbers, **usual
            )
        elif dq is not None:
            self.query_gradient = Launch(
                query_gradient_kernel,
                row_programs * column_tiles,
                (*rows_of_queries, POINTER, lengths, strided(dq)),
                numbers,
                **fewer,
            )
        self.sink_gradient = None
        if needs.sink and sink is not None and outputs.lse is not None and problem.totals is None:
            self.sink_gradient = SinkGradient(
                sink, outputs.lse.shape, m_tiles * block_m, m_tiles * block_m, 0, negated=False
            )

        # `resized` supports q, k, v and their gradients only, with dQ summed by atomics.
        self.resizable = (
            bias is sink is mask is parts is problem.tile_mask is problem.totals is self.query_gradient is None
            and not problem.score.dropout
        )
        self.choices = ragged(problem, config)

        def ordered(x: Tensor, name: str) -> Launch:
            operand = problem.bias if name == "bias" else getattr(problem.parts, name)
            assert isinstance(operand, TensorSpec)
            how = constants(_how(problem, name, operand, False))
            matrices, axis = operand.batch * operand.heads, tuple[str, ...]()
            if name == "toeplitz":
                kernel, programs = diagonal_gradient_kernel, triton.cdiv(operand.cols, config.block_n)
            elif name in ("query", "key"):
                kernel, axis = distance_gradient_kernel, (name,)
                across = config.block_n if name == "query" else block_m
                programs = (m_tiles if name == "query" else n_tiles) * triton.cdiv(operand.cols, across)
            else:
                kernel = bias_gradient_kernel
                programs = (m_tiles if operand.rows > 1 else 1) * (n_tiles if operand.cols > 1 else 1)
            layouts = (*rows_of_queries, POINTER, lengths, strided(x))
            return Launch(kernel, matrices * programs, layouts, (how, *axis, *numbers), **fewer)

        if dbias is not None and ordered_bias:
            self.bias_gradient = ordered(dbias, "bias")
        self.part_gradients = {name: ordered(x, name) for name, x in ordered_parts.items()}

    def resized(
        self, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs, outputs: Outputs,
        cotangents: Outputs, needs: Needs,
    ) -> TritonBackward | None:  # fmt: skip
        """Return a backward for other lengths; None if they need other compile-time parameters."""
        if self.other is not None:
            return self.other.resized(structure, lo, hi, inputs, outputs, cotangents, needs)
        return resized_backward(self, structure, lo, hi, inputs, outputs, cotangents)

    def __call__(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        if self.other is not None:
            return self.other(inputs, outputs, cotangents)
        try:
            return self._run(inputs, outputs, cotangents)
        except OutOfResources as error:
            self.other = smaller(self, error, inputs, outputs, cotangents)
            return self.other(inputs, outputs, cotangents)

    def _run(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        q, k, v, bias, mask, sink, parts, *_ = inputs
        do, dlse, *_ = cotangents
        with device_of(q):
            delta, lse2 = self.empty_stats(), self.empty_stats()
            dq, dk, dv, dq_accum = [None if make is None else make() for make in self.empty_gradients]
            dbias = empty_bias_gradient(self.problem, bias, self.reduction, q.device)
            lengths = flat_lengths(inputs.lengths)
            finite = None if self.empty_finite is None else self.empty_finite()
            mended = None if self.empty_mended is None else self.empty_mended()
            stats = (outputs.o, outputs.o_low, do, outputs.lse, dlse, delta, lse2, dq_accum, mended)
            if self.problem.totals is not None:
                gaps = dbias if self.has_gaps else None
                self.preprocess(*stats, *lengths, k, v, finite, dk, dv, dq, gaps)
            else:
                self.preprocess(*stats)
            if self.finite is not None:
                self.finite(k, v, finite)
            dparts = empty_part_gradients(self.problem, parts, self.needs, q.device)
            masks, found = flat_and_lists(self.masked, mask, inputs.tiles, NO_LISTS)
            rows = (
                q,
                k,
                v,
                do if mended is None else mended,
                lse2,
                delta,
                bias,
                *masks,
                inputs.seed,
                *flat_parts(parts),
            )
            if self.main is not None:
                given = {name: x for name, x in dparts.items() if name not in self.part_gradients}
                self.main(
                    *rows, *flat_gradients(parts, given), found.by_keys, *lengths, k, v, finite, dk, dv, dq_accum, dbias
                )
            if self.postprocess is not None:
                self.postprocess(dq_accum, dq, *lengths)
            if self.query_gradient is not None:
                self.query_gradient(*rows, found.by_rows, *lengths, dq)
            if self.bias_gradient is not None:
                self.bias_gradient(*rows, found.states, *lengths, dbias)
            for name, launch in self.part_gradients.items():
                launch(*rows, found.states, *lengths, dparts[name])
            if dbias is not None and bias is not None:
                dbias = dbias.to(bias.dtype)
            dsink = None
            if self.sink_gradient is not None and sink is not None and outputs.lse is not None:
                dsink = self.sink_gradient(sink, lse2, delta)
            elif self.needs.sink and sink is not None and outputs.lse is not None:  # packed batch
                dsink = packed_sink_gradient(sink, outputs, cotangents)
            return Gradients(dq, dk, dv, dbias, dsink, **cast_part_gradients(parts, dparts))


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def problem_sizes(problem: Problem, inputs: Inputs, padded_queries: int = 0) -> ProblemSizes:
    p, lengths, bias = problem, inputs.lengths, inputs.bias
    sizes = ProblemSizes(p.batch, p.heads, p.group, p.queries, p.keys, p.head_dim, p.value_dim, padded_queries)
    if p.totals is None:
        return sizes
    pairs = 0 if bias is None or lengths is None or lengths.pairs is None else bias.shape[3]
    return sizes._replace(total_queries=p.totals[0], total_keys=p.totals[1], pairs=pairs)


def compiled_constants(
    problem: Problem,
    config: TritonConfig,
    inputs: Inputs,
    tma: bool,
    cols: Columns,
    *tensors: Tensor | None,
    flat: bool = False,
    **switches: Any,
) -> Constexprs:
    ragged_m, ragged_n = ragged(problem, config)
    values = Constexprs(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=cols.block_d,
        BLOCK_DV=cols.block_dv,
        EVEN_D=cols.block_d == problem.head_dim,
        EVEN_DV=cols.block_dv == problem.value_dim,
        BY_BLOCKS=by_blocks(problem),
        D_BLOCKS=cols.d_blocks,
        DV_BLOCKS=cols.dv_blocks,
        D_TILE=cols.d_tile,
        DV_TILE=cols.dv_tile,
        COLUMN_TILES=cols.tiles,
        QUERIES_STAY=config.queries_stay,
        RAGGED_M=ragged_m,
        RAGGED_N=ragged_n,
        TMA=tma,
        WIDE=wide(*tensors),
        BIAS=is_added(problem),
        BIAS_TENSOR=problem.bias is not None,
        MASK=problem.mask is not None,
        BIAS_HOW=score_broadcast(inputs.bias, problem.bias, problem, config, "bias", flat),
        MASK_HOW=tile_how(problem, config.block_m, config.block_n, config.pack_gqa)
        or score_broadcast(inputs.mask, problem.mask, problem, config, "mask"),
        HIDES=not every_pair_alike(problem),
        ORDER=problem.raster_order.value,
        PRECISION=precision(problem),
        PACK_GQA=config.pack_gqa,
        STAGES_AGAIN=second_walk_stages(problem, tma),
        STAGES_MASKED=2
        if problem.mask is not None and config.block_m * cols.block_d == 64 * 128
        else config.num_stages,
        HAS_PARTS=inputs.parts is not None,
        PARTS=part_hows(problem, inputs.parts),
        PACKED=problem.totals is not None,
        FROM_START=problem.score.packed is not None and "from_start" in problem.score.packed.forms,
        FIRST=first_added(problem),
        FAR=not switches["LISTS"] and has_far_tiles(problem, inputs.parts),
        MARK=tl.float32 if INTERPRET else tl.bfloat16,  # the interpreter computes bfloat16 products wrongly
        **switches,
    )
    return constants(values)


def uses_tma(problem: Problem, *tensors: Tensor) -> bool:
    return (
        problem.capability is not None
        and problem.capability >= (9, 0)
        and problem.totals is None  # a box would reach into the next sequence
        and all(tensor_fits_tma(x, x.data_ptr() % 16 == 0) for x in tensors)
    )


def rows_layout(x: Tensor, block: int, cols: tl.constexpr, tma: bool) -> Any:
    """Return the layout of q, k, v or do."""
    return descriptor(x, block, cols.value) if tma else strided(x)


def input_layouts(inputs: Inputs, config: TritonConfig, c: Constexprs, tma: bool) -> tuple[Any, ...]:
    return (
        rows_layout(inputs.q, config.block_m, c.BLOCK_D, tma and not config.pack_gqa),
        rows_layout(inputs.k, config.block_n, c.BLOCK_D, tma),
        rows_layout(inputs.v, config.block_n, c.BLOCK_DV, tma),
        scores_layout(inputs.bias, c.BIAS_HOW, config),
        tile_layout() if inputs.tiles is not None else scores_layout(inputs.mask, c.MASK_HOW, config),
    )


def _stats_layout(x: Tensor, block: int, tma: bool) -> Any:
    """Return the layout of LSE or delta: a TMA descriptor, or a plain pointer."""
    if not tma:
        return POINTER
    x = x.flatten(0, 1)
    return boxed(TensorDescriptor, x, x.stride(), [1, block])


def scores_layout(x: Tensor | None, how: Broadcast | None, config: TritonConfig) -> Any:
    """Return the layout of a bias or mask."""
    if x is not None and how is not None and how.TMA.value:
        return descriptor(x, config.block_m, config.block_n)
    return strided(x)


def score_broadcast(
    x: Tensor | None, operand: TensorSpec | None, problem: Problem, config: TritonConfig, name: str, flat: bool = False
) -> Broadcast | None:
    if x is None or operand is None:
        return None
    # With pack_gqa a tile's rows belong to several heads: read by pointers.
    tma = operand.axes == BiasKind.MATRIX and not config.pack_gqa and x.dtype is not torch.bool and uses_tma(problem, x)
    return _how(problem, name, operand, tma)._replace(FLAT=flat and operand.axes == BiasKind.MATRIX)


def _how(problem: Problem, name: str, operand: TensorSpec, tma: bool) -> Broadcast:
    """Return how a bias, mask or bias component broadcasts."""
    how = broadcast(operand, problem.broadcast_group(operand), tma, packed_layout(problem, name))
    if name == "mask":
        return how._replace(BATCH=problem.mask_period)
    return how._replace(BATCH=problem.bias_batch, RUNS=problem.bias_in_runs) if name == "bias" else how
