"""The operators beside PyTorch's tools: copy-on-write tensors, the profiler, the counter of FLOPs."""

import pytest
import torch

from tilewise import attention, scaled_dot_product_attention


def tensors(B=2, H=4, Hkv=2, M=5, N=7, D=8, Dv=8, dtype=torch.float32, requires_grad=True):
    return [
        torch.randn(shape, dtype=dtype, requires_grad=requires_grad)
        for shape in ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    ]


# --- copy on write ---


def lazily(tensors):
    """Copies that share their memory with ``tensors`` until somebody writes to it."""
    return [torch._lazy_clone(x.detach()).requires_grad_(x.requires_grad) for x in tensors]


# The bias goes through tilewise's own tiles: PyTorch's fused kernel reads one as if to write, in PyTorch's call too.
@pytest.mark.parametrize(("terms", "biased"), [({"softcap": 3.0}, True), ({"causal": True}, False), ({}, False)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
def test_tensors_that_are_copied_on_write_stay_shared(terms, biased, masked, dtype, trained):
    sources = tensors(dtype=dtype, requires_grad=trained)
    if biased:
        sources.append(torch.randn(1, 4, 5, 7, dtype=dtype, requires_grad=trained))
    if masked:
        sources.append(torch.rand(1, 1, 1, 7) < 0.7)
    before = [x.detach().clone() for x in sources]
    for _ in range(2):  # the first call prepares, the second finds that done
        lazy = lazily(sources)
        bias, mask = lazy[3] if biased else None, lazy[-1] if masked else None
        o = attention(*lazy[:3], bias=bias, mask=mask, **terms)
        if trained:
            o.backward(torch.randn_like(o))
        assert all(torch._C._is_cow_tensor(x) for x in lazy)
        assert all(torch.equal(x, y) for x, y in zip(sources, before, strict=True))


def test_the_sdpa_door_leaves_tensors_shared():
    sources = tensors(Hkv=4)
    lazy = lazily(sources)
    o = scaled_dot_product_attention(*lazy, is_causal=True)
    o.backward(torch.randn_like(o))
    assert all(torch._C._is_cow_tensor(x) for x in lazy)
