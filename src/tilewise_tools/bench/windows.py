"""Attention of atoms in windows of keys: case, reference results and providers.

Windows are those of `tilewise.integrations.evoformer.window_pair_attention` with ``edges="clip"``, reimplemented here
by index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.backends import lse_dtype
from tilewise.explanation.work import Work
from tilewise.integrations.evoformer import window_pair_attention
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise_tools.bench.operators import OperatorInputs, wide_dtype

PADDING = 40  # masked atoms at the end; fewer than a window has there, so that each query sees a key


@dataclass(frozen=True)
class WindowCase:
    """Shape of windowed attention of ``batch`` samples of ``keys`` atoms, a multiple of q_block.

    Samples share one trainable bias (1, heads, blocks, q_block, k_block), and a mask that hides the last atoms.
    """

    family: str
    batch: int
    heads: int
    keys: int
    head_dim: int
    q_block: int = 32
    k_block: int = 128
    dtype: str = "bfloat16"
    backward: bool = True
    host: bool = False
    operator: str = "windows"

    @property
    def name(self) -> str:
        return f"{self.family} N{self.keys}"

    @property
    def blocks(self) -> int:
        return self.keys // self.q_block

    @property
    def before(self) -> int:
        return (self.k_block - self.q_block) // 2

    def inputs(self, device: torch.device, seed: int = 0) -> OperatorInputs:
        """Return new standard normal inputs; q, k, v, do are stored as (B, N, H, D), as by a projection."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=getattr(torch, self.dtype)).normal_(generator=generator)

        rows = (self.batch, self.keys, self.heads, self.head_dim)
        named = {name: normal(*rows).transpose(1, 2) for name in ("q", "k", "v")}
        named["bias"] = normal(1, self.heads, self.blocks, self.q_block, self.k_block)
        do = normal(*rows).transpose(1, 2)
        return OperatorInputs({name: x.requires_grad_(self.backward) for name, x in named.items()}, do)

    def mask(self, device: torch.device) -> Tensor:
        """Return the mask of atoms, bool (1, N)."""
        return (torch.arange(self.keys, device=device) < self.keys - PADDING)[None]

    def windows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the atom of each window position, int64 (blocks, k_block), and if it is visible, bool."""
        first = torch.arange(self.blocks, device=device)[:, None] * self.q_block - self.before
        places = first + torch.arange(self.k_block, device=device)
        seen = (places >= 0) & (places < self.keys - PADDING)
        return places.clamp(0, self.keys - 1), seen

    def problem(self, device: str, capability: tuple[int, int] | None) -> Problem:
        """Return the problem for tilewise's backends, with the blocks as the batch."""
        dtype, batch = getattr(torch, self.dtype), self.batch * self.blocks
        return Problem(
            device=device,
            capability=capability,
            dtype=dtype,
            batch=batch,
            heads=self.heads,
            kv_heads=self.heads,
            queries=self.q_block,
            keys=self.k_block,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            score=Score.of(Band(), self.head_dim),
            bias=TensorSpec(dtype, batch, self.heads, self.q_block, self.k_block),
            bias_grad=self.backward,
        )

    def exact(self, inputs: OperatorInputs) -> dict[str, Tensor]:
        """Compute o and gradients by autograd in a wider dtype."""
        wide = {name: x.detach().to(wide_dtype(self.dtype)).requires_grad_() for name, x in inputs.named.items()}
        with torch.enable_grad():
            o = einsum(self, OperatorInputs(wide, inputs.do))()
            if not self.backward:
                return {"o": o.detach()}
            grads = torch.autograd.grad(o, list(wide.values()), inputs.do.to(o.dtype))
        return {"o": o.detach(), **{f"d{name}": g for name, g in zip(wide, grads, strict=True)}}

    def work(self, which: str) -> Work:
        """Return the work of all pairs of the windows, with traffic as in `PackedCase.work`."""
        dtype = getattr(torch, self.dtype)
        entries = self.heads * self.blocks * self.q_block * self.k_block
        rows = self.batch * self.heads * self.keys
        tensor, lse = rows * self.head_dim, rows * lse_dtype(dtype).itemsize
        products = self.head_dim * entries * self.batch
        if which == "forward":
            return Work(4 * products, (4 * tensor + entries) * dtype.itemsize + lse, 0)
        return Work(10 * products, (8 * tensor + 2 * entries) * dtype.itemsize + lse, 0)


def cases(device: str) -> Iterator[WindowCase]:
    if device == "cuda":
        for samples in (1, 16):
            family = f"window_pair_attention D32{'' if samples == 1 else f' {samples} samples'}"
            yield WindowCase(family, samples, 4, 10240, 32, host=samples == 1)
    else:
        yield WindowCase("window_pair_attention D32 float32", 1, 4, 1024, 32, dtype="float32")


# Providers


def tilewise_windows(case: WindowCase, x: OperatorInputs, backend: str) -> Callable[[], Tensor]:
    (q, k, v, bias), mask = x.leaves, case.mask(x.do.device)
    return lambda: window_pair_attention(q, k, v, bias, mask, case.q_block, case.k_block, backend=backend)


def einsum(case: WindowCase, x: OperatorInputs) -> Callable[[], Tensor]:
    """Return the forward by gather and einsum; indices and mask are created before timing starts."""
    (q, k, v, bias), (places, seen) = x.leaves, case.windows(x.do.device)
    return lambda: _gathered(q, k, v, bias, places, seen, case.q_block)


def einsum_compiled(case: WindowCase, x: OperatorInputs) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    (q, k, v, bias), (places, seen) = x.leaves, case.windows(x.do.device)
    compiled = torch.compile(_gathered, dynamic=False)
    return lambda: compiled(q, k, v, bias, places, seen, case.q_block)


def _gathered(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, places: Tensor, seen: Tensor, q_block: int) -> Tensor:
    blocks = q.unflatten(2, (-1, q_block)) * q.shape[-1] ** -0.5
    s = torch.einsum("bhnid,bhnjd->bhnij", blocks, k[:, :, places]) + bias
    p = s.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhnij,bhnjd->bhnid", p, v[:, :, places]).flatten(2, 3)


def sdpa(case: WindowCase, x: OperatorInputs) -> Callable[[], Tensor]:
    """Return the forward by gather and SDPA with an additive mask."""
    places, seen = case.windows(x.do.device)
    q, k, v, bias = x.leaves
    hidden = ~seen[:, None]

    def forward() -> Tensor:
        blocks, keys, values = (
            t.flatten(1, 2) for t in (q.unflatten(2, (-1, case.q_block)), k[:, :, places], v[:, :, places])
        )
        matrix = bias.masked_fill(hidden, -torch.inf).flatten(1, 2)
        o = F.scaled_dot_product_attention(blocks, keys, values, attn_mask=matrix.expand(case.batch, -1, -1, -1))
        return o.unflatten(1, (case.heads, case.blocks)).flatten(2, 3)

    return forward


def flex(case: WindowCase, x: OperatorInputs) -> Callable[[], Tensor]:
    """Return the forward by FlexAttention, as one sequence; creates the block mask before timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # beyond its recompilation limit flex_attention would run uncompiled and unfused
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    (q, k, v, bias), last = x.leaves, case.keys - PADDING
    matrix, q_block, k_block, before = bias[0], case.q_block, case.k_block, case.before

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = j - (i // q_block * q_block - before)
        return (place >= 0) & (place < k_block) & (j < last)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = j - (i // q_block * q_block - before)
        return s + matrix[h, i // q_block, i % q_block, place.clamp(0, k_block - 1)]

    mask = create_block_mask(seen, None, None, case.keys, case.keys, device=x.do.device.type)
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=mask)
