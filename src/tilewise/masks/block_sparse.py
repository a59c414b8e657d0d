"""TileMask: a block-sparse mask, with tiles of scores that are empty, full or partial."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilewise.backends import has_triton
from tilewise.masks import picture
from tilewise.masks.tree import Trees, tree_ends
from tilewise.operator.eager import is_eager
from tilewise.spec.block_mask import (
    EMPTY,
    FULL,
    PARTIAL,
    TileTensors,
    document_offsets,
    listed,
    no_bits,
    pack,
    tiles_of_intervals,
)
from tilewise.spec.integers import LARGEST_SIZE, check_range
from tilewise.spec.score import check_numbers
from tilewise.spec.tensors import Versions, check_tensor, stream_of, tensors_read_by

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Block = int | tuple[int, int]
MAX_BLOCK = 2**14  # queries or keys of a tile
_AT_ONCE = 1 << 24  # pairs per call of a mask_mod


class TileLists(NamedTuple):
    """Tile indices that each row of tiles visits, like the lists of FlexAttention; int32.

    full_counts, partial_counts: (B|1, H|Hkv|1, rows).
    full_indices, partial_indices: (..., rows, columns); the first ``count`` are ascending tiles, the others 0.
    """

    full_counts: Tensor
    full_indices: Tensor
    partial_counts: Tensor
    partial_indices: Tensor


class Kept(NamedTuple):
    """Bounds on the selected keys of a mask made by `tilewise.dynamic_mask`, known without synchronization.

    keep: a query sees at most this many keys.
    causal: a query sees at most one key that the query before does not see; else all queries see equal keys.
    by_query: each query has its own scores, and `causal` does not apply.
    """

    keep: int
    causal: bool
    by_query: bool


@dataclass(frozen=True, eq=False, repr=False)
class TileMask:
    """Block-sparse mask for ``attention(mask=...)``: tiles of scores are empty, full or partial.

    Forward and backward skip empty tiles, where a bias gets a gradient of 0. No constructor makes an array of queries
    times keys. A mask serves any number of calls, layers and steps: from the second call on the tile lists of kernels
    are cached, while its tensors exist unchanged. It is on the device of its tensors, and calls do not synchronize.

    Attributes:
        queries, keys: M and N of the calls.
        tensors: see `tilewise.spec.block_mask.TileTensors`.
        kept: set by `tilewise.dynamic_mask`, so that a call may gather the selected keys.
    """

    queries: int
    keys: int
    tensors: TileTensors
    kept: Kept | None = None
    _lists: dict[tuple[bool, int | None], TileLists] = field(default_factory=dict, init=False, repr=False)

    # --- properties ---

    @property
    def block(self) -> tuple[int, int]:
        """Return (queries, keys) of a tile."""
        return self.tensors.block

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B|1, H|Hkv|1, query tiles, key tiles)."""
        return tuple(self._tiles.shape)

    @property
    def device(self) -> torch.device:
        return self._tiles.device

    @property
    def _tiles(self) -> Tensor:
        assert self.tensors.tiles is not None
        return self.tensors.tiles

    def to(self, device: torch.device | str) -> TileMask:
        """Copy the mask to another device."""
        moved = (None if x is None else x.to(device) for x in self.tensors)
        return TileMask(self.queries, self.keys, TileTensors(*moved), self.kept)

    def lists(self, by_keys: bool = False) -> TileLists:
        """Return the tiles to visit by row of query tiles, or by_keys by key tile; made once per stream."""
        key = by_keys, stream_of(self.device)
        found = self._lists.get(key)
        if found is None:
            tiles = self._tiles.mT if by_keys else self._tiles
            full, partial = (listed(x) for x in (tiles == FULL, tiles >= PARTIAL))
            found = self._lists[key] = TileLists(*full, *partial)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lists": {}}

    def __repr__(self) -> str:
        """Return sizes, sparsity and a picture; sizes alone if the tiles cannot be read, as on the meta device.

        Synchronizes once with a GPU.
        """
        head = picture.headline(self.queries, self.keys, self._tiles, self.block)
        cells = picture.cells_of(self._tiles, picture.TEXT_CELLS)
        return head if cells is None else "\n".join([head, picture.summary(cells), picture.text(cells)])

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with the picture as SVG."""
        head = picture.headline(self.queries, self.keys, self._tiles, self.block)
        cells = picture.cells_of(self._tiles, picture.SVG_CELLS)
        if cells is None:
            return f"<div>{head}</div>"
        legend = f"strong: full, faint: partial{picture.per_cell(cells)}"
        return f"<div>{head}<br>{picture.summary(cells)}<br>{picture.svg(cells)}<br><small>{legend}</small></div>"

    def dense(self) -> Tensor:
        """Return the mask as bool (B|1, H|Hkv|1, M, N), for tests and pictures of small ones."""
        return self.tensors.rows_visible(slice(0, self.queries), self.keys)

    def validate(self) -> TileMask:
        """Check the numbers of the mask and return it. Synchronizes with a GPU.

        Raises:
            ValueError: a tile is not empty, full, or partial with existing bits; an interval exceeds the queries; or
                tiles or document offsets do not match the intervals.
        """
        tiles, bits, begins, ends, offsets = self.tensors
        assert tiles is not None
        assert bits is not None
        most = FULL + bits.shape[0] if begins is None else PARTIAL
        if tiles.numel() and not (tiles.min() >= 0 and tiles.max() <= most):
            raise ValueError(f"TileMask.tiles: expected 0 to {most}, got {int(tiles.min())} to {int(tiles.max())}")
        if begins is not None and ends is not None and begins.numel():
            _check_intervals(begins, ends, self.queries)
            expected = tiles_of_intervals(begins, ends, self.queries, self.block)
            if not torch.equal(expected, tiles):
                raise ValueError("TileMask.tiles: are not those of its intervals")
            if offsets is not None and not torch.equal(offsets, document_offsets(begins[:, 0, 0])):
                raise ValueError("TileMask.offsets: are not those of its intervals")
        return self

    # --- constructors ---

    @classmethod
    def from_block_mask(cls, block_mask: Any, *, validate: bool = False) -> TileMask:
        """Make the mask of FlexAttention's `torch.nn.attention.flex_attention.BlockMask`.

        Calls its mask_mod once for the pairs of partial blocks, with index tensors ``(b, h, q, kv)`` that broadcast.
        Synchronizes once, for their number. Duplicate blocks count once, blocks that are both full and partial are
        full, and blocks out of range are ignored.

        Args:
            block_mask: with any BLOCK_SIZE. Tiles are its blocks if these are multiples of 64, up to 16,384; else the
                tiles have 64, or 128 where blocks are larger, and show the pairs of the blocks that they overlap.
            validate: raise for duplicate blocks or blocks out of range, which synchronizes.

        Under torch.compile mask_mod is called for all pairs instead, without synchronization; each has a bit.

        Raises:
            TypeError, ValueError: no BlockMask; with ``validate`` wrong lists.
        """
        if not is_block_mask(block_mask):
            raise TypeError(f"block_mask: expected FlexAttention's BlockMask, got {type(block_mask).__name__}")
        queries, keys = (int(n) for n in block_mask.seq_lengths)
        block = tuple(block_mask.BLOCK_SIZE)
        count, indices = block_mask.kv_num_blocks, block_mask.kv_indices
        rows, cols = -(-queries // block[0]), -(-keys // block[1])
        if indices.dim() != 4 or indices.shape[2] != rows or indices.shape[:3] != count.shape:
            raise ValueError(
                f"block_mask: expected kv_indices (B, H, {rows}, columns) and kv_num_blocks (B, H, {rows}), got "
                f"{tuple(indices.shape)} and {tuple(count.shape)}"
            )
        full_count, full_indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        partial = _named(count, indices, cols, "kv_indices", validate)
        if full_count is None:
            full = torch.zeros_like(partial)
        else:
            full = _named(full_count, full_indices, cols, "full_kv_indices", validate)
            if validate and bool((full & partial).any()):
                raise ValueError("block_mask: a block is in full_kv_indices and in kv_indices")
        partial, mask_mod, size = partial & ~full, block_mask.mask_mod, _tile_of_blocks(block)
        if size != block:
            mask_mod = _in_blocks(full, partial, mask_mod, block)
            full, partial = _tiles_of_blocks(full, partial, queries, keys, block, size)
        return _with_bits(full, partial, mask_mod, queries, keys, size)

    @classmethod
    def from_tiles(
        cls, tiles: Tensor, queries: int, keys: int, *, block: Block = 128, mask: Tensor | None = None
    ) -> TileMask:
        """Make a mask from a bool tensor of tiles.

        Args:
            tiles: bool (B|1, H|Hkv|1, ceil(M / block_m), ceil(N / block_n)); True = visible.
            queries, keys: M and N.
            block: queries and keys of a tile, one number or two; multiples of 64.
            mask: bool (B|1, H|Hkv|1, M|1, N|1), the visible pairs of these tiles; default: all. Takes one bit per
                element, after broadcasting to all pairs.

        Raises:
            TypeError, ValueError: naming the argument, what was passed and what is allowed.
        """
        check_tensor("tiles", tiles)
        size = checked_block(block)
        _check_lengths(queries=queries, keys=keys)
        rows, cols = -(-queries // size[0]), -(-keys // size[1])
        if tiles.dtype != torch.bool:
            raise TypeError(f"tiles: dtype must be bool (True = visible), got {tiles.dtype}")
        if tiles.dim() != 4 or tuple(tiles.shape[2:]) != (rows, cols):
            raise ValueError(
                f"tiles: expected shape (B|1, H|Hkv|1, {rows}, {cols}) for {queries} queries and {keys} keys in tiles "
                f"of {size[0]} x {size[1]}, got {tuple(tiles.shape)}"
            )
        if mask is None:
            return cls(queries, keys, TileTensors(tiles.to(torch.int32).contiguous(), no_bits(size, tiles.device)))
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: dtype must be bool (True = attend), got {mask.dtype}")
        if mask.device != tiles.device:
            raise ValueError(f"mask: must be on the device of tiles, {tiles.device}, got {mask.device}")
        fits = mask.dim() == 4 and mask.shape[2] in (1, queries) and mask.shape[3] in (1, keys)
        if not fits or any(1 not in x and x[0] != x[1] for x in zip(mask.shape[:2], tiles.shape[:2], strict=True)):
            raise ValueError(
                f"mask: shape {tuple(mask.shape)} does not broadcast to ({tiles.shape[0]}, {tiles.shape[1]}, "
                f"{queries}|1, {keys}|1)"
            )
        lead = torch.broadcast_shapes(mask.shape[:2], tiles.shape[:2])
        whole = mask.expand(*lead, queries, keys)
        return _of_rows(lambda part: whole[:, :, part], tiles.expand(*lead, rows, cols), queries, keys, size)

    @classmethod
    def from_rows(
        cls, rows_of: Callable[[slice], Tensor], queries: int, keys: int, *, block: Block = 128,
        device: torch.device | str = "cpu",
    ) -> TileMask:  # fmt: skip
        """Make a mask from a function of a slice of rows, called for each row of tiles.

        It returns bool (B|1, H|Hkv|1, rows, N). Bits of all pairs are stored, an eighth of a byte each, so as not to
        read the number of partial tiles.
        """
        size = checked_block(block)
        _check_lengths(queries=queries, keys=keys)
        every = torch.ones(1, 1, -(-queries // size[0]), -(-keys // size[1]), dtype=torch.bool, device=device)
        return _of_rows(rows_of, every, queries, keys, size)

    @classmethod
    def from_intervals(cls, begins: Tensor, ends: Tensor, queries: int, *, block: Block = 128) -> TileMask:
        """Make a mask in which queries ``begins[..., j]`` to ``ends[..., j] - 1`` see key j.

        Args:
            begins, ends: int32 or int64, (B|1, H|Hkv|1, N), of equal shape; clamped to the queries.
            queries: M.
            block: as for `from_tiles`.

        Raises:
            TypeError, ValueError: naming the argument, what was passed and what is allowed.
        """
        size = checked_block(block)
        for name, x in (("begins", begins), ("ends", ends)):
            check_tensor(name, x)
            if x.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: dtype must be int32 or int64, got {x.dtype}")
            if x.dim() != 3 or x.shape != begins.shape:
                raise ValueError(f"{name}: expected (B|1, H|Hkv|1, N), begins and ends alike, got {tuple(x.shape)}")
        if ends.device != begins.device:
            raise ValueError(f"ends: must be on the device of begins, {begins.device}, got {ends.device}")
        _check_lengths(queries=queries, keys=begins.shape[2])
        first = begins.clamp(0, queries).to(torch.int32).unsqueeze(2).contiguous()
        last = torch.maximum(ends.clamp(0, queries).to(torch.int32).unsqueeze(2), first).contiguous()
        tiles = _tiles_of(first, last, queries, size)
        return cls(queries, begins.shape[2], TileTensors(tiles, no_bits(size, tiles.device), first, last))

    @classmethod
    def documents(cls, ids: Tensor, *, block: Block = 128) -> TileMask:
        """Make a mask of documents packed in one sequence; tokens see their own document. Does not synchronize.

        Args:
            ids: int32 or int64, (S,) or (B, S). Consecutive tokens with equal ids are one document; equal ids elsewhere
                are another. A negative id is padding, which sees no key and is visible to no query.
            block: as for `from_tiles`.
        """
        ids = _integers("ids", ids, (1, 2))
        ids = ids.view(-1, ids.shape[-1])
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        new = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        begins = torch.where(new, place, 0).cummax(1).values
        last = torch.nn.functional.pad(new[:, 1:], (0, 1), value=True)
        ends = torch.where(last, place + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
        ends = torch.where(ids < 0, begins, ends)
        found = cls.from_intervals(begins[:, None], ends[:, None], ids.shape[1], block=block)
        return cls(found.queries, found.keys, found.tensors._replace(offsets=document_offsets(begins)))

    @classmethod
    def prefix_lm(cls, lengths: Tensor, size: int, *, block: Block = 128) -> TileMask:
        """Make a mask in which tokens see the prefix and are causal beyond it. Does not synchronize.

        Args:
            lengths: of the prefixes, int32 or int64, (B,).
            size: S, tokens of each sequence.
            block: as for `from_tiles`.
        """
        lengths = _integers("lengths", lengths, (1,))
        _check_lengths(size=size)
        place = torch.arange(size, device=lengths.device)
        begins = torch.where(place < lengths[:, None], 0, place)[:, None]
        return cls.from_intervals(begins, torch.full_like(begins, size), size, block=block)

    @classmethod
    def tree(
        cls, trees: Trees, *, size: int | None = None, block: Block = 128, device: torch.device | str = "cpu"
    ) -> TileMask:
        """Make a mask of prefix trees: sequences with shared beginnings, such as responses to one prompt.

        A row has each shared token once: the tokens of a root, then those of each branch followed by its own branches.
        A token sees the tokens before it in its own sequence, and itself; ``causal=True`` changes nothing. Windows and
        biases by distance count rows, not positions.

        Args:
            trees: a list of trees, all in one row, or a list of such lists for a batch. A tree is a length in tokens,
                or a pair ``(length, [branches])`` whose branches are trees: ``(4096, [1024] * 8)`` is a prompt with 8
                responses. Lengths may be 0.
            size: S, tokens of each row with padding, which sees no key and is visible to no query. Default: those of
                the longest row.
            block: as for `from_tiles`.

        Raises:
            TypeError, ValueError: naming the argument, what was passed and what is allowed.

        `tilewise.tree_positions` has the positions of the tokens in their own sequences.
        """
        ends = tree_ends(trees, size, device)[:, None]
        begins = torch.arange(ends.shape[2], device=ends.device).expand_as(ends)
        return cls.from_intervals(begins, ends, ends.shape[2], block=block)

    @classmethod
    def sliding_window(
        cls, queries: int, keys: int, window: tuple[int | None, int | None], *, global_tokens: int = 0,
        block: Block = 128, device: torch.device | str = "cpu",
    ) -> TileMask:  # fmt: skip
        """Make a mask in which query i sees keys i + N - M - left to i + N - M + right and the global tokens.

        Args:
            queries, keys: M and N. window: (left, right); None: no limit.
            global_tokens: number of first keys that all queries see, like attention sinks; with ``causal=True`` up to
                their own.
            block: as for `from_tiles`.
        """
        _check_lengths(queries=queries, keys=keys)
        check_numbers(window, dropout_p=0.0)
        _positive("global_tokens", global_tokens, least=0)
        left, right = (max(queries, keys) * 2 if x is None else x for x in window)
        centre = torch.arange(keys, device=device) - (keys - queries)
        everywhere = torch.arange(keys, device=device) < global_tokens
        begins = torch.where(everywhere, 0, centre - right)
        ends = torch.where(everywhere, queries, centre + left + 1)
        return cls.from_intervals(begins[None, None], ends[None, None], queries, block=block)

    @classmethod
    def dilated(
        cls, queries: int, keys: int, window: int, dilation: int, *, block: int = 128,
        device: torch.device | str = "cpu",
    ) -> TileMask:  # fmt: skip
        """Make a mask with every ``dilation``-th key around i + N - M, ``window`` of them on each side.

        block: of queries and of keys, a multiple of 64. Source: Longformer, arXiv 2004.05150, figure 2c.
        """
        reach = _positive("window", window) * _positive("dilation", dilation)
        return _by_distance(
            lambda d: (d % dilation == 0) & (d.abs() <= reach), queries, keys, block, torch.device(device)
        )

    @classmethod
    def strided(
        cls, queries: int, keys: int, stride: int, *, block: int = 128, device: torch.device | str = "cpu"
    ) -> TileMask:
        """Make a mask with the keys less than ``stride`` from i + N - M, and every ``stride``-th key.

        block: as for `dilated`. Source: Sparse Transformer, arXiv 1904.10509, figure 3b, with ``causal=True``.
        """
        _positive("stride", stride)
        return _by_distance(
            lambda d: (d % stride == 0) | (d.abs() < stride), queries, keys, block, torch.device(device)
        )

    @classmethod
    def from_mask_mod(
        cls, mask_mod: MaskMod, queries: int, keys: int, *, batch: int = 1, heads: int = 1, block: Block = 128,
        device: torch.device | str = "cpu",
    ) -> TileMask:  # fmt: skip
        """Make a mask from a bool function of index tensors ``(b, h, q, kv)``, which broadcast.

        Calls it for all pairs, (B|1, H|1, rows, columns), by rows of tiles, and again for the pairs of partial tiles.
        Synchronizes once, for the number of these.
        """
        size = checked_block(block)
        _check_lengths(queries=queries, keys=keys)
        _positive("batch", batch)
        _positive("heads", heads)
        device = torch.device(device)
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(-1, 1, 1)
        kv = torch.arange(keys, device=device)
        full, partial = [], []
        for begin in range(0, queries, size[0]):
            q = torch.arange(begin, min(begin + size[0], queries), device=device)[:, None]
            seen = _asked(mask_mod, b, h, q, kv).expand(batch, heads, q.shape[0], keys)
            some, every = _some_and_every(seen, size[1])
            full.append(every)
            partial.append(some & ~every)
        return _with_bits(torch.stack(full, 2), torch.stack(partial, 2), mask_mod, queries, keys, size)


torch.serialization.add_safe_globals([TileMask, TileTensors, Kept])  # for torch.load(weights_only=True)

# --- from the argument of a call ---


class _Made(NamedTuple):
    """A TileMask, the stream that it was made on, the tensors that it was made of, and what else it depends on."""

    mask: TileMask
    stream: int | None
    of: Versions
    key: object


_made_for: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()


def is_block_mask(x: object) -> bool:
    """True if ``x`` is a BlockMask, without importing its slow module."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(x, module.BlockMask)


def tile_mask_of(name: str, mask: object, queries: int, keys: int) -> TileMask | None:
    """Return the TileMask of an argument that is one or is a BlockMask; None for others."""
    found = mask if isinstance(mask, TileMask) else None
    if found is None and is_block_mask(mask):
        found = _of_block_mask(mask)
    if found is not None and (found.queries, found.keys) != (queries, keys):
        raise ValueError(
            f"{name}: the {type(mask).__name__} is for {found.queries} queries and {found.keys} keys, the call has "
            f"{queries} and {keys}"
        )
    return found


def _of_block_mask(mask: Any) -> TileMask:
    if torch.compiler.is_compiling():
        return TileMask.from_block_mask(mask)
    read = tensors_read_by(mask.as_tuple())
    return cached_mask(mask, None, read, mask.kv_indices.device, lambda: TileMask.from_block_mask(mask))


def cached_mask(
    owner: Any, key: object, read: list[Tensor], device: torch.device, make: Callable[[], TileMask]
) -> TileMask:
    """Return ``make()``, cached while ``owner`` exists, ``key`` is equal, and the tensors ``read`` are unchanged."""
    made = _made_for.get(owner)
    if made is None or made.key != key or not made.of.hold(read):
        if not is_eager(read or (None,)) or any(x.is_inference() for x in read):  # their changes are not counted
            return make()
        of = Versions(read)
        with torch.inference_mode(False):  # inference tensors cannot be saved for backward
            made = _Made(make(), stream_of(device), of, key)
        if device.type == "cuda":  # other streams may then read it; from_block_mask synchronizes anyway
            torch.cuda.current_stream(device).synchronize()
        _made_for[owner] = made
    elif made.stream != stream_of(device) and not torch.cuda.is_current_stream_capturing():
        for x in filter(torch.is_tensor, made.mask.tensors):  # the memory is not reused before this stream has read it
            x.record_stream(torch.cuda.current_stream(device))
    return made.mask


# --- checks ---


def checked_block(block: Any, name: str = "block") -> tuple[int, int]:
    """Return (queries, keys) of a tile from the argument ``block``."""
    pair = (block, block) if isinstance(block, int) else block
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(n) is int for n in pair):
        raise TypeError(f"{name}: expected an int or a pair of ints, got {block!r}")
    if any(n <= 0 or n % 64 for n in pair):
        raise ValueError(f"{name}: expected multiples of 64, got {block!r}")
    if max(pair) > MAX_BLOCK:
        raise ValueError(f"{name}: must be {MAX_BLOCK} or less, got {block!r}")
    return pair[0], pair[1]


def _check_lengths(**lengths: Any) -> None:
    for name, n in lengths.items():
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
            raise TypeError(f"{name}: expected an int, got {type(n).__name__}")
        if n < 1:
            raise ValueError(f"{name}: must be 1 or more, got {n}")
        check_range(name, n, LARGEST_SIZE)


def _positive(name: str, n: Any, least: int = 1) -> int:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{name}: expected an int, got {type(n).__name__}")
    if n < least:
        raise ValueError(f"{name}: must be {least} or more, got {n}")
    check_range(name, n, LARGEST_SIZE)
    return n


def _integers(name: str, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    check_tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype must be int32 or int64, got {x.dtype}")
    if x.dim() not in dims or x.shape[-1] == 0:
        words = " or ".join(map(str, dims))
        raise ValueError(f"{name}: expected {words} dimensions, the last not empty, got shape {tuple(x.shape)}")
    return x


def _check_intervals(begins: Tensor, ends: Tensor, queries: int) -> None:
    if not bool(((begins >= 0) & (begins <= ends) & (ends <= queries)).all()):
        raise ValueError(f"TileMask: an interval is not within the {queries} queries")


# --- tiles and bits ---


def _tiles_of(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    """Return `tiles_of_intervals`; on a GPU one kernel instead of some fifty operators."""
    if begins.is_cuda and begins.numel() and is_eager((begins, ends)) and has_triton():
        from tilewise.backends.kernels import interval_tiles

        return interval_tiles.tiles_of_intervals(begins, ends, queries, block)
    return tiles_of_intervals(begins, ends, queries, block)


def _named(count: Tensor, indices: Tensor, cols: int, name: str, validate: bool) -> Tensor:
    """Return the tiles in a list of a BlockMask as bool (B, H, rows, cols), without those out of range."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    counts = (place < count.unsqueeze(-1)).expand(indices.shape)
    inside = counts & (indices >= 0) & (indices < cols)
    times = torch.zeros(*indices.shape[:3], cols + 1, dtype=torch.int32, device=indices.device)
    if validate:
        ordered = torch.where(counts, indices, -1 - place).sort(-1).values  # unused places get distinct numbers
        twice = bool((ordered[..., 1:] == ordered[..., :-1]).any())
        if bool((counts & ~inside).any()) or bool((count > indices.shape[-1]).any()) or bool((count < 0).any()):
            raise ValueError(f"block_mask: {name} names a block out of range, of {cols} along the keys")
        if twice:
            raise ValueError(f"block_mask: {name} names a block twice")
    # Ignored blocks go to an additional column. All writes are 1, so their order does not matter.
    times.scatter_(-1, torch.where(inside, indices, cols).long(), 1)
    return times[..., :cols] != 0


def _tile_of_blocks(block: tuple[int, int]) -> tuple[int, int]:
    """Return the tile size for a BLOCK_SIZE."""
    if all(n % 64 == 0 and n <= MAX_BLOCK for n in block):
        return block
    first, second = (128 if n >= 128 else 64 for n in block)
    return first, second


def _in_blocks(full: Tensor, partial: Tensor, mask_mod: MaskMod, block: tuple[int, int]) -> MaskMod:
    """Return a mask_mod that is False outside of the blocks, and True in full ones."""

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        place = b, h, q // block[0], kv // block[1]
        return full[place] | (partial[place] & _asked(mask_mod, b, h, q, kv))

    return within


def _tiles_of_blocks(
    full: Tensor, partial: Tensor, queries: int, keys: int, block: tuple[int, int], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the tiles of ``size`` in which all blocks are full, and the others that overlap a block.

    A tile overlaps the blocks of a range, whose sums are differences of sums from the first block.
    """

    def ends(length: int, tile: int, of: int) -> tuple[Tensor, Tensor]:
        first = torch.arange(0, length, tile, device=full.device)
        return first // of, ((first + tile).clamp(max=length) - 1) // of + 1

    (top, bottom), (left, right) = ends(queries, size[0], block[0]), ends(keys, size[1], block[1])

    def overlapped(which: Tensor) -> Tensor:
        sums = torch.nn.functional.pad(which.cumsum(2).cumsum(3), (1, 0, 1, 0))
        rows = sums[:, :, bottom] - sums[:, :, top]
        return rows[..., right] - rows[..., left]

    every = overlapped(full) == (bottom - top)[:, None] * (right - left)
    return every, (overlapped(full | partial) > 0) & ~every


def _asked(mask_mod: MaskMod, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    seen = mask_mod(b, h, q, kv)
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        came = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise TypeError(f"mask_mod: must return a bool tensor, got {came}")
    return seen


def _some_and_every(seen: Tensor, block_n: int) -> tuple[Tensor, Tensor]:
    """Return for bool (..., rows, N) which tiles of keys are partly visible, and which are fully visible."""
    more = -seen.shape[-1] % block_n
    some = torch.nn.functional.pad(seen.any(-2), (0, more), value=False).unflatten(-1, (-1, block_n)).any(-1)
    every = torch.nn.functional.pad(seen.all(-2), (0, more), value=True).unflatten(-1, (-1, block_n)).all(-1)
    return some, every


def _of_rows(
    rows_of: Callable[[slice], Tensor], tiles: Tensor, queries: int, keys: int, block: tuple[int, int]
) -> TileMask:
    """Make the mask of `TileMask.from_rows`, restricted to the bool ``tiles``; does not synchronize."""
    block_m, block_n = block
    found, words = [], []
    for m, begin in enumerate(range(0, queries, block_m)):
        seen = rows_of(slice(begin, min(begin + block_m, queries)))
        some, every = _some_and_every(seen, block_n)
        seen = torch.nn.functional.pad(seen, (0, -keys % block_n, 0, block_m - seen.shape[2]))
        words.append(pack(seen.unflatten(3, (-1, block_n)).transpose(2, 3)))
        kind = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))
        found.append(torch.where(tiles[:, :, m], kind, EMPTY))
    kinds, bits = torch.stack(found, 2), torch.stack(words, 2).flatten(0, 3)
    place = torch.arange(kinds.numel(), device=kinds.device).view(kinds.shape)
    numbered = torch.where(kinds == PARTIAL, PARTIAL + place, kinds).to(torch.int32).contiguous()
    return TileMask(queries, keys, TileTensors(numbered, bits.contiguous()))


def _with_bits(
    full: Tensor, partial: Tensor, mask_mod: MaskMod, queries: int, keys: int, block: tuple[int, int]
) -> TileMask:
    """Make a mask with the bits of partial tiles only; synchronizes for their number, but not under torch.compile."""
    if torch.compiler.is_compiling():
        return _with_all_bits(full, partial, mask_mod, queries, keys, block)
    block_m, block_n = block
    where = partial.nonzero()
    words, kinds = [], []
    for part in where.split(max(_AT_ONCE // (block_m * block_n), 1)):
        b, h, m, n = (x.view(-1, 1, 1) for x in part.unbind(1))
        q = m * block_m + torch.arange(block_m, device=full.device)[:, None]
        kv = n * block_n + torch.arange(block_n, device=full.device)
        inside = (q < queries) & (kv < keys)
        seen = _asked(mask_mod, b, h, q.clamp(max=queries - 1), kv.clamp(max=keys - 1))
        seen = seen.expand(len(part), block_m, block_n)
        some, every = (seen & inside).flatten(1).any(1), (seen | ~inside).flatten(1).all(1)
        kinds.append(torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)))
        words.append(pack(seen & inside))
    bits = torch.cat([no_bits(block, full.device), *words])
    kind = torch.cat([where.new_zeros(0), *kinds])  # FlexAttention lists full tiles at the ends as partial
    tiles = full.to(torch.int32)
    number = torch.arange(PARTIAL, PARTIAL + len(where), device=full.device)
    tiles[where.unbind(1)] = torch.where(kind == PARTIAL, number, kind).to(torch.int32)
    return TileMask(queries, keys, TileTensors(tiles.contiguous(), bits))


def _with_all_bits(
    full: Tensor, partial: Tensor, mask_mod: MaskMod, queries: int, keys: int, block: tuple[int, int]
) -> TileMask:
    """Make the mask of `_with_bits` with bits of all tiles, whose number is known to a compiler."""
    batch, heads, rows, cols = full.shape
    b = torch.arange(batch, device=full.device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=full.device).view(-1, 1, 1)
    q = torch.arange(rows * block[0], device=full.device)[:, None]
    kv = torch.arange(cols * block[1], device=full.device)
    inside = (q < queries) & (kv < keys)
    seen = _asked(mask_mod, b, h, q.clamp(max=queries - 1), kv.clamp(max=keys - 1))

    def in_tiles(x: Tensor) -> Tensor:
        whole = x.expand(batch, heads, rows * block[0], cols * block[1])
        return whole.unflatten(3, (cols, block[1])).unflatten(2, (rows, block[0])).transpose(3, 4)

    some, every = in_tiles(seen & inside).any(-1).any(-1), in_tiles(seen | ~inside).all(-1).all(-1)
    number = PARTIAL + torch.arange(full.numel(), device=full.device).view(full.shape)
    kind = torch.where(every, FULL, torch.where(some, number, EMPTY))
    tiles = torch.where(full, FULL, torch.where(partial, kind, EMPTY)).to(torch.int32)
    return TileMask(queries, keys, TileTensors(tiles.contiguous(), pack(in_tiles(seen & inside)).flatten(0, 3)))


def _by_distance(
    seen: Callable[[Tensor], Tensor], queries: int, keys: int, block: int, device: torch.device
) -> TileMask:
    """Make a mask from a function of ``j - (i + N - M)``; tiles on a diagonal share bits. No synchronization."""
    _check_lengths(queries=queries, keys=keys)
    size, _ = checked_block(block)
    rows, cols = -(-queries // size), -(-keys // size)
    offset = torch.arange(size, device=device) - torch.arange(size, device=device)[:, None] - (keys - queries)
    words, kinds = [], []
    for diagonals in torch.arange(1 - rows, cols, device=device).split(max(_AT_ONCE // (size * size), 1)):
        found = seen(diagonals.view(-1, 1, 1) * size + offset)
        words.append(pack(found))
        flat = found.flatten(1)
        kinds.append(torch.where(flat.all(1), FULL, torch.where(flat.any(1), PARTIAL, EMPTY)))
    kind = torch.cat(kinds)
    kind = torch.where(kind == PARTIAL, PARTIAL + torch.arange(kind.shape[0], device=device), kind)
    diagonal = torch.arange(cols, device=device) - torch.arange(rows, device=device)[:, None] + rows - 1
    return TileMask(queries, keys, TileTensors(kind[diagonal].to(torch.int32)[None, None], torch.cat(words)))
