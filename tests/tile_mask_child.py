"""What of test_tile_mask_triton.py runs in the interpreter's process beside tile_mask_helpers.py."""

from __future__ import annotations

from helpers import Case, tensors
from tile_mask_helpers import pattern
from torch import Tensor


def lists_of(case: Case, name: str, block: int | tuple[int, int]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """States and lists of the forward and of the backward: of the bool mask, and of the tiles."""
    from tilewise.backends.protocol import Inputs
    from tilewise.backends.triton.config import backward_config, forward_config
    from tilewise.backends.triton.masks import MaskLists
    from tilewise.backends.triton.tile_mask import flat_mask
    from tilewise.problem import Problem
    from tilewise.score.terms import Band, Score

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


def _counted(lists: Tensor) -> Tensor:
    """With 0 where nothing was written."""
    from tilewise.backends.triton.visibility import HEAD

    head = HEAD.value
    written = lists.clone()
    for row in written.view(-1, lists.shape[-1]):
        row[head + int(row[0]) :] = 0
    return written
