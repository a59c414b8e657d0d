"""Tile sizes, warpgroups and rings of the Hopper kernel, with the reason for the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.problem import Problem

ROWS = 64  # queries of a warpgroup: the height of a wgmma
SHARED_MEMORY = 227 * 1024  # bytes that one program may use on sm_90


def most_registers(programs: int, warpgroups: int) -> dict[str, int]:
    """Triton's option for several programs of so many warpgroups on a multiprocessor; none for one, which has all."""
    return {} if programs == 1 else {"maxnreg": 65536 // (programs * warpgroups * 128) // 8 * 8}


@dataclass(frozen=True)
class Config:
    """How one program works.

    Attributes:
        block_n: keys of a tile.
        warpgroups: that compute, `ROWS` queries each; one more warp loads Q, K and V, one for each loads its bias.
        stages: tiles in the rings of K and V.
        bias_stages: tiles in the ring of the bias, for each warpgroup.
        bias_first: the accumulator of Q·Kᵀ starts from the bias; else the bias is added after the product.
        turns: warpgroups take the tensor cores in turns: the softmax of one runs under the products of the others.
        lazy: O is rescaled only where a row's maximum has grown by more than `score.SLACK` powers of two.
        persistent: as many programs as multiprocessors, each walks over several tiles of queries.
        chunk: tiles of queries in a row that a program takes: of a band a long and a short one.
        o_in_q: O leaves through the shared memory of Q.
        q_in_registers: Q is read once, not by every wgmma.
        programs: that share a multiprocessor.
        registers: of a thread of a computing and of a loading warp; 64 K of them in all.
    """

    block_n: int
    warpgroups: int
    stages: int
    bias_stages: int
    bias_first: bool
    turns: bool
    lazy: bool
    persistent: bool
    chunk: int
    o_in_q: bool
    q_in_registers: bool
    registers: tuple[int, int]
    programs: int = 1

    @property
    def block_m(self) -> int:
        return self.warpgroups * ROWS


def padded(n: int) -> int:
    """The next power of two from 32 up: the width of a tile, which TMA fills up with zeros."""
    return max(32, 1 << (n - 1).bit_length())


def bias_tile(problem: Problem) -> int:
    """Bytes an element of the bias that passes through shared memory; 0 where there is none."""
    bias = problem.bias
    return 0 if bias is None or bias.rows == 1 or bias.cols == 1 else bias.dtype.itemsize


def forward_config(problem: Problem) -> Config:
    """The forward's tiles."""
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    bias = bias_tile(problem)
    # 240 registers hold S and P of 128 keys and O of 128 dimensions; O of 256 leaves room for 64 keys.
    # A float32 bias tile takes twice the shared memory of a 16-bit one, and a bias along the keys takes registers,
    # which a softcap or the masks of a band need too: half the keys.
    band, capped = not problem.score.band.unlimited, problem.score.softcap is not None
    crowded = problem.bias is not None and (capped or (band and not bias))
    # With heads of 32 a tile is mostly softmax: two programs of half the keys fit a multiprocessor, and one of them
    # computes while the other waits for its bias.
    small = d == 32 and bias > 0 and problem.mask is None and not capped
    block_n = 64 if small or d == 256 or (d == 128 and (bias == 4 or crowded)) else 128
    # A third warpgroup shares the tiles of keys with two: worth it where 160 registers are enough for each.
    three = d <= 64 and problem.bias is None and problem.mask is None and not capped
    return Config(
        block_n=block_n,
        warpgroups=3 if three else 2,
        stages=2,
        bias_stages=0 if not bias else 1 if d == 256 and bias == 4 else 2,
        bias_first=bias > 0 and not capped,
        turns=True,
        # What it leaves out is worth its branch but beside a bias of 128 dimensions, and at 64 beside a band (H200).
        lazy=problem.bias is None if d >= 128 else not small and not band,
        # The next tile's loads run under the end of the last.
        persistent=True,
        chunk=2 if band else 1,
        q_in_registers=d <= 128 and not three and not small and (d < 128 or problem.bias is None or bias > 0),
        o_in_q=(d == 256 or (bias > 0 and d == 128)) and padded(problem.head_dim) == padded(problem.value_dim),
        registers=(104, 32) if small else (160, 32) if three else (240, 24),
        programs=2 if small else 1,
    )


@dataclass(frozen=True)
class BackwardConfig:
    """How one program of the backward works; one or two warpgroups compute, one warp loads.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a program: `ROWS` for each warpgroup, or for both, which then share the columns.
        warpgroups: that compute.
        stages: tiles in the ring of Q and the bias.
        do_stages: tiles in the ring of dO.
        dq_parts: dQ leaves in so many parts, one after the other through the same shared memory.
        ahead: K·Qᵀ of the next tile is issued before dQ has left its registers, not after.
        programs: that share a multiprocessor.
        loading_registers: of a thread of the loading warp.
        sum_bytes: of shared memory for the tiles of dS that are added up to a shared dBias.
        dq_late: the second part of dQ is issued when the first has left its registers, not with it.
        v_held: columns of V in registers, so that V·dOᵀ reads less of shared memory; needs dq_late to have room.
    """

    block_m: int
    block_n: int
    warpgroups: int
    stages: int
    do_stages: int
    dq_parts: int
    ahead: bool
    programs: int = 1
    loading_registers: int = 24
    sum_bytes: int = 16384
    dq_late: bool = False
    v_held: int = 0

    @property
    def shares_keys(self) -> bool:
        """Both warpgroups have the same keys, and each a half of the columns of every product."""
        return self.warpgroups * ROWS > self.block_n


def backward_width(problem: Problem) -> int:
    """The width of the backward's tiles of Q, K, V and dO."""
    return max(padded(problem.head_dim), padded(problem.value_dim))


def backward_config(problem: Problem) -> BackwardConfig:
    """The backward's tiles: registers hold S and dP of 64 queries, and dK and dV of 128 keys and 128 dimensions. Tiles
    of 128 queries at 64 dimensions fit only if dS is computed from the rounded P, which takes as long as it saves."""
    d, bias = backward_width(problem), problem.bias
    if d == 256:
        # dK and dV of 64 keys take half of the registers of both warpgroups. Shared memory holds K, V, two tiles of Q,
        # for the next K·Qᵀ, one of dO, which comes under dQ, dK and that product, and half of dQ.
        return BackwardConfig(
            block_m=64, block_n=ROWS, warpgroups=2, stages=2, do_stages=1, dq_parts=2, ahead=True, sum_bytes=8192
        )  # fmt: skip
    # Smaller programs that share a multiprocessor do not wait for each other, but read Q and dO, and add dQ, for half
    # the keys each: worth it with heads of 32, and where something else makes a program wait (H200).
    shared = bias is not None and bias_tile(problem) > 0 and bias.batch * bias.heads < problem.batch * problem.heads
    plain = problem.score.band.unlimited and problem.score.softcap is None
    programs = 1
    if d == 32:
        programs = 3 if plain and (bias is None or bias_tile(problem)) else 2  # 136 registers a thread, or 232
    elif d == 64 and (shared or not problem.score.band.unlimited):
        programs = 2
    # Up to 64 dimensions leave registers for the next K·Qᵀ; a bias tile that must come first makes it slower (H200).
    ahead = d <= 64 and programs == 1 and not bias_tile(problem)
    warpgroups = 2 if programs == 1 else 1
    return BackwardConfig(
        block_m=64, block_n=warpgroups * ROWS, warpgroups=warpgroups, stages=2, do_stages=2, dq_parts=1, ahead=ahead,
        programs=programs,
    )  # fmt: skip
