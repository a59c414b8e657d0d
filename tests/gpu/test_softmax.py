"""`tilewise.softmax` on the device, held to the error rule of softmax_helpers.py, in poisoned memory."""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import each
from softmax_helpers import Case, check

from tilewise import softmax
from tilewise.ops.row_softmax.triton import launch

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
AXES = ["11n", "1nn", "n1n", "nn1", "n11", "nnn", "111"]


@pytest.mark.parametrize("dtype", [BRAIN, FLOAT])
@pytest.mark.parametrize("length", [1, 3, 127, 129, 1023, 4096, 8192, 16384, 16385, 32768, 65536, 100001, 131072])
def test_lengths(length, dtype):
    check(Case((131, length), dtype=dtype), device="cuda")


@each(
    Case((7, 5, 333), dim=dim, dtype=BRAIN, bias=bias, mask=mask, layout=layout)
    for n, bias in enumerate(AXES)
    for dim, mask, layout in (
        ((-1, None, "contiguous"), (1, AXES[(n + 3) % 7], "transposed"), (0, AXES[(n + 5) % 7], "sliced"))[n % 3],
        (-1, AXES[(n + 2) % 7], "transposed"),
    )
)
def test_axes_and_layouts(case):
    check(case, device="cuda")


@each(
    [
        Case((1000, 40), mask="nn", planted=math.nan, dtype=FLOAT),
        Case((40, 70000), mask="1n", planted=math.nan, bias="1n", dtype=BRAIN),
        Case((40, 70000), mask="nn", blind=True, bias="nn", hidden=True, dtype=BRAIN),
        Case((40, 70000), blind=True, dtype=HALF),
        Case((2, 70000), mask="nn", blind=True, dtype=FLOAT),
        Case((3, 1 << 20), dtype=BRAIN, bias="1n", bias_dtype=FLOAT),
        Case((1, 3_000_001), dtype=FLOAT, mask="1n"),
        Case((5000, 300), dim=0, dtype=BRAIN, bias="n1", mask="n1"),
        Case((3, 50000, 40), dim=1, dtype=BRAIN, bias="1n1"),
        Case((4, 8, 256, 256), dtype=BRAIN, bias="1nnn", mask="n11n"),
        Case((64, 64, 4), dim=1, dtype=FLOAT, layout="expanded"),
    ]
)
def test_special_cases(case):
    check(case, device="cuda")


def test_offsets_past_the_reach_of_32_bits():
    """Rows at both ends of 2.2e9 elements; and one row whose elements lie that far apart."""
    rows, length = 18000, 1 << 17
    x = torch.zeros(rows, length, dtype=HALF, device="cuda")
    x[-1, -1] = 3.0
    p = softmax(x)
    assert p[-1].tolist()[-1] == pytest.approx(math.exp(3) / (math.exp(3) + length - 1), rel=1e-3)
    assert (p[-2] == p[0, 0]).all()
    across = softmax(x[:, :: length // 2], dim=0)
    torch.testing.assert_close(across, torch.softmax(x[:, :: length // 2].float(), 0).half())


def test_equal_inputs_give_equal_bits_where_programs_wait_for_each_other():
    x, dp = (torch.randn(500, 65536, dtype=BRAIN, device="cuda") for _ in range(2))
    strides = tuple(x.stride())
    layouts = strides, None, None, strides
    _, config, _ = launch._prepare(tuple(x.shape), 1, layouts, 2, False, launch._processors(x), False)
    if not config.on_chip:
        pytest.skip("a device of few multiprocessors: programs do not wait there")
    assert config.parts > 1
    bias = torch.randn(1, 65536, device="cuda")
    results = []
    for _ in range(20):
        leaves = x.detach().requires_grad_(), bias.detach().requires_grad_()
        p = softmax(leaves[0], bias=leaves[1])
        results.append((p, *torch.autograd.grad(p, leaves, dp)))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_beside_itself_on_many_streams():
    """Rows that wait for parts of themselves, eight launches at a time."""
    x = torch.randn(200, 131072, dtype=BRAIN, device="cuda")
    expected = softmax(x)
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    found = []
    for n in range(32):
        with torch.cuda.stream(streams[n % 8]):
            found.append(softmax(x))
    torch.cuda.synchronize()
    assert all(torch.equal(p, expected) for p in found)


@pytest.mark.parametrize("largest", [1e30, torch.finfo(FLOAT).max])
@pytest.mark.parametrize("length", [3, 65536])
def test_any_finite_x(largest, length):
    x = torch.full((140, length), -largest, device="cuda")
    x[:, 0] = x[:, -1] = largest
    p = softmax(x, scale=1e3)
    assert (p[:, 0] == 0.5).all()
    assert (p[:, -1] == 0.5).all()
    assert (p[:, 1:-1] == 0).all()


@pytest.mark.parametrize("length", [5, 65536])
def test_what_is_not_finite_and_visible_spoils_its_row(length):
    x = torch.zeros(140, length, device="cuda")
    x[1, length // 2], x[2, -1] = math.nan, math.inf
    p = softmax(x)
    assert p[[1, 2]].isnan().all()
    assert (p[[0, 3]] == p[0, 0]).all()


def test_compile():
    compiled = torch.compile(lambda x, bias: softmax(2 * x, scale=0.5, bias=bias), backend="aot_eager", fullgraph=True)
    x, bias = (torch.randn(n, 300, device="cuda", requires_grad=True) for n in (40, 1))
    outputs = compiled(x, bias), softmax(x, bias=bias)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(p.square().sum(), (x, bias)) for p in outputs))


def test_rows_whose_indices_do_not_fit():
    x = torch.zeros(1, device="cuda").expand(1 << 30)
    with pytest.raises(ValueError, match=r"^x: a row on a GPU has at most 1073741823 elements, got 1073741824$"):
        softmax(x)


def test_float64_is_an_error():
    message = r"^x, bias: float64 runs on the CPU only, the tensors are on cuda:0$"
    with pytest.raises(ValueError, match=message):
        softmax(torch.zeros(3, dtype=torch.float64, device="cuda"))
    with pytest.raises(ValueError, match=message):
        softmax(torch.zeros(3, device="cuda"), bias=torch.zeros(3, dtype=torch.float64, device="cuda"))
