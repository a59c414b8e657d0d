"""From a Problem and its tensors to kernel launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output
from tilewise.backends.triton.backward_kernel import backward_kernel, finish_kernel, finite_kernel, prepare_kernel
from tilewise.backends.triton.config import Config, backward_config, forward_config, padded
from tilewise.backends.triton.forward_kernel import forward_kernel
from tilewise.backends.triton.ordered_kernels import bias_gradient_kernel, query_gradient_kernel
from tilewise.backends.triton.score import INTERPRET, Terms
from tilewise.backends.triton.tensors import Broadcast, Sizes, Strided, broadcast, descriptor, fits_tma, strided, wide
from tilewise.problem import Problem
from tilewise.score.tiles import limits

LOG2E = 1.4426950408889634
NOTHING = Strided(None, 0, 0, 0, 0)


class Compiled(NamedTuple):
    """What a kernel knows when it is compiled; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any  # head dimensions, padded to a power of two
    BLOCK_DV: Any
    EVEN_D: Any  # nothing was padded
    EVEN_DV: Any
    RAGGED_M: Any  # the last tile of queries reaches past their end
    TMA: Any  # q, k, v, do by descriptor
    WIDE: Any  # offsets inside one tile need 64 bits
    BIAS: Any
    MASK: Any
    BIAS_HOW: Any  # how they broadcast, `Broadcast`
    MASK_HOW: Any
    HIDES: Any  # some pair may be hidden, so that a value that is not finite may have to stay out
    ORDER: Any  # see tensors.program_tile
    PRECISION: Any  # of float32 products
    MARK: Any  # dtype that marks values that are not finite
    DQ_TMA: Any = False
    DBIAS: Any = "none"  # see bias_reduction
    DBIAS_TMA: Any = False
    WANT_Q: Any = False
    WANT_K: Any = False
    WANT_V: Any = False


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    q, k, v, bias, mask = inputs
    config = forward_config(problem)
    o = empty_output(q, problem.value_dim)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tma = _uses_tma(problem, q, k, v)
    c = _compiled(problem, config, inputs, tma, q, k, v, bias, mask)
    forward_kernel[(triton.cdiv(problem.queries, config.block_m) * problem.heads * problem.batch,)](
        _rows_source(q, config.block_m, c.BLOCK_D, tma),
        _rows_source(k, config.block_n, c.BLOCK_D, tma),
        _rows_source(v, config.block_n, c.BLOCK_DV, tma),
        _scores_source(bias, c.BIAS_HOW, config), _scores_source(mask, c.MASK_HOW, config),
        strided(o), lse, _terms(problem), _sizes(problem), c,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return Outputs(o, lse)


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    q, k, v, bias, mask = inputs
    do, dlse = cotangents
    B, H, M, N = problem.batch, problem.heads, problem.queries, problem.keys
    config = backward_config(problem)
    padded_queries = triton.cdiv(M, config.block_m) * config.block_m
    tma = _uses_tma(problem, q, k, v, do)

    dq, dk, dv = (torch.empty_like(x) if need else None for x, need in zip((q, k, v), needs[:3], strict=True))
    reduction = bias_reduction(problem, bias) if needs.bias else "none"
    dbias = _empty_bias_gradient(problem, bias, reduction)
    # Sums over several programs go to kernels of their own where equal inputs must give equal bits.
    ordered_q = needs.q and problem.deterministic
    ordered_bias = reduction not in ("none", "store") and problem.deterministic
    dbias_tma = dbias is not None and reduction in ("store", "add") and _uses_tma(problem, dbias)
    c = _compiled(
        problem, config, inputs, tma, q, k, v, outputs.o, do, dq, bias, mask, dbias,
        DQ_TMA=tma and config.dq_tma, DBIAS="none" if ordered_bias else reduction, DBIAS_TMA=dbias_tma,
        WANT_Q=needs.q and not ordered_q, WANT_K=needs.k, WANT_V=needs.v,
    )  # fmt: skip
    sizes = _sizes(problem, padded_queries)
    numbers = (_terms(problem), sizes, c)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    m_tiles, n_tiles = padded_queries // config.block_m, triton.cdiv(N, config.block_n)

    delta = torch.empty(B, H, padded_queries, dtype=torch.float32, device=q.device)
    lse2 = torch.empty_like(delta)
    # transposed: the kernel has dQᵀ, and queries that lie side by side make wide reduce-adds
    dq_sum = q.new_empty((B * H, problem.head_dim, padded_queries), dtype=torch.float32) if c.WANT_Q.value else None
    prepare_kernel[(m_tiles * H * B,)](
        strided(outputs.o), strided(do), outputs.lse, _strided3(dlse), delta, lse2, dq_sum, sizes,
        dlse is not None, c, num_warps=4,
    )  # fmt: skip
    finite = None
    if c.HIDES.value:
        finite = torch.empty(2, B, problem.kv_heads, N, dtype=torch.int8, device=q.device)
        finite_kernel[(n_tiles * problem.kv_heads * B,)](strided(k), strided(v), finite, sizes, c, num_warps=4)

    rows = (
        _rows_source(q, config.block_m, c.BLOCK_D, tma),
        _rows_source(k, config.block_n, c.BLOCK_D, tma),
        _rows_source(v, config.block_n, c.BLOCK_DV, tma),
        _rows_source(do, config.block_m, c.BLOCK_DV, tma),
        *(_stats_source(x, config.block_m, tma) for x in (lse2, delta)),
        _scores_source(bias, c.BIAS_HOW, config), _scores_source(mask, c.MASK_HOW, config),
    )  # fmt: skip
    if c.WANT_Q.value or c.WANT_K.value or c.WANT_V.value or c.DBIAS.value != "none":
        dq_target: Any = dq_sum
        if dq_sum is not None and c.DQ_TMA.value:
            dq_target = TensorDescriptor(dq_sum, dq_sum.shape, dq_sum.stride(), [1, c.BLOCK_D.value, config.block_m])
        targets = (dq_target, _target(dk), _target(dv), _bias_target(dbias, config, dbias_tma))
        backward_kernel[(n_tiles * problem.kv_heads * B,)](
            *rows, strided(k), strided(v), finite, *targets, *numbers, **options
        )
    if dq is not None and dq_sum is not None:
        finish_kernel[(m_tiles * H * B,)](dq_sum, strided(dq), *numbers, num_warps=4)
    if dq is not None and ordered_q:
        query_gradient_kernel[(m_tiles * H * B,)](*rows, strided(dq), *numbers, **options)
    if dbias is not None and ordered_bias:
        b, h, m, n = dbias.shape
        grid = (b * h * (m_tiles if m > 1 else 1) * (n_tiles if n > 1 else 1),)
        bias_gradient_kernel[grid](*rows, strided(dbias), *numbers, **options)
    return Gradients(dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype))


def bias_reduction(problem: Problem, bias: Tensor | None) -> str:
    """How tiles of dS become dBias: "store" each, "add" those that share one, or sum to "rows" or "cols" vectors."""
    if bias is None:
        return "none"
    b, h, m, n = bias.shape
    if m == 1 and problem.queries > 1:
        return "cols"
    if n == 1 and problem.keys > 1:
        return "rows"
    return "store" if (b, h) == (problem.batch, problem.heads) else "add"


def _terms(problem: Problem) -> Terms:
    score, c = problem.score, tl.constexpr
    lo, hi = limits(score.band)
    scaled = score.softcap is not None or problem.bias is not None
    return Terms(
        exponent=LOG2E if scaled else score.scale * LOG2E,
        scale=score.scale,
        cap=1.0 if score.softcap is None else score.softcap,
        lo=lo,
        hi=hi,
        HAS_LO=c(score.band.lo is not None),
        HAS_HI=c(score.band.hi is not None),
        HAS_CAP=c(score.softcap is not None),
    )


def _sizes(problem: Problem, padded_queries: int = 0) -> Sizes:
    p = problem
    return Sizes(p.batch, p.heads, p.group, p.queries, p.keys, p.head_dim, p.value_dim, padded_queries)


def _compiled(
    problem: Problem, config: Config, inputs: Inputs, tma: bool, *tensors: Tensor | None, **switches: Any
) -> Compiled:
    bd, bdv = padded(problem.head_dim), padded(problem.value_dim)
    values = Compiled(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=bd,
        BLOCK_DV=bdv,
        EVEN_D=bd == problem.head_dim,
        EVEN_DV=bdv == problem.value_dim,
        RAGGED_M=problem.queries % config.block_m != 0,
        TMA=tma,
        WIDE=wide(*tensors),
        BIAS=problem.bias is not None,
        MASK=problem.mask is not None,
        BIAS_HOW=_broadcast(inputs.bias, problem),
        MASK_HOW=_broadcast(inputs.mask, problem),
        HIDES=problem.bias is not None or problem.mask is not None or not problem.score.band.unlimited,
        ORDER=_order(problem),
        PRECISION=_precision(problem.dtype),
        MARK=tl.float32 if INTERPRET else tl.bfloat16,  # the interpreter computes bfloat16 products wrongly
        **switches,
    )
    return Compiled(*(x if isinstance(x, Broadcast) else tl.constexpr(x) for x in values))


def _order(problem: Problem) -> str:
    """Which programs run side by side, see `tensors.program_tile`."""
    bias = problem.bias
    if not problem.score.band.unlimited:
        return "balanced"
    if bias is None or bias.rows == 1 or bias.cols == 1:
        return "tiles"
    if bias.batch == 1 and problem.batch > 1:
        return "batch"
    return "heads" if bias.heads < problem.heads else "tiles"


def _precision(dtype: torch.dtype) -> str:
    """float32 products follow torch's own setting for matrix products; 16-bit ones have no choice."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _uses_tma(problem: Problem, *tensors: Tensor) -> bool:
    return problem.capability is not None and problem.capability >= (9, 0) and all(fits_tma(x) for x in tensors)


def _rows_source(x: Tensor, block: int, cols: tl.constexpr, tma: bool) -> Any:
    """q, k, v or do as its kernel argument."""
    return descriptor(x, block, cols.value) if tma else strided(x)


def _stats_source(x: Tensor, block: int, tma: bool) -> Any:
    """LSE or delta as its kernel argument."""
    if not tma:
        return x
    rows = x.shape[0] * x.shape[1]
    return TensorDescriptor(x, [rows, x.shape[2]], [x.shape[2], 1], [1, block])


def _scores_source(x: Tensor | None, how: Broadcast | None, config: Config) -> Any:
    """A bias or mask as its kernel argument."""
    if x is None or how is None:
        return NOTHING
    return descriptor(x, config.block_m, config.block_n) if how.TMA.value else strided(x)


def _broadcast(x: Tensor | None, problem: Problem) -> Broadcast | None:
    if x is None:
        return None
    full = x.shape[2] > 1 and x.shape[3] > 1
    return broadcast(x, problem.heads, full and x.dtype is not torch.bool and _uses_tma(problem, x))


def _target(x: Tensor | None) -> Strided:
    return NOTHING if x is None else strided(x)


def _strided3(x: Tensor | None) -> Strided:
    return NOTHING if x is None else strided(x[..., None])


def _bias_target(dbias: Tensor | None, config: Config, tma: bool) -> Any:
    if dbias is None or not tma:
        return _target(dbias)
    return descriptor(dbias, config.block_m, config.block_n)


def _empty_bias_gradient(problem: Problem, bias: Tensor | None, reduction: str) -> Tensor | None:
    """Where dBias is written: in its own dtype where every element is stored once, else a float32 sum of its shape."""
    if reduction == "none" or bias is None:
        return None
    dtype = bias.dtype if reduction == "store" else torch.float32
    fill = torch.empty if reduction == "store" and problem.score.band.unlimited else torch.zeros
    return fill(bias.shape, dtype=dtype, device=bias.device)
