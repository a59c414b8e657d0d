"""Rows that the hopper backend treats apart, in Triton's interpreter: those that its forward computes again, and what
its backward knows of each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from helpers import DROPOUT_SEED, Case, Results, Tensors, hold, reference, rows_of, run, tensors, visible
from tile_mask_helpers import pattern
from torch import Tensor

from tilewise import TileMask
from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends import reference as backend
from tilewise.frontend.arguments import seed_tensor
from tilewise.spec.dropout import threshold
from tilewise.spec.problem import Problem
from tilewise.spec.rounding import with_low_bits
from tilewise.spec.score import Band, Score
from tilewise.spec.statistics import Statistics

HALF, FLOAT = torch.float16, torch.float32
USUAL = Case(B=2, H=2, Hkv=1, M=70, N=75, D=24, dtype=HALF, layout="padded", grads="")
GROUPS = replace(USUAL, B=1, H=4, Hkv=2, M=63)


REPAIRED = [
    replace(GROUPS, causal=True, N=139),
    replace(USUAL, causal=True, M=139),  # the first queries see nothing
    replace(USUAL, window=(40, 20), softcap=2.0, Dv=40),
    replace(USUAL, window=(None, 3), D=136, Dv=8, B=1),
    *(replace(USUAL, bias=bias, mask="1111", B=1) for bias in ("1111", "1hm1")),
    *(replace(GROUPS, bias=bias, bias_dtype=FLOAT) for bias in ("1h1n", "11mn", "1kmn")),
    *(replace(USUAL, mask=mask) for mask in ("bhmn", "b1m1", "11m1", "bh11", "1111")),
    replace(GROUPS, mask="1k1n"),
    replace(USUAL, mask="1hm1", bias="b11n", planted=math.nan, causal=True),
    replace(USUAL, mask="b11n", bias="1hm1", planted=math.inf, layout="heads_last"),
    replace(USUAL, bias="1hmn", bias_hides=True, blind=True, scale=0.7),
    replace(USUAL, mask="111n", M=1, N=1),
    replace(GROUPS, causal=True, N=139, sink="h"),
    replace(USUAL, causal=True, M=139, sink="h", sink_dtype=FLOAT, sink_at=20.0),  # the first see their sink alone
    replace(USUAL, mask="bhmn", blind=True, sink="bhm", sink_none=True),
    replace(USUAL, bias="1hmn", bias_hides=True, blind=True, scale=0.7, sink="1hm", softcap=2.0, sink_at=-3.0),
    replace(GROUPS, causal=True, N=139, dropout_p=0.3, sink="h"),
    replace(USUAL, mask="bhmn", planted=math.nan, dropout_p=0.6, M=139),
]


def _call(case: Case, x: Tensors, found: TileMask | None = None) -> tuple[Problem, Inputs]:
    """found: in the place of the mask."""
    inputs = Inputs(*x[:5], None if x.sink is None else rows_of(x.sink))
    if found is not None:
        inputs = inputs._replace(mask=None, tiles=found.tensors)
    scale = case.D**-0.5 if case.scale is None else case.scale
    score = Score(
        scale, case.softcap, Band.aligned(case.causal, case.window, case.N - case.M),
        dropout=threshold(case.dropout_p),
    )  # fmt: skip
    if case.dropout_p:
        inputs = inputs._replace(seed=seed_tensor(DROPOUT_SEED, x.q.device))
    return Problem.of(*inputs, score, bias_grad="b" in case.grads), inputs


class Repaired(NamedTuple):
    """A forward whose rows the repair kernel has or has not computed again.

    before, after: o and lse, from the reference, without and with the repair. spoilt: the rows that were broken. seen:
    which query sees which key, bool (B, H, M, N).
    """

    before: Results
    after: Results
    spoilt: Tensor
    seen: Tensor


def repair(
    case: Case, share: float, value: float | None = None, where: tuple = (), tiles: str | None = None, runs: int = 0
) -> Repaired:
    """Break a share of the rows as the forward kernel does, and let the repair kernel look; first, if there is a
    ``value``, put it into v[where]. tiles: the kernel is given a mask by tiles, that pattern of tile_mask_helpers.
    runs: it is given the first so many biases, each for a run of batch elements."""
    from tilewise.backends.gluon.sm90.forward.launch import HopperForward
    from tilewise.backends.kernels.block_mask import flat_mask

    x = tensors(case)
    if value is not None:
        x.v[where] = value
    found = None
    if tiles is not None:
        found, dense = pattern(tiles, case, (64, 128))
        x = x._replace(mask=dense)
    bias = x.bias
    if runs:
        bias = x.bias[:runs, None]
        x = x._replace(bias=bias[:, 0].repeat_interleave(case.B // runs, 0))
    before = run(case, "reference", inputs=x)
    problem, inputs = _call(case, x._replace(bias=bias), found)
    inputs = inputs.with_matrices()
    outputs = backend.forward(problem, inputs)
    launch = HopperForward(problem, inputs).nan_fixup
    assert launch is not None
    spoilt = torch.rand(before.lse.shape, generator=torch.Generator().manual_seed(0)) < share
    o, lse = before.o.clone(), before.lse.clone()
    o[spoilt], lse[spoilt] = 7.0, float("nan")
    o_low = None if outputs.o_low is None else outputs.o_low.masked_fill(spoilt[..., None], 7777)
    launch(*inputs[:4], *flat_mask(inputs.mask, inputs.tiles), inputs.sink, inputs.seed, o, o_low, lse, None)
    if o_low is not None:
        _hold_low_bits(case, o, o_low, outputs.o_low, spoilt)
    return Repaired(before, before._replace(o=o, lse=lse), spoilt, visible(case, x))


def statistics_again(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics by the reference, those after a repair of some rows that were 777, and which rows these are."""
    from tilewise.backends.gluon.sm90.forward.launch import HopperForward

    x = tensors(case)
    problem, inputs = _call(case, x)
    problem = replace(problem, score=replace(problem.score, statistics=Statistics(True, True, True)))
    outputs = backend.forward(problem, inputs)
    launch = HopperForward(problem, inputs).nan_fixup
    spoilt = torch.rand(outputs.lse.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    lse, found = outputs.lse.masked_fill(spoilt, math.nan), torch.full_like(outputs.statistics, 777.0)
    launch(*inputs[:5], inputs.sink, inputs.seed, outputs.o, None, lse, found)
    return outputs.statistics, found, spoilt


def _hold_low_bits(case: Case, o: Tensor, found: Tensor, before: Tensor, spoilt: Tensor) -> None:
    """Of rows that are computed again O is nearer to the exact one with its low bits; of the others they stay."""
    assert torch.equal(found[~spoilt], before[~spoilt])
    exact = reference(case, tensors(case, planted=False)).o
    errors = [(x.double() - exact)[spoilt].abs().mean() for x in (o, with_low_bits(o, found))]
    assert errors[1] < 0.9 * errors[0]


def prepare(case: Case, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the backward knows of each query: its LSE in base 2 and -delta, (B, H, tiles · BLOCK_M); the exact delta of
    the case's o without its dlse; the sum of dQ, of which the first heads are zero; and the counters."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    x = tensors(case)
    problem, inputs = _call(case, x)
    outputs = backend.forward(problem, inputs)._replace(lse=lse)
    cotangents = Outputs(x.do, dlse)
    launch = HopperBackward(problem, inputs, outputs, cotangents, Needs(True, True, True, case.bias is not None))
    stats, counts, dq_accum = launch.buffers(x.q)
    stats.fill_(float("nan"))
    dq_accum.fill_(float("nan"))
    counts.fill_(-1)
    row_bias = x.bias if launch.of_rows else None
    launch.before(outputs.o, outputs.o_low, x.do, lse, dlse, row_bias, stats, dq_accum, counts, None)
    lse2, minus_delta = stats.view(case.B, case.H, -1, 2, 64).unbind(3)
    delta = (with_low_bits(outputs.o, outputs.o_low).double() * x.do.double()).sum(-1)
    return lse2.flatten(2), minus_delta.flatten(2), delta, dq_accum.view(case.B * case.kv_heads, -1), counts


def mend(case: Case, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the backward makes of a float64 LSE: dO, and which query tiles have it, (B, H, tiles); the LSE in base 2
    and -delta, (B, H, tiles · BLOCK_M); dO and o as they were."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    x = tensors(case)
    problem, inputs = _call(case, x)
    outputs = backend.forward(problem, inputs)._replace(lse=lse)
    launch = HopperBackward(problem, inputs, outputs, Outputs(x.do, dlse), Needs(True, True, True, True))
    stats, counts, dq_accum = launch.buffers(x.q)
    do = launch.empty_mended().fill_(float("nan"))
    launch.before(outputs.o, outputs.o_low, x.do, lse, dlse, None, stats, dq_accum, counts, do)
    tiles = case.B * case.H * (stats.numel() // (case.B * case.H * 128))
    coarse = counts.as_strided((tiles,), (1,), launch.flags - tiles).flip(0)
    lse2, minus_delta = stats.view(case.B, case.H, -1, 2, 64).unbind(3)
    return do, coarse.view(case.B, case.H, -1), lse2.flatten(2), minus_delta.flatten(2), x.do, outputs.o


def sink_gradient(case: Case) -> tuple[Tensor, Results]:
    """dSink from what the backward knows of each query, and the reference's results."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    x = tensors(case)
    problem, inputs = _call(case, x)
    exact = run(case, "reference", inputs=x)
    outputs, cotangents = backend.forward(problem, inputs), Outputs(x.do, x.dlse)
    outputs = outputs._replace(lse=exact.lse.double())
    launch = HopperBackward(problem, inputs, outputs, cotangents, Needs(True, True, True, case.bias is not None, True))
    stats, counts, dq_accum = launch.buffers(x.q)
    stats.fill_(float("nan"))
    launch.before(
        exact.o, outputs.o_low, x.do, outputs.lse, x.dlse, None, stats, None if launch.dq_stored else dq_accum,
        counts, launch.empty_mended(),
    )  # fmt: skip
    return launch.sink_gradient(inputs.sink, stats, stats), exact


def early(case: Case) -> dict[str, bool]:
    """Which kernels of a backward may begin before the one before them has ended."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    x = tensors(case)
    problem, inputs = _call(case, x)
    outputs = Outputs(x.do, x.do[..., 0].float())
    launch = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, case.bias is not None))
    names = ("before", "main", "after", "reduce_group")
    return {name: bool(x and x.options.get("launch_pdl")) for name in names for x in [getattr(launch, name)]}


@pytest.mark.parametrize("case", REPAIRED, ids=str)
def test_rows_are_computed_again(interpreter, case):
    """Those that are NaN in the LSE, and no other."""
    before, after, spoilt, _ = interpreter(repair, case, 0.3)
    assert torch.equal(after.o[~spoilt], before.o[~spoilt])
    assert torch.equal(after.lse[~spoilt], before.lse[~spoilt])
    hold(case, after)


@pytest.mark.parametrize(
    "case",
    [
        replace(GROUPS, causal=True, N=139, sink="h"),
        replace(USUAL, causal=True, M=139, sink="h", sink_at=20.0),
        replace(USUAL, bias="1hmn", bias_hides=True, blind=True, planted=math.nan, softcap=2.0),
        replace(USUAL, bias="1hm1", mask="bhmn", blind=True),
    ],
    ids=str,
)
def test_statistics_are_computed_again(interpreter, case):
    before, after, spoilt = interpreter(statistics_again, case)
    torch.testing.assert_close(after[spoilt], before[spoilt], rtol=1e-5, atol=1e-5)
    assert (after[~spoilt] == 777.0).all()


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("bits", replace(GROUPS, M=139, N=200)),
        ("blocks", replace(USUAL, B=2, H=4, Hkv=2, N=300, bias="1hmn", sink="h")),
        ("documents", replace(USUAL, M=139, N=139, D=136, causal=True)),
        ("window", replace(GROUPS, M=1, N=3)),
    ],
)
def test_rows_of_a_mask_by_tiles_are_computed_again(interpreter, name, case):
    before, after, spoilt, seen = interpreter(repair, case, 0.3, None, (), name)
    assert torch.equal(after.o[~spoilt], before.o[~spoilt])
    hold(case, after, inputs=tensors(case)._replace(mask=seen))


def test_rows_with_a_bias_of_their_run_are_computed_again(interpreter):
    case = replace(USUAL, B=6, bias="bhmn", causal=True, M=63)
    before, after, spoilt, _ = interpreter(repair, case, 0.3, None, (), None, 2)
    assert spoilt.any()
    torch.testing.assert_close(after.o, before.o, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(after.lse, before.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "terms", [{"causal": True}, {"mask": "bhmn"}, {"window": (9, 2), "bias": "1111"}, {"bias": "bhmn", "blind": True}],
    ids=str,
)  # fmt: skip
def test_what_is_visible_is_not_hidden(interpreter, terms, value):
    """A value that is not finite shows in its own column of the rows that see it."""
    case = replace(USUAL, **terms)
    before, after, _, seen = interpreter(repair, case, 1.0, value, (1, 0, 33, 5))
    touched = torch.zeros(after.o.shape, dtype=torch.bool)
    touched[1, :, :, 5] = seen[1, :, :, 33]
    assert touched.any()
    assert torch.equal(~after.o.isfinite(), touched)
    torch.testing.assert_close(after.o[~touched], before.o[~touched], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(after.lse, before.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bias", "p"), [(None, 0.0), ("1hmn", 0.0), ("b1m1", 0.0), ("b1m1", 0.25), (None, 1.0)], ids=str
)
def test_what_the_backward_knows_of_a_row(interpreter, bias, p):
    """A row that takes no part has probabilities exp2(-inf) = 0 and a delta of 0, whatever its cotangents. With dropout
    probabilities have its weight, and delta is rid of it."""
    case = replace(USUAL, grads="qkvb", bias=bias, M=130, dropout_p=p)
    weight = 4 / 3 if p == 0.25 else 1.0
    generator = torch.Generator().manual_seed(1)
    lse, dlse = (10 * torch.randn(case.B, case.H, case.M, generator=generator) for _ in range(2))
    left_out = (-math.inf, torch.finfo(torch.bfloat16).min, torch.finfo(FLOAT).min, -1e9, 3e38)
    for row, value in enumerate(left_out):
        lse[:, :, row], dlse[:, :, row] = value, math.inf if row == 0 else 1e9
    lse[1, 0, 20], lse[0, 1, 21] = math.nan, -1e7
    lse2, minus_delta, delta, dq_accum, counts = interpreter(prepare, case, lse, dlse)
    known = slice(len(left_out), case.M)
    constant = tensors(case).bias if bias == "b1m1" else torch.zeros(1, 1, case.M, 1)
    expected = (lse.double() - constant[..., 0].double()) / math.log(2) - math.log2(weight)
    torch.testing.assert_close(lse2[..., known].double(), expected[..., known], rtol=1e-6, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        minus_delta[..., known].double(), (dlse - delta)[..., known] / weight, rtol=1e-5, atol=1e-4
    )
    for rows in (slice(0, len(left_out)), slice(case.M, None)):
        assert (lse2[..., rows] == math.inf).all()
        assert (minus_delta[..., rows] == 0).all()
    assert (dq_accum == 0).all()
    assert (counts == 0).all()


def test_do_makes_up_for_the_rounding_of_a_large_lse(interpreter):
    """2^(s - r) P with r, the LSE L in float32, is wrong by 2^(L - r): dO and delta of the row get the inverse."""
    case = replace(USUAL, grads="qkvb", bias="1hmn", M=200)
    generator = torch.Generator().manual_seed(1)
    lse, dlse = (torch.randn(case.B, case.H, case.M, generator=generator) for _ in range(2))
    lse = lse.double()
    lse[:, :, 70] += 1e4  # the second tile of four
    lse[0, 0, 199], lse[0, 1, 199], lse[0, 0, 1], lse[0, 0, 2] = 1e6, -1e6, -math.inf, -1e9
    do, coarse, lse2, minus_delta, given, o = interpreter(mend, case, lse, dlse)
    known = lse.abs() < 1e8
    exact = torch.where(known, lse, 0.0) / math.log(2)
    factor = torch.exp2(exact.float().double() - exact)
    counts = torch.nn.functional.pad((factor - 1).abs() > 2**-14, (0, 56)).unflatten(2, (4, 64)).any(-1)
    assert (coarse == counts).all()
    assert counts[0, 0].tolist() == [False, True, False, True]
    torch.testing.assert_close(lse2[..., : case.M][known].double(), exact[known], rtol=1e-7, atol=1e-7)
    marked = coarse.repeat_interleave(64, 2)[..., : case.M] == 1
    assert do[~marked].isnan().all()
    torch.testing.assert_close(do[marked].double(), (factor[..., None] * given)[marked], rtol=2**-10, atol=1e-7)
    read = torch.where(marked[..., None], do, given).double()
    delta = (o.double() * read).sum(-1) - torch.where(marked, factor, 1.0) * dlse
    torch.testing.assert_close(minus_delta[..., : case.M][known].double(), -delta[known], rtol=1e-5, atol=1e-4)


def test_sums_of_later_heads_are_left_to_others(interpreter):
    case = replace(USUAL, B=90, H=4, Hkv=2, D=64, grads="qkv", N=300)
    zeros = torch.zeros(case.B, case.H, case.M)
    *_, dq_accum, counts = interpreter(prepare, case, zeros, zeros)
    zeroed = -(-132 // 3) + 1  # of heads that have three tiles of keys each
    assert (dq_accum[:zeroed] == 0).all()
    assert dq_accum[zeroed:].isnan().all()
    assert len(dq_accum) == 180
    assert (counts == 0).all()


@pytest.mark.parametrize(("batch", "waits"), [(87, True), (88, False)])
def test_the_cast_begins_early_beside_few_of_many_programs(interpreter, batch, waits):
    """Four rounds of 132 programs are 528; a case has three tiles of keys for each of two heads."""
    case = replace(USUAL, B=batch, Hkv=2, D=64, grads="qkv", M=5, N=300)
    found = interpreter(early, case)
    assert found == {"before": False, "main": True, "after": not waits, "reduce_group": False}


@pytest.mark.parametrize(
    "terms",
    [
        {"sink": "bhm"},
        {"sink": "h", "causal": True, "M": 139, "sink_none": True},
        {"sink": "bhm", "dropout_p": 0.3},
        {"sink": "h", "dropout_p": 1.0},
    ],
    ids=str,
)
def test_the_gradient_of_a_sink(interpreter, terms):
    """From the statistics of tiles that reach past the queries."""
    case = replace(USUAL, grads="qkvs", sink_dtype=FLOAT, **terms)
    found, exact = interpreter(sink_gradient, case)
    torch.testing.assert_close(found.view_as(exact.dsink), exact.dsink, rtol=2e-3, atol=2e-3)
