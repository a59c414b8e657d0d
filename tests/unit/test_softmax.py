"""`tilewise.softmax` on the CPU: the error rule, exact cases, gradcheck, the operators as PyTorch sees them, errors."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch._inductor.config as inductor
from helpers import opcheck
from pairwise import each
from softmax_helpers import Case, Tensors, check, unfused
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import softmax
from tilewise.ops.row_softmax import SoftmaxNeeds, cpu
from tilewise.ops.row_softmax.explanation import explain
from tilewise.quantities import quantity

BRAIN, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def pieces(monkeypatch):
    """Tensors of a few hundred elements come in pieces."""
    monkeypatch.setattr(cpu, "AT_ONCE", 50)


# --- numbers ---

AXES = ["11n", "1nn", "n1n", "nn1", "n11", "nnn", "111"]


@each(
    Case((3, 5, 37), dim=dim, dtype=dtype, bias=bias, mask=mask, layout=layout)
    for n, (dim, dtype) in enumerate((d, t) for d in (-1, 1, 0) for t in (BRAIN, HALF, FLOAT, DOUBLE))
    for bias, mask, layout in (
        (None, None, "contiguous"),
        (AXES[n % 7], None, "transposed"),
        (None, AXES[n % 7], "sliced"),
        (AXES[(n + 3) % 7], AXES[n % 7], "expanded"),
    )
)
def test_error_rule(case, pieces):
    check(case)


@each(
    [
        Case((5,)),
        Case((1, 1)),
        Case((2, 3, 4, 5, 6), dim=2, bias="1n1n1", mask="n1111", dtype=BRAIN),
        Case((4, 40), bias="1n", bias_dtype=FLOAT, dtype=BRAIN, hidden=True),
        Case((4, 40), bias="nn", bias_dtype=DOUBLE, dtype=FLOAT),
        Case((4, 40), mask="1n", bias="1n", planted=math.nan),
        Case((4, 40), mask="nn", planted=math.inf, dtype=FLOAT),
        Case((4, 40), mask="nn", blind=True),
        Case((4, 40), blind=True, bias="1n"),
        Case((4, 40), dim=0, mask="nn", blind=True, dtype=FLOAT),
    ]
)
@pytest.mark.parametrize("at_once", [1 << 19, 10])
def test_error_rule_of_special_cases(case, at_once, monkeypatch):
    monkeypatch.setattr(cpu, "AT_ONCE", at_once)
    check(case)


@pytest.mark.parametrize(("axes", "dim"), [(axes, n % 3 - 1) for n, axes in enumerate(AXES)])
def test_gradcheck(axes, dim, monkeypatch):
    monkeypatch.setattr(cpu, "AT_ONCE", 8)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn([1 if a == "1" else n for a, n in zip(axes, x.shape, strict=True)], dtype=DOUBLE)
    mask = torch.rand(2, 3, 4) < 0.7
    bias.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: softmax(x, scale=1.3, bias=b, mask=mask, dim=dim), (x, bias))
    assert torch.autograd.gradcheck(lambda x: softmax(x, dim=dim), (x,))


@pytest.mark.parametrize("largest", [1e30, torch.finfo(FLOAT).max])
def test_any_finite_x(largest):
    """Also where the scaled x would overflow."""
    x = torch.tensor([[largest, largest, -largest], [-largest, 0.0, 0.0], [-largest, -largest, -largest]])
    p = softmax(x, scale=1e3)
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]]))


def test_what_is_not_finite_and_visible_spoils_its_row():
    x = torch.zeros(4, 5)
    x[1, 2], x[2, 3] = math.nan, math.inf
    p = softmax(x)
    assert p[[1, 2]].isnan().all()
    assert (p[[0, 3]] == 0.2).all()


def test_rows_that_see_nothing_are_zero():
    x = torch.full((3, 4), -math.inf)
    x[1] = 0.0
    x.requires_grad_()
    p = softmax(x)
    (dx,) = torch.autograd.grad(p, x, torch.full((3, 4), math.nan).index_fill(0, torch.tensor([1]), 1.0))
    assert p.tolist() == [[0.0] * 4, [0.25] * 4, [0.0] * 4]
    assert (dx == 0).all()


def test_a_bias_that_is_not_finite_behind_the_mask():
    bias = torch.tensor([0.0, math.nan, math.inf, 0.0])
    mask = torch.tensor([True, False, False, True])
    assert softmax(torch.randn(1, 4).zero_(), bias=bias, mask=mask).tolist() == [[0.5, 0.0, 0.0, 0.5]]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_nothing_to_compute(shape):
    x = torch.randn(shape, requires_grad=True)
    bias = torch.randn([1] * len(shape), requires_grad=True)
    p = softmax(x, bias=bias)
    p.sum().backward()
    assert p.shape == x.grad.shape == shape
    assert bias.grad.tolist() == torch.zeros([1] * len(shape)).tolist()


def test_memory_does_not_grow_with_the_tensor(monkeypatch):
    """Beyond the result: a piece in float32, and what a piece needs."""
    from tilewise_tools.bench.timing import working_bytes

    monkeypatch.setattr(cpu, "AT_ONCE", 1 << 12)
    x = torch.randn(256, 1024, dtype=BRAIN)
    bias = torch.randn(1, 1024)
    assert working_bytes(lambda: (softmax(x, bias=bias, scale=0.5),), torch.device("cpu")) < 1 << 17


# --- PyTorch's kernels, where they serve ---


class Passes(TorchDispatchMode):
    """The names of what reads or writes as many elements as there are; a view does neither."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.names = elements, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        tensors = [y for y in torch.utils._pytree.tree_leaves((args, kwargs, results)) if isinstance(y, torch.Tensor)]
        if not function.is_view and max((y.numel() for y in tensors), default=0) >= self.elements:
            self.names.append(function._schema.name.removeprefix("aten::"))
        return results


@pytest.mark.parametrize(
    ("dtype", "transposed"),
    # 16-bit rows that are not contiguous are missing, which PyTorch's forward rounds twice.
    [(BRAIN, False), (HALF, False), (FLOAT, False), (FLOAT, True), (DOUBLE, False), (DOUBLE, True)],
)
def test_a_plain_call_is_one_pass_and_its_backward_two(dtype, transposed):
    """Of the whole tensor; more of them were several times torch.softmax's time."""
    x, dp = (torch.randn(2 * 512, 1024, dtype=dtype) for _ in range(2))
    if transposed:
        x, dp = x.t(), dp.t()
    with Passes(x.numel()) as passes:
        p = cpu.forward(x, 1.0, None, None, 1)
    assert [name for name in passes.names if not name.startswith("empty")] == ["_softmax"]
    with Passes(x.numel()) as passes:
        cpu.backward(dp, p, 1.0, None, 1, SoftmaxNeeds(True, False))
    assert [name for name in passes.names if not name.startswith("empty")] == ["_softmax_backward_data", "sum"]


@pytest.mark.parametrize("dtype", [BRAIN, HALF, FLOAT, DOUBLE])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 15, 33, 200])
def test_what_is_not_a_number_makes_all_of_its_row_one(dtype, dim, length):
    """Wherever it stands, and a row that sees nothing is 0; one element of a row tells."""
    x = torch.randn(3 * length + 2, length, dtype=DOUBLE)
    places = torch.arange(length)
    x[places, places], x[length + places, places], x[2 * length] = math.nan, math.inf, -math.inf
    x[2 * length + 1 + places, places] = -math.inf
    p = softmax(x.to(dtype).movedim(0, 1 - dim).contiguous(), dim=dim).movedim(1 - dim, 0)
    assert p[: 2 * length].isnan().all()
    assert (p[2 * length] == 0).all()
    rest = torch.nan_to_num(x[2 * length :].to(dtype).softmax(1))
    torch.testing.assert_close(p[2 * length :], rest)


@pytest.mark.parametrize("dtype", [BRAIN, HALF, FLOAT, DOUBLE])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_gradient_where_p_is_zero_takes_no_part(dtype, dim, scale):
    """Nor does a finite one whose difference from delta overflows."""
    torch.manual_seed(0)
    largest = torch.finfo(dtype).max
    x, dp = torch.zeros(6, 40, dtype=dtype), torch.randn(6, 40).to(dtype)
    x[:, 7::5] = -math.inf
    for row, planted in enumerate([0.0, math.nan, math.inf, -math.inf, largest]):
        dp[row, 7::5] = planted
    dp[4, 0] = -largest  # delta with it, so that the two differ by more than the largest number
    x, dp = (y.movedim(1, dim).contiguous() for y in (x, dp))
    x.requires_grad_()
    p = softmax(x, dim=dim, scale=scale)
    (dx,) = torch.autograd.grad(p, x, dp)
    hidden = p == 0
    p, dp = p.double(), dp.double().masked_fill(hidden, 0.0)
    right = p * (dp - (dp * p).sum(dim, keepdim=True)) * scale
    assert (dx[hidden] == 0).all()
    largest_of_row = right.abs().amax(dim, keepdim=True)
    error = (dx.double() - right).abs() / largest_of_row
    assert error.max() < (1e-2 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("dtype", [BRAIN, FLOAT])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_visible_gradient_that_is_not_finite_leaves_alone_where_p_is_zero(dtype, scale):
    """It makes delta NaN, and with it what is visible of its row: 0 · NaN is no gradient of what is hidden."""
    x, dp = torch.zeros(3, 40, dtype=dtype), torch.ones(3, 40, dtype=dtype)
    x[:, 7::5] = -math.inf
    hidden = x.isinf()
    dp[1, 0] = math.nan
    (dx,) = torch.autograd.grad(softmax(x.requires_grad_(), scale=scale), x, dp)
    assert (dx[hidden] == 0).all()
    assert torch.equal((dx.isnan() | hidden).all(1), torch.tensor([False, True, False]))
    assert dx[::2].isfinite().all()


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("dim", [0, 1])
def test_statistics_of_16_bits_are_of_32(dtype, dim):
    """P and dx are float32's, rounded once: also delta, which PyTorch's kernels could keep in 16 bits."""
    torch.manual_seed(0)
    x, dp = torch.randn(64, 77).to(dtype), (torch.randn(64, 77) + 30).to(dtype)
    x.requires_grad_()
    p = softmax(x, dim=dim)
    (dx,) = torch.autograd.grad(p, x, dp)
    once = torch.softmax(x.detach().float(), dim)
    torch.testing.assert_close(p.float(), once, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)
    wide = p.detach().double()
    right = wide * (dp - (dp * wide).sum(dim, keepdim=True))
    torch.testing.assert_close(dx.double(), right, rtol=0.51 * torch.finfo(dtype).eps, atol=3e-6)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[:, 1:-2], lambda x: x[:, :1], lambda x: x[:1].expand(9, 12),
    lambda x: x[None, :, :, None], lambda x: x.view(3, 3, 12).transpose(0, 2), lambda x: x[:, None, 5:6],
])  # fmt: skip
def test_strides_of_the_results(dtype, view, pieces):
    """As the operator's fake says; a kernel that writes through them as if they were contiguous would be seen."""
    torch.manual_seed(0)
    x = view(torch.randn(9, 12, dtype=dtype)).detach().requires_grad_()
    for dim in range(x.dim()):
        p = softmax(x, dim=dim)
        dp = torch.randn_like(x)
        (dx,) = torch.autograd.grad(p, x, dp, retain_graph=True)
        assert p.stride() == dx.stride() == torch.empty_like(x).stride()
        case = Case(tuple(x.shape), dim=dim, dtype=dtype, scale=1.0)
        right = unfused(case, Tensors(x.detach(), None, None, dp), DOUBLE)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == FLOAT else {"rtol": 2e-2, "atol": 1e-2}
        torch.testing.assert_close(p.double(), right.p, **tolerance)
        torch.testing.assert_close(dx.double(), right.dx, **tolerance)
        (dx,) = torch.autograd.grad(p.sum(), x)  # a gradient of stride 0
        assert dx.abs().max() < (1e-6 if dtype == FLOAT else 2e-2)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_memory_of_a_plain_call_and_its_backward(dtype):
    from tilewise_tools.bench.timing import working_bytes

    x, dp = (torch.randn(256, 1024, dtype=dtype) for _ in range(2))
    p = softmax(x)
    for step in (lambda: (softmax(x),), lambda: (cpu.backward(dp, p, 1.0, None, 1, SoftmaxNeeds(True, False))[0],)):
        assert working_bytes(step, torch.device("cpu")) < 1 << 14


# --- the operators ---

OPERATORS = {
    "plain": Case((3, 5), dtype=FLOAT),
    "bias, mask": Case((2, 3, 5), dtype=FLOAT, bias="1n1", mask="n1n", dim=1),
    "half with a float32 bias": Case((3, 5), dtype=HALF, bias="1n", bias_dtype=FLOAT),
    "transposed": Case((4, 3, 5), dtype=DOUBLE, layout="transposed", bias="nnn"),
    "no rows": Case((0, 5), dtype=FLOAT),
}


@pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
def test_opcheck(case):
    from softmax_helpers import tensors

    (x, bias, mask, dp), _ = tensors(case)
    dim = case.dim % x.dim()
    leaves = [None if y is None else y.detach().requires_grad_() for y in (x, bias)]
    traced = case.dtype == DOUBLE or mask is not None
    opcheck(torch.ops.tilewise.softmax.default, (leaves[0], 0.7, leaves[1], mask, dim), traced)
    p = softmax(x, bias=bias, mask=mask, dim=dim)
    like = (None, None) if bias is None else (list(bias.shape), bias.dtype)
    for wanted in ([True, bias is not None], [False, bias is not None]):
        arguments = (dp, p, 0.7, *like, dim, wanted)
        opcheck(torch.ops.tilewise.softmax_backward.default, arguments, traced and wanted[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own use
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@inductor.patch(fx_graph_cache=False)  # on disk, by which a change of a fake kernel is not seen
def test_compile(backend):
    """Inductor leaves products and views to PyTorch; what it writes in C++ takes a compiler 20 seconds."""

    def biased(x, w, bias, mask):
        around = x @ w if backend == "inductor" else 2 * x
        return softmax(around, scale=0.5, bias=bias, mask=mask).transpose(0, 1)

    torch._dynamo.reset()
    compiled = torch.compile(biased, backend=backend, fullgraph=True, dynamic=True)
    for length in (11, 17):
        x, w, bias = (torch.randn(n, length, requires_grad=True) for n in (3, length, 1))
        mask = torch.rand(3, length) < 0.7
        outputs = [f(x, w, bias, mask) for f in (compiled, biased)]
        torch.testing.assert_close(*outputs, **TOLERANCE)
        leaves = (x, w, bias) if backend == "inductor" else (x, bias)
        torch.testing.assert_close(*(torch.autograd.grad(p.square().sum(), leaves) for p in outputs), **TOLERANCE)
    torch._dynamo.reset()


def test_an_eager_call_is_the_operator():
    x, bias = torch.randn(3, 7, requires_grad=True), torch.randn(1, 7, requires_grad=True)
    outputs = softmax(x, scale=0.4, bias=bias), torch.ops.tilewise.softmax(x, 0.4, bias, None, 1)
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    grads = [torch.autograd.grad(p.square().sum(), (x, bias)) for p in outputs]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_memory_that_holds_negatives(monkeypatch):
    """What reaches a backend, whose kernels take pointers, holds its numbers."""
    seen = []
    for name in ("forward", "backward"):
        of = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *args, of=of: seen.extend(args) or of(*args))
    x, bias, dp = (torch.randn(3, 5, dtype=torch.complex64).conj().imag for _ in range(3))
    x.requires_grad_()
    torch.autograd.grad(softmax(x, bias=bias), x, dp)
    assert x.is_neg()
    assert dp.is_neg()
    tensors = [y for y in seen if isinstance(y, torch.Tensor)]
    assert len(tensors) == 4
    assert not any(y.is_neg() for y in tensors)


def test_fake_and_meta_tensors_give_shapes():
    x = torch.randn(3, 4, 5).transpose(0, 1)
    with FakeTensorMode() as mode:
        fake = softmax(mode.from_tensor(x))
    meta = softmax(x.to("meta"), bias=torch.empty(5, device="meta"))
    real = softmax(x)
    assert fake.shape == meta.shape == real.shape
    assert fake.stride() == real.stride()


@pytest.mark.parametrize(("x_grad", "bias_grad"), [(True, False), (False, True)])
def test_gradients_only_for_what_asks_for_one(x_grad, bias_grad):
    x, bias = torch.randn(3, 5, requires_grad=x_grad), torch.randn(1, 5, requires_grad=bias_grad)
    softmax(x, bias=bias).square().sum().backward()
    assert (x.grad is not None, bias.grad is not None) == (x_grad, bias_grad)
    assert not softmax(x.detach(), bias=bias.detach()).requires_grad


def test_second_derivative_raises():
    x = torch.randn(3, 5, requires_grad=True)
    (dx,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^tilewise\.softmax has no second derivative"):
        dx.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use
def test_transforms():
    """vmap gets a loop; a tangent is an error, where the dispatcher would lose it."""
    x, bias = torch.randn(6, 3, 4), torch.randn(6, 4)
    torch.testing.assert_close(torch.vmap(softmax)(x), x.softmax(-1))
    for function in (softmax, torch.vmap(softmax), lambda y: softmax(x[:, 0], bias=y[:, 0])):
        with pytest.raises(NotImplementedError, match=r"^tilewise\.softmax has no forward-mode derivative"):
            torch.func.jvp(function, (x,), (x,))
    _, tangent = torch.func.jvp(lambda y: y * softmax(bias), (bias,), (bias,))  # what it does not follow may pass
    torch.testing.assert_close(tangent, bias * bias.softmax(-1))


# --- errors, by their whole message ---

X = torch.zeros(2, 5)
BAD = {
    "x is a list": (([1.0],), {}, TypeError, "x: expected a torch.Tensor, got list"),
    "x is a number": ((torch.tensor(1.0),), {}, ValueError, "x: expected at least 1 dimension, got shape ()"),
    "x of integers": (
        (torch.zeros(2, dtype=torch.int64),), {}, TypeError,
        "x: dtype must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "scale is text": ((X,), {"scale": "1"}, TypeError, "scale: expected a float, got str"),
    "scale is a bool": ((X,), {"scale": True}, TypeError, "scale: expected a float, got bool"),
    "scale is 0": ((X,), {"scale": 0}, ValueError, "scale: must be positive and finite, got 0"),
    "scale is NaN": ((X,), {"scale": math.nan}, ValueError, "scale: must be positive and finite, got nan"),
    "scale is lost": ((X,), {"scale": 1e-50}, ValueError, "scale: must be between 1.2e-35 and 3.4e+38, got 1e-50"),
    "scale is infinite": ((X,), {"scale": 1e300}, ValueError, "scale: must be between 1.2e-35 and 3.4e+38, got 1e+300"),
    "dim is a float": ((X,), {"dim": 1.0}, TypeError, "dim: expected an int, got float"),
    "no such axis": ((X,), {"dim": 2}, ValueError, "dim: must be between -2 and 1 for x of shape (2, 5), got 2"),
    "bias is a number": ((X,), {"bias": 1.0}, TypeError, "bias: expected a torch.Tensor, got float"),
    "bias is a mask": (
        (X,), {"bias": X > 0}, TypeError,
        "bias: dtype must be float16, bfloat16, float32 or float64, got torch.bool; a bool mask is passed as mask=",
    ),
    "mask is a bias": (
        (X,), {"mask": X}, TypeError,
        "mask: dtype must be bool (True = visible), got torch.float32; an additive mask is passed as bias=",
    ),
    "bias is larger": (
        (X,), {"bias": torch.zeros(3, 2, 5)}, ValueError, "bias: shape (3, 2, 5) does not broadcast to x's (2, 5)",
    ),
    "mask of another shape": (
        (X,), {"mask": torch.zeros(2, 4) > 0}, ValueError, "mask: shape (2, 4) does not broadcast to x's (2, 5)",
    ),
    "bias elsewhere": (
        (X,), {"bias": torch.zeros(5, device="meta")}, ValueError, "bias: must be on x's device cpu, got meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD.values(), ids=BAD)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        softmax(*arguments, **options)


# --- explain ---


def meta(*shape, dtype=BRAIN, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize(
    ("arguments", "forward", "backward"),
    [
        ({"x": meta(4096, 1000)}, "read once: a row of up to 1024 in each program, 2 warps", None),
        ({"x": meta(64, 4096, 64)}, "read once: 16 rows of up to 64 in each program, 2 warps", None),
        (
            {"x": meta(4096, 65536)},
            "read once: 16 programs of 4096 elements for each row, which wait for each other's statistics, 1 warp",
            "read once: 16 programs of 4096 elements for each row, which wait for each other's statistics, 4 warps",
        ),
        (
            {"x": meta(4096, 65536), "multiprocessors": 20},
            "read twice: one program a row, tiles of 1 x 4096",
            None,
        ),
        ({"x": meta(4096, 8192)}, "read once: a row of up to 8192 in each program, 16 warps",
         "read once: a row of up to 8192 in each program, 8 warps"),
    ],
)  # fmt: skip
def test_explain_on_a_gpu(arguments, forward, backward):
    found = explain(**{"multiprocessors": 132, **arguments})
    size = 2 * arguments["x"].numel()
    assert str(found).splitlines()[1:] == [
        f"forward    {forward}; at least {quantity(2 * size, 'B')}",
        f"backward   {backward or forward}; at least {quantity(3 * size, 'B')}",
    ]


def test_explain_on_the_cpu():
    bias, mask = meta(1, 37, dtype=FLOAT, requires_grad=True), meta(3, 37, dtype=torch.bool)
    found = explain(meta(3, 37), bias=bias, mask=mask)
    assert str(found) == (
        "softmax    3 rows of 37, bfloat16\n"
        "forward    PyTorch's kernels; beside them whole rows, about 524,288 elements at a time; at least 703 B\n"
        "backward   PyTorch's kernels; beside them whole rows, about 524,288 elements at a time; at least 814 B"
    )
    with pytest.raises(ValueError, match=r"^multiprocessors: must be 1 or more, got 0$"):
        explain(X, multiprocessors=0)
    with pytest.raises(ValueError, match=r"^dim: must be between -2 and 1"):
        explain(X, dim=4)


@pytest.mark.parametrize("name", ["x", "bias", "mask"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_dense_tensor_is_refused_by_name(name):
    """A CausalBias, whose memory nobody wrote, and a nested tensor, which has no shape."""
    for bad, message in (
        (causal_upper_left(3, 3), "expected a plain torch.Tensor, got CausalBias"),
        (torch.nested.nested_tensor([torch.ones(3, 3)] * 2), "expected a dense tensor .* got a nested tensor"),
        (torch.ones(3, 3).to_sparse(), "expected a dense tensor .* got layout torch.sparse_coo"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: {message}"):
            softmax(**{"x": torch.ones(2, 3, 3), name: bad})
