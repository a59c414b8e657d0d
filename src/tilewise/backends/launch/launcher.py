"""Launches of Triton and Gluon kernels that cost the host little; with `short_launch` the one place that knows Triton's
inner launch path.

Triton's own way to a kernel, ``kernel[grid](...)``, costs the host 50 µs: it binds and specialises every argument to
find the compiled kernel. What a call's layout decides is therefore settled once, in a `Launch`. To launch a new kernel,

1. when a call is prepared, say how each tensor reaches the kernel, in the order of its parameters: by TMA (the
   backend's ``descriptor``), by pointer and strides (`strided`), or as a plain `POINTER`; then all other arguments:

       self.main = Launch(kernel, programs, (descriptor(q, 64, 128), strided(o), POINTER), (sizes, c), num_warps=8)

2. at each call, give the tensors alone, in the same order: ``self.main(q, o, lse)``. One that is absent is None, with
   the layout that the kernel expects: ``strided(None)`` is a `Strided` of no tensor, `POINTER` a plain None.

The first call of a `Launch` is Triton's own and compiles. Later ones take the kernel that it found, which is right for
tensors of the same layout: shape, dtype, strides and device. Alignment is looked at here: where a pointer is not a
multiple of 16 and the first one was, another kernel is looked for. A kernel is kept under all that Triton chooses one
by (`Launch.wants`), so that a `Launch` for other sizes, of a cache that grows or the next batch, asks Triton only where
no earlier one wanted the same. Constants make most of that: say them by `constants`, and they are compared by identity.

On Triton 3.6 to 3.9 later calls also leave out Triton's Python around its launcher in C, and keep the descriptors of
the addresses seen last (`short_launch`). Later versions, and launches that hooks watch (profilers set them) or that
need memory beside their arguments, go through `CompiledKernel`.

On Triton 3.9 kernels in Gluon are compiled by the ptxas with which they were made, see `assembler`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver

from tilewise.backends.launch.arguments import (
    POINTER,
    Places,
    Record,
    Strided,
    bound,
    boxed,
    layout_kind,
    placed,
    row_strides,
    sink_layout,
    strided,
    strided_if_any,
    strided_rows,
    strides_of,
)
from tilewise.backends.launch.short_launch import VERSION, Members, Short, Varied, knows_launcher

__all__ = [
    "POINTER",
    "VERSION",
    "Launch",
    "Members",
    "Places",
    "Record",
    "Strided",
    "Varied",
    "Whole",
    "boxed",
    "constants",
    "kinds",
    "resized_launches",
    "row_strides",
    "sink_layout",
    "strided",
    "strided_if_any",
    "strided_rows",
]

_WHOLE = -2  # what a resized launch is kept under, beside what `Short` keeps
_PTX = 88  # what ptxas 12.9 reads
_assembling = threading.Lock()


T = TypeVar("T", bound=tuple)
_constants: dict[tuple, tuple] = {}
_known_constants: set[int] = set()  # by identity, those among the values of `_constants`, which live on
_kernels: dict[tuple, CompiledKernel] = {}  # by what a launch wants of one
_families: dict[tuple, int] = {}  # a number for all that launches want beside their integers
_numbers = count()  # those, of which no two threads get the same
_keeping = threading.Lock()


def constants(values: T) -> T:
    """What a kernel knows when it is compiled: ``values``, a named tuple, with a tl.constexpr for each.

    Equal values give the same object. Fields have one type each: 1 and True are equal.
    """
    key = (type(values), *values)
    found = _constants.get(key)
    if found is None:
        fields = (constants(x) if isinstance(x, tuple) else tl.constexpr(x) for x in values)
        found = _constants.setdefault(key, type(values)(*fields))
    _known_constants.add(id(found))
    return found  # type: ignore[return-value]


class Launch:
    """A kernel with all of its arguments but the tensors, for one layout of these.

    Args:
        kernel: made by triton.jit or gluon.jit.
        programs: how many run.
        layouts: how tensors reach its leading parameters.
        numbers: its other arguments, in their order.
        options: Triton's num_warps and num_stages; launch_pdl: it may begin before the kernel before it has ended.
    """

    __slots__ = (
        "_aligned", "_compiled", "_family", "_layouts", "_places", "_records", "_short", "_wants", "kernel", "numbers",
        "options", "programs",
    )  # fmt: skip

    def __init__(
        self, kernel: Any, programs: int, layouts: Sequence[Any], numbers: Sequence[Any], **options: int
    ) -> None:
        self.kernel, self.programs = kernel, programs
        # Products and sums in one instruction: Triton 3.9 warns that 3.10 will make two unless it is asked for one.
        self.options = {"enable_fp_fusion": True, **options}
        if _chooses_assembler(kernel):
            self.options["ptx_version"] = _PTX
        self._layouts, self.numbers = tuple(layouts), tuple(numbers)
        self._places: tuple[Any, Any] | None = None  # of a resized one, how tensors lie, if someone asks
        self._records = any(isinstance(x, Record) for x in self._layouts)
        self._family: _Family | None = None
        self._wants: tuple | None = None
        self._aligned: tuple[bool, ...] = ()  # which tensors began on a multiple of 16 bytes when it was compiled
        self._compiled: CompiledKernel | None = None
        self._short: Short | None = None

    @property
    def layouts(self) -> tuple[Any, ...]:
        found = self._places  # which another thread may have used up
        if found is not None:
            places, values = found
            self._layouts = tuple([placed(x, at, values) for x, at in zip(self._layouts, places, strict=True)])
            self._places = None
        return self._layouts

    def resized(
        self, programs: int, places: Places, given: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> Callable[..., Any]:  # fmt: skip
        """The same for other sizes, see `resized_launches`; places: of each layout where in ``given`` its tensor's
        shape and strides stand."""
        at = len(given)
        varied = Varied(places, at, range(at + 1, at + 1 + len(numbers)))
        values = (*given, programs, *numbers)
        family = self.family()
        (found,) = resized_launches([(self, varied)], family.made, family.codes(numbers), values)
        return partial(found.run, values, {}) if found.is_short else found.whole(values, {})

    def family(self) -> _Family:
        if self._family is None:
            self._family = _Family(self)
        return self._family

    def with_sizes(
        self, programs: int, places: Places, values: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> Launch:  # fmt: skip
        """A launch of its own for other sizes, see `resized_launches`."""
        new = object.__new__(Launch)
        new.kernel, new.options, new._records, new._family = self.kernel, self.options, self._records, self.family()
        new.numbers = tuple([_alike(x, y) for x, y in zip(numbers, self.numbers, strict=True)])
        new.programs, new._layouts, new._places = programs, self.layouts, (places, values)
        new._wants, new._aligned, new._compiled, new._short = None, (), None, None
        return new

    def __call__(self, *tensors: Tensor | None) -> None:
        if self._short is not None and not _watched() and self._short.launch(tensors):
            return
        _bind_context(tensors)
        aligned = tuple([x is not None and x.data_ptr() % 16 == 0 for x in tensors])
        compiled = self._compiled if aligned == self._aligned else None
        if compiled is None:
            wants = self.wants(tensors, aligned)
            compiled = _kernels.get(wants)
            if compiled is None:
                compiled = self._ask(tensors, wants)
                self._keep(compiled, aligned, tensors)
                return
            self._keep(compiled, aligned, tensors)
            if self._short is not None and not _watched() and self._short.launch(tensors):
                return
        compiled[self.programs, 1, 1](*self._arguments(tensors))

    def wants(self, tensors: Sequence[Tensor | None], aligned: Sequence[bool]) -> tuple:
        """All that Triton looks at to choose a kernel for tensors in these layouts, ``aligned`` to 16 bytes or not.

        Of an integer whether it is 1, whether 16 divides it, and its width; the value of what is a constant; of a float
        nothing; dtypes, boxes and their layouts in shared memory.
        """
        if self._wants is None:
            family = self.family()
            self._wants = (family.number, *family.codes(self.numbers), *_codes(strides_of(self.layouts)))
        kinds = [None if x is None else (x.dtype, x.device) for x in tensors]
        return (self._wants, *kinds, *aligned)

    def _arguments(self, tensors: Sequence[Tensor | None]) -> tuple:
        if not self._records:
            return (*map(bound, self.layouts, tensors), *self.numbers)
        given = iter(tensors)
        found = [
            layout.kind(*[bound(x, next(given)) for x in layout.layouts])
            if isinstance(layout, Record)
            else bound(layout, next(given))
            for layout in self.layouts
        ]
        return (*found, *self.numbers)

    def _ask(self, tensors: Sequence[Tensor | None], wants: tuple) -> CompiledKernel | None:
        """Triton, which launches too. The interpreter compiles nothing."""
        with assembler(self.kernel):
            compiled = self.kernel[(self.programs,)](*self._arguments(tensors), **self.options)
        if not isinstance(compiled, CompiledKernel):
            return None
        return _kernels.setdefault(wants, compiled)

    def _keep(
        self, compiled: CompiledKernel | None, aligned: tuple[bool, ...], tensors: Sequence[Tensor | None]
    ) -> None:
        """The first that is found: addresses that are aligned otherwise are rare, and are looked up each time."""
        if self._compiled is None and compiled is not None:
            with _keeping:  # another thread's kernel may be one for other addresses
                if self._compiled is not None:
                    return
                self._aligned, self._compiled = aligned, compiled
            if knows_launcher(compiled):
                self._short = _short(self, compiled, tensors)
                if self._family is not None:
                    self._family.short.setdefault(self._family.codes(self.numbers), self._short)


def resized_launches(
    bases: Sequence[tuple[Launch, Varied]], made: dict[tuple, list[Whole]], kind: tuple, values: tuple[Any, ...]
) -> list[Whole]:
    """The launches of a pass for other sizes, ``values``: tensors lie elsewhere, programs are others, and integers
    differ among those numbers that are no constants. ``run`` of each takes values, a dictionary of its own that lives
    as long as these, and its tensors.

    bases: the launches, and where in values what differs stands, the same each time. Of strides those are 1, or
    multiples of 16, that were before, which axes are of size 1 stays, and all numbers are of 32 bits where they were.
    made: those that were found before, by ``kind``, in which `kinds` of all integers are that differ.
    """
    known = made.get(kind)
    if known is not None:
        return known
    found = [Whole(base, varied, values) for base, varied in bases]
    if all(x.is_short for x in found):
        made[kind] = found
    return found


class Whole:
    """A launch for other sizes: by the launcher in C where a kernel of its kind has been compiled, see `Short`; by a
    `Launch` of its own where none has, where hooks watch, and for addresses that it was not compiled for."""

    def __init__(self, base: Launch, varied: Varied, values: tuple[Any, ...]) -> None:
        self.base, self.varied, self.run, family = base, varied, self._run, base.family()
        first = family.short.get(family.codes(self._numbers(values)))
        self.is_short = first is not None
        if first is not None:
            short = Short(
                first.compiled, base.layouts, base.numbers, base.programs, first.there, _bind, _watched, self.whole,
                varied, values,
            )  # fmt: skip
            self.run = short.run

    def whole(self, values: tuple[Any, ...], kept: dict[Any, Any]) -> Launch:
        found: Launch | None = kept.get(_WHOLE)
        if found is None:
            numbers = self._numbers(values)
            programs = _varied(self.base.programs, self.varied.programs, values)
            found = self.base.with_sizes(programs, self.varied.layouts, values, numbers)
            kept[_WHOLE] = found
        return found

    def _numbers(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([_varied(x, at, values) for x, at in zip(self.base.numbers, self.varied.numbers, strict=True)])

    def _run(self, values: tuple[Any, ...], kept: dict[Any, Any], *tensors: Tensor | None) -> None:
        self.whole(values, kept)(*tensors)


def _varied(x: Any, at: Members, values: tuple[Any, ...]) -> Any:
    if isinstance(at, tuple):
        return tuple([_varied(y, n, values) for y, n in zip(x, at, strict=True)])
    return x if at is None else values[at]


def _alike(x: Any, base: Any) -> Any:
    """A tuple as the named one that it stands for, which kernels ask for by name."""
    return x if type(x) is type(base) or not isinstance(base, tuple) else type(base)(*x)


_CLASS = bytes(16 if low == 0 else 0 for low in range(256))
_low_bits, _is_one = (15).__and__, (1).__eq__


def kinds(integers: Sequence[int]) -> tuple[Any, ...]:
    """Of each integer of 32 bits what Triton looks at: whether it is 1, and whether 16 divides it."""
    return bytes(map(_low_bits, integers)).translate(_CLASS), *map(_is_one, integers)


class _Family:
    """What a launch and those that are resized from it have in common: all that they want but their integers.

    short: by `codes` of the numbers, that of the first.
    """

    def __init__(self, launch: Launch) -> None:
        layouts, numbers = launch.layouts, launch.numbers
        named = getattr(launch.kernel, "params", ())[len(layouts) :]  # none of an interpreted one
        fixed = [p.is_constexpr for p in named] or [False] * len(numbers)
        # Which numbers are integers that may differ, or have some among them.
        self._single: list[int] = []
        self._among: list[tuple[int, Any]] = []  # and what finds them, or None where it has no other members
        for n, x in enumerate(numbers):
            if fixed[n] or (isinstance(x, tuple) and id(x) in _known_constants):
                continue
            if type(x) is int:
                self._single.append(n)
            elif isinstance(x, tuple):
                members = [at for at, y in enumerate(x) if type(y) is int]
                if len(members) == len(x):
                    self._among.append((n, None))
                elif any(isinstance(y, tuple) for y in x):
                    self._among.append((n, _integers))
                elif len(members) > 1:  # or else it gives no tuple
                    self._among.append((n, itemgetter(*members)))
                elif members:
                    self._among.append((n, itemgetter(slice(members[0], members[0] + 1))))
        kinds = [_value(x) if known else _kind(x) for x, known in zip(numbers, fixed, strict=True)]
        wants = (launch.kernel, *launch.options.items(), *map(layout_kind, layouts), *kinds)
        self.number = _families.setdefault(wants, next(_numbers))
        self.short: dict[tuple[int, ...], Short] = {}
        self.made: dict[tuple, list[Whole]] = {}

    def codes(self, numbers: Sequence[Any]) -> tuple[int, ...]:
        """`_codes` of the integers among a launch's numbers."""
        integers = [numbers[n] for n in self._single]
        for n, some in self._among:
            integers += numbers[n] if some is None else some(numbers[n])
        return _codes(integers)


def _integers(x: Any) -> list[int]:
    """All in a tuple and in tuples among its members."""
    if isinstance(x, tuple):
        return [] if id(x) in _known_constants else [i for y in x for i in _integers(y)]
    return [x] if type(x) is int else []


def _codes(integers: Sequence[int]) -> tuple[int, ...]:
    """Of each integer what Triton looks at: whether it is 1, whether 16 divides it, and its width."""
    if integers and (max(integers) >= 2**31 or min(integers) < -(2**31)):
        return tuple([(1 if x == 1 else 0 if x & 15 else 16) + 32 * (not -(2**31) <= x < 2**31) for x in integers])
    return kinds(integers)


def _kind(x: Any) -> Any:
    """Of a number, or a tuple of them, what Triton looks at beside `_Family.codes`."""
    if type(x) is int or type(x) is float:
        return type(x)
    return _value(x)


def _value(x: Any) -> Any:
    if isinstance(x, tuple):
        if id(x) in _known_constants:
            return "constants", id(x)
        return type(x), *[_kind(y) for y in x]
    if isinstance(x, tl.constexpr):  # whose own comparisons take several calls each
        return "constexpr", type(x.value), x.value
    return type(x), x


def _chooses_assembler(kernel: Any) -> bool:
    """Not where the environment names an assembler."""
    chosen = "TRITON_PTXAS_BLACKWELL_PATH" in os.environ
    return VERSION >= (3, 9) and isinstance(kernel, GluonJITFunction) and not chosen


@contextmanager
def assembler(kernel: Any) -> Iterator[None]:
    """Compile a kernel in Gluon by ptxas 12.9 on Triton 3.9, which brings it and takes 13.4 for Hopper instead.

    ptxas: 13.4 spills in half of the kernels, and runs all wgmma of the backward at 64 dimensions in series (C7512);
    12.9 does neither. Triton has one choice for a whole process, so that is changed for the time of a compilation: of
    two threads that compile, one in tilewise, the other may get 12.9 too.
    """
    if not _chooses_assembler(kernel):
        yield
        return
    from triton.backends.nvidia.compiler import get_ptxas_version

    with _assembling:
        get_ptxas_version(driver.active.get_current_target().arch)  # is kept, as part of names in Triton's cache
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
            yield


class _Thread(threading.local):
    bound = False


_thread = _Thread()


def _bind_context(tensors: Sequence[Tensor | None]) -> None:
    """Make the device's context current in this thread, where Triton makes descriptors.

    Autograd's threads have none until something calls CUDA's runtime, which PyTorch's allocator need not do, and the
    driver's function behind Triton's descriptors does not look for one.
    """
    if not _thread.bound and any(x is not None and x.is_cuda for x in tensors):
        _bind()


def _watched() -> bool:
    """Whether hooks want to see launches: a chain with members, or a plain function in its place."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _bind() -> None:
    if not _thread.bound:
        torch.cuda.mem_get_info()  # of the runtime's functions one that touches no stream, which may be capturing
        _thread.bound = True


def _short(launch: Launch, compiled: CompiledKernel, tensors: Sequence[Tensor | None]) -> Short:
    there = [None if x is None else 0 if x.data_ptr() % 16 else 15 for x in tensors]
    return Short(compiled, launch.layouts, launch.numbers, launch.programs, there, _bind)
