"""The online softmax on what warpgroups hold of a product: reductions of rows, the steps that are left out where no
maximum has moved, and P as an operand of P·V.

A row of wgmma's result lies in four threads, which hold two neighbours of every eight columns each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends.gluon.compat import REDUCES_IN_TREES, chain
from tilewise.backends.gluon.sm90.common.dropout import dropped_pairs
from tilewise.backends.gluon.sm90.common.wgmma import accumulator

SLACK = gl.constexpr(8.0)


@gluon.jit
def by_thread(x):
    """As [rows, columns / 8, 4, 2]: of every eight columns two neighbours in each of the four threads of a row."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def of_threads(x):
    """As [rows, 4, columns / 4]: what each of the four threads of a row has of it."""
    return by_thread(x).permute((0, 2, 1, 3)).reshape([x.shape[0], 4, x.shape[1] // 4])


@gluon.jit
def maxima_of_rows(x):
    """The maxima of the rows of a product."""
    if REDUCES_IN_TREES:
        rows = gl.max(chain(of_threads(x), True), axis=1)
        return gl.convert_layout(rows, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    else:
        return gl.max(x, axis=1)


@gluon.jit
def sums_of_rows(x, BY_THREAD: gl.constexpr):
    """The sums of rows; BY_THREAD: what each of the four threads of a row has of it, [rows, 4], without a shuffle."""
    if BY_THREAD and REDUCES_IN_TREES:
        return chain(of_threads(x), False)
    elif BY_THREAD:
        return gl.sum(gl.sum(by_thread(x), axis=1), axis=2)
    elif REDUCES_IN_TREES:
        rows = gl.sum(chain(of_threads(x), False), axis=1)
        return gl.convert_layout(rows, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    else:
        return gl.sum(x, axis=1)


@gluon.jit
def online_softmax(
    s, m_i, l_i, exponent, LAZY: gl.constexpr, MAY_BE_FULLY_MASKED: gl.constexpr, shift=None, lowest=None
):
    """``(p, m, l, alpha)``; l and alpha of rows, or of each thread of a row where ``l_i`` is, see `sums_of_rows`.

    LAZY: m is the greatest score or up to `SLACK` powers of two less: where it stays, alpha is 1 and `rescaled` has
    nothing to do (as in FlashAttention-4). MAY_BE_FULLY_MASKED: a row may have seen nothing yet, so that its maximum is
    -inf.
    shift: what is to be added to all scores of the tile, or of a row; the maximum counts it. lowest: what the maximum
    times ``exponent`` is taken to be where that is less: there a bias that stands for -inf, as the least number of a
    dtype does, would pass the range of float32.
    """
    BY_THREAD: gl.constexpr = len(l_i.shape) == 2
    most = maxima_of_rows(s)
    if shift is not None:
        most += shift
    m_new = gl.maximum(m_i, most)
    if LAZY:
        m_new = gl.where((m_new - m_i) * exponent <= SLACK, m_i, m_new)  # not where m_i is -inf
    base = m_new
    if MAY_BE_FULLY_MASKED:
        base = gl.where(m_new == -float("inf"), 0.0, m_new)
    # Subtracted before it is scaled: where the maximum stays, alpha must be 1 and not 1 + rounding, thousands of times.
    alpha = gl.exp2((m_i - base) * exponent)
    if shift is not None:
        base -= shift
    base *= exponent
    if lowest is not None:
        base = gl.maximum(base, lowest)
    p = gl.exp2(s * exponent - base[:, None])
    if BY_THREAD:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)[:, None]
        alpha, _ = gl.broadcast(alpha, l_i)
    return p, m_new, l_i * alpha + sums_of_rows(p, BY_THREAD), alpha


@gluon.jit
def declare_exceeds():
    """Once in a kernel, before all `exceeds`."""
    gl.inline_asm_elementwise(
        ".reg .b32 tilewise_exceeds; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exceeds(sums):
    """Not 0 where a thread of this warp has more than 2^14 in a sum by thread of `sums_of_rows`, or NaN.

    So P is within float16, and O far within float32. A scalar that a warp has for itself: what it decides may not have
    warps wait for each other. From a tensor to a scalar leads a reduction over all warps, or a register of PTX.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gtu.f32 p, $2, 0f46800000; setp.gtu.or.f32 p, $3, 0f46800000, p; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 tilewise_exceeds, 1, 0, p; mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,f,f", [sums], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    return gl.inline_asm_elementwise(
        "mov.b32 $0, tilewise_exceeds;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def changed_rows(alpha):
    """1 where a thread of the warp has an alpha that is not 1."""
    # A thread has two of the rows that its warp has, here as in wgmma's results.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3f800000; setp.neu.f32 q, $3, 0f3f800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; selp.b32 $1, 1, 0, p; }",
        "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def changed_rows_once_summed(alpha, l_i):
    """The same of each thread of a row, or where a sum is NaN.

    The sums are asked for ptxas's sake: it moves no vote past a border of basic blocks, and nothing that a vote needs
    past the vote. Shuffles keep the exponentials above the wait for P·V where there are any.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.neu.f32 p, $2, 0f3f800000; setp.neu.or.f32 p, $3, 0f3f800000, p; "
        "setp.ltu.or.f32 p, $4, 0f00000000, p; setp.ltu.or.f32 p, $5, 0f00000000, p; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; selp.b32 $1, 1, 0, p; }",
        "=r,=r,f,f,f,f", [alpha, l_i], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_asm(n):
    """Multiplies n registers by n others unless all threads of the warp have a 0 in the last."""
    muls = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred p; setp.ne.s32 p, ${3 * n}, 0; @!p bra.uni DONE; {muls} DONE: }}"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def to_columns(x, o, BY_THREAD: gl.constexpr):
    """What rows of ``o`` have, or each thread of a row of a `by_thread`, in a shape that broadcasts to ``o``."""
    if BY_THREAD:
        x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, o.type.layout)), assert_trivial=True)
        return x[:, None, :][:, :, :, None]
    else:
        return gl.convert_layout(x, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def rescaled(o, alpha, changed, LAZY: gl.constexpr):
    """o · alpha of `online_softmax`; LAZY: a warp of which nothing has changed takes no step."""
    BY_THREAD: gl.constexpr = len(alpha.shape) == 2
    parts = o
    if BY_THREAD:
        parts = by_thread(o)
    alpha = to_columns(alpha, parts, BY_THREAD)
    if LAZY:
        EACH: gl.constexpr = o.shape[1] // 2
        parts = gl.inline_asm_elementwise(
            _rescale_asm(EACH), _rescale_constraints(EACH), [parts, alpha, to_columns(changed, parts, BY_THREAD)],
            dtype=gl.float32, is_pure=False, pack=EACH,
        )  # fmt: skip
    else:
        parts *= alpha
    return gl.convert_layout(parts.reshape(o.shape), o.type.layout, assert_trivial=True)


@gluon.jit
def rounded(p, dropped, DTYPE: gl.constexpr, terms, c):
    """P in the dtype of V; with several loops or dropout neighbours of two columns as one word, [64, BLOCK_N / 2].

    Of 16-bit elements that go from one loop into another LLVM would hold each in a register of its own.
    ``dropped``: of `dropout_words`, or None.
    """
    if c.PAIRS:
        low, high = p.reshape([64, c.BLOCK_N // 2, 2]).split()
        KIND: gl.constexpr = "f16x2" if gl.float16 == DTYPE else "bf16x2"
        if dropped is not None:
            return gl.inline_asm_elementwise(
                f"{{ .reg .b32 x; cvt.rn.{KIND}.f32 x, $2, $1; lop3.b32 $0, x, $3, 0, 0x30; }}", "=r,f,f,r",
                [low, high, dropped_pairs(dropped, low, terms, c)], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        return gl.inline_asm_elementwise(
            f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(64, c.BLOCK_DV), 2)
        return gl.convert_layout(p.to(DTYPE), OPERAND, assert_trivial=True)


@gluon.jit
def times_v(p, v, o, c):
    """Issue o + P·V; ``p``: of `rounded`."""
    if c.PAIRS:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(64, c.BLOCK_DV), 2)
        p = gl.join(p, p).reshape([64, c.BLOCK_N])
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [p], dtype=gl.int16, is_pure=True, pack=2)
        p = gl.convert_layout(p.to(v.dtype, bitcast=True), OPERAND, assert_trivial=True)
    return warpgroup_mma(p, v, o, is_async=True)
