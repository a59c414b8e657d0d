"""What of test_tile_mask_triton.py runs in the interpreter's process beside tile_mask_helpers.py."""

from __future__ import annotations

from helpers import Case, tensors
from tile_mask_helpers import pattern
from torch import Tensor


def lists_of(case: Case, name: str, block: int | tuple[int, int]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """States and lists of the forward and of the backward: of the bool mask, and of the tiles."""
    from tilewise.backends.kernels.block_mask import flat_mask
    from tilewise.backends.protocol import Inputs
    from tilewise.backends.triton.config import backward_config, forward_config
    from tilewise.backends.triton.masks import MaskLists
    from tilewise.spec.problem import Problem
    from tilewise.spec.score import Band, Score

    found, dense = pattern(name, case, block)
    q, k, v, *_ = tensors(case)
    B, H, M, N = (*found.shape[:2], case.M, case.N)
    dense = dense.expand(B, H, M, N).contiguous()
    score = Score(1.0, None, Band(None, 20))
    pairs = []
    for backward in (False, True):
        both = []
        for inputs in (Inputs(q, k, v, None, dense), Inputs(q, k, v, None, None, tiles=found.tensors)):
            problem = Problem.of(*inputs, score)
            config = backward_config(problem, False) if backward else forward_config(problem, False, False)
            make = MaskLists(problem, config, inputs.mask, q.device, by_rows=True, by_keys=True, even=backward)
            masked = make(flat_mask(inputs.mask, inputs.tiles))
            both.append([masked.states, *map(_counted, (masked.by_rows, masked.by_keys))])
        pairs.append((both[0], both[1]))
    return pairs


def hopper_lists_of(
    case: Case, name: str, block: int | tuple[int, int], many: int
) -> list[tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Bits of visited tiles, lists and states of the Hopper kernels, by rows and by keys: of the bool mask, and of the
    tiles. What nobody has written is 0. many: see `masks.MANY`."""
    import torch

    from tilewise.backends.gluon import masks
    from tilewise.backends.gluon.masks import MaskSummary
    from tilewise.backends.gluon.sm90.common.config import backward_config, forward_config
    from tilewise.backends.kernels.block_mask import flat_mask
    from tilewise.backends.protocol import Inputs
    from tilewise.spec.problem import Problem
    from tilewise.spec.score import Band, Score

    masks.MANY = many
    masks.KEYS = 0  # one row has states, too
    found, dense = pattern(name, case, block)
    q, k, v, *_ = tensors(case)
    dense = dense.expand(*found.shape[:2], case.M, case.N).contiguous()
    score = Score(1.0, None, Band.aligned(case.causal, case.window, case.N - case.M))
    pairs = []
    for by_keys in (False, True):
        both = []
        for inputs in (Inputs(q, k, v, None, dense), Inputs(q, k, v, None, None, tiles=found.tensors)):
            problem = Problem.of(*inputs, score, deterministic=case.deterministic)
            config = backward_config(problem) if by_keys else forward_config(problem)
            groups = 1 if by_keys else config.warpgroups
            summary = MaskSummary(problem, inputs.mask, q.device, config.block_n, groups, by_keys)
            summary.bits = lambda make=summary.bits: make().fill_(0x5A5A5A5A)  # no full tile's bits
            bits, lists, states, _ = summary(flat_mask(inputs.mask, inputs.tiles))
            bits = bits.view(-1, 2 * config.block_n) if by_keys else bits
            read = _read(lists, by_keys, case, bits, config.block_n, groups)
            others = -(-case.M // 64) if by_keys else -(-case.N // config.block_n)
            both.append((torch.where(read, bits, 0), _listed(lists, others), states))
        pairs.append((both[0], both[1]))
    return pairs


def _listed(lists: Tensor, others: int) -> Tensor:
    """With 0 where nothing was written, of the entries and, where there is one, of their order."""
    import torch

    place = torch.arange(lists.shape[-1] - 1) % others
    return torch.cat([lists[..., :1], torch.where(place < lists[..., :1], lists[..., 1:], 0)], -1)


def _read(lists: Tensor, by_keys: bool, case: Case, bits: Tensor, block_n: int, groups: int) -> Tensor:
    """Which bits a kernel reads: of tiles in its lists that the mask cuts; the backward, that anything does."""
    import torch

    others = -(-case.M // 64) if by_keys else -(-case.N // block_n)
    read = torch.zeros(*lists.shape[:2], others, dtype=torch.bool)
    for x in range(lists.shape[0]):
        for t in range(lists.shape[1]):
            for entry in lists[x, t, 1 : 1 + int(lists[x, t, 0])].tolist():
                if entry & (3 if by_keys else 2):
                    read[x, t, entry >> 2] = True
    if by_keys:
        return read.flatten()[:, None].expand(bits.shape)
    return read.repeat_interleave(64 * groups, 1)[:, : bits.shape[1], :, None].expand(bits.shape)


def _counted(lists: Tensor) -> Tensor:
    """With 0 where nothing was written."""
    from tilewise.backends.triton.visibility import HEAD

    head = HEAD.value
    written = lists.clone()
    for row in written.view(-1, lists.shape[-1]):
        row[head + int(row[0]) :] = 0
    return written


def sparse_sum_of(
    bias: tuple[int, ...], mask: tuple[int, ...], states: Tensor, total: Tensor, block_n: int
) -> tuple[Tensor, Tensor]:
    """A sum as it is zeroed before, and what is made of another one, in float16."""
    from types import SimpleNamespace

    import torch

    from tilewise.backends.gluon.sm90.backward.sparse_sum import SparseSum
    from tilewise.spec.operands import TensorSpec

    of = TensorSpec(torch.float16, *bias)
    shape = SimpleNamespace(bias=of, mask=TensorSpec(torch.bool, *mask), queries=bias[2], keys=bias[3])
    like = torch.empty(bias[0], bias[1], bias[3], bias[2], dtype=torch.float16).mT
    sums = SparseSum(shape, like, total, block_n)
    zeroed = total.clone()
    sums.zero(states, zeroed)
    return zeroed, sums.result(states, total)
