"""Prefix trees, against packed sequences in which each has its own copy of what they share."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import TileMask, attention, tree_positions, varlen_attention
from tilewise.bias import alibi

GROUP = [(70, [40, 1, 55])]  # a prompt and three responses
NESTED = [(30, [(20, [9, (0, [4, 13]), 0]), 17]), 5, (0, [6, 2]), (8, [(11, [(3, [])])])]


def sequences_of(row, before=(), start=0):
    """The tokens of each sequence of the trees of a row, which begins at ``start``; and where the row ends."""
    found = []
    for tree in row:
        length, branches = tree if isinstance(tree, tuple) else (tree, [])
        path = [*before, *range(start, start + length)]
        start += length
        inner, start = sequences_of(branches, path, start)
        found += inner or [path]
    return found, start


def rotated(x, positions):
    """Rotary positions of x (B, H, S, D)."""
    angles = positions[:, None, :, None] / 10.0 ** torch.arange(x.shape[3] // 2)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


@pytest.mark.parametrize("row", [GROUP, NESTED], ids=["group", "nested"])
def test_positions_are_those_of_each_sequence(row):
    positions, previous = tree_positions(row)
    sequences, total = sequences_of(row)
    assert positions.shape == previous.shape == (1, total)
    for path in sequences:
        assert positions[0, path].tolist() == list(range(len(path)))
        assert previous[0, path].tolist() == [-1, *path][: len(path)]


def test_a_batch_is_padded():
    """To the longest row or a given size; a row is what it is by itself."""
    rows = [GROUP, NESTED, []]
    total = [sequences_of(row)[1] for row in rows]
    for size in (None, 200):
        mask, (positions, previous) = TileMask.tree(rows, size=size, block=64), tree_positions(rows, size=size)
        long = size or max(total)
        assert mask.dense().shape == (3, 1, long, long)
        assert positions.shape == previous.shape == (3, long)
        for b, (row, own) in enumerate(zip(rows, total, strict=True)):
            expected = torch.zeros(long, long, dtype=torch.bool)
            if own:
                alone = tree_positions(row)
                expected[:own, :own] = TileMask.tree(row).dense()[0, 0]
                assert torch.equal(positions[b, :own], alone.positions[0])
                assert torch.equal(previous[b, :own], alone.previous[0])
            assert torch.equal(mask.dense()[b, 0], expected)
            assert (positions[b, own:] == 0).all()
            assert (previous[b, own:] == -1).all()


@pytest.mark.parametrize("row", [GROUP, NESTED], ids=["group", "nested"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_tree_is_its_sequences(row, biased):
    """Outputs and gradients of q and k with rotary positions, v and ALiBi's slopes, in float64.

    ALiBi of a causal sequence is a bias of its keys: for one query distance and position differ by a constant.
    """
    H, D = 2, 8
    sequences, total = sequences_of(row)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, total, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.03], dtype=torch.float64, requires_grad=True)
    leaves = [q, k, v, slopes] if biased else [q, k, v]
    do = torch.randn(1, H, total, D, dtype=torch.float64)

    mask, (positions, _) = TileMask.tree(row, block=64), tree_positions(row)
    bias = slopes[:, None, None] * positions if biased else None
    o = attention(rotated(q, positions), rotated(k, positions), v, bias=bias, mask=mask)
    found = torch.autograd.grad((o * do).sum(), leaves)

    tokens = torch.tensor([token for path in sequences for token in path])
    lengths = torch.tensor([len(path) for path in sequences])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    place = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = [x[:, :, tokens] for x in (q, k, v)]
    packed = [rotated(packed[0], place), rotated(packed[1], place), packed[2]]
    most = int(lengths.max())
    term = alibi(slopes) if biased else None
    each = varlen_attention(*(x[0].transpose(0, 1) for x in packed), cu, cu, most, most, bias=term, causal=True)
    torch.testing.assert_close(o[0, :, tokens].transpose(0, 1), each, rtol=1e-10, atol=1e-12)
    copies = torch.bincount(tokens, minlength=total)
    weighted = (do / copies[:, None])[0, :, tokens].transpose(0, 1)  # a token counts once, in however many sequences
    expected = torch.autograd.grad((each * weighted).sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_previous_tokens_predict():
    """The log-probs of a model of the packed sequences: of each response's first token after the same prompt."""
    (prompt, responses), vocabulary = GROUP[0], 11
    sequences, total = sequences_of(GROUP)
    logits, tokens = torch.randn(total, vocabulary, dtype=torch.float64), torch.randint(vocabulary, (total,))
    previous = tree_positions(GROUP).previous[0, prompt:]
    found = logits[previous].log_softmax(-1).gather(-1, tokens[prompt:, None])[:, 0].split(responses)
    for path, one in zip(sequences, found, strict=True):
        expected = logits[path][:-1].log_softmax(-1).gather(-1, tokens[path][1:, None])[prompt - 1 :, 0]
        assert torch.equal(one, expected)


def test_explain_counts_visible_pairs():
    q = torch.randn(1, 2, sequences_of(GROUP)[1], 8)
    mask = TileMask.tree(GROUP, block=64)
    prompt, responses = GROUP[0]
    pairs = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in responses)
    found = tilewise.explain(q, q, q, mask=mask)
    assert mask.dense().sum() == pairs
    assert found.forward.flops == 4 * 8 * 2 * pairs
    assert "TileMask (1, 1, 166, 166) in tiles of 64 x 64: 6 of 9 tiles visible, 4 of them in part" in str(found)


def test_many_levels():
    """Deeper than Python's stack."""
    tree = 1
    for _ in range(3000):
        tree = (1, [tree])
    assert tree_positions([tree]).positions[0].tolist() == list(range(3001))
    assert torch.equal(TileMask.tree([tree], size=3072).tensors.ends[0, 0, 0, :3001], torch.full((3001,), 3001).int())


@pytest.mark.parametrize("function", [TileMask.tree, tree_positions])
def test_errors(function):
    for trees, message in (
        ((4, [2]), r"expected a list of trees, or a list of such lists, got tuple"),
        ([(4, 2)], r"expected a length or a pair \(length, \[trees\]\), got \(4, 2\)"),
        ([(4, [2], 1)], r"expected a length or a pair \(length, \[trees\]\), got \(4, \[2\], 1\)"),
        ([[4], 2], r"expected a length or a pair \(length, \[trees\]\), got \[4\]"),
        ([(4, [2.0])], r"expected a length or a pair \(length, \[trees\]\), got 2.0"),
        ([True], r"expected a length or a pair \(length, \[trees\]\), got True"),
    ):
        with pytest.raises(TypeError, match=f"^trees: {message}"):
            function(trees)
    for trees, message in (
        ([(4, [-1])], "a length must be 0 or more, got -1"),
        ([], "expected a row with tokens, got none"),
        ([[], [(0, [0])]], "expected a row with tokens, got none"),
    ):
        with pytest.raises(ValueError, match=f"^trees: {message}"):
            function(trees)
    with pytest.raises(ValueError, match=r"^size: must be 166 or more, the tokens of the longest row, got 165"):
        function(GROUP, size=165)
    with pytest.raises(TypeError, match=r"^size: expected an int or None, got float"):
        function(GROUP, size=200.0)
    with pytest.raises(ValueError, match=r"^size: must be 2147483647 or less"):
        function(GROUP, size=2**31)
