"""spec/visibility.py against a mask written out, and the lists that Triton's kernels make of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import Case, Results, hold, run, tensors
from interpreter_child import make_sparse, problem_of
from pairwise import pairwise
from torch import Tensor

from tilewise.spec import visibility
from tilewise.spec.score import Band
from tilewise.spec.tiles import key_tiles, limits, query_tiles
from tilewise.spec.visibility import HIDDEN, MIXED, WHOLE

BANDS = [Band(), Band(hi=0), Band(lo=-3), Band(lo=-4, hi=1), Band(lo=2, hi=5), Band(hi=-4)]


def mask_lists(case: Case, backward: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, int], Tensor]:
    """What the triton backend's forward, or backward, knows of a case's mask: of each tile, by rows and by keys; the
    size of its tiles; and the mask, of which some tiles are hidden and some whole."""
    from tilewise.backends.triton.config import backward_config, forward_config
    from tilewise.backends.triton.masks import MaskLists

    x = tensors(case)
    make_sparse(x.mask)
    problem = problem_of(case, x)
    config = backward_config(problem, False) if backward else forward_config(problem, False, False)
    found = MaskLists(problem, config, x.mask, x.q.device, by_rows=True, by_keys=True, even=backward)([x.mask])
    rows, keys = (y.view(-1, *y.shape[-2:]) for y in (found.by_rows, found.by_keys))
    return found.states, rows, keys, (config.block_m, config.block_n), x.mask


def check_sparse(case: Case) -> None:
    """`helpers.check` with a mask of hidden and whole tiles; the last keys are hidden from all queries, and NaN."""
    clean = tensors(case)
    make_sparse(clean.mask)
    k, v = clean.k.clone(), clean.v.clone()
    if case.mask[3] == "n":
        hidden = min(70, case.N // 2)
        clean.mask[..., case.N - hidden :] = False
        k[:, :, case.N - hidden :] = v[:, :, case.N - hidden :] = float("nan")
    hold(case, run(case, "triton", inputs=clean._replace(k=k, v=v)), inputs=clean)


class _Turned:
    """Lists of a mask, after which the mask is turned round in all tiles that are hidden or, by rows, full."""

    def __init__(self, lists, config, mask: Tensor):
        self.lists, self.config, self.mask, self.before, self.tiles = lists, config, mask, mask.clone(), 0

    def __call__(self, mask: Tensor, tiles: None):
        masks, found = self.lists(mask, tiles)
        c = self.config
        states = found.states.view(*mask.shape[:2], *found.states.shape[1:])
        turned = states == 0
        if found.by_keys is None:  # the forward's
            m_tiles, others = found.by_rows.shape[1], found.by_rows.shape[2] - 4
            full = torch.zeros(*mask.shape[:2], m_tiles, others, dtype=torch.bool)
            for row, listed in zip(full.flatten(0, 2), found.by_rows.flatten(0, 1).tolist(), strict=True):
                row[listed[3 : 3 + listed[1]]] = True
            for dim in (2, 3):  # one state for several tiles: they are full all of them
                full = full if states.shape[dim] == full.shape[dim] else full.all(dim, keepdim=True)
            turned |= full
        for b, h, m, n in turned.nonzero().tolist():
            tile = mask[b, h, m * c.block_m : (m + 1) * c.block_m, n * c.block_n : (n + 1) * c.block_n]
            tile.logical_not_()
            self.tiles += 1
        return masks, found


def turn_mask(case: Case) -> tuple[Results, Results, int]:
    """Results of the triton backend, and those of a mask that is `_Turned`; in how many tiles."""
    from tilewise.backends import Inputs, Needs, Outputs
    from tilewise.backends.triton.launch import TritonBackward, TritonForward

    x = tensors(case)
    make_sparse(x.mask)
    problem, inputs = problem_of(case, x), Inputs(x.q, x.k, x.v, x.bias, x.mask)
    needs, cotangents = Needs(True, True, True, x.bias is not None), Outputs(x.do, x.dlse)
    forward = TritonForward(problem, inputs)
    outputs = forward(inputs)
    backward = TritonBackward(problem, inputs, outputs, cotangents, needs)
    before = Results(*outputs[:2], *backward(inputs, outputs, cotangents)[:5])
    turned, results = 0, []
    for passed, arguments in ((forward, (inputs,)), (backward, (inputs, outputs, cotangents))):
        passed.masked = _Turned(passed.masked, passed.config, x.mask)
        results += passed(*arguments)[: 2 if passed is forward else 5]
        x.mask[:] = passed.masked.before
        turned += passed.masked.tiles
    return before, Results(*results), turned


def matrix(M, N, band):
    """Which of M x N pairs the band shows."""
    return [
        [(band.lo is None or j - i >= band.lo) and (band.hi is None or j - i <= band.hi) for j in range(N)]
        for i in range(M)
    ]


def kind(pairs, mask):
    """(visited, cut, mixed) of a tile: of all its pairs whether the band shows them, and whether the mask does."""
    if not any(mask) or not any(pairs):
        return False, None, None
    return True, not all(pairs), not all(mask)


def state(mask):
    return WHOLE if all(mask) else MIXED if any(mask) else HIDDEN


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("by_keys", [False, True])
def test_kinds(band, by_keys):
    """Of every tile of sizes around a tile's: what is visited, in which order, and of which kind."""
    lo, hi = limits(band)
    BLOCK_M, BLOCK_N = 3, 4
    for M, N in itertools.product((1, 2, 3, 7, 9), (1, 4, 5, 11)):
        seen = matrix(M, N, band)
        mask = [[(7 * (i // 2) + 5 * (j // 3) + i * j // 9) % 3 > 0 for j in range(N)] for i in range(M)]
        rows = [range(a, min(a + BLOCK_M, M)) for a in range(0, M, BLOCK_M)]
        cols = [range(a, min(a + BLOCK_N, N)) for a in range(0, N, BLOCK_N)]
        for own in cols if by_keys else rows:
            if by_keys:
                interval = query_tiles(own.start, len(own), M, lo, hi, BLOCK_M)
                pairs = [[(i, j) for i in other for j in own] for other in rows]
            else:
                interval = key_tiles(own.start, len(own), N, lo, hi, BLOCK_N)
                pairs = [[(i, j) for i in own for j in other] for other in cols]
            size = BLOCK_M if by_keys else BLOCK_N
            masks = [[mask[i][j] for i, j in tile] for tile in pairs]
            bands = [[seen[i][j] for i, j in tile] for tile in pairs]
            whole_tile = [len(tile) // len(own) == size for tile in pairs]
            for states, of_mask in (([state(m) for m in masks], masks), (None, [[True] * len(m) for m in masks])):
                # An interval may hold a tile that a narrow band misses, between two that it meets: none here.
                expected = visibility.Kinds([], [], [])
                for n in range(len(pairs)):
                    visited, cut, mixed = kind(bands[n], of_mask[n])
                    if visited:
                        cut = cut or not whole_tile[n]
                        (expected.cut if cut else expected.mixed if mixed else expected.full).append(n)
                assert visibility.kinds(*interval, states) == expected


def test_the_example_of_the_docstring():
    interval = key_tiles(192, 64, 256, *limits(Band(hi=0)), 64)
    assert interval == (0, 0, 3, 4)
    assert visibility.kinds(*interval, [MIXED, HIDDEN, WHOLE, MIXED]) == ([2], [0], [3])


USUAL = Case(B=2, H=4, Hkv=2, M=200, N=330, D=16, mask="bhmn")
SMALL = Case(B=2, H=2, Hkv=1, M=130, N=200, D=16, mask="bhmn")  # tiles of each kind, as few as may be
LISTED = [
    USUAL,
    replace(USUAL, mask="1kmn", causal=True),
    replace(USUAL, mask="b1mn", window=(90, 20)),
    replace(USUAL, mask="11mn", M=330, N=200, causal=True),
    replace(USUAL, mask="b11n"),
    replace(USUAL, mask="1hm1", causal=True),
    replace(USUAL, mask="1111", M=129, N=127),
    replace(USUAL, mask="bhmn", M=3, N=129),
    replace(USUAL, mask="b1mn", M=129, N=129, dtype=torch.float32),
]


@pytest.mark.parametrize("case", LISTED, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_lists_of_a_mask(interpreter, case, backward):
    """Of every matrix of the mask, in both directions: what `visibility.kinds` makes of what is left of its tiles."""
    states, by_rows, by_keys, (block_m, block_n), mask = interpreter(mask_lists, case, backward)
    lo, hi = limits(Band.aligned(case.causal, case.window, case.N - case.M))
    full = mask.expand(*mask.shape[:2], case.M, case.N).flatten(0, 1)
    tiles = [list(part.split(block_n, 2)) for part in full.split(block_m, 1)]
    for x in range(full.shape[0]):
        of = [[state(t[x].flatten().tolist()) for t in part] for part in tiles]
        rows = states[x].expand(len(of), len(of[0])) if 1 in states[x].shape else states[x]
        assert rows.tolist() == of
        for m, part in enumerate(of):
            rows_left = min(block_m, case.M - m * block_m)
            interval = key_tiles(m * block_m, rows_left, case.N, lo, hi, block_n)
            check_list(by_rows[x, m].tolist(), interval, part, backward and rows_left < block_m)
        for n in range(len(of[0])):
            cols_left = min(block_n, case.N - n * block_n)
            interval = query_tiles(n * block_n, cols_left, case.M, lo, hi, block_m)
            check_list(by_keys[x, n].tolist(), interval, [part[n] for part in of], backward and cols_left < block_n)


def check_list(found, interval, states, none_full):
    begin, full_begin, full_end, end = interval
    if none_full:
        full_begin = full_end = begin
    full, mixed, cut = visibility.kinds(begin, full_begin, full_end, end, states)
    tiles = full + mixed + cut
    assert found[:3] == [len(tiles), len(full), len(full) + len(mixed)]
    assert found[3 : 3 + len(tiles)] == tiles


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, mask="b1mn", causal=True, bias="1hmn", B=1),
        replace(SMALL, mask="1h1n", bias="bhmn", dtype=torch.float32, B=1),
        replace(SMALL, mask="b1m1", bias="b11n", softcap=2.0, H=1),
        replace(SMALL, mask="1kmn", bias="1hmn", deterministic=True, B=1, H=4, Hkv=2),
        replace(SMALL, mask="b11n", bias="111n", deterministic=True, causal=True, H=1),
        replace(SMALL, mask="b1mn", bias="1hm1", deterministic=True, B=1),
    ],
    ids=str,
)
def test_where_the_mask_is_not_read(interpreter, case):
    """Hidden tiles are not visited, and the forward does not mask full ones: after the lists are made the mask is
    turned round there, and nothing changes, not a bit."""
    before, after, turned = interpreter(turn_mask, case)
    assert turned > 0
    for name, x, y in zip(before._fields, before, after, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert torch.equal(x, y), name


LENGTHS = [(1, 3), (3, 1), (127, 129), (129, 127), (1, 129), (260, 3)]
SPARSE = Case(B=2, H=4, Hkv=2, M=70, N=130, D=16)
PAIR = replace(SPARSE, H=2, Hkv=1)  # as many heads as tell a mask of heads from one for all


@pytest.mark.parametrize(
    "case",
    [
        *(
            replace(
                SPARSE if "k" in axes else PAIR,
                mask="".join(axes),
                bias=bias,
                dtype=dtype,
                **terms,
            )
            for *axes, bias, dtype, terms in pairwise(
                "b1",
                "hk1",
                "m1",
                "n1",
                (None, "1hmn", "b11n"),
                (torch.float16, torch.float32),
                ({}, {"causal": True}, {"softcap": 2.0}, {"deterministic": True}),
            )
        ),
        *(replace(PAIR, M=M, N=N, mask="b1mn") for M, N in LENGTHS),
        replace(SPARSE, mask="1kmn", bias="bhmn", deterministic=True, causal=True, M=129, N=70),
        replace(SPARSE, mask="bhmn", bias="1hm1", deterministic=True, window=(60, 9)),
        replace(SPARSE, mask="b1mn", bias="1111", deterministic=True),
    ],
    ids=str,
)
def test_masks_of_hidden_and_whole_tiles(interpreter, case):
    interpreter(check_sparse, case)
