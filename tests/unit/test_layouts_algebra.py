"""tilewise.layouts: CuTe's algebra and linear layouts over F2, their laws checked by enumeration."""

from __future__ import annotations

import itertools

import pytest

from tilewise.layouts.convert import cute_to_linear, linear_to_cute, swizzle_to_linear
from tilewise.layouts.cute import (
    ComposedLayout,
    Layout,
    Swizzle,
    coalesce,
    complement,
    composition,
    concatenate,
    left_inverse,
    logical_divide,
    logical_product,
    right_inverse,
)
from tilewise.layouts.int_tuple import compact_strides, congruent, coordinate, flatten, product, text
from tilewise.layouts.linear import LinearLayout

SIZES, STRIDES = (1, 2, 3, 4, 6), (0, 1, 2, 3, 4, 8, 12)
ONE_MODE = [Layout(s, d) for s in SIZES for d in STRIDES]
TWO_MODES = [
    Layout(shape, stride)
    for shape in itertools.product((2, 3, 4), repeat=2)
    for stride in itertools.product((0, 1, 2, 3, 8), repeat=2)
]
NESTED = [
    Layout(((2, 2), 3), ((1, 6), 2)),
    Layout((4, (2, 4)), (2, (1, 8))),
    Layout(((2, 3), (2, 2)), ((6, 1), (12, 3))),
    Layout((3, (2, (2, 2))), (8, (4, (1, 2)))),
]
LAYOUTS = [*ONE_MODE, *TWO_MODES, *NESTED]


def offsets(layout):
    return [layout(i) for i in range(layout.size)]


def injective(layout):
    return len(set(offsets(layout))) == layout.size


# Nested tuples and evaluation


def test_int_tuples():
    t = ((2, 3), 4, (5, (6,)))
    assert flatten(t) == (2, 3, 4, 5, 6)
    assert product(t) == 720
    assert text(t) == "((2,3),4,(5,(6)))"
    assert congruent(t, ((1, 1), 1, (1, (1,))))
    assert not congruent(t, ((1, 1), (1,), (1, (1,))))
    assert compact_strides(t) == ((1, 2), 6, (24, (120,)))
    assert coordinate(0, ()) == ()


@pytest.mark.parametrize("shape", [5, (2, 3), ((2, 2), 3), (3, (2, (2, 2)))], ids=str)
def test_coordinates_are_colexicographic(shape):
    compact = Layout(shape)
    assert [compact(coordinate(i, shape)) for i in range(compact.size)] == list(range(compact.size))


def test_a_layout_is_the_inner_product_at_every_depth():
    layout = Layout(((2, 2), 3), ((1, 6), 2))
    for i, j, k in itertools.product(range(2), range(2), range(3)):
        expected = i + 6 * j + 2 * k
        assert layout(((i, j), k)) == layout((i, j), k) == layout(i + 2 * j, k) == layout(i + 2 * j + 4 * k) == expected
    assert str(layout) == "((2,2),3):((1,6),2)"
    assert (layout.size, layout.cosize) == (12, 12)
    for given in LAYOUTS:
        assert given.cosize == max(offsets(given)) + 1


def test_bad_layouts():
    with pytest.raises(ValueError, match=r"stride must be nested as shape \(2,3\) is, got 1"):
        Layout((2, 3), 1)
    with pytest.raises(ValueError, match="at least 1"):
        Layout((2, 0), (1, 2))
    with pytest.raises(ValueError, match="does not fit shape"):
        Layout((2, 3))(1, 1, 1)
    with pytest.raises(ValueError, match="nested deeper"):
        Layout((2, 3))((1, 1), 1)


# The algebra


def test_coalesce():
    for layout in LAYOUTS:
        simple = coalesce(layout)
        assert offsets(simple) == offsets(layout)
        assert all(isinstance(mode.shape, int) for mode in simple.modes)
        assert len(simple.modes) <= max(1, len(layout.flat()))
    assert str(coalesce(Layout((2, (1, 6)), (1, (7, 2))))) == "12:1"


def test_composition():
    done = 0
    for a in [*TWO_MODES, *NESTED]:
        for b in (*ONE_MODE, Layout((2, 2), (1, 4)), Layout((2, 3), (2, 4)), Layout((2, (2, 2)), (4, (2, 1)))):
            if b.cosize > a.size:
                continue
            try:
                c = composition(a, b)
            except ValueError:
                continue
            done += 1
            assert offsets(c) == [a(b(i)) for i in range(b.size)], f"{a} o {b}"
            assert [mode.size for mode in c.modes] == [mode.size for mode in b.modes] or isinstance(b.shape, int)
    assert done > 1000


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Layout((4, 6), (1, 8)), Layout(2, 3)),
        (Layout((4, 6), (1, 8)), Layout(6)),
        (Layout((3, 4), (1, 5)), Layout(2, 4)),
    ],
)
def test_composition_says_when_there_is_none(a, b):
    with pytest.raises(ValueError, match=r"divide|cannot be taken"):
        composition(a, b)


def test_composition_by_mode():
    a = Layout((4, 6), (6, 1))
    b = composition(a, (Layout(2, 2), Layout(3, 2)))
    assert [b(i, j) for j in range(3) for i in range(2)] == [a(2 * i, 2 * j) for j in range(3) for i in range(2)]


@pytest.mark.parametrize("cotarget", [12, 24, 96])
def test_complement(cotarget):
    done = 0
    for a in LAYOUTS:
        try:
            r = complement(a, cotarget)
        except ValueError:
            continue
        done += 1
        assert injective(a)
        assert set(offsets(a)) & set(offsets(r)) == {0}, f"{a} and {r}"
        assert offsets(r) == sorted(offsets(r))
        sums = sorted(i + j for i in offsets(a) for j in offsets(r))
        assert len(set(sums)) == len(sums)
        assert set(range(cotarget)) <= set(sums)
    assert done > 70


def test_no_complement_of_what_is_not_injective():
    for a in TWO_MODES:
        if not injective(a):
            with pytest.raises(ValueError, match="no complement"):
                complement(a, 24)


def test_logical_divide():
    done = 0
    for a in [Layout(24, 1), Layout((4, 6), (6, 1)), Layout((4, 6)), *NESTED]:
        for b in ONE_MODE:
            try:
                d = logical_divide(a, b)
            except ValueError:
                continue
            done += 1
            assert d.size == a.size
            assert sorted(offsets(d)) == sorted(offsets(a))
            assert [d(i, 0) for i in range(b.size)] == [a(b(i)) for i in range(b.size)]
            rest = complement(b, a.size)
            assert [d(0, j) for j in range(rest.size)] == [a(rest(j)) for j in range(rest.size)]
    assert done > 40


def test_logical_divide_by_mode():
    tiled = logical_divide(Layout((8, 12), (12, 1)), (Layout(4), Layout(3)))
    assert str(tiled) == "((4,2),(3,4)):((12,48),(1,3))"
    with pytest.raises(ValueError, match="do not divide"):
        logical_divide(Layout(8), Layout(3))


def test_logical_product():
    a = Layout((2, 2), (1, 2))
    for b in (Layout(6), Layout((2, 3)), Layout((3, 2), (2, 1))):
        p = logical_product(a, b)
        assert p.size == a.size * b.size
        assert sorted(offsets(p)) == list(range(p.size))
        for j in range(b.size):
            assert [p(i, j) for i in range(a.size)] == [a(i) + 4 * b(j) for i in range(a.size)]


def test_inverses():
    for a in LAYOUTS:
        r = right_inverse(a)
        assert [a(r(i)) for i in range(r.size)] == list(range(r.size))
        if sorted(offsets(a)) == list(range(a.size)):
            assert r.size == a.size
        if injective(a) and a.size > 1:
            try:
                left = left_inverse(a)
            except ValueError:  # injective, but its strides do not divide one another
                continue
            assert [left(a(i)) for i in range(a.size)] == list(range(a.size)), f"{a}"


# Swizzles

SWIZZLES = [Swizzle(b, m, s) for b in range(4) for m in range(3) for s in range(b, b + 2)]


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=str)
def test_a_swizzle_is_linear_and_its_own_inverse(swizzle):
    values = [swizzle(i) for i in range(512)]
    assert sorted(values) == list(range(512))
    if swizzle.shift > 0:
        assert [swizzle(v) for v in values] == list(range(512))
    assert all(values[i ^ j] == values[i] ^ values[j] for i in range(0, 512, 7) for j in range(512))
    linear = swizzle_to_linear(swizzle, 512)
    assert [linear(offset=i)[0] for i in range(512)] == values


def test_swizzle_by_hand():
    assert [Swizzle(3, 4, 3)(128 * line + 16 * unit) // 16 % 8 for line in (1, 6) for unit in range(8)] == [
        1, 0, 3, 2, 5, 4, 7, 6,
        6, 7, 4, 5, 2, 3, 0, 1,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="S >= B"):
        Swizzle(3, 4, 2)


# Linear layouts


def columns_layout():
    return LinearLayout.of(
        {"offset": [(0, 1), (0, 2), (1, 1), (2, 2)]},
        {"dim0": 4, "dim1": 4},
    )


def test_a_linear_layout_is_the_xor_of_its_bases():
    layout = columns_layout()
    for i, j in itertools.product(range(16), repeat=2):
        a, b = layout(offset=i), layout(offset=j)
        assert layout(offset=i ^ j) == (a[0] ^ b[0], a[1] ^ b[1])
    assert str(layout) == (
        " - offset=1 -> (0, 1)\n   offset=2 -> (0, 2)\n   offset=4 -> (1, 1)\n   offset=8 -> (2, 2)\n"
        "where out dims are: [dim0 (size 4), dim1 (size 4)]"
    )


def test_invert_and_compose_every_invertible_layout_of_three_bits():
    outputs = {"x": 2, "y": 4}
    vectors = [(x, y) for x in range(2) for y in range(4)]
    invertible = 0
    for bases in itertools.product(vectors, repeat=3):
        layout = LinearLayout.of({"i": bases}, outputs)
        image = [layout(i=i) for i in range(8)]
        if len(set(image)) < 8:
            with pytest.raises(ValueError, match="same output"):
                layout.invert()
            continue
        invertible += 1
        inverse = layout.invert()
        assert [inverse(x=x, y=y) for x, y in image] == [(i,) for i in range(8)]
        assert layout.compose(inverse) == LinearLayout.of({"i": [(1,), (2,), (4,)]}, {"i": 8})
        assert inverse.invert() == layout
    assert invertible == 168  # the order of GL(3, 2)


def test_bad_linear_layouts():
    with pytest.raises(ValueError, match="powers of two, got x of size 3"):
        LinearLayout.of({"i": []}, {"x": 3})
    with pytest.raises(ValueError, match=r"basis \(4,\) of i is outside"):
        LinearLayout.of({"i": [(4,)]}, {"x": 4})
    with pytest.raises(ValueError, match="each basis of i needs 2"):
        LinearLayout.of({"i": [(1,)]}, {"x": 4, "y": 4})
    with pytest.raises(ValueError, match="offset=16 is not inside"):
        columns_layout()(offset=16)
    with pytest.raises(ValueError, match="not inside"):
        columns_layout()(lane=0)
    with pytest.raises(ValueError, match="are not the inputs"):
        columns_layout().compose(columns_layout())
    with pytest.raises(ValueError, match="3 input bits"):
        LinearLayout.of({"i": [(1,), (2,), (4,)]}, {"x": 16}).invert()


# Conversions


@pytest.mark.parametrize("swizzle", [Swizzle(b, m, 3) for b in range(4) for m in range(4)], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        Layout((8, 16), (16, 1)),
        Layout(((8, 2), (16, 2)), ((16, 128), (1, 256))),
        Layout(((16, 2), (8, 2)), ((1, 256), (16, 128))),
    ],
    ids=str,
)
def test_cute_and_linear_are_the_same_function(swizzle, layout):
    cute = ComposedLayout(swizzle, layout)
    linear = cute_to_linear(cute, ("mn", "k"))
    rows, columns = (mode.size for mode in layout.modes)
    places = {(mn, k): cute(mn, k) for mn in range(rows) for k in range(columns)}
    assert all(linear(mn=mn, k=k) == (place,) for (mn, k), place in places.items())
    back = linear_to_cute(linear)
    assert all(back(mn, k) == place for (mn, k), place in places.items())
    assert back.swizzle.bits <= swizzle.bits


def test_what_is_not_linear():
    with pytest.raises(ValueError, match="3 is no power of two"):
        cute_to_linear(Layout((3, 4)), ("mn", "k"))
    with pytest.raises(ValueError, match="carry"):
        cute_to_linear(Layout((4, 4), (1, 3)), ("mn", "k"))
    with pytest.raises(ValueError, match="got the names"):
        cute_to_linear(Layout((4, 4)), ("mn",))
    with pytest.raises(ValueError, match="no swizzled CuTe layout"):
        linear_to_cute(LinearLayout.of({"mn": [(1,), (3,)]}, {"offset": 4}))


def test_concatenate():
    assert str(concatenate(Layout(2, 3), Layout((2, 2)))) == "(2,(2,2)):(3,(1,2))"
