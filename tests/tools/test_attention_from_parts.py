"""The page that builds attention from its parts prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "attention-from-parts.md"
PIECE = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)


def test_the_page_prints_what_it_says():
    pieces = PIECE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(pieces) >= 7
    names: dict[str, object] = {}
    for code, expected in pieces:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == expected
