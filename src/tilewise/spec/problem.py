"""Problem: one frozen description of a call, with the checks that every call passes.

Bias terms and packed arguments are checked where they are read, in `bias` and `frontend.varlen`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.spec.bias_components import ROWS, Parts
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.checks import (
    DTYPES,
    _check_distances,
    _check_operand,
    _shape,
    check_in_runs,
    check_lengths,
    check_qkv,
    check_repeated,
    check_seed,
    check_sink,
)
from tilewise.spec.operands import BiasKind, BroadcastGroup, PartOperands, Sizes, TensorSpec, TileOperand
from tilewise.spec.score import Score
from tilewise.spec.seqlens import Lengths, Packed
from tilewise.spec.table import Axes
from tilewise.spec.tiles import visible_pairs
from tilewise.spec.tma import tensor_fits_tma


class RasterOrder(StrEnum):
    """The tiles of scores that run at the same time and share the L2 cache; kernels get the value."""

    TILES = "tiles"  # of one head, which share its keys and values
    BATCH = "batch"  # of batch elements that share a bias tile
    HEADS = "heads"  # of heads that share a bias tile
    LONGEST_FIRST = "longest"  # a window makes tiles uneven: the longest of some heads first (LPT)


@dataclass(frozen=True)
class Problem:
    """Sizes, dtype, device and score terms of a call; hashable, the key of cached plans."""

    device: str  # torch's device type
    capability: tuple[int, int] | None  # of a CUDA device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    score: Score
    bias: TensorSpec | None = None
    mask: TensorSpec | None = None  # of a tile mask: its shape as a bool mask
    tile_mask: TileOperand | None = None
    sink: TensorSpec | None = None  # one column: (batch, heads, rows, 1)
    parts: PartOperands | None = None  # bias components that `bias` cannot hold
    bias_grad: bool = False  # the bias requires a gradient
    sink_grad: bool = False
    deterministic: bool = False
    exact: bool = False  # allow_tf32=False: float32 matmuls on a GPU do not use TF32, whatever PyTorch's setting
    totals: tuple[int, int] | None = None  # of a packed batch, whose queries and keys are the longest sequence's
    sequence: int = 0  # index of the first batch element, for dropout
    irregular: tuple[str, ...] = ()  # see the function; names of q, k, v, bias and, in a backward, do

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute, as without queries or keys."""
        return 0 in (self.batch, self.heads, self.queries, self.keys, self.value_dim, *(self.totals or ()))

    @property
    def few_queries(self) -> bool:
        """True if reading K and V dominates: up to 64 queries (M of the smallest wgmma), 16 keys or more for each."""
        return self.queries <= 64 and 16 * self.queries <= self.keys

    @property
    def mask_repeats(self) -> bool:
        """True if batch element b has mask b % n, with n masks for more batch elements."""
        return self.mask is not None and 1 < self.mask.batch < self.batch

    @property
    def mask_period(self) -> int | bool:
        """Return n if the mask repeats, True if each batch element has its own, False if all share one."""
        if self.mask is None:
            return False
        return self.mask.batch if self.mask_repeats else self.mask.batch > 1

    @property
    def bias_in_runs(self) -> bool:
        """True if batch element b has bias b // (batch // n), with n biases for more batch elements."""
        return self.bias is not None and 1 < self.bias.batch < self.batch

    @property
    def bias_batch(self) -> int | bool:
        """Return n if runs of batch elements share a bias, True if each has its own, False if all share one."""
        if self.bias is None:
            return False
        return self.bias.batch if self.bias_in_runs else self.bias.batch > 1

    def broadcast_group(self, x: TensorSpec) -> BroadcastGroup:
        """Return the broadcast group of the bias or the mask."""
        batch = self.batch // max(x.batch, 1)
        if x.heads == 1:
            return BroadcastGroup(batch, self.heads, self.kv_heads)
        return BroadcastGroup(batch, self.group if x.heads == self.kv_heads else 1, 1)

    @property
    def bias_itemsize(self) -> int:
        """Return the bytes per element of the bias tile loaded with a tile of scores; 0 without one."""
        return 0 if self.bias is None else self.bias.matrix_itemsize

    @property
    def raster_order(self) -> RasterOrder:
        """Return the order in which programs take tiles of scores: which of them run at once and share the L2 cache."""
        if not self.score.band.unlimited:
            return RasterOrder.LONGEST_FIRST
        if self.bias is None or self.bias.axes != BiasKind.MATRIX:
            return RasterOrder.TILES
        group = self.broadcast_group(self.bias)
        if group.batch > 1:
            return RasterOrder.BATCH
        return RasterOrder.HEADS if group.heads > 1 else RasterOrder.TILES

    @property
    def pairs(self) -> int:
        """Return the number of (query, key) pairs inside the causal or local window, over all batches and heads."""
        return self.batch * self.heads * visible_pairs(self.queries, self.keys, self.score.band)

    @property
    def flops(self) -> int:
        """Return the forward FLOPs: two products, a multiply and an add each, per visible pair."""
        return 2 * self.pairs * (self.head_dim + self.value_dim)

    @property
    def backward_flops(self) -> int:
        """Return the backward FLOPs: S, dQ and dK over the head dimension, dP and dV over the value dimension."""
        return 2 * self.pairs * (3 * self.head_dim + 2 * self.value_dim)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        sink: Tensor | None,
        parts: Parts | None,
        seed: Tensor | None,
        lengths: Lengths | None,
        tiles: TileTensors | None,
        score: Score,
        *,
        bias_grad: bool = False,
        sink_grad: bool = False,
        part_grads: tuple[str, ...] = (),
        deterministic: bool = False,
        exact: bool = False,
        irregular: tuple[str, ...] = (),
    ) -> Problem:
        """Describe a call, or raise a ValueError or TypeError that names the argument at fault."""
        check_qkv(q, k, v)
        B, H, M, D = q.shape
        _, Hkv, N, Dv = v.shape
        totals = None
        if (lengths is None) != (score.packed is None):
            raise ValueError("cu_seqlens: go with the longest lengths, and these with cu_seqlens")
        if lengths is not None and score.packed is not None:
            totals, B = (M, N), check_lengths(lengths, q)
            M, N = score.packed.max_q, score.packed.max_k
        sizes = Sizes(B, H, Hkv, M, N)
        operands = _Operands(sizes, q.device, totals, score.packed)
        whole_mask, tile_mask = operands.operand("mask", mask), None
        if tiles is not None:
            if mask is not None:
                raise ValueError("mask: expected one mask, got a bool mask and tiles")
            whole_mask, tile_mask = operands.tiles(tiles)
        if seed is not None:
            check_seed("seed", seed, q)
            if not seed.is_contiguous():
                raise ValueError(f"seed: must be contiguous, got stride {seed.stride()}")
        return cls(
            device=q.device.type,
            capability=torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None,
            dtype=q.dtype,
            batch=B,
            heads=H,
            kv_heads=Hkv,
            queries=M,
            keys=N,
            head_dim=D,
            value_dim=Dv,
            score=score,
            bias=operands.operand("bias", bias),
            mask=whole_mask,
            tile_mask=tile_mask,
            sink=operands.sink(sink),
            parts=None if parts is None else operands.parts(parts, score, part_grads),
            bias_grad=bias_grad,
            sink_grad=sink_grad,
            deterministic=deterministic,
            exact=exact,
            totals=totals,
            irregular=irregular,
        )


def irregular(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, do: Tensor | None = None) -> tuple[str, ...]:
    """Return the names of the tensors that a TMA descriptor cannot describe, see `spec.tma`."""
    named = (("q", q), ("k", k), ("v", v), ("bias", bias), ("do", do))
    return tuple(name for name, x in named if x is not None and x.numel() and not tensor_fits_tma(x, _is_aligned(x)))


def _is_aligned(x: Tensor) -> bool:
    """True if ``x`` begins at a multiple of 16 bytes; a traced tensor has no address, and its offset is used."""
    address = x.data_ptr() if type(x) in (Tensor, Parameter) else x.storage_offset() * x.element_size()
    return bool(address % 16 == 0)


@dataclass(frozen=True)
class _Operands:
    """Checks of the tensors of a call other than q, k and v; `tilewise.bias` checks bias terms."""

    sizes: Sizes
    device: torch.device
    totals: tuple[int, int] | None
    packed: Packed | None

    def operand(self, name: str, x: Tensor | None) -> TensorSpec | None:
        if x is None:
            return None
        if x.dim() < 4:  # only a direct call of the operator: other callers pad to four
            raise ValueError(f"{name}: expected 4 dimensions, got shape {_shape(x)}")
        if self.packed is not None and (
            name in self.packed.forms or (name == "bias" and "ragged" in self.packed.forms)
        ):
            return self._packed(name, x)
        if name == "mask" and x.dim() == 5 and self.totals is None:
            check_repeated(x, self.sizes, self.device)
            return TensorSpec(x.dtype, *x.shape[1:])
        if name == "bias" and x.dim() == 5 and self.totals is None:
            check_in_runs(x, self.sizes, self.device)
            return TensorSpec(x.dtype, x.shape[0], *x.shape[2:])
        _check_operand(name if name in ("bias", "mask") else "bias", x, self.sizes, self.device)
        return TensorSpec(x.dtype, *x.shape)

    def _packed(self, name: str, x: Tensor) -> TensorSpec:
        """Describe a packed bias, along all queries, all keys or all pairs, by its shape for the longest sequence.

        An axis of queries or keys gets 2 or more, because 1 would mean one number for all sequences.
        """
        assert self.packed is not None
        assert self.totals is not None
        B, H, Hkv, M, N = self.sizes
        ragged = "ragged" in self.packed.forms and name == "bias"
        _, heads, rows, cols = x.shape
        queries, keys = self.totals
        longest = None  # no dictionary: sizes may be SymInts, which are not hashable
        if ragged:
            longest = (M, N) if rows == 1 else None
        elif rows == 1 and cols == keys:
            longest = 1, max(N, 2)
        elif rows == queries and cols == 1:
            longest = max(M, 2), 1
        if longest is None or heads not in (1, Hkv, H) or x.shape[0] != 1:
            raise ValueError(f"{name}: shape {_shape(x)} does not fit {queries} queries and {keys} keys")
        _check_operand("bias", x, self.sizes._replace(B=1, M=rows, N=cols), self.device)
        return TensorSpec(x.dtype, B, heads, *longest)

    def tiles(self, tiles: TileTensors) -> tuple[TensorSpec, TileOperand]:
        B, H, Hkv, M, N = self.sizes
        if self.totals is not None:
            raise ValueError("mask: a packed batch takes no TileMask; pass a bool mask")
        x, bits = tiles.tiles, tiles.bits
        if x is None or bits is None or (tiles.begins is None) != (tiles.ends is None):
            raise ValueError("mask: of a TileMask tiles and bits go together, and begins with ends")
        for name, y in zip(TileTensors._fields, tiles, strict=True):
            if y is not None and (y.dtype != torch.int32 or not y.is_contiguous()):
                raise ValueError(f"mask: TileMask.{name} must be contiguous int32, got {y.dtype}, stride {y.stride()}")
            if y is not None and y.device != self.device:
                raise ValueError(f"mask: TileMask.{name} must be on q's device {self.device}, got {y.device}")
        if bits.dim() != 3 or 0 in bits.shape[1:] or bits.shape[1] % 64 or bits.shape[2] % 2:
            raise ValueError(f"mask: TileMask.bits: expected (places, 64 n, 2 n), got shape {_shape(bits)}")
        block_m, block_n = tiles.block
        counts = -(-M // block_m), -(-N // block_n)
        b, h, *found = x.shape if x.dim() == 4 else (0, 0)
        if b not in (1, B) or h not in (1, Hkv, H) or tuple(found) != counts:
            heads = f"{H}|1" if Hkv == H else f"{H}|{Hkv}|1"
            raise ValueError(
                f"mask: a TileMask of shape {_shape(x)} does not fit ({B}|1, {heads}, {counts[0]}, {counts[1]}), tiles "
                f"of {block_m} x {block_n} for {M} queries and {N} keys"
            )
        for name, y in (("begins", tiles.begins), ("ends", tiles.ends)):
            if y is not None and _shape(y) != (b, h, 1, N):
                raise ValueError(f"mask: TileMask.{name}: expected shape {(b, h, 1, N)}, got {_shape(y)}")
        x = tiles.offsets
        if x is not None and (tiles.begins is None or M != N or h != 1 or _shape(x) != (b, N + 1)):
            raise ValueError(f"mask: TileMask.offsets: expected intervals and shape {(b, M + 1)}, got {_shape(x)}")
        kind: Literal["bits", "intervals"] = "bits" if tiles.begins is None else "intervals"
        return TensorSpec(torch.bool, b, h, M, N), TileOperand(block_m, block_n, kind, x is not None)

    def sink(self, x: Tensor | None) -> TensorSpec | None:
        if x is None:
            return None
        if x.dim() == 1:  # only a direct call of the operator: other callers pad to three
            raise ValueError(f"sink: expected 3 dimensions, got shape {_shape(x)}")
        if self.packed is not None and self.totals is not None and "sink" in self.packed.forms:
            check_sink(x, self.sizes._replace(B=1, M=self.totals[0]), self.device)
            return TensorSpec(x.dtype, self.sizes.B, x.shape[1], self.sizes.M, 1)
        check_sink(x, self.sizes, self.device)
        batch, heads, rows = x.shape
        return TensorSpec(x.dtype, batch, heads, rows, 1)

    def parts(self, parts: Parts, score: Score, grads: tuple[str, ...]) -> PartOperands:
        found: dict[str, TensorSpec | None] = {}
        for name, row in ROWS.items():
            x = getattr(parts, name)
            found[name] = self.operand(name, x) if row.broadcasts else self._component(name, row, x)
        for name in ("query", "key"):
            values, distances = getattr(parts, name), getattr(score, name)
            if (values is None) != (distances is None):
                raise ValueError(f"bias: values per {name} and their distances go together")
            if values is not None:
                shift, buckets = getattr(parts, f"{name}_shift"), getattr(parts, f"{name}_buckets")
                _check_distances(name, distances, values if buckets is None else buckets, shift, self.sizes.B)
        kinds = ("query", "key")
        return PartOperands(
            **found,
            shifts=tuple(name for name in kinds if getattr(parts, f"{name}_shift") is not None),
            buckets=tuple(name for name in kinds if getattr(parts, f"{name}_buckets") is not None),
            grads=grads,
        )

    def _component(self, name: str, row: Axes, x: Tensor | None) -> TensorSpec | None:
        """Describe a bias component whose axes are those of its ``row`` in the table."""
        if x is None:
            return None
        at = "all" if name == "toeplitz" else name
        if x.dtype not in DTYPES:
            raise TypeError(f"bias: values per {at}: dtype must be float, got {x.dtype}")
        if x.device != self.device:
            raise ValueError(f"bias: values per {at}: must be on q's device {self.device}, got {x.device}")
        B, H, Hkv, M, N = self.sizes
        known = {"B": B, "H": H, "Hkv": Hkv, "M": M, "N": N, "M+N-1": max(M + N - 1, 0)}
        totals = self.totals if row.packed else None
        if totals is not None:
            known |= {"B": 1, "M": totals[0], "N": totals[1]}
        axes = [[int(size) if size.isdigit() else known.get(size) for size in row.sizes(n)] for n in range(4)]
        if x.dim() != 4 or not all(None in allowed or n in allowed for n, allowed in zip(x.shape, axes, strict=True)):
            raise ValueError(f"bias: values per {at}: shape {_shape(x)} does not fit the call")
        b, h, m, n = x.shape
        if totals is not None:
            b, m = B, N if "N" in row.sizes(2) else M
        return TensorSpec(x.dtype, b, h, m, n)
