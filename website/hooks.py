"""What the site has beyond docs/: pages of the repository's root, the examples, a style, formulas, and plain text.

Pages of the root are read where they are, and links to and from them are moved with them. Formulas become MathML here,
which browsers show by themselves: no script, and nothing from elsewhere. What cannot be converted is an error.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils.templates import TemplateContext

sys.path.insert(0, str(Path(__file__).parent))
import plain_text

ROOT = Path(__file__).parents[1]
ASSETS = ("style.css", "iframe-worker.js")
# Pages that the search leaves out or puts last: sources, README, which repeats other pages, and what few look for.
SEARCH = {"overview.md": {"exclude": True}, "changelog.md": {"boost": 0.3}}
EXAMPLES = "examples/README.md"
PAGES = {
    "README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    EXAMPLES: "examples/index.md",
}  # fmt: skip


def moved(match: re.Match[str]) -> str:
    """A link of a page of the root, as of the folder docs/."""
    path, anchor = match["path"], match["anchor"] or ""
    return f"]({PAGES.get(path, path.removeprefix('docs/'))}{anchor})"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == EXAMPLES:
            text = re.sub(r"\]\((\w+)\.py\)", r"](\1.md)", text)
        else:
            text = re.sub(r"\]\((?P<path>[\w./-]+)(?P<anchor>#[\w-]+)?\)", moved, text)
        files.append(File.generated(config, name, content=text))
    for script in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {script.name}\n\n```python\n{script.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{script.stem}.md", content=text))
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")  # README links to it
    files.append(File.generated(config, "CITATION.cff", content=citation))
    for name in ASSETS:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of docs/ to the root's pages, and what the search makes of the page."""
    uri = page.file.src_uri
    if uri in SEARCH:
        page.meta["search"] = SEARCH[uri]
    elif uri.startswith("examples/") and uri != PAGES[EXAMPLES]:
        page.meta["search"] = {"exclude": True}
    elif uri.startswith("notebook/"):
        page.meta["search"] = {"boost": 0.3}
    for source, name in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, content, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', block, content, flags=re.DOTALL)


def on_page_context(context: TemplateContext, page: Page, config: MkDocsConfig, nav: Navigation) -> TemplateContext:
    plain_text.write(page)
    if page.is_homepage:
        Path(config.site_dir, "llms.txt").write_text(plain_text.index(nav, config), encoding="utf-8")
    return context


def inline(match: re.Match[str]) -> str:
    return formula(match[1], "inline")


def block(match: re.Match[str]) -> str:
    return f'<div class="formula">{formula(match[1], "block")}</div>'


# Of cases, which the style draws as one: few machines have a font in which it stretches.
BRACE = re.compile(r'<mo stretchy="true" fence="true" form="prefix">&#x0007B;</mo><mtable>')


def formula(text: str, display: str) -> str:
    mathml = convert(html.unescape(text).strip(), display=display)
    mathml = BRACE.sub('<mtable class="cases">', mathml)
    if "\\" in mathml:  # a command that it does not know
        raise ValueError(f"formula: cannot be converted: {text}")
    return mathml
