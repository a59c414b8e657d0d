"""The tutorial prints what its page and its notebook show, and draws its pictures."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def tutorial():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "website")
        import tutorial

        yield tutorial
        sys.modules.pop("tutorial")


@pytest.fixture(scope="module")
def text(tutorial):
    return tutorial.PAGE.read_text(encoding="utf-8")


def test_the_page_prints_what_it_shows(tutorial, text, tmp_path, monkeypatch):
    """The words exactly; the numbers as closely as another CPU and another torch compute them."""
    pytest.importorskip("matplotlib").use("svg")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        printed = tutorial.run(text)
    finally:
        torch.set_num_threads(threads)
    shown = [output for _, output in tutorial.blocks(text)]
    assert sum(map(bool, shown)) > 8
    for expected, found in zip(shown, printed, strict=True):
        assert NUMBER.sub("#", found) == NUMBER.sub("#", expected)
        for x, y in zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True):
            assert float(x) == pytest.approx(float(y), abs=5 if "%" in expected and "." not in x else 0.15), found
    for name in ("tutorial-before.svg", "tutorial-after.svg"):
        assert (tmp_path / name).stat().st_size > 5000
        assert (REPOSITORY / "docs" / "images" / name).is_file()
    assert (tmp_path / "tutorial-before.svg").read_bytes() != (tmp_path / "tutorial-after.svg").read_bytes()


def test_the_notebook_is_the_page(tutorial, text):
    """`python website/tutorial.py` writes it: its cells have the page's code, outputs and text."""
    written = tutorial.NOTEBOOK.read_text(encoding="utf-8")
    assert written == tutorial.notebook(text)
    cells = json.loads(written)["cells"]
    code = [("".join(c["source"]), "".join(c["outputs"][0]["text"]) if c["outputs"] else "")
            for c in cells if c["cell_type"] == "code"]  # fmt: skip
    assert [(x.strip("\n"), y) for x, y in tutorial.blocks(text)] == code
    assert len({c["id"] for c in cells}) == len(cells)
    assert "```python" not in written


def test_outputs_are_replaced(tutorial):
    page = "a\n\n```python\nprint(1)\n```\n\n```text\n0\n```\n\n```python\nx = 2\n```\n"
    assert tutorial.run(page) == ["1\n", ""]
    assert tutorial.with_outputs(page, ["1\n", ""]) == page.replace("\n0\n", "\n1\n")
