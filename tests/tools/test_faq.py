"""The errors that docs/faq.md explains are the errors that calls raise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import attention

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE.split("\n## Errors\n")[1], re.MULTILINE)
X = torch.zeros(2, 4, 8, 16)


def third_derivative() -> None:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attention(x, x, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x, create_graph=True)
    second.sum().backward()


CALLS: list[Callable[[], object]] = [
    lambda: attention(X, X, X, mask=torch.zeros(8, 8)),
    lambda: attention(X, X, X, mask=torch.ones(2, 8, dtype=torch.bool)),
    lambda: attention(X, X, X, attn_mask=None),
    lambda: attention(X, X.half(), X),
    lambda: attention(X[:, :3], X[:, :2], X[:, :2]),
    lambda: tilewise.explain(X, X, X, device="sm_75"),
    lambda: attention(X, X, X, backend="hopper"),
    third_derivative,
    lambda: attention(X, X, X, softcap=0),
]


def test_each_message_has_a_call():
    assert len(MESSAGES) == len(CALLS)


@pytest.mark.parametrize(("message", "call"), list(zip(MESSAGES, CALLS, strict=False)), ids=MESSAGES)
def test_the_message_is_raised(message, call):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=re.escape(message.removesuffix(" ..."))):
        call()
