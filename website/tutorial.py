"""The tutorial as a notebook, with the outputs that its page shows.

    PYTHONPATH=src python website/tutorial.py    # runs docs/tutorial.md; writes its outputs, pictures and notebook

The page is the source: a block of Python is a cell, the block of text after it is what the cell prints. A notebook is
JSON, so that neither Jupyter nor a plugin of the site is needed. tests/tools/test_tutorial.py runs the page.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
LINK_TO_ITSELF = "Paste the blocks one after the other, or open\n[the same page as a notebook](tutorial.ipynb)."

# Grey letters on nothing, which can be read on white and on black; equal numbers give equal bytes.
STYLE = {
    "text.color": "#808080", "axes.labelcolor": "#808080", "axes.edgecolor": "#808080",
    "xtick.color": "#808080", "ytick.color": "#808080", "svg.fonttype": "none", "svg.hashsalt": "tilewise",
}  # fmt: skip


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (code, output) of each block of Python, with "" for a block that prints nothing."""
    return [(match["code"], match["output"] or "") for match in BLOCK.finditer(text)]


def run(text: str) -> list[str]:
    """Run the blocks one after the other, and return what each prints; pictures go to the current folder."""
    names: dict[str, Any] = {}
    printed = []
    for code, _ in blocks(text):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, PAGE.name, "exec"), names)
        printed.append(out.getvalue())
    return printed


def with_outputs(text: str, printed: list[str]) -> str:
    """Return the page with these outputs in place of its own."""
    outputs = iter(printed)

    def block(match: re.Match[str]) -> str:
        output = next(outputs)
        return f"```python\n{match['code']}```\n" + (f"\n```text\n{output}```\n" if output else "")

    return BLOCK.sub(block, text)


def notebook(text: str) -> str:
    """Return the page as a notebook of nbformat 4.5."""
    assert LINK_TO_ITSELF in text
    text = text.replace(LINK_TO_ITSELF, "Run the cells one after the other.")
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        if source.strip():
            lines = source.strip("\n").splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines, **more})

    end = 0
    for number, match in enumerate(BLOCK.finditer(text), 1):
        add("markdown", text[end : match.start()])
        output = (match["output"] or "").splitlines(keepends=True)
        outputs = [{"name": "stdout", "output_type": "stream", "text": output}] if output else []
        add("code", match["code"], execution_count=number, outputs=outputs)
        end = match.end()
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    text = PAGE.read_text(encoding="utf-8")
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date of the pictures
    with contextlib.chdir(DOCS / "images"):
        text = with_outputs(text, run(text))
    PAGE.write_text(text, encoding="utf-8")
    NOTEBOOK.write_text(notebook(text), encoding="utf-8")


if __name__ == "__main__":
    main()
