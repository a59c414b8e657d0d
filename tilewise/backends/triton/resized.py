"""Launches that were prepared for some lengths, for others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tilewise.backends import Inputs, Outputs, gradient_strides, output_layout
from tilewise.backends.launcher import Place
from tilewise.backends.score import limited
from tilewise.backends.triton.config import Config, splits
from tilewise.backends.triton.masks import lists_pay
from tilewise.backends.triton.packed import tile_count
from tilewise.problem import Problem


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


def resized_forward(run: Any, problem: Problem, inputs: Inputs) -> Any:
    """A `launch.Forward` for other lengths than ``run``'s; None where these ask for something else that is compiled
    in."""
    config, q, sink = run.config, inputs.q, inputs.sink
    shares = splits(problem, config)
    if (shares > 1) != (run.shares > 1) or ragged(problem, config) != run.choices or lists_pay(problem, config):
        return None
    new = object.__new__(type(run))
    new.__dict__.update(run.__dict__)
    new.problem, new.shares = problem, shares
    o, device = Place(*output_layout(q, problem.value_dim), q.element_size()), q.device
    batch, heads, rows, row = o.shape
    lse = (batch, heads, rows), (heads * rows, rows, 1)
    new.empty_o = partial(torch.empty_strided, o.shape, o.strides, dtype=q.dtype, device=device)
    new.empty_lse = partial(torch.empty_strided, *lse, dtype=torch.float32, device=device)
    terms, sizes, c = run.main.numbers
    sizes = sizes._replace(queries=problem.queries, keys=problem.keys, splits=shares)
    sink_row = None if sink is None else Place.of(sink[..., None])
    target = o
    if run.merge is not None:
        target = Place((shares * batch, heads, rows, row), (heads * rows * row, rows * row, row, 1), 4)
        parts = (target.shape, target.strides), ((shares * batch, heads, rows), lse[1])
        new.empty_shares = tuple([
            partial(torch.empty_strided, *x, dtype=torch.float32, device=device) for x in parts
        ])  # fmt: skip
        new.merge = run.merge.resized(batch * heads * rows, (None, None, o, None, sink_row), (sizes, c))
    places = [None if x is None else Place.of(x) for x in inputs[:5]]
    new.main = run.main.resized(
        forward_programs(problem, config, shares),
        (*places, sink_row if shares == 1 else None, None, None, None, None, target, None),
        (limited(terms, problem.score.band), sizes, c),
    )
    return new


def resized_backward(run: Any, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Any:
    """The same of a `launch.Backward`."""
    p, config, (q, k, v, *_), (do, dlse) = problem, run.config, inputs, cotangents
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
    made = [Place(x.shape, gradient_strides(x), x.element_size()) for x in (q, k, v)]
    *gradients, accumulator = run.empty_gradients
    new.empty_gradients = [
        None if make is None else partial(torch.empty_strided, x.shape, x.strides, dtype=q.dtype, device=device)
        for make, x in zip(gradients, made, strict=True)
    ]
    new.empty_gradients.append(None if accumulator is None else partial(empty, *accum))
    given = [Place.of(x) for x in (q, k, v, do)]
    dlse_row = None if dlse is None else Place.of(dlse[..., None])
    new.preprocess = run.preprocess.resized(
        row_programs,
        (Place.of(outputs.o), given[3], None, dlse_row, None, None, None, None),
        (sizes, *run.preprocess.numbers[1:]),
    )
    if run.finite is not None:
        new.finite = run.finite.resized(key_programs, (*given[1:3], None), (sizes, *run.finite.numbers[1:]))
    if run.main is not None:
        terms, _, c = run.main.numbers
        stats_row = Place((heads, padded), (padded, 1), 4)
        written = [None if make is None else x for make, x in zip(gradients[1:], made[1:], strict=True)]
        own = (*given[1:3], None, *written)
        new.main = run.main.resized(
            key_programs,
            (*given, stats_row, stats_row, None, None, None, None, None, None, own, Place(*accum, 4), None),
            (limited(terms, problem.score.band), sizes, c),
        )
    if run.postprocess is not None:
        terms, _, c = run.postprocess.numbers
        new.postprocess = run.postprocess.resized(
            row_programs, (None, made[0], None), (limited(terms, problem.score.band), sizes, c)
        )
    return new
