"""The doors (attention, explain, SDPA): what they take for a keyword, and what autocast does there."""

import inspect
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from tilewise import attention, explain

B, H, M, N, D = 2, 3, 5, 7, 4


def tensors(M=M, N=N, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=gen, dtype=torch.float64).to(dtype) for n in (M, N, N)]


# --- under autocast ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64, torch.float64),
])  # fmt: skip
def test_autocast_casts_q_k_and_v(dtypes, with_bias, causal):
    """As it does for PyTorch's function; the second call is the usual one, and one without autocast is neither."""
    qkv = [x.to(dtype) for x, dtype in zip(tensors(M, M), dtypes, strict=True)]
    expected_dtype = torch.float64 if dtypes[0] == torch.float64 else torch.bfloat16
    bias = torch.randn(1, H, M, M, dtype=torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    leaves = [x.clone().requires_grad_() for x in (*qkv, *([bias] if with_bias else []))]
    terms = {"bias": leaves[3]} if with_bias else {}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            o, lse = attention(*leaves[:3], causal=causal, return_lse=True, **terms)
            assert explain(*leaves[:3], causal=causal, **terms).problem.dtype == expected_dtype
        assert o.dtype == expected_dtype
        assert lse.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
        gradients = torch.autograd.grad(o.double().square().sum(), leaves)
        assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
        by_hand = [x.to(expected_dtype) for x in leaves[:3]]
        torch.testing.assert_close(o, attention(*by_hand, causal=causal, **terms), rtol=0, atol=0)
        if len(set(dtypes)) == 1:
            assert attention(*leaves[:3], causal=causal, **terms).dtype == dtypes[0]
        else:
            with pytest.raises(TypeError, match="dtype must equal q's"):
                attention(*leaves[:3], causal=causal, **terms)


def test_autocast_as_pytorch_has_it():
    q, k, v = tensors(dtype=torch.float32)
    for dtypes in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        inputs = [x.to(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = attention(*inputs), F.scaled_dot_product_attention(*inputs)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_autocast_names_the_dtypes_that_came(which):
    """float64 beside another dtype, and what is not floating: nothing is cast."""
    arguments = dict(zip("qkv", tensors(dtype=torch.float32), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = arguments | {which: arguments[which].double()}
        with pytest.raises(TypeError, match=r"dtype must equal q's, got torch.float(64|32) with q torch.float(64|32)$"):
            attention(**mixed)
        with pytest.raises(TypeError, match=f"^{which}: dtype must (be|equal).* got torch.int64"):
            attention(**(arguments | {which: arguments[which].long()}))
        with pytest.raises(TypeError, match=f"^{which}: expected a torch.Tensor, got NoneType$"):
            attention(**(arguments | {which: None}))


def test_autocast_of_another_device_changes_nothing():
    qkv = tensors(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else torch.autocast("cpu", enabled=False):
        assert attention(*qkv).dtype == torch.float32
    meta = [x.to("meta") for x in qkv]
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*meta).dtype == torch.float32


def test_autocast_under_torch_compile():
    qkv = tensors(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(*qkv), attention(*qkv, causal=True))
        assert compiled(*qkv).dtype == torch.float32


# --- keywords ---


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("attn_mask", "mask= (bool, True = attend) or bias= (float, added to the scores)"),
        ("is_causal", "causal=, aligned bottom-right"),
        ("softmax_scale", "scale="),
        ("dropout", "dropout_p="),
        ("window_size", "window=(left, right), with None for no limit"),
        ("alibi_slopes", "bias="),
        ("enable_gqa", "k and v with fewer heads as they are"),
    ],
)
def test_another_librarys_keyword_gets_a_hint(keyword, hint):
    start = f"attention() got an unexpected keyword argument '{keyword}'; tilewise.attention takes {hint}"
    with pytest.raises(TypeError, match=f"^{re.escape(start)}"):
        attention(*tensors(), **{keyword: None})


def test_an_unknown_keyword_is_pythons_error():
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'biass'$"):
        attention(*tensors(), biass=None)
    assert "unknown" not in inspect.signature(attention).parameters
    kinds = {p.kind for p in inspect.signature(attention).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_auto_is_the_plans_own_choice():
    qkv = tensors()
    torch.testing.assert_close(attention(*qkv, backend="auto"), attention(*qkv), rtol=0, atol=0)
    assert explain(*qkv, backend="auto").plan == explain(*qkv).plan
