"""Description and addresses of the project on a package index; pyproject.toml says all else.

urls.toml has the project's public addresses, and none so far. An index shows README without the repository beside it:
relative links become words, or with a `Source` in urls.toml links to it.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def description(readme: str, source: str | None) -> str:
    """Return README without pictures of the repository, and with its relative links as words or to ``source``."""

    def replaced(link: re.Match[str]) -> str:
        words, path = link.groups()
        if source is not None:
            return f"[{words}]({source}/blob/main/{path})"
        return words if words == path else f"{words}: {path}"

    return LINK.sub(replaced, PICTURE.sub("", readme))


if __name__ == "__main__":
    urls = tomllib.loads((HERE / "urls.toml").read_text(encoding="utf-8"))
    setup(
        long_description=description((HERE / "README.md").read_text(encoding="utf-8"), urls.get("Source")),
        long_description_content_type="text/markdown",
        project_urls=urls,
    )
