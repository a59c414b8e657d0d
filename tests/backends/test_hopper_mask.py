"""The kernels that read a mask for the hopper backend, in Triton's interpreter, against brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Case, tensors, visible
from interpreter_child import make_sparse, problem_of
from torch import Tensor

from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

USUAL = Case(B=2, H=4, Hkv=2, M=139, N=300, D=64)


def summarise(case: Case, keys: int) -> tuple[Tensor, Tensor, int, int]:
    """What the hopper backend's forward knows of a case's mask: bits, visits, and its tiles of queries and of keys.

    keys: up to how many `key_summary_kernel` looks at."""
    from tilewise.backends.gluon import masks
    from tilewise.backends.gluon.masks import MaskSummary
    from tilewise.backends.gluon.sm90.common.config import forward_config

    x = tensors(case)
    problem = problem_of(case, x)
    config = forward_config(problem)
    masks.KEYS = keys
    bits, visits, *_ = MaskSummary(problem, x.mask, x.q.device, config.block_n, config.warpgroups)([x.mask])
    return bits, visits, config.block_m, config.block_n


def summarise_by_keys(case: Case, sparse: bool) -> tuple[Tensor, Tensor, Tensor, int, int, Tensor]:
    """What its backward knows of it: bits, visits, states, its tiles of queries and of keys; and the mask.

    sparse: of blocks of 64 some are hidden and some visible.
    """
    from tilewise.backends.gluon.masks import MaskSummary
    from tilewise.backends.gluon.sm90.common.config import backward_config

    x = tensors(case)
    problem = problem_of(case, x)
    config = backward_config(problem)
    if sparse:
        block = (torch.arange(x.mask.shape[2])[:, None] // 64 + torch.arange(x.mask.shape[3]) // 64) % 4
        x.mask[:] = torch.where(block == 0, x.mask, block != 1)
    found = MaskSummary(problem, x.mask, x.q.device, config.block_n, 1, by_keys=True)([x.mask])
    return *found[:3], config.block_m, config.block_n, x.mask


def longest_first(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of three matrices, ``count`` of each, of random tiles but for the last one's, before and after
    `longest_first_kernel`; and those of a mask whose work tiles are to come in that order."""
    from tilewise.backends.gluon.mask_kernels import longest_first_kernel
    from tilewise.backends.gluon.masks import MaskSummary

    visited = torch.rand(3, count, 40, generator=torch.Generator().manual_seed(count)) < torch.rand(3, count, 1) / 3
    visited[2] = (torch.arange(40) >= torch.arange(count)[:, None] % 9) & (torch.arange(40) < 12)
    lists = torch.zeros(3, count, 42, dtype=torch.int32)
    lists[..., 0] = visited.sum(-1)
    lists[..., 1:-1] = torch.where(visited, 4 * torch.arange(40) + 1, -4).sort(dim=-1, descending=True).values
    ordered = lists.clone()
    longest_first_kernel[(3 * -(-count // 64),)](ordered, count, 42, 64)
    x = tensors(Case(B=2, H=2, M=200, N=400, D=64, mask="bhmn"))
    make_sparse(x.mask)
    problem = Problem.of(x.q, x.k, x.v, None, x.mask, *(None,) * 5, Score(1.0, None, Band()))
    usual, other = (MaskSummary(problem, x.mask, x.q.device, 64, 1, True, longest_first=a)([x.mask]) for a in (0, 1))
    listed = torch.arange(usual.tile_list.shape[2]) <= usual.tile_list[..., :1]  # what stands behind is anything
    assert torch.equal(usual.tile_list[listed], other.tile_list[..., :-1][listed])
    return lists, ordered, other.tile_list


@pytest.mark.parametrize(
    "case",
    [
        replace(USUAL, H=2, mask="bhmn"),
        replace(USUAL, mask="1kmn", causal=True),
        replace(USUAL, mask="b1mn", window=(60, 20), blind=True),
        replace(USUAL, mask="bh1n", layout="padded"),
        replace(USUAL, mask="1km1", blind=True),
        replace(USUAL, mask="111n", M=64, N=128),
        replace(USUAL, mask="b111", causal=True, M=300, N=139),
        replace(USUAL, mask="11mn", D=256, window=(3, 3), layout="heads_last"),
        replace(USUAL, mask="1hm1", M=1, N=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("keys", [0, 1 << 12])
def test_summary(interpreter, case, keys):
    """By two kernels, or by one where queries do not differ."""
    bits, visits, block_m, block_n = interpreter(summarise, case, keys)
    mask = tensors(case).mask
    heads, rows = mask.shape[:2].numel(), mask.shape[2]
    count, chunks = -(-case.N // block_n), -(-case.M // block_m)
    assert bits.shape == (heads, rows, count, 4)
    assert visits.shape == (heads, chunks, 1 + count)

    # the bits are the mask, and 0 past its end
    bit = (bits.long()[..., None, None] >> (2 * torch.arange(block_n // 8)[:, None] + torch.arange(2))) & 1
    found = bit.transpose(3, 4).reshape(heads, rows, count * block_n).bool()
    assert torch.equal(found[..., : case.N], mask.expand(-1, -1, -1, case.N).flatten(0, 1))
    assert not found[..., case.N :].any()

    # what is not listed is hidden, and what is listed uncut is visible
    band = visible(replace(case, mask=None, blind=False), tensors(replace(case, mask=None, blind=False)))[0, 0]
    for h, shown in enumerate(mask.expand(-1, -1, case.M, case.N).flatten(0, 1)):
        for m in range(chunks):
            at = slice(m * block_m, (m + 1) * block_m)
            listed, *entries = visits[h, m].tolist()
            entries = entries[:listed]
            tiles = [entry >> 2 for entry in entries]
            assert tiles == sorted(set(tiles), reverse=True)
            assert len(tiles) >= 1
            hidden = torch.ones(case.N, dtype=torch.bool)
            for n, entry in zip(tiles, entries, strict=True):
                keys = slice(n * block_n, (n + 1) * block_n)
                hidden[keys] = False
                assert listed == 1 or shown[at, keys].any()
                nothing = listed == 1 and entry & 3 == 3  # where nothing is visible, one hidden tile is listed
                assert nothing or bool(entry & 2) == (not shown[at, keys].all())
                assert entry & 1 or (band[at, keys].all() and keys.stop <= case.N)
            assert not (shown & band)[at, hidden].any()


def test_work_tiles_come_the_longest_first(interpreter):
    """More of them than a program of the kernel places; their lists stay as they are. But for those that leave nothing
    out between their ends."""
    lists, ordered, of_mask = interpreter(longest_first, 150)
    assert torch.equal(lists[..., :-1], ordered[..., :-1])
    assert ordered[2, :, -1].tolist() == [-1 - i for i in range(150)]
    assert (of_mask[..., -1] < 0).all()  # three quarters of its blocks are visited
    for found in ordered[:2]:
        lengths = found[:, 0].tolist()
        assert found[:, -1].tolist() == sorted(range(len(lengths)), key=lambda i: -lengths[i])  # equal ones in order


@pytest.mark.parametrize(
    "case",
    [
        replace(USUAL, H=2, mask="bhmn", deterministic=True),
        replace(USUAL, mask="1kmn", causal=True, deterministic=True),
        replace(USUAL, mask="b1mn", window=(60, 20), blind=True),
        replace(USUAL, mask="bh1n", layout="padded", D=128, deterministic=True),
        replace(USUAL, mask="1km1", blind=True, D=128),
        replace(USUAL, mask="111n", M=64, N=128),
        replace(USUAL, mask="b111", B=4),  # tiles of keys that their end cuts and the mask does not
        replace(USUAL, mask="b111", causal=True, M=300, N=139, deterministic=True),
        replace(USUAL, mask="11mn", window=(3, 3), layout="heads_last", deterministic=True),
        replace(USUAL, mask="1hm1", M=1, N=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", [False, True])
def test_summary_by_keys(interpreter, case, sparse):
    """For the backward; sparse: whole tiles are hidden, and whole tiles visible."""
    bits, visits, states, block_m, block_n, mask = interpreter(summarise_by_keys, case, sparse)
    heads, rows = mask.shape[:2].numel(), mask.shape[2]
    tiles, chunks, row_chunks = -(-case.N // block_n), -(-case.M // block_m), -(-rows // block_m)
    mask = mask.expand(-1, -1, case.M, case.N).flatten(0, 1)
    mask = torch.nn.functional.pad(mask, (0, tiles * block_n - case.N, 0, chunks * block_m - case.M))

    # the bits are the mask of one tile after the other, [keys, queries], and 0 past the end of the keys
    words = bits.long().view(heads, tiles, row_chunks, block_n // 16, 8, 4)[..., None, None, None]
    half, eight, pair = torch.arange(2)[:, None, None], torch.arange(8)[:, None], torch.arange(2)
    found = ((words >> (16 * half + 2 * eight + pair)) & 1).bool()  # sixteen, key, two queries, half, eight, pair
    found = found.permute(0, 1, 2, 3, 6, 4, 7, 5, 8).reshape(heads, tiles, row_chunks, block_n, block_m)
    shown = mask.view(heads, chunks, block_m, tiles, block_n).permute(0, 3, 1, 4, 2)
    if rows == 1:
        assert found.logical_xor(shown[:, :, :1, :, :1]).sum() == 0
    else:
        assert torch.equal(found, shown)
    some = shown.any((3, 4))
    assert torch.equal(states.view(heads, tiles, row_chunks).expand(-1, -1, chunks) > 0, some)

    # what is not listed is hidden, and what is listed uncut is visible; each has the turn that its place gives it
    case = replace(case, mask=None, blind=False)
    band = visible(case, tensors(case))[0, 0]
    assert visits.shape == (heads, tiles, 1 + (2 if case.deterministic else 1) * chunks)
    for h in range(heads):
        dq_semaphores = [0] * chunks
        for n in range(tiles):
            count, *entries = visits[h, n].tolist()
            listed = [entry >> 2 for entry in entries[:count]]
            assert listed == sorted(set(listed), reverse=True)
            keys = slice(n * block_n, (n + 1) * block_n)
            for m in range(chunks):
                at = slice(m * block_m, min((m + 1) * block_m, case.M))
                if m in listed:
                    cut = entries[listed.index(m)] & 3
                    whole = mask[h, at, keys].all() and band[at, keys].all()
                    assert some[h, n, m]
                    assert cut or whole
                    assert not whole or not cut & 2
                else:
                    assert not (mask[h, at, : case.N] & band[at])[:, keys].any()
            if case.deterministic:
                for m, turn in zip(listed, entries[chunks:], strict=False):
                    assert turn == dq_semaphores[m]
                    dq_semaphores[m] += 1
