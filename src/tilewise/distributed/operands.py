"""Calls on shards: tensors with the axes along which they are split, and the local calls.

A tensor with an axis of queries has this rank's rows, one with an axis of this rank's keys moves with K, and others
are equal on all ranks. Positions are those of the whole sequence: local calls have shifted windows, and bias terms
have the positions of their first query and key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Outputs, lse_dtype
from tilewise.bias import Alibi, LowRankBias, RelativeBias, T5Bias
from tilewise.bias.terms import Term, shape_of, wide
from tilewise.distributed.documents import SeenKeys
from tilewise.distributed.layout import Chunk, Ranks, local_band
from tilewise.frontend.arguments import Call, Seed, check_dropout_seed, check_inputs, read_call, seed_tensor
from tilewise.frontend.autocast import autocast
from tilewise.masks.block_sparse import TileMask, is_block_mask
from tilewise.operator.autograd import attention_op, attention_outputs
from tilewise.operator.seed import drawn_seed
from tilewise.spec import dropout
from tilewise.spec.checks import check_flag, check_qkv
from tilewise.spec.operands import Sizes
from tilewise.spec.rounding import keeps_low_bits
from tilewise.spec.score import Band, Window, check_numbers
from tilewise.spec.tensors import check_tensor, is_causal_bias, is_dtensor
from tilewise.spec.tiles import visible_pairs

FUNCTION = "context_parallel_attention"
KEY_STEP = 256  # no tile of keys is larger, so cuts are at whole tiles and addresses stay aligned
GROUP_FLOPS = 4e12


class CallOptions(NamedTuple):
    """The arguments of a call that are not tensors."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    deterministic: bool | None
    backend: str | None
    dropout_p: float = 0.0


class Slot(NamedTuple):
    """A tensor's name and axes; None: it does not have the axis, or broadcasts along it."""

    name: str
    heads: int | None = None  # query or key/value heads
    rows: int | None = None  # this rank's queries
    keys: int | None = None  # this rank's keys
    columns: int | None = None  # all keys

    @property
    def replicated(self) -> bool:
        """True if the tensor is equal on all ranks."""
        return self.rows is None and self.keys is None


class Piece(NamedTuple):
    """One of the tensors and terms of ``bias=``, with indices of its tensors by field name; a tensor's name is ""."""

    term: Term | None
    fields: dict[str, int]


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call on shards: its options, and the axes of its tensors."""

    ranks: Ranks
    sizes: Sizes  # of the whole sequence
    options: CallOptions
    slots: tuple[Slot, ...]  # of q, k, v, then of bias, mask and sink
    pieces: tuple[Piece, ...]  # of the bias
    mask: int | None  # index of the tensor
    sink: int | None
    seed: Tensor | None = None  # of dropout; has no slot
    drawn: bool = False  # this rank drew the seed; the first rank's is used

    @property
    def queries(self) -> int:
        return self.sizes.M // self.ranks.size

    @property
    def keys(self) -> int:
        return self.sizes.N // self.ranks.size

    @property
    def band(self) -> Band:
        """Return the window of the whole sequence, where the last query sees the last key."""
        return Band.aligned(self.options.causal, self.options.window, self.sizes.N - self.sizes.M)

    @property
    def row_chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks of this rank's queries; each is one local call."""
        return self.ranks.chunks(self.queries)

    def keeps_low_bits(self, dtype: torch.dtype) -> bool:
        """True if outputs in this dtype have low bits."""
        return keeps_low_bits(dtype, dropout.threshold(self.options.dropout_p))

    def seen_keys(self, query: Chunk) -> Chunk:
        """Return the keys that these queries see, in whole `KEY_STEP`s; some if they see none."""
        band, last = local_band(self.band, query.start, 0), self.sizes.N - 1
        first = 0 if band.lo is None else min(max(band.lo, 0), last) // KEY_STEP * KEY_STEP
        end = last if band.hi is None else min(max(query.length - 1 + band.hi, first), last)
        end = min(end // KEY_STEP * KEY_STEP + KEY_STEP, last + 1)
        return Chunk(first, first, end - first)

    def pairs(self, rank: int) -> int:
        """Return the number of visible pairs of that rank's queries, over batch and heads."""
        chunks = self.ranks.split.chunks(rank, self.queries)
        seen = sum(visible_pairs(x.length, self.sizes.N, local_band(self.band, x.start, 0)) for x in chunks)
        return self.sizes.B * self.sizes.H * seen

    @property
    def hop_pairs(self) -> int:
        """Return the number of pairs of this rank's queries and another's keys, over batch and heads."""
        return self.sizes.B * self.sizes.H * self.queries * self.keys

    @property
    def group_flops(self) -> float:
        """Return the least forward FLOPs of a group of heads on one rank, about 7 ms of a Hopper GPU. With fewer, the
        tails of launches leave more of the GPU idle than collectives take."""
        return GROUP_FLOPS

    def declines(self, method: str) -> str | None:
        """Return why the method cannot run the call; None if it can."""
        for name, heads in (("query heads", self.sizes.H), ("key/value heads", self.sizes.Hkv)):
            if method == "all_to_all" and heads % self.ranks.size:
                return f"the {heads} {name} do not divide by {self.ranks.size} ranks"
        return None

    @property
    def causal_alone(self) -> bool:
        """True if queries see the keys up to their own, and no matrix, term or dropout depends on positions."""
        counts = any(piece.term is not None and not isinstance(piece.term, LowRankBias) for piece in self.pieces)
        columns = any(slot.columns is not None for slot in self.slots)
        return self.band == Band(None, 0) and not (counts or columns or self.options.dropout_p)

    @property
    def seen(self) -> SeenKeys | None:
        """Return the keys that local calls of a packed batch have; None: all keys."""
        return None

    def is_local(self, query: Chunk) -> bool:
        """True if ``query`` is all rows of the shard, with this rank's keys alone: its own sequences of a packed batch.
        Rows of other sequences give 0 there."""
        return False

    @property
    def sent_share(self) -> float:
        """Return the share of its keys that a rank sends in an all-gather."""
        return 1.0

    @property
    def moving(self) -> list[int]:
        """Return the indices of tensors that move with the keys."""
        return [n for n, slot in enumerate(self.slots) if slot.keys is not None]

    # --- local calls ---

    def local(
        self, tensors: Sequence[Tensor], query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0
    ) -> Call:
        """Return the local call of tensors that hold these queries and keys, and the heads from ``first_head`` on. Only
        numbers of windows and terms differ from those of the whole call."""
        bias: list[Any] = []
        for piece in self.pieces:
            if piece.term is None:
                bias.append(tensors[piece.fields[""]])
                continue
            fields: dict[str, Any] = {name: tensors[n] for name, n in piece.fields.items()}
            if not isinstance(piece.term, LowRankBias):
                at: Any = piece.term
                first = self.sizes.N - self.sizes.M if at.query_start is None else at.query_start
                fields |= {"query_start": first + query.start, "key_start": at.key_start + key.start}
            bias.append(dataclasses.replace(piece.term, **fields))  # type: ignore[type-var]
        options = self.options._asdict() | {"causal": False, "window": None}
        call = read_call(
            *tensors[:3],
            bias=None if not bias else bias[0] if len(bias) == 1 else tuple(bias),
            mask=None if self.mask is None else tensors[self.mask],
            sink=tensors[self.sink] if sink and self.sink is not None else None,
            dropout_seed=self.seed,
            **options,
        )
        score = call.score
        band = score.band.both(local_band(self.band, query.start, key.start))
        origin = dropout.Origin(query.start, key.start, first_head) if score.dropout else score.origin
        return call._replace(score=dataclasses.replace(score, band=band, origin=origin))

    def attend(
        self, tensors: Sequence[Tensor], query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0,
        return_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``(o, lse)`` of these queries and keys."""
        local = self.local(tensors, query, key, sink=sink, first_head=first_head)
        o, lse = attention_op(*local, return_lse=return_lse)
        if lse is None:  # not requested
            lse = o.new_empty(0, dtype=lse_dtype(o.dtype))
        return o, lse

    def outputs(
        self, tensors: Sequence[Tensor], query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0
    ) -> Outputs:
        """Return the outputs of these queries and keys with the low bits of o, without a derivative."""
        inputs, score, deterministic, backend = self.local(tensors, query, key, sink=sink, first_head=first_head)
        return attention_outputs(inputs, score, deterministic, backend)

    # --- views of tensors ---

    def cut_rows(self, n: int, x: Tensor, query: Chunk) -> Tensor:
        axis = self.slots[n].rows
        return x if axis is None else x.narrow(axis, query.local, query.length)

    def cut_one(self, n: int, x: Tensor, query: Chunk, key: Chunk) -> Tensor:
        """Return the view for these queries and keys of ``x``, which has the axes of tensor ``n``."""
        slot, x = self.slots[n], self.cut_rows(n, x, query)
        if slot.keys is not None:
            x = x.narrow(slot.keys, key.local, key.length)
        return x if slot.columns is None else x.narrow(slot.columns, key.start, key.length)

    def cut(self, tensors: Sequence[Tensor], query: Chunk, key: Chunk) -> list[Tensor]:
        return [self.cut_one(n, x, query, key) for n, x in enumerate(tensors)]

    def accumulator(self, n: int, x: Tensor) -> Tensor:
        """Return zeros for the gradient of tensor ``n``, in float32 for 16 bits, but in a matrix's own dtype, as each
        of its elements is added to once."""
        dtype = x.dtype if self.slots[n].columns is not None else wide(x.new_empty(0)).dtype
        return torch.zeros(x.shape, dtype=dtype, device=x.device)


# --- reading ---


class Reader:
    """A list of tensors and their slots; errors name the argument, its value and what is allowed."""

    function = FUNCTION

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.all_keys = self.keys * ranks.size
        self.tensors: list[Tensor] = [q, k, v]
        self.slots = [Slot("q", 1, 2), Slot("k", 1, None, 2), Slot("v", 1, None, 2)]

    def put(self, x: Tensor, slot: Slot) -> int:
        self.tensors.append(x)
        # A heads axis of size 1 is not split.
        single = slot.heads is not None and x.shape[slot.heads] == 1
        self.slots.append(slot._replace(heads=None) if single else slot)
        return len(self.tensors) - 1

    def operand(self, name: str, x: Tensor) -> int:
        """Add a bias or mask, and return its index."""
        check_tensor(name, x, may_be_causal=True)
        if is_causal_bias(x):
            raise NotImplementedError(f"{name}: a CausalBias is not taken here; pass causal=True")
        self._same_device(name, x)
        if x.dim() > 4:
            raise ValueError(f"{name}: expected at most 4 dimensions, got shape {shape_of(x)}")
        four = x[(None,) * (4 - x.dim())]
        m, n = four.shape[2:]
        if (m, n) == (self.queries, self.all_keys):
            return self.put(four, Slot(name, 1, 2, None, 3))
        if (m, n) == (self.queries, 1):
            return self.put(four, Slot(name, 1, 2))
        if (m, n) == (1, self.keys):
            return self.put(four, Slot(name, 1, None, 3))
        if (m, n) == (1, 1):
            return self.put(four, Slot(name, 1))
        raise ValueError(
            f"{name}: shape {shape_of(x)} is not one of this rank's {self.queries} queries and all {self.all_keys} "
            f"keys (.., {self.queries}, {self.all_keys}), of its queries alone (.., {self.queries}, 1), of its "
            f"{self.keys} keys alone (.., 1, {self.keys}), or (.., 1, 1)"
        )

    def sink(self, x: Tensor) -> int:
        self._same_device("sink", x)
        if x.dim() == 1:
            return self.put(x, Slot("sink", 0))
        if x.dim() != 3 or x.shape[2] not in (1, self.queries):
            raise ValueError(
                f"sink: expected one logit for each head, (H|1,), or for each of this rank's queries, "
                f"(B|1, H|1, {self.queries}|1), got shape {shape_of(x)}"
            )
        return self.put(x, Slot("sink", 1, None if x.shape[2] == 1 else 2))

    def term(self, term: Term) -> Piece:
        if isinstance(term, T5Bias):
            return Piece(term, {"table": self.put(term.table, Slot("T5Bias.table", 1))})
        if isinstance(term, Alibi):
            return Piece(term, {"slopes": self.put(term.slopes, Slot("Alibi.slopes", term.slopes.dim() - 1))})
        if isinstance(term, LowRankBias):
            self._length("LowRankBias.u", term.u, self.queries)
            self._length("LowRankBias.w", term.w, self.keys)
            u, w = term.u, term.w
            if self.tensors[0].dtype != torch.float64:
                u, w = autocast(u, w)
            at = self.put(u, Slot("LowRankBias.u", 1, 2)), self.put(w, Slot("LowRankBias.w", 1, None, 2))
            return Piece(term, dict(zip("uw", at, strict=True)))
        if isinstance(term, RelativeBias):
            values, name = term.values, "RelativeBias.values"
            if values.dim() != 4:
                raise NotImplementedError(f"{name}: packed batches are not taken here, got shape {shape_of(values)}")
            if values.shape[2] == 1:
                return Piece(term, {"values": self.put(values, Slot(name, 1))})
            on_query = term.on == "query"
            self._length(name, values, self.queries if on_query else self.keys)
            slot = Slot(name, 1, 2) if on_query else Slot(name, 1, None, 2)
            return Piece(term, {"values": self.put(values, slot)})
        raise NotImplementedError(f"bias: {type(term).__name__} is not taken by {self.function}")

    def pieces(self, bias: Any) -> list[Piece]:
        found: list[Piece] = []
        for part in () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,):
            if is_dtensor(part):
                raise NotImplementedError(f"bias: {self.function} takes no DTensor; pass this rank's shard")
            if isinstance(part, Term):
                found.append(self.term(part))
            else:
                found.append(Piece(None, {"": self.operand("bias", part)}))
        return found

    def _length(self, name: str, x: Tensor, length: int) -> None:
        if x.shape[2] != length:
            raise ValueError(f"{name}: expected this rank's {length} rows, got shape {shape_of(x)}")

    def _same_device(self, name: str, x: Tensor) -> None:
        if x.device != self.tensors[0].device:
            raise ValueError(f"{name}: must be on q's device {self.tensors[0].device}, got {x.device}")


def read(
    qkv: tuple[Tensor, Tensor, Tensor], bias: Any, mask: Tensor | None, sink: Tensor | None, ranks: Ranks,
    options: CallOptions, dropout_seed: Seed = None,
) -> tuple[ShardedCall, list[Tensor]]:  # fmt: skip
    """Return the call and its tensors, checked as far as one rank can."""
    given = {**dict(zip("qkv", qkv, strict=True)), "bias": bias, "mask": mask, "sink": sink}
    for name, x in given.items():
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: {FUNCTION} takes no DTensor; pass this rank's shard, {name}.to_local()")
    if isinstance(mask, TileMask) or is_block_mask(mask):
        raise NotImplementedError(
            f"mask: {FUNCTION} takes no {type(mask).__name__} yet, whose tiles are those of all rows; pass this rank's "
            "rows of a bool mask"
        )
    check_inputs(*qkv, bias, mask, sink)
    check_qkv(*qkv)
    check_numbers(options.window, dropout_p=options.dropout_p, scale=options.scale, softcap=options.softcap)
    check_flag("causal", options.causal)
    if dropout_seed is not None:
        check_dropout_seed(dropout_seed, qkv[0])
    q, k, v = autocast(*qkv)
    _check_lengths(q, k, ranks, alone=bias is None and mask is None and sink is None)
    reader = Reader(q, k, v, ranks)
    pieces = reader.pieces(bias)
    mask_at = None if mask is None else reader.operand("mask", mask)
    sink_at = None if sink is None else reader.sink(sink)
    B, H, M, _ = q.shape
    sizes = Sizes(B, H, k.shape[1], M * ranks.size, k.shape[2] * ranks.size)
    seed, drawn = None, False
    if options.dropout_p:
        drawn = dropout_seed is None
        seed = drawn_seed(q) if dropout_seed is None else seed_tensor(dropout_seed, q.device)
    call = ShardedCall(ranks, sizes, options, tuple(reader.slots), tuple(pieces), mask_at, sink_at, seed, drawn)
    return call, reader.tensors


def _check_lengths(q: Tensor, k: Tensor, ranks: Ranks, alone: bool) -> None:
    for name, x in (("q", q), ("k", k)):
        length, pieces = x.shape[2], ranks.split.pieces
        if x.numel() == 0:
            raise ValueError(f"{name}: a shard needs one element or more, got shape {shape_of(x)}")
        if length % pieces:
            raise ValueError(f"{name}: with load_balancer='head_tail' a shard has an even length, got {length}")
        if not alone and ranks.size > 1 and length == 1:
            raise ValueError(
                f"{name}: a shard of one row does not tell a bias, mask or sink of that row from one for all rows; it "
                f"needs 2 or more, got shape {shape_of(x)}"
            )
