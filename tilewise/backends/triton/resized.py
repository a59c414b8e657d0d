"""Launches that were prepared for some lengths, for others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tilewise.backends import Inputs, Outputs, gradient_strides, output_layout
from tilewise.backends.launcher import ENDS, PLACE, place
from tilewise.backends.protocol import Structure, resized_problem
from tilewise.backends.score import limited
from tilewise.backends.triton.config import Config, splits
from tilewise.backends.triton.masks import lists_pay
from tilewise.backends.triton.packed import tile_count
from tilewise.problem import Problem
from tilewise.score import tiles


def forward_programs(problem: Problem, config: Config, shares: int) -> int:
    """Of a forward."""
    if problem.totals is not None:
        return tile_count(problem, problem.totals[0], config.block_m) * problem.heads
    rows, heads = problem.queries, problem.heads
    if config.pack_gqa:
        rows, heads = rows * problem.group, problem.kv_heads
    return -(-rows // config.block_m) * problem.batch * shares * heads


def ragged(problem: Problem, config: Config) -> tuple[bool, bool]:
    """What depends on lengths in `Constexprs`, of a problem without parts whose mask needs no lists: RAGGED_M and
    RAGGED_N."""
    rows = problem.queries * (problem.group if config.pack_gqa else 1)
    packed = problem.totals is not None
    return packed or rows % config.block_m != 0, packed or problem.keys % config.block_n != 0


# Where tensors begin among how they lie, of a forward; of a bias, a mask and a sink after these.
_Q, _K, _V, _O, _TARGET, _MORE = (PLACE * n for n in range(6))


def resized_forward(run: Any, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs) -> Any:
    """A `launch.Forward` for other lengths than ``run``'s; None where these ask for something else that is compiled
    in."""
    problem = resized_problem(run.problem, structure, lo, hi)
    config, q, sink = run.config, inputs.q, inputs.sink
    shares = splits(problem, config)
    if (shares > 1) != (run.shares > 1) or ragged(problem, config) != run.choices or lists_pay(problem, config):
        return None
    new = object.__new__(type(run))
    new.__dict__.update(run.__dict__)
    new.problem, new.shares = problem, shares
    o, device = output_layout(q.shape, q.stride(), problem.value_dim), q.device
    batch, heads, rows, row = o[0]
    lse = (batch, heads, rows), (heads * rows, rows, 1)
    new.empty_o = partial(torch.empty_strided, *o, dtype=q.dtype, device=device)
    new.empty_lse = partial(torch.empty_strided, *lse, dtype=torch.float32, device=device)
    terms, sizes, c = run.main.numbers
    sizes = sizes._replace(queries=problem.queries, keys=problem.keys, splits=shares)
    target = o
    if run.merge is not None:
        target = (shares * batch, heads, rows, row), (heads * rows * row, rows * row, row, 1)
        parts = target, ((shares * batch, heads, rows), lse[1])
        new.empty_shares = tuple([
            partial(torch.empty_strided, *x, dtype=torch.float32, device=device) for x in parts
        ])  # fmt: skip
    given: tuple[Any, ...] = ()
    for x in inputs[:3]:
        given += place(x.shape, x.stride(), x.element_size())
    given += (*place(*o, q.element_size()), *place(*target, 4))
    places: list[int | None] = [_Q, _K, _V]
    for y in (*inputs[3:5], None if sink is None else sink[..., None]):
        places.append(None if y is None else len(given))
        if y is not None:
            given += place(y.shape, y.stride(), y.element_size())
    given += ENDS
    *operands, sink_place = places
    if run.merge is not None:
        new.merge = run.merge.resized(batch * heads * rows, (None, None, _O, None, sink_place), given, (sizes, c))
    new.main = run.main.resized(
        forward_programs(problem, config, shares),
        (*operands, sink_place if shares == 1 else None, None, None, None, None, _TARGET, None),
        given,
        (_limited(terms, problem), sizes, c),
    )
    return new


def _limited(terms: Any, problem: Problem) -> Any:
    band = problem.score.band
    return terms if band.unlimited else limited(terms, *tiles.limits(band))


# Of a backward.
_DO, _OUT, _DQ, _DK, _DV, _STATS = (PLACE * n for n in range(3, 9))
_ACCUM, _DLSE = _STATS + 4, _STATS + 10


def resized_backward(
    run: Any, structure: Structure, lo: int | None, hi: int | None, inputs: Inputs, outputs: Outputs,
    cotangents: Outputs,
) -> Any:  # fmt: skip
    """The same of a `launch.Backward`."""
    p, config = resized_problem(run.problem, structure, lo, hi), run.config
    (q, k, v, *_), (do, dlse) = inputs, cotangents
    if ragged(p, config) != run.choices:
        return None
    new = object.__new__(type(run))
    new.__dict__.update(run.__dict__)
    new.problem, device, heads = p, q.device, p.batch * p.heads
    m_tiles, n_tiles = -(-p.queries // config.block_m), -(-p.keys // config.block_n)
    row_programs, key_programs, padded = m_tiles * heads, n_tiles * p.kv_heads * p.batch, m_tiles * config.block_m
    sizes = run.preprocess.numbers[0]._replace(queries=p.queries, keys=p.keys, padded_queries=padded)
    empty = partial(torch.empty_strided, dtype=torch.float32, device=device)
    accum = (heads, p.head_dim, padded), (p.head_dim * padded, padded, 1)
    new.empty_stats = partial(empty, (p.batch, p.heads, padded), (p.heads * padded, padded, 1))
    made = [(x.shape, gradient_strides(x)) for x in (q, k, v)]
    *gradients, accumulator = run.empty_gradients
    new.empty_gradients = [
        None if make is None else partial(torch.empty_strided, *x, dtype=q.dtype, device=device)
        for make, x in zip(gradients, made, strict=True)
    ]
    new.empty_gradients.append(None if accumulator is None else partial(empty, *accum))
    given: tuple[Any, ...] = ()
    for x in (q, k, v, do, outputs.o):
        given += place(x.shape, x.stride(), x.element_size())
    for shape, strides in made:
        given += place(shape, strides, q.element_size())
    given += (heads, padded, padded, 1, *accum[0], *accum[1])
    if dlse is not None:
        given += place((*dlse.shape, 1), (*dlse.stride(), 1), 4)
    given += ENDS
    new.preprocess = run.preprocess.resized(
        row_programs,
        (_OUT, _DO, None, None if dlse is None else _DLSE, None, None, None, None),
        given,
        (sizes, *run.preprocess.numbers[1:]),
    )
    if run.finite is not None:
        new.finite = run.finite.resized(key_programs, (_K, _V, None), given, (sizes, *run.finite.numbers[1:]))
    if run.main is not None:
        terms, _, c = run.main.numbers
        written = [None if make is None else x for make, x in zip(gradients[1:], (_DK, _DV), strict=True)]
        own = (_K, _V, None, *written)
        accumulated = None if accumulator is None else _ACCUM
        new.main = run.main.resized(
            key_programs,
            (_Q, _K, _V, _DO, _STATS, _STATS, *(None,) * 6, own, accumulated, None),
            given,
            (_limited(terms, p), sizes, c),
        )
    if run.postprocess is not None:
        terms, _, c = run.postprocess.numbers
        new.postprocess = run.postprocess.resized(
            row_programs, (None, _DQ, None), given, (_limited(terms, p), sizes, c)
        )
    return new
