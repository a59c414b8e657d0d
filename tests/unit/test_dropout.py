"""Dropout: its generator, the same mask on every backend, and all that a call with a seed meets on its way."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import interpreter_child
import pytest
import torch
from forced import check_origin, check_split
from helpers import DROPOUT_SEED, Case, check, dropout_mask, kept_share, tensors
from pairwise import each
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import attention, explain
from tilewise.backends import Inputs
from tilewise.operator import onnx as plain
from tilewise.operator.autograd import attention_op
from tilewise.spec import dropout
from tilewise.spec.score import Band, Score

BRAIN, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
SMALL = Case(B=2, H=4, Hkv=2, M=37, N=70, D=16, dropout_p=0.2)


# --- the generator, against one in Python's own integers ---


def philox(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Salmon et al. 2011, section 3.3: words of 32 bits, two or four to a counter, half as many to a key."""
    multipliers = [0xD256D193] if len(counter) == 2 else [0xD2511F53, 0xCD9E8D57]
    for _ in range(rounds):
        products = [m * x for m, x in zip(multipliers, counter[::2], strict=True)]
        high, low = ([f(x) for x in products] for f in (lambda x: x >> 32, lambda x: x % 2**32))
        if len(counter) == 4:
            high, low = high[::-1], low[::-1]
        mixed = [h ^ k ^ x for h, k, x in zip(high, key, counter[1::2], strict=True)]
        counter = [x for pair in zip(mixed, low, strict=True) for x in pair]
        key = [(k + weyl) % 2**32 for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=False)]
    return counter


def number(seed: int, offset: int, b: int, h: int, i: int, j: int) -> int:
    """Of 15 bits: it drops the probability where it is less than the threshold."""
    words = [[x % 2**32, x // 2**32 % 2**32] for x in (seed, offset)]
    w = philox([*words[1], b, h], words[0], 10)
    x = philox([(8 * (i // 16) + i % 8) ^ w[1], (4 * (j // 16) + j // 2 % 4) ^ w[2]], w[:1], 7)
    pair = x[i // 8 % 2].to_bytes(4, "little")[j % 2 * 2 :][:2]
    return int.from_bytes(pair, ["little", "big"][j // 8 % 2]) % 2**15


@pytest.mark.parametrize("threshold", [1, 3277, 0x7BFF, 0x7C00, 0x7C01, 32767, 32768])
def test_two_numbers_at_once(threshold):
    """As Hopper's kernels compare them: every number beside the least, the greatest and those around the threshold."""
    pytest.importorskip("triton")
    from tilewise.backends.gluon.score import dropout_bounds

    terms = dropout_bounds(Score(1.0, None, Band(), dropout=threshold))
    assert type(terms["bound"]) is float  # of which no value is compiled anew
    bounds = [x.double() for x in torch.tensor(terms["bound"]).view(1).view(HALF)]
    numbers = torch.arange(65536)
    halves = (numbers - 65536 * (numbers > 32767)).to(torch.int16)
    for bound in bounds:  # float16's, of which NaN is not less
        if terms["MOSTLY"].value:
            dropped = ~((~halves).view(HALF).abs().double() < bound)
        else:
            dropped = halves.view(HALF).abs().double() < bound
        assert torch.equal(dropped, (numbers & 0x7FFF) < threshold)


PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
VECTORS = [  # Random123's tests/kat_vectors: rounds, counter, key, words
    (7, [0, 0], [0], "257a3673 cd26be2a"),
    (7, [2**32 - 1] * 2, [2**32 - 1], "ab302c4d 3dc9d239"),
    (7, PI[:2], PI[2:3], "bedbbe6b e4c770b3"),
    (10, [0, 0], [0], "ff1dae59 6cd10df2"),
    (10, [0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, [2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI[:4], PI[4:], "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), VECTORS)
def test_vectors(rounds, counter, key, words):
    expected = [int(word, 16) for word in words.split()]
    assert philox(counter, key, rounds) == expected
    counters, keys = (list(map(torch.tensor, x)) for x in (counter, key))
    if len(counter) == 2:
        assert list(dropout.philox2x32(*counters, *keys, rounds)) == expected
    else:
        assert list(dropout.philox4x32(counters, keys, rounds)) == expected


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, 2**62 + 5), (2**40 + 17, -(2**63)), (2**63 - 1, 3)])
def test_numbers(seed, offset):
    """The reference, and the dense mask of helpers.py that the backends are held to, have the definition's numbers."""
    words = dropout.stream(
        torch.tensor([seed, offset]), torch.arange(3).view(3, 1, 1, 1), torch.arange(2).view(2, 1, 1)
    )
    generator = torch.Generator().manual_seed(1)
    b, h, i, j = (torch.randint(n, (200,), generator=generator) for n in (3, 2, 70, 130))
    found = [
        dropout.kept(words, torch.arange(70)[:, None], torch.arange(130), threshold)[b, h, i, j]
        for threshold in (3277, 16384, 32768, 1, 32767)
    ]
    numbers = [number(seed, offset, *place) for place in zip(*(x.tolist() for x in (b, h, i, j)), strict=True)]
    for kept, threshold in zip(found, (3277, 16384, 32768, 1, 32767), strict=True):
        assert kept.tolist() == [x >= threshold for x in numbers]
    if (seed, offset) == (0, 0):
        mask, case = dropout_mask(SMALL), SMALL
        places = [(b % 2, h, i % case.M, j % case.N) for b, h, i, j in zip(b, h, i, j, strict=True)]
        expected = [number(*DROPOUT_SEED, *map(int, place)) >= 6554 for place in places]
        assert [bool(mask[place]) for place in places] == expected


@pytest.mark.parametrize(
    ("rows", "cols"), [((0, 37), (0, 70)), ((5, 6), (17, 70)), ((16, 32), (8, 9)), ((20, 37), (31, 33))]
)
def test_tiles_of_the_reference(rows, cols):
    seed = torch.tensor([-5, 2**40])
    words = dropout.stream(seed, torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1))
    whole = dropout.kept(words, torch.arange(37)[:, None], torch.arange(70), 6554)
    assert torch.equal(
        dropout.kept_tile(words, slice(*rows), slice(*cols), 6554), whole[..., slice(*rows), slice(*cols)]
    )


def test_both_ends_of_a_half():
    """Of all halves each number drops as many as its threshold says; and both drop as docs/maths.md says."""
    halves = torch.arange(65536)
    ends = [dropout.number_of(halves, torch.tensor(j)) for j in (0, 8)]
    for end in ends:
        assert (end.bincount() == 2).all()
    t = torch.arange(1, 32768)
    share = t / 32768.0
    both = torch.maximum(*ends).bincount().cumsum(0)[:-1] / 65536.0
    excess = both - share**2
    assert excess.min() > -1e-6
    assert excess.max() < 0.002
    correlation = excess / (share * (1 - share))
    assert correlation[3277 - 1] < 0.0035
    assert correlation[(t >= 328) & (t <= 32440)].max() < 0.01
    assert both[0] == 2**-16


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_shares_and_neighbours(p):
    """Within five standard deviations as many as p says are dropped, of each head and of each of the four of a group;
    and neighbours are independent."""
    mask = ~dropout_mask(Case(B=2, H=3, M=256, N=1024, dropout_p=p))

    def near(x: Tensor, share: float) -> None:
        n = x[0, 0].numel()
        assert ((x.double().mean((-2, -1)) - share).abs() < 5 * math.sqrt(share * (1 - share) / n)).all()

    near(mask, p)
    for rows in (slice(0, None, 16), slice(8, None, 16)):
        for cols in (slice(0, None, 16), slice(8, None, 16)):
            near(mask[:, :, rows, cols], p)
    for x, y in (
        (mask[..., 1:], mask[..., :-1]), (mask[:, :, 1:], mask[:, :, :-1]),
        (mask[:, 1:], mask[:, :-1]), (mask[1:], mask[:-1]),
        (mask[:, :, 8:], mask[:, :, :-8]), (mask[..., 8:], mask[..., :-8]), (mask[:, :, 8:, 8:], mask[:, :, :-8, :-8]),
    ):  # fmt: skip
        near(x & y, p * p)


# --- every backend against the error rule ---

MEETS = [
    {},
    {"dtype": FLOAT, "causal": True, "dropout_p": 0.5},
    {"M": 1, "N": 3, "dropout_p": 0.7},
    {"M": 129, "N": 33, "B": 1, "Hkv": None, "H": 1},
    {"mask": "b1mn", "blind": True, "sink": "h", "layout": "sliced"},
    {"bias": "1hmn", "bias_hides": True, "deterministic": True, "window": (20, 9)},
    {"bias": "b11n", "planted": math.nan, "dtype": FLOAT},
    {"softcap": 2.0, "scale": 0.7, "sink": "bhm", "lse": False, "layout": "heads_last"},
    {"bias": "bkm1", "M": 70, "N": 37, "causal": True, "dtype": FLOAT},
    {"dropout_p": 1.0, "lse": True, "sink": "h"},
    {"dropout_p": 1 / 32768},
    {"grads": "qb", "bias": "11mn", "deterministic": True},
    {"grads": "v"},
]  # fmt: skip


@each(replace(SMALL, **terms) for terms in MEETS)
def test_cpu(case):
    check(case, "cpu")


@each(
    [
        replace(SMALL, B=1, H=3, Hkv=1, M=400, N=530, causal=True),  # tiles of 170 queries
        replace(SMALL, B=1, H=2, Hkv=2, M=130, N=600, dtype=BRAIN, sink="h"),
        replace(SMALL, B=1, H=2, M=520, N=513, mask="11mn", planted=math.inf, dtype=FLOAT),
    ]
)
def test_tiles_of_the_cpu(case):
    check(case, "cpu")


@each(
    replace(SMALL, **{"M": 19, "N": 35, **terms})
    for terms in [
        *MEETS,
        {"B": 1, "H": 2, "Hkv": 1, "M": 130, "N": 200, "causal": True, "sink": "h"},
        {"M": 200, "N": 130, "B": 1, "H": 1, "Hkv": 1, "mask": "11mn", "deterministic": True},
    ]
)  # fmt: skip
def test_triton(interpreter, case):
    interpreter(check, case, "triton")


def test_integers_stay_in_range(interpreter):
    """But for those of the generator, which wrap round by design."""
    interpreter(
        interpreter_child.watch_integers, check, replace(SMALL, M=19, N=35, bias="11mn", deterministic=True), "triton"
    )


FEW = Case(B=2, H=4, Hkv=2, M=1, N=300, D=16, grads="", dropout_p=0.4)


@pytest.mark.parametrize("splits", [1, 3])
@each(
    [
        FEW,
        replace(FEW, M=3, sink="bhm", dtype=FLOAT, causal=True, bias="bhmn", grads="qkvs"),
        replace(FEW, M=9, H=3, Hkv=1, window=(200, 0)),
    ]
)
def test_few_queries(interpreter, case, splits):
    """Rows of a tile are query heads of several streams."""
    interpreter(check_split, case, splits)


ORIGINS = [(48, 0, 0), (5, 16, 3), (32, 27, 2)]  # multiples of 16, and not


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_parts_of_a_call(backend, origin):
    check_origin(backend, dropout.Origin(*origin), False)


@pytest.mark.parametrize(("origin", "deterministic"), list(zip(ORIGINS, (True, False, True), strict=True)))
def test_parts_of_a_call_in_triton(interpreter, origin, deterministic):
    interpreter(check_origin, "triton", dropout.Origin(*origin), deterministic)


# --- the definition ---


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("terms", [{}, {"causal": True, "sink": "h"}, {"softcap": 2.0, "M": 3, "N": 129}])
def test_by_a_dense_mask(backend, terms):
    """Plain torch in float64, by a mask that shares nothing with the library."""
    case = replace(SMALL, dtype=DOUBLE, Hkv=4, D=8, dropout_p=0.3, **terms)
    x = tensors(case)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.sink) if t is not None]
    s = leaves[0] @ leaves[1].mT / math.sqrt(8)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if case.causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(case.N - case.M + 1), -math.inf)
    if case.sink:
        s = torch.cat([s, leaves[3].view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : case.N] * dropout_mask(case) / kept_share(0.3)
    expected = p @ leaves[2], torch.logsumexp(s, -1)
    found = attention(*leaves[:3], sink=x.sink, **case.terms, return_lse=True, backend=backend)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(y, leaves, (x.do, x.dlse.double())) for y in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("terms", [{}, {"causal": True, "softcap": 2.0}])
def test_gradcheck(terms):
    q, k, v = (torch.randn(2, 2, n, 2, dtype=DOUBLE, requires_grad=True) for n in (3, 5, 5))
    bias, sink = (torch.randn(shape, dtype=DOUBLE, requires_grad=True) for shape in ((1, 2, 3, 5), (2,)))
    torch.autograd.gradcheck(
        lambda q, k, v, bias, sink: attention(q, k, v, bias=bias, sink=sink, dropout_p=0.4, dropout_seed=(5, 6),
                                              return_lse=True, **terms),
        (q, k, v, bias, sink),
    )  # fmt: skip


# --- what a call meets on its way ---


def inputs(requires_grad: bool = True) -> list[Tensor]:
    return [torch.randn(2, 4, n, 8, requires_grad=requires_grad) for n in (5, 27, 27)]


def drop(**options) -> Tensor:
    """Bool (2, 4, 16, 32), where all probabilities are 1/32 and values are the unit vectors."""
    q, k = torch.zeros(2, 4, 16, 8), torch.zeros(2, 4, 32, 8)
    return attention(q, k, torch.eye(32).expand(2, 4, 32, 32), dropout_p=0.25, **options) == 0


def test_torch_manual_seed_repeats():
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found += [drop(), drop()]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[4])
    x, state = inputs(), torch.get_rng_state()
    explain(*x, dropout_p=0.25)
    drop(dropout_seed=(1, 2))
    assert torch.equal(torch.get_rng_state(), state), "a generator that nobody asked for moved on"


def test_seeds():
    first = drop(dropout_seed=(7, 2**63 + 9))
    assert 0.2 < first.float().mean() < 0.3
    assert torch.equal(first, drop(dropout_seed=[7, 9 - 2**63]))  # the same 64 bits
    assert torch.equal(first, drop(dropout_seed=torch.tensor([7, 9 - 2**63])))
    assert torch.equal(first, drop(dropout_seed=torch.tensor([[7, 0], [9 - 2**63, 0]])[:, 0], backend="reference"))
    for other in ((8, 9 - 2**63), (7, 9), (7 + 2**32, 9 - 2**63), (7 + 2**63, 9 - 2**63), (9 - 2**63, 7)):
        assert not torch.equal(first, drop(dropout_seed=other))


def test_a_remembered_call_is_that_of_its_numbers():
    q, k, v = inputs()
    for p, seed in (
        (0.1, (1, 2)),
        (0.1, (3, 4)),
        (0.5, (1, 2)),
        (0.0, (1, 2)),
        (0.0, None),
        (0.1, (1, 2)),
        (1e-9, None),
    ):
        found, expected = (
            attention(q, k, v, dropout_p=p, dropout_seed=seed, backend=backend) for backend in (None, "reference")
        )
        torch.testing.assert_close(found, expected)


def test_gradients_are_those_of_the_forward_whatever_is_drawn_between():
    q, k, v = inputs()
    torch.manual_seed(1)
    o = attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(2)
    found = torch.autograd.grad(o.square().sum(), (q, k, v))
    torch.manual_seed(1)
    expected = torch.autograd.grad(attention(q, k, v, dropout_p=0.3, backend="reference").square().sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


def test_a_seed_that_changed_before_the_backward_is_an_error():
    q, k, v = inputs()
    seed = torch.tensor([1, 2])
    o = attention(q, k, v, dropout_p=0.3, dropout_seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_with_their_seed(use_reentrant):
    q, k, v = inputs()

    def block(q, k, v):
        return attention(q, k, v, dropout_p=0.3).square()

    results = []
    for call in (block, lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        o = call(q, k, v)
        torch.rand(3)
        results.append([o, *torch.autograd.grad(o.sum(), (q, k, v))] if not use_reentrant else backward_of(o, q, k, v))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def backward_of(o: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The same where only ``backward`` may be called."""
    for x in leaves:
        x.grad = None
    o.sum().backward()
    return [o, *(x.grad for x in leaves)]


@pytest.mark.parametrize("seed", [None, "tensor", (11, 12)])
def test_compile(seed):
    q, k, v = inputs()
    given = torch.tensor([11, 12]) if seed == "tensor" else seed

    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.3, dropout_seed=given, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = []
    for g in (compiled, f, compiled):
        torch.manual_seed(6)
        o = g(q, k, v)
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=0)
    torch.testing.assert_close(results[0], results[1])
    assert (seed is None) != torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_vmap():
    """Randomness as torch.func.vmap's argument says: one mask for all, one for each, or an error."""
    stacked = [torch.randn(3, 1, 2, n, 6) for n in (5, 7, 7)]
    same = [x[:1].expand_as(x) for x in stacked]

    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(f)(*stacked)
    o = torch.vmap(f, randomness="same")(*same)
    assert torch.equal(o[0], o[1])
    o = torch.vmap(f, randomness="different")(*same)
    assert not torch.equal(o[0], o[1])
    found, expected = (
        torch.vmap(
            torch.func.grad(lambda *x, by=by: attention(*x, dropout_p=0.5, dropout_seed=(1, 2), backend=by).sum())
        )(*stacked)
        for by in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected)


def test_the_door_of_pytorch():
    q, k, v = inputs()
    torch.manual_seed(9)
    o = tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(9)
    torch.testing.assert_close(o, attention(q, k, v, dropout_p=0.3, backend="reference"))
    flattened = tilewise.scaled_dot_product_attention(
        *(x.detach().unflatten(0, (1, 2)) for x in (q, k, v)), None, 0.3, True
    )
    assert flattened.shape == (1, *o.shape)
    for p in (1.0, 1):
        found, expected = (
            f(q, k, v, dropout_p=p)
            for f in (tilewise.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
        )
        assert (found == 0).all()
        assert (expected == 0).all()
        assert all((x == 0).all() for x in torch.autograd.grad(found.sum(), (q, k, v)))


def test_a_model_that_trains():
    """The mean over many masks is attention without dropout."""
    q, k, v = inputs(requires_grad=False)
    many = [x[:1].expand(2000, -1, -1, -1) for x in (q, k, v)]
    found = attention(*many, dropout_p=0.2, dropout_seed=(3, 4))
    expected = attention(q[:1], k[:1], v[:1])
    error = (found.mean(0) - expected[0]).abs() / (found.std(0) / math.sqrt(2000))
    assert error.max() < 5


def test_deterministic_repeats_bit_by_bit():
    q, k, v = inputs()

    def gradients():
        o = attention(q, k, v, dropout_p=0.2, dropout_seed=(1, 2), deterministic=True)
        return torch.autograd.grad(o.square().sum(), (q, k, v))

    assert all(map(torch.equal, gradients(), gradients()))


def test_flops_and_explanation():
    q, k, v = inputs()
    e, without = explain(q, k, v, dropout_p=0.1), explain(q, k, v)
    assert "dropout: 10% of the probabilities are 0, the others 1.11 times as large" in str(e)
    assert "dropout" not in str(without).replace("has no dropout", "")
    assert (e.forward, e.backward) == (without.forward, without.backward)


def test_no_keys_and_no_queries():
    q, k, v = inputs()
    for x in ((q, k[:, :, :0], v[:, :, :0]), (q[:, :, :0], k, v)):
        o, lse = attention(*x, dropout_p=0.3, return_lse=True)
        assert (o == 0).all()
        assert (lse == -math.inf).all()
        assert all((y == 0).all() for y in torch.autograd.grad(o.sum() + lse.exp().sum(), x))


PAIR = "dropout_seed: expected a pair (seed, offset) of ints, or an int64 tensor of shape (2,), got "
TENSOR = "dropout_seed: expected (seed, offset), int64 of shape (2,), got "
BAD = [
    (5, TypeError, PAIR + "5"),
    ((1, 2, 3), TypeError, PAIR + "(1, 2, 3)"),
    ((1, 0.5), TypeError, PAIR + "(1, 0.5)"),
    ((1, 2**64), ValueError, f"dropout_seed: expected numbers of 64 bits, got (1, {2**64})"),
    (torch.zeros(2), ValueError, TENSOR + "torch.float32 of shape (2,)"),
    (torch.zeros(3, dtype=torch.int64), ValueError, TENSOR + "torch.int64 of shape (3,)"),
    (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "dropout_seed: must be on q's device cpu, got meta"),
]


@pytest.mark.parametrize(("seed", "error", "message"), BAD, ids=lambda x: str(getattr(x, "shape", x))[:40])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_errors(p, seed, error, message):
    for function in (attention, explain):
        with pytest.raises(error) as found:
            function(*inputs(), dropout_p=p, dropout_seed=seed)
        assert str(found.value) == message


def test_the_operator_wants_both_or_none():
    q, k, v = inputs()
    for p, seed in ((0.1, None), (0.0, torch.tensor([1, 2]))):
        with pytest.raises(ValueError, match=r"^seed: goes with dropout"):
            attention_op(Inputs(q, k, v, None, None, seed=seed), Score.of(Band(), 8, dropout_p=p), False, "auto")


def test_what_the_operator_refuses():
    x = inputs()
    score = Score.of(Band(), 8, dropout_p=0.1)
    for seed, message in ((torch.zeros(2), "expected (seed, offset)"), (torch.zeros(3, 2).long()[:2, 0], "contiguous")):
        with pytest.raises(ValueError, match=re.escape(message)):
            attention_op(Inputs(*x, None, None, seed=seed), score, False, "auto")
    with pytest.raises(NotImplementedError, match="dropout_p: dropout has no form in ONNX"):
        plain.attention(*Inputs(*x, None, None, seed=torch.tensor([1, 2])), score)


@pytest.mark.parametrize(("name", "hint"), [("seed", "dropout_seed="), ("dropout", "dropout_p=")])
def test_names_that_others_have(name, hint):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'; tilewise.attention takes {hint}"):
        attention(*inputs(), **{name: 1})
