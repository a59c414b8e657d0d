"""Calls on CPU tensors under `torch.set_default_device`: it places new tensors of the caller, never those of a call.

The default device is "meta", on which whatever depends on it has no numbers.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._device import _device_constructors

import tilewise
from tilewise import attention, bias
from tilewise.integrations import evoformer, flash_attn
from tilewise.topk import gather

B, H, HKV, M, N, D = 2, 4, 2, 19, 23, 8
LENGTHS = (5, 0, 18)
SEED = (7, 11)


# --- each call of a factory names its device ---

FACTORIES = {function.__name__ for function in _device_constructors()}
MENTIONED = re.compile(rf"\btorch\.({'|'.join(FACTORIES)})\b")
# What the caller asked for, as a new tensor.
DEFAULT = {"tilewise/bias/buckets.py: torch.tensor(slopes, dtype=torch.float32)"}


def is_factory(node: ast.expr) -> bool:
    called_of = getattr(node, "value", None)
    return isinstance(called_of, ast.Name) and called_of.id == "torch" and node.attr in FACTORIES


def without_device(source: str) -> list[str]:
    """Calls of torch's factories, and partial calls, without ``device=``."""
    found = []
    for node in ast.walk(ast.parse(source)) if MENTIONED.search(source) else ():
        if not isinstance(node, ast.Call) or any(k.arg in ("device", None) for k in node.keywords):
            continue
        if any(map(is_factory, (node.func, *node.args[:1]))):
            found.append(ast.unparse(node))
    return found


def test_each_factory_names_its_device():
    package = Path(tilewise.__file__).parent
    found = set()
    for path in sorted(package.rglob("*.py")):
        found |= {f"{path.relative_to(package.parent)}: {call}" for call in without_device(path.read_text())}
    assert found == DEFAULT


def test_a_factory_without_a_device_is_found():
    source = "torch.arange(3)\nn = torch.zeros(2, device=x.device)\nf = partial(torch.empty, 4)\nx.new_empty(3)\n"
    assert without_device(source) == ["torch.arange(3)", "partial(torch.empty, 4)"]


# --- calls ---


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), device="cpu")


def rows(heads: int, length: int, dim: int = D, seed: int = 0) -> torch.Tensor:
    return normal(B, heads, length, dim, seed=seed)


QKV = rows(H, M), rows(HKV, N, seed=1), rows(HKV, N, seed=2)
TOTAL = sum(LENGTHS)
PACKED = normal(TOTAL, H, D), normal(TOTAL, HKV, D, seed=1), normal(TOTAL, HKV, D, seed=2)
CU = torch.tensor([0, *LENGTHS]).cumsum(0).int()
MATRICES = CU.new_tensor([0, *(n * n for n in LENGTHS)]).cumsum(0)
SEEN = normal(B, 1, M, N, seed=3) < 0.8
HIDDEN = normal(1, 1, 1, N, seed=3) < 0.8
DOCUMENTS = torch.tensor([0] * 7 + [1] * 16).expand(B, N)


def attend(*more: torch.Tensor, **options):
    """A call of `attention`; what is made of the leaves beside q, k and v is ``bias`` or ``sink``."""
    named = {name: options.pop(name) for name in ("of_bias", "of_sink") if name in options}

    def call(q, k, v, *leaves):
        found = {name.removeprefix("of_"): make(*leaves) for name, make in named.items()}
        return attention(q, k, v, **options, **found)

    return call, (*QKV, *more)


def packed(function, *more: torch.Tensor, **options):
    return lambda q, k, v, *leaves: function(q, k, v, CU, CU, max(LENGTHS), max(LENGTHS), **options), (*PACKED, *more)


def square(x):
    return rows(2, 17, seed=x)


def of_distances(q, k, v):
    mask = tilewise.TileMask.sliding_window(M, N, (4, 3), block=64, global_tokens=1)
    return attention(q, k, v, mask=mask) + attention(q, k, v, mask=tilewise.TileMask.strided(M, N, 3, block=64))


def of_documents(q, k, v):
    mask = tilewise.TileMask.documents(DOCUMENTS)
    return attention(k, k, v, mask=mask)


def of_block_mask(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: (i + j) % 3 > 0, B, None, M, N, device="cpu", BLOCK_SIZE=128)
    return attention(q, k, v, mask=mask)


def of_scores(q, k, v, scores):
    mask = tilewise.dynamic_mask(scores.detach(), keep=5, causal=True, queries=M, block=64)
    return attention(q, k, v, mask=mask, causal=True, bias=scores)


def of_best_keys(q, k, v, scores):
    mask = tilewise.dynamic_mask(scores.detach(), keep=64, causal=True)
    return attention(q, k, v, mask=mask, causal=True)


def jagged(q, k, v):
    nested = [torch.nested.nested_tensor_from_jagged(x, CU.long()).transpose(1, 2) for x in (q, k, v)]
    return attention(*nested, causal=True, dropout_p=0.2, dropout_seed=SEED).values()


def merged(q, k, v):
    parts = [attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(9), slice(9, None))]
    return tilewise.merge_attention(*zip(*parts, strict=True))


def windowed(q, k, v, pair):
    return evoformer.window_pair_attention(q, k, v, pair, q_block=4, k_block=8, mask=HIDDEN[:, 0, 0, :17])


DROPOUT = {"dropout_p": 0.3, "dropout_seed": SEED}
RELATIVE = normal(B, H, M, 9, seed=4)
BUCKETS = CU.new_tensor([0, 1, 1, 2, 3, 4, 4, 4])
KEPT_KEYS = CU.new_tensor([[3, 5, 7], [7, 0, 2]])[..., None, None, None]
TRIANGLE = *(normal(B, 3, H, 7, D, seed=n) for n in range(3)), normal(B, 1, H, 7, 7)
CALLS = {
    "plain": attend(),
    "lse": attend(return_lse=True, causal=True, window=(5, 3), softcap=4.0),
    "bias, mask, sink": attend(
        normal(1, H, M, N), normal(H), of_bias=lambda b, s: b, of_sink=lambda b, s: s, mask=SEEN, causal=True
    ),
    "key bias": attend(normal(B, 1, 1, N), of_bias=lambda b: b, mask=HIDDEN),
    "causal bias": attend(mask=causal_lower_right(M, N)),
    "dropout": attend(**DROPOUT),
    "dropout, seed drawn": attend(dropout_p=0.3),
    "dropout, bias": attend(normal(1, H, M, N), of_bias=lambda b: b, mask=SEEN, **DROPOUT),
    "dropout, reference": attend(backend="reference", **DROPOUT),
    "reference": attend(normal(1, H, M, N), of_bias=lambda b: b, mask=SEEN, causal=True, backend="reference"),
    "deterministic": attend(normal(1, H, M, N), of_bias=lambda b: b, deterministic=True),
    "T5": attend(normal(32, H), of_bias=lambda t: bias.t5_bias(t, bidirectional=True)),
    "T5, dropout": attend(normal(32, H), of_bias=lambda t: bias.t5_bias(t, bidirectional=False), **DROPOUT),
    "ALiBi": attend(normal(H).abs(), of_bias=lambda s: bias.alibi(s)),
    "ALiBi, reference": attend(normal(H).abs(), of_bias=lambda s: bias.alibi(s), backend="reference"),
    "values": attend(RELATIVE, of_bias=lambda x: bias.RelativeBias(x, lo=-4)),
    "values, clamped": attend(RELATIVE, of_bias=lambda x: bias.RelativeBias(x, lo=-4, outside="clamp", reverse=True)),
    "values of keys": attend(
        normal(1, HKV, N, 9), of_bias=lambda x: bias.RelativeBias(x, lo=-4, on="key", outside="clamp")
    ),
    "values in buckets": attend(
        normal(1, H, M, 5), of_bias=lambda x: bias.RelativeBias(x, lo=-4, buckets=BUCKETS)
    ),
    "low rank": attend(normal(1, H, M, 3), normal(1, HKV, N, 3), of_bias=lambda u, w: bias.low_rank_bias(u, w)),
    "several terms": attend(
        normal(1, H, M, N), normal(32, H), of_bias=lambda b, t: (b, bias.t5_bias(t, bidirectional=True))
    ),
    "Swin": (
        lambda q, k, v, t: attention(q, k, v, bias=bias.swin_bias(t, (3, 3))),
        (*(rows(2, 9, seed=n) for n in range(3)), normal(25, 2)),
    ),
    "relative logits": attend(
        normal(B, H, M, 6), normal(H, 6, 9),
        of_bias=lambda s, p: bias.relative_logits(s, p, lo=-4),
    ),
    "windows of tiles": (of_distances, QKV),
    "documents": (of_documents, QKV),
    "BlockMask": (of_block_mask, QKV),
    "top keys": (of_scores, (*QKV, normal(B, HKV, 1, N))),
    "top keys, gathered": (of_best_keys, (*(normal(1, 2, 1024, D, seed=n) for n in range(3)), normal(1, 2, 1, 1024))),
    "leading dimensions": (
        lambda q, k, v, b: attention(q, k, v, bias=b),
        TRIANGLE,
    ),
    "vmap": (
        lambda q, k, v: torch.vmap(lambda q, k, v: attention(q[None], k[None], v[None], **DROPOUT))(q, k, v), QKV,
    ),
    "no keys": (attention, (QKV[0], QKV[1][:, :, :0], QKV[2][:, :, :0])),
    "SDPA": (
        lambda q, k, v, b: tilewise.scaled_dot_product_attention(q, k, v, attn_mask=b, enable_gqa=True),
        (*QKV, normal(M, N)),
    ),
    "SDPA, causal": (
        lambda q, k, v: tilewise.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), QKV,
    ),
    "varlen": packed(tilewise.varlen_attention, causal=True, window=(4, 0), **DROPOUT),
    "varlen, reference": packed(tilewise.varlen_attention, backend="reference", validate=True, **DROPOUT),
    "varlen, T5": (
        lambda q, k, v, t: tilewise.varlen_attention(
            q, k, v, CU, CU, 18, 18, bias=(bias.t5_bias(t, bidirectional=True), bias.alibi(t[0]))
        ),
        (*PACKED, normal(32, H)),
    ),
    "varlen, matrices": (
        lambda q, k, v, b: tilewise.varlen_attention(q, k, v, CU, CU, 18, 18, bias=bias.RaggedBias(b, MATRICES)),
        (*PACKED, normal(H, sum(n * n for n in LENGTHS))),
    ),
    "varlen_attn": packed(tilewise.varlen_attn, window_size=(-1, 0), enable_gqa=True),
    "jagged": (jagged, PACKED),
    "merge": (merged, QKV),
    "matmul": (lambda a, b, c: tilewise.matmul(a, b, c=c, alpha=0.5), (normal(2, 3, 4), normal(2, 4, 5), normal(3, 5))),
    "softmax": (
        lambda x, b: tilewise.softmax(x, bias=b, mask=SEEN, scale=0.3), (normal(B, H, M, N), normal(1, H, M, N)),
    ),
    "triangle": (
        lambda q, k, v, b: evoformer.triangle_attention(q, k, v, b, kv_lengths=KEPT_KEYS),
        TRIANGLE,
    ),
    "Evoformer": (
        lambda q, k, v, b, c: evoformer.DS4Sci_EvoformerAttention(q, k, v, [b, c]),
        (*(normal(B, 3, 7, H, D, seed=n) for n in range(3)), normal(B, 3, 1, 1, 7), normal(B, 1, H, 7, 7)),
    ),
    "atoms": (windowed, (*map(square, range(3)), normal(B, 2, 5, 4, 8))),
    "flash_attn": (
        lambda q, k, v, s: flash_attn.flash_attn_func(q, k, v, alibi_slopes=s, causal=True, return_attn_probs=True)[:2],
        (*(normal(B, 11, H, D, seed=n) for n in range(3)), normal(H)),
    ),
    "flash_attn, packed": (
        lambda qkv: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, CU, 18, causal=True), (normal(TOTAL, 3, H, D),),
    ),
}  # fmt: skip


def value_and_gradients(function, inputs):
    torch.manual_seed(0)
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = sum((o * o).sum() for o in outputs)
    return *outputs, *torch.autograd.grad(loss, leaves, allow_unused=True)


@pytest.fixture
def meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", CALLS)
def test_call(name, meta, monkeypatch):
    monkeypatch.setattr(gather, "WORTH", {"cpu": 0.0, "cuda": 0.0})
    function, inputs = CALLS[name]
    found = value_and_gradients(function, inputs)
    torch.set_default_device(None)
    expected = value_and_gradients(function, inputs)
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_explain(meta):
    found = str(tilewise.explain(*QKV, causal=True)), str(tilewise.explain_varlen(*PACKED, CU, CU, 18, 18))
    torch.set_default_device(None)
    assert found == (str(tilewise.explain(*QKV, causal=True)), str(tilewise.explain_varlen(*PACKED, CU, CU, 18, 18)))
