"""Attention of structure models against the formula in float64: forward and every gradient."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import empty_cache
from structure_helpers import DTYPES, check, check_rounded, formula, tensors, value_and_gradients, with_nan

import tilewise
from tilewise.integrations import evoformer
from tilewise.integrations.evoformer import (
    DS4Sci_EvoformerAttention,
    attention_pair_bias,
    triangle_attention,
    window_pair_attention,
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


# --- triangle_attention ---

B, N, H, Q, K, D = 2, 3, 2, 5, 7, 8


def triangle_inputs(Q=Q, K=K, D=D, B=B, dtype=torch.float64):
    lead = (B, N, H)
    return tensors((*lead, Q, D), (*lead, K, D), (*lead, K, D), (B, 1, H, Q, K), dtype=dtype)


def test_triangle_signature():
    parameters = inspect.signature(triangle_attention).parameters.values()
    names = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert names == ["q", "k", "v", "bias", "mask=None", "scale=None", "return_aux=False", "kv_lengths=None"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize(("Q", "K"), [(1, 1), (5, 7), (1, 9), (9, 1), (33, 130)])
@pytest.mark.parametrize("masked", [False, True])
def test_triangle(Q, K, masked):
    """Also a row of pairs that sees nothing, and NaN in hidden keys and values."""
    inputs, mask = triangle_inputs(Q, K), None
    planted = inputs
    if masked:
        mask = tensors((B, N, 1, 1, K), seed=1)[0] > -0.5
        mask[..., K // 2] = False
        mask[1, 2] = False
        planted = [inputs[0], *(with_nan(x, -2, K // 2) for x in inputs[1:3]), inputs[3]]
    ours = value_and_gradients(lambda *x: triangle_attention(*x, mask, scale=0.3), planted)
    check(ours, value_and_gradients(lambda *x: formula(*x, mask, scale=0.3), inputs))
    if masked:
        assert not ours[0][1, 2].any()


@pytest.mark.parametrize("D", [8, 24, 48, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triangle_dtypes(dtype, D):
    q, k, v, bias = triangle_inputs(17, 19, D, dtype=dtype)
    bias = bias.float()
    mask = tensors((B, N, 1, 1, 19), seed=1)[0] > -0.5
    ours = value_and_gradients(lambda *x: triangle_attention(*x, mask), [q, k, v, bias])
    assert [x.dtype for x in ours] == [dtype] * 4 + [torch.float32]
    wide = [x.double() for x in (q, k, v, bias)]
    check_rounded(ours, value_and_gradients(lambda *x: formula(*x, mask), wide), dtype)


def test_triangle_of_four_dimensions():
    """The result has five dimensions, as cuEquivariance's has; a mask that is not bool, as it takes it."""
    inputs = triangle_inputs(B=1)
    mask = (tensors((1, N, 1, 1, K), seed=1)[0] > -0.5).float()
    # no tensor, q with the others, q alone, and mask and bias alone
    for four in ((), (0, 1, 2, 3, 4), (0,), (3, 4)):

        def ours(*x, four=four):
            return triangle_attention(*(t[0] if i in four else t for i, t in enumerate((*x, mask))))

        found = value_and_gradients(ours, inputs)
        assert found[0].shape == (1, N, H, Q, D)
        check(found, value_and_gradients(lambda *x: formula(*x, mask.bool()), inputs))


def test_triangle_aux_of_four_dimensions():
    """The lse has B too, and lengths come with or without it: cuEquivariance's mask_to_kv_lengths always gives it."""
    inputs = triangle_inputs(B=1)
    lengths = torch.tensor([2, K, 5], dtype=torch.int32).view(1, N, 1, 1, 1)
    expected = triangle_attention(*inputs, return_aux=True, kv_lengths=lengths)
    for given in (lengths, lengths[0]):
        found = triangle_attention(*(x[0] for x in inputs), return_aux=True, kv_lengths=given)
        assert found[1].shape == found[2].shape == (1, N, H, Q)
        check(found, expected)


def test_triangle_gated_as_a_caller_does():
    """Protenix takes the first element of the result of an unbatched call, and applies a gate to it."""
    inputs = [x[0] for x in triangle_inputs(Q=N, K=N, B=1)]
    (gate,) = tensors((N, N, H, D), seed=2)
    update = triangle_attention(*inputs)[0].transpose(-2, -3) * gate
    check([update], [formula(*inputs).transpose(-2, -3) * gate])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_triangle_lengths(dtype):
    """Keys that count, up to none and all; more than all is all."""
    inputs = triangle_inputs()
    lengths = torch.tensor([[0, 1, K], [4, K - 1, K + 5]], dtype=dtype).view(B, N, 1, 1, 1)
    mask = (torch.arange(K) < lengths.view(B, N, 1)).view(B, N, 1, 1, K)
    ours = value_and_gradients(lambda *x: triangle_attention(*x, kv_lengths=lengths), inputs)
    check(ours, value_and_gradients(lambda *x: formula(*x, mask), inputs))
    assert not ours[0][0, 0].any()
    check([triangle_attention(*(x[0] for x in inputs), kv_lengths=lengths[0])], [ours[0][:1]])


def test_triangle_aux():
    inputs = triangle_inputs()

    def ours(*x):
        out, lse, largest = triangle_attention(*x, return_aux=True)
        torch.testing.assert_close(largest, (x[0] @ x[1].mT * D**-0.5 + x[3]).amax(-1))
        return out, lse

    def theirs(q, k, v, bias):
        return formula(q, k, v, bias), (q @ k.mT * D**-0.5 + bias).logsumexp(-1)

    check(value_and_gradients(ours, inputs), value_and_gradients(theirs, inputs))


def test_triangle_aux_of_no_keys():
    """A length of 0 gives o and an lse of 0, as in cuEquivariance, and no gradient. A mask that hides all: -inf."""
    inputs = triangle_inputs()
    lengths = torch.tensor([[0, 3, K], [K, 0, 1]]).view(B, N, 1, 1, 1)
    mask = (torch.arange(K) < lengths.view(B, N, 1)).view(B, N, 1, 1, K)

    def ours(*x):
        return triangle_attention(*x, return_aux=True, kv_lengths=lengths)[:2]

    def theirs(q, k, v, bias):
        s = (q @ k.mT * D**-0.5 + bias).masked_fill(~mask, -torch.inf)
        empty = (lengths == 0).squeeze(-1)
        lse = s.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, 0.0)
        return formula(q, k, v, bias, mask), lse

    check(value_and_gradients(ours, inputs), value_and_gradients(theirs, inputs))
    lse = triangle_attention(*inputs, mask, return_aux=True)[1]
    assert (lse[0, 0] == -torch.inf).all()


def test_triangle_of_columns():
    """The ending node's: a transposed pair representation is read where it lies."""
    inputs = triangle_inputs(N, N)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs[:3]]
    check(
        value_and_gradients(triangle_attention, [*turned, inputs[3]]),
        value_and_gradients(formula, inputs),
    )


# --- DS4Sci_EvoformerAttention ---


@pytest.mark.parametrize("which", ["", "-", "m", "-p", "mp"])
def test_evoformer(which):
    L = 9
    shape = (B, N, L, H, D)
    mask_bias, pair_bias = tensors((B, N, 1, 1, L), (B, 1, H, L, L), seed=1)
    given = [x for x, letter in ((mask_bias, "m"), (pair_bias, "p")) if letter in which]

    def ours(q, k, v, *biases):
        left = list(biases)
        passed = [None if letter == "-" else left.pop(0) for letter in which]
        count = len(passed)
        o = DS4Sci_EvoformerAttention(q, k, v, passed)
        assert len(passed) == count
        assert o.is_contiguous()
        return o

    def theirs(q, k, v, *biases):
        return formula(*(x.transpose(2, 3) for x in (q, k, v)), sum(biases, torch.zeros(()))).transpose(2, 3)

    inputs = [*tensors(shape, shape, shape), *given]
    check(value_and_gradients(ours, inputs), value_and_gradients(theirs, inputs))


def test_autocast_comes_before_checks():
    """What it makes alike is alike; float64 stays, and is named by the name that it came by."""
    q, k = tensors((1, N, 6, H, D), (1, N, 6, H, D), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = DS4Sci_EvoformerAttention(q, k.bfloat16(), k, [])
        assert o.dtype == torch.bfloat16
        windows = window_pair_attention(*(x.transpose(2, 3)[0] for x in (q, k.bfloat16(), k)), None, None, 2, 4)
        assert windows.dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"^V: dtype must equal Q's"):
            DS4Sci_EvoformerAttention(q, k, k.double(), [])


@pytest.mark.parametrize("L", [1, 2, 40])
def test_evoformer_lengths_and_hidden_keys(L):
    """A mask bias of -inf hides, also all of a row; one of -1e9 is a number, as in DeepSpeed."""
    shape = (B, N, L, H, D)
    q, k, v, mask_bias, pair_bias = tensors(shape, shape, shape, (B, N, 1, 1, L), (B, 1, H, L, L))
    hidden = mask_bias < 0
    hidden[0, 1] = True
    for far in (-torch.inf, -1e9):
        bias = torch.where(hidden, far, 0.0).double()
        o = DS4Sci_EvoformerAttention(q, k, v, [bias, pair_bias])
        expected = formula(*(x.transpose(2, 3) for x in (q, k, v)), bias + pair_bias).transpose(2, 3)
        check([o], [expected], 1e-5)  # in a sum with -1e9 that many digits are left
        assert o[0, 1].any() == (far > -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evoformer_dtypes(dtype):
    L, D = 33, 24
    shape = (1, N, L, H, D)
    inputs = tensors(shape, shape, shape, (1, N, 1, 1, L), (1, 1, H, L, L), dtype=dtype)

    def theirs(q, k, v, a, b):
        return formula(*(x.transpose(2, 3) for x in (q, k, v)), a + b).transpose(2, 3)

    ours = value_and_gradients(lambda q, k, v, *biases: DS4Sci_EvoformerAttention(q, k, v, biases), inputs)
    assert {x.dtype for x in ours} == {dtype}
    check_rounded(ours, value_and_gradients(theirs, [x.double() for x in inputs]), dtype)


# --- attention_pair_bias ---

S = 6
MASKS = {
    "none": None, "of each structure": (B, S), "shared by samples": (B, 1, S), "of each sample": (B, 3, S),
    "five dimensions": (B, 1, 1, 1, S),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [(B, 1, H, S, S), (B, H, S, S), (1, 1, H, S, S), (1, H, S, S)])
def test_pair_bias(bias, mask):
    inputs = tensors((B, 3, H, S, D), (B, 3, H, S, D), (B, 3, H, S, 4), bias)
    mask = None if MASKS[mask] is None else tensors(MASKS[mask], seed=1)[0] > -0.5
    whole = None
    if mask is not None:
        mask[1] = False
        samples = mask if mask.dim() == 5 else mask[:, None] if mask.dim() == 2 else mask
        whole = samples if samples.dim() == 5 else samples[:, :, None, None]

    def theirs(q, k, v, bias):
        return formula(q, k, v, bias if bias.dim() == 5 else bias[:, None], whole)

    ours = value_and_gradients(lambda *x: attention_pair_bias(*x, mask), inputs)
    check(ours, value_and_gradients(theirs, inputs))


@pytest.mark.parametrize("mask", [None, (B, S), (B, 1, S), (B, 1, 1, S)])
def test_pair_bias_without_samples(mask):
    inputs = tensors((B, H, S, D), (B, H, S, D), (B, H, S, D), (B, H, S, S))
    mask = None if mask is None else tensors(mask, seed=1)[0] > -0.5
    whole = None if mask is None else mask.reshape(B, 1, 1, S)
    ours = value_and_gradients(lambda *x: attention_pair_bias(*x, mask, scale=0.5), inputs)
    check(ours, value_and_gradients(lambda *x: formula(*x, whole, scale=0.5), inputs))


def test_pair_bias_is_not_repeated(monkeypatch):
    """However many samples there are: the bias that a call is given is that of one structure, where it lies."""
    seen = []
    attention = tilewise.attention

    def spy(q, k, v, bias, **options):
        seen.append((bias.shape, bias.data_ptr(), q.shape))
        return attention(q, k, v, bias=bias, **options)

    monkeypatch.setattr(evoformer, "attention", spy)
    q, k, v, bias = tensors((1, 5, H, S, D), (1, 5, H, S, D), (1, 5, H, S, D), (1, H, S, S))
    attention_pair_bias(q, k, v, bias)
    assert seen == [((1, 1, H, S, S), bias.data_ptr(), q.shape)]


@pytest.mark.parametrize("lead", [(1, 3), (2,)])
@pytest.mark.parametrize("masked", [False, True])
def test_pair_bias_of_a_call_like_an_earlier_one(lead, masked, monkeypatch):
    """Other numbers in tensors that lie as earlier ones did: nobody is asked again, until something differs."""
    empty_cache(monkeypatch)
    shape = (*lead, H, S, D)
    inputs, others = (tensors(shape, shape, shape, (lead[0], H, S, S), seed=seed) for seed in (3, 4))
    mask = torch.arange(S) < S - 1 if masked else None
    mask = None if mask is None else mask.expand(lead[0], S).contiguous()
    value_and_gradients(lambda *x: attention_pair_bias(*x, mask), inputs)
    whole = None if mask is None else mask.view(lead[0], *[1] * len(lead), 1, S)
    bias = (slice(None), None) if len(lead) == 2 else ()
    theirs = value_and_gradients(lambda q, k, v, b: formula(q, k, v, b[bias], whole), others)
    with monkeypatch.context() as patched:
        patched.setattr(tilewise.api, "read_call", None)
        patched.setattr(tilewise.api, "attention_of_leading", None)
        check(value_and_gradients(lambda *x: attention_pair_bias(*x, mask), others), theirs)
        with torch.no_grad():
            check([attention_pair_bias(*others, mask)], theirs[:1])
        more = torch.ones(lead[0], S, dtype=torch.bool) if mask is None else None
        turned = others[3].mT.contiguous().mT
        for call in (
            lambda: attention_pair_bias(*others, more),
            lambda: attention_pair_bias(*others, mask, scale=0.5),
            lambda: attention_pair_bias(*others[:3], turned, mask),
        ):
            with pytest.raises(TypeError, match="NoneType"):
                call()
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(TypeError, match="NoneType"):
                attention_pair_bias(*others, mask)
        finally:
            torch.use_deterministic_algorithms(False)
    with pytest.raises(TypeError, match="mask: dtype must be bool"):
        attention_pair_bias(*others, torch.ones(lead[0], S))


# --- in the Triton kernels ---


def by_triton():
    """In bfloat16's place float32, which the interpreter multiplies exactly."""
    attention = tilewise.attention
    evoformer.attention = lambda *args, **options: attention(*args, **{**options, "backend": "triton"})
    try:
        inputs = triangle_inputs(9, 17, 24, dtype=torch.float32)
        mask = tensors((B, N, 1, 1, 17), seed=1)[0] > -0.5
        ours = value_and_gradients(lambda *x: triangle_attention(*x, mask), inputs)
        theirs = value_and_gradients(lambda *x: formula(*x, mask), [x.double() for x in inputs])
        check(ours, theirs, 1e-5)
    finally:
        evoformer.attention = attention


def test_triton(interpreter):
    interpreter(by_triton)


# --- errors ---


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


X4, X5 = (2, 2, 12, 4), (2, 3, 2, 6, 4)
ERRORS = {
    "triangle, dimensions": (
        lambda: triangle_attention(zeros(2, 6, 4), zeros(2, 6, 4), zeros(2, 6, 4), zeros(6, 6)),
        r"q: expected 4 or 5 dimensions \(B, N, heads, .* got shape \(2, 6, 4\)",
    ),
    "triangle, no bias": (
        lambda: triangle_attention(zeros(*X5), zeros(*X5), zeros(*X5), None),
        "bias: expected a torch.Tensor, got NoneType",
    ),
    "triangle, bias": (
        lambda: triangle_attention(zeros(*X5), zeros(*X5), zeros(*X5), zeros(2, 2, 6, 6)),
        r"bias: shape \(2, 2, 6, 6\) does not broadcast to \(2\|1, 3\|1, 2\|1, 6\|1, 6\|1\)",
    ),
    "triangle, aux": (
        lambda: triangle_attention(zeros(*X5), zeros(*X5), zeros(*X5), zeros(6, 6), return_aux="lse"),
        "return_aux: expected a bool, got 'lse'",
    ),
    "triangle, lengths and a mask": (
        lambda: triangle_attention(*3 * [zeros(*X5)], zeros(6, 6), zeros(6) > 0, kv_lengths=zeros(2, 3, 1, 1, 1).int()),
        "kv_lengths: takes the place of a mask; pass one of the two",
    ),
    "triangle, dtype of lengths": (
        lambda: triangle_attention(*3 * [zeros(*X5)], zeros(6, 6), kv_lengths=zeros(2, 3, 1, 1, 1)),
        "kv_lengths: dtype must be int32 or int64, got torch.float32",
    ),
    "triangle, lengths": (
        lambda: triangle_attention(*3 * [zeros(*X5)], zeros(6, 6), kv_lengths=zeros(2, 3).int()),
        r"kv_lengths: expected shape \(B, N, 1, 1, 1\), got \(2, 3\)",
    ),
    "triangle, number of lengths": (
        lambda: triangle_attention(*3 * [zeros(*X5)], zeros(6, 6), kv_lengths=zeros(2, 4, 1, 1, 1).int()),
        r"kv_lengths: expected shape \(B, N, 1, 1, 1\), got \(2, 4, 1, 1, 1\), where B and N of q are \(2, 3\)",
    ),
    "triangle, device of lengths": (
        lambda: triangle_attention(*3 * [zeros(*X5)], zeros(6, 6), kv_lengths=zeros(2, 3, 1, 1, 1).int().to("meta")),
        "kv_lengths: must be on q's device cpu, got meta",
    ),
    "evoformer, four": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X4), zeros(*X4), zeros(*X4), []),
        r"Q: expected 5 dimensions \(B, N, length, heads, head_dim\), got shape \(2, 2, 12, 4\)",
    ),
    "evoformer, K": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X5), zeros(2, 3, 1, 6, 4), zeros(*X5), []),
        r"K: shape must equal Q's \(2, 3, 2, 6, 4\), got \(2, 3, 1, 6, 4\)",
    ),
    "evoformer, V's dtype": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X5), zeros(*X5), zeros(*X5).half(), []),
        "V: dtype must equal Q's torch.float32, got torch.float16",
    ),
    "evoformer, one tensor": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X5), zeros(*X5), zeros(*X5), zeros(2, 3, 1, 1, 2)),
        "biases: expected a list of at most two tensors, got Tensor",
    ),
    "evoformer, three": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X5), zeros(*X5), zeros(*X5), [None] * 3),
        "biases: expected at most two tensors, got 3",
    ),
    "evoformer, the mask's": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X5), zeros(*X5), zeros(*X5), [zeros(2, 1, 6, 2, 2)]),
        r"biases\[0\]: expected shape \(2, 3, 1, 1, 2\), got \(2, 1, 6, 2, 2\)",
    ),
    "evoformer, the pairs'": (
        lambda: DS4Sci_EvoformerAttention(zeros(*X5), zeros(*X5), zeros(*X5), [None, zeros(2, 3, 1, 1, 2)]),
        r"biases\[1\]: expected shape \(2, 1, 6, 2, 2\), got \(2, 3, 1, 1, 2\)",
    ),
    "pair bias, five for four": (
        lambda: attention_pair_bias(zeros(*X4), zeros(*X4), zeros(*X4), zeros(2, 1, 2, 12, 12)),
        r"pair_bias: expected 4 dimensions, got shape \(2, 1, 2, 12, 12\)",
    ),
    "pair bias": (
        lambda: attention_pair_bias(zeros(*X5), zeros(*X5), zeros(*X5), zeros(3, 2, 6, 6)),
        r"pair_bias: shape \(3, 2, 6, 6\) does not broadcast to \(2, 3, 2, 6, 6\)",
    ),
    "pair bias, mask": (
        lambda: attention_pair_bias(zeros(*X5), zeros(*X5), zeros(*X5), zeros(2, 2, 6, 6), zeros(3, 6).bool()),
        r"mask: shape \(3, 6\) is no mask of the keys of scores \(2, 3, 2, 6, 6\)",
    ),
    "pair bias, mask's dtype": (
        lambda: attention_pair_bias(zeros(*X5), zeros(*X5), zeros(*X5), zeros(2, 2, 6, 6), zeros(2, 6)),
        r"mask: dtype must be bool \(True = visible\), got torch.float32",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, match = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=match):
        call()
