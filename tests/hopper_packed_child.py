"""What runs in the child process of test_hopper_packed.py: kernels in plain Triton of packed batches, as Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from varlen_helpers import HALF, Lengths

from tilewise import varlen_attention
from tilewise.varlen import read_packed

HEADS, KV_HEADS, DIM = 4, 2, 24


class Call(NamedTuple):
    """bias: along the "keys", the "queries", or None. sink: for each head "h", each query "hm", or None."""

    lengths: Lengths
    bias: str | None = None
    sink: str | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None

    def tensors(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """q, k, v; and what else `varlen_attention` takes."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(HALF)

        x = self.lengths
        q, (k, v) = normal(x.total_q, HEADS, DIM), normal(2, x.total_k, KV_HEADS, DIM)
        bias = {None: None, "keys": normal(HEADS, x.total_k), "queries": normal(HEADS, x.total_q, 1)}[self.bias]
        sink = {None: None, "h": normal(HEADS), "hm": normal(HEADS, x.total_q)}[self.sink]
        options = {"bias": bias, "sink": sink, "causal": self.causal, "window": self.window, "softcap": self.softcap}
        return (q, k, v), options

    def read(self) -> tuple[Any, Any]:
        """The problem and its inputs."""
        from tilewise.problem import Problem
        from tilewise.score.lengths import Lengths as Tensors

        qkv, options = self.tensors()
        cu_q, cu_k, *longest = self.lengths.arguments()
        call = read_packed(
            *qkv, Tensors(cu_q, cu_k, self.lengths.seqused().get("seqused_k")), tuple(longest), mask=None,
            dropout_p=0.0, dropout_seed=None, deterministic=False, backend=None, validate=False, **options,
        )  # fmt: skip
        return Problem.of(*call.inputs, call.score), call.inputs

    def forward(self) -> tuple[Any, Any]:
        """The prepared forward, and its inputs."""
        from tilewise.backends.gluon.sm90.launch import Forward

        problem, inputs = self.read()
        return Forward(problem, inputs), inputs


def tile_list(x: Call, others: dict[str, tuple[int, ...]] | None = None) -> tuple[Tensor, Tensor, Tensor, int]:
    """The list, O and the LSE, which were NaN, and the queries of a tile. others: offsets in place of these."""
    run, inputs = x.forward()
    o, lse = torch.full_like(inputs.q, torch.nan), torch.full(inputs.q.shape[:3], torch.nan)
    given = {name: torch.tensor(offsets, dtype=torch.int32) for name, offsets in (others or {}).items()}
    found, semaphore = run.packed(inputs.lengths._replace(**given), o, lse=lse)
    assert semaphore[0] == 0
    return found, o, lse, 64 * run.main.numbers[2].WARPGROUPS.value


def repair(x: Call, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O and the LSE before and after, and which rows were broken and are to be computed again."""
    run, inputs = x.forward()
    qkv, options = x.tensors()
    o, lse = varlen_attention(
        *qkv, *x.lengths.arguments(), **x.lengths.seqused(), **options, return_lse=True, backend="cpu"
    )
    o, lse = o.transpose(0, 1)[None], lse[None]
    spoilt = torch.rand(lse.shape, generator=torch.Generator().manual_seed(1)) < share
    spoilt[:, :, x.lengths.total_q - x.lengths.past :] = False
    after, after_lse = o.clone(), lse.clone()
    after[spoilt], after_lse[spoilt] = 7.0, torch.nan
    found, _ = run.packed(inputs.lengths, o.clone(), lse=lse.clone())
    run.repair(*inputs[:6], None, found, after, after_lse)
    return o, lse, after, after_lse, spoilt


def tiles_of_heads(x: Call, by_keys: bool, block: int = 64) -> tuple[Tensor, Tensor]:
    """The list of tiles of queries, or of keys; and what it comes to for all heads, (first query,
    first key, tile, head) each."""
    from hopper_packed_kernel import tiles_of_heads_kernel

    from tilewise.backends.gluon.packed import TileList

    problem, inputs = x.read()
    rows = inputs.k if by_keys else inputs.q
    found, _ = TileList(problem, block, rows, by_keys=by_keys)(inputs.lengths, rows.clone())
    out = torch.full((int(found[0]) * HEADS, 4), -1, dtype=torch.int32)
    if len(out):
        tiles_of_heads_kernel[(len(out),)](found, out, HEADS, block, by_keys)
    return found, out
