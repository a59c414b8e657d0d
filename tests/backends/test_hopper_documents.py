"""Documents as a mask in the hopper backend: the packed batch that they are, and which of two kernels has its tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tilewise import TileMask
from tilewise.backends.gluon.sm90.forward.documents import COUNT, as_packed
from tilewise.backends.gluon.varlen import ENTRY, LIST_HEAD, SEMAPHORE
from tilewise.backends.protocol import Inputs
from tilewise.spec.operands import TileOperand
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

LENGTHS = (70, 3, 300, 1, 129, 128, 300, 64)  # two alike
PADDING = (3, 5)  # of which a token sees nothing


def lists_of(
    problem: Problem, mask: TileMask, visited: Tensor, block: int, tiles: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The packed list and the counts; visited: how many tiles of 128 queries and 128 keys the mask's kernel visits of
    each tile of queries. And the tile list that it was handed."""
    from tilewise.backends.gluon.masks import KnownMask
    from tilewise.backends.gluon.sm90.forward.documents import DocumentSummary
    from tilewise.backends.kernels.block_mask import flat_mask

    lists = torch.cat([visited[:, None], torch.full((len(visited), 3), 1 << 20)], 1).to(torch.int32)[None]

    def summary(flat: object) -> KnownMask:
        return KnownMask(torch.zeros(1, dtype=torch.int32), lists, None)

    make = DocumentSummary(replace(problem, device="cpu"), summary, 128, block, tiles)
    found = make(flat_mask(None, mask.tensors))
    return found.packed_list, found.counts, found.tile_list


def ids_of(lengths, padding=()):
    return torch.cat([torch.full((n,), -1 - d if d in padding else d) for d, n in enumerate(lengths)])


def problem_of(mask: TileMask, heads: int = 2, causal: bool = False) -> tuple[Problem, Inputs]:
    q = torch.empty(1, heads, mask.queries, 64, dtype=torch.bfloat16, device="meta")
    tensors = type(mask.tensors)(*(None if x is None else x.to("meta") for x in mask.tensors))
    inputs = Inputs(q, q, q, None, None, tiles=tensors)
    return Problem.of(*inputs, Score(0.125, None, Band(None, 0 if causal else None))), inputs


MANY = tuple(1 + n % 7 for n in range(300))  # more than a program has


@pytest.mark.parametrize("lengths", [LENGTHS, MANY], ids=["few", "many"])
@pytest.mark.parametrize("block", [64, 192])
def test_tiles_are_those_of_a_packed_batch(interpreter, block, lengths):
    """Documents of most keys first, padding last, of each the last queries first."""
    mask = TileMask.documents(ids_of(lengths, PADDING))
    total = sum(lengths)
    visited = torch.tensor([10**6])  # more than a packed batch
    found, counts, _ = interpreter(lists_of, problem_of(mask)[0], mask, visited, block, 200)
    most = total // block + total
    assert found.numel() == LIST_HEAD.value + most * ENTRY.value
    firsts = torch.tensor((0, *lengths)).cumsum(0).tolist()
    keys = [0 if d in PADDING else n for d, n in enumerate(lengths)]
    expected = [
        [m, firsts[d], firsts[d], lengths[d], keys[d]]
        for d in sorted(range(len(lengths)), key=lambda d: -keys[d])
        for m in reversed(range(-(-lengths[d] // block)))
    ]
    assert found[: LIST_HEAD.value].tolist() == [len(expected)] + [0] * (LIST_HEAD.value - 1)
    entries = found[LIST_HEAD.value :].view(-1, ENTRY.value)
    assert entries[: len(expected), :5].tolist() == expected
    assert not counts.any()


def test_wrong_offsets_lead_nowhere_else(interpreter):
    """Of numbers that are none of offsets or ends all tiles lie within the tokens, and in the list."""
    generator = torch.Generator().manual_seed(0)
    mask = TileMask.documents(ids_of(LENGTHS))
    total = mask.keys
    for low, high in ((-400, 1200), (-5, total)):
        for x in (mask.tensors.offsets, mask.tensors.ends):
            x.copy_(torch.randint(low, high, x.shape, generator=generator))
        visited = torch.tensor([10**6])
        found, *_ = interpreter(lists_of, problem_of(mask)[0], mask, visited, 64, 200)
        assert found.numel() == LIST_HEAD.value + (total // 64 + total) * ENTRY.value
        listed = found[LIST_HEAD.value :].view(-1, ENTRY.value)[: int(found[0]), :5]
        assert len(listed) == int(found[0]) > 0
        tile, first, key, queries, keys = listed.T
        for begin, count in ((first, queries), (key, keys)):
            assert (begin >= 0).all()
            assert (count >= 0).all()
            assert (begin + count <= total).all()
        assert (tile >= 0).all()
        assert (tile * 64 < queries).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "packed"), [(39, False), (300, True), (900, True)])
def test_the_device_says_which_kernel_has_tiles(interpreter, length, packed, causal):
    """Short documents share tiles of the mask, long ones have less of their own."""
    mask = TileMask.documents(torch.arange(8192) // length)
    problem, _ = problem_of(mask, causal=causal)
    tiles = mask.tensors.tiles[0, 0] > 0  # of 128 x 128, as the kernel's
    visited = (tiles.tril() if causal else tiles).sum(1)
    found, counts, lists = interpreter(lists_of, problem, mask, visited, 128, 200)
    assert torch.equal(lists[0, :, 0], visited)
    assert (int(found[0]) > 0) == packed
    expected = [0] * 2 * SEMAPHORE
    expected[COUNT.value] = 0 if packed else 200
    assert counts.tolist() == expected


def test_validate_reads_offsets():
    mask = TileMask.documents(ids_of(LENGTHS, PADDING)).validate()
    mask.tensors.offsets[0, 2] += 1
    with pytest.raises(ValueError, match=r"TileMask\.offsets: are not those"):
        mask.validate()


def test_which_problems_are_packed_batches():
    documents, _ = problem_of(TileMask.documents(ids_of(LENGTHS)), causal=True)
    found = as_packed(documents)
    total = sum(LENGTHS)
    assert (found.totals, found.batch, found.mask, found.tile_mask) == ((total, total), total, None, None)
    assert found.score.band == documents.score.band
    others = [
        problem_of(TileMask.sliding_window(total, total, (90, 0)))[0],  # intervals, too
        replace(documents, batch=2),
        replace(documents, score=replace(documents.score, band=Band(-90, 0))),
        replace(documents, score=replace(documents.score, dropout=1 << 15)),
        replace(documents, bias=documents.mask),
    ]
    assert [as_packed(x) for x in others] == [None] * len(others)


def test_offsets_are_where_documents_begin():
    ids = torch.stack([ids_of(LENGTHS, PADDING), torch.zeros(sum(LENGTHS), dtype=torch.int64)])
    mask = TileMask.documents(ids)
    total = ids.shape[1]
    first, one = mask.tensors.offsets.tolist()
    assert first == [*torch.tensor((0, *LENGTHS)).cumsum(0).tolist(), *[total] * (total - len(LENGTHS))]
    assert one == [0, *[total] * total]
    problem, inputs = problem_of(TileMask.documents(ids[:1]))
    assert problem.tile_mask == TileOperand(128, 128, "intervals", True)
    wrong = inputs._replace(tiles=inputs.tiles._replace(offsets=inputs.tiles.offsets[:, 1:].contiguous()))
    with pytest.raises(ValueError, match=r"TileMask\.offsets"):
        Problem.of(*wrong, problem.score)
