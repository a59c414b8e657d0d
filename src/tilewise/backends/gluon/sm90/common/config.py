"""Tile sizes, warpgroups and pipelines of the Hopper kernel, with the reason for the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import ends
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band
from tilewise.spec.tiles import visible_pairs

ROWS = 64  # queries of a warpgroup: the height of a wgmma
SHARED_MEMORY = 227 * 1024  # bytes that one program may use on sm_90
ELEMENTS = 3  # batch elements of a program of the backward, see `is_batched`
BATCHED_FROM = 128  # queries, and keys
MOST_PROGRAMS = 8  # of a group that shares a bias, see dbias_reduce
L2_CACHE = 32 * 1024**2  # of 50 MiB, what is there again when the next program wants it


def most_registers(programs: int, warpgroups: int) -> dict[str, int]:
    """Triton's option for so many programs of so many warpgroups on a multiprocessor; none for a large one, which has
    all, but for a small one: Triton would ask for 256 a thread, and there are 255."""
    most = 65536 // (programs * warpgroups * 128) // 8 * 8
    return {} if programs == 1 and most < 255 else {"maxnreg": min(most, 248)}


@dataclass(frozen=True)
class ForwardConfig:
    """How one program works. Its warpgroups take the tensor cores in turns: the softmax of one runs under the products
    of the others.

    Attributes:
        block_n: keys of a tile.
        warpgroups: that compute, `ROWS` queries each; one more warp loads Q, K and V, one for each loads its bias.
        q_stages: tiles in the pipeline of Q.
        stages: tiles in the pipelines of K and V.
        bias_stages: tiles in the pipeline of the bias, for each warpgroup.
        bias_first: the accumulator of Q·Kᵀ starts from the bias; else the bias is added after the product.
        lazy: O is rescaled only where a row's maximum has grown by more than `softmax.SLACK` powers of two.
        sums_by_thread: each thread sums up what it has of a row, and threads of a row meet at its end only.
        peeled: the tiles of keys that a band cuts come first and have a loop of their own; else a branch.
        skips_hidden: a warpgroup leaves tiles out of which it sees nothing, and another something.
        dynamic: a program takes whichever tile of queries is left; else those at a stride of the number of programs.
        o_in_q: O leaves through the shared memory of Q.
        o_in_bias: through a slot of the bias's pipeline, in its turn: Q and K of the next tile need not wait for that.
        q_in_registers: Q is read once, not by every wgmma.
        words_last: those of dropout are made after P·V, whose registers are then free; else among the exponentials.
        scale_in_q: Q is scaled when it is read; the units of the scores are 1, and a bias needs no multiplication.
        programs: that share a multiprocessor.
        registers: of a thread of a computing and of a loading warp; 64 K of them in all.
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
    """The next power of two from 32 up: the width of a tile, which TMA fills up with zeros."""
    return max(32, 1 << (n - 1).bit_length())


def _scales_exactly(problem: Problem) -> bool:
    """Whether queries can be multiplied by the scale without rounding: by a power of two, if their exponents have room
    for it. Those of bfloat16 have, down to elements of 2^-110; smaller ones may lose 2^-134 each, as if they had been
    written down in bfloat16 after scaling, which a score shows only beside keys past 2^100."""
    scale = problem.score.scale
    return problem.dtype == torch.bfloat16 and 2**-16 <= scale <= 1 and math.frexp(scale)[0] == 0.5


def sees_few(queries: int, keys: int, lo: int | None, hi: int | None) -> bool:
    """Whether a query sees few keys: of 192 queries that a band cuts more is in vain than of 128 (H200, D=64).

    lo, hi: the limits of the band.
    """
    return keys < 2048 or visible_pairs(queries, keys, Band(lo, hi)) // max(1, queries) < 2048


def band_of(problem: Problem) -> tuple[int, int, int | None, int | None]:
    """Queries and keys, and the limits of the band."""
    return problem.queries, problem.keys, problem.score.band.lo, problem.score.band.hi


def hides_keys(problem: Problem) -> bool:
    """Whether a mask is the same for all queries, and heads, of a batch element."""
    mask = problem.mask
    return mask is not None and problem.tile_mask is None and mask.rows == 1 and mask.heads == 1 and mask.cols > 1


def has_small_heads(problem: Problem) -> bool:
    """Whether K, V and the bias of a tile of keys come together, see `small_heads_kernel`."""
    p, score = problem, problem.score
    if (p.mask is not None and not hides_keys(p)) or p.parts is not None or p.totals is not None or p.sink is not None:
        return False
    if score.query is not None or score.toeplitz is not None or score.transformed or score.dropout:
        return False
    return backward_width(p) == 32 and p.bias_itemsize == 2 and score.band.unlimited


def forward_config(problem: Problem) -> ForwardConfig:
    """The forward's tiles."""
    d = max(padded(problem.head_dim), padded(problem.value_dim))
    bias = problem.bias_itemsize
    # A bias along the keys or the queries has no tiles: beside one all is as without.
    along_keys = problem.bias is not None and problem.bias.axes == "cols"
    # 240 registers hold S and P of 128 keys and O of 128 dimensions; O of 256 leaves room for 64 keys.
    # A float32 bias tile takes twice the shared memory of a 16-bit one, and a softcap takes registers beside any: half
    # the keys.
    band, capped = not problem.score.band.unlimited, problem.score.transformed
    masked = problem.mask is not None
    plain = not bias and not masked
    crowded = capped and (bias > 0 or along_keys)
    # With heads of 32 a tile is mostly softmax: two programs of half the keys fit a multiprocessor, and one of them
    # computes while the other waits for its bias.
    small = d == 32 and bias > 0 and not capped and (not masked or has_small_heads(problem))
    block_n = 64 if small or d == 256 or (d == 128 and (bias == 4 or crowded)) else 128
    # A third warpgroup shares the tiles of keys with two: worth it where 160 registers are enough for each.
    three = d <= 64 and plain and not (capped or problem.score.dropout)
    three = three and not (band and sees_few(*band_of(problem)))
    in_registers = not (three or small) and d <= 128
    # but for a mask that differs between queries, where that is 5 % slower; of keys alone 3 % faster (H200, D=64)
    by_rows = d == 64 and not bias and problem.mask is not None and problem.mask.rows > 1
    in_registers = in_registers and not by_rows
    apart = problem.score.band.hi is not None and problem.score.band.lo is None and not masked
    # A bias by distance whose range ends: most tiles of long rows have none, as if there was no bias.
    ends_below = ends(problem).lo
    rows = (3 if three else 2) * ROWS
    fills = d == 256 or (bias > 0 and d == 128)  # no room for O beside everything else
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
        # What it leaves out is worth its branch but beside a bias of 128 dimensions, or in small programs (H200).
        lazy=(not bias or ends_below) if d >= 128 else not small,
        # whose tiles the host does not count
        dynamic=underflows or band or (masked and not small) or problem.totals is not None,
        q_in_registers=in_registers,
        scale_in_q=in_registers and bias > 0 and not capped and _scales_exactly(problem),
        o_in_q=fills and not o_in_bias and padded(problem.head_dim) == padded(problem.value_dim),
        o_in_bias=o_in_bias,
        registers=(104, 32) if small else (160, 32) if three else (240, 24),
        programs=2 if small else 1,
        # Worth 1 to 2 %; slower beside a bias, and at 128 dimensions without a band (H200).
        sums_by_thread=((plain or (ends_below and not small)) and (d != 128 or band)) or by_rows,
        peeled=apart,
        skips_hidden=apart and rows > block_n,  # else it has nothing to leave out, and costs 1 %
        words_last=d == 128,  # beside Q there are no registers for them (H200); at D=64 that is 8 % slower
    )


@dataclass(frozen=True)
class BackwardConfig:
    """How one program of the backward works; one or two warpgroups compute, one warp loads.

    Attributes:
        block_m: queries of a tile.
        m_subtiles: a tile is computed in so many, the softmax of one under products of the other.
        block_n: keys of a program: `ROWS` for each warpgroup, or for both, which then share the columns.
        warpgroups: that compute.
        stages: tiles in the pipeline of Q and the bias.
        do_stages: tiles in the pipeline of dO.
        dq_parts: dQ leaves in so many parts, one after the other; two only if `ahead`.
        dq_by_tma: they leave through shared memory, and a warp of its own adds them, in a fixed order if need be; else
            straight from registers.
        ahead: K·Qᵀ of the next tile is issued before dQ, or its last part, has left its registers, not after.
        peeled: of a band; they and the tiles that nothing cuts have a loop each. Else a branch in one loop.
        key_stages: tiles in the pipeline of K; that of the next work tile comes before dK of one has left.
        value_stages: tiles in the pipeline of V, as many; or one beside two of K, where dV leaves through the memory of
        dQ
            and the next V comes as soon as the last step has read this one.
        dynamic: a program stays and takes whichever tile of keys is left, if some are; else there is one for each.
        head_swizzle: key/value heads whose tiles of keys alternate.
        deferred_release: where order matters, a tile of dQ counts as added a step later, when it is there without a
            wait.
        k_in_registers, v_in_registers: K, V are read once, not by every wgmma of K·Qᵀ, of dP.
        dq_stored: each tile of queries has one tile of keys, and its dQ leaves as what it is, not onto a float32 sum.
        sum_bytes: of shared memory for the tiles of dS that are added up to a shared dBias.
        programs: that share a multiprocessor.
        loading_registers: of a thread of the loading warp.
        elements: batch elements of a program, which has so many times `warpgroups`, see batched; else 1.
        computing_registers: of a thread of an element.
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
        """Both warpgroups have the same keys, and each a half of the columns of every product."""
        return self.warpgroups * ROWS > self.block_n


def backward_width(problem: Problem) -> int:
    """The width of the backward's tiles of Q, K, V and dO."""
    return max(padded(problem.head_dim), padded(problem.value_dim))


def head_swizzle(problem: Problem, queries: int) -> int:
    """Of the backward, for so many queries. A band makes tiles of keys unlike: the longest of eight heads come first,
    so that the last to run are short; those of a window are alike, and faster one head after the other (2 % of 512 and
    2,048 of 16,384 keys, H200, D=128). Where order matters each program follows the one before it by a step or two, and
    of several heads several at once: of as many heads as have Q, dO and the float32 sum of dQ in the L2 cache
    together."""
    band, width = problem.score.band, backward_width(problem)
    least = 1 if band.unlimited or longest_first(problem) else 8
    if not problem.deterministic:
        return 1 if width == 128 and band.lo is not None and band.hi is not None else least
    return min(max(heads_in_cache(problem, queries), least), 32 if width <= 64 else 16)  # more are slower (H200)


def heads_in_cache(problem: Problem, queries: int) -> int:
    """Of how many key/value heads the L2 cache has room for Q, dO and the float32 sum of dQ together, a power of two;
    of one at least."""
    head = problem.group * queries * backward_width(problem) * (2 * problem.dtype.itemsize + 4)
    return 1 << max(1, L2_CACHE // head).bit_length() - 1


def scatters(problem: Problem) -> bool:
    """Whether neighbouring tiles may see tiles that have nothing to do with each other, as blocks do. Intervals of
    queries, as of windows and documents, say that they do not; a bool mask says nothing, and is taken for one of these.
    """
    return problem.tile_mask is not None and problem.tile_mask.kind == "bits"


def longest_first(problem: Problem) -> bool:
    """Whether work tiles beside a mask come the longest first: of the backward, where heads or batch elements share a
    matrix, and run side by side to read it once. Programs that see as much stay in step, and then Q, dO and dq_accum of
    the heads that run together come from the L2 cache for more than one of them, as they do in a call without a mask
    (H100, blocks at 25 % of 16,384 keys, D=128, 16 heads: 5.2 ms to 3.7). Not where order is fixed, nor where
    neighbours visit the same queries, and stay in step anyway (documents: 0.70 ms to 0.88); of blocks that happen to be
    such, their lists tell."""
    p, bias = problem, problem.bias
    if bias is None or bias.axes != "matrix" or not scatters(p) or p.deterministic or p.score.query is not None:
        return False
    return not p.broadcast_group(bias).single and (not p.bias_grad or dbias_sums(p) > 0)


def _dense_stores(problem: Problem) -> bool:
    """Whether dQ of a call that is no packed batch leaves as what it is where all keys are one tile.

    Not beside a mask, whose lists leave tiles of queries out and have the order of sums, nor beside what has loops or
    sums of its own: a bias by distance, and a tile bias that several heads or batch elements share.
    """
    bias, score = problem.bias, problem.score
    if problem.mask is not None or problem.parts is not None or score.query is not None or score.toeplitz is not None:
        return False
    return bias is None or problem.bias_itemsize == 0 or problem.broadcast_group(bias).single


def is_batched(problem: Problem) -> bool:
    """Whether a program of the backward has several batch elements, which share a bias that has a gradient: of heads of
    32, where there are enough of them for all programs (H200, H = 4, of the speed of one in a program: 1.14 to 1.43 for
    32 to 192 batch elements and 192 to 768 queries and keys, 1.03 to 1.14 for 128; 0.82 for 16 batch elements)."""
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
    """How many sums a dBias comes from where programs that share a bias add their tiles of dS as they come, in the
    bias's dtype and in any order; 0 where they do not.

    A 16-bit sum has no more than eight summands: it is then nearer to float64 than unfused torch, whose dS is rounded
    more often (at most 0.75 of its error; with sixteen 1.5). Two such sums take as much memory as a float32 one. Beside
    q of the other 16-bit dtype unfused torch has float32 scores, and rounds dBias once: so do the other ways."""
    bias = problem.bias
    if bias is None or problem.deterministic or problem.score.query is not None or bias.axes != "matrix":
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
    """The backward's tiles: registers hold S and dP of 64 queries, and dK and dV of 128 keys and 128 dimensions."""
    d, bias = backward_width(problem), problem.bias
    tile, along_keys = problem.bias_itemsize > 0, bias is not None and bias.axes == "cols"
    swizzle = head_swizzle(problem, problem.queries)
    later = problem.deterministic and problem.score.band.unlimited and swizzle > 1
    apart = tile and bias is not None and bias.dtype != problem.dtype
    shared = tile and bias is not None and not problem.broadcast_group(bias).single
    if d == 256:
        # dK and dV of 64 keys take half of the registers of both warpgroups. Shared memory holds K, V, two tiles of Q,
        # for the next K·Qᵀ, and two of dO; or one, which comes under dQ, dK and that product, and half of dQ, or a tile
        # for dS beside two of the bias, or one for a shared dBias beside dS.
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
    # Smaller programs that share a multiprocessor do not wait for each other, but read Q and dO, and add dQ, for half
    # the keys each: worth it with heads of 32, and of 64 where tiles do not come in subtiles (H200).
    capped = problem.score.transformed
    band, masked = problem.score.band, problem.mask is not None
    programs = 1
    # A float32 bias has tiles of twice the size, and dS one of its own beside them: fewer programs fit, and at 128
    # dimensions half the keys.
    wide = problem.bias_itemsize == 4
    words = bool(problem.score.dropout) and problem.score.toeplitz is not None  # of dropout, in loops of its own
    plain = band.lo is None and not (capped or masked or along_keys or words)  # subtiles fit
    # Of a packed batch of short sequences a larger tile is mostly empty, and there are as many as sequences and heads:
    # more programs side by side.
    short = problem.totals is not None and max(problem.queries, problem.keys) <= ROWS
    # Beside a shared bias too, but where dS is added onto a sum: that is what its two warps are too few for.
    group = problem.broadcast_group(bias) if tile and bias is not None else None
    onto_sum = group is not None and problem.bias_grad and MOST_PROGRAMS % (group.batch * group.kv_heads) != 0
    onto_sum = onto_sum and not dbias_sums(problem)
    halved = shared and (apart or onto_sum or not plain)
    if d == 32:
        small = band.unlimited and not (capped or wide or along_keys)
        programs = 3 if small else 2  # 136 registers, or 232
    elif d == 64 and not wide and (short or halved or not (tile or problem.deterministic or plain)):
        programs = 2  # where order matters, half the keys are twice as many waits
    block_n = ROWS if programs > 1 or (wide and d == 128) else 2 * ROWS
    # At 64 dimensions 128 queries between two meetings of the warpgroups, in subtiles: worth a tenth, with a bias tile
    # a quarter; a softcap or a bias of the keys would spill (H200).
    # A Toeplitz bias, in loops of its own, needs what registers the next K·Qᵀ would have, and but for subtiles K.
    far = problem.score.toeplitz
    diagonals = problem.parts is not None and far is not None and ("toeplitz" in problem.parts.grads or far.linear)
    tall = d == 64 and programs == 1 and not (wide or capped or masked or along_keys or words)
    # What wgmma reads of shared memory is the next limit there: K, or K and V, into registers, where there are some
    # left, are worth 4 to 10 %. So is the next K·Qᵀ; but a bias tile, which must come first, makes it slower (H200).
    d64 = d == 64 and not tile
    ahead = d64 and not diagonals and (programs == 1 or not along_keys)
    single = problem.keys <= block_n and (problem.totals is not None or _dense_stores(problem))
    # At 128 dimensions there is room for two tiles of K, but for one of V. Worth most where work tiles are short.
    few_steps = problem.totals is not None or (band.lo is not None and band.hi is not None)
    keys_ahead = d == 128 and block_n == 2 * ROWS and few_steps and not (tile or along_keys or masked or single)
    # 8192 elements that are added up at a time, or half of them where the tiles leave no room for more.
    crowded = masked and (apart or capped) and d == 128 and not wide
    return BackwardConfig(
        block_m=2 * ROWS if tall else ROWS, block_n=block_n, warpgroups=block_n // ROWS, stages=2, do_stages=2,
        dq_parts=1, dq_by_tma=problem.deterministic or d != 32,  # from registers it leaves faster there (H200)
        ahead=ahead, programs=programs,
        sum_bytes=8192 * (4 if wide else 2) // (2 if crowded else 1), m_subtiles=2 if tall else 1,
        # Worth 3 % at 128 and at 64 in subtiles; beside a bias tile it would spill there (H200).
        peeled=not masked and (d != 64 or (tall and not (tile or band.unlimited))),
        k_in_registers=(d64 and (tall or not diagonals)) or (d == 32 and bias is None and not masked),
        v_in_registers=d64 and not tall and not diagonals and (programs == 2 or not along_keys),
        key_stages=2 if keys_ahead or not (d == 128 or tile) else 1, value_stages=1 if d == 128 or tile else 2,
        dq_stored=single and d != 32,
        dynamic=not ((d == 128 and along_keys) or (d == 64 and tile and not band.unlimited)),  # these would spill
        head_swizzle=swizzle, deferred_release=later,
    )  # fmt: skip
