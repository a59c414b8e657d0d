"""Launches of Triton and Gluon kernels that cost the host little; the one place that knows Triton's inner launch path.

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

On Triton 3.6 later calls also leave out Triton's Python around its launcher in C, and keep the descriptors of the
addresses seen last. Other versions, and launches that hooks watch (profilers set them), go through `CompiledKernel`.

On Triton 3.9 kernels in Gluon are compiled by the ptxas with which they were made, see `assembler`.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver

from tilewise.backends.kernel_arguments import (
    ENDS,
    PLACE,
    POINTER,
    Indices,
    Places,
    Record,
    Strided,
    bound,
    boxed,
    joined,
    layout_kind,
    place,
    placed,
    places_of,
    row_strides,
    sink_layout,
    strided,
    strided_if_any,
    strides_of,
)

__all__ = [
    "ENDS",
    "PLACE",
    "POINTER",
    "Launch",
    "Places",
    "Record",
    "Strided",
    "boxed",
    "constants",
    "kinds",
    "place",
    "resized_launches",
    "row_strides",
    "sink_layout",
    "strided",
    "strided_if_any",
]

_ADDRESSES = 256  # of one tensor argument, whose descriptors are kept
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_PTX = 88  # what ptxas 12.9 reads
_assembling = threading.Lock()


T = TypeVar("T", bound=tuple)
_constants: dict[tuple, tuple] = {}
_known_constants: set[int] = set()  # by identity, those among the values of `_constants`, which live on
_kernels: dict[tuple, CompiledKernel] = {}  # by what a launch wants of one
_families: dict[tuple, int] = {}  # a number for all that launches want beside their integers


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
        self._places: tuple[Any, ...] | None = None  # of a resized one, what its layouts will have, if someone asks
        self._records = any(isinstance(x, Record) for x in self._layouts)
        self._family: _Family | None = None
        self._wants: tuple | None = None
        self._aligned: tuple[bool, ...] = ()  # which tensors began on a multiple of 16 bytes when it was compiled
        self._compiled: CompiledKernel | None = None
        self._short: _Short | None = None

    @property
    def layouts(self) -> tuple[Any, ...]:
        if self._places is not None and self._family is not None:
            triples = zip(self._layouts, self._family.places, strict=True)
            self._layouts = tuple([placed(x, places, self._places) for x, places in triples])
            self._places = None
        return self._layouts

    def resized(
        self, programs: int, places: Places, given: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> Launch | _Short:  # fmt: skip
        """The same for other sizes: tensors lie elsewhere, and integers differ among those numbers that are no
        constants.

        given: how tensors lie, `place` after `place`, and `ENDS`; places: of each layout where its tensor's begins, the
        same each time, None where a layout stays as it is. Of their strides those are 1, or multiples of 16, that were
        before, which axes are of size 1 stays, and all numbers are of 32 bits where they were.
        """
        family = self._family
        if family is None:
            family = self._family = _Family(self)
        if not family.places:
            family.place(places, given)
        short = family.short.get(family.codes(numbers))
        if short is None:
            return self._resized(programs, given, numbers)
        if short.origin is None:
            short.origin = self, given
            short.shared.place(family.places)
        return short.resized(programs, given, numbers)

    def _resized(self, programs: int, given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Launch:
        family = self._family
        assert family is not None
        new = object.__new__(Launch)
        new.kernel, new.options, new._records, new._family = self.kernel, self.options, self._records, family
        new.programs, new.numbers, new._layouts, new._places = programs, numbers, family.layouts, given
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
            if self._family is None:
                self._family = _Family(self)
            self._wants = (self._family.number, *self._family.codes(self.numbers), *_codes(strides_of(self.layouts)))
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
            self._aligned, self._compiled = aligned, compiled
            if _has_short_way(compiled):
                self._short = _Short(self, compiled, tensors)
                if self._family is not None:
                    self._family.short.setdefault(self._family.codes(self.numbers), self._short)


def resized_launches(
    bases: Sequence[tuple[Launch, Places]], made: dict[tuple, list[Any]], kind: tuple, given: tuple[Any, ...],
    sizes: Sequence[tuple[int, tuple[Any, ...]]],
) -> list[Any]:  # fmt: skip
    """`Launch.resized` of all launches of a pass, each with its places; sizes: programs and numbers of each.

    made: those that were made of the same, by ``kind``, in which `kinds` of all integers are that differ.
    """
    known = made.get(kind)
    if known is not None:
        return [x.resized(programs, given, numbers) for x, (programs, numbers) in zip(known, sizes, strict=True)]
    triples = zip(bases, sizes, strict=True)
    found = [x.resized(programs, places, given, numbers) for (x, places), (programs, numbers) in triples]
    if all(isinstance(x, _Short) for x in found):
        made[kind] = found
    return found


def kinds(integers: Sequence[int]) -> tuple[int, ...]:
    """Of each integer of 32 bits what Triton looks at: whether it is 1, and whether 16 divides it."""
    return tuple([1 if x == 1 else 0 if x & 15 else 16 for x in integers])


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
        self.layouts = layouts
        self.places: list[Any] = []  # of a resized one's layouts, see `place`
        kinds = [_value(x) if known else _kind(x) for x, known in zip(numbers, fixed, strict=True)]
        wants = (launch.kernel, *launch.options.items(), *map(layout_kind, layouts), *kinds)
        self.number = _families.setdefault(wants, len(_families))
        self.short: dict[tuple[int, ...], _Short] = {}

    def place(self, places: Places, given: Sequence[Any]) -> None:
        """Say where layouts of resized ones begin; see `Launch.resized`."""
        self.places = [places_of(x, begin, given) for x, begin in zip(self.layouts, places, strict=True)]

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
        torch.cuda.mem_get_info()  # of the runtime's functions one that touches no stream, which may be capturing
        _thread.bound = True


def _watched() -> bool:
    """Whether hooks want to see launches: a chain with members, or a plain function in its place."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _has_short_way(compiled: CompiledKernel) -> bool:
    """Whether Triton's launcher is the one that `_Short` knows, and needs no memory beside the kernel's arguments."""
    if VERSION != (3, 6):
        return False
    from triton.backends.nvidia.driver import CudaDriver

    m = compiled.metadata
    has_scratch = m.global_scratch_size > 0 or m.profile_scratch_size > 0
    return isinstance(driver.active, CudaDriver) and not has_scratch and None not in (m.tensordesc_meta or ())


def _mask(x: Tensor | None) -> int:
    """15 for a kernel that is compiled for an address that is a multiple of 16."""
    return 15 if x is not None and x.data_ptr() % 16 == 0 else 0


class _Short:
    """Triton 3.6's launcher in C, with its arguments laid out beforehand: a launch fills in addresses and descriptors.

    The arguments are those that Triton's Python hands to it: an address for a pointer, a descriptor followed by its
    shape and strides, any object for what was compiled in. In the place of a tensor by pointer its strides wait for the
    address; in that of a record those of its members.
    """

    __slots__ = ("_arguments", "_descriptors", "_programs", "_whole", "origin", "shared")

    def __init__(self, launch: Launch, compiled: CompiledKernel, tensors: Sequence[Tensor | None]) -> None:
        shared = self.shared = _Shared(compiled, len(launch.numbers))
        arguments: list[Any] = []
        metadata = iter(compiled.metadata.tensordesc_meta or ())
        given = enumerate(tensors)
        for which, layout in enumerate(launch.layouts):
            at = len(arguments)
            shared.places.append((which, at))
            if isinstance(layout, Record):
                members = [(*next(given), of) for of in layout.layouts]
                arguments.append(tuple([None if of is POINTER else of[1:] for _, _, of in members]))
                shared.records.append((at, [(None if x is None else n, _mask(x)) for n, x, _ in members]))
                continue
            n, x = next(given)
            if isinstance(layout, Strided):
                arguments.append(layout if x is None else layout[1:])
                if x is not None:
                    shared.strided.append((at, n, _mask(x)))
            elif layout is POINTER:
                arguments.append(None)
                if x is not None:
                    shared.pointers.append((at, n, _mask(x)))
            else:
                arguments += [None, *layout.shape, *layout.strides]
                shared.descriptors.append((at, n, len(shared.descriptors)))
                shared.boxes.append(_Box.of(layout, next(metadata), at))
        self._arguments = [*arguments, *launch.numbers]
        self._programs = launch.programs
        self._descriptors: dict[int, Any] = {}  # those of the addresses seen last, by these and which one it is
        self.origin: tuple[Launch, tuple[Any, ...]] | None = None  # of which it is resized, and how its tensors lie
        self._whole: Launch | None = None

    def resized(self, programs: int, given: tuple[Any, ...], numbers: tuple[Any, ...]) -> _Short:
        """Of a launch that wants the same kernel; see `Launch.resized`."""
        new = object.__new__(_Short)
        shared = new.shared = self.shared
        new._programs, new._descriptors, new._whole = programs, {}, None
        new.origin = self.origin[0], given  # type: ignore[index]
        new._arguments = arguments = self._arguments.copy()
        for begin, end, pick in shared.spans:
            arguments[begin:end] = pick(given)
        for at, pick in shared.rows:
            arguments[at] = pick(given)
        for at, picks in shared.members:
            rows = zip(arguments[at], picks, strict=True)
            arguments[at] = tuple([row if pick is None else pick(given) for row, pick in rows])
        arguments[shared.numbers :] = numbers
        return new

    def whole(self) -> Launch:
        """Of a resized one: for launches that hooks watch, and addresses that the kernel was not compiled for."""
        if self._whole is None:
            assert self.origin is not None
            base, given = self.origin
            self._whole = base._resized(self._programs, given, tuple(self._arguments[self.shared.numbers :]))
        return self._whole

    def __call__(self, *tensors: Tensor | None) -> None:
        if _watched() or not self.launch(tensors):
            self.whole()(*tensors)

    def launch(self, tensors: Sequence[Any]) -> bool:
        """False, and nothing done, where the kernel was compiled for another alignment."""
        shared, kept = self.shared, self._descriptors
        arguments, odd = self._arguments.copy(), 0
        for at, n, which in shared.descriptors:
            address = tensors[n].data_ptr()  # a multiple of 16, or no descriptor can be made
            arguments[at] = kept.get(address + which) or self._describe(which, tensors[n], address)
        for at, n, mask in shared.strided:
            address = tensors[n].data_ptr()
            odd |= address & mask
            arguments[at] = (address, *arguments[at])
        for at, n, mask in shared.pointers:
            arguments[at] = address = tensors[n].data_ptr()
            odd |= address & mask
        for at, members in shared.records:
            found: list[Any] = []
            for (which_tensor, mask), strides in zip(members, arguments[at], strict=True):
                begin = None if which_tensor is None else tensors[which_tensor].data_ptr()
                odd |= (begin or 0) & mask
                found.append(begin if strides is None else (begin, *strides))
            arguments[at] = tuple(found)
        if odd:
            return False
        shared.launch(self._programs, 1, 1, shared.stream_of(shared.device), *shared.kernel, *arguments)
        return True

    def _describe(self, which: int, x: Tensor, address: int) -> Any:
        """A TMA descriptor, which holds an address and else only a layout, as Triton 3.6's make_tensordesc_arg makes
        it."""
        if not _thread.bound:
            _bind_context((x,))
        box, padding, begin, middle, end = self.shared.boxes[which]
        shape, strides = self._arguments[begin:middle], self._arguments[middle:end]
        descriptor = self.shared.fill(address, *box, shape, strides, padding)
        if len(self._descriptors) >= _ADDRESSES:
            self._descriptors.clear()
        self._descriptors[address + which] = descriptor
        return descriptor


class _Box(NamedTuple):
    """Of a descriptor what does not depend on sizes, and from where to where its shape and strides stand."""

    box: tuple[Any, ...]
    padding: int
    begin: int
    middle: int
    end: int

    @classmethod
    def of(cls, layout: Any, metadata: Any, at: int) -> _Box:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        m, axes = metadata, len(layout.shape)
        box = (m["swizzle"], m["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], m["block_size"])
        return cls(box, 1 if layout.padding == "nan" else 0, at + 1, at + 1 + axes, at + 1 + 2 * axes)


class _Shared:
    """What launches of one kernel share: the kernel, and which arguments tensors and their layouts are."""

    def __init__(self, compiled: CompiledKernel, numbers: int) -> None:
        self.numbers = -numbers  # where they begin, from the end
        # Each: its place in the arguments, which tensor it is, and its `_mask`; of a descriptor, the how manieth.
        self.pointers: list[tuple[int, int, int]] = []
        self.strided: list[tuple[int, int, int]] = []
        self.descriptors: list[tuple[int, int, int]] = []
        # Each: its place, and of its members which tensor, if any, and the mask.
        self.records: list[tuple[int, list[tuple[int | None, int]]]] = []
        self.boxes: list[_Box] = []
        self.places: list[tuple[int, int]] = []  # which layout, and its place in the arguments
        # What a resized one is filled by: arguments from .. to .., or one argument, or of a record each member, and
        # what finds its numbers.
        self.spans: list[tuple[int, int, Callable[..., Any]]] = []
        self.rows: list[tuple[int, Callable[..., Any]]] = []
        self.members: list[tuple[int, list[Callable[..., Any] | None]]] = []
        run = compiled.run
        self.fill: Any = driver.active.utils.fill_tma_descriptor if compiled.metadata.tensordesc_meta else None
        self.launch = run.launch
        if compiled.metadata.tensordesc_meta:  # then it is a function around the launcher, which makes descriptors
            self.launch = inspect.getclosurevars(run.launch).nonlocals["launcher"]
        self.device, self.stream_of = driver.active.get_current_device(), driver.active.get_current_stream
        no_scratch, no_hooks = (None, None), (None, None, None)
        self.kernel = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, *no_scratch, compiled.packed_metadata,
            *no_hooks,
        )  # fmt: skip

    def place(self, places: list[Any]) -> None:
        """Say how resized ones are filled; places: by layout, see `places_of`."""
        spans: list[tuple[int, Indices]] = []
        boxes = {at for at, *_ in self.descriptors}
        for which, at in self.places:
            found = places[which]
            if found is None:
                continue
            if isinstance(found, list):
                self.members.append((at, [None if x is None else itemgetter(*x) for x in found]))
            elif at not in boxes:
                self.rows.append((at, itemgetter(*found)))
            elif spans and spans[-1][0] + len(spans[-1][1]) == at:
                spans[-1] = spans[-1][0], joined(spans[-1][1], found)
            else:
                spans.append((at + 1, found))
        self.spans = [(begin, begin + len(found), itemgetter(*found)) for begin, found in spans]
