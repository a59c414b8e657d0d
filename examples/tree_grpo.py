"""GRPO on prefix trees: each prompt is computed once for all of its responses.

    python examples/tree_grpo.py    # each update also on one sequence for each response: equal gradients

A model of characters continues speeches; its reward is the share of vowels. All prompts of a step and their responses
are one row: `tilewise.TileMask.tree` keeps the responses apart, and `tilewise.tree_positions` has the positions for the
rotary embedding, and for each token the one whose logits predict it: for the first token of every response the last one
of the prompt. Beside it, log-probs and gradients of each update are computed by PyTorch's function on a copy of the
prompt for each response.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise
from tilewise import TileMask
from tilewise_tools.demo.example import NONE, Trial, draw, parse, table

WIDTH, HEADS, LAYERS, CLIP, EPOCHS = 32, 2, 2, 0.2, 2


class Group(NamedTuple):
    prompt: Tensor
    responses: list[Tensor]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (B, S) of x (B, heads, S, D)."""
    rates = 1e4 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    angles = positions[:, None, :, None] * rates
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, mask: TileMask | None) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, positions), rotated(k, positions)
        if mask is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            o = tilewise.attention(q, k, v, mask=mask, causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols)

    def forward(self, tokens: Tensor, positions: Tensor, mask: TileMask | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.norm(x)


def on_tree(model: Model, groups: list[Group]) -> Tensor:
    """The log-probs of the tokens of all responses, one after the other."""
    device = groups[0].prompt.device
    trees = [(len(group.prompt), [len(x) for x in group.responses]) for group in groups]
    tokens = torch.cat([x for group in groups for x in (group.prompt, *group.responses)])
    answers = torch.cat([torch.arange(p + sum(lengths), device=device) >= p for p, lengths in trees])
    positions, previous = tilewise.tree_positions(trees, device=device)
    hidden = model(tokens[None], positions, TileMask.tree(trees, device=device))[0]
    return -F.cross_entropy(model.head(hidden[previous[0, answers]]), tokens[answers], reduction="none")


def on_sequences(model: Model, groups: list[Group]) -> Tensor:
    """The same with the prompt before each response."""
    found = []
    for prompt, responses in groups:
        for response in responses:
            tokens = torch.cat([prompt, response])
            hidden = model(tokens[None], torch.arange(len(tokens), device=tokens.device)[None])[0]
            logits = model.head(hidden[len(prompt) - 1 : -1])
            found.append(-F.cross_entropy(logits, response, reduction="none"))
    return torch.cat(found)


@torch.no_grad()
def sampled(model: Model, prompt: Tensor, count: int, longest: int, end: int) -> Group:
    """A group of responses, each up to its first ``end``."""
    rows = prompt.expand(count, -1)
    for _ in range(longest):
        hidden = model(rows, torch.arange(rows.shape[1], device=rows.device)[None])[:, -1]
        rows = torch.cat([rows, model.head(hidden).softmax(-1).multinomial(1)], 1)
    responses = []
    for row in rows[:, len(prompt) :]:
        ends = (row == end).nonzero().flatten().tolist()
        responses.append(row[: ends[0] + 1] if ends else row)
    return Group(prompt, responses)


def grpo(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def largest_apart(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Relative to the largest number of each tensor."""
    return max(((x - y).abs().max() / x.abs().max()).item() for x, y in zip(expected, found, strict=True))


def train(given: argparse.Namespace) -> dict[str, list[float]]:
    """The mean reward of each step, and how far each update is from that of sequences; with time and memory."""
    torch.manual_seed(0)
    text = files("tilewise_tools.demo").joinpath("data/as_you_like_it.txt").read_text(encoding="ascii")
    symbols = sorted(set(text))
    number = {character: i for i, character in enumerate(symbols)}
    speeches = [x for x in text.split("\n\n") if len(x) > given.longest]
    vowels = torch.tensor([x in "aeiouAEIOU" for x in symbols], dtype=torch.float64, device=given.device)
    model = Model(len(symbols)).to(given.device, getattr(torch, given.dtype))
    optimizer = torch.optim.Adam(model.parameters(), lr=given.lr)

    def update(log_probs_of: Callable[..., Tensor], groups: list[Group], old: Tensor, advantages: Tensor) -> Tensor:
        log_probs = log_probs_of(model, groups)
        grpo(log_probs, old, advantages).backward()
        return log_probs.detach()

    rewards: list[float] = []
    apart: list[float] = []
    ways = [(Trial("tree"), on_tree)]
    if given.against != NONE:
        ways.insert(0, (Trial("sequences"), on_sequences))  # the optimizer takes the gradients of the last one
    for step in range(given.steps):
        groups = []
        for i in torch.randint(len(speeches), (given.prompts,)).tolist():
            length = int(torch.randint(given.longest // 2, given.longest, ()))
            prompt = torch.tensor([number[x] for x in speeches[i][-length:]], device=given.device)
            groups.append(sampled(model, prompt, given.responses, given.length, number["\n"]))
        scores = torch.stack([torch.stack([vowels[x].mean() for x in group.responses]) for group in groups])
        better = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
        lengths = torch.tensor([len(x) for group in groups for x in group.responses], device=given.device)
        advantages = torch.repeat_interleave(better.flatten(), lengths).to(getattr(torch, given.dtype))
        with torch.no_grad():
            old = on_tree(model, groups)
        for _ in range(EPOCHS):
            found = []
            for way, log_probs_of in ways:
                optimizer.zero_grad()
                found.append(
                    [
                        way.measure(partial(update, log_probs_of, groups, old, advantages), given.device),
                        *(x.grad for x in model.parameters()),
                    ]
                )
            optimizer.step()
            if len(found) > 1:
                apart.append(largest_apart(*found))
        rewards.append(scores.mean().item())
        if step % 10 == 0 or step == given.steps - 1:
            prompts = sum(len(group.prompt) for group in groups)
            answers = int(lengths.sum())
            print(
                f"step {step + 1:4d}: {rewards[-1]:5.1%} vowels; {prompts + answers} tokens in the tree, "
                f"{given.responses * prompts + answers} in sequences",
                flush=True,
            )
    runs = [way for way, _ in reversed(ways)]
    table(runs)
    draw(given.output / "tree_grpo.png", "GRPO on prefix trees", {"vowels": rewards}, "share of vowels", runs)
    return {"rewards": rewards, "apart": apart}


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--responses", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--longest", type=int, default=100, help="characters of a prompt, at most")
    parser.add_argument("--length", type=int, default=12, help="characters of a response, at most")
    parser.add_argument("--lr", type=float, default=3e-3)
    given = parse(parser, arguments, "sequences")
    found = train(given)
    if found["apart"]:
        print(f"log-probs and gradients of the tree and of sequences differ by {max(found['apart']):.1e} at most")
    return found


if __name__ == "__main__":
    main()
