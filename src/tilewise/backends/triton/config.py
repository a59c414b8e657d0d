"""Tile sizes, warps and pipeline stages of the Triton kernels, measured on an H200 with Triton 3.6.

See docs/notebook/triton.md. Two rules explain most numbers. The load pipeline needs three stages: with two, Triton
issues the next load at the end of an iteration. And several programs with small tiles per multiprocessor beat a large
one, since softmax overlaps products, except at D = 128 with a bias tile, whose shared memory allows fewer programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tilewise.backends import float32_precision
from tilewise.spec.problem import Problem
from tilewise.spec.tiles import key_tiles, limits

MOST_SPLITS = 256
# Multiprocessors of a typical GPU of each compute capability. The device's own number is not used, so that the number
# of splits, and with it the result's bits, depend on the problem alone.
_MULTIPROCESSORS = {(8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


@dataclass(frozen=True)
class TritonConfig:
    """Tile size and launch options of a kernel."""

    block_m: int  # queries per tile
    block_n: int  # keys per tile
    num_warps: int  # per program
    num_stages: int  # of the load pipeline
    dq_tma: bool = False  # add dQ by TMA, from shared memory; else by pointers, from registers
    pack_gqa: bool = False  # a tile's rows are all query heads of one key/value head, query after query
    queries_stay: bool = False  # the forward loads all blocks of its queries once, else again for each tile of keys
    maxnreg: int | None = None  # registers per thread at most; None: ptxas decides

    @property
    def options(self) -> dict[str, int]:
        """Options of a `Launch`."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def smaller(self) -> TritonConfig | None:
        """Return a config for the same tiles in less shared memory, with equal results; None if there is none."""
        if self.num_stages > 1:
            return replace(self, num_stages=self.num_stages - 1)
        return replace(self, dq_tma=False) if self.dq_tma else None


def shared_memory(problem: Problem) -> int:
    """Return the bytes of shared memory per program (CUDA C++ programming guide)."""
    capability = problem.capability or (8, 0)  # none: the interpreter, on a CPU
    if capability in ((8, 0), (8, 7)):
        return 163 * 1024
    return 227 * 1024 if capability[0] in (9, 10) else 99 * 1024


def padded(n: int) -> int:
    """Return the next power of two, at least 16, as a tensor-core operand needs."""
    return max(16, 1 << (n - 1).bit_length())


MOST_COLUMNS = 256  # of a tile of rows; past them rows are read in blocks, see `blocks`


class Columns(NamedTuple):
    """Columns of q and k, and of v and o: of one block, numbers of blocks and of those that a program computes.

    A tile of rows has ``tiles`` programs.
    """

    block_d: int
    block_dv: int
    d_blocks: int = 1
    dv_blocks: int = 1
    d_tile: int = 1
    dv_tile: int = 1
    tiles: int = 1


def columns(problem: Problem, tma: bool, forward: bool = True) -> Columns:
    """Return the columns of the tiles: up to 256 one block of the `padded` head and value dimension.

    In a Hopper forward with rows by pointers at least one 128-byte swizzle, see `second_walk_stages`. Blocks have at
    least that in any case, and 64 or 128 columns, whichever needs less padding. Per program the forward computes one
    block of up to 256 columns of O, or of few queries 512, the backward up to 256 columns each of dQ, dK and dV; on
    Hopper by TMA and without a bias up to 320, so that heads of 576 take two programs for each tile of rows, not three.
    """
    d, dv = problem.head_dim, problem.value_dim
    if not by_blocks(problem):
        least = 128 // problem.dtype.itemsize if forward and _hopper(problem) and not tma else 16
        return Columns(max(padded(d), least), max(padded(dv), least))
    block_d, block_dv = (64 if 0 < dim % 128 <= 64 else 128 for dim in (d, dv))
    d_blocks = -(-d // block_d)
    if forward:
        block_dv = min(max(padded(dv), 64), 2 * MOST_COLUMNS if _holds_wide_sums(problem) else MOST_COLUMNS)
        tiles = -(-dv // block_dv)
        return Columns(block_d, block_dv, d_blocks, tiles, tiles=tiles)
    dv_blocks = -(-dv // block_dv)
    added = problem.bias_itemsize or by_distance(problem)
    most = 320 if tma and _hopper(problem) and problem.dtype.itemsize == 2 and not added else MOST_COLUMNS
    tiles = max(-(-d_blocks * block_d // most), -(-dv_blocks * block_dv // most))
    return Columns(block_d, block_dv, d_blocks, dv_blocks, -(-d_blocks // tiles), -(-dv_blocks // tiles), tiles)


def _holds_wide_sums(problem: Problem) -> bool:
    """True if the registers hold 512 columns of O: of few queries in 16 bits; of more than 16 rows without a bias."""
    has_rows = problem.queries * problem.group <= 16 or (problem.bias is None and problem.parts is None)
    return problem.few_queries and problem.dtype.itemsize == 2 and has_rows


def by_blocks(problem: Problem) -> bool:
    """True if the kernels read rows in blocks of columns."""
    return max(problem.head_dim, problem.value_dim) > MOST_COLUMNS


def second_walk_stages(problem: Problem, tma: bool) -> int:
    """Return the stages of the forward's second pass, which excludes hidden values that are not finite.

    ptxas 12.8: it confuses wgmma descriptors with equal address and different swizzles (tests/descriptor_lint.py), as
    k and v would have if they reused one shared-memory buffer. Pipelined tiles have buffers of their own, hence two
    stages if the swizzles differ. Rows by pointers may not be pipelined: `columns` makes their tiles large enough for
    equal swizzles in either order of rows and columns (except tiles of 32 keys with a bias by pointers, for which the
    lint finds no error).
    """
    swizzles = {min(128, width * problem.dtype.itemsize) for width in columns(problem, tma)[:2]}
    return 2 if _hopper(problem) and tma and len(swizzles) > 1 else 1


def precision(problem: Problem) -> str:
    """Return the PRECISION of `products.product`: torch's setting, without TF32 if the problem is `exact`.

    "tf32x3" sums three TF32 products of the operands' high and low parts, as precise as float32 and on tensor cores.
    Past 128 dimensions its operands spill (32 KiB per program on sm_86) and exceed shared memory: "ieee".
    """
    found = float32_precision(problem.dtype)
    if problem.dtype.itemsize < 4 or found == "ieee" or not problem.exact:
        return found
    return "tf32x3" if max(problem.head_dim, problem.value_dim) <= 128 else "ieee"


def forward_config(problem: Problem, bias_tma: bool, tma: bool) -> TritonConfig:
    """Return the forward's config. bias_tma, tma: bias, and q, k and v, are read by TMA."""
    if problem.few_queries:
        return _few_queries_config(problem)
    if by_blocks(problem):
        return _forward_by_blocks(problem, tma)
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    if problem.dtype.itemsize == 4:
        return TritonConfig(64, 32, 4, 2) if d <= 64 else TritonConfig(16 if by_distance(problem) else 32, 16, 4, 1)
    added = problem.bias_itemsize or by_distance(problem)
    if shared_memory(problem) < 200 * 1024:
        if d <= 64:
            return TritonConfig(64, 32, 4, 2) if added else TritonConfig(128, 64, 4, 2)
        return TritonConfig(64, 32, 8, 2) if d <= 128 else TritonConfig(64, 16, 4, 1)
    bias_tile = problem.bias_itemsize
    if by_distance(problem) and d <= 128:  # two programs share a multiprocessor, also at 128 dimensions
        if d > 64 and (problem.mask is not None or problem.score.transformed):  # other tiles spill thousands of bytes
            return TritonConfig(128, 32, 8, 3)
        return TritonConfig(64, 64, 4, 3 if d <= 64 else 2)
    if d <= 64:
        if _hopper(problem) and not tma:  # tiles widened by `columns`
            # A bias is loaded element by element without prefetch: three programs hide each other's latency.
            return TritonConfig(64, 64, 4, 2, maxnreg=168) if bias_tile == 2 else TritonConfig(64, 64, 8, 3)
        if bias_tile:
            return TritonConfig(128, 64, 4 if bias_tma else 8, 3)
        if every_pair_alike(problem):
            return TritonConfig(64, 128, 4, 3)
        # With a mask ptxas takes 184 to 205 registers, for two programs; with 168 three fit. Nothing spills: only the
        # second pass, past values that are not finite, needs more.
        masked = _hopper(problem) and problem.mask is not None
        return TritonConfig(64, 64, 4, 3, maxnreg=168 if masked else None)
    if d <= 128:
        if bias_tile and not bias_tma:
            return TritonConfig(128, 32, 8, 3)
        if bias_tile:
            return TritonConfig(128, 64, 8, 3 if bias_tile == 2 else 2)
        return TritonConfig(64, 64, 4, 3)
    block_n = 64 if bias_tile < 4 and not by_distance(problem) else 32
    if _blackwell(problem):  # 512 columns of tensor memory hold the accumulators of both passes over the keys
        return TritonConfig(64, block_n, 4, 2)
    return TritonConfig(128, block_n, 8, 2)


def _forward_by_blocks(problem: Problem, tma: bool) -> TritonConfig:
    """Return a config for rows that are read in blocks: the most rows, whose 256 columns of O fit the registers.

    A step over 128 x 64 scores reads 192 KiB of q and k at D = 512, six times what the L2 delivers while the tensor
    cores compute it, so the queries stay in shared memory where two stages of keys and values fit beside them.
    """
    if problem.dtype.itemsize == 4:
        return TritonConfig(16 if by_distance(problem) else 32, 16, 8, 1)
    if shared_memory(problem) < 200 * 1024:
        return TritonConfig(64, 32, 8, 2)
    if not tma or not _hopper(problem):
        return TritonConfig(64, 64, 8, 3)
    c = columns(problem, tma)
    pair = problem.bias_itemsize + (0 if problem.mask is None else problem.mask.matrix_itemsize)
    for block_n in (64, 32):
        stage = block_n * (2 * (c.d_blocks * c.block_d + c.block_dv) + 128 * pair)
        if 2 * 128 * c.d_blocks * c.block_d + 2 * stage + 1024 <= shared_memory(problem):
            return TritonConfig(128, block_n, 8, 2, queries_stay=True)
    return TritonConfig(128, 64, 8, 3)


def _few_queries_config(problem: Problem) -> TritonConfig:
    """Return a config with tiles no taller than the queries and loads that saturate the bandwidth.

    On Hopper one program per multiprocessor with four stages of 32 KiB achieves this. With more than 16 rows a program
    would wait for mma.sync, so they use wgmma with 64 rows, which reads all stages from shared memory.
    """
    size = problem.dtype.itemsize
    if by_blocks(problem):
        c = columns(problem, False)
        d, pair_of_rows = max(c.d_blocks * c.block_d, c.block_dv), (c.d_blocks * c.block_d + c.block_dv) * size
    else:
        d = max(padded(problem.head_dim), padded(problem.value_dim))
        pair_of_rows = 2 * d * size  # of k and v
    capacity = shared_memory(problem)
    large = capacity > 200 * 1024
    block_m = min(padded(problem.queries * problem.group), 64)
    if large and block_m > 16:
        block_m = 64
    elif 2 * block_m * d * size > capacity:  # half of it is for keys and values
        block_m //= 2
    stage = 32 * 1024 if large else 16 * 1024
    if by_blocks(problem) and large and block_m == 16:
        stage = 72 * 1024  # a step is a chain of products over the blocks: fewer and longer ones
    block_n = max(16, min(1 << (stage // pair_of_rows).bit_length() >> 1, 128))
    warps = 8 if block_m * d > 64 * 128 else 4
    # Queries are loaded once; all stages but one hold keys, values and the tiles of bias and mask.
    pair = problem.bias_itemsize + (0 if problem.mask is None else problem.mask.matrix_itemsize)
    most = 1 + (capacity - block_m * d * size - 4096) // (block_n * (pair_of_rows + block_m * pair))
    stages = min(3 if block_m == 64 else 4, most)
    return TritonConfig(block_m, block_n, warps, stages, pack_gqa=True, queries_stay=by_blocks(problem) and size == 2)


def splits(problem: Problem, config: TritonConfig) -> int:
    """Return how many programs share the keys of one tile of queries: the fewest of the fastest choices.

    Model: a program takes the time of its key tiles plus about three more. Programs run in waves: one program on each
    multiprocessor, or two, which share its bandwidth and take twice as long. Four waves at most, so that the partial
    results stay small for any number of keys.
    """
    return shared_by(problem, config, problem.queries, problem.keys, *limits(problem.score.band))


def shared_by(problem: Problem, config: TritonConfig, queries: int, keys: int, lo: int, hi: int) -> int:
    """Like `splits`, but with other numbers of queries and keys and other window limits lo, hi."""
    if not config.pack_gqa:
        return 1
    p = problem
    units = p.batch * p.kv_heads * -(-queries * p.group // config.block_m)
    if lo <= 0 and queries + hi >= keys:  # common case: all keys
        begin, end = 0, -(-keys // config.block_n)
    else:
        begin, _, _, end = key_tiles(0, queries, keys, lo, hi, config.block_n)
    return best_splits(units, end - begin, _MULTIPROCESSORS.get(p.capability or (8, 0), 128))


@lru_cache(1024)  # a growing KV cache keeps its number of tiles for several steps
def best_splits(units: int, tiles: int, multiprocessors: int) -> int:
    """Return `splits` for ``units`` programs of ``tiles`` key tiles, among those that fill waves."""

    def time(splits: int) -> int:
        programs = units * splits
        waves = 1 if programs <= multiprocessors else 2 * -(-programs // (2 * multiprocessors))
        return waves * (-(-tiles // splits) + 3)

    most = min(tiles, 8 * multiprocessors // units, MOST_SPLITS)
    full = [min(waves * multiprocessors // units, most) for waves in (1, 2, 4, 6, 8)]
    found = [-(-tiles // -(-tiles // splits)) for splits in full if splits > 0]
    return min([1, *found], key=lambda splits: (time(splits), splits))


def backward_config(problem: Problem, tma: bool) -> TritonConfig:
    """Return the backward's config; its accumulators, 2 · block_n · d floats, must fit the registers.

    tma: q, k, v and do are read by TMA. Pointers and window masking take registers. ptxas 12.8: with both and large
    tiles it spills hundreds of bytes, and it has passed wgmma an overwritten descriptor. Such combinations have smaller
    tiles; tests/aot/test_triton_aot.py limits the spills.
    """
    if by_blocks(problem):
        return _backward_by_blocks(problem, tma)
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    if problem.dtype.itemsize == 4:
        return TritonConfig(32, 32, 4, 1) if d <= 64 else TritonConfig(16, 16, 4, 1)
    added = problem.bias_itemsize or by_distance(problem)
    if shared_memory(problem) < 200 * 1024:
        if d <= 64:
            return TritonConfig(32, 64, 8, 2) if added else TritonConfig(32, 64, 4, 2)
        return TritonConfig(16, 64, 4, 1) if d <= 128 else TritonConfig(16, 32, 4, 1)
    bias_tile = problem.bias_itemsize
    if not tma:
        # Triton 3.6: tiles of 32 queries by pointers gave wrong dQ on sm_90 (cause unknown).
        if d <= 64:  # with a bias that is not pipelined a third stage of q and do only takes shared memory
            return TritonConfig(64, 64, 4, 2 if problem.totals is not None and bias_tile == 2 else 3)
        return TritonConfig(64, 64, 8, 2) if d <= 128 else TritonConfig(64, 32, 8, 1)
    if by_distance(problem) and d <= 128:
        # Values per query: many tiles have no entry, and prefer large tiles as a backward without bias does. Other
        # relative-position biases have values in every tile: the tiles that spill least.
        often = problem.parts is not None and (problem.parts.toeplitz is not None or problem.parts.key is not None)
        if d <= 64:
            return TritonConfig(32 if often else 64, 64, 4, 3)
        if often and not _blackwell(problem):
            return TritonConfig(64, 64, 8, 2, dq_tma=True)
    if d <= 64:
        if not bias_tile:
            return TritonConfig(64, 64, 4, 4)
        return TritonConfig(32, 128, 4, 3) if problem.score.band.unlimited else TritonConfig(64, 64, 4, 3)
    if d <= 128:
        if bias_tile:
            return TritonConfig(32, 128, 8, 3)
        # On Blackwell dS takes shared memory (on Hopper registers), and so do the sums of several heads.
        return TritonConfig(64, 128, 8, (1 if problem.group > 1 else 2) if _blackwell(problem) else 3, dq_tma=True)
    # Sums of several heads exceed Blackwell's tensor memory: use tiles that are too small for tensor memory.
    small = bias_tile == 4 or (_blackwell(problem) and problem.group > 1)
    return TritonConfig(16, 32, 4, 2, dq_tma=True) if small else TritonConfig(32, 64, 8, 2, dq_tma=True)


def _backward_by_blocks(problem: Problem, tma: bool) -> TritonConfig:
    """Return a config for rows that are read in blocks, with sums of 256 columns each of dK and dV."""
    if problem.dtype.itemsize == 4:
        return TritonConfig(16, 16, 8, 1)
    if shared_memory(problem) < 200 * 1024:
        return TritonConfig(16, 32, 8, 2)
    if _blackwell(problem) and problem.group > 1:  # as in `backward_config`
        return TritonConfig(16, 32, 8, 2, dq_tma=tma)
    return TritonConfig(64, 64, 8, 3, dq_tma=True) if tma else TritonConfig(64, 32, 8, 2)


def tangents_config(problem: Problem, pair_bytes: int) -> TritonConfig:
    """Return the config of the tangents' kernel, with the most stages of up to three that fit shared memory.

    pair_bytes: of a score's bias and its tangent, 0 unless matrices. Tiles are smaller than the forward's: there are
    those of the tangents beside them, and two of scores in registers. Only the pass past values that are not finite
    spills up to 128 dimensions. ptxas 12.8: with a mask and a bias it serializes wgmma over 32 keys.
    """
    d, size = max(padded(problem.head_dim), padded(problem.value_dim)), problem.dtype.itemsize
    capacity, mask = shared_memory(problem), 0 if problem.mask is None else 2 * problem.mask.matrix_itemsize
    large = capacity >= 200 * 1024 and size == 2
    if size == 4:
        block_m, block_n, warps = 32 if d <= 64 else 16, 16, 4
    elif d > 128 and (not large or _blackwell(problem)):
        block_m, block_n, warps = 32, 16, 8
    elif not large:
        block_m, block_n, warps = 64 if d <= 64 else 32, 32, 4
    elif d > 128:
        block_m, block_n, warps = 64, 32 if pair_bytes < 8 else 16, 4
    elif d <= 64 or _blackwell(problem) or (mask and pair_bytes):
        block_m, block_n, warps = 64, 64, 4
    else:
        block_m, block_n, warps = 128, 32 if pair_bytes else 64, 8
    rows, stage = block_m * (2 * d * size + block_n * mask) + 1024, block_n * (4 * d * size + block_m * pair_bytes)
    stages = (capacity - rows) // stage
    if large and d <= 64 and (capacity // 2 - rows) // stage >= 2:  # two programs share a multiprocessor
        stages = (capacity // 2 - rows) // stage
    return TritonConfig(block_m, block_n, warps, min(max(stages, 1), 3))


def every_pair_alike(problem: Problem) -> bool:
    """True if the problem has no bias, mask or window: tiles take registers for the products only."""
    return problem.bias is None and problem.parts is None and problem.mask is None and problem.score.band.unlimited


def by_distance(problem: Problem) -> bool:
    """True if the problem has a relative-position bias; its tiles are read by pointers."""
    parts = problem.parts
    return parts is not None and any(x is not None for x in (parts.query, parts.key, parts.toeplitz))


def _hopper(problem: Problem) -> bool:
    return problem.capability is not None and problem.capability[0] == 9


def _blackwell(problem: Problem) -> bool:
    return problem.capability is not None and problem.capability[0] == 10
