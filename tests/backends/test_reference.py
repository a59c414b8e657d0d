"""The reference against the textbook formula and plain autograd, in float64, sharing no code with tilewise.spec."""

import math

import pytest
import torch

from tilewise import attention

B, H, HKV, M, N, D, DV = 2, 4, 2, 5, 7, 6, 3
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def visible_pairs(M, N, causal, window):
    """The definition of causal and window, a pair at a time."""
    left, right = window or (None, None)
    rows = []
    for i in range(M):
        centre = i + N - M
        rows.append(
            [
                (not causal or j <= centre)
                and (left is None or j >= centre - left)
                and (right is None or j <= centre + right)
                for j in range(N)
            ]
        )
    return torch.tensor(rows, dtype=torch.bool).reshape(M, N)


def textbook(q, k, v, bias=None, mask=None, causal=False, window=None, scale=None, softcap=None):
    """softmax(softcap(scale q k^T) + bias) v, one head after the other; what is hidden takes part in nothing."""
    (B, H, M, D), (Hkv, N) = q.shape, k.shape[1:3]

    def of_head(x, b, h):
        return x[b if x.shape[0] > 1 else 0, h * x.shape[1] // H].expand(M, N)

    outputs, lses = [], []
    for b in range(B):
        for h in range(H):
            s = q[b, h] @ k[b, h * Hkv // H].T * (D**-0.5 if scale is None else scale)
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            seen = visible_pairs(M, N, causal, window)
            if bias is not None:
                s = s + of_head(bias, b, h)
                seen = seen & (of_head(bias, b, h) != -math.inf)
            if mask is not None:
                seen = seen & of_head(mask, b, h)
            rows = []
            for i in range(M):
                s_i, v_i = s[i, seen[i]], v[b, h * Hkv // H][seen[i]]
                lses.append(torch.logsumexp(s_i, 0))
                rows.append(torch.softmax(s_i, 0) @ v_i)
            outputs.append(torch.stack(rows))
    return torch.stack(outputs).view(B, H, M, -1), torch.stack(lses).view(B, H, M)


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    return [
        torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((B, H, M, D), (B, HKV, N, D), (B, HKV, N, DV))
    ]


def hide_some(*shape):
    """A mask whose first query row, where it has one for itself, sees nothing."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(shape, generator=generator) < 0.6
    if shape[2] > 1:
        mask[:, :, 0] = False
    return mask


def bias_of(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def values_and_gradients(function, tensors, **terms):
    """o, lse and the gradient of a loss that uses both, with respect to q, k, v and the bias."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    bias = terms.pop("bias", None)
    if bias is not None:
        bias = bias.detach().clone().requires_grad_()
        leaves.append(bias)
    o, lse = function(*leaves[:3], bias=bias, **terms)
    generator = torch.Generator().manual_seed(4)
    do, dlse = (torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype) for x in (o, lse))
    loss = (o * do).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()
    return o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def reference(q, k, v, **terms):
    return attention(q, k, v, return_lse=True, backend="reference", **terms)


CASES = {
    "plain": {},
    "scale": {"scale": 0.37},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "left window": {"window": (3, None)},
    "causal window": {"causal": True, "window": (1, 4)},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": bias_of(B, H, M, N)},
    "bias of key/value heads": {"bias": bias_of(1, HKV, M, N)},
    "bias of keys": {"bias": bias_of(B, 1, 1, N)},
    "bias of queries": {"bias": bias_of(1, H, M, 1)},
    "bias of nothing": {"bias": bias_of(1, 1, 1, 1)},
    "mask": {"mask": hide_some(B, H, M, N)},
    "mask of key/value heads": {"mask": hide_some(1, HKV, M, N)},
    "mask of keys": {"mask": hide_some(B, 1, 1, N)},
    "bias hides": {"bias": bias_of(1, 1, M, N).masked_fill(~hide_some(1, 1, M, N), -math.inf)},
    "everything": {
        "bias": bias_of(B, HKV, 1, N), "mask": hide_some(1, H, M, N), "causal": True, "window": (4, None),
        "softcap": 2.0, "scale": 0.8,
    },
}  # fmt: skip


@pytest.mark.parametrize("terms", [pytest.param(terms, id=name) for name, terms in CASES.items()])
def test_reference_is_the_textbook(terms):
    ours = values_and_gradients(reference, inputs(), **terms)
    theirs = values_and_gradients(textbook, inputs(), **terms)
    for x, expected in zip(ours, theirs, strict=True):
        assert x.shape == expected.shape
        assert expected.isfinite().all() or (expected == -math.inf).any()  # -inf: the lse of a row that sees nothing
        torch.testing.assert_close(x, expected, **EXACT)


@pytest.mark.parametrize(("queries", "keys"), [(7, 4), (4, 7), (1, 7), (7, 1)])
def test_causal_is_bottom_right(queries, keys):
    q, k, v = torch.randn(1, 1, queries, D), torch.randn(1, 1, keys, D), torch.randn(1, 1, keys, DV)
    tensors = [x.double() for x in (q, k, v)]
    ours = values_and_gradients(reference, tensors, causal=True)
    for x, expected in zip(ours, values_and_gradients(textbook, tensors, causal=True), strict=True):
        torch.testing.assert_close(x, expected, **EXACT)
    o, lse = ours[:2]
    blind = max(queries - keys, 0)  # queries before the first key
    assert (o[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -math.inf).all()
    assert lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_are_rounded_once(dtype):
    """What the reference gives in 16 bits is the float64 result on the same inputs, rounded."""
    tensors, bias = inputs(dtype), bias_of(B, 1, M, N).to(torch.bfloat16)
    ours = values_and_gradients(reference, tensors, bias=bias, causal=True)
    theirs = values_and_gradients(textbook, [x.double() for x in tensors], bias=bias.double(), causal=True)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype, torch.bfloat16]
    # The cotangents that both losses draw are rounded to the output's dtype: only the forward is compared bit for bit.
    torch.testing.assert_close(ours[0], theirs[0].to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(ours[1], theirs[1].float(), rtol=0, atol=0)


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_is_hidden_reaches_nothing(planted, softcap):
    """NaN and infinity in a key and value that nobody sees: the numbers as without, and zero gradients for them."""
    q, k, v = inputs()
    mask = torch.ones(1, 1, 1, N, dtype=torch.bool)
    mask[..., 2] = False
    bias = bias_of(1, H, M, N)
    bias[..., 5] = -math.inf
    bias[..., 2] = planted  # hidden by the mask
    clean = values_and_gradients(reference, (q, k, v), bias=bias.nan_to_num(), mask=mask, softcap=softcap)
    # nan_to_num made the hidden bias finite, and that of key 5 a number that hides it all the same.
    for x in (k, v):
        x[:, :, [2, 5]] = planted
    spoiled = values_and_gradients(reference, (q, k, v), bias=bias, mask=mask, softcap=softcap)
    for x, expected in zip(spoiled, clean, strict=True):
        torch.testing.assert_close(x, expected, **EXACT)
    _, _, _, dk, dv, dbias = spoiled
    for gradient in (dk[:, :, [2, 5]], dv[:, :, [2, 5]], dbias[..., [2, 5]]):
        assert (gradient == 0).all()


def test_what_one_query_does_not_see_reaches_only_the_others():
    """Causal: NaN in the last value reaches the last query alone; NaN in its key makes that whole row NaN."""
    for spoil_key in (False, True):
        q, k, v = inputs()
        (k if spoil_key else v)[0, 0, -1, 0] = math.nan
        o, lse = reference(q, k, v, causal=True)
        spoiled = torch.zeros(B, H, M, DV, dtype=torch.bool)
        spoiled[0, : H // HKV, -1, : DV if spoil_key else 1] = True
        assert torch.equal(o.isnan(), spoiled)
        assert torch.equal(lse.isnan(), spoiled.any(-1) & spoil_key)


def test_a_visible_infinity_is_not_hidden():
    q, k, v = inputs()
    v[0, 0, 0, 1] = math.inf
    v[0, 1, 0, 2] = -math.inf
    o, _ = reference(q, k, v)
    assert (o[0, : H // HKV, :, 1] == math.inf).all()
    assert (o[0, H // HKV :, :, 2] == -math.inf).all()
    assert o[1].isfinite().all()


def test_a_row_that_sees_nothing():
    mask = hide_some(B, H, M, N)
    o, lse, dq, _, _, dbias = values_and_gradients(reference, inputs(), mask=mask, bias=bias_of(B, H, M, N))
    assert (o[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -math.inf).all()
    assert (dq[:, :, 0] == 0).all()
    assert (dbias[:, :, 0] == 0).all()


def test_a_row_at_a_very_negative_bias_is_a_mean():
    """Its LSE is -1e30, with or without the logarithm of the number of keys."""
    v = torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True)
    q, k = torch.randn(1, 1, 2, 4, dtype=torch.float64), torch.randn(1, 1, 5, 4, dtype=torch.float64)
    o = attention(q, k, v, bias=torch.full((1,), -1e30, dtype=torch.float64), backend="reference")
    torch.testing.assert_close(o, v.mean(2, keepdim=True).expand(o.shape))
    torch.testing.assert_close(torch.autograd.grad(o.sum(), v)[0], torch.full_like(v, 2 / 5))
