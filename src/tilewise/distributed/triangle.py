"""Triangle attention of a pair representation whose rows are split over ranks (dynamic axial parallelism).

A rank has the rows z (B, N / R, N, C). For the starting node each row is a batch element, so q, k, v and o stay on
their rank, and only the pair bias is gathered, with C / H times fewer numbers than z. The ending node is the starting
node of the transposed z, which an all-to-all makes.

Source: FastFold (arXiv 2203.00854), section on dynamic axial parallelism; for the computation
`tilewise.integrations.evoformer.triangle_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.api import attention
from tilewise.distributed.agreement import Description, settled
from tilewise.distributed.autograd import gather, to_heads
from tilewise.distributed.layout import Ranks
from tilewise.spec.checks import DTYPES, broadcasts, check_flag, check_qkv
from tilewise.spec.statistics import AuxRequest
from tilewise.spec.tensors import check_tensor, is_dtensor

FUNCTION = "triangle_attention"


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    mesh: DeviceMesh,
    validate: bool = False,
) -> Any:
    """Compute triangle attention of this rank's rows of a pair representation.

    Like `tilewise.integrations.evoformer.triangle_attention`, but a collective: every rank of the mesh makes the call,
    and the backward, in the same order. Gradients are those of the sum of all ranks' losses.

    Args:
        q, k, v: this rank's rows, (B, N / ranks, H, Q, D), (B, N / ranks, H, K, D) and (B, N / ranks, H, K, Dv), or
            without B if it is 1; equal shapes on all ranks.
        bias: the bias rows that this rank's rows of z give: (B|1, 1, H|1, Q / ranks, K), or without B. It is gathered
            once; the gradient is summed over ranks in float32 by one reduce-scatter.
        mask: (B|1, N / ranks|1, 1, 1, K), of this rank's rows.
        scale, return_aux: as in the local function.
        mesh: a DeviceMesh of one axis, whose ranks have the rows in order.
        validate: see `tilewise.distributed.context_parallel_attention`.

    Returns:
        (B, N / ranks, H, Q, Dv), of this rank's rows, also if q has no B; with ``return_aux`` ``(out, lse, max)``.

    Each rank holds the whole bias, (B, 1, H, Q, K), and in the backward its gradient. With B above 1 this is B local
    calls. Under `torch.compile` it is a graph break.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        NotImplementedError: for DTensors.
    """
    return _run((q, k, v), bias, mask, scale, return_aux, Ranks.of(mesh, None), validate)


def transpose_shards(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of the transposed tensor, contiguous.

    (B, rows / ranks, columns, ...) becomes (B, columns / ranks, rows, ...). It may be a bool mask without further axes.
    A collective: one all-to-all, and another in the backward. Differentiable, and its own inverse.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        NotImplementedError: for DTensors.
    """
    ranks = Ranks.of(mesh, None)
    _check_local("tensor", tensor, "transpose_shards", ranks)
    shape = tuple(tensor.shape)
    if len(shape) < 3:
        raise ValueError(f"tensor: expected (B, rows, columns, ...), got shape {shape}")
    if shape[2] % ranks.size:
        raise ValueError(
            f"tensor: the {shape[2]} columns must be a multiple of the {ranks.size} ranks, got shape {shape}"
        )
    return _transposed(tensor, ranks)


@torch.compiler.disable  # a graph break, as in tilewise.distributed.api
def _transposed(x: Tensor, ranks: Ranks) -> Tensor:
    return to_heads(x, ranks, 2, 1).transpose(1, 2).contiguous()


@torch.compiler.disable
def _run(
    qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor, mask: Tensor | None, scale: float | None, return_aux: bool,
    ranks: Ranks, validate: bool,
) -> Any:  # fmt: skip
    def read() -> tuple[Description, Description, None]:
        check_flag("validate", validate)
        check_flag("return_aux", return_aux)
        _check(*qkv, bias, mask, ranks)
        named = zip((*"qkv", "bias"), (*qkv, bias), strict=True)
        layouts = [(name, (tuple(x.shape), x.dtype, x.requires_grad)) for name, x in named]
        return (
            ("function", FUNCTION), *layouts, ("mask", mask is None), ("scale", scale), ("return_aux", return_aux),
            ("torch.is_grad_enabled()", torch.is_grad_enabled()),
        ), (), None  # fmt: skip

    settled(ranks, validate, read, lambda _: FUNCTION)
    whole = gather(bias, ranks, bias.dim() - 2)
    seen = mask if mask is None or mask.dtype == torch.bool else mask != 0
    q, k, v = (x if x.dim() == 5 else x[None] for x in qkv)
    if not return_aux:
        return attention(q, k, v, bias=whole, mask=seen, scale=scale)
    request = AuxRequest(lse=True, max_scores=True)
    o, aux = attention(q, k, v, bias=whole, mask=seen, scale=scale, return_aux=request)
    return o, aux.lse, aux.max_scores


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, ranks: Ranks) -> None:
    for name, x in {"q": q, "k": k, "v": v, "bias": bias, "mask": mask}.items():
        if x is not None or name != "mask":
            _check_local(name, x, FUNCTION, ranks)
    n, lead, shape = q.dim(), tuple(q.shape[:-3]), tuple(q.shape)
    if n not in (4, 5):
        raise ValueError(f"q: expected (B, N / ranks, heads, queries, head_dim), or without B, got shape {shape}")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != n or tuple(x.shape[:-3]) != lead:
            raise ValueError(f"{name}: leading dimensions must equal q's {lead}, got shape {tuple(x.shape)}")
    if 0 in lead:
        raise ValueError(f"q: a rank must have a row, got shape {shape}")
    check_qkv(*(x if n == 4 else x[0] for x in (q, k, v)))
    H, Q, K = *q.shape[-3:-1], k.shape[-2]
    if Q % ranks.size:
        raise ValueError(f"q: the {Q} queries must be a multiple of the {ranks.size} ranks, got shape {shape}")
    if bias.dtype not in DTYPES:
        raise TypeError(f"bias: dtype must be float16, bfloat16, float32 or float64, got {bias.dtype}")
    mine = (*lead[:-1], 1, H, Q // ranks.size, K)
    if bias.dim() != n or not broadcasts(bias.shape[:-2], mine[:-2]) or tuple(bias.shape[-2:]) != mine[-2:]:
        raise ValueError(
            f"bias: expected this rank's rows of queries, ({', '.join(f'{x}|1' for x in mine[:-2])}, {mine[-2]}, "
            f"{mine[-1]}), got shape {tuple(bias.shape)}"
        )
    full = (*lead, H, Q, K)
    if mask is not None and (mask.dim() != n or not broadcasts(mask.shape, full)):
        raise ValueError(f"mask: shape {tuple(mask.shape)} does not broadcast to {full}, of this rank's rows")


def _check_local(name: str, x: Any, function: str, ranks: Ranks) -> None:
    if is_dtensor(x):
        raise NotImplementedError(f"{name}: {function} takes no DTensor; pass this rank's shard, x.to_local()")
    check_tensor(name, x)
    if x.device.type != ranks.device:
        raise ValueError(f"{name}: must be on the mesh's device {ranks.device}, got {x.device}")
