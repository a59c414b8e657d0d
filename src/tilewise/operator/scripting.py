"""torch.jit.script, which takes no keyword-only arguments and no choice by dtype or device: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refuse(function: Callable[..., Any]) -> None:
    """Make torch.jit.script say of ``function`` what to use in its place, where it gave up on the signature."""

    def prepare() -> NoReturn:
        raise NotImplementedError(
            f"tilewise.{function.__name__}: torch.jit.script does not support it; use torch.compile, torch.export, or "
            "torch.jit.trace"
        )

    function.__prepare_scriptable__ = prepare  # type: ignore[attr-defined]
