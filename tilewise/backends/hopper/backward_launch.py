"""From a Problem, its results and their cotangents to the launches of the backward."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl

from tilewise.backends import Gradients, Inputs, Needs, Outputs, allocation, device_of
from tilewise.backends.hopper.backward_kernel import Compiled, Sizes, backward_kernel
from tilewise.backends.hopper.bias_gradient import bias_axes, bias_gradient, empty_bias_gradient, reduction
from tilewise.backends.hopper.config import BackwardConfig, backward_config, backward_width
from tilewise.backends.hopper.launch import hides, score_terms
from tilewise.backends.hopper.row_kernels import finish_kernel, prepare_kernel
from tilewise.backends.hopper.tensors import descriptor, vector
from tilewise.backends.launcher import POINTER, Launch, strided
from tilewise.problem import Problem


class Backward:
    """A backward with everything but its tensors, for one problem and one layout of these.

    Every gradient is computed, also where nobody needs it.
    """

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs):
        self.problem, self.needs = problem, needs
        config = backward_config(problem)
        width, block_m, block_n = backward_width(problem), config.block_m, config.block_n
        p = problem
        row_tiles, key_tiles = -(-p.queries // block_m), -(-p.keys // block_n)
        sizes = Sizes(p.batch, p.kv_heads, p.group, p.queries, p.keys, row_tiles, key_tiles)
        row_programs = row_tiles * p.heads * p.batch
        q, k, v, bias, _ = inputs
        do, dlse = cotangents
        # float32: of each tile of queries the LSE in base 2, then −delta; the sum of dQ
        stats = torch.empty(2 * block_m * row_programs, dtype=torch.float32, device="meta")
        q_sum = torch.empty(q.shape, dtype=torch.float32, device="meta")
        dq, dk, dv = (torch.empty_like(x, device="meta") for x in (q, k, v))
        dbias = empty_bias_gradient(problem, bias, torch.device("meta"))
        self.empty_stats, self.empty_q_sum, self.empty_dq, self.empty_dk, self.empty_dv = (
            allocation(x, q.device) for x in (stats, q_sum, dq, dk, dv)
        )
        dlse_rows = None if dlse is None else dlse[..., None]
        terms, c, axes = score_terms(problem), _compiled(problem, config, width), bias_axes(problem)
        self.of_rows, self.of_pairs = axes == "rows", axes in ("matrix", "cols")
        self.before = Launch(
            prepare_kernel,
            row_programs,
            (
                strided(outputs.o),
                strided(do),
                POINTER,
                strided(dlse_rows),
                strided(bias if self.of_rows else None),
                POINTER,
                POINTER,
            ),
            (p.head_dim, p.value_dim, sizes, c.BIAS_GROUP.value, dlse is not None, self.of_rows, block_m, width),
            num_warps=4,
        )
        self.main = Launch(
            backward_kernel,
            key_tiles * p.kv_heads * p.batch,
            (
                descriptor(q, block_m, width),
                descriptor(k, block_n, width),
                descriptor(v, block_n, width),
                descriptor(do, block_m, width),
                strided(bias) if axes == "cols" else descriptor(bias if axes == "matrix" else None, block_m, block_n),
                vector(stats, block_m),
                descriptor(q_sum, block_m, width),
                descriptor(dk, block_n, width),
                descriptor(dv, block_n, width),
                POINTER if reduction(problem) == "sum" else descriptor(dbias, block_m, block_n),
            ),
            (terms, sizes, c),
            num_warps=8,
        )
        self.after = Launch(
            finish_kernel,
            row_programs,
            (POINTER, strided(dq)),
            (p.head_dim, p.score.scale, sizes, block_m, width),
            num_warps=4,
        )

    def __call__(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        q, k, v, bias, _ = inputs
        o, lse = outputs
        do, dlse = cotangents
        needs = self.needs
        with device_of(q):
            stats, q_sum = self.empty_stats(), self.empty_q_sum()
            dq, dk, dv = self.empty_dq(), self.empty_dk(), self.empty_dv()
            dbias = empty_bias_gradient(self.problem, bias, q.device)
            self.before(o, do, lse, dlse, bias if self.of_rows else None, stats, q_sum)
            self.main(q, k, v, do, bias if self.of_pairs else None, stats, q_sum, dk, dv, dbias)
            self.after(q_sum, dq)
            if needs.bias and bias is not None:
                dbias = bias_gradient(self.problem, bias, dbias, lse, dlse)
        return Gradients(
            dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dbias if needs.bias else None
        )


def _compiled(problem: Problem, config: BackwardConfig, width: int) -> Compiled:
    bias, axes = problem.bias, bias_axes(problem)
    values = Compiled(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=width,
        STAGES=config.stages,
        AHEAD=config.ahead,
        LOADING_REGISTERS=config.loading_registers,
        BIAS="none" if axes == "rows" else axes,
        BIAS_BATCH=bias is not None and bias.batch > 1,
        BIAS_GROUP=1 if bias is None else problem.heads // bias.heads,
        DBIAS=reduction(problem),
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
    shared = bias is not None and bias_axes(problem) == "matrix" and bias.batch == 1 and problem.batch > 1
    return "batch" if shared else "tiles"
