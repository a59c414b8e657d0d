"""Merging of attention over parts of the keys by their LSEs: docs/maths.md, "Online softmax"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.spec.checks import DTYPES, check_sink
from tilewise.spec.operands import Sizes
from tilewise.spec.tensors import check_tensor


def merge_attention(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], *, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint parts of the keys, computed with ``return_lse=True``.

    ``lse = log(sum_p exp(lse_p))`` and ``o = sum_p exp(lse_p - lse) * o_p``, with the sink as one more part without a
    value. Uses PyTorch operators, so that outputs, lses and sink have derivatives of any order.

    Args:
        outputs: (B, H, M, Dv) of each part; all float16, bfloat16, float32 or float64.
        lses: (B, H, M) of each part, natural logarithms, float32 (float64 for float64 outputs). Where one is -inf the
            part is ignored, whatever its output is.
        sink: logit of each row, as for `tilewise.attention`: (H,), or broadcastable {B|1} × {H|1} × {M|1}. It counts
            once for the whole row: compute the parts without it.

    Returns:
        o in the outputs' dtype and lse in the lses', summed in float32 (float64). Rows without visible keys and sink
            have o = 0, lse = -inf and zero gradients.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.

    Examples:
        >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> parts = zip(k.split(50, 2), v.split(50, 2))
        >>> halves = [tilewise.attention(q, *part, return_lse=True) for part in parts]
        >>> o, lse = tilewise.merge_attention(*zip(*halves))
        >>> torch.allclose(o, tilewise.attention(q, k, v), atol=1e-5)
        True
    """
    _check(outputs, lses, sink)
    o, lse = combine(outputs, lses, sink)
    return o.to(outputs[0].dtype), lse


def combine(outputs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `merge_attention` without checks, with o in the lses' dtype."""
    wide = lses[0].dtype
    logits = [*lses]
    if sink is not None:
        sink = sink[None, :, None] if sink.dim() == 1 else sink
        logits.append(sink.to(wide).expand(lses[0].shape))
    # The result does not depend on the maximum, which needs no derivative; -inf is replaced by 0.
    most = torch.stack([x.detach() for x in logits]).amax(0)
    most = most.masked_fill(most == -torch.inf, 0.0)
    weights = [torch.exp(x - most) for x in logits]
    total = torch.stack(weights).sum(0)
    seen = total != 0
    total = torch.where(seen, total, 1.0)
    o = torch.zeros_like(outputs[0], dtype=wide)
    for part, lse, weight in zip(outputs, lses, weights, strict=False):
        # A quotient stays exact for large LSEs; the difference of two LSEs does not.
        o = o + (weight / total)[..., None] * part.to(wide).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return o, torch.where(seen, total.log() + most, -torch.inf)


def _check(outputs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | None) -> None:
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, (tuple, list)):
            raise TypeError(f"{name}: expected a sequence of tensors, one of each part, got {type(parts).__name__}")
    if not outputs:
        raise ValueError("outputs: needs one part or more, got none")
    if len(lses) != len(outputs):
        raise ValueError(f"lses: expected one for each of the {len(outputs)} outputs, got {len(lses)}")
    first = outputs[0]
    for n, o in enumerate(outputs):
        name = f"outputs[{n}]"
        check_tensor(name, o)
        if o.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, M, Dv), got shape {tuple(o.shape)}")
        if o.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {o.dtype}")
        if o.dtype != first.dtype:
            raise TypeError(f"{name}: dtype must equal outputs[0]'s {first.dtype}, got {o.dtype}")
        if o.shape != first.shape:
            raise ValueError(f"{name}: shape must equal outputs[0]'s {tuple(first.shape)}, got {tuple(o.shape)}")
        if o.device != first.device:
            raise ValueError(f"{name}: must be on outputs[0]'s device {first.device}, got {o.device}")
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    for n, lse in enumerate(lses):
        name = f"lses[{n}]"
        check_tensor(name, lse)
        if lse.shape != first.shape[:3]:
            raise ValueError(f"{name}: expected shape (B, H, M) = {tuple(first.shape[:3])}, got {tuple(lse.shape)}")
        if lse.dtype != wide:
            raise TypeError(f"{name}: dtype must be {wide} for outputs of {first.dtype}, got {lse.dtype}")
        if lse.device != first.device:
            raise ValueError(f"{name}: must be on outputs[0]'s device {first.device}, got {lse.device}")
    if sink is not None:
        check_tensor("sink", sink)
        B, H, M, _ = first.shape
        check_sink(sink, Sizes(B, H, H, M, 0), first.device, of="outputs[0]")
