"""Cases of packed batches: sequence lengths, inputs, biases by definition, work.

Batches:

lognormal   32,768 tokens in 52 sequences, the longest 3,800: the quantiles of a lognormal distribution
uneven      lengths from 64 to 512, log-uniform, until they sum to at least 16,384 tokens
short       4,096 lengths from 8 to 64, uniform
rollouts    eight sequences of 5,120 tokens: a prompt of 4,096 and a response of 1,024 each, see `sparse`'s tree
few         five lengths of a few tokens, for tests

Lengths are equal on every machine: `random.Random(seed).random()` is stable across Python versions.

Biases:

keys        a packed bias along the keys, (1, total)
relative    a relative position bias for the last 256 keys, (total, H, 256)
ragged      a matrix (n, n) for each sequence, row-major, (H, pairs)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import exp
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import lse_dtype
from tilewise.bias import RaggedBias, RelativeBias
from tilewise.explanation.work import Work
from tilewise.frontend.varlen import read_packed
from tilewise.spec.bias_components import DIFFERENTIABLE
from tilewise.spec.problem import Problem, irregular
from tilewise.spec.seqlens import Lengths

ENTRIES = 256
BIASES = ("keys", "relative", "ragged")


def lognormal(count: int, total: int, longest: int) -> tuple[int, ...]:
    """Return ``count`` lengths with this sum and this maximum, in random order.

    Length n is ``longest * exp(sigma * (z[n] - z[-1]))``, where z are the normal quantiles (n + 1/2) / count and sigma
    is chosen to give the sum. Rounding applies to the cumulative sums, so that the total is exact.
    """
    z = [NormalDist().inv_cdf((n + 0.5) / count) for n in range(count)]
    low, high = 0.0, 16.0
    for _ in range(100):  # the sum falls as sigma grows
        sigma = (low + high) / 2
        if longest * sum(exp(sigma * (x - z[-1])) for x in z) > total:
            low = sigma
        else:
            high = sigma
    rest = [longest * exp(low * (x - z[-1])) for x in z[:-1]]
    share = (total - longest) / sum(rest)
    ends = [round(share * end) for end in accumulate(rest, initial=0.0)]
    found = [*(end - begin for begin, end in pairwise(ends)), longest]
    draw = random.Random(1)
    return tuple(n for _, n in sorted((draw.random(), n) for n in found))


def uneven(total: int) -> tuple[int, ...]:
    draw, found = random.Random(2), [0]
    while sum(found) < total:
        found.append(round(64 * 8 ** draw.random()))
    return tuple(found[1:])


def short(count: int) -> tuple[int, ...]:
    draw = random.Random(3)
    return tuple(8 + int(57 * draw.random()) for _ in range(count))


BATCHES: dict[str, Callable[[], tuple[int, ...]]] = {
    "lognormal": lambda: lognormal(52, 32768, 3800),
    "uneven": lambda: uneven(16384),
    "short": lambda: short(4096),
    "rollouts": lambda: (5120,) * 8,
    "few": lambda: (5, 1, 33, 2, 12),
}


@lru_cache
def lengths_of(batch: str) -> tuple[int, ...]:
    return BATCHES[batch]()


class PackedInputs(NamedTuple):
    """Input tensors of a packed case.

    Attributes:
        named: the leaves q, k, v (total, H, D), and bias if the case has one.
        do: gradient of the output, (total, H, D).
        cu: first token of each sequence, int32 (B + 1,).
        pairs: first element of each sequence's bias matrix, int64 (B + 1,).
    """

    named: dict[str, Tensor]
    do: Tensor
    cu: Tensor
    pairs: Tensor

    @property
    def names(self) -> list[str]:
        return list(self.named)

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.named.values())


@dataclass(frozen=True)
class PackedCase:
    """Self-attention of a packed batch.

    Attributes:
        batch: one of `BATCHES`, which gives the lengths.
        bias: one of `BIASES`, trainable, or None.
        host: True to measure the host time of a call, too.
    """

    family: str
    batch: str
    heads: int
    head_dim: int
    causal: bool = False
    bias: str | None = None
    dtype: str = "bfloat16"
    backward: bool = True
    host: bool = False
    operator: str = "varlen"

    def __post_init__(self) -> None:
        if self.batch not in BATCHES or self.bias not in (None, *BIASES):
            raise ValueError(f"there is no packed batch {self.batch!r} with bias {self.bias!r}")

    @property
    def lengths(self) -> tuple[int, ...]:
        return lengths_of(self.batch)

    @property
    def keys(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def name(self) -> str:
        return f"{self.family} T{self.keys}"

    @property
    def without_bias(self) -> str | None:
        """Name of this case without its bias, if there is such a case."""
        if self.batch != "lognormal" or self.bias is None:
            return None
        return lognormal_case(self.head_dim, self.causal).name

    @property
    def sequences(self) -> list[slice]:
        """Rows of each sequence."""
        return [slice(*ends) for ends in pairwise(accumulate(self.lengths, initial=0))]

    @property
    def matrices(self) -> list[slice]:
        """Elements of each sequence's matrix in a ragged bias."""
        return [slice(*ends) for ends in pairwise(accumulate((n * n for n in self.lengths), initial=0))]

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        if self.bias is None:
            return None
        shapes = {
            "keys": (1, self.keys),
            "relative": (self.keys, self.heads, ENTRIES),
            "ragged": (self.heads, sum(n * n for n in self.lengths)),
        }
        return shapes[self.bias]

    def tensors(self, device: torch.device, new: Callable[..., Tensor]) -> PackedInputs:
        """Return inputs that ``new`` creates from shapes."""
        rows = (self.keys, self.heads, self.head_dim)
        named, do = {name: new(*rows) for name in ("q", "k", "v")}, new(*rows)
        if self.bias_shape is not None:
            named["bias"] = new(*self.bias_shape)
        cu, pairs = ([0, *(x.stop for x in found)] for found in (self.sequences, self.matrices))
        return PackedInputs(
            {name: x.requires_grad_(self.backward) for name, x in named.items()},
            do,
            torch.tensor(cu, dtype=torch.int32, device=device),
            torch.tensor(pairs, device=device),
        )

    def inputs(self, device: torch.device, seed: int = 0) -> PackedInputs:
        """Return new standard normal inputs."""
        generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

        return self.tensors(device, normal)

    def term(self, x: PackedInputs) -> Any:
        """Return the bias argument of `tilewise.varlen_attention`."""
        bias = x.named.get("bias")
        if bias is None or self.bias == "keys":
            return bias
        return RelativeBias(bias, lo=1 - ENTRIES) if self.bias == "relative" else RaggedBias(bias, x.pairs)

    def problem(self, device: str, capability: tuple[int, int] | None) -> Problem:
        """Return the case as a problem for tilewise's backends."""
        return replace(_problem(self), device=device, capability=capability)

    def work(self, which: str) -> Work:
        """Return the work of a pass: 4·D FLOPs per visible pair and head in the forward, 10·D in the backward.

        The forward reads q, k, v, bias and writes o and LSE; the backward reads these and do, and writes gradients.
        """
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        dtype = getattr(torch, self.dtype)
        rows, bias = self.keys * self.heads * self.head_dim, 1 if self.bias_shape else 0
        for n in self.bias_shape or ():
            bias *= n
        lse = self.keys * self.heads * lse_dtype(dtype).itemsize
        if which == "forward":
            return Work(4 * self.head_dim * pairs * self.heads, (4 * rows + bias) * dtype.itemsize + lse, 0)
        return Work(10 * self.head_dim * pairs * self.heads, (8 * rows + 2 * bias) * dtype.itemsize + lse, 0)


@lru_cache
def _problem(case: PackedCase) -> Problem:
    meta = torch.device("meta")
    x = case.tensors(meta, lambda *shape: torch.empty(shape, dtype=getattr(torch, case.dtype), device=meta))
    q, k, v, *_ = x.leaves
    longest = (case.longest, case.longest)
    call = read_packed(q, k, v, Lengths(x.cu, x.cu), longest, bias=case.term(x), causal=case.causal)
    parts = call.inputs.parts
    grads = [name for name in DIFFERENTIABLE if parts is not None and getattr(parts, name) is not None]
    return Problem.of(
        *call.inputs,
        call.score,
        bias_grad=call.inputs.bias is not None and case.backward,
        part_grads=tuple(grads) if case.backward else (),
        irregular=irregular(*call.inputs[:4]),
    )


# The bias of one sequence as a matrix, and its gradient


def matrix(case: PackedCase, bias: Tensor, b: int) -> Tensor:
    """Return the bias of sequence ``b`` as a matrix (H|1, n|1, n)."""
    rows, n = case.sequences[b], case.lengths[b]
    if case.bias == "keys":
        return bias[:, None, rows]
    if case.bias == "ragged":
        return bias[:, case.matrices[b]].unflatten(1, (n, n))
    entry, inside = _entries(n, bias.device)
    values = bias[rows].transpose(0, 1)
    return torch.where(inside, values.gather(-1, entry.expand(case.heads, n, n)), 0.0)


def add_gradient(case: PackedCase, total: Tensor, dmatrix: Tensor, b: int) -> None:
    """Backward of `matrix`: add the gradient (H|1, n|1, n) of a matrix to ``total``, of the bias's shape."""
    rows, n = case.sequences[b], case.lengths[b]
    if case.bias == "keys":
        total[:, rows] += dmatrix[:, 0]
    elif case.bias == "ragged":
        total[:, case.matrices[b]] += dmatrix.flatten(1)
    else:
        entry, inside = _entries(n, total.device)
        zeros = torch.zeros(case.heads, n, ENTRIES, dtype=total.dtype, device=total.device)
        zeros.scatter_add_(-1, entry.expand_as(dmatrix), torch.where(inside, dmatrix, 0.0))
        total[rows] += zeros.transpose(0, 1)


def _entries(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the entry of each pair in a relative position bias, (n, n), and True where the pair has one."""
    i = torch.arange(n, device=device)
    entry = i[None, :] - i[:, None] + ENTRIES - 1
    return entry.clamp(0, ENTRIES - 1), (entry >= 0) & (entry < ENTRIES)


# The list


def lognormal_case(head_dim: int, causal: bool, bias: str | None = None) -> PackedCase:
    """Return a lognormal case with heads * head_dim = 2,048."""
    words = {None: "", "keys": " bias along keys", "relative": " bias by distance"}[bias]
    family = f"varlen D{head_dim} {'causal' if causal else 'full'}{words}"
    return PackedCase(family, "lognormal", 2048 // head_dim, head_dim, causal, bias)


def ragged_case(dtype: str = "bfloat16") -> PackedCase:
    return PackedCase("varlen ragged bias D32", "uneven", 4, 32, bias="ragged", dtype=dtype)


def short_case() -> PackedCase:
    return PackedCase("varlen short D64 full", "short", 16, 64, host=True)


def rollouts_case(head_dim: int) -> PackedCase:
    return PackedCase(f"varlen rollouts D{head_dim} causal", "rollouts", 16, head_dim, causal=True)


def biased() -> Iterator[PackedCase]:
    yield from (lognormal_case(128, causal=True, bias=bias) for bias in ("keys", "relative"))
    yield ragged_case()
