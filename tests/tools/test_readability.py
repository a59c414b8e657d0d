"""Pages for users are short, plain, and say what they are for. The limits may only become stricter."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PEERS = (REPOSITORY / "docs" / "peers.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(REPOSITORY.glob("docs/**/*.md"))
    if path.parent.name != "notebook"
}
FIRST_PAGES = ["README.md", "docs/index.md", "docs/faq.md", *(name for name in PAGES if "tutorial" in name)]


def prose(text: str) -> list[str]:
    """Return the sentences of a page, without code, tables, headings, pictures, and addresses of links."""
    text = re.sub(r"^```.*?^```|^(#|\|).*?$|<!--.*?-->|!\[.*?\]\(.*?\)", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"^[-*] ", "\n\n", text, flags=re.MULTILINE)
    sentences = re.split(r"\n\s*\n|(?<=[.!?])[\"*]*\s", text)
    return [sentence for sentence in sentences if words(sentence)]


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+(?:['’-][A-Za-z]+)*", text)


def syllables(word: str) -> int:
    """Count groups of vowels. Two vowels as in bias, gradient or video are spoken apart, unless as in motion or social.
    A last e is silent, and mostly that of -es and -ed, but not after a consonant and l."""
    word = word.lower()
    count = len(re.findall(r"[aeiouy]+", word))
    count -= bool(
        re.search(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouydtl]ed$|[aeiouy]led$|[^aeiouycglsxz]es$|[aeiouy]les$", word)
    )
    count += len(re.findall(r"(?<![cgstx])i[aou]|ie(?=n)|eo|ua", word))
    return max(count, 1)


def reading_ease(text: str) -> float:
    """Return Flesch's measure: 100 is very easy, 50 is fairly difficult, 0 is for specialists."""
    sentences = prose(text)
    found = [word for sentence in sentences for word in words(sentence)]
    return 206.835 - 1.015 * len(found) / len(sentences) - 84.6 * sum(map(syllables, found)) / len(found)


@pytest.mark.parametrize(
    ("word", "count"),
    [("bias", 2), ("mask", 1), ("motion", 2), ("tile", 1), ("table", 2), ("queries", 2), ("gradient", 3),
     ("attention", 3), ("needed", 2), ("compiled", 2), ("shapes", 1), ("the", 1), ("memory", 3), ("matrix", 2)],
)  # fmt: skip
def test_syllables(word, count):
    assert syllables(word) == count


def test_only_prose_is_measured():
    table, code, items = "| a | b |\n|---|---|\n| c | d |", "```\nx = 1.\n```", "- two\n- three"
    page = f"# A title\n\nOne [link](a/b.md) here. `code` is left out.\n\n{code}\n\n{table}\n\n{items}"
    assert [words(x) for x in prose(page)] == [["One", "link", "here"], ["is", "left", "out"], ["two"], ["three"]]


def test_long_words_and_sentences_are_harder():
    easy, hard = (
        "The cat sat. The dog ran.",
        "Differentiability notwithstanding, implementations occasionally materialize.",
    )
    assert reading_ease(easy) > 100
    assert reading_ease(hard) < 0
    assert reading_ease("The cat sat and the dog ran.") < reading_ease(easy)


def test_readme_is_short():
    assert len(README.split()) <= 1400
    assert len(README.splitlines()) <= 170
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert len(first[1].splitlines()) <= 8


def test_documents_are_short():
    """Without the notebook. This limit may only shrink."""
    assert sum(len(text.split()) for text in PAGES.values()) <= 26_000


@pytest.mark.parametrize("name", FIRST_PAGES)
def test_first_pages_are_easy_to_read(name):
    text = README if name == "README.md" else PAGES[name]
    ease = reading_ease(text)
    assert ease >= 50, f"{name}: {ease:.1f}; the longest sentence: {max(prose(text), key=lambda x: len(words(x)))}"


@pytest.mark.parametrize("name", FIRST_PAGES)
def test_code_of_first_pages_is_not_cut(name):
    """The site shows lines of 88 columns without a scroll bar."""
    text = README if name == "README.md" else PAGES[name]
    code = "".join(re.findall(r"^```.*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert [line for line in code.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/index.md"])
def test_a_page_says_what_it_is_for(name):
    """In its first paragraph, with the words "This page"."""
    title, paragraph = PAGES[name].split("\n\n")[:2]
    assert title.startswith("# ")
    assert "This page" in paragraph


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the first table of a text, without its head."""
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1].splitlines()]


def test_gpus_have_the_state_of_the_tests():
    """README's table says which compute capabilities tests/aot compiles for."""
    source = (REPOSITORY / "tests" / "aot" / "test_triton_room.py").read_text(encoding="utf-8")
    targets = re.search(r"^TARGETS = (.*?\})", source, re.MULTILINE)
    assert targets is not None
    listed = rows(README.split("\n## Which GPU\n")[1].split("\n## ")[0])
    compiled = {row[1].replace(".", "") for row in listed if re.search("(?<!not )compiled|measured", row[2])}
    assert compiled == {str(target) for target in ast.literal_eval(targets[1])}


def test_every_cell_beside_other_libraries_has_its_source():
    """README's table and docs/peers.md have the same libraries, rows and answers, and each answer has a source."""
    section = README.split("\n## Compared with other libraries\n")[1].split("\n## ")[0]
    names = re.search(r"^\| \| (.*) \|$", section, re.MULTILINE)
    assert names is not None
    libraries = dict(part.split("\n", 1) for part in PEERS.split("\n## ")[1:])
    assert names[1].split(" | ") == list(libraries)
    short = rows(section)
    for i, library in enumerate(libraries):
        known = rows(libraries[library])
        assert [row[0] for row in known] == [row[0] for row in short]
        assert [row[1] for row in known] == [row[1 + i] for row in short], library
        for feature, answer, source in known:
            assert answer in ("yes", "part", "no", "?"), (library, feature)
            assert source, (library, feature)
            assert ("not checked" in source) or answer != "?", (library, feature)
