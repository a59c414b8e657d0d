"""Swin's relative position bias as a matrix per head, since windows are small."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.bias.terms import check_float, check_int, shape_of, wide


def swin_bias(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Return Swin's relative position bias as a matrix, (1, H, Wh·Ww, Wh·Ww), by indexing.

    For a window of 7 × 7, with 49 queries and keys, a matrix per head shared by all windows is smaller than q. The
    matrix and the sum that is the table's gradient are float32 (float64 for a float64 table): indexing a bfloat16 table
    would sum in bfloat16. If windows are a dimension of q (B, windows, H, M, D), pass ``bias[:, None]``.

    Args:
        table: ((2 Wh - 1)·(2 Ww - 1), H), float, as transformers stores it.
        window: (Wh, Ww).

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.

    Source: Swin, arXiv 2103.14030, section 3.2; SwinRelativePositionBias of transformers.
    """
    check_float("table", table, (2,), "((2 Wh - 1)(2 Ww - 1), H)")
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected a pair (Wh, Ww), got {window!r}")
    for side in window:
        check_int("window", side, least=1)
    height, width = window
    rows = (2 * height - 1) * (2 * width - 1)
    if table.shape[0] != rows:
        raise ValueError(f"table: expected {rows} rows for a window of {height} x {width}, got shape {shape_of(table)}")
    place = torch.arange(height * width, device=table.device)
    down, right = place // width, place % width
    index = (down[:, None] - down + height - 1) * (2 * width - 1) + right[:, None] - right + width - 1
    taken = wide(table).index_select(0, index.flatten()) if table.is_cpu else wide(table)[index.flatten()]
    return taken.view(height * width, height * width, -1).permute(2, 0, 1)[None]
