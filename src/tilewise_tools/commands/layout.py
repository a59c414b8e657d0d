"""``tilewise layout``: the layout of a tensor-core operand in shared or tensor memory, as text and pictures."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tilewise.layouts import (
    Arch,
    AtomOrder,
    LayoutError,
    Major,
    Operand,
    Role,
    SwizzleMode,
    TensorMemoryOperand,
    element_bits,
    instructions,
)
from tilewise.layouts.figure import Scene, figure
from tilewise.layouts.page import to_html
from tilewise.layouts.png import write_png
from tilewise.layouts.svg import to_svg
from tilewise.layouts.tensor_memory_views import tensor_memory_drawing, tensor_memory_facts, tensor_memory_figure
from tilewise.layouts.text import drawing, facts
from tilewise.spec.gpus import compute_capability
from tilewise_tools.commands.arguments import check_writable, choice, mistake, told, whole
from tilewise_tools.commands.arguments import shape as parse_shape
from tilewise_tools.commands.spelling import dtype_name

# The option behind each argument of `tilewise.layouts`.
OPTIONS = {name: f"--{name}" for name in ("shape", "dtype", "swizzle", "major", "rows", "address", "element")}


class Memory(StrEnum):
    """Memory that holds the operand."""

    SHARED = "shared"
    TENSOR = "tensor"


def command(
    shape: Annotated[str, typer.Option(help="Shape of the tile in elements: M or N, and K.", metavar="MN,K")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16, tf32, e4m3, int8, fp4, ...", metavar="DTYPE")] = "bf16",
    swizzle: Annotated[
        str, typer.Option(help="Width in bytes: 0 (none, interleaved), 32, 64 or 128.", metavar="BYTES")
    ] = "128",
    major: Annotated[str, typer.Option(help="Contiguous dimension.", metavar="k|mn")] = "k",
    order: Annotated[
        str,
        typer.Option(help="Dimension along which atoms follow one another in memory.", metavar="strided|leading"),
    ] = "strided",
    arch: Annotated[
        str,
        typer.Option(
            help="sm_90 is Hopper (wgmma), sm_100 Blackwell (tcgen05); or a GPU, such as h100 or b200.",
            metavar="sm_90|sm_100",
        ),
    ] = "sm_90",
    operand: Annotated[str, typer.Option(help="Operand of the product.", metavar="a|b")] = "a",
    memory: Annotated[
        str, typer.Option(help="Memory of the operand; tensor memory is for A on sm_100.", metavar="shared|tensor")
    ] = "shared",
    rows: Annotated[
        str | None, typer.Option(help="M or N of one instruction. Default: the usual one.", metavar="NUMBER")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Address of the operand: bytes, or in tensor memory 65536 x lane + column.", metavar="NUMBER"
        ),
    ] = "0",
    instruction: Annotated[
        str, typer.Option(help="Instruction whose share and descriptor are shown, from 0.", metavar="NUMBER")
    ] = "0",
    element: Annotated[str | None, typer.Option(help="Show the address of this element.", metavar="MN,K")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the figure into this file.", metavar="FILE")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the figure into this file.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page, one file.", metavar="FILE")] = None,
) -> None:
    """Show the layout of an operand in shared or tensor memory.

    Prints atoms, SBO and LBO, descriptors, the linear layout and bank conflicts; in tensor memory lanes and columns.
    Nothing runs: neither a GPU nor PyTorch is needed. Output for sm_100 was not verified on hardware.

    Example: tilewise layout --shape 128,256 --dtype bf16 --swizzle 128 --major k --arch sm_90 --svg layout.svg
    """
    for path, option in ((svg, "--svg"), (png, "--png"), (html, "--html")):
        if path is not None:
            check_writable(path, option)
    size = parse_shape(shape, "--shape", 2, "128,64")
    place = None if element is None else parse_shape(element, "--element", 2, "5,37")
    height = None if rows is None else whole(rows, "--rows", 1)
    base, shown = whole(address, "--address", 0), whole(instruction, "--instruction", 0)
    role = choice(operand, "--operand", Role)
    if choice(memory, "--memory", Memory) is Memory.TENSOR:
        fixed: dict[str, tuple[str | Path | None, str | None]] = {
            "--swizzle": (swizzle, "128"),
            "--major": (major, "k"),
            "--order": (order, "strided"),
            "--arch": (_arch(arch), "sm_100"),
            "--operand": (operand, "a"),
            "--rows": (rows, None),
            "--html": (html, None),
        }
        _check_tensor(fixed)
        _tensor((size[0], size[1]), dtype, base, shown, place, svg, png)
        return
    try:
        bits, mode = element_bits(dtype_name(dtype) or dtype), SwizzleMode.of(whole(swizzle, "--swizzle", 0))
        tile = Operand(
            (size[0], size[1]), bits, mode, choice(major, "--major", Major), choice(order, "--order", AtomOrder)
        )
        shares = list(instructions(tile, _arch(arch), role, height, base))
        offset = None if place is None else tile.byte_offset(*place)
    except LayoutError as error:
        raise _told(error, height) from None
    if shown >= len(shares):
        raise mistake("--instruction", f"there are {len(shares)}, counted from 0, got {shown}")
    share = shares[shown]
    lines = [*facts(tile, shares, role, shown), "", *drawing(tile, share)]
    if place is not None and offset is not None:
        lines += ["", f"element {place} is at byte {offset}, address {base + offset:#x}"]
    lines += _draw(figure(tile, share), svg, png)
    if html is not None:
        html.write_text(to_html(tile, shares, role, shown), encoding="utf-8")
        lines.append(f"page: {html}")
    typer.echo("\n".join(lines))  # after all files: a reader such as head may close the pipe


def _check_tensor(options: dict[str, tuple[str | Path | None, str | None]]) -> None:
    """Raise a mistake for an option that tensor memory gives no choice; ``options``: value, and the one allowed."""
    for option, (value, allowed) in options.items():
        if value is not None and str(value).strip().lower() != allowed:
            needed = "does not apply" if allowed is None else f"must be {allowed}"
            raise mistake(option, f"{needed} with --memory tensor, got '{value}'")


def _tensor(
    shape: tuple[int, int], dtype: str, address: int, shown: int, place: tuple[int, ...] | None,
    svg: Path | None, png: Path | None,
) -> None:  # fmt: skip
    """Show operand A in tensor memory."""
    try:
        tile = TensorMemoryOperand(shape, element_bits(dtype_name(dtype) or dtype), address)
        cell = None if place is None else tile.cell(place[0], place[1])
    except LayoutError as error:
        raise _told(error, None) from None
    if shown >= len(tile.addresses()):
        raise mistake("--instruction", f"there are {len(tile.addresses())}, counted from 0, got {shown}")
    lines = [*tensor_memory_facts(tile, shown), "", *tensor_memory_drawing(tile, shown)]
    if cell is not None:
        last = cell.bit + tile.bits - 1
        lines += ["", f"element {place} is in lane {cell.lane}, column {cell.column}, bits {cell.bit} to {last}"]
    lines += _draw(tensor_memory_figure(tile, shown), svg, png)
    typer.echo("\n".join(lines))


def _draw(scene: Scene, svg: Path | None, png: Path | None) -> list[str]:
    """Write the figure; return a line for each file."""
    if svg is not None:
        svg.write_text(to_svg(scene), encoding="utf-8")
    if png is not None:
        write_png(scene, png)
    return [f"picture: {path}" for path in (svg, png) if path is not None]


def _arch(text: str) -> Arch:
    """Return the architecture of "sm_90" or of a GPU such as "H100"."""
    named = "sm_{}{}".format(*(compute_capability(text) or (0, 0)))
    return choice(named if named in list(Arch) else text, "--arch", Arch)


def _told(error: LayoutError, rows: int | None) -> typer.BadParameter:
    """Convert a broken hardware rule into an error that names the option; element bits come from --dtype."""
    text = re.sub(r"^bits: must be (.*?) for ", r"dtype: must have \1 bits for ", str(error))
    text = re.sub(r"\bbits=(\d+)", r"elements of \1 bits", text)
    return told(LayoutError(text), OPTIONS if rows is not None else OPTIONS | {"rows": "--rows (the usual one)"})
