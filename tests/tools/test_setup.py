"""README as a package index shows it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
README = "![figure](docs/a.svg)\n\nSee [docs/a.md](docs/a.md), [the rules](docs/b.md#c), [here](https://pypi.org).\n"


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_tilewise", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_an_address_relative_links_are_words(setup):
    assert setup.description(README, None) == "See docs/a.md, the rules: docs/b.md#c, [here](https://pypi.org).\n"


def test_with_an_address_they_lead_there(setup):
    at = "https://example.org/tilewise"
    assert setup.description(README, at) == (
        f"See [docs/a.md]({at}/blob/main/docs/a.md), [the rules]({at}/blob/main/docs/b.md#c), [here](https://pypi.org).\n"
    )
