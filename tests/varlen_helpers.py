"""Packed batches for tests: tensors of one, and the same sequences one by one, written down a second time."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
from helpers import Case, Tensors, unfused
from torch import Tensor

from tilewise import attention, varlen_attention
from tilewise.bias.canonical import dense

BRAIN, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
H, HKV, D, DV = 4, 2, 8, 6


class Lengths(NamedTuple):
    """Of a packed batch. past: rows after the last sequence. longer: by what the maxima exceed the longest."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    used: tuple[int, ...] | None = None
    past: int = 0
    longer: int = 0

    @property
    def B(self) -> int:
        return len(self.queries)

    @property
    def total_q(self) -> int:
        return sum(self.queries) + self.past

    @property
    def total_k(self) -> int:
        return sum(self.keys) + self.past

    @property
    def max_q(self) -> int:
        return max(self.queries, default=0) + self.longer

    @property
    def max_k(self) -> int:
        return max(self.seen, default=0) + self.longer

    @property
    def seen(self) -> tuple[int, ...]:
        """Keys that count, of each sequence."""
        return self.keys if self.used is None else self.used

    @property
    def pairs(self) -> list[int]:
        """Where the matrix of each sequence begins, and the end."""
        return offsets(m * n for m, n in zip(self.queries, self.seen, strict=True))

    def sequences(self) -> list[Sequence]:
        columns = (range(self.B), offsets(self.queries), self.queries, offsets(self.keys), self.seen, self.pairs)
        return [Sequence(*x) for x in zip(*columns, strict=False)]

    def arguments(self, dtype: torch.dtype = torch.int32) -> tuple:
        """Those of `varlen_attention` after q, k and v."""
        return *(torch.tensor(offsets(x), dtype=dtype) for x in (self.queries, self.keys)), self.max_q, self.max_k

    def seqused(self, dtype: torch.dtype = torch.int32) -> dict:
        return {} if self.used is None else {"seqused_k": torch.tensor(self.used, dtype=dtype)}


class Sequence(NamedTuple):
    b: int
    q0: int
    m: int
    k0: int
    n: int
    p0: int

    @property
    def rows(self) -> slice:
        return slice(self.q0, self.q0 + self.m)

    @property
    def cols(self) -> slice:
        return slice(self.k0, self.k0 + self.n)


def offsets(lengths) -> list[int]:
    return [0, *accumulate(lengths)]


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def cut(x: Tensor, s: Sequence) -> Tensor:
    """Of a padded bias or mask, (B|1, heads, M|1, N|1), what belongs to a sequence."""
    x = x[s.b : s.b + 1] if x.shape[0] > 1 else x
    x = x[:, :, : s.m] if x.shape[2] > 1 else x
    return x[..., : s.n] if x.shape[3] > 1 else x


def ragged(values: Tensor, s: Sequence) -> Tensor:
    return values[:, s.p0 : s.p0 + s.m * s.n].unflatten(1, (s.m, s.n))[None]


class New:
    """Makes leaves, and keeps them."""

    def __init__(self, lengths: Lengths, dtype: torch.dtype = FLOAT, seed: int = 0) -> None:
        self.lengths, self.dtype, self.leaves = lengths, dtype, []
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=DOUBLE).to(dtype or self.dtype).requires_grad_()
        self.leaves.append(x)
        return x


class Again(New):
    """With leaves that are there."""

    def __init__(self, lengths: Lengths, leaves) -> None:
        super().__init__(lengths)
        self.given = iter(leaves)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return next(self.given)


def tensors(lengths: Lengths, dtype: torch.dtype = FLOAT, heads=(H, HKV), dims=(D, DV), seed: int = 1):
    """Leaves q, k and v, and cotangents of o and lse."""
    new, wide = New(lengths, dtype, seed), DOUBLE if dtype == DOUBLE else FLOAT
    q = new(lengths.total_q, heads[0], dims[0])
    k, v = (new(lengths.total_k, heads[1], d) for d in dims)
    do = new(lengths.total_q, heads[0], dims[1]).detach()
    return (q, k, v), do, new(heads[0], lengths.total_q, dtype=wide).detach()


def call(qkv, lengths: Lengths, offsets_dtype: torch.dtype = torch.int32, **options):
    return varlen_attention(
        *qkv, *lengths.arguments(offsets_dtype), **lengths.seqused(offsets_dtype), return_lse=True, **options
    )


def sequence_calls(qkv, lengths: Lengths, parts=None, mask=None, sink=None):
    """(sequence, q, k, v, bias, mask, sink) of each as `attention` takes them; ``parts(s)``: a sequence's bias."""
    q, k, v = qkv
    heads, kv_heads = q.shape[1], k.shape[1]
    for s in lengths.sequences():
        own = [x.transpose(0, 1)[None] for x in (q[s.rows], k[s.cols], v[s.cols])]
        bias = None
        if parts is not None:
            bias = sum(dense(x, 1, heads, s.m, s.n, kv_heads) for x in parts(s))
        hidden = None if mask is None else cut(mask, s)
        logits = sink if sink is None or sink.dim() == 1 else sink[None, :, s.rows]
        yield s, *own, bias, hidden, logits


def joined(qkv, lengths: Lengths, found) -> tuple[Tensor, Tensor]:
    """``found``, o and lse of each sequence, as those of the packed batch."""
    q, v = qkv[0], qkv[2]
    o, lse = [x[0].transpose(0, 1) for x, _ in found], [x[0] for _, x in found]
    wide = DOUBLE if q.dtype == DOUBLE else FLOAT
    o.append(q.new_zeros(lengths.past, q.shape[1], v.shape[2]))
    lse.append(q.new_full((q.shape[1], lengths.past), -math.inf, dtype=wide))
    return torch.cat(o), torch.cat(lse, 1)


def one_by_one(qkv, lengths: Lengths, parts=None, mask=None, sink=None, backend="reference", **options):
    """By the float64 reference, differentiable; by another backend in the inputs' dtype."""
    found = []
    if backend == "reference":
        qkv = [x.double() for x in qkv]
    for _, q, k, v, bias, hidden, logits in sequence_calls(qkv, lengths, parts, mask, sink):
        bias = bias if bias is None or q.dtype == DOUBLE else bias.float()
        found.append(
            attention(q, k, v, bias=bias, mask=hidden, sink=logits, return_lse=True, backend=backend, **options)
        )
    return joined(qkv, lengths, found)


def plain(qkv, lengths: Lengths, parts=None, mask=None, sink=None, **options):
    """By plain torch in the inputs' dtype, the yardstick of the error rule."""
    found = []
    for s, q, k, v, bias, hidden, logits in sequence_calls(qkv, lengths, parts, mask, sink):
        case = Case(B=1, H=q.shape[1], Hkv=k.shape[1], M=s.m, N=s.n, D=q.shape[3], Dv=v.shape[3], dtype=q.dtype,
                    **options)  # fmt: skip
        bias = None if bias is None else bias.to(torch.promote_types(q.dtype, FLOAT))
        o, lse = unfused(case, Tensors(q, k, v, bias, hidden, None, None, logits))
        if logits is not None and s.n == 0:
            lse = (logits[None, :, None] if logits.dim() == 1 else logits).expand(lse.shape)
        found.append((o, lse.to(DOUBLE if q.dtype == DOUBLE else FLOAT)))
    return joined(qkv, lengths, found)


def gradients(outputs, leaves, do, dlse):
    """Of o and lse; rows that see nothing have no LSE to differentiate. Zeros where nothing depends on a leaf."""
    o, lse = outputs
    loss = (o * do.to(o.dtype)).sum() + (lse * dlse.to(lse.dtype)).masked_fill(lse == -math.inf, 0.0).sum()
    if not loss.requires_grad:
        return tuple(torch.zeros_like(x) for x in leaves)
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))


def hold(lengths: Lengths, make=None, dtype=FLOAT, backend="cpu", *, bias_dtype=None, heads=(H, HKV), dims=(D, DV),
         mask=None, sink=None, offsets_dtype=torch.int32, validate=False, as_dense=False, **options):  # fmt: skip
    """The error rule: o, lse and each gradient at most twice as far from the reference's sequences as plain torch's.

    In 16 bits, and with ``as_dense``, also where the backend's own dense calls are as far: O is rounded before it meets
    dO in the gradients, of which most cancels in a sum over many pairs. Those have a rule of their own.

    make: ``(new) -> (bias, parts)``, the bias of the packed batch, and ``parts(sequence)``, what one has of it.
    """
    new = New(lengths, bias_dtype or dtype)
    bias, parts = (None, None) if make is None else make(new)
    qkv, do, dlse = tensors(lengths, dtype, heads, dims)
    leaves = (*qkv, *new.leaves, *([] if sink is None else [sink]))
    found = call(
        qkv, lengths, offsets_dtype, bias=bias, mask=mask, sink=sink, backend=backend, validate=validate, **options
    )
    terms = {"parts": parts, "mask": mask, "sink": sink, **options}
    calls = (found, one_by_one(qkv, lengths, **terms), plain(qkv, lengths, **terms))
    results = [(*x, *gradients(x, leaves, do, dlse)) for x in calls]
    wide = DOUBLE if dtype == DOUBLE else FLOAT
    assert [x.dtype for x in results[0]] == [dtype, wide, *(x.dtype for x in leaves)]
    coarsest = min((dtype, *(x.dtype for x in leaves)), key=lambda x: torch.finfo(x).bits)
    slack = {DOUBLE: 1e-13, FLOAT: 1e-5, HALF: 1e-3, BRAIN: 8e-3}[coarsest]
    dense_results: list[Tensor] = []
    for n, (ours, truth, theirs) in enumerate(zip(*([x.detach() for x in each] for each in results), strict=True)):
        assert ours.shape == truth.shape
        hidden = truth == -math.inf
        assert torch.equal(ours == -math.inf, hidden), n
        if ours.numel():
            error, other = (float((x - truth).masked_fill(hidden, 0.0).abs().max()) for x in (ours, theirs))
            largest = float(truth.masked_fill(hidden, 0.0).abs().max())
            if (as_dense or dtype in (HALF, BRAIN)) and error > 2 * other + slack * max(1.0, largest):
                if not dense_results:  # which few calls need
                    x = one_by_one(qkv, lengths, **terms, backend=backend)
                    dense_results += (y.detach() for y in (*x, *gradients(x, leaves, do, dlse)))
                other = max(other, float((dense_results[n] - truth).masked_fill(hidden, 0.0).abs().max()))
            assert error <= 2 * other + slack * max(1.0, largest), n
    return found


# Queries without keys, keys without queries, neither; one of each; more of the one and of the other.
SMALL = Lengths((3, 0, 7, 1, 5, 0), (5, 4, 0, 1, 9, 0), past=2)
USED = SMALL._replace(keys=(8, 4, 2, 1, 9, 3), used=(5, 4, 0, 1, 7, 2), longer=3)
# Sequences of equal lengths in a row, whose keys begin 6 rows after each other, and then no longer.
RUNS = Lengths((3, 3, 3, 3, 2, 2), (6, 6, 6, 5, 4, 4), used=(4, 4, 4, 4, 4, 4), past=1)
SQUARE = Lengths((4, 6, 1), (4, 6, 1))
ONES = Lengths((1, 1, 0, 1), (1, 3, 1, 4))  # as in decoding
LONG = Lengths((3, 127, 0, 129, 1, 239, 128), (128, 1, 3, 239, 0, 127, 129), past=3)
