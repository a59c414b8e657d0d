"""The doors of structure models in the bench: cases of `cases` that are called by them too.

Who else computes such a case takes the same leaves, of four dimensions; a door sees them with the dimensions that it is
called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention

if TYPE_CHECKING:
    from tilewise.bench.cases import Case, Inputs


def _triangle(x: Inputs) -> Tensor:
    """The batch is the rows of one pair representation."""
    assert x.bias is not None
    o: Tensor = triangle_attention(
        x.q[None], x.k[None], x.v[None], x.bias[None], None if x.mask is None else x.mask[None]
    )
    return o[0]


def _tokens(x: Inputs) -> Tensor:
    """The batch is the samples of one structure."""
    assert x.bias is not None
    return attention_pair_bias(x.q[None], x.k[None], x.v[None], x.bias)[0]


DOORS: dict[str, Callable[[Inputs], Tensor]] = {"triangle_attention": _triangle, "attention_pair_bias": _tokens}


def door(case: Case, x: Inputs) -> Callable[[], Tensor]:
    """The forward, by the backend that tilewise takes by itself."""
    assert case.door is not None
    call = DOORS[case.door]
    return lambda: call(x)


def no_door(case: Case) -> str | None:
    return None if case.door is not None else "is measured where a case has a door"
