"""What runs in the child process of test_hopper_rows.py: the hopper backend's kernels in plain Triton, as Python."""

from __future__ import annotations

from typing import NamedTuple

import torch
from helpers import DROPOUT_SEED, Case, Results, Tensors, reference, rows_of, run, tensors, visible
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
    case: Case, share: float, value: float | None = None, where: tuple = (), tiles: str | None = None
) -> Repaired:
    """Break a share of the rows as the forward kernel does, and let the repair kernel look; first, if there is a
    ``value``, put it into v[where]. tiles: the kernel is given a mask by tiles, that pattern of tile_mask_helpers."""
    from tilewise.backends.gluon.sm90.forward.launch import HopperForward
    from tilewise.backends.kernels.block_mask import flat_mask

    x = tensors(case)
    if value is not None:
        x.v[where] = value
    found = None
    if tiles is not None:
        found, dense = pattern(tiles, case, (64, 128))
        x = x._replace(mask=dense)
    before = run(case, "reference", inputs=x)
    problem, inputs = _call(case, x, found)
    outputs = backend.forward(problem, inputs)
    launch = HopperForward(problem, inputs).nan_fixup
    assert launch is not None
    spoilt = torch.rand(before.lse.shape, generator=torch.Generator().manual_seed(0)) < share
    o, lse = before.o.clone(), before.lse.clone()
    o[spoilt], lse[spoilt] = 7.0, float("nan")
    o_low = None if outputs.o_low is None else outputs.o_low.masked_fill(spoilt[..., None], 7777)
    launch(*inputs[:4], *flat_mask(inputs.mask, inputs.tiles), inputs.sink, inputs.seed, o, o_low, lse)
    if o_low is not None:
        _hold_low_bits(case, o, o_low, outputs.o_low, spoilt)
    return Repaired(before, before._replace(o=o, lse=lse), spoilt, visible(case, x))


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
    stats, counts, dq_accum = launch.buffers(x.q.device)
    stats.fill_(float("nan"))
    dq_accum.fill_(float("nan"))
    counts.fill_(-1)
    launch.before(
        outputs.o, outputs.o_low, x.do, lse, dlse, x.bias if launch.of_rows else None, stats, dq_accum, counts
    )
    lse2, minus_delta = stats.view(case.B, case.H, -1, 2, 64).unbind(3)
    delta = (with_low_bits(outputs.o, outputs.o_low).double() * x.do.double()).sum(-1)
    return lse2.flatten(2), minus_delta.flatten(2), delta, dq_accum.view(case.B * case.kv_heads, -1), counts


def sink_gradient(case: Case) -> tuple[Tensor, Results]:
    """dSink from what the backward knows of each query, and the reference's results."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    x = tensors(case)
    problem, inputs = _call(case, x)
    exact = run(case, "reference", inputs=x)
    outputs, cotangents = backend.forward(problem, inputs), Outputs(x.do, x.dlse)
    launch = HopperBackward(problem, inputs, outputs, cotangents, Needs(True, True, True, case.bias is not None, True))
    stats, counts, dq_accum = launch.buffers(x.q.device)
    stats.fill_(float("nan"))
    launch.before(
        exact.o, outputs.o_low, x.do, exact.lse, x.dlse, None, stats, None if launch.dq_stored else dq_accum, counts
    )
    found = launch.sink_gradient(inputs.sink, exact.lse, stats)
    return found, exact


def early(case: Case) -> dict[str, bool]:
    """Which kernels of a backward may begin before the one before them has ended."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    x = tensors(case)
    problem, inputs = _call(case, x)
    outputs = Outputs(x.do, x.do[..., 0].float())
    launch = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, case.bias is not None))
    names = ("before", "main", "after", "reduce_group")
    return {name: bool(x and x.options.get("launch_pdl")) for name in names for x in [getattr(launch, name)]}
