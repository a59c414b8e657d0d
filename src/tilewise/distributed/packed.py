"""Context parallelism of packed batches: `context_parallel_varlen_attention` and its calls on shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.bias import LowRankBias, RelativeBias
from tilewise.bias.packed import RaggedBias
from tilewise.bias.terms import Term, shape_of
from tilewise.distributed.agreement import Description, agree, agreed
from tilewise.distributed.api import check_method, described
from tilewise.distributed.documents import Documents, Part, SeenKeys, packed_ranks, read_offsets
from tilewise.distributed.layout import Chunk, LoadBalancer, Ranks
from tilewise.distributed.methods import attend
from tilewise.distributed.operands import CallOptions, Piece, Reader, ShardedCall, Slot
from tilewise.distributed.plan import ContextParallelPlan, make_plan
from tilewise.frontend.arguments import Bias, Call, Seed, Window, check_dropout_seed, check_inputs, seed_tensor
from tilewise.frontend.autocast import autocast
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.frontend.varlen import read_packed
from tilewise.operator.dispatch import describe
from tilewise.operator.seed import drawn_seed
from tilewise.planner import check_backend
from tilewise.spec import dropout
from tilewise.spec.checks import check_flag
from tilewise.spec.operands import Sizes
from tilewise.spec.score import ScoreNumbers, check_numbers
from tilewise.spec.tensors import check_tensor, is_dtensor

FUNCTION = "context_parallel_varlen_attention"
GROUP_FLOPS = 5e11  # about 1 ms of a Hopper GPU; launches of short sequences have short tails
CPU = torch.device("cpu")
PackedMethod = Literal["auto", "all_gather", "all_to_all"]


@named_only
def context_parallel_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    mesh: DeviceMesh,
    bias: Bias = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    load_balancer: Literal["document"] | None = None,
    method: PackedMethod = "auto",
    deterministic: bool | None = None,
    backend: str | None = None,
    validate: bool = False,
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `tilewise.varlen_attention` of a packed batch whose tokens are split over the ranks of a mesh.

    A collective like `context_parallel_attention`, which documents the other arguments.

    Args:
        q, k, v: this rank's tokens, (T / ranks, H, D), (T / ranks, Hkv, D) and (T / ranks, Hkv, Dv), of T on all ranks.
        cu_seqlens: (B + 1,), ints, of the whole batch and equal on all ranks: where sequences begin, and T. A tensor on
            the CPU, or a sequence of ints; a tensor on a GPU synchronizes the host once.
        bias: tensors along the keys, (1|H, T / ranks), or the queries, (1|H, T / ranks, 1), split like the tokens;
            terms of `tilewise.bias`, with values (T / ranks, H, R), u and w (1, H, T / ranks, r).
        sink: (H,), equal on all ranks, or one for each of this rank's queries, (1|H, T / ranks).
        load_balancer: how `shard` with ``cu_seqlens`` split the tokens. None: contiguous parts. "document": each
            sequence on one rank, but the longest with a head and a tail on every rank, so that all ranks have equally
            many tokens and about equally many visible pairs.
        method: "all_gather" gathers keys and values; it supports windows and terms that count positions in causal calls
            alone, and no dropout. "all_to_all" trades tokens for heads and supports all of these. "auto": see
            `explain_context_parallel`.

    A mask, a padded bias, `RaggedBias` and the ring are not supported.

    Returns:
        o (T / ranks, H, Dv), split like q; with ``return_lse`` also lse (H, T / ranks).

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        NotImplementedError: an argument that is not supported, by name.
    """
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    given = {"bias": bias, "sink": sink, "dropout_seed": dropout_seed}
    o, lse = _run(
        mesh, load_balancer, cu_seqlens, (q, k, v), given, options, unknown, method=method, validate=validate,
        return_lse=return_lse,
    )  # fmt: skip
    o = o.squeeze(0).transpose(0, 1)
    return (o, lse.squeeze(0)) if return_lse else o


@torch.compiler.disable  # a graph break: collectives in an autograd.Function cannot be traced
def _run(
    mesh: DeviceMesh, load_balancer: LoadBalancer, cu_seqlens: Any, qkv: tuple[Tensor, Tensor, Tensor],
    given: dict[str, Any], options: CallOptions, unknown: dict[str, Any],
    *, method: str, validate: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = Ranks.of(mesh, None)
    failure: Exception | None = None
    description: Description | None = None
    chosen: str | None = None
    offsets: tuple[int, ...] = ()
    try:
        if unknown:
            raise unexpected(FUNCTION, unknown)
        check_flag("validate", validate)
        check_flag("return_lse", return_lse)
        check_method(method)
        offsets = read_offsets("cu_seqlens", cu_seqlens)
        ranks = packed_ranks(mesh, load_balancer, offsets, ranks)
        call, tensors = read(qkv, given["bias"], given["sink"], ranks, options, given["dropout_seed"])
        description = described(call, tensors, method, return_lse)
        chosen = agreed(ranks, description)
        known = chosen is not None
        if not known or validate:
            _check_locally(call, tensors)
            chosen = make_plan(call, tensors, method).method
    except (ValueError, TypeError, NotImplementedError) as error:
        failure, known = error, False
    if not known or validate:
        agree(ranks, description, chosen, failure, beside=(("cu_seqlens", offsets),))
    assert chosen is not None
    return attend(chosen, call, tensors, return_lse)


@named_only
def explain_context_parallel_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    mesh: DeviceMesh,
    bias: Bias = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    load_balancer: Literal["document"] | None = None,
    method: PackedMethod = "auto",
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> ContextParallelPlan:
    """Return the plan of `context_parallel_varlen_attention`; see `explain_context_parallel`. Windows do not count.

    Raises:
        ValueError, TypeError, NotImplementedError: like the call on this rank.
    """
    if unknown:
        raise unexpected("explain_context_parallel_varlen", unknown)
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    ranks = packed_ranks(mesh, load_balancer, read_offsets("cu_seqlens", cu_seqlens))
    call, tensors = read((q, k, v), bias, sink, ranks, options, dropout_seed)
    check_method(method)
    _check_locally(call, tensors)
    return make_plan(call, tensors, method)


@dataclass(frozen=True, eq=False)
class PackedCall(ShardedCall):
    """A call on shards of a packed batch; q, k, v and o are (1, H, tokens, D), as in backends. A chunk of rows is one
    of `Documents.parts`; keys are this rank's, `SeenKeys`, or for all_to_all all keys."""

    device: torch.device = CPU

    @property
    def documents(self) -> Documents:
        found = self.ranks.split
        assert isinstance(found, Documents)
        return found

    @property
    def row_chunks(self) -> tuple[Chunk, ...]:
        return tuple(part.chunk for part in self.documents.parts(self.ranks.rank, self.options.causal, self.device))

    def _part(self, query: Chunk) -> Part:
        if query.length == self.sizes.M > self.queries:  # all tokens, of some heads
            return self.documents.whole(self.device)
        return self.documents.parts(self.ranks.rank, self.options.causal, self.device)[query.start]

    @property
    def seen(self) -> SeenKeys:
        return self.documents.seen(self.ranks.rank, self.device)

    @property
    def sent_share(self) -> float:
        return self.documents.sent_share

    def is_local(self, query: Chunk) -> bool:
        return self._part(query).is_local

    def seen_keys(self, query: Chunk) -> Chunk:
        return Chunk(0, 0, self.keys if self.is_local(query) else self.seen.count)

    def pairs(self, rank: int) -> int:
        """Return the number of visible pairs of that rank's queries, over heads; windows do not count."""
        return self.sizes.H * self.documents.pairs(rank, self.options.causal)

    @property
    def hop_pairs(self) -> int:
        return self.pairs(self.ranks.rank) // self.ranks.size

    @property
    def group_flops(self) -> float:
        """Return the least forward FLOPs of a group on one rank: more if there is less to send, which groups hide."""
        share = self.sent_share
        return GROUP_FLOPS / share if share else math.inf

    def declines(self, method: str) -> str | None:
        if method == "ring":
            return "it takes no packed batches"
        if method == "all_gather":
            if self.options.dropout_p:
                return "dropout counts positions from the start of each sequence, of which a rank has only parts"
            causal = self.options.causal
            if not causal and self.options.window is not None:
                return "a window of a packed batch is to end with the query: causal=True"
            for piece in self.pieces:
                start = getattr(piece.term, "query_start", None)
                if (
                    piece.term is not None
                    and not isinstance(piece.term, LowRankBias)
                    and (
                        not causal or start is not None or piece.term.key_start != 0  # type: ignore[attr-defined]
                    )
                ):
                    name = type(piece.term).__name__
                    return f"{name} of a packed batch counts from the last query and key: causal=True, and no start"
        return super().declines(method)

    def local(
        self, tensors: Sequence[Tensor], query: Chunk, key: Chunk, *, sink: bool = True, first_head: int = 0
    ) -> Call:
        part = self._part(query)
        bias: list[Any] = []
        for piece in self.pieces:
            if piece.term is None:
                bias.append(tensors[piece.fields[""]])
            else:
                fields: Any = {name: tensors[n] for name, n in piece.fields.items()}
                bias.append(dataclasses.replace(piece.term, **fields))  # type: ignore[type-var]
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in tensors[:3])
        call = read_packed(
            q, k, v, part.lengths, part.longest,
            bias=None if not bias else bias[0] if len(bias) == 1 else tuple(bias),
            sink=tensors[self.sink] if sink and self.sink is not None else None,
            dropout_seed=self.seed,
            **self.options._asdict(),
        )  # fmt: skip
        if not call.score.dropout:
            return call
        return call._replace(score=dataclasses.replace(call.score, origin=dropout.Origin(head=first_head)))


# --- reading ---


class _Reader(Reader):
    """The reader of packed tensors; q, k and v are as in `PackedCall`."""

    function = FUNCTION

    def operand(self, name: str, x: Tensor) -> int:
        check_tensor(name, x)
        self._same_device(name, x)
        x = x[None] if x.dim() == 1 else x
        if x.dim() == 2 and x.shape[1] == self.keys:
            return self.put(x, Slot(name, 0, None, 1))
        if x.dim() == 3 and x.shape[1:] == (self.queries, 1):
            return self.put(x, Slot(name, 0, 1))
        if x.dim() == 4:
            raise NotImplementedError(f"{name}: {FUNCTION} takes no padded tensor, got shape {shape_of(x)}")
        raise ValueError(
            f"{name}: shape {shape_of(x)} is neither along this rank's keys, (1|H, {self.keys}), nor along its "
            f"queries, (1|H, {self.queries}, 1)"
        )

    def sink(self, x: Tensor) -> int:
        self._same_device("sink", x)
        if x.dim() == 1:
            return self.put(x, Slot("sink", 0))
        if x.dim() != 2 or x.shape[1] != self.queries:
            raise ValueError(
                f"sink: expected one logit for each head, (H|1,), or for each of this rank's queries, "
                f"(1|H, {self.queries}), got shape {shape_of(x)}"
            )
        return self.put(x, Slot("sink", 0, 1))

    def term(self, term: Term) -> Piece:
        if isinstance(term, RaggedBias):
            raise NotImplementedError(f"bias: RaggedBias is not taken by {FUNCTION}: its pairs have no rows to split")
        if not isinstance(term, RelativeBias) or (term.values.dim() == 4 and term.values.shape[2] == 1):
            return super().term(term)
        values, name, on_query = term.values, "RelativeBias.values", term.on == "query"
        rows = self.queries if on_query else self.keys
        if values.dim() != 3 or values.shape[0] != rows:
            raise ValueError(f"{name}: expected this rank's tokens, ({rows}, H|Hkv|1, R), got shape {shape_of(values)}")
        return Piece(term, {"values": self.put(values, Slot(name, 1, 0) if on_query else Slot(name, 1, None, 0))})


def read(
    qkv: tuple[Tensor, Tensor, Tensor], bias: Any, sink: Tensor | None, ranks: Ranks, options: CallOptions,
    dropout_seed: Seed,
) -> tuple[PackedCall, list[Tensor]]:  # fmt: skip
    """Return the call and its tensors, checked as far as one rank can."""
    for name, x in {**dict(zip("qkv", qkv, strict=True)), "bias": bias, "sink": sink}.items():
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: {FUNCTION} takes no DTensor; pass this rank's shard, {name}.to_local()")
    check_inputs(*qkv, bias, None, sink)
    check_numbers(options.window, dropout_p=options.dropout_p, scale=options.scale, softcap=options.softcap)
    check_flag("causal", options.causal)
    if dropout_seed is not None:
        check_dropout_seed(dropout_seed, qkv[0])
    rows = ranks.split.offsets[-1] // ranks.size
    for name, x in zip("qkv", qkv, strict=True):
        if x.dim() != 3 or x.shape[0] != rows or x.numel() == 0:
            raise ValueError(
                f"{name}: expected this rank's {rows} of the {ranks.split.offsets[-1]} tokens of cu_seqlens, "
                f"({rows}, heads, head_dim), got shape {shape_of(x)}"
            )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in autocast(*qkv))
    reader = _Reader(q, k, v, ranks)
    pieces = reader.pieces(bias)
    sink_at = None if sink is None else reader.sink(sink)
    seed = None
    if options.dropout_p:
        seed = drawn_seed(q) if dropout_seed is None else seed_tensor(dropout_seed, q.device)
    tokens = rows * ranks.size
    sizes = Sizes(1, q.shape[1], k.shape[1], tokens, tokens)
    call = PackedCall(
        ranks, sizes, options, tuple(reader.slots), tuple(pieces), None, sink_at, seed, dropout_seed is None, q.device
    )
    return call, reader.tensors


def _check_locally(call: PackedCall, tensors: list[Tensor]) -> None:
    """Raise any error of a local call before anything is sent; other ranks' keys are views without memory."""
    check_backend(call.options.backend)
    device = tensors[0].device.type
    if device != call.ranks.device:
        raise ValueError(f"q: must be on the mesh's device {call.ranks.device}, got {device}")
    query = call.row_chunks[0]
    whole = []
    for x, slot in zip(tensors, call.slots, strict=True):
        if slot.keys is not None:
            shape = list(x.shape)
            shape[slot.keys] = call.sizes.N
            x = x.narrow(slot.keys, 0, 1).expand(shape)
        whole.append(x)
    key = call.seen_keys(query)
    local = call.local(call.cut(whole, query, key), query, key)
    describe(local.inputs, ScoreNumbers.of(local.score, local.deterministic, local.backend))
