"""Attention of atoms in windows against the formula in float64: forward and every gradient."""

from __future__ import annotations

import pytest
import torch
from structure_helpers import DTYPES, check, check_rounded, formula, tensors, value_and_gradients, with_nan

import tilewise
from tilewise.integrations import evoformer
from tilewise.integrations.evoformer import window_pair_attention
from tilewise.spec.tma import tensor_fits_tma
from tilewise.windows.api import Windows


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


def begin_of(block, N, q_block, k_block, edges):
    begin = block * q_block - (k_block - q_block) // 2
    return max(0, min(begin, N - k_block)) if edges == "shift" else begin


def dense(bias, N, q_block, k_block, edges):
    """A bias of windows as (B, H, N, N), -inf outside of them."""
    rows = []
    for block in range(bias.shape[2]):
        begin = begin_of(block, N, q_block, k_block, edges)
        for i in range(min(q_block, N - block * q_block)):
            row = bias[:, :, block, i, max(-begin, 0) : N - begin]
            lead = max(begin, 0)
            rows.append(torch.nn.functional.pad(row, (lead, N - lead - row.shape[-1]), value=-torch.inf))
    return torch.stack(rows, 2)


@pytest.fixture(params=[0, 16], ids=["blocks", "bands"])
def rows(request, monkeypatch):
    """Blocks one by one, and put together as for a GPU's kernels."""
    monkeypatch.setattr(evoformer, "_TILES", {"cpu": request.param})
    return request.param


def window_inputs(shape, blocks, q_block, k_block, bias=None, dtype=torch.float64):
    B, H, N, D = shape
    q, k, v, pair = tensors(shape, shape, (B, H, N, D), (*(bias or (B, H)), blocks, q_block, k_block))
    return [x.to(dtype) for x in (q, k, v, pair)]


SIZES = {  # N, q_block, k_block
    "blocks and a rest": (45, 8, 20),
    "whole blocks": (40, 8, 24),
    "shorter than a window": (11, 4, 16),
    "shorter than a block": (3, 8, 12),
    "one": (1, 4, 4),
    "a window that is a block": (13, 4, 4),
    "odd": (29, 3, 10),
    "no multiple": (37, 8, 13),
}


@pytest.mark.parametrize("edges", ["clip", "shift"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_windows(rows, size, edges, bias):
    N, q_block, k_block = SIZES[size]
    inputs = window_inputs((2, 3, N, 4), -(-N // q_block), q_block, k_block, bias)
    ours = value_and_gradients(lambda *x: window_pair_attention(*x, None, q_block, k_block, edges, scale=0.7), inputs)
    theirs = value_and_gradients(
        lambda q, k, v, pair: formula(q, k, v, dense(pair, N, q_block, k_block, edges), scale=0.7), inputs
    )
    check(ours, theirs)


@pytest.mark.parametrize("edges", ["clip", "shift"])
@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_windows_and_a_mask(rows, edges, B, shared):
    """Queries that see nothing; NaN in hidden keys at the ends of sequences, where windows reach into the next."""
    N, q_block, k_block = 24, 4, 12
    inputs = window_inputs((B, 2, N, 4), 6, q_block, k_block, (1, 2))
    mask = tensors((1 if shared else B, N), seed=1)[0] > -0.5
    mask[:, 4:20] = False
    mask[:, [0, 1, N - 1]] = False
    hidden = [0, 1, 7, N - 1]
    planted = [inputs[0], *(with_nan(x, 2, hidden) for x in inputs[1:3]), inputs[3]]
    ours = value_and_gradients(lambda *x: window_pair_attention(*x, mask, q_block, k_block, edges), planted)
    whole = mask[:, None, None]
    theirs = value_and_gradients(
        lambda q, k, v, pair: formula(q, k, v, dense(pair, N, q_block, k_block, edges), whole), inputs
    )
    check(ours, theirs)
    assert not ours[0][:, :, 12].any()


@pytest.mark.parametrize("rows", [0, 128])
def test_windows_of_alphafold(rows, monkeypatch):
    """32 queries and 128 keys, from 48 before the block to 79 after its first; a length that is no multiple."""
    N = 333
    monkeypatch.setattr(evoformer, "_TILES", {"cpu": rows})
    inputs = window_inputs((1, 2, N, 8), 11, 32, 128)
    for edges in ("clip", "shift"):
        windows = Windows(N, 32, 128, edges)
        assert [windows.begin(b) for b in (0, 1, 2, 5, 10)] == (
            [-48, -16, 16, 112, 272] if edges == "clip" else [0, 0, 16, 112, 205]
        )
        ours = value_and_gradients(lambda *x, edges=edges: window_pair_attention(*x, None, edges=edges), inputs)
        theirs = value_and_gradients(
            lambda q, k, v, pair, edges=edges: formula(q, k, v, dense(pair, N, 32, 128, edges)), inputs
        )
        check(ours, theirs)


def test_nan_of_a_sequence_stays_in_it(rows):
    """In its queries too, though windows of "clip" reach into the memory of the next sequence."""
    q, k, v, pair = (x.requires_grad_() for x in window_inputs((2, 2, 12, 4), 3, 4, 12))
    bad = q.detach().clone()
    bad[0] = torch.nan
    good = [x[1] for x in torch.autograd.grad(window_pair_attention(q, k, v, pair, None, 4, 12).sum(), (k, v, pair))]
    q = bad.requires_grad_()
    ours = torch.autograd.grad(window_pair_attention(q, k, v, pair, None, 4, 12).sum(), (q, k, v, pair))
    assert ours[1][0].isnan().any()
    check([x[1] for x in ours[1:]], good)


@pytest.mark.parametrize("outside", ["keys", "queries"])
@pytest.mark.parametrize("B", [1, 2])
def test_nan_of_a_bias_outside_the_sequence(rows, B, outside):
    """Is not looked at, and has a gradient of 0."""
    inputs = window_inputs((B, 2, 21, 4), 6, 4, 12, (1, 2))
    planted = inputs[3].clone()
    if outside == "keys":
        planted[:, :, 0, :, :4] = planted[:, :, 5, :, 5:] = torch.nan
    else:
        planted[:, :, 5, 1:] = torch.nan
    call = lambda *x: window_pair_attention(*x, None, 4, 12)  # noqa: E731
    ours = value_and_gradients(call, [*inputs[:3], planted])
    check(ours, value_and_gradients(call, inputs))
    assert not ours[-1][planted.isnan()].any()


@pytest.mark.parametrize("D", [8, 24, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_dtypes(rows, dtype, D):
    N = 77
    inputs = window_inputs((2, 2, N, D), 10, 8, 32, (1, 2), dtype)
    inputs[3] = inputs[3].float()
    ours = value_and_gradients(lambda *x: window_pair_attention(*x, None, 8, 32), inputs)
    assert [x.dtype for x in ours] == [dtype] * 4 + [torch.float32]
    theirs = value_and_gradients(
        lambda q, k, v, pair: formula(q, k, v, dense(pair, N, 8, 32, "clip")), [x.double() for x in inputs]
    )
    check_rounded(ours, theirs, dtype)


def test_overlapping_windows_are_summed_in_float32():
    """1 and three numbers that bfloat16 would lose one after the other."""
    x = torch.zeros(1, 1, 8, 1, dtype=torch.bfloat16, requires_grad=True)
    (windows,) = Windows(8, 1, 4, "clip").of(x)
    cotangent = torch.zeros_like(windows)
    cotangent[:] = 2.0**-9
    cotangent[..., 0, :] = 1.0  # the window that comes last, or first
    (gradient,) = torch.autograd.grad(windows, x, cotangent)
    assert gradient[0, 0, 3].item() == torch.tensor(1 + 3 * 2.0**-9).bfloat16().item() != 1.0


def test_shifted_windows_are_summed_in_float32():
    """A key that windows at the front, in the middle and at the back have: 1, and twice what bfloat16 loses."""
    x = torch.zeros(1, 1, 5, 1, dtype=torch.bfloat16, requires_grad=True)
    (windows,) = Windows(5, 1, 4, "shift").of(x)
    cotangent = torch.zeros_like(windows)
    for block, place, number in ((0, 3, 3 * 2.0**-10), (1, 3, 1.0), (3, 2, 3 * 2.0**-11), (4, 2, 3 * 2.0**-11)):
        cotangent[0, 0, block, place] = number
    (gradient,) = torch.autograd.grad(windows, x, cotangent)
    assert gradient[0, 0, 3].item() == torch.tensor(1 + 6 * 2.0**-10).bfloat16().item() != 1.0


@pytest.mark.parametrize("edges", ["clip", "shift"])
def test_windows_gradcheck(rows, edges):
    inputs = [x.requires_grad_() for x in window_inputs((1, 2, 7, 2), 4, 2, 5)]
    assert torch.autograd.gradcheck(lambda *x: window_pair_attention(*x, None, 2, 5, edges), inputs)


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_windows_of_other_layouts(rows, B, turned):
    """Heads last, as projections leave them, and a bias with its heads last."""
    N, q_block, k_block = 24, 4, 12
    inputs = window_inputs((B, 2, N, 4), 6, q_block, k_block, (1, 2))
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    given.append(inputs[3].movedim(1, -1).contiguous().movedim(-1, 1) if turned else inputs[3])
    check(
        value_and_gradients(lambda *x: window_pair_attention(*x, None, q_block, k_block), given),
        value_and_gradients(lambda *x: window_pair_attention(*x, None, q_block, k_block), inputs),
    )


@pytest.mark.parametrize("shared", [1, 2])
def test_windows_and_bias_are_views(monkeypatch, shared):
    """A call for all batch elements, in which keys take their length and a margin, and the bias lies where it lay."""
    seen = []
    attention = tilewise.attention

    def spy(q, k, v, bias, **options):
        seen.append((q.shape, q.data_ptr(), k.untyped_storage().nbytes(), bias.shape, bias.data_ptr()))
        return attention(q, k, v, bias=bias, **options)

    monkeypatch.setattr(evoformer, "attention", spy)
    q, k, v, pair = window_inputs((2, 3, 40, 4), 5, 8, 24, (shared, 3))
    window_pair_attention(q, k, v, pair, None, 8, 24)
    nbytes = (2 * 2 * 3 * 40 + 3 * 8) * 4 * 8  # of keys and values, with a margin before, between and behind them
    assert seen == [((2, 15, 8, 4), q.data_ptr(), nbytes, (shared, 15, 8, 24), pair.data_ptr())]


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("mask", [None, (1, 333)])
def test_what_a_gpu_is_asked_for(B, mask, monkeypatch):
    """Four blocks are one, without a mask and with memory that TMA describes; the bias has 1.8 times its numbers."""
    seen = []

    def spy(q, k, v, bias, mask, **options):
        assert mask is None
        for x in (q, k, v, bias):
            assert tensor_fits_tma(x, x.storage_offset() * x.element_size() % 16 == 0)
        seen.append((q.shape, k.shape, bias.shape, bias.untyped_storage().nbytes() / pair.nbytes))
        return q

    monkeypatch.setattr(evoformer, "attention", spy)
    monkeypatch.setattr(evoformer, "_TILES", {"cpu": 128})
    q, k, v, pair = window_inputs((B, 2, 333, 8), 11, 32, 128, (1, 2), torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    window_pair_attention(q, k, v, pair, None if mask is None else torch.ones(mask, dtype=torch.bool))
    lead = (B, 6)
    assert seen == [((*lead, 128, 8), (*lead, 224, 8), (1, 6, 128, 224), 6 * 28800 / (22 * 4096))]


def test_windows_without_a_bias_and_of_nothing(rows):
    q, k, v, pair = window_inputs((2, 2, 12, 4), 3, 4, 12)
    check(
        [window_pair_attention(q, k, v, None, None, 4, 12)],
        [window_pair_attention(q, k, v, torch.zeros_like(pair), None, 4, 12)],
    )
    for edges in ("clip", "shift"):
        empty = window_pair_attention(*(x[:1, :, :0] for x in (q, k, v)), pair[:1, :, :0], None, 4, 12, edges)
        assert empty.shape == (1, 2, 0, 4)
        empty = window_pair_attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], pair[:, :, :0], None, 4, 12, edges)
        assert empty.shape == (2, 2, 0, 4)


# PyTorch's compiler warns of its own doings, differently in each release.
@pytest.mark.filterwarnings("default")
def test_windows_compile(monkeypatch):
    """In one graph, with blocks put together."""
    monkeypatch.setattr(evoformer, "_TILES", {"cpu": 16})
    inputs = [x.requires_grad_() for x in window_inputs((1, 2, 24, 4), 6, 4, 12, dtype=torch.float32)]
    mask = torch.arange(24)[None] > 2
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: window_pair_attention(*x, mask, 4, 12), fullgraph=True, backend="eager")
    ours = value_and_gradients(compiled, inputs)
    check(ours, value_and_gradients(lambda *x: window_pair_attention(*x, mask, 4, 12), inputs), 1e-5)


# --- in the Triton kernels ---


def by_triton():
    """Blocks one by one, and put together, by `tilewise.attention`, which computes what the kernels of windows do not
    take; float32 in bfloat16's place, which the interpreter multiplies exactly."""
    inputs = window_inputs((2, 2, 45, 8), 6, 8, 20, (1, 2), torch.float32)
    mask = tensors((2, 45), seed=1)[0] > -0.5
    theirs = value_and_gradients(
        lambda q, k, v, pair: formula(q, k, v, dense(pair, 45, 8, 20, "clip"), mask[:, None, None]),
        [x.double() for x in inputs],
    )
    by_windows, evoformer._by_windows = evoformer._by_windows, lambda *call: False
    try:
        for rows in (0, 16):
            evoformer._TILES = {"cpu": rows}
            ours = value_and_gradients(lambda *x: window_pair_attention(*x, mask, 8, 20, backend="triton"), inputs)
            check(ours, theirs, 1e-5)
    finally:
        evoformer._by_windows = by_windows


def test_triton(interpreter):
    interpreter(by_triton)


# --- errors ---


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


X4, X5 = (2, 2, 12, 4), (2, 3, 2, 6, 4)
ERRORS = {
    "windows, k": (
        lambda: window_pair_attention(zeros(*X4), zeros(2, 2, 11, 4), zeros(*X4), None),
        r"k: batch, heads and length must equal q's \(2, 2, 12\), got shape \(2, 2, 11, 4\)",
    ),
    "windows, bias": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), zeros(2, 2, 3, 4, 8), None, 4, 12),
        r"pair_bias: expected shape \(2\|1, 2\|1, 3, 4, 12\), got \(2, 2, 3, 4, 8\)",
    ),
    "windows, mask": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), None, zeros(3, 12).bool()),
        r"mask: expected shape \(2\|1, 12\), got \(3, 12\)",
    ),
    "windows, mask's dtype": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), None, zeros(2, 12)),
        "mask: dtype must be bool",
    ),
    "windows, bias's dtype": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), zeros(2, 2, 3, 4, 12).int(), None, 4, 12),
        "pair_bias: dtype must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    "windows, bias's device": (
        lambda: window_pair_attention(
            zeros(*X4), zeros(*X4), zeros(*X4), zeros(2, 2, 3, 4, 12, device="meta"), None, 4, 12
        ),
        "pair_bias: must be on q's device cpu, got meta",
    ),
    "windows, v's device": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4, device="meta"), None, None, 4, 12),
        "v: must be on q's device cpu, got meta",
    ),
    "windows, k's dtype": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4).half(), zeros(*X4), None, None, 4, 12),
        "k: dtype must equal q's, got torch.float16 with q torch.float32",
    ),
    "windows, k_block": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), None, None, 8, 4),
        "k_block: must not be below q_block, 8, got 4",
    ),
    "windows, q_block": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), None, None, 0),
        "q_block: must be 1 or more, got 0",
    ),
    "windows, q_block's type": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), None, None, 8.0),
        "q_block: expected an int, got float",
    ),
    "windows, edges": (
        lambda: window_pair_attention(zeros(*X4), zeros(*X4), zeros(*X4), None, edges="wrap"),
        'edges: expected "clip" or "shift", got \'wrap\'',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, match = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=match):
        call()
