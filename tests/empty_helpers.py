"""Calls without batch elements, heads, queries or keys, on PyTorch's default device, and what they must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise import attention, bias, varlen_attention
from tilewise.integrations import evoformer, flash_attn

USUAL = {"B": 2, "H": 4, "Hkv": 2, "M": 64, "N": 48}
NO_HEADS = {"H": 0, "Hkv": 0}
EMPTY = [
    {"B": 0}, NO_HEADS, {"M": 0}, {"N": 0}, {"M": 0, "N": 0}, {"B": 0, "N": 0}, NO_HEADS | {"M": 0},
    NO_HEADS | {"B": 0, "M": 0, "N": 0},
]  # fmt: skip
of_sizes = pytest.mark.parametrize("empty", EMPTY, ids=lambda sizes: "no " + ", ".join(sizes))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def arguments(
    sizes: dict[str, int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, tuple[dict[str, Any], list[torch.Tensor]]]]:
    """q, k and v, and by name the other arguments of a call, with the leaves of each."""
    B, H, Hkv, M, N = sizes.values()
    axes = {"b": B, "h": H, "k": Hkv, "m": M, "n": N, "1": 1}

    def shaped(letters: str) -> tuple[int, ...]:
        return tuple(axes[x] for x in letters)

    qkv = [zeros(B, H, M, 32, dtype=dtype), zeros(B, Hkv, N, 32, dtype=dtype), zeros(B, Hkv, N, 16, dtype=dtype)]
    found: dict[str, tuple[dict, list[torch.Tensor]]] = {"plain": ({}, [])}
    for letters in ("bhmn", "1hmn", "11mn", "bkmn", "1kmn", "b11n", "1h1n", "bhm1", "11m1", "1111"):
        x = zeros(*shaped(letters), dtype=dtype)
        found[f"bias {letters}"] = {"bias": x}, [x]
        y, mask = zeros(1, H, M, N, dtype=dtype), torch.ones(shaped(letters), dtype=torch.bool)
        found[f"mask {letters}"] = {"bias": y, "mask": mask}, [y]
    for letters in ("h", "bhm"):
        x = zeros(*shaped(letters), dtype=dtype)
        found[f"sink {letters}"] = {"sink": x}, [x]
    table, slopes, matrix = zeros(32, H), zeros(H), zeros(1, H, M, N, dtype=dtype)
    query, key = zeros(B, H, M, 17, dtype=dtype), zeros(1, Hkv, N, 17, dtype=dtype)
    u, w = zeros(1, H, M, 3, dtype=dtype), zeros(1, Hkv, N, 3, dtype=dtype)
    terms = {
        "T5": (bias.t5_bias(table, bidirectional=True), [table]),
        "ALiBi": (bias.alibi(slopes), [slopes]),
        "values of queries": (bias.RelativeBias(query, lo=-8), [query]),
        "values of keys": (bias.RelativeBias(key, lo=-8, on="key", outside="clamp"), [key]),
        "low rank": (bias.low_rank_bias(u, w), [u, w]),
        "several": ((matrix, bias.t5_bias(table, bidirectional=True)), [matrix, table]),
    }
    found |= {name: ({"bias": term}, leaves) for name, (term, leaves) in terms.items()}
    numbers = {"softcap": 3.0, "window": (5, 3), "causal": True, "dropout_p": 0.1, "deterministic": True}
    found |= {name: ({"bias": matrix, name: value}, [matrix]) for name, value in numbers.items()}
    if M and N:
        found["tiles"] = {"mask": tilewise.TileMask.sliding_window(M, N, (8, 8), block=64, device=qkv[0].device)}, []
    return qkv, found


def check_attention(empty: dict[str, int], dtype: torch.dtype, **options: Any) -> None:
    """o is 0, the LSE -inf or that of the sink, and so are all gradients 0 but the sink's."""
    qkv, others = arguments(USUAL | empty, dtype)
    for name, (more, leaves) in others.items():
        o, lse = attention(*qkv, **more, return_lse=True, **options)
        assert o.shape == (*qkv[0].shape[:3], 16), name
        assert not o.any(), name
        sink = more.get("sink")
        assert torch.equal(lse, torch.full_like(lse, -torch.inf) if sink is None else torch.zeros_like(lse)), name
        loss = o.sum() + (lse.sum() if sink is not None else 0)
        for x, grad in zip([*qkv, *leaves], torch.autograd.grad(loss, [*qkv, *leaves]), strict=True):
            assert grad.shape == x.shape, name
            expected = lse.numel() / max(grad.numel(), 1) if x is sink else 0
            assert torch.equal(grad, torch.full_like(grad, expected)), name


def calls(
    B: int, H: int, Hkv: int, M: int, N: int
) -> tuple[dict[str, tuple[Callable[..., torch.Tensor], Any]], tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """The other entry points, by name, with their leaves; those of a packed batch, and its lengths. S: a leading
    dimension beside the batch."""
    S, D = 3, 8
    qkv = zeros(B, H, M, D), zeros(B, Hkv, N, D), zeros(B, Hkv, N, D)
    apart = zeros(B, S, H, M, D), zeros(B, S, H, N, D), zeros(B, S, H, N, D)
    rows, atoms = [zeros(B, S, N, H, D) for _ in range(3)], [zeros(B, H, N, D) for _ in range(3)]
    packed = zeros(B * M, H, D), zeros(B * N, Hkv, D), zeros(B * N, Hkv, D)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (M, N))
    cu = cu_q, cu_k, M, N
    offsets, blocks = torch.arange(B + 1, dtype=torch.int32) * M * N, -(-N // 4)

    def merged(*tensors: torch.Tensor) -> torch.Tensor:
        return tilewise.merge_attention(*zip(*[attention(*tensors, return_lse=True) for _ in range(2)], strict=True))[0]

    return {
        "sdpa": (lambda *x: tilewise.scaled_dot_product_attention(*x, enable_gqa=True), [*qkv, zeros(H, M, N)]),
        "leading": (lambda *x: attention(*x[:3], bias=x[3]), [*apart, zeros(B, 1, H, M, N)]),
        "triangle": (evoformer.triangle_attention, [*apart, zeros(B, 1, H, M, N)]),
        "Evoformer": (
            lambda *x: evoformer.DS4Sci_EvoformerAttention(*x[:3], x[3:]),
            [*rows, zeros(B, S, 1, 1, N), zeros(B, 1, H, N, N)],
        ),
        "atoms": (lambda *x: evoformer.window_pair_attention(*x, None, 4, 8), [*atoms, zeros(B, H, blocks, 4, 8)]),
        "flash_attn": (
            lambda *x: flash_attn.flash_attn_func(*x[:3], alibi_slopes=x[3], causal=True),
            [*(x.transpose(1, 2) for x in qkv), zeros(H)],
        ),
        "flash_attn packed": (lambda *x: flash_attn.flash_attn_varlen_func(*x, *cu), packed),
        "varlen": (lambda *x: varlen_attention(*x, *cu, window=(3, 0), causal=True, dropout_p=0.1), packed),
        "varlen T5": (
            lambda *x: varlen_attention(*x[:3], *cu, bias=bias.t5_bias(x[3], bidirectional=True)),
            [*packed, zeros(32, H)],
        ),
        "varlen keys": (lambda *x: varlen_attention(*x[:3], *cu, bias=x[3]), [*packed, zeros(H, 1, B * N)]),
        "varlen matrices": (
            lambda *x: varlen_attention(*x[:3], *cu, bias=bias.RaggedBias(x[3], offsets)),
            [*packed, zeros(H, B * M * N)],
        ),
        "varlen_attn": (lambda *x: tilewise.varlen_attn(*x, *cu, enable_gqa=True), packed),
        "merge": (merged, qkv),
        "softmax": (lambda *x: tilewise.softmax(x[0], bias=x[1]), [zeros(B, H, M, N), zeros(1, H, M, N)]),
        "matmul": (lambda *x: tilewise.matmul(x[0], x[1], c=x[2]), [zeros(B, M, D), zeros(B, D, N), zeros(N)]),
    }, packed, cu  # fmt: skip


def check_calls(empty: dict[str, int]) -> None:
    """Results and gradients are 0."""
    found, _, _ = calls(**USUAL | empty)
    for name, (function, leaves) in found.items():
        leaves = [x.detach().requires_grad_() for x in leaves]
        o = function(*leaves)
        assert not o.any(), name
        for x, grad in zip(leaves, torch.autograd.grad(o.square().sum(), leaves), strict=True):
            assert grad.shape == x.shape, name
            assert not grad.any(), name
