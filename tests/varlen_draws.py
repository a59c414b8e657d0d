"""Packed batches at random, in numbers: equal numbers, equal calls of `varlen_helpers.hold`."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from varlen_biases import BIASES, STARTS, several
from varlen_helpers import BRAIN, DOUBLE, FLOAT, HALF, HKV, H, Lengths, hold

# Of each of these a call takes at most one bias; those for all queries by distance are added up to one.
ONE = [x for x in BIASES if not x.startswith(("several", "everything", "ragged, along", "padded, along"))]
KINDS = (
    [x for x in ONE if x.startswith(("padded", "ragged")) and not x.endswith(("11n", "1n", "m1", "11"))],
    [x for x in ONE if x.startswith("along the keys") or x.endswith(("b11n", "1h1n"))],
    [x for x in ONE if x.startswith("along the queries") or x.endswith(("bkm1", "11m1"))],
    [x for x in ONE if x.startswith("query")],
    [x for x in ONE if x.startswith("key")],
    [x for x in ONE if x.startswith(("all", "t5", "alibi"))],
    ["low rank"],
)
MASKS = ("bhmn", "b11n", "1km1", "11mn", "1h1n", "b1mn")
SIZES = (0, 1, 1, 2, 3, 5, 8, 16, 17, 33)


class Drawn(NamedTuple):
    """The arguments of one call; ``mask``: its axes; ``sink``: its axes, h or hm."""

    lengths: Lengths
    biases: tuple[str, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    mask: str | None
    sink: str | None
    options: dict[str, Any]

    def hold(self, backend: str = "cpu") -> None:
        x, generator = self.lengths, torch.Generator().manual_seed(5)
        dtype, bias_dtype = self.dtypes
        sizes = {"b": x.B, "h": H, "k": HKV, "m": x.max_q, "n": x.max_k, "1": 1}
        mask = sink = None
        if self.mask is not None:
            mask = torch.rand([sizes[axis] for axis in self.mask], generator=generator) < 0.7
        if self.sink is not None:
            sink = torch.randn((H, x.total_q) if self.sink == "hm" else (H,), generator=generator, dtype=DOUBLE)
            sink = sink.to(FLOAT if dtype in (HALF, BRAIN) else dtype).requires_grad_()
        make = several(*(BIASES[name] for name in self.biases)) if self.biases else None
        hold(x, make, dtype, backend, bias_dtype=bias_dtype, mask=mask, sink=sink, as_dense=True, **self.options)


def drawn(n: int, dtypes: tuple[torch.dtype, ...] = (DOUBLE, FLOAT, HALF, BRAIN)) -> Drawn:
    """The n-th of all calls."""
    r = random.Random(n)
    found: list[tuple[int, int]] = []
    for _ in range(r.randint(1, len(STARTS))):
        again = found and r.random() < 0.4  # sequences of equal lengths
        found.append(found[-1] if again else (r.choice(SIZES), r.choice(SIZES)))
    queries, keys = zip(*found, strict=True)
    used = None
    if r.random() < 0.3:
        used, keys = keys, tuple(x + r.choice((0, 0, 3)) for x in keys)
    lengths = Lengths(queries, keys, used=used, past=r.choice((0, 0, 2)), longer=r.choice((0, 0, 5)))
    dtype = r.choice(dtypes)
    biases = [r.choice(kind) for kind in KINDS if r.random() < 0.2]
    if 0 in (lengths.max_q, lengths.max_k):
        biases = [x for x in biases if not x.startswith("padded")]
    if 1 in (lengths.max_q, lengths.max_k) and any(x.startswith("padded") for x in biases):
        biases = [x for x in biases if not x.startswith("along")]  # a matrix of one row or column is one of these
    narrow = dtype in (HALF, BRAIN) and "low rank" not in biases
    return Drawn(
        lengths, tuple(biases), (dtype, r.choice((dtype, FLOAT)) if narrow else dtype),
        r.choice(MASKS) if r.random() < 0.3 else None,
        r.choice(("h", "hm")) if r.random() < 0.3 else None,
        {
            "causal": r.random() < 0.4,
            "window": (r.choice((None, 0, 2, 9)), r.choice((None, 0, 2, 9))) if r.random() < 0.3 else None,
            "softcap": r.choice((1.5, 5.0)) if r.random() < 0.2 and "low rank" not in biases else None,
            "scale": r.choice((None, 0.05, 0.6)),
            "deterministic": r.random() < 0.2,
        },
    )  # fmt: skip
