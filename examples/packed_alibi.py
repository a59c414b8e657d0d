"""A causal model of characters with trained ALiBi slopes, on the speeches of a play, packed without padding.

    python examples/packed_alibi.py                           # beside padded batches by PyTorch: equal losses
    python examples/packed_alibi.py --width 384 --layers 6    # as nanoGPT's model of characters, for a GPU

Speeches are of very different lengths. `tilewise.varlen_attention` takes them end to end; each sees itself alone, and
ALiBi's distances are counted within it. Everything else in the model is computed for each character by itself, so that
nothing but attention has to know where a speech begins.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise
from tilewise.bias import alibi, alibi_slopes
from tilewise_tools.demo.example import NONE, Trial, parse, report, train

HEADS = 6
LONGEST = 256  # characters of a speech that count


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.slopes = nn.Parameter(alibi_slopes(HEADS))

    def forward(self, x: Tensor, cu: Tensor, longest: int, padded: bool) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(1)  # (characters, heads, D)
        if padded:
            # A row for each speech. Padding comes last, where no character of the speech sees it.
            place = torch.arange(longest, device=x.device)
            real = place < cu.diff()[:, None]
            rows = [y.new_zeros(*real.shape, *y.shape[1:]).index_put((real,), y).transpose(1, 2) for y in (q, k, v)]
            distance = place - place[:, None]
            bias = (self.slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
            o = F.scaled_dot_product_attention(*rows, attn_mask=bias[None]).transpose(1, 2)[real]
        else:
            bias = alibi(self.slopes, "signed")
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


def run(given: argparse.Namespace, padded: bool) -> Trial:
    """The loss of each step, in nats for each character."""
    torch.manual_seed(0)
    found, symbols = speeches()
    model = Model(symbols, given.width, given.layers).to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    packed = rows = 0

    def loss_of(text: Tensor, following: Tensor, cu: Tensor) -> Tensor:
        nonlocal packed, rows
        longest = int(cu.diff().max())
        packed, rows = packed + len(text), rows + longest * (len(cu) - 1)
        return F.cross_entropy(model(text, cu, longest, padded), following)

    name = "padded" if padded else "packed"
    result = train(name, loss_of, optimizer, islice(batches(found, given.room), given.steps), given.device)
    slopes = ", ".join(f"{x:.4f}" for x in model.layers[0].slopes.tolist())
    print(f"{name}: {packed} characters, {rows} places if padded; slopes of the first layer: {slopes}")
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--room", type=int, default=1024, help=f"characters of a batch, at most; at least {LONGEST}")
    parser.add_argument("--width", type=int, default=144)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    given = parse(parser, arguments, "padded")
    runs = [run(given, padded) for padded in (False, True)[: 1 if given.against == NONE else 2]]
    report(runs, given.output, "packed_alibi", "Packed speeches, and padded ones by SDPA", "nats a character")
    return {found.name: found.losses for found in runs}


if __name__ == "__main__":
    main()
