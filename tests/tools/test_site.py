"""The site, and how it looks in a browser: `make test-browser` sets up both; tests of what is missing are skipped."""

from __future__ import annotations

import io
import json
import re
import subprocess
import time
from pathlib import Path

import browser
import pytest

REPOSITORY = Path(__file__).parents[2]
MKDOCS = REPOSITORY / ".venv-docs" / "bin" / "mkdocs"
PAGES = (
    "index", "overview", "tutorial", "features", "peers", "faq", "recipes", "switching", "performance", "maths",
    "layouts", "rules", "api/attention", "api/bias", "api/masks",
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


def test_nothing_is_fetched_from_elsewhere(site):
    """The folder works when it is opened by hand: scripts and styles are its own, and the search index is a script."""
    for page in PAGES:
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        loaded = re.findall(r'<script[^>]* src="([^"]+)"|<link rel="(?:stylesheet|preconnect)" href="([^"]+)"', text)
        assert len(loaded) > 3
        assert not [link for pair in loaded for link in pair if "//" in link]
        assert 'iframe-worker.js"></script>' in text
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")


def test_the_search_finds_pages(site):
    """The sources of the examples and README, which repeat other pages, are not in the index."""
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = {entry["location"].partition("#")[0] for entry in entries}
    assert {x for x in pages if x.startswith(("examples/", "overview"))} == {"examples/index.html"}
    for word in ("T5", "rotary", "AMD", "tutorial"):
        assert [x for x in entries if re.search(rf"\b{word}\b", x["title"] + x["text"], re.IGNORECASE)]


def test_a_page_leads_to_the_next(site):
    """Tabs above, and previous and next below."""
    text = (site / "tutorial.html").read_text(encoding="utf-8")
    assert 'class="md-tabs"' in text
    assert 'rel="prev"' in text or "md-footer__link--prev" in text
    assert "md-footer__link--next" in text


def test_every_page_is_there_as_markdown(site):
    """Beside its HTML, and llms.txt lists all but README's; a page of the API has its docstrings."""
    pages = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")} - {Path("404")}
    assert len(pages) > 40
    texts = {page: (site / page.with_suffix(".md")).read_text(encoding="utf-8") for page in pages}
    assert not [page for page, text in texts.items() if re.search(r"^:::", text, re.MULTILINE)]
    lines = (site / "llms.txt").read_text(encoding="utf-8")
    assert lines.startswith("# tilewise\n\n> ")
    listed = {Path(name) for name in re.findall(r"^- \[[^\]]+\]\(([\w./-]+)\.md\)", lines, re.MULTILINE)}
    assert listed == pages - {Path("overview")}
    assert "```python\nattention(q: Tensor, k: Tensor, v: Tensor, *, bias: Bias" in texts[Path("api/attention")]
    for page, text in texts.items():
        for link in re.findall(r"\]\(([\w./-]+\.md)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
            assert (site / page.parent / link).is_file(), (page, link)


def test_signatures_are_those_of_a_caller(site):
    """Without what is only there to be rejected, and with links to the types' explanations."""
    text = (site / "api" / "attention.html").read_text(encoding="utf-8")
    assert "**unknown" not in text
    assert "**numbers" not in text
    for name in ("bias", "mask", "seed", "window"):
        assert f'href="types.html#{name}"' in text


@pytest.mark.parametrize(
    ("word", "page"), [("T5", "position-biases"), ("rotary", "faq"), ("AMD", "faq"), ("tutorial", "tutorial")]
)
def test_the_search_works_without_a_server(chromium, site, word, page):
    chromium.resize(1280, 900)
    chromium.open(site / "index.html")
    typed = "const x = document.querySelector('.md-search__input'); x.focus(); x.value = '{}'; "
    chromium.evaluate(f"(() => {{ {typed.format(word)} x.dispatchEvent(new Event('keyup', {{bubbles: true}})) }})()")
    links = "[...document.querySelectorAll('.md-search-result__link')].map(e => e.href.split('/').pop())"
    end = time.monotonic() + browser.SECONDS
    while not (found := chromium.evaluate(links)) and time.monotonic() < end:
        time.sleep(0.1)
    assert any(link.startswith(f"{page}.html") for link in found)
    assert not any(link.startswith("t5_finetune") for link in found)


def test_no_code_is_cut(chromium, site):
    chromium.resize(1280, 900)
    for page in PAGES:
        chromium.open(site / f"{page}.html")
        cut = "[...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth)"
        assert page == "overview" or chromium.evaluate(f"{cut}.map(e => e.textContent)") == []
