"""Sources as Python reads them, each once in a process and not before somebody asks: all of them take a second."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Trees(Mapping[Any, ast.Module]):
    """Modules by their names, or whatever stands for the path of each."""

    def __init__(self, paths: Mapping[Any, Path]) -> None:
        self.paths = paths

    def __getitem__(self, name: Any) -> ast.Module:
        return tree(self.paths[name])

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[Any]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)
