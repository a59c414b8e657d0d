"""The public call. It names and checks its arguments; everything else happens further down."""

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
    """``alpha * a @ b + beta * c``, accumulated in float32 and rounded once, differentiable in a, b and c.

    Args:
        a: (..., M, K), float16, bfloat16, float32, or float64 (CPU). Leading dimensions are a batch and broadcast
            against b's as in ``torch.matmul``. Any strides: a transposed matrix (``x.mT``) is read in place.
        b: (..., K, N) in a's dtype.
        c: added to the product; any floating dtype whatever a's is, of a shape that broadcasts to (..., M, N): a row
            (N), a column (M, 1), a matrix, with or without batch. It costs no pass of its own.
        alpha: multiplies the product; a number within the range of float32. With 0, a and b are not read.
        beta: multiplies c; as alpha. With 0, c is not read.
        backend: "hopper", "triton" or "cpu"; one that cannot run the call is an error. Default, and "auto": the
            first of them that can, see `tilewise.ops.gemm.explanation.explain`.

    Returns:
        (..., M, N) in a's dtype, contiguous. On a GPU float32 products use TF32 where PyTorch's own matrix products
        do (``torch.set_float32_matmul_precision``). The CPU computes 16-bit products in float32.
        Autocast casts nothing.
        Gradients, with dY that of the result: dA = alpha · dY Bᵀ, dB = alpha · Aᵀ dY, dC = beta · dY, each in the
        dtype and shape of its input, summed over the axes that broadcast in float32 and rounded once. Second
        derivatives too.

    An operand is copied only where more than two batch dimensions remain after those that lie evenly in memory are
    merged.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Source: BLAS's GEMM; docs/maths.md derives the gradients.
    """
    which = "auto" if backend is None else backend
    usual = type(alpha) is float and type(beta) is float and (which == "auto" or which in BACKENDS)
    try:
        known = usual and is_eager((a, b, c)) and ran_before(a, b, c, alpha, beta, which)
    except RuntimeError:
        check_arguments(a, b, c, alpha, beta, backend)  # a nested tensor has no shape to look a call up by
        raise
    if known:
        return eager_matmul(a, b, c, alpha, beta, [], which)
    check_arguments(a, b, c, alpha, beta, backend)
    return matmul_op(a, b, c, float(alpha), float(beta), which)
