"""Declaration of an operator of PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from tilewise.operator.eager import apply_of
from tilewise.operator.tools import announce, exports_onnx
from tilewise.spec.table import inner_record

_library = torch.library.Library("tilewise", "DEF")

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", int | None: "SymInt?", float: "float",
    float | None: "float?", bool: "bool", str: "str", torch.dtype | None: "ScalarType?", list[bool]: "bool[]",
    list[int]: "SymInt[]", list[int] | None: "SymInt[]?",
}  # fmt: skip


class Operator:
    """Operator ``tilewise::name`` with its kernel, fake kernel and derivative, also for torch.func.

    Its arguments are the fields of ``records``, in order; the functions below receive the records. A field that is
    itself a record or None is replaced by the fields of that record, all None if the record is None.

    Args:
        records: named-tuple classes.
        results: number of tensors returned.
        real: the kernel, ``(*records) -> results``.
        fake: the fake kernel: shapes, dtypes and strides only.
        setup: ``(ctx, *records, results)``; saves in ``ctx`` what ``backward`` reads.
        backward: ``(ctx, *cotangents) -> gradients`` of the leading arguments. None: no derivative.
        tangents: ``(ctx, *tangents) -> tangents`` of the results, from those of all arguments. None: no derivative.
        lacks: the missing derivative in words, for the errors of backward and tangents where they are None.
        plain: ``real`` in PyTorch's own operators, for ONNX.
        part_of: the public function whose backward this operator is.

    torch.func cannot differentiate an operator whose derivative is written in Python: torch.func.jvp would silently
    drop the tangents. An autograd.Function with a setup_context takes the operator's place under its transforms.
    """

    def __init__(
        self,
        name: str,
        records: tuple[type, ...],
        results: int,
        real: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        setup: Callable[..., None] | None = None,
        backward: Callable[..., Sequence[Tensor | None]] | None = None,
        tangents: Callable[..., Sequence[Tensor | None]] | None = None,
        lacks: str | None = None,
        plain: Callable[..., Any] | None = None,
        part_of: str | None = None,
    ) -> None:
        self.name, self._function = name, f"tilewise.{part_of or name}"
        self._records, self._plain, self._tangents = records, plain, tangents
        first = "forward-mode derivative (torch.func.jvp, forward AD)"
        second = "second derivative: its backward cannot be differentiated"
        self._lacks = lacks or (second if backward is None else first)
        fields = [f"{_SCHEMA_TYPES[kind]} {field}" for r in records for field, kind in _fields(r)]
        returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        _library.define(f"{name}({', '.join(fields)}) -> {returns}")
        _library.impl(name, lambda *arguments: real(*self._read(arguments)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilewise::{name}", lambda *a: fake(*self._read(a)), lib=_library)
        self._packet = getattr(torch.ops.tilewise, name)

        def keep(ctx: Any, inputs: tuple, output: Any) -> None:
            if setup is not None:
                setup(ctx, *self._read(inputs), output)

        def differentiate(ctx: Any, *cotangents: Any) -> Any:
            if backward is None:
                self.refuse_tangents()
            gradients = backward(ctx, *cotangents)
            return *gradients, *(None,) * (len(fields) - len(gradients))

        jvp = self.refuse_tangents if tangents is None else tangents
        kernel = _autograd_kernel(self._packet.default, keep, differentiate, jvp)
        _library.impl(name, kernel, "Autograd", with_keyset=True)
        self._transformed = _transformed(self, self._packet, keep, differentiate, jvp)

    def _read(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the records whose fields are the dispatcher's ``arguments``."""
        rest = iter(arguments)
        return [_filled(record, rest) for record in self._records]

    def __call__(self, *arguments: Any) -> Any:
        """Call the dispatcher, or the autograd.Function under a transform of torch.func."""
        announce(self.name)
        return self._transformed.apply(*arguments) if _is_transformed() else self._packet(*arguments)

    def traced_call(self, *arguments: Any) -> Any:
        """Make a public call that is compiled, traced or transformed."""
        if self._tangents is None and not _is_transformed() and _have_tangents(arguments):
            self.refuse_tangents()  # the operator would drop the tangents
        if self._plain is not None and exports_onnx():
            return self._plain(*self._read(arguments))
        return self(*arguments)

    def refuse_tangents(self, ctx: Any = None, *grad_inputs: Any) -> NoReturn:
        raise NotImplementedError(f"{self._function} has no {self._lacks}")


def operator_of_lists(
    name: str, real: Callable[..., Any], fake: Callable[..., Any], *, setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Define ``tilewise::name`` with arguments from the annotations of ``real``, for compilers only.

    It may take lists of tensors, where `Operator` has one field per tensor. setup, backward: as for
    `torch.library.register_autograd`.
    """
    operator = torch.library.custom_op(f"tilewise::{name}", real, mutates_args=())
    operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=setup)


def composed_operator(schema: str, made_of: Callable[..., Any]) -> None:
    """Define ``tilewise::schema``, which a compiler decomposes into the PyTorch operators called by ``made_of``."""
    _library.define(schema)
    _library.impl(schema.partition("(")[0], made_of, "CompositeImplicitAutograd")


def gradients_like(
    inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], q: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the tensors of a backward operator, with the strides that `fake_gradients_like` declares. An empty tensor
    stands for a gradient that is not required."""
    pairs = zip(inputs, gradients, strict=True)
    return tuple(q.new_empty(0) if x is None or g is None else _like(x, g) for x, g in pairs)


def _like(x: Tensor, gradient: Tensor) -> Tensor:
    """Return ``gradient``, or a copy of it, with the strides of ``torch.empty_like(x)``."""
    strides = torch.empty_like(x, device="meta").stride()
    dims = zip(gradient.shape, gradient.stride(), strides, strict=True)
    if gradient.numel() == 0 or all(n == 1 or own == promised for n, own, promised in dims):
        return gradient
    return torch.empty_like(x).copy_(gradient)


def fake_gradients_like(
    inputs: Sequence[Tensor | None], needs: Sequence[bool], q: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the fake result of `gradients_like`: shapes, dtypes and strides only."""
    pairs = zip(inputs, needs, strict=True)
    return tuple(torch.empty_like(x) if need and x is not None else q.new_empty(0) for x, need in pairs)


@contextmanager
def autograd_again() -> Iterator[None]:
    """Let autograd record within an operator, for a backward that differentiates its own forward. An operator runs
    below autograd, which records nothing there, whatever the grad mode."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        yield


def _fields(record: type) -> Iterator[tuple[str, Any]]:
    for name, kind in _hints(record):
        inner = inner_record(kind)
        if inner is None:
            yield name, kind
        else:
            yield from _fields(inner)


def _filled(record: type, values: Iterator[Any]) -> Any:
    """Return a record filled with the next values of `_fields`."""
    found = []
    for _, kind in _hints(record):
        inner = inner_record(kind)
        value = next(values) if inner is None else _filled(inner, values)
        found.append(None if inner is not None and all(x is None for x in value) else value)
    return record(*found)


@cache
def _hints(record: type) -> list[tuple[str, Any]]:
    return list(get_type_hints(record).items())


def _autograd_kernel(
    operator: torch._ops.OpOverload, keep: Callable, differentiate: Callable, tangents: Callable
) -> Callable[..., Any]:  # fmt: skip
    """Return the Autograd kernel, as `torch.library.register_autograd` does, also for torch.func's transforms. Within
    transforms Dynamo calls the operator itself, for which torch.library raises an error."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *call):
            *arguments, keys = call
            if torch._C._are_functorch_transforms_active():  # an outer transform may differentiate too
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = below(keys, *arguments)
            else:
                output = below(keys, *arguments)
            keep(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx, *cotangents):
            return *differentiate(ctx, *cotangents), None

        jvp = staticmethod(tangents)

    def below(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    apply = apply_of(Recorded)

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        differentiated = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not differentiated and not _have_tangents(arguments):
            return below(keys, *arguments)
        with enable_single_level_autograd_function():  # the level of the transform that owns these tensors
            return apply(*arguments, keys)

    return kernel


def _transformed(
    operator: Operator, packet: Callable, keep: Callable, differentiate: Callable, tangents: Callable
) -> type[torch.autograd.Function]:
    """Return the operator as an autograd.Function for torch.func's transforms."""

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            return packet(*arguments)

        setup_context = staticmethod(keep)
        backward = staticmethod(differentiate)
        jvp = staticmethod(tangents)

        @staticmethod
        def vmap(info, in_dims, *arguments):
            return _one_by_one(operator, info.batch_size, in_dims, arguments)

    return Transformed


def _one_by_one(call: Callable, size: int, in_dims: Sequence, arguments: Sequence) -> tuple[Any, Any]:
    """Return ``call`` of each of ``size`` elements along ``in_dims``, stacked along dimension 0."""
    pairs = [(x, dim if isinstance(x, Tensor) else None) for x, dim in zip(arguments, in_dims, strict=True)]
    calls = [call(*(x if dim is None else x.select(dim, i) for x, dim in pairs)) for i in range(size)]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    results = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return results, (0,) * len(results)


def _have_tangents(arguments: Sequence[Any]) -> bool:
    """True if a tensor has a tangent of forward AD. A compiled torch.func.jvp enters its level without Python's
    knowledge of it; PyTorch has only level 0."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
    return any(forward_ad.unpack_dual(x, level=0).tangent is not None for x in tensors)


def _is_transformed() -> bool:
    """True within a transform of torch.func, except functionalize, which only supports operators.

    False within an operator that a transform has called: there the dispatcher leads to the transforms further out.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode):
        return False
    return peek_interpreter_stack().key() != TransformType.Functionalize
