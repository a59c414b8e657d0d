"""What of test_hopper_documents.py runs in the interpreter's process."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilewise import TileMask
from tilewise.spec.problem import Problem


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
