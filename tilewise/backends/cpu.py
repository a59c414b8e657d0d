"""placeholder: tiled CPU backend"""
from tilewise.backends.oracle import backward, forward  # noqa: F401
from tilewise.problem import Problem


def declines(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else "needs CPU tensors"


def tiles(problem: Problem) -> str:
    return "x"
