"""The launcher: which way a launch takes, and that the short way hands the kernel what Triton's own would."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import Case
from launcher_child import launcher_arguments, resized_arguments, wanted
from relative_helpers import Term

pytest.importorskip("triton")


class Compiled:
    """Stands in for what Triton returns of a launch; counts its own."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    """Stands in for a triton.jit function: every search gives another compiled kernel."""

    def __init__(self):
        self.found = []

    def __getitem__(self, grid):
        def search(*args, **options):
            self.found.append(Compiled())
            return self.found[-1]

        return search


@pytest.fixture
def launch(monkeypatch):
    """A `Launch` of three tensors, by strides, by pointer and absent, and its kernel."""
    from tilewise.backends.launch import launcher

    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(launcher, "knows_launcher", lambda compiled: False)
    kernel = Kernel()
    x = torch.zeros(2, 3, 4, 8)
    layouts = (launcher.strided(x), launcher.POINTER, launcher.strided(None))
    return launcher.Launch(kernel, 6, layouts, (7, 0.5), num_warps=4), kernel


def at(offset: int) -> torch.Tensor:
    """A float32 tensor that begins ``offset`` elements past a multiple of 64 bytes."""
    return torch.zeros(1000)[offset : offset + 192].view(2, 3, 4, 8)


def test_triton_is_asked_once(launch):
    run, kernel = launch
    x, y = at(0), at(0)
    for _ in range(3):
        run(x, y, None)
    (compiled,) = kernel.found
    grid, (rows, pointer, absent, *numbers) = compiled.launches[-1]
    assert len(compiled.launches) == 2
    assert grid == (6, 1, 1)
    assert rows.pointer is x
    assert rows[1:] == x.stride()
    assert pointer is y
    assert absent == (None, 0, 0, 0, 0)
    assert numbers == [7, 0.5]


@pytest.mark.parametrize("odd", [(1, 0), (0, 1), (2, 3)])
def test_another_alignment_is_asked_for(launch, odd):
    """A kernel compiled for multiples of 16 bytes does not get other addresses, nor the other way round."""
    run, kernel = launch
    run(at(0), at(0), None)
    for _ in range(2):
        run(*(at(n) for n in odd), None)
    assert len(kernel.found) == 2
    run(at(0), at(4), None)
    assert [len(compiled.launches) for compiled in kernel.found] == [1, 1]


class Interpreted(Kernel):
    def __getitem__(self, grid):
        return lambda *args, **options: self.found.append(args)


def test_an_interpreter_compiles_nothing(launch):
    run, _ = launch
    run.kernel = Interpreted()
    for _ in range(2):
        run(at(0), at(0), None)
    assert len(run.kernel.found) == 2


class Short:
    """Stands in for the short way."""

    def __init__(self):
        self.launches = 0

    def launch(self, *tensors):
        self.launches += 1
        return True


def test_hooks_see_launches(launch, monkeypatch):
    """Profilers hook Triton's launches; the short way would go past them."""
    from triton import knobs

    run, kernel = launch
    run(at(0), at(0), None)
    run._short = Short()
    run(at(0), at(0), None)
    assert run._short.launches == 1
    assert not kernel.found[0].launches
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, name)
        chain.add(print)
        run(at(0), at(0), None)
        chain.remove(print)
        monkeypatch.setattr(knobs.runtime, name, print)
        run(at(0), at(0), None)
        monkeypatch.setattr(knobs.runtime, name, None)
    assert run._short.launches == 1
    assert len(kernel.found[0].launches) == 4
    run(at(0), at(0), None)
    assert run._short.launches == 2


USUAL = Case(B=2, H=4, Hkv=2, M=70, N=136, D=64, dtype=torch.bfloat16)


TERMS = (Term(starts="batch"), Term("key", R=8, buckets=50), Term("all"))


@pytest.mark.parametrize(
    ("triton", "backend", "case", "terms"),
    [
        ("3.6.0", "hopper", replace(USUAL, bias="1hmn", Hkv=4, sink="h"), ()),
        ("installed", "hopper", replace(USUAL, bias="1hmn", Hkv=4, sink="h"), ()),
        ("3.6.0", "triton", replace(USUAL, bias="1h1n", mask="b1mn", layout="heads_last", dropout_p=0.1), ()),
        ("3.6.0", "triton", replace(USUAL, bias="1hmn"), TERMS),
    ],
    ids=str,
)
def test_the_short_way_hands_over_the_same_arguments(compilers, triton, backend, case, terms):
    """What reaches Triton's launcher in C, in every launch of a forward and a backward: pointers by address."""
    names, own, short = zip(*compilers.run(launcher_arguments, triton, 90, case, backend, terms), strict=True)
    assert {"forward_kernel", "preprocess_kernel", "backward_kernel", "postprocess_kernel"} <= set(names)
    for name, x, y in zip(names, own, short, strict=True):
        assert x == y, name
    assert any("map" in str(x) for x in own)


def test_a_kernel_is_shared_where_triton_would_choose_the_same(compilers):
    """For random problems: equal wants, equal choice, so that no launch gets another's kernel; and hardly one more."""
    found = compilers.run(wanted, "3.6.0", 90, range(20), 10)
    choices = {}
    for wants, chosen in found:
        assert choices.setdefault(wants, chosen) == chosen
    assert len(found) > 500
    assert len(choices) <= 1.1 * len(set(choices.values())) < 0.5 * len(found)


class Two(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("number", "other", "same"),
    [
        (32, 48, True), (3, 5, True), (32, 33, False), (1, 3, False), (1, True, False), (2**31, 2**32, True),
        (16, 2**32, False), (0.5, 1.5, True), (1.0, 1, False), (None, 16, False), (-16, 16, True),
        (-(2**40), 16, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["alone", "member", "beside a record", "in a record"])
def test_numbers_that_triton_tells_apart(launch, number, other, same, where):
    """An integer that is 1, that 16 divides, or that has more than 32 bits wants another kernel than one that is not;
    so does another type. Wherever it stands, also in one that is resized."""
    run, kernel = launch
    place = {
        "alone": lambda x: x, "member": lambda x: Two(x, 7), "beside a record": lambda x: Two(x, Two(7, 0.5)),
        "in a record": lambda x: Two(7, Two(0.5, Two(x, 3))),
    }[where]  # fmt: skip
    wants = [
        type(run)(kernel, 6, run.layouts, (place(x), 0.5), num_warps=4).wants((at(0), at(0), None), (True, True, False))
        for x in (number, other)
    ]
    assert (wants[0] == wants[1]) == same
    if type(number) is type(other) is int:
        first = type(run)(kernel, 6, run.layouts, (place(number), 0.5), num_warps=4)
        resized = first.resized(8, (None, None, None), (), (place(other), 0.5))
        assert resized.wants((at(0), at(0), None), (True, True, False)) == wants[1]
        assert resized.programs == 8


def test_strides_of_a_resized_launch(launch):
    run, kernel = launch
    x, other = at(0), torch.zeros(2, 3, 5, 8)
    run(x, x, None)
    given = (7, other.shape, other.stride())
    resized = run.resized(9, (1, None, None), given, (9, 0.5))
    for _ in range(2):
        resized(other, x, None)
    grid, (rows, pointer, absent, *numbers) = kernel.found[-1].launches[-1]
    assert grid == (9, 1, 1)
    assert rows[1:] == other.stride()
    assert pointer is x
    assert absent == (None, 0, 0, 0, 0)
    assert numbers == [9, 0.5]


class Box:
    """Stands in for a descriptor."""

    def __init__(self, shape, strides, block_shape):
        self.shape, self.strides, self.block_shape = shape, strides, block_shape


@pytest.mark.parametrize(
    ("strides", "rows", "box"),
    [
        ((480, 160, 32, 1), (480, 160, 32, 1), (480, 160, 32, 1)),  # as they are
        ((0, 160, 32, 1), (0, 160, 32, 1), (8, 160, 32, 1)),
        ((488, 160, 40, 1), (0, 160, 40, 1), (8, 160, 40, 1)),
        ((2**31, 160, 32, 1), (0, 160, 32, 1), (8, 160, 32, 1)),
    ],
)
def test_strides_along_an_axis_of_size_1(strides, rows, box):
    """Those that TMA can step by, and that Triton takes for 0's like, stay, so that launches for other sizes may take
    all as they are. Else by pointer 0, by TMA a row; of such launches too."""
    from tilewise.backends.launch.arguments import gives, placed, row_strides, strided, strided_rows

    x = torch.empty_strided((1, 3, 5, 8), strides, dtype=torch.bfloat16, device="meta")
    assert strided(x)[1:] == (0, *strides[1:])
    assert strided_rows(x)[1:] == rows
    assert row_strides(x.shape, strides, 2) == box
    layout = Box([1, 3, 5, 8], list(box), [1, 1, 4, 8])
    other = (1, 3, 7, 8), (strides[0] and strides[0] + 32, 224, 32, 1)
    found = placed(layout, 0, other)
    assert found.strides == [other[1][0] if rows[0] else 8, *other[1][1:]]
    assert found.shape == list(other[0])
    by_pointer = placed(strided_rows(x), 0, other)
    assert by_pointer[1:] == (other[1][0] if rows[0] else 0, *other[1][1:])
    assert all(gives(layout, *other)) == bool(rows[0])


@pytest.mark.parametrize(
    ("version", "more", "known"),
    [
        *(((3, minor), {}, True) for minor in (6, 7, 8, 9)),
        ((3, 10), {}, False), ((3, 9), {"global_scratch_size": 16}, False),
        ((3, 9), {"profile_scratch_size": 16}, False), ((3, 9), {"tensordesc_meta": [None]}, False),
        ((3, 9), {"gsan_enabled": True}, False),
    ],
)  # fmt: skip
def test_launchers_that_are_known(monkeypatch, version, more, known):
    """Those of the versions that a plain install may bring; no launch that takes more than the kernel's arguments."""
    from triton.backends.nvidia.driver import CudaDriver

    from tilewise.backends.launch import short_launch

    monkeypatch.setattr(short_launch, "VERSION", version)
    monkeypatch.setattr(short_launch, "driver", SimpleNamespace(active=object.__new__(CudaDriver)))
    usual = {"global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": None, "gsan_enabled": False}
    metadata = SimpleNamespace(**usual | more)
    assert short_launch.knows_launcher(SimpleNamespace(metadata=metadata, run=metadata)) == known


class Driver:
    """Of Triton's what a `Short` asks for; descriptors are tuples of what they are made of."""

    def __init__(self, launch):
        make = lambda *args: args  # noqa: E731
        self.utils = SimpleNamespace(fill_tma_descriptor=make, fill_tma_descriptor_tiled=make, launch=launch)
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: "stream"


@pytest.fixture(params=[(3, 6), (3, 7)], ids=["all in one row", "parameters as a list"])
def short(monkeypatch, request):
    """``(a function that makes a Short, what the launcher in C gets)``, the same in either form: how many programs
    first, then two numbers, the stream, the kernel, eight more, and the kernel's arguments."""
    from tilewise.backends.launch import short_launch

    given = []

    def launcher(*args):
        if request.param == (3, 7):
            *head, annotations, signature, listed = args
            assert (annotations, signature) == ("annotations", "signature")
            args = (*head, *listed)
        given.append(args)

    monkeypatch.setattr(short_launch, "VERSION", request.param)
    monkeypatch.setattr(short_launch, "driver", SimpleNamespace(active=Driver(launcher)))

    def make(layouts, numbers, there, boxes=(), **resized):
        run = SimpleNamespace(
            launch=(lambda *args: launcher(*args)) if boxes else launcher, launch_cooperative_grid=False,
            launch_pdl=False, arg_annotations="annotations", kernel_signature="signature",
        )  # fmt: skip
        compiled = SimpleNamespace(
            run=run, metadata=SimpleNamespace(tensordesc_meta=boxes), function="kernel", packed_metadata=()
        )
        return short_launch.Short(compiled, layouts, numbers, 6, there, lambda: None, **resized)

    return make, given


def test_the_short_way_declines_another_alignment(short):
    """Of tensors by strides and by pointer that the kernel was compiled for, not of others."""
    from tilewise.backends.launch.launcher import POINTER, strided

    make, given = short
    run = make((strided(at(0)), POINTER, POINTER), (7,), (15, 15, 0))
    assert run.launch(at(0), at(4), at(1))
    for odd in ((at(1), at(0), at(0)), (at(0), at(2), at(0))):
        assert not run.launch(*odd)
    ((programs, *_, rows, pointer, odd, number),) = given
    assert (programs, given[0][3], given[0][4], number) == (6, "stream", "kernel", 7)
    assert rows[1:] == at(0).stride()
    assert pointer % 16 == 0
    assert odd % 16 == 4


def test_who_launches_a_resized_launch(short):
    """The launcher in C; a `Launch` where somebody looks on, and for another alignment."""
    from tilewise.backends.launch.launcher import POINTER, Varied

    make, given = short
    watched, others = [False], []
    whole = lambda values, kept: lambda *tensors: others.append((values, tensors))  # noqa: E731
    varied = Varied((None,), 0, (1, None))
    run = make(
        (POINTER,), (7, 9), (15,), watched=lambda: watched[0], whole=whole, varied=varied, values=(4, 5)
    ).run  # fmt: skip
    x, odd, kept = at(0), at(1), {}
    run((2, 3), kept, x)
    run((2, 3), kept, odd)
    watched[0] = True
    run((2, 3), kept, x)
    ((programs, *_, number, constant),) = given
    assert (programs, number, constant) == (2, 3, 9)
    assert [(values, y) for values, (y,) in others] == [((2, 3), odd), ((2, 3), x)]


def test_a_pointer_within_a_tensor(short):
    """In the short way, in Triton's own, and where there is no tensor."""
    from tilewise.backends.launch.arguments import Within, bound
    from tilewise.backends.launch.launcher import POINTER

    make, given = short
    x, layout = torch.arange(12, dtype=torch.int32), Within(4, 16)
    assert make((POINTER, layout, layout), (7,), (15, 15, None)).launch(x, x, None)
    assert given[-1][-4:] == (x.data_ptr(), x.data_ptr() + 16, None, 7)
    assert bound(layout, x).data_ptr() == x.data_ptr() + 16
    assert bound(layout, None) is None


def test_descriptors_are_kept_by_address(short):
    """As many as there is room for; then they begin anew, and a launch is laid out as before."""
    from tilewise.backends.launch.short_launch import _ADDRESSES

    make, given = short
    layout = SimpleNamespace(shape=[2, 3, 4, 8], strides=[96, 32, 8, 1], block_shape=[1, 1, 4, 8], padding="zero")
    box = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 1, 4, 8]}
    run = make((layout,), (7,), (15,), boxes=(box,))
    x = torch.zeros(4 * (_ADDRESSES + 20) + 192)
    for n in (*range(_ADDRESSES + 20), 3, 3, _ADDRESSES + 19):
        y = x[4 * n : 4 * n + 192].view(2, 3, 4, 8)
        assert run.launch(y)
        descriptor, *sizes, number = given[-1][13:]
        assert descriptor == (y.data_ptr(), 3, 4, 7, [1, 1, 4, 8], layout.shape, layout.strides, 0)
        assert sizes == [*layout.shape, *layout.strides]
        assert number == 7
    assert given[-3][13] is given[-2][13]
    assert given[3][13] is not given[-2][13]


# Lengths of one number of tiles and of others, multiples of 16 and not; the same length where tensors lie otherwise:
# caches of other strides, wide rows, heads last. (A CPU's addresses are all alike: see test_structure.py.)
SQUARE = [("dense", "dense", n, n) for n in (300, 301, 320, 640, 301)]
LAYOUTS = ("dense", "cache", "longer cache", "wide", "heads last")
OTHERWISE = [(x if x in ("heads last", "wide") else "dense", x, M, 333) for x in LAYOUTS for M in (77, 78)][1:]
DECODING = [("dense", layout, 1, n) for layout in ("cache", "longer cache") for n in (33, 100, 501, 699)]


@pytest.mark.parametrize(
    ("backend", "single", "what"),
    [
        ("hopper", True, "causal"), ("hopper", False, "bias"), ("hopper", False, "sink scale"), ("triton", False, ""),
        ("triton", True, "causal sink"), ("hopper", False, "window"), ("triton", False, "causal window scale"),
    ],
)  # fmt: skip
def test_a_resized_launch_hands_over_what_a_new_one_would(compilers, backend, single, what):
    """In every launch of forwards and backwards: the kernel, pointers, shapes and strides of descriptors, numbers,
    programs."""
    more = {"single": single, **{name: name in what for name in ("causal", "window", "scale", "bias", "sink")}}
    calls = [*SQUARE, *OTHERWISE, *DECODING]
    found, resized, triton_way = compilers.run(resized_arguments, "3.6.0", 90, backend, calls, more)
    for call, (mine, alone) in zip(calls, found, strict=True):
        assert mine == alone, call
    assert len(found) == len(calls)
    assert resized > 20, resized
    if not more["bias"] and not more["sink"]:  # whose backward is not resized
        assert triton_way == 0
