"""The site in a browser: `make test-browser` sets up both, and without either these tests are skipped."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MKDOCS = REPOSITORY / ".venv-docs" / "bin" / "mkdocs"
PAGES = (
    "index", "overview", "tutorial", "features", "peers", "faq", "recipes", "switching", "performance", "maths",
    "layouts", "api/attention", "api/bias",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not MKDOCS.exists():
        pytest.skip("no mkdocs here: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    config = REPOSITORY / "website" / "mkdocs.yml"
    subprocess.run([MKDOCS, "build", "-q", "--config-file", config, "--site-dir", folder], check=True, cwd=REPOSITORY)
    return folder


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole(chromium, site, page, width):
    """It has a heading, nothing is wider than the window, and pictures and formulas have a size."""
    chromium.resize(width, 900)
    chromium.open(site / f"{page}.html")
    assert chromium.evaluate("document.querySelector('h1').textContent.trim().length") > 3
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    shown = "[...document.querySelectorAll('article {}')].filter(e => e.checkVisibility()){}"
    assert chromium.evaluate(shown.format("img", ".filter(e => !e.naturalWidth).map(e => e.src)")) == []
    assert chromium.evaluate(shown.format("math", ".filter(e => e.getBoundingClientRect().height < 5).length")) == 0
    assert (page == "maths") == (chromium.evaluate(shown.format("math", ".length")) > 50)


def test_formulas_are_whole(chromium, site):
    """Nothing of them is cut off or scrolls by height, and the brace of cases is as high as they are."""
    chromium.resize(1280, 900)
    chromium.open(site / "maths.html")
    assert chromium.evaluate("[...document.querySelectorAll('.formula')].length") > 20
    rect = "[{0}.getBoundingClientRect()].map(r => [r.top, r.bottom])[0]"
    boxes = f"[...document.querySelectorAll('.formula')].map(e => [{rect.format('e')}, {rect.format('e.firstChild')}])"
    for (top, bottom), (begin, end) in chromium.evaluate(boxes):
        assert top <= begin < end <= bottom
    scrolls = "[...document.querySelectorAll('.formula')].filter(e => e.offsetWidth - e.clientWidth > 0).length"
    assert chromium.evaluate(scrolls) == 0  # by height: no bar beside them
    braces = "[...document.querySelectorAll('mtable.cases')]"
    (drawn,) = chromium.evaluate(f"{braces}.map(e => getComputedStyle(e).backgroundImage)")
    assert drawn.startswith('url("data:image/svg')
    assert chromium.evaluate(f"{braces}.map(e => e.getBoundingClientRect().height > 30)") == [True]
    assert chromium.evaluate("document.body.innerHTML.includes('>{</mo><mtable')") is False


def test_a_screenshot_shows_text(chromium, site):
    """The first page is neither blank nor one color: dark letters on white in the middle of the window."""
    from matplotlib.image import imread

    chromium.resize(1280, 900)
    chromium.open(site / "index.html")
    picture = imread(io.BytesIO(chromium.screenshot()))[200:800, 320:960, :3].mean(-1)
    assert picture.shape == (600, 640)
    assert (picture > 0.9).mean() > 0.6
    assert 0.01 < (picture < 0.4).mean() < 0.3
