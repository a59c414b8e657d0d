"""What a call is apart from its lengths: what may be prepared once for all of them.

A cache that grows by a key a step, or batches whose longest sequence differs, bring a new layout with each call. Calls
of one structure (`structure_of`) are computed by the same backend, and their `Problem`s differ in the numbers of
queries and keys, and in what follows from them: in the band, and in the axes of a bias or mask. So a pass that was
prepared for one of them may be `resized` for another, where the backend finds that nothing it has compiled in changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.backends import address
from tilewise.backends.protocol import Inputs, Structure
from tilewise.problem import Problem
from tilewise.score.terms import Terms

_WIDE = 2**23  # strides from which offsets inside a tile may need 64 bits
MOST_VARIANTS = 16  # of a structure: what lengths decide of it has fewer cases
_MOST = 2**29  # elements of all heads' rows, far from where a backend counts in more than 32 bits


def structure_of(inputs: Inputs, *more: Tensor | None) -> Structure | None:
    """Of a call with q, k, v, bias, mask and sink alone, whose shapes fit; None of any other.

    more: o and the LSE of a backward, and their cotangents.
    """
    q, k, v, bias, mask, sink, parts, seed, lengths, tiles = inputs
    if not (parts is seed is lengths is tiles is None) or not q.dim() == k.dim() == v.dim() == 4:
        return None
    batch, heads, M, head_dim = q.shape
    _, kv_heads, N, value_dim = v.shape
    if k.shape != (batch, kv_heads, N, head_dim) or v.shape[0] != batch or M == 0 or N == 0:
        return None
    strides = (*q.stride(), *k.stride(), *v.stride())
    width = max(head_dim, value_dim)
    most, dense = max(strides), heads * max(M, N) * width
    if most >= 2**31 or dense >= 2**31 or 2 * batch * heads * (M + N + 256) >= _MOST:
        return None
    few = M <= 64 and 16 * M <= N  # `Problem.few_queries`
    key: tuple = (
        batch, heads, kv_heads, head_dim, value_dim, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        *_codes(strides), strides[1] < strides[2], strides[5] < strides[6], strides[9] < strides[10],
        0 if q.is_cpu else (address(q) % 16, address(k) % 16, address(v) % 16),
        most >= _WIDE, dense >= _WIDE, M if few else M == 1, few, N == 1,
        *_codes((M * head_dim, M * value_dim, N * head_dim, N * value_dim)),  # strides of what is made, or factors
    )  # fmt: skip
    for x in (bias, mask):
        if x is None:
            key += (None,)
            continue
        if x.dim() != 4 or x.shape[2] not in (1, M) or x.shape[3] not in (1, N) or max(x.stride()) >= _WIDE:
            return None
        b, h, m, n = x.shape
        key += (b, h, m == 1, n == 1, x.dtype, x.device, _broadcast_codes(x), _alignment(x))
    if sink is None:
        key += (None,)
    else:
        if sink.dim() != 3 or sink.shape[2] not in (1, M):
            return None
        key += (*sink.shape[:2], sink.shape[2] == 1, sink.dtype, sink.device, _broadcast_codes(sink), _alignment(sink))
    for x in more:
        if x is None:
            key += (None,)
            continue
        if x.shape[2] != M:
            return None
        stride = x.stride()
        if max(stride) >= _WIDE:
            return None
        key += (*x.shape[:2], *x.shape[3:], x.dtype, x.device, _codes(stride), stride[1] < stride[2], _alignment(x))
    return Structure(key, M, N, (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()))


def _codes(strides: Sequence[int]) -> tuple[int, ...]:
    """Of each stride whether it is 0 or 1, and the power of two that divides it, up to 16: whether TMA can step by it,
    whether a kernel is compiled for multiples of 16."""
    return tuple([x if x < 2 else (x & -x & 15) | 16 for x in strides])


def _broadcast_codes(x: Tensor) -> tuple[int, ...]:
    """The same; nobody steps along an axis of size 1."""
    return _codes([0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


def _alignment(x: Tensor) -> int:
    return 0 if x.is_cpu else address(x) % 16


def terms_key(terms: Terms) -> tuple:
    """The same of terms: the limits of the band may differ."""
    lo, hi, *rest = terms
    return (lo is None, hi is None, *rest)


class Variants(NamedTuple):
    """Passes that were prepared for calls of a structure, each with its problem."""

    prepared: list[tuple[Problem, Any]]

    def resized(self, structure: Structure, terms: Terms, *tensors: Any) -> Any | None:
        """One for another call, if a backend finds that it can make it of one that is there."""
        prepared = self.prepared
        for n, (_, run) in enumerate(prepared):
            made = run.resized(structure, terms.lo, terms.hi, *tensors)
            if made is not None:
                if n:  # the next one, which has about as many, will be made of it too
                    prepared.insert(0, prepared.pop(n))
                return made
        return None
