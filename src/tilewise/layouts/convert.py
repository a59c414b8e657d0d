"""Conversion between CuTe layouts with a swizzle and linear layouts over F2."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.layouts.cute import ComposedLayout, Layout, Swizzle, coalesce, concatenate
from tilewise.layouts.int_tuple import product
from tilewise.layouts.linear import LinearLayout, is_power_of_two

OFFSET = "offset"


def swizzle_to_linear(swizzle: Swizzle, size: int) -> LinearLayout:
    """Return a swizzle of offsets as a linear layout. The offsets are below ``size``, a power of two."""
    bits = size.bit_length() - 1
    return LinearLayout.of({OFFSET: [(swizzle(1 << bit),) for bit in range(bits)]}, {OFFSET: size})


def cute_to_linear(layout: Layout | ComposedLayout, names: Sequence[str]) -> LinearLayout:
    """Return the linear layout from coordinates in the top-level modes, named ``names``, to ``offset``.

    Raises:
        ValueError: the layout is not linear over F2: a size is not a power of two, or adding offsets carries.
    """
    plain = layout.layout if isinstance(layout, ComposedLayout) else layout
    if len(plain.modes) != len(names):
        raise ValueError(f"{plain} has {len(plain.modes)} modes, got the names {tuple(names)}")
    inputs, used = {}, 0
    for name, mode in zip(names, plain.modes, strict=True):
        for size, _ in mode.flat():
            if not is_power_of_two(size):
                raise ValueError(f"{layout} is not linear over F2: {size} is no power of two")
        bases = []
        for bit in range(product(mode.shape).bit_length() - 1):
            offset = mode(1 << bit)
            if offset & used:
                raise ValueError(f"{layout} is not linear over F2: offsets carry when they are added")
            used |= offset
            bases.append((layout.swizzle(offset) if isinstance(layout, ComposedLayout) else offset,))
        inputs[name] = bases
    # A swizzle moves bits only downwards, so it does not enlarge the range of offsets.
    return LinearLayout.of(inputs, {OFFSET: 1 << used.bit_length()})


def linear_to_cute(linear: LinearLayout) -> ComposedLayout:
    """Return the CuTe layout of a linear layout to ``offset``, with the swizzle of the fewest bits.

    Raises:
        ValueError: there is none with a swizzle of at most 3 bits and a shift of 3.
    """
    for bits in range(4):
        for base in range(8) if bits else (0,):
            swizzle = Swizzle(bits, base, 3)
            strides = [[swizzle(basis[0]) for basis in bases] for _, bases in linear.inputs]
            if all(is_power_of_two(d) for mode in strides for d in mode):  # a swizzle is its own inverse
                modes = [coalesce(Layout((2,) * len(mode), tuple(mode))) for mode in strides]
                return ComposedLayout(swizzle, concatenate(*modes))
    raise ValueError(f"no swizzled CuTe layout is the linear layout\n{linear}")
