"""A small causal model of bytes, with a learned relative bias, on a sequence that is split over several processes.

    torchrun --nproc-per-node 2 examples/long_context.py    # beside PyTorch's function on one rank, which has all rows
    python examples/long_context.py                         # one process: equal losses

The text is Python's own documentation of its language, which comes with Python. Every rank has a chunk of the
sequence's head and one of its tail, so that all have equally much to compute under the causal mask. Where there is a
GPU for each process it runs there.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilewise.bias import RelativeBias
from tilewise.distributed import context_parallel_attention, shard
from tilewise_tools.demo.example import NONE, Trial, parse, report

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

    def forward(self, x: Tensor, mesh: DeviceMesh | None) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if mesh is None:  # PyTorch's function takes a matrix of all rows and keys
            place = torch.arange(x.shape[1], device=x.device)
            distance = place - place[:, None]
            bias = self.distances[:, :, 0, distance.clamp(1 - REACH, 0) + REACH - 1]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(distance > 0, -torch.inf))
        else:
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

    def forward(self, tokens: Tensor, mesh: DeviceMesh | None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mesh)
        return self.head(self.norm(x))


def sequences(length: int) -> Iterator[Tensor]:
    """One after the other, (1, length + 1): of each byte but the last the next is to be said."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    for start in range(0, len(text) - length, length):
        yield text[None, start : start + length + 1]


def run(mesh: DeviceMesh | None, length: int, steps: int, device: str = "cpu") -> Trial:
    """The loss of each step, in bits for each byte, the same on every rank; without a mesh by PyTorch on this one."""
    torch.manual_seed(0)  # every rank draws the same parameters
    name = "sdpa" if mesh is None else "tilewise"
    model, found = Model().to(device), Trial(name)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for text in islice(sequences(length), steps):
        parts = [x.to(device) for x in (text[:, :-1], text[:, 1:])]
        given, following = parts if mesh is None else (shard(x, mesh, SPLIT, 1) for x in parts)
        optimizer.zero_grad()

        def step(given: Tensor = given, following: Tensor = following) -> Tensor:
            loss = F.cross_entropy(model(given, mesh).flatten(0, 1), following.flatten(), reduction="sum") / length
            loss.backward()
            total = loss.detach().clone()
            if mesh is not None:
                for name, parameter in model.named_parameters():
                    if not name.endswith("distances"):  # whose gradient is the sum over ranks already
                        dist.all_reduce(parameter.grad, group=mesh.get_group())
                dist.all_reduce(total, group=mesh.get_group())
            return total

        loss = found.measure(step, device)
        optimizer.step()
        found.losses.append(loss.item() / math.log(2))
        count = len(found.losses)
        if (mesh is None or mesh.get_rank() == 0) and (count % 10 == 1 or count == steps):
            where = "1" if mesh is None else mesh.size()
            print(f"{name}, step {count:3d}: {found.losses[-1]:.3f} bits a byte on {where} of {device}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=1024, help="bytes of a sequence, of all ranks together")
    parser.add_argument("--steps", type=int, default=40)
    given = parse(parser, arguments, "sdpa", dtypes=False)
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        os.environ.setdefault(name, alone)
    size = int(os.environ["WORLD_SIZE"])
    device = given.device if torch.cuda.device_count() >= size else "cpu"
    mesh = init_device_mesh(device, (size,))
    runs, first = [run(mesh, given.length, given.steps, device)], mesh.get_rank() == 0
    if first:
        if given.against != NONE:
            runs.append(run(None, given.length, given.steps, device))
        report(runs, given.output, "long_context", f"A sequence on {size} of {device}", "bits a byte")
    dist.destroy_process_group()
    return {found.name: found.losses for found in runs}


if __name__ == "__main__":
    main()
