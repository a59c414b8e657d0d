"""README for a package index, where a path of the repository leads nowhere; pyproject.toml says all else."""

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def in_words(link: re.Match[str]) -> str:
    """What it says, and the path in the source distribution that it leads to."""
    words, path = link.groups()
    return words if words == path else f"{words}: {path}"


def description(readme: str) -> str:
    """Without pictures, and with words for links, where these are relative."""
    return LINK.sub(in_words, PICTURE.sub("", readme))


README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=description(README), long_description_content_type="text/markdown")
