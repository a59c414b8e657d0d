"""Structure of a call: all but its lengths, so that one prepared pass serves many lengths.

Decoding with a growing cache, or batches with different longest sequences, bring a new layout with each call. Calls of
one structure (`structure_of`) use the same backend; their `Problem`s differ only in the numbers of queries and keys and
what follows from them: causal limits, window and the axes of a bias or mask. A prepared pass can then be `resized` for
another call, if the backend finds that nothing compiled in changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.backends import address
from tilewise.backends.protocol import Structure
from tilewise.spec.problem import Problem
from tilewise.spec.score import ScoreNumbers

_WIDE = 2**23  # strides from which offsets within a tile may need 64 bits
MOST_VARIANTS = 16  # per structure; more than lengths can lead to
_MOST = 2**29  # elements of the rows of all heads; below it every backend counts in 32 bits


# Layout of a tensor: shape, dtype, device, strides, and address modulo 16 (0 on a CPU).
Layout = tuple[tuple[int, ...], Any, Any, tuple[int, ...], int]


def layouts(*tensors: Tensor | None) -> tuple[Layout | None, ...]:
    """Return the layout of each tensor. On the CPU addresses are 0, because its backends read any address alike."""
    first = tensors[0]
    if first is not None and first.is_cuda:  # what `address` would ask of each
        return tuple([
            None if x is None else (x.shape, x.dtype, x.device, x.stride(), x.data_ptr() & 15) for x in tensors
        ])  # fmt: skip
    return tuple([
        None if x is None else (x.shape, x.dtype, x.device, x.stride(), 0 if x.is_cpu else address(x) % 16)
        for x in tensors
    ])  # fmt: skip


def restored_layouts(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return what may differ in the `layouts` of saved tensors and cotangents of one forward.

    Hooks must restore shapes. A wrong number of elements, dtype or device would let kernels read elsewhere, so these
    are part of it.
    """
    first = tensors[0]
    if first is not None and first.is_cuda:
        return tuple([
            None if x is None else (x.stride(), x.dtype, x.numel(), x.get_device(), x.data_ptr() & 15) for x in tensors
        ])  # fmt: skip
    return tuple([None if x is None else (x.stride(), x.dtype, x.numel()) for x in tensors])


def structure_of(
    q: Layout, k: Layout, v: Layout, bias: Layout | None, mask: Layout | None, sink: Layout | None,
    *more: Layout | None,
) -> Structure | None:  # fmt: skip
    """Return the structure of a call with q, k, v, bias, mask and sink only, whose shapes fit. None for other calls.
    more: in a backward, the layouts of o and the LSE, and of their cotangents."""
    q_shape, q_dtype, q_device, q_strides, q_begin = q
    k_shape, k_dtype, k_device, k_strides, k_begin = k
    v_shape, v_dtype, v_device, v_strides, v_begin = v
    try:
        batch, heads, M, head_dim = q_shape
        v_batch, kv_heads, N, value_dim = v_shape
        (qb, qh, qm, qd), (kb, kh, kn, kd), (vb, vh, vn, vd) = q_strides, k_strides, v_strides
    except ValueError:  # not four axes each
        return None
    if k_shape != (batch, kv_heads, N, head_dim) or v_batch != batch or not (M and N):
        return None
    # Checks below read only bits of the strides: if one reaches a power of two, so does their bitwise or.
    strides = qb | qh | qm | kb | kh | kn | vb | vh | vn
    wide = (False, False)
    if (strides | qd | kd | vd | heads * (M + N) * (head_dim + value_dim)) >= _WIDE:
        dense = heads * (M if M > N else N) * (head_dim if head_dim > value_dim else value_dim)
        if (strides | qd | kd | vd | dense) >= 2**31:
            return None
        wide = (strides | qd | kd | vd) >= _WIDE, dense >= _WIDE
    if 2 * batch * heads * (M + N + 256) >= _MOST:
        return None
    few = M <= 64 and 16 * M <= N  # `Problem.few_queries`
    # Common case: contiguous rows, other strides multiples of 16. One code then stands for all strides.
    usual = qd == kd == vd == 1 and not strides & 15 and qb and qh and qm and kb and kh and kn and vb and vh and vn
    key: tuple = (
        batch, heads, kv_heads, head_dim, value_dim, q_dtype, k_dtype, v_dtype, q_device, k_device, v_device,
        0 if usual else _codes((*q_strides, *k_strides, *v_strides)), qh < qm, kh < kn, vh < vn,
        q_begin, k_begin, v_begin, wide, M if few else M == 1, few, N == 1,
        # strides of tensors that a pass allocates, or factors of them
        0 if not (head_dim | value_dim) & 15 else _codes((M * head_dim, M * value_dim, N * head_dim, N * value_dim)),
    )  # fmt: skip
    if bias is not None or mask is not None or sink is not None:
        for x in (bias, mask):
            if x is None:
                key += (None,)
                continue
            shape, dtype, device, steps, begin = x
            if len(shape) != 4 or shape[2] not in (1, M) or shape[3] not in (1, N) or max(steps) >= _WIDE:
                return None
            key += (*shape[:2], shape[2] == 1, shape[3] == 1, dtype, device, _broadcast_codes(shape, steps), begin)
        if sink is not None:
            shape, dtype, device, steps, begin = sink
            if len(shape) != 3 or shape[2] not in (1, M):
                return None
            key += (*shape[:2], shape[2] == 1, dtype, device, _broadcast_codes(shape, steps), begin)
    found: tuple[tuple[int, ...], ...] = (q_shape, q_strides, k_shape, k_strides, v_shape, v_strides)
    if more:
        o, lse, do, dlse = more
        if o is None or lse is None or do is None:
            return None
        o_shape, o_dtype, o_device, o_strides, o_begin = o
        do_shape, do_dtype, do_device, do_strides, do_begin = do
        lse_shape, lse_dtype, lse_device, lse_strides, lse_begin = lse
        if not o_shape == do_shape == (batch, heads, M, value_dim) or lse_shape != o_shape[:3]:
            return None
        (ob, oh, om, od), (db, dh, dm, dd) = o_strides, do_strides
        strides = ob | oh | om | db | dh | dm
        if (strides | od | dd) >= _WIDE or max(lse_strides) >= _WIDE:
            return None
        usual = od == dd == 1 and not strides & 15 and ob and oh and om and db and dh and dm
        key += (
            o_dtype, o_device, do_dtype, do_device, 0 if usual else _codes((*o_strides, *do_strides)), oh < om, dh < dm,
            o_begin, do_begin, lse_dtype, lse_device, lse_begin,
            # The LSE of a forward is contiguous and read by pointer.
            0 if lse_strides == (heads * M, M, 1) else _codes(lse_strides),
        )  # fmt: skip
        found = (*found, o_shape, o_strides, lse_shape, lse_strides, do_shape, do_strides)
        if dlse is not None:
            shape, dtype, device, steps, begin = dlse
            if shape != lse_shape or max(steps) >= _WIDE:
                return None
            key += (dtype, device, _codes(steps), begin)
            found = (*found, shape, steps)
    return tuple.__new__(Structure, (key, M, N, found))


def _codes(strides: Sequence[int]) -> tuple[int, ...]:
    """Return a code per stride: 0, 1, or the largest power of two up to 16 that divides it. It tells if TMA can step by
    the stride and if a kernel may be specialized for multiples of 16."""
    return tuple([x if x < 2 else (x & -x & 15) | 16 for x in strides])


def _broadcast_codes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return `_codes`, with 0 for axes of size 1, whose stride does not matter."""
    return _codes([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])


def terms_key(terms: ScoreNumbers) -> tuple:
    """Return the key of terms within a structure: causal and window limits count only by being set."""
    return terms[0] is None, terms[1] is None, terms[2:]


_changing = threading.Lock()  # guards changes of `Variants`, which threads share; reading needs no lock


class Variants(NamedTuple):
    """Prepared passes of one structure, each with its problem."""

    prepared: list[tuple[Problem, Any]]

    def add(self, problem: Problem, run: Any) -> bool:
        """Add a pass; return False if there are `MOST_VARIANTS` already."""
        with _changing:
            if len(self.prepared) >= MOST_VARIANTS:
                return False
            self.prepared.append((problem, run))
            return True

    def resized(self, structure: Structure, terms: ScoreNumbers, *tensors: Any) -> Any | None:
        """Return a pass resized from one of these for another call; None if no backend can."""
        for n, found in enumerate(tuple(self.prepared)):
            made = found[1].resized(structure, terms.lo, terms.hi, *tensors)
            if made is not None:
                if n > 0:  # the next call, probably of similar lengths, tries it first
                    with _changing:
                        self.prepared[:] = [found, *(x for x in self.prepared if x is not found)]
                return made
        return None
