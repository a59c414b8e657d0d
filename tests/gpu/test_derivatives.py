"""Forward-mode and second derivatives on the device, after Hopper's and Triton's passes, by the rule of helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from derivative_helpers import WAYS, LargestTensor, hold_tangents, no_lse, plain, tangents_like
from helpers import Case, tensors

from tilewise import attention, varlen_attention
from tilewise.backends import Inputs
from tilewise.backends.protocol import Tangents
from tilewise.operator.dispatch import forward_of, tangents_of
from tilewise.spec.score import Band, Score, ScoreNumbers

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
DEVICE = "cuda"
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Case(B=2, H=4, Hkv=2, M=300, N=600, D=64, dtype=BRAIN)
CASES = [
    {},
    {"bias": "1hmn", "causal": True},
    {"bias": "b11n", "sink": "h", "softcap": 3.0, "dtype": HALF},
    {"mask": "b1mn", "blind": True, "sink": "bhm"},
    {"bias": "bhmn", "dtype": FLOAT, "window": (100, 30), "M": 600},
]
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_derivatives(way, changes):
    case = replace(USUAL, **changes)
    x = tensors(case, DEVICE)
    names = [name for name in ("q", "k", "v", "bias", "sink") if getattr(x, name) is not None]
    leaves = [getattr(x, name) for name in names]
    given = tangents_like(leaves)

    def ours(*leaves):
        y = x._replace(**dict(zip(names, leaves, strict=True)))
        return no_lse(attention(y.q, y.k, y.v, bias=y.bias, mask=y.mask, sink=y.sink, return_lse=True, **case.terms))

    def theirs(*leaves):
        return plain(case, x._replace(**dict(zip(names, leaves, strict=True))))

    exact = WAYS[way](theirs, [y.double() for y in leaves], [y.double() for y in given])
    for y, other, right in zip(*(WAYS[way](f, leaves, given) for f in (ours, theirs)), exact, strict=True):
        error, allowed = ((z.double() - right).abs().max() for z in (y, other))
        # Unfused torch may be exact by chance: half a step of the largest number is allowed.
        step = max(1e-5, torch.finfo(y.dtype).eps / 2)
        assert error <= 2 * allowed + step * right.abs().max()


# By Triton's kernel, after either backend's forward: TMA and pointers, each loop over the keys, each head dimension.
KERNEL = [
    {},
    {"D": 128, "causal": True},
    {"D": 128, "bias": "1hmn", "causal": True, "layout": "heads_last"},
    {"D": 128, "bias": "bkmn", "bias_dtype": FLOAT, "softcap": 20.0},
    {"D": 128, "bias": "1hmn", "mask": "b1mn", "blind": True},
    {"D": 128, "bias": "1hmn", "layout": "sliced", "M": 129, "N": 127},
    {"D": 128, "Dv": 64, "mask": "b11n", "planted": math.nan},
    {"D": 32, "Dv": 96, "window": (50, 20), "bias": "1hm1", "dtype": HALF},
    {"D": 256, "bias": "11mn", "bias_hides": True, "dtype": HALF},
    {"D": 256, "causal": True, "planted": math.inf, "window": (40, 0)},
    {"D": 72, "bias": "b11n", "sink": "bhm", "sink_none": True},
    {"M": 1, "N": 3, "bias": "1h1n"},
    {"D": 128, "dtype": FLOAT, "bias": "bhmn", "bias_scale": 1e6},
    {"dtype": FLOAT, "bias": "1111", "sink": "h", "sink_at": 1e4},
]


@pytest.mark.parametrize("changes", KERNEL, ids=str)
def test_the_kernel(changes):
    hold_tangents(replace(USUAL, **changes), device=DEVICE)


@pytest.mark.parametrize("given", ["q", "k", "v", "b", "s", "qk", "vb"])
@pytest.mark.parametrize("D", [64, 128])
def test_absent_tangents(given, D):
    case = replace(USUAL, D=D, bias="1hmn", sink="h", softcap=2.0, causal=True, dtype=HALF)
    hold_tangents(case, given, DEVICE)


@pytest.mark.parametrize("changes", [{"dropout_p": 0.3}, {"D": 264}, {"D": 136, "dtype": FLOAT}], ids=str)
def test_what_the_kernel_declines(changes):
    hold_tangents(replace(USUAL, **changes), "qkv", DEVICE, fused=False)


def test_tangents_at_any_address():
    """Rows that no TMA descriptor can hold, and an expanded one: equal numbers but for the order of sums."""
    x = tensors(replace(USUAL, bias="1hmn"), DEVICE)
    inputs, terms = Inputs(*x[:4], None), ScoreNumbers.of(Score.of(Band(), 64), False, "auto")
    outputs = forward_of(inputs, terms)(inputs)
    given = Tangents(*tangents_like(x[:4]))._replace(q=torch.ones_like(x.q))
    others = [torch.stack([y, y], -1)[..., 1] for y in given[1:4]]
    others = Tangents(torch.ones(1, device=DEVICE, dtype=BRAIN).expand_as(x.q), *others)
    found, expected = (tangents_of(inputs, outputs, y, terms)(inputs, outputs, y) for y in (others, given))
    torch.testing.assert_close(found[:2], expected[:2], rtol=2e-2, atol=2e-2)


@each_way
def test_packed(way):
    """Two sequences as the padded batch has them."""
    case = Case(B=2, H=2, Hkv=2, M=130, N=130, D=64, dtype=FLOAT)
    x = tensors(case, DEVICE)
    offsets = torch.tensor([0, 130, 260], device=DEVICE)

    def ours(*qkv):
        rows = [y.transpose(1, 2).flatten(0, 1) for y in qkv]
        o, lse = varlen_attention(*rows, offsets, offsets, 130, 130, return_lse=True)
        return o.unflatten(0, (2, 130)).transpose(1, 2), lse.unflatten(1, (2, 130)).transpose(0, 1)

    def theirs(*qkv):
        return plain(case, x._replace(q=qkv[0], k=qkv[1], v=qkv[2]))

    given = tangents_like(x[:3])
    found, expected = (tuple(WAYS[way](f, x[:3], given)) for f in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@each_way
def test_no_matrix_of_scores(way):
    case = replace(USUAL, B=1, M=4096, N=4096)
    x = tensors(case, DEVICE)
    with LargestTensor() as found:
        WAYS[way](lambda *qkv: (attention(*qkv, causal=True),), x[:3], tangents_like(x[:3]))
    assert found.elements <= 4 * 512 * 512
