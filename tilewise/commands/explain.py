"""``tilewise explain``: what a call will do and what limits it, from shapes alone."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.commands.arguments import shape as parse_shape

if TYPE_CHECKING:
    from torch import Tensor


class Dtype(StrEnum):
    """What `tilewise.attention` takes."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


def command(
    shape: Annotated[str, typer.Option(help="Of q: batch, heads, length, head dimension.", metavar="B,H,M,D")],
    kv_shape: Annotated[
        str | None, typer.Option(help="Of k and v, if it differs from q's.", metavar="B,Hkv,N,D")
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Head dimension of v, if it differs from k's.", min=1, max=256)
    ] = None,
    bias: Annotated[str | None, typer.Option(help="Shape of an additive bias.", metavar="B,H,M,N")] = None,
    bias_dtype: Annotated[Dtype | None, typer.Option(help="Default: q's.")] = None,
    bias_grad: Annotated[bool, typer.Option(help="Whether the bias asks for a gradient.")] = True,
    mask: Annotated[str | None, typer.Option(help="Shape of a bool mask.", metavar="B,H,M,N")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.BFLOAT16,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, or a compute capability such as sm_90, which need not be here. "
            "Default: cuda if torch sees a GPU, else cpu."
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The last query sees the last key.")] = False,
    window: Annotated[
        str | None, typer.Option(help="Keys seen left and right of a query; none: no limit.", metavar="LEFT,RIGHT")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Default: 1/sqrt(D).")] = None,
    softcap: Annotated[float | None, typer.Option(help="Scores become softcap * tanh(score / softcap).")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Equal inputs give equal bits.")] = False,
    backend: Annotated[str | None, typer.Option(help="Ask for one backend. Default: the plan's choice.")] = None,
    limits: Annotated[
        str | None, typer.Option(help="Of the device, where they are not known.", metavar="FLOP/s,BYTE/s")
    ] = None,
) -> None:
    """Tell what a call would do and what limits it.

    Backend and tiles with reasons, FLOPs, bytes, and the bound. A table compares the memory traffic with that of an
    implementation that stores the score matrix. Nothing is computed, and nothing of the given shapes is allocated.

    Example: tilewise explain --shape 4,16,4096,128 --bias 1,16,4096,4096 --causal --device sm_90
    """
    import torch

    from tilewise.explanation import explain, traffic_table

    q_shape = parse_shape(shape, "--shape", 4)
    k_shape = q_shape if kv_shape is None else parse_shape(kv_shape, "--kv-shape", 4)
    v_shape = k_shape if value_dim is None else (*k_shape[:3], value_dim)
    place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(sizes: tuple[int, ...], kind: torch.dtype, requires_grad: bool = False) -> Tensor:
        return torch.empty(sizes, dtype=kind, device=where, requires_grad=requires_grad)

    where, context = _where(place)
    kind = getattr(torch, dtype.value)
    try:
        with context:
            explanation = explain(
                tensor(q_shape, kind),
                tensor(k_shape, kind),
                tensor(v_shape, kind),
                bias=None
                if bias is None
                else tensor(parse_shape(bias, "--bias"), getattr(torch, (bias_dtype or dtype).value), bias_grad),
                mask=None if mask is None else tensor(parse_shape(mask, "--mask"), torch.bool),
                causal=causal,
                window=None if window is None else _window(window),
                scale=scale,
                softcap=softcap,
                deterministic=deterministic,
                backend=backend,
                device=place if where == "meta" else None,
                limits=None if limits is None else _limits(limits),
            )
    except (ValueError, TypeError) as error:  # these name the argument, as the option is called
        raise typer.BadParameter(str(error)) from None
    typer.echo(explanation)
    if explanation.forward.flops > 0:
        typer.echo("")
        for line in traffic_table(explanation):
            typer.echo(line)


def _where(place: str) -> tuple[str, AbstractContextManager]:
    """A device for tensors that take no memory, and the context in which they are made."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if re.fullmatch(r"sm_\d{2,}", place):
        return "meta", nullcontext()
    if place not in ("cpu", "cuda"):
        raise typer.BadParameter(
            f"must be cpu, cuda or a compute capability such as sm_90, got {place!r}", param_hint="--device"
        )
    if place == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; name one, such as sm_90", param_hint="--device")
    return place, FakeTensorMode()


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if part.strip().lower() == "none" else int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"two widths are needed, each a number or none, got {text!r}", param_hint="--window"
        ) from None
    return left, right


def _limits(text: str) -> tuple[float, float]:
    try:
        flops, bytes_per_second = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"two numbers are needed, FLOP/s and bytes/s, such as 990e12,4.8e12, got {text!r}", param_hint="--limits"
        ) from None
    return flops, bytes_per_second
