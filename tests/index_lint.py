"""A lint of kernels: what is multiplied by a stride, or by a length of a whole tensor, has 64 bits.

Triton computes ``index * stride`` in the wider type of both. An argument below 2³¹ is an int32, so that the product of
an int32 index and a stride wraps around at 2³¹ elements, where a tensor of less than 2³¹ rows does not. This reads the
source of all functions of Triton and Gluon: which values are strides, which have 64 bits, through assignments, calls
and what functions return.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

STRIDE = re.compile(r"stride\d")  # of `kernel_arguments.Strided`
LENGTHS = {"queries", "keys", "padded_queries", "total_queries", "total_keys"}  # attributes of the sizes of a problem
PROMOTING = {"minimum", "maximum", "where"}
SAME = {"max_contiguous", "multiple_of", "convert_layout", "expand_dims"}


class Kind(NamedTuple):
    """What is known of a value."""

    wide: bool = False  # an int64, in every case
    stride: bool = False  # a stride or a length, or a multiple of one, in some case


class Values(NamedTuple):
    """Several values, of a tuple."""

    each: tuple[Kind, ...]


class Product(NamedTuple):
    place: str  # module: function
    text: str


def is_rounded(node: ast.BinOp) -> bool:
    """``x // 8 * 8``: no more than x."""
    left, whole = node.left, isinstance(node.op, ast.Mult)
    divided = whole and isinstance(left, ast.BinOp) and isinstance(left.op, ast.FloorDiv)
    return divided and ast.dump(left.right) == ast.dump(node.right)


def joined(kinds: list[Kind]) -> Kind:
    """One of several, it is not known which."""
    return Kind(all(x.wide for x in kinds), any(x.stride for x in kinds))


def kernels_of(folder: Path) -> dict[str, ast.Module]:
    """Modules with functions of Triton or Gluon, by their path in the folder."""
    sources = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    return {path: ast.parse(source) for path, source in sources.items() if "jit\n" in source or ".jit(" in source}


class Lint:
    """Products of all functions, found once what each is called with and returns is known."""

    def __init__(self, modules: dict[str, ast.Module]):
        self.functions: dict[tuple[str, str], ast.FunctionDef] = {}  # by path and name
        self.imported: dict[tuple[str, str], tuple[str, str]] = {}
        for path, module in modules.items():
            for node in module.body:
                if isinstance(node, ast.FunctionDef) and any(".jit" in ast.unparse(x) for x in node.decorator_list):
                    self.functions[path, node.name] = node
                elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilewise."):
                    source = "/".join(node.module.split(".")[1:]) + ".py"
                    self.imported |= {(path, x.asname or x.name): (source, x.name) for x in node.names}
        # By path and name: of each parameter what it is called with, and what a function returns.
        self.given: dict[tuple[str, str], dict[str, list[Kind]]] = defaultdict(lambda: defaultdict(list))
        self.returned: dict[tuple[str, str], list[Kind | Values]] = defaultdict(list)
        known = None
        while known != (now := self._known()):
            known = now
            given, self._given_now = self.given, defaultdict(lambda: defaultdict(list))
            returned = defaultdict(list)
            self.products: list[Product] = []
            for key, node in self.functions.items():
                self.path, self.found, self.place = key[0], returned[key], ": ".join(key)
                parameters = [x.arg for x in (*node.args.args, *node.args.kwonlyargs)]
                self.run(node.body, {x: joined(given[key].get(x) or [Kind()]) for x in parameters})
            self.given, self.returned = self._given_now, returned

    def _known(self):
        given = {(key, x): joined(kinds) for key, found in self.given.items() for x, kinds in found.items()}
        return given, {key: self.returns(key) for key in self.returned}

    def returns(self, key: tuple[str, str]) -> Kind | Values:
        found = self.returned.get(key, [])
        several = [x.each for x in found if isinstance(x, Values)]
        if several and len(several) == len(found):
            return Values(tuple(joined(list(kinds)) for kinds in zip(*several, strict=True)))
        return joined([x for x in found if isinstance(x, Kind)]) if found and not several else Kind()

    # --- statements ---

    def run(self, body: list[ast.stmt], env: dict[str, Kind | Values]) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                value = self.of(node.value, env)
                for target in node.targets:
                    self.assign(target, value, env)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.assign(node.target, self.of(node.value, env), env)
            elif isinstance(node, ast.AugAssign):
                before = node.target if isinstance(node.target, ast.Name) else ast.Constant(0)
                self.assign(node.target, self.of(ast.BinOp(before, node.op, node.value), env), env)
            elif isinstance(node, ast.Return):
                if node.value is not None:
                    self.found.append(self.of(node.value, env))
            elif isinstance(node, (ast.If, ast.For, ast.While)):
                self.branch(node, env)
            elif isinstance(node, ast.Expr):
                self.of(node.value, env)

    def branch(self, node: ast.If | ast.For | ast.While, env: dict[str, Kind | Values]) -> None:
        for x in (node.iter,) if isinstance(node, ast.For) else (node.test,):
            self.of(x, env)
        ways = [dict(env), dict(env)]
        if isinstance(node, ast.For):
            self.assign(node.target, Kind(), ways[0])
        self.run(node.body, ways[0])
        self.run(node.orelse, ways[1])
        for name in {*ways[0], *ways[1]}:
            kinds = [way[name] for way in ways if name in way]
            env[name] = kinds[0] if len(set(kinds)) == 1 else joined([x for x in kinds if isinstance(x, Kind)])

    def assign(self, target: ast.expr, value: Kind | Values, env: dict[str, Kind | Values]) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            each = value.each if isinstance(value, Values) else [Kind()] * len(target.elts)
            for x, kind in zip(target.elts, each, strict=False):
                self.assign(x, kind, env)

    # --- expressions ---

    def of(self, node: ast.expr, env: dict[str, Kind | Values]) -> Kind | Values:
        if isinstance(node, ast.Name):
            return env.get(node.id, Kind())
        if isinstance(node, ast.Tuple):
            return Values(tuple(self.one(x, env) for x in node.elts))
        if isinstance(node, ast.Attribute):
            self.of(node.value, env)
            return Kind(stride=bool(STRIDE.fullmatch(node.attr)) or node.attr in LENGTHS)
        if isinstance(node, ast.Subscript):
            value = self.one(node.value, env)
            # Of `ops.row_softmax` a tensor is a tuple, of its pointer and its strides.
            item = "softmax" in self.path and ast.unparse(node.value) == "x" and ast.unparse(node.slice) != "0"
            return Kind(stride=True) if item else value
        if isinstance(node, ast.UnaryOp):
            return self.one(node.operand, env)
        if isinstance(node, ast.IfExp):
            self.of(node.test, env)
            return joined([self.one(node.body, env), self.one(node.orelse, env)])
        if isinstance(node, ast.BinOp):
            return self.operation(node, env)
        if isinstance(node, ast.Call):
            return self.call(node, env)
        for x in ast.iter_child_nodes(node):
            if isinstance(x, ast.expr):
                self.of(x, env)
        return Kind()

    def one(self, node: ast.expr, env: dict[str, Kind | Values]) -> Kind:
        found = self.of(node, env)
        return found if isinstance(found, Kind) else Kind()

    def operation(self, node: ast.BinOp, env: dict[str, Kind | Values]) -> Kind:
        left, right = self.one(node.left, env), self.one(node.right, env)
        wide = left.wide or right.wide
        if is_rounded(node):
            return self.one(node.left.left, env)
        if isinstance(node.op, ast.Mult) and (left.stride or right.stride) and not wide:
            self.products.append(Product(self.place, ast.unparse(node)))
        return Kind(wide, isinstance(node.op, (ast.Add, ast.Sub)) and (left.stride or right.stride))

    def call(self, node: ast.Call, env: dict[str, Kind | Values]) -> Kind | Values:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute):
            self.of(node.func.value, env)
        given = [self.of(x, env) for x in node.args]
        named = {x.arg: self.of(x.value, env) for x in node.keywords}
        kinds = [x if isinstance(x, Kind) else Kind() for x in given]
        if name in ("cast", "to"):
            value = kinds[0] if name == "cast" else self.one(node.func.value, env)
            to = ast.unparse(node.args[1 if name == "cast" else 0])
            return Kind(to.endswith("int64"), value.stride)
        if name in PROMOTING:
            return Kind(any(x.wide for x in kinds), any(x.stride for x in kinds))
        if name in SAME:
            return kinds[0]
        key = self.path, name
        key = self.imported.get(key, key)
        if isinstance(node.func, ast.Attribute) or key not in self.functions:
            return Kind()
        parameters = [x.arg for x in self.functions[key].args.args]
        for parameter, kind in itertools.chain(zip(parameters, kinds, strict=False), named.items()):
            self._given_now[key][parameter].append(kind if isinstance(kind, Kind) else Kind())
        return self.returns(key)
