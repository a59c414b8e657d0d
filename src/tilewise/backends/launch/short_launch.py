"""Direct calls of Triton's C launcher with prepared arguments, except addresses and descriptors.

The launcher takes the number of programs, the stream, the kernel, and for each parameter an address, a descriptor
followed by its shape and strides, a tuple of an address and strides or of a record's members, or any object for a
constant. A Python loop over these takes longer than the launcher. So `Short` generates two functions, as Triton does
for a kernel's arguments: one fills the argument list with one line per parameter; the other, for launches of other
sizes (`launcher.resized_launches`), builds the list.

Triton 3.6 compiles a launcher per signature, which takes all arguments one by one. From 3.7 on one launcher serves all
kernels: it takes a list, the positions of tuples and constants in it and the types of the others, both from a
CudaLauncher. Triton 3.8 and 3.9 have a sanitizer, gsan, which adds parameters: its kernels go through Triton, and so
do all kernels on versions that `VERSIONS` does not name. Before you add a version, read its launcher.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tilewise.backends.launch.arguments import POINTER, Record, Strided, Within, gives

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
_ADDRESSES = 256  # cached descriptors per launch, at most
_ARGUMENTS = -1  # key of the argument list in the cache of descriptors

Members = int | None | tuple["int | None", ...]


class Varied(NamedTuple):
    """Positions in ``values`` of all that differs between launches; None for what does not."""

    layouts: Sequence[Any]  # of each tensor's shape, which its strides follow; a tuple for a `Record`
    programs: int | None
    numbers: Sequence[Members]  # a tuple for a tuple


class Short:
    """Fast launch of a compiled kernel, for calls in which the same tensors are absent.

    Args:
        layouts, numbers, programs: those of the `Launch` that compiled the kernel.
        there: for each tensor None if it is absent, 15 if the kernel requires a multiple of 16 as its address, else 0.
        bind: called before a descriptor is made.
        watched: of a resized launch, returns True if launch hooks are set.
        whole: of a resized launch, returns the `Launch` of (values, kept) for hooks and for other alignments.
        varied: of a resized launch, the positions in its values.
        values: of a resized launch, an example.
    """

    __slots__ = ("_bind", "compiled", "launch", "run", "there")

    def __init__(
        self, compiled: CompiledKernel, layouts: Sequence[Any], numbers: Sequence[Any], programs: int,
        there: Sequence[int | None], bind: Callable[[], None], watched: Callable[[], bool] | None = None,
        whole: Callable[..., Any] | None = None, varied: Varied | None = None, values: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.compiled, self.there, self._bind = compiled, tuple(there), bind
        metadata: Any = compiled.metadata.tensordesc_meta or ()
        fill: Any = _descriptor_maker() if metadata else None
        launch, kernel = _launcher(compiled, bool(metadata))
        device = driver.active.get_current_device()
        at = Varied([None] * len(layouts), None, [None] * len(numbers)) if varied is None else varied
        writer = _Writer(values)
        boxes: list[tuple[Any, ...]] = []  # `_box` of each descriptor
        descriptors, tensors = iter(metadata), enumerate(there)
        fills: list[tuple[Any, ...]] = []  # position in the list, kind, and number and alignment mask of each tensor
        for layout, begin in zip(layouts, at.layouts, strict=True):
            place = len(writer.constants)
            if isinstance(layout, Record):
                members = [(x, *next(tensors)) for x in layout.layouts]
                writer.record(layout, begin)
                fills.append((place, "record", tuple([(n, mask, x is not POINTER) for x, n, mask in members])))
                continue
            n, mask = next(tensors)
            is_plain = layout is POINTER or isinstance(layout, Within)
            if is_plain or mask is None:
                writer.write(None if is_plain else layout)
                if mask is not None:
                    fills.append((place, "pointer", n, mask, 0 if layout is POINTER else layout.offset))
            elif isinstance(layout, Strided):
                writer.row(layout, begin)
                fills.append((place, "strided", n, mask, 0))
            else:
                fills.append((place, "box", n, len(boxes), *writer.box(layout, begin)))
                boxes.append(_box(layout, next(descriptors)))
        for x, number in zip(numbers, at.numbers, strict=True):
            writer.write(x, number)
        make = _launch_of(len(self.there), tuple(fills), varied is not None, at.programs, VERSION == (3, 6))
        given = launch, driver.active.get_current_stream, self._begin, fill, boxes, programs, device, kernel
        self.run: Callable[..., Any]
        if varied is None:
            self.run = make(*given, writer.constants)
            # Takes the tensors; returns False without a launch if the kernel was compiled for another alignment.
            self.launch = partial(self.run, None, {})
        else:
            self.run = make(*given, writer.function(), watched, whole)

    def _begin(self, kept: dict[int, Any]) -> None:
        """Prepare the creation of descriptors: bind the context, empty a full cache."""
        self._bind()
        if len(kept) >= _ADDRESSES:
            kept.clear()


def knows_launcher(compiled: CompiledKernel) -> bool:
    """True if `Short` knows the C launcher, and the kernel needs no scratch memory or extra arguments."""
    if VERSION not in VERSIONS:
        return False
    from triton.backends.nvidia.driver import CudaDriver

    m = compiled.metadata
    has_scratch = m.global_scratch_size > 0 or m.profile_scratch_size > 0
    is_cacheable = isinstance(driver.active, CudaDriver) and None not in (m.tensordesc_meta or ())
    return is_cacheable and not has_scratch and not getattr(compiled.run, "gsan_enabled", False)


def _launcher(compiled: CompiledKernel, makes_descriptors: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the C launcher and its arguments between the stream and the kernel's."""
    run: Any = compiled.run
    begin = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    no_scratch, no_hooks = (None, None), (None, None, None)  # metadata for the hooks, enter hook, exit hook
    if VERSION == (3, 6):
        launch = run.launch
        if makes_descriptors:  # a Python function wraps the launcher
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        return launch, (*begin, *no_scratch, compiled.packed_metadata, *no_hooks)
    types = run.arg_annotations, run.kernel_signature
    return driver.active.utils.launch, (*begin, compiled.packed_metadata, *no_hooks, *no_scratch, *types)


def _descriptor_maker() -> Any:
    utils = driver.active.utils
    return utils.fill_tma_descriptor if VERSION == (3, 6) else utils.fill_tma_descriptor_tiled


def _box(layout: Any, metadata: Any) -> tuple[Any, ...]:
    """Return a TMA descriptor's size-independent properties, like Triton's make_tensordesc_arg."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    m = metadata
    kind = TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]]
    return m["swizzle"], m["elem_size"], kind, m["block_size"], 1 if layout.padding == "nan" else 0


@lru_cache(1024)
def _launch_of(
    tensors: int, fills: tuple[tuple[Any, ...], ...], resized: bool, programs: int | None, in_a_row: bool
) -> Callable[..., Callable[..., bool]]:
    """Generate a factory of the function that fills an argument list and launches.

    The function of a resized launch also builds the list at its first call. programs: position of their number in
    ``values``, None if fixed. in_a_row: the launcher takes the kernel's arguments one by one, not as a list.
    """
    given = ", ".join(f"t{n}" for n in range(tensors))
    lines: list[str] = []
    checked: list[str] = []
    stored: list[str] = []

    def address(n: int, mask: int) -> str:
        lines.append(f"p{n} = t{n}.data_ptr()")
        if mask:
            checked.append(f"p{n}")
        return f"p{n}"

    made: list[str] = []
    for place, kind, *rest in fills:
        if kind == "record":
            lines.append(f"r = a[{place}]")
            found = []
            for at, (n, mask, strided) in enumerate(rest[0]):
                begin = "None" if mask is None else address(n, mask)
                found.append(f"({begin}, *r[{at}])" if strided else begin)
            lines.append(f"a[{place}] = ({', '.join(found)},)")
        elif kind == "box":  # the address is a multiple of 16, else there would be no descriptor
            n, which, shape, strides = rest
            key = f"{address(n, 0)} + {which}" if which else address(n, 0)
            lines.append(f"d{which} = get({key})")
            sizes = f"box{which}, {shape}, {strides}"
            filled = f"fill(p{n}, swizzle{which}, size{which}, type{which}, {sizes}, padding{which})"
            made.append(f"if d{which} is None: d{which} = kept[{key}] = {filled}")
            stored.append(f"a[{place}] = d{which}")
        else:
            n, mask, offset = rest
            begin = address(n, mask) + (f" + {offset}" if offset else "")
            lines.append(f"a[{place}] = " + (f"({begin}, *a[{place}])" if kind == "strided" else begin))
    boxes = ", ".join(f"(swizzle{n}, size{n}, type{n}, box{n}, padding{n})" for n in range(len(made)))
    if made:
        lines.append(f"if not ({' and '.join(f'd{n}' for n in range(len(made)))}):")
        lines += [f"    {line}" for line in ("begin(kept)", *made)]
        lines += stored
    other = f"return whole(values, kept)({given})" if resized else "return False"
    first = ["a = listed.copy()"]
    if resized:
        first = [
            f"if watched(): {other}", f"a = get({_ARGUMENTS})",
            f"if a is None: a = kept[{_ARGUMENTS}] = listed(values)", "a = a.copy()",
        ]  # fmt: skip
    if checked:
        lines.append(f"if ({' | '.join(checked)}) & 15: {other}")
    count = "programs" if programs is None else f"values[{programs}]"
    body = ["get = kept.get", *first, *lines]
    body += [f"run({count}, 1, 1, stream_of(device), *kernel, {'*a' if in_a_row else 'a'})", "return True"]
    given_to = "run, stream_of, begin, fill, boxes, programs, device, kernel, listed, watched=None, whole=None"
    source = [f"def make({given_to}):"]
    source += [f"    {boxes}{',' * bool(made)} = boxes"] if made else []
    source += [f"    def launch(values, kept, {given}):", *(f"        {line}" for line in body), "    return launch"]
    found_function: Callable[..., Callable[..., bool]] = _function("make", source)
    return found_function


@lru_cache(1024)
def _code(source: str) -> Any:
    return compile(source, "<tilewise launch>", "exec")


def _function(name: str, source: Sequence[str], **known: Any) -> Any:
    exec(_code("\n".join(source)), known)
    return known[name]


class _Writer:
    """Generator of the function that builds an argument list from ``values``.

    It is given an example of these: which axes have size 1, and which of them keep their strides, never differs.
    constants: the argument list of a launch that is not resized.
    """

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.constants: list[Any] = []
        self._items: list[str | tuple[Any]] = []  # source text, or a constant as 1-tuple
        self._known: dict[str, Any] = {}
        self._values = values

    def write(self, x: Any, at: Members = None) -> None:
        """Append an argument: the constant ``x``, or values[at]."""
        if isinstance(at, tuple):
            names = [self._constant(y) if n is None else f"values[{n}]" for y, n in zip(x, at, strict=True)]
            self._append(x, f"({', '.join(names)},)")
        else:
            self._append(x, (x,) if at is None else f"values[{at}]")

    def row(self, layout: Strided, at: int | None) -> None:
        """Append the strides of a tensor by pointer."""
        self._append(layout[1:], (layout[1:],) if at is None else self._row(layout, at))

    def record(self, layout: Record, at: Sequence[int | None] | None) -> None:
        """Append the strides of a record's members, None for a plain pointer."""
        rows = zip(layout.layouts, at or [None] * len(layout.layouts), strict=True)
        names = ["None" if x is POINTER else self._row(x, begin) for x, begin in rows]
        self._append([None if x is POINTER else x[1:] for x in layout.layouts], f"({', '.join(names)},)")

    def box(self, layout: Any, at: int | None) -> tuple[str, str]:
        """Append a descriptor, its shape and strides; return source expressions of shape and strides."""
        self.write(None)
        begin, sizes = len(self.constants), [*layout.shape, *layout.strides]
        middle, end = begin + len(layout.shape), begin + len(sizes)
        self.constants += sizes
        if at is None:
            self._items += [(x,) for x in sizes]
            return f"a[{begin}:{middle}]", f"a[{middle}:{end}]"
        given = gives(layout, self._values[at], self._values[at + 1])
        self._items.append(f"*values[{at}]")
        if all(given):
            self._items.append(f"*values[{at + 1}]")
            return f"values[{at}]", f"values[{at + 1}]"
        self._items += self._strides(layout.strides, given, at)
        return f"values[{at}]", f"a[{middle}:{end}]"

    def function(self) -> Callable[[tuple[Any, ...]], list[Any]]:
        items: list[Any] = []
        for is_constant, some in groupby(self._items, lambda x: isinstance(x, tuple)):
            if is_constant:  # join neighbouring constants
                items.append(f"*{self._constant(tuple([x[0] for x in some]))}")
            else:
                items += some
        source = ["def listed(values):", f"    return [{', '.join(items)}]"]
        found: Callable[[tuple[Any, ...]], list[Any]] = _function("listed", source, **self._known)
        return found

    def _append(self, x: Any, item: str | tuple[Any]) -> None:
        self.constants.append(x)
        self._items.append(item)

    def _constant(self, x: Any) -> str:
        if x is None or type(x) is int or type(x) is bool:
            return repr(x)
        name = f"k{len(self._known)}"
        self._known[name] = x
        return name

    def _row(self, layout: Strided, at: int | None) -> str:
        if at is None:
            return self._constant(layout[1:])
        given = gives(layout, self._values[at], self._values[at + 1])
        return f"values[{at + 1}]" if all(given) else f"({', '.join(self._strides(layout[1:], given, at))})"

    def _strides(self, fixed: Sequence[int], given: Sequence[bool], at: int) -> list[str]:
        """Return the source of each stride: the tensor's in values[at + 1], or the layout's."""
        pairs = zip(fixed, given, strict=True)
        return [f"values[{at + 1}][{n}]" if own else repr(x) for n, (x, own) in enumerate(pairs)]
