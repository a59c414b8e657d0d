"""Names in backticks, in docstrings and comments, are names of the package."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest
from source_trees import Trees

import tilewise

PACKAGE = Path(tilewise.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = Trees({path: path for path in SOURCES})
REFERENCE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")


@functools.cache
def tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def module_names(path: Path) -> tuple[str, ...]:
    return tuple(x for x in path.relative_to(PACKAGE).with_suffix("").parts if x != "__init__")


def members(node: ast.AST) -> set[str]:
    """What a module or a class defines or imports, and the attributes that a class gives itself."""
    found = set()
    for x in ast.walk(node):
        if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
            found.add(x.name)
        elif isinstance(x, (ast.Import, ast.ImportFrom)):
            found |= {(name.asname or name.name).partition(".")[0] for name in x.names}
        elif isinstance(x, (ast.Assign, ast.AnnAssign)):
            for target in x.targets if isinstance(x, ast.Assign) else [x.target]:
                found |= {y.id for y in ast.walk(target) if isinstance(y, ast.Name)}
                found |= {y.attr for y in ast.walk(target) if isinstance(y, ast.Attribute)}
    return found


class Names:
    """All names of the package."""

    def __init__(self) -> None:
        self.all = {x.string for s in SOURCES.values() for x in tokens(s) if x.type == tokenize.NAME}
        self.all |= {name for path in SOURCES for name in module_names(path)}
        self.modules: dict[str, set[str]] = defaultdict(set)  # by the last part of their names
        self.classes: dict[str, list[tuple[Path, set[str]]]] = defaultdict(list)
        for path, tree in TREES.items():
            where = module_names(path) or ("tilewise",)
            self.modules[where[-1]] |= members(tree)
            for over, under in itertools.pairwise(where):
                self.modules[over].add(under)
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(x).rpartition(".")[2] for x in node.bases]
                    of_bases = {x for base in bases for _, found in self.classes.get(base, []) for x in found}
                    self.classes[node.name].append((path, members(node) | of_bases))

    def has(self, reference: str, path: Path) -> bool:
        """Whether a reference in a module is one: of `x.y` a class x that the module defines or imports, or else the
        only one of this name, has a y, and so has a module x."""
        parts = reference.removeprefix("tilewise.").split(".")
        if parts[0] in ("torch", "transformers"):
            return True
        if not self.all.issuperset(parts):
            return False
        for name, attribute in itertools.pairwise(parts):
            if name in self.classes:
                here = [found for where, found in self.classes[name] if where == path]
                seen = here or [found for _, found in self.classes[name]]
                if not here and len(seen) > 1 and name not in members(TREES[path]):
                    return False
                if not any(attribute in found for found in seen):
                    return False
            elif name in self.modules and attribute not in self.modules[name]:
                return False
        return True


def texts(path: Path) -> list[str]:
    """Docstrings and comments."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(x) or "" for x in ast.walk(TREES[path]) if isinstance(x, documented)]
    return found + [x.string for x in tokens(SOURCES[path]) if x.type == tokenize.COMMENT]


@pytest.fixture(scope="module")
def names():
    return Names()


def test_names_in_backticks_are_there(names):
    gone = [
        f"{path.relative_to(PACKAGE)}: {reference}"
        for path in SOURCES
        for text in texts(path)
        for reference in REFERENCE.findall(text)
        if not names.has(reference, path)
    ]
    assert not gone


def test_what_is_gone_is_found(names):
    path = PACKAGE / "backends" / "gluon" / "sm90" / "backward" / "kernel.py"
    for reference in ("BackwardConstants.BIAS", "Problem.few_queries", "dq_accum", "spec.tiles.key_tiles"):
        assert names.has(reference, path)
    for reference in ("Compiled.BIAS", "_Short", "Problem.few", "spec.tiles.tile_keys"):
        assert not names.has(reference, path)
