"""Biases that runs of batch elements share on the device: one launch, with each way to sum the bias's gradient."""

from __future__ import annotations

import pytest
import torch
from bias_runs import RunsCase, hold_runs

HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize(
    "case",
    [
        RunsCase(runs=2, rows=64, H=4, Hkv=4, M=128, N=128),  # D=32: three elements a program, and one is left
        RunsCase("hmn", "r11n", runs=3, rows=50, H=4, Hkv=4, M=136, N=200, planted=True),  # two are left
        RunsCase("hmn", "r11n", runs=4, rows=33, H=4, Hkv=2, M=160, N=192),  # none is left
        RunsCase("1mn", "r11n", runs=3, rows=40, H=4, Hkv=4, M=72, N=264, planted=True),
        RunsCase("hmn", runs=4, rows=2, M=300, N=704),  # sums of two, in dBias's dtype
        RunsCase("hmn", runs=3, rows=14, M=260, N=520),  # two such sums
        RunsCase("kmn", runs=2, rows=20, H=4, M=260, N=520, deterministic=True),
        RunsCase("hmn", runs=3, rows=5, M=257, N=1030, options=(("causal", True),)),  # rows of no multiple of 16 bytes
        RunsCase("hmn", "r1mn", runs=2, rows=12, M=260, N=520, planted=True),
        RunsCase("hmn", "1hmn", runs=2, rows=3, M=129, N=200, bias_dtype=torch.float32),
        RunsCase("hmn", runs=3, rows=4, M=260, N=520, trained=False),
        RunsCase("hmn", "r11n", runs=2, rows=40, M=49, N=49),
    ],
    ids=str,
)
def test_runs(backend, case, D):
    hold_runs(case._replace(D=D, dtype=torch.bfloat16), backend, "cuda")


@pytest.mark.parametrize("lead", [(2, 40), (2, 2, 20)])
def test_runs_by_any_backend(lead):
    """Chosen by the planner, and equal bits in a second call, which is prepared."""
    from tilewise import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(*lead, 4, 256, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(lead[0], *(1 for _ in lead[1:]), 4, 256, 256, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(*lead, 1, 1, 256, device="cuda") < 0.7
    first, second = (attention(q, k, v, bias=bias, mask=mask) for _ in range(2))
    assert torch.equal(first, second)
    each = [attention(q[n], k[n], v[n], bias=bias[n], mask=mask[n]) for n in range(lead[0])]
    torch.testing.assert_close(first, torch.stack(each), rtol=0, atol=2**-6)


@HOPPER
@pytest.mark.parametrize(("H", "Hkv", "deterministic"), [(4, 2, True), (32, 1, False)])
def test_a_bias_of_groups_of_heads_with_many_heads(H, Hkv, deterministic):
    """Programs that reduce dBias zero no sums of dQ, which must be zeroed before: else they wait without end."""
    from tilewise import attention

    torch.manual_seed(0)
    B, M, D = 200, 192, 64
    leaves = [
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((B, H, M, D), (B, Hkv, M, D), (B, Hkv, M, D), (B, Hkv, M, M))
    ]
    q, k, v, bias = leaves
    do = torch.randn_like(q)
    found = [
        torch.autograd.grad(attention(q, k, v, bias=bias, deterministic=deterministic, backend=name), leaves, do)
        for name in ("hopper", "triton")
    ]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2**-5 * float(y.abs().max()))
