"""From a mask to the lists of tiles that kernels visit."""

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
    """What the mask leaves of each tile, and the tiles that a tile of queries, or of keys, visits; see `visibility`."""

    states: Tensor | None
    by_rows: Tensor | None
    by_keys: Tensor | None


NO_LISTS = MaskTiles(None, None, None)


def lists_pay(problem: Problem, config: TritonConfig) -> bool:
    """Whether a mask is read once before the kernel, for it to skip tiles.

    Not where there is one tile of keys, and not for few queries: their forward is over in the time of a launch or two,
    and reads all keys and values that it may see at once, which a list would come before.
    """
    return problem.mask is not None and not config.pack_gqa and problem.keys > config.block_n


class MaskLists:
    """`MaskTiles`, for one problem, one layout of its mask, and the tiles of a forward or a backward.

    mask: a bool mask, or None of one by tiles.
    by_rows, by_keys: which lists are wanted. even: there are no full tiles beside one that reaches past the end of its
    own queries or keys.
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
        """mask: as `kernels.block_mask.flat_mask` gives it."""
        states, rows, keys = self.empty_states(), None, None
        self.summarise(*mask, states)
        if self.by_rows is not None:
            rows = self.empty_rows()
            self.by_rows(states, rows)
        if self.by_keys is not None:
            keys = self.empty_keys()
            self.by_keys(states, keys)
        return MaskTiles(states, rows, keys)
