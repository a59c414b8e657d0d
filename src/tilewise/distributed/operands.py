"""Calls on shards: tensors with the axes along which they are split, and the local calls.

A tensor with an axis of queries has this rank's rows, one with an axis of this rank's keys moves with K, and others
are equal on all ranks. Positions are those of the whole sequence: local calls have shifted windows, and bias terms
have the positions of their first query and key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Outputs
from tilewise.bias import Alibi, LowRankBias, RelativeBias, T5Bias
from tilewise.bias.packed import RaggedBias
from tilewise.bias.terms import Term, shape_of, wide
from tilewise.distributed.documents import Documents, SeenKeys
from tilewise.distributed.layout import AllKeys, Chunk, Ranks, Tensors
from tilewise.frontend.arguments import Bias, Call, Seed, check_dropout_seed, check_inputs, read_call, seed_tensor
from tilewise.frontend.autocast import autocast
from tilewise.frontend.keywords import unexpected
from tilewise.frontend.varlen import read_packed
from tilewise.masks.block_sparse import TileMask, is_block_mask
from tilewise.operator.autograd import attention_outputs
from tilewise.operator.seed import drawn_seed
from tilewise.spec import dropout
from tilewise.spec.checks import check_flag, check_qkv
from tilewise.spec.operands import Sizes
from tilewise.spec.rounding import keeps_low_bits
from tilewise.spec.score import Band, Window, check_numbers
from tilewise.spec.tensors import check_tensor, is_causal_bias, is_dtensor
from tilewise.spec.tiles import visible_pairs

FUNCTION, PACKED_FUNCTION = "context_parallel_attention", "context_parallel_varlen_attention"
KEY_STEP = 256  # no tile of keys is larger, so cuts are at whole tiles and addresses stay aligned
# About 7 ms of a Hopper GPU. With fewer, the tails of launches leave more of the GPU idle than collectives take.
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


class Arguments(NamedTuple):
    """The arguments of a call on shards, as given."""

    qkv: tuple[Tensor, Tensor, Tensor]
    bias: Bias
    mask: Tensor | None
    sink: Tensor | None
    dropout_seed: Seed
    options: CallOptions
    unknown: dict[str, Any]  # keywords
    method: str = "auto"
    validate: bool = False
    return_lse: bool = True
    function: str = FUNCTION  # of which errors speak

    def refuse(self) -> None:
        """Raise an error that names an unknown keyword."""
        for name in self.unknown:
            if self.function == FUNCTION and name.startswith(("cu_seqlens", "seqused", "max_seqlen")):
                raise NotImplementedError(f"{name}: {FUNCTION} takes no packed batches: {PACKED_FUNCTION}")
            raise unexpected(self.function, self.unknown)


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
        return self.split is None

    @property
    def split(self) -> int | None:
        """Return the axis along which the tensor is split."""
        return self.rows if self.rows is not None else self.keys


class Piece(NamedTuple):
    """One of the tensors and terms of ``bias=``, with indices of its tensors by field name; a tensor's name is ""."""

    term: Term | None
    fields: dict[str, int]


@dataclass(frozen=True, eq=False)
class ContextParallelCall:
    """A call on shards of a sequence or of a packed batch: its options, and the axes of its tensors. Of a packed batch
    q, k, v and o are (1, H, tokens, D), as in backends."""

    ranks: Ranks
    sizes: Sizes  # of the whole sequence, or batch
    options: CallOptions
    slots: tuple[Slot, ...]  # of q, k, v, then of bias, mask and sink
    pieces: tuple[Piece, ...]  # of the bias
    mask: int | None  # index of the tensor
    sink: int | None
    device: torch.device
    seed: Tensor | None = None  # of dropout; has no slot
    drawn: bool = False  # this rank drew the seed; the first rank's is used

    @property
    def queries(self) -> int:
        return self.sizes.M // self.ranks.size

    @property
    def keys(self) -> int:
        return self.sizes.N // self.ranks.size

    @property
    def documents(self) -> Documents | None:
        """Return the split of a packed batch; None for a sequence."""
        return self.ranks.split if isinstance(self.ranks.split, Documents) else None

    @property
    def seen(self) -> AllKeys | SeenKeys:
        """Return the keys that local calls have after a gathering."""
        split = self.ranks.split
        return AllKeys(split, self.sizes.N) if self.documents is None else split.seen(self.ranks.rank, self.device)

    @property
    def band(self) -> Band:
        """Return the window of the whole sequence, where the last query sees the last key."""
        return Band.aligned(self.options.causal, self.options.window, self.sizes.N - self.sizes.M)

    @property
    def row_chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks of this rank's queries; each is one local call."""
        if self.documents is not None:
            return self.documents.parts(self.ranks.rank, self.options.causal, self.device)
        return self.ranks.chunks(self.queries)

    @property
    def everything(self) -> tuple[Chunk, Chunk]:
        """Return all queries and all keys, as one call."""
        keys = Chunk(0, 0, self.sizes.N)
        return (Chunk(0, 0, self.sizes.M) if self.documents is None else self.documents.whole(self.device)), keys

    def keeps_low_bits(self, dtype: torch.dtype) -> bool:
        """True if outputs in this dtype have low bits."""
        return keeps_low_bits(dtype, dropout.threshold(self.options.dropout_p))

    def seen_keys(self, query: Chunk) -> Chunk:
        """Return the keys that these queries see, in whole `KEY_STEP`s; some if they see none. Of a packed batch the
        keys are this rank's, or `seen`."""
        if self.documents is not None:
            return Chunk(0, 0, self.keys if query.is_local else self.seen.count)
        band, last = self.band.shifted(query.start), self.sizes.N - 1
        first = 0 if band.lo is None else min(max(band.lo, 0), last) // KEY_STEP * KEY_STEP
        end = last if band.hi is None else min(max(query.length - 1 + band.hi, first), last)
        end = min(end // KEY_STEP * KEY_STEP + KEY_STEP, last + 1)
        return Chunk(first, first, end - first)

    def pairs(self, rank: int) -> int:
        """Return the number of visible pairs of that rank's queries, over batch and heads. Windows of packed batches do
        not count."""
        if self.documents is not None:
            return self.sizes.H * self.documents.pairs(rank, self.options.causal)
        chunks = self.ranks.split.chunks(rank, self.queries)
        seen = sum(visible_pairs(x.length, self.sizes.N, self.band.shifted(x.start)) for x in chunks)
        return self.sizes.B * self.sizes.H * seen

    def flops(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the forward FLOPs of each rank."""
        q, _, v = tensors[:3]
        return tuple(2 * (q.shape[3] + v.shape[3]) * self.pairs(rank) for rank in range(self.ranks.size))

    @property
    def group_flops(self) -> float:
        """Return the least forward FLOPs of a group of heads on one rank."""
        return GROUP_FLOPS if self.documents is None else self.documents.group_flops

    @property
    def causal_alone(self) -> bool:
        """True if queries see the keys up to their own, and no matrix, term or dropout depends on positions."""
        counts = any(piece.term is not None and not isinstance(piece.term, LowRankBias) for piece in self.pieces)
        columns = any(slot.columns is not None for slot in self.slots)
        return self.band == Band(None, 0) and not (counts or columns or self.options.dropout_p)

    @property
    def moving(self) -> dict[int, int]:
        """Return the index of each tensor that moves with the keys, and its axis of keys."""
        return {n: slot.keys for n, slot in enumerate(self.slots) if slot.keys is not None}

    # --- local calls ---

    def local(self, tensors: Tensors, query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0) -> Call:
        """Return the local call of tensors that hold these queries and keys, and the heads from ``first_head`` on. Only
        numbers of windows and terms differ from those of the whole call."""
        bias: list[Any] = []
        for piece in self.pieces:
            if piece.term is None:
                bias.append(tensors[piece.fields[""]])
                continue
            fields: dict[str, Any] = {name: tensors[n] for name, n in piece.fields.items()}
            if query.lengths is None and not isinstance(piece.term, LowRankBias):
                at: Any = piece.term
                first = self.sizes.N - self.sizes.M if at.query_start is None else at.query_start
                fields |= {"query_start": first + query.start, "key_start": at.key_start + key.start}
            bias.append(replace(piece.term, **fields))  # type: ignore[type-var]
        given: dict[str, Any] = {
            **self.options._asdict(),
            "bias": None if not bias else bias[0] if len(bias) == 1 else tuple(bias),
            "mask": None if self.mask is None else tensors[self.mask],
            "sink": tensors[self.sink] if sink and self.sink is not None else None,
            "dropout_seed": self.seed,
        }
        if query.lengths is not None:
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in tensors[:3])
            call = read_packed(q, k, v, query.lengths, query.longest, **given)
            band, origin = call.score.band, dropout.Origin(head=first_head)
        else:
            call = read_call(*tensors[:3], **given | {"causal": False, "window": None})
            band = call.score.band.both(self.band.shifted(query.start - key.start))
            origin = dropout.Origin(query.start, key.start, first_head)
        score = replace(call.score, band=band, origin=origin if call.score.dropout else call.score.origin)
        return call._replace(score=score)

    def outputs(self, tensors: Tensors, query: Chunk, key: Chunk, *, saved_lse: bool = False, **more: Any) -> Outputs:
        """Return the outputs of these queries and keys with the low bits of o, without a derivative. ``more``: see
        `local`; ``saved_lse``: see `attention_outputs`."""
        local = self.local(self.cut(tensors, query, key), query, key, **more)
        return attention_outputs(*local, saved_lse=saved_lse)

    # --- views of tensors ---

    def cut_one(self, n: int, x: Tensor, query: Chunk, key: Chunk) -> Tensor:
        """Return the view for these queries and keys of ``x``, which has the axes of tensor ``n``."""
        slot = self.slots[n]
        for axis, first, length in (
            (slot.rows, query.local, query.length), (slot.keys, key.local, key.length),
            (slot.columns, key.start, key.length),
        ):  # fmt: skip
            x = x if axis is None else x.narrow(axis, first, length)
        return x

    def cut(self, tensors: Tensors, query: Chunk, key: Chunk) -> list[Tensor]:
        return [self.cut_one(n, x, query, key) for n, x in enumerate(tensors)]

    def accumulator(self, n: int, x: Tensor) -> Tensor:
        """Return zeros for the gradient of tensor ``n``, in float32 for 16 bits, but in a matrix's own dtype, as each
        of its elements is added to once."""
        dtype = x.dtype if self.slots[n].columns is not None else wide(x.new_empty(0)).dtype
        return torch.zeros(x.shape, dtype=dtype, device=x.device)


# --- reading ---


class Reader:
    """A list of tensors and their slots; errors name the argument, its value and what is allowed."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.all_keys = self.keys * ranks.size
        self.packed = isinstance(ranks.split, Documents)
        self.function = PACKED_FUNCTION if self.packed else FUNCTION
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
        check_tensor(name, x, may_be_causal=not self.packed)
        if is_causal_bias(x):
            raise NotImplementedError(f"{name}: a CausalBias is not taken here; pass causal=True")
        self._same_device(name, x)
        queries, keys, all_keys, shape = self.queries, self.keys, self.all_keys, shape_of(x)
        forms: dict[tuple[int, ...], Slot]
        if self.packed:
            x = x[None] if x.dim() == 1 else x
            forms = {(keys,): Slot(name, 0, None, 1), (queries, 1): Slot(name, 0, 1)}
            if x.dim() == 4:
                raise NotImplementedError(f"{name}: {self.function} takes no padded tensor, got shape {shape}")
            words = f"neither along this rank's keys, (1|H, {keys}), nor along its queries, (1|H, {queries}, 1)"
        else:
            if x.dim() > 4:
                raise ValueError(f"{name}: expected at most 4 dimensions, got shape {shape}")
            x = x[(None,) * (4 - x.dim())]
            forms = {
                (1, 1): Slot(name, 1), (1, keys): Slot(name, 1, None, 3), (queries, 1): Slot(name, 1, 2),
                (queries, all_keys): Slot(name, 1, 2, None, 3),
            }  # fmt: skip
            words = (
                f"not one of this rank's {queries} queries and all {all_keys} keys (.., {queries}, {all_keys}), of its "
                f"queries alone (.., {queries}, 1), of its {keys} keys alone (.., 1, {keys}), or (.., 1, 1)"
            )
        slot = forms.get(tuple(x.shape[1 if self.packed else 2 :]))
        if slot is None:
            raise ValueError(f"{name}: shape {shape} is {words}")
        return self.put(x, slot)

    def sink(self, x: Tensor) -> int:
        self._same_device("sink", x)
        if x.dim() == 1:
            return self.put(x, Slot("sink", 0))
        rows = 1 if self.packed else 2
        one = not self.packed and x.dim() == 3 and x.shape[2] == 1
        if x.dim() != rows + 1 or (x.shape[rows] != self.queries and not one):
            form = f"1|H, {self.queries}" if self.packed else f"B|1, H|1, {self.queries}|1"
            raise ValueError(
                f"sink: expected one logit for each head, (H|1,), or for each of this rank's queries, ({form}), got "
                f"shape {shape_of(x)}"
            )
        return self.put(x, Slot("sink", rows - 1, None if one else rows))

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
            return Piece(term, {"values": self.put(term.values, self._slot_of_values(term))})
        words = ": its pairs have no rows to split" if self.packed and isinstance(term, RaggedBias) else ""
        raise NotImplementedError(f"bias: {type(term).__name__} is not taken by {self.function}{words}")

    def _slot_of_values(self, term: RelativeBias) -> Slot:
        values, name, on_query = term.values, "RelativeBias.values", term.on == "query"
        rows = self.queries if on_query else self.keys
        if values.dim() != 4 and not self.packed:
            raise NotImplementedError(f"{name}: packed batches are not taken here, got shape {shape_of(values)}")
        if values.dim() == 4 and values.shape[2] == 1:
            return Slot(name, 1)
        if not self.packed:
            self._length(name, values, rows)
        elif values.dim() != 3 or values.shape[0] != rows:
            raise ValueError(f"{name}: expected this rank's tokens, ({rows}, H|Hkv|1, R), got shape {shape_of(values)}")
        axis = 0 if self.packed else 2
        return Slot(name, 1, axis) if on_query else Slot(name, 1, None, axis)

    def pieces(self, bias: Any) -> list[Piece]:
        found: list[Piece] = []
        for part in () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,):
            if is_dtensor(part):
                raise NotImplementedError(f"bias: {self.function} takes no DTensor; pass this rank's shard")
            is_term = isinstance(part, Term)
            found.append(self.term(part) if is_term else Piece(None, {"": self.operand("bias", part)}))
        return found

    def _length(self, name: str, x: Tensor, length: int) -> None:
        if x.shape[2] != length:
            raise ValueError(f"{name}: expected this rank's {length} rows, got shape {shape_of(x)}")

    def _same_device(self, name: str, x: Tensor) -> None:
        if x.device != self.tensors[0].device:
            raise ValueError(f"{name}: must be on q's device {self.tensors[0].device}, got {x.device}")


def read(ranks: Ranks, given: Arguments) -> tuple[ContextParallelCall, list[Tensor]]:
    """Return the call and its tensors, checked as far as one rank can."""
    (q, k, v), bias, mask, sink, seed, options = given[:6]
    packed = isinstance(ranks.split, Documents)
    function = PACKED_FUNCTION if packed else FUNCTION
    for name, x in {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sink": sink}.items():
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: {function} takes no DTensor; pass this rank's shard, {name}.to_local()")
    if isinstance(mask, TileMask) or is_block_mask(mask):
        raise NotImplementedError(
            f"mask: {FUNCTION} takes no {type(mask).__name__} yet, whose tiles are those of all rows; pass this rank's "
            "rows of a bool mask"
        )
    check_inputs(q, k, v, bias, mask, sink)
    if not packed:
        check_qkv(q, k, v)
    check_numbers(options.window, dropout_p=options.dropout_p, scale=options.scale, softcap=options.softcap)
    check_flag("causal", options.causal)
    if seed is not None:
        check_dropout_seed(seed, q)
    if packed:
        _check_tokens(given.qkv, ranks)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in autocast(q, k, v))
    else:
        q, k, v = autocast(q, k, v)
        _check_lengths(q, k, ranks, alone=bias is None and mask is None and sink is None)
    reader = Reader(q, k, v, ranks)
    pieces = reader.pieces(bias)
    mask_at = None if mask is None else reader.operand("mask", mask)
    sink_at = None if sink is None else reader.sink(sink)
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2] * ranks.size, k.shape[2] * ranks.size)
    drawn = bool(options.dropout_p) and seed is None
    numbers = None
    if options.dropout_p:
        numbers = drawn_seed(q) if seed is None else seed_tensor(seed, q.device)
    call = ContextParallelCall(
        ranks, sizes, options, tuple(reader.slots), tuple(pieces), mask_at, sink_at, q.device, numbers, drawn
    )
    return call, reader.tensors


def _check_tokens(qkv: tuple[Tensor, Tensor, Tensor], ranks: Ranks) -> None:
    tokens = ranks.split.offsets[-1]
    rows = tokens // ranks.size
    for name, x in zip("qkv", qkv, strict=True):
        if x.dim() != 3 or x.shape[0] != rows or x.numel() == 0:
            raise ValueError(
                f"{name}: expected this rank's {rows} of the {tokens} tokens of cu_seqlens, ({rows}, heads, head_dim), "
                f"got shape {shape_of(x)}"
            )


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
