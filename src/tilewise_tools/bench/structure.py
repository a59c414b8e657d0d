"""The doors of structure models in the bench: cases of `cases` that are called by them too.

Who else computes such a case takes the same leaves, of four dimensions; a door sees them with the dimensions that it is
called with. So does cuEquivariance, whose function one of them has the name and arguments of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention

if TYPE_CHECKING:
    from tilewise_tools.bench.cases import Case, CaseInputs


def _triangle(x: CaseInputs) -> Tensor:
    """The batch is the rows of one pair representation."""
    assert x.bias is not None
    o: Tensor = triangle_attention(
        x.q[None], x.k[None], x.v[None], x.bias[None], None if x.mask is None else x.mask[None]
    )
    return o.squeeze(0)  # the gradient of a select is a copy


def _tokens(x: CaseInputs) -> Tensor:
    """The batch is the samples of one structure."""
    assert x.bias is not None
    return attention_pair_bias(x.q[None], x.k[None], x.v[None], x.bias).squeeze(0)


DOORS: dict[str, Callable[[CaseInputs], Tensor]] = {"triangle_attention": _triangle, "attention_pair_bias": _tokens}


def door(case: Case, x: CaseInputs) -> Callable[[], Tensor]:
    """The forward, by the backend that tilewise takes by itself."""
    assert case.door is not None
    call = DOORS[case.door]
    return lambda: call(x)


def no_door(case: Case) -> str | None:
    return None if case.door is not None else "is measured where a case has a door"


def cuequivariance_declines(case: Case) -> str | None:
    """Of what is plain otherwise: its bias is shared by all rows, and has one matrix for each head."""
    if case.bias != (1, case.heads, case.queries, case.keys) or case.causal or case.kv_heads != case.heads:
        return "takes a bias that the batch shares, and neither a band nor grouped heads"
    return None


def cuequivariance(case: Case, x: CaseInputs) -> Callable[[], Tensor]:
    """The forward by NVIDIA's triangle attention, of which the batch is the rows."""
    from cuequivariance_ops_torch import triangle_attention as attend

    mask = None if x.mask is None else x.mask[None]

    def forward() -> Tensor:
        assert x.bias is not None
        o: Tensor = attend(x.q[None], x.k[None], x.v[None], x.bias[None], mask)
        return o.squeeze(0)

    return forward
