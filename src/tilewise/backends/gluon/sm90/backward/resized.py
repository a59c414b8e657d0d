"""Prepared backwards for other sequence lengths, without a bias, a mask or packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise.backends import Gradients, Inputs, Outputs, gradient_strides, is_elsewhere
from tilewise.backends.gluon.sm90.backward.dq import DQ_COLS
from tilewise.backends.gluon.sm90.backward.scheduler import counters
from tilewise.backends.gluon.sm90.backward.sizes import choices, leaves_queries_out, sized
from tilewise.backends.gluon.sm90.common.traits import limits_of
from tilewise.backends.kernels.score import varied_limits
from tilewise.backends.launch.launcher import Launch, Varied, Whole, kinds, resized_launches
from tilewise.backends.protocol import Structure, resized_problem
from tilewise.spec.problem import Problem

# Indices in the values of `resized_backward`: programs, window limits, counters, sizes; shapes and strides of tensors.
_ROW_PROGRAMS, _PROGRAMS, _LO, _HI, _COUNTED, _SIZES, _FIRST = range(7)
_STATS, _ACCUM, _DQ, _DK, _DV, _Q, _K, _V, _O, _LSE, _DO, _DLSE = range(_FIRST, _FIRST + 24, 2)


def backward_bases(run: Any, has_dlse: bool) -> list[tuple[Launch, Varied]]:
    """Return the launches of a `HopperBackward`, and what varies with lengths, see `resized_launches`."""
    leaves = _DQ if run.dq_stored else _ACCUM if run.config.dq_by_tma else None
    before = (_O, None, _DO, None, _DLSE if has_dlse else None, None, None, None, None, None)
    main = (_Q, _K, _V, _DO, None, _STATS, leaves, _DK, _DV, None, (None, None), *(None,) * 6)
    terms = run.main.numbers[0]
    same = [None] * (len(run.before.numbers) - 3)
    found = [
        (run.before, Varied(before, _ROW_PROGRAMS, (None, _SIZES, _COUNTED, *same))),
        (run.main, Varied(main, _PROGRAMS, (varied_limits(terms, _LO, _HI), _SIZES, None))),
    ]
    if not run.dq_stored:
        same = [None] * (len(run.after.numbers) - 3)
        found.append((run.after, Varied((None, _DQ, None), _ROW_PROGRAMS, (None, None, _SIZES, *same))))
    return found


_MOST = 4096  # cached pairs of (query tiles, key tiles)


class _Tiled(NamedTuple):
    """Sizes, programs and buffer lengths of a backward for given numbers of query and key tiles."""

    ds_buffer_groups: int
    zeroed: int
    counted: int
    row_programs: int
    work_tiles: int
    programs: int
    stats: int
    accum: int
    kind: tuple[Any, ...]  # `kinds` of the integers that kernels take


def _tiled(run: Any, row_tiles: int, key_tiles: int) -> _Tiled:
    found: _Tiled | None = run.tiled.get((row_tiles, key_tiles))
    if found is None:
        config, (batch, kv_heads, group, *_) = run.config, run.main.numbers[1]
        shape = batch, kv_heads, group, 1, 1, 1
        queries, keys = row_tiles * config.block_m, key_tiles * config.block_n
        sizes, groups = sized(config, shape, queries, keys, run.multiprocessors)
        counted = counters(sizes, groups, run.problem.deterministic, reduces=False)
        row_programs, work_tiles = row_tiles * batch * kv_heads * group, key_tiles * batch * kv_heads
        accum = 0 if run.dq_stored else row_programs * config.block_m * run.width // DQ_COLS.value
        if len(run.tiled) >= _MOST:
            run.tiled.clear()
        run.tiled[row_tiles, key_tiles] = found = _Tiled(
            sizes.ds_buffer_groups, sizes.zeroed, counted, row_programs, work_tiles,
            min(run.programs, work_tiles) if run.dynamic else work_tiles, 2 * config.block_m * row_programs, accum,
            kinds((row_tiles, key_tiles, sizes.ds_buffer_groups, sizes.zeroed, counted)),
        )  # fmt: skip
    return found


def resized_backward(run: Any, structure: Structure, lo: int | None, hi: int | None) -> ResizedBackward | None:
    """Return a `HopperBackward` for other lengths than ``run``'s, or None if these need other constants."""
    _, M, N, layouts = structure
    q_shape, q_strides, k_shape, k_strides, v_shape, v_strides, *_ = layouts
    config = run.config
    row_tiles, key_tiles = -(-M // config.block_m), -(-N // config.block_n)
    tiled = _tiled(run, row_tiles, key_tiles)
    ds_buffer_groups, zeroed, counted, row_programs, work_tiles, programs, stats, accum, kind = tiled
    if choices(run.problem, config, run.always_hides, M, N, lo, hi, work_tiles, run.programs) != run.choices:
        return None
    dv_strides = gradient_strides(v_shape, v_strides)
    same = k_strides == v_strides and k_shape == v_shape
    dk_strides = dv_strides if same else gradient_strides(k_shape, k_strides)
    same = q_strides == k_strides and q_shape == k_shape
    dq_strides = dk_strides if same else gradient_strides(q_shape, q_strides)
    first, last, ends = limits_of(lo, hi)
    batch, kv_heads, group, lag = run.shape
    values = (
        row_programs, programs, first, last, counted,
        (batch, kv_heads, group, M, N, row_tiles, key_tiles, 1, 1, ds_buffer_groups, lag, zeroed, 1), (stats,), (1,),
        (accum, DQ_COLS.value), (DQ_COLS.value, 1), q_shape, dq_strides, k_shape, dk_strides, v_shape, dv_strides,
        *layouts,
    )  # fmt: skip
    if len(layouts) > 12:  # the kernel takes dLSE with a last axis of 1
        values = *values[:-2], (*layouts[12], 1), (*layouts[13], 1)
    kind = kind, ends, M & 15 == 0, N & 15 == 0  # lengths of 1 are part of the structure
    found = run.made.get(kind) or resized_launches(run.bases, run.made, kind, values)
    return ResizedBackward(run, structure, (lo, hi), (stats, counted, accum), values, found)


class ResizedBackward:
    """Resized `HopperBackward`, see `resized_backward`."""

    __slots__ = ("band", "kept", "launches", "of", "sizes", "structure", "varied", "zeroes_dq")

    def __init__(
        self, of: Any, structure: Structure, band: tuple[int | None, int | None], sizes: tuple[int, int, int],
        values: tuple[Any, ...], launches: list[Whole],
    ) -> None:  # fmt: skip
        self.of, self.structure, self.band, self.sizes = of, structure, band, sizes
        self.varied, self.launches = values, launches
        self.kept: tuple[dict[Any, Any], ...] = ({}, {}, {})  # for each launch
        self.zeroes_dq = of.dq_stored and leaves_queries_out(structure.queries, structure.keys, *band)

    @property
    def layouts(self) -> list[Any]:
        """Return shape and strides of dQ, dK and dV."""
        return [self.varied[at : at + 2] for at in (_DQ, _DK, _DV)]

    @property
    def problem(self) -> Problem:
        return resized_problem(self.of.problem, self.structure, *self.band)

    def __call__(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        q, k, v, _, _, _, _, seed, _, _ = inputs
        if is_elsewhere(q):
            with torch.cuda.device(q.device):
                return self(inputs, outputs, cotangents)
        (o, lse, *_), (do, dlse, *_), (stats_size, counted, accum) = outputs, cotangents, self.sizes
        assert lse is not None
        values, launches, (kept, main_kept, after_kept) = self.varied, self.launches, self.kept
        stats = lse.new_empty(stats_size)  # float32
        counts = lse.new_empty(counted, dtype=torch.int32)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)  # in `gradient_strides`
        if self.of.dq_stored:  # no dq_accum: the kernel takes a pointer that it does not read
            sums, leaves, pointer = None, dq, stats
            if self.zeroes_dq:
                dq.zero_()
        else:
            sums = leaves = pointer = lse.new_empty((accum, DQ_COLS.value))
        launches[0].run(values, kept, o, None, do, lse, dlse, None, stats, sums, counts, None)
        launches[1].run(
            values, main_kept, q, k, v, do, None, stats, leaves, dk, dv, None, seed, None, None, None, pointer, None,
            counts, None,
        )  # fmt: skip
        if sums is not None:
            launches[2].run(values, after_kept, sums, dq, counts)
        needs = self.of.needs
        return Gradients(dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, None)
