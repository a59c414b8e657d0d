"""Problems at random, in numbers: what is drawn, and how a failure is told so that it can be called again.

A compiler takes seconds for a kernel and a GPU milliseconds for a small problem. So a soak draws few kernels (what a
kernel is compiled for: dtypes, head dimensions, terms, layout, which sizes are multiples of 16) and for each of them
many sizes and values. Equal numbers, equal problems.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from helpers import LAYOUTS, Case, check
from relative_helpers import Term
from relative_helpers import check as check_terms

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
BIASES = ("bhmn", "1hmn", "b1mn", "11mn", "bkmn", "b11n", "1h1n", "bk1n", "111n", "1hm1", "bhm1", "1111")
SINKS = ("h", "h", "bhm", "1hm", "b11", "111")
MASKS = ("b11n", "b1mn", "1hmn", "bhmn", "11mn", "bk1n", "111n", "11m1", "1111")


class Drawn(NamedTuple):
    """A problem and who computes it: a backend, or None for the plan's choice. bias_terms: beside the case's bias."""

    case: Case
    backend: str | None
    bias_terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        if self.bias_terms:
            return f'check_terms({self.case!r}, {self.bias_terms!r}, {self.backend!r}, "cuda")'
        return f'check({self.case!r}, {self.backend!r}, "cuda")'

    def check(self) -> None:
        if self.bias_terms:
            check_terms(self.case, self.bias_terms, self.backend, "cuda")
        else:
            check(self.case, self.backend, "cuda")


@dataclass(frozen=True)
class Kernel:
    """What all problems of one kernel share.

    queries: "one", "few" (beside many keys) or "many". even: lengths are multiples of 16. group: query heads for each
    key/value head. band: "causal", "window", "both" or None. terms: the rest of `Case`.
    """

    queries: str
    even: bool
    group: int
    band: str | None
    capped: bool
    terms: tuple[tuple[str, object], ...]
    backend: str | None
    bias_terms: tuple[Term, ...] = ()

    def problem(self, r: random.Random) -> Drawn:
        step = 16 if self.even else 1
        rest = 0 if self.even else r.choice((1, 3, 5, 7, 9, 11, 13, 15))
        if self.queries == "many":
            M, N = (16 * r.randint(1, 40) + rest for _ in range(2))
        else:
            M = 1 if self.queries == "one" else step * r.randint(1 if self.even else 2, 64 // step)
            N = 16 * r.randint(M, 200) + rest
        causal, window = self.band in ("causal", "both"), None
        if self.band in ("window", "both"):
            window = (r.randint(0, max(M, N)), r.randint(0, max(M, N)))
        kv_heads = r.choice((2, 3))
        return Drawn(
            Case(
                B=r.choice((2, 3)), H=self.group * kv_heads, Hkv=kv_heads, M=M, N=N, causal=causal, window=window,
                softcap=r.uniform(1, 8) if self.capped else None, scale=r.choice((None, r.uniform(0.02, 0.7))),
                **dict(self.terms),
            ),
            self.backend,
            self.bias_terms,
        )  # fmt: skip


def kernel(n: int) -> Kernel:
    """The n-th kernel of all that a soak knows: of eight four that the hopper backend takes, and three of few queries.

    Those of few queries have most often both a bias and a mask: decoding meets every kind of them.
    """
    r = random.Random(n)
    hopper, decodes = n % 2 == 0, n % 8 in (1, 3, 5)
    queries = r.choice(("one", "few")) if decodes else "many"
    D = r.choice(
        (8, 32, 64, 64, 128, 128, 128, 72, 96, 192, 256) if hopper else (8, 24, 33, 64, 96, 128, 128, 200, 256)
    )
    dtype = r.choice((BRAIN, BRAIN, HALF) if hopper else (BRAIN, BRAIN, HALF, FLOAT))
    bias = r.choice(BIASES) if r.random() < (0.9 if decodes else 0.7) else None
    mask = r.choice(MASKS) if r.random() < (0.7 if decodes else 0.3 if hopper else 0.5) else None
    hidden = next((x for x in (mask, bias) if x is not None), None)  # what may hide keys from all queries
    by_keys = hidden is not None and hidden[3] == "n"
    layout = r.choice(("padded", "padded", "heads_last") if hopper else LAYOUTS)
    if hopper and layout == "heads_last" and bias is not None and "mn" in bias:
        layout = "padded"  # its bias is a transpose, which TMA cannot describe
    terms = {
        "D": D,
        "Dv": r.choice((D, D, D, 8, 64, 128)),
        "dtype": dtype,
        "bias": bias,
        "bias_dtype": None if bias is None else r.choice((None, None, None, BRAIN, HALF, FLOAT)),
        "mask": mask,
        "layout": layout,
        "planted": r.choice((None, float("nan"), float("inf"))) if by_keys and layout != "expanded" else None,
        "bias_hides": bias is not None and bias[3] == "n" and r.random() < 0.3,
        "blind": hidden is not None and hidden[2] == "m" and queries == "many" and r.random() < 0.3,
        "lse": r.random() < 0.8,
        "deterministic": r.random() < 0.2,
        "grads": r.choice(("qkvbs", "qkvbs", "qkvbs", "", "b", "kv", "q")),
    }
    s = random.Random(f"sink of {n}")
    if s.random() < 0.3 and not (hopper and bias is not None and bias[3] == "1"):  # which hopper leaves to others
        terms |= {
            "sink": s.choice(SINKS),
            "sink_dtype": s.choice((None, None, BRAIN, HALF, FLOAT)),
            "sink_at": s.choice((0.0, 0.0, 5.0, 40.0, -40.0)),
            "sink_none": s.random() < 0.3,
        }
    s = random.Random(f"dropout of {n}")
    if not hopper and s.random() < 0.3:  # which hopper leaves to others
        terms["dropout_p"] = s.choice((0.1, 0.1, 0.5, 0.9))
    return Kernel(
        queries, r.random() < 0.4, r.choice((1, 1, 2, 4)), r.choice((None, None, "causal", "window", "both")),
        r.random() < 0.2, tuple(terms.items()), None if hopper else r.choice((None, "triton")),
        () if hopper else bias_terms(random.Random(f"bias terms of {n}"), bool(terms["deterministic"])),
    )  # fmt: skip


def bias_terms(r: random.Random, deterministic: bool) -> tuple[Term, ...]:
    """For a third of the kernels one to three terms; with an order for their sums where that is asked for."""
    if r.random() < 0.67:
        return ()
    kinds = r.choice((("query",), ("query",), ("key",), ("all",), ("t5",), ("query", "t5"), ("key", "query", "alibi")))
    found = []
    for kind in kinds:
        starts = r.choice((None, None, "one", "batch"))
        found.append(
            Term(
                kind, axes="bh" if kind == "t5" or (deterministic and starts) else r.choice(("bh", "1h", "bk", "11")),
                R=32 if kind == "t5" else r.choice((1, 33, 100, 1024)), lo=r.choice((-1023, -500, -16, 0)),
                reverse=r.random() < 0.3, outside=r.choice((0.0, -math.inf, 0.0 if deterministic else "clamp")),
                buckets=None if deterministic or r.random() < 0.7 else 200, starts=starts,
                dtype=r.choice((None, None, BRAIN, HALF, FLOAT)), hides=kind in ("query", "key") and r.random() < 0.2,
                layout=r.choice(("contiguous", "padded", "sliced") if kind in ("query", "key") else ("contiguous",)),
            )
        )  # fmt: skip
    return tuple(found)


def problems(n: int, count: int, seed: int = 0) -> Iterator[Drawn]:
    """``count`` problems of the n-th kernel."""
    r = random.Random(f"{n} {seed}")
    for _ in range(count):
        yield kernel(n).problem(r)


def soak(n: int, count: int, seed: int = 0) -> list[str]:
    """Hold ``count`` problems of the n-th kernel to the error rule on the GPU; the failures as calls to repeat.

    What is at work is printed: an error of another kind ends the soak, and the last line is its problem.
    """
    failures = []
    for drawn in problems(n, count, seed):
        print(drawn, flush=True)
        try:
            drawn.check()
        except AssertionError as error:
            failures.append(f"{drawn}\n    {error}")
    return failures
