"""Copies of a shared bias that TMA cannot read in place, with rows that begin at multiples of 16 bytes.

Examples: heads last, as a linear layer returns a pair bias, or rows of a length that is no multiple of eight. The
Triton kernels read such a bias element by element, which takes several times as long as all other work; all heads that
share the bias read one copy, smaller by their number than a matrix per head. Rows of its gradient are padded too, until
the kernels are done.

Nothing here imports triton: the plan calls it on machines without triton.
"""

from __future__ import annotations

from torch import Tensor

from tilewise.spec.operands import BiasKind, TensorSpec
from tilewise.spec.problem import Problem

SHARERS = 4  # query heads of all batch elements that share a bias; with fewer no copy is made
STEP = 8  # elements; 16 bytes or a multiple in each dtype


def is_shared(problem: Problem) -> bool:
    bias = problem.bias
    if bias is None or bias.axes != BiasKind.MATRIX or problem.parts is not None or problem.totals is not None:
        return False
    group = problem.broadcast_group(bias)
    return group.batch * group.heads >= SHARERS


def is_copied(problem: Problem) -> bool:
    """True if the kernels read a copy of the bias."""
    return "bias" in problem.irregular and is_shared(problem)


def is_row_of_16_bytes(bias: TensorSpec) -> bool:
    return bias.cols * bias.dtype.itemsize % 16 == 0


def pads_gradient(problem: Problem) -> bool:
    """True if the kernels write dBias with longer rows than the bias has."""
    return problem.bias is not None and is_shared(problem) and not is_row_of_16_bytes(problem.bias)


def padded(columns: int) -> int:
    return -(-columns // STEP) * STEP


def copied(bias: Tensor) -> Tensor:
    *shape, columns = bias.shape
    return bias.new_empty(*shape, padded(columns))[..., :columns].copy_(bias)


def copied_bytes(problem: Problem) -> int:
    bias = problem.bias
    assert bias is not None
    return bias.batch * bias.heads * bias.rows * padded(bias.cols) * bias.dtype.itemsize
