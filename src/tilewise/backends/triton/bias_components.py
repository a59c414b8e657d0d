"""Bias components as arguments of the Triton kernels, in one record, and buffers for their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs
from tilewise.backends.kernels.score import ScoreArgs, score_terms
from tilewise.backends.launch.launcher import POINTER, Record, strided
from tilewise.backends.triton.reductions import is_summed
from tilewise.backends.triton.relative import by_distance, far_tiles_differ, numbers_of
from tilewise.backends.triton.tensors import broadcast
from tilewise.spec.bias_components import DIFFERENTIABLE, Parts
from tilewise.spec.problem import Problem

NO_PARTS = (None,)
_LISTS = ("query_shift", "key_shift", "query_buckets", "key_buckets")  # one axis, contiguous


class PartTensors(NamedTuple):
    """Bias components in the backward: the fields of `Parts`, and the gradients that are required."""

    cols: Any
    rows: Any
    query: Any
    key: Any
    toeplitz: Any
    query_shift: Any
    key_shift: Any
    query_buckets: Any
    key_buckets: Any
    dcols: Any
    drows: Any
    dquery: Any
    dkey: Any
    dtoeplitz: Any


class PartHows(NamedTuple):
    """Access to each of the `Parts`: a `Broadcast` or a `ByDistance`."""

    cols: Any = None
    rows: Any = None
    query: Any = None
    key: Any = None
    toeplitz: Any = None


def is_added(problem: Problem) -> bool:
    """True if a bias or bias component is added to the scores."""
    return problem.bias is not None or problem.parts is not None


def bias_first(problem: Problem, by_elements: bool = False) -> bool:
    """True if Q Kᵀ accumulates onto the bias, never with a softcap. by_elements: `comes_by_elements`."""
    return (problem.parts is not None or by_elements) and not problem.score.transformed


def kernel_terms(problem: Problem, inputs: Inputs, first: bool) -> ScoreArgs:
    """Return the kernel arguments of a score. first: see `bias_first`."""
    scaled = problem.score.transformed or (is_added(problem) and not first)
    terms = score_terms(problem.score, scaled=scaled)
    return terms._replace(**part_numbers(problem, inputs.parts))


def packed_layout(problem: Problem, name: str) -> str:
    """Return the layout of a bias, mask or vector component in a packed batch, see `Broadcast`."""
    forms = () if problem.score.packed is None else problem.score.packed.forms
    if name == "bias" and "ragged" in forms:
        return "pairs"
    return "packed" if name in forms else "padded"


def part_hows(problem: Problem, parts: Parts | None) -> PartHows | None:
    if parts is None:
        return None
    found: dict[str, Any] = {}
    assert problem.parts is not None
    for name, _ in parts.vectors():
        operand = getattr(problem.parts, name)
        found[name] = broadcast(operand, problem.broadcast_group(operand), False, packed_layout(problem, name))
    for name, x in parts.relatives(problem.score, problem.queries):
        found[name] = by_distance(problem, name, x)
    return PartHows(**found)


def part_numbers(problem: Problem, parts: Parts | None) -> dict[str, Any]:
    """Return the fields of `ScoreArgs` for relative-position biases."""
    relatives = [] if parts is None else parts.relatives(problem.score, problem.queries)
    return {name: numbers_of(x) for name, x in relatives}


def first_added(problem: Problem) -> str:
    """Return the name of the first summand in `relative.load_added`."""
    parts = problem.parts
    if problem.bias is not None or parts is None:
        return "bias"
    order = ("cols", "rows", "toeplitz", "query", "key")
    return next(name for name in order if getattr(parts, name) is not None)


def has_far_tiles(problem: Problem, parts: Parts | None) -> bool:
    relatives = [] if parts is None else parts.relatives(problem.score, problem.queries)
    return bool(relatives) and far_tiles_differ(problem, relatives)


def parts_layout(parts: Parts | None, gradients: dict[str, Tensor] | None = None) -> Any:
    """Return the layout of `flat_parts`, with gradients also of `flat_gradients`; `POINTER` for None."""
    if parts is None:
        return POINTER
    layouts = [POINTER if x is None or name in _LISTS else strided(x) for name, x in parts._asdict().items()]
    if gradients is None:
        return Record(Parts, tuple(layouts))
    more = [strided(gradients[name]) if name in gradients else POINTER for name in DIFFERENTIABLE]
    return Record(PartTensors, (*layouts, *more))


def flat_parts(parts: Parts | None) -> tuple[Tensor | None, ...]:
    """Return the tensors of ``parts`` for a `Launch`."""
    if parts is None:
        return NO_PARTS
    dense = {name: x.contiguous() for name in _LISTS if (x := getattr(parts, name)) is not None}
    return parts._replace(**dense)


def flat_gradients(parts: Parts | None, gradients: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    return () if parts is None else tuple([gradients.get(name) for name in DIFFERENTIABLE])


def empty_part_gradients(
    problem: Problem, parts: Parts | None, needs: Needs, device: torch.device
) -> dict[str, Tensor]:  # fmt: skip
    """Return zeroed buffers for the components' required gradients: some entries have no pair."""
    found = {}
    for name in needs.parts if parts is not None else ():
        x = getattr(parts, name)
        single = name in ("query", "key") and not is_summed(problem, name)
        found[name] = torch.zeros_like(x, dtype=x.dtype if single else torch.float32, device=device)
    return found


def cast_part_gradients(parts: Parts | None, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(getattr(parts, name).dtype) for name, x in gradients.items()}
