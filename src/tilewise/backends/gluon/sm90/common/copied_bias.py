"""A bias that TMA cannot read as it lies, and that many share: a copy whose rows begin at multiples of 16 bytes.

So lie heads last, as a linear layer makes a pair bias, and rows of a length that is no multiple of eight. The Triton
kernels read them element by element, which takes several times as long as all the rest; a copy is read by each of those
who share it, and is smaller by their number than what a matrix for each of them would be. The rows of its gradient have
such a length too, until the kernels are done.

Nothing here imports triton: the plan asks on machines that have none.
"""

from __future__ import annotations

from torch import Tensor

from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem

SHARERS = 4  # query heads of all batch elements; of fewer nobody makes a second matrix
STEP = 8  # elements, of which a multiple is one of 16 bytes in each dtype


def is_shared(problem: Problem) -> bool:
    bias = problem.bias
    if bias is None or bias.axes != "matrix" or problem.parts is not None or problem.totals is not None:
        return False
    group = problem.broadcast_group(bias)
    return group.batch * group.heads >= SHARERS


def is_copied(problem: Problem) -> bool:
    """Whether the kernels read a copy of the bias."""
    return "bias" in problem.irregular and is_shared(problem)


def is_row_of_16_bytes(bias: TensorSpec) -> bool:
    return bias.cols * bias.dtype.itemsize % 16 == 0


def pads_gradient(problem: Problem) -> bool:
    """Whether rows of what becomes dBias are longer than its own."""
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
