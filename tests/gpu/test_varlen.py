"""Packed batches on a GPU: every sequence equals a dense call of it on the CPU in float64, by the error rule."""

from __future__ import annotations

import pytest
import torch
from helpers import cached, poisoned_memory

from tilewise import attention, varlen_attention
from tilewise.bias import RaggedBias, RelativeBias, t5_bias

H, HKV = 4, 2
QUERIES = (127, 0, 1, 300, 64, 3, 129)
KEYS = (129, 5, 1, 239, 800, 0, 1)
EDGES_Q, EDGES_K = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (QUERIES, KEYS))
PAIRS = [0, *torch.tensor([m * n for m, n in zip(QUERIES, KEYS, strict=True)]).cumsum(0).tolist()]


def leaf(*shape, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_()


def ragged(dtype):
    values = leaf(H, PAIRS[-1], dtype=dtype, seed=7)
    return RaggedBias(values, torch.tensor(PAIRS, device="cuda")), [values]


def relative(dtype):
    values = leaf(EDGES_Q[-1], H, 65, dtype=dtype, seed=8)
    return RelativeBias(values, lo=-40), [values]


def ahead(dtype):
    """Of keys after the query alone."""
    values = leaf(EDGES_Q[-1], H, 300, dtype=dtype, seed=8)
    return RelativeBias(values, lo=3), [values]


def t5(dtype):
    table = leaf(32, H, dtype=torch.float32, seed=9)
    return t5_bias(table, True), [table]


def keys(dtype):
    values = leaf(H, EDGES_K[-1], dtype=dtype, seed=10)
    return values, [values]


def queries(dtype):
    values = leaf(1, EDGES_Q[-1], 1, dtype=torch.float32, seed=11)
    return values, [values]


def shared(dtype):
    values = leaf(1, PAIRS[-1], dtype=dtype, seed=7)
    return RaggedBias(values, torch.tensor(PAIRS, device="cuda")), [values]


def padded(dtype):
    values = leaf(1, HKV, max(QUERIES), max(KEYS), dtype=dtype, seed=7)
    return values, [values]


def clamped(dtype):
    values = leaf(EDGES_K[-1], 1, 33, dtype=dtype, seed=8)
    return RelativeBias(values, lo=-20, outside="clamp", on="key"), [values]


def buckets(dtype):
    values = leaf(EDGES_Q[-1], HKV, 20, dtype=dtype, seed=8)
    entries = torch.arange(200, device="cuda") * 7 % 20
    return RelativeBias(values, lo=-150, buckets=entries, outside="clamp"), [values]


def own_bias(kind, leaves, b):
    """Of sequence b, as a dense call takes it."""
    if kind is None:
        return None
    (x,) = leaves
    if kind is ragged:
        return x[:, PAIRS[b] : PAIRS[b + 1]].view(1, H, QUERIES[b], KEYS[b])
    if kind is keys:
        return x[:, EDGES_K[b] : EDGES_K[b + 1]].view(1, H, 1, KEYS[b])
    if kind is queries:
        return x[:, EDGES_Q[b] : EDGES_Q[b + 1]].view(1, 1, QUERIES[b], 1)
    if kind is t5:
        return t5_bias(x, True)
    return RelativeBias(x[EDGES_Q[b] : EDGES_Q[b + 1]].transpose(0, 1)[None], lo=-40 if kind is relative else 3)


def one_by_one(q, k, v, kind, leaves, **options):
    """By the reference in float64, or in another backend's own dtype."""
    found = []
    for b in range(len(QUERIES)):
        rows, cols = slice(EDGES_Q[b], EDGES_Q[b + 1]), slice(EDGES_K[b], EDGES_K[b + 1])
        own = [x.transpose(0, 1)[None] for x in (q[rows], k[cols], v[cols])]
        bias = own_bias(kind, leaves, b) if QUERIES[b] and KEYS[b] else None
        found.append(attention(*own, bias=bias, return_lse=True, **options))
    return torch.cat([o[0].transpose(0, 1) for o, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def gradients(o, lse, leaves, do, dlse):
    loss = (o * do.to(o.dtype)).sum() + (lse * dlse.to(lse.dtype)).masked_fill(lse == -torch.inf, 0.0).sum()
    return [o, lse, *torch.autograd.grad(loss, leaves)]


RUNS = [
    *(("triton", kind, 64) for kind in (None, ragged, relative, t5)),
    *(("triton", ragged, dim) for dim in (16, 32, 128, 512)),
    *(("hopper", kind, 64) for kind in (None, keys, queries, relative)),
    *(("hopper", None, dim) for dim in (32, 128, 192, 256)),
    *(("hopper", keys, dim) for dim in (32, 128, 192, 256)),
    *(("hopper", kind, dim) for kind in (relative, ahead) for dim in (32, 128)),
]


def named(x):
    return x.__name__ if callable(x) else str(x)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20), "softcap": 9.0}], ids=str)
@pytest.mark.parametrize(("backend", "kind", "D"), RUNS, ids=named)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sequences(dtype, backend, kind, D, options):
    if backend == "hopper" and kind in (relative, ahead):
        options = {name: x for name, x in options.items() if name != "softcap"}  # which is declined beside them
    q = leaf(EDGES_Q[-1], H, D, dtype=dtype, seed=1)
    Dv = 128 if D == 192 else D
    k, v = (leaf(EDGES_K[-1], HKV, dim, dtype=dtype, seed=seed) for dim, seed in ((D, 2), (Dv, 3)))
    do, dlse = leaf(EDGES_Q[-1], H, Dv, dtype=dtype, seed=4), leaf(H, EDGES_Q[-1], dtype=torch.float32, seed=5)
    bias, leaves = (None, []) if kind is None else kind(dtype)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (EDGES_Q, EDGES_K))
    every = (q, k, v, *leaves)
    with poisoned_memory("cuda"):
        found = varlen_attention(
            q, k, v, cu_q, cu_k, max(QUERIES), max(KEYS), bias=bias, return_lse=True, backend=backend,
            deterministic=False, **options,
        )  # fmt: skip
        ours = gradients(*found, every, do, dlse)
    wide = [x.detach().double().requires_grad_() for x in every]
    exact = gradients(*one_by_one(*wide[:3], kind, wide[3:], backend="reference", **options), wide, do, dlse)
    theirs = gradients(*one_by_one(q, k, v, kind, leaves, backend="triton", **options), every, do, dlse)
    for x, truth, other in zip(ours, exact, theirs, strict=True):
        assert torch.equal(x == -torch.inf, truth == -torch.inf)
        x, truth, other = (y.detach().double().masked_fill(truth == -torch.inf, 0.0) for y in (x, truth, other))
        largest = max(1.0, float(truth.abs().max()))
        # Dense calls of the same backend read a bias as the packed one does, and would share its faults.
        allowed = min(2 * float((other - truth).abs().max()) + 1e-3 * largest, 0.1 * largest)
        assert float((x - truth).abs().max()) <= allowed


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_longest_lengths_share_what_is_prepared(backend):
    q, k, v = (leaf(n, H, 64, dtype=torch.bfloat16, seed=n) for n in (EDGES_Q[-1], EDGES_K[-1], EDGES_K[-1]))
    cu_q, cu_k = (torch.tensor(x, device="cuda") for x in (EDGES_Q, EDGES_K))
    found, kept = [], []
    for more in (0, 1, 30):
        o = varlen_attention(
            q, k, v, cu_q, cu_k, max(QUERIES) + more, max(KEYS) + more, backend=backend, deterministic=True
        )
        found.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
        kept.append((len(cached("forward")), len(cached("backward"))))
    assert kept[0] == kept[1] == kept[2]
    for x in zip(*found, strict=True):
        assert torch.equal(x[0], x[1])
        assert torch.equal(x[0], x[2])


@pytest.mark.parametrize(
    ("backend", "bias_of"),
    [
        *(("triton", kind) for kind in (ragged, shared, padded, keys, queries, t5, clamped, buckets)),
        *(("hopper", kind) for kind in (None, keys, relative)),
    ],
    ids=named,
)
def test_repeats_are_equal(backend, bias_of):
    """With deterministic=True, and as close as another order of additions to what comes without it."""
    q = leaf(EDGES_Q[-1], H, 64, dtype=torch.bfloat16, seed=1)
    k, v = (leaf(EDGES_K[-1], HKV, 64, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (EDGES_Q, EDGES_K))
    bias, leaves = (None, []) if bias_of is None else bias_of(torch.bfloat16)

    def run(deterministic):
        o = varlen_attention(
            q, k, v, cu_q, cu_k, max(QUERIES), max(KEYS), bias=bias, causal=True, deterministic=deterministic,
            backend=backend,
        )  # fmt: skip
        return [o, *torch.autograd.grad(o.float().square().sum(), (q, k, v, *leaves))]

    runs = [run(True) for _ in range(100)]
    assert all(torch.equal(a, b) for found in runs[1:] for a, b in zip(found, runs[0], strict=True))
    for found, other in zip(runs[0], run(False), strict=True):
        assert float((found - other).detach().abs().max()) <= 2e-2 * float(other.detach().abs().max())


def bias_of_rows(kind, leaves):
    """Of a leaf whose first axis is that of all queries or keys."""
    if kind is None:
        return None
    (x,) = leaves
    if kind is relative:
        return RelativeBias(x, lo=-40)
    return x.transpose(0, 1) if kind is keys else x.transpose(0, 1)[:, :, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, keys, queries, relative], ids=named)
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_leaves_neighbours_alone(dim, kind, causal):
    """NaN in the sequences beside it, and in rows past the last, does not reach a sequence; rows of none are zero, with
    an LSE of -inf."""
    total, past = EDGES_Q[-1], 70
    more = {None: [], keys: [(H,)], queries: [(H,)], relative: [(H, 65)]}[kind]
    shapes = ((H, dim), (HKV, dim), (HKV, dim), *more)
    x = [torch.randn(total + past, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    cu = torch.tensor(EDGES_Q, dtype=torch.int32, device="cuda")
    longest = max(QUERIES)

    def found(x):
        leaves = [y.requires_grad_() for y in x]
        o, lse = varlen_attention(
            *leaves[:3], cu, cu, longest, longest, bias=bias_of_rows(kind, leaves[3:]), causal=causal,
            deterministic=True, return_lse=True, backend="hopper",
        )  # fmt: skip
        dlse = torch.where(lse.isfinite(), 0.5, torch.nan)
        dlse[:, :total].nan_to_num_(0.5)
        gradients = torch.autograd.grad((o, lse), leaves, (o.detach(), dlse))
        assert (lse[:, total:] == -torch.inf).all()
        return o, torch.where(lse == -torch.inf, 0.0, lse).transpose(0, 1), *gradients

    clean = found([y.clone() for y in x])
    for b in (0, 3, 5):
        dirty = [torch.full_like(y, torch.nan) for y in x]
        rows = slice(EDGES_Q[b], EDGES_Q[b + 1])
        for y, of in zip(dirty, x, strict=True):
            y[rows] = of[rows]
        for ours, theirs in zip(found(dirty), clean, strict=True):
            assert torch.equal(ours[rows], theirs[rows])
            assert not ours[total:].any()


@pytest.mark.parametrize(("dim", "longest"), [(64, 70), (64, 64), (128, 64), (32, 64), (256, 40)])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_takes_many_sequences(causal, deterministic, same, dim, longest):
    """More than one look of the kernel that lists tiles, and every row as the Triton kernels have it: where each tile
    of queries has one of keys, or, of another length of the keys, none."""
    generator = torch.Generator().manual_seed(3)
    lengths = [torch.randint(0, longest + 1, (1000,), generator=generator) for _ in range(2)]
    lengths = lengths[:1] * 2 if same else lengths
    cu = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).to("cuda", torch.int32) for n in lengths]
    cu = cu[:1] * 2 if same else cu
    q, k = (int(n.sum()) for n in lengths)
    x = [leaf(n, H, dim, dtype=torch.bfloat16, seed=seed) for n, seed in ((q, 1), (k, 2), (k, 3))]
    found = []
    for backend in ("hopper", "triton"):
        with poisoned_memory("cuda"):
            o = varlen_attention(
                *x, *cu, longest, longest, causal=causal, deterministic=deterministic, backend=backend
            )  # fmt: skip
            found.append([o.detach(), *torch.autograd.grad(o, x, x[0])])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours.float() - theirs.float()).abs().max()) < 2e-2 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("kind", [None, keys, relative], ids=named)
def test_hopper_leaves_keys_that_do_not_count(kind):
    """Of a cache with room: gradients of keys past `seqused_k` are zero, whatever they hold."""
    _, more = (None, []) if kind is None else kind(torch.bfloat16)
    used = torch.tensor([min(n, 100) for n in KEYS], dtype=torch.int32, device="cuda")
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (EDGES_Q, EDGES_K))
    q = leaf(EDGES_Q[-1], H, 64, dtype=torch.bfloat16, seed=1)
    counted = torch.zeros(EDGES_K[-1], dtype=torch.bool, device="cuda")
    for b in range(len(KEYS)):
        counted[EDGES_K[b] : EDGES_K[b] + int(used[b])] = True
    whole = [leaf(EDGES_K[-1], HKV, 64, dtype=torch.bfloat16, seed=seed).detach() for seed in (2, 3)]
    found = []
    for backend, hidden in (("hopper", torch.nan), ("triton", 0.0)):
        kv = [torch.where(counted[:, None, None], y, hidden).requires_grad_() for y in whole]
        leaves = [(torch.where(counted, y, hidden) if kind is keys else y).detach().requires_grad_() for y in more]
        bias = None if kind is None else leaves[0] if kind is keys else RelativeBias(leaves[0], lo=-40)
        o = varlen_attention(q, *kv, cu_q, cu_k, max(QUERIES), 100, bias=bias, seqused_k=used, backend=backend)
        found.append([o.detach(), *torch.autograd.grad(o, (q, *kv, *leaves), q)])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours.float() - theirs.float()).abs().max()) < 2e-2 * max(1.0, float(theirs.abs().max()))
    assert not found[0][2][~counted].any()
    assert not found[0][3][~counted].any()


def test_hopper_computes_again_what_a_hidden_value_has_spoilt():
    """A value that is not finite shows in the rows of its own sequence that see it, and nowhere else."""
    cu = torch.tensor(EDGES_Q, dtype=torch.int32, device="cuda")
    longest = max(QUERIES)
    x = [torch.randn(EDGES_Q[-1], H, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    clean = varlen_attention(*x, cu, cu, longest, longest, causal=True, backend="hopper")
    planted = EDGES_Q[3] + 200
    x[2][planted] = torch.inf
    found = varlen_attention(*x, cu, cu, longest, longest, causal=True, backend="hopper")
    seen = torch.zeros(EDGES_Q[-1], dtype=torch.bool, device="cuda")
    seen[planted : EDGES_Q[4]] = True
    assert not found[seen].isfinite().any()
    assert torch.allclose(found[~seen].float(), clean[~seen].float(), atol=1e-2)
