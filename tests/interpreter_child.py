"""What runs in the child process of the fixture `interpreter` of conftest.py, where Triton's kernels are Python."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from helpers import Case, Results, Tensors, check, hold, run, tensors, visible
from torch import Tensor

from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score


def start() -> None:
    """Make this process an interpreter of Triton kernels; triton reads the variable when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # numpy speaks up where a GPU computes on: log2(0), inf - inf, a product of NaN, an overflow that marks one.
    for message in (
        "divide by zero encountered in log2", "invalid value encountered", "overflow encountered", "All-NaN slice",
    ):  # fmt: skip
        warnings.filterwarnings("ignore", message, RuntimeWarning, r"triton\.runtime\.interpreter|numpy\..*")
    import interpreter_speed  # which imports triton

    interpreter_speed.hurry()


def with_and_without_speed(case: Case) -> tuple[Results, Results]:
    """Results of the triton backend, by Triton's interpreter as it comes and as `interpreter_speed` leaves it."""
    from interpreter_speed import as_it_comes

    with as_it_comes():
        slow = run(case, "triton")
    return slow, run(case, "triton")


def watch_integers(function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, where integers that overflow are an error."""
    from interpreter_speed import watch_overflow

    watch_overflow(True)
    try:
        return function(*arguments)
    finally:
        watch_overflow(False)


def check_integers(case: Case, backend: str) -> None:
    """`helpers.check`, where integers that overflow are an error."""
    watch_integers(check, case, backend)


def without_atomics(function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, where an atomic addition is an error."""
    from triton.runtime import interpreter

    def refuse(*_) -> None:
        raise AssertionError("an atomic, in whose order nothing is fixed")

    interpreter.interpreter_builder.create_atomic_rmw = refuse
    try:
        return function(*arguments)
    finally:
        del interpreter.interpreter_builder.create_atomic_rmw


def check_without_atomics(case: Case, backend: str) -> None:
    """`helpers.check`, where an atomic addition is an error."""
    without_atomics(check, case, backend)


def largest_plus(n: int) -> int:
    """2³¹ - 1 + n in 32 bits, by a kernel, where integers that overflow are an error."""
    import triton
    import triton.language as tl
    from interpreter_speed import watch_overflow

    @triton.jit
    def kernel(x, n):
        tl.store(x, tl.load(x) + n)

    kernel[(1,)](torch.zeros(1, dtype=torch.int32), n)  # what is known of an addition now is to be forgotten
    x = torch.tensor([2**31 - 1], dtype=torch.int32)
    watch_overflow(True)
    try:
        kernel[(1,)](x, n)
    finally:
        watch_overflow(False)
    return int(x)


def spoil(case: Case, which: str, where: tuple[int, ...], value: float) -> tuple[Results, Results, Tensor]:
    """Put ``value`` into q, k, v, bias or do: results of the triton backend, of the reference, and who sees what."""
    inputs = tensors(case)
    getattr(inputs, which)[where] = value
    return run(case, "triton", inputs=inputs), run(case, "reference", inputs=inputs), visible(case, inputs)


def summarise(case: Case, keys: int) -> tuple[Tensor, Tensor, int, int]:
    """What the hopper backend's forward knows of a case's mask: bits, visits, and its tiles of queries and of keys.

    keys: up to how many `key_summary_kernel` looks at."""
    from tilewise.backends.gluon import masks
    from tilewise.backends.gluon.masks import MaskSummary
    from tilewise.backends.gluon.sm90.common.config import forward_config

    x = tensors(case)
    problem = _problem_of(case, x)
    config = forward_config(problem)
    masks.KEYS = keys
    bits, visits, *_ = MaskSummary(problem, x.mask, x.q.device, config.block_n, config.warpgroups)([x.mask])
    return bits, visits, config.block_m, config.block_n


def summarise_by_keys(case: Case, sparse: bool) -> tuple[Tensor, Tensor, Tensor, int, int, Tensor]:
    """What its backward knows of it: bits, visits, states, its tiles of queries and of keys; and the mask.

    sparse: of blocks of 64 some are hidden and some visible.
    """
    from tilewise.backends.gluon.masks import MaskSummary
    from tilewise.backends.gluon.sm90.common.config import backward_config

    x = tensors(case)
    problem = _problem_of(case, x)
    config = backward_config(problem)
    if sparse:
        block = (torch.arange(x.mask.shape[2])[:, None] // 64 + torch.arange(x.mask.shape[3]) // 64) % 4
        x.mask[:] = torch.where(block == 0, x.mask, block != 1)
    found = MaskSummary(problem, x.mask, x.q.device, config.block_n, 1, by_keys=True)([x.mask])
    return *found[:3], config.block_m, config.block_n, x.mask


def longest_first(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of three matrices, ``count`` of each, of random tiles but for the last one's, before and after
    `longest_first_kernel`; and those of a mask whose work tiles are to come in that order."""
    from tilewise.backends.gluon.mask_kernels import longest_first_kernel
    from tilewise.backends.gluon.masks import MaskSummary

    visited = torch.rand(3, count, 40, generator=torch.Generator().manual_seed(count)) < torch.rand(3, count, 1) / 3
    visited[2] = (torch.arange(40) >= torch.arange(count)[:, None] % 9) & (torch.arange(40) < 12)
    lists = torch.zeros(3, count, 42, dtype=torch.int32)
    lists[..., 0] = visited.sum(-1)
    lists[..., 1:-1] = torch.where(visited, 4 * torch.arange(40) + 1, -4).sort(dim=-1, descending=True).values
    ordered = lists.clone()
    longest_first_kernel[(3 * -(-count // 64),)](ordered, count, 42, 64)
    x = tensors(Case(B=2, H=2, M=200, N=400, D=64, mask="bhmn"))
    _sparse(x.mask)
    problem = Problem.of(x.q, x.k, x.v, None, x.mask, *(None,) * 5, Score(1.0, None, Band()))
    usual, other = (MaskSummary(problem, x.mask, x.q.device, 64, 1, True, longest_first=a)([x.mask]) for a in (0, 1))
    listed = torch.arange(usual.tile_list.shape[2]) <= usual.tile_list[..., :1]  # what stands behind is anything
    assert torch.equal(usual.tile_list[listed], other.tile_list[..., :-1][listed])
    return lists, ordered, other.tile_list


def _problem_of(case: Case, x: Tensors) -> Problem:
    score = Score(1.0, None, Band.aligned(case.causal, case.window, case.N - case.M))
    return Problem.of(x.q, x.k, x.v, x.bias, x.mask, *(None,) * 5, score, deterministic=case.deterministic)


def _sparse(mask: Tensor) -> None:
    """Of blocks of 128 x 64 leave some as they are, hide a quarter, and show the others."""
    block = (torch.arange(mask.shape[2])[:, None] // 128 + torch.arange(mask.shape[3]) // 64) % 4
    mask[:] = torch.where(block == 0, mask, block != 1)


def mask_lists(case: Case, backward: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, int], Tensor]:
    """What the triton backend's forward, or backward, knows of a case's mask: of each tile, by rows and by keys; the
    size of its tiles; and the mask, of which some tiles are hidden and some whole."""
    from tilewise.backends.triton.config import backward_config, forward_config
    from tilewise.backends.triton.masks import MaskLists

    x = tensors(case)
    _sparse(x.mask)
    problem = _problem_of(case, x)
    config = backward_config(problem, False) if backward else forward_config(problem, False, False)
    found = MaskLists(problem, config, x.mask, x.q.device, by_rows=True, by_keys=True, even=backward)([x.mask])
    rows, keys = (y.view(-1, *y.shape[-2:]) for y in (found.by_rows, found.by_keys))
    return found.states, rows, keys, (config.block_m, config.block_n), x.mask


def check_sparse(case: Case) -> None:
    """`helpers.check` with a mask of hidden and whole tiles; the last keys are hidden from all queries, and NaN."""
    clean = tensors(case)
    _sparse(clean.mask)
    k, v = clean.k.clone(), clean.v.clone()
    if case.mask[3] == "n":
        hidden = min(70, case.N // 2)
        clean.mask[..., case.N - hidden :] = False
        k[:, :, case.N - hidden :] = v[:, :, case.N - hidden :] = float("nan")
    hold(case, run(case, "triton", inputs=clean._replace(k=k, v=v)), inputs=clean)


class _Turned:
    """Lists of a mask, after which the mask is turned round in all tiles that are hidden or, by rows, full."""

    def __init__(self, lists, config, mask: Tensor):
        self.lists, self.config, self.mask, self.before, self.tiles = lists, config, mask, mask.clone(), 0

    def __call__(self, mask: Tensor, tiles: None):
        masks, found = self.lists(mask, tiles)
        c = self.config
        states = found.states.view(*mask.shape[:2], *found.states.shape[1:])
        turned = states == 0
        if found.by_keys is None:  # the forward's
            m_tiles, others = found.by_rows.shape[1], found.by_rows.shape[2] - 4
            full = torch.zeros(*mask.shape[:2], m_tiles, others, dtype=torch.bool)
            for row, listed in zip(full.flatten(0, 2), found.by_rows.flatten(0, 1).tolist(), strict=True):
                row[listed[3 : 3 + listed[1]]] = True
            for dim in (2, 3):  # one state for several tiles: they are full all of them
                full = full if states.shape[dim] == full.shape[dim] else full.all(dim, keepdim=True)
            turned |= full
        for b, h, m, n in turned.nonzero().tolist():
            tile = mask[b, h, m * c.block_m : (m + 1) * c.block_m, n * c.block_n : (n + 1) * c.block_n]
            tile.logical_not_()
            self.tiles += 1
        return masks, found


def turn_mask(case: Case) -> tuple[Results, Results, int]:
    """Results of the triton backend, and those of a mask that is `_Turned`; in how many tiles."""
    from tilewise.backends import Inputs, Needs, Outputs
    from tilewise.backends.triton.launch import TritonBackward, TritonForward

    x = tensors(case)
    _sparse(x.mask)
    problem, inputs = _problem_of(case, x), Inputs(x.q, x.k, x.v, x.bias, x.mask)
    needs, cotangents = Needs(True, True, True, x.bias is not None), Outputs(x.do, x.dlse)
    forward = TritonForward(problem, inputs)
    outputs = forward(inputs)
    backward = TritonBackward(problem, inputs, outputs, cotangents, needs)
    before = Results(*outputs[:2], *backward(inputs, outputs, cotangents)[:5])
    turned, results = 0, []
    for passed, arguments in ((forward, (inputs,)), (backward, (inputs, outputs, cotangents))):
        passed.masked = _Turned(passed.masked, passed.config, x.mask)
        results += passed(*arguments)[: 2 if passed is forward else 5]
        x.mask[:] = passed.masked.before
        turned += passed.masked.tiles
    return before, Results(*results), turned


def low_bits_and_back(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By the twins in Triton: the low bits of float32 numbers, and what becomes of those of ``dtype`` with them."""
    from low_bits_kernel import low_bits_kernel

    low, found = torch.empty_like(exact, dtype=torch.int16), torch.empty_like(exact)
    low_bits_kernel[(1,)](exact, exact.to(dtype), low, found, len(exact), 32768)
    return low, found


def one_key_of_packed(tokens: int) -> tuple[Tensor, ...]:
    """Gradients of a packed batch by the triton backend, in which each query sees one key, beside dropout 0.9."""
    from tilewise import varlen_attention

    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(tokens, 4, 16, generator=generator).half().requires_grad_() for _ in range(3)]
    offsets = torch.tensor([0, 7, 7, 40, tokens - 5], dtype=torch.int32)
    o = varlen_attention(
        *x, offsets, offsets, tokens, tokens, window=(0, 0), dropout_p=0.9, dropout_seed=(1, 2), backend="triton"
    )  # fmt: skip
    return torch.autograd.grad((o.float() * torch.arange(16.0)).sum(), x)


def check_sink_gradient(shape: tuple[int, ...], M: int, tile: int, between: int, first: int) -> None:
    """`SinkGradient` beside `backends.sink_gradient`; first: 0 of delta, else of -delta / 2.5."""
    from tilewise.backends import sink_gradient
    from tilewise.backends.kernels.sinks import SinkGradient

    generator = torch.Generator().manual_seed(0)
    sink, lse, minus_delta = (torch.randn(x, generator=generator) for x in (shape, (2, 3, M), (2, 3, M)))
    sink[:, 0, 0] = lse[:, : 3 // shape[1], 0] = -torch.inf  # rows that see nothing, no sink either
    factor = -2.5 if first else 1.0
    delta = torch.nn.functional.pad(-minus_delta / factor, (0, -M % tile), value=torch.nan)
    laid = torch.full((2, 3, -(-M // tile), between), torch.nan)
    laid[..., first : first + tile] = delta.unflatten(-1, (-1, tile))
    found = SinkGradient(sink, lse, tile, between, first, factor=factor)(sink, lse, laid)
    torch.testing.assert_close(found, sink_gradient(sink, lse, minus_delta), rtol=1e-4, atol=1e-4)
