"""The hardware as the judge of tilewise.layouts: wgmma reads what TMA wrote, told where by our descriptors alone.

Every case also compares shared memory, byte by byte, with where `Operand.offset` says that TMA puts each element.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import wgmma_proof
from wgmma_proof import B_AT, KINDS, M, N, Tile, shares

from tilewise.layouts import AtomOrder, Major, Operand, Role, SwizzleMode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wgmma needs a GPU of compute capability 9.0",
)

ORDERS = pytest.mark.parametrize("order", AtomOrder, ids=lambda order: order.value)
SWIZZLES = pytest.mark.parametrize("swizzle", SwizzleMode, ids=lambda mode: mode.name)


@pytest.fixture(scope="module")
def proof():
    return wgmma_proof.Proof()


def tiles(kind, swizzle, a, b, order):
    """A and B of 128 rows and 256 bytes of K: several atoms in each direction, in every mode."""
    bits = KINDS[kind].bits
    depth = 8 * 256 // bits
    return (
        Tile.random(kind, Operand((M, depth), bits, swizzle, a, order), 1),
        Tile.random(kind, Operand((N, depth), bits, swizzle, b, order), 2),
    )


def exact(a, b):
    return a.values.cpu().double() @ b.values.cpu().double().T


def multiply(proof, a, b, change_a=None, change_b=None):
    """D, with some field of all descriptors of A or of B replaced."""
    shares_a, shares_b = shares(a.operand, Role.A, 0), shares(b.operand, Role.B, B_AT)
    shares_a = [replace(s, descriptor=replace(s.descriptor, **(change_a or {}))) for s in shares_a]
    shares_b = [replace(s, descriptor=replace(s.descriptor, **(change_b or {}))) for s in shares_b]
    result, image_a, image_b = proof.run(a, b, shares_a, shares_b)
    assert torch.equal(image_a, a.image()), "TMA put A elsewhere"
    assert torch.equal(image_b, b.image()), "TMA put B elsewhere"
    return result.double()


@ORDERS
@pytest.mark.parametrize("b", Major, ids=lambda major: f"b-{major.value}")
@pytest.mark.parametrize("a", Major, ids=lambda major: f"a-{major.value}")
@SWIZZLES
def test_sixteen_bits(proof, swizzle, a, b, order):
    left, right = tiles("bf16", swizzle, a, b, order)
    assert torch.equal(multiply(proof, left, right), exact(left, right))


@ORDERS
@pytest.mark.parametrize("kind", ["e4m3", "tf32"])
@SWIZZLES
def test_other_widths_are_k_major(proof, kind, swizzle, order):
    left, right = tiles(kind, swizzle, Major.K, Major.K, order)
    assert torch.equal(multiply(proof, left, right), exact(left, right))


@ORDERS
@pytest.mark.parametrize("lbo", [0, 48, 8192])
@pytest.mark.parametrize("swizzle", [SwizzleMode.B32, SwizzleMode.B64, SwizzleMode.B128], ids=lambda mode: mode.name)
def test_lbo_is_ignored_in_swizzled_k_major(proof, swizzle, lbo, order):
    left, right = tiles("bf16", swizzle, Major.K, Major.K, order)
    change = {"leading_byte_offset": lbo}
    assert torch.equal(multiply(proof, left, right, change, change), exact(left, right))


@ORDERS
@pytest.mark.parametrize(
    ("swizzle", "major", "field"),
    [
        *((swizzle, Major.K, "stride_byte_offset") for swizzle in SwizzleMode),
        (SwizzleMode.NONE, Major.K, "leading_byte_offset"),
        *((swizzle, Major.MN, "stride_byte_offset") for swizzle in SwizzleMode),
        *((swizzle, Major.MN, "leading_byte_offset") for swizzle in SwizzleMode),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_other_wrong_stride_gives_a_wrong_product(proof, swizzle, major, field, order):
    """Halved, so that nothing outside shared memory is read. Shows as well that the tests above could fail."""
    left, right = tiles("bf16", swizzle, major, major, order)
    value = getattr(shares(right.operand, Role.B, B_AT)[0].descriptor, field)
    wrong = multiply(proof, left, right, change_b={field: value // 32 * 16})
    assert not torch.equal(wrong, exact(left, right))
