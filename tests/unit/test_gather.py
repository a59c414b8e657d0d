"""Gathered keys: calls with a dynamic mask held to the reference with the bool mask, by the error rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, Tensors, hold, run, tensors
from torch import Tensor

from tilewise import TileMask, attention, dynamic_mask, explain
from tilewise.bias import Alibi
from tilewise.masks.block_sparse import Kept
from tilewise.spec.score import Band
from tilewise.spec.tiles import limits
from tilewise.topk import gather
from tilewise.topk.autograd import gather_rows

KERNELS = "tilewise.topk.kernels"
USUAL = Case(B=2, H=4, Hkv=2, M=300, N=300, D=16)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small calls are gathered, in small chunks."""
    monkeypatch.setattr(gather, "WORTH", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(gather, "CHUNK", 64)


@pytest.fixture
def ways(monkeypatch) -> list[gather.Gather | str]:
    """What was decided for each call."""
    found, decide = [], gather.gather_of

    def told(*arguments):
        found.append(decide(*arguments))
        return found[-1]

    monkeypatch.setattr(gather, "gather_of", told)
    return found


def masked(case: Case, keep: int, shape: tuple[int, int], causal: bool) -> tuple[Tensors, TileMask]:
    """Inputs with the bool mask, and the TileMask; scores with ties."""
    scores = torch.randint(0, 40, (*shape, 1, case.N), generator=torch.Generator().manual_seed(keep)).float()
    found = dynamic_mask(scores, keep=keep, causal=causal, queries=case.M)
    return tensors(case)._replace(mask=found.dense()), found


@pytest.mark.parametrize(
    ("causal", "shape", "more"),
    [
        (False, (2, 2), {}),
        (True, (2, 2), {}),
        (False, (1, 1), {"bias": "bh1n", "sink": "h", "softcap": 9.0}),
        (True, (1, 2), {"bias": "bh1n", "sink": "h", "softcap": 9.0}),
        (False, (1, 2), {"causal": True, "bias": "111n", "layout": "heads_last"}),
        (True, (2, 1), {"causal": True, "bias": "111n", "layout": "heads_last", "M": 257}),
        (True, (1, 1), {"bias": "1k1n", "sink": "bhm", "window": (90, 20), "dtype": torch.bfloat16}),
        (False, (2, 2), {"bias": "1k1n", "sink": "bhm", "window": (90, 20), "dtype": torch.bfloat16}),
        (True, (2, 2), {"M": 400, "sink": "b11", "bias": "b11n", "D": 8, "Dv": 24, "bias_dtype": torch.float32}),
        (True, (1, 2), {"M": 100, "B": 1, "layout": "sliced", "bias": "1h1n", "bias_hides": True}),
        (True, (1, 1), {"Hkv": 4, "dtype": torch.float32, "lse": False, "sink": "1h1"}),
    ],
    ids=str,
)
def test_against_the_bool_mask(ways, causal, shape, more):
    case = replace(USUAL, **more)
    inputs, found = masked(case, 30, shape, causal)
    hold(case, run(case, "cpu", inputs=inputs._replace(mask=found)), inputs=inputs)
    (way,) = ways[:1]
    assert isinstance(way, gather.Gather), way
    assert way.chunks == (-(-case.M // 64) if causal else 1)


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_nan(ways, causal):
    """In keys and values that no query keeps; and, causal, in those that few do."""
    case = replace(USUAL, bias="1k1n", dtype=torch.float32)
    inputs, found = masked(case, 12, (1, 2), causal)
    unseen = ~inputs.mask.any(2).expand(2, 2, 300)
    assert unseen.any()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[unseen] = v[unseen] = math.nan
    if causal:
        k[:, :, 3] = v[:, :, 3] = math.nan
    o = attention(inputs.q, k, v, bias=inputs.bias, mask=found)
    assert isinstance(ways[0], gather.Gather)
    touched = found.dense()[..., 3].repeat_interleave(2, 1).expand(2, 4, 300) if causal else torch.tensor(False)
    assert torch.equal(o.isnan().any(-1), touched.expand(2, 4, 300))


@pytest.mark.parametrize(
    "scores", [torch.arange(300.0), -torch.arange(300.0), torch.zeros(300)], ids=["up", "down", "0"]
)
def test_as_many_keys_as_a_chunk_may_keep(ways, scores):
    """Where each key is better than those before, a chunk keeps keep + rows - 1; where it is worse, keep."""
    found = dynamic_mask(scores.view(1, 1, 1, 300), keep=70, causal=True)
    q, k, v = (torch.randn(1, 2, 300, 8, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(attention(q, k, v, mask=found), attention(q, k, v, mask=found.dense()))
    assert ways[0] == gather.Gather(3, 100, 192, masked=True)


@pytest.mark.parametrize(
    ("M", "keep", "expected"),
    [
        (32768, 2048, (16, 2048, 4096)),
        (32768, 3000, (16, 2048, 5120)),  # 11 chunks of 2,979 would end one query past the last
        (32768, 100, (256, 128, 256)),
        (30000, 2048, (15, 2000, 4096)),
        (8192, 4000, None),
    ],
)
def test_chunks(monkeypatch, M, keep, expected):
    monkeypatch.setattr(gather, "CHUNK", 128)
    q = torch.empty(1, 2, M, 8, device="meta")
    found = TileMask.from_intervals(torch.zeros(1, 1, M, dtype=torch.int32), torch.zeros(1, 1, M, dtype=torch.int32), M)
    found = TileMask(M, M, found.to("meta").tensors, Kept(keep, True, by_query=False))
    way = explain(q, q, q, mask=found, causal=True, device="sm_90").gather
    assert isinstance(way, str) if expected is None else way == (*expected, True)


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize(("B", "H", "shape"), [(2, 4, (2, 2)), (1, 3, (1, 1)), (2, 2, (1, 2))], ids=str)
def test_gradients_of_rows(by_heads, B, H, shape):
    """Of rows that several chunks name, heads that share keys, and places that name none."""
    x, keys, _ = _rows(B, H, shape, by_heads)
    x.requires_grad_()
    (found,) = gather_rows(keys, 3, x)
    at = keys.clamp(max=39).repeat_interleave(H // shape[1], 1).expand(B, H, 3, 7)
    expected = torch.stack([x.gather(2, at[:, :, c, :, None].expand(-1, -1, -1, 5)) for c in range(3)], 1).flatten(0, 1)
    assert torch.equal(found, expected)
    named = (at.transpose(1, 2).flatten(0, 1) < 39)[..., None].repeat_interleave(5, -1)
    cotangent = torch.randn(found.shape, dtype=torch.float64) * named
    (one,), (other,) = (torch.autograd.grad(y, x, cotangent) for y in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize(("B", "H", "shape"), [(2, 4, (2, 2)), (1, 3, (1, 1)), (2, 2, (1, 2))], ids=str)
def test_the_kernels_are_their_twins(interpreter, by_heads, B, H, shape):
    x, keys, generator = _rows(B, H, shape, by_heads, torch.float32, 6)  # more than are read at once
    x.requires_grad_()
    (found,) = gather_rows(keys, 6, x)
    grad = torch.randn(found.shape, generator=generator)
    (expected,) = torch.autograd.grad(found, x, grad)
    places = interpreter(f"{KERNELS}.places_of", keys, x.shape[2])
    total = interpreter(f"{KERNELS}.sum_rows", grad, places, x.shape, torch.float32, by_heads)
    assert torch.equal(total, expected)
    assert total.transpose(1, 2).is_contiguous() == by_heads
    taken = interpreter(f"{KERNELS}.take_rows", x.detach(), keys)
    named = (keys < 40).repeat_interleave(H // shape[1], 1).expand(B, H, 6, 7).transpose(1, 2).flatten(0, 1)
    assert torch.equal(taken, found.detach() * named[..., None])


@pytest.mark.parametrize(
    ("shape", "N", "way", "band"),
    [
        ((2, 3), 700, gather.Gather(3, 200, 256, True), Band()),
        ((1, 2), 300, gather.Gather(5, 70, 130, True), Band(-150, 0)),
        ((1, 2), 4500, gather.Gather(1, 300, 4500, True), Band(None, 40)),  # more than a program reads at once
        ((1, 1), 90, gather.Gather(1, 90, 30, False), Band()),
    ],
    ids=str,
)
def test_the_kernels_of_chunks_are_their_twins(interpreter, shape, N, way, band):
    """Same keys in the same order, and the same tiles; also where a mask shows more keys than there is room for."""
    queries = way.chunks * way.rows
    begins = torch.randint(0, queries, (*shape, 1, N), generator=torch.Generator().manual_seed(N), dtype=torch.int32)
    ends = (begins + torch.arange(N, dtype=torch.int32).roll(N // 3) % 300 - 20).clamp(0, queries).maximum(begins)
    begins[..., ::3], ends[..., ::7] = 0, queries
    begins[..., ::11] = ends[..., ::11]
    for batch in {2, shape[0]}:
        own = 1 if way.chunks == shape[0] == 1 else batch
        one = gather.of_chunks(begins, ends, band, way, batch)
        other = interpreter(f"{KERNELS}.keys_of_chunks", begins, ends, limits(band), way, own)
        assert torch.equal(one[0].int(), other[0])
        assert (other[1] is None) == (not way.masked)
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(one[1] or (), other[1] or (), strict=True))


def _rows(
    B: int, H: int, shape: tuple[int, int], by_heads: bool, dtype: torch.dtype = torch.float64, chunks: int = 3
) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(1)
    size = (B, 40, H, 5) if by_heads else (B, H, 40, 5)
    x = torch.randn(size, generator=generator, dtype=dtype)
    keys = torch.rand(*shape, chunks, 39, generator=generator).argsort(-1)[..., :7].sort(-1).values
    keys[..., 1, 5:] = 40
    return (x.transpose(1, 2) if by_heads else x), keys, generator


def test_nearly_all_tiles_are_full_or_hidden(monkeypatch):
    """Of a causal mask with random scores, in the places of gathered keys: little more is visited than is seen."""
    made, make = [], TileMask.from_intervals
    monkeypatch.setattr(
        TileMask, "from_intervals", lambda *args, **named: made.append(make(*args, **named)) or made[-1]
    )
    found = dynamic_mask(torch.randn(1, 2, 1, 4096), keep=512, causal=True)
    monkeypatch.setattr(gather, "attention_op", lambda inputs, *args, **named: (inputs.q, None, None))
    attention(*torch.zeros(3, 1, 2, 4096, 8).unbind(), mask=found)
    tiles = made[-1].tensors.tiles
    assert made[-1].validate().shape == (8, 2, 4, 8)
    assert made[-1].dense().sum() == found.dense().sum()
    visited, partial = (tiles > 0).sum(), (tiles > 1).sum()
    assert visited * 128 * 128 < 1.3 * found.dense().sum()
    assert partial < 0.5 * visited


def test_equal_bits():
    case = replace(USUAL, dtype=torch.bfloat16, bias="11mn"[:2] + "1n", deterministic=True)
    inputs, found = masked(case, 30, (1, 2), True)
    first, second = (run(case, "cpu", inputs=inputs._replace(mask=found)) for _ in range(2))
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_compiles(ways):
    q = torch.randn(2, 2, 130, 8, requires_grad=True)
    scores = torch.randn(1, 2, 1, 130)

    def step(q, scores):
        return attention(q, q, q, mask=dynamic_mask(scores, keep=9, causal=True), causal=True)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, scores)
    expected = step(q, scores)
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), q) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()
    assert isinstance(ways[-1], gather.Gather)


def test_transforms():
    found = dynamic_mask(torch.randn(1, 2, 1, 130), keep=9, causal=True)
    q, k, v = (torch.randn(3, 1, 2, 130, 8, dtype=torch.float64) for _ in range(3))

    def loss(q, k, v):
        return attention(q, k, v, mask=found).square().sum()

    grads = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    total = sum(attention(*x, mask=found.dense()).square().sum() for x in zip(*leaves, strict=True))
    for one, other in zip(grads, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_derivatives_of_gathered_keys():
    """In forward mode nothing is gathered; a second derivative goes through the gather."""
    found = dynamic_mask(torch.randn(1, 2, 1, 130, dtype=torch.double), keep=9)
    leaves = tuple(torch.randn(1, 2, 130, 8, dtype=torch.double) for _ in range(3))

    def derivatives(mask):
        def loss(*qkv):
            return attention(*qkv, mask=mask).square().sum()

        given = [x.clone().requires_grad_() for x in leaves]
        grads = torch.autograd.grad(loss(*given), given, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in grads), given)
        return *second, torch.func.jvp(loss, leaves, leaves)[1]

    torch.testing.assert_close(derivatives(found), derivatives(found.dense()))


def test_dtensors_are_refused_by_name(monkeypatch):
    """By the operator, which is told that these are some."""
    monkeypatch.setattr(gather, "is_dtensor", lambda x: True)
    monkeypatch.setattr(gather, "gathered_attention", None)
    found = dynamic_mask(torch.randn(1, 2, 1, 130), keep=9)
    attention(*torch.randn(3, 1, 2, 130, 8).unbind(), mask=found)


def test_more_leading_dimensions(ways):
    found = dynamic_mask(torch.randn(1, 2, 1, 130), keep=9)
    q, k, v = (torch.randn(2, 3, 2, 130, 8) for _ in range(3))
    torch.testing.assert_close(attention(q, k, v, mask=found), attention(q, k, v, mask=found.dense()))
    assert isinstance(ways[0], gather.Gather)


def test_a_mask_that_was_changed_reaches_no_memory():
    """Then it shows more keys than there is room for; those that have none are not seen."""
    found = dynamic_mask(torch.randn(1, 1, 1, 300), keep=30, causal=True)
    found.tensors.begins.fill_(0)
    found.tensors.ends.fill_(300)
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    assert attention(q, k, v, mask=found).isfinite().all()


H, B = USUAL.H, USUAL.B
NOT_GATHERED = {
    "each query has scores of its own": {"scores": (1, 1, 300, 300)},
    "there is one query": {"M": 1},
    "query heads of one key/value head": {"scores": (1, H, 1, 300)},
    "dropout goes by": {"dropout_p": 0.5},
    "a bias of several terms": {"bias": Alibi(torch.ones(H))},
    "the bias is not one of keys alone": {"bias": torch.zeros(1, 1, 300, 300)},
    "200 keys for each query are more than half": {"keep": 200},
    "the call is so small": {"worth": True},
}


@pytest.mark.parametrize("reason", NOT_GATHERED)
def test_what_is_not_gathered(monkeypatch, reason):
    """The call visits tiles, and explain tells why."""
    more = {"scores": (1, 1, 1, 300), "keep": 20, "M": 300, **NOT_GATHERED[reason]}
    if more.pop("worth", False):
        monkeypatch.setattr(gather, "WORTH", {"cpu": 1e8, "cuda": 1e8})
    q, k, v = (torch.randn(B, h, m, 8) for h, m in ((H, more.pop("M")), (2, 300), (2, 300)))
    found = dynamic_mask(torch.randn(more.pop("scores")), keep=more.pop("keep"), causal=True, queries=q.shape[2])
    told = explain(q, k, v, mask=found, **more)
    assert told.gather.startswith(reason)
    assert f"  selected keys are not gathered: {reason}" in str(told)
    assert told.problem == told.plan.problem
    if "dropout_p" not in more:
        expected = attention(q, k, v, mask=found.dense(), **more)
        torch.testing.assert_close(attention(q, k, v, mask=found, **more), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_explain(causal):
    q, k = torch.randn(B, H, 300, 8), torch.randn(B, 2, 300, 8)
    found = dynamic_mask(torch.randn(1, 2, 1, 300), keep=30, causal=causal)
    told = explain(q, k, k, mask=found, bias=torch.zeros(1, H, 1, 300), sink=torch.zeros(B, H, 300), causal=causal)
    many = "each of 5 chunks of 60 queries at most 128" if causal else "all queries 30"
    assert f"  selected keys are gathered: for {many} of 300" in str(told)
    assert "  q (2, 4, 300, 8)" in str(told)
    seen = found.dense().sum().item() * B * H // 2
    assert told.forward.flops == seen * 4 * 8
    assert told.backward.flops == seen * 10 * 8
    computed = told.plan.problem
    assert (computed.batch, computed.queries, computed.keys) == ((10, 60, 128) if causal else (2, 300, 30))
    # On the meta device nobody knows the elements: what the gathered keys make at most.
    meta = [x.to("meta") for x in (q, k, k)]
    told = explain(*meta, mask=found.to("meta"), causal=causal, device="sm_90")
    assert told.forward.flops == (10 * H * 60 * 128 if causal else B * H * 300 * 30) * 4 * 8


def test_the_problem_is_that_of_what_is_computed(monkeypatch):
    """What explain plans for, of every kind of operand."""
    found = []
    compute = gather.attention_op
    monkeypatch.setattr(gather, "attention_op", lambda *args, **named: found.append(args) or compute(*args, **named))
    for causal in (False, True):
        for shape in ((1, 1), (1, 2), (2, 2)):
            for bias, sink in ((None, (H,)), ((1, H, 1, 300), (B, H, 300)), ((B, 1, 1, 300), (1, 1, 300)),
                               ((1, 1, 1, 300), (B, 1, 1))):  # fmt: skip
                q, k = torch.randn(B, H, 300, 8), torch.randn(B, 2, 300, 8)
                mask = dynamic_mask(torch.randn(*shape, 1, 300), keep=30, causal=causal)
                terms = {"bias": None if bias is None else torch.zeros(bias), "sink": torch.zeros(sink)}
                attention(q, k, k, mask=mask, **terms)
                inputs, score = found[-1][:2]
                assert gather.Problem.of(*inputs, score) == explain(q, k, k, mask=mask, **terms).plan.problem


def test_kept_goes_where_a_mask_goes():
    found = dynamic_mask(torch.randn(1, 1, 1, 300), keep=30, causal=True)
    assert found.kept == found.to("meta").kept == Kept(30, True, by_query=False)
    assert TileMask.documents(torch.zeros(300, dtype=torch.int64)).kept is None
