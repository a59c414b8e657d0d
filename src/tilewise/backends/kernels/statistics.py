"""Results of a forward for each row besides O: LSE and statistics of the scores, in Triton and Gluon kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.score import LOG2E

LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(LOG2E)


class RowResults(NamedTuple):
    """Pointers to a number for each row: its LSE, and its statistics, `Outputs.statistics`, or None."""

    lse: Any
    statistics: Any


class StatisticsHow(NamedTuple):
    """Compile-time switches of the statistics; see `tilewise.spec.statistics`."""

    MAXIMUM: Any
    UNBIASED: Any
    ENTROPY: Any


@triton.jit
def entropy_of(top, l_i, excess, lse2, sink):
    """Return the entropy of rows in nats.

    top, l_i, excess: of the keys alone, the number m that exponents are relative to, Σ 2^(s - m) and Σ 2^(s - m)
    (s - m), all to base 2. lse2: base-2 LSE of the row, sink included. sink: a logit, or None.

    H = log2(l) - excess / l without a sink. A part of the softmax with entropy H and an LSE that is x below the row's
    has the share 2^-x, and adds 2^-x (H + x).
    """
    seen = l_i > 0
    entropy = tl.where(seen, tl.log2(l_i) - excess / tl.where(seen, l_i, 1.0), 0.0)
    if sink is not None:
        below = (lse2 - top.to(tl.float64)).to(tl.float32) - tl.log2(l_i)
        sink_below = (lse2 - sink.to(tl.float64) * _LOG2E).to(tl.float32)  # as `with_sink` has it: 0 without keys
        entropy = tl.exp2(-below) * (entropy + tl.minimum(below, 256.0))
        entropy += tl.exp2(-sink_below) * tl.minimum(sink_below, 256.0)
        entropy = tl.where(lse2 == -float("inf"), 0.0, entropy)
    return entropy * LN2


@triton.jit
def store_statistics(statistics, row, inside, most, unbiased, entropy, c):
    """Store the statistics of rows side by side; those that ``c``, a `StatisticsHow`, lacks are not read."""
    at = statistics + row * (c.MAXIMUM + c.UNBIASED + c.ENTROPY)
    if c.MAXIMUM:
        tl.store(at, most, mask=inside)
    if c.UNBIASED:
        tl.store(at + c.MAXIMUM, unbiased, mask=inside)
    if c.ENTROPY:
        tl.store(at + (c.MAXIMUM + c.UNBIASED), entropy, mask=inside)
