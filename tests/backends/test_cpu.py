"""The CPU backend: its tiles and PyTorch's fused kernel by the error rule, what it allocates, and its parts."""

import itertools
import math

import pytest
import torch
from helpers import LAYOUTS, Case, check, hold, reference, run, tensors, visible
from pairwise import pairwise
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import attention
from tilewise.backends import Inputs, Needs, Outputs, cpu
from tilewise.backends.cpu import fused, parts, tiled
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

LENGTHS = (1, 3, 127, 128, 129, 239, 799)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FULL, SMALL = {"B": 2, "H": 4, "Hkv": 2, "M": 37, "N": 53, "D": 16}, {"B": 2, "H": 2, "M": 37, "N": 53, "D": 8}


def case(**fields):
    """A case in float32, in which tests/helpers.py makes no other exception."""
    return Case(**{"dtype": torch.float32, **fields})


def tiles_only(monkeypatch):
    for name in ("declines", "declines_backward"):
        monkeypatch.setattr(fused, name, lambda problem: "the test wants tiles")


ROUTES = ("as chosen", "tiles", "small tiles")


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    """PyTorch's kernel where it serves, tiles for everything, and tiles so small that short rows need many."""
    if request.param != "as chosen":
        tiles_only(monkeypatch)
    if request.param == "small tiles":
        small_tiles(monkeypatch)
    return request.param


def each_pair(names, *options):
    """Cases in which each pair of values of two options occurs; the first option is the route."""
    return pytest.mark.parametrize(names, pairwise(ROUTES, *options), indirect=["route"], ids=str)


def small_tiles(monkeypatch):
    for name, size in (("BLOCK_M", 16), ("MAX_BLOCK_M", 16), ("BLOCK_N", 24)):
        monkeypatch.setattr(tiled, name, size)


# --- by the error rule ---


@pytest.mark.parametrize(("M", "N"), list(itertools.product(LENGTHS, LENGTHS)))
def test_lengths(M, N):
    """Each length against each, with the terms and the dtype taking turns."""
    turn = LENGTHS.index(M) * 3 + LENGTHS.index(N)
    terms = [{}, {"causal": True}, {"window": (100, 30)}, {"mask": "b1mn"}, {"softcap": 2.0}][turn % 5]
    bias = [None, "bhmn", "1hmn", "b11n"][turn % 4]
    check(case(B=1, M=M, N=N, dtype=FLOATS[turn % 3], bias=bias, **terms), "cpu")
    check(case(B=1, M=M, N=N, D=8, bias=bias, **terms), "cpu")


@each_pair(
    "route, dtype, bias, terms",
    FLOATS,
    [None, "bhmn", "1hmn"],
    [
        {}, {"causal": True}, {"causal": True, "M": 53}, {"window": (9, 3)}, {"window": (None, 4), "mask": "11mn"},
        {"softcap": 1.5}, {"mask": "b11n"}, {"mask": "bhmn", "causal": True}, {"scale": 0.3}, {"Dv": 5},
    ],
)  # fmt: skip
def test_terms(route, dtype, bias, terms):
    check(case(**{**SMALL, **terms}, dtype=dtype, bias=bias), "cpu")


# Of 24, such that each combination of three axes is there.
BROADCASTS = [
    "".join(("b1"[(h + m + n) % 2], "hk1"[h], "m1"[m], "n1"[n]))
    for h, m, n in itertools.product(*map(range, (3, 2, 2)))
]


@each_pair("route, bias, dtype", BROADCASTS, [torch.float32, torch.bfloat16])
def test_gradient_of_every_bias(route, bias, dtype):
    check(case(**FULL, bias=bias, dtype=dtype), "cpu")


@pytest.mark.parametrize("mask", BROADCASTS)
def test_every_mask(route, mask):
    check(case(**FULL, mask=mask, bias="1hmn" if "m" in mask else None), "cpu")


@each_pair(
    "route, Hkv, terms",
    (6, 3, 2, 1),
    [{}, {"bias": "bhmn", "causal": True}, {"bias": "1k1n", "mask": "bkmn"}],
)
def test_groups(route, Hkv, terms):
    check(case(B=2, H=6, Hkv=Hkv, M=41, N=70, D=8, **terms), "cpu")


def test_groups_in_ordinary_tiles():
    """Several tiles of the ordinary size along each axis, ragged at each end."""
    M, N = tiled.MAX_BLOCK_M // 2 + 13, tiled.BLOCK_N + 7
    check(case(B=1, H=2, Hkv=1, M=M, N=N, D=16, bias="1hmn", causal=True), "cpu")
    check(case(B=1, H=2, Hkv=1, M=M, N=N, D=16, bias="1hmn", dtype=torch.bfloat16, window=(300, 20)), "cpu")


@each_pair("route, layout, terms", LAYOUTS, [{}, {"bias": "bhmn"}, {"mask": "bhmn", "causal": True}, {"bias": "b1mn"}])
def test_layouts(route, layout, terms):
    check(case(**SMALL, **terms, layout=layout), "cpu")


@pytest.mark.parametrize("bias", [None, "11mn"])
def test_rows_that_are_not_contiguous(route, bias):
    """Head dimensions that are not the last in memory, rows that overlap: the fused kernel would read past them."""
    c = case(B=2, H=2, M=9, N=11, D=8, bias=bias, lse=False, grads="qkv")
    t = tensors(c)
    for axes in ((2, 3), (1, 3)):
        q, k, v, do = (x.transpose(*axes).contiguous().transpose(*axes) for x in (t.q, t.k, t.v, t.do))
        hold(c, run(c, "cpu", inputs=t._replace(q=q, k=k, v=v, do=do)))
    for part in ((..., slice(1)), (slice(None), slice(None), slice(1))):
        k, v = (x[part].expand_as(x) for x in (t.k, t.v))
        repeated = run(c, "cpu", inputs=t._replace(k=k, v=v))
        plain = run(c, "cpu", inputs=t._replace(k=k.contiguous(), v=v.contiguous()))
        torch.testing.assert_close(repeated, plain)


@each_pair("route, layout, bias", LAYOUTS, [None, "1hmn"])
def test_results_lie_as_the_operators_say(route, layout, bias):
    """O as q, LSE contiguous, gradients as torch.empty_like: torch.compile was told so."""
    c = case(**SMALL, bias=bias, layout=layout, lse=False, grads="qkv")
    t = tensors(c)
    results = run(c, "cpu")
    heads_last = t.q.stride(1) < t.q.stride(2)
    assert (results.o.transpose(1, 2) if heads_last else results.o).is_contiguous()
    assert results.lse.is_contiguous()
    for gradient, x in zip(results[2:5], t, strict=False):
        assert gradient.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("bias", ["1hmn", "b11n"])
def test_bias_dtypes(route, dtype, bias_dtype, bias):
    check(case(**SMALL, dtype=dtype, bias=bias, bias_dtype=bias_dtype), "cpu")


@pytest.mark.parametrize("grads", ["q", "k", "v", "b", "kb", "qv"])
def test_gradients_on_demand(route, grads):
    check(case(**SMALL, bias="bhmn", softcap=3.0, lse="v" not in grads, grads=grads), "cpu")
    check(case(**SMALL, bias="1hmn", lse=False, grads=grads), "cpu")


@pytest.mark.parametrize("terms", [{}, {"bias": "bhmn"}, {"causal": True, "M": 53}, {"mask": "b11n"}], ids=str)
def test_without_an_lse_gradient(route, terms):
    """Then PyTorch's fused backward may serve."""
    check(case(**{**SMALL, **terms}, lse=False, grads="qkv"), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_summed_in_float32(dtype):
    """Many queries on few keys, so that dK and dV are long sums: summed in 16 bits they break the rule."""
    check(case(B=1, H=2, M=4096, N=16, D=16, dtype=dtype, lse=False), "cpu")


@pytest.mark.parametrize("terms", [{}, {"bias": "1hmn", "causal": True}, {"mask": "b11n", "softcap": 2.0}], ids=str)
def test_float64(route, terms):
    """To float64's precision, from the backend that the other dtypes are measured with."""
    c = case(**FULL, **terms)
    inputs = type(tensors(c))(*(x.double() if x is not None and x.is_floating_point() else x for x in tensors(c)))
    torch.testing.assert_close(run(c, "cpu", inputs=inputs), reference(c, inputs), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", ["1hmn", "b11n"])
def test_float64_with_a_bias_of_fewer_bits(route, bias, bias_dtype):
    """PyTorch's kernel takes a float32 mask for float64 inputs, and reads it as float64."""
    t = tensors(case(**SMALL, bias=bias, bias_dtype=bias_dtype))
    q, k, v = t.q.double(), t.k.double(), t.v.double()
    got = attention(q, k, v, bias=t.bias, backend="cpu")
    expected = attention(q, k, v, bias=t.bias.double(), backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@each_pair(
    "route, terms, bias",
    [{}, {"causal": True}, {"window": (2, 1)}, {"softcap": 0.7}, {"mask": (1, 2, 3, 4)}],
    [(2, 2, 3, 4), (2, 1, 3, 1), (1, 1, 1, 4)],
)
def test_gradcheck(route, terms, bias):
    torch.manual_seed(3)
    shapes = ((2, 2, 3, 3), (2, 1, 4, 3), (2, 1, 4, 2), bias)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    if "mask" in terms:
        terms = {"mask": torch.rand(terms["mask"]) < 0.6}

    def outputs(q, k, v, bias):
        o, lse = attention(q, k, v, bias=bias, return_lse=True, backend="cpu", **terms)
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(outputs, inputs)


# --- what is hidden ---

HIDDEN = [
    {"mask": "b11n"},
    {"mask": "bhmn"},
    {"mask": "1hmn", "bias": "1hmn"},
    {"bias": "bhmn"},
    {"bias": "b11n"},
    {"M": 80, "window": (5, 5), "N": 120, "causal": True},
]


@each_pair("route, planted, terms", [math.nan, math.inf, -math.inf], HIDDEN)
def test_hidden_keys_may_hold_anything(route, terms, planted):
    """Keys that nobody sees; the results are those of the same call with ordinary numbers there."""
    check(case(**{**SMALL, **terms}, planted=planted), "cpu")
    check(case(**{**SMALL, **terms}, planted=planted, lse=False, grads="qkv"), "cpu")
    if "bias" in terms:
        check(case(**{**SMALL, **terms}, planted=planted, softcap=2.0), "cpu")


@each_pair(
    "route, spoiled, terms",
    [("k", math.nan), ("v", math.nan), ("v", math.inf), ("v", -math.inf)],
    [{"causal": True, "M": 53}, {"mask": "b1mn"}, {"bias": "bhmn", "bias_hides": True}],
)
def test_a_bad_key_shows_where_it_is_seen_and_only_there(route, spoiled, terms):
    which, value = spoiled
    c = case(**{**SMALL, **terms})
    t = tensors(c)
    clean = run(c, "cpu")
    x = getattr(t, which).clone()
    x[:, :, 20] = value
    seen = visible(c, t)[..., 20]
    assert seen.any()
    assert not seen.all()
    got = run(c, "cpu", inputs=t._replace(**{which: x}))
    assert (~got.o[seen].isfinite()).any(-1).all()
    assert (~got.dq[seen].isfinite()).any(-1).all()
    for result, expected in ((got.o, clean.o), (got.lse, clean.lse), (got.dq, clean.dq), (got.dbias, clean.dbias)):
        if result is not None:
            torch.testing.assert_close(result[~seen], expected[~seen])
    # A key shares no query with the bad one, so nothing may reach it.
    apart = ~(visible(c, t) & seen[..., None]).any(2)
    for result, expected in ((got.dk, clean.dk), (got.dv, clean.dv)):
        torch.testing.assert_close(result[apart], expected[apart])


@each_pair(
    "route, dtype, terms",
    FLOATS,
    [{"mask": "b1mn"}, {"mask": "bhmn", "bias": "1hmn"}, {"bias": "b1mn"}, {"bias": "bhmn", "causal": True, "M": 53},
     {"M": 70, "N": 30, "causal": True}, {"M": 200, "N": 7, "causal": True, "bias": "1h11"}],
)  # fmt: skip
def test_rows_that_see_nothing(route, dtype, terms):
    check(case(**{**SMALL, **terms}, dtype=dtype, blind=True), "cpu")
    check(case(**{**SMALL, **terms}, dtype=dtype, blind=True, lse=False, grads="qkv"), "cpu")


def test_rows_made_blind_by_the_bias_and_the_band_together(route):
    """What the bias leaves to a query, the band hides."""
    for dtype in (torch.float32, torch.bfloat16):
        c = case(**{**SMALL, "M": 53}, bias="bhmn", causal=True, dtype=dtype, lse=False, grads="qkv")
        t = tensors(c)
        t.bias[:, 0, 7, :8] = t.bias[:, 1, 30, :31] = -math.inf
        seen = visible(c, t)
        assert (~seen.any(-1)).sum() == 4
        got = run(c, "cpu", inputs=t)
        exact = reference(c, t)
        assert torch.equal(got.lse == -math.inf, ~seen.any(-1))
        assert torch.equal(exact.lse == -math.inf, ~seen.any(-1))
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(got.o.double(), exact.o, **tolerance)
        torch.testing.assert_close(got.dk.double(), exact.dk, **tolerance)


def test_a_row_with_lse_zero_is_not_blind(route):
    """PyTorch's kernel gives LSE = 0 and O = 0 to rows that see nothing; others may have both by right."""
    q, k, v = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)
    bias = torch.tensor([0.0, -math.inf, 0.0, 1.0]).view(1, 1, 4, 1)
    o, lse = attention(q, k, v, bias=bias, return_lse=True, backend="cpu")
    assert torch.equal(o, torch.zeros(1, 1, 4, 8))
    assert lse.flatten().tolist() == [0.0, -math.inf, 0.0, 1.0]


@pytest.mark.parametrize("terms", [{"bias": "bhmn"}, {"bias": "1h1n", "mask": "b1mn"}, {"bias": "b1mn"}], ids=str)
def test_a_bias_may_hide(route, terms):
    check(case(**SMALL, **terms, bias_hides=True), "cpu")
    check(case(**SMALL, **terms, bias_hides=True, softcap=1.0), "cpu")


def test_nothing_reaches_a_row_that_sees_nothing(route):
    """Not even an infinite gradient of its LSE, which a loss on -inf may well give."""
    c = case(**SMALL, mask="bhmn", blind=True)
    t = tensors(c)
    blind = ~visible(c, t).any(-1)
    hold(c, run(c, "cpu", inputs=t._replace(dlse=t.dlse.masked_fill(blind, math.inf))))


# --- what it is made of ---


def problem(bias=None, mask=None, bias_grad=False, **fields):
    t = tensors(case(bias=bias, mask=mask, **fields))
    band = Band.aligned(fields.get("causal", False), fields.get("window"), t.k.shape[2] - t.q.shape[2])
    score = Score(0.25, fields.get("softcap"), band)
    inputs = Inputs(t.q, t.k, t.v, t.bias, t.mask, t.sink)
    return Problem.of(*inputs, score, bias_grad=bias_grad), inputs, t


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [
        ({}, True, True),
        ({"M": 9, "N": 9, "causal": True}, True, True),
        ({"M": 1, "causal": True}, True, True),  # one query: the band hides nothing
        ({"mask": "b11n"}, True, True),
        ({"bias": "bhmn"}, True, True),
        ({"bias": "bhmn", "dtype": torch.bfloat16, "bias_dtype": torch.float32}, True, "16-bit"),
        ({"bias": "b11n", "bias_dtype": torch.float16}, True, True),
        ({"bias": "bhmn", "bias_grad": True}, True, "bias gradient"),
        ({"dtype": torch.bfloat16}, True, "16-bit"),
        ({"bias": "bhmn", "bias_dtype": torch.float16}, "float16 bias", "float16 bias"),
        ({"bias": "bhmn", "mask": "b11n"}, "not both", "not both"),
        ({"mask": "b1mn"}, "M x N", "M x N"),
        ({"causal": True}, "one window", "one window"),
        ({"window": (3, 3)}, "one window", "one window"),
        ({"softcap": 2.0}, "softcap", "softcap"),
        ({"Dv": 4}, "as wide", "as wide"),
        ({"H": 4, "bias": "bkmn"}, "group", "group"),
    ],
    ids=str,
)
def test_the_choice_is_made_and_told(monkeypatch, fields, forward, backward):
    fields = {"B": 2, "H": 2, "Hkv": 2, "M": 9, "N": 11, "D": 8, **fields}
    p, inputs, t = problem(**fields)
    words = cpu.tiles(p)
    if forward is True and backward is True:
        assert words == "PyTorch's fused kernel"
    elif forward is True:
        assert words.startswith("forward: PyTorch's fused kernel; backward: tiles of 9 queries x 11 keys")
        assert backward in words
    else:
        assert words.startswith("tiles of 9 queries x 11 keys, 4 heads" if fields["H"] == 2 else "tiles of 9 queries")
        assert forward in words

    def forbidden(*arguments):
        raise AssertionError("not the kernel that was told")

    for chosen, name in ((forward, "forward"), (backward, "backward")):
        monkeypatch.setattr(tiled if chosen is True else fused, name, forbidden)
    outputs = cpu.forward(p, inputs)
    needs = Needs(True, False, True, p.bias_grad)
    found = cpu.backward(p, inputs, outputs, Outputs(t.do, None), needs)
    assert [x is not None for x in found] == list(needs)


def test_groups_are_kept_from_an_older_kernel(monkeypatch):
    """It may take as many key heads for granted as there are query heads, and read past them."""
    p, _, _ = problem(H=4, Hkv=2)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert fused.declines(p) is None
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    assert "groups" in fused.declines(p)
    assert fused.declines(problem()[0]) is None


@pytest.mark.parametrize(
    ("layout", "kernel"),
    [("contiguous", True), ("sliced", True), ("expanded", True), ("heads_last", False), ("a column", True)],
)
def test_a_bias_that_would_be_copied_goes_to_the_tiles(monkeypatch, layout, kernel):
    """PyTorch's kernel copies a bias whose last dimension is strided; one that repeats is handed over as a row."""
    column = layout == "a column"
    p, inputs, _ = problem(**SMALL, bias="bhmn", layout="contiguous" if column else layout)
    if column:
        inputs = inputs._replace(bias=inputs.bias[..., :1].expand_as(inputs.bias))
    calls = []
    forward = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda *x: calls.append("tiles") or forward(*x))
    outputs = cpu.forward(p, inputs)
    assert calls == ([] if kernel else ["tiles"])
    torch.testing.assert_close(outputs, forward(p, inputs))


def test_device():
    p, _, _ = problem()
    assert cpu.declines(p) is None
    moved = Problem(**{**{name: getattr(p, name) for name in p.__dataclass_fields__}, "device": "cuda"})
    assert "cuda" in cpu.declines(moved)


class Allocations(TorchDispatchMode):
    """The memory of each tensor that an operator returns, in bytes; that of ``known`` tensors does not count."""

    def __init__(self, known):
        super().__init__()
        parts.keep_freed_tiles()  # once a process, and never touched
        self.largest = 0
        self.sizes = set()
        self.known = {x.untyped_storage().data_ptr() for x in known if x is not None}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.sizes.add(x.untyped_storage().nbytes())
                self.largest = max(self.sizes)
        return results


@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": True}, {"mask": "b11n"}, {"window": (64, 64)}, {"softcap": 2.0}, {"Hkv": 1},
     {"dtype": torch.bfloat16}, {"bias": "111n"}, {"bias": "b1m1", "causal": True}, {"layout": "heads_last"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("tiled_only", [False, True])
def test_no_buffer_grows_with_the_square_of_the_length(monkeypatch, tiled_only, fields):
    """A tile's size at most, in 8 bytes a score: a band's distances are int64. S² bytes would be twice as much."""
    if tiled_only:
        tiles_only(monkeypatch)
    monkeypatch.setattr(tiled, "BLOCK_M", 256)
    monkeypatch.setattr(tiled, "BLOCK_N", 256)
    S = 1024
    p, inputs, t = problem(B=1, H=2, M=S, N=S, D=8, **fields)
    with Allocations(t) as seen:
        outputs = cpu.forward(p, inputs)
        for dlse, bias_grad in ((None, False), (t.dlse, inputs.bias is not None)):
            p, _, _ = problem(B=1, H=2, M=S, N=S, D=8, bias_grad=bias_grad, **fields)
            cpu.backward(p, inputs, outputs, Outputs(t.do, dlse), Needs(True, True, True, bias_grad))
    assert seen.largest <= 8 * 256 * 256


def test_a_full_bias_is_read_and_its_gradient_written_in_place():
    """One buffer of M x N, dBias itself; for a bias with a strided last axis too, which PyTorch's kernel would copy."""
    S = 1500
    for layout in ("contiguous", "heads_last"):
        p, inputs, t = problem(
            B=1, H=2, M=S, N=S, D=8, bias="1hmn", dtype=torch.bfloat16, layout=layout, bias_grad=True
        )
        with Allocations(t) as forward:
            outputs = cpu.forward(p, inputs)
        with Allocations(t) as backward:
            cpu.backward(p, inputs, outputs, Outputs(t.do, None), Needs(True, True, True, True))
        assert forward.largest <= 4 * torch.get_num_threads() * tiled.BLOCK_M * tiled.BLOCK_N
        assert backward.largest == inputs.bias.numel() * 2


@pytest.mark.parametrize("bias", ["1hmn", "b1mn", "11mn"])
def test_a_shared_16_bit_bias_gradient_is_summed_a_block_of_rows_at_a_time(monkeypatch, bias):
    monkeypatch.setattr(tiled, "BLOCK_M", 64)
    monkeypatch.setattr(tiled, "BLOCK_N", 64)
    S = 512
    p, inputs, t = problem(B=3, H=2, M=S, N=S, D=8, bias=bias, dtype=torch.bfloat16, bias_grad=True)
    outputs = cpu.forward(p, inputs)
    dbias = inputs.bias.numel() * 2
    with Allocations(t) as backward:
        cpu.backward(p, inputs, outputs, Outputs(t.do, None), Needs(True, True, True, True))
    assert backward.largest == dbias
    assert max(backward.sizes - {dbias}) <= 4 * tiled.tiling(p).rows * S


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-1e9, -1e10, -1e30, None])
@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_at_a_very_negative_bias_is_a_mean(dtype, lowest, bias_grad, causal):
    """Some models hide by a large negative number, or the most negative: a row that has it everywhere is the mean of
    what it may see, in its gradients too, where the LSE alone no longer tells of how many."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 40, 32, dtype=dtype, requires_grad=True) for _ in range(3)]
    bias = torch.zeros(1, 2, 40, 40, dtype=dtype)
    bias[:, :, 5] = torch.finfo(dtype).min if lowest is None else lowest
    if bias_grad:
        leaves.append(bias.requires_grad_())
    do = torch.randn(1, 2, 40, 32, dtype=dtype)
    o = attention(*leaves[:3], bias=bias, causal=causal, backend="cpu")
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1) if causal else torch.zeros(40, 40, dtype=torch.bool)
    wide = torch.promote_types(dtype, torch.float32)
    scores = leaves[0].to(wide) @ leaves[1].to(wide).mT / 32**0.5 + bias.to(wide)
    expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ leaves[2].to(wide)
    for x, y in zip(
        (o, *torch.autograd.grad(o, leaves, do)),
        (expected, *torch.autograd.grad(expected, leaves, do.to(wide))),
        strict=True,
    ):
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(x.to(wide), y.to(wide), rtol=tolerance, atol=tolerance)


def test_results_repeat_bit_by_bit(route):
    c = case(**FULL, bias="1hmn", mask="b1mn", sink="h")
    for x, y in zip(run(c, "cpu"), run(c, "cpu"), strict=True):
        assert torch.equal(x, y)


def test_a_tile_is_of_one_thread_and_each_has_one():
    """Tiles are of the size that a core's own cache holds, or four times that if of several heads, and a call with few
    heads has one for each thread."""
    c = case(B=1, H=1, M=700, N=600, D=8, bias="1hmn", causal=True)
    p, _, _ = problem(B=1, H=1, M=4000, N=4000, D=8)
    short, _, _ = problem(B=1, H=1, M=400, N=4000, D=8)
    some, _, _ = problem(B=64, H=3, M=49, N=49, D=8)
    many, _, _ = problem(B=640, H=3, M=49, N=49, D=8)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            assert tiled.tiling(p) == (1, 512, 512)
            assert tiled.tiling(short) == (1, 400 // n, 512)
            assert tiled.tiling(some) == (192 // n, 49, 49)
            assert tiled.tiling(many) == (436, 49, 49)
            check(c, "cpu")
    finally:
        torch.set_num_threads(threads)


def test_short_sequences_share_tiles():
    p, _, _ = problem(B=6, H=4, Hkv=2, M=10, N=20, D=8)
    assert tiled.tiling(p) == (12, 10, 20)
    long, _, _ = problem(B=6, H=4, Hkv=2, M=300, N=600, D=8)
    assert tiled.tiling(long).heads == 1


def test_autocast_leaves_the_tiles_in_float32(route):
    """q, k and v are cast on the way in, so that they are bfloat16 here already; the tiles are made of them."""
    c = case(**FULL, bias="bhmn", mask="b1mn", sink="bhm", dtype=torch.bfloat16)
    plain = run(c, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(c, "cpu")
    for x, y in zip(plain[:-1], cast[:-1], strict=True):  # without a sink's gradient
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 5, 7, 3), (3, 5, 7, 3), (1, 256, 64, 256), (1, 300, 77, 211)])
def test_product(shape, dtype):
    T, m, k, n = shape
    torch.manual_seed(0)
    a, b = torch.randn(T, m, k, dtype=dtype), torch.randn(T, n, k, dtype=dtype)
    exact = (a.double() @ b.mT.double()).to(dtype)
    for x, y in itertools.product((a, a.mT.contiguous().mT), (b.mT, b.mT.contiguous())):
        torch.testing.assert_close(parts.product(x, y), exact)
        for total in (torch.randn(T, m, n, dtype=dtype), torch.randn(T, m, 2 * n, dtype=dtype)[..., :n]):
            expected = total + exact
            assert parts.product(x, y, total) is total
            torch.testing.assert_close(total, expected)


@pytest.mark.skipif(not parts._prefers_onednn(), reason="products do not go through oneDNN here")
def test_large_float32_products_go_through_onednn(monkeypatch):
    called = []
    for name in ("bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, lambda *x, name=name, out=None: called.append(name) or x[-1])
    large, small = torch.ones(1, 256, 256), torch.ones(1, 8, 8)
    parts.product(large, large)
    parts.product(large, large, large.clone())
    assert not called
    parts.product(small, small)
    parts.product(small, small, small.clone())
    parts.product(large.double(), large.double())
    parts.product(large.expand(2, -1, -1), large.expand(2, -1, -1))
    assert called == ["bmm", "baddbmm", "bmm", "bmm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hide(dtype):
    s = torch.tensor([1.5, -0.0, math.nan, math.inf, -math.inf, -1e30, 0.0], dtype=dtype).repeat(2, 3, 1)
    visible = torch.rand(3, 7) < 0.5
    expected = torch.where(visible, s, -math.inf)
    got = s.clone()
    assert parts.hide(got, visible).data_ptr() == got.data_ptr()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_difference(dtype):
    s = torch.cat((torch.linspace(-90, 5, 200, dtype=dtype), torch.tensor([-math.inf], dtype=dtype))).repeat(3, 1)
    row = torch.tensor([[5.0], [7.5], [-math.inf]], dtype=dtype)
    s[2] = -math.inf
    expected = torch.exp(s.double() - torch.tensor([[5.0], [7.5], [0.0]])).to(dtype)
    got = parts.exp_difference(s, row)
    assert got.data_ptr() == s.data_ptr()
    # The scores are 90 here, so that a relative error of the exponent's last bit is 90 of the result's.
    torch.testing.assert_close(got, expected, rtol=200 * torch.finfo(dtype).eps, atol=0)
