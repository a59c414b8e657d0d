"""Masks by tiles on the device: kernels against the reference with the bool mask, by the error rule, what is
made on the device against what a CPU makes, and equal bits of equal calls."""

from __future__ import annotations

import math
from dataclasses import replace

import helpers
import pytest
import torch
from helpers import Case, hold, run, tensors
from tile_mask_helpers import PATTERNS, check, check_kept, check_wrong, pattern
from torch.nn.attention.flex_attention import create_block_mask

from tilewise import TileMask, attention, dynamic_mask
from tilewise.backends import Inputs
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise.topk import gather
from tilewise.topk.selection import running_smallest

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
hopper_alone = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
HOPPER = pytest.param("hopper", marks=hopper_alone)
both_backends = pytest.mark.parametrize("backend", ["triton", HOPPER])
USUAL = Case(B=2, H=4, Hkv=2, M=799, N=799, D=64, dtype=BRAIN)
TERMS = [
    {},
    {"D": 128, "causal": True, "bias": "1hmn", "dtype": HALF},
    {"bias": "11mn", "deterministic": True},
    {"bias": "bkm1", "layout": "heads_last"},
    {"sink": "bhm", "softcap": 9.0},
    {"D": 256, "window": (300, 50), "bias": "bhmn", "grads": "b"},
    {"B": 1, "H": 8, "D": 32, "bias": "b11n", "dtype": HALF, "deterministic": True},
    {"bias": "1hmn", "bias_dtype": FLOAT, "M": 700, "deterministic": True},
    {"B": 4, "Hkv": 4, "D": 128, "bias": "11mn"},  # more share it than a group of programs has
    {"B": 3, "H": 8, "Hkv": 4, "M": 799, "bias": "11mn", "deterministic": True},
]
FOR_TRITON = [
    {"dropout_p": 0.2, "window": (300, 50), "layout": "sliced"},
    {"dtype": FLOAT, "D": 48, "bias": "bhmn", "grads": "b"},
]


@both_backends
@pytest.mark.parametrize("block", [64, (128, 64), (64, 192), 256], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(backend, name, block):
    check(USUAL, name, backend, block, "cuda")


@both_backends
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("name", ["bits", "window"])
def test_beside_other_terms(backend, name, terms):
    check(replace(USUAL, **{"M": 800, "N": 800, **terms}), name, backend, 128, "cuda")


@pytest.mark.parametrize("mask", ["bhmn", "1kmn", "b11n"])
@hopper_alone
def test_a_shared_dbias_under_a_bool_mask(mask):
    helpers.check(replace(USUAL, B=4, H=8, Hkv=4, M=800, N=800, bias="11mn", mask=mask), "hopper", "cuda")


@pytest.mark.parametrize(("heads", "M"), [(1, 1471), (2, 1475)])
@pytest.mark.parametrize("terms", [{}, {"causal": True}, {"B": 4, "bias": "1hmn"}, {"grads": "qkv", "D": 64}], ids=str)
@hopper_alone
def test_few_heads_run_together(monkeypatch, heads, M, terms):
    """As where the L2 cache has room for no more of those that share a bias: lengths that no other test has."""
    case = replace(USUAL, **{"B": 1, "H": 8, "Hkv": 8, "M": M, "N": 1504, "D": 128, "bias": "11mn", **terms})
    room = heads * M * case.D * 8
    monkeypatch.setattr(config, "L2_CACHE", room)
    monkeypatch.setattr(launch, "L2_CACHE", room)
    check(case, "bits", "hopper", 128, "cuda")
    check(case, "strided", "hopper", 64, "cuda")  # whose tiles stay as they lie


@pytest.mark.parametrize("terms", FOR_TRITON, ids=str)
def test_terms_for_triton(terms):
    check(replace(USUAL, **terms), "bits", "triton", 128, "cuda")


@pytest.mark.parametrize(
    ("M", "N"), [(1, 1), (1, 1023), (3, 2000), (127, 129), (129, 127), (1000, 3), (2048, 2048)], ids=str
)
@both_backends
@pytest.mark.parametrize("name", ["bits", "window"])
def test_lengths(backend, name, M, N):
    check(replace(USUAL, M=M, N=N, D=128), name, backend, 128, "cuda")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@both_backends
@pytest.mark.parametrize("name", ["bits", "documents"])
def test_hidden_nan(backend, name, value):
    check(replace(USUAL, M=800, N=800, planted=value, bias="11mn"), name, backend, 64, "cuda")


LONG = replace(USUAL, B=1, M=4500, N=4500)  # more tiles than programs
FOR_DOCUMENTS = [
    {},
    {"D": 128, "causal": True},
    {"D": 128, "Hkv": 4, "dtype": HALF, "planted": math.nan},
    {"sink": "bhm", "softcap": 9.0, "causal": True, "layout": "heads_last"},
    {"D": 256, "deterministic": True, "sink": "h"},
]


@hopper_alone
@pytest.mark.parametrize("terms", FOR_DOCUMENTS, ids=str)
@pytest.mark.parametrize("name", ["documents", "long documents"])
def test_documents(name, terms):
    """Short ones by the mask's kernel, long ones as a packed batch."""
    check(replace(LONG, **terms), name, "hopper", 128, "cuda")


@hopper_alone
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls this mode a prototype
@pytest.mark.parametrize(("length", "packed"), [(39, False), (900, True)])
def test_which_kernel_has_the_tiles_of_documents(length, packed):
    from tilewise.backends.gluon.sm90.forward.launch import HopperForward

    found = TileMask.documents(torch.arange(LONG.N, device="cuda") // length)
    q = torch.randn(1, 8, LONG.M, 64, device="cuda", dtype=BRAIN)
    inputs = Inputs(q, q, q, None, None, tiles=found.tensors)
    run = HopperForward(Problem.of(*inputs, Score(0.125, None, Band())), inputs)
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            _, lists = run.documents(None, found.tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (int(lists.packed_list[0]) > 0) == packed
    assert int(lists.counts[1]) == (0 if packed else 8 * 36)


@both_backends
def test_wrong_numbers_reach_no_memory(backend):
    check_wrong(replace(USUAL, M=800, N=800, bias="11mn"), backend, "cuda")


MADE = {
    "documents": lambda device: TileMask.documents(torch.arange(1000, device=device) // 300 - 1),
    "prefix": lambda device: TileMask.prefix_lm(torch.tensor([3, 700], device=device), 1000),
    "tree": lambda device: TileMask.tree([[(400, [200, (90, [7, 130])])], [3, (0, [1])]], size=1000, device=device),
    "window": lambda device: TileMask.sliding_window(700, 1000, (90, 20), global_tokens=5, device=device),
    "dilated": lambda device: TileMask.dilated(700, 1000, 20, 3, device=device),
    "strided": lambda device: TileMask.strided(700, 1000, 50, device=device),
    "function": lambda device: TileMask.from_mask_mod(
        lambda b, h, q, kv: (q // 64 + kv // 100) % 3 == 0, 700, 1000, device=device
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_made_on_the_device(make):
    """Each constructor gives the bits that it gives on a CPU."""
    for x, y in zip(make("cuda").tensors, make("cpu").tensors, strict=True):
        assert x is y is None or torch.equal(x.cpu(), y)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls this mode a prototype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 1000])
def test_dynamic_masks(causal, rows):
    """The keys that a CPU keeps, ties among them; the call waits for nothing."""
    scores = torch.randn(2, 4, rows, 1000, device="cuda").mul(8).round()
    expected = dynamic_mask(scores.cpu(), keep=100, causal=causal, queries=1000)
    q, k, v = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            mask = dynamic_mask(scores, keep=100, causal=causal, queries=1000)
            attention(q, k, v, mask=mask, causal=causal).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(mask.dense().cpu(), expected.dense())
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.fixture
def gathered(monkeypatch):
    """Small calls are gathered too."""
    monkeypatch.setattr(gather, "WORTH", {"cuda": 0.0})


@both_backends
@pytest.mark.parametrize(
    ("causal", "heads", "more"),
    [
        (False, 2, {}),
        (True, 2, {}),
        (True, 1, {"causal": True, "bias": "1h1n", "sink": "h", "D": 128, "M": 799, "layout": "heads_last"}),
        (False, 2, {"causal": True, "bias": "b11n", "sink": "bhm", "deterministic": True}),
        (True, 2, {"window": (500, 0), "bias": "1k1n", "softcap": 9.0, "D": 96, "dtype": HALF}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gathered")
def test_gathered_keys(backend, causal, heads, more):
    case = replace(USUAL, **{"M": 1000, "N": 1000, **more})
    scores = torch.randn(1, heads, 1, case.N, device="cuda").mul(100).round()
    found = dynamic_mask(scores, keep=100, causal=causal, queries=case.M)
    inputs = tensors(case, "cuda")._replace(mask=found.dense())
    hold(case, run(case, backend, "cuda", inputs._replace(mask=found)), "cuda", inputs)


@pytest.mark.usefixtures("gathered")
def test_gathered_keys_past_two_to_the_31():
    """Rows of k and v 2²² elements apart."""
    case = replace(USUAL, M=1000, N=1000)
    found = dynamic_mask(torch.randn(1, 1, 1, case.N, device="cuda"), keep=100, queries=case.M)
    inputs = tensors(case, "cuda")._replace(mask=found.dense())
    spread, far, at = torch.full((case.N, 2**22), math.nan, dtype=case.dtype, device="cuda"), [], 0
    for x in (inputs.k, inputs.v):
        B, heads, _, D = x.shape
        rows = spread[:, at : at + B * heads * D].unflatten(1, (B, heads, D))
        far.append(rows.permute(1, 2, 0, 3).copy_(x))
        at += B * heads * D
    assert (case.N - 1) * far[0].stride(2) > 2**31
    hold(case, run(case, "triton", "cuda", inputs._replace(k=far[0], v=far[1], mask=found)), "cuda", inputs)


@pytest.mark.parametrize("n", [1, 2, 127, 5000, 32768])
def test_when_keys_go(n):
    """The kernel finds what PyTorch's operators find on a CPU."""
    order = torch.rand(2, 3, n).argsort(-1)
    for w in (1, 100, n):
        assert torch.equal(running_smallest(order.cuda(), w).cpu(), running_smallest(order, w).int())


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (2048, 4096), (5000, 777)])
def test_tiles_of_intervals(queries, keys):
    """The same tiles as on a CPU; also of no matrices."""
    begins = torch.randint(0, queries + 1, (2, 3, keys))
    ends = torch.randint(0, queries + 1, begins.shape)
    begins[1, 0], ends[1, 0], ends[1, 1] = 0, queries, 0
    for block in (64, 128, (64, 192)):
        made = [TileMask.from_intervals(x, y, queries, block=block).tensors
                for x, y in ((begins.cuda(), ends.cuda()), (begins, ends))]  # fmt: skip
        assert all(x is y is None or torch.equal(x.cpu(), y) for x, y in zip(*made, strict=True))
    assert TileMask.from_intervals(begins[:0].cuda(), ends[:0].cuda(), queries).tensors.tiles.numel() == 0


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4096, 4096), (5000, 777), (777, 5000)])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_made_is_what_a_cpu_makes(queries, keys, causal):
    """Intervals, tiles and gathered keys, of scores with ties."""
    scores = torch.randn(2, 3, 1, keys).mul(100).round()
    way = gather.Gather(2, -(-queries // 2), min(keys, 130 + -(-queries // 2)), True)
    for block in (64, 128, (64, 192)):
        made = [
            dynamic_mask(x, keep=130, causal=causal, queries=queries, block=block).tensors
            for x in (scores.cuda(), scores)
        ]
        assert all(x is y is None or torch.equal(x.cpu(), y) for x, y in zip(*made, strict=True))
    kept = [x for x in made if x.begins is not None]
    assert len(kept) == 2 * (keys > 130)  # else every key is, and no interval says so
    for band in (Band(), Band(-90, 7)) if kept else ():
        found, wanted = (gather.of_chunks(x.begins, x.ends, band, way, 2) for x in kept)
        assert torch.equal(found[0].cpu().long(), wanted[0])
        assert all(x is y is None or torch.equal(x.cpu(), y) for x, y in zip(found[1], wanted[1], strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls this mode a prototype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("gathered")
def test_gathered_keys_wait_for_nothing_and_have_equal_bits(causal):
    scores = torch.randn(2, 4, 1, 1000, device="cuda")
    q, k, v = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
    results = []
    for mode in ("default", *["error"] * 10):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            o = attention(q, k, v, mask=dynamic_mask(scores, keep=100, causal=causal), deterministic=True)
            results.append([o.detach(), *torch.autograd.grad(o.sum(), (q, k, v))])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for found in results[1:]:
        assert all(map(torch.equal, results[0], found))


def test_a_block_mask():
    ids = torch.arange(1000, device="cuda") // 300
    block_mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 1000, 1000)
    q, k, v = tensors(replace(USUAL, M=1000, N=1000), "cuda")[:3]
    expected = attention(q, k, v, mask=(ids[:, None] == ids)[None, None])
    torch.testing.assert_close(attention(q, k, v, mask=block_mask), expected)
    torch.testing.assert_close(attention(q, k, v, mask=TileMask.documents(ids)), expected)


@both_backends
@pytest.mark.parametrize("name", ["bits", "documents"])
def test_equal_bits(backend, name):
    case = replace(USUAL, M=800, N=800, bias="11mn")
    here = pattern(name, case, 128)[0].to("cuda")
    inputs = tensors(case, "cuda")
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.bias)]

    def results():
        o = attention(*leaves[:3], bias=leaves[3], mask=here, deterministic=True, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]

    first = results()
    for _ in range(100):
        assert all(map(torch.equal, first, results()))


@both_backends
def test_lists_are_kept_while_a_mask_stays_as_it_is(backend):
    check_kept(replace(USUAL, M=800, N=800, bias="1hmn", deterministic=True), backend, "cuda")


@both_backends
def test_a_graph_makes_its_own_lists(backend):
    """They outlive those that are kept, and follow the mask's numbers."""
    case = replace(USUAL, M=800, N=800)
    q, k, v, *_ = tensors(case, "cuda")
    mask = pattern("bits", case, 128)[0].to("cuda")
    with torch.no_grad():
        for _ in range(3):
            attention(q, k, v, mask=mask, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = attention(q, k, v, mask=mask, backend=backend)
        mask.tensors.tiles.copy_(mask.tensors.tiles.flip(-1))
        graph.replay()
        assert torch.equal(o, attention(q, k, v, mask=mask, backend=backend))


@both_backends
def test_lists_of_one_stream_are_not_read_on_another(backend):
    case = replace(USUAL, M=2048, N=2048)
    q, k, v, *_ = tensors(case, "cuda")
    mask = pattern("bits", case, 128)[0].to("cuda")
    side = torch.cuda.Stream()
    with torch.no_grad():
        expected = attention(q, k, v, mask=mask, backend=backend)
        torch.cuda.synchronize()
        torch.cuda._sleep(10**8)  # what is made here is made late
        attention(q, k, v, mask=mask, backend=backend)
        with torch.cuda.stream(side):
            found = attention(q, k, v, mask=mask, backend=backend)
        side.synchronize()
        assert torch.equal(found, expected)
