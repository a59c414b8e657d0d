"""The Triton kernel of tilewise.matmul in Triton's interpreter, in float16 and float32: values and gradients."""

import pytest
import torch
from matmul_helpers import LAYOUTS, Product, check, check_negated, check_tf32
from pairwise import each

HALF, FLOAT = torch.float16, torch.float32


@each(
    [
        *(Product(M=M, N=N, K=K, c=c, dtype=dtype) for M, N, K, c, dtype in (
            (1, 1, 1, "mn", HALF), (3, 129, 64, "n", FLOAT), (127, 3, 65, "m1", HALF), (65, 72, 96, "mn", HALF),
            (129, 65, 31, "1", FLOAT),
        )),
        *(Product(M=9, N=7, K=70, a_batch=a, b_batch=b, c=c, dtype=HALF, c_dtype=FLOAT, alpha=0.5, beta=-2.0)
          for a, b, c in (
              ((2,), (), "bmn"), ((), (2,), "mn"), ((2, 3), (3,), "bm1"), ((2, 1), (3,), None),
              ((2, 1, 2), (3, 1), "bmn"), ((2, 3, 2), (2, 1, 2), "n"),
          )),
        *(Product(M=M, N=7, K=K, a_batch=(2, 3), b_batch=(3,), c="m1", dtype=HALF) for M, K in ((1, 40), (5, 1))),
        *(Product(M=9, N=17, K=35, a_batch=(2, 3), b_batch=(3,), c="bmn", a_layout=a, b_layout=b, c_layout=c,
                  dtype=FLOAT, c_dtype=HALF)
          for a, b, c in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], LAYOUTS[2:] + LAYOUTS[:2], strict=True)),
        *(Product(M=9, N=7, K=K, c="n", alpha=alpha, beta=beta, dtype=HALF)
          for K, alpha, beta in ((0, 1.0, 0.5), (5, 0.0, 0.5), (5, 2.0, 0.0), (5, 1e-20, 3.0))),
    ]
)  # fmt: skip
def test_triton(interpreter, case):
    interpreter(check, case, "triton")


def test_memory_that_holds_negatives(interpreter):
    interpreter(check_negated, "triton")


@pytest.mark.parametrize(("setting", "value"), [("allow_tf32", True), ("fp32_precision", "tf32")])
def test_tf32_operands_are_rounded(interpreter, setting, value):
    """By PyTorch's older setting and its newer one, after which the older one may not be read."""
    interpreter(check_tf32, "triton", setting, value)
