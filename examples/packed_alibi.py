"""A causal model of characters with trained ALiBi slopes, on the speeches of a play, packed without padding.

    python examples/packed_alibi.py                     # six layers, 384 wide, as nanoGPT's model of characters
    python examples/packed_alibi.py --against padded    # the same speeches in padded batches: the same losses

Speeches are of very different lengths. `tilewise.varlen_attention` takes them end to end; each sees itself alone, and
ALiBi's distances are counted within it. Everything else in the model is computed for each character by itself, so that
nothing but attention has to know where a speech begins.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise
from tilewise.bias import alibi, alibi_slopes

HEADS = 6
LONGEST = 512  # characters of a speech that count


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.slopes = nn.Parameter(alibi_slopes(HEADS))

    def forward(self, x: Tensor, cu: Tensor, longest: int, padded: bool) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(1)  # (characters, heads, D)
        bias = alibi(self.slopes, "signed")
        if padded:
            # A row for each speech. Padding comes last, where no character of the speech sees it.
            real = torch.arange(longest, device=x.device) < cu.diff()[:, None]
            rows = [y.new_zeros(*real.shape, *y.shape[1:]).index_put((real,), y).transpose(1, 2) for y in (q, k, v)]
            o = tilewise.attention(*rows, bias=bias, causal=True).transpose(1, 2)[real]
        else:
            o = tilewise.varlen_attention(q, k, v, cu, cu, longest, longest, bias=bias, causal=True)
        x = x + self.out(o.flatten(1))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, symbols: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)  # and none of positions
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, characters: Tensor, cu: Tensor, longest: int, padded: bool) -> Tensor:
        x = self.embedding(characters)
        for layer in self.layers:
            x = layer(x, cu, longest, padded)
        return self.head(self.norm(x))


def speeches() -> tuple[list[Tensor], int]:
    """Each as numbers, its speaker first; and how many characters there are."""
    text = files("tilewise_tools.demo").joinpath("data/as_you_like_it.txt").read_text(encoding="ascii")
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    found = [[number[x] for x in part.strip("\n")[: LONGEST + 1]] for part in text.split("\n\n")]
    return [torch.tensor(part) for part in found if len(part) > 1], len(number)


def batches(found: list[Tensor], room: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Speeches in random order, as many as there is room for: characters, those that follow, and where each begins."""
    draw = torch.Generator().manual_seed(0)
    chosen: list[Tensor] = []
    while True:
        for i in torch.randperm(len(found), generator=draw).tolist():
            lengths = [len(x) - 1 for x in chosen]
            if sum(lengths) + len(found[i]) - 1 > room:
                starts = torch.tensor([0, *lengths]).cumsum(0)
                yield torch.cat([x[:-1] for x in chosen]), torch.cat([x[1:] for x in chosen]), starts.to(torch.int32)
                chosen = []
            chosen.append(found[i])


def train(given: argparse.Namespace, padded: bool) -> list[float]:
    """The loss of each step, in nats for each character."""
    torch.manual_seed(0)
    found, symbols = speeches()
    model = Model(symbols, given.width, given.layers).to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    losses, packed, rows, start = [], 0, 0, time.perf_counter()
    for step, (text, following, cu) in zip(range(given.steps), batches(found, given.room), strict=False):
        longest = int(cu.diff().max())
        packed, rows = packed + len(text), rows + longest * (len(cu) - 1)
        out = model(text.to(given.device), cu.to(given.device), longest, padded)
        loss = F.cross_entropy(out, following.to(given.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step + 1:4d}: loss {losses[-1]:.4f} of {len(cu) - 1} speeches")
    slopes = ", ".join(f"{x:.4f}" for x in model.layers[0].slopes.tolist())
    seconds = time.perf_counter() - start
    print(f"{seconds:.1f} s, {packed} characters, {rows} places if padded; slopes of the first layer: {slopes}")
    return losses


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--room", type=int, default=4096, help=f"characters of a batch, at most; at least {LONGEST}")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--against", choices=["padded"], help="also train on padded batches")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="float64: on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    losses = {"packed": train(given, padded=False)}
    if given.against:
        losses[given.against] = train(given, padded=True)
        most = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        print(f"losses of packed and {given.against} batches differ by {most:.1e} at most")
    return losses


if __name__ == "__main__":
    main()
