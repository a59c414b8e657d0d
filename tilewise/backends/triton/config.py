"""Tile sizes, warps and pipeline depth of the Triton kernels, with the reason for the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.problem import Problem


@dataclass(frozen=True)
class Config:
    """Tile of block_m queries by block_n keys, warps a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def shared_memory(problem: Problem) -> int:
    """Bytes of shared memory that one program may use (CUDA C++ programming guide, table of compute capabilities)."""
    capability = problem.capability or (8, 0)  # none: the interpreter, on a CPU
    if capability in ((8, 0), (8, 7)):
        return 163 * 1024
    return 227 * 1024 if capability[0] in (9, 10) else 99 * 1024


def padded(n: int) -> int:
    """The next power of two, at least 16: what a tensor-core operand needs."""
    return max(16, 1 << (n - 1).bit_length())


def forward_config(problem: Problem) -> Config:
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    if problem.dtype.itemsize == 4:
        return Config(64, 32, 4, 2) if d <= 128 else Config(32, 16, 4, 1)
    hopper = shared_memory(problem) > 200 * 1024
    if d <= 64:
        return Config(128, 128, 8, 3) if hopper else Config(128, 64, 4, 2)
    if d <= 128:
        return Config(128, 128, 8, 2) if hopper else Config(128, 64 if d <= 64 else 32, 4, 2)
    return Config(128, 64, 8, 2) if hopper else Config(64, 32, 4, 1)


def backward_config(problem: Problem) -> Config:
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    if problem.dtype.itemsize == 4:
        return Config(32, 32, 4, 1) if d <= 128 else Config(16, 16, 4, 1)
    hopper = shared_memory(problem) > 200 * 1024
    if d <= 64:
        return Config(64, 128, 8, 2) if hopper else Config(64, 64, 4, 2)
    if d <= 128:
        return Config(64, 128, 8, 2) if hopper else Config(32, 64, 4, 1)
    return Config(64, 64, 8, 1) if hopper else Config(16, 32, 4, 1)
