"""Forward-mode and second derivatives of attention(): against PyTorch's own operators, in every combination."""

from __future__ import annotations

import math
from dataclasses import replace

import memory_helpers
import pytest
import torch
from derivative_helpers import WAYS, LargestTensor, gradient_of_gradient, no_lse, plain, tangents_like
from helpers import Case, Tensors, dropout_mask, opcheck, tensors
from pairwise import pairwise
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import TileMask, attention, explain
from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.protocol import Tangents
from tilewise.bias import RelativeBias, alibi, low_rank_bias, relative_logits, t5_bias
from tilewise.bias.canonical import dense
from tilewise.derivatives import packed, scores
from tilewise.frontend.arguments import read_call
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score, ScoreNumbers

DOUBLE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
BASE = Case(B=2, H=4, Hkv=2, M=9, N=11, D=4, Dv=3, dtype=DOUBLE)
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of queries, of keys and of the batch."""
    monkeypatch.setattr(scores, "BLOCK", 4)
    monkeypatch.setattr(scores, "SCORES", 64)


def check(way, ours, theirs, leaves, **tolerance):
    given = tangents_like(leaves)
    found, expected = (WAYS[way](f, leaves, given) for f in (ours, theirs))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, **tolerance)


def check_case(way, case, backend=None):
    """Derivatives by q, k, v, bias and sink. Planted values are in the call of tilewise only."""
    clean, given = tensors(case, planted=False), tensors(case)
    dropout_mask(case)  # cached, and no tensor of a transform
    names = [name for name in ("q", "k", "v", "bias", "sink") if getattr(given, name) is not None]
    hidden = {name: getattr(given, name) != getattr(clean, name) for name in names}

    def ours(*leaves):
        if case.planted is not None:
            pairs = zip(names, leaves, strict=True)
            leaves = [torch.where(hidden[name], getattr(given, name), x) for name, x in pairs]
        x = given._replace(**dict(zip(names, leaves, strict=True)))
        return no_lse(attention(x.q, x.k, x.v, bias=x.bias, mask=x.mask, sink=x.sink, return_lse=True, backend=backend,
                                **case.terms))  # fmt: skip

    def theirs(*leaves):
        return plain(case, clean._replace(**dict(zip(names, leaves, strict=True))))

    check(way, ours, theirs, [getattr(clean, name) for name in names])


CASES = [
    {},
    {"Hkv": 4, "M": 1},
    {"bias": "bhmn"},
    {"bias": "1kmn", "softcap": 1.5},
    {"bias": "b11n"},
    {"bias": "1hm1", "causal": True},
    {"bias": "1111", "mask": "b11n"},
    {"bias": "11mn", "bias_hides": True, "blind": True},
    {"mask": "bhmn", "blind": True, "sink": "h"},
    {"mask": "1kmn", "sink": "1hm", "sink_none": True},
    {"mask": "11m1"},
    {"causal": True, "M": 13, "N": 6, "blind": True},
    {"window": (3, 1), "sink": "bhm", "softcap": 0.7},
    {"dropout_p": 0.3, "bias": "1hmn"},
    {"dropout_p": 0.5, "causal": True, "sink": "h", "softcap": 2.0},
    {"mask": "b11n", "planted": math.nan, "softcap": 1.0},
    {"causal": True, "M": 5, "N": 11, "window": (2, 0), "planted": math.inf},
    {"layout": "heads_last", "bias": "bhmn", "mask": "bhmn", "sink": "bhm", "dropout_p": 0.2, "causal": True},
    {"layout": "sliced", "scale": 0.3},
]


def words(value):
    """For the name of a test: a case's changes, or whatever else."""
    return str(replace(BASE, **value)).partition("float64")[2] or "default" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("way", "changes", "backend"), pairwise(WAYS, CASES, [None, "reference"]), ids=words)
def test_derivatives(way, changes, backend):
    check_case(way, replace(BASE, **changes), backend)


# --- bias terms ---

BUCKETS = torch.tensor([3, 0, 0, 1, 2, 2, 4])
TERMS = {
    "t5": lambda x: t5_bias(x(8, 4), True, 10),
    "alibi, signed": lambda x: alibi(x(2, 4), "signed"),
    "query, hidden outside": lambda x: RelativeBias(x(2, 2, 9, 7), lo=-3, outside=-math.inf),
    "query, clamped": lambda x: RelativeBias(x(1, 1, 9, 5), lo=-2, outside="clamp", reverse=True),
    "query, buckets and starts": lambda x: RelativeBias(
        x(2, 4, 9, 5), lo=-3, buckets=BUCKETS, query_start=torch.tensor([4, 9])
    ),
    "query, hidden by the device's positions": lambda x: RelativeBias(
        x(2, 4, 9, 9), lo=-3, outside=-math.inf, query_start=torch.tensor([4, 9])
    ),
    "key": lambda x: RelativeBias(x(2, 2, 11, 7), lo=-3, on="key", outside="clamp"),
    "all": lambda x: RelativeBias(x(1, 4, 1, 7), lo=-3),
    "relative logits": lambda x: relative_logits(x(2, 4, 9, 3), x(3, 6), lo=0, reverse=True),
    "low rank": lambda x: low_rank_bias(x(2, 4, 9, 3), x(1, 2, 11, 3)),
    "cols and rows": lambda x: (x(2, 1, 1, 11), x(4, 9, 1)),
    "everything": lambda x: (
        x(1, 4, 9, 11), x(2, 1, 1, 11), x(4, 9, 1), RelativeBias(x(2, 2, 9, 5), lo=-2, outside="clamp"),
        RelativeBias(x(1, 1, 11, 20), lo=-9, on="key", outside=-math.inf), alibi(x(4)),
        RelativeBias(x(1, 4, 1, 7), lo=-3), t5_bias(x(8, 1), True, 10), low_rank_bias(x(1, 4, 9, 2), x(1, 1, 11, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("way", "name", "backend"), pairwise(WAYS, TERMS, [None, "reference"]), ids=str)
def test_bias_terms(way, name, backend):
    x, shapes = tensors(BASE), []
    TERMS[name](lambda *shape: shapes.append(shape) or torch.randn(shape, dtype=DOUBLE))
    leaves = [x.q, x.k, x.v, *tangents_like([torch.empty(shape, dtype=DOUBLE) for shape in shapes], seed=3)]

    def bias_of(leaves):
        rest = iter(leaves[3:])
        return TERMS[name](lambda *_: next(rest))

    def ours(*leaves):
        return no_lse(attention(*leaves[:3], bias=bias_of(leaves), return_lse=True, backend=backend))

    def theirs(*leaves):
        bias = bias_of(leaves)
        terms = bias if isinstance(bias, tuple) else (bias,)
        added = [dense(term, 2, 4, 9, 11, 2) for term in terms]
        return plain(BASE, x._replace(q=leaves[0], k=leaves[1], v=leaves[2]), added)

    check(way, ours, theirs, leaves)


# --- masks of tiles, leading dimensions, without keys ---


@each_way
def test_tile_masks(way):
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    case = replace(BASE, N=9)
    x = tensors(case)
    for mask in (
        TileMask.documents(documents, block=64),
        TileMask.from_mask_mod(lambda b, h, i, j: i >= j, 9, 9, block=64),
    ):
        whole = x._replace(mask=mask.dense())

        def ours(*qkv, mask=mask):
            return attention(*qkv, mask=mask, return_lse=True)

        check(way, ours, lambda *qkv, x=whole: plain(case, x._replace(q=qkv[0], k=qkv[1], v=qkv[2])), x[:3])


@each_way
def test_a_mask_that_repeats_along_leading_dimensions(way):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 2, 5, 4, dtype=DOUBLE) for _ in range(3))
    bias, mask = torch.randn(2, 1, 2, 5, 5, dtype=DOUBLE), torch.rand(1, 3, 1, 1, 5) < 0.6
    mask[..., 0] = True
    case = replace(BASE, B=6, H=2, Hkv=2, M=5, N=5)

    def ours(q, k, v, bias):
        return attention(q, k, v, bias=bias, mask=mask, return_lse=True)

    def theirs(q, k, v, bias):
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        whole = Tensors(
            *flat, bias.expand(2, 3, 2, 5, 5).flatten(0, 1), mask.expand(2, 3, 1, 1, 5).flatten(0, 1), *flat[:2]
        )
        return tuple(x.unflatten(0, (2, 3)) for x in plain(case, whole))

    check(way, ours, theirs, (q, k, v, bias))


@each_way
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_bias_that_runs_of_the_batch_share(way, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 2, 5, 4, dtype=DOUBLE) for _ in range(3))
    bias = torch.randn(2, 1, 2, 5, 5, dtype=DOUBLE)

    def ours(q, k, v, bias):
        return attention(q, k, v, bias=bias, return_lse=True, backend=backend)

    def theirs(q, k, v, bias):
        s = q @ k.mT / 2 + bias
        e = (s - s.detach().amax(-1, keepdim=True)).exp()
        total = e.sum(-1, keepdim=True)
        return e / total @ v, (total.log() + s.detach().amax(-1, keepdim=True)).squeeze(-1)

    check(way, ours, theirs, (q, k, v, bias))


@each_way
@pytest.mark.parametrize(("M", "N"), [(3, 0), (0, 3)])
def test_empty_calls(way, M, N):
    case = replace(BASE, M=M, N=N, sink="h")
    check_case(way, case)


# --- PyTorch's own checks ---


def leaves_of(case, *names):
    x = tensors(case)
    return [getattr(x, name).requires_grad_() for name in names]


def test_gradcheck():
    """Numerically, in eager forward AD, batched too."""
    case = replace(BASE, M=3, N=5, D=2, Dv=2, B=1, H=2, Hkv=1, bias="11mn", sink="h", softcap=1.0, causal=True)
    leaves = leaves_of(case, "q", "k", "v", "bias", "sink")

    def f(q, k, v, bias, sink):
        return attention(q, k, v, bias=bias, sink=sink, causal=True, softcap=1.0, return_lse=True)

    assert gradcheck(f, leaves, check_forward_ad=True, check_batched_forward_grad=True, check_batched_grad=True)
    assert gradgradcheck(f, leaves)
    assert gradgradcheck(f, leaves, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False)


def test_eager_forward_mode():
    """In dual_level, with and without gradients, of a call that the cache knows, and of subclasses."""
    x = tensors(BASE)
    given = tangents_like(x[:3])
    _, expected = torch.func.jvp(lambda *qkv: attention(*qkv, return_lse=True), tuple(x[:3]), given)
    attention(*x[:3], return_lse=True)

    class Tagged(torch.Tensor):
        pass

    for mode in (torch.no_grad(), torch.enable_grad()):
        for kind in (torch.Tensor, Tagged):
            with mode, forward_ad.dual_level():
                duals = [forward_ad.make_dual(y, t).as_subclass(kind) for y, t in zip(x[:3], given, strict=True)]
                outputs = attention(*duals, return_lse=True)
                found = [forward_ad.unpack_dual(y).tangent for y in outputs]
                torch.testing.assert_close([y.as_subclass(torch.Tensor) for y in found], list(expected))
                assert forward_ad.unpack_dual(attention(*x[:3])).tangent is None


@pytest.mark.parametrize("at", range(5))
def test_one_tangent_alone(at):
    """The others are zero, and none takes a product."""
    case = replace(BASE, bias="1hmn", sink="h", softcap=1.0)
    x = tensors(case)
    leaves = [x.q, x.k, x.v, x.bias, x.sink]
    given = [t if n == at else torch.zeros_like(t) for n, t in enumerate(tangents_like(leaves))]

    def ours(*leaves):
        return attention(*leaves[:3], bias=leaves[3], sink=leaves[4], softcap=1.0, return_lse=True)

    _, expected = torch.func.jvp(ours, tuple(leaves), tuple(given))
    with forward_ad.dual_level():
        duals = list(leaves)
        duals[at] = forward_ad.make_dual(leaves[at], given[at])
        found = [forward_ad.unpack_dual(y).tangent for y in ours(*duals)]
        torch.testing.assert_close(found, list(expected))


# --- every public function ---


class Dual(memory_helpers.Call):
    """Makes equal tensors each time, with tangents if ``dual``."""

    def __init__(self, dual):
        super().__init__(21, "cpu", None, DOUBLE)
        self.dual, self.leaves, self.tangents = dual, [], []
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape):
        x, tangent = (torch.randn(shape, generator=self.generator, dtype=DOUBLE) for _ in range(2))
        self.leaves.append(x.requires_grad_())
        self.tangents.append(tangent)
        return forward_ad.make_dual(x, tangent) if self.dual else x

    def seen(self, *shape):
        return torch.rand(shape, generator=self.generator) < 0.8


FUNCTIONS = {**memory_helpers.OF_BACKENDS, **memory_helpers.OTHERS}
del FUNCTIONS["softmax"]  # it has no tangents


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions(name):
    """⟨w, J u⟩ in forward mode is ⟨Jᵀ w, u⟩ in reverse mode, which can be differentiated again."""

    def outputs(call):
        torch.manual_seed(0)  # of dropout
        found = FUNCTIONS[name](call)
        return [x for x in (found if isinstance(found, tuple) else (found,)) if x.isfinite().all()]

    call = Dual(False)
    found = outputs(call)
    weights = [x.detach().cos() for x in found]
    grads = torch.autograd.grad(found, call.leaves, weights, create_graph=True, materialize_grads=True)
    with forward_ad.dual_level():
        pairs = [(forward_ad.unpack_dual(x).tangent, w) for x, w in zip(outputs(Dual(True)), weights, strict=True)]
        forward_mode = sum((x * w).sum() for x, w in pairs if x is not None)
    reverse_mode = sum((x * u).sum() for x, u in zip(grads, call.tangents, strict=True))
    torch.testing.assert_close(torch.as_tensor(forward_mode, dtype=DOUBLE), reverse_mode.detach())
    second = torch.autograd.grad(reverse_mode, call.leaves, materialize_grads=True)
    assert all(x.isfinite().all() for x in second)


# --- transforms, compilers, checkpoints, autocast ---


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_hessian_and_vmap():
    case = replace(BASE, M=2, N=3, B=1, Hkv=4)
    x = tensors(case)

    def loss(f):
        return lambda q: sum(y.sin().sum() for y in f(q))

    def ours(q):
        return attention(q, x.k, x.v, return_lse=True)

    def theirs(q):
        return plain(case, x._replace(q=q))

    for transform in (
        torch.func.hessian,
        torch.func.jacfwd,
        lambda f: lambda q: torch.func.linearize(f, q)[1](q.cos()),
    ):
        torch.testing.assert_close(transform(loss(ours))(x.q), transform(loss(theirs))(x.q))
    stacked = torch.stack([x.q, x.q.cos()])

    def directions(f):
        return torch.vmap(lambda q: torch.func.jvp(f, (q,), (q.sin(),))[1])(stacked)

    torch.testing.assert_close(directions(ours), directions(theirs))


COMPILED = {**WAYS, "reverse over reverse": gradient_of_gradient}  # autograd.grad with create_graph is not compiled


@pytest.mark.parametrize("way", COMPILED)
def test_compiled(way):
    torch._dynamo.reset()
    x = tensors(replace(BASE, bias="1hmn"))
    leaves = (x.q, x.k, x.v, x.bias)
    given = tangents_like(leaves)

    def derivative(*leaves):
        def f(q, k, v, bias):
            return attention(q, k, v, bias=bias, return_lse=True)

        return tuple(COMPILED[way](f, leaves, given))

    compiled = torch.compile(derivative, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), derivative(*leaves))


def test_checkpoints():
    leaves = leaves_of(BASE, "q", "k", "v")
    found = []
    for wrapped in (False, True):

        def f(*qkv, wrapped=wrapped):
            return checkpoint(attention, *qkv, use_reentrant=False) if wrapped else attention(*qkv)

        grads = torch.autograd.grad(f(*leaves).sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(y, y.detach()) for y in leaves]
            found[-1] += (forward_ad.unpack_dual(f(*duals)).tangent.detach(),)
    torch.testing.assert_close(found[0], found[1])


def test_autocast():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))

    def f(*qkv):
        with torch.autocast("cpu", torch.bfloat16):
            return (attention(*qkv),)

    def cast(*qkv):
        return (attention(*(x.bfloat16() for x in qkv)),)

    for way in WAYS.values():
        given = tangents_like((q, k, v))
        torch.testing.assert_close(way(f, (q, k, v), given), way(cast, (q, k, v), given))


@each_way
def test_scaled_dot_product_attention(way):
    x = tensors(replace(BASE, Hkv=4, bias="1hmn"))

    def ours(q, k, v, bias):
        return (tilewise.scaled_dot_product_attention(q, k, v, bias),)

    def theirs(q, k, v, bias):
        return plain(replace(BASE, Hkv=4), x._replace(q=q, k=k, v=v, bias=bias))[:1]

    check(way, ours, theirs, (x.q, x.k, x.v, x.bias))


def test_the_operators():
    """What compilers and exporters are told."""
    x = tensors(replace(BASE, bias="1hmn", sink="h"))
    inputs = Inputs(x.q, x.k, x.v, x.bias, None, x.sink[None, :, None])
    leaves = [None if y is None else y.requires_grad_() for y in inputs.flat()]
    given = [None if y is None else torch.randn_like(y).requires_grad_() for y in inputs.differentiable()]
    terms = ScoreNumbers.of(Score.of(Band(None, 2), 4, softcap=1.5), False, "cpu")
    o, lse, low, _ = torch.ops.tilewise.attention(*leaves, *terms)
    saved = (o.detach(), lse.detach(), low)
    opcheck(torch.ops.tilewise.attention_tangents.default, (*leaves, *given, *saved, *terms), traced=True)
    constant = [None if y is None else y.detach() for y in (*leaves, *given)]
    needs = [y is not None for y in given]
    second = torch.ops.tilewise.attention_second.default
    opcheck(second, (x.do, x.dlse, *constant, *terms, needs), traced=True)
    cotangents = x.do.clone().requires_grad_(), x.dlse.double().requires_grad_()
    opcheck(torch.ops.tilewise.attention_backward.default, (*cotangents, *leaves, *saved, *terms, needs), traced=False)


# --- precision, memory ---


@each_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("changes", [{"bias": "1hmn"}, {"softcap": 2.0, "causal": True, "sink": "h"}], ids=str)
def test_precision(way, dtype, changes):
    """No derivative is further from float64 than twice what PyTorch's own operators are in the same dtype."""
    case = replace(BASE, M=33, N=33, D=16, Dv=16, dtype=dtype, **changes)
    x = tensors(case)
    names = [name for name in ("q", "k", "v", "bias", "sink") if getattr(x, name) is not None]
    leaves = [getattr(x, name) for name in names]
    given = tangents_like(leaves)

    def ours(*leaves):
        y = dict(zip(names, leaves, strict=True))
        q, k, v = y["q"], y["k"], y["v"]
        return attention(q, k, v, bias=y.get("bias"), sink=y.get("sink"), return_lse=True, **case.terms)

    def theirs(*leaves):
        o, lse = plain(case, x._replace(**dict(zip(names, leaves, strict=True))))
        return o, lse

    exact = WAYS[way](theirs, [y.double() for y in leaves], [y.double() for y in given])
    found, unfused = (WAYS[way](f, leaves, given) for f in (ours, theirs))
    for y, other, right in zip(found, unfused, exact, strict=True):
        error, allowed = ((z.double() - right).abs().max() for z in (y, other))
        assert error <= 2 * allowed + 1e-5 * right.abs().max()


@each_way
def test_no_matrix_of_scores(way, monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 64)
    case = replace(BASE, B=1, H=2, Hkv=1, M=700, N=900, sink="h")
    x = tensors(case)

    def ours(*leaves):
        return attention(*leaves[:3], sink=leaves[3], causal=True, return_lse=True)

    leaves = (x.q, x.k, x.v, x.sink)
    with LargestTensor() as found:
        WAYS[way](ours, leaves, tangents_like(leaves))
    assert found.elements < 2 * 700 * 900 / 8


# --- what there is not ---


def test_derivatives_that_are_declined():
    x = tensors(BASE)

    def loss(q):
        return attention(q, x.k, x.v).sin().sum()

    def directional(q):
        return torch.func.jvp(loss, (q,), (q,))[1]

    with pytest.raises(NotImplementedError, match=r"^tilewise\.attention has no second derivative in forward mode"):
        torch.func.jvp(directional, (x.q,), (x.q,))
    with pytest.raises(NotImplementedError, match=r"^tilewise\.attention has no third derivative"):
        torch.func.grad(lambda q: torch.func.grad(directional)(q).sum())(x.q)


def test_what_has_no_order_on_a_gpu_is_declined():
    x = tensors(BASE)
    values = torch.randn(2, 4, 9, 5, dtype=DOUBLE)
    bias = RelativeBias(values, lo=-3, buckets=BUCKETS)
    none = dict.fromkeys(("mask", "sink", "window", "dropout_seed", "backend"))
    call = read_call(*x[:3], bias=bias, causal=False, dropout_p=0.0, deterministic=True, **none)
    problem = replace(Problem.of(*call.inputs, call.score, deterministic=True), device="cuda")
    with pytest.raises(NotImplementedError, match=r"^deterministic: the second derivative by a bias by distance with"):
        packed.second(
            problem,
            call.inputs,
            Tangents(*x[:3], None),
            Outputs(x.do, None),
            Needs(True, True, True, False, query=True),
        )


def test_explain_counts_them():
    q = torch.empty(1, 2, 64, 32, dtype=torch.bfloat16, device="meta")
    found = explain(q, q, q, device="sm_90")
    assert found.tangent_flops == 2 * 2 * 64 * 64 * (3 * 32 + 3 * 32)
    assert found.second_flops == 2 * 2 * 64 * 64 * (10 * 32 + 6 * 32)
    assert "second derivatives: 8.39 MFLOP, tiles in PyTorch's operators, not fused yet" in str(found)


def test_explain_says_which_way_tangents_take():
    q = torch.empty(1, 2, 64, 32, dtype=torch.bfloat16, device="meta")
    wide = torch.empty(1, 2, 64, 264, dtype=torch.bfloat16, device="meta")
    unfused = "tiles in PyTorch's operators"
    for x, device, terms, way in (
        (q, "sm_90", {}, "in triton's kernel"),
        (q, "sm_80", {"bias": torch.empty(1, 2, 64, 64, device="meta")}, "in triton's kernel"),
        (q, "sm_90", {"dropout_p": 0.5}, f"{unfused}: triton has no kernel for tangents under dropout yet"),
        (
            q,
            "sm_90",
            {"bias": alibi(torch.ones(2, device="meta"))},
            f"{unfused}: triton has no kernel for tangents with",
        ),
        (
            wide,
            "sm_90",
            {},
            f"{unfused}: triton computes the tangents of up to 256 dimensions in this dtype, not of 264",
        ),
        (wide[..., :136].float(), "sm_90", {}, f"{unfused}: triton computes the tangents of up to 128 dimensions"),
        (q, "cpu", {}, f"{unfused}: cpu has no kernel for tangents"),
    ):
        text = str(explain(x, x, x, device=device, **terms))
        assert f"FLOP, {way}" in text, text


def test_flop_counter():
    x = tensors(BASE)
    count, leaves = FlopCounterMode(display=False), tuple(x[:3])

    def ours(*qkv):
        return attention(*qkv, return_lse=True)

    with count:
        WAYS["jvp"](ours, leaves, tangents_like(leaves))
        forward_mode = count.get_total_flops()
        WAYS["forward over reverse"](ours, leaves, tangents_like(leaves))
    pairs = 2 * 2 * 4 * 9 * 11
    assert forward_mode == pairs * (4 * 4 + 4 * 3)
    assert count.get_flop_counts()["Global"][torch.ops.tilewise.attention_second] == pairs * (10 * 4 + 6 * 3)
