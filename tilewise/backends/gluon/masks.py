"""From a bool mask to what kernels must know of it: the launches of `mask_kernels`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends import allocation
from tilewise.backends.gluon.mask_kernels import MaskConstants, summary_kernel, tile_list_kernel
from tilewise.backends.launcher import POINTER, Launch, constants, strided
from tilewise.problem import Problem
from tilewise.score.tiles import limits

ROWS = 64  # of a tile of the mask, see `summary_kernel`


class MaskSummary:
    """What a kernel must know of a mask, for one problem and one layout of the mask.

    by_keys: tiles of keys visit tiles of queries, as in the backward, not the other way round.
    """

    def __init__(self, problem: Problem, mask: Tensor, block_n: int, warpgroups: int, by_keys: bool = False):
        p, (batch, heads, rows, _) = problem, mask.shape
        key_tiles, row_tiles = -(-p.keys // block_n), -(-p.queries // (warpgroups * ROWS))
        chunks, ordered = -(-rows // ROWS), by_keys and p.deterministic

        def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Callable[[], Tensor]:
            return allocation(torch.empty(batch * heads, *shape, dtype=dtype, device="meta"), mask.device)

        if by_keys:
            programs, others = key_tiles, row_tiles
            self.bits_like = torch.empty(
                batch * heads * key_tiles * chunks * 2 * block_n, dtype=torch.int32, device="meta"
            )
            self.bits = allocation(self.bits_like, mask.device)
            self.states = workspace(key_tiles, chunks, dtype=torch.int8)
        else:
            programs, others = row_tiles, key_tiles
            self.bits = workspace(rows, key_tiles, 4)
            self.states = workspace(chunks, key_tiles, dtype=torch.int8)
        self.tile_list = workspace(programs, 1 + (2 if ordered else 1) * others)
        values = (block_n, warpgroups, rows > 1, 1 << (others - 1).bit_length(), by_keys, ordered)
        c = constants(MaskConstants(*values))
        self.summarise = Launch(
            summary_kernel, batch * heads * chunks * key_tiles, (strided(mask), POINTER, POINTER),
            (heads, rows, p.keys, c), num_warps=4,
        )  # fmt: skip
        self.list = Launch(
            tile_list_kernel, batch * heads * programs, (POINTER, POINTER),
            (p.queries, p.keys, *limits(p.score.band), c), num_warps=4,
        )  # fmt: skip

    def __call__(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bits, the tile list and states, see `mask_kernels`."""
        bits, states, tile_list = self.bits(), self.states(), self.tile_list()
        self.summarise(mask, bits, states)
        self.list(states, tile_list)
        return bits, tile_list, states
