"""Tile sizes, warps and pipeline depth of the Triton kernels, with the reason for the numbers.

Measured on an H200 with Triton 3.6 (docs/notebook/triton.md). Two rules explain most of the table. The load pipeline
needs three stages: with two, Triton issues the next load at the end of an iteration and its latency is exposed. And a
small tile with several programs on a multiprocessor beats one large program, because the softmax of one then runs under
the products of another; a bias tile in shared memory leaves room for fewer programs and turns that round at D = 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tilewise.backends import float32_precision
from tilewise.spec.problem import Problem
from tilewise.spec.tiles import key_tiles, limits

MOST_SPLITS = 256
# Multiprocessors of a usual GPU of each compute capability. Not of the device at hand: the number of splits, and so the
# bits of a result, then depend on the problem alone.
_MULTIPROCESSORS = {(8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


@dataclass(frozen=True)
class TritonConfig:
    """Tile of block_m queries by block_n keys, warps a program, stages of the load pipeline.

    dq_tma: dQ is reduced by TMA, through shared memory, and not by pointers, from registers.
    pack_gqa: rows of a tile are the query heads of one key/value head, one query after the other.
    maxnreg: registers a thread at most, for so many programs to share a multiprocessor; None: as ptxas likes.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dq_tma: bool = False
    pack_gqa: bool = False
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Of a `Launch`."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def smaller(self) -> TritonConfig | None:
        """The same tiles in less shared memory; None where nothing is left to give up. No number depends on it."""
        if self.num_stages > 1:
            return replace(self, num_stages=self.num_stages - 1)
        return replace(self, dq_tma=False) if self.dq_tma else None


def shared_memory(problem: Problem) -> int:
    """Bytes of shared memory that one program may use (CUDA C++ programming guide, table of compute capabilities)."""
    capability = problem.capability or (8, 0)  # none: the interpreter, on a CPU
    if capability in ((8, 0), (8, 7)):
        return 163 * 1024
    return 227 * 1024 if capability[0] in (9, 10) else 99 * 1024


def padded(n: int) -> int:
    """The next power of two, at least 16: what a tensor-core operand needs."""
    return max(16, 1 << (n - 1).bit_length())


def widths(problem: Problem, tma: bool, forward: bool = True) -> tuple[int, int]:
    """Columns of the tiles of q and k, and of v and o: `padded` head and value dimension.

    In a forward on Hopper whole swizzles of 128 bytes where rows come by pointers: see `second_walk_stages`.
    """
    least = 128 // problem.dtype.itemsize if forward and _hopper(problem) and not tma else 16
    return max(padded(problem.head_dim), least), max(padded(problem.value_dim), least)


def second_walk_stages(problem: Problem, tma: bool) -> int:
    """Stages of the forward's walk past hidden keys that are not finite.

    ptxas 12.8 confuses descriptors of Hopper's products that have one address and different swizzles
    (tests/descriptor_lint.py), as those of k and v would where both take turns in one piece of shared memory. Tiles in
    a pipeline have shared memory of their own, hence two stages where their swizzles differ. Rows by pointers may be
    such that no pipeline takes them: their tiles are wide and long enough for the same swizzle in either order of rows
    and columns (but for tiles of 32 keys beside a bias by pointers, in which the lint finds no fault either).
    """
    swizzles = {min(128, width * problem.dtype.itemsize) for width in widths(problem, tma)}
    return 2 if _hopper(problem) and tma and len(swizzles) > 1 else 1


def precision(problem: Problem) -> str:
    """Of the products, see `products.product`: torch's setting, but for a problem that is `exact` no TF32.

    In its place three products of it, of what TF32 holds of the operands and of what it leaves over, are as exact as
    float32 and run on tensor cores. Past 128 dimensions their operands spill, 32 KiB a program on sm_86, and shared
    memory ends there: float32's own.
    """
    found = float32_precision(problem.dtype)
    if problem.dtype.itemsize < 4 or found == "ieee" or not problem.exact:
        return found
    return "tf32x3" if max(problem.head_dim, problem.value_dim) <= 128 else "ieee"


def forward_config(problem: Problem, bias_tma: bool, tma: bool) -> TritonConfig:
    """The tiles. bias_tma: a bias tile comes by TMA; tma: q, k and v do. Pointers to a tile take registers."""
    if problem.few_queries:
        return _few_queries_config(problem)
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
        if d > 64 and (problem.mask is not None or problem.score.transformed):  # else thousands of bytes spill
            return TritonConfig(128, 32, 8, 3)
        return TritonConfig(64, 64, 4, 3 if d <= 64 else 2)
    if d <= 64:
        if _hopper(problem) and not tma:  # tiles that `widths` made wider
            # Elements of a bias come one by one, and nothing fetches them ahead: of three programs one computes while
            # others wait for theirs.
            return TritonConfig(64, 64, 4, 2, maxnreg=168) if bias_tile == 2 else TritonConfig(64, 64, 8, 3)
        if bias_tile:
            return TritonConfig(128, 64, 4 if bias_tma else 8, 3)
        if every_pair_alike(problem):
            return TritonConfig(64, 128, 4, 3)
        # With a mask ptxas takes 184 to 205 registers, and two programs fit; with 168 three do. Nothing spills: what
        # wants more is the second walk alone, past values that are not finite.
        masked = _hopper(problem) and problem.mask is not None
        return TritonConfig(64, 64, 4, 3, maxnreg=168 if masked else None)
    if d <= 128:
        if bias_tile and not bias_tma:
            return TritonConfig(128, 32, 8, 3)
        if bias_tile:
            return TritonConfig(128, 64, 8, 3 if bias_tile == 2 else 2)
        return TritonConfig(64, 64, 4, 3)
    block_n = 64 if bias_tile < 4 and not by_distance(problem) else 32
    if _blackwell(problem):  # 512 columns of tensor memory hold the accumulators of both walks over the keys
        return TritonConfig(64, block_n, 4, 2)
    return TritonConfig(128, block_n, 8, 2)


def _few_queries_config(problem: Problem) -> TritonConfig:
    """Tiles no taller than the queries need, and enough keys and values on the way to keep the memory busy.

    With 32 KiB a stage and four stages one program on each multiprocessor of a Hopper GPU does that. More than 16 rows
    keep it waiting for Ampere's product, so that they take Hopper's, of 64 rows, which holds all stages in shared
    memory.
    """
    d, size = max(padded(problem.head_dim), padded(problem.value_dim)), problem.dtype.itemsize
    capacity = shared_memory(problem)
    large = capacity > 200 * 1024
    block_m = min(padded(problem.queries * problem.group), 64)
    if large and block_m > 16:
        block_m = 64
    elif 2 * block_m * d * size > capacity:  # half of it is for keys and values
        block_m //= 2
    stage = 32 * 1024 if large else 16 * 1024
    block_n = max(16, min(stage // (2 * d * size), 128))
    warps = 8 if block_m * d > 64 * 128 else 4
    # Queries stay; keys, values and the tiles of a bias and a mask are in all stages but one.
    pair = problem.bias_itemsize + (0 if problem.mask is None else problem.mask.matrix_itemsize)
    most = 1 + (capacity - block_m * d * size - 4096) // (block_n * (2 * d * size + block_m * pair))
    return TritonConfig(block_m, block_n, warps, min(3 if block_m == 64 else 4, most), pack_gqa=True)


def splits(problem: Problem, config: TritonConfig) -> int:
    """How many programs share the keys of one tile of queries: those that share them out best, of equals the fewest.

    A program takes the time of its key tiles and of some three more for what comes before and after them. Programs
    run in waves: one on each multiprocessor, or twice as long two on each, which share its bandwidth. Four waves at
    most, so that the partial results stay small however long the keys are.
    """
    return shared_by(problem, config, problem.queries, problem.keys, *limits(problem.score.band))


def shared_by(problem: Problem, config: TritonConfig, queries: int, keys: int, lo: int, hi: int) -> int:
    """The same, but for so many queries and keys and a band of these limits."""
    if not config.pack_gqa:
        return 1
    p = problem
    units = p.batch * p.kv_heads * -(-queries * p.group // config.block_m)
    if lo <= 0 and queries + hi >= keys:  # as usual, all keys
        begin, end = 0, -(-keys // config.block_n)
    else:
        begin, _, _, end = key_tiles(0, queries, keys, lo, hi, config.block_n)
    return best_splits(units, end - begin, _MULTIPROCESSORS.get(p.capability or (8, 0), 128))


@lru_cache(1024)  # a cache that grows has as many tiles for a while
def best_splits(units: int, tiles: int, multiprocessors: int) -> int:
    """`splits` for so many programs of so many key tiles each: of those that fill a number of waves the most, and the
    fewest that do as well."""

    def time(splits: int) -> int:
        programs = units * splits
        waves = 1 if programs <= multiprocessors else 2 * -(-programs // (2 * multiprocessors))
        return waves * (-(-tiles // splits) + 3)

    most = min(tiles, 8 * multiprocessors // units, MOST_SPLITS)
    full = [min(waves * multiprocessors // units, most) for waves in (1, 2, 4, 6, 8)]
    found = [-(-tiles // -(-tiles // splits)) for splits in full if splits > 0]
    return min([1, *found], key=lambda splits: (time(splits), splits))


def backward_config(problem: Problem, tma: bool) -> TritonConfig:
    """The backward's tiles; the accumulators of dK and dV, 2 · block_n · d floats, must fit the registers.

    tma: q, k, v and do come by TMA. Pointers take registers, and so does the masking of a band: where both meet large
    tiles, ptxas 12.8 spills hundreds of bytes and has been seen to hand wgmma a descriptor that it had overwritten.
    Such combinations get smaller tiles; tests/test_triton_aot.py holds the spills down.
    """
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
        # Tiles of 32 queries that come by pointers gave wrong dQ on sm_90 (Triton 3.6; the cause is not known).
        if d <= 64:  # beside a bias that no pipeline brings a third stage of q and do only takes room
            return TritonConfig(64, 64, 4, 2 if problem.totals is not None and bias_tile == 2 else 3)
        return TritonConfig(64, 64, 8, 2) if d <= 128 else TritonConfig(64, 32, 8, 1)
    if by_distance(problem) and d <= 128:
        # Values per query leave many tiles without an entry, and those like large tiles, as a backward without a bias
        # does. Others have values in every tile: those that spill least.
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
        # On Blackwell dS takes shared memory where Hopper keeps it in registers; so do the sums of several heads.
        return TritonConfig(64, 128, 8, (1 if problem.group > 1 else 2) if _blackwell(problem) else 3, dq_tma=True)
    # The sums of several heads take more tensor memory than Blackwell has: tiles that are too small for it.
    small = bias_tile == 4 or (_blackwell(problem) and problem.group > 1)
    return TritonConfig(16, 32, 4, 2, dq_tma=True) if small else TritonConfig(32, 64, 8, 2, dq_tma=True)


def every_pair_alike(problem: Problem) -> bool:
    """No bias, mask or band: no tile takes registers for anything but the products."""
    return problem.bias is None and problem.parts is None and problem.mask is None and problem.score.band.unlimited


def by_distance(problem: Problem) -> bool:
    """Whether a bias by distance is among what is added to the scores; its tiles come by pointers."""
    parts = problem.parts
    return parts is not None and any(x is not None for x in (parts.query, parts.key, parts.toeplitz))


def _hopper(problem: Problem) -> bool:
    return problem.capability is not None and problem.capability[0] == 9


def _blackwell(problem: Problem) -> bool:
    return problem.capability is not None and problem.capability[0] == 10
