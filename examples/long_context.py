"""A small causal model of bytes, with a learned relative bias, on a sequence that is split over several processes.

    torchrun --nproc-per-node 2 examples/long_context.py
    python examples/long_context.py                          # one process: the same losses

The text is Python's own documentation of its language, which comes with Python. Every rank has a chunk of the
sequence's head and one of its tail, so that all have equally much to compute under the causal mask. Where there is a
GPU for each process it runs there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilewise.bias import RelativeBias
from tilewise.distributed import context_parallel_attention, shard

HEADS, WIDTH, LAYERS, REACH = 4, 64, 2, 64
SPLIT = "head_tail"


class Layer(nn.Module):
    """Attention with one bias for each distance up to REACH, and a feed-forward network; this rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.distances = nn.Parameter(torch.zeros(1, HEADS, 1, REACH))

    def forward(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        bias = RelativeBias(self.distances, lo=1 - REACH, outside="clamp")
        o = context_parallel_attention(q, k, v, mesh=mesh, bias=bias, causal=True, load_balancer=SPLIT)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, mesh: DeviceMesh) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mesh)
        return self.head(self.norm(x))


def sequences(length: int) -> Iterator[Tensor]:
    """One after the other, (1, length + 1): of each byte but the last the next is to be said."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    for start in range(0, len(text) - length, length):
        yield text[None, start : start + length + 1]


def train(mesh: DeviceMesh, length: int, steps: int) -> list[float]:
    """The loss of each step, in bits for each byte; the same on every rank."""
    torch.manual_seed(0)  # every rank draws the same parameters
    model = Model().to(mesh.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for text in islice(sequences(length), steps):
        given, following = (shard(x.to(mesh.device_type), mesh, SPLIT, 1) for x in (text[:, :-1], text[:, 1:]))
        loss = F.cross_entropy(model(given, mesh).flatten(0, 1), following.flatten(), reduction="sum") / length
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if not name.endswith("distances"):  # whose gradient is the sum over ranks already
                dist.all_reduce(parameter.grad, group=mesh.get_group())
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group())
        losses.append(total.item() / torch.log(torch.tensor(2.0)).item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=1024, help="bytes of a sequence, of all ranks together")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        os.environ.setdefault(name, alone)
    size = int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    mesh = init_device_mesh(device, (size,))
    losses = train(mesh, given.length, given.steps)
    if mesh.get_rank() == 0:
        for step in sorted({0, *range(9, len(losses), 10), len(losses) - 1}):
            print(f"step {step + 1:4d}: {losses[step]:.3f} bits a byte on {size} of {device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
