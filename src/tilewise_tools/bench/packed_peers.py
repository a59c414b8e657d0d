"""Providers of packed batches: tilewise, FlashAttention-4, varlen_attn, FlexAttention, padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise_tools.bench.packed import ENTRIES, PackedCase, PackedInputs

BLOCK = 128  # block size of FlexAttention's block mask, the default


class Padded(NamedTuple):
    """A packed batch, padded to its longest sequence.

    Attributes:
        leaves: q, k, v (B, H, n, D) and bias (B, H, n, n).
        do: gradient of the output, (B, H, n, D), 0 in the padding.
        mask: bool (B, 1, 1, n), False in the padding.
    """

    leaves: list[Tensor]
    do: Tensor
    mask: Tensor


def tilewise_varlen(case: PackedCase, x: PackedInputs, backend: str) -> Callable[[], Tensor]:
    (q, k, v, *_), term = x.leaves, case.term(x)

    def forward() -> Tensor:
        o = tilewise.varlen_attention(
            q, k, v, x.cu, x.cu, case.longest, case.longest, bias=term, causal=case.causal, backend=backend
        )
        assert isinstance(o, Tensor)
        return o

    return forward


def fa4(case: PackedCase, x: PackedInputs) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_varlen_func

    def forward() -> Tensor:
        o = flash_attn_varlen_func(
            *x.leaves,
            cu_seqlens_q=x.cu,
            cu_seqlens_k=x.cu,
            max_seqlen_q=case.longest,
            max_seqlen_k=case.longest,
            causal=case.causal,
        )
        return o[0] if isinstance(o, tuple) else o

    return forward


def torch_varlen(case: PackedCase, x: PackedInputs) -> Callable[[], Tensor]:
    """Return the forward by varlen_attn; torch 2.10 has ``is_causal`` instead of 2.12's ``window_size``."""
    from torch.nn.attention.varlen import varlen_attn

    causal: dict[str, Any] = {}
    if case.causal:
        windows = "window_size" in inspect.signature(varlen_attn).parameters
        causal = {"window_size": (-1, 0)} if windows else {"is_causal": True}
    q, k, v = x.leaves

    def forward() -> Tensor:
        o = varlen_attn(q, k, v, x.cu, x.cu, case.longest, case.longest, **causal)
        assert isinstance(o, Tensor)
        return o

    return forward


def flex(case: PackedCase, x: PackedInputs) -> Callable[[], Tensor]:
    """Return the forward by FlexAttention, as one sequence with a document mask.

    The block mask is created before timing starts.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # beyond its recompilation limit flex_attention would run uncompiled and unfused
    compiled = torch.compile(flex_attention, dynamic=False)
    document = documents(case, x)
    mask, score_mod = block_mask(case, document), _score_mod(case, x, document)
    q, k, v = (leaf.transpose(0, 1)[None] for leaf in x.leaves[:3])

    def forward() -> Tensor:
        o: Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=mask)
        return o[0].transpose(0, 1)

    return forward


def block_mask(case: PackedCase, document: Tensor) -> Any:
    """Return FlexAttention's block mask, computed from the first and last document of each block.

    `create_block_mask` would store all pairs, 2 * 10**10 of them for the short sequences.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[i] == document[j]
        return same & (j <= i) if case.causal else same

    total, count = case.keys, -(-case.keys // BLOCK)
    block = torch.arange(count, device=document.device)
    first, last = document[block * BLOCK], document[(block * BLOCK + BLOCK - 1).clamp(max=total - 1)]
    some = (first[:, None] <= last) & (first <= last[:, None])
    whole = (first == last) & ((block + 1) * BLOCK <= total)
    full = some & whole[:, None] & whole
    if case.causal:
        some, full = some & (block <= block[:, None]), full & (block < block[:, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(total, total)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks in each row (1, 1, rows), and their columns first (1, 1, rows, columns)."""
    columns = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[None, None], columns.to(torch.int32)[None, None]


def documents(case: PackedCase, x: PackedInputs) -> Tensor:
    """Return the sequence of each token, (total,)."""
    return torch.repeat_interleave(torch.arange(len(case.lengths), device=x.cu.device), x.cu.diff())


def _score_mod(case: PackedCase, x: PackedInputs, document: Tensor) -> Callable[..., Tensor] | None:
    """Return the bias as a score_mod of packed positions; its values for hidden pairs are arbitrary."""
    if case.bias is None:
        return None
    bias = x.named["bias"]
    if case.bias == "keys":
        keys = bias[0]
        return lambda s, b, h, i, j: s + keys[j]
    if case.bias == "relative":

        def relative(s, b, h, i, j):
            entry = j - i + ENTRIES - 1
            inside = (entry >= 0) & (entry < ENTRIES)
            return s + torch.where(inside, bias[i, h, entry.clamp(0, ENTRIES - 1)], 0.0)

        return relative
    first, length, matrix, last = x.cu[:-1][document], x.cu.diff()[document], x.pairs[:-1][document], bias.shape[1] - 1

    def ragged(s, b, h, i, j):
        entry = matrix[i] + (i - first[i]) * length[i] + (j - first[i])
        return s + bias[h, entry.clamp(0, last)]

    return ragged


def padded(case: PackedCase, x: PackedInputs) -> Padded:
    """Return the padded batch; called before timing starts."""
    B, n = len(case.lengths), case.longest
    q, k, v, bias = x.leaves
    rows = torch.arange(n, device=x.cu.device) < x.cu.diff()[:, None]  # (B, n), False in the padding

    def of_rows(packed: Tensor) -> Tensor:
        full = packed.new_zeros(B, n, *packed.shape[1:])
        full[rows] = packed
        return full.transpose(1, 2)

    full = bias.new_zeros(B, case.heads, n, n)
    for b, (m, own) in enumerate(zip(case.lengths, case.matrices, strict=True)):
        full[b, :, :m, :m] = bias.detach()[:, own].unflatten(1, (m, m))
    leaves = [*(of_rows(t.detach()) for t in (q, k, v)), full]
    return Padded([t.requires_grad_(case.backward) for t in leaves], of_rows(x.do), rows[:, None, None])


def tilewise_padded(case: PackedCase, x: Padded) -> Callable[[], Tensor]:
    """Return the forward of a padded batch by tilewise's default backend."""
    q, k, v, bias = x.leaves

    def forward() -> Tensor:
        o = tilewise.attention(q, k, v, bias=bias, mask=x.mask, causal=case.causal)
        assert isinstance(o, Tensor)
        return o

    return forward


def packed_again(case: PackedCase, x: Padded, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert o and the gradients of a padded batch to the packed layout."""
    rows, results = x.mask[:, 0, 0], []
    for n, padded in enumerate(found):
        if n < 4:  # o, dq, dk and dv
            results.append(padded.transpose(1, 2)[rows])
        else:
            parts = [padded[b, :, :m, :m].flatten(1) for b, m in enumerate(case.lengths)]
            results.append(torch.cat(parts, 1))
    return tuple(results)


def no_bias(case: PackedCase) -> str | None:
    return None if case.bias is None else "takes no bias tensor that has a gradient"


def ragged_alone(case: PackedCase) -> str | None:
    return None if case.bias == "ragged" else "is measured beside a ragged bias alone"
