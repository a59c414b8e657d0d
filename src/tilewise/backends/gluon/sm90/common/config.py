"""Tables of the tile sizes, warpgroups, pipeline stages and flags of the Hopper kernels.

`FORWARD_TILES` and `BACKWARD_TILES` choose the tiles of a program: the first row that matches wins. `FORWARD_FIELDS`
and `BACKWARD_FIELDS` set other fields of a configuration: of the rows that match and set a field the first one wins,
and a field without such a row has its default. A row's source is the section of docs/notebook with its measurement, or
else the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

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
BACKWARD_WIDTHS = (32, 64, 128, 256)  # of tiles, see `backward_width`
WIDTHS = (*BACKWARD_WIDTHS, 192)  # and of the forward's in three panels
PANEL = 64  # columns of a panel: 128 bytes, one swizzle
NO_SECTION = "not in the notebook"

Tiles = TypeVar("Tiles")


def most_registers(programs: int, warpgroups: int) -> dict[str, int]:
    """Return Triton's register option for ``programs`` of ``warpgroups`` per multiprocessor; none if one large program
    has all.

    A small single program needs the option: Triton would ask for 256 registers per thread, and 255 are the most.
    """
    most = 65536 // (programs * warpgroups * 128) // 8 * 8
    return {} if programs == 1 and most < 255 else {"maxnreg": min(most, 248)}


def padded(n: int) -> int:
    """Return the next power of two, at least 32: the width of a tile, which TMA pads with zeros."""
    return max(32, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class Traits:
    """A problem and those of its properties that many rules ask for.

    Attributes:
        problem: the problem, for other properties.
        width: columns of the tiles, see `backward_width`.
        bias_bytes: bytes per element of the bias tile; 0 without one. A bias along the keys or the queries has no tile.
        has_key_bias: the bias varies along the keys alone.
        has_mask: a mask hides keys.
        has_window: a causal or local window hides keys.
        is_capped: scores have a softcap.
    """

    problem: Problem
    width: int
    bias_bytes: int
    has_key_bias: bool
    has_mask: bool
    has_window: bool
    is_capped: bool

    @classmethod
    def of(cls, problem: Problem) -> Traits:
        bias, score = problem.bias, problem.score
        return cls(
            problem, backward_width(problem), problem.bias_itemsize, bias is not None and bias.axes == BiasKind.COLS,
            problem.mask is not None, not score.band.unlimited, score.transformed,
        )  # fmt: skip


class TileRule(NamedTuple, Generic[Tiles]):
    """A row of a table of tiles.

    Attributes:
        widths: widths of tiles to which it applies.
        when: condition on the problem.
        source: section of docs/notebook, or the reason.
        tiles: the choice.
    """

    widths: tuple[int, ...]
    when: Callable[[Traits], bool]
    source: str
    tiles: Tiles


class FieldRule(NamedTuple, Generic[Tiles]):
    """A row of a table of fields: like `TileRule`, but ``when`` has the chosen tiles too, and ``fields`` are set."""

    widths: tuple[int, ...]
    when: Callable[[Traits, Tiles], bool]
    source: str
    fields: dict[str, Any]


def _always(*_: object) -> bool:
    return True


def _first_tiles(rules: tuple[TileRule[Tiles], ...], x: Traits) -> Tiles:
    """Return the tiles of the first rule that matches."""
    return next(rule.tiles for rule in rules if x.width in rule.widths and rule.when(x))


def _first_fields(rules: tuple[FieldRule[Tiles], ...], x: Traits, tiles: Tiles) -> dict[str, Any]:
    """Return the fields that matching rules set; the first rule that sets a field wins."""
    found: dict[str, Any] = {}
    for rule in rules:
        if x.width in rule.widths and rule.when(x, tiles):
            found = rule.fields | found
    return found


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
    q_in_registers: bool
    registers: tuple[int, int]
    programs: int = 1
    stages: int = 2
    bias_stages: int = 0
    bias_first: bool = False
    lazy: bool = False
    dynamic: bool = False
    o_in_q: bool = False
    scale_in_q: bool = False
    sums_by_thread: bool = False
    peeled: bool = False
    skips_hidden: bool = False
    o_in_bias: bool = False
    words_last: bool = False

    @property
    def block_m(self) -> int:
        return self.warpgroups * ROWS


def _scales_exactly(problem: Problem) -> bool:
    """True if multiplying queries by the scale does not round: the scale is a power of two, within the exponent range.
    bfloat16 has that range for elements down to 2^-110; smaller ones may lose 2^-134 each, as if rounded to bfloat16
    after scaling, which changes a score only with keys past 2^100."""
    scale = problem.score.scale
    return problem.dtype == torch.bfloat16 and 2**-16 <= scale <= 1 and math.frexp(scale)[0] == 0.5


def sees_few(queries: int, keys: int, lo: int | None, hi: int | None) -> bool:
    """True if queries see few keys: tiles of 192 queries that the window cuts waste more than those of 128.

    lo, hi: limits of the window. Source: docs/notebook/hopper-forward.md#warpgroups-and-registers.
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
    """True if `small_heads_kernel` runs, which loads K, V and the bias of a key tile together.

    Source: docs/notebook/hopper-forward.md#pair-bias.
    """
    p, score = problem, problem.score
    if (p.mask is not None and not hides_keys(p)) or p.parts is not None or p.totals is not None or p.sink is not None:
        return False
    if score.query is not None or score.toeplitz is not None or score.transformed or score.dropout:
        return False
    if any(score.statistics):  # of scores that it does not compare
        return False
    return backward_width(p) == 32 and p.bias_itemsize == 2 and score.band.unlimited


class ForwardTiles(NamedTuple):
    """Tiles of a forward program, and other fields of `ForwardConfig` that depend on the same conditions."""

    block_n: int
    warpgroups: int
    q_in_registers: bool = True
    q_stages: int = 1
    registers: tuple[int, int] = (240, 24)
    programs: int = 1


def _runs_small_programs(x: Traits) -> bool:
    """True if small programs share a multiprocessor: one computes while the other waits for its bias."""
    return x.bias_bytes > 0 and not x.is_capped and (not x.has_mask or has_small_heads(x.problem))


def _runs_three_warpgroups(x: Traits) -> bool:
    """True if a third warpgroup shares key tiles with two others: 160 registers per thread are enough."""
    has_few_terms = not (x.bias_bytes or x.has_mask or x.is_capped or x.problem.score.dropout)
    # With the entropy, causal and D=64: 1.21 times the time without it; two take 1.11 (H200).
    takes_more = x.problem.score.statistics.entropy or sees_few(*band_of(x.problem))
    return has_few_terms and not (x.has_window and takes_more)


def _keeps_maximum(x: Traits, tiles: ForwardTiles) -> bool:
    """True if there are registers for a maximum that rescaling may ignore, beside the entropy's sum. Without them, at
    D=64, both take 1.19 times the time of neither, and rescaling each time 1.13 (H200)."""
    statistics = x.problem.score.statistics
    return not (statistics.max_scores and statistics.entropy) or tiles.warpgroups == 2


def _masks_queries(x: Traits) -> bool:
    """True if a mask differs between queries, and there is no bias tile."""
    return not x.bias_bytes and x.problem.mask is not None and x.problem.mask.rows > 1


def _caps_bias(x: Traits) -> bool:
    """True if there are a softcap and a bias, which take more registers together."""
    return x.is_capped and (x.bias_bytes > 0 or x.has_key_bias)


# 240 registers hold S and P of 128 keys and O of 128 dimensions, or 64 keys and 256 dimensions. With a mask of keys
# alone Q in registers gains 3 % at D=64 (H200).
FORWARD_TILES: tuple[TileRule[ForwardTiles], ...] = (
    TileRule((32,), _runs_small_programs, "hopper-forward.md#pair-bias",
             ForwardTiles(block_n=64, warpgroups=2, q_in_registers=False, q_stages=2, registers=(104, 32), programs=2)),
    TileRule((32, 64), _runs_three_warpgroups, "hopper-forward.md#warpgroups-and-registers",
             ForwardTiles(block_n=128, warpgroups=3, q_in_registers=False, q_stages=2, registers=(160, 32))),
    TileRule((64,), _masks_queries, "hopper-forward.md#warpgroups-and-registers",
             ForwardTiles(block_n=128, warpgroups=2, q_in_registers=False, q_stages=2)),
    TileRule((128,), lambda x: x.bias_bytes == 4, "shared memory", ForwardTiles(block_n=64, warpgroups=2)),
    TileRule((128,), _caps_bias, "registers", ForwardTiles(block_n=64, warpgroups=2)),
    TileRule((32, 64, 128), _always, "hopper-forward.md#warpgroups-and-registers",
             ForwardTiles(block_n=128, warpgroups=2)),
    TileRule((192,), lambda x: not x.bias_bytes and not _caps_bias(x), "shared memory",
             ForwardTiles(block_n=128, warpgroups=2, q_in_registers=False)),
    TileRule((192, 256), _always, "registers", ForwardTiles(block_n=64, warpgroups=2, q_in_registers=False)),
)  # fmt: skip


def _scales_q(x: Traits, tiles: ForwardTiles) -> bool:
    """True if Q is scaled when it is read into registers, which saves the multiplication of a bias tile."""
    return tiles.q_in_registers and x.bias_bytes > 0 and not x.is_capped and _scales_exactly(x.problem)


def _ends_below(x: Traits) -> bool:
    """True if a bias by relative position ends: most tiles of long rows have no entry."""
    return ends(x.problem).lo


def _has_plain_tiles(x: Traits, tiles: ForwardTiles) -> bool:
    """True if all tiles, or most tiles of long rows, have neither a bias nor a mask."""
    return not (x.bias_bytes or x.has_mask) or (_ends_below(x) and tiles.programs == 1)


def _has_unknown_key_tiles(x: Traits, tiles: ForwardTiles) -> bool:
    """True if lengths or norms on the device decide how many key tiles a query tile visits."""
    return toeplitz_constants(x.problem, 2 * tiles.block_n)["UNDERFLOWS"] or x.problem.totals is not None


def _has_causal_edge(x: Traits) -> bool:
    """True if the window is limited on the right alone, and there is no mask."""
    band = x.problem.score.band
    return band.hi is not None and band.lo is None and not x.has_mask


def _fills_shared_memory(x: Traits) -> bool:
    """True if Q, K, V and the bias leave no shared memory for O."""
    return x.width in (192, 256) or (x.width == 128 and x.bias_bytes > 0)


def _stores_o_in_bias(x: Traits, tiles: ForwardTiles) -> bool:
    """True if O is as large as a stage of the pipeline of a bias by relative position."""
    p = x.problem
    is_relative = p.score.query is not None and p.bias is not None and p.bias.dtype == p.dtype
    return _fills_shared_memory(x) and is_relative and tiles.block_n == padded(p.value_dim)


def _stores_o_in_q(x: Traits, tiles: ForwardTiles) -> bool:
    """True if O is as large as Q, and the bias pipeline is not used for it."""
    is_as_large = x.width == 192 or padded(x.problem.head_dim) == padded(x.problem.value_dim)
    return _fills_shared_memory(x) and is_as_large and not _stores_o_in_bias(x, tiles)


FORWARD_FIELDS: tuple[FieldRule[ForwardTiles], ...] = (
    FieldRule((64,), lambda x, t: x.has_window and not x.bias_bytes and t.warpgroups == 2, NO_SECTION, {"stages": 3}),
    FieldRule((256,), lambda x, _: x.bias_bytes == 4, "shared memory", {"bias_stages": 1}),
    FieldRule(WIDTHS, lambda x, _: x.bias_bytes > 0, "hopper-forward.md#warpgroups-and-registers", {"bias_stages": 2}),
    FieldRule(WIDTHS, lambda x, _: (x.bias_bytes > 0 or x.has_key_bias) and not x.is_capped, "hopper-forward.md#bias",
              {"bias_first": True}),
    FieldRule(WIDTHS, _scales_q, "hopper-forward.md#softmax-and-o", {"scale_in_q": True}),
    # Rescaling costs more than the branch, except beside a bias at 128 dimensions, or in small programs.
    FieldRule((32, 64), lambda x, t: t.programs == 1 and _keeps_maximum(x, t), "hopper-forward.md#softmax-and-o",
              {"lazy": True}),
    FieldRule((128, 192, 256), lambda x, _: not x.bias_bytes or _ends_below(x), "hopper-forward.md#softmax-and-o",
              {"lazy": True}),
    FieldRule((64,), lambda x, _: _masks_queries(x), NO_SECTION, {"sums_by_thread": True}),
    FieldRule((32, 64, 256), _has_plain_tiles, "hopper-forward.md#softmax-and-o", {"sums_by_thread": True}),
    FieldRule((128, 192), lambda x, t: x.has_window and _has_plain_tiles(x, t), "hopper-forward.md#softmax-and-o",
              {"sums_by_thread": True}),
    FieldRule(WIDTHS, lambda x, t: x.has_window or (x.has_mask and t.programs == 1), "hopper-forward.md#scheduling",
              {"dynamic": True}),
    FieldRule(WIDTHS, _has_unknown_key_tiles, "the host does not know the number of key tiles", {"dynamic": True}),
    FieldRule(WIDTHS, lambda x, _: _has_causal_edge(x), "hopper-forward.md#causal-and-local-windows", {"peeled": True}),
    FieldRule(WIDTHS, lambda x, t: _has_causal_edge(x) and t.warpgroups * ROWS > t.block_n,
              "hopper-forward.md#causal-and-local-windows", {"skips_hidden": True}),
    FieldRule(WIDTHS, _stores_o_in_bias, "shared memory", {"o_in_bias": True}),
    FieldRule(WIDTHS, _stores_o_in_q, "shared memory", {"o_in_q": True}),
    FieldRule((128, 192), _always, "hopper-forward.md#dropout", {"words_last": True}),
)  # fmt: skip


def panels(problem: Problem) -> int:
    """Return the number of tiles, side by side, that Q and K of the forward come in.

    Three of `PANEL` columns for heads of 129 to 192 dimensions with values of up to 128 (DeepSeek's MLA), which would
    be padded to 256.
    """
    return 3 if 128 < problem.head_dim <= 3 * PANEL and padded(problem.value_dim) <= 128 else 1


def forward_config(problem: Problem) -> ForwardConfig:
    """Return the forward's configuration."""
    x = Traits.of(problem)
    if panels(problem) > 1:
        x = replace(x, width=192)
    tiles = _first_tiles(FORWARD_TILES, x)
    return ForwardConfig(**tiles._asdict(), **_first_fields(FORWARD_FIELDS, x, tiles))


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
    sum_bytes: int
    programs: int = 1
    stages: int = 2
    do_stages: int = 2
    dq_parts: int = 1
    dq_by_tma: bool = False
    ahead: bool = False
    loading_registers: int = 24
    m_subtiles: int = 1
    peeled: bool = False
    key_stages: int = 1
    value_stages: int = 1
    dynamic: bool = True
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


def value_width(problem: Problem) -> int:
    """Return the width of the backward's tiles of V and dO: that of Q and K, but at 256 that of the values, at least
    128."""
    width = backward_width(problem)
    return max(128, padded(problem.value_dim)) if width == 256 else width


def depth(dims: int, width: int) -> int:
    """Return how many columns of tiles of ``width`` a product over ``dims`` dimensions reads.

    Tiles of 128 and more are read in steps of 16 columns, the depth of a wgmma. Smaller ones may be in registers.
    """
    return width if width < 128 else -(-dims // 16) * 16


def columns_of_dq(problem: Problem, config: BackwardConfig) -> int:
    """Return the columns of the backward's dQ, or of its second part: a power of two, at least 32."""
    share = backward_width(problem) // config.dq_parts
    if config.dq_stored or share < 128:
        return share
    return min(share, padded(max(1, problem.head_dim - (config.dq_parts - 1) * share)))


def head_swizzle(problem: Problem, queries: int) -> int:
    """Return the backward's head swizzle for ``queries`` queries: key/value heads whose key tiles alternate.

    With a causal window key tiles differ in length: the longest of eight heads run first, so that short ones run last.
    Tiles of a local window are equally long, and one head after the other is faster (2 % at windows of 512 and 2,048 of
    16,384 keys, H200, D=128). With a fixed order each program follows the previous one by a step or two, so that
    several heads run at once: as many as have Q, dO and the float32 dQ sum in the L2 cache. Sources:
    docs/notebook/hopper-backward.md#scheduling and #deterministictrue.
    """
    band, width = problem.score.band, backward_width(problem)
    least = 1 if band.unlimited or longest_first(problem) else 8
    if not problem.deterministic:
        return 1 if width == 128 and band.lo is not None and band.hi is not None else least
    return min(max(heads_in_cache(problem, queries), least), 32 if width <= 64 else 16)  # more are slower


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
    and dq_accum of the heads that run together to more than one of them, as without a mask. False with a fixed order,
    and where neighbours visit the same queries and stay in step anyway, as with documents; for block masks of this kind
    `longest_first_kernel` detects it. Source: docs/notebook/hopper-forward.md#masks-by-tiles.
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
    """True if a backward program computes several batch elements, which share a bias that has a gradient.

    For heads of 32, with enough batch elements for all programs. Source:
    docs/notebook/hopper-backward.md#the-pair-bias. The gain is 1.03 to 1.14 with 128 queries and keys, and 1.14 to 1.43
    with 192 to 768 (H200, H = 4, 32 to 192 batch elements).
    """
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
    shared = bias.batch == 1 or p.bias_in_runs
    return rows and score.band.unlimited and shared and enough and long


def dbias_sums(problem: Problem) -> int:
    """Return the number of sums of dBias if programs that share a bias add dS tiles in its dtype, in any order; else 0.

    A 16-bit sum has at most eight summands: it is then nearer to float64 than unfused torch, which rounds dS more
    often. Two such sums take as much memory as a float32 one. If q has the other 16-bit dtype, unfused torch has
    float32 scores and rounds dBias once; so do the other methods.

    Source: docs/notebook/hopper-backward.md#a-shared-dbias.
    """
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


class BackwardTiles(NamedTuple):
    """Tiles of a backward program, fields of `BackwardConfig`."""

    block_n: int
    warpgroups: int
    block_m: int = ROWS
    m_subtiles: int = 1
    programs: int = 1
    elements: int = 1


def _casts_ds(x: Traits) -> bool:
    """True if the bias tile has another dtype than Q: dS has a tile of its own."""
    bias = x.problem.bias
    return x.bias_bytes > 0 and bias is not None and bias.dtype != x.problem.dtype


def _shares_bias(x: Traits) -> bool:
    """True if batch elements or heads share the bias tile."""
    bias = x.problem.bias
    return x.bias_bytes > 0 and bias is not None and not x.problem.broadcast_group(bias).single


def _adds_to_float32(x: Traits) -> bool:
    """True if groups of programs add dBias to a float32 sum, for which two warps per multiprocessor are too few."""
    p = x.problem
    if not x.bias_bytes or p.bias is None or not p.bias_grad or dbias_sums(p):
        return False
    group = p.broadcast_group(p.bias)
    return MOST_PROGRAMS % (group.batch * group.kv_heads) != 0


def _fits_subtiles(x: Traits) -> bool:
    """True if registers hold two subtiles of queries; dropout beside a Toeplitz bias has loops of its own."""
    drops = x.problem.score.dropout > 0 and x.problem.score.toeplitz is not None
    return not (x.is_capped or x.has_mask or x.has_key_bias or drops)


def _prefers_subtiles(x: Traits) -> bool:
    """True if subtiles fit, and the window has no left limit."""
    return _fits_subtiles(x) and x.problem.score.band.lo is None


def _has_short_sequences(x: Traits) -> bool:
    """True if a packed batch has as many tiles as sequences and heads: larger tiles would be mostly empty."""
    return x.problem.totals is not None and max(x.problem.queries, x.problem.keys) <= ROWS


def _halves_shared_bias(x: Traits) -> bool:
    """True if programs that share a bias have half the keys."""
    return _shares_bias(x) and (_casts_ds(x) or _adds_to_float32(x) or not _prefers_subtiles(x))


def _halves_keys(x: Traits) -> bool:
    """True if programs without a bias tile have half the keys, which would double the waits of a fixed order."""
    return not (x.bias_bytes or x.problem.deterministic or _prefers_subtiles(x))


# Registers hold S and dP of 64 queries, dK and dV of 128 keys and 128 dimensions; past these, dK and dV of 64 keys take
# half of the registers of both warpgroups. Smaller programs that share a multiprocessor do not wait for each other, but
# each reads Q and dO, and adds dQ, for half the keys.
BACKWARD_TILES: tuple[TileRule[BackwardTiles], ...] = (
    TileRule((32,), lambda x: is_batched(x.problem), "hopper-backward.md#the-pair-bias",
             BackwardTiles(block_n=64, warpgroups=1, elements=ELEMENTS)),
    TileRule((32,), lambda x: not (x.has_window or x.is_capped or x.bias_bytes == 4 or x.has_key_bias),
             "hopper-backward.md#the-first-versions", BackwardTiles(block_n=64, warpgroups=1, programs=3)),
    TileRule((32,), _always, "232 registers, not 136", BackwardTiles(block_n=64, warpgroups=1, programs=2)),
    TileRule((64,), lambda x: x.bias_bytes == 4, "hopper-backward.md#the-first-versions",
             BackwardTiles(block_n=128, warpgroups=2)),
    TileRule((64,), _has_short_sequences, "hopper-backward.md#packed-batches",
             BackwardTiles(block_n=64, warpgroups=1, programs=2)),
    TileRule((64,), _halves_shared_bias, "hopper-backward.md#a-shared-dbias",
             BackwardTiles(block_n=64, warpgroups=1, programs=2)),
    TileRule((64,), _halves_keys, "hopper-backward.md#m-subtiles",
             BackwardTiles(block_n=64, warpgroups=1, programs=2)),
    TileRule((64,), _fits_subtiles, "hopper-backward.md#m-subtiles",
             BackwardTiles(block_n=128, warpgroups=2, block_m=128, m_subtiles=2)),
    TileRule((64,), _always, NO_SECTION, BackwardTiles(block_n=128, warpgroups=2)),
    TileRule((128,), lambda x: x.bias_bytes == 4, "hopper-backward.md#the-first-versions",
             BackwardTiles(block_n=64, warpgroups=1)),
    TileRule((128,), _always, "registers", BackwardTiles(block_n=128, warpgroups=2)),
    TileRule((256,), _always, "hopper-backward.md#heads-of-256", BackwardTiles(block_n=64, warpgroups=2)),
)  # fmt: skip


def _has_one_do_tile(x: Traits) -> bool:
    """True if shared memory holds one tile of dO at 256 dimensions.

    It holds K, V, two tiles of Q, for the next K·Qᵀ, and two of dO. Or one of dO, loaded during dQ, dK and that
    product, and half of dQ; or a dS tile beside two of the bias; or one for a shared dBias beside dS.
    """
    return x.problem.deterministic or _casts_ds(x) or (_shares_bias(x) and x.is_capped)


def _sums_diagonals(x: Traits) -> bool:
    """True if a Toeplitz bias needs the registers of the next K·Qᵀ, and without subtiles those of K."""
    parts, far = x.problem.parts, x.problem.score.toeplitz
    return parts is not None and far is not None and ("toeplitz" in parts.grads or far.linear)


def _issues_ahead(x: Traits, tiles: BackwardTiles) -> bool:
    """True if registers hold the next K·Qᵀ. With a bias tile, which must come first, it is slower."""
    return not (x.bias_bytes or _sums_diagonals(x) or (x.has_key_bias and tiles.programs > 1))


def _holds_k(x: Traits, tiles: BackwardTiles) -> bool:
    """True if registers hold K: shared-memory reads of wgmma are the limit, and 4 to 10 % are gained (H200)."""
    return not x.bias_bytes and (tiles.m_subtiles > 1 or not _sums_diagonals(x))


def _holds_v(x: Traits, tiles: BackwardTiles) -> bool:
    """True if registers hold V beside K."""
    has_registers = tiles.m_subtiles == 1 and (tiles.programs > 1 or not x.has_key_bias)
    return has_registers and not x.bias_bytes and not _sums_diagonals(x)


def _has_one_key_tile(x: Traits, tiles: BackwardTiles) -> bool:
    """True if each query tile has one key tile, and its dQ is stored."""
    p = x.problem
    return p.keys <= tiles.block_n and (p.totals is not None or _dense_stores(p))


def _loads_k_ahead(x: Traits, tiles: BackwardTiles) -> bool:
    """True if work tiles are short, and shared memory holds two tiles of K and one of V."""
    band = x.problem.score.band
    is_short = x.problem.totals is not None or (band.lo is not None and band.hi is not None)
    return is_short and not (x.bias_bytes or x.has_key_bias or x.has_mask or _has_one_key_tile(x, tiles))


BACKWARD_FIELDS: tuple[FieldRule[BackwardTiles], ...] = (
    FieldRule((32,), lambda _, t: t.elements > 1, "hopper-backward.md#the-pair-bias",
              {"stages": 3, "do_stages": 3, "key_stages": 2, "value_stages": 2, "peeled": False,
               "loading_registers": 72, "computing_registers": 144}),
    FieldRule((256,), lambda x, _: _has_one_do_tile(x), "shared memory", {"do_stages": 1}),
    FieldRule((256,), _always, "hopper-backward.md#heads-of-256", {"dq_parts": 2, "ahead": True}),
    FieldRule((64,), _issues_ahead, "hopper-backward.md#m-subtiles", {"ahead": True}),
    FieldRule((32, 64), lambda x, _: not x.bias_bytes, "hopper-backward.md#persistent-ctas",
              {"key_stages": 2, "value_stages": 2}),
    FieldRule((128,), _loads_k_ahead, "hopper-backward.md#packed-batches", {"key_stages": 2}),
    FieldRule(WIDTHS, lambda x, _: x.problem.deterministic, "additions from registers have no order",
              {"dq_by_tma": True}),
    FieldRule((64, 128), _always, "hopper-backward.md#dqs-way-out", {"dq_by_tma": True}),
    FieldRule((64, 128), _has_one_key_tile, "hopper-backward.md#packed-batches", {"dq_stored": True}),
    FieldRule((32,), lambda x, _: x.problem.bias is None and not x.has_mask, "hopper-backward.md#m-subtiles",
              {"k_in_registers": True}),
    FieldRule((64,), _holds_k, "hopper-backward.md#m-subtiles", {"k_in_registers": True}),
    FieldRule((64,), _holds_v, "hopper-backward.md#m-subtiles", {"v_in_registers": True}),
    # At 64 dimensions separate loops are 3 % faster in subtiles; with a bias tile they would spill (H200).
    FieldRule((64,), lambda x, t: t.m_subtiles > 1 and x.has_window and not x.bias_bytes,
              "hopper-backward.md#m-subtiles", {"peeled": True}),
    FieldRule((32, 128), lambda x, _: not x.has_mask, "hopper-backward.md#m-subtiles", {"peeled": True}),
    FieldRule((128, 256), lambda x, _: x.has_key_bias, "hopper-backward.md#persistent-ctas", {"dynamic": False}),
    FieldRule((64,), lambda x, _: x.has_window and x.bias_bytes > 0, "hopper-backward.md#persistent-ctas",
              {"dynamic": False}),
    FieldRule((256,), lambda x, _: x.is_capped and x.bias_bytes > 0, "registers", {"dynamic": False}),
)  # fmt: skip


def _sum_bytes(x: Traits, tiles: BackwardTiles) -> int:
    """Return `BackwardConfig.sum_bytes`, for 8192 elements, or half where tiles leave no more shared memory."""
    if tiles.elements > 1:
        return 0
    crowded = x.width == 128 and x.bias_bytes != 4 and x.has_mask and (_casts_ds(x) or x.is_capped)
    return (4 if x.bias_bytes == 4 else 2) * (4096 if crowded or x.width == 256 else 8192)


def backward_config(problem: Problem) -> BackwardConfig:
    """Return the backward's configuration."""
    x = Traits.of(problem)
    tiles, swizzle = _first_tiles(BACKWARD_TILES, x), head_swizzle(problem, problem.queries)
    return BackwardConfig(
        **tiles._asdict(),
        **_first_fields(BACKWARD_FIELDS, x, tiles),
        sum_bytes=_sum_bytes(x, tiles),
        head_swizzle=swizzle,
        deferred_release=problem.deterministic and not x.has_window and swizzle > 1,
    )
