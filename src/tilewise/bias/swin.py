"""Swin's relative position bias, a matrix a head: windows are small."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.bias.terms import check_float, check_int, shape_of, wide


def swin_bias(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Swin's relative position bias as a matrix, (1, H, Wh·Ww, Wh·Ww): a gather, and no term.

    A window of 7 × 7 has 49 queries and keys, so that a matrix a head, shared by all windows, is smaller than q. It is
    float32 (float64 for a float64 table), and so is the sum that is the table's gradient: indexing a table of bfloat16
    sums in bfloat16. Where windows are a dimension of their own, q (B, windows, H, M, D), pass it as ``bias[:, None]``.

    Args:
        table: ((2 Wh - 1)·(2 Ww - 1), H), float, as transformers stores it.
        window: (Wh, Ww).

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

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
