"""Pages as Markdown beside their HTML, and llms.txt, which lists them: for language models and plain text.

A page of the API has only names, `::: tilewise.attention`: their signatures and docstrings take the names' places.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

SOURCES = Path(__file__).parents[1] / "src"
SIGNATURES = Path(__file__).with_name("signatures.py")
NAME = re.compile(r"^::: ([\w.]+)\n(?:    options:.*\n)?", re.MULTILINE)


@functools.cache
def package() -> griffe.Module:
    extensions = griffe.load_extensions(str(SIGNATURES))
    return griffe.load("tilewise", search_paths=[SOURCES], extensions=extensions, resolve_aliases=True)


def described(match: re.Match[str]) -> str:
    """Return the signature and docstring of a name, and of the public functions of a class."""
    found = package()[match[1].removeprefix("tilewise.")]
    parts = [f"## {match[1]}"]
    members = [x for x in found.members.values() if x.is_function and x.name[0] != "_"] if found.is_class else [found]
    if found.is_class and found.docstring:
        parts.append(found.docstring.value)
    for x in members:
        text = x.docstring.value if x.docstring else ""
        parts.append(f"```python\n{x.signature(return_type=True)}\n```\n\n{text}".rstrip())
    return "\n\n".join(parts) + "\n"


def text_of(page: Page) -> str:
    text = re.sub(r"(\]\([\w./]*)\bREADME\.md", r"\1index.md", page.markdown or "")  # a folder's README is its index
    return NAME.sub(described, text)


def write(page: Page) -> None:
    """Write a page's Markdown beside its HTML."""
    file = Path(page.file.abs_dest_path).with_suffix(".md")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text_of(page), encoding="utf-8")


def first_sentence(markdown: str) -> str:
    """Return the first sentence below a page's title, without links; "" where no prose follows the title."""
    paragraphs = [x for x in markdown.split("\n\n") if x.strip()]
    if len(paragraphs) < 2 or not paragraphs[1][0].isalpha():
        return ""
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[1].split()))
    return re.split(r"(?<=[.:])\s", prose)[0].rstrip(":")


def index(nav: Navigation, config: MkDocsConfig) -> str:
    """Return llms.txt (llmstxt.org): a section for each tab, a line for each page."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    section = None
    for page in nav.pages:
        top = page.ancestors[-1].title if page.ancestors else page.title
        if top != section:
            section = top
            lines += ["", f"## {section}", ""]
        about = first_sentence(page.markdown or "")
        lines.append(
            f"- [{page.title}]({page.file.dest_uri.removesuffix('.html')}.md)" + (f": {about}" if about else "")
        )
    return "\n".join(lines) + "\n"
