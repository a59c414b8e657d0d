"""The sum of a dBias whose tiles a mask hides in part: the kernel, in the interpreter, against loops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

B, H, HKV, M, N, BLOCK_N = 2, 4, 2, 150, 200, 128


def sparse_sum_of(
    bias: tuple[int, ...], mask: tuple[int, ...], states: Tensor, total: Tensor, block_n: int
) -> tuple[Tensor, Tensor]:
    """A sum as it is zeroed before, and what is made of another one, in float16."""
    from tilewise.backends.gluon.sm90.backward.sparse_sum import SparseSum
    from tilewise.spec.operands import TensorSpec

    of = TensorSpec(torch.float16, *bias)
    shape = SimpleNamespace(bias=of, mask=TensorSpec(torch.bool, *mask), queries=bias[2], keys=bias[3])
    like = torch.empty(bias[0], bias[1], bias[3], bias[2], dtype=torch.float16).mT
    sums = SparseSum(shape, like, total, block_n)
    zeroed = total.clone()
    sums.zero(states, zeroed)
    return zeroed, sums.result(states, total)


@pytest.mark.parametrize(
    ("bias", "mask", "rows"),
    [
        ((1, 1), (1, 1), True), ((1, 1), (B, H), True), ((1, 1), (B, HKV), False), ((B, 1), (1, H), True),
        ((1, H), (B, HKV), True), ((1, HKV), (B, H), True), ((1, HKV), (1, 1), False),
        ((2 * B, 1), (B, H), True), ((2 * B, H), (B, 1), False),  # the mask repeats along the batch
    ],
    ids=str,
)  # fmt: skip
def test_what_is_zeroed_and_read(interpreter, bias, mask, rows):
    """Tiles that one of the matrices of the mask shows, of those that share the bias; the others hold NaN."""
    generator = torch.Generator().manual_seed(B)
    tiles = -(-N // BLOCK_N), (-(-M // 64) if rows else 1)
    states = (torch.rand(mask[0] * mask[1], *tiles, generator=generator) < 0.2).to(torch.int8) * 2
    states[:, 0, 0], states[:, 1, -1] = 2, 0
    of_mask = states.view(*mask, *tiles)
    shown = torch.zeros(*bias, M, N, dtype=torch.bool)
    for b in range(max(B, bias[0])):
        for h in range(H):
            mb, mh = b % mask[0], h * mask[1] // H
            seen = of_mask[mb, mh].T.repeat_interleave(64 if rows else M, 0)[:M].repeat_interleave(BLOCK_N, 1)[:, :N]
            shown[b % bias[0], h * bias[1] // H] |= seen > 0
    assert 0 < shown.sum() < shown.numel()
    total = torch.randn(*bias, M, N, generator=generator).masked_fill(~shown, math.nan)
    zeroed, found = interpreter(sparse_sum_of, (*bias, M, N), (*mask, M if rows else 1, N), states, total, BLOCK_N)
    assert torch.equal(zeroed.isnan(), ~shown)
    assert (zeroed[shown] == 0).all()
    assert torch.equal(found, total.nan_to_num().to(torch.float16))
    assert found.mT.is_contiguous()
