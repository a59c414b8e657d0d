"""For the tests of transformers, which are left out where it is not installed; some others need no library."""

import importlib.util
from pathlib import Path

import pytest

ALONE = ("test_flash_attn", "test_flex", "test_evoformer", "test_sdpa_mode")
TESTS = {path.name for path in Path(__file__).parent.glob("test_*.py") if not path.name.startswith(ALONE)}
collect_ignore = [] if importlib.util.find_spec("transformers") is not None else sorted(TESTS)


@pytest.fixture(scope="module", autouse=True)
def registered():
    from tilewise.integrations import transformers as integration

    integration.register()


@pytest.fixture
def calls(monkeypatch):
    """What reaches tilewise.attention: the keyword arguments of each call."""
    from tilewise.integrations import transformers as integration

    seen = []
    attention = integration.attention

    def spy(q, k, v, **options):
        seen.append(options | {"M": q.shape[2], "N": k.shape[2]})
        return attention(q, k, v, **options)

    monkeypatch.setattr(integration, "attention", spy)
    return seen
