"""How the commands read their arguments; a mistake is a typer.BadParameter that names the option."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path

import typer

LARGEST = 1 << 58  # elements of a tensor: the bytes of float64 are still counted in 64 bits


class Device(StrEnum):
    """Where a command runs."""

    CPU = "cpu"
    CUDA = "cuda"


def names(text: str, option: str) -> tuple[str, ...]:
    """The parts of ``text`` between its commas; none where it is empty."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not found:
        raise typer.BadParameter(f"names separated by commas are needed, got {text!r}", param_hint=option)
    return found


def shape(text: str, option: str, dims: int | None = None) -> tuple[int, ...]:
    """Sizes separated by commas: ``dims`` of them, or up to four."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"sizes separated by commas are needed, got {text!r}", param_hint=option) from None
    if any(size < 0 for size in sizes):
        raise typer.BadParameter(f"a size cannot be negative, got {text!r}", param_hint=option)
    if len(sizes) > 4 or (dims is not None and len(sizes) != dims):
        needed = "at most 4" if dims is None else str(dims)
        raise typer.BadParameter(f"{needed} sizes are needed, got {len(sizes)}: {text!r}", param_hint=option)
    if math.prod(max(size, 1) for size in sizes) > LARGEST:  # strides are counted so, too
        raise typer.BadParameter(f"at most 2**58 elements are allowed, got {text!r}", param_hint=option)
    return sizes


def check_writable(path: Path, option: str) -> None:
    """Before anything long is run: ``path`` can be made or written over."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}", param_hint=option)
    if path.is_dir() or not os.access(folder, os.W_OK):  # it is written beside and then moved there
        raise typer.BadParameter(f"cannot write {path}", param_hint=option)
