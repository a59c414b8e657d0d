"""Symbols in place of the indices of a score: operations on them are recorded as expressions, without numbers.

Operations between captured tensors alone run as they are, so that gradients reach the caller's tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NUMBERS = (int, float)
_ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "floor_divide": "floordiv", "remainder": "mod",
    "subtract": "sub", "multiply": "mul", "negative": "neg", "absolute": "abs", "clip": "clamp", "pos": "positive",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "invert": "not",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not", "and_": "and", "or_": "or",
    "float": "to", "double": "to", "half": "to", "bfloat16": "to", "int": "to", "long": "to", "bool": "to",
    "type": "to",
}  # fmt: skip
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
    "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!=", "pow": "**",
}  # fmt: skip
# Functions of single numbers: what they give for a tensor of indices is what they give for each index.
ELEMENTWISE = frozenset((
    *_INFIX, "neg", "positive", "not", "abs", "sign", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt",
    "rsqrt", "square", "reciprocal", "sin", "cos", "tanh", "sigmoid", "relu", "erf", "floor", "ceil", "round", "trunc",
    "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill", "logical_and", "logical_or",
    "logical_xor", "logical_not", "isinf", "isnan", "isfinite", "lshift", "rshift", "to",
    "zeros_like", "ones_like", "full_like",
))  # fmt: skip


_COMPARISONS = frozenset(("ge", "gt", "le", "lt", "eq", "ne"))
# Operations that are bool whatever their arguments are.
BOOL = _COMPARISONS | {"logical_and", "logical_or", "logical_xor", "logical_not", "isinf", "isnan", "isfinite"}


class Affine(NamedTuple):
    """An index that is a sum of multiples of b, h, q and kv, and a constant; exact integers, held as ``dtype``."""

    b: int
    h: int
    q: int
    kv: int
    constant: int
    dtype: torch.dtype = torch.int64

    def plus(self, other: Affine, times: int) -> Affine:
        return Affine(
            self.b + times * other.b, self.h + times * other.h, self.q + times * other.q, self.kv + times * other.kv,
            self.constant + times * other.constant, torch.promote_types(self.dtype, other.dtype),
        )  # fmt: skip


def unsupported(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"score_mod: {what}; {instead}")


def _differs(x: Any, conversion: str) -> NotImplementedError:
    return unsupported(
        f"{conversion} of {words(x)}, which differs between scores",
        "write torch.where for a condition, and index tensors in place of Python lists",
    )


class Symbol:
    """Stand-in for a tensor without dimensions in a score_mod. PyTorch's functions of it are recorded."""

    device: torch.device

    def operation(self, name: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the symbol of an operation that this one takes part in; a score decides before its indices."""
        raise NotImplementedError

    def in_words(self) -> str:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return record(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return index_of(self, index)

    def __bool__(self) -> bool:
        raise _differs(self, "a truth value")

    def __int__(self) -> int:
        raise _differs(self, "an int")

    def __index__(self) -> int:
        raise _differs(self, "a Python index")

    def __float__(self) -> float:
        raise _differs(self, "a float")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unsupported(
            f".{name} of {words(self)}", "supported are functions of single numbers, such as clamp and where"
        )

    __hash__ = object.__hash__


def _method(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any, **kwargs: Any) -> Any:
        args = (*others, self) if swapped else (self, *others)
        return record(function, args, kwargs)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Symbol, f"__{_name}__", _method(_function))
    setattr(Symbol, f"__r{_name}__", _method(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "abs"):
    setattr(Symbol, f"__{_name}__", _method(getattr(operator, _name)))
for _name in sorted(ELEMENTWISE | _ALIASES.keys()):
    if hasattr(Tensor, _name):
        setattr(Symbol, _name, _method(getattr(Tensor, _name)))


class Index(Symbol):
    """Number that depends on the indices of a score and on captured tensors, and not on the score.

    name, function, args, kwargs: the operation; "index" has the tensor and its indices as arguments.
    variables: of "b", "h", "q", "kv"; "distance" in place of q and kv where only kv - q is read.
    affine: its exact form, if it is one.
    open: dimensions of an indexed tensor that still need an index.
    """

    def __init__(
        self, name: str, function: Callable[..., Any] | None, args: tuple, kwargs: dict[str, Any],
        device: torch.device, affine: Affine | None = None,
    ) -> None:  # fmt: skip
        self.name, self.function, self.args, self.kwargs, self.device = name, function, args, kwargs, device
        self.affine = affine
        self.open = args[0].dim() - len(args) + 1 if name == "index" else 0
        self.variables = _variables(affine, args)

    @property
    def dtype(self) -> torch.dtype:
        if self.affine is None:
            raise unsupported(f".dtype of {words(self)}", "name the dtype")
        return self.affine.dtype


class Indexing(TorchFunctionMode):
    """Record ``tensor[symbol]``, which PyTorch would not ask the symbol about."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and any(isinstance(x, Symbol) for x in _tuple(args[1])):
            return index_of(args[0], args[1])
        if func is torch.tensor and args and isinstance(args[0], float) and math.isinf(args[0]):
            return args[0]  # a number can be read, also under a compiler
        if any(isinstance(x, Symbol) for x in args) or any(isinstance(x, Symbol) for x in kwargs.values()):
            return record(func, args, kwargs)
        return func(*args, **kwargs)


# --- operations ---


def record(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the symbol of an operation on symbols."""
    name = _NAMES.get(function)
    if name in ("min", "max") and len(args) == 2 and isinstance(args[1], (Symbol, Tensor)):
        name, function = f"{name}imum", torch.minimum if name == "min" else torch.maximum
    symbols = [x for x in (*args, *kwargs.values()) if isinstance(x, Symbol)]
    if name not in ELEMENTWISE or not symbols or (name == "where" and len(args) != 3):
        custom = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        called = f"torch.ops.{function}" if custom else getattr(function, "__name__", str(function))
        raise unsupported(
            f"{called} of {', '.join(words(x) for x in args)}",
            "supported are PyTorch's functions of single numbers, such as torch.tanh and torch.clamp",
        )
    for x in (*args, *kwargs.values()):
        if (isinstance(x, Tensor) and x.dim() > 0) or (isinstance(x, Index) and x.open):
            raise unsupported(f"{name} of {words(x)}, which has dimensions left", "index all of them")
    for x in symbols:
        if not isinstance(x, Index):
            return x.operation(name, function, args, kwargs)
    if name in _COMPARISONS:
        first, second = (affine_of(x) for x in args)
        if first is not None and second is not None and by_distance(first.plus(second, -1)):
            args = (args[0] - args[1], 0)
    return Index(name, function, args, kwargs, symbols[0].device, _affine(name, function, args, kwargs))


def index_of(table: Any, index: Any) -> Index:
    """Return ``table[index]``, of a captured tensor and symbols or ints."""
    indices = _tuple(index)
    if isinstance(table, Index) and table.open:
        table, indices = table.args[0], (*table.args[1:], *indices)
    if not isinstance(table, Tensor):
        raise unsupported(f"an index of {words(table)}", "index captured tensors only")
    for x in indices:
        whole = isinstance(x, Tensor) and (x.dim() or x.dtype == torch.bool)
        if whole or not isinstance(x, (Index, Tensor, int)) or isinstance(x, bool):
            raise unsupported(
                f"{words(x)} as an index of {words(table)}", "indices are numbers: ints, b, h, q_idx, kv_idx"
            )
    if len(indices) > table.dim():
        raise IndexError(f"score_mod: {len(indices)} indices for {words(table)}")
    device = next(x.device for x in indices if isinstance(x, Index))
    return Index("index", None, (table, *indices), {}, device)


def _tuple(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def _names() -> dict[Any, str]:
    """Return the name of each function in `ELEMENTWISE`, by which the same function of other modules has it too."""
    found = {}
    for name in sorted(ELEMENTWISE | _ALIASES.keys() | {"min", "max"}):
        for module in (torch, Tensor, operator, torch.nn.functional):
            for spelled in (name, f"__{name}__"):
                function = getattr(module, spelled, None)
                if callable(function) and not isinstance(function, type):
                    found[function] = _ALIASES.get(name, name)
    return found


_NAMES = _names()


def _variables(affine: Affine | None, args: tuple) -> frozenset[str]:
    if affine is None:
        found: frozenset[str] = frozenset()
        for x in args:
            if isinstance(x, Index):
                found = found | x.variables
        return found
    names = [name for name in ("b", "h") if getattr(affine, name)]
    if affine.q and affine.q == -affine.kv:
        return frozenset((*names, "distance"))
    return frozenset((*names, *(name for name in ("q", "kv") if getattr(affine, name))))


def _affine(name: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Affine | None:
    """Return the affine form of an operation, or None. float32 and float64 hold integers; 16-bit dtypes round them."""
    forms = [affine_of(x) for x in args[:2]]
    first = forms[0] if forms else None
    if name == "to" and first is not None:
        dtype = dtype_of(function, args, kwargs)
        if dtype in (torch.int32, torch.int64):
            return first._replace(dtype=torch.int64) if not first.dtype.is_floating_point else None
        return first._replace(dtype=dtype) if dtype in (torch.float32, torch.float64) else None
    if kwargs or first is None:
        return None
    if name == "neg":
        return Affine(0, 0, 0, 0, 0).plus(first, -1)
    second = forms[1] if len(forms) == 2 else None
    if second is None:
        return None
    if name in ("add", "sub"):
        return first.plus(second, 1 if name == "add" else -1)
    if name == "mul" and not any(second[:4]):
        return Affine(0, 0, 0, 0, 0, second.dtype).plus(first, second.constant)
    if name == "mul" and not any(first[:4]):
        return Affine(0, 0, 0, 0, 0, first.dtype).plus(second, first.constant)
    return None


def affine_of(x: Any) -> Affine | None:
    """Return the affine form of an Index or an int, or None."""
    if isinstance(x, Index):
        return x.affine
    return Affine(0, 0, 0, 0, x) if isinstance(x, int) and not isinstance(x, bool) else None


def dtype_of(function: Any, args: tuple, kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of a conversion; None if it is not a conversion to a known one."""
    named = {"float": torch.float32, "double": torch.float64, "int": torch.int32, "long": torch.int64,
             "half": torch.float16, "bfloat16": torch.bfloat16, "bool": torch.bool}  # fmt: skip
    given = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype)]
    return given[0] if given else named.get(function.__name__)


def by_distance(form: Affine) -> bool:
    """True if a form is a multiple of kv - q and a constant."""
    return form.kv != 0 and form.q == -form.kv and form.b == form.h == 0


def fingerprint(x: Any, tensors: list[Tensor]) -> Any:
    """Return what two equal expressions have in common, to compare and to keep; append captured tensors to a list."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return "tensor"
    if not isinstance(x, Index):
        return type(x), x
    parts = tuple(fingerprint(y, tensors) for y in (*x.args, *x.kwargs.values()))
    return x.name, x.function, x.affine, tuple(x.kwargs), parts


# --- in words ---


def words(x: Any) -> str:
    """Return an expression as Python code, for errors."""
    if isinstance(x, Tensor):
        return f"a tensor {tuple(x.shape)}" if x.dim() else "a captured number"
    if isinstance(x, Symbol) and not isinstance(x, Index):
        return x.in_words()
    if not isinstance(x, Index):
        return str(x) if isinstance(x, (*NUMBERS, torch.dtype)) else type(x).__name__
    if x.function is None and x.name != "index":
        return {"q": "q_idx", "kv": "kv_idx"}.get(x.name, x.name)
    parts = [words(y) for y in x.args]
    if x.name == "index":
        return f"tensor{tuple(x.args[0].shape)}[{', '.join(parts[1:])}]"
    if x.name in _INFIX and len(parts) == 2:
        return f"({parts[0]} {_INFIX[x.name]} {parts[1]})"
    return f"{x.name}({', '.join(parts)})"
