"""dynamic_mask against sorting each query's keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilewise import attention, dynamic_mask
from tilewise.spec.block_mask import tiles_of_intervals
from tilewise.topk.selection import running_smallest

KERNELS = "tilewise.topk.kernels"


def sorted_by_hand(scores: Tensor, keep: int, causal: bool, M: int) -> Tensor:
    """Bool (B, H, M, N)."""
    B, H, rows, N = scores.shape
    kept = torch.zeros(B, H, M, N, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, M))).tolist():
        row = scores[b, h, i if rows > 1 else 0].tolist()
        last = min(max(i + N - M + 1, 0), N) if causal else N
        kept[b, h, i, sorted(range(last), key=lambda j: (-row[j], j))[:keep]] = True
    return kept


@pytest.mark.parametrize(("M", "N"), [(70, 70), (30, 100), (100, 40), (1, 65), (130, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by_query", [False, True])
def test_what_is_kept(M, N, causal, by_query):
    """With ties, of which the lower index is kept, and with -inf."""
    scores = torch.randint(0, 6, (2, 2, M if by_query else 1, N)).float()
    scores[scores == 0] = -math.inf
    for keep in (1, 2, 7, 64, 200):
        found = dynamic_mask(scores, keep=keep, causal=causal, queries=M, block=64)
        assert torch.equal(found.validate().dense(), sorted_by_hand(scores, keep, causal, M))


def test_every_number_of_keys_and_of_kept_ones():
    for N in range(1, 20):
        scores = torch.randn(1, 1, 1, N)
        for keep in range(1, N + 2):
            found = dynamic_mask(scores, keep=keep, causal=True)
            assert torch.equal(found.dense(), sorted_by_hand(scores, keep, True, N))


def test_one_row_keeps_intervals():
    """No bits and no matrix: 32,768 keys take megabytes."""
    found = dynamic_mask(torch.randn(1, 2, 1, 32768), keep=2048, causal=True)
    assert found.tensors.bits.numel() == 0
    assert sum(x.nbytes for x in found.tensors if x is not None) < 2 << 20
    seen = found.tensors.rows_visible(slice(30000, 30001), 32768)
    assert (seen.sum(-1) == 2048).all()


@pytest.mark.parametrize("n", [1, 2, 3, 31, 64, 1500])
def test_the_kernel_of_the_running_smallest_is_its_twin(interpreter, n):
    order = torch.rand(3, 2, n).argsort(-1)
    for w in {1, 2, n // 3 + 1, n, n + 5}:
        found = interpreter(f"{KERNELS}.running_smallest", order, w)
        assert torch.equal(found, running_smallest(order, w).int())


@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
def test_the_kernel_of_the_running_smallest_adds_up_a_long_node(interpreter, order):
    """More blocks in a node than are added up at once, and an end in the middle of one."""
    n = 6200
    numbers = {"random": torch.randperm(n), "ascending": torch.arange(n), "descending": torch.arange(n).flip(0)}[order]
    numbers = torch.stack([numbers, numbers.roll(n // 3)])
    assert torch.equal(interpreter(f"{KERNELS}.running_smallest", numbers, 700), running_smallest(numbers, 700).int())


@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (30, 101), (101, 30), (1100, 1100)])
def test_the_kernel_of_intervals_is_its_twin(interpreter, queries, keys):
    """With ties, a power of two, and where more are to be kept than there are keys."""
    scores = torch.randint(0, 50, (2, 2, 1, keys), generator=torch.Generator().manual_seed(keys)).float()
    order = scores[:, :, 0].sort(dim=-1, descending=True, stable=True).indices
    for keep in (1, 17, keys - 1, keys, 10**12):
        for causal in (False, True):
            made = dynamic_mask(scores, keep=keep, causal=causal, queries=queries).tensors
            found = interpreter(f"{KERNELS}.selected_intervals", order, keep, causal, queries)
            assert torch.equal(found[0], made.begins)
            assert torch.equal(found[1], made.ends)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 128), (700, 300), (2500, 65)])
def test_the_kernel_of_tiles_of_intervals_is_its_twin(interpreter, queries, keys):
    """Empty intervals too, whole tiles of them, and keys that all queries see; a tile of 192 keys, not a power of 2."""
    begins = torch.randint(0, queries + 1, (2, 3, 1, keys), dtype=torch.int32)
    ends = torch.maximum(torch.randint(0, queries + 1, begins.shape, dtype=torch.int32), begins)
    begins[1, :2], ends[1, 0], ends[1, 1] = 0, queries, queries // 2
    begins[1, 2] = ends[1, 2] = queries
    for block in ((64, 64), (64, 192), (128, 128)):
        found = interpreter("tilewise.backends.kernels.interval_tiles.tiles_of_intervals", begins, ends, queries, block)
        assert torch.equal(found, tiles_of_intervals(begins, ends, queries, block))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_flow_to_the_bias_of_what_is_kept(causal):
    q, k, v = (torch.randn(1, h, 130, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    bias = torch.randn(1, 2, 1, 130, dtype=torch.float64, requires_grad=True)
    found = dynamic_mask(bias, keep=9, causal=causal)
    assert found.shape[1] == 2
    results = []
    for mask in (found, sorted_by_hand(bias, 9, causal, 130)):
        o = attention(q, k, v, bias=bias, mask=mask, causal=causal)
        results.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v, bias))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    kept = sorted_by_hand(bias, 9, causal, 130).any(2, keepdim=True)
    assert (results[0][4][~kept] == 0).all()


def test_errors():
    scores = torch.randn(1, 1, 4, 8)
    for arguments, kind, message in (
        ({"scores": scores.int(), "keep": 1}, TypeError, "scores: dtype must be floating, got torch.int32"),
        ({"scores": scores[0], "keep": 1}, ValueError, "scores: expected"),
        ({"scores": scores, "keep": 0}, ValueError, "keep: must be 1 or more, got 0"),
        ({"scores": scores, "keep": 1.5}, TypeError, "keep: expected an int, got float"),
        ({"scores": scores, "keep": 1, "queries": 5}, ValueError, "queries: must be the scores' 4, got 5"),
        ({"scores": scores, "keep": 1, "causal": "left"}, TypeError, "causal: expected a bool"),
        ({"scores": scores, "keep": 1, "block": 32}, ValueError, "block: expected multiples of 64"),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            dynamic_mask(**arguments)
