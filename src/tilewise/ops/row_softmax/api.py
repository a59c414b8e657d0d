"""The public function `softmax`: it checks its arguments and calls the operator."""

from __future__ import annotations

from torch import Tensor

from tilewise.ops.row_softmax.autograd import softmax_op
from tilewise.ops.row_softmax.checks import check_arguments


def softmax(
    x: Tensor, *, scale: float = 1.0, bias: Tensor | None = None, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    """Return the softmax of ``scale * x + bias`` along one axis, over the visible elements.

    Args:
        x: any shape with at least one axis, any strides; float16, bfloat16, float32 or, on the CPU, float64. A row, the
            elements along ``dim``, has at most 2**30 - 1 elements on a GPU, and any number on the CPU.
        scale: multiplies x; positive. Without a bias it is applied after subtracting the row's maximum, so no finite x
            overflows; with a bias, ``scale * x + bias`` must be in the range of float32.
        bias: added to the scaled x; broadcastable to x's shape; float16, bfloat16, float32 or, on the CPU, float64,
            independently of x's dtype. Its gradient has its shape and dtype and is summed in float32 (float64 for
            float64). -inf hides an element like the mask.
        mask: bool, broadcastable to x's shape; True = visible.
        dim: the axis.

    Returns:
        P in x's shape and dtype, computed with float32 statistics (float64 for float64) and rounded once. Masked
        elements are 0. A row in which all elements are masked, or all scores are -inf, is 0. A visible NaN or +inf
        makes its row NaN; a masked one has no effect.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.

    Examples:
        >>> x = torch.tensor([[0.0, 1.0, 2.0]])
        >>> tilewise.softmax(x, mask=torch.tensor([True, True, False])).round(decimals=3)
        tensor([[0.2690, 0.7310, 0.0000]])

    Gradients of x and bias: ``dS = P * (dP - sum(dP * P))``, ``dx = scale * dS``, and ``dbias`` is dS summed over the
    axes that bias broadcasts. If P is 0, dS is 0 for any dP. Equal inputs give bitwise equal gradients. There is no
    second derivative.

    `tilewise.ops.row_softmax.explanation.explain` tells which kernel computes a call.

    Source: M. Milakov, N. Gimelshein, arXiv 1805.02867; docs/maths.md derives both formulas.
    """
    check_arguments(x, scale, bias, mask, dim)
    return softmax_op(x, float(scale), _like(bias, x), _like(mask, x), int(dim) % x.dim())


def _like(operand: Tensor | None, x: Tensor) -> Tensor | None:
    """Return ``operand`` with leading axes of size 1, up to x's number of axes."""
    if operand is None or operand.dim() == x.dim():
        return operand
    return operand[(None,) * (x.dim() - operand.dim())]
