"""Interface of a backend (a module with the members of `Backend`), its inputs and outputs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from torch import Tensor

from tilewise.spec.bias_components import DIFFERENTIABLE, NO_PARTS, Parts
from tilewise.spec.block_mask import NO_TILES, TileTensors
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band
from tilewise.spec.seqlens import NO_LENGTHS, Lengths
from tilewise.spec.table import SCORES, Axes, Maybe, rows_of

Pass = Literal["forward", "backward", "tangents"]


class Inputs(NamedTuple):
    """Inputs of a call, the table of `spec.table`. An optional input is None where the call has none.

    Bias components, lengths and tiles are nested records: their eighteen tensors, which few calls have, would
    lengthen each loop over the inputs of a call that takes 10 µs.

    In a packed batch q is (1, H, queries of all sequences, D), and likewise k, v, o and the LSE. `Packed.forms` names
    the other operands with an axis of all queries or keys. Values per query and per key always have one.
    """

    q: Annotated[Tensor, Axes("B H M D", True, True)]
    k: Annotated[Tensor, Axes("B Hkv N D", True, True)]
    v: Annotated[Tensor, Axes("B Hkv N Dv", True, True)]
    bias: Annotated[Maybe, Axes(SCORES, True)]
    mask: Annotated[Maybe, Axes(SCORES)]  # bool
    sink: Annotated[Maybe, Axes("B|1 H|1 M|1", True)] = None
    parts: Parts | None = None  # bias components
    seed: Annotated[Maybe, Axes("2")] = None  # of dropout, int64
    lengths: Lengths | None = None  # of a packed batch
    tiles: TileTensors | None = None  # a tile mask, in place of the mask

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors without nested records: the first six, also the offsets of a packed batch if there are no
        others, else `flat`."""
        parts, seed, lengths, tiles = self[6:]
        if parts is seed is tiles is None:
            return self[:6] if lengths is None else (*self[:6], *lengths)
        return self.flat()

    def flat(self) -> tuple[Tensor | None, ...]:
        """Return all tensors in the order of `INPUT_NAMES`, as PyTorch's dispatcher takes them."""
        parts = NO_PARTS if self.parts is None else self.parts
        lengths = NO_LENGTHS if self.lengths is None else self.lengths
        return *self[:6], *parts, self.seed, *lengths, *(NO_TILES if self.tiles is None else self.tiles)

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that can have a gradient, in the order of `Needs`."""
        found: tuple[Tensor | None, ...] = _differentiable(self.flat())
        return found

    def to_differentiate(self) -> tuple[Tensor | None, ...]:
        """Return `differentiable`, without the bias components if there are none, which come last."""
        found: tuple[Tensor | None, ...] = _usual(self) if self.parts is None else self.differentiable()
        return found

    def with_matrices(self) -> Inputs:
        """Return the inputs with a bias (n, 1, H, M, N) of runs and a repeated mask (1, n, H, M, N) as (n, H, M, N).

        `Problem.bias_batch` and `mask_period` say which batch element has which of the n."""
        bias, mask = self.bias, self.mask
        if mask is not None and mask.dim() == 5:
            mask = mask.squeeze(0)
        if bias is not None and bias.dim() == 5:
            bias = bias.squeeze(1)
        return self._replace(bias=bias, mask=mask)

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Inputs:
        """Rebuild the record from the result of `tensors` or `flat`."""
        if len(tensors) == 6:
            return cls(*tensors)
        q, k, v, bias, mask, sink, *more = tensors
        if len(more) == len(NO_LENGTHS):
            return cls(q, k, v, bias, mask, sink, None, None, Lengths(*more))
        parts, rest = more[: len(NO_PARTS)], more[len(NO_PARTS) + 1 :]
        lengths, tiles = rest[: len(NO_LENGTHS)], rest[len(NO_LENGTHS) :]
        return cls(
            q, k, v, bias, mask, sink,
            Parts(*parts) if any(x is not None for x in parts) else None,
            more[len(NO_PARTS)],
            Lengths(*lengths) if any(x is not None for x in lengths) else None,
            TileTensors(*tiles) if any(x is not None for x in tiles) else None,
        )  # fmt: skip


OPERANDS = rows_of(Inputs)
INPUT_NAMES = tuple(OPERANDS)  # of the tensors in `Inputs.flat`
_DIFFERENTIABLE = [name for name, row in OPERANDS.items() if row.grad]
_differentiable = itemgetter(*[INPUT_NAMES.index(name) for name in _DIFFERENTIABLE])
_usual = itemgetter(*[n for n, name in enumerate(Inputs._fields) if name in _DIFFERENTIABLE])


def _one_each(default: Any) -> Any:
    """Return a named tuple class with a field for each operand that can have a gradient."""
    optional = [x for x in _DIFFERENTIABLE if x not in Inputs._fields or x in Inputs._field_defaults]
    return namedtuple("_one_each", _DIFFERENTIABLE, defaults=[default] * len(optional))


class Outputs(NamedTuple):
    """Outputs of a call, or their cotangents."""

    o: Tensor  # (B, H, M, Dv), q's dtype
    lse: Tensor | None  # natural log, (B, H, M), `lse_dtype`
    # Rounding error of a 16-bit o under dropout, int16 in o's layout (`tilewise.spec.rounding`); None otherwise.
    o_low: Tensor | None = None
    # `Score.statistics`, (B, H, M, count), `lse_dtype`; None without any, and of cotangents.
    statistics: Tensor | None = None


class Needs(_one_each(False)):  # type: ignore[misc]
    """Flags of the operands that need a gradient, True or False, by name and in the table's order."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the fields of `Parts` that need a gradient."""
        return tuple(name for name in DIFFERENTIABLE if getattr(self, name))

    @property
    def of_problem(self) -> dict[str, Any]:
        """Keyword arguments of `Problem.of`."""
        return {"bias_grad": self.bias, "sink_grad": self.sink, "part_grads": self.parts}


class Gradients(_one_each(None)):  # type: ignore[misc]
    """Gradients in the shape and dtype of the inputs, in the order of `Needs`; None where it is False."""

    __slots__ = ()


class Tangents(_one_each(None)):  # type: ignore[misc]
    """Tangents of the operands in the order of `Needs`, or cotangents of their gradients; None is zero."""

    __slots__ = ()


class Structure(NamedTuple):
    """A call apart from its lengths (see `tilewise.operator.structure`), together with these lengths."""

    key: tuple  # equal for all calls of one structure
    queries: int
    keys: int
    # Shape, then strides, of q, k and v; in a backward also of o, the LSE and their cotangents (dLSE may be missing).
    layouts: tuple[tuple[int, ...], ...]


def resized_problem(problem: Problem, structure: Structure, lo: int | None, hi: int | None) -> Problem:
    """Return another call's problem with this structure and window limits lo, hi, without checks."""
    M, N = structure.queries, structure.keys
    score = problem.score
    if (score.band.lo, score.band.hi) != (lo, hi):
        score = object.__new__(type(score))
        score.__dict__.update(problem.score.__dict__, band=Band(lo, hi))
    copy = object.__new__(Problem)
    copy.__dict__.update(problem.__dict__, queries=M, keys=N, score=score)
    for name in ("bias", "mask", "sink"):
        x: TensorSpec | None = getattr(problem, name)
        if x is not None:
            whole = TensorSpec(x.dtype, x.batch, x.heads, x.rows if x.rows == 1 else M, x.cols if x.cols == 1 else N)
            copy.__dict__[name] = whole
    return copy


Forward = Callable[[Inputs], Outputs]
Backward = Callable[[Inputs, Outputs, Outputs], Gradients]  # inputs, outputs, cotangents of the outputs
JVP = Callable[[Inputs, Outputs, Tangents], Outputs]  # inputs, outputs, tangents of the inputs; those of the outputs


class Backend(Protocol):
    """Interface of a backend. It is given validated problems that are not empty.

    prepare: for each pass a function that does all work that does not depend on the tensors' values, and returns a
    function that computes the pass:

        "forward":   (problem, inputs) -> `Forward`
        "backward":  (problem, inputs, outputs, cotangents, needs) -> `Backward`
        "tangents":  (problem, inputs, outputs, tangents) -> `JVP`, of the backends in `tilewise.planner.TANGENTS`

    The returned function serves all tensors of equal shape, dtype, strides, device and address modulo 16; its caller
    caches it by these. Gradients that are not required are None. If the function has a true ``resizable``, its
    ``resized(structure, lo, hi, ...)``, called with the tensors that prepare takes, returns a function for another
    call of the same `Structure` with window limits lo, hi, or None if that call must be prepared. If it has a true
    ``takes_rows``, it reads only addresses of tensors, and q, k, v, o and the LSE of a packed batch, with their
    gradients and cotangents, may also have the caller's shapes, (total, H, D) and (H, total).
    """

    prepare: Mapping[Pass, Callable[..., Callable[..., Any]]]

    def declines(self, problem: Problem, work: Pass = "forward") -> str | None:
        """Return why the backend does not support the pass; None if it does.

        If it supports the forward but not the backward, `tilewise.planner.GRADIENTS` names the backend of the latter.
        "tangents" is asked of the backends in `tilewise.planner.TANGENTS` alone.
        """

    def prefers(self, problem: Problem) -> str | None:
        """Return why another backend would be faster, or None. ``backend=`` overrides this preference."""

    def tiles(self, problem: Problem) -> str:
        """Describe the tiles in words, for explain()."""


def at_once(compute: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Wrap ``compute`` as a member of `Backend.prepare` that prepares nothing.

    The prepared function is cached for other calls, so it holds no tensor of this call.
    """

    def prepare(problem: Problem, *call: Any) -> Callable[..., Any]:
        needs = call[3:]  # a backward's argument after inputs, outputs and cotangents
        return lambda *tensors: compute(problem, *tensors, *needs)

    return prepare
