"""A small Pairformer fills in contact maps of chains of which half of all pairs are hidden.

    python examples/pairformer.py
    python examples/pairformer.py --against einsum --dtype float64    # attention written out in einsum: the same losses

Blocks are triangle attention around the starting and the ending node, attention of tokens with a bias of pairs, and
transitions; triangle multiplication, which is no attention, is left out. A head on pairs says whether they are in
contact, one on tokens how many contacts each has, so that both attentions learn.

The chains are made up. Each walks on a cubic lattice and never visits a site twice; it goes to a free neighbouring site
that k earlier tokens touch with a probability proportional to 4 ** k, so that it folds, and starts again where no site
is free. Two tokens are in contact if their sites are neighbours and they do not follow each other. A hidden contact can
be guessed from those nearby: that is what triangles are for.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention

TOKEN, PAIR, HEADS, BLOCKS, REACH = 32, 32, 4, 2, 8
STEPS = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))


def chain(length: int, draw: random.Random) -> Tensor:
    """The contact map (length, length) of a chain."""
    sites = [(0, 0, 0)]
    while len(sites) < length:
        around = [[tuple(a + b for a, b in zip(sites[-1], step, strict=True)) for step in STEPS]][0]
        free = [site for site in around if site not in sites]
        if not free:
            sites = sites[:1]
            continue
        touched = [sum(sum(abs(a - b) for a, b in zip(x, y, strict=True)) == 1 for y in sites) for x in free]
        sites.append(draw.choices(free, [4.0**k for k in touched])[0])
    at = torch.tensor(sites)
    near = (at[:, None] - at).abs().sum(-1) == 1
    return near & ((torch.arange(length)[:, None] - torch.arange(length)).abs() > 1)


def batch(size: int, longest: int, draw: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Contact maps of chains of several lengths (B, N, N), which pairs are shown, and which tokens are there (B, N)."""
    contact = torch.zeros(size, longest, longest, dtype=torch.bool)
    there = torch.zeros(size, longest, dtype=torch.bool)
    for b in range(size):
        length = draw.randint(3 * longest // 4, longest)
        contact[b, :length, :length], there[b, :length] = chain(length, draw), True
    shown = (torch.rand(contact.shape) < 0.5).triu()
    return contact, shown | shown.mT, there


def einsum_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """What both functions of tilewise compute, with all scores in memory."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("...qk,...kd->...qd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


class Attention(nn.Module):
    """Of pairs in the rows of the pair representation, or of tokens; gated, with a bias of pairs."""

    def __init__(self, width: int, triangle: bool, einsum: bool) -> None:
        super().__init__()
        self.triangle, self.einsum = triangle, einsum
        self.norm, self.pairs = nn.LayerNorm(width), nn.LayerNorm(PAIR)
        self.qkvg, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.bias = nn.Linear(PAIR, HEADS, bias=False)

    def forward(self, x: Tensor, z: Tensor, there: Tensor) -> Tensor:
        q, k, v, gate = self.qkvg(self.norm(x)).unflatten(-1, (4, HEADS, -1)).transpose(-4, -2).unbind(-2)
        bias = self.bias(self.pairs(z)).permute(0, 3, 1, 2)  # (B, heads, N, N)
        if self.triangle:
            bias, mask = bias[:, None], there[:, None, None, None]  # each row has the same bias
        else:
            mask = there[:, None, None]
        if self.einsum:
            o = einsum_attention(q, k, v, bias, mask)
        else:
            o = (triangle_attention if self.triangle else attention_pair_bias)(q, k, v, bias, mask)
        return self.out((o * gate.sigmoid()).transpose(-3, -2).flatten(-2))
