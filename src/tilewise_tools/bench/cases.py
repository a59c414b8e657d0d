"""The named cases of attention and their sizes."""

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

TOKENS, HIDDEN = 16384, 2048  # large GPU cases: batch * length, and heads * head dimension
DROPOUT_SEED = (1, 2)
KINDS = ("BHMN", "1HMN", "B11N")


class CaseInputs(NamedTuple):
    """Input tensors of a case. All but do and mask are leaves.

    Attributes:
        q: (B, H, M, D).
        k, v: (B, Hkv, N, D).
        bias: of shape `Case.bias`, or None.
        do: gradient of the output, (B, H, M, D).
        sink: (H,), or None.
        term: the trainable tensor of a bias term, see `terms`, or None.
        mask: key mask, bool (B, 1, 1, N), or None.
    """

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
    """One shape of attention. Other operators are in `operators`, packed batches in `packed`.

    The cases of a ``family`` form one curve over their lengths in a picture.

    Attributes:
        bias: shape of an additive bias in ``dtype``; the backward computes its gradient. With a batch of n biases,
            fewer than batch elements, each is that of a run of them.
        dtype: torch's name of the dtype of every tensor.
        backward: True to measure the backward, with gradients of all inputs, too.
        sink: True for a trainable attention sink per head.
        dropout: dropout probability; tilewise uses `DROPOUT_SEED`.
        term: one of `terms.NAMES`, a trainable bias that is not stored as a matrix.
        mask: one of `sparse.NAMES`, or "kept N", a dynamic mask.
        padded: True to hide a random eighth of the keys of each batch element by a bool mask; all pairs count as work.
        windows: number of random bool masks (M, N) that hide a third of the pairs and repeat along the batch, as of
            Swin's windows; all pairs count as work.
        entry: one of `structure.ENTRY_POINTS`, a function that is measured in addition to `tilewise.attention`.
        window: with causal, the number of keys that a query sees, including its own.
        host: True for a small case that measures the host time of a call; pictures omit it.
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
    windows: int | None = None
    entry: str | None = None
    window: int | None = None

    @property
    def band(self) -> Band:
        window = None if self.window is None else (self.window - 1, 0)
        return Band.aligned(self.causal, window, self.keys - self.queries)

    @property
    def name(self) -> str:
        return f"{self.family} S{self.keys}"

    @property
    def run(self) -> int:
        """Batch elements, one after the other, that share one of several biases; 1 if none do, or if all share one."""
        return self.batch // self.bias[0] if self.bias is not None and 1 < self.bias[0] < self.batch else 1

    def problem(self, device: str, capability: tuple[int, int] | None) -> Problem:
        """Return the case as a problem for tilewise's backends."""
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
        if self.windows is not None:
            return TensorSpec(torch.bool, self.batch, 1, self.queries, self.keys)
        if self.mask is None:
            return None
        return TensorSpec(torch.bool, 1, 1 if sparse.keep(self.mask) is None else self.heads, self.queries, self.keys)

    def inputs(self, device: torch.device, seed: int = 0) -> CaseInputs:
        """Return new standard normal inputs; q, k, v are stored as (B, S, H, D), like a projection's output."""
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
            mask[..., 0] = True  # no fully masked query: providers differ there, see docs/structure-models.md
        if self.windows is not None:
            drawn = torch.rand(self.windows, 1, self.queries, self.keys, generator=generator, device=device)
            mask = drawn >= 1 / 3
            mask[..., 0] = True
            mask = mask.repeat(self.batch // self.windows, 1, 1, 1)
        return CaseInputs(q, k, v, bias, do, sink, term, mask)


def dense(head_dim: int, length: int, causal: bool, sink: bool = False, dropout: float = 0.0) -> Case:
    heads = HIDDEN // head_dim
    family = f"dense D{head_dim} {'causal' if causal else 'full'}{' sink' if sink else ''}"
    family += f" dropout {dropout:g}" if dropout else ""
    return Case(family, TOKENS // length, heads, heads, length, length, head_dim, causal, sink=sink, dropout=dropout)


def biased(kind: str, head_dim: int, length: int) -> Case:
    """Return a case with a trainable bias that broadcasts as one of `KINDS`."""
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
    """Return the attention of the Inkling models: each query has a learned bias for the last 1,024 keys."""
    family = f"inkling 64/8 D128 causal{'' if term else ' without bias'}"
    return Case(family, 1, 64, 8, length, length, 128, causal=True, term="inkling" if term else None)


def toeplitz(term: str | None, length: int) -> Case:
    """Return a case with a Toeplitz bias, 16 heads of dimension 64."""
    family = f"{term or 'dense'} 16 heads D64 full"
    return Case(family, max(8192 // length, 1), 16, 16, length, length, 64, term=term)


def pair(length: int) -> Case:
    """Return the pair bias of structure models: S rows of S tokens share one bias (1, 4, S, S)."""
    return Case("pair bias D32", length, 4, 4, length, length, 32, bias=(1, 4, length, length))


def beside(case: Case, name: str) -> Case:
    """Return the case with a function that is measured in addition, one of `structure.ENTRY_POINTS`."""
    return replace(case, entry=name)


def triangle(length: int, structures: int = 1) -> Case:
    """Return the `pair` case of several structures, each with its own bias, with different hidden keys in each row."""
    family = f"triangle_attention D32{f' B{structures}' if structures > 1 else ''}"
    case = replace(pair(length), family=family, batch=structures * length, padded=True)
    return beside(replace(case, bias=(structures, 4, length, length)), "triangle_attention")


def tokens(length: int) -> Case:
    """Return a case of AlphaFold 3's diffusion: 16 samples share the bias."""
    bias = (1, 16, length, length)
    return beside(Case("attention_pair_bias D48", 16, 16, 16, length, length, 48, bias=bias), "attention_pair_bias")


def swin(images: int) -> Case:
    """Return Swin's first stage: 64 windows of 49 tokens of each image share a bias, and have masks of their own."""
    case = Case(f"swin D32 B{images}", 64 * images, 3, 3, 49, 49, 32, bias=(1, 3, 49, 49), windows=64)
    return beside(case, "attention")


def masked(mask: str, length: int, causal: bool = False, biased: bool = False) -> Case:
    """Return a case with a mask of `sparse`, with or without a trainable bias (1, 1, M, N)."""
    family = f"{mask} D128 {'causal' if causal else 'full'}{' bias 11MN' if biased else ''}"
    bias = (1, 1, length, length) if biased else None
    return Case(family, 1, 16, 16, length, length, 128, causal, bias=bias, mask=mask)


def tree(head_dim: int) -> Case:
    """Return 8 responses of 1,024 tokens to a prompt of 4,096, of which `packed.rollouts_case` has 8 copies."""
    return Case(f"tree D{head_dim}", 1, 16, 16, 12288, 12288, head_dim, mask="tree")


def windowed(window: int, length: int) -> Case:
    return Case(f"window {window} D128 causal", 1, 16, 16, length, length, 128, causal=True, window=window)


def long(length: int, causal: bool) -> Case:
    """Return a dense case of 16 heads, the baseline of dynamic masks."""
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
    """Return a decoding step with ``keys`` cached keys; ``bias``: "B11N" (padding) or "1H1N" (ALiBi).

    The name contains the batch unless it is 16, and the number of queries unless it is 1.
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
    """Return a CPU case with batch * heads = 8, D = 64; ``kind`` is "full", "causal" or one of `KINDS`."""
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
    """Yield the GPU cases, the most important first, for runs that exceed their budget."""
    for length in (4096, 16384, 1024):
        for head_dim in (128, 64):
            yield from (dense(head_dim, length, causal) for causal in (False, True))
            yield from (biased(kind, head_dim, length) for kind in ("BHMN", "1HMN"))
        if length == 4096:
            yield from (tiny("bfloat16", bias) for bias in (False, True))
            yield from (pair(s) for s in (256, 384, 512, 768))
            yield from (triangle(s) for s in (384, 768))
            yield from (triangle(s, 8) for s in (256, 384))
            yield tokens(768)
            yield from (gqa(length, causal) for causal in (False, True))
            yield from (decode(16, keys) for keys in (8192, 32768))
            yield from (decode(16, 32768, bias=bias) for bias in ("B11N", "1H1N"))
            yield decode(16, 32768, queries=8)
            yield from (biased("B11N", head_dim, length) for head_dim in (128, 64))
            yield from (biased("BHMN", head_dim, 511) for head_dim in (128, 64, 32))  # unaligned rows
            yield from (dense(head_dim, length, causal=True, sink=True) for head_dim in (128, 64))
            for head_dim in (128, 64):
                yield from (dense(head_dim, length, causal, dropout=0.1) for causal in (False, True))
        for head_dim in (256, 512):
            yield from (dense(head_dim, length, causal) for causal in (False, True))
    yield biased("1HMN", 512, 4096)
    for length in (4096, 8192, 16384):
        yield from (inkling(length, term) for term in (False, True))
    for length in (2048, 8192):
        yield from (toeplitz(term, length) for term in (None, "t5", "alibi"))
    yield from (swin(images) for images in (8, 32, 128))
    for mask in ("blocks 25", "blocks 5"):
        yield from (masked(mask, 16384, biased=biased) for biased in (False, True))
    yield from (masked("documents", 32768, causal) for causal in (True, False))
    yield from (tree(head_dim) for head_dim in (128, 64))
    yield from (windowed(window, 16384) for window in (512, 2048))
    for causal in (True, False):
        yield from (long(32768, causal), masked("kept 2048", 32768, causal))
    # The other rows of the table in docs/notebook/decoding.md.
    yield decode(16, 32768, queries=16)
    yield from (decode(batch, keys) for batch, keys in ((64, 4096), (25, 16384), (4, 32768), (1, 32768)))
    yield decode(4, 32768, kv_heads=32)
    yield from (decode(batch, 32768, head_dim=head_dim) for batch, head_dim in ((16, 64), (8, 256), (8, 512)))


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
    """Yield the packed cases, with a bias after without, and last their dense equivalents.

    A dense equivalent has as many sequences, all of the batch's mean length.
    """
    if device == "cpu":
        yield packed.ragged_case("float32")
        return
    plain = [packed.lognormal_case(head_dim, causal) for head_dim in (128, 64) for causal in (True, False)]
    yield plain[0]
    yield from packed.biased()
    yield packed.short_case()
    yield from (packed.rollouts_case(head_dim) for head_dim in (128, 64))
    yield from plain[1:]
    for case in plain:
        batch, mean = len(case.lengths), case.keys // len(case.lengths)
        family = f"{case.family} dense at the mean length"
        yield Case(family, batch, case.heads, case.heads, mean, mean, case.head_dim, case.causal)


AnyCase = Case | operators.SoftmaxCase | operators.MatmulCase | packed.PackedCase | windows.WindowCase


def cases(device: str, quick: bool = False) -> list[AnyCase]:
    """Return the cases of a device type ("cuda" or "cpu") in the order of the run."""
    attention = (_gpu_quick if quick else _gpu) if device == "cuda" else (_cpu_quick if quick else _cpu)
    return [
        *attention(),
        *operators.cases(device, quick),
        *([] if quick else [*windows.cases(device), *_packed(device)]),
    ]
