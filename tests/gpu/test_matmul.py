"""tilewise.matmul on the device, each of its backends that has kernels, held to the error rule in poisoned memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers import poisoned_memory
from matmul_helpers import LAYOUTS, Product, check, operands
from pairwise import each

from tilewise import matmul
from tilewise.ops.gemm import hopper
from tilewise.ops.gemm.config import hopper_config
from tilewise.ops.gemm.plan import choose, declines_hopper
from tilewise.ops.gemm.problem import describe

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Product(M=264, N=392, K=200, dtype=BRAIN)
HOPPER = torch.cuda.get_device_capability() == (9, 0)


def on_hopper(case):
    """Whether the Hopper kernel takes the case."""
    product = describe(*operands(case, "cuda")[:3], ())
    return HOPPER and product is not None and declines_hopper(product) is None


def hold(*cases):
    """Hold every backend that takes a case to the error rule."""
    for case in cases:
        for backend in ("triton", "hopper") if on_hopper(case) else ("triton",):
            check(case, backend, "cuda")


SIZES = [
    (1, 8, 64), (3, 127, 1), (64, 8, 799), (127, 129, 128), (128, 256, 64), (129, 264, 1024), (256, 1, 200),
    (799, 1024, 8), (1024, 800, 129), (1000, 1096, 840),
]  # fmt: skip


@each(replace(USUAL, M=M, N=N, K=K, c=c) for (M, N, K), c in zip(SIZES, (None, "mn", "n") * 4, strict=False))
def test_sizes(case):
    hold(case)


@pytest.mark.parametrize("a", ["contiguous", "transposed"])
@pytest.mark.parametrize("b", ["contiguous", "transposed"])
def test_transposes(a, b):
    case = replace(USUAL, a_layout=a, b_layout=b, c="mn", alpha=0.5)
    assert on_hopper(case) == HOPPER
    hold(case, replace(case, c=None, dtype=HALF), replace(case, c=None, a_batch=(3,), b_batch=(3,)))


@each(replace(USUAL, a_batch=(2, 3), b_batch=(3,), c="bmn", a_layout=a, b_layout=b, c_layout=c)
      for a, b, c in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], LAYOUTS[2:] + LAYOUTS[:2], strict=True))  # fmt: skip
def test_layouts(case):
    hold(case)


@each(
    replace(USUAL, M=72, N=136, K=40, a_batch=a, b_batch=b, c=c, c_dtype=FLOAT)
    for a, b, c in (
        ((3,), (), "bm1"), ((), (3,), "mn"), ((2, 3), (3,), "bmn"), ((2, 1), (3,), None), ((2, 3), (2, 1), "b11"),
        ((2, 3), (2, 3), "n"), ((2, 1, 2), (3, 1), "bmn"), ((2, 3, 2), (2, 1, 2), None), ((65,), (65,), "m1"),
    )
)  # fmt: skip
def test_batches(case):
    hold(case)


@each(
    replace(USUAL, c=c, c_dtype=dtype, alpha=alpha, beta=beta, grads="c")
    for c, dtype, alpha, beta in (
        ("mn", BRAIN, 1.0, 1.0), ("mn", HALF, 0.125, 1.0), ("mn", FLOAT, -2.0, 0.5), ("mn", FLOAT, 0.125, 1.0),
        ("n", BRAIN, 0.125, 1.0), ("n", FLOAT, 1.0, 1e-30), ("m1", BRAIN, 1.0, 1.0), ("m1", FLOAT, 1e-30, 1.0),
        ("1", HALF, -2.0, 0.5),
    )
)  # fmt: skip
def test_c(case):
    hold(case)


@pytest.mark.parametrize("alpha", [0.125, -0.125])
def test_the_largest_c_does_not_overflow(alpha):
    """The lowest finite number is what many masks add: it must come out as itself, not as -inf."""
    a, b = (torch.randn(256, 256, device="cuda", dtype=BRAIN) for _ in range(2))
    c = torch.full((256, 256), torch.finfo(BRAIN).min, device="cuda", dtype=BRAIN)
    assert torch.equal(matmul(a, b, c=c, alpha=alpha), c)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        hold(
            replace(USUAL, dtype=FLOAT, M=127, N=129, K=799, a_layout="transposed", c="mn", alpha=0.5),
            replace(USUAL, dtype=FLOAT, c="n", c_dtype=BRAIN, a_batch=(3,), b_layout="transposed"),
        )
    finally:
        torch.set_float32_matmul_precision(before)


@each(replace(USUAL, K=K, c="m1", alpha=alpha, beta=beta)
      for K, alpha, beta in ((0, 1.0, 0.5), (64, 0.0, 0.5), (64, 2.0, 0.0)))  # fmt: skip
def test_factors_of_zero(case):
    hold(case)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize(
    ("c", "changes"),
    [
        (None, {}), (None, {"rows": 128, "block_n": 128, "store_buffers": 1}), ("mn", {}),
        ("mn", {"turns": True}),
    ],
    ids=str,
)  # fmt: skip
def test_full_size_repeats_bitwise(c, changes, alpha):
    """Races show where every multiprocessor walks over several tiles and what it reads is in the L2 cache."""
    case = replace(USUAL, M=2048, N=4096, K=512, c=c, alpha=alpha)
    a, b, c, _ = operands(case, "cuda")
    product, y = describe(a, b, c, ()), torch.empty(case.M, case.N, device="cuda", dtype=BRAIN)
    launch = hopper.prepare(product, a, b, c, y, alpha, 1.0, replace(hopper_config(product), **changes))
    launch(a, b, c, y)
    exact = alpha * (a.double() @ b.double()) + (0 if c is None else c.double())
    rounding = (exact.to(BRAIN).double() - exact).abs().max()
    assert (y.double() - exact).abs().max() <= 2 * rounding
    first = y.clone()
    for _ in range(30):
        y.fill_(torch.nan)
        launch(a, b, c, y)
        assert torch.equal(y, first)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_offsets_over_two_to_the_31(backend, which):
    """The last matrix of a batch, and the last rows of a matrix, that lie further than 2³¹ elements in."""
    if backend == "hopper" and not HOPPER:
        pytest.skip("needs compute capability 9.0")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=BRAIN)

    a, b, c = normal(256, 64), normal(64, 64), None
    if which == "a":  # and y
        a = torch.zeros(2**31 // 64 + 192, 64, device="cuda", dtype=BRAIN)
        a[-256:] = normal(256, 64)
    elif which == "b":
        b = torch.zeros(2, 2**31 // 64, 64, device="cuda", dtype=BRAIN)[:, :64]
        b[1] = normal(64, 64)
    else:
        c = torch.zeros(256, 2**23 + 64, device="cuda", dtype=BRAIN)[:, :64]
        c[255] = normal(64)
    with poisoned_memory("cuda"):
        y = matmul(a, b, c=c, backend=backend)
    exact = a[-256:].double() @ b.double() + (0 if c is None else c.double())
    assert ((y[..., -256:, :].double() - exact).abs() <= 0.1 + 2**-8 * exact.abs()).all()
    assert not any(part.isnan().any() for part in y.split(2**22, -2))


def drawn(n: int) -> Product:
    """A product of any size and terms; equal n, equal product."""
    r = random.Random(n)
    size = (1, 8, 40, 64, 127, 128, 136, 256, 264, 520, 799, 1024)
    batch = r.choice((((), ()), ((), ()), ((3,), ()), ((2,), (2,)), ((2, 3), (3,)), ((2, 1), (2, 5))))
    return Product(
        M=r.choice(size), N=r.choice(size), K=r.choice(size), a_batch=batch[0], b_batch=batch[1],
        c=r.choice((None, "mn", "bmn", "n", "m1", "b1n")), dtype=r.choice((BRAIN, HALF)),
        c_dtype=r.choice((None, BRAIN, FLOAT)), alpha=r.choice((1.0, 1.0, 0.3, -2.0)), beta=r.choice((1.0, 0.7)),
        a_layout=r.choice(LAYOUTS[:5]), b_layout=r.choice(LAYOUTS[:5]), c_layout=r.choice(("contiguous", "padded")),
    )  # fmt: skip


@pytest.mark.parametrize("part", range(8))
def test_soak(part):
    hold(*(drawn(n) for n in range(part, 16, 8)))


def test_what_is_chosen():
    x = operands(USUAL, "cuda")
    expected = "hopper" if HOPPER else "triton"
    assert choose(describe(*x[:3], ())).backend == expected
