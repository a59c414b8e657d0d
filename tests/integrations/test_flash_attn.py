"""The door for code written for flash-attn against the formula in float64, and against tilewise.attention."""

import inspect
import math
import re

import pytest
import torch
from flash_attn_helpers import CASES, B, D, H, M, N, check, eps, formula, qkv_tensors, tensors, value_and_gradients
from torch import nn

import tilewise
from tilewise.bias import alibi_slopes, t5_bias
from tilewise.integrations import flash_attn
from tilewise.integrations.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


# --- signatures ---

OPTIONS = (
    "dropout_p=0.0", "softmax_scale=None", "causal=False", "window_size=(-1, -1)", "softcap=0.0", "alibi_slopes=None",
    "deterministic=False", "return_attn_probs=False",
)  # fmt: skip
SIGNATURES = {  # of flash-attn 2.8
    "flash_attn_func": ("q", "k", "v", *OPTIONS),
    "flash_attn_kvpacked_func": ("q", "kv", *OPTIONS),
    "flash_attn_qkvpacked_func": ("qkv", *OPTIONS),
    "flash_attn_varlen_func": (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *OPTIONS, "block_table=None"),
    "flash_attn_varlen_kvpacked_func": (
        "q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *OPTIONS),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *OPTIONS),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    ours = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ours == [*SIGNATURES[name], "bias=None"]
    *positional, bias = parameters
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in positional)
    assert bias.kind is bias.KEYWORD_ONLY


# --- results and gradients ---


@pytest.mark.parametrize("Hkv", [4, 2, 1])
@pytest.mark.parametrize("slopes", [None, (H,), (B, H)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_options(case, slopes, Hkv):
    inputs = qkv_tensors(Hkv=Hkv)
    if slopes is not None:
        inputs += [x.abs() for x in tensors(slopes, seed=2)]

    def ours(q, k, v, slopes=None):
        out, lse, probabilities = flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **CASES[case])
        assert probabilities is None
        assert (out.shape, lse.shape) == ((B, M, H, D), (B, H, M))
        return out, lse

    check(
        value_and_gradients(ours, inputs),
        value_and_gradients(lambda q, k, v, slopes=None: formula(q, k, v, slopes=slopes, **CASES[case]), inputs),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("M", "N"), [(5, 5), (1, 7), (7, 3), (0, 3), (3, 0)])
def test_lengths(M, N, causal):
    """Also queries that see nothing: 0, with an lse of -inf."""
    inputs = qkv_tensors(M=M, N=N, Dv=3)

    def finite(out, lse):
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    def ours(*x):
        return finite(*flash_attn_func(*x, causal=causal, return_attn_probs=True)[:2])

    def theirs(*x):
        return finite(*formula(*x, causal=causal))

    check(value_and_gradients(ours, inputs), value_and_gradients(theirs, inputs))
    lse = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)[1]
    blind = M if N == 0 else max(M - N, 0) if causal else 0
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    inputs = qkv_tensors(Hkv=2, dtype=dtype)
    slopes = alibi_slopes(H)
    ours = value_and_gradients(
        lambda *x: flash_attn_func(*x, causal=True, alibi_slopes=slopes, return_attn_probs=True), inputs
    )
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    doubles = [x.double() for x in inputs]
    check(ours, value_and_gradients(lambda *x: formula(*x, causal=True, slopes=slopes), doubles), 20 * eps(dtype))


BIASES = {
    "one for all": (1, H, M, N), "of each sequence": (B, 1, 1, N), "two dimensions": (M, N),
}  # fmt: skip


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_and_slopes(name, slopes):
    inputs = [*qkv_tensors(), *tensors(BIASES[name], seed=3)]
    slopes = alibi_slopes(H) if slopes else None
    check(
        value_and_gradients(lambda q, k, v, b: [flash_attn_func(q, k, v, alibi_slopes=slopes, bias=b)], inputs),
        value_and_gradients(lambda q, k, v, b: formula(q, k, v, slopes=slopes, bias=b)[:1], inputs),
    )


def test_bias_terms_and_slopes():
    q, k, v = qkv_tensors()
    table, matrix = tensors((32, H), (1, H, M, N), seed=4)
    term, slopes = t5_bias(table, bidirectional=True), alibi_slopes(H)
    for bias in (term, (term, matrix), [matrix], ()):
        terms = (bias,) if bias is term else tuple(bias)
        expected = tilewise.attention(
            *(x.transpose(1, 2) for x in (q, k, v)), bias=(*terms, tilewise.bias.alibi(slopes)), softcap=2.0
        )
        ours = flash_attn_func(q, k, v, softcap=2.0, alibi_slopes=slopes, bias=bias)
        torch.testing.assert_close(ours, expected.transpose(1, 2))


def test_slopes_without_a_gradient_of_their_own():
    q, k, v = (x.requires_grad_() for x in qkv_tensors())
    slopes = alibi_slopes(H)
    flash_attn_func(q, k, v, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None
    assert all(x.grad is not None for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_packed(case, dtype):
    """What the same tensors give one by one, and gradients of what they came in."""
    options = CASES[case] | {"return_attn_probs": True, "alibi_slopes": alibi_slopes(H)}
    qkv, q, kv = tensors((B, M, 3, H, D), (B, M, H, D), (B, N, 2, 2, D), dtype=dtype)
    check(
        value_and_gradients(lambda x: flash_attn_qkvpacked_func(x, **options), [qkv]),
        value_and_gradients(lambda x: flash_attn_func(x[:, :, 0], x[:, :, 1], x[:, :, 2], **options), [qkv]),
        eps(dtype),
    )
    check(
        value_and_gradients(lambda q, kv: flash_attn_kvpacked_func(q, kv, **options), [q, kv]),
        value_and_gradients(lambda q, kv: flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options), [q, kv]),
        eps(dtype),
    )


def test_nothing_is_copied_and_the_result_has_views(monkeypatch):
    seen = []

    def spy(q, k, v, **options):
        seen.extend([q, k, v])
        return tilewise.attention(q, k, v, **options)

    monkeypatch.setattr(flash_attn, "attention", spy)
    (qkv,) = tensors((B, M, 3, H, D))
    q, k, v = qkv_tensors()
    for out in (
        flash_attn_qkvpacked_func(qkv),
        flash_attn_func(q, k, v),
        flash_attn_func(q[:1].expand(B, -1, -1, -1), k, v),
    ):
        assert out.is_contiguous()
    pointers = [x.data_ptr() for x in seen]
    assert pointers[:3] == [qkv[:, :, i].data_ptr() for i in range(3)]
    assert pointers[3:] == 2 * [x.data_ptr() for x in (q, k, v)]


def test_positional_arguments():
    """In flash-attn's order."""
    q, k, v = qkv_tensors()
    slopes = alibi_slopes(H)
    out, lse, _ = flash_attn_func(q, k, v, 0.0, 0.5, True, (3, 0), 2.0, slopes, True, True)
    options = {"softmax_scale": 0.5, "causal": True, "window_size": (3, 0), "softcap": 2.0, "slopes": slopes}
    check([out, lse], formula(q, k, v, **options))


# --- dropout, determinism ---


def test_dropout_is_repeated_by_the_seed():
    q, k, v = (x.requires_grad_() for x in qkv_tensors(M=40, N=40))

    def step(seed, p=0.3):
        torch.manual_seed(seed)
        out, lse, _ = flash_attn_func(q, k, v, dropout_p=p, softcap=2.0, return_attn_probs=True)
        return out, lse, *torch.autograd.grad(out.sum(), (q, k, v))

    first, again, other, none = step(0), step(0), step(1), step(0, p=0.0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    torch.testing.assert_close(first[1], none[1])  # the lse knows nothing of it
    torch.manual_seed(0)
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(first[0], tilewise.attention(*transposed, dropout_p=0.3, softcap=2.0).transpose(1, 2))
    assert not flash_attn_func(q, k, v, 1.0).any()


@pytest.mark.parametrize(("flag", "reaches"), [(True, True), (False, None)])
def test_deterministic(flag, reaches, monkeypatch):
    """False is no wish: torch's setting decides."""
    seen = []

    def spy(*args, **options):
        seen.append(options["deterministic"])
        return tilewise.attention(*args, **options)

    monkeypatch.setattr(flash_attn, "attention", spy)
    flash_attn_func(*qkv_tensors(), deterministic=flag)
    assert seen == [reaches]


# --- torch.compile, autocast ---


def test_compiles_without_a_graph_break():
    def layer(q, kv, qkv, slopes, bias):
        both = flash_attn_kvpacked_func(q, kv, 0.0, 0.3, window_size=(3, -1), alibi_slopes=slopes, bias=bias)
        own, lse, _ = flash_attn_qkvpacked_func(qkv, causal=True, softcap=2.0, return_attn_probs=True)
        return both, own, lse

    torch._dynamo.reset()
    inputs = tensors((B, M, H, D), (B, N, 2, 2, D), (B, M, 3, H, D), (B, H), (1, H, M, N))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check(value_and_gradients(compiled, inputs), value_and_gradients(layer, inputs))


def test_autocast():
    q, k, v = qkv_tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k.bfloat16(), v, causal=True)
    assert out.dtype == torch.bfloat16
    check([out], formula(q, k, v, causal=True)[:1], 5e-2)


# --- errors ---

Q, K, V = qkv_tensors(Hkv=2, dtype=torch.float32)
KV, QKV = torch.stack((K, V), 2), torch.zeros(B, M, 3, H, D)
ERRORS = {
    "no tensor": ((Q.tolist(), K, V), {}, TypeError, "q: expected a torch.Tensor, got list"),
    "three dimensions": ((Q, K[0], V), {}, ValueError,
                         "k: expected 4 dimensions (batch, seqlen, heads, head_dim), got shape (9, 2, 8)"),
    "integers": ((Q.int(), K, V), {}, TypeError, "q: dtype must be float16, bfloat16, float32 or float64"),
    "dtype": ((Q, K, V.double()), {}, TypeError, "v: dtype must equal q's torch.float32, got torch.float64"),
    "device": ((Q, K.to("meta"), V), {}, ValueError, "k: must be on q's device cpu, got meta"),
    "batch": ((Q, K[:1], V), {}, ValueError, "k: batch size must equal q's 2, got 1"),
    "head dimension": ((Q, K[..., :4], V), {}, ValueError, "k: head dimension must equal q's 8, got 4"),
    "heads of v": ((Q, K, V[:, :, :1]), {}, ValueError, "v: length and heads must equal k's (9, 2), got (9, 1)"),
    "length of v": ((Q, K, V[:, 1:]), {}, ValueError, "v: length and heads must equal k's (9, 2), got (8, 2)"),
    "heads": ((Q[:, :, :3], K, V), {}, ValueError, "k: its 2 heads must divide q's 3 heads"),
    "no head dimension": ((Q.new_zeros(1, 1, 1, 0),) * 3, {}, ValueError, "q: head dimension must be 1 or more, got 0"),
    "transposed kv": ((Q, KV.transpose(1, 2)), {}, ValueError,
                      "kv: expected shape (batch, seqlen, 2, heads, head_dim), got (2, 2, 9, 2, 8)"),
    "kv's batch": ((Q, KV[:1]), {}, ValueError, "kv: batch size must equal q's 2, got 1"),
    "kv's dtype": ((Q, KV.half()), {}, TypeError, "kv: dtype must equal q's torch.float32, got torch.float16"),
    "kv's heads": ((Q[:, :, :3], KV), {}, ValueError, "kv: its 2 heads must divide q's 3 heads"),
    "kv's head dimension": ((Q, KV[..., :4]), {}, ValueError, "kv: head dimension must equal q's 8, got 4"),
    "two in qkv": ((QKV[:, :, :2],), {}, ValueError,
                   "qkv: expected shape (batch, seqlen, 3, heads, head_dim), got (2, 6, 2, 4, 8)"),
    "no qkv": ((None,), {}, TypeError, "qkv: expected a torch.Tensor, got NoneType"),
    "scale of 0": ((Q, K, V), {"softmax_scale": 0.0}, ValueError,
                   "softmax_scale: must be positive and finite, got 0.0"),
    "scale": ((Q, K, V), {"softmax_scale": "1"}, TypeError, "softmax_scale: expected a float, got str"),
    "no window": ((Q, K, V), {"window_size": None}, TypeError, "window_size: expected a pair (left, right) of ints"),
    "window": ((Q, K, V), {"window_size": 3}, TypeError, "window_size: expected a pair (left, right) of ints"),
    "half a window": ((Q, K, V), {"window_size": (0.5, 0)}, TypeError,
                      "window_size: left width must be an int, -1 for no limit, got 0.5"),
    "softcap": ((Q, K, V), {"softcap": None}, TypeError, "softcap: expected a float, got NoneType"),
    "infinite softcap": ((Q, K, V), {"softcap": math.inf}, ValueError, "softcap: must be positive and finite, got inf"),
    "causal": ((Q, K, V), {"causal": "top-left"}, TypeError, "causal: expected a bool, got 'top-left'"),
    "deterministic": ((Q, K, V), {"deterministic": None}, TypeError, "deterministic: expected a bool, got None"),
    "probabilities": ((Q, K, V), {"return_attn_probs": 1}, TypeError, "return_attn_probs: expected a bool, got 1"),
    "dropout": ((Q, K, V), {"dropout_p": 1.5}, ValueError, "dropout_p: must be a float in [0, 1], got 1.5"),
    "slopes of keys": ((Q, K, V), {"alibi_slopes": torch.ones(2)}, ValueError,
                       "alibi_slopes: expected shape (heads,) = (4,) or (batch, heads) = (2, 4), got (2,)"),
    "integer slopes": ((Q, K, V), {"alibi_slopes": torch.ones(4).int()}, TypeError,
                       "alibi_slopes: dtype must be float32 or another float dtype, got torch.int32"),
    "list of slopes": ((Q, K, V), {"alibi_slopes": [1.0]}, TypeError,
                       "alibi_slopes: expected a torch.Tensor, got list"),
    "slopes' device": ((Q, K, V), {"alibi_slopes": torch.ones(4, device="meta")}, ValueError,
                       "alibi_slopes: must be on q's device cpu, got meta"),
    "bias": ((Q, K, V), {"bias": torch.zeros(B, M, H, N)}, ValueError,
             "bias: shape (2, 6, 4, 9) does not broadcast to (2|1, 4|2|1, 6|1, 9|1)"),
}  # fmt: skip
DOORS = {1: flash_attn_qkvpacked_func, 2: flash_attn_kvpacked_func, 3: flash_attn_func}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    arguments, options, error, message = ERRORS[name]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        DOORS[len(arguments)](*arguments, **options)


# --- a model ---


class SelfAttention(nn.Module):
    """As models for flash-attn have it: one projection, heads in place, no mask but causal."""

    def __init__(self, attend):
        super().__init__()
        self.Wqkv, self.out_proj, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.Wqkv(x).view(batch, length, 3, 4, 8)
        context = self.attend(qkv, dropout_p=0.0, softmax_scale=8**-0.5, causal=True, window_size=(-1, -1))
        return self.out_proj(context.view(batch, length, 32))


def pytorchs(qkv, dropout_p, softmax_scale, causal, window_size):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return nn.functional.scaled_dot_product_attention(
        q, k, v, None, dropout_p, causal, scale=softmax_scale
    ).transpose(1, 2).contiguous()  # fmt: skip


def test_a_model_trains_as_with_pytorchs():
    losses = []
    for attend in (flash_attn_qkvpacked_func, pytorchs):
        torch.manual_seed(0)
        model = nn.Sequential(SelfAttention(attend), nn.Tanh(), SelfAttention(attend)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, target = tensors((2, 12, 32), (2, 12, 32))
        for _ in range(4):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-9)
    assert losses[3] < losses[0]
