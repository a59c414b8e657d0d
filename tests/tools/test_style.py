"""Rules of style. style_exceptions.json lists what breaks each of them today; the lists may only become shorter."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from source_trees import Trees

REPOSITORY = Path(__file__).parents[2]
SOURCES = REPOSITORY / "src"
EXCEPTIONS = json.loads((Path(__file__).parents[1] / "style_exceptions.json").read_text(encoding="utf-8"))
TREES = Trees({path.relative_to(SOURCES).as_posix(): path for path in sorted(SOURCES.rglob("*.py"))})
LINES, PARAMETERS, NAMES = 120, 15, 25
OPENINGS = re.compile(r"(Of|What|Whether|Those|The same|As|Who|Which|Where|How|That|In|By)\b")


def functions(name):
    """(qualified name, node) of each function of a module, those of classes too."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{prefix}.{child.name}".lstrip(".")
                if isinstance(child, ast.FunctionDef):
                    yield inner, child
                yield from walk(child, inner)

    yield from walk(TREES[name], "")


def held(rule, found):
    """All that breaks a rule is listed, and all that is listed breaks it."""
    assert sorted(found) == EXCEPTIONS[rule], f"tests/style_exceptions.json, {rule!r}: it may only become shorter"


def test_functions_are_short():
    """At most 120 lines, docstring apart."""
    found = []
    for name in TREES:
        for function, node in functions(name):
            documented = ast.get_docstring(node) is not None
            docstring = node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
            if node.end_lineno - node.lineno + 1 - docstring > LINES:
                found.append(f"{name}: {function}")
    held("long functions", found)


def test_functions_have_few_parameters():
    """At most 15; public functions, which have the keywords of their callers, and adapters of theirs are listed."""
    found = []
    for name in TREES:
        for function, node in functions(name):
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            if count > PARAMETERS and f"{name}: {function}" not in found:  # once, whatever its overloads
                found.append(f"{name}: {function}")
    held("many parameters", found)


def test_a_class_name_stands_once():
    where = defaultdict(list)
    for name in TREES:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(name)
    held("class names", [f"{x}: {', '.join(sorted(files))}" for x, files in where.items() if len(files) > 1])


def test_imports_are_short():
    """At most 25 names from one module."""
    found = []
    for name in TREES:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.ImportFrom) and len(node.names) > NAMES:
                found.append(f"{name}: {node.module}")
    held("long imports", found)


def openings(name):
    """Docstrings of a module that begin with a relative clause or a preposition, as (qualified name, first word)."""
    documented = [("", TREES[name]), *functions(name)]
    documented += [(x.name, x) for x in ast.walk(TREES[name]) if isinstance(x, ast.ClassDef)]
    for where, node in documented:
        text = ast.get_docstring(node)
        if text and OPENINGS.match(text):
            yield f"{name}: {where or 'module'}"


def test_docstrings_open_with_a_sentence():
    held("docstring openings", [x for name in TREES for x in openings(name)])


def words():
    """(pattern, the field's word for it, files that may have it) of each word that is ours alone."""
    for line in (Path(__file__).parents[1] / "own_words.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern, instead, *files = line.split(" -> ")
            yield pattern.strip(), instead.strip(), " ".join(files).split()


def test_the_fields_words_are_used():
    """In code, its prose and the pages; a line for each file and word, with how often."""
    files = [*(SOURCES / name for name in TREES), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    files += sorted(REPOSITORY.glob("docs/**/*.md"))
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(REPOSITORY).as_posix()
        for pattern, _, allowed in words():
            count = len(re.findall(pattern, text, re.IGNORECASE))
            if count and name not in allowed:
                found.append(f"{name}: {pattern}: {count}")
    held("own words", found)


@pytest.mark.parametrize("rule", EXCEPTIONS)
def test_exceptions_are_sorted(rule):
    assert EXCEPTIONS[rule] == sorted(EXCEPTIONS[rule])
