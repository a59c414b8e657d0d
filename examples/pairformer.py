"""A small Pairformer fills in contact maps of chains, of which a quarter is hidden.

    python examples/pairformer.py
    python examples/pairformer.py --against einsum --dtype float64    # attention written out in einsum: the same losses

Blocks are triangle attention around the starting and the ending node, attention of tokens with a bias of pairs, and
transitions; triangle multiplication, which is no attention, is left out. A head on pairs says whether they are in
contact, one on tokens how many contacts each has, so that both attentions learn.

The chains are made up. Each walks on a cubic lattice and never visits a site twice; it goes to a free neighbouring site
that k earlier tokens touch with a probability proportional to 8 ** k, so that it folds, and starts again where no site
is free. Two tokens are in contact if their sites are neighbours and they do not follow each other. Only tokens that are
an odd number of steps apart, three or more, can be; the loss asks for no others. A hidden contact can be guessed from
those nearby: that is what triangles are for.
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
        last = sites[-1]
        free = [site for a, b, c in STEPS if (site := (last[0] + a, last[1] + b, last[2] + c)) not in sites]
        if not free:
            sites = sites[:1]
            continue
        touched = [sum(sum(abs(a - b) for a, b in zip(x, y, strict=True)) == 1 for y in sites) for x in free]
        sites.append(draw.choices(free, [8.0**k for k in touched])[0])
    at = torch.tensor(sites)
    near = (at[:, None] - at).abs().sum(-1) == 1
    return near.triu(2) | near.tril(-2)


def batch(size: int, longest: int, draw: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Contact maps of chains of several lengths (B, N, N), which pairs are shown, and which tokens are there (B, N)."""
    contact = torch.zeros(size, longest, longest, dtype=torch.bool)
    there = torch.zeros(size, longest, dtype=torch.bool)
    for b in range(size):
        length = draw.randint(3 * longest // 4, longest)
        contact[b, :length, :length], there[b, :length] = chain(length, draw), True
    shown = (torch.rand(contact.shape) < 0.75).triu()
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
    def __init__(self, einsum: bool) -> None:
        super().__init__()
        self.state, self.distance = nn.Embedding(3, PAIR), nn.Embedding(2 * REACH + 1, PAIR)
        self.token = nn.Embedding(6, TOKEN)
        self.blocks = nn.ModuleList(Block(einsum) for _ in range(BLOCKS))
        self.pair_head = nn.Sequential(nn.LayerNorm(PAIR), nn.Linear(PAIR, 1))
        self.token_head = nn.Sequential(nn.LayerNorm(TOKEN), nn.Linear(TOKEN, 6))

    def forward(self, contact: Tensor, shown: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of a contact (B, N, N), and of 0 to 5 contacts of a token (B, N, 6)."""
        place = torch.arange(there.shape[1], device=there.device)
        distance = (place[:, None] - place).clamp(-REACH, REACH) + REACH
        z = self.state(torch.where(shown, contact.long(), 2)) + self.distance(distance)
        s = self.token((contact & shown).sum(-1))
        for block in self.blocks:
            s, z = block(s, z, there)
        z = self.pair_head(z)[..., 0]
        return z + z.mT, self.token_head(s)


def train(given: argparse.Namespace, einsum: bool) -> list[float]:
    """The loss of each step: in nats for each hidden pair, and for each token."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model = Model(einsum).to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    place = torch.arange(given.tokens, device=given.device)
    apart = (place[:, None] - place).abs()
    losses, seconds = [], 0.0
    for step in range(given.steps + 1):
        contact, shown, there = (x.to(given.device) for x in batch(given.batch, given.tokens, draw))
        start = time.perf_counter()
        pairs, counts = model(contact, shown, there)
        asked = ~shown & there[:, None] & there[:, :, None] & (apart % 2 == 1) & (apart > 1)
        wanted, logits = contact[asked], pairs[asked]
        if step == given.steps:  # of chains that were not learned from
            best = logits.topk(int(wanted.sum())).indices
            break
        loss = F.binary_cross_entropy_with_logits(logits, wanted.to(logits))
        loss = loss + F.cross_entropy(counts[there], contact.sum(-1)[there])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds += time.perf_counter() - start
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step + 1:4d}: loss {losses[-1]:.4f}")
    way = "einsum" if einsum else "tilewise"
    memory = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB at most" if given.device == "cuda" else ""
    right, share = (x.float().mean().item() for x in (wanted[best], wanted))
    print(f"{way}: {seconds:.1f} s{memory}; new chains: {share:.0%} of the hidden pairs are contacts, and {right:.0%} "
          "of as many that the model finds most likely")  # fmt: skip
    return losses


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24, help="of a chain, at most; the shortest have three quarters")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--against", choices=["einsum"], help="also train with attention written out in einsum")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="float64: on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    losses = {"tilewise": train(given, einsum=False)}
    if given.against:
        losses[given.against] = train(given, einsum=True)
        most = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        print(f"losses of tilewise and {given.against} differ by {most:.1e} at most")
    return losses


if __name__ == "__main__":
    main()
