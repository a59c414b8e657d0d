"""A small Swin transformer on scikit-learn's handwritten digits, with a learned bias of places in the window.

    python examples/swin_digits.py                    # beside PyTorch's function, with bias and mask added up for it
    python examples/swin_digits.py --dtype float64    # equal losses; in float32 rounding grows from step to step

8 x 8 pixels in windows of 4 x 4; needs scikit-learn.
Every second layer shifts the windows by half, and a mask keeps apart what only the shift has brought together.
`tilewise.bias.swin_bias` makes the bias of a window from a table of offsets; `tilewise.attention` takes windows as one
more leading dimension, along which the bias is shared and the mask is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tilewise
from tilewise.bias import swin_bias
from tilewise_tools.demo.example import NONE, Trial, parse, report, train

SIDE, WINDOW, WIDTH, HEADS, LAYERS = 8, 4, 32, 2, 4


def windows(x: Tensor) -> Tensor:
    """(B, SIDE, SIDE, C) as (B, windows, places, C)."""
    x = x.unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def image(x: Tensor) -> Tensor:
    """The way back."""
    return (
        x.unflatten(2, (WINDOW, WINDOW)).unflatten(1, (SIDE // WINDOW, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    )


class Layer(nn.Module):
    def __init__(self, shift: int, sdpa: bool) -> None:
        super().__init__()
        self.shift, self.sdpa = shift, sdpa
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, HEADS))
        part = (torch.arange(SIDE) >= SIDE - shift).long()  # what the shift has brought to the other end
        region = windows((2 * part[:, None] + part)[None, :, :, None])[..., 0]
        mask = region[..., :, None] == region[..., None, :]
        self.register_buffer("mask", mask[:, :, None])  # (1, windows, 1, places, places)

    def forward(self, x: Tensor) -> Tensor:
        y = windows(torch.roll(self.before(x), (-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(3, 0, 1, 4, 2, 5)  # (B, windows, heads, places, D)
        bias = swin_bias(self.table, (WINDOW, WINDOW))
        if self.sdpa:
            added = torch.zeros_like(self.mask, dtype=bias.dtype).masked_fill(~self.mask, -torch.inf) + bias
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        else:
            o = tilewise.attention(q, k, v, bias=bias[:, None], mask=self.mask if self.shift else None)
        o = image(self.out(o.transpose(2, 3).flatten(3)))
        x = x + torch.roll(o, (self.shift, self.shift), (1, 2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, sdpa: bool) -> None:
        super().__init__()
        self.pixel = nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(Layer(WINDOW // 2 * (i % 2), sdpa) for i in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH * (SIDE // 2) ** 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pixel(images[..., None])
        for layer in self.layers:
            x = layer(x)
        merged = self.norm(x).unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4))  # of 2 x 2 places
        return self.head(merged.flatten(1))


def run(given: argparse.Namespace, sdpa: bool) -> Trial:
    """The loss of each step."""
    torch.manual_seed(0)
    digits = load_digits()
    like = {"dtype": getattr(torch, given.dtype), "device": given.device}
    images = torch.tensor(digits.images, **like) / 4 - 2
    labels = torch.tensor(digits.target, device=given.device)
    order = torch.randperm(len(images)).to(given.device)
    learned, kept = order[:-360], order[-360:]  # a fifth is not learned from
    model = Model(sdpa).to(**like)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    draws = ((torch.randint(len(learned), (given.batch,)),) for _ in range(given.steps))

    def loss_of(drawn: Tensor) -> Tensor:
        some = learned[drawn]
        return F.cross_entropy(model(images[some]), labels[some])

    name = "sdpa" if sdpa else "tilewise"
    found = train(name, loss_of, optimizer, draws, given.device)
    with torch.no_grad():
        right = (model(images[kept]).argmax(-1) == labels[kept]).float().mean().item()
    print(f"{name}: of {len(kept)} other digits {right:.1%} are right")
    row = model.layers[0].table[:, 0].view(2 * WINDOW - 1, -1)[WINDOW - 1].tolist()
    print("bias of the first head for keys in the query's row, from left to right:", *(f"{x:.2f}" for x in row))
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    given = parse(parser, arguments, "sdpa")
    runs = [run(given, sdpa) for sdpa in (False, True)[: 1 if given.against == NONE else 2]]
    report(runs, given.output, "swin_digits", "A small Swin on handwritten digits")
    return {found.name: found.losses for found in runs}


if __name__ == "__main__":
    main()
