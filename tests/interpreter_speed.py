"""Triton's interpreter in half of its time: what it finds out anew for each operation is found out once.

Its time goes to Python, operation by operation, and hardly to numpy: types are made, compared and written out, operands
are brought to one type and one shape. What is computed, and by which functions of numpy, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

semantic = interpreter.interpreter_semantic
Handle = interpreter.TensorHandle


class Plan(NamedTuple):
    """What an operation comes to on operands of such types: one of the builder's operations on their handles."""

    name: str
    arguments: tuple[Any, ...]  # which stand behind the handles
    result: Any  # its type
    brought: tuple[Any, ...] = (None, None)  # how the operands are, see `_rule`
    ufunc: Any = None  # numpy's function, if the operation comes to that alone
    scalar: Any = None  # the type of the handle then
    facts: tuple[Any, ...] = ()  # what a tensor has of its type


# Of an operation and the types of its operands; None: whatever it is, it is no `Plan`.
_plans: dict[Any, Plan | None] = {}
# What was replaced: where, its name, before and after.
_replaced: list[tuple[Any, str, Any, Any]] = []


def hurry() -> None:
    """To be called once in a process, after TRITON_INTERPRET was set and triton imported."""
    interpreter._patch_attr = _patch_attr
    # it looks through triton.language for what to patch at each call of each function
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    watch_overflow(False)
    _remember_types()
    _remember_values()
    _remember_operations()


def _patch_attr(where: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Triton's, without the question whether a function of triton.language is called by a kernel."""
    function = getattr(member, "__wrapped__", member)

    def called(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*arguments, **named)

    scope.set_attr(where, name, called)


def watch_overflow(on: bool) -> None:
    """Whether each sum and product of integers is followed by one in 64 bits, which shows whether it overflowed."""
    _plans.clear()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=on, sanitize_overflow=on)


@contextmanager
def as_it_comes() -> Iterator[None]:
    """Triton's interpreter without all of this, to compare with."""
    for where, name, before, _ in _replaced:
        setattr(where, name, before)
    _plans.clear()
    try:
        yield
        assert not _plans, "some of this was at work"
    finally:
        for where, name, _, after in _replaced:
            setattr(where, name, after)


def _replace(where: Any, name: str, after: Any) -> None:
    _replaced.append((where, name, getattr(where, name), after))
    setattr(where, name, after)


def _remember_types() -> None:
    """Each operation makes the type of a tile and a tensor of that type, and asks for numpy's name of it. A kernel has
    few types: each is checked and written out when it is first met, and copied from then on."""
    dtypes: dict[str, Any] = {}
    tiles: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, tuple[Any, Any, Any]] = {}
    fitting: dict[tuple[int, str], bool] = {}
    plain, slow_unwrap = {tl.tensor, tl.dtype, tl.block_type, int, type(None), bool}, tl.core._unwrap_if_constexpr
    slow_equal, slow_fits, slow_handle = tl.dtype.__eq__, interpreter._validate_np_data_size, Handle.__init__
    new_dtype, new_tile, new_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__

    def numpy_dtype(of: Any) -> Any:
        if of.name not in dtypes:
            dtypes[of.name] = new_dtype(of)
        return dtypes[of.name]

    def init_tile(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in tiles:
            new_tile(self, element_ty, shape)
            tiles[key] = vars(self).copy()
        vars(self).update(tiles[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        found = tensors.get(type.name)
        if found is None:
            new_tensor(self, None, type)
            tensors[type.name] = found = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = found

    def fits(array: Any, dtype: Any) -> bool:
        key = array.itemsize, dtype.name
        found = fitting.get(key)
        if found is None:
            fitting[key] = found = slow_fits(array, dtype)
        return found

    def init_handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        if not fits(data, dtype):
            slow_handle(self, data, dtype)  # which says what is wrong

    def unwrap(x: Any) -> Any:
        return x if type(x) in plain else slow_unwrap(x)

    def equal(self: Any, other: Any) -> Any:
        return self.name == other.name if type(other) is tl.dtype else slow_equal(self, other)

    _replace(interpreter, "_get_np_dtype", numpy_dtype)
    _replace(interpreter, "_validate_np_data_size", fits)
    _replace(Handle, "__init__", init_handle)
    _replace(tl.block_type, "__init__", init_tile)
    _replace(tl.tensor, "__init__", init_tensor)
    _replace(tl.dtype, "__eq__", equal)
    _replace(tl.core, "_unwrap_if_constexpr", unwrap)


def _remember_values() -> None:
    """Numbers and ranges are made once: nothing is written into the data of a handle. And what stands between a kernel
    and another function, or a new axis, is passed by."""
    numbers: dict[tuple[Any, ...], Any] = {}
    ranges: dict[tuple[int, int], Any] = {}
    slow_constant, slow_range, slow_tensor = semantic.scalar_constant, semantic.arange, semantic.to_tensor
    slow_item, rewritten = tl.tensor.__getitem__, interpreter.InterpretedFunction.rewritten_fn
    whole = slice(None)

    def again(x: Any) -> Any:
        return tl.tensor(Handle(x.handle.data, x.handle.dtype), x.type)

    def scalar_constant(value: Any, dtype: Any) -> Any:
        key = type(value), repr(value), dtype.name
        if key not in numbers:
            if len(numbers) > 10_000:
                numbers.clear()
            numbers[key] = slow_constant(value, dtype)
        return again(numbers[key])

    def arange(start: int, end: int, **named: Any) -> Any:
        if named:
            return slow_range(start, end, **named)
        if (start, end) not in ranges:
            ranges[start, end] = slow_range(start, end)
        return again(ranges[start, end])

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else slow_tensor(x, check_type)

    def item(self: Any, places: Any) -> Any:
        if type(places) is not tuple or not all(x is None or (type(x) is slice and x == whole) for x in places):
            return slow_item(self, places)
        for dim, place in enumerate(places):
            if place is None:
                self = semantic.expand_dims(self, dim)
        return self

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        function = rewritten.get(self.fn) or self.rewrite()
        try:
            return function(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    _replace(semantic, "scalar_constant", scalar_constant)
    _replace(semantic, "arange", arange)
    _replace(semantic, "to_tensor", to_tensor)
    _replace(tl.tensor, "__getitem__", item)
    _replace(interpreter.InterpretedFunction, "__call__", call)


def _remember_operations() -> None:
    """``x + y`` goes through five functions, and brings x and y to one type and one shape, before anything is added.
    Where all of that comes to one operation of numpy, that is asked for at once when operands of such types are met
    again. Nothing is spread over a shape: numpy does that itself."""
    bring, unwrapped = "binary_op_type_checking_impl", tl.core._unwrap_if_constexpr
    _replace(semantic, bring, _bring_to_one_type(getattr(semantic, bring)))
    _replace(semantic, "broadcast_impl_value", _spread(semantic.broadcast_impl_value))
    for name in ("cast", "expand_dims"):
        _shorten_one(name)
    for name in ("minimum", "maximum"):
        _shorten_two(name)
    for operator, pointers in {"add": (True, True), "sub": (True, False), "mul": ()}.items():
        function = _shorten_two(operator, pointers)
        _replace(tl.tensor, f"__{operator}__", _operator(operator, function, True))
        _replace(tl.tensor, f"__r{operator}__", lambda x, y, f=function: f(unwrapped(y), x, True))
    for operator, name in {"floordiv": "floordiv", "mod": "mod", "and": "and_", "or": "or_", "xor": "xor_"}.items():
        function = _shorten_two(name, (False, False, True, True) if operator in ("floordiv", "mod") else ())
        _replace(tl.tensor, f"__{operator}__", _operator(name, function))
        _replace(tl.tensor, f"__r{operator}__", lambda x, y, f=function: f(unwrapped(y), x))
    for operator, name in {
        "lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal", "eq": "equal",
        "ne": "not_equal",
    }.items():  # fmt: skip
        function = _shorten_two(name)
        _replace(
            tl.tensor, f"__{operator}__",
            _operator(name, lambda x, y, f=function: f(x, y if type(y) is tl.tensor else semantic.to_tensor(y))),
        )  # fmt: skip


def _operator(name: str, function: Any, *more: Any) -> Any:
    """``function(x, y, *more)``, and at once what is known of two tensors of such types."""
    tensor, unwrapped = tl.tensor, tl.core._unwrap_if_constexpr

    def operator(x: Any, y: Any) -> Any:
        if type(y) is tensor:
            plan = _plans.get((name, x.type.name, y.type.name, *more))
            if plan is not None:
                return _made(plan.ufunc(x.handle.data, y.handle.data), plan)
        return function(x, unwrapped(y), *more)

    return operator


def _kind(x: Any) -> Any:
    """What an operation on ``x`` depends on, but for a tensor's elements."""
    return x.type.name if type(x) is tl.tensor else (type(x), x)


def _rule(x: Any, brought: Any) -> Any:
    """How ``x`` becomes what it was brought to: None if its handle does, a number's data and type, or the type that it
    is cast to."""
    if brought is x or (type(x) is tl.tensor and x.dtype == brought.dtype):
        return None
    if type(x) is tl.tensor:
        return brought.dtype
    return semantic.scalar_constant(x, brought.dtype).handle.data, brought.dtype


def _handle(x: Any, rule: Any) -> Any:
    if rule is None:
        return x.handle
    return Handle(*rule) if type(rule) is tuple else semantic.cast(x, rule).handle


def _bring_to_one_type(slow: Any) -> Any:
    """``slow`` of operands of which it knows how they are brought to one type, and shape."""
    known: dict[Any, Any] = {}

    def bring(x: Any, y: Any, *allowed: bool, **named: bool) -> tuple[Any, Any]:
        key = _kind(x), _kind(y), allowed, *named.items()
        found = known.get(key)
        if found is None:
            both = slow(x, y, *allowed, **named)
            if len(known) > 100_000:  # numbers of loops
                known.clear()
            found = known[key] = (_rule(x, both[0]), both[0].type), (_rule(y, both[1]), both[1].type)
        (x_rule, x_type), (y_rule, y_type) = found
        if x_rule is not None or x.type is not x_type:
            x = tl.tensor(_handle(x, x_rule), x_type)
        if y_rule is not None or y.type is not y_type:
            y = tl.tensor(_handle(y, y_rule), y_type)
        return x, y

    return bring


def _spread(slow: Any) -> Any:
    """``slow``, which brings two tensors to one shape, of types of which it knows how they become what."""
    known: dict[tuple[str, str], Any] = {}

    def become(x: Any, what: Any) -> Any:
        if what is None:
            return x
        kind, dtype = what
        return tl.tensor(Handle(np.broadcast_to(x.handle.data, kind.shape), dtype), kind)

    def spread(x: Any, y: Any) -> tuple[Any, Any]:
        key = x.type.name, y.type.name
        found = known.get(key)
        if found is None:
            both = tuple(slow(x, y))
            known[key] = [None if b is a else (b.type, b.handle.dtype) for a, b in zip((x, y), both, strict=True)]
            return both
        return become(x, found[0]), become(y, found[1])

    return spread


class _Recorder:
    """The interpreter's builder, with a note of each operation that it was asked for."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.builder, name)
        if not name.startswith("create_"):
            return found

        def noted(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return found(*arguments)

        return noted


def _learn(slow: Any, tensors: tuple[Any, ...], *more: Any, **named: Any) -> tuple[Any, Plan | None]:
    """What ``slow`` makes of the tensors, and how."""
    builder = semantic.builder
    semantic.builder = recorder = _Recorder(builder)
    try:
        result = slow(*tensors, *more, **named)
    finally:
        semantic.builder = builder
    if len(recorder.asked) == 1:
        name, asked = recorder.asked[0]
        if len(asked) >= len(tensors) and all(x is y.handle for x, y in zip(asked, tensors, strict=False)):
            facts = result.shape, result.numel, result.dtype
            return result, Plan(name, asked[len(tensors) :], result.type, facts=facts)
    return result, None


def _by_ufunc(plan: Plan, operands: tuple[Any, Any], result: Any) -> dict[str, Any]:
    """More of a plan whose result is what a function of numpy makes of the operands, and nothing else."""
    asked = getattr(interpreter.InterpreterBuilder, plan.name)
    if plan.name == "create_addptr":
        width = max(1, operands[0].handle.get_element_ty().primitive_bitwidth // 8)
        return {"ufunc": lambda x, y: x + width * y.astype(np.uint64), "scalar": result.handle.dtype}
    found = (
        asked(SimpleNamespace(binary_op=lambda left, right, ufunc: ufunc), None, None) if _is_binary(asked) else None
    )
    if found is None or plan.arguments or found(*(x.handle.data for x in operands)).dtype != result.handle.data.dtype:
        return {}
    return {"ufunc": found, "scalar": result.handle.dtype}


def _by_array(plan: Plan, given: Any, result: Any) -> dict[str, Any]:
    """The same of a cast or a new axis. bfloat16 has the numbers of unsigned integers, and is cast otherwise."""
    asked, data = getattr(interpreter.InterpreterBuilder, plan.name), result.handle.data
    if plan.name == "create_expand_dims" and plan.arguments[0] >= 0:
        place = (*(slice(None),) * plan.arguments[0], None)
        return {"ufunc": lambda x: x[place], "scalar": result.handle.dtype}
    if asked.__code__.co_names[:1] == ("cast_impl",) and "u" not in (given.dtype.kind, data.dtype.kind):
        return {"ufunc": methodcaller("astype", data.dtype), "scalar": result.handle.dtype}
    return {}


def _is_binary(asked: Any) -> bool:
    """Of the builder's operations, whose code has few names."""
    return asked.__code__.co_names[:1] == ("binary_op",)


def _made(data: Any, plan: Plan) -> Any:
    """A tensor, by what its and its handle's `__init__` would do."""
    handle, made = object.__new__(Handle), object.__new__(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, plan.scalar, {}
    made.handle, made.type = handle, plan.result
    made.shape, made.numel, made.dtype = plan.facts
    return made


def _shorten_one(name: str) -> None:
    """The function of that name in triton.language.semantic: of a tensor, and of a type or an axis."""
    slow = getattr(semantic, name)

    def quick(x: Any, to: Any, *more: Any) -> Any:
        key = name, x.type.name, getattr(to, "name", to), more
        if key not in _plans:
            result, plan = _learn(slow, (x,), to, *more)
            _plans[key] = plan and plan._replace(**_by_array(plan, x.handle.data, result))
            return result
        plan = _plans[key]
        if plan is None:
            return slow(x, to, *more)
        if plan.ufunc is not None:
            return _made(plan.ufunc(x.handle.data), plan)
        return tl.tensor(getattr(semantic.builder, plan.name)(x.handle, *plan.arguments), plan.result)

    _replace(semantic, name, quick)


def _shorten_two(name: str, pointers: tuple[bool, ...] = ()) -> Any:
    """The function of that name in triton.language.semantic: of two tensors or numbers; pointers: which of them may be
    one."""
    slow = getattr(semantic, name)

    def quick(x: Any, y: Any, *more: Any, **named: Any) -> Any:
        key = name, _kind(x), _kind(y), more, *named.items()
        plan = _plans.get(key, quick)
        if plan is quick:
            brought = semantic.binary_op_type_checking_impl(x, y, *pointers)
            rules = _rule(x, brought[0]), _rule(y, brought[1])
            result, plan = _learn(slow, brought, *more, **named)
            if len(_plans) > 100_000:  # numbers of loops
                _plans.clear()
            plan = plan and plan._replace(brought=rules, **_by_ufunc(plan, brought, result))
            _plans[key] = plan
            if plan and plan.ufunc and rules == (None, None) and not named:
                _plans[name, x.type.name, y.type.name, *more] = plan  # for `_operator`
            return result
        if plan is None:
            return slow(x, y, *more, **named)
        one, other = plan.brought
        if plan.ufunc is None:
            handles = _handle(x, one), _handle(y, other)
            return tl.tensor(getattr(semantic.builder, plan.name)(*handles, *plan.arguments), plan.result)
        left = x.handle.data if one is None else one[0] if type(one) is tuple else _handle(x, one).data
        right = y.handle.data if other is None else other[0] if type(other) is tuple else _handle(y, other).data
        return _made(plan.ufunc(left, right), plan)

    _replace(semantic, name, quick)
    return quick
