"""Attention of models of biological structures: functions of cuEquivariance, DeepSpeed, OpenFold, and AlphaFold 3.

cuEquivariance, DeepSpeed and OpenFold are neither imported nor needed: these functions run wherever
`tilewise.attention` does. Every bias has a gradient, a query that sees no key gives 0, and nothing is copied unless a
docstring says so.
docs/structure-models.md has recipes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import AuxRequest, attention
from tilewise.cache import calls
from tilewise.frontend.autocast import autocast, autocast_somewhere
from tilewise.operator.eager import is_eager
from tilewise.operator.tools import exports_onnx
from tilewise.planner import check_backend
from tilewise.spec.checks import DTYPES, broadcasts, check_flag
from tilewise.spec.integers import LARGEST_SIZE, check_range
from tilewise.spec.score import check_numbers
from tilewise.spec.tensors import check_tensor, is_dtensor
from tilewise.windows import Geometry
from tilewise.windows.api import Edges, Windows, banded
from tilewise.windows.autograd import WINDOWS, eager_windows, layouts, windowed
from tilewise.windows.config import fits, rows_merge

if TYPE_CHECKING:
    from tilewise.windows.launch import Windowed

_STRIDED = torch.strided
_TILES = {"cuda": 128}  # rows of a kernel's tile of queries, on devices with kernels


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    kv_lengths: Tensor | None = None,
) -> Any:
    """Compute ``softmax(scale * q @ k.mT + bias) @ v`` like ``cuequivariance_torch.triangle_attention``.

    Args:
        q: queries (B, N, H, Q, D), or (N, H, Q, D) if B is 1; float16, bfloat16, float32, or float64 (CPU). D is 1 to
            256. Any strides.
        k: keys (B, N, H, K, D), in q's dtype and number of dimensions.
        v: values (B, N, H, K, Dv), likewise.
        bias: (B, 1, H, Q, K), or with 4 dimensions (1, H, Q, K), or any shape that broadcasts to (B, N, H, Q, K). Any
            float dtype, read without conversion; its gradient has its shape and dtype and is summed in float32.
        mask: (B, N, 1, 1, K), or with 4 dimensions (N, 1, 1, K), or any shape that broadcasts; bool, True = visible. In
            other dtypes, as in cuEquivariance, nonzero = visible; no gradient.
        scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.
        return_aux: also return the logsumexp and the maximum of each row's scores.
        kv_lengths: instead of a mask, for keys padded on the right: the number of visible keys, (B, N, 1, 1, 1), or
            (N, 1, 1, 1) if B is 1; int32 or int64. More than K means all.

    Returns:
        (B, N, H, Q, Dv) in q's dtype and memory order, with 5 dimensions even if q has 4, like cuEquivariance's. With
        ``return_aux`` ``(out, lse, max)``: lse (B, N, H, Q), float32 (float64 for float64 inputs), natural logarithm,
        differentiable; the maximum in that shape and dtype, bias included, -inf for a query that sees no key.

    A query that sees no key gives 0, zero gradients and an lse of -inf, or 0 if its ``kv_lengths`` is 0, as in
    cuEquivariance. cuEquivariance replaces scores that ``mask`` hides by -1e9, so a fully masked row there gives the
    mean of the values. This is one call for any B, and copies nothing.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.

    Source: the documentation of cuequivariance_torch.triangle_attention; AlphaFold 2 (Jumper et al., Nature 2021),
    supplement, Algorithms 13 and 14; for the computation `tilewise.attention`.
    """
    check_flag("return_aux", return_aux)
    _check("q", q, (4, 5), "(B, N, heads, queries, head_dim) or (N, heads, queries, head_dim)")
    for name, x in (("k", k), ("v", v)):
        _check(name, x, (4, 5), "(B, N, heads, keys, head_dim) or (N, heads, keys, head_dim)")
    q, k, v = (x if x.dim() == 5 else x[None] for x in (q, k, v))
    check_tensor("bias", bias)
    if mask is not None:
        check_tensor("mask", mask)
        mask = mask if mask.dtype == torch.bool else mask != 0
    if kv_lengths is not None:
        if mask is not None:
            raise ValueError("kv_lengths: takes the place of a mask; pass one of the two")
        mask = _within(q, k, kv_lengths)
    if not return_aux:
        return attention(q, k, v, bias=bias, mask=mask, scale=scale)
    o, aux = attention(q, k, v, bias=bias, mask=mask, scale=scale, return_aux=AuxRequest(lse=True, max_scores=True))
    lse = aux.lse
    if kv_lengths is not None and lse is not None:
        lse = lse.masked_fill(kv_lengths.squeeze(-1) <= 0, 0.0)
    return o, lse, aux.max_scores


def _within(q: Tensor, k: Tensor, kv_lengths: Tensor) -> Tensor:
    """Return the mask of the keys within ``kv_lengths``. q and k have 5 dimensions."""
    check_tensor("kv_lengths", kv_lengths)
    if kv_lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"kv_lengths: dtype must be int32 or int64, got {kv_lengths.dtype}")
    _check_device("kv_lengths", kv_lengths, "q", q)
    shape = (1, *kv_lengths.shape) if kv_lengths.dim() == 4 and q.shape[0] == 1 else tuple(kv_lengths.shape)
    if len(shape) != 5 or not broadcasts(shape, (*q.shape[:2], 1, 1, 1)):
        raise ValueError(
            f"kv_lengths: expected shape (B, N, 1, 1, 1), got {tuple(kv_lengths.shape)}, where B and N of q are "
            f"{tuple(q.shape[:2])}"
        )
    return torch.arange(k.shape[-2], device=kv_lengths.device) < kv_lengths


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """Compute ``softmax(Q @ K.mT / sqrt(D) + biases[0] + biases[1]) @ V`` like DeepSpeed's function of this name.

    Args:
        Q: queries (B, N, L, H, D), heads after the length; float16, bfloat16, float32, or float64 (CPU). D is 1 or more
            and L any length. Any strides.
        K, V: keys and values (B, N, L, H, D) in Q's dtype.
        biases: a list or tuple of at most two, which is not changed: the mask bias, (B, N, 1, 1, L), and the pair bias,
            (B, 1, H, L, L). Each may be None or omitted. Any float dtype; gradients have their shapes and dtypes and
            are summed in float32.

    Returns:
        (B, N, L, H, D) in Q's dtype, contiguous.

    If biases hide all keys of a query by -inf, it gives 0 and zero gradients; DeepSpeed gives NaN. -1e9 in place of
    -inf is an ordinary number, except in float16, where it is -inf. This is one call for any B.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.

    Source: deepspeed/ops/deepspeed4science/evoformer_attn.py of DeepSpeed for the shapes; for the computation
    `tilewise.attention`.
    """
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        _check(name, x, (5,), "(B, N, length, heads, head_dim)")
        if x.shape != Q.shape:
            raise ValueError(f"{name}: shape must equal Q's {tuple(Q.shape)}, got {tuple(x.shape)}")
    Q, K, V = autocast(Q, K, V)
    for name, x in (("K", K), ("V", V)):
        _check_device(name, x, "Q", Q)
        if x.dtype != Q.dtype:
            raise TypeError(f"{name}: dtype must equal Q's {Q.dtype}, got {x.dtype}")
    if not isinstance(biases, (list, tuple)):
        raise TypeError(f"biases: expected a list of at most two tensors, got {type(biases).__name__}")
    if len(biases) > 2:
        raise ValueError(f"biases: expected at most two tensors, got {len(biases)}")
    B, N, L, H, _ = Q.shape
    added = []
    for i, (bias, shape) in enumerate(zip(biases, ((B, N, 1, 1, L), (B, 1, H, L, L)), strict=False)):
        if bias is None:
            continue
        check_tensor(f"biases[{i}]", bias)
        if tuple(bias.shape) != shape:
            raise ValueError(f"biases[{i}]: expected shape {shape}, got {tuple(bias.shape)}")
        added.append(bias)
    o = attention(*(x.transpose(-3, -2) for x in (Q, K, V)), bias=tuple(added) or None)
    return o.transpose(-3, -2).contiguous()


def openfold_attention(
    query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor], use_high_precision: bool = False, *,
    mask_biases: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``softmax(query @ key.mT + biases[0] + ...) @ value``, as ``_attention`` of OpenFold's Attention does.

    OpenFold, OpenFold3, Boltz, Protenix and ESMFold, by OpenFold, have this function. They have multiplied query by
    ``1 / sqrt(D)`` already, so that there is no scale.

    Args:
        query: (..., H, Q, D) with any number of leading dimensions, also none; float16, bfloat16, float32, or float64
            (CPU). Any strides.
        key: (..., H, K, D) in query's dtype.
        value: (..., H, K, Dv) in query's dtype.
        biases: a list or tuple of any number of tensors, each of which broadcasts to (..., H, Q, K). Any float dtype;
            gradients have their shapes and dtypes and are summed in float32.
        use_high_precision: OpenFold3's argument, which has no effect: scores and softmax are always float32, or float64
            for float64 inputs.
        mask_biases: take a bias of size 1 along heads and queries that requires no grad for a mask. Its numbers must be
            0 at visible keys and -1e4 or less at hidden ones, as ``inf * (mask - 1)`` is. Then hidden keys cost no
            addition and have no effect at all, and a query that sees no key gives 0. On a CPU other numbers are an
            error; on a GPU they are not looked at, as the host would wait for them.

    Returns:
        (..., H, Q, Dv) in query's dtype.

    Without ``mask_biases`` every bias is added as it is: a query whose keys all have a bias of -1e9 gives nearly the
    mean of the values, as in OpenFold. Where two biases broadcast along different leading dimensions, this may be
    several calls; see `tilewise.attention`.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.

    Source: openfold/model/primitives.py of OpenFold for the signature; for the computation `tilewise.attention`.
    """
    check_flag("use_high_precision", use_high_precision)
    check_flag("mask_biases", mask_biases)
    if not isinstance(biases, (list, tuple)):
        raise TypeError(f"biases: expected a list of tensors, got {type(biases).__name__}")
    added, mask = [], None
    for i, bias in enumerate(biases):
        check_tensor(f"biases[{i}]", bias)
        if mask_biases and not bias.requires_grad and all(size == 1 for size in bias.shape[-3:-1]):
            seen = _seen_keys(f"biases[{i}]", bias)
            mask = seen if mask is None else mask & seen
        else:
            added.append(bias)
    call = partial(attention, bias=tuple(added) or None, mask=mask, scale=1.0)
    if isinstance(query, Tensor) and query.dim() == 3:
        return call(*(x[None] for x in (query, key, value))).squeeze(0)
    return call(query, key, value)


def _seen_keys(name: str, bias: Tensor) -> Tensor:
    """Return the mask that a bias of 0 and -1e4 or less stands for. Half of -1e4 allows for its rounding."""
    if bias.device.type == "cpu" and is_eager((bias,)) and not ((bias == 0) | (bias <= -5e3)).all():
        raise ValueError(
            f"{name}: with mask_biases=True a bias of shape {tuple(bias.shape)} must be 0 or at most -1e4, and holds "
            "other numbers; mask_biases=False adds it as it is"
        )
    return bias > -5e3


def attention_pair_bias(
    q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Compute attention of tokens with a pair bias, as in AlphaFold 3's diffusion transformer and pairformer.

    The caller computes projections, the gate and what follows. The samples of a diffusion share the bias of their
    structure, which is never repeated in memory.

    Args:
        q: queries (B, samples, H, S, D) or (B, H, S, D); float16, bfloat16, float32, or float64 (CPU). D is 1 or more.
            Any strides: (..., S, H, D) data passes by ``transpose(-3, -2)``.
        k: keys, in q's dtype and dimensions except for their length.
        v: values, likewise, (..., S, Dv).
        pair_bias: (B|1, H|1, S, S) for all samples, or (B|1, samples|1, H|1, S, S). Any float dtype; its gradient has
            its shape and dtype and is summed in float32.
        mask: of keys, bool, True = visible: (B|1, S), (B|1, samples|1, S), or with q's number of dimensions, such as
            (B, 1, 1, 1, S).
        scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.

    Returns:
        q's shape with Dv in place of D, in q's dtype. A query that sees no key gives 0.

    With B above 1 and a mask that the samples share this is B calls; see `tilewise.attention`.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.

    Source: AlphaFold 3 (Abramson et al., Nature 2024), supplement, Algorithm 24; for the computation
    `tilewise.attention`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x, (4, 5), "(B, samples, heads, length, head_dim) or (B, heads, length, head_dim)")
    check_tensor("pair_bias", pair_bias)
    n = q.dim()
    allowed = (4, n)
    if pair_bias.dim() not in allowed:
        words = " or ".join(str(x) for x in dict.fromkeys(allowed))
        raise ValueError(f"pair_bias: expected {words} dimensions, got shape {tuple(pair_bias.shape)}")
    lead = (*q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-2])
    bias = pair_bias if pair_bias.dim() == n else pair_bias[:, None]
    if not broadcasts(bias.shape, lead):
        raise ValueError(f"pair_bias: shape {tuple(pair_bias.shape)} does not broadcast to {lead}")
    if mask is not None:
        mask = _mask_of_keys(mask, lead)
    return attention(q, k, v, bias=bias, mask=mask, scale=scale)


def _mask_of_keys(mask: Tensor, full: tuple[int, ...]) -> Tensor:
    """Return the mask with as many dimensions as ``full``, the shape of scores."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: dtype must be bool (True = visible), got {mask.dtype}")
    x, n = mask, len(full)
    if x.dim() in (2, 3) and x.dim() < n:
        samples = x[:, None] if x.dim() == 2 else x
        x = samples[:, :, None, None] if n == 5 else samples[:, :, None]
        full = full if n == 5 else (full[0], 1, *full[2:])
    if x.dim() != n or not broadcasts(x.shape, full):
        raise ValueError(f"mask: shape {tuple(mask.shape)} is no mask of the keys of scores {full}")
    return x


def window_pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pair_bias: Tensor | None,
    mask: Tensor | None = None,
    q_block: int = 32,
    k_block: int = 128,
    edges: Edges = "clip",
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute attention in which each block of queries sees a window of keys around it, as for AlphaFold 3's atoms.

    Query i is in block ``b = i // q_block``. A block sees k_block keys, from
    ``b * q_block - (k_block - q_block) // 2`` on: with 32 and 128, from 48 before the block to 48 after it.

    Args:
        q: queries (B, H, N, D); float16, bfloat16, float32, or float64 (CPU). D is 1 or more, and N any length.
        k: keys (B, H, N, D) in q's dtype.
        v: values (B, H, N, Dv) in q's dtype.
        pair_bias: (B|1, H|1, blocks, q_block, k_block), where blocks is N / q_block, rounded up: entry (b, i, j) is for
            the i-th query of block b and the j-th key of its window. Any float dtype; its gradient has its shape and
            dtype and is summed in float32. Entries of queries or keys outside the sequence are ignored, and their
            gradient is 0. None: no bias.
        mask: (B|1, N), bool, True at visible keys.
        q_block, k_block: ints, k_block not below q_block.
        edges: "clip": the part of a window outside the sequence is hidden. "shift": a window that would extend beyond
            the sequence is moved inside, so that it has k_block keys unless N is less.
        scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.
        backend: as in `tilewise.attention`. "triton" has window kernels, which None uses on a GPU; "hopper" has none.

    Returns:
        (B, H, N, Dv) in q's dtype. A query that sees no key gives 0. Hidden keys have no effect, not even NaN.

    On a GPU the forward is one kernel, and so is the backward, for blocks of up to 32 queries and windows of up to 256
    keys and 32 KiB, in 16 bits or float32. Only a bias whose blocks are not contiguous one after the other is copied.
    Gradients of k and v, and of a shared bias, are summed in float32 and in one order.

    Otherwise this is `tilewise.attention`, with these copies:

    - k and v once, with windows as overlapping views; with "shift" each window.
    - q, if N is not a multiple of the blocks that are computed together, or if B is above 1 and its heads and lengths
      are not laid out as (H, N).
    - the bias. On a GPU with "clip" as many blocks as have 128 queries are one block for a kernel, whose bias is a
      copy: for blocks of 32 and 128, of four blocks, with 1.75 times their numbers. Otherwise it is copied only if N is
      not a multiple of q_block.

    If B is above 1 and the bias does not have all heads, or has them last in memory, this is up to B calls; otherwise
    one, in which a mask of each sequence is repeated for each head. Gradients of k and v sum overlapping windows, whose
    numbers are in q's dtype, in float32 (float64 for float64 inputs) and in one order.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.

    Source: AlphaFold 3 (Abramson et al., Nature 2024), supplement, Algorithm 7; for the computation
    `tilewise.attention`.
    """
    tensors = (q, k, v, pair_bias, mask)
    key = _key_of(tensors, (q_block, k_block, edges, scale, backend))
    known: tuple[Windowed, tuple] | None = None if key is None else calls.get(key)
    if known is not None:  # an earlier call was checked
        return eager_windows(known[0], q, k, v, pair_bias, mask, known[1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x, (4,), "(B, heads, length, head_dim)")
        if x.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"{name}: batch, heads and length must equal q's {tuple(q.shape[:3])}, got shape {tuple(x.shape)}"
            )
    windows = _windows(q.shape[2], q_block, k_block, edges)
    B, H, N, _ = q.shape
    if pair_bias is not None:
        check_tensor("pair_bias", pair_bias)
        _check_windows("pair_bias", pair_bias, (B, H), (windows.blocks, q_block, k_block))
        _check_device("pair_bias", pair_bias, "q", q)
        if pair_bias.dtype not in DTYPES:
            raise TypeError(f"pair_bias: dtype must be float16, bfloat16, float32 or float64, got {pair_bias.dtype}")
    if mask is not None:
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: dtype must be bool (True = visible), got {mask.dtype}")
        _check_windows("mask", mask, (B,), (N,))
        _check_device("mask", mask, "q", q)
    check_numbers(dropout_p=0.0, scale=scale)
    check_backend(backend)
    q, k, v = autocast(q, k, v)  # before windows repeat elements
    geometry = Geometry(q_block, k_block, edges == "shift")
    if _by_windows(q, k, v, pair_bias, geometry, backend):
        return _windowed(q, k, v, pair_bias, mask, geometry, scale, key)
    count = 1 if pair_bias is None else _blocks_together(windows, q.device)
    if pair_bias is not None and count > 1:
        # A mask that the bias cannot include is passed beside it.
        held = mask is None or mask.shape[0] in (1, pair_bias.shape[0])
        pair_bias = banded(pair_bias, windows, count, mask if held else None)
        windows, mask = windows.together(count), None if held else mask
        seen = None if mask is None else windows.visible(mask, q.device)
    else:
        seen = windows.visible(mask, q.device)
        if pair_bias is not None and N % q_block:  # entries of absent queries may be NaN
            pair_bias = pair_bias.masked_fill(windows.absent(q.device), 0.0)
    k, v = windows.of(k, v)
    o = _attention_of_windows(q, k, v, windows, pair_bias, seen, {"scale": scale, "backend": backend})
    return o if o.shape[2] == N else o[:, :, :N]


# --- by window kernels ---

_NUMBERS = (float, int, type(None))


def _key_of(tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple | None:
    """Return the cache key of an eager call of plain tensors without autocast: all but their data; else None."""
    q, k, v = tensors[:3]
    q_block, k_block, edges, scale, backend = arguments
    if not (
        q is not None and k is not None and v is not None
        # exact types: a bool or another type may equal a number of an earlier call
        and type(q_block) is type(k_block) is int and type(edges) is str and type(scale) in _NUMBERS
        and (backend is None or type(backend) is str)
        and is_eager(tensors) and not autocast_somewhere()
    ):  # fmt: skip
        return None
    for x in tensors:
        if x is not None and (x.layout is not _STRIDED or x.is_nested):
            return None
    return ("window_pair_attention", *layouts(tensors), arguments)


def _by_windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, geometry: Geometry, backend: str | None) -> bool:
    """True if the window kernels compute the call: on a GPU, or in Triton's interpreter."""
    asked = backend == "triton" or (q.is_cuda and backend in (None, "auto"))
    return asked and fits(q, k, v, bias, geometry) and not is_dtensor(q) and not exports_onnx()


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, geometry: Geometry,
    scale: float | None, key: tuple | None,
) -> Tensor:  # fmt: skip
    """Launch the window kernels, one each way; ``key``: the cache key of the prepared launch, see `_key_of`."""
    numbers = (1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale), *geometry)
    if bias is not None and not rows_merge(bias):
        bias, key = bias.contiguous(), None
    tensors = (q, k, v, bias, mask)
    if not is_eager(tensors):
        o: Tensor = WINDOWS.traced_call(*tensors, *numbers)[0]
        return o
    run = windowed(*tensors, *numbers)
    if key is not None:
        calls.put(key, (run, numbers))
    return eager_windows(run, *tensors, numbers)


# --- by `tilewise.attention` ---


def _blocks_together(windows: Windows, device: torch.device) -> int:
    """Return the number of blocks that are one block for a kernel, whose tiles have 128 rows. It is 1 on a CPU, which
    has no such tiles, and for "shift", whose windows are not evenly spaced."""
    if windows.edges == "shift" or device.type not in _TILES:
        return 1
    return max(min(_TILES[device.type] // windows.q_block, windows.blocks), 1)


def _attention_of_windows(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, bias: Tensor | None, seen: Tensor | None, options: Any
) -> Tensor:
    """Return o (B, H, rows, Dv) of q (B, H, length, D), windows of k and v, bias (B|1, H|1, blocks, q_block, k_block)
    and seen (B|1, blocks, k_block)."""
    (B, H, N, D), Dv = q.shape, v.shape[-1]
    blocks, rows = windows.blocks, windows.blocks * windows.q_block
    q = q if rows == N else pad(q, (0, 0, 0, rows - N))
    # Few views and no copies: with short blocks a call costs host time.
    merges = bias is None or (bias.shape[1] == H and (H == 1 or bias.stride(1) == blocks * bias.stride(2)))
    if B == 1 and (not merges or q.stride(1) < q.stride(2)):
        # Blocks are the batch. If q is stored as (N, H, D), so is o, and nothing is copied.
        q = q.view(H, blocks, windows.q_block, D)
        q, k, v = (x.transpose(0, 1) for x in (q, k.squeeze(0), v.squeeze(0)))
        bias = None if bias is None else bias.squeeze(0).transpose(0, 1)
        seen = None if seen is None else seen.squeeze(0)[:, None, None]
        o = attention(q, k, v, bias=bias, mask=seen, **options)
        return o.transpose(0, 1).reshape(1, H, rows, Dv)
    if merges:
        # Heads times blocks are the heads: one call for all batch elements, even if they share the bias.
        q = q.reshape(B, H * blocks, windows.q_block, D)
        k, v = (x.flatten(1, 2) for x in (k, v))
        bias = None if bias is None else bias.flatten(1, 2)
        if seen is not None:
            seen = seen[:, None].expand(-1, H, -1, -1).flatten(1, 2)[:, :, None]
        return attention(q, k, v, bias=bias, mask=seen, **options).view(B, H, rows, Dv)
    q, k, v = (x.transpose(1, 2) for x in (q.unflatten(2, (blocks, windows.q_block)), k, v))
    assert bias is not None
    seen = None if seen is None else seen[:, :, None, None]
    return attention(q, k, v, bias=bias.transpose(1, 2), mask=seen, **options).transpose(1, 2).flatten(2, 3)


def _windows(length: int, q_block: Any, k_block: Any, edges: Any) -> Windows:
    for name, n in (("q_block", q_block), ("k_block", k_block)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"{name}: expected an int, got {type(n).__name__}")
        if n < 1:
            raise ValueError(f"{name}: must be 1 or more, got {n}")
        check_range(name, n, LARGEST_SIZE)
    if k_block < q_block:
        raise ValueError(f"k_block: must not be below q_block, {q_block}, got {k_block}")
    if edges not in ("clip", "shift"):
        raise ValueError(f'edges: expected "clip" or "shift", got {edges!r}')
    return Windows(length, q_block, k_block, edges)


# --- checks ---


def _check(name: str, x: Any, dims: tuple[int, ...], axes: str) -> None:
    check_tensor(name, x)
    if x.dim() not in dims:
        raise ValueError(
            f"{name}: expected {' or '.join(map(str, dims))} dimensions {axes}, got shape {tuple(x.shape)}"
        )


def _check_device(name: str, x: Tensor, first: str, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: must be on {first}'s device {q.device}, got {x.device}")


def _check_windows(name: str, x: Tensor, shared: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Check that the shape is ``(*shared, *full)``, where dimensions of ``shared`` may be 1."""
    n = len(shared)
    if x.dim() != n + len(full) or tuple(x.shape[n:]) != full or not broadcasts(x.shape, (*shared, *full)):
        words = ", ".join([*(f"{size}|1" for size in shared), *map(str, full)])
        raise ValueError(f"{name}: expected shape ({words}), got {tuple(x.shape)}")
