"""The doors: what they take for a keyword."""

import inspect
import re

import pytest
import torch

from tilewise import attention, explain

B, H, M, N, D = 2, 3, 5, 7, 4


def tensors(M=M, N=N, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=gen, dtype=torch.float64).to(dtype) for n in (M, N, N)]


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
