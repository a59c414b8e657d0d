"""flash-attn's functions of sequences that lie end to end: each sequence by the formula in float64."""

import itertools
import re

import pytest
import torch
from flash_attn_helpers import CASES, B, D, H, N, check, eps, formula, tensors, value_and_gradients
from torch import nn

from tilewise.bias import alibi_slopes
from tilewise.integrations.flash_attn import (
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

QUERIES, KEYS = [0, 4, 4, 5, 11], [0, 7, 9, 9, 14]  # also without queries, or without keys
LONGEST = (6, 7)


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


def places(queries=QUERIES, keys=KEYS):
    return [torch.tensor(x, dtype=torch.int32) for x in (queries, keys)]


def one_by_one(q, k, v, queries=QUERIES, keys=KEYS, slopes=None, bias=None, **options):
    """Each sequence by the formula; slopes (B, H) and a padded bias have a row for each."""
    outs, sums = [], []
    for b, (i, j, m, n) in enumerate(zip(queries, keys, queries[1:], keys[1:], strict=False)):
        own = {
            "slopes": slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            "bias": None if bias is None else bias[b if bias.shape[0] > 1 else 0, :, : m - i, : n - j],
        }
        out, lse = formula(q[None, i:m], k[None, j:n], v[None, j:n], **own, **options)
        outs.append(out[0])
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, -1)


def with_finite_sums(function):
    """``function`` with 0 for the -inf of queries that see nothing."""

    def finite(*inputs):
        out, lse, *_ = function(*inputs)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return finite


@pytest.mark.parametrize("slopes", [None, (H,), (len(KEYS) - 1, H)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sequences_end_to_end(case, slopes):
    options = CASES[case]
    inputs = tensors((11, H, D), (14, 2, D), (14, 2, 3))
    if slopes is not None:
        inputs += [x.abs() for x in tensors(slopes, seed=2)]

    def ours(q, k, v, slopes=None):
        out, lse, probabilities = flash_attn_varlen_func(
            q, k, v, *places(), *LONGEST, alibi_slopes=slopes, return_attn_probs=True, **options
        )
        assert probabilities is None
        assert (out.shape, lse.shape) == ((11, H, 3), (H, 11))
        assert out.is_contiguous()
        return out, lse

    def theirs(q, k, v, slopes=None):
        return one_by_one(q, k, v, slopes=slopes, **options)

    check(value_and_gradients(with_finite_sums(ours), inputs), value_and_gradients(with_finite_sums(theirs), inputs))
    ours, theirs = ours(*inputs)[1], theirs(*inputs)[1]
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_sequences_with_a_bias(batch, slopes):
    """Padded, with its gradient."""
    inputs = tensors((11, H, D), (14, H, D), (14, H, D), (batch, H, *LONGEST))
    slopes = alibi_slopes(H) if slopes else None
    check(
        value_and_gradients(
            lambda q, k, v, b: [
                flash_attn_varlen_func(q, k, v, *places(), *LONGEST, causal=True, alibi_slopes=slopes, bias=b)
            ],
            inputs,
        ),
        value_and_gradients(lambda q, k, v, b: one_by_one(q, k, v, slopes=slopes, bias=b, causal=True)[:1], inputs),
    )


def test_sequences_with_a_bias_that_lies_packed():
    """A number for each key, beside slopes, as the padded one that says the same."""
    q, k, v, numbers = (x.requires_grad_() for x in tensors((11, H, D), (14, H, D), (14, H, D), (H, 14)))
    padded = torch.stack([
        nn.functional.pad(numbers[:, j:n], (0, LONGEST[1] - (n - j))) for j, n in itertools.pairwise(KEYS)
    ])[:, :, None]  # fmt: skip
    outs = [
        flash_attn_varlen_func(q, k, v, *places(), *LONGEST, causal=True, alibi_slopes=alibi_slopes(H), bias=bias)
        for bias in (numbers, padded)
    ]
    check(*([out, *torch.autograd.grad(out.square().sum(), (q, k, v, numbers))] for out in outs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("case", ["causal", "window", "all"])
def test_packed_sequences(case, dtype):
    options = CASES[case] | {"return_attn_probs": True, "alibi_slopes": alibi_slopes(H)}
    qkv, q, kv = tensors((14, 3, H, D), (11, H, D), (14, 2, 2, D), dtype=dtype)
    both, lengths = places(KEYS, KEYS), places()
    check(
        value_and_gradients(lambda x: flash_attn_varlen_qkvpacked_func(x, both[0], 7, **options), [qkv]),
        value_and_gradients(
            lambda x: flash_attn_varlen_func(x[:, 0], x[:, 1], x[:, 2], *both, 7, 7, **options), [qkv]
        ),
        eps(dtype),
    )  # fmt: skip
    check(
        value_and_gradients(
            with_finite_sums(lambda q, x: flash_attn_varlen_kvpacked_func(q, x, *lengths, *LONGEST, **options)), [q, kv]
        ),
        value_and_gradients(
            with_finite_sums(lambda q, x: flash_attn_varlen_func(q, x[:, 0], x[:, 1], *lengths, *LONGEST, **options)),
            [q, kv],
        ),
        eps(dtype),
    )


def test_dropout_of_sequences_is_repeated_by_the_seed():
    (qkv,) = tensors((60, 3, H, D))
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(flash_attn_varlen_qkvpacked_func(qkv, torch.tensor([0, 25, 60]), 35, 0.3))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_a_padded_batch_without_its_padding():
    """As encoders do it: take the tokens out, attend, put them back."""
    (qkv,) = tensors((B, N, 3, H, D))
    qkv.requires_grad_()
    tokens = torch.arange(N) < torch.tensor([N, 5])[:, None]
    lengths = tokens.sum(-1)
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = flash_attn_varlen_qkvpacked_func(qkv[tokens], cu_seqlens, int(lengths.max()))
    out = torch.zeros(B, N, H, D, dtype=packed.dtype).index_put(tokens.nonzero(as_tuple=True), packed)
    hidden = torch.zeros(B, 1, 1, N, dtype=torch.float64).masked_fill(~tokens[:, None, None], -torch.inf)
    padded = flash_attn_qkvpacked_func(qkv, bias=hidden) * tokens[:, :, None, None]
    torch.testing.assert_close(out, padded)
    gradients = [torch.autograd.grad(x.square().sum(), qkv)[0] for x in (out, padded)]
    torch.testing.assert_close(*gradients)


# --- errors ---

CU, LONG = places(), LONGEST
KV, QKV = torch.zeros(B, N, 2, 2, D), torch.zeros(B, 6, 3, H, D)
VQ, VK, VV = tensors((11, H, D), (14, 2, D), (14, 2, D))
VARLEN_ERRORS = {
    "pages": (flash_attn_varlen_func, (VQ, VK, VV, *CU, *LONG), {"block_table": CU[0]}, NotImplementedError,
              "block_table: keys and values in pages are not implemented"),
    "four dimensions": (flash_attn_varlen_func, (VQ[None], VK, VV, *CU, *LONG), {}, ValueError,
                        "q: expected 3 dimensions (total, heads, head_dim), got shape (1, 11, 4, 8)"),
    "no lengths": (flash_attn_varlen_func, (VQ, VK, VV, None, CU[1], *LONG), {}, TypeError,
                   "cu_seqlens_q: expected a torch.Tensor, got NoneType"),
    "lengths of keys": (flash_attn_varlen_func, (VQ, VK, VV, CU[0], CU[1][1:], *LONG), {}, ValueError,
                        "cu_seqlens_k: expected shape (5,) for 4 sequences, got (4,)"),
    "longest of keys": (flash_attn_varlen_func, (VQ, VK, VV, *CU, 6, 7.0), {}, TypeError,
                        "max_seqlen_k: expected an int, got float"),
    "float lengths": (flash_attn_varlen_kvpacked_func, (VQ, torch.stack((VK, VV), 1), CU[0].float(), CU[1], *LONG), {},
                      TypeError, "cu_seqlens_q: dtype must be int32 or int64, got torch.float32"),
    "dense kv": (flash_attn_varlen_kvpacked_func, (VQ, KV, *CU, *LONG), {}, ValueError,
                 "kv: expected shape (total_k, 2, heads, head_dim), got (2, 9, 2, 2, 8)"),
    "dense qkv": (flash_attn_varlen_qkvpacked_func, (QKV, CU[0], 6), {}, ValueError,
                  "qkv: expected shape (total, 3, heads, head_dim), got (2, 6, 3, 4, 8)"),
    "two dimensions of lengths": (flash_attn_varlen_qkvpacked_func, (QKV[0], CU[0][None], 6), {}, ValueError,
                                  "cu_seqlens: expected shape (batch + 1,), got (1, 5)"),
    "lengths elsewhere": (flash_attn_varlen_qkvpacked_func, (QKV[0], CU[0].to("meta"), 6), {}, ValueError,
                          "cu_seqlens: must be on q's device cpu, got meta"),
    "no longest": (flash_attn_varlen_qkvpacked_func, (QKV[0], CU[0], None), {}, TypeError,
                   "max_seqlen: expected an int, got NoneType"),
    "a negative longest": (flash_attn_varlen_qkvpacked_func, (QKV[0], CU[0], -1), {}, ValueError,
                           "max_seqlen: must be 0 or more, got -1"),
    "slopes": (flash_attn_varlen_func, (VQ, VK, VV, *CU, *LONG), {"alibi_slopes": torch.ones(2, 4)}, ValueError,
               "alibi_slopes: expected shape (heads,) = (4,) or (batch, heads) = (4, 4), got (2, 4)"),
    "scale": (flash_attn_varlen_func, (VQ, VK, VV, *CU, *LONG), {"softmax_scale": -1.0}, ValueError,
              "softmax_scale: must be positive and finite, got -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARLEN_ERRORS)
def test_errors_of_sequences_name_the_argument(name):
    door, arguments, options, error, message = VARLEN_ERRORS[name]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        door(*arguments, **options)


def test_a_known_call_is_checked():
    """A number of another type is refused although an equal call is cached; an equal call is what it was."""
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    lengths = torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9]), 5, 5
    o = flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    known = flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)
    assert torch.equal(o, known[0])
    assert (known[1].shape, known[2]) == ((2, 9), None)
    assert torch.equal(o, flash_attn_varlen_func(q, k, v, *lengths, window_size=(-1, 0)))
    assert torch.equal(o, flash_attn_varlen_func(q, k, v, *lengths, causal=True, softcap=-1.0, deterministic=True))
    for options, name in (
        ({"causal": 1}, "causal"), ({"deterministic": 0}, "deterministic"), ({"softcap": False}, "softcap"),
        ({"window_size": (True, 0)}, "window_size"), ({"return_attn_probs": 0}, "return_attn_probs"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name}: "):
            flash_attn_varlen_func(q, k, v, *lengths, **{"causal": True} | options)
