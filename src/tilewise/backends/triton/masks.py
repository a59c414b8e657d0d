"""Computation of the lists of tiles that kernels visit under a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.backends import allocation
from tilewise.backends.kernels.block_mask import tile_how, tile_layout
from tilewise.backends.launch.launcher import POINTER, Launch, constants, strided
from tilewise.backends.triton.config import TritonConfig
from tilewise.backends.triton.tile_mask import tile_summary_kernel
from tilewise.backends.triton.visibility import AROUND, Masking, list_kernel, summary_kernel
from tilewise.spec.problem import Problem
from tilewise.spec.tiles import limits


class MaskTiles(NamedTuple):
    """States and lists of a mask's tiles, see `visibility`."""

    states: Tensor | None  # state of each tile
    by_rows: Tensor | None  # tiles of keys that each tile of queries visits
    by_keys: Tensor | None  # tiles of queries that each tile of keys visits


NO_LISTS = MaskTiles(None, None, None)


def lists_pay(problem: Problem, config: TritonConfig) -> bool:
    """True if the mask is read once before the kernel, so that the kernel skips empty tiles.

    It does not pay with one tile of keys, nor for few queries: their forward takes as long as a launch or two, and
    loads all keys and values at once, for which it would first wait for the list.
    """
    return problem.mask is not None and not config.pack_gqa and problem.keys > config.block_n


class MaskLists:
    """Launches that compute `MaskTiles` for one problem, mask layout and tile size.

    mask: a bool mask, or None for a tile mask.
    by_rows, by_keys: which lists to compute. even: see `Masking`.
    """

    def __init__(
        self,
        problem: Problem,
        config: TritonConfig,
        mask: Tensor | None,
        device: torch.device,
        *,
        by_rows: bool,
        by_keys: bool,
        even: bool,
    ) -> None:
        p, of = problem, problem.mask
        assert of is not None
        matrices = of.batch * of.heads
        m_tiles, n_tiles = triton.cdiv(p.queries, config.block_m), triton.cdiv(p.keys, config.block_n)
        states = (matrices, m_tiles if of.rows > 1 else 1, n_tiles if of.cols > 1 else 1)

        def workspace(*shape: int, dtype: torch.dtype = torch.int32) -> Callable[[], Tensor]:
            return allocation(torch.empty(shape, dtype=dtype, device="meta"), device)

        def masking(keys: bool) -> Masking:
            others = m_tiles if keys else n_tiles
            values: tuple[Any, ...] = (
                config.block_m, config.block_n, of.rows > 1, of.cols > 1, keys,
                triton.next_power_of_2(others), even,
            )  # fmt: skip
            return constants(Masking(*values))

        def lists(keys: bool) -> Launch:
            return Launch(
                list_kernel, matrices * (n_tiles if keys else m_tiles), (POINTER, POINTER),
                (p.queries, p.keys, *limits(p.score.band), masking(keys)), num_warps=4,
            )  # fmt: skip

        self.empty_states = workspace(*states, dtype=torch.int8)
        self.empty_rows = workspace(matrices, m_tiles, n_tiles + AROUND.value)
        self.empty_keys = workspace(matrices, n_tiles, m_tiles + AROUND.value)
        programs, how = states[0] * states[1] * states[2], tile_how(problem, config.block_m, config.block_n)
        if how is None:
            self.summarise = Launch(
                summary_kernel, programs, (strided(mask), POINTER), (of.heads, p.queries, p.keys, masking(False)),
                num_warps=4,
            )  # fmt: skip
        else:
            self.summarise = Launch(
                tile_summary_kernel, programs, (tile_layout(), POINTER),
                (p.queries, p.keys, constants(how), masking(False)), num_warps=4,
            )  # fmt: skip
        self.by_rows, self.by_keys = lists(False) if by_rows else None, lists(True) if by_keys else None

    def __call__(self, mask: Sequence[Tensor | None]) -> MaskTiles:
        """Compute the `MaskTiles` of a mask, given as `kernels.block_mask.flat_mask` returns it."""
        states, rows, keys = self.empty_states(), None, None
        self.summarise(*mask, states)
        if self.by_rows is not None:
            rows = self.empty_rows()
            self.by_rows(states, rows)
        if self.by_keys is not None:
            keys = self.empty_keys()
            self.by_keys(states, keys)
        return MaskTiles(states, rows, keys)
