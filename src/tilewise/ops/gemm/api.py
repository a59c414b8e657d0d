"""The public function `matmul`: it checks its arguments and calls the operator."""

from __future__ import annotations

from torch import Tensor

from tilewise.operator.eager import is_eager
from tilewise.ops.gemm.autograd import eager_matmul, matmul_op
from tilewise.ops.gemm.problem import BACKENDS, check_arguments
from tilewise.ops.gemm.run import ran_before


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Return ``alpha * a @ b + beta * c``, accumulated in float32 and rounded once. It is differentiable in a, b and c.

    Args:
        a: (..., M, K) in float16, bfloat16, float32 or, on the CPU, float64. Leading dimensions are a batch and
            broadcast against b's as in ``torch.matmul``. Any strides: a transposed matrix (``x.mT``) is read in place.
        b: (..., K, N) in a's dtype.
        c: added to the product, without a separate pass; any floating dtype, independently of a's, of a shape that
            broadcasts to (..., M, N): a row (N), a column (M, 1), or a matrix, with or without batch.
        alpha: multiplies the product; finite in float32. If 0, a and b are not read.
        beta: multiplies c; finite in float32. If 0, c is not read.
        backend: "hopper", "triton" or "cpu"; raises an error if it cannot run the call. Default, and "auto": the first
            of them that can; `tilewise.ops.gemm.explanation.explain` tells which.

    Returns:
        y (..., M, N) in a's dtype, contiguous. On a GPU, float32 products use TF32 if PyTorch's own matrix products do
        (``torch.set_float32_matmul_precision``). The CPU computes 16-bit products in float32. Autocast does not apply.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.

    Examples:
        >>> a, b = torch.randn(4, 32, 64, requires_grad=True), torch.randn(64, 48)
        >>> y = tilewise.matmul(a, b, c=torch.randn(48), alpha=0.5)
        >>> y.sum().backward()
        >>> y.shape, a.grad.shape
        (torch.Size([4, 32, 48]), torch.Size([4, 32, 64]))

    Gradients, with dY that of the result: dA = alpha · dY Bᵀ, dB = alpha · Aᵀ dY, dC = beta · dY, each in the dtype and
    shape of its input. Sums over broadcast axes are accumulated in float32 and rounded once. Second derivatives are
    supported.

    An operand is copied only if more than two batch dimensions remain after merging those with uniform strides.

    Source: BLAS's GEMM; docs/maths.md derives the gradients.
    """
    which = "auto" if backend is None else backend
    usual = type(alpha) is float and type(beta) is float and (which == "auto" or which in BACKENDS)
    try:
        known = usual and is_eager((a, b, c)) and ran_before(a, b, c, alpha, beta, which)
    except RuntimeError:
        check_arguments(a, b, c, alpha, beta, backend)  # a nested tensor has no shape to look up
        raise
    if known:
        return eager_matmul(a, b, c, alpha, beta, [], which)
    check_arguments(a, b, c, alpha, beta, backend)
    return matmul_op(a, b, c, float(alpha), float(beta), which)
