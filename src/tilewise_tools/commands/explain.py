"""``tilewise explain``: predict from shapes alone what a call does and what limits it."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise_tools.commands.arguments import check_writable, in_options, mistake, number, told, whole
from tilewise_tools.commands.arguments import dtype as parse_dtype
from tilewise_tools.commands.arguments import shape as parse_shape
from tilewise_tools.commands.patterns import draw, is_pattern, pattern

if TYPE_CHECKING:
    from torch import Tensor


def command(
    shape: Annotated[str, typer.Option(help="Shape of q: batch, heads, length, head dimension.", metavar="B,H,M,D")],
    kv_shape: Annotated[
        str | None, typer.Option(help="Shape of k and v, if it differs from q's.", metavar="B,Hkv,N,D")
    ] = None,
    value_dim: Annotated[
        str | None, typer.Option(help="Head dimension of v, if it differs from k's.", metavar="DV")
    ] = None,
    bias: Annotated[str | None, typer.Option(help="Shape of an additive bias.", metavar="B,H,M,N")] = None,
    bias_dtype: Annotated[str | None, typer.Option(help="Dtype of the bias. Default: q's.", metavar="DTYPE")] = None,
    bias_grad: Annotated[bool, typer.Option(help="Compute the bias's gradient, or not.")] = True,
    mask: Annotated[
        str | None,
        typer.Option(
            help="Shape of a bool mask; or a sparse pattern: documents:LENGTH (or all lengths, separated by commas), "
            "prefix:LENGTH, window:LEFT,RIGHT,GLOBAL, dilated:REACH,STEP, strided:STRIDE, or FILE.pt with a bool "
            "tensor.",
            metavar="B,H,M,N",
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the tiles that the mask pattern leaves visible.", metavar="FILE")
    ] = None,
    sink: Annotated[
        str | None, typer.Option(help="Shape of trainable attention sinks, H or B,H,M, in q's dtype.", metavar="H")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of q, k, v: float16 (or fp16), bfloat16 (bf16), float32 (fp32), float64 (fp64).",
            metavar="DTYPE",
        ),
    ] = "bfloat16",
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, a GPU such as h100 or rtx4090, or a compute capability such as sm_90; no such GPU is "
            "needed. "
            "Default: cuda if torch sees a GPU, else cpu.",
            metavar="DEVICE",
        ),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The last query sees the last key.")] = False,
    window: Annotated[
        str | None, typer.Option(help="Visible keys left and right of a query; none: no limit.", metavar="LEFT,RIGHT")
    ] = None,
    scale: Annotated[str | None, typer.Option(help="Softmax scale. Default: 1/sqrt(D).", metavar="NUMBER")] = None,
    softcap: Annotated[
        str | None, typer.Option(help="Scores become softcap * tanh(score / softcap).", metavar="NUMBER")
    ] = None,
    dropout_p: Annotated[str | None, typer.Option(help="Dropout probability, 0 to 1.", metavar="NUMBER")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Equal inputs give equal bits.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(help="hopper, triton, cpu or reference. Default: chosen automatically.", metavar="NAME"),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(help="Peak rates of an unknown device, such as 990e12,4.8e12.", metavar="FLOP/s,BYTE/s"),
    ] = None,
) -> None:
    """Show what a call would do and what limits it.

    Prints backend and tiles with reasons, FLOPs, bytes and the bound. A table compares the memory traffic with that of
    an implementation that stores the score matrix. Nothing is computed, and no tensor of these shapes is allocated.

    Example: tilewise explain --shape 4,16,4096,128 --bias 1,16,4096,4096 --causal --device sm_90
    """
    q_shape = parse_shape(shape, "--shape", 4)
    k_shape = q_shape if kv_shape is None else parse_shape(kv_shape, "--kv-shape", 4)
    v_shape = k_shape if value_dim is None else (*k_shape[:3], whole(value_dim, "--value-dim", 1))
    parse_shape(",".join(map(str, v_shape)), "--value-dim", 4)  # checks the number of elements
    bias_shape = None if bias is None else parse_shape(bias, "--bias")
    patterned = mask is not None and is_pattern(mask)
    mask_shape = None if mask is None or patterned else parse_shape(mask, "--mask")
    if png is not None and not patterned:
        raise mistake("--png", "draws the tiles of a pattern: give one with --mask, such as documents:512")
    if png is not None:
        check_writable(png, "--png")
    sink_shape = None if sink is None else parse_shape(sink, "--sink")
    kind_name = parse_dtype(dtype, "--dtype")
    bias_name = kind_name if bias_dtype is None else parse_dtype(bias_dtype, "--bias-dtype")
    if bias is None and bias_dtype is not None:
        raise mistake("--bias-dtype", "there is no bias: give its shape with --bias")
    widths = None if window is None else _window(window)
    factor = None if scale is None else number(scale, "--scale")
    cap = None if softcap is None else number(softcap, "--softcap")
    share = 0.0 if dropout_p is None else number(dropout_p, "--dropout-p")
    speeds = None if limits is None else _limits(limits)
    options = _options(kv_shape is not None, value_dim is not None)

    import torch

    from tilewise.explanation.attention import explain
    from tilewise.explanation.text import traffic_table
    from tilewise.planner import ALIASES, BACKENDS

    if backend not in (None, "auto", *BACKENDS, *ALIASES):
        raise mistake("--backend", f"must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    place = device.strip().lower() if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    where, context = _where(place)
    tile_mask = None
    if mask is not None and patterned:  # a pattern is evaluated on the CPU, whatever the device
        tile_mask = pattern(mask, q_shape[2], k_shape[2])
        if where == "cuda":
            place = "sm_{}{}".format(*torch.cuda.get_device_capability())
        where, context = "meta", nullcontext()
    kind = getattr(torch, kind_name)

    def tensor(sizes: tuple[int, ...], kind: torch.dtype, requires_grad: bool = False) -> Tensor:
        return torch.empty(sizes, dtype=kind, device=where, requires_grad=requires_grad)

    try:
        with context:
            explanation = explain(
                tensor(q_shape, kind),
                tensor(k_shape, kind),
                tensor(v_shape, kind),
                bias=None if bias_shape is None else tensor(bias_shape, getattr(torch, bias_name), bias_grad),
                mask=tile_mask if mask_shape is None else tensor(mask_shape, torch.bool),
                sink=None if sink_shape is None else tensor(sink_shape, kind, True),
                causal=causal,
                window=widths,
                scale=factor,
                softcap=cap,
                dropout_p=share,
                deterministic=deterministic,
                backend=None if backend == "auto" else backend,
                device=place if where == "meta" else None,
                limits=speeds,
            )
    except (ValueError, TypeError) as error:
        raise told(error, options) from None
    lines = [in_options(str(explanation), options)]
    if explanation.forward.flops > 0:
        lines += ["", *traffic_table(explanation)]
    if png is not None and tile_mask is not None:
        lines.append(f"picture: {png}: {draw(tile_mask, explanation.problem.score.band, png)}")
    typer.echo("\n".join(lines))  # after the picture: a reader such as head may close the pipe


def _options(kv_shape: bool, value_dim: bool) -> dict[str, str]:
    """Return the option behind each argument of `tilewise.explain`; k and v may stem from q's option."""
    k = "--kv-shape" if kv_shape else "--shape"
    tensors = {"q": "--shape", "k": k, "v": "--value-dim" if value_dim else k}
    words = ("causal", "window", "scale", "softcap", "deterministic", "backend", "device", "limits")
    named = {name: f"--{name}" for name in ("bias", "mask", "sink", *words)}
    return tensors | named | {"dropout_p": "--dropout-p"}


def _where(place: str) -> tuple[str, AbstractContextManager]:
    """Return a device for tensors without storage, and the context in which to create them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tilewise.spec.gpus import compute_capability

    if compute_capability(place) is not None:
        return "meta", nullcontext()
    if place not in ("cpu", "cuda"):
        raise mistake(
            "--device",
            f"must be cpu, cuda, a GPU such as h100, or a compute capability such as sm_90, got {place!r}",
        )
    if place == "cuda" and not torch.cuda.is_available():
        raise mistake("--device", "torch sees no CUDA device here; name one, such as h100 or sm_90")
    return place, FakeTensorMode()


def _window(text: str) -> tuple[int | None, int | None]:
    parts = [part.strip().lower() for part in text.split(",")]
    if len(parts) != 2 or not all(part == "none" or re.fullmatch(r"-?[0-9]{1,18}", part) for part in parts):
        raise mistake("--window", f"two widths are needed, each a number or none, such as 512,0, got {text!r}")
    left, right = (None if part == "none" else int(part) for part in parts)
    return left, right


def _limits(text: str) -> tuple[float, float]:
    try:
        flops, bytes_per_second = (float(part) for part in text.split(","))
    except ValueError:
        flops = bytes_per_second = math.nan
    if not (0 < flops < math.inf and 0 < bytes_per_second < math.inf):
        needed = "two numbers, positive and finite, are needed, FLOP/s and bytes/s, such as 990e12,4.8e12"
        raise mistake("--limits", f"{needed}, got {text!r}")
    return flops, bytes_per_second
