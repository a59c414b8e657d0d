"""``tilewise layout``: where a tensor-core operand lies in shared memory, in facts and pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tilewise.commands.arguments import check_writable
from tilewise.layouts import Arch, AtomOrder, LayoutError, Major, Operand, Role, SwizzleMode, element_bits, instructions
from tilewise.layouts.figure import figure
from tilewise.layouts.page import to_html
from tilewise.layouts.png import write_png
from tilewise.layouts.svg import to_svg
from tilewise.layouts.text import drawing, facts


def command(
    shape: Annotated[str, typer.Option(help="Of the tile in elements: M or N, and K.", metavar="MNxK")],
    dtype: Annotated[str, typer.Option(help="bf16, fp16, tf32, e4m3, int8, fp4, ...")] = "bf16",
    swizzle: Annotated[int, typer.Option(help="Width in bytes: 0 (none, interleaved), 32, 64 or 128.")] = 128,
    major: Annotated[Major, typer.Option(help="Which dimension is contiguous.")] = Major.K,
    order: Annotated[
        AtomOrder, typer.Option(help="Along which dimension atoms follow one another in memory.")
    ] = AtomOrder.STRIDED_FIRST,
    arch: Annotated[Arch, typer.Option(help="sm_90 is Hopper (wgmma), sm_100 Blackwell (tcgen05).")] = Arch.SM_90,
    operand: Annotated[Role, typer.Option(help="Whether it is A or B of the product.")] = Role.A,
    rows: Annotated[int | None, typer.Option(help="M or N of one instruction. Default: the usual one.")] = None,
    address: Annotated[int, typer.Option(help="Of the operand in shared memory, in bytes.", min=0)] = 0,
    instruction: Annotated[int, typer.Option(help="Whose share and descriptor are shown.", min=0)] = 0,
    element: Annotated[str | None, typer.Option(help="Tell where this element lies.", metavar="MN,K")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the figure into this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the figure into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page, one file.")] = None,
) -> None:
    """Tell how an operand lies in shared memory.

    Atoms, SBO and LBO, descriptors, linear layout, bank conflicts. Nothing is run: neither a
    GPU nor PyTorch is needed. What is said of sm_100 was not verified on hardware.

    Example: tilewise layout --shape 128x256 --dtype bf16 --swizzle 128 --major k --arch sm_90 --svg layout.svg
    """
    for path, option in ((svg, "--svg"), (png, "--png"), (html, "--html")):
        if path is not None:
            check_writable(path, option)
    try:
        tile = Operand(_pair(shape, "--shape", "x"), element_bits(dtype), SwizzleMode.of(swizzle), major, order)
        shares = list(instructions(tile, arch, operand, rows, address))
        place = None if element is None else _pair(element, "--element", ",")
        offset = None if place is None else tile.byte_offset(*place)
    except LayoutError as error:  # these name the argument, as the option is called, and the rule of the hardware
        raise typer.BadParameter(str(error)) from None
    if instruction >= len(shares):
        raise typer.BadParameter(f"there are {len(shares)}, got {instruction}", param_hint="--instruction")
    share = shares[instruction]
    for line in [*facts(tile, shares, operand, instruction), "", *drawing(tile, share)]:
        typer.echo(line)
    if place is not None and offset is not None:
        typer.echo(f"\nelement {place} lies at byte {offset}, address {address + offset:#x}")
    if svg is not None:
        svg.write_text(to_svg(figure(tile, share)), encoding="utf-8")
    if png is not None:
        write_png(figure(tile, share), png)
    if html is not None:
        html.write_text(to_html(tile, shares, operand, instruction), encoding="utf-8")


def _pair(text: str, option: str, between: str) -> tuple[int, int]:
    found = re.fullmatch(rf"\s*(\d+)\s*{between}\s*(\d+)\s*", text)
    if found is None:
        example = between.join(("128", "64"))
        raise typer.BadParameter(f"two sizes such as {example} are needed, got {text!r}", param_hint=option)
    return int(found[1]), int(found[2])
