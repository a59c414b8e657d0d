"""Entry points for structure models and windows, measured on some cases in addition to a call of 4 dimensions.

All providers of such a case get the same 4-D leaves. The entry points and cuEquivariance, whose triangle_attention one
of them replaces, get them with additional dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from tilewise import attention
from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention

if TYPE_CHECKING:
    from tilewise_tools.bench.cases import Case, CaseInputs


def by_structure(case: Case, x: CaseInputs) -> list[Tensor | None]:
    """Return q, k, v, bias and mask of a case whose batch is the rows of one pair representation or of several."""
    assert x.bias is not None
    rows = [None if y is None else y.unflatten(0, (x.bias.shape[0], -1)) for y in (x.q, x.k, x.v, x.mask)]
    return [*rows[:3], x.bias[:, None], rows[3]]


def _triangle(case: Case, x: CaseInputs) -> Tensor:
    """Call triangle_attention; the batch is the rows of one pair representation or of several."""
    o: Tensor = triangle_attention(*by_structure(case, x))  # type: ignore[arg-type]
    return o.flatten(0, 1)


def _tokens(case: Case, x: CaseInputs) -> Tensor:
    """Call attention_pair_bias; the batch is the samples of one structure."""
    assert x.bias is not None
    return attention_pair_bias(x.q[None], x.k[None], x.v[None], x.bias).squeeze(0)


def _windows(case: Case, x: CaseInputs) -> Tensor:
    """Call attention of images and their windows; the mask of one image."""
    assert x.bias is not None
    assert x.mask is not None
    q, k, v = (y.unflatten(0, (-1, case.windows)) for y in (x.q, x.k, x.v))
    o: Tensor = attention(q, k, v, bias=x.bias[None], mask=x.mask[None, : case.windows])
    return o.flatten(0, 1)


ENTRY_POINTS: dict[str, Callable[[Case, CaseInputs], Tensor]] = {
    "triangle_attention": _triangle, "attention_pair_bias": _tokens, "attention": _windows,
}  # fmt: skip


def entry_point(case: Case, x: CaseInputs) -> Callable[[], Tensor]:
    """Return the forward of the case's entry point, by tilewise's default backend."""
    assert case.entry is not None
    call = ENTRY_POINTS[case.entry]
    return lambda: call(case, x)


def cuequivariance_declines(case: Case) -> str | None:
    """Return why cuEquivariance does not support a case; it needs a bias (1, H, M, N)."""
    if case.windows is not None:
        return "takes masks of keys"
    bias = case.bias if case.bias is not None and (case.bias[0] == 1 or case.run > 1) else ()
    if bias[1:] != (case.heads, case.queries, case.keys) or case.causal or case.kv_heads != case.heads:
        return "takes a bias that the rows share, and neither causal nor grouped heads"
    return None


def cuequivariance(case: Case, x: CaseInputs) -> Callable[[], Tensor]:
    """Return the forward by cuEquivariance's triangle_attention; the batch is the rows of each structure."""
    from cuequivariance_ops_torch import triangle_attention as attend

    def forward() -> Tensor:
        o: Tensor = attend(*by_structure(case, x))
        return o.flatten(0, 1)

    return forward
