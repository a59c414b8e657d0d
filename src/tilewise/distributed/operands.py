"""A call on shards: its tensors with the axes along which they are split, and the local calls that it is made of.

A tensor is this rank's rows where it has an axis of queries, travels with K where it has one of this rank's keys, and
else is the same on every rank. Positions are those of the whole sequence: a local call gets them by its band, and its
bias terms by where their queries and keys begin.
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
KEY_STEP = 256  # no tile of keys is larger: what is cut off are whole tiles, and addresses stay as aligned as they were
GROUP_FLOPS = 4e12


class CallOptions(NamedTuple):
    """The arguments of a call that are no tensors."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    deterministic: bool | None
    backend: str | None
    dropout_p: float = 0.0


class Slot(NamedTuple):
    """A tensor's name and axes; None for one that it has not, or along which it broadcasts.

    heads: query or key/value heads. rows: this rank's queries. keys: this rank's keys. columns: all keys.
    """

    name: str
    heads: int | None = None
    rows: int | None = None
    keys: int | None = None
    columns: int | None = None

    @property
    def replicated(self) -> bool:
        """The same on every rank."""
        return self.rows is None and self.keys is None


class Piece(NamedTuple):
    """One of the tensors and terms of ``bias=``: the term, and which tensors are its fields; of a tensor, "" is it."""

    term: Term | None
    fields: dict[str, int]


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """sizes: of the whole sequence. slots: of the tensors, q, k, v first; then, by their places among them, those of
    the bias in ``pieces``, mask and sink; the seed is none of them."""

    ranks: Ranks
    sizes: Sizes
    options: CallOptions
    slots: tuple[Slot, ...]
    pieces: tuple[Piece, ...]
    mask: int | None
    sink: int | None
    seed: Tensor | None = None  # of dropout
    drawn: bool = False  # the seed, by this rank, so that the first rank's is taken

    @property
    def queries(self) -> int:
        return self.sizes.M // self.ranks.size

    @property
    def keys(self) -> int:
        return self.sizes.N // self.ranks.size

    @property
    def band(self) -> Band:
        """Of causal and window, for the whole sequence: the last query sees the last key."""
        return Band.aligned(self.options.causal, self.options.window, self.sizes.N - self.sizes.M)

    @property
    def row_chunks(self) -> tuple[Chunk, ...]:
        """Of this rank's queries, those of one local call each."""
        return self.ranks.chunks(self.queries)

    def keeps_low_bits(self, dtype: torch.dtype) -> bool:
        """Whether its outputs in this dtype have low bits."""
        return keeps_low_bits(dtype, dropout.threshold(self.options.dropout_p))

    def seen_keys(self, query: Chunk) -> Chunk:
        """Of all keys those that these queries see, in whole `KEY_STEP`s; some if they see none."""
        band, last = local_band(self.band, query.start, 0), self.sizes.N - 1
        first = 0 if band.lo is None else min(max(band.lo, 0), last) // KEY_STEP * KEY_STEP
        end = last if band.hi is None else min(max(query.length - 1 + band.hi, first), last)
        end = min(end // KEY_STEP * KEY_STEP + KEY_STEP, last + 1)
        return Chunk(first, first, end - first)

    def pairs(self, rank: int) -> int:
        """Visible to that rank's queries, of all batch elements and heads."""
        chunks = self.ranks.split.chunks(rank, self.queries)
        seen = sum(visible_pairs(x.length, self.sizes.N, local_band(self.band, x.start, 0)) for x in chunks)
        return self.sizes.B * self.sizes.H * seen

    @property
    def hop_pairs(self) -> int:
        """Of this rank's queries and another's keys, for all batch elements and heads."""
        return self.sizes.B * self.sizes.H * self.queries * self.keys

    @property
    def group_flops(self) -> float:
        """Of a forward on one rank, that heads which are computed apart have at least: about 7 ms of a Hopper GPU. Of
        less, the last programs of a launch leave more of the GPU idle than collectives take."""
        return GROUP_FLOPS

    def declines(self, method: str) -> str | None:
        """Why that method cannot run the call; None if it can."""
        for name, heads in (("query heads", self.sizes.H), ("key/value heads", self.sizes.Hkv)):
            if method == "all_to_all" and heads % self.ranks.size:
                return f"the {heads} {name} do not divide by {self.ranks.size} ranks"
        return None

    @property
    def causal_alone(self) -> bool:
        """Whether each query sees the keys up to its own and nothing else depends on positions: no matrix, no term
        that counts distances, no dropout."""
        counts = any(piece.term is not None and not isinstance(piece.term, LowRankBias) for piece in self.pieces)
        columns = any(slot.columns is not None for slot in self.slots)
        return self.band == Band(None, 0) and not (counts or columns or self.options.dropout_p)

    @property
    def seen(self) -> SeenKeys | None:
        """Of a packed batch the keys that local calls have: not all."""
        return None

    def is_local(self, query: Chunk) -> bool:
        """Whether these are all rows of the shard, with this rank's keys alone: of a packed batch the sequences that no
        other rank has, beside which the rows of others come to nothing."""
        return False

    @property
    def sent_share(self) -> float:
        """Of its keys, what a rank of a gathering call sends."""
        return 1.0

    @property
    def moving(self) -> list[int]:
        """Which tensors go with the keys."""
        return [n for n, slot in enumerate(self.slots) if slot.keys is not None]

    # --- local calls ---

    def local(
        self, tensors: Sequence[Tensor], query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0
    ) -> Call:
        """Of tensors that hold these queries and keys, and the heads from ``first_head`` on; and of bands and terms
        nothing but their numbers changed."""
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
        if lse is None:  # nobody looks at it
            lse = o.new_empty(0, dtype=lse_dtype(o.dtype))
        return o, lse

    def outputs(
        self, tensors: Sequence[Tensor], query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0
    ) -> Outputs:
        """The same without a derivative, with the low bits of o."""
        inputs, score, deterministic, backend = self.local(tensors, query, key, sink=sink, first_head=first_head)
        return attention_outputs(inputs, score, deterministic, backend)

    # --- parts of tensors ---

    def cut_rows(self, n: int, x: Tensor, query: Chunk) -> Tensor:
        axis = self.slots[n].rows
        return x if axis is None else x.narrow(axis, query.local, query.length)

    def cut_one(self, n: int, x: Tensor, query: Chunk, key: Chunk) -> Tensor:
        """A view of ``x``, which is laid out as tensor ``n``: what these queries and keys have of it."""
        slot, x = self.slots[n], self.cut_rows(n, x, query)
        if slot.keys is not None:
            x = x.narrow(slot.keys, key.local, key.length)
        return x if slot.columns is None else x.narrow(slot.columns, key.start, key.length)

    def cut(self, tensors: Sequence[Tensor], query: Chunk, key: Chunk) -> list[Tensor]:
        return [self.cut_one(n, x, query, key) for n, x in enumerate(tensors)]

    def accumulator(self, n: int, x: Tensor) -> Tensor:
        """Zeros for the gradient of tensor ``n``, in float32 for 16 bits; a matrix's, of which each element gets one
        number only, in its own dtype."""
        dtype = x.dtype if self.slots[n].columns is not None else wide(x.new_empty(0)).dtype
        return torch.zeros(x.shape, dtype=dtype, device=x.device)


# --- reading ---


class Reader:
    """Collects tensors and their slots; every error names the argument, what came and what is allowed."""

    function = FUNCTION

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.all_keys = self.keys * ranks.size
        self.tensors: list[Tensor] = [q, k, v]
        self.slots = [Slot("q", 1, 2), Slot("k", 1, None, 2), Slot("v", 1, None, 2)]

    def put(self, x: Tensor, slot: Slot) -> int:
        self.tensors.append(x)
        # An axis of size 1 has no heads to split.
        single = slot.heads is not None and x.shape[slot.heads] == 1
        self.slots.append(slot._replace(heads=None) if single else slot)
        return len(self.tensors) - 1

    def operand(self, name: str, x: Tensor) -> int:
        """A bias or mask."""
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
    """The call and its tensors, checked as far as one rank can."""
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
