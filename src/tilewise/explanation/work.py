"""Work of a call and limits of a device: FLOPs, bytes, shares of tiles, and the bound (roofline)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewise.backends import lse_dtype
from tilewise.spec.block_mask import EMPTY, PARTIAL, TileTensors
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.reference import in_band
from tilewise.spec.rounding import LOW_BYTES, keeps_low_bits
from tilewise.spec.score import is_positive_float
from tilewise.spec.tiles import key_tiles, query_tiles
from tilewise.spec.tiles import limits as band_limits


class Limits(NamedTuple):
    """Peak rates of a device, and the source of the numbers."""

    flops: float  # FLOP/s
    bytes_per_second: float
    source: str

    @property
    def break_even(self) -> float:
        """Intensity (FLOP/byte) above which a call is compute-bound."""
        return self.flops / self.bytes_per_second

    def bound(self, work: Work) -> Literal["compute", "memory"]:
        return "compute" if work.intensity > self.break_even else "memory"

    def seconds(self, work: Work) -> float:
        """Return the least time of ``work``, in seconds."""
        return max(work.flops / self.flops, work.bytes / self.bytes_per_second)


class DataSheet(NamedTuple):
    """Peak rates from a vendor's data sheet, not measured. FLOP/s are those of dense 16-bit tensor cores."""

    model: str
    name: str  # a part of the device's name in CUDA
    flops: float
    bytes_per_second: float


# NVIDIA's data sheets by compute capability; the first is used if no device is given.
DATA_SHEETS = {
    (8, 0): (DataSheet("A100 SXM 80 GB", "A100-SXM4-80GB", 312e12, 2.0e12),),
    (9, 0): (
        DataSheet("H100 SXM", "H100 80GB HBM3", 990e12, 3.35e12),
        DataSheet("H200 SXM", "NVIDIA H200", 990e12, 4.8e12),
    ),
}


# Passes over B x H x M x N matrices of an implementation that stores them. Forward: S and P, each written and read
# once. Backward: P read for dV and for dS, dP written and read, dS written once and read for dQ and for dK.
FORWARD_PASSES = {"S": 2, "P": 2}


BACKWARD_PASSES = {"P": 2, "dP": 2, "dS": 3}


@dataclass(frozen=True)
class Work:
    """Work of one pass.

    Attributes:
        flops: of the matrix products, 2 per multiply-add; pairs masked by causal, window or a mask are not counted, but
            a mask without known elements counts in full.
        bytes: least memory traffic: each input read once and each result written once.
        unfused_bytes: additional traffic, in q's dtype, of an implementation that stores the score matrix and its
            softmax (or their gradients): `FORWARD_PASSES` or `BACKWARD_PASSES`.
    """

    flops: int
    bytes: int
    unfused_bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.unfused_bytes + other.unfused_bytes)

    @property
    def intensity(self) -> float:
        """Intensity in FLOP/byte; 0 for no work."""
        return self.flops / self.bytes if self.bytes else 0.0


class MaskShare(NamedTuple):
    """Shares that a mask leaves of the scores within the causal limit and window, and of their tiles."""

    pairs: float
    tiles: float  # of `TILE` x `TILE`, with any visible score


class TileShare(NamedTuple):
    """Numbers of tiles of a TileMask over all batch elements and heads, regardless of causal and window."""

    block: tuple[int, int]  # queries and keys
    tiles: int
    visible: int
    partial: int  # the visible tiles whose pairs are checked one by one


TILE = 128


def _tile_share(tiles: TileTensors | None) -> TileShare | None:
    if tiles is None or tiles.tiles is None or tiles.tiles.is_meta or is_fake(tiles.tiles):
        return None
    x = tiles.tiles
    return TileShare(tiles.block, x.numel(), int((x > EMPTY).sum()), int((x >= PARTIAL).sum()))


def _mask_share(problem: Problem, mask: Tensor | None, listed: TileTensors | None) -> MaskShare | None:
    """Return the share, computed a few rows at a time. None without a mask, if its elements are unknown, or if no score
    is left."""
    mask = mask if listed is None else listed.tiles
    if mask is None or mask.is_meta or is_fake(mask) or problem.pairs == 0:
        return None
    cols = torch.arange(problem.keys, device=mask.device)
    pairs = tiles = band_tiles = 0
    for row0 in range(0, problem.queries, TILE):
        rows = torch.arange(row0, min(row0 + TILE, problem.queries), device=mask.device)
        in_reach = in_band(rows[:, None], cols, problem.score.band)
        band_tiles += _count_tiles(in_reach)
        if listed is None:
            of_rows = mask if mask.shape[2] == 1 else mask[:, :, rows]
        else:
            of_rows = listed.rows_visible(slice(row0, row0 + rows.shape[0]), problem.keys)
        for of_batch in of_rows:
            seen = of_batch & in_reach
            pairs += int(seen.sum())
            tiles += _count_tiles(seen)
    matrices = mask.shape[0] * mask.shape[1]
    band_pairs = problem.pairs // (problem.batch * problem.heads)
    return MaskShare(pairs / (matrices * band_pairs), tiles / (matrices * band_tiles))


def _count_tiles(seen: Tensor) -> int:
    """Return the number of tiles with a visible score in a row of tiles, (..., up to TILE, N)."""
    keys = seen.any(-2)
    return int(torch.nn.functional.pad(keys, (0, -keys.shape[-1] % TILE)).unflatten(-1, (-1, TILE)).any(-1).sum())


def _data_sheet(problem: Problem, name: str | None) -> Limits | None:
    """Return the limits of the GPU with the name in CUDA, or the `gpu_key`, ``name``; without a name, of the
    capability's first data sheet."""
    if problem.capability is None or problem.dtype.itemsize != 2:
        return None
    for sheet in DATA_SHEETS.get(problem.capability, ()):
        if name is None or sheet.name in name or sheet.model.partition(" ")[0].lower() == name:
            return Limits(sheet.flops, sheet.bytes_per_second, f"data sheet of the {sheet.model}")
    return None


def _given_limits(pair: tuple[float, float]) -> Limits:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"limits: expected a pair (FLOP/s, bytes/s), got {pair!r}")
    for limit in pair:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise TypeError(f"limits: expected a pair (FLOP/s, bytes/s) of floats, got {pair!r}")
        if not is_positive_float(limit):
            raise ValueError(f"limits: must be positive and finite, got {pair!r}")
    return Limits(float(pair[0]), float(pair[1]), "limits as given")


def forward_work(problem: Problem) -> Work:
    """Return the work of the forward: it reads the inputs and writes o, lse and statistics."""
    statistics = len(problem.score.statistics.names) * problem.batch * problem.heads * problem.queries
    size = lse_dtype(problem.dtype).itemsize
    return Work(problem.flops, _read(problem) + _results(problem) + statistics * size, _stored(problem, FORWARD_PASSES))


def backward_work(problem: Problem) -> Work:
    """Return the work of the backward. It reads the forward's inputs and results and dO, and writes gradients."""
    size, heads = problem.dtype.itemsize, problem.batch * problem.heads
    do = heads * problem.queries * problem.value_dim * size
    dq = heads * problem.queries * problem.head_dim * size
    dk_dv = problem.batch * problem.kv_heads * problem.keys * (problem.head_dim + problem.value_dim) * size
    dbias = math.prod(problem.bias.shape) * problem.bias.dtype.itemsize if problem.bias and problem.bias_grad else 0
    dsink = math.prod(problem.sink.shape) * problem.sink.dtype.itemsize if problem.sink and problem.sink_grad else 0
    parts = problem.parts
    dparts = 0 if parts is None else sum(_part(problem, name, x) for name, x in parts.named() if name in parts.grads)
    traffic = _read(problem) + _results(problem) + do + dq + dk_dv + dbias + dsink + dparts
    return Work(problem.backward_flops, traffic, _stored(problem, BACKWARD_PASSES))


def _read(problem: Problem) -> int:
    """Return the bytes of q, k, v, bias and its terms, mask and sink that causal and window leave visible."""
    M, N = problem.queries, problem.keys
    lo, hi = band_limits(problem.score.band)
    first_key, _, _, last_key = key_tiles(0, M, N, lo, hi, 1)
    first_query, _, _, last_query = query_tiles(0, N, M, lo, hi, 1)
    queries = problem.batch * problem.heads * (last_query - first_query) * problem.head_dim
    keys = problem.batch * problem.kv_heads * (last_key - first_key) * (problem.head_dim + problem.value_dim)
    mask = problem.mask if problem.tile_mask is None else None  # `explain` counts the tensors of a TileMask
    operands = sum(_operand(problem, x) for x in (problem.bias, mask) if x is not None)
    operands += 0 if problem.parts is None else sum(_part(problem, name, x) for name, x in problem.parts.named())
    operands += 0 if problem.sink is None else math.prod(problem.sink.shape) * problem.sink.dtype.itemsize
    return (queries + keys) * problem.dtype.itemsize + operands


def _operand(problem: Problem, x: TensorSpec) -> int:
    full = x.rows == problem.queries and x.cols == problem.keys and problem.batch * problem.heads > 0
    pairs = problem.pairs // (problem.batch * problem.heads) if full else x.rows * x.cols
    return x.batch * x.heads * pairs * x.dtype.itemsize


def _part(problem: Problem, name: str, x: TensorSpec) -> int:
    """Return the bytes of a bias component. Relative positions known to the host count only if some pair reads them."""
    distances, parts, cols = {"query": problem.score.query, "key": problem.score.key}.get(name), problem.parts, x.cols
    if distances is not None and parts is not None and name not in (*parts.shifts, *parts.buckets):
        least, most = max(distances.lo, 1 - problem.queries), min(distances.hi, problem.keys - 1)
        cols = max(most - least + 1, 1 if distances.outside == "clamp" else 0)
    return x.batch * x.heads * x.rows * cols * x.dtype.itemsize


def _results(problem: Problem) -> int:
    """Return the bytes of o and lse, and with dropout of o's low bits."""
    rows, element = problem.batch * problem.heads * problem.queries, problem.dtype.itemsize
    if keeps_low_bits(problem.dtype, problem.score.dropout):
        element += LOW_BYTES
    return rows * (problem.value_dim * element + lse_dtype(problem.dtype).itemsize)


def _stored(problem: Problem, passes: dict[str, int]) -> int:
    return sum(passes.values()) * _matrix(problem)


def _matrix(problem: Problem) -> int:
    """Return the bytes of one B x H x M x N matrix."""
    return problem.batch * problem.heads * problem.queries * problem.keys * problem.dtype.itemsize
