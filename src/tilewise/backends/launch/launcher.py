"""Launches of Triton and Gluon kernels with little host time.

Triton's ``kernel[grid](...)`` takes 50 µs on the host: it binds and specializes every argument to find the compiled
kernel. A `Launch` does this work once per layout. To launch a new kernel,

1. when a call is prepared, describe each tensor argument in the order of the kernel's parameters: TMA (the backend's
   ``descriptor``), pointer and strides (`strided`), or plain `POINTER`; then all other arguments:

       self.main = Launch(kernel, programs, (descriptor(q, 64, 128), strided(o), POINTER), (sizes, c), num_warps=8)

2. at each call, pass the tensors alone in this order: ``self.main(q, o, lse)``. An absent tensor is None, with the
   layout that the kernel expects: ``strided(None)`` is a `Strided` without a tensor, `POINTER` a plain None.

The first call of a `Launch` goes through Triton, which compiles. Later calls reuse the kernel, which fits all tensors
of equal shape, dtype, strides and device; an unaligned pointer (not a multiple of 16) selects another kernel. Kernels
are cached by everything that Triton specializes on (`Launch.wants`), so a `Launch` for other sizes, as of a growing KV
cache, asks Triton only for new combinations.

On Triton 3.6 to 3.9 later calls also skip Triton's Python code around its C launcher, and cache the TMA descriptors of
recent addresses (`short_launch`). Later versions, launches with hooks (profilers) and kernels with scratch memory use
`CompiledKernel`. Only these two modules depend on Triton's launch path. On 3.9 `assembler` sets the ptxas for Gluon.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
    Within,
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
from tilewise.cache import kernels

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
    "Within",
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

_WHOLE = -2  # key of a resized `Launch`, next to the keys of `Short`
_PTX = 88  # PTX version that ptxas 12.9 reads
_assembling = threading.Lock()


T = TypeVar("T", bound=tuple)
_keeping = threading.Lock()


def constants(values: T) -> T:
    """Return the named tuple ``values`` with tl.constexpr fields."""
    return type(values)(*(constants(x) if isinstance(x, tuple) else tl.constexpr(x) for x in values))


class Launch:
    """Kernel with all arguments except the tensors, for one layout of these.

    Args:
        kernel: made by triton.jit or gluon.jit.
        programs: number of programs (CTAs).
        layouts: layouts of the tensors, the leading parameters.
        numbers: the other arguments, in order.
        options: Triton's num_warps and num_stages; launch_pdl: programmatic dependent launch, the kernel may start
            before the previous one ends.
    """

    __slots__ = (
        "_aligned", "_compiled", "_family", "_layouts", "_places", "_records", "_short", "_wants", "kernel", "numbers",
        "options", "programs",
    )  # fmt: skip

    def __init__(
        self, kernel: Any, programs: int, layouts: Sequence[Any], numbers: Sequence[Any], **options: int
    ) -> None:
        self.kernel, self.programs = kernel, programs
        # Triton 3.9: fused multiply-adds are the default, with a warning that 3.10 requires this option for them.
        self.options = {"enable_fp_fusion": True, **options}
        if _chooses_assembler(kernel):
            self.options["ptx_version"] = _PTX
        self._layouts, self.numbers = tuple(layouts), tuple(numbers)
        self._places: tuple[Any, Any] | None = None  # arguments of `placed` for a resized launch, applied lazily
        self._records = any(isinstance(x, Record) for x in self._layouts)
        self._family: _Family | None = None
        self._wants: tuple | None = None
        self._aligned: tuple[bool, ...] = ()  # which tensors were aligned to 16 bytes when it was compiled
        self._compiled: CompiledKernel | None = None
        self._short: Short | None = None

    @property
    def layouts(self) -> tuple[Any, ...]:
        found = self._places  # read once: another thread may set it to None
        if found is not None:
            places, values = found
            self._layouts = tuple([placed(x, at, values) for x, at in zip(self._layouts, places, strict=True)])
            self._places = None
        return self._layouts

    def resized(
        self, programs: int, places: Places, given: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> Callable[..., Any]:  # fmt: skip
        """Return a function that launches the kernel for other sizes, see `resized_launches`.

        places: for each layout the index in ``given`` of its tensor's shape, which the strides follow.
        """
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
        """Return a separate `Launch` for other sizes, see `resized_launches`."""
        new = object.__new__(Launch)
        new.kernel, new.options, new._records, new._family = self.kernel, self.options, self._records, self.family()
        new.numbers = tuple([_alike(x, y) for x, y in zip(numbers, self.numbers, strict=True)])
        new.programs, new._layouts, new._places = programs, self.layouts, (places, values)
        new._wants, new._aligned, new._compiled, new._short = None, (), None, None
        return new

    def __call__(self, *tensors: Tensor | None) -> None:
        if self._short is not None and not _watched() and self._short.launch(*tensors):
            return
        _bind_context(tensors)
        aligned = tuple([x is not None and x.data_ptr() % 16 == 0 for x in tensors])
        compiled = self._compiled if aligned == self._aligned else None
        if compiled is None:
            wants = self.wants(tensors, aligned)
            compiled = kernels.get(wants)
            if compiled is None:
                compiled = self._ask(tensors, wants)
                self._keep(compiled, aligned, tensors)
                return
            self._keep(compiled, aligned, tensors)
            if self._short is not None and not _watched() and self._short.launch(*tensors):
                return
        compiled[self.programs, 1, 1](*self._arguments(tensors))

    def wants(self, tensors: Sequence[Tensor | None], aligned: Sequence[bool]) -> tuple:
        """Return the key by which Triton specializes a kernel. aligned: of each tensor, to 16 bytes.

        It has for an integer whether it is 1, divisible by 16, and its width; for a float nothing; the values of
        constants; dtypes, TMA boxes and their shared-memory layouts.
        """
        if self._wants is None:
            family = self.family()
            self._wants = (family.wants, *family.codes(self.numbers), *_codes(strides_of(self.layouts)))
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
        """Launch through Triton and return the compiled kernel, None under the interpreter."""
        with assembler(self.kernel):
            compiled = self.kernel[(self.programs,)](*self._arguments(tensors), **self.options)
        if not isinstance(compiled, CompiledKernel):
            return None
        return kernels.put(wants, compiled)

    def _keep(
        self, compiled: CompiledKernel | None, aligned: tuple[bool, ...], tensors: Sequence[Tensor | None]
    ) -> None:
        """Keep the first kernel that is found; kernels for other (rare) alignments are looked up each time."""
        if self._compiled is None and compiled is not None:
            with _keeping:  # another thread may keep a kernel for another alignment
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
    """Return the launches of a pass for other layouts, program counts and non-constant integers.

    Call ``run(values, kept, *tensors)`` of each, where ``kept`` is a dictionary that lives as long as ``values``.

    bases: the launches, and the positions in ``values`` of all that differs; always the same. Strides that were 1 or
    multiples of 16 still are, the same axes have size 1, and 32-bit numbers still have 32 bits.
    made: cache of earlier results by ``kind``, which contains `kinds` of all integers that differ.
    """
    known = made.get(kind)
    if known is not None:
        return known
    found = [Whole(base, varied, values) for base, varied in bases]
    if all(x.is_short for x in found):
        made[kind] = found
    return found


class Whole:
    """Launch for other sizes: through the C launcher (`Short`) if a kernel of its kind has been compiled.

    Otherwise, with launch hooks, or for addresses of another alignment it goes through a separate `Launch`.
    """

    def __init__(self, base: Launch, varied: Varied, values: tuple[Any, ...]) -> None:
        self.base, self.varied, self.run, self.is_short = base, varied, self._run, False
        self._shorten(values)

    def _shorten(self, values: tuple[Any, ...]) -> None:
        """Go through the C launcher from now on, if it can."""
        base, family = self.base, self.base.family()
        first = family.short.get(family.codes(self._numbers(values)))
        if first is not None:
            short = Short(
                first.compiled, base.layouts, base.numbers, base.programs, first.there, _bind, _watched, self.whole,
                self.varied, values,
            )  # fmt: skip
            self.run, self.is_short = short.run, True

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
        self._shorten(values)  # that launch may have compiled the kernel


def _varied(x: Any, at: Members, values: tuple[Any, ...]) -> Any:
    if isinstance(at, tuple):
        return tuple([_varied(y, n, values) for y, n in zip(x, at, strict=True)])
    return x if at is None else values[at]


def _alike(x: Any, base: Any) -> Any:
    """Return ``x`` as the named tuple type of ``base``: kernels read its fields by name."""
    return x if type(x) is type(base) or not isinstance(base, tuple) else type(base)(*x)


_CLASS = bytes(16 if low == 0 else 0 for low in range(256))
_low_bits, _is_one = (15).__and__, (1).__eq__


def kinds(integers: Sequence[int]) -> tuple[Any, ...]:
    """Return what Triton specializes 32-bit integers on: for each whether it is 1, or divisible by 16."""
    return bytes(map(_low_bits, integers)).translate(_CLASS), *map(_is_one, integers)


class _Family:
    """Common properties of a launch and those resized from it: `Launch.wants` except the integers."""

    def __init__(self, launch: Launch) -> None:
        layouts, numbers = launch.layouts, launch.numbers
        named = getattr(launch.kernel, "params", ())[len(layouts) :]  # empty under the interpreter
        fixed = [p.is_constexpr for p in named] or [False] * len(numbers)
        # Positions of the numbers that are integers which may differ, and of tuples with functions that extract theirs.
        self._single = [n for n, x in enumerate(numbers) if type(x) is int and not fixed[n]]
        self._among = [
            (n, get) for n, x in enumerate(numbers) if isinstance(x, tuple) and not fixed[n] and (get := _integers(x))
        ]
        kinds = [_value(x) if known else _kind(x) for x, known in zip(numbers, fixed, strict=True)]
        self.wants = (launch.kernel, *launch.options.items(), *map(layout_kind, layouts), *kinds)
        self.short: dict[tuple[int, ...], Short] = {}  # by `codes` of the numbers
        self.made: dict[tuple, list[Whole]] = {}

    def codes(self, numbers: Sequence[Any]) -> tuple[int, ...]:
        """Return `_codes` of the integers among a launch's numbers."""
        integers = [numbers[n] for n in self._single]
        for n, get in self._among:
            integers += get(numbers[n])
        return _codes(integers)


def _integers(x: tuple) -> Callable[[tuple], Sequence[int]] | None:
    """Return a function that extracts the integers of tuples like ``x``, also nested ones; None without integers."""
    own = [at for at, y in enumerate(x) if type(y) is int]
    nested = [(at, get) for at, y in enumerate(x) if isinstance(y, tuple) and (get := _integers(y))]
    if nested:
        return lambda x: [*[x[at] for at in own], *[i for at, get in nested for i in get(x[at])]]
    if len(own) < 2:  # itemgetter of one index returns no tuple
        return itemgetter(slice(own[0], own[0] + 1)) if own else None
    return itemgetter(*own)


def _codes(integers: Sequence[int]) -> tuple[int, ...]:
    """Return what Triton specializes integers on: for each whether it is 1, divisible by 16, its width."""
    if integers and (max(integers) >= 2**31 or min(integers) < -(2**31)):
        return tuple([(1 if x == 1 else 0 if x & 15 else 16) + 32 * (not -(2**31) <= x < 2**31) for x in integers])
    return kinds(integers)


def _kind(x: Any) -> Any:
    """Return what Triton specializes a number or tuple on besides `_Family.codes`."""
    if type(x) is int or type(x) is float:
        return type(x)
    return _value(x)


def _value(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x), *[_kind(y) for y in x]
    if isinstance(x, tl.constexpr):  # its own comparison takes several calls
        return "constexpr", type(x.value), x.value
    return type(x), x


def _chooses_assembler(kernel: Any) -> bool:
    """True if `assembler` changes the ptxas for ``kernel``; False if the environment names one."""
    chosen = "TRITON_PTXAS_BLACKWELL_PATH" in os.environ
    return VERSION >= (3, 9) and isinstance(kernel, GluonJITFunction) and not chosen


@contextmanager
def assembler(kernel: Any) -> Iterator[None]:
    """Compile a Gluon kernel with ptxas 12.9 on Triton 3.9, which ships it but uses 13.4 for Hopper.

    ptxas 13.4: half of the kernels spill, and all wgmma of the backward at 64 dimensions are serialized (C7512).
    Triton's setting is per process: another thread that compiles at the same time may use 12.9 too.
    """
    if not _chooses_assembler(kernel):
        yield
        return
    from triton.backends.nvidia.compiler import get_ptxas_version

    with _assembling:
        get_ptxas_version(driver.active.get_current_target().arch)  # Triton caches it, as part of its cache keys
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
            yield


class _Thread(threading.local):
    bound = False


_thread = _Thread()


def _bind_context(tensors: Sequence[Tensor | None]) -> None:
    """Make the CUDA context current in this thread, for Triton's driver calls that create descriptors.

    Autograd's threads have no context until they call the CUDA runtime, which PyTorch's allocator does not always do.
    """
    if not _thread.bound and any(x is not None and x.is_cuda for x in tensors):
        _bind()


def _watched() -> bool:
    """True if launch hooks are set: a hook chain with members, or a plain function."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _bind() -> None:
    if not _thread.bound:
        torch.cuda.mem_get_info()  # a runtime call that uses no stream: one may be capturing
        _thread.bound = True


def _short(launch: Launch, compiled: CompiledKernel, tensors: Sequence[Tensor | None]) -> Short:
    there = [None if x is None else 0 if x.data_ptr() % 16 else 15 for x in tensors]
    return Short(compiled, launch.layouts, launch.numbers, launch.programs, there, _bind)
