"""Recomputation of `torch.utils.checkpoint` within a function mode of the forward.

PyTorch restores autocast, random numbers and the default device for a recomputation, and no other mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import checkpoint


def recompute_within(is_active: Callable[[], bool], mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Make regions that are checkpointed while ``is_active()`` recompute within ``mode()``, from now on and in every
    thread, with ``use_reentrant`` False or True.

    It replaces a method of each of the two classes that hold a recomputation, so that it does not matter by which name
    a library has imported `checkpoint`. Regions that begin without the mode are as before.
    """
    begin, forward = checkpoint._CheckpointFrame.__init__, checkpoint.CheckpointFunction.forward

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        if not is_active():
            return function

        def recompute(*args: Any, **named: Any) -> Any:
            if is_active():  # the backward, or the forward of the reentrant kind, is within the mode
                return function(*args, **named)
            with mode():
                return function(*args, **named)

        return recompute

    def init(self: Any, recompute_fn: Callable[..., Any], *rest: Any, **named: Any) -> None:
        begin(self, again(recompute_fn), *rest, **named)

    def forward_of(ctx: Any, run_function: Callable[..., Any], *rest: Any) -> Any:
        return forward(ctx, again(run_function), *rest)

    checkpoint._CheckpointFrame.__init__ = init  # type: ignore[method-assign]
    checkpoint.CheckpointFunction.forward = staticmethod(forward_of)  # type: ignore[method-assign]
