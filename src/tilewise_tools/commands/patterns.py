"""Sparse patterns by name, ``tilewise explain --mask documents:512``, and pictures of their tiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilewise_tools.commands.arguments import mistake

if TYPE_CHECKING:
    from tilewise import TileMask
    from tilewise.spec.score import Band

INCHES, DPI = 6.0, 160
SHADES = ("#ffffff", "#9ecae1", "#08519c")  # empty, partial, full


def is_pattern(text: str) -> bool:
    """True if ``text`` is a pattern or a file rather than a shape."""
    return text.partition(":")[0].strip().lower() in PATTERNS or text.endswith(".pt")


def pattern(text: str, queries: int, keys: int) -> TileMask:
    """Return a `TileMask` on the CPU; raise a mistake that names --mask."""
    if text.endswith(".pt"):
        return _loaded(Path(text), queries, keys)
    name, _, rest = text.partition(":")
    name = name.strip().lower()
    what, count = PATTERNS[name]
    parts = [part.strip() for part in rest.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 19]
    if len(numbers) != len(parts) or not (len(numbers) == count or count == 0):
        raise mistake("--mask", f"{what}, got {text!r}")
    try:
        return _made(name, queries, keys, numbers)
    except ValueError as error:
        raise mistake("--mask", f"{what}, got {text!r}: {error}") from None


def _loaded(path: Path, queries: int, keys: int) -> TileMask:
    """Load a bool tensor (M, N) or (B|1, H|1, M, N) that torch.save wrote."""
    import pickle

    import torch

    from tilewise import TileMask

    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0] or "it ends early"
        raise mistake("--mask", f"cannot read {path}: {why}") from None
    if not isinstance(found, torch.Tensor) or found.dtype != torch.bool or found.dim() not in (2, 4):
        raise mistake("--mask", f"{path}: a bool tensor (M, N) or (B, H, M, N) is needed")
    dense = found[None, None] if found.dim() == 2 else found
    if tuple(dense.shape[2:]) != (queries, keys):
        sizes = f"{dense.shape[2]} queries and {dense.shape[3]} keys, not {queries} and {keys}"
        raise mistake("--mask", f"{path}: is for {sizes}")
    return TileMask.from_rows(lambda rows: dense[:, :, rows], queries, keys)


def _documents(size: int, lengths: list[int]) -> TileMask:
    """Return a document mask; a single length applies to all documents, the last may be shorter."""
    import torch

    from tilewise import TileMask

    if min(lengths) < 1:
        raise ValueError("no document is empty")
    if len(lengths) == 1:
        return TileMask.documents(torch.arange(size, device="cpu") // lengths[0])
    if sum(lengths) != size:
        raise ValueError(f"these are {sum(lengths)} tokens in all, of {size}")
    return TileMask.documents(torch.repeat_interleave(torch.tensor(lengths, device="cpu")))


def _made(name: str, queries: int, keys: int, numbers: list[int]) -> TileMask:
    import torch

    from tilewise import TileMask

    if name in ("documents", "prefix"):
        if queries != keys:
            raise ValueError(f"it has as many queries as keys, not {queries} and {keys}")
        if name == "documents":
            return _documents(keys, numbers)
        return TileMask.prefix_lm(torch.tensor(numbers, device="cpu"), keys)
    if name == "window":
        left, right, everywhere = numbers
        return TileMask.sliding_window(queries, keys, (left, right), global_tokens=everywhere)
    return (TileMask.dilated if name == "dilated" else TileMask.strided)(queries, keys, *numbers)


# For each name: the required form, and the number of integers, 0 for any.
PATTERNS = {
    "documents": ("documents:LENGTH, or all lengths, separated by commas, is needed", 0),
    "prefix": ("prefix:LENGTH is needed, the keys that all queries see", 1),
    "window": ("window:LEFT,RIGHT,GLOBAL is needed, keys on each side and keys that all queries see", 3),
    "dilated": ("dilated:REACH,STEP is needed", 2),
    "strided": ("strided:STRIDE is needed", 1),
}


def draw(mask: TileMask, band: Band, path: Path) -> str:
    """Write a PNG of the tiles of mask and causal/local window, queries downwards, keys to the right; return its title.

    A tile is drawn full or empty only if it is so for all batch elements and heads.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    states = shades(mask, band)
    block_m, block_n = mask.block
    rows, cols = len(states), len(states[0])
    figure = Figure(figsize=(INCHES, INCHES * min(max(rows * block_m / (cols * block_n), 0.25), 2.0) + 0.8), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    extent = (0, cols * block_n, rows * block_m, 0)
    colors = ListedColormap(SHADES)
    axes.imshow(states, cmap=colors, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
    axes.set_xlim(0, mask.keys)
    axes.set_ylim(mask.queries, 0)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    full, partial = (sum(row.count(state) for row in states) for state in (2, 1))
    within = "" if band.unlimited else " with causal or window"
    title = f"{full + partial} of {rows * cols} tiles of {block_m} x {block_n} visible{within}, {partial} in part"
    axes.set_title(f"{title} (light)", fontsize=10)
    figure.savefig(path, format="png", bbox_inches="tight")
    return title


def shades(mask: TileMask, band: Band) -> list[list[int]]:
    """Return 0 (empty), 1 (partial) or 2 (full) for each tile of mask and causal/local window."""
    from tilewise.spec.block_mask import EMPTY, FULL
    from tilewise.spec.tiles import key_tiles, limits

    assert mask.tensors.tiles is not None
    tiles = mask.tensors.tiles.flatten(0, 1)
    some, full = (tiles != EMPTY).any(0).tolist(), (tiles == FULL).all(0).tolist()
    block_m, block_n = mask.block
    found = []
    for m, (some_of_row, full_of_row) in enumerate(zip(some, full, strict=True)):
        rows = min(block_m, mask.queries - m * block_m)
        begin, full_begin, full_end, end = key_tiles(m * block_m, rows, mask.keys, *limits(band), block_n)
        if band.unlimited:  # the tile at the end of the keys counts as full
            full_end = end
        row = []
        for n, (is_seen, is_full) in enumerate(zip(some_of_row, full_of_row, strict=True)):
            inside = begin <= n < end and is_seen
            row.append(0 if not inside else 2 if is_full and full_begin <= n < full_end else 1)
        found.append(row)
    return found
