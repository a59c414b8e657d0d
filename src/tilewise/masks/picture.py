"""Pictures of a tile mask for a REPL and a notebook: a grid of cells, each of one or more tiles."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewise.operator.eager import is_eager
from tilewise.quantities import percent
from tilewise.spec.block_mask import EMPTY, FULL

MARKS = "·▒█"  # of an empty, a partial and a full cell
NAMES = ("empty", "partial", "full")
TEXT_CELLS, SVG_CELLS = 24, 64  # rows and columns of a picture, at most
SVG_PIXELS = 320


class Cells(NamedTuple):
    """Picture of the tiles of all matrices of a mask.

    rows: 0 (empty), 1 (partial) or 2 (full) of each cell. A cell is full or empty if all of its tiles are, in all
        batch elements and heads.
    side: a cell has ``side`` x ``side`` tiles.
    visible, partial, tiles: counts over all matrices; ``visible`` includes ``partial``.
    """

    rows: list[list[int]]
    side: int
    visible: int
    partial: int
    tiles: int


def is_readable(tiles: Tensor) -> bool:
    """True if the elements can be read here: no meta or fake tensor, no compiler, no graph capture."""
    if is_fake(tiles) or not is_eager((tiles,)):
        return False
    return not (tiles.is_cuda and torch.cuda.is_current_stream_capturing())


def cells_of(tiles: Tensor, most: int) -> Cells | None:
    """Return a picture of at most ``most`` x ``most`` cells; None if the elements cannot be read.

    On a GPU the picture is made there, and one copy of it is read.
    """
    if not is_readable(tiles) or tiles.numel() == 0:
        return None
    side = -(-max(tiles.shape[-2:]) // most)
    matrices = tiles.flatten(0, -3)
    more = (0, -tiles.shape[-1] % side, 0, -tiles.shape[-2] % side)

    def in_cells(seen: Tensor, beyond: bool) -> Tensor:
        """Return (rows, columns, side * side); tiles beyond the end of the mask are ``beyond``."""
        padded = torch.nn.functional.pad(seen, more, value=beyond)
        return padded.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2).flatten(2)

    some = in_cells((matrices != EMPTY).any(0), False).any(-1)
    every = in_cells((matrices == FULL).all(0), True).all(-1)
    counts = torch.stack([(tiles != EMPTY).sum(), (tiles > FULL).sum()])
    shades = (some.long() + every.long()).flatten()
    visible, partial, *flat = torch.cat([counts, shades]).tolist()
    cols = some.shape[1]
    return Cells([flat[i : i + cols] for i in range(0, len(flat), cols)], side, visible, partial, tiles.numel())


def headline(queries: int, keys: int, tiles: Tensor, block: tuple[int, int]) -> str:
    sizes = f"{queries} queries and {keys} keys in tiles of {block[0]} x {block[1]}"
    return f"TileMask{tuple(tiles.shape)}: {sizes}, on {tiles.device}"


def summary(cells: Cells) -> str:
    sparsity = percent(1 - cells.visible / cells.tiles)
    return f"{cells.visible} of {cells.tiles} tiles visible, {cells.partial} of them in part: sparsity {sparsity}"


def per_cell(cells: Cells) -> str:
    return "" if cells.side == 1 else f"; a cell is {cells.side} x {cells.side} tiles"


def text(cells: Cells) -> str:
    """Return the picture in characters, queries downwards: two for each cell, which makes it a square."""
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, NAMES, strict=True))
    return "\n".join([*("".join(2 * MARKS[x] for x in row) for row in cells.rows), f"{legend}{per_cell(cells)}"])


def svg(cells: Cells) -> str:
    """Return the picture as SVG in the color of the text around it, so that it suits a light and a dark page."""
    rows, cols = len(cells.rows), len(cells.rows[0])
    scale = SVG_PIXELS / max(rows, cols)
    width, height = round(scale * cols), round(scale * rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {cols} {rows}" '
        'preserveAspectRatio="none" fill="currentColor" shape-rendering="crispEdges" role="img">',
        f'<rect width="{cols}" height="{rows}" fill="none" stroke="currentColor" vector-effect="non-scaling-stroke"/>',
    ]
    for y, row in enumerate(cells.rows):
        x = 0
        for shade, run in groupby(row):
            length = len(list(run))
            if shade:
                opacity = (0.35, 0.85)[shade - 1]
                parts.append(f'<rect x="{x}" y="{y}" width="{length}" height="1" fill-opacity="{opacity}"/>')
            x += length
    return "".join([*parts, "</svg>"])
