"""Online softmax on accumulators: row reductions, rescaling only where a maximum has changed, and P as operand of P·V.

Four threads share a row of wgmma's result; each has two neighbours of every eight columns.
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
    """Reshape to [rows, columns / 8, 4, 2]: two neighbours of every eight columns in each of a row's four threads."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def of_threads(x):
    """Reshape to [rows, 4, columns / 4]: the elements of each of a row's four threads."""
    return by_thread(x).permute((0, 2, 1, 3)).reshape([x.shape[0], 4, x.shape[1] // 4])


@gluon.jit
def maxima_of_rows(x):
    """Return the row maxima of a product."""
    if REDUCES_IN_TREES:
        rows = gl.max(chain(of_threads(x), True), axis=1)
        return gl.convert_layout(rows, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    else:
        return gl.max(x, axis=1)


@gluon.jit
def sums_of_rows(x, BY_THREAD: gl.constexpr):
    """Return row sums; BY_THREAD: the sums of each of a row's four threads, [rows, 4], without a shuffle."""
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
    s, m_i, l_i, exponent, LAZY: gl.constexpr, MAY_BE_FULLY_MASKED: gl.constexpr, shift=None, lowest=None, excess=0,
    ENTROPY: gl.constexpr = False,
):  # fmt: skip
    """Return ``(p, m, l, alpha, most, excess)``: l, alpha and excess per row, or per thread of a row as ``l_i``, see
    `sums_of_rows`; most: the tile's greatest scores.

    LAZY: m is the greatest score or up to `SLACK` powers of two less: where it stays, alpha is 1 and `rescaled` has no
    work (as in FlashAttention-4). MAY_BE_FULLY_MASKED: a row's maximum may be -inf so far.
    shift: added to all scores of the tile, or of a row; the maximum includes it. lowest: lower bound of the maximum
    times ``exponent``: a bias used as -inf, such as the least finite number of a dtype, would exceed float32. excess:
    with ENTROPY the sums of p log2(p), with p relative to m.
    """
    BY_THREAD: gl.constexpr = len(l_i.shape) == 2
    most = maxima_of_rows(s)
    if shift is not None:
        most += shift
    m_new = gl.maximum(m_i, most)
    if LAZY:
        m_new = gl.where((m_new - m_i) * exponent <= SLACK, m_i, m_new)  # false if m_i is -inf
    base = m_new
    if MAY_BE_FULLY_MASKED:
        base = gl.where(m_new == -float("inf"), 0.0, m_new)
    # Subtract before scaling: where the maximum stays, alpha must be exactly 1, not 1 + rounding, thousands of times.
    fall = (m_i - base) * exponent
    alpha = gl.exp2(fall)
    if shift is not None:
        base -= shift
    base *= exponent
    if lowest is not None:
        base = gl.maximum(base, lowest)
    power = s * exponent - base[:, None]
    p = gl.exp2(power)
    if BY_THREAD:
        alpha = _by_thread_of(alpha, l_i)
    if ENTROPY:
        fall = gl.maximum(fall, -256.0)  # 2^-256 is 0 in float32, where a power of -inf would give 0 · inf
        if MAY_BE_FULLY_MASKED:
            power = gl.maximum(power, -256.0)
        if BY_THREAD:
            fall = _by_thread_of(fall, l_i)
        excess = alpha * (excess + l_i * fall) + sums_of_rows(p * power, BY_THREAD)
    return p, m_new, l_i * alpha + sums_of_rows(p, BY_THREAD), alpha, most, excess


@gluon.jit
def _by_thread_of(x, l_i):
    """Return a number for each row in the shape of ``l_i``, a number for each of a row's threads."""
    x = gl.convert_layout(x, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)[:, None]
    x, _ = gl.broadcast(x, l_i)
    return x


@gluon.jit
def declare_exceeds():
    """Declare the register of `exceeds`; call once per kernel, before all `exceeds`."""
    gl.inline_asm_elementwise(
        ".reg .b32 tilewise_exceeds; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exceeds(sums):
    """Return nonzero if a thread of this warp has a sum by thread (`sums_of_rows`) above 2^14, or NaN. The bound keeps
    P within float16, and O far within float32. The result is a scalar per warp, whose branches must not make warps wait
    for each other. In Triton a tensor becomes a scalar only by a reduction over all warps, so this uses a PTX register.
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
    """Return 1 where a thread of the warp has an alpha other than 1."""
    # A thread has two of its warp's rows, here as in wgmma's results.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3f800000; setp.neu.f32 q, $3, 0f3f800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; selp.b32 $1, 1, 0, p; }",
        "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def changed_rows_once_summed(alpha, l_i):
    """Like `changed_rows`, for each thread of a row; also 1 where a sum is NaN.

    ptxas: testing the sums keeps the exponentials above the wait for P·V, because ptxas moves no vote past a
    basic-block boundary, and no input of a vote past the vote. Otherwise shuffles, where there are any, do this.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.neu.f32 p, $2, 0f3f800000; setp.neu.or.f32 p, $3, 0f3f800000, p; "
        "setp.ltu.or.f32 p, $4, 0f00000000, p; setp.ltu.or.f32 p, $5, 0f00000000, p; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; selp.b32 $1, 1, 0, p; }",
        "=r,=r,f,f,f,f", [alpha, l_i], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_asm(n):
    """Return PTX that multiplies n registers by n others unless all threads of the warp have a 0 in the last."""
    muls = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred p; setp.ne.s32 p, ${3 * n}, 0; @!p bra.uni DONE; {muls} DONE: }}"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def to_columns(x, o, BY_THREAD: gl.constexpr):
    """Broadcast a number per row of ``o``, or BY_THREAD per thread of a row of a `by_thread`, to the shape of ``o``."""
    if BY_THREAD:
        x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, o.type.layout)), assert_trivial=True)
        return x[:, None, :][:, :, :, None]
    else:
        return gl.convert_layout(x, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def rescaled(o, alpha, changed, LAZY: gl.constexpr):
    """Return o · alpha of `online_softmax`; LAZY: a warp without changed rows skips the multiplications."""
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
    """Return P in the dtype of V; with PAIRS, two neighbouring columns in one word, [64, BLOCK_N / 2].

    LLVM: 16-bit elements that pass from one loop to another would each take a register.
    ``dropped``: from `dropout_words`, or None.
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
    """Issue o + P·V; ``p``: from `rounded`."""
    if c.PAIRS:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(64, c.BLOCK_DV), 2)
        p = gl.join(p, p).reshape([64, c.BLOCK_N])
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [p], dtype=gl.int16, is_pure=True, pack=2)
        p = gl.convert_layout(p.to(v.dtype, bitcast=True), OPERAND, assert_trivial=True)
    return warpgroup_mma(p, v, o, is_async=True)
