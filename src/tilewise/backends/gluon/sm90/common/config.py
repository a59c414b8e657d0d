"""Tile sizes, warpgroups and pipeline stages of the Hopper kernels, and the reasons for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import ends
from tilewise.spec.operands import BiasKind
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band
from tilewise.spec.tiles import visible_pairs

ROWS = 64  # queries per warpgroup: the height of a wgmma
SHARED_MEMORY = 227 * 1024  # bytes available to one program on sm_90
ELEMENTS = 3  # batch elements per program of the backward, see `is_batched`
BATCHED_FROM = 128  # the fewest queries, and keys
MOST_PROGRAMS = 8  # programs of a group that shares a bias, at most; see dbias_reduce
L2_CACHE = 32 * 1024**2  # bytes, of 50 MiB, that are still cached when the next program reads them


def most_registers(programs: int, warpgroups: int) -> dict[str, int]:
    """Return Triton's register option for ``programs`` of ``warpgroups`` per multiprocessor; none if one large program
    has all.

    A small single program needs the option: Triton would ask for 256 registers per thread, and 255 are the most.
    """
    most = 65536 // (programs * warpgroups * 128) // 8 * 8
    return {} if programs == 1 and most < 255 else {"maxnreg": min(most, 248)}


@dataclass(frozen=True)
class ForwardConfig:
    """Configuration of a forward program. Its warpgroups use the tensor cores in turn: the softmax of one overlaps the
    products of the others.

    Attributes:
        block_n: keys per tile.
        warpgroups: computing warpgroups, `ROWS` queries each; one more warp loads Q, K and V, and one per warpgroup its
            bias.
        q_stages: stages of the pipeline of Q.
        stages: stages of the pipelines of K and V.
        bias_stages: stages of the bias pipeline of each warpgroup.
        bias_first: the accumulator of Q·Kᵀ starts from the bias; else the bias is added after the product.
        lazy: O is rescaled only where a row's maximum has grown by more than `softmax.SLACK` powers of two.
        sums_by_thread: each thread sums its part of a row; the threads of a row combine their sums once, at its end.
        peeled: key tiles cut by the window come first, in a loop of their own; else there is a branch.
        skips_hidden: a warpgroup skips tiles that are empty for it but not for another.
        dynamic: a program fetches the next query tile; else it takes tiles at a stride of the number of programs.
        o_in_q: O is stored through the shared memory of Q.
        o_in_bias: O is stored through a slot of the bias pipeline, in its turn: Q and K of the next tile do not wait.
        q_in_registers: Q is read into registers once, not from shared memory by each wgmma.
        words_last: dropout words are computed after P·V, whose registers are then free; else among the exponentials.
        scale_in_q: Q is scaled when it is read; scores are in units of 1, and a bias needs no multiplication.
        programs: programs per multiprocessor.
        registers: registers per thread of a computing and of a loading warp; 64 K in all.
    """

    block_n: int
    warpgroups: int
    q_stages: int
    stages: int
    bias_stages: int
    bias_first: bool
    lazy: bool
    dynamic: bool
    o_in_q: bool
    q_in_registers: bool
    scale_in_q: bool
    registers: tuple[int, int]
    programs: int = 1
    sums_by_thread: bool = False
    peeled: bool = False
    skips_hidden: bool = False
    o_in_bias: bool = False
    words_last: bool = False

    @property
    def block_m(self) -> int:
        return self.warpgroups * ROWS


def padded(n: int) -> int:
    """Return the next power of two, at least 32: the width of a tile, which TMA pads with zeros."""
    return max(32, 1 << (n - 1).bit_length())


def _scales_exactly(problem: Problem) -> bool:
    """True if multiplying queries by the scale does not round: the scale is a power of two, within the exponent range.
    bfloat16 has that range for elements down to 2^-110; smaller ones may lose 2^-134 each, as if rounded to bfloat16
    after scaling, which changes a score only with keys past 2^100."""
    scale = problem.score.scale
    return problem.dtype == torch.bfloat16 and 2**-16 <= scale <= 1 and math.frexp(scale)[0] == 0.5


def sees_few(queries: int, keys: int, lo: int | None, hi: int | None) -> bool:
    """True if queries see few keys: tiles of 192 queries that the window cuts waste more than those of 128 (H200,
    D=64).

    lo, hi: limits of the window.
    """
    return keys < 2048 or visible_pairs(queries, keys, Band(lo, hi)) // max(1, queries) < 2048


def band_of(problem: Problem) -> tuple[int, int, int | None, int | None]:
    """Return queries, keys, and the limits of the window."""
    return problem.queries, problem.keys, problem.score.band.lo, problem.score.band.hi


def hides_keys(problem: Problem) -> bool:
    """True if all queries and heads of a batch element share a bool mask over the keys."""
    mask = problem.mask
    return mask is not None and problem.tile_mask is None and mask.rows == 1 and mask.heads == 1 and mask.cols > 1


def has_small_heads(problem: Problem) -> bool:
    """True if `small_heads_kernel` runs, which loads K, V and the bias of a key tile together."""
    p, score = problem, problem.score
    if (p.mask is not None and not hides_keys(p)) or p.parts is not None or p.totals is not None or p.sink is not None:
        return False
    if score.query is not None or score.toeplitz is not None or score.transformed or score.dropout:
        return False
    return backward_width(p) == 32 and p.bias_itemsize == 2 and score.band.unlimited


def forward_config(problem: Problem) -> ForwardConfig:
    """Return the forward's configuration."""
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    bias = problem.bias_itemsize
    # A bias along the keys or the queries has no tiles: the configuration is that without a bias.
    along_keys = problem.bias is not None and problem.bias.axes == BiasKind.COLS
    # 240 registers hold S and P of 128 keys and O of 128 dimensions; with O of 256 dimensions 64 keys fit.
    # A float32 bias tile takes twice the shared memory of a 16-bit one, and a softcap with any bias takes more
    # registers: half the keys.
    band, capped = not problem.score.band.unlimited, problem.score.transformed
    masked = problem.mask is not None
    plain = not bias and not masked
    crowded = capped and (bias > 0 or along_keys)
    # With heads of 32 a tile is mostly softmax: two programs of half the keys fit a multiprocessor, and one computes
    # while the other waits for its bias.
    small = d == 32 and bias > 0 and not capped and (not masked or has_small_heads(problem))
    block_n = 64 if small or d == 256 or (d == 128 and (bias == 4 or crowded)) else 128
    # A third warpgroup shares key tiles with two others: faster if 160 registers per thread are enough.
    three = d <= 64 and plain and not (capped or problem.score.dropout)
    three = three and not (band and sees_few(*band_of(problem)))
    in_registers = not (three or small) and d <= 128
    # except with a mask that differs between queries (5 % slower); with a mask of keys 3 % faster (H200, D=64)
    by_rows = d == 64 and not bias and problem.mask is not None and problem.mask.rows > 1
    in_registers = in_registers and not by_rows
    apart = problem.score.band.hi is not None and problem.score.band.lo is None and not masked
    # Bias by relative position whose range ends: most tiles of long rows have no entry, as if there was no bias.
    ends_below = ends(problem).lo
    rows = (3 if three else 2) * ROWS
    fills = d == 256 or (bias > 0 and d == 128)  # no shared memory is left for O
    by_distance = problem.score.query is not None and problem.bias is not None and problem.bias.dtype == problem.dtype
    o_in_bias = fills and by_distance and block_n == padded(problem.value_dim)
    underflows = toeplitz_constants(problem, 2 * block_n)["UNDERFLOWS"]
    return ForwardConfig(
        block_n=block_n,
        warpgroups=3 if three else 2,
        q_stages=1 if d == 256 or in_registers else 2,
        stages=3 if d == 64 and band and not bias and not three else 2,
        bias_stages=0 if not bias else 1 if d == 256 and bias == 4 else 2,
        bias_first=(bias > 0 or along_keys) and not capped,
        # Rescaling costs more than the branch, except beside a bias at 128 dimensions, or in small programs (H200).
        lazy=(not bias or ends_below) if d >= 128 else not small,
        # the host does not know the number of key tiles
        dynamic=underflows or band or (masked and not small) or problem.totals is not None,
        q_in_registers=in_registers,
        scale_in_q=in_registers and bias > 0 and not capped and _scales_exactly(problem),
        o_in_q=fills and not o_in_bias and padded(problem.head_dim) == padded(problem.value_dim),
        o_in_bias=o_in_bias,
        registers=(104, 32) if small else (160, 32) if three else (240, 24),
        programs=2 if small else 1,
        # 1 to 2 % faster; slower beside a bias, and at 128 dimensions without a window (H200).
        sums_by_thread=((plain or (ends_below and not small)) and (d != 128 or band)) or by_rows,
        peeled=apart,
        skips_hidden=apart and rows > block_n,  # else it skips nothing, and costs 1 %
        words_last=d == 128,  # Q in registers leaves none for the words (H200); at D=64 this is 8 % slower
    )


@dataclass(frozen=True)
class BackwardConfig:
    """Configuration of a backward program; one or two warpgroups compute, one warp loads.

    Attributes:
        block_m: queries per tile.
        m_subtiles: subtiles of a tile; the softmax of one overlaps the products of the other.
        block_n: keys per program: `ROWS` per warpgroup, or for both, which then share the columns.
        warpgroups: computing warpgroups.
        stages: stages of the pipelines of Q and the bias.
        do_stages: stages of the pipeline of dO.
        dq_parts: dQ is added in so many parts, one after the other; two only if `ahead`.
        dq_by_tma: dQ is stored in shared memory, and its own warp adds it, if necessary in a fixed order; else it is
            added from registers.
        ahead: K·Qᵀ of the next tile is issued before dQ, or its last part, has left its registers, not after.
        peeled: tiles that the window cuts and full tiles have a loop each; else there is a branch in one loop.
        key_stages: stages of K's pipeline; with two, K of the next work tile is loaded before dK is stored.
        value_stages: stages of V's pipeline, as many; or one with two of K: dV is stored through the memory of dQ,
            and the next V is loaded as soon as the last step has read this one.
        dynamic: a program stays and fetches the next key tile; else there is one program per key tile.
        head_swizzle: key/value heads whose key tiles alternate.
        deferred_release: with a fixed order, a dQ tile counts as added one step later, when it is there without a wait.
        k_in_registers, v_in_registers: K, V are read into registers once, not by each wgmma of K·Qᵀ, of dP.
        dq_stored: each query tile has one key tile, and its dQ is stored in its dtype, not added to a float32 sum.
        sum_bytes: shared memory for the dS tiles that are added up to a shared dBias.
        programs: programs per multiprocessor.
        loading_registers: registers per thread of the loading warp.
        elements: batch elements per program, which has so many times `warpgroups`, see `is_batched`; else 1.
        computing_registers: registers per thread of a batch element's warpgroup.
    """

    block_m: int
    block_n: int
    warpgroups: int
    stages: int
    do_stages: int
    dq_parts: int
    dq_by_tma: bool
    ahead: bool
    sum_bytes: int
    programs: int = 1
    loading_registers: int = 24
    m_subtiles: int = 1
    peeled: bool = False
    key_stages: int = 1
    value_stages: int = 1
    dynamic: bool = False
    head_swizzle: int = 1
    deferred_release: bool = False
    k_in_registers: bool = False
    v_in_registers: bool = False
    dq_stored: bool = False
    elements: int = 1
    computing_registers: int = 0

    @property
    def shares_keys(self) -> bool:
        """True if both warpgroups have the same keys, and each half of the columns of every product."""
        return self.warpgroups * ROWS > self.block_n


def backward_width(problem: Problem) -> int:
    """Return the width of the backward's tiles of Q, K, V and dO."""
    return max(padded(problem.head_dim), padded(problem.value_dim))


def head_swizzle(problem: Problem, queries: int) -> int:
    """Return the backward's head swizzle for ``queries`` queries: key/value heads whose key tiles alternate.

    With a causal window key tiles differ in length: the longest of eight heads run first, so that short ones run last.
    Tiles of a local window are equally long, and one head after the other is faster (2 % at windows of 512 and 2,048 of
    16,384 keys, H200, D=128). With a fixed order each program follows the previous one by a step or two, so that
    several heads run at once: as many as have Q, dO and the float32 dQ sum in the L2 cache.
    """
    band, width = problem.score.band, backward_width(problem)
    least = 1 if band.unlimited or longest_first(problem) else 8
    if not problem.deterministic:
        return 1 if width == 128 and band.lo is not None and band.hi is not None else least
    return min(max(heads_in_cache(problem, queries), least), 32 if width <= 64 else 16)  # more are slower (H200)


def heads_in_cache(problem: Problem, queries: int) -> int:
    """Return the key/value heads whose Q, dO and float32 dQ sum fit the L2 cache together: a power of two, at least
    one."""
    head = problem.group * queries * backward_width(problem) * (2 * problem.dtype.itemsize + 4)
    return 1 << max(1, L2_CACHE // head).bit_length() - 1


def scatters(problem: Problem) -> bool:
    """True if neighbouring tiles may visit unrelated tiles, as with block-sparse masks. A mask given as intervals of
    queries, such as windows and documents, does not; nor is a bool mask assumed to."""
    return problem.tile_mask is not None and problem.tile_mask.kind == "bits"


def longest_first(problem: Problem) -> bool:
    """True if the backward orders work tiles longest first, because heads or batch elements share a matrix bias.

    They run side by side to read it once. Programs of similar length stay in step, so that the L2 cache serves Q, dO
    and dq_accum of the heads that run together to more than one of them, as without a mask (H100, 25 % of blocks of
    16,384 keys, D=128, 16 heads: 5.2 ms to 3.7). False with a fixed order, and where neighbours visit the same queries
    and stay in step anyway (documents: 0.70 ms to 0.88); for block masks of this kind `longest_first_kernel` detects
    it.
    """
    p, bias = problem, problem.bias
    if bias is None or bias.axes != BiasKind.MATRIX or not scatters(p) or p.deterministic or p.score.query is not None:
        return False
    return not p.broadcast_group(bias).single and (not p.bias_grad or dbias_sums(p) > 0)


def _dense_stores(problem: Problem) -> bool:
    """True if dQ of a dense call is stored directly where all keys are one tile.

    False with a mask, whose lists leave out query tiles and hold the order of sums, and with terms that have their own
    loops or sums: a bias by relative position, and a matrix bias that several heads or batch elements share.
    """
    bias, score = problem.bias, problem.score
    if problem.mask is not None or problem.parts is not None or score.query is not None or score.toeplitz is not None:
        return False
    return bias is None or problem.bias_itemsize == 0 or problem.broadcast_group(bias).single


def is_batched(problem: Problem) -> bool:
    """True if a backward program computes several batch elements, which share a bias that has a gradient. For heads of
    32, with enough batch elements for all programs (H200, H = 4, speed relative to one element per program: 1.14 to
    1.43 for 32 to 192 batch elements and 192 to 768 queries and keys, 1.03 to 1.14 for 128; 0.82 for 16 batch
    elements)."""
    p, bias, score = problem, problem.bias, problem.score
    if bias is None or not p.bias_grad or p.bias_itemsize != p.dtype.itemsize or bias.dtype != p.dtype:
        return False
    if (p.mask is not None and not hides_keys(p)) or p.parts is not None or p.totals is not None or p.deterministic:
        return False
    if score.query is not None or score.toeplitz is not None or score.transformed or score.dropout:
        return False
    enough = p.batch >= 32 and p.batch * p.kv_heads * -(-p.keys // ROWS) >= 512
    long = min(p.queries, p.keys) >= BATCHED_FROM
    rows = backward_width(p) == 32 and p.head_dim % 8 == 0  # see `dq_accum.finish_heads`
    return rows and score.band.unlimited and bias.batch == 1 and enough and long


def dbias_sums(problem: Problem) -> int:
    """Return the number of sums of dBias if programs that share a bias add dS tiles in its dtype, in any order; else 0.
    A 16-bit sum has at most eight summands: it is then nearer to float64 than unfused torch, which rounds dS more often
    (at most 0.75 of its error; with sixteen 1.5). Two such sums take as much memory as a float32 one. If q has the
    other 16-bit dtype, unfused torch has float32 scores and rounds dBias once; so do the other methods."""
    bias = problem.bias
    if bias is None or problem.deterministic or problem.score.query is not None or bias.axes != BiasKind.MATRIX:
        return 0
    group = problem.broadcast_group(bias)
    broadcast_size = group.batch * group.heads
    if group.single or is_batched(problem):
        return 0
    if bias.dtype not in (torch.float32, problem.dtype):
        return 0
    if bias.dtype == torch.float32 or broadcast_size <= MOST_PROGRAMS:
        return 1
    return 2 if broadcast_size <= 2 * MOST_PROGRAMS and group.batch * group.kv_heads % 2 == 0 else 0


def backward_config(problem: Problem) -> BackwardConfig:
    """Return the backward's configuration. Registers hold S and dP of 64 queries, dK and dV of 128 keys and 128
    dimensions."""
    d, bias = backward_width(problem), problem.bias
    tile, along_keys = problem.bias_itemsize > 0, bias is not None and bias.axes == BiasKind.COLS
    swizzle = head_swizzle(problem, problem.queries)
    later = problem.deterministic and problem.score.band.unlimited and swizzle > 1
    apart = tile and bias is not None and bias.dtype != problem.dtype
    shared = tile and bias is not None and not problem.broadcast_group(bias).single
    if d == 256:
        # dK and dV of 64 keys take half of the registers of both warpgroups. Shared memory holds K, V, two tiles of Q,
        # for the next K·Qᵀ, and two of dO. Or one of dO, loaded during dQ, dK and that product, and half of dQ; or a dS
        # tile beside two of the bias; or one for a shared dBias beside dS.
        one = problem.deterministic or apart or (shared and problem.score.transformed)
        return BackwardConfig(
            block_m=64, block_n=ROWS, warpgroups=2, stages=2, do_stages=1 if one else 2, dq_parts=2,
            dq_by_tma=problem.deterministic, ahead=True, sum_bytes=16384 if problem.bias_itemsize == 4 else 8192,
            dynamic=not (along_keys or (tile and problem.score.transformed)),  # these would spill
            head_swizzle=swizzle, deferred_release=later,
        )  # fmt: skip
    if is_batched(problem):
        return BackwardConfig(
            block_m=64, block_n=ROWS, warpgroups=1, stages=3, do_stages=3, dq_parts=1, dq_by_tma=False, ahead=False,
            sum_bytes=0, loading_registers=72, key_stages=2, value_stages=2, dynamic=True, elements=ELEMENTS,
            computing_registers=144,
        )  # fmt: skip
    # Smaller programs that share a multiprocessor do not wait for each other, but each reads Q and dO, and adds dQ, for
    # half the keys: faster with heads of 32, and of 64 where tiles have no subtiles (H200).
    capped = problem.score.transformed
    band, masked = problem.score.band, problem.mask is not None
    programs = 1
    # A float32 bias has tiles of twice the size, and a separate dS tile: fewer programs fit, and at 128 dimensions half
    # the keys.
    wide = problem.bias_itemsize == 4
    words = bool(problem.score.dropout) and problem.score.toeplitz is not None  # dropout, in loops of its own
    plain = band.lo is None and not (capped or masked or along_keys or words)  # subtiles fit
    # In a packed batch of short sequences a larger tile is mostly empty, and there are as many tiles as sequences and
    # heads: more programs side by side.
    short = problem.totals is not None and max(problem.queries, problem.keys) <= ROWS
    # Also with a shared bias, except where dS is added to a sum, for which two warps are too few.
    group = problem.broadcast_group(bias) if tile and bias is not None else None
    onto_sum = group is not None and problem.bias_grad and MOST_PROGRAMS % (group.batch * group.kv_heads) != 0
    onto_sum = onto_sum and not dbias_sums(problem)
    halved = shared and (apart or onto_sum or not plain)
    if d == 32:
        small = band.unlimited and not (capped or wide or along_keys)
        programs = 3 if small else 2  # 136 registers, or 232
    elif d == 64 and not wide and (short or halved or not (tile or problem.deterministic or plain)):
        programs = 2  # with a fixed order, half the keys mean twice as many waits
    block_n = ROWS if programs > 1 or (wide and d == 128) else 2 * ROWS
    # At 64 dimensions 128 queries, in subtiles, between two synchronizations of the warpgroups: 10 % faster, with a
    # bias tile 25 %; a softcap or a bias of the keys would spill (H200).
    # A Toeplitz bias, in its own loops, needs the registers of the next K·Qᵀ, and without subtiles those of K.
    far = problem.score.toeplitz
    diagonals = problem.parts is not None and far is not None and ("toeplitz" in problem.parts.grads or far.linear)
    tall = d == 64 and programs == 1 and not (wide or capped or masked or along_keys or words)
    # Then the shared-memory reads of wgmma are the limit: K, or K and V, in registers, where some are free, are 4 to 10
    # % faster. So is the next K·Qᵀ ahead; but with a bias tile, which must come first, it is slower (H200).
    d64 = d == 64 and not tile
    ahead = d64 and not diagonals and (programs == 1 or not along_keys)
    single = problem.keys <= block_n and (problem.totals is not None or _dense_stores(problem))
    # At 128 dimensions two tiles of K fit, but one of V. The gain is largest with short work tiles.
    few_steps = problem.totals is not None or (band.lo is not None and band.hi is not None)
    keys_ahead = d == 128 and block_n == 2 * ROWS and few_steps and not (tile or along_keys or masked or single)
    # 8192 elements are added at a time, or half where tiles leave no more shared memory.
    crowded = masked and (apart or capped) and d == 128 and not wide
    return BackwardConfig(
        block_m=2 * ROWS if tall else ROWS, block_n=block_n, warpgroups=block_n // ROWS, stages=2, do_stages=2,
        dq_parts=1, dq_by_tma=problem.deterministic or d != 32,  # from registers it is faster there (H200)
        ahead=ahead, programs=programs,
        sum_bytes=8192 * (4 if wide else 2) // (2 if crowded else 1), m_subtiles=2 if tall else 1,
        # 3 % faster at 128 and at 64 in subtiles; with a bias tile it would spill there (H200).
        peeled=not masked and (d != 64 or (tall and not (tile or band.unlimited))),
        k_in_registers=(d64 and (tall or not diagonals)) or (d == 32 and bias is None and not masked),
        v_in_registers=d64 and not tall and not diagonals and (programs == 2 or not along_keys),
        key_stages=2 if keys_ahead or not (d == 128 or tile) else 1, value_stages=1 if d == 128 or tile else 2,
        dq_stored=single and d != 32,
        dynamic=not ((d == 128 and along_keys) or (d == 64 and tile and not band.unlimited)),  # these would spill
        head_swizzle=swizzle, deferred_release=later,
    )  # fmt: skip
