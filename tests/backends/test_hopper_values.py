"""How values by distance lie in memory for TMA on Hopper: which are copied, and how the view of them is described."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.spec.relative import skewed
from tilewise.spec.score import Distances

pytest.importorskip("triton")

from tilewise.backends.gluon import values

BRAIN, FLOAT = torch.bfloat16, torch.float32


def of(*shape, dtype=BRAIN):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "reverse", "fits"),
    [
        (of(2, 3, 16, 1025), False, True),
        (of(2, 3, 16, 1025), True, False),
        (of(2, 3, 16, 1024), False, False),
        (of(2, 3, 16, 1033)[..., :1024], False, True),
        (of(2, 3, 16, 1033)[..., 8:1032], False, True),
        (of(2, 3, 16, 1033)[..., 1:1025], False, False),  # its address
        (of(2, 3, 15, 1025), False, False),  # the stride of a head
        (of(2, 3, 16, 1025)[:, :, :15], False, True),
        (of(2, 3, 16, 9), False, True),
        (of(2, 3, 16, 1), False, False),
        (of(2, 3, 16, 9)[..., :1], False, True),
        (of(2, 1, 16, 9).expand(2, 3, 16, 9), False, False),
        (of(2, 1, 1, 9).expand(2, 3, 16, 9), False, False),
        (of(2, 3, 17, 16).mT, False, False),
        (of(2, 3, 16, 5, dtype=FLOAT), False, True),
        (of(2, 3, 16, 8, dtype=FLOAT), False, False),
        (of(1, 1, 15, 1025), False, True),
    ],
)
def test_values_that_tma_reads_are_not_copied(x, reverse, fits):
    distances = Distances("query", -8, x.shape[3], reverse)
    assert values.fits(x, distances) == fits
    check_layout(x, distances, fits)
    for lo in (-9, -1, 5):
        check_layout(x, Distances("query", lo, x.shape[3], reverse), False)


def check_layout(x, distances, fits):
    laid, reverse, upright = values.Skewed(x, distances), distances.reverse, replace(distances, reverse=False, lo=-8)
    front = values.front_of(distances, x.dtype)
    assert front % values.step_of(x.dtype) == distances.lo % values.step_of(x.dtype)
    assert laid.copies == (not fits)
    x.copy_(torch.arange(x.shape[3]) % 100) if x.stride(1) else None
    assert all(like.is_meta for like in (laid.like, laid.gradient_plain, laid.gradient_like))
    found = laid.laid_out(x)
    assert torch.equal(found[..., front:], x.flip(3) if reverse else x)
    assert (found is x) == fits
    assert values.fits(found, upright)
    assert (laid.like.shape, laid.like.stride()) == (skewed(found).shape, skewed(found).stride())
    sums = laid.empty_gradient(x)
    assert values.fits(sums, upright)
    assert (sums[..., front:].shape, sums.stride()) == (laid.gradient_plain.shape, laid.gradient_plain.stride())
    assert laid.gradient_like.stride() == skewed(sums).stride()
    sums[..., front:] = found[..., front:]
    gradient, like = laid.gradient(sums, x), torch.empty_like(x)
    assert torch.equal(gradient, x)
    assert (gradient.shape, gradient.dtype, gradient.stride()) == (like.shape, like.dtype, like.stride())


def test_the_view_stays_in_the_memory_of_the_values():
    for M, R in [(16, 1025), (15, 3), (7, 1)]:
        laid = values.empty_values(of(2, 3, M, R), Distances("query", -3, R))
        view, room = skewed(laid), laid._base.numel()
        last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        assert last < room
