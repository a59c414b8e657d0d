"""From a Problem and its tensors to kernel launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output
from tilewise.backends.triton.forward_kernel import forward_kernel
from tilewise.backends.triton.backward_kernel import backward_kernel, finish_kernel, prepare_kernel
from tilewise.backends.triton.config import Config, backward_config, forward_config, padded
from tilewise.backends.triton.score import INTERPRET, Terms
from tilewise.backends.triton.tensors import Strided, broadcast, descriptor, fits_tma, strided, wide
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.problem import Problem
from tilewise.score.tiles import limits

LOG2E = 1.4426950408889634


class Sizes(NamedTuple):
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int


class Compiled(NamedTuple):
    """What is known when a kernel is compiled."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    EVEN_D: Any
    EVEN_DV: Any
    RAGGED_M: Any
    TMA: Any
    WIDE: Any
    BIAS: Any
    MASK: Any
    HIDES: Any
    ORDER: Any
    PRECISION: Any
    MARK: Any
    DBIAS: Any = "none"
    DBIAS_TMA: Any = False
    WANT_Q: Any = False
    WANT_K: Any = False
    WANT_V: Any = False


NOTHING = Strided(None, 0, 0, 0, 0)


def terms(problem: Problem) -> Terms:
    score, c = problem.score, tl.constexpr
    lo, hi = limits(score.band)
    capped = score.softcap is not None
    return Terms(
        exponent=LOG2E if capped else score.scale * LOG2E,
        scale=score.scale,
        cap=score.softcap if score.softcap is not None else 1.0,
        bias_unit=1.0 if capped else 1.0 / score.scale,
        lo=lo,
        hi=hi,
        HAS_LO=c(score.band.lo is not None),
        HAS_HI=c(score.band.hi is not None),
        HAS_CAP=c(capped),
    )


def sizes(problem: Problem) -> Sizes:
    p = problem
    return Sizes(p.batch, p.heads, p.group, p.queries, p.keys, p.head_dim, p.value_dim)


def order(problem: Problem) -> str:
    """Which programs run side by side: those that read the same bias tile when a large bias is shared, see
    `forward_kernel.program_tile`."""
    bias = problem.bias
    if bias is None or bias.rows == 1 or bias.cols == 1:
        return "tiles"
    if bias.batch == 1 and problem.batch > 1:
        return "batch"
    return "heads" if bias.heads < problem.heads else "tiles"


def uses_tma(problem: Problem, *tensors: Tensor) -> bool:
    return problem.capability is not None and problem.capability[0] >= 9 and all(fits_tma(x) for x in tensors)


def precision(dtype: torch.dtype) -> str:
    """float32 products follow torch's own setting for matrix products."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def compiled(problem: Problem, config: Config, tma: bool, *tensors: Tensor | None, **switches: Any) -> Compiled:
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
        HIDES=problem.bias is not None or problem.mask is not None or not problem.score.band.unlimited,
        ORDER=order(problem),
        PRECISION=precision(problem.dtype),
        MARK=tl.float32 if INTERPRET else tl.bfloat16,  # the interpreter computes bfloat16 products wrongly
        **switches,
    )
    return Compiled(*(tl.constexpr(x) for x in values))


def rows_source(x: Tensor, block: int, cols: int, tma: bool) -> Any:
    """q, k, v or do as its kernel argument."""
    return descriptor(x, block, cols) if tma else strided(x)


def scores_source(x: Tensor | None, problem: Problem, config: Config) -> tuple[Any, Any]:
    """A bias or mask as its kernel arguments: the tensor and how it broadcasts."""
    if x is None:
        return NOTHING, None
    full = x.shape[2] > 1 and x.shape[3] > 1
    tma = full and x.dtype is not torch.bool and uses_tma(problem, x)
    source = descriptor(x, config.block_m, config.block_n) if tma else strided(x)
    return source, broadcast(x, problem.heads, tma)


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    q, k, v, bias, mask = inputs
    config = forward_config(problem)
    o = empty_output(q, problem.value_dim)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tma = uses_tma(problem, q, k, v)
    c = compiled(problem, config, tma, q, k, v, bias, mask)
    bias_source, bias_how = scores_source(bias, problem, config)
    mask_source, mask_how = scores_source(mask, problem, config)
    programs = triton.cdiv(problem.queries, config.block_m) * problem.heads * problem.batch
    forward_kernel[(programs,)](
        rows_source(q, config.block_m, c.BLOCK_D.value, tma),
        rows_source(k, config.block_n, c.BLOCK_D.value, tma),
        rows_source(v, config.block_n, c.BLOCK_DV.value, tma),
        bias_source,
        mask_source,
        strided(o),
        lse,
        bias_how,
        mask_how,
        terms(problem),
        sizes(problem),
        c,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return Outputs(o, lse)


def bias_reduction(problem: Problem, bias: Tensor) -> str:
    """How the tiles of dS become dBias: each stored, added up where several tiles share one, or summed to vectors."""
    if problem.bias is None:
        return "none"
    _, _, m, n = bias.shape
    if m == 1 and problem.queries > 1:
        return "cols"
    if n == 1 and problem.keys > 1:
        return "rows"
    alone = bias.shape[:2] == (problem.batch, problem.heads)
    return "store" if alone else "add"


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    q, k, v, bias, mask = inputs
    do, dlse = cotangents
    o, lse = outputs
    config = backward_config(problem)
    B, H, M, D = q.shape
    padded_queries = triton.cdiv(M, config.block_m) * config.block_m

    dk = torch.empty_like(k) if needs.k else None
    dv = torch.empty_like(v) if needs.v else None
    dq_sum = torch.empty(B * H, D, padded_queries, dtype=torch.float32, device=q.device) if needs.q else None
    delta = torch.empty(B, H, padded_queries, dtype=torch.float32, device=q.device)
    lse2 = torch.empty_like(delta)
    reduction = bias_reduction(problem, bias) if needs.bias else "none"
    dbias = _bias_gradient_sum(problem, bias, reduction)

    tma = uses_tma(problem, q, k, v, do)
    tma_dbias = reduction in ("store", "add") and uses_tma(problem, dbias)
    c = compiled(
        problem, config, tma, q, k, v, o, do, bias, mask, dbias,
        DBIAS=reduction, DBIAS_TMA=tma_dbias, WANT_Q=needs.q, WANT_K=needs.k, WANT_V=needs.v,
    )  # fmt: skip
    block_d, block_dv = c.BLOCK_D.value, c.BLOCK_DV.value
    prepare_kernel[(padded_queries // config.block_m * H * B,)](
        strided(o), strided(do), lse, _strided3(dlse), delta, lse2, dq_sum, sizes(problem),
        dlse is not None, needs.q, padded_queries, c, num_warps=4,
    )  # fmt: skip
    bias_source, bias_how = scores_source(bias, problem, config)
    mask_source, mask_how = scores_source(mask, problem, config)
    if tma_dbias:
        dbias_target: Any = descriptor(dbias, config.block_m, config.block_n)
    else:
        dbias_target = NOTHING if dbias is None else strided(dbias)
    stats: list[Any] = [lse2, delta]
    dq_target: Any = dq_sum
    if tma:
        stats = [TensorDescriptor(x, [B * H, padded_queries], [padded_queries, 1], [1, config.block_m]) for x in stats]
        if dq_sum is not None:
            dq_target = TensorDescriptor(dq_sum, dq_sum.shape, dq_sum.stride(), [1, block_d, config.block_m])
    backward_kernel[(triton.cdiv(problem.keys, config.block_n) * problem.kv_heads * B,)](
        rows_source(q, config.block_m, block_d, tma),
        rows_source(k, config.block_n, block_d, tma),
        rows_source(v, config.block_n, block_dv, tma),
        strided(k),
        strided(v),
        rows_source(do, config.block_m, block_dv, tma),
        *stats, bias_source, mask_source, dq_target,
        NOTHING if dk is None else strided(dk), NOTHING if dv is None else strided(dv), dbias_target,
        bias_how, mask_how, terms(problem), sizes(problem), padded_queries, c,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    dq = None
    if dq_sum is not None:
        dq = torch.empty_like(q)
        finish_kernel[(triton.cdiv(M, config.block_m) * H * B,)](
            dq_sum, strided(dq), terms(problem), sizes(problem), padded_queries, c, num_warps=4
        )
    return Gradients(dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype))


def _strided3(x: Tensor | None) -> Strided:
    return NOTHING if x is None else strided(x[..., None])


def _bias_gradient_sum(problem: Problem, bias: Tensor | None, reduction: str) -> Tensor | None:
    """Where dBias is written: in its own dtype where every element is stored once, else a float32 sum of its shape."""
    if reduction == "none" or bias is None:
        return None
    dtype = bias.dtype if reduction == "store" else torch.float32
    fill = torch.empty if reduction == "store" and problem.score.band.unlimited else torch.zeros
    return fill(bias.shape, dtype=dtype, device=bias.device)
