"""From a Problem, its results and their cotangents to the launches of the backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.backends import Gradients, Inputs, Needs, Outputs
from tilewise.backends.hopper.backward_kernel import Compiled, Sizes, backward_kernel
from tilewise.backends.hopper.config import BackwardConfig, backward_config, backward_width
from tilewise.backends.hopper.launch import Launch, Launcher, hides, score_terms
from tilewise.backends.hopper.row_kernels import finish_kernel, prepare_kernel
from tilewise.backends.hopper.tensors import NOTHING, bound, descriptor, strided, unbound
from tilewise.problem import Problem


class Buffers(NamedTuple):
    """What the launches read and write apart from the inputs, outputs and cotangents."""

    stats: Tensor  # float32: of each tile of queries the LSE in base 2, then delta
    q_sum: Tensor  # float32 (B, H, M, D)
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None  # in the bias's dtype, or a float32 sum


class Prepared(Launcher):
    """All of a backward but its tensors, made once for each problem and each layout of its tensors."""

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, buffers: Buffers):
        super().__init__()
        config = backward_config(problem)
        width, block_m, block_n = backward_width(problem), config.block_m, config.block_n
        p = problem
        row_tiles, key_tiles = -(-p.queries // block_m), -(-p.keys // block_n)
        sizes = Sizes(p.batch, p.kv_heads, p.group, p.queries, p.keys, row_tiles, key_tiles)
        q, k, v, bias, _ = inputs
        do, dlse = cotangents
        stats, q_sum, dq, dk, dv, dbias = buffers
        box = [block_m]
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.float32)
        self.tiles = {
            "q": descriptor(q, block_m, width),
            "k": descriptor(k, block_n, width),
            "v": descriptor(v, block_n, width),
            "do": descriptor(do, block_m, width),
            "bias": None if bias is None else descriptor(bias, block_m, block_n),
            "stats": TensorDescriptor(stats, [stats.numel()], [1], box, layout),
            "q_sum": descriptor(q_sum, block_m, width),
            "dk": descriptor(dk, block_n, width),
            "dv": descriptor(dv, block_n, width),
            "dbias": None if dbias is None else descriptor(dbias, block_m, block_n),
        }
        self.tiles = {name: unbound(source) for name, source in self.tiles.items()}
        rows = {"o": outputs.o, "do": do, "dq": dq, "dlse": None if dlse is None else dlse[..., None]}
        self.rows = {name: unbound(NOTHING if x is None else strided(x)) for name, x in rows.items()}
        terms, c = score_terms(problem), _compiled(problem, config, width)
        row_programs = row_tiles * p.heads * p.batch
        constants = {"BLOCK_M": block_m, "BLOCK_D": width}
        self.before = Launch(
            prepare_kernel, row_programs, (p.head_dim, p.value_dim, sizes, dlse is not None, *constants.values()),
            {"num_warps": 4},
        )  # fmt: skip
        self.main = Launch(
            backward_kernel, key_tiles * p.kv_heads * p.batch, (terms, sizes, c), {"num_warps": 8}
        )  # fmt: skip
        self.after = Launch(
            finish_kernel, row_programs, (p.head_dim, p.score.scale, sizes, *constants.values()), {"num_warps": 4}
        )  # fmt: skip


_prepared: dict[tuple, Prepared] = {}


def _prepare(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, buffers: Buffers) -> Prepared:
    """Kept under everything that a compiled kernel depends on."""
    tensors = (*inputs, outputs.o, *cotangents, *buffers[2:])
    layouts = tuple(None if x is None else (x.stride(), x.data_ptr() % 16) for x in tensors)
    key = (problem, layouts, inputs.q.device.index)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= 4096:
            _prepared.clear()
        prepared = _prepared[key] = Prepared(problem, inputs, outputs, cotangents, buffers)
    return prepared


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    """Every gradient is computed, also where nobody needs it."""
    q, k, v, bias, _ = inputs
    do, dlse = cotangents
    block_m = backward_config(problem).block_m
    row_tiles = -(-problem.queries // block_m)
    buffers = Buffers(
        stats=q.new_empty(2 * block_m * row_tiles * problem.heads * problem.batch, dtype=torch.float32),
        q_sum=q.new_empty(q.shape, dtype=torch.float32),
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dv=torch.empty_like(v),
        dbias=_empty_bias_gradient(problem, bias),
    )
    ready = _prepare(problem, inputs, outputs, cotangents, buffers)
    stats, q_sum, dq, dk, dv, dbias = buffers
    ready.launch(
        ready.before, bound(ready.rows["o"], outputs.o), bound(ready.rows["do"], do), outputs.lse,
        bound(ready.rows["dlse"], dlse), stats, q_sum,
    )  # fmt: skip
    named = {"q": q, "k": k, "v": v, "do": do, "bias": bias, "stats": stats, "q_sum": q_sum, "dk": dk, "dv": dv,
             "dbias": dbias}  # fmt: skip
    ready.launch(ready.main, *(bound(ready.tiles[name], x) for name, x in named.items()))
    ready.launch(ready.after, q_sum, bound(ready.rows["dq"], dq))
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    return Gradients(
        dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dbias if needs.bias else None
    )


def _reduction(problem: Problem) -> str:
    """How tiles of dS become dBias."""
    bias = problem.bias
    if bias is None or not problem.bias_grad:
        return "none"
    return "store" if (bias.batch, bias.heads) == (problem.batch, problem.heads) else "add"


def _empty_bias_gradient(problem: Problem, bias: Tensor | None) -> Tensor | None:
    """Where dBias is written: in its own dtype where every element is stored once, else a float32 sum of its shape."""
    reduction = _reduction(problem)
    if reduction == "none" or bias is None:
        return None
    dtype = bias.dtype if reduction == "store" else torch.float32
    fill = torch.empty if reduction == "store" and problem.score.band.unlimited else torch.zeros
    return fill(bias.shape, dtype=dtype, device=bias.device)


def _compiled(problem: Problem, config: BackwardConfig, width: int) -> Compiled:
    bias = problem.bias
    values = Compiled(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=width,
        STAGES=config.stages,
        AHEAD=config.ahead,
        LOADING_REGISTERS=config.loading_registers,
        BIAS=bias is not None,
        BIAS_BATCH=bias is not None and bias.batch > 1,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        DBIAS=_reduction(problem),
        RAGGED=problem.keys % config.block_n != 0,
        HIDES=hides(problem),
        ORDER=_order(problem),
    )
    return Compiled(*(gl.constexpr(x) for x in values))


def _order(problem: Problem) -> str:
    """See backward_kernel.work_of."""
    if not problem.score.band.unlimited:
        return "balanced"
    bias = problem.bias
    return "batch" if bias is not None and bias.batch == 1 and problem.batch > 1 else "tiles"
