"""Every bias of a packed batch: makers for `varlen_helpers.hold`, ``(new) -> (bias, parts of a sequence)``."""

from __future__ import annotations

import math

import torch
from varlen_helpers import HKV, H, cut, ragged

from tilewise.bias import RaggedBias, RelativeBias, alibi, low_rank_bias, t5_bias

INF = math.inf


def padded(axes):
    def make(new):
        x = new.lengths
        sizes = {"b": x.B, "h": H, "k": HKV, "m": x.max_q, "n": x.max_k, "1": 1}
        w = new(*(sizes[axis] for axis in axes))
        return w, lambda s: [cut(w, s)]

    return make


def along_keys(*shape):
    def make(new):
        w = new(*shape, new.lengths.total_k)
        full = w.expand(1, *w.shape) if w.dim() == 1 else w
        return w, lambda s: [full[None, :, None, s.cols]]

    return make


def along_queries(heads):
    def make(new):
        w = new(heads, new.lengths.total_q, 1)
        return w, lambda s: [w[None, :, s.rows]]

    return make


def ragged_bias(heads):
    def make(new):
        w = new(heads, new.lengths.pairs[-1])
        return RaggedBias(w, torch.tensor(new.lengths.pairs)), lambda s: [ragged(w, s)]

    return make


def relative(on, heads=H, R=5, lo=-2, **settings):
    """Values of each query or key; a start that is a tensor has a number for each sequence."""

    def make(new):
        values = new(new.lengths.total_q if on == "query" else new.lengths.total_k, heads, R)
        starts = {name: x[: new.lengths.B] if isinstance(x, torch.Tensor) and x.dim() else x
                  for name, x in settings.items() if name.endswith("start")}  # fmt: skip
        given = {**settings, **starts}

        def of(s):
            own = values[s.rows if on == "query" else s.cols].transpose(0, 1)[None]
            return [RelativeBias(own, lo=lo, on=on, **given | start_of(starts, s))]

        return RelativeBias(values, lo=lo, on=on, **given), of

    return make


def start_of(starts, s):
    return {name: x[s.b] if isinstance(x, torch.Tensor) and x.dim() else x for name, x in starts.items()}


def toeplitz(make_term, *shape, per_sequence=False, **starts):
    """``make_term(leaf, **starts)``; a leaf with an axis of sequences is that of each."""

    def make(new):
        leaf = new(*((new.lengths.B, *shape) if per_sequence else shape))
        given = {name: x[: new.lengths.B] if isinstance(x, torch.Tensor) and x.dim() else x
                 for name, x in starts.items()}  # fmt: skip

        def of(s):
            return [make_term(leaf[s.b : s.b + 1] if per_sequence else leaf, **start_of(given, s))]

        return make_term(leaf, **given), of

    return make


def low_rank(new):
    u, w = new(1, H, new.lengths.total_q, 3), new(1, HKV, new.lengths.total_k, 3)
    return low_rank_bias(u, w), lambda s: [low_rank_bias(u[:, :, s.rows], w[:, :, s.cols])]


def several(*makers):
    def make(new):
        made = [maker(new) for maker in makers]
        return tuple(bias for bias, _ in made), lambda s: [x for _, of in made for x in of(s)]

    return make


def for_all(values, **starts):
    return RelativeBias(values, lo=-2, outside="clamp", **starts)


def hidden_far(values, **starts):
    return RelativeBias(values, lo=-3, outside=-INF, reverse=True, **starts)


def t5(table, **starts):
    return t5_bias(table, True, 6, **starts)


BUCKETS = torch.tensor([3, 0, 0, 1, 2, 2, 4])
STARTS = torch.tensor([4, 0, 9, 2, 1, 3])
BIASES = {
    **{f"padded {axes}": padded(axes) for axes in
       ("bhmn", "1kmn", "11mn", "b11n", "1h1n", "bkm1", "11m1", "bh11", "1111")},
    "along the keys": along_keys(H),
    "along the keys, groups": along_keys(HKV),
    "along the keys, one head": along_keys(1),
    "along the keys, one dimension": along_keys(),
    "along the queries": along_queries(H),
    "along the queries, one head": along_queries(1),
    "ragged": ragged_bias(H),
    "ragged, groups": ragged_bias(HKV),
    "ragged, shared": ragged_bias(1),
    "two along the keys and two along the queries": several(
        along_keys(H), along_keys(), along_queries(1), along_queries(H)
    ),
    "two matrices, padded": several(padded("bhmn"), padded("1kmn")),
    "query": relative("query"),
    "query, hidden outside": relative("query", HKV, outside=-INF),
    "query, clamped and reversed": relative("query", 1, outside="clamp", reverse=True),
    "query, buckets": relative("query", buckets=BUCKETS, outside="clamp"),
    "query, start of all": relative("query", query_start=2, key_start=1),
    "query, a start of all on the device": relative("query", query_start=torch.tensor(2)),
    "query, starts": relative("query", query_start=STARTS, outside=-INF),
    "query, starts of keys": relative("query", key_start=STARTS),
    "key": relative("key"),
    "key, hidden outside": relative("key", outside=-INF, reverse=True),
    "key, clamped": relative("key", HKV, outside="clamp"),
    "key, buckets and starts": relative("key", 1, buckets=BUCKETS, query_start=STARTS, key_start=1),
    "all": toeplitz(for_all, 1, H, 1, 6),
    "all, of each sequence": toeplitz(for_all, HKV, 1, 6, per_sequence=True),
    "all, hidden outside": toeplitz(hidden_far, 1, H, 1, 7),
    "all, start": toeplitz(for_all, 1, 1, 1, 6, query_start=1, key_start=2),
    "all, start of keys": toeplitz(for_all, 1, 1, 1, 6, key_start=2),
    "t5": toeplitz(t5, 8, H),
    "t5, starts": toeplitz(t5, 8, H, query_start=STARTS),
    "alibi": toeplitz(alibi, H),
    "alibi, start": toeplitz(alibi, H, query_start=3),
    "alibi, of each sequence": toeplitz(alibi, H, per_sequence=True),
    "several by distance": several(toeplitz(t5, 8, H), toeplitz(alibi, 1), toeplitz(for_all, 1, H, 1, 6)),
    "several with starts": several(toeplitz(t5, 8, H, query_start=STARTS), toeplitz(alibi, H, query_start=2)),
    "low rank": low_rank,
    "ragged, along the keys and alibi": several(ragged_bias(H), along_keys(1), toeplitz(alibi, H)),
    "padded, along both": several(padded("1hmn"), along_keys(H), along_queries(1)),
    "everything": several(
        ragged_bias(1), along_keys(HKV), along_queries(H), relative("query"), relative("key", 1, outside="clamp"),
        toeplitz(t5, 8, H), low_rank,
    ),
}  # fmt: skip
