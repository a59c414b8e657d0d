"""FlexAttention's function by tilewise against PyTorch's own, and against plain PyTorch for the gradients of q, k, v.

On a CPU PyTorch's function has the gradients of captured tensors, and refuses those of q, k and v.
"""

import copy
import functools
import gc
import inspect
import math

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import TileMask
from tilewise.integrations.flex import flex_attention
from tilewise.masks import block_sparse

B, H, D = 2, 4, 16
INF = math.inf
pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning", "ignore:return_lse is deprecated:FutureWarning"
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """PyTorch's function computes all scores, and does not compile."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


class Captured:
    """What score_mods capture, for M queries and N keys."""

    def __init__(self, M, N, dtype=torch.float64):
        torch.manual_seed(1)
        self.M, self.N = M, N
        sizes = {
            "slopes": (H,), "number": (), "table": (H, M + N), "buckets": (33, H), "per_batch": (B, H), "keys": (B, N),
            "matrix": (M, N), "heads": (H, M, N), "full": (B, H, M + 3, N), "flipped": (N, M),
            "by_query": (B, H, M, 9), "all_by_query": (H, M, M + N), "by_key": (N, M + N),
        }  # fmt: skip
        for name, size in sizes.items():
            setattr(self, name, torch.randn(size, dtype=dtype).requires_grad_())
        self.ids = torch.arange(max(M, N)) // 30
        self.lengths = torch.tensor([N // 2, N])
        self.bucket_of = torch.randint(0, 33, (M + N,))
        self.seen = torch.rand(H, M, N) < 0.9
        self.seen[..., 0] = True

    def detached(self):
        found = copy.copy(self)
        for name, x in vars(self).items():
            setattr(found, name, x.detach() if torch.is_tensor(x) else x)
        return found

    def trained(self):
        return [x for x in vars(self).values() if torch.is_tensor(x) and x.requires_grad]


def t5_bucket(distance):
    """Thirty-two buckets, half of them for keys after the query, as models compute them."""
    bucket = 0
    bucket = bucket + (distance > 0).to(torch.long) * 16
    distance = torch.abs(distance)
    large = 8 + (torch.log(distance.float() / 8) / math.log(16) * 8).to(torch.long)
    large = torch.min(large, torch.full_like(large, 15))
    return bucket + torch.where(distance < 8, distance, large)


# name: c -> score_mod(s, b, h, q, k)
ADDED = {
    "nothing": lambda c: lambda s, b, h, q, k: s,
    "alibi": lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (k - q),
    "alibi, a distance first": lambda c: lambda s, b, h, q, k: (q - k) * -c.slopes[h] + s,
    "alibi, absolute": lambda c: lambda s, b, h, q, k: s - c.slopes[h] * (q - k).abs(),
    "alibi, shifted": lambda c: lambda s, b, h, q, k: s + (2 * (k - q) + 6) * c.per_batch[b, h] / 4,
    "alibi of the paper": lambda c: lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "alibi of positions": lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (c.keys[b, k] - q.float()),
    "distance": lambda c: lambda s, b, h, q, k: s + (q - k),
    "scaled distance": lambda c: lambda s, b, h, q, k: s + (q - k) * (1 / 64),
    "uneven distance": lambda c: lambda s, b, h, q, k: s + (2 * k - q) / 64,
    "table": lambda c: lambda s, b, h, q, k: s + c.table[h, q - k + c.N],
    "table, clamped": lambda c: lambda s, b, h, q, k: s + c.buckets[(k - q).clamp(-16, 16) + 16, h],
    "table, by buckets": lambda c: lambda s, b, h, q, k: s + c.buckets[c.bucket_of[k - q + c.M], h],
    "T5": lambda c: lambda s, b, h, q, k: s + c.buckets[t5_bucket(k - q), h],
    "function of the distance": lambda c: lambda s, b, h, q, k: s - torch.log1p((q - k).abs().double()) * c.slopes[h],
    "softcap": lambda c: lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "softcap, then a bias": lambda c: lambda s, b, h, q, k: torch.tanh(s * 0.5) * 3 + c.heads[h, q, k],
    "scaled": lambda c: lambda s, b, h, q, k: (s / 3 + c.matrix[q, k]) * 2.0,
    "full": lambda c: lambda s, b, h, q, k: s + c.full[b, h, q + 3, k],
    "of one head": lambda c: lambda s, b, h, q, k: s + c.heads[1, q, k],
    "transposed": lambda c: lambda s, b, h, q, k: s - c.flipped[k, q],
    "keys": lambda c: lambda s, b, h, q, k: s + 0.5 * c.keys[b, k],
    "numbers": lambda c: lambda s, b, h, q, k: s + c.number * c.keys[b, k] + c.slopes[h] + 0.25,
    "sum": lambda c: lambda s, b, h, q, k: s + (c.matrix[q, k] - (c.keys[b, k] - c.heads[h, q, k])),
    "per query": lambda c: lambda s, b, h, q, k: s + c.by_query[b, h, q, torch.clamp(q - k, -4, 4) + 4],
    "per query, a range": lambda c: lambda s, b, h, q, k: s + c.all_by_query[h, q, q - k + c.N - 1],
    "per key": lambda c: lambda s, b, h, q, k: s + c.by_key[k, k - q],  # negative indices count from the end
    "where": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s + c.slopes[h] * c.table[h, q - k], s),
    "captured operations": lambda c: lambda s, b, h, q, k: s + c.table.exp()[h, q - k + c.N] * c.slopes.sum(),
}
HIDDEN = {
    "causal": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s, -INF),
    "causal, by masked_fill": lambda c: lambda s, b, h, q, k: s.masked_fill(k > q, -INF),
    "causal, by a tensor": lambda c: lambda s, b, h, q, k: torch.where(k <= q, s, torch.tensor(-INF, dtype=s.dtype)),
    "causal, added": lambda c: lambda s, b, h, q, k: s + torch.where(q >= k, c.table[h, q - k], -INF),
    "window": lambda c: lambda s, b, h, q, k: torch.where((q >= k) & (q - k <= 20), s, -INF),
    "window, both sides": lambda c: lambda s, b, h, q, k: torch.where((q - k).abs() < 35, s + c.slopes[h] * k, -INF),
    "before the diagonal": lambda c: lambda s, b, h, q, k: torch.where(k - q < -5, s, -INF),
    "documents": lambda c: lambda s, b, h, q, k: torch.where(c.ids[q] == c.ids[k], s, -INF),
    "causal documents": lambda c: lambda s, b, h, q, k: torch.where((c.ids[q] == c.ids[k]) & (q >= k), s, -INF),
    "padding": lambda c: lambda s, b, h, q, k: torch.where(k < c.lengths[b], s, -INF),
    "padding and queries": lambda c: lambda s, b, h, q, k: torch.where((k < c.lengths[b]) & (q != 7), s, -INF),
    "prefix": lambda c: lambda s, b, h, q, k: torch.where((k < 20 + 9 * b) | (q >= k), s, -INF),
    "matrix": lambda c: lambda s, b, h, q, k: torch.where(c.seen[h, q, k], s + c.matrix[q, k], -INF),
    "matrix and window": lambda c: (
        lambda s, b, h, q, k: torch.where(
            torch.logical_and(c.seen[h, q, k], (q - k).abs() < 50), torch.tanh(s) + c.matrix[q, k], -INF
        )
    ),
}
FORMS = ADDED | HIDDEN


def operands(M, N, dtype=torch.float64, Hkv=H):
    torch.manual_seed(0)
    return [torch.randn(B, heads, n, D).to(dtype).requires_grad_() for heads, n in ((H, M), (Hkv, N), (Hkv, N))]


def plain(q, k, v, score_mod, visible=None):
    """All scores at once; rows that see nothing give 0."""
    M, N = q.shape[2], k.shape[2]
    scores = q @ k.mT / math.sqrt(D)
    b, h = torch.arange(B).view(B, 1, 1, 1), torch.arange(H).view(H, 1, 1)
    scores = score_mod(scores, b, h, torch.arange(M)[:, None], torch.arange(N))
    if visible is not None:
        scores = torch.where(visible, scores, -INF)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.clamp(min=-1e30)[..., None]) @ v, lse


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("M", "N"), [(50, 90), (90, 50)])
def test_values_and_gradients(name, M, N):
    c = Captured(M, N)
    score_mod, qkv = FORMS[name](c), operands(M, N)
    o, lse = flex_attention(*qkv, score_mod, return_lse=True)
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, qkv + c.trained(), do, allow_unused=True, retain_graph=True)
    expected = torch.autograd.grad(plain(*qkv, score_mod)[0], qkv + c.trained(), do, allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            close(ours, theirs)
    values, score_mod = [x.detach() for x in qkv], FORMS[name](c.detached())
    by_torch, lse_by_torch = torch_flex.flex_attention(*values, score_mod, return_lse=True)
    close(o, by_torch)
    close(lse, lse_by_torch)


@pytest.mark.parametrize("name", ["alibi", "table, by buckets", "sum", "per query", "causal, added"])
def test_gradients_are_those_of_pytorch(name, monkeypatch):
    """Of captured tensors; compiled, since PyTorch's backward is."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    c, qkv = Captured(50, 90), [x.detach() for x in operands(50, 90)]
    results = []
    for function in (flex_attention, torch_flex.flex_attention):
        o = function(*qkv, FORMS[name](c))
        do = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
        results.append(torch.autograd.grad(o, c.trained(), do, allow_unused=True))
    assert any(x is not None for x in results[0])
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("name", ["alibi", "T5", "softcap, then a bias", "per query", "window", "matrix and window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_at_most_that_of_pytorch(name, dtype):
    exact = FORMS[name](Captured(70, 70))
    qkv = [x.detach() for x in operands(70, 70, dtype)]
    with torch.no_grad():
        o = flex_attention(*qkv, FORMS[name](Captured(70, 70, dtype)))
        by_torch = torch_flex.flex_attention(*qkv, FORMS[name](Captured(70, 70, dtype)))
        expected = plain(*(x.double() for x in qkv), exact)[0]
    assert o.dtype == dtype
    assert (o - expected).abs().max() <= 2 * (by_torch - expected).abs().max() + 1e-6


def test_gradients_of_16_bit_tensors_are_rounded_once():
    """Those of a table whose first entry most distances read."""
    qkv, do, c = operands(70, 400, torch.float32), torch.randn(B, H, 70, D), Captured(70, 70)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        table = c.by_key[0, :4].detach().to(torch.bfloat16).to(dtype).requires_grad_()
        o = flex_attention(*qkv, lambda s, b, h, q, k, x=table: s + x[(k - q).clamp(0, 3)])
        gradients += torch.autograd.grad(o, table, do)
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("M", "N"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_keys(M, N):
    c = Captured(5, 5)
    o, lse = flex_attention(*operands(M, N), FORMS["alibi"](c), return_lse=True)
    assert torch.equal(o, torch.zeros(B, H, M, D, dtype=torch.float64))
    assert torch.equal(lse, torch.full((B, H, M), -INF, dtype=torch.float64))


def test_heads_of_groups(monkeypatch):
    """A bias of the heads of k and v, and one of q's."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    qkv = operands(70, 90, Hkv=2)
    bias = torch.randn(2, 70, 90, dtype=torch.float64, requires_grad=True)

    def score_mod(s, b, h, q, k):
        return s + bias[h // 2, q, k] + torch.exp2(-h) * (k - q)

    o = flex_attention(*qkv, score_mod, enable_gqa=True)
    by_torch = torch_flex.flex_attention(*(x.detach() for x in qkv), score_mod, enable_gqa=True)
    do = torch.randn_like(o)
    close(o, by_torch)
    close(*(torch.autograd.grad(x, bias, do)[0] for x in (o, by_torch)))
    with pytest.raises(ValueError, match=r"^key: expected the 4 heads of query, got 2; pass enable_gqa=True"):
        flex_attention(*qkv, score_mod)


# --- block masks ---

IDS = torch.tensor([0] * 40 + [1] * 50 + [2] * 56)
S, WIDTH = 146, 13


def near(b, h, q, kv):
    """NATTEN's neighbourhoods of a canvas 13 wide, whose centres stay inside."""
    (qx, qy), (kx, ky) = ((x % WIDTH, x // WIDTH) for x in (q, kv))
    return ((qx.clamp(2, WIDTH - 3) - kx).abs() <= 2) & ((qy.clamp(2, 8) - ky).abs() <= 2)


MASK_MODS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "sliding window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 30),
    "dilated window": lambda b, h, q, kv: ((q - kv).abs() <= 40) & ((q - kv) % 4 == 0),
    "prefix LM": lambda b, h, q, kv: (kv < 33 + 20 * b) | (q >= kv),
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "natten": near,
    "by head": lambda b, h, q, kv: (q + kv) % (h + 2) == 0,
}


def test_the_largest_scores():
    """By the formula: PyTorch's function has them on a GPU alone."""
    c, (q, k, v) = Captured(S, S), operands(S, S)
    distance = torch.arange(S) - torch.arange(S)[:, None]
    request = AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(q, k, v, lambda s, b, h, i, j: 2.0 * s + c.slopes[h] * (j - i), return_aux=request)
    scores = 2.0 * (q @ k.mT) / q.shape[-1] ** 0.5 + c.slopes[:, None, None] * distance
    close(aux.max_scores, scores.amax(-1))
    close(aux.lse, scores.logsumexp(-1))


@pytest.mark.parametrize("block", [16, (32, 128), 96])
@pytest.mark.parametrize("name", MASK_MODS)
def test_block_masks(name, block):
    c, qkv = Captured(S, S), operands(S, S)
    mask = create_block_mask(MASK_MODS[name], B, H, S, S, device="cpu", BLOCK_SIZE=block)

    def score_mod(s, b, h, q, k):
        return torch.where(k != 5, torch.tanh(s) + c.slopes[h] * (k - q), -INF)

    request = AuxRequest(lse=True)
    o, aux = flex_attention(*qkv, score_mod, mask, return_aux=request)
    by_torch, theirs = torch_flex.flex_attention(*(x.detach() for x in qkv), score_mod, mask, return_aux=request)
    close(o, by_torch)
    close(aux.lse, theirs.lse)
    do = torch.randn_like(o)
    b, h = torch.arange(B).view(B, 1, 1, 1), torch.arange(H).view(H, 1, 1)
    visible = MASK_MODS[name](b, h, torch.arange(S)[:, None], torch.arange(S))
    expected = torch.autograd.grad(plain(*qkv, score_mod, visible)[0], [*qkv, c.slopes], do)
    for ours, exact in zip(torch.autograd.grad(o, [*qkv, c.slopes], do), expected, strict=True):
        close(ours, exact)
    close(flex_attention(*qkv, score_mod, TileMask.from_block_mask(mask)), o)


# --- under torch.compile ---


def everything(c):
    """A softcap, a term of each kind, and conditions of each kind."""

    def score_mod(s, b, h, q, k):
        s = 20 * torch.tanh(s / 20) + c.heads[h, q, k] - 0.5 * c.keys[b, k] + c.slopes[h] * (k - q)
        s = s + c.buckets[t5_bucket(k - q), h] + c.table.exp()[h, q - k + c.N] + c.all_by_query[h, q, q - k + c.N - 1]
        return torch.where((c.ids[q] == c.ids[k]) & (q >= k) & (k < c.lengths[b]), s, -INF)

    return score_mod


COMPILED = {x: FORMS[x] for x in ("causal, by a tensor", "before the diagonal")} | {"everything": everything}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_in_one_graph(name):
    c, qkv = Captured(70, 90), operands(70, 90)
    score_mod = COMPILED[name](c)
    torch._dynamo.reset()

    def f(q, k, v):
        return flex_attention(q, k, v, score_mod, return_lse=True)

    results = []
    for function in (torch.compile(f, fullgraph=True, backend="aot_eager"), f):
        o, lse = function(*qkv)
        do = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
        results.append((o, lse, *torch.autograd.grad(o, qkv + c.trained(), do, allow_unused=True)))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


def test_block_masks_compile_in_one_graph():
    c, qkv = Captured(S, S), operands(S, S)
    mask = create_block_mask(and_masks(near, MASK_MODS["causal"]), None, None, S, S, device="cpu", BLOCK_SIZE=16)
    score_mod = ADDED["alibi"](c)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    close(compiled(*qkv, score_mod, mask), flex_attention(*qkv, score_mod, mask))


def test_a_refusal_names_the_operation_under_a_compiler():
    compiled = torch.compile(flex_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="score_mod: exp of the score"):
        compiled(*operands(70, 70), lambda s, b, h, q, k: torch.exp(s))


# --- what is not made ---


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if torch.is_tensor(found) and func.namespace != "tilewise" and not func.is_view:
            self.numbers = max(self.numbers, found.numel())
        return found


@pytest.mark.parametrize("name", ["alibi", "T5", "table", "where", "full", "sum", "per query", "window", "causal"])
def test_no_array_of_queries_times_keys(name):
    M, N = 300, 310
    c, qkv = Captured(M, N), [x[:1] for x in operands(M, N)]
    with Largest() as largest:
        flex_attention(*qkv, FORMS[name](c))
    # "sum" adds two captured matrices, of one and of all heads.
    assert largest.numbers <= (H * M * N if name == "sum" else H * (M + N) * D)


# --- masks that are kept ---


def test_a_condition_is_evaluated_once(monkeypatch):
    made = []
    monkeypatch.setattr(TileMask, "from_mask_mod", functools.partial(counted, TileMask.from_mask_mod, made))
    ids, other, qkv = torch.arange(70) // 9, torch.arange(70) // 5, operands(70, 70)
    state = {"ids": ids, "shift": 1}

    def score_mod(s, b, h, q, k):
        return torch.where(state["ids"][q] == state["ids"][k] * state["shift"], s, -INF)

    def calls(times):
        made.clear()
        for _ in range(times):
            o = flex_attention(*qkv, score_mod)
        close(o, plain(*qkv, score_mod)[0])
        return len(made)

    assert calls(3) == 1
    assert calls(2) == 0
    ids[:20] = 3
    assert calls(2) == 1
    state["ids"] = other
    assert calls(2) == 1
    state["shift"] = 2
    assert calls(2) == 1


def test_no_mask_outlives_its_score_mod():
    ids, qkv = torch.arange(70) // 9, operands(70, 70)

    def call():
        def score_mod(s, b, h, q, k):
            return torch.where(ids[q] == ids[k], s, -INF)

        flex_attention(*qkv, score_mod)
        assert len(block_sparse._made_for) == before + 1

    gc.collect()
    before = len(block_sparse._made_for)
    call()
    gc.collect()
    assert len(block_sparse._made_for) == before


def counted(function, made, *args, **named):
    made.append(1)
    return function(*args, **named)


# --- what is refused ---

approximate = torch.library.Library("flex_test", "DEF")
approximate.define("tanh(Tensor x) -> Tensor")

REFUSED = {
    "exp of the score; a score may be multiplied": lambda c: lambda s, b, h, q, k: torch.exp(s),
    "torch.ops.flex_test.tanh of the score": lambda c: lambda s, b, h, q, k: 20 * torch.ops.flex_test.tanh(s / 20),
    "tanh of a score with a bias or a mask; tilewise computes softcap(scale * score) + bias, then hides": (
        lambda c: lambda s, b, h, q, k: torch.tanh(s + c.slopes[h])
    ),
    "tanh of a tanh": lambda c: lambda s, b, h, q, k: torch.tanh(torch.tanh(s)),
    "the score is subtracted": lambda c: lambda s, b, h, q, k: c.slopes[h] - s,
    "the score is multiplied or divided by -2": lambda c: lambda s, b, h, q, k: s * -2,
    "the score is multiplied by tensor(4,)[h]; pass a Python number": lambda c: lambda s, b, h, q, k: s * c.slopes[h],
    "the score is multiplied by the changed score": lambda c: lambda s, b, h, q, k: s * torch.tanh(s / 20),
    "adds two scores": lambda c: lambda s, b, h, q, k: s + 0.1 * s,
    "gt of the score, 0": lambda c: lambda s, b, h, q, k: torch.where(s > 0, s, -INF),
    "conversion of the score to torch.bfloat16": lambda c: lambda s, b, h, q, k: s.to(torch.bfloat16),
    "torch.where replaces the score by -1000000000.0; what is hidden is -float('inf')": (
        lambda c: lambda s, b, h, q, k: torch.where(q >= k, s, -1e9)
    ),
    "torch.where replaces the score by tensor(4,)[h]": (
        lambda c: lambda s, b, h, q, k: torch.where(k == 0, c.slopes[h], s)
    ),
    "torch.where of two scores with different factors": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s * 2, s),
    "adds (tensor(2, 90)[b, kv_idx] * tensor(2, 90)[b, q_idx]), which depends on q_idx and kv_idx; compute": (
        lambda c: lambda s, b, h, q, k: s + c.keys[b, k] * c.keys[b, q]
    ),
    "adds tensor(2, 4, 73, 90)[(b % 2), h, q_idx, kv_idx]": (
        lambda c: lambda s, b, h, q, k: s + c.full[b % 2, h, q, k]
    ),
    "adds (tensor(4,)[h] * tensor(70, 90)[q_idx, kv_idx])": (
        lambda c: lambda s, b, h, q, k: s + c.slopes[h] * c.matrix[q, k]
    ),
    "adds where((tensor(90,)[q_idx] == tensor(90,)[kv_idx]), tensor(4,)[h], 0.0)": (
        lambda c: lambda s, b, h, q, k: torch.where(c.ids[q] == c.ids[k], s + c.slopes[h], s)
    ),
    "a truth value of ((q_idx - kv_idx) >= 0), which differs": lambda c: lambda s, b, h, q, k: s if q >= k else s * 2,
    "a Python index of h": lambda c: lambda s, b, h, q, k: s + [0.1, 0.2, 0.3, 0.4][h],
    "a float of kv_idx": lambda c: lambda s, b, h, q, k: s + math.log(k),
    "sum of q_idx; supported are PyTorch's functions of": lambda c: lambda s, b, h, q, k: s + torch.sum(q),
    "max of q_idx": lambda c: lambda s, b, h, q, k: s + torch.max(q),
    ".item of h": lambda c: lambda s, b, h, q, k: s + h.item(),
    "add of a tensor (4,), which has dimensions left": lambda c: lambda s, b, h, q, k: s + c.slopes,
    "add of tensor(4, 160)[h], which has dimensions left": lambda c: lambda s, b, h, q, k: s + c.table[h],
    "slice as an index of a tensor (4, 160)": lambda c: lambda s, b, h, q, k: s + c.table[h, :],
    "an index of q_idx; index captured tensors only": lambda c: lambda s, b, h, q, k: s + q[0],
    "returns (tensor(4,)[h] * (q_idx - kv_idx)) in place of a score": (
        lambda c: lambda s, b, h, q, k: c.slopes[h] * (q - k)
    ),
    "torch.where of a captured number; a condition reads": (
        lambda c: lambda s, b, h, q, k: torch.where(torch.tensor(True), s, -INF)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_named(message):
    with pytest.raises(NotImplementedError) as error:
        flex_attention(*operands(70, 90), REFUSED[message](Captured(70, 90)))
    assert str(error.value).startswith(f"score_mod: {message}")


def test_a_condition_beside_a_block_mask():
    qkv, c = operands(70, 70), Captured(70, 70)
    mask = create_block_mask(MASK_MODS["causal"], None, None, 70, 70, device="cpu")
    for name, words in (
        ("documents", r"\(tensor\(70,\)\[q_idx\] == "),
        ("before the diagonal", r"\(\(\(kv_idx - q_idx\) - -5\) < 0"),
    ):
        with pytest.raises(
            NotImplementedError, match=f"^score_mod: hides by {words}.* beside block_mask; combine them"
        ):
            flex_attention(*qkv, HIDDEN[name](c), mask)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"query": torch.zeros(4, 8, 16)}, ValueError, r"^query: expected \(batch, heads, length, head_dim\), got"),
        ({"key": None}, TypeError, r"^key: expected a torch.Tensor, got NoneType"),
        ({"block_mask": torch.ones(8, 8)}, TypeError, r"^block_mask: expected a BlockMask, a TileMask or None, got"),
        ({"kernel_options": 3}, TypeError, r"^kernel_options: expected a dict or None, got int"),
        ({"enable_gqa": 1}, TypeError, r"^enable_gqa: "),
        ({"return_lse": None}, TypeError, r"^return_lse: "),
        ({"scale": -1.0}, ValueError, r"^scale: "),
        ({"return_aux": True}, TypeError, r"^return_aux: expected a tilewise.AuxRequest"),
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, ValueError, r"^return_lse: with return_aux ask for"),
        (
            {"score_mod": lambda s, b, h, q, k: s + torch.zeros(4, 8)[q, k]}, ValueError,
            r"^score_mod: tensor\(4, 8\)\[q_idx, kv_idx\] reads 8 entries of axis 0, which has 4",
        ),
        (
            {"score_mod": lambda s, b, h, q, k: torch.where(torch.arange(8)[k], s, -INF)}, TypeError,
            r"^score_mod: the condition tensor\(8,\)\[kv_idx\] must be bool, got torch.int64",
        ),
        ({"score_mod": lambda s, b, h, q, k: s + torch.zeros(8)[q, k]}, IndexError, r"^score_mod: 2 indices for a"),
    ],
)  # fmt: skip
def test_wrong_arguments(given, error, message):
    arguments = {name: torch.zeros(1, 2, 8, 16) for name in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        flex_attention(**(arguments | given))


def test_the_signature_is_pytorchs():
    ours, theirs = (inspect.signature(f).parameters.values() for f in (flex_attention, torch_flex.flex_attention))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_scale_is_that_of_pytorch():
    qkv = operands(70, 70)
    for score_mod in (None, lambda s, b, h, q, k: s * 3, lambda s, b, h, q, k: 4 * torch.tanh(s / 2)):
        o = flex_attention(*qkv, score_mod, scale=0.1)
        close(o, torch_flex.flex_attention(*(x.detach() for x in qkv), score_mod, scale=0.1))
