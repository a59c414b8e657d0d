"""The public call: it names and checks its arguments."""

from __future__ import annotations

from torch import Tensor

from tilewise.ops.row_softmax.autograd import softmax_op
from tilewise.ops.row_softmax.checks import check_arguments


def softmax(
    x: Tensor, *, scale: float = 1.0, bias: Tensor | None = None, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    """Softmax of ``scale * x + bias`` along one axis over what the mask leaves visible: P of attention from its scores.

    Args:
        x: float16, bfloat16, float32, or float64 (CPU); of any shape with at least one axis, any strides. A row is
            what lies along ``dim``, up to 2**30 - 1 elements on a GPU, without limit on the CPU.
        scale: multiplies x; positive. Without a bias it takes effect after the row's maximum has been subtracted, so
            that no finite x overflows; with one, ``scale * x + bias`` has to be within the range of float32.
        bias: added to the scaled x; float16, bfloat16, float32 or float64 (CPU), whatever x's dtype is, broadcastable
            to x's shape. Its gradient has its shape and dtype and is summed in float32 (float64 for float64). -inf
            hides an element as the mask does.
        mask: bool, broadcastable to x's shape; True = visible.
        dim: the axis.

    `tilewise.ops.row_softmax.explanation.explain` tells which kernel takes a call.

    Returns:
        The probabilities, in x's shape and dtype. Computed with float32 statistics (float64 for float64), rounded
        once. Hidden elements are 0, and a row of which nothing is visible, or whose scores are all -inf, is all 0.
        A NaN or +inf that is visible makes its row NaN; behind the mask it has no effect.

        Gradients flow to x and bias: ``dS = P * (dP - sum(dP * P))``, ``dx = scale * dS``, ``dbias`` the sum of dS
        over the axes that bias broadcasts. Where P is 0, dS is 0, whatever dP is. Equal inputs give equal bits. There
        is no second derivative.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Source: M. Milakov, N. Gimelshein, arXiv 1805.02867; docs/maths.md derives both formulas.
    """
    check_arguments(x, scale, bias, mask, dim)
    return softmax_op(x, float(scale), _like(bias, x), _like(mask, x), int(dim) % x.dim())


def _like(operand: Tensor | None, x: Tensor) -> Tensor | None:
    """Leading axes of size 1 up to x's number, as broadcasting reads a smaller shape."""
    if operand is None or operand.dim() == x.dim():
        return operand
    return operand[(None,) * (x.dim() - operand.dim())]
