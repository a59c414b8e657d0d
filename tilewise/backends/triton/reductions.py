"""Which gradients of biases are sums over several pairs, and which of those have an order. Imports no triton."""

from __future__ import annotations

from tilewise.problem import PART_WORDS, Operand, Problem


def bias_reduction(problem: Problem) -> str:
    """How tiles of dS become dBias: "store" each, "add" those that share one, or sum to "rows" or "cols" vectors, of
    which a number is one of the second kind."""
    if problem.bias is None:
        return "none"
    if problem.bias.axes != "matrix":
        return "rows" if problem.bias.axes == "rows" else "cols"
    return "store" if problem.broadcast_group(problem.bias).single else "add"


def is_stored_whole(problem: Problem, reduction: str) -> bool:
    """Whether every element of dBias that a pair has is stored once: of a ragged one those of its sequences."""
    padded = problem.totals is not None and (problem.score.packed is None or "ragged" not in problem.score.packed.forms)
    return reduction == "store" and problem.score.band.unlimited and problem.mask is None and not padded


def is_summed(problem: Problem, name: str) -> bool:
    """Whether several pairs may share an element of the part of that name."""
    distances = {"query": problem.score.query, "key": problem.score.key}.get(name)
    if distances is None:  # along keys or queries, or along diagonals
        return True
    return not problem.broadcast_group(_operand(problem, name)).single or _within_a_row(problem, name) is not None


def unordered(problem: Problem) -> str | None:
    """Why some gradient of a part cannot be summed in a fixed order; None if all can."""
    if problem.totals is not None:
        return _unordered_packed(problem)
    for name in () if problem.parts is None else problem.parts.grads:
        why = _within_a_row(problem, name)
        operand = _operand(problem, name)
        if why is None and problem.parts is not None and name in problem.parts.shifts and operand.batch < problem.batch:
            why = "that batch elements share from positions on the device"
        if why is not None:
            return (
                f"sums the gradient of {PART_WORDS[name]} {why} in no fixed order: leave deterministic=True out, or "
                "compute on the CPU"
            )
    return None


def _unordered_packed(problem: Problem) -> str | None:
    """Of a packed batch no kernel walks all that share an element."""
    summed = [PART_WORDS[x] for x in (() if problem.parts is None else problem.parts.grads) if is_summed(problem, x)]
    bias = problem.bias
    shared = bias is not None and (bias.axes != "matrix" or not problem.broadcast_group(bias).single)
    if problem.bias_grad and shared:
        summed.insert(0, "a bias that several queries, keys, heads or sequences share")
    if not summed:
        return None
    return (
        f"sums the gradient of {summed[0]} in no fixed order in a packed batch: leave deterministic=True out, or "
        "compute on the CPU"
    )


def _within_a_row(problem: Problem, name: str) -> str | None:
    """How several pairs of one row of scores, or of one column, come to share an entry."""
    distances = {"query": problem.score.query, "key": problem.score.key}.get(name)
    if distances is None or problem.parts is None:
        return None
    if name in problem.parts.buckets:
        return "in buckets"
    return "with clamped ends" if distances.outside == "clamp" else None


def _operand(problem: Problem, name: str) -> Operand:
    operand = getattr(problem.parts, name)
    assert isinstance(operand, Operand)
    return operand
