"""Cases of context parallelism: causal self-attention, as whole tensors and as shards of a rank.

causal     no bias
relative   a relative position bias per query, (1, H, S, 1025): entry ``1024 - d`` for the key ``d`` positions before
           the query, 0 beyond; the layout of `tilewise.bias.relative_logits`, which TMA can read
packed     a packed batch of 52 lengths, the quantiles of a lognormal distribution; q (tokens, H, D)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilewise.bias import RelativeBias
from tilewise_tools.bench.packed import lognormal

KINDS = ("causal", "relative", "packed")


@dataclass(frozen=True)
class ParallelCase:
    """One shape of context-parallel attention.

    Attributes:
        kind: one of `KINDS`.
        length: length of the whole sequence, or tokens of the packed batch.
        entries: entries per query of a relative position bias.
    """

    kind: str
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    entries: int = 1025

    @property
    def name(self) -> str:
        return f"{self.kind} {'T' if self.kind == 'packed' else 'S'}{self.length}"

    @property
    def axis(self) -> int:
        """Axis of the sequence in every tensor."""
        return 0 if self.kind == "packed" else 2

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the sequences. In a short batch, used for checks, every rank has a part of one sequence."""
        if self.kind != "packed":
            return (self.length,)
        longest = self.length // 2 if self.length < 32768 else round(self.length * 3800 / 32768)
        return lognormal(52, self.length, longest)

    @property
    def cu_seqlens(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    @property
    def flops(self) -> int:
        """FLOPs of all visible pairs, forward (4 D) and backward (10 D)."""
        return 14 * self.head_dim * self.heads * sum(n * (n + 1) // 2 for n in self.lengths)

    def shapes(self, parts: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the leaves for one of ``parts`` equal parts of the sequence."""
        rows = self.length // parts
        found: dict[str, tuple[int, ...]] = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            found[name] = (rows, heads, self.head_dim) if self.kind == "packed" else (1, heads, rows, self.head_dim)
        if self.kind == "relative":
            found["values"] = (1, self.heads, rows, self.entries)
        return found

    def draw(self, device: torch.device, seed: int, parts: int = 1) -> tuple[dict[str, Tensor], Tensor]:
        """Return standard normal leaves, without requires_grad, and a gradient of the output."""
        generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, self.dtype)

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

        shapes = self.shapes(parts)
        return {name: normal(shape) for name, shape in shapes.items()}, normal(shapes["q"])

    def bias(self, leaves: dict[str, Tensor]) -> Any:
        return RelativeBias(leaves["values"], lo=1 - self.entries) if self.kind == "relative" else None

    def small(self, ranks: int) -> ParallelCase:
        """Return a shorter case, which every rank can compute unfused in float64."""
        return replace(self, length=min(self.length, 2048 if self.dtype == "bfloat16" else 32 * ranks))


def cases(device: str, ranks: int, quick: bool = False) -> list[ParallelCase]:
    if device == "cpu":
        new: Callable[..., ParallelCase] = lambda kind, length: ParallelCase(kind, length, 8, 8, 16, "float32", 9)  # noqa: E731
        return [new(kind, 64 * ranks) for kind in KINDS]
    found = [ParallelCase(kind, length) for length in (65536, 131072) for kind in ("causal", "relative")]
    if quick:
        return found[:2]
    found.append(ParallelCase("packed", 131072))
    if ranks >= 4:
        found += [ParallelCase("causal", 262144), ParallelCase("relative", 262144), ParallelCase("causal", 524288)]
    return found
