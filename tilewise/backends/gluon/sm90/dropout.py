"""Dropout of probabilities in registers: which are kept is a function of their place, see `tilewise.score.dropout`.

A thread of wgmma's result owns all four scores of a group, whose words are made once: rows i, i + 8 and columns j,
j + 8 in a tile of scores as in a transposed one. In the backward a probability that is dropped has its sign turned:
P is needed with dropout for dV and without for dS, and a sign costs no register.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.dropout import kept
from tilewise.backends.gluon.sm90.m_subtiles import minus_delta_of


@gluon.jit
def dropped(p, words, m0, n0, terms):
    """P of a tile, [queries, keys] from ``m0`` and ``n0`` on, with 0 for what is dropped; ``words``: a `Stream`."""
    rows = gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))[:, None]
    cols = gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
    return gl.where(kept(words, m0, rows, n0, cols, terms), p, 0.0)


@gluon.jit
def signed_by_dropout(p, words, m0, n0, terms):
    """P of a transposed subtile, [keys, queries], negative where it is dropped."""
    rows = gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
    cols = gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))[:, None]
    return gl.where(kept(words, m0, rows, n0, cols, terms), p, -p)


@gluon.jit
def kept_of(p, words):
    """P as dV takes it, but for the weight of what is kept, which is dV's. ``p``: of `signed_by_dropout`."""
    if words is not None:
        p = gl.where(p < 0, 0.0, p)  # NaN stays
    return p


@gluon.jit
def softmax_gradient(p, dp, words, rows, slot, SUBTILE: gl.constexpr, terms, c):
    """dS = P (dP - delta) of a transposed subtile; with dropout dP counts, by its weight, where P is kept.

    ``dp``: of `m_subtiles.begin_dp`, which has delta in it where nothing is dropped."""
    if words is not None:
        minus_delta = minus_delta_of(rows, slot, SUBTILE, c)[None, :]
        return gl.abs(p) * gl.where(p > 0, dp * terms.weight + minus_delta, minus_delta)
    else:
        return p * dp
