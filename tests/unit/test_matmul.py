"""tilewise.matmul on the CPU and as PyTorch sees it: reference, gradients, opcheck, torch.compile, error messages."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import empty_cache, opcheck
from matmul_helpers import LAYOUTS, Product, check, lay_out
from pairwise import each
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import causal_upper_left

from tilewise import matmul
from tilewise.ops.gemm import problem
from tilewise.ops.gemm import run as running
from tilewise.ops.gemm.config import HopperConfig
from tilewise.ops.gemm.explanation import explain
from tilewise.ops.gemm.plan import choose
from tilewise.ops.gemm.run import run

HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
BATCHES = [
    ((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 3), ()), ((), (2, 3)), ((2, 1), (3,)), ((2, 3), (1, 3)),
    ((1, 3), (2, 1)), ((2, 1, 2), (3, 1)), ((2, 3, 2), (2, 1, 2)),
]  # fmt: skip


# --- against float64 ---


@each(
    Product(M=M, N=N, K=K, c=c, dtype=dtype)
    for n, (M, N, K) in enumerate(itertools.product((1, 3, 65), (1, 17), (1, 40)))
    for c in ((None, "mn", "n", "m1", "1")[n % 5], "mn")
    for dtype in (FLOAT, BRAIN)
)
def test_sizes(case):
    check(case)


@each(
    Product(M=9, N=7, K=5, a_batch=a, b_batch=b, c=c, dtype=dtype, c_dtype=c_dtype, alpha=0.3, beta=-2.0)
    for n, (a, b) in enumerate(BATCHES)
    for c, dtype, c_dtype in (
        (None, HALF, None), (("bmn", "mn", "bm1", "b1n", "n")[n % 5], BRAIN, FLOAT),
        (("m1", "b11", "bmn")[n % 3], FLOAT, HALF),
    )
)  # fmt: skip
def test_batches(case):
    check(case)


@each(
    Product(M=9, N=7, K=5, a_batch=(2, 3), b_batch=(3,), c="bmn", a_layout=a, b_layout=b, c_layout=c)
    for a, b, c in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], LAYOUTS[2:] + LAYOUTS[:2], strict=True)
)
def test_layouts(case):
    check(case)


@each(
    Product(M=9, N=7, K=K, c=c, alpha=alpha, beta=beta, a_batch=(2,))
    for K, alpha, beta in ((0, 1.0, 0.5), (5, 0.0, 0.5), (5, 2.0, 0.0), (5, 0.0, 0.0), (5, 1e-20, 3.0), (5, -2.0, -1.0))
    for c in (None, "mn", "n", "bm1")
)
def test_factors_of_zero_and_others(case):
    check(case)


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"K": 0}, {"a_batch": (0,)}, {"b_batch": (2, 0), "K": 0}])
@pytest.mark.parametrize("c", [None, "mn", "bm1", "n"])
def test_empty(sizes, c):
    check(Product(**({"M": 3, "N": 4, "K": 5, "c": c, "c_dtype": BRAIN} | sizes)))


def test_a_factor_of_zero_reads_nothing():
    """As in BLAS: what is multiplied by 0 may hold NaN."""
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    bad = torch.full_like(c, math.nan)
    torch.testing.assert_close(matmul(a, b, c=bad, beta=0), a @ b)
    torch.testing.assert_close(matmul(a * math.nan, b, c=c, alpha=0.0, beta=2), 2 * c)


# --- gradients ---


@pytest.mark.parametrize(
    ("a", "b", "c"), [(a, b, c) for n, (a, b) in enumerate(BATCHES) for c in ("bmn", ("n", "m1")[n % 2])]
)
def test_gradcheck(a, b, c):
    """Numbers of every derivative, and of the second."""
    case = Product(M=2, N=3, K=2, a_batch=a, b_batch=b, c=c)
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=DOUBLE, requires_grad=True) for shape in
              ((*a, 2, 2), (*b, 2, 3), case.c_shape())]  # fmt: skip

    def function(a, b, c):
        return matmul(a, b, c=c, alpha=0.7, beta=-1.3)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("grads", ["a", "b", "c", "ab", "bc", ""])
def test_gradients_on_demand(grads, monkeypatch):
    """No product is computed for a gradient that nobody asks for."""
    from tilewise.ops.gemm import autograd

    calls = []
    monkeypatch.setattr(autograd, "run", lambda *args: calls.append(args) or run(*args))
    check(Product(M=3, N=4, K=5, c="n", grads=grads))
    assert len(calls) == 1 + ("a" in grads) + ("b" in grads)


def test_an_operand_is_kept_only_for_the_gradient_of_the_other():
    kept = []
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        matmul(a, b, c=torch.randn(5, requires_grad=True))
    assert kept == [b.shape]


def test_float32_sums_of_a_16_bit_gradient():
    """65,536 ones of bfloat16 sum to 65,536, not to 256, where bfloat16 would stay."""
    a = torch.ones(65536, 1, dtype=BRAIN)
    b = torch.ones(1, 2, dtype=BRAIN, requires_grad=True)
    c = torch.zeros(2, dtype=BRAIN, requires_grad=True)
    matmul(a, b, c=c).sum().backward()
    assert c.grad.tolist() == b.grad[0].tolist() == [65536.0, 65536.0]


def test_gradient_of_a_float32_c_is_not_rounded_to_bfloat16():
    a, b = torch.randn(3, 4, dtype=BRAIN), torch.randn(4, 5, dtype=BRAIN)
    c, dy = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5).to(BRAIN)
    (dc,) = torch.autograd.grad(matmul(a, b, c=c, beta=0.3), c, dy)
    assert torch.equal(dc, dy.float() * 0.3)


def test_the_gradient_of_a_full_c_is_dy_but_never_shares_its_memory_in_grad():
    """Two leaves whose gradients are one tensor: what is done to the one's .grad must not reach the other's."""
    a, b, dy = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    c, d = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    (dc,) = torch.autograd.grad(matmul(a, b, c=c), c, dy)
    assert dc.data_ptr() == dy.data_ptr()  # no pass
    before = dy.clone()
    (matmul(a, b, c=c) + matmul(a, b, c=d)).backward(dy)
    c.grad.zero_()
    assert torch.equal(dy, before)
    assert torch.equal(d.grad, before)


# --- as PyTorch sees it ---

OPERATOR_CASES = {
    "plain": {},
    "batch": {"a": (2, 5, 4), "b": (2, 4, 3), "c": (2, 5, 3)},
    "row": {"c": (3,)},
    "broadcast, summed": {"a": (2, 5, 4), "b": (4, 3), "summed": [-3]},
    "column of bfloat16": {"c": (5, 1), "c_dtype": BRAIN},
    "empty": {"a": (5, 0), "b": (0, 3), "c": (5, 3)},
}


@pytest.mark.parametrize("name", OPERATOR_CASES)
def test_opcheck(name):
    case = OPERATOR_CASES[name]

    def leaf(shape, dtype=FLOAT):
        return torch.randn(shape).to(dtype).requires_grad_()

    a, b = leaf(case.get("a", (5, 4))), leaf(case.get("b", (4, 3)))
    c = leaf(case["c"], case.get("c_dtype", FLOAT)) if "c" in case else None
    arguments = (a, b, c, 0.5, 2.0, case.get("summed", []), "auto")
    opcheck(torch.ops.tilewise.matmul.default, arguments, traced=name not in ("plain", "batch", "row"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()

    def function(a, b, c):
        return matmul(a, b, c=c, alpha=0.5).relu().sum(-1)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 7):
        leaves = [torch.randn(s, requires_grad=True) for s in ((2, rows, 4), (4, 3), (3,))]
        ours, theirs = compiled(*leaves), function(*leaves)
        torch.testing.assert_close(ours, theirs)
        pairs = zip(*(torch.autograd.grad(y.sum(), leaves) for y in (ours, theirs)), strict=True)
        for x, y in pairs:
            torch.testing.assert_close(x, y)
    torch._dynamo.reset()


def test_an_eager_call_is_the_operator():
    leaves = [torch.randn(s, requires_grad=True) for s in ((2, 5, 4), (4, 3), (3,))]
    results = [
        matmul(*leaves[:2], c=leaves[2], alpha=0.5),
        torch.ops.tilewise.matmul(*leaves, 0.5, 1.0, [], "auto"),
    ]
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in results]
    for x, y in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_autocast_rounds_nothing():
    a, b, c = (torch.randn(s, requires_grad=True) for s in ((3, 4), (2, 4, 5), (5,)))

    def results():
        y = matmul(a, b, c=c)
        return y, *torch.autograd.grad(y.square().sum(), (a, b, c))

    plain = results()
    with torch.autocast("cpu", dtype=BRAIN):
        for x, y in zip(results(), plain, strict=True):
            assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own use
def test_transforms():
    """vmap gets a loop; a tangent is an error, where the dispatcher would lose it."""
    a, b = torch.randn(6, 3, 4), torch.randn(6, 4, 5)
    torch.testing.assert_close(torch.vmap(matmul)(a, b), a @ b)
    for function in (lambda x: matmul(x, b), torch.vmap(lambda x: matmul(b[0].mT, b[0], c=x[:1] @ b[0]))):
        with pytest.raises(NotImplementedError, match=r"^tilewise\.matmul has no forward-mode derivative"):
            torch.func.jvp(function, (a,), (a,))
    _, tangent = torch.func.jvp(lambda x: x * matmul(a, b).sum(), (a,), (a,))  # what it does not follow may pass
    torch.testing.assert_close(tangent, a * (a @ b).sum())


def test_fake_and_meta_tensors_give_shapes():
    a, b = torch.randn(2, 1, 5, 4), torch.randn(3, 4, 6)
    with FakeTensorMode() as mode:
        assert matmul(mode.from_tensor(a), mode.from_tensor(b)).shape == (2, 3, 5, 6)
    meta = matmul(a.to("meta").requires_grad_(), b.to("meta"))
    assert meta.is_meta
    assert meta.shape == (2, 3, 5, 6)


def test_requires_grad_follows_the_inputs():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    assert matmul(a, b).requires_grad
    assert not matmul(b.mT, a.mT.detach()).requires_grad
    with torch.no_grad():
        assert not matmul(a, b).requires_grad


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": [[1.0]]}, TypeError, r"^a: expected a torch\.Tensor, got list$"),
        ({"c": 1.0}, TypeError, r"^c: expected a torch\.Tensor, got float$"),
        ({"a": torch.ones(4)}, ValueError, r"^a: expected at least 2 dimensions, got shape \(4,\)$"),
        ({"a": torch.ones(3, 4, dtype=torch.int32)}, TypeError, r"^a: dtype must be float16, .*, got torch\.int32$"),
        ({"b": torch.ones(4, 5, dtype=BRAIN)}, TypeError, r"^b: dtype must equal a's, got torch\.bfloat16 with a"),
        ({"b": torch.ones(5, 5)}, ValueError, r"^b: must have as many rows as a has columns, 4, got 5"),
        ({"b": torch.ones(4, 5, device="meta")}, ValueError, r"^b: must be on a's device cpu, got meta$"),
        ({"a": torch.ones(2, 3, 4), "b": torch.ones(3, 4, 5)}, ValueError, r"^b: batch dimensions \(3,\) do not"),
        ({"c": torch.ones(3, 5, dtype=torch.bool)}, TypeError, r"^c: dtype must be float16, .*, got torch\.bool$"),
        ({"c": torch.ones(3, 5, device="meta")}, ValueError, r"^c: must be on a's device cpu, got meta$"),
        ({"c": torch.ones(3)}, ValueError, r"^c: shape \(3,\) does not broadcast to the product's \(3, 5\)$"),
        ({"c": torch.ones(2, 3, 5)}, ValueError, r"^c: shape \(2, 3, 5\) does not broadcast"),
        ({"alpha": "1"}, TypeError, r"^alpha: expected a float, got str$"),
        ({"beta": True}, TypeError, r"^beta: expected a float, got bool$"),
        ({"alpha": math.inf}, ValueError, r"^alpha: must be finite in float32, got inf$"),
        ({"alpha": 10**400}, ValueError, r"^alpha: must be finite in float32, got 10+$"),
        ({"beta": -1e300}, ValueError, r"^beta: must be finite in float32, got -1e\+300$"),
        ({"backend": "cuda"}, ValueError, r"^backend: must be one of hopper, triton, cpu, auto or None, got 'cuda'$"),
        ({"backend": "hopper"}, ValueError, r"^backend: 'hopper' cannot run this call: "),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    arguments = {"a": torch.ones(3, 4), "b": torch.ones(4, 5)} | arguments
    with pytest.raises(error, match=message):
        matmul(arguments.pop("a"), arguments.pop("b"), **arguments)


# --- what the plan chooses ---


@pytest.mark.parametrize(
    ("a", "b", "c", "backend", "expected"),
    [
        ((256, 128), (128, 64), None, "auto", "hopper"),
        ((256, 128), (128, 64), (64,), "auto", "hopper"),
        ((2, 256, 128), (2, 128, 64), None, "auto", "hopper"),
        ((2, 256, 128), (2, 128, 64), None, "hopper", "hopper"),
        ((256, 128), (128, 63), None, "auto", "triton"),
        ((256, 128), (128, 63), None, "hopper or auto", "triton"),
        ((256, 127), (127, 64), None, "hopper or auto", "triton"),
        ((256, 128), (128, 64), None, "triton or auto", "triton"),
        ((256, 127), (127, 64), None, "hopper", r"TMA, which cannot describe a:"),
    ],
)
def test_choices_on_hopper(a, b, c, backend, expected):
    a, b, c = (None if shape is None else torch.empty(shape, dtype=BRAIN) for shape in (a, b, c))
    product = replace(problem.describe(a, b, c, ()), device="cuda", capability=(9, 0))
    if expected in problem.BACKENDS:
        assert choose(product, backend).backend == expected
        assert choose(replace(product, capability=(8, 0)), "auto").backend == "triton"
    else:
        with pytest.raises(ValueError, match=expected):
            choose(product, backend)


@pytest.mark.parametrize(("field", "value"), [("stages", 1), ("store_buffers", 3), ("store_cols", 256)])
def test_configurations_that_would_hang_or_race(field, value):
    name = "store_buffers" if field == "store_cols" else field
    with pytest.raises(ValueError, match=rf"^{name}: must"):
        HopperConfig(**{field: value})


# --- how batch axes become at most two ---


@pytest.mark.parametrize(
    ("a", "b", "summed", "expected"),
    [
        (torch.empty(2, 3, 5, 4), torch.empty(4, 6), (), (30, 6, 4, (1, 1), (1, 1))),  # a batch of rows is rows
        (torch.empty(2, 3, 5, 4), torch.empty(2, 3, 4, 6), (), (5, 6, 4, (1, 6), (1, 1))),
        (torch.empty(2, 5, 3, 4).transpose(1, 2), torch.empty(2, 3, 4, 6), (), (5, 6, 4, (2, 3), (1, 1))),
        (torch.empty(2, 3, 5, 4), torch.empty(3, 4, 6), (), (5, 6, 4, (2, 3), (1, 1))),
        (torch.empty(2, 3, 1, 4), torch.empty(3, 4, 6), (), (1, 6, 4, (2, 3), (1, 1))),  # a row for each b
        (torch.empty(2, 3, 5, 4).mT, torch.empty(2, 3, 5, 6), (-3, -4), (4, 6, 30, (1, 1), (1, 1))),
        (torch.empty(2, 3, 4, 5), torch.empty(2, 3, 5, 6), (-3, -4), (4, 6, 5, (1, 1), (1, 6))),
        (torch.empty(2, 3, 4, 5), torch.empty(2, 3, 5, 6), (-3,), (4, 6, 5, (2, 1), (1, 3))),
        (torch.empty(2, 3, 4, 5), torch.empty(2, 3, 5, 6), (-4,), (4, 6, 5, (3, 1), (1, 2))),
        (torch.empty(2, 1, 2, 4, 5), torch.empty(3, 2, 5, 6), (), None),
    ],
)  # fmt: skip
def test_merged_axes(a, b, summed, expected):
    product = problem.describe(a, b, None, summed)
    if expected is None:
        assert product is None
    else:
        assert (product.rows, product.cols, product.inner, product.kept, product.summed) == expected
        assert product.flops == 2 * math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * math.prod(
            (a.shape[-2], a.shape[-1], b.shape[-1])
        )


def test_layouts_are_what_they_say():
    x = torch.randn(2, 3, 4)
    for layout in LAYOUTS[:-1]:
        assert torch.equal(lay_out(x, layout), x)


# --- explain ---


def test_explain():
    meta = {"device": "meta", "dtype": BRAIN}
    a, b = torch.empty(8192, 512, **meta), torch.empty(512, 8192, **meta)
    found = explain(a, b, c=torch.empty(8192, 8192, **meta), device="sm_90")
    assert found.choice.backend == "hopper"
    assert found.flops == 2 * 8192 * 8192 * 512
    assert found.bytes == 2 * (2 * 8192 * 512 + 2 * 8192 * 8192)
    assert "tiles of 128 x 256, steps of 64, 3 stages" in str(found)
    assert str(found).endswith("68.7 GFLOP, 285 MB, 241 FLOP/byte")
    batch = explain(a.expand(3, -1, -1), b.mT.contiguous().mT.expand(3, -1, -1), device="sm_80")
    assert "not hopper: needs compute capability 9.0, this GPU has 8.0" in str(batch)
    assert explain(a, b, device="cpu").choice.backend == "cpu"
    assert explain(a, b, c=a[:, :1], alpha=0.5, device="sm_90").tiles.endswith("C last")
    for arguments, message in (
        ((a[:0], b), "no product"), ((torch.empty(2, 1, 2, 4, 5), torch.empty(3, 2, 5, 6)), "two batch axes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            explain(*arguments)
    with pytest.raises(ValueError, match=r"^device: must be"):
        explain(a, b, device="gpu")


def test_a_call_like_an_earlier_one_is_not_checked_again(monkeypatch):
    """And one that is not quite like it is."""
    a, b, c = torch.randn(4, 5), torch.randn(5, 6), torch.randn(4, 6)
    filled = lambda a, b, c, y: y.fill_(7.0)  # noqa: E731
    empty_cache(monkeypatch)
    monkeypatch.setattr(running, "_prepare", lambda a, b, *rest: ((a.shape[0], b.shape[1]), filled))
    matmul(a, b, c=c, backend="triton")
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.ops.gemm.api.check_arguments", None)
        assert (matmul(a + 1, b, c=c, backend="triton") == 7.0).all()
        for x in (a, b, c):
            x.requires_grad_()
        assert matmul(a, b, c=c, backend="triton").requires_grad
    for arguments, error, message in (
        ({"alpha": True}, TypeError, "alpha: "), ({"backend": "triton or auto"}, ValueError, "backend: "),
        ({"beta": 0.0, "c": c.detach()[:, :2]}, ValueError, "c: "), ({"b": b.detach()[:3]}, ValueError, "b: "),
        ({"a": None}, TypeError, "a: "), ({"c": c.detach().long()}, TypeError, "c: "),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            matmul(**{"a": a, "b": b, "c": c, "backend": "triton", **arguments})


@pytest.mark.parametrize("which", range(3))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_dense_tensor_is_refused_by_name(which):
    """A CausalBias, whose memory nobody wrote, and a nested tensor, which has no shape; also after an ordinary call."""
    ordinary = [torch.ones(2, 3, 3) for _ in range(3)]
    matmul(*ordinary[:2], c=ordinary[2])
    nested = torch.nested.nested_tensor([torch.ones(3, 3)] * 2)
    for bad, message in (
        (causal_upper_left(3, 3), "expected a plain torch.Tensor, got CausalBias"),
        (nested, "expected a dense tensor .* got a nested tensor"),
        (torch.ones(3, 3).to_sparse(), "expected a dense tensor .* got layout torch.sparse_coo"),
    ):
        a, b, c = [*ordinary[:which], bad, *ordinary[which + 1 :]]
        with pytest.raises(TypeError, match=f"^{'abc'[which]}: {message}"):
            matmul(a, b, c=c)


def test_auto_is_the_default():
    a = torch.randn(3, 3)
    assert torch.equal(matmul(a, a, backend="auto"), matmul(a, a))
