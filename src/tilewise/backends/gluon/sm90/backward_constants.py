"""What the backward kernel knows when it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple


class BackwardConstants(NamedTuple):
    """What the kernel knows when it is compiled; every field is a gl.constexpr. See config.BackwardConfig for most."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    M_SUBTILES: Any
    SUBTILE_M: Any  # queries of a subtile
    STAGES: Any
    DO_STAGES: Any
    PEELED: Any
    DQ_PARTS: Any
    DQ_BY_TMA: Any
    DQ_STORED: Any
    AHEAD: Any
    K_IN_REGISTERS: Any
    V_IN_REGISTERS: Any
    WARPS: Any  # that compute
    LANES: Any  # batch elements of a program, see backward_lanes; else 1
    SHARES_KEYS: Any  # both warpgroups have the same keys
    LOADING_REGISTERS: Any
    COMPUTING_REGISTERS: Any  # of lanes
    BIAS: Any  # "matrix", "cols" where it is full along the keys only, or "none", also where it is full along neither
    BIAS_APART: Any  # dS has a tile of its own: the bias, and dBias in its place, are of another dtype
    BIAS_BATCH: Any  # a bias for each batch element, or one for all
    BIAS_GROUP: Any  # query heads that share a bias
    RELATIVE: Any  # it is a bias by distance, see `range_tiles`
    RANGE_LO: Any  # some visible pairs lie below the distances with an entry
    RANGE_HI: Any  # or above
    SORTED: Any  # tiles below the range, those that its end cuts, and those inside have a loop each
    TOEPLITZ: Any  # as of the forward, see toeplitz_gradient
    TOEPLITZ_BATCH: Any
    TOEPLITZ_GROUP: Any
    FAR_LO: Any
    FAR_HI: Any
    VANISHES: Any
    DTOEPLITZ: Any  # its gradient is wanted
    DBIAS_SUMS: Any  # to which tiles of dS are added with "accumulate", see config.dbias_sums
    ZEROES_DBIAS: Any  # programs do, for groups to come
    GROUP_BROADCASTS: Any  # those of one program do
    DBIAS: Any  # "none"; of a matrix "store", "accumulate", "reduce" or "lanes"; of cols "sum"; by distance "add"
    MASK: Any  # there is a bool mask: `mask_kernels` has read it
    HIDES_KEYS: Any  # of lanes, in the place of MASK: it is the same for all queries, see `key_mask`
    MASK_BATCH: Any  # as of the bias
    MASK_GROUP: Any
    LONGEST_FIRST: Any  # work tiles come in the order that `mask_kernels.longest_first_kernel` finds
    MASK_ROWS: Any  # the mask differs between queries
    GROUP_PROGRAMS: Any  # programs that share a bias and run side by side
    SUM_BYTES: Any  # of shared memory, for what is added up
    ADDS: Any  # more of them share a bias
    ORDERED: Any  # what is summed by reduce-adds is summed in a fixed order
    DEFERRED_RELEASE: Any  # what has been added counts a step later
    RAGGED: Any  # the last tile of keys reaches past their end
    HIDES_END: Any  # what is past it has to be hidden: a band that ends with the last key does so anyway
    HIDES: Any  # some pair may be hidden, so that a key or value that is not finite may have to stay out
    HEAD_SWIZZLE: Any  # see backward_scheduler.head_and_tile
    KEY_STAGES: Any
    VALUE_STAGES: Any  # fewer than KEY_STAGES: dV leaves through dQ's shared memory, see `producers`
    DYNAMIC: Any  # a program stays, and takes the next work tile that is left; else it has one
    # Of a packed batch: which sums of dQ are zeroed before counts in work tiles, not in heads, see `zero_ahead`.
    ZEROED_BY_TILE: Any
    PACKED: Any  # a packed batch: work tiles are listed, see packed
