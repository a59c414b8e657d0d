"""Launch of the tangents' kernel for a Problem and the layouts of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import OutOfResources

from tilewise.backends import Inputs, Outputs, device_of, empty_output, saved_lse_dtype
from tilewise.backends.kernels.tile_lists import TileListCache, flat_and_lists
from tilewise.backends.launch.launcher import POINTER, Launch, Record, constants, sink_layout, strided
from tilewise.backends.protocol import Tangents
from tilewise.backends.triton.bias_components import bias_first, kernel_terms
from tilewise.backends.triton.config import TritonConfig, columns, tangents_config
from tilewise.backends.triton.launch import (
    compiled_constants,
    input_layouts,
    problem_sizes,
    rows_layout,
    score_broadcast,
    scores_layout,
    uses_tma,
)
from tilewise.backends.triton.masks import NO_LISTS, MaskLists, lists_pay
from tilewise.backends.triton.resized import forward_programs, smaller
from tilewise.backends.triton.tangents.kernel import GivenTangents, TangentRows, tangents_kernel
from tilewise.spec.problem import Problem


class TritonTangents:
    """Prepared tangents of one problem, for all tensors of one layout and the same absent tangents."""

    def __init__(self, problem: Problem, inputs: Inputs, outputs: Outputs, given: Tangents) -> None:
        self.problem = problem
        pair = problem.bias_itemsize
        if given.bias is not None and problem.bias is not None:
            pair += problem.bias.matrix_itemsize
        self._prepare(tangents_config(problem, pair), inputs, outputs, given)

    def _prepare(self, config: TritonConfig, inputs: Inputs, outputs: Outputs, given: Tangents) -> None:
        problem = self.problem
        self.config = config
        self.other: TritonTangents | None = None  # in less shared memory, see `smaller`
        moved = [x for x in given[:3] if x is not None]
        tma = uses_tma(problem, *inputs[:3], *moved)
        lists = lists_pay(problem, config)
        self.masked = None
        if lists:
            self.masked = TileListCache(
                MaskLists(problem, config, inputs.mask, inputs.q.device, by_rows=True, by_keys=False, even=False),
                problem,
            )
        c = compiled_constants(
            problem, config, inputs, tma, columns(problem, tma), *inputs[:5], *moved, given.bias, LISTS=lists,
            BIAS_FIRST=bias_first(problem),
        )  # fmt: skip
        how = score_broadcast(given.bias, problem.bias, problem, config, "bias")
        q, k, v, bias, sink, *_ = [x is not None for x in given]
        switches = constants(
            GivenTangents(
                Q=q,
                K=k,
                V=v,
                BIAS=bias,
                SINK=sink,
                SCORES=q or k or bias,
                HAS_SINK=inputs.sink is not None,
                BIAS_HOW=how,
            )
        )
        o = empty_output(inputs.q, problem.value_dim, "meta")
        self.layout_o, self.lse_dtype = (o.shape, o.stride()), saved_lse_dtype(problem.dtype, problem)
        rows = (strided(outputs.o), strided(o), POINTER, sink_layout(inputs.sink), sink_layout(given.sink))
        sides = ((given.q, config.block_m, c.BLOCK_D), (given.k, config.block_n, c.BLOCK_D),
                 (given.v, config.block_n, c.BLOCK_DV))  # fmt: skip
        self.main = Launch(
            tangents_kernel,
            forward_programs(problem, config, 1),
            (
                *input_layouts(inputs, config, c, tma),
                POINTER,
                *(POINTER if x is None else rows_layout(x, block, cols, tma) for x, block, cols in sides),
                POINTER if given.bias is None else scores_layout(given.bias, switches.BIAS_HOW, config),
                Record(TangentRows, rows),
            ),
            (switches, kernel_terms(problem, inputs, bias_first(problem)), problem_sizes(problem, inputs), c),
            **config.options,
        )

    def __call__(self, inputs: Inputs, outputs: Outputs, given: Tangents) -> Outputs:
        """Return the tangents of o and the LSE. outputs: those of the forward."""
        if self.other is not None:
            return self.other(inputs, outputs, given)
        q = inputs.q
        with device_of(q):
            o = torch.empty_strided(*self.layout_o, dtype=q.dtype, device=q.device)
            lse = torch.empty(self.layout_o[0][:3], dtype=self.lse_dtype, device=q.device)
            mask, (_, lists, _) = flat_and_lists(self.masked, inputs.mask, inputs.tiles, NO_LISTS)
            rows: tuple[Tensor | None, ...] = (outputs.o, o, lse, inputs.sink, given.sink)
            try:
                self.main(*inputs[:4], *mask, lists, *given[:4], *rows)
            except OutOfResources as error:
                self.other = smaller(self, error, inputs, outputs, given)
                return self.other(inputs, outputs, given)
        return Outputs(o, lse)
