"""The named cases: what is computed, and at which sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise.spec.operands import PartOperands, TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise_tools.bench import operators, packed, sparse, terms, windows

TOKENS, HIDDEN = 16384, 2048  # of the large GPU cases: batch times length, and heads times head dimension
DROPOUT_SEED = (1, 2)
KINDS = ("BHMN", "1HMN", "B11N")


class CaseInputs(NamedTuple):
    """q (B, H, M, D), k, v (B, Hkv, N, D), bias as `Case.bias` or None, do as the output, sink (H,) or None, term: what
    `terms` trains for a case, or None; all but do are leaves. mask: of keys, bool (B, 1, 1, N), or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    do: Tensor
    sink: Tensor | None = None
    term: Tensor | None = None
    mask: Tensor | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in ("q", "k", "v", "bias", "sink", "term") if getattr(self, name) is not None]

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.bias, self.sink, self.term) if x is not None]


@dataclass(frozen=True)
class Case:
    """One shape of attention; the other operators' are in `operators`, packed batches in `packed`. Those of a
    ``family`` are one curve over their lengths in a picture.

    Attributes:
        bias: shape of an additive bias in ``dtype``; its gradient is part of the backward.
        dtype: of every tensor, as torch names it.
        backward: with gradients of all inputs; without, the forward alone is measured.
        sink: with a trainable attention sink for each head.
        dropout: the share of the probabilities that are dropped; by tilewise with `DROPOUT_SEED`.
        term: one of `terms.NAMES`, a trainable bias that no matrix is made of.
        mask: one of `sparse.NAMES`, which pairs are visible, or what a dynamic mask keeps.
        padded: an eighth of the keys of each batch element, drawn at random, is hidden by a bool mask; all pairs are
            counted as work.
        door: one of `structure.DOORS`, by which it is called beside `tilewise.attention`.
        window: with causal, how many keys a query sees, its own among them.
        host: so small that what it measures is the host's time for a call; it is left out of pictures.
    """

    operator: ClassVar[str] = "attention"

    family: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    bias: tuple[int, int, int, int] | None = None
    dtype: str = "bfloat16"
    backward: bool = True
    host: bool = False
    sink: bool = False
    dropout: float = 0.0
    term: str | None = None
    mask: str | None = None
    padded: bool = False
    door: str | None = None
    window: int | None = None

    @property
    def band(self) -> Band:
        window = None if self.window is None else (self.window - 1, 0)
        return Band.aligned(self.causal, window, self.keys - self.queries)

    @property
    def name(self) -> str:
        return f"{self.family} S{self.keys}"

    def problem(self, device: str, capability: tuple[int, int] | None) -> Problem:
        """The case as tilewise's backends see it on a device."""
        dtype = getattr(torch, self.dtype)
        score = Score.of(self.band, self.head_dim, dropout_p=self.dropout)
        parts = None
        if self.term is not None:
            distances = terms.distances(self.term, self.queries, self.keys)
            grads = ("toeplitz" if distances is None else "query",) if self.backward else ()
            if distances is None:
                score = replace(score, toeplitz=terms.far(self.term, self.queries, self.keys))
                parts = PartOperands(
                    toeplitz=TensorSpec(torch.float32, 1, self.heads, 1, self.queries + self.keys - 1), grads=grads
                )
            else:
                score = replace(score, query=distances)
                parts = PartOperands(
                    query=TensorSpec(dtype, self.batch, self.heads, self.queries, distances.count), grads=grads
                )
        return Problem(
            device=device,
            capability=capability,
            dtype=dtype,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            queries=self.queries,
            keys=self.keys,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            score=score,
            parts=parts,
            bias=None if self.bias is None else TensorSpec(dtype, *self.bias),
            mask=self._mask(),
            tile_mask=None if self.mask is None else sparse.operand(self.mask),
            sink=TensorSpec(dtype, 1, self.heads, 1, 1) if self.sink else None,
            bias_grad=self.bias is not None and self.backward,
            sink_grad=self.sink and self.backward,
        )

    def _mask(self) -> TensorSpec | None:
        if self.padded:
            return TensorSpec(torch.bool, self.batch, 1, 1, self.keys)
        if self.mask is None:
            return None
        return TensorSpec(torch.bool, 1, 1 if sparse.keep(self.mask) is None else self.heads, self.queries, self.keys)

    def inputs(self, device: torch.device, seed: int = 0) -> CaseInputs:
        """Fresh standard normal inputs; q, k, v in the memory order (B, S, H, D) that a projection gives."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=getattr(torch, self.dtype)).normal_(generator=generator)

        def rows(heads: int, length: int) -> Tensor:
            return normal(self.batch, length, heads, self.head_dim).transpose(1, 2)

        q, do = rows(self.heads, self.queries), rows(self.heads, self.queries)
        k, v = rows(self.kv_heads, self.keys), rows(self.kv_heads, self.keys)
        bias = None if self.bias is None else normal(*self.bias)
        sink = normal(self.heads) if self.sink else None
        term = None
        if self.term is not None:
            term = terms.trained(self.term, self.batch, self.heads, self.queries, normal)
        for x in (q, k, v, bias, sink, term):
            if x is not None:
                x.requires_grad_(self.backward)
        mask = None
        if self.padded:
            drawn = torch.rand(self.batch, 1, 1, self.keys, generator=generator, device=device)
            mask = drawn >= 1 / 8
            mask[..., 0] = True  # no query sees nothing: there others differ, see docs/structure-models.md
        return CaseInputs(q, k, v, bias, do, sink, term, mask)


def dense(head_dim: int, length: int, causal: bool, sink: bool = False, dropout: float = 0.0) -> Case:
    heads = HIDDEN // head_dim
    family = f"dense D{head_dim} {'causal' if causal else 'full'}{' sink' if sink else ''}"
    family += f" dropout {dropout:g}" if dropout else ""
    return Case(family, TOKENS // length, heads, heads, length, length, head_dim, causal, sink=sink, dropout=dropout)


def biased(kind: str, head_dim: int, length: int) -> Case:
    """A trainable bias in one of the `KINDS` of broadcast."""
    batch, heads = TOKENS // length, HIDDEN // head_dim
    if length == 16384:  # a full bias is 8 GiB at D=128 and 16 GiB at D=64: fewer heads
        batch, heads = (1 if kind == "BHMN" else 2), 8
    shapes = {
        "BHMN": (batch, heads, length, length),
        "1HMN": (1, heads, length, length),
        "B11N": (batch, 1, 1, length),
    }
    return Case(f"bias {kind} D{head_dim}", batch, heads, heads, length, length, head_dim, bias=shapes[kind])


def inkling(length: int, term: bool) -> Case:
    """The attention of the Inkling models: a learned bias of the last 1,024 keys for each query."""
    family = f"inkling 64/8 D128 causal{'' if term else ' without bias'}"
    return Case(family, 1, 64, 8, length, length, 128, causal=True, term="inkling" if term else None)


def toeplitz(term: str | None, length: int) -> Case:
    """A bias of distances alone, on 16 heads of dimension 64."""
    family = f"{term or 'dense'} 16 heads D64 full"
    return Case(family, max(8192 // length, 1), 16, 16, length, length, 64, term=term)


def pair(length: int) -> Case:
    """Pair bias of structure models: a batch of S rows of S tokens shares one bias of four heads."""
    return Case("pair bias D32", length, 4, 4, length, length, 32, bias=(1, 4, length, length))


def triangle(length: int) -> Case:
    """A node's rows, which share the bias, each with keys of its own that are hidden."""
    return replace(pair(length), family="triangle_attention D32", padded=True, door="triangle_attention")


def tokens(length: int) -> Case:
    """Of AlphaFold 3's diffusion: 16 samples share the bias."""
    bias = (1, 16, length, length)
    return Case("attention_pair_bias D48", 16, 16, 16, length, length, 48, bias=bias, door="attention_pair_bias")


def masked(mask: str, length: int, causal: bool = False, biased: bool = False) -> Case:
    """One of `sparse.NAMES`, with or without a trainable matrix that all heads share."""
    family = f"{mask} D128 {'causal' if causal else 'full'}{' bias 11MN' if biased else ''}"
    bias = (1, 1, length, length) if biased else None
    return Case(family, 1, 16, 16, length, length, 128, causal, bias=bias, mask=mask)


def windowed(window: int, length: int) -> Case:
    return Case(f"window {window} D128 causal", 1, 16, 16, length, length, 128, causal=True, window=window)


def long(length: int, causal: bool) -> Case:
    """Sixteen heads, with which dynamic masks are compared."""
    return Case(f"dense 16 heads D128 {'causal' if causal else 'full'}", 1, 16, 16, length, length, 128, causal)


def gqa(length: int, causal: bool) -> Case:
    family = f"gqa 32/8 D128 {'causal' if causal else 'full'}"
    return Case(family, TOKENS // length, 32, 8, length, length, 128, causal)


def decode(
    batch: int,
    keys: int,
    dtype: str = "bfloat16",
    bias: str = "",
    queries: int = 1,
    kv_heads: int = 8,
    head_dim: int = 128,
) -> Case:
    """A step of generation beside a cache of ``keys``; ``bias`` is "B11N" (padding, positions) or "1H1N" (ALiBi).

    A name says the batch if it is not 16, and the number of queries if it is not 1.
    """
    shapes = {"B11N": (batch, 1, 1, keys), "1H1N": (1, 32, 1, keys)}
    family = f"decode 32/{kv_heads} D{head_dim}" + (f" bias {bias}" if bias else "")
    family += (f" B{batch}" if batch != 16 else "") + (f" M{queries}" if queries > 1 else "")
    shape = shapes.get(bias)
    return Case(family, batch, 32, kv_heads, queries, keys, head_dim, bias=shape, dtype=dtype, backward=False)


def tiny(dtype: str, bias: bool) -> Case:
    shape = (1, 8, 128, 128) if bias else None
    return Case(f"tiny D64{' bias 1HMN' if bias else ''}", 1, 8, 8, 128, 128, 64, bias=shape, dtype=dtype, host=True)


def on_cpu(kind: str, length: int, dtype: str) -> Case:
    """Eight heads of dimension 64 in all; ``kind`` is "full", "causal" or one of the `KINDS`."""
    batch = 1 if kind in ("full", "causal") else 2
    heads = 8 // batch
    shapes = {
        "BHMN": (batch, heads, length, length),
        "1HMN": (1, heads, length, length),
        "B11N": (batch, 1, 1, length),
    }
    family = f"{'bias' if kind in KINDS else 'dense'} {kind} D64 {dtype}"
    bias = shapes.get(kind)
    return Case(family, batch, heads, heads, length, length, 64, causal=kind == "causal", bias=bias, dtype=dtype)


def _gpu() -> Iterator[Case]:
    """Most telling first: a run that its budget ends has these."""
    for length in (4096, 16384, 1024):
        for head_dim in (128, 64):
            yield from (dense(head_dim, length, causal) for causal in (False, True))
            yield from (biased(kind, head_dim, length) for kind in ("BHMN", "1HMN"))
        if length == 4096:
            yield from (tiny("bfloat16", bias) for bias in (False, True))
            yield from (pair(s) for s in (256, 384, 512, 768))
            yield from (triangle(s) for s in (384, 768))
            yield tokens(768)
            yield from (gqa(length, causal) for causal in (False, True))
            yield from (decode(16, keys) for keys in (8192, 32768))
            yield from (decode(16, 32768, bias=bias) for bias in ("B11N", "1H1N"))
            yield decode(16, 32768, queries=8)
            yield from (biased("B11N", head_dim, length) for head_dim in (128, 64))
            yield from (biased("BHMN", head_dim, 511) for head_dim in (128, 64, 32))  # rows that begin anywhere
            yield from (dense(head_dim, length, causal=True, sink=True) for head_dim in (128, 64))
            for head_dim in (128, 64):
                yield from (dense(head_dim, length, causal, dropout=0.1) for causal in (False, True))
        yield from (dense(256, length, causal) for causal in (False, True))
    for length in (4096, 8192, 16384):
        yield from (inkling(length, term) for term in (False, True))
    for length in (2048, 8192):
        yield from (toeplitz(term, length) for term in (None, "t5", "alibi"))
    for mask in ("blocks 25", "blocks 5"):
        yield from (masked(mask, 16384, biased=biased) for biased in (False, True))
    yield from (masked("documents", 32768, causal) for causal in (True, False))
    yield from (windowed(window, 16384) for window in (512, 2048))
    for causal in (True, False):
        yield from (long(32768, causal), masked("kept 2048", 32768, causal))
    # the other rows of the table in docs/notebook/decoding.md
    yield decode(16, 32768, queries=16)
    yield from (decode(batch, keys) for batch, keys in ((64, 4096), (25, 16384), (4, 32768), (1, 32768)))
    yield decode(4, 32768, kv_heads=32)
    yield from (decode(batch, 32768, head_dim=head_dim) for batch, head_dim in ((16, 64), (8, 256)))


def _gpu_quick() -> Iterator[Case]:
    yield from (dense(128, 4096, causal) for causal in (False, True))
    yield from (biased(kind, 128, 4096) for kind in ("BHMN", "1HMN"))
    yield pair(256)
    yield decode(16, 8192)
    yield tiny("bfloat16", bias=True)


def _cpu() -> Iterator[Case]:
    for length in (1024, 2048, 4096):
        for dtype in ("float32", "bfloat16"):
            yield from (on_cpu(kind, length, dtype) for kind in ("full", "causal", "BHMN", "1HMN"))
    yield on_cpu("B11N", 2048, "float32")
    yield from (replace(on_cpu("full", 2048, "float32"), family=f"{x} D64 float32", term=x) for x in terms.NAMES)
    yield from (
        replace(on_cpu("full", 2048, "float32"), family=f"{x} D64 float32", mask=x) for x in (*sparse.NAMES, "kept 256")
    )
    yield replace(on_cpu("causal", 2048, "float32"), family="window 256 D64 float32", window=256)
    yield decode(2, 8192, "float32")
    yield from (tiny("float32", bias) for bias in (False, True))


def _cpu_quick() -> Iterator[Case]:
    yield from (on_cpu(kind, 1024, "float32") for kind in ("full", "causal", "1HMN"))
    yield on_cpu("BHMN", 512, "bfloat16")
    yield decode(1, 4096, "float32")
    yield tiny("float32", bias=True)


def _packed(device: str) -> Iterator[Case | packed.PackedCase]:
    """Those with a bias after the one without, and last, of each batch of many lengths, the dense one of as many
    sequences of their mean length."""
    if device == "cpu":
        yield packed.ragged_case("float32")
        return
    plain = [packed.lognormal_case(head_dim, causal) for head_dim in (128, 64) for causal in (True, False)]
    yield plain[0]
    yield from packed.biased()
    yield packed.short_case()
    yield from plain[1:]
    for case in plain:
        batch, mean = len(case.lengths), case.keys // len(case.lengths)
        family = f"{case.family} dense at the mean length"
        yield Case(family, batch, case.heads, case.heads, mean, mean, case.head_dim, case.causal)


AnyCase = Case | operators.SoftmaxCase | operators.MatmulCase | packed.PackedCase | windows.WindowCase


def cases(device: str, quick: bool = False) -> list[AnyCase]:
    """The cases of a device type ("cuda" or "cpu"), in the order in which they are run."""
    attention = (_gpu_quick if quick else _gpu) if device == "cuda" else (_cpu_quick if quick else _cpu)
    return [
        *attention(),
        *operators.cases(device, quick),
        *([] if quick else [*windows.cases(device), *_packed(device)]),
    ]
