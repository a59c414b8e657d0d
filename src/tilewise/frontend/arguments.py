"""Reader of the arguments of a public call: checks, defaults, and bias terms as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from tilewise.backends import Inputs
from tilewise.bias.canonical import Slots, canonical, with_dense
from tilewise.bias.low_rank import LowRankBias
from tilewise.bias.terms import Term
from tilewise.frontend.autocast import autocast
from tilewise.masks.block_sparse import TileMask, tile_mask_of
from tilewise.operator.seed import drawn_seed
from tilewise.planner import check_backend
from tilewise.spec.bias_components import Parts
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.checks import check_flag, check_qkv, check_seed, four_dims, sink_of_rows
from tilewise.spec.operands import Sizes
from tilewise.spec.score import Band, Numbers, Score, Window, check_numbers
from tilewise.spec.statistics import NO_STATISTICS, Statistics
from tilewise.spec.tensors import causal_limit, check_tensor, is_causal_bias, is_dtensor

Seed = tuple[int, int] | Tensor | None
Mask = Tensor | TileMask | None
Bias = Tensor | Term | Sequence[Tensor | Term] | None


# --- read and check ---
EVERYWHERE = Band()


class Call(NamedTuple):
    """Arguments of a call with their defaults filled in: those of `attention_op`."""

    inputs: Inputs
    score: Score
    deterministic: bool
    backend: str


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias,
    mask: Mask,
    sink: Tensor | None,
    causal: bool,
    window: Window | None,
    dropout_p: float,
    dropout_seed: Seed,
    deterministic: bool | None,
    backend: str | None,
    statistics: Statistics = NO_STATISTICS,
    **numbers: Unpack[Numbers],
) -> Call:
    """Read and check the keyword arguments of `attention`; ``numbers`` are those of `Score.of`. A call with dropout but
    without a seed gets its seed later, by `with_seed`."""
    check_numbers(window, dropout_p=dropout_p, **numbers)
    if causal is not True and causal is not False:  # avoids a function call in the common case
        check_flag("causal", causal)
    if deterministic is not None:
        check_flag("deterministic", deterministic, "a bool or None")
    backend = check_backend(backend)
    tiles = None if mask is None or isinstance(mask, Tensor) else _tiles(mask, q, k, v)
    if tiles is not None:
        mask = None
    check_inputs(q, k, v, bias, mask, sink)
    if dropout_seed is not None:
        check_dropout_seed(dropout_seed, q)
    q, k, v = autocast(q, k, v)
    band = EVERYWHERE
    if causal or window is not None:
        # Malformed tensors get a neutral diagonal here, and their error from Problem.
        diagonal = k.shape[2] - q.shape[2] if q.dim() == k.dim() == 4 else 0
        band = Band.aligned(bool(causal), window, diagonal)
    slots = None
    if isinstance(bias, (Term, tuple, list)):
        slots, bias = _slots(bias, q, k, v), None
        band = band.both(slots.band)
    elif bias is not None:
        assert isinstance(bias, Tensor)
        bias, band = _operand("bias", bias, (q, k, v), causal, band)
    if mask is not None:
        assert isinstance(mask, Tensor)
        mask, band = _operand("mask", mask, (q, k, v), causal, band)
    if sink is not None:
        sink = sink_of_rows(sink, q, k, v)
    score = Score.of(
        band, q.shape[-1] if q.dim() > 0 else 0, dropout_p=dropout_p, statistics=statistics, **numbers
    )  # fmt: skip
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    inputs = Inputs(q, k, v, bias, mask, sink, tiles=tiles)
    if score.dropout and dropout_seed is not None:
        inputs = inputs._replace(seed=seed_tensor(dropout_seed, q.device))
    if slots is not None:
        if slots.low_rank is not None and backend == "reference":
            sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
            slots = slots._replace(matrix=with_dense(low_rank_of(slots, q, score), slots.matrix, sizes), low_rank=None)
        inputs, score = with_slots(inputs, score, slots)
    return Call(inputs, score, deterministic, backend)


def with_seed(inputs: Inputs, score: Score) -> Inputs:
    """Return ``inputs`` with a seed drawn from torch's generator if the call has dropout and no seed."""
    if not score.dropout:
        return inputs
    if is_dtensor(inputs.q):
        raise NotImplementedError(
            "dropout_p: dropout takes no DTensors, of which each device would count its sequences and heads from 0; "
            "call attention on local tensors, with a seed of each device"
        )
    if inputs.seed is not None:
        return inputs
    return inputs._replace(seed=drawn_seed(inputs.q))


def check_dropout_seed(seed: Any, q: Tensor) -> None:
    """Raise an error unless ``seed`` is a pair of 64-bit ints or an int64 tensor (2,) on q's device."""
    if isinstance(seed, Tensor):
        check_tensor("dropout_seed", seed)
        check_seed("dropout_seed", seed, q)
        return
    pair = isinstance(seed, (tuple, list)) and len(seed) == 2
    if not pair or not all(isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool) for x in seed):
        raise TypeError(
            f"dropout_seed: expected a pair (seed, offset) of ints, or an int64 tensor of shape (2,), got {seed!r}"
        )
    if not all(-(2**63) <= x < 2**64 for x in seed):
        raise ValueError(f"dropout_seed: expected numbers of 64 bits, got {seed!r}")


def seed_tensor(seed: tuple[int, int] | Tensor, device: torch.device) -> Tensor:
    """Return the seed as an int64 tensor (2,) on ``device``. Kernels write the numbers: a copy from the host would
    synchronize, and a CUDA graph could not capture it."""
    if isinstance(seed, Tensor):
        return seed.contiguous()
    first, second = (x - 2**64 if x >= 2**63 else x for x in seed)
    made = torch.full((2,), first, dtype=torch.int64, device=device)
    made[1].fill_(second)
    return made


def check_inputs(q: Tensor, k: Tensor, v: Tensor, bias: Bias, mask: Mask, sink: Tensor | None) -> None:
    """Raise an error unless all are tensors of a supported kind. bias may also be a term or a sequence."""
    check_tensor("q", q)
    check_tensor("k", k)
    check_tensor("v", v)
    if bias is not None and not isinstance(bias, (Term, tuple, list)):
        check_tensor("bias", bias, may_be_causal=True)
    if mask is not None:
        check_tensor("mask", mask, may_be_causal=True)
        assert isinstance(mask, Tensor)
        if mask.requires_grad:
            raise ValueError("mask: requires grad, but a mask has no gradient; pass a trainable additive mask as bias=")
    if sink is not None:
        check_tensor("sink", sink)


def _operand(
    name: str, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], causal: bool, band: Band
) -> tuple[Tensor | None, Band]:
    """Return the bias or mask in four dimensions, and the band. A CausalBias becomes a band, and None."""
    q, k, _ = qkv
    if not is_causal_bias(x):
        return four_dims(name, x, *qkv), band
    if causal:
        raise ValueError(f"{name}: a CausalBias says by itself what is hidden; leave causal=True out")
    if not q.dim() == k.dim() == 4:
        return None, band  # Problem raises the error
    hi = causal_limit(name, x, q.shape[2], k.shape[2])
    return None, Band(band.lo, hi if band.hi is None else min(band.hi, hi))


def _tiles(mask: Any, q: Tensor, k: Tensor, v: Tensor) -> TileTensors | None:
    """Return the tensors of a TileMask or BlockMask; None for other masks. Errors of q, k and v take precedence."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    check_qkv(q, k, v)
    found = tile_mask_of("mask", mask, q.shape[2], k.shape[2])
    return None if found is None else found.tensors


def _slots(bias: Any, q: Tensor, k: Tensor, v: Tensor) -> Slots:
    """Return the bias components of bias terms. Errors of q, k and v take precedence."""
    check_qkv(q, k, v)
    B, H, M, _ = q.shape
    return canonical(bias, B, H, k.shape[1], M, k.shape[2], q.device)


def with_slots(inputs: Inputs, score: Score, slots: Slots) -> tuple[Inputs, Score]:
    """Return ``inputs`` and ``score`` with the bias components of `canonical`. ``score`` has the original q's scale.

    A low-rank bias is appended to q and k. A single component, even if only along the keys, becomes the plain bias,
    which every backend supports.
    """
    if slots.low_rank is not None:
        if score.statistics.max_scores_unbiased:
            raise NotImplementedError(
                "return_aux: a low-rank bias is part of the product, of which there is no maximum without it; leave "
                "max_scores_unbiased out"
            )
        q, k, scale = low_rank_of(slots, inputs.q, score).extended(inputs.q, inputs.k, score.scale)
        inputs, score = inputs._replace(q=q, k=k), replace(score, scale=scale)
    bias, cols, rows = slots.matrix, slots.cols, slots.rows
    if bias is None:
        bias, cols = cols, None
    if bias is None:
        bias, rows = rows, None
    parts = Parts(cols, rows, toeplitz=None if slots.toeplitz is None else slots.toeplitz.values)
    numbers: dict[str, Any] = {"toeplitz": slots.far}
    for name, x in (("query", slots.query), ("key", slots.key)):
        if x is not None:
            parts = parts._replace(**{name: x.values, f"{name}_shift": x.shift, f"{name}_buckets": x.buckets})
            numbers[name] = x.distances
    return inputs._replace(bias=bias, parts=None if all(x is None for x in parts) else parts), replace(score, **numbers)


def low_rank_of(slots: Slots, q: Tensor, score: Score) -> LowRankBias:
    """Return the low-rank bias, checked and cast by autocast as q was. It is appended to q and k."""
    found = slots.low_rank
    assert found is not None
    if q.dtype != torch.float64:
        found = LowRankBias(*autocast(found.u, found.w))
    found.check_call(q, score.transformed)
    return found


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v, cast by autocast if all are tensors."""
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    return autocast(q, k, v) if tensors else (q, k, v)


# --- packed batches ---


def padded_mask(mask: Tensor | None) -> Tensor | None:
    """Return the mask of a packed batch with four dimensions."""
    if mask is None:
        return None
    if is_causal_bias(mask):
        raise TypeError("mask: a CausalBias has lengths of its own; pass causal=True")
    return mask if mask.dim() >= 4 else mask[(None,) * (4 - mask.dim())]
