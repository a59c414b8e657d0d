"""What a backend is: a module with the members of `Backend`. And what goes in and comes out of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from tilewise.spec.bias_components import DIFFERENTIABLE, NO_PARTS, Parts
from tilewise.spec.block_mask import NO_TILES, TileTensors
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band
from tilewise.spec.seqlens import NO_LENGTHS, Lengths

Pass = Literal["forward", "backward"]


class Inputs(NamedTuple):
    """q (B, H, M, D), k (B, Hkv, N, D), v (B, Hkv, N, Dv); bias and mask (B|1, H|Hkv|1, M|1, N|1) or None; sink
    (B|1, H|1, M|1) or None; parts, of bias terms, or None; seed, of dropout, int64 (2,) or None; lengths, of a packed
    batch, or None; tiles, of a mask by tiles, in the place of the mask, or None.

    Parts, lengths and tiles are records of their own because a call of 10 µs hardly ever has them: seventeen more
    fields would be looked at in each loop over its inputs.

    Of a packed batch q is (1, H, queries of all sequences, D), and k, v, o and the LSE alike; `Packed.forms` says what
    else has an axis of all queries or keys. Values per query and per key always have.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    sink: Tensor | None = None
    parts: Parts | None = None
    seed: Tensor | None = None
    lengths: Lengths | None = None
    tiles: TileTensors | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Without a record in them."""
        one = self.parts is self.seed is self.lengths is self.tiles  # one object: None
        return self[:6] if one else self.flat()

    def flat(self) -> tuple[Tensor | None, ...]:
        """`INPUT_NAMES`: what an operator of PyTorch's dispatcher takes."""
        parts = NO_PARTS if self.parts is None else self.parts
        lengths = NO_LENGTHS if self.lengths is None else self.lengths
        return *self[:6], *parts, self.seed, *lengths, *(NO_TILES if self.tiles is None else self.tiles)

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Inputs:
        """From `tensors` or `flat`."""
        q, k, v, bias, mask, sink, *more = tensors
        parts, rest = more[: len(NO_PARTS)], more[len(NO_PARTS) + 1 :]
        lengths, tiles = rest[: len(NO_LENGTHS)], rest[len(NO_LENGTHS) :]
        return cls(
            q, k, v, bias, mask, sink,
            Parts(*parts) if any(x is not None for x in parts) else None,
            more[len(NO_PARTS)] if more else None,
            Lengths(*lengths) if any(x is not None for x in lengths) else None,
            TileTensors(*tiles) if any(x is not None for x in tiles) else None,
        )  # fmt: skip


# Of the tensors of `Inputs`, one after the other.
INPUT_NAMES = (*Inputs._fields[:6], *Parts._fields, "seed", *Lengths._fields, *TileTensors._fields)


class Outputs(NamedTuple):
    """o (B, H, M, Dv) in q's dtype and the natural-log LSE (B, H, M) in `lse_dtype`; or their cotangents.

    o_low: with dropout, beside an o of 16 bits, the bits that rounding took of it, int16, laid out as o: see
    `tilewise.spec.rounding`. None elsewhere, and among cotangents.
    """

    o: Tensor
    lse: Tensor | None
    o_low: Tensor | None = None


class Needs(NamedTuple):
    """Which inputs want a gradient, by their names."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sink: bool = False
    cols: bool = False
    rows: bool = False
    query: bool = False
    key: bool = False
    toeplitz: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Of `Parts`, those that want one."""
        return tuple(name for name in DIFFERENTIABLE if getattr(self, name))


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their inputs; None where `Needs` is False."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sink: Tensor | None = None
    cols: Tensor | None = None
    rows: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    toeplitz: Tensor | None = None


class Structure(NamedTuple):
    """A call apart from its lengths, see `tilewise.operator.structure`, and what those decide.

    key: equal for all calls of a structure. layouts: shape and strides of q, k and v, which have been read for the key;
    then those of a backward's o, LSE, and their cotangents, of which that of the LSE may be missing.
    """

    key: tuple
    queries: int
    keys: int
    layouts: tuple[tuple[int, ...], ...]


def resized_problem(problem: Problem, structure: Structure, lo: int | None, hi: int | None) -> Problem:
    """Of another call of the same structure, without the checks that it passes as that one did. lo, hi: its band."""
    M, N = structure.queries, structure.keys
    score = problem.score
    if (score.band.lo, score.band.hi) != (lo, hi):
        score = object.__new__(type(score))
        score.__dict__.update(problem.score.__dict__, band=Band(lo, hi))
    copy = object.__new__(Problem)
    copy.__dict__.update(problem.__dict__, queries=M, keys=N, score=score)
    for name in ("bias", "mask"):
        x: TensorSpec | None = getattr(problem, name)
        if x is not None:
            whole = TensorSpec(x.dtype, x.batch, x.heads, x.rows if x.rows == 1 else M, x.cols if x.cols == 1 else N)
            copy.__dict__[name] = whole
    if problem.sink is not None:
        x = problem.sink
        copy.__dict__["sink"] = TensorSpec(x.dtype, x.batch, x.heads, x.rows if x.rows == 1 else M, 1)
    return copy


Forward = Callable[[Inputs], Outputs]
Backward = Callable[[Inputs, Outputs, Outputs], Gradients]  # of inputs, outputs and their cotangents


class Backend(Protocol):
    """What the plan asks of a backend, and how it is run. It gets validated problems that are not empty.

    prepare: for each pass that the backend has, a function that does once for many calls what does not depend on the
    numbers in tensors, and returns what computes the pass,

        "forward":   (problem, inputs) -> `Forward`
        "backward":  (problem, inputs, outputs, cotangents, needs) -> `Backward`

    What it returns serves all tensors of the same layout, and its caller keeps it by that: shape, dtype, strides,
    device, and address modulo 16. Gradients that nobody needs are None. It may be ``resizable``: then its
    ``resized(structure, lo, hi, ...)``, with the tensors as prepare takes them, serves another call of the same
    `Structure`, whose band has these limits, or is None where that one must be prepared.
    """

    prepare: Mapping[Pass, Callable[..., Callable[..., Any]]]

    def declines(self, problem: Problem, work: Pass = "forward") -> str | None:
        """Why it cannot run the pass; None if it can. Where a backward alone is declined, the gradients come from the
        backend that `tilewise.planner.GRADIENTS` names."""

    def prefers(self, problem: Problem) -> str | None:
        """Why it prefers to leave the problem to another, which would be faster; None if it does not. Asked for by name
        it runs all the same."""

    def tiles(self, problem: Problem) -> str:
        """Its tiles in words, for explain()."""


def at_once(compute: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """A member of `Backend.prepare` that prepares nothing: ``compute`` takes the problem, the tensors and, last, what
    else there is. What it returns is kept for other calls, and so holds no tensor of this one."""

    def prepare(problem: Problem, *call: Any) -> Callable[..., Any]:
        needs = call[3:]  # of a backward: what comes after its inputs, outputs and cotangents
        return lambda *tensors: compute(problem, *tensors, *needs)

    return prepare
