"""The doors of structure models on a device, against the formula in float64: forward and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention, window_pair_attention
from tilewise.windows.api import Windows

DEVICE, BRAIN = "cuda", torch.bfloat16
DTYPES = [BRAIN, torch.float16, torch.float32]


def drawn(*shapes, dtype=BRAIN, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]


def gradients(function, inputs, do):
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves)
    return [o, *torch.autograd.grad(o, leaves, do.to(o.dtype))]


def formula(q, k, v, bias, mask=None):
    """In the inputs' dtype; a row that sees nothing is 0."""
    s = (q @ k.mT) * q.shape[-1] ** -0.5 + bias
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    seen = (s > -torch.inf).any(-1, keepdim=True)
    return s.where(seen, 0.0).softmax(-1).where(seen, 0.0) @ v


def check(ours, unfused, exact):
    """The error of each, by Euclidean norms, within twice that of unfused torch and half a rounding."""
    for x, y, z in zip(ours, unfused, exact, strict=True):
        assert x.shape == z.shape
        error, theirs = ((t.double() - z).norm().item() for t in (x, y))
        assert error <= 2 * theirs + torch.finfo(x.dtype).eps / 2 * z.norm().item()


def held(door, reference, inputs, do):
    wide = [x.double() for x in inputs]
    return gradients(door, inputs, do), gradients(reference, inputs, do), gradients(reference, wide, do)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [37, 128, 260])
@pytest.mark.parametrize("masked", [False, True])
def test_triangle(S, masked, dtype):
    inputs = drawn(*[(1, 5, 4, S, 32)] * 3, (1, 1, 4, S, S), dtype=dtype)
    (do,) = drawn((1, 5, 4, S, 32), seed=1)
    mask = None
    if masked:
        mask = torch.rand(1, 5, 1, 1, S, device=DEVICE) < 0.8
        mask[0, 3] = False
    check(*held(lambda *x: triangle_attention(*x, mask), lambda *x: formula(*x, mask), inputs, do))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_bias(dtype):
    inputs = drawn(*[(1, 3, 4, 150, 48)] * 3, (1, 4, 150, 150), dtype=dtype)
    (do,) = drawn((1, 3, 4, 150, 48), seed=1)
    check(*held(attention_pair_bias, lambda q, k, v, bias: formula(q, k, v, bias[:, None]), inputs, do))


def gathered(N, mask=None, q_block=32, k_block=128, edges="clip"):
    """The formula by windows."""
    windows = Windows(N, q_block, k_block, edges)
    blocks = windows.blocks
    begins = torch.tensor([windows.begin(b) for b in range(blocks)], device=DEVICE)
    places = begins[:, None] + torch.arange(k_block, device=DEVICE)
    seen = ((places >= 0) & (places < N))[None]
    places = places.clamp(0, N - 1)
    if mask is not None:
        seen = seen & mask[:, places]

    def reference(q, k, v, bias):
        q = torch.nn.functional.pad(q, (0, 0, 0, blocks * q_block - N)).unflatten(2, (blocks, q_block))
        o = formula(q, k[:, :, places], v[:, :, places], bias, seen[:, None, :, None])
        return o.flatten(2, 3)[:, :, :N]

    return reference


def atoms(B, N, D=32, q_block=32, k_block=128, dtype=BRAIN, bias=(1, 2)):
    """q, k, v in projections' order and the bias, which has all samples."""
    inputs = [x.transpose(1, 2) for x in drawn(*[(B, N, 2, D)] * 3, dtype=dtype)]
    return inputs + drawn((*bias, -(-N // q_block), q_block, k_block), dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [333, 512])
@pytest.mark.parametrize(("B", "mask"), [(1, None), (1, 1), (3, None), (3, 1), (3, 3)])
@pytest.mark.parametrize("backend", [None, "hopper"])
def test_windows(backend, B, mask, N, dtype):
    """By their own kernels, and by four blocks as one of `tilewise.attention`; a mask that the bias holds there, and
    one that it cannot."""
    if backend is not None and dtype == torch.float32:
        pytest.skip("the hopper backend takes 16 bits")
    inputs = atoms(B, N, dtype=dtype)
    (do,) = drawn((B, 2, N, 32), seed=1)
    seen = None
    if mask is not None:
        seen = torch.rand(mask, N, device=DEVICE) < 0.8
        seen[:, 64:260] = False
    door = lambda *x: window_pair_attention(*x, seen, backend=backend)  # noqa: E731
    check(*held(door, gathered(N, seen), inputs, do))


@pytest.mark.parametrize("edges", ["clip", "shift"])
@pytest.mark.parametrize(
    ("q_block", "k_block", "D"),
    [(32, 128, 16), (32, 128, 48), (16, 64, 64), (24, 100, 8), (32, 200, 32), (64, 192, 32)],
)
@pytest.mark.parametrize("bias", [(1, 2), (3, 1), (3, 2)])
def test_windows_of_other_sizes(bias, q_block, k_block, D, edges):
    N = 400 + q_block // 2
    inputs = atoms(3, N, D, q_block, k_block, bias=bias)
    inputs[3] = inputs[3].movedim(1, -1).contiguous().movedim(-1, 1)  # heads last, as a projection of pairs leaves them
    (do,) = drawn((3, 2, N, D), seed=1)
    door = lambda *x: window_pair_attention(*x, None, q_block, k_block, edges)  # noqa: E731
    check(*held(door, gathered(N, None, q_block, k_block, edges), inputs, do))


def test_windows_of_many_samples():
    """So many that a program computes several."""
    inputs = atoms(24, 4096)
    (do,) = drawn((24, 2, 4096, 32), seed=1)
    check(*held(window_pair_attention_of(None), gathered(4096), inputs, do))


def window_pair_attention_of(mask):
    return lambda *x: window_pair_attention(*x, mask)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears:UserWarning")
def test_windows_are_one_launch_each_way():
    from torch.profiler import ProfilerActivity, profile

    inputs = [x.requires_grad_() for x in atoms(1, 512)]
    mask = torch.ones(1, 512, dtype=torch.bool, device=DEVICE)
    (do,) = drawn((1, 2, 512, 32), seed=1)

    def both():
        torch.autograd.grad(window_pair_attention(*inputs, mask), inputs, do)

    both()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        both()
        torch.cuda.synchronize()
    events = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(events) == ["backward_kernel", "forward_kernel"]


def test_windows_at_other_addresses():
    """A bias at addresses that are and are not multiples of 16 bytes, between its calls, and gradients on a stream."""
    inputs = atoms(1, 352)
    size = inputs[3].numel()
    (numbers,) = drawn((size + 8,))
    stream = torch.cuda.Stream()
    for n in (0, 1, 8, 3, 0):
        bias = numbers[n : n + size].view(inputs[3].shape)
        with torch.cuda.stream(stream if n else torch.cuda.current_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            found = gradients(window_pair_attention_of(None), [*inputs[:3], bias], torch.ones_like(inputs[0]))
        torch.cuda.synchronize()
        again = gradients(window_pair_attention_of(None), [*inputs[:3], bias.clone()], torch.ones_like(inputs[0]))
        assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own use
def test_windows_compile():
    torch._dynamo.reset()
    inputs = atoms(1, 333)
    mask = torch.arange(333, device=DEVICE)[None] < 300
    (do,) = drawn((1, 2, 333, 32), seed=1)
    door = window_pair_attention_of(mask)
    compiled = torch.compile(door, fullgraph=True)
    ours, eager = gradients(compiled, inputs, do), gradients(door, inputs, do)
    assert all(torch.equal(x, y) for x, y in zip(ours, eager, strict=True))


@pytest.mark.parametrize("edges", ["clip", "shift"])
def test_windows_repeat_bits_and_hide_nan(edges):
    """NaN in hidden keys, values and places of the bias that are nobody's; equal bits every time."""
    N = 333
    q, k, v = drawn(*[(2, 2, N, 32)] * 3)
    (bias,) = drawn((1, 2, 11, 32, 128), seed=2)
    (do,) = drawn((2, 2, N, 32), seed=1)
    mask = torch.ones(1, N, dtype=torch.bool, device=DEVICE)
    mask[:, [0, 70, N - 1]] = False
    call = lambda *x: window_pair_attention(*x, mask, edges=edges)  # noqa: E731
    clean = gradients(call, (q, k, v, bias), do)
    for x in (k, v):
        x[:, :, [0, 70, N - 1]] = torch.nan
    bias[:, :, 10, 13:] = torch.nan
    if edges == "clip":
        bias[:, :, 0, :, :48] = torch.nan
    found = [gradients(call, (q, k, v, bias), do) for _ in range(3)]
    for other in found:
        assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True))
    for x, y in zip(found[0], clean, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_overlapping_windows_are_summed_in_float32():
    """1 and three numbers that bfloat16 would lose one after the other."""
    for edges in ("clip", "shift"):
        x = torch.zeros(1, 1, 8, 8, dtype=BRAIN, device=DEVICE, requires_grad=True)
        (windows,) = Windows(8, 1, 4, edges).of(x)
        cotangent = torch.full_like(windows, 2.0**-9)
        cotangent[..., 0, :] = 1.0
        (gradient,) = torch.autograd.grad(windows, x, cotangent)
        expected = torch.tensor(1 + 3 * 2.0**-9).to(BRAIN).item()
        assert isinstance(gradient, Tensor)
        assert gradient[0, 0, 3].unique().tolist() == [expected]
        assert expected != 1.0
