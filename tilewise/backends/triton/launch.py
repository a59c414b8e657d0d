"""From a Problem and its tensors to kernel launches."""

from __future__ import annotations

from collections.abc import Callable
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
from tilewise.backends.triton.tensors import (
    Broadcast,
    Sizes,
    Strided,
    bound,
    broadcast,
    descriptor,
    fits_tma,
    strided,
    unbound,
    wide,
)
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


class Prepared:
    """All of a call but its tensors, made once for each problem and each layout of its tensors."""

    def __init__(self, problem: Problem, config: Config, c: Compiled, sizes: Sizes, sources: dict[str, Any]):
        self.problem, self.config, self.c = problem, config, c
        self.numbers = (_terms(problem), sizes, c)
        self.sources = {name: unbound(source) for name, source in sources.items()}
        self._kernels: dict[str, Any] = {}

    def bind(self, name: str, x: Tensor | None) -> Any:
        """The kernel argument of a tensor whose layout was prepared under ``name``."""
        return bound(self.sources[name], x)

    def launch(self, kernel: Any, programs: int, *args: Any, num_warps: int = 4, num_stages: int = 3) -> None:
        """Launch; from the second time on without Triton's search for the compiled kernel, some 50 µs of host time."""
        name = kernel.__name__
        if name in self._kernels:
            self._kernels[name][programs, 1, 1](*args)
            return
        compiled_kernel = kernel[(programs,)](*args, num_warps=num_warps, num_stages=num_stages)
        if not INTERPRET:
            self._kernels[name] = compiled_kernel


_prepared: dict[tuple, Prepared] = {}


def _prepare(kind: Any, problem: Problem, tensors: tuple[Tensor | None, ...], make: Callable[[], Prepared]) -> Prepared:
    """What ``make`` makes, kept under everything that a compiled kernel depends on."""
    layouts = tuple(None if x is None else (x.stride(), x.data_ptr() % 16, x.dtype) for x in tensors)
    device = tensors[0].device.index if tensors[0] is not None else None
    key = (kind, problem, layouts, device, torch.backends.cuda.matmul.allow_tf32)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= 4096:
            _prepared.clear()
        prepared = _prepared[key] = make()
    return prepared


def _prepare_forward(problem: Problem, inputs: Inputs, o: Tensor) -> Prepared:
    q, k, v, bias, mask = inputs
    config = forward_config(problem, bias is not None and _uses_tma(problem, bias))
    tma = _uses_tma(problem, q, k, v)
    c = _compiled(problem, config, inputs, tma, q, k, v, bias, mask)
    sources = {
        **_input_sources(inputs, config, c, tma),
        "o": strided(o),
    }
    return Prepared(problem, config, c, _sizes(problem), sources)


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    q, k, v, bias, mask = inputs
    o = empty_output(q, problem.value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    ready = _prepare("forward", problem, (*inputs, o), lambda: _prepare_forward(problem, inputs, o))
    config = ready.config
    ready.launch(
        forward_kernel, triton.cdiv(problem.queries, config.block_m) * problem.heads * problem.batch,
        ready.bind("q", q), ready.bind("k", k), ready.bind("v", v), ready.bind("bias", bias), ready.bind("mask", mask),
        ready.bind("o", o), lse, *ready.numbers, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return Outputs(o, lse)


class Targets(NamedTuple):
    """Where gradients go. Sums over several programs have float32 tensors of their own."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    q_sum: Tensor | None  # (B·H, D, padded queries), transposed: the kernel has dQᵀ, whose rows make wide reduce-adds


def _prepare_backward(
    problem: Problem, inputs: Inputs, o: Tensor, do: Tensor, dlse: Tensor | None, stats: Tensor, targets: Targets
) -> Prepared:
    q, k, v, bias, mask = inputs
    tma = _uses_tma(problem, q, k, v, do)
    config = backward_config(problem, tma)
    reduction = "none" if targets.bias is None else bias_reduction(problem, bias)
    dbias_tma = targets.bias is not None and reduction in ("store", "add") and _uses_tma(problem, targets.bias)
    c = _compiled(
        problem, config, inputs, tma, q, k, v, o, do, bias, mask, *targets[:4],
        DQ_TMA=tma and config.dq_tma,
        DBIAS="none" if _ordered(problem, reduction) else reduction,
        DBIAS_TMA=dbias_tma,
        WANT_Q=targets.q_sum is not None, WANT_K=targets.k is not None, WANT_V=targets.v is not None,
    )  # fmt: skip
    q_sum: Any = Strided(None, 0, 0, 0, 0)
    if targets.q_sum is not None and c.DQ_TMA.value:
        q_sum = TensorDescriptor(
            targets.q_sum, targets.q_sum.shape, targets.q_sum.stride(), [1, c.BLOCK_D.value, config.block_m]
        )
    dbias: Any = _target(targets.bias)
    if targets.bias is not None and dbias_tma:
        dbias = descriptor(targets.bias, config.block_m, config.block_n)
    sources = {
        **_input_sources(inputs, config, c, tma),
        "do": _rows_source(do, config.block_m, c.BLOCK_DV, tma),
        "stats": _stats_source(stats, config.block_m, tma),
        "o": strided(o), "do_rows": strided(do), "k_rows": strided(k), "v_rows": strided(v),
        "dlse": NOTHING if dlse is None else strided(dlse[..., None]),
        "dq": _target(targets.q), "dk": _target(targets.k), "dv": _target(targets.v),
        "dbias": dbias, "dbias_rows": _target(targets.bias), "q_sum": q_sum,
    }  # fmt: skip
    return Prepared(problem, config, c, _sizes(problem, stats.shape[2]), sources)


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    q, k, v, bias, mask = inputs
    do, dlse = cotangents
    B, H, N = problem.batch, problem.heads, problem.keys
    config = backward_config(problem, _uses_tma(problem, q, k, v, do))
    block_m = config.block_m
    m_tiles, n_tiles = triton.cdiv(problem.queries, block_m), triton.cdiv(N, config.block_n)
    delta, lse2 = (q.new_empty((B, H, m_tiles * block_m), dtype=torch.float32) for _ in range(2))
    reduction = bias_reduction(problem, bias) if needs.bias else "none"
    summed = needs.q and not problem.deterministic
    dq, dk, dv = (torch.empty_like(x) if need else None for x, need in zip((q, k, v), needs[:3], strict=True))
    q_sum = q.new_empty((B * H, problem.head_dim, m_tiles * block_m), dtype=torch.float32) if summed else None
    targets = Targets(dq, dk, dv, _empty_bias_gradient(problem, bias, reduction), q_sum)
    ready = _prepare(
        ("backward", needs), problem, (*inputs, outputs.o, do, dlse, *targets[:4]),
        lambda: _prepare_backward(problem, inputs, outputs.o, do, dlse, delta, targets),
    )  # fmt: skip
    c, numbers, bind = ready.c, ready.numbers, ready.bind
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    # The ordered kernels stream keys and values past a tile of queries: larger tiles, so fewer stages fit.
    ordered = options | {"num_stages": min(config.num_stages, 2)}

    ready.launch(
        prepare_kernel, m_tiles * H * B, bind("o", outputs.o), bind("do_rows", do), outputs.lse, bind("dlse", dlse),
        delta, lse2, targets.q_sum, numbers[1], dlse is not None, c,
    )  # fmt: skip
    finite = None
    if c.HIDES.value:
        finite = torch.empty(2, B, problem.kv_heads, N, dtype=torch.int8, device=q.device)
        ready.launch(
            finite_kernel, n_tiles * problem.kv_heads * B, bind("k_rows", k), bind("v_rows", v), finite, *numbers[1:]
        )
    rows = (
        bind("q", q), bind("k", k), bind("v", v), bind("do", do), bind("stats", lse2), bind("stats", delta),
        bind("bias", bias), bind("mask", mask),
    )  # fmt: skip
    if c.WANT_Q.value or c.WANT_K.value or c.WANT_V.value or c.DBIAS.value != "none":
        q_sum = bind("q_sum", targets.q_sum) if c.DQ_TMA.value else targets.q_sum
        ready.launch(
            backward_kernel, n_tiles * problem.kv_heads * B, *rows, bind("k_rows", k), bind("v_rows", v), finite,
            q_sum, bind("dk", targets.k), bind("dv", targets.v), bind("dbias", targets.bias), *numbers, **options,
        )  # fmt: skip
    if targets.q_sum is not None:
        ready.launch(finish_kernel, m_tiles * H * B, targets.q_sum, bind("dq", targets.q), *numbers)
    elif targets.q is not None:
        ready.launch(query_gradient_kernel, m_tiles * H * B, *rows, bind("dq", targets.q), *numbers, **ordered)
    if targets.bias is not None and _ordered(problem, reduction):
        b, h, m, n = targets.bias.shape
        programs = b * h * (m_tiles if m > 1 else 1) * (n_tiles if n > 1 else 1)
        ready.launch(bias_gradient_kernel, programs, *rows, bind("dbias_rows", targets.bias), *numbers, **ordered)
    dbias = None if targets.bias is None or bias is None else targets.bias.to(bias.dtype)
    return Gradients(targets.q, targets.k, targets.v, dbias)


def _ordered(problem: Problem, reduction: str) -> bool:
    """Whether dBias is a sum that must run in one order."""
    return problem.deterministic and reduction not in ("none", "store")


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
    problem: Problem,
    config: Config,
    inputs: Inputs,
    tma: bool,
    *tensors: Tensor | None,
    **switches: Any,
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


def _input_sources(inputs: Inputs, config: Config, c: Compiled, tma: bool) -> dict[str, Any]:
    return {
        "q": _rows_source(inputs.q, config.block_m, c.BLOCK_D, tma),
        "k": _rows_source(inputs.k, config.block_n, c.BLOCK_D, tma),
        "v": _rows_source(inputs.v, config.block_n, c.BLOCK_DV, tma),
        "bias": _scores_source(inputs.bias, c.BIAS_HOW, config),
        "mask": _scores_source(inputs.mask, c.MASK_HOW, config),
    }


def _stats_source(x: Tensor, block: int, tma: bool) -> Any:
    """LSE or delta as its kernel argument: a descriptor, or else the tensor itself."""
    if not tma:
        return None
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


def _empty_bias_gradient(problem: Problem, bias: Tensor | None, reduction: str) -> Tensor | None:
    """Where dBias is written: in its own dtype where every element is stored once, else a float32 sum of its shape."""
    if reduction == "none" or bias is None:
        return None
    dtype = bias.dtype if reduction == "store" else torch.float32
    fill = torch.empty if reduction == "store" and problem.score.band.unlimited else torch.zeros
    return fill(bias.shape, dtype=dtype, device=bias.device)
