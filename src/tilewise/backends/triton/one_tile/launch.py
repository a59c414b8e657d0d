"""Launches of the one-tile kernels for a Problem and the layouts of its tensors."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tilewise.backends import (
    Gradients,
    Inputs,
    Needs,
    Outputs,
    device_of,
    empty_output,
    gradient_strides,
    saved_lse_dtype,
)
from tilewise.backends.kernels.score import INTERPRET, score_terms
from tilewise.backends.launch.launcher import POINTER, Launch, Record, constants, strided, strided_if_any
from tilewise.backends.triton.config import TritonConfig, every_pair_alike, padded
from tilewise.backends.triton.one_tile.config import Sharing, one_tile_config, sharing
from tilewise.backends.triton.one_tile.kernels import (
    OneTileConstants,
    OneTileGradients,
    OneTileSizes,
    one_tile_backward_kernel,
    one_tile_forward_kernel,
)
from tilewise.backends.triton.tensors import broadcast, wide
from tilewise.spec.problem import Problem


class OneTileForward:
    """Prepared forward of one problem, for all tensors of one layout."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        q, k, v, bias, mask, *_ = inputs
        o = empty_output(q, problem.value_dim, "meta")
        self.layout_o, self.lse_dtype = (o.shape, o.stride()), saved_lse_dtype(problem.dtype, problem)
        shared, config = sharing(problem), one_tile_config(problem, False)
        self.main = Launch(
            one_tile_forward_kernel,
            _programs(shared),
            (strided(q), strided(k), strided(v), strided(bias), strided(mask), strided(o), POINTER),
            _numbers(problem, shared, config, (q, k, v, bias, mask)),
            **config.options,
        )

    def __call__(self, inputs: Inputs) -> Outputs:
        q, k, v, bias, mask, *_ = inputs
        with device_of(q):
            o = torch.empty_strided(*self.layout_o, dtype=q.dtype, device=q.device)
            lse = torch.empty(self.layout_o[0][:3], dtype=self.lse_dtype, device=q.device)
            self.main(q, k, v, bias, mask, o, lse)
        return Outputs(o, lse)


class OneTileBackward:
    """Prepared backward of one problem, for all tensors of one layout."""

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> None:
        q, k, v, bias, mask, *_ = inputs
        do, dlse, *_ = cotangents
        shared, config = sharing(problem), one_tile_config(problem, True)
        # dBias is a matrix for each program; see `_bias_gradient`.
        self.parts: tuple[int, ...] | None = None
        self.summed: list[int] = []
        self.dtype = torch.float32
        if needs.bias and bias is not None:
            self.parts = (shared.programs, shared.batch, shared.heads, problem.queries, problem.keys)
            self.summed = [
                n for n, (x, y) in enumerate(zip(self.parts[:3], (1, *bias.shape[:2]), strict=True)) if x > y
            ]
            self.dtype = torch.float32 if self.summed else bias.dtype
        wanted = [x if need else None for x, need in zip((q, k, v), needs[:3], strict=True)]
        self.gradients = [None if x is None else (x.shape, gradient_strides(x.shape, x.stride())) for x in wanted]
        like = [None if x is None else torch.empty_like(x, device="meta") for x in wanted]
        dbias = None if self.parts is None else torch.empty(_programs(shared), 1, *self.parts[3:], device="meta")
        self.main = Launch(
            one_tile_backward_kernel,
            _programs(shared),
            (
                *(strided(x) for x in (q, k, v, do, outputs.o)),
                POINTER,
                strided_if_any(None if dlse is None else dlse[..., None]),
                strided(bias),
                strided(mask),
                Record(OneTileGradients, tuple([strided(x) for x in (*like, dbias)])),
            ),
            _numbers(
                problem,
                shared,
                config,
                (q, k, v, do, outputs.o, bias, mask),
                WANT_Q=needs.q,
                WANT_K=needs.k,
                WANT_V=needs.v,
                WANT_BIAS=self.parts is not None,
            ),
            **config.options,
        )

    def __call__(self, inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Gradients:
        q, k, v, bias, mask, *_ = inputs
        do, dlse, *_ = cotangents
        with device_of(q):
            grads = [
                None if x is None else torch.empty_strided(*x, dtype=q.dtype, device=q.device) for x in self.gradients
            ]
            dbias = None if self.parts is None else torch.empty(self.parts, dtype=self.dtype, device=q.device)
            self.main(q, k, v, do, outputs.o, outputs.lse, dlse, bias, mask, *grads, dbias)
            dq, dk, dv = grads
            return Gradients(dq, dk, dv, _bias_gradient(dbias, bias, self.summed))


def _bias_gradient(parts: Tensor | None, bias: Tensor | None, summed: list[int]) -> Tensor | None:
    """Return dBias from the matrices (programs, batch, heads, M, N) that programs have stored."""
    if parts is None or bias is None:
        return None
    found = parts.sum(summed, keepdim=True) if summed else parts
    return found.squeeze(0).to(bias.dtype)


def _programs(shared: Sharing) -> int:
    return shared.batch * shared.heads * shared.programs


def _numbers(
    problem: Problem, shared: Sharing, config: TritonConfig, tensors: tuple[Tensor | None, ...], **wanted: bool
) -> tuple[Any, ...]:  # fmt: skip
    """Return the kernels' arguments that are not tensors."""
    p = problem
    hows = [
        None if x is None else broadcast(x, p.broadcast_group(x), False)._replace(BATCH=batch)
        for x, batch in ((p.bias, p.bias is not None and p.bias.batch > 1), (p.mask, p.mask_period))
    ]
    block_d, block_dv = padded(p.head_dim), padded(p.value_dim)
    c = OneTileConstants(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        EVEN_D=block_d == p.head_dim,
        EVEN_DV=block_dv == p.value_dim,
        WIDE=wide(*tensors),
        BIAS=p.bias is not None,
        MASK=p.mask is not None,
        BIAS_HOW=hows[0],
        MASK_HOW=hows[1],
        MASKS_VARY=shared.masks_vary,
        HIDES=not every_pair_alike(p),
        STAGES=config.num_stages,
        PRECISION="tf32",  # unused: 16 bits
        MARK=tl.float32 if INTERPRET else tl.bfloat16,  # the interpreter computes bfloat16 products wrongly
        **wanted,
    )
    sizes = OneTileSizes(p.batch, p.heads, p.queries, p.keys, p.head_dim, p.value_dim, *shared[:3])
    return score_terms(p.score, scaled=True), sizes, constants(c)
