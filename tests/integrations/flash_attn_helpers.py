"""What the tests of the door for flash-attn share: sizes, options, and the formula in plain PyTorch."""

import math

import torch

B, M, N, H, D = 2, 6, 9, 4, 8


def tensors(*shapes, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def qkv_tensors(*, Hkv=H, M=M, N=N, Dv=D, dtype=torch.float64):
    return tensors((B, M, H, D), (B, N, Hkv, D), (B, N, Hkv, Dv), dtype=dtype)


def formula(q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, slopes=None, bias=None):
    """out and softmax_lse as flash-attn documents them, with the matrix of scores; a row that sees nothing is 0."""
    M, N, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    place = torch.arange(M)[:, None] + N - M
    key = torch.arange(N)
    if slopes is not None:
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None] * (place - key).abs()
    if bias is not None:
        s = s + bias
    left, right = window_size
    seen = torch.ones(M, N, dtype=torch.bool)
    if causal:
        seen &= key <= place
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    s = s.masked_fill(~seen, -torch.inf)
    p = torch.where(seen.any(-1)[:, None], s, 0.0).softmax(-1).masked_fill(~seen, 0.0)
    return (p @ v).transpose(1, 2), s.logsumexp(-1)


def value_and_gradients(function, inputs):
    """The outputs, and the gradients of a sum of them with fixed weights."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [x for x in function(*leaves) if x is not None]
    total = sum((x * tensors(x.shape, dtype=x.dtype, seed=1)[0]).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves)]


def check(got, expected, tolerance=1e-10):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


CASES = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "window to the left": {"window_size": [3, -1]},
    "window to the right": {"window_size": (-1, 0)},
    "a window as long as the keys": {"window_size": (N, N)},
    "causal and window": {"causal": True, "window_size": (2, 4)},
    "softcap": {"softcap": 1.5},
    "negative softcap": {"softcap": -1.0},
    "all": {"causal": True, "window_size": (4, 0), "softcap": 2.0, "softmax_scale": 0.7},
}


def eps(dtype):
    return torch.finfo(dtype).eps
