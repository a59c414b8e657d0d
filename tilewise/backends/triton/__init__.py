"""placeholder"""
from tilewise.problem import Problem


def declines(problem: Problem) -> str | None:
    return "needs a CUDA device"


def tiles(problem: Problem) -> str:
    return "x"
