"""Dropout on the device: its kernels by the error rule of helpers.py, whose mask numpy makes score by score; the
same mask as the CPU's; and what a call with a seed meets on its way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from forced import check_origin, check_split
from helpers import DROPOUT_SEED, Case, check, differentiate, dropout_mask, hold, tensors
from torch.utils.checkpoint import checkpoint

from tilewise import attention, explain, scaled_dot_product_attention
from tilewise.bias import t5_bias
from tilewise.spec import dropout

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Case(B=2, H=4, Hkv=2, M=239, N=432, D=64, dtype=BRAIN, dropout_p=0.1)
TERMS = [
    {},
    {"D": 128, "causal": True, "dtype": HALF},
    {"D": 128, "M": 700, "causal": True, "dropout_p": 0.5},  # the first queries see nothing
    {"D": 32, "window": (100, 30), "M": 1, "N": 3, "lse": False},
    {"D": 256, "causal": True, "M": 129, "N": 129},
    {"D": 128, "softcap": 2.0, "sink": "h"},
    {"D": 72, "Dv": 40, "layout": "sliced", "dtype": HALF},
    {"bias": "1hmn", "deterministic": True},
    {"bias": "bhmn", "bias_hides": True, "blind": True, "D": 128, "causal": True, "deterministic": True},
    {"bias": "b11n", "planted": math.nan, "sink": "bhm", "sink_none": True},
    {"bias": "bkm1", "bias_dtype": FLOAT, "layout": "heads_last"},
    {"mask": "b1mn", "blind": True, "D": 128, "M": 1000, "N": 1024},
    {"mask": "bhmn", "planted": math.inf, "D": 256, "bias": "1hmn", "softcap": 2.0},
    {"dtype": FLOAT, "D": 48, "bias": "11mn", "mask": "b11n", "grads": "qb"},
    {"dropout_p": 1.0, "sink": "h"},
    {"Hkv": None, "M": 1023, "N": 799, "dropout_p": 0.9},
]


# Each row sees one key: its dS is 0, if D has what rounding takes of O.
ONE_KEY = [
    {"D": 64},
    {"D": 32, "dtype": HALF},
    {"D": 128},
    {"D": 128, "Dv": 64, "dtype": HALF, "deterministic": True},
    {"D": 256},
    {"D": 64, "bias": "1hmn"},
    {"D": 128, "bias": "1hmn", "layout": "padded"},
    {"D": 128, "bias": "b11n"},
    {"D": 128, "mask": "b11n", "planted": math.nan, "sink": "h"},
]
# What the Hopper kernels compute another way, or with other tiles.
HOPPER_TERMS = [
    {"D": 64, "M": 1023, "N": 799},  # subtiles of queries
    {"D": 64, "M": 640, "N": 640, "causal": True, "deterministic": True},
    {"D": 128, "M": 640, "N": 640, "deterministic": True},
    {"D": 256, "M": 257, "N": 384, "deterministic": True},
    {"D": 32, "H": 4, "Hkv": None, "bias": "1hmn", "M": 256, "N": 256},
    {"D": 64, "bias": "bhmn", "bias_dtype": FLOAT, "softcap": 2.0},
    {"D": 64, "M": 127, "N": 3, "dropout_p": 0.5, "lse": False},
    {"D": 128, "Hkv": 1, "mask": "b11n", "planted": math.nan, "M": 799, "N": 1023},
]
NOT_HOPPERS = [
    {"D": 72, "Dv": 40, "layout": "sliced", "dtype": HALF},
    {"bias": "bkm1", "bias_dtype": FLOAT, "layout": "heads_last"},
]
HOPPER = torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = [x for x in TERMS if x.get("dtype") != FLOAT and x not in NOT_HOPPERS] + HOPPER_TERMS
BACKENDS = ["triton"] + ["hopper"] * HOPPER


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("terms", ONE_KEY, ids=str)
def test_rows_that_see_one_key(terms, backend):
    one = {"M": 432, "window": (0, 0), "dropout_p": 0.9, "lse": False}
    check(replace(USUAL, **one, **terms), backend, "cuda")


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_dropout(terms):
    check(replace(USUAL, **{"layout": "padded", **terms}), "triton", "cuda")


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("terms", ON_HOPPER, ids=str)
def test_dropout_on_hopper(terms):
    check(replace(USUAL, **{"layout": "padded", **terms}), "hopper", "cuda")


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize(("D", "causal"), [(64, False), (64, True), (128, False)])
def test_beside_a_toeplitz_bias_on_hopper(D, causal):
    """T5's table, as models train it: no further from float64 on the CPU than twice what the Triton kernels are."""
    shapes = [(2, 4, 799, D), (2, 2, 1023, D), (2, 2, 1023, D), (32, 4)]
    generator = torch.Generator().manual_seed(1)
    exact = [torch.randn(shape, generator=generator).to(BRAIN).double() for shape in shapes]
    do = torch.randn(2, 4, 799, D, generator=generator).to(BRAIN)

    def results(leaves, do, backend):
        leaves = [x.detach().requires_grad_() for x in leaves]
        *qkv, table = leaves
        bias = t5_bias(table, bidirectional=not causal)
        o = attention(*qkv, bias=bias, causal=causal, dropout_p=0.2, dropout_seed=DROPOUT_SEED, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    expected = results(exact, do.double(), "cpu")
    on_device = [x.to("cuda", BRAIN) for x in exact]
    found = [results(on_device, do.cuda(), backend) for backend in ("hopper", "triton")]
    for hopper, triton, want in zip(*found, expected, strict=True):
        errors = [(x.double().cpu() - want).abs().max().item() for x in (hopper, triton)]
        assert errors[0] <= 2 * errors[1] + 1e-3 * want.abs().max().item()


@pytest.mark.parametrize("splits", [1, 2, 40])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"sink": "bhm", "M": 3, "causal": True, "bias": "bhmn", "D": 128},
        {"M": 5, "mask": "1hmn", "blind": True, "grads": "qkv"},
        {"M": 9, "N": 4096, "dtype": HALF, "Hkv": 1},
    ],
    ids=str,
)
def test_few_queries(terms, splits):
    check_split(replace(USUAL, **{"H": 8, "M": 1, "N": 1023, "grads": "", "dropout_p": 0.3, **terms}), splits, "cuda")


# --- the mask ---


def dropped(B, H, M, N, device="cuda", dtype=BRAIN, D=64, **options):
    """Bool (B, H, M, N): all scores are equal and values are unit vectors, 128 keys at a time."""
    q, k = (torch.zeros(B, H, n, D, device=device, dtype=dtype) for n in (M, N))
    found = []
    for n in range(0, N, 128):
        v = torch.zeros(B, H, N, 128, device=device, dtype=dtype)
        width = min(128, N - n)
        v[:, :, n : n + width, :width] = torch.eye(width, device=device, dtype=dtype)
        found.append(attention(q, k, v, dropout_seed=DROPOUT_SEED, **options)[..., :width] == 0)
    return torch.cat(found, -1)


@pytest.mark.parametrize(("dtype", "D"), [(BRAIN, 64), (HALF, 128), (FLOAT, 32), (BRAIN, 256), (HALF, 16)])
@pytest.mark.parametrize("sizes", [(2, 3, 130, 300), (1, 2, 1, 3), (1, 4, 3, 1100)])
def test_the_same_mask_as_on_a_cpu(sizes, dtype, D):
    found = dropped(*sizes, dtype=dtype, D=D, dropout_p=0.3)
    assert torch.equal(found.cpu(), dropped(*sizes, device="cpu", dtype=FLOAT, dropout_p=0.3))
    B, H, M, N = sizes
    assert torch.equal(found.cpu(), ~dropout_mask(Case(B=B, H=H, M=M, N=N, dropout_p=0.3)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("terms", [{"causal": True}, {"deterministic": True}, {"mask": True}, {"bias": True}], ids=str)
def test_the_backward_has_it_too(terms, backend):
    """dV of unit cotangents is the transposed mask, whatever kernel and tiles compute it."""
    B, H, M, N = 2, 4, 96, 304
    q = torch.zeros(B, H, M, 64, device="cuda", dtype=BRAIN)
    k = torch.zeros(B, H // 2, N, 64, device="cuda", dtype=BRAIN)
    v = torch.zeros(B, H // 2, N, M, device="cuda", dtype=BRAIN, requires_grad=True)
    options = dict(terms)
    if "mask" in terms:
        options["mask"] = torch.ones(B, 1, M, N, device="cuda", dtype=torch.bool)
    if "bias" in terms:
        options["bias"] = torch.zeros(1, H, M, N, device="cuda", dtype=BRAIN, requires_grad=True)
    o = attention(q, k, v, dropout_p=0.5, dropout_seed=DROPOUT_SEED, backend=backend, **options)
    do = torch.eye(M, device="cuda", dtype=BRAIN).expand(B, H, M, M).contiguous()
    for head in range(2):  # of each group one at a time
        one = torch.zeros(H, 1, 1, device="cuda", dtype=BRAIN)
        one[head::2] = 1
        (dv,) = torch.autograd.grad(o, v, do * one, retain_graph=True)
        kept = dropout_mask(Case(B=B, H=H, M=M, N=N, dropout_p=0.5))[:, head::2]
        if terms.get("causal"):
            kept = kept.tril(N - M)
        assert torch.equal(dv.mT.cpu() != 0, kept)


@pytest.mark.parametrize("origin", [(48, 0, 0), (5, 16, 3), (32, 27, 2)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_call(backend, origin, deterministic):
    dtype = HALF if backend == "hopper" else FLOAT
    check_origin(backend, dropout.Origin(*origin), deterministic, "cuda", dtype)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("p", [1 / 65536, 0.5, 0.5 + 1 / 65536, 0.9, 65535 / 65536])
def test_any_share_on_hopper(p):
    """Numbers are compared another way from a half on."""
    found = dropped(1, 2, 200, 300, D=64, dropout_p=p, backend="hopper")
    assert torch.equal(found.cpu(), ~dropout_mask(Case(B=1, H=2, M=200, N=300, dropout_p=p)))


def test_drawn_seeds():
    """torch.manual_seed repeats them, the mask changes from call to call, and the share is right."""
    q, k, v = (torch.zeros(4, 16, 512, 64, device="cuda", dtype=BRAIN) for _ in range(3))
    v[:, :, :64] = torch.eye(64, device="cuda")
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found += [attention(q, k, v, dropout_p=0.1) == 0 for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[4])
    n = found[0].numel()
    assert abs(found[0].double().mean().item() - 0.1) < 5 * math.sqrt(0.09 / n)


# --- what a call meets on its way ---


def normal(*shape, requires_grad=True):
    return torch.randn(shape, device="cuda", dtype=BRAIN).requires_grad_(requires_grad)


def step(x, seed=None, **options):
    o = attention(*x, dropout_p=0.2, dropout_seed=seed, **options)
    return [o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o))]


def test_the_plan_takes_the_fastest():
    x = [normal(2, 4, 4096, 128) for _ in range(3)]
    plan = explain(*x, dropout_p=0.1).plan
    assert (plan.backend, plan.backward) == (BACKENDS[-1], BACKENDS[-1])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls this mode a prototype
@pytest.mark.parametrize("seed", [None, (3, 4), "tensor"])
def test_a_call_does_not_wait_for_the_device(seed):
    x = [normal(1, 2, 128, 64) for _ in range(3)]
    seed = torch.tensor([3, 4], device="cuda") if seed == "tensor" else seed
    torch.cuda.synchronize()
    for mode in ("default", "error", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            step(x, seed)
            scaled_dot_product_attention(*x, dropout_p=0.2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_draws_anew_at_each_replay():
    x = [normal(1, 2, 256, 64) for _ in range(3)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(x)
    replays = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        replays.append([y.clone() for y in results])
        # the backward had the forward's mask: <dO, O> = <dV, V>
        o, *_, dv = replays[-1]
        expected = o.double().sum()
        torch.testing.assert_close((dv.double() * x[2]).sum(), expected, rtol=2e-2, atol=2.0)
    assert not torch.equal(replays[0][0], replays[1][0])
    assert not torch.equal(replays[1][0], replays[2][0])


def test_a_cuda_graph_with_a_seed_of_its_own():
    """Captured with a pair it keeps the pair; a seed tensor may be written to between replays."""
    case = replace(USUAL, M=128, N=256)
    x = tensors(case, "cuda")
    seed = torch.zeros(2, dtype=torch.int64, device="cuda")
    y = [normal(1, 2, 256, 64) for _ in range(3)]

    def both():
        pair = differentiate(case, x, lambda x: attention(x.q, x.k, x.v, **case.terms, return_lse=True))
        return pair, step(y, seed)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, others = both()
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        hold(case, results, "cuda", x)
        # dQ is a sum by reduce-adds, in no fixed order
        for found, expected in zip(others, step(y, (value, value)), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert torch.equal(others[0], step(y, (value, value))[0])


def test_gradients_repeat_bit_by_bit():
    x = [normal(2, 4, 1000, 128) for _ in range(3)]
    first = step(x, (5, 6), deterministic=True, causal=True)
    for _ in range(10):
        assert all(map(torch.equal, step(x, (5, 6), deterministic=True, causal=True), first))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_with_their_seed(use_reentrant):
    x = [normal(2, 4, 256, 64) for _ in range(3)]

    def block(q, k, v):
        return attention(q, k, v, dropout_p=0.3, deterministic=True)

    results = []
    for call in (block, lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        o = call(*x)
        torch.rand(3, device="cuda")
        for y in x:
            y.grad = None
        o.sum().backward()
        results.append([o, *(y.grad for y in x)])
    assert all(map(torch.equal, *results))


# PyTorch's compiler warns of its own doings, differently in each release.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", [None, (11, 12), "tensor"])
def test_compile(seed):
    """One graph, whose backward has the mask of its forward; with a given seed the eager call's."""
    x = [normal(2, 4, 256, 64) for _ in range(3)]
    given = torch.tensor([11, 12], device="cuda") if seed == "tensor" else seed

    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.3, dropout_seed=given, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True)
    results = []
    for _ in range(2):
        torch.manual_seed(6)
        o = compiled(*x)
        do = torch.randn_like(o)
        results.append((o, do, *torch.autograd.grad(o, x, do)))
        o, do, *_, dv = results[-1]
        torch.testing.assert_close(
            (dv.double() * x[2]).sum(), (o.double() * do).sum(), rtol=2e-2, atol=0.02 * o.norm().item()
        )
    assert torch.equal(results[0][0], results[1][0])
    assert (seed is None) != torch.equal(compiled(*x), results[0][0])
    if seed is not None:
        assert torch.equal(results[0][0], f(*x))


def test_a_new_share_compiles_nothing():
    from tilewise.cache import kernels

    x = [normal(1, 2, 256, 56) for _ in range(3)]  # of no other test: a launch made for other lengths has their tiles
    step(x)
    known = kernels._older | kernels._recent
    for p in (0.1, 0.25, 0.5, 1 / 32768, 0.9):
        o = attention(*x, dropout_p=p)
        torch.autograd.grad(o, x, torch.ones_like(o))
    assert kernels._older | kernels._recent == known


def test_more_than_two_to_the_31st_scores():
    """Places count in their own sequence and head: no index runs over."""
    B, H, M, N = 3, 700, 1024, 1024
    q, k, v = (torch.zeros(B, H, n, 16, device="cuda", dtype=BRAIN) for n in (M, N, N))
    v[:, :, -16:] = torch.eye(16, device="cuda")
    found = attention(q, k, v, dropout_p=0.5, dropout_seed=DROPOUT_SEED)[-1, -1] != 0
    few = attention(*(x[:, :1].cpu().float() for x in (q, k, v)), dropout_p=0.5, dropout_seed=DROPOUT_SEED)
    assert not torch.equal(found.cpu(), few[-1, -1] != 0)
    seed = torch.tensor([DROPOUT_SEED[0] - 2**64, DROPOUT_SEED[1]])
    words = dropout.stream(seed, torch.tensor([[B - 1]]), torch.tensor([[H - 1]]))
    expected = dropout.kept(words, torch.arange(M)[:, None], torch.arange(N - 16, N), 16384)
    assert torch.equal(found.cpu(), expected)
