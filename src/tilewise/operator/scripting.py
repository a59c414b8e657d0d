"""Rejection of torch.jit.script. It supports neither keyword-only arguments nor a choice by dtype or device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refuse(function: Callable[..., Any]) -> None:
    """Make torch.jit.script of ``function`` raise an error that names the alternatives."""

    def prepare() -> NoReturn:
        raise NotImplementedError(
            f"tilewise.{function.__name__}: torch.jit.script does not support it; use torch.compile, torch.export, or "
            "torch.jit.trace"
        )

    function.__prepare_scriptable__ = prepare  # type: ignore[attr-defined]
