"""Choice of the kernel of a softmax and of its tiles, with the reasons for the numbers.

Measured on an H200 with Triton 3.6 (docs/notebook/softmax.md). A program's elements stay in registers, 4 bytes each. A
multiprocessor needs several programs, so that one loads while another computes or stores. Rows of up to 16384 elements
fit. A longer row is shared by programs of 4096 elements: the smaller a program, the sooner another takes its place
while the row's other programs are awaited. The loads in flight while a program waits decide the speed, so 16-bit
elements stay 16 bits wide and threads get few registers: `PACKED`.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 16384  # elements per program
SHARED_TILE = 4096  # elements of a program that shares its row with others
SMALL_TILE = 1024  # least elements per program for short rows
LOOP_TILE = 4096  # elements of a tile of the kernels that loop over rows

# 16-bit rows without bias and mask, by (backward, length): elements of a program, warps, registers per thread.
PACKED = {
    (False, 32768): (32768, 16, 64),
    (False, 65536): (4096, 1, 128),
    (False, 131072): (16384, 4, 128),
    (True, 16384): (8192, 8, 56),
    (True, 131072): (2048, 2, 48),
}


@dataclass(frozen=True)
class SoftmaxConfig:
    """Tile of ``rows`` by ``block`` elements, with ``parts`` programs per row.

    on_chip: each element is read once; otherwise rows are read twice, ``span`` columns by each program.
    pack: 16-bit elements stay 16 bits wide while their row's statistics are computed.
    registers: limit per thread of a packed tile, so that more programs fit; None: the compiler's choice.
    """

    on_chip: bool
    rows: int
    block: int
    parts: int
    span: int
    num_warps: int
    pack: bool = False
    registers: int | None = None


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def softmax_config(
    rows: int,
    neighbours: int,
    length: int,
    across: bool,
    itemsize: int,
    backward: bool,
    processors: int,
    plain: bool = True,
) -> SoftmaxConfig:
    """Return the kernel and tiles of a softmax.

    Args:
        rows: number of all rows.
        neighbours: rows along the last axis, some of which form a tile.
        length: elements per row.
        across: neighbours in a column are closer in memory than in a row: a tile needs enough rows to read whole
            sectors.
        itemsize: bytes of an element of x.
        processors: multiprocessors of the device; 0 if programs do not run concurrently (Triton's interpreter).
        plain: there is neither a bias nor a mask.
    """
    block = power_of_two(length)
    together = min(32, power_of_two(neighbours)) if across else 1

    def run_together(parts: int) -> bool:
        """True if programs that wait for each other run concurrently, whatever else the device does. Half of them fit
        if each has a multiprocessor of its own; they start in the order of their numbers."""
        return together == 1 and (parts == 1 or 2 * parts <= processors <= rows * parts)

    if plain and itemsize == 2 and (backward, block) in PACKED:
        part, warps, registers = PACKED[backward, block]
        parts = block // part
        if run_together(parts):
            return SoftmaxConfig(True, 1, part, parts, part, warps, True, registers)
    if block * together <= TILE:
        together = max(together, min(SMALL_TILE // block, power_of_two(neighbours), 128))
        return _tile(together, block, 1, itemsize, backward)
    # Only here smaller programs were faster: 4.07 TB/s against 3.99 with rows of 128k.
    shared = SHARED_TILE // 2 if itemsize == 4 and not backward and length > 65536 else SHARED_TILE
    for part in (shared, SHARED_TILE):
        parts = block // part
        if run_together(parts):
            return _tile(1, part, parts, itemsize, backward)
    block = min(block, max(LOOP_TILE // together, 16))
    splits = power_of_two(max(4 * processors * together // rows, 1))
    splits = max(min(splits, power_of_two(length) // (4 * block), 512), 1)
    span = -(-length // (splits * block)) * block
    return SoftmaxConfig(False, together, block, splits, span, 8)


def _tile(rows: int, block: int, parts: int, itemsize: int, backward: bool) -> SoftmaxConfig:
    elements = rows * block
    if parts > 1:
        return SoftmaxConfig(True, rows, block, parts, block, elements // 1024, pack=itemsize == 2 and backward)
    if itemsize == 2 and elements == (8192 if backward else 16384):  # packed, one more program fits
        return SoftmaxConfig(True, rows, block, 1, block, 8, pack=True)
    return SoftmaxConfig(True, rows, block, 1, block, min(max(elements // 512, 1), 16))
