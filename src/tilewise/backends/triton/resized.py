"""Reuse of prepared launches for calls that differ in their lengths only."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
from triton import OutOfResources

from tilewise.backends import Inputs, Outputs, device_of, gradient_strides, output_layout
from tilewise.backends.kernels.score import limited, varied_limits
from tilewise.backends.launch.launcher import Launch, Varied, Whole, resized_launches
from tilewise.backends.protocol import Structure, resized_problem
from tilewise.backends.triton.bias_components import NO_PARTS
from tilewise.backends.triton.config import TritonConfig, columns, shared_by
from tilewise.backends.triton.masks import lists_pay
from tilewise.backends.triton.varlen import NO_LENGTHS, tile_count
from tilewise.spec import tiles
from tilewise.spec.problem import Problem


def smaller(run: Any, error: OutOfResources, *tensors: Any) -> Any:
    """Return a new pass that takes less shared memory, after Triton found that a kernel exceeds it.

    The pass itself stays unchanged, since other threads may be running it. A kernel's shared memory depends on the
    compiler: config.py fits the tested versions (tests/aot/test_triton_room.py).
    """
    if (config := run.config.smaller()) is None:
        raise error
    found = copy(run)
    found._prepare(config, *tensors)
    return found


def forward_programs(problem: Problem, config: TritonConfig, shares: int) -> int:
    """Return the number of programs of a forward."""
    if problem.totals is not None:
        tiles = columns(problem, False).tiles
        return tile_count(problem, problem.totals[0], config.block_m) * problem.heads * tiles
    return _programs(problem, problem.queries, config, shares)


def _programs(problem: Problem, queries: int, config: TritonConfig, shares: int) -> int:
    """Return the programs of a forward that is not packed, for another number of queries."""
    rows, heads = queries, problem.heads
    if config.pack_gqa:
        rows, heads = rows * problem.group, problem.kv_heads
    return -(-rows // config.block_m) * problem.batch * shares * heads * columns(problem, False).tiles


def ragged(problem: Problem, config: TritonConfig) -> tuple[bool, bool]:
    """Return RAGGED_M and RAGGED_N, the only `Constexprs` of resizable problems that lengths change."""
    if problem.totals is not None:
        return True, True
    return _ragged(problem.queries, problem.keys, problem.group, config)


def _ragged(queries: int, keys: int, group: int, config: TritonConfig) -> tuple[bool, bool]:
    rows = queries * group if config.pack_gqa else queries
    return rows % config.block_m != 0, keys % config.block_n != 0


# --- forward ---

# Positions in the values of `resized_forward`: programs of both launches, window limits, sizes; then shape and strides
# of o, the splits' sums, q, k, v, and of bias, mask and sink if present.
_PROGRAMS, _MERGES, _LO, _HI, _QUERIES, _KEYS, _SPLITS, _FIRST = range(8)
_O, _SHARES, _Q, _K, _V, _MORE = range(_FIRST, _FIRST + 12, 2)


def forward_bases(run: Any, inputs: Inputs) -> list[tuple[Launch, Varied]]:
    """Return a `TritonForward`'s launches and their length-dependent values, see `resized_launches`."""
    more = iter(range(_MORE, _MORE + 6, 2))
    bias, mask, sink = (None if x is None else next(more) for x in inputs[3:6])
    merges = run.merge is not None
    nothing = (None, None)  # of `RowResults`
    main = (_Q, _K, _V, bias, mask, None if merges else sink, *(None,) * 4, _SHARES if merges else _O, None, nothing)
    terms, sizes, _ = run.main.numbers
    limits, differ = varied_limits(terms, _LO, _HI), {"queries": _QUERIES, "keys": _KEYS, "splits": _SPLITS}
    varied_sizes = tuple([differ.get(name) for name in sizes._fields])
    found = [(run.main, Varied(main, _PROGRAMS, (limits, varied_sizes, None)))]
    if merges:
        found.append((run.merge, Varied((None, nothing, _O, None, nothing, sink), _MERGES, (varied_sizes, None))))
    return found


def resized_forward(run: Any, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs) -> Any:
    """Return ``run`` for other lengths; None if they need other compile-time parameters."""
    _, M, N, layouts = structure
    problem, config = run.problem, run.config
    group, first, last = run.group, *tiles.clipped(lo, hi)
    shares = shared_by(problem, config, M, N, first, last)
    if (shares > 1) != (run.merge is not None) or _ragged(M, N, group, config) != run.choices:
        return None
    if inputs.mask is not None and lists_pay(resized_problem(problem, structure, lo, hi), config):
        return None
    layout_o = output_layout(layouts[0], layouts[1], problem.value_dim)
    batch, heads, _, value_dim = layout_o[0]
    shared = (shares * batch, heads, M, value_dim), (heads * M * value_dim, M * value_dim, value_dim, 1)
    values = (
        _programs(problem, M, config, shares), batch * heads * M * columns(problem, False).tiles, first, last, M, N,
        shares, *layout_o, *shared, *layouts,
    )  # fmt: skip
    if run.has_more:
        values += _more(inputs)
    kind = (
        M & 15 == 0, M == 1, N & 15 == 0, N == 1, shares & 15 == 0, first & 15 == 0, first == 1, last & 15 == 0,
        last == 1,
    )  # fmt: skip
    found = run.made.get(kind) or resized_launches(run.bases, run.made, kind, values)
    return ResizedForward(run, structure, (lo, hi), layout_o, shared[0] if len(found) > 1 else None, values, found)


def _more(inputs: Inputs) -> tuple[tuple[int, ...], ...]:
    """Return shapes and strides of bias, mask and sink, as far as present."""
    _, _, _, bias, mask, sink, *_ = inputs
    found = tuple([y for x in (bias, mask) if x is not None for y in (x.shape, x.stride())])
    return found if sink is None else (*found, (*sink.shape, 1), (*sink.stride(), 1))


class ResizedForward:
    """Forward of a `TritonForward` for other lengths."""

    __slots__ = ("band", "kept", "launches", "layout_o", "of", "other", "shared", "structure", "varied")

    def __init__(
        self, of: Any, structure: Structure, band: Any, layout_o: Any, shared: tuple[int, ...] | None,
        values: tuple[Any, ...], launches: list[Whole],
    ) -> None:  # fmt: skip
        self.of, self.structure, self.band, self.layout_o, self.shared = of, structure, band, layout_o, shared
        self.varied, self.launches = values, launches
        self.kept: tuple[dict[Any, Any], ...] = ({}, {})  # caches of the two launches
        self.other: Any = None  # in less shared memory

    @property
    def problem(self) -> Problem:
        return resized_problem(self.of.problem, self.structure, *self.band)

    def __call__(self, inputs: Inputs) -> Outputs:
        if self.other is not None:
            return self.other(inputs)
        q, k, v, bias, mask, sink, _, seed, *_ = inputs
        values, launches, (kept, merge_kept) = self.varied, self.launches, self.kept
        try:
            with device_of(q):
                device, (shape, strides) = q.device, self.layout_o
                o = torch.empty_strided(shape, strides, dtype=q.dtype, device=device)
                lse = torch.empty(shape[:3], dtype=self.of.lse_dtype, device=device)
                if self.shared is None:
                    launches[0].run(
                        values,
                        kept,
                        q,
                        k,
                        v,
                        bias,
                        mask,
                        sink,
                        seed,
                        *NO_PARTS,
                        None,
                        *NO_LENGTHS,
                        o,
                        None,
                        lse,
                        None,
                    )
                else:
                    sums = torch.empty(self.shared, dtype=torch.float32, device=device)
                    sum_lse = torch.empty(self.shared[:3], dtype=self.of.lse_dtype, device=device)
                    launches[0].run(
                        values, kept, q, k, v, bias, mask, None, seed, *NO_PARTS, None, *NO_LENGTHS, sums, None,
                        sum_lse, None,
                    )  # fmt: skip
                    launches[1].run(values, merge_kept, sums, sum_lse, None, o, None, lse, None, sink)
        except OutOfResources as error:
            self.other = smaller(type(self.of)(self.problem, inputs), error, inputs)
            return self.other(inputs)
        return Outputs(o, lse)


def _limited(terms: Any, problem: Problem) -> Any:
    band = problem.score.band
    return terms if band.unlimited else limited(terms, *tiles.limits(band))


# --- backward ---

# Positions of shapes and strides in the values of `resized_backward`.
_BQ, _BK, _BV, _DO, _OUT, _DQ, _DK, _DV, _STATS, _ACCUM, _DLSE = range(0, 22, 2)


def resized_backward(
    run: Any, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs, outputs: Outputs,
    cotangents: Outputs,
) -> Any:  # fmt: skip
    """Return a backward for other lengths; None if they need other compile-time parameters."""
    p, config = resized_problem(run.problem, structure, lo, hi), run.config
    (q, k, v, *_), (do, dlse, *_) = inputs, cotangents
    if ragged(p, config) != run.choices:
        return None
    new = object.__new__(type(run))
    new.__dict__.update(run.__dict__)
    new.problem, new.other, device, heads = p, None, q.device, p.batch * p.heads
    m_tiles, n_tiles = -(-p.queries // config.block_m), -(-p.keys // config.block_n)
    row_programs, key_programs, padded = m_tiles * heads, n_tiles * p.kv_heads * p.batch, m_tiles * config.block_m
    sizes = run.preprocess.numbers[0]._replace(queries=p.queries, keys=p.keys, padded_queries=padded)
    empty = partial(torch.empty_strided, dtype=torch.float32, device=device)
    accum = (heads, p.head_dim, padded), (p.head_dim * padded, padded, 1)
    if run.empty_finite is not None:
        new.empty_finite = partial(torch.empty, (2, *k.shape[:3]), dtype=torch.int8, device=device)
    new.empty_stats = partial(empty, (p.batch, p.heads, padded), (p.heads * padded, padded, 1))
    made = [(x.shape, gradient_strides(x.shape, x.stride())) for x in (q, k, v)]
    *gradients, accumulator = run.empty_gradients
    new.empty_gradients = [
        None if make is None else partial(torch.empty_strided, *x, dtype=q.dtype, device=device)
        for make, x in zip(gradients, made, strict=True)
    ]
    new.empty_gradients.append(None if accumulator is None else partial(empty, *accum))
    given: tuple[Any, ...] = tuple([y for x in (q, k, v, do, outputs.o) for y in (x.shape, x.stride())])
    given = *given, *[y for x in made for y in x], (heads, padded), (padded, 1), *accum
    if dlse is not None:
        given = *given, (*dlse.shape, 1), (*dlse.stride(), 1)
    new.preprocess = run.preprocess.resized(
        row_programs,
        (_OUT, None, _DO, None, None if dlse is None else _DLSE, None, None, None, None),
        given,
        (sizes, *run.preprocess.numbers[1:]),
    )
    if run.finite is not None:
        new.finite = run.finite.resized(key_programs, (_BK, _BV, None), given, (sizes, *run.finite.numbers[1:]))
    if run.main is not None:
        terms, _, c = run.main.numbers
        written = [None if make is None else x for make, x in zip(gradients[1:], (_DK, _DV), strict=True)]
        own = (_BK, _BV, None, *written)
        accumulated = None if accumulator is None else _ACCUM
        new.main = run.main.resized(
            key_programs * c.COLUMN_TILES.value,
            (_BQ, _BK, _BV, _DO, _STATS, _STATS, *(None,) * 6, own, accumulated, None),
            given,
            (_limited(terms, p), sizes, c),
        )
    if run.postprocess is not None:
        terms, _, c = run.postprocess.numbers
        new.postprocess = run.postprocess.resized(
            row_programs, (None, _DQ, None), given, (_limited(terms, p), sizes, c)
        )
    return new
