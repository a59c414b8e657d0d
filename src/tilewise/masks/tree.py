"""Prefix trees: sequences with shared beginnings, each shared token once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.spec.integers import LARGEST_SIZE, check_range

Tree: TypeAlias = "int | tuple[int, Sequence[Tree]]"
Trees: TypeAlias = Sequence[Tree] | Sequence[Sequence[Tree]]


class TreePositions(NamedTuple):
    """Positions of tokens in their own sequences, int64 (B, S); see `tree_positions`."""

    positions: Tensor
    previous: Tensor


def tree_positions(trees: Trees, *, size: int | None = None, device: torch.device | str = "cpu") -> TreePositions:
    """Return the position of each token of prefix trees in its own sequence, and the token before it there.

    Args:
        trees, size: as for `tilewise.TileMask.tree`.
        device: of the results.

    Returns:
        ``(positions, previous)``, int64 (B, S). ``positions`` counts the tokens before each in its own sequence, as
        rotary embeddings do; 0 for padding. ``previous`` is the index in the row of the token just before it, whose
        logits predict it: for the first token of each response the last token of the prompt. It is -1 for the first
        token of a sequence, and for padding.

    Raises:
        TypeError, ValueError: naming the argument, what was passed and what is allowed.

    Examples:
        >>> # a prompt of 3 tokens, 2 responses of 2
        >>> positions, previous = tilewise.tree_positions([(3, [2, 2])])
        >>> positions
        tensor([[0, 1, 2, 3, 4, 3, 4]])
        >>> previous
        tensor([[-1,  0,  1,  2,  3,  2,  5]])
    """
    rows = [_Segments.of(row) for row in _rows(trees)]
    total = _size(rows, size)
    return TreePositions(
        _padded([x.positions() for x in rows], total, 0).to(device, non_blocking=True),
        _padded([x.previous() for x in rows], total, -1).to(device, non_blocking=True),
    )


def tree_ends(trees: Any, size: int | None, device: torch.device | str) -> Tensor:
    """Return the end of the subtree of each token, int64 (B, S); 0 for padding."""
    rows = [_Segments.of(row) for row in _rows(trees)]
    return _padded([x.subtree_ends() for x in rows], _size(rows, size), 0).to(device, non_blocking=True)


class _Segments(NamedTuple):
    """The segments of one row, in its order.

    lengths: in tokens. parents: number of the segment that it continues, -1 for a root.
    """

    lengths: list[int]
    parents: list[int]

    @classmethod
    def of(cls, row: Sequence[Tree]) -> _Segments:
        found = cls([], [])
        todo: list[tuple[Any, int]] = [(tree, -1) for tree in reversed(row)]
        while todo:
            tree, parent = todo.pop()
            is_pair = isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[1], list)
            length, branches = tree if is_pair else (tree, [])
            if isinstance(length, bool) or not isinstance(length, int):
                raise TypeError(f"trees: expected a length or a pair (length, [trees]), got {tree!r}")
            if length < 0:
                raise ValueError(f"trees: a length must be 0 or more, got {length}")
            todo += [(branch, len(found.lengths)) for branch in reversed(branches)]
            found.lengths.append(length)
            found.parents.append(parent)
        return found

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))[:-1]

    def _of_tokens(self, numbers: list[int]) -> Tensor:
        """Return the number of each token's segment."""
        of_segments, lengths = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (numbers, self.lengths))
        return torch.repeat_interleave(of_segments, lengths)

    def subtree_ends(self) -> Tensor:
        ends = list(accumulate(self.lengths))
        for segment, parent in reversed(list(enumerate(self.parents))):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        return self._of_tokens(ends)

    def positions(self) -> Tensor:
        first: list[int] = []  # position of each segment's first token
        for parent in self.parents:
            first.append(0 if parent < 0 else first[parent] + self.lengths[parent])
        shift = [position - start for position, start in zip(first, self.starts, strict=True)]
        return torch.arange(sum(self.lengths), device="cpu") + self._of_tokens(shift)

    def previous(self) -> Tensor:
        before: list[int] = []  # token before each segment, and its own last one
        last: list[int] = []
        for start, length, parent in zip(self.starts, self.lengths, self.parents, strict=True):
            before.append(-1 if parent < 0 else last[parent])
            last.append(start + length - 1 if length else before[-1])
        token = torch.arange(sum(self.lengths), device="cpu")
        return torch.where(token == self._of_tokens(self.starts), self._of_tokens(before), token - 1)


def _rows(trees: Any) -> Sequence[Sequence[Tree]]:
    """Return the rows of a batch; trees that are no list of lists are one row."""
    if not isinstance(trees, list):
        raise TypeError(f"trees: expected a list of trees, or a list of such lists, got {type(trees).__name__}")
    return trees if trees and all(isinstance(row, list) for row in trees) else [trees]


def _size(rows: list[_Segments], size: int | None) -> int:
    longest = max(sum(row.lengths) for row in rows)
    if longest == 0:
        raise ValueError("trees: expected a row with tokens, got none")
    if size is None:
        size = longest
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size: expected an int or None, got {type(size).__name__}")
    if size < longest:
        raise ValueError(f"size: must be {longest} or more, the tokens of the longest row, got {size}")
    check_range("size", size, LARGEST_SIZE)
    return size


def _padded(rows: list[Tensor], size: int, value: int) -> Tensor:
    return torch.stack([torch.nn.functional.pad(row, (0, size - row.shape[0]), value=value) for row in rows])
