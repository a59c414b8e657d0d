"""A small Pairformer sorts tokens into groups, of which it is shown some pairs.

    python examples/pairformer.py                    # beside attention written out in einsum
    python examples/pairformer.py --dtype float64    # equal losses; in float32 rounding grows from step to step

Blocks are triangle attention around the starting and the ending node, attention of tokens with a bias of pairs, and
transitions; triangle multiplication, which is no attention, is left out. A head on pairs says whether both tokens are
of one group, one on tokens how many others their group has, so that both attentions learn.

The groups are made up: each token draws one of a few. Three pairs in ten are shown, and the loss asks for the others.
They follow by triangles: if i and k are of one group, and k and j are, then i and j are; if only one pair is, they are
not. Guessing that no pair is of one group is right for about two in three.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention
from tilewise_tools.demo.example import NONE, Trial, parse, report, train

TOKEN, PAIR, HEADS, BLOCKS = 32, 32, 4, 2
GROUPS, SHOWN = (2, 3, 4), 0.3


def batch(size: int, longest: int, draw: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of one group (B, N, N), which pairs are shown, and which tokens are there (B, N)."""
    same = torch.zeros(size, longest, longest, dtype=torch.bool)
    there = torch.zeros(size, longest, dtype=torch.bool)
    for b in range(size):
        length, count = draw.randint(3 * longest // 4, longest), draw.choice(GROUPS)
        group = torch.tensor([draw.randrange(count) for _ in range(length)])
        same[b, :length, :length], there[b, :length] = group[:, None] == group, True
    shown = (torch.rand(same.shape) < SHOWN).triu()
    return same, shown | shown.mT, there


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
        q, k, v, gate = self.qkvg(self.norm(x)).unflatten(-1, (4, HEADS, -1)).transpose(-4, -2).unbind(-3)
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


class Block(nn.Module):
    def __init__(self, einsum: bool) -> None:
        super().__init__()
        self.starting, self.ending = Attention(PAIR, True, einsum), Attention(PAIR, True, einsum)
        self.tokens = Attention(TOKEN, False, einsum)
        self.transitions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n)) for n in (PAIR, TOKEN)
        )

    def forward(self, s: Tensor, z: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        z = z + self.starting(z, z, there)
        z = z + self.ending(z.transpose(1, 2), z.transpose(1, 2), there).transpose(1, 2)
        z = z + self.transitions[0](z)
        s = s + self.tokens(s, z, there)
        return s + self.transitions[1](s), z


class Model(nn.Module):
    def __init__(self, longest: int, einsum: bool) -> None:
        super().__init__()
        self.state = nn.Embedding(3, PAIR)
        self.token = nn.Embedding(longest, TOKEN)
        self.blocks = nn.ModuleList(Block(einsum) for _ in range(BLOCKS))
        self.pair_head = nn.Sequential(nn.LayerNorm(PAIR), nn.Linear(PAIR, 1))
        self.token_head = nn.Sequential(nn.LayerNorm(TOKEN), nn.Linear(TOKEN, longest))

    def forward(self, same: Tensor, shown: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of a pair of one group (B, N, N), and of 0 to N - 1 others in a token's group (B, N, N)."""
        apart = ~torch.eye(there.shape[1], dtype=torch.bool, device=there.device)
        z = self.state(torch.where(shown, same.long(), 2))
        s = self.token((same & shown & apart).sum(-1))
        for block in self.blocks:
            s, z = block(s, z, there)
        z = self.pair_head(z)[..., 0]
        return z + z.mT, self.token_head(s)


def run(given: argparse.Namespace, einsum: bool) -> Trial:
    """The loss of each step: in nats for each hidden pair, and for each token."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model = Model(given.tokens, einsum).to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)

    def batches(count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(count):
            yield batch(given.batch, given.tokens, draw)

    def hidden(same: Tensor, shown: Tensor, there: Tensor) -> Tensor:
        apart = ~torch.eye(there.shape[1], dtype=torch.bool, device=there.device)
        return ~shown & there[:, None] & there[:, :, None] & apart

    def loss_of(same: Tensor, shown: Tensor, there: Tensor) -> Tensor:
        pairs, counts = model(same, shown, there)
        asked = hidden(same, shown, there)
        loss = F.binary_cross_entropy_with_logits(pairs[asked], same[asked].to(pairs))
        return loss + F.cross_entropy(counts[there], same.sum(-1)[there] - 1)

    name = "einsum" if einsum else "tilewise"
    found = train(name, loss_of, optimizer, batches(given.steps), given.device)
    right, guessed = [], []
    with torch.no_grad():
        for new in batches(4):  # not learned from
            same, shown, there = (x.to(given.device) for x in new)
            asked = hidden(same, shown, there)
            right.append(((model(same, shown, there)[0] > 0) == same)[asked])
            guessed.append(~same[asked])
    share, base = (torch.cat(x).float().mean().item() for x in (right, guessed))
    print(f"{name}: new groups: {share:.1%} of the hidden pairs are right, {base:.1%} by saying no to all")
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16, help="at most; the fewest are three quarters")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    given = parse(parser, arguments, "einsum")
    runs = [run(given, einsum) for einsum in (False, True)[: 1 if given.against == NONE else 2]]
    report(
        runs, given.output, "pairformer", "A small Pairformer sorts tokens into groups", "nats a pair + nats a token"
    )
    return {found.name: found.losses for found in runs}


if __name__ == "__main__":
    main()
