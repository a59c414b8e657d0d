"""Launches of `mask_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import allocation
from tilewise.backends.gluon.mask_kernels import (
    MaskConstants,
    key_summary_kernel,
    longest_first_kernel,
    summary_kernel,
    tile_list_kernel,
    tile_summary_kernel,
)
from tilewise.backends.kernels.block_mask import tile_how, tile_layout
from tilewise.backends.launch.launcher import POINTER, Launch, constants, strided
from tilewise.spec.problem import Problem
from tilewise.spec.tiles import limits

ROWS = 64  # rows per tile of the mask, see `summary_kernel`
KEYS = 1 << 12  # the most keys of a mask shared by all queries that one program of `key_summary_kernel` reads
MANY = 1 << 14  # tiles from which on a program of `tile_summary_kernel` has several: most need no look at their pairs


class KnownMask(NamedTuple):
    """Outputs of `mask_kernels`; group_lists: of `backward.dbias_reduce`. All are None without a mask.

    states: only the backward reads them; `key_summary_kernel` writes none.
    """

    bits: Tensor | None = None
    tile_list: Tensor | None = None
    states: Tensor | None = None
    group_lists: Tensor | None = None


NOTHING_KNOWN = KnownMask()


class MaskSummary:
    """Launches that summarise the mask of one problem, for one layout of the mask.

    mask: a bool mask, or None for a block mask.
    by_keys: key tiles visit query tiles, as in the backward; else query tiles visit key tiles.
    """

    def __init__(
        self,
        problem: Problem,
        mask: Tensor | None,
        device: torch.device,
        block_n: int,
        warpgroups: int,
        by_keys: bool = False,
        longest_first: bool = False,
    ) -> None:
        p, of = problem, problem.mask
        assert of is not None
        matrices, rows = of.batch * of.heads, of.rows
        key_tiles, row_tiles = -(-p.keys // block_n), -(-p.queries // (warpgroups * ROWS))
        chunks, ordered = -(-rows // ROWS), by_keys and p.deterministic

        def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Callable[[], Tensor]:
            return allocation(torch.empty(matrices, *shape, dtype=dtype, device="meta"), device)

        if by_keys:
            programs, others = key_tiles, row_tiles
            self.bits_like = torch.empty(matrices * key_tiles * chunks * 2 * block_n, dtype=torch.int32, device="meta")
            self.bits = allocation(self.bits_like, device)
            self.states = workspace(key_tiles, chunks, dtype=torch.int8)
        else:
            programs, others = row_tiles, key_tiles
            self.bits = workspace(rows, key_tiles, 4)
            self.states = workspace(chunks, key_tiles, dtype=torch.int8)
        width = 1 + (2 if ordered else 1) * others + longest_first
        self.tile_list = workspace(programs, width)
        self.order = None
        if longest_first:
            self.order = Launch(
                longest_first_kernel, matrices * -(-programs // 64), (POINTER,), (programs, width, 64), num_warps=4
            )
        how = tile_how(p, ROWS, block_n)
        tiles, banded = 1 << (others - 1).bit_length(), not p.score.band.unlimited
        count = matrices * chunks * key_tiles
        at_once = 8 if how is not None and count >= MANY else 1
        flags = by_keys, how is not None, ordered, banded, at_once, longest_first
        c = constants(MaskConstants(block_n, warpgroups, rows > 1, tiles, *flags))
        self.in_one = not by_keys and rows == 1 and how is None and not banded and tiles * block_n <= KEYS
        if self.in_one:
            self.summarise = Launch(
                key_summary_kernel, matrices * programs, (strided(mask), POINTER, POINTER),
                (of.heads, p.keys, programs, c), num_warps=4,
            )  # fmt: skip
        elif how is None:
            self.summarise = Launch(
                summary_kernel, count, (strided(mask), POINTER, POINTER), (of.heads, rows, p.keys, c), num_warps=4
            )
        else:
            count = matrices * chunks * -(-key_tiles // at_once)
            # Intervals: a single warp computes its words without sharing work with other warps.
            warps = 1 if how.LAYOUT == "intervals" else 4
            self.summarise = Launch(
                tile_summary_kernel, count, (tile_layout(), POINTER, POINTER), (rows, p.keys, constants(how), c),
                num_warps=warps,
            )  # fmt: skip
        self.list = Launch(
            tile_list_kernel, matrices * programs, (POINTER, POINTER, POINTER),
            (p.queries, p.keys, *limits(p.score.band), c), num_warps=4,
        )  # fmt: skip

    def __call__(self, mask: Sequence[Tensor | None]) -> KnownMask:
        """mask: from `kernels.block_mask.flat_mask`."""
        bits, tile_list = self.bits(), self.tile_list()
        if self.in_one:
            self.summarise(*mask, bits, tile_list)
            return KnownMask(bits, tile_list)
        states = self.states()
        self.summarise(*mask, bits, states)
        self.list(states, bits, tile_list)
        if self.order is not None:
            self.order(tile_list)
        return KnownMask(bits, tile_list, states)
