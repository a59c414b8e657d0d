"""Views of a call's tensors in the shapes that the operator takes, and of its results in the caller's.

Autograd does not record them: an eager call takes them inside its autograd.Function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.backends import Gradients, Inputs, Outputs, heads_first, rows_first


class ShapedViews(NamedTuple):
    """Views of the first six inputs in the ``shapes`` that the operator takes, where they have others; None: as given.

    ``lead``: leading dimensions of a call with more of them than a batch, else empty.
    """

    lead: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def between(cls, given: Inputs, taken: Inputs) -> ShapedViews | None:
        """Return views of ``given`` with the shapes of ``taken``; None if these are its own."""
        pairs = zip(given[:6], taken[:6], strict=True)
        shapes = [None if x is None or y is None or x.shape == y.shape else tuple(y.shape) for x, y in pairs]
        return None if shapes == [None] * 6 else cls(tuple(given.q.shape[:-3]) if shapes[0] else (), tuple(shapes))

    def inputs(self, given: Inputs) -> Inputs:
        q, k, v, bias, mask, sink, *more = given
        pairs = zip((q, k, v, bias, mask, sink), self.shapes, strict=True)
        return Inputs(*[x if x is None or shape is None else x.view(shape) for x, shape in pairs], *more)  # type: ignore[arg-type]

    def outputs(self, *found: Tensor | None) -> Any:
        """Return o, the LSE and statistics in the caller's shapes."""
        if not self.lead:
            return found
        return tuple([x if x is None else x.view(*self.lead, *x.shape[1:]) for x in found])

    def cotangents(self, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if not self.lead:
            return do, dlse
        (batch, *_), n = self.shapes[0], len(self.lead)  # type: ignore[misc]
        return tuple([None if x is None else x.reshape(batch, *x.shape[n:]) for x in (do, dlse)])  # type: ignore[return-value]

    def gradients(self, grads: Sequence[Tensor | None], given: Inputs) -> list[Tensor | None]:
        """Return the gradients in the order of `Needs`, in the shapes of ``given``."""
        found, shapes = list(grads), (*self.shapes[:4], self.shapes[5])
        for n, (x, shape) in enumerate(zip((*given[:4], given.sink), shapes, strict=True)):
            grad = grads[n]
            if grad is not None and x is not None and shape is not None:
                found[n] = grad.view(x.shape)
        return found


class PackedViews(NamedTuple):
    """Views of a packed batch, (total, H, D) as (1, H, total, D), and of bias, mask and sink in these shapes."""

    bias: tuple[int, ...] | None
    mask: tuple[int, ...] | None
    sink: tuple[int, ...] | None

    def inputs(self, given: Inputs) -> Inputs:
        q, k, v, bias, mask, sink, *more = given
        views = [None if x is None else x.view(shape) for x, shape in zip((bias, mask, sink), self, strict=True)]  # type: ignore[arg-type]
        return Inputs(heads_first(q), heads_first(k), heads_first(v), *views, *more)  # type: ignore[arg-type]

    def outputs(self, o: Tensor, *others: Tensor | None) -> Any:
        """Return o, the LSE and statistics in the caller's shapes."""
        return rows_first(o), *[x if x is None else x.squeeze(0) for x in others]

    def cotangents(self, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return None if do is None else heads_first(do), None if dlse is None else dlse.unsqueeze(0)

    def gradients(self, grads: Sequence[Tensor | None], given: Inputs) -> list[Tensor | None]:
        rows = [None if x is None else rows_first(x) for x in grads[:3]]
        pairs = zip(grads[3:5], (given.bias, given.sink), strict=True)
        return [*rows, *[None if grad is None or x is None else grad.view(x.shape) for grad, x in pairs], *grads[5:]]


Views = ShapedViews | PackedViews


def without_rows(inputs: Inputs, outputs: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Inputs, Outputs, Outputs]:
    """Return the arguments of a `Backward` with q, k, v, o and the LSE in the operator's shapes, for a packed batch of
    which they have the caller's: (total, H, D) and (H, total)."""
    found = []
    for o, lse, low, *_ in (outputs, cotangents):
        wide = [None if x is None else heads_first(x) for x in (o, low)]
        found.append(Outputs(wide[0], None if lse is None else lse.unsqueeze(0), wide[1]))  # type: ignore[arg-type]
    q, k, v, *more = inputs
    return Inputs(heads_first(q), heads_first(k), heads_first(v), *more), found[0], found[1]  # type: ignore[arg-type]


def with_rows(grads: Gradients) -> Gradients:
    """Return the gradients of `without_rows` in the caller's shapes."""
    rows = [None if x is None else rows_first(x) for x in grads[:3]]
    return grads._replace(q=rows[0], k=rows[1], v=rows[2])
