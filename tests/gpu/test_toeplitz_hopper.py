"""Toeplitz biases, T5's table, ALiBi and values for all, through Hopper's kernels, forward and backward: the error rule
of helpers.py against float64 attention with the whole bias, written out here once more."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from helpers import SLACK, poisoned_memory

from tilewise import attention, clear_caches, explain
from tilewise.backends.gluon import toeplitz
from tilewise.backends.gluon.sm90.common.underflow import Reach
from tilewise.bias import RelativeBias, alibi, constants, t5_bias

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Call:
    """kind: "t5", "t5 one way", "absolute", "signed", "both" (T5's and ALiBi's sum), or R values for all from the
    distance ``lo`` on, which outside are "zero", "clamp" or "hidden"; "hides" is "clamp" with values of -inf.

    slopes: "h" or "bh". grads: "b" is the table's, the slopes' or the values'.
    """

    kind: str = "t5"
    M: int = 799
    N: int | None = None
    B: int = 2
    H: int = 4
    Hkv: int = 2
    D: int = 64
    dtype: torch.dtype = BRAIN
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    start: int | None = None
    lo: int = -40
    R: int = 81
    slopes: str = "h"
    masked: bool = False
    sink: bool = False
    grads: str = "qkvb"

    @property
    def keys(self) -> int:
        return self.M if self.N is None else self.N

    def __str__(self) -> str:
        fields = [(x.name, getattr(self, x.name), x.default) for x in dataclasses.fields(self)]
        return " ".join(
            f"{name}={str(value).removeprefix('torch.')}" for name, value, usual in fields if value != usual
        )


def drawn(c: Call) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(c.M + 7 * c.keys + c.D + len(c.kind))

    def normal(*shape, dtype=c.dtype):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    if c.kind.startswith("t5"):
        b = normal(32, c.H, dtype=FLOAT)
    elif c.kind in ("absolute", "signed"):
        b = normal(*((c.B, c.H) if c.slopes == "bh" else (c.H,)), dtype=FLOAT).abs() / 16
    elif c.kind == "both":
        b = normal(33, c.H, dtype=FLOAT)
        b[32] = b[32].abs() / 16
    else:
        b = normal(1, c.H, 1, c.R, dtype=FLOAT)
        if c.kind == "hides":
            b[..., 0], b[..., 7] = -math.inf, -math.inf
    mask = torch.rand(c.B, 1, c.M, c.keys, generator=generator, device="cuda") < 0.7 if c.masked else None
    return {
        "q": normal(c.B, c.H, c.M, c.D), "k": normal(c.B, c.Hkv, c.keys, c.D), "v": normal(c.B, c.Hkv, c.keys, c.D),
        "b": b, "do": normal(c.B, c.H, c.M, c.D), "dlse": normal(c.B, c.H, c.M, dtype=FLOAT), "mask": mask,
    }  # fmt: skip


def positions(c: Call):
    """Key minus query; without a start the last query stands at the last key."""
    start = c.keys - c.M if c.start is None else c.start
    return torch.arange(c.keys, device="cuda") - (torch.arange(c.M, device="cuda") + start)[:, None]


def seen_by(c: Call, mask):
    distance = torch.arange(c.keys, device="cuda") - (torch.arange(c.M, device="cuda") + c.keys - c.M)[:, None]
    left, right = c.window or (None, None)
    seen = distance <= 0 if c.causal else torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen if mask is None else seen & mask


def bucket(c: Call, distance):
    """T5's of 32, up to 128."""
    half = 32 if c.kind == "t5 one way" else 16
    found = torch.zeros_like(distance)
    if half == 16:
        found, d = torch.where(distance > 0, half, 0), distance.abs()
    else:
        d = (-distance).clamp(min=0)
    exact = half // 2
    far = exact + (torch.log(d.clamp(min=1).float() / exact) / math.log(128 / exact) * (half - exact)).long()
    return found + torch.where(d < exact, d, far.clamp(max=half - 1))


def dense(c: Call, b):
    d = positions(c)
    if c.kind.startswith("t5"):
        return b[bucket(c, d)].permute(2, 0, 1)[None]
    if c.kind in ("absolute", "signed"):
        slopes = b if b.dim() == 2 else b[None]
        return slopes[:, :, None, None] * (d if c.kind == "signed" else -d.abs())
    if c.kind == "both":
        return b[:32][bucket(c, d)].permute(2, 0, 1)[None] - b[32][None, :, None, None] * d.abs()
    entry = d - c.lo
    found = b[:, :, 0][..., entry.clamp(0, c.R - 1)]
    outside = {"zero": 0.0, "hidden": -math.inf}.get(c.kind)
    return found if outside is None else torch.where((entry >= 0) & (entry < c.R), found, outside)


def unfused(c: Call, q, k, v, b, mask):
    """In q's dtype, with the whole bias; rows that see nothing are 0, and -inf in the LSE."""
    group = c.H // c.Hkv
    s = (q @ k.repeat_interleave(group, 1).mT) / math.sqrt(c.D)
    s = (s + dense(c, b).to(s.dtype)).masked_fill(~seen_by(c, mask), -math.inf)
    blind = (s == -math.inf).all(-1, keepdim=True)
    if c.sink:
        s = torch.cat([s, s.new_full((*s.shape[:3], 1), 0.5)], -1)
        blind = torch.zeros_like(blind)
    s = s.masked_fill(blind, 0.0)
    p = torch.softmax(s, -1).masked_fill(blind, 0.0)[..., : c.keys]
    lse = torch.logsumexp(s.to(torch.promote_types(s.dtype, FLOAT)), -1)
    return p @ v.repeat_interleave(group, 1), lse.masked_fill(blind[..., 0], -math.inf)


def term(c: Call, b):
    if c.kind.startswith("t5"):
        return t5_bias(b, c.kind == "t5", 128, query_start=c.start)
    if c.kind in ("absolute", "signed"):
        return alibi(b, c.kind, query_start=c.start)
    if c.kind == "both":
        return t5_bias(b[:32], True, 128, query_start=c.start), alibi(b[32], query_start=c.start)
    outside = {"zero": 0.0, "hidden": -math.inf}.get(c.kind, "clamp")
    return RelativeBias(b, lo=c.lo, outside=outside, query_start=c.start)


def fused(c: Call, q, k, v, b, mask):
    sink = torch.full((c.H,), 0.5, device="cuda", dtype=FLOAT) if c.sink else None
    return attention(q, k, v, bias=term(c, b), mask=mask, causal=c.causal, window=c.window, sink=sink, return_lse=True,
                     deterministic=False, backend="hopper")  # fmt: skip


def results(c: Call, function, x, double=False):
    """By name: o, lse and the gradients."""
    leaves = {name: x[name].double() if double else x[name] for name in "qkvb"}
    leaves = {name: t.detach().requires_grad_(name in c.grads) for name, t in leaves.items()}
    o, lse = function(c, *leaves.values(), x["mask"])
    wanted = [t for t in leaves.values() if t.requires_grad]
    found = {"o": o.detach(), "lse": lse.detach()}
    if wanted:
        cotangents = [x["do"].to(o.dtype), x["dlse"].masked_fill(lse == -math.inf, 0.0).to(lse.dtype)]
        grads = torch.autograd.grad((o, lse), wanted, cotangents)
        found |= dict(zip(["d" + name for name in leaves if name in c.grads], grads, strict=True))
    return found


def check(c: Call):
    x = drawn(c)
    with poisoned_memory("cuda"):
        ours = results(c, fused, x)
    exact = results(c, unfused, x, double=True)
    other = results(c, unfused, x)
    known = exact["lse"] != -math.inf
    assert torch.equal(ours["lse"] != -math.inf, known)
    wrong = []
    for name, truth in exact.items():
        y, z = ours[name].double(), other[name].double()
        assert y.shape == truth.shape
        if name == "lse":
            y, z, truth = (t[known] for t in (y, z.masked_fill(~known, 0.0), truth))
        if not y.isfinite().all():
            wrong.append(f"{name}: {int((~y.isfinite()).sum())} of {y.numel()} elements are not finite")
            continue
        error, yardstick, largest = (float(t.abs().max()) for t in (y - truth, z - truth, truth))
        if error > 2 * yardstick + SLACK * largest:
            wrong.append(f"{name} is off by {error:.3e}, unfused by {yardstick:.3e}, largest {largest:.3e}")
    assert not wrong, f"{c}: {'; '.join(wrong)}"
    if "db" in ours:
        assert (ours["db"].dtype, ours["db"].shape) == (x["b"].dtype, x["b"].shape)


CALLS = [
    Call(),
    Call(M=1, grads=""),
    Call(M=1, N=70),
    *(Call(M=M) for M in (127, 128, 129, 239, 1023)),
    Call(M=2048, B=1),
    Call(M=2048, B=1, causal=True),
    Call("t5 one way", 1023, causal=True),
    Call("t5 one way", 799),
    Call(M=799, N=1023),
    Call(M=1023, N=799, causal=True),  # the first queries see nothing
    Call(M=300, N=2000, start=700),
    Call(D=128, causal=True),
    Call(D=128, dtype=HALF),
    Call(D=32, M=1023, dtype=HALF),
    Call(D=40, H=2, Hkv=2, M=768),
    Call(window=(200, 50), M=1023),
    Call(window=(500, None), causal=True, M=1023, D=128),
    Call(masked=True),
    Call(sink=True, M=1023),
    Call(grads="qkv"),
    Call(grads=""),
    Call("absolute"),
    Call("absolute", M=2),
    *(Call("absolute", M=M) for M in (127, 129, 239, 1023)),
    Call("absolute", M=2048, B=1),
    Call("absolute", M=799, N=1023, causal=True),
    Call("absolute", 1023, 799, start=100),
    Call("absolute", 2048, causal=True, dtype=HALF, B=1),
    Call("absolute", D=128, slopes="bh"),
    Call("absolute", window=(300, 300), M=1023, D=128),
    Call("absolute", masked=True, M=512),
    Call("signed", 1023, causal=True),
    Call("signed", 1023, slopes="bh", D=32),
    Call("signed", grads="qkv"),
    Call("both", 1023),
    Call("zero"),
    Call("zero", 1023, lo=300, R=100),
    Call("clamp", 1023, lo=-700, R=30, causal=True),
    Call("clamp", 512, lo=-600, R=1300),  # every pair has an entry
    Call("hidden", 799),
    Call("hides", 799),
    Call("hides", 799, causal=True, D=128),
]


@pytest.mark.parametrize("c", CALLS, ids=str)
def test_toeplitz(c):
    check(c)


def test_far_keys_that_are_hidden_and_not_finite():
    """All beyond the first entry is -inf: rows that a hidden NaN has spoilt are computed again."""
    c = Call("hides", 300, grads="")
    x = drawn(c)
    clean = fused(c, *(x[name] for name in "qkvb"), None)
    x["k"][:, :, 0, 3] = math.nan
    x["v"][:, :, 0] = math.inf
    o, lse = fused(c, *(x[name] for name in "qkvb"), None)
    torch.testing.assert_close(o[:, :, 41:], clean[0][:, :, 41:], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse[:, :, 41:], clean[1][:, :, 41:], rtol=1e-4, atol=1e-3)
    assert o[:, :, 0].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_far_numbers_of_any_size(causal):
    """Far tiles hide all else, or nothing of them is left."""
    c = Call("clamp", 700, causal=causal, R=3, lo=-1)
    for number in (-1e9, 1e4):
        x = drawn(c)
        x["b"][..., 0] = number
        ours, exact = results(c, fused, x), results(c, unfused, x, double=True)
        for name in ("o", "lse", "dv"):
            torch.testing.assert_close(ours[name].double(), exact[name], rtol=2e-2, atol=2e-2)


def test_it_is_hoppers():
    q = torch.randn(1, 4, 512, 64, device="cuda", dtype=BRAIN)
    table = torch.randn(32, 4, device="cuda", requires_grad=True)
    plan = explain(q, q, q, bias=t5_bias(table, True)).plan
    assert (plan.backend, plan.backward) == ("hopper", "hopper")
    assert explain(q, q, q, bias=t5_bias(table, True), deterministic=True).plan.backward == "triton"


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # nothing is accumulated
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize("kind", ["t5", "alibi"])
def test_again_and_in_a_graph(monkeypatch, kind, dtype):
    """A call like an earlier one is not read, a graph makes what is kept of a term by itself, and both see new
    numbers."""
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
    b = torch.rand(*((32, 4) if kind == "t5" else (4,)), device="cuda", dtype=dtype).requires_grad_()
    do = torch.randn_like(q)

    def run():
        bias = t5_bias(b, True, 77) if kind == "t5" else alibi(b)
        o = attention(q, k, v, bias=bias, backend="hopper")
        return (o.detach(), *torch.autograd.grad(o, (q, k, v, b), do))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = run()
    torch.cuda.current_stream().wait_stream(stream)
    monkeypatch.setattr("tilewise.api.read_call", None)
    again = run()
    assert torch.equal(first[0], again[0])
    for x, y in zip(again, first, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))
    constants._kept.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    assert not constants._kept
    with torch.no_grad():
        b.mul_(-3.0)
    graph.replay()
    for x, y in zip(captured, run(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "D"), [(2048, 64), (4096, 64), (4096, 128)])
def test_tiles_that_vanish_are_left_out(monkeypatch, M, D, causal):
    """Beside steep and flat slopes: of causal attention O, the LSE, dK and dV have the bits that they have if nothing
    is left out. In full attention a lazy maximum may start elsewhere, see `underflow`: O and the LSE are as near to
    float64 then, gradients near to the others."""
    generator = torch.Generator("cuda").manual_seed(M + D)
    shapes = (2, 8, M, D), (2, 2, M, D), (2, 2, M, D), (2, 8, M, D)
    q, k, v, do = (torch.randn(shape, generator=generator, device="cuda").to(BRAIN) for shape in shapes)
    b = torch.tensor([4.0, 2.0, 1.0, 0.75, 2**-4, 2**-5, 2**-7, 2**-8], device="cuda")
    found = []

    def spy(self, *tensors, of=Reach.__call__):
        found.append(of(self, *tensors))
        return found[-1]

    def run():
        clear_caches()
        leaves = [x.detach().requires_grad_() for x in (q, k, v, b)]
        with poisoned_memory("cuda"):
            o, lse = attention(*leaves[:3], bias=alibi(leaves[3]), causal=causal, return_lse=True, deterministic=False,
                               backend="hopper")  # fmt: skip
            return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)

    monkeypatch.setattr(Reach, "__call__", spy)
    monkeypatch.setattr(toeplitz, "UNDERFLOW_FROM", 1024)
    ours = run()
    of_heads, of_keys = found
    assert (of_heads[:, :4, 0] > -300).all()
    assert (of_keys[:, 0, 0] > -300).all()
    assert (of_heads[:, 7, 0] <= -M).all()
    assert (of_keys[:, 1, 0] <= -M).all()
    monkeypatch.setattr(toeplitz, "UNDERFLOW_FROM", 1 << 60)
    other = run()
    assert len(found) == 2
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv", "db"), ours, other, strict=True):
        if causal and name in ("o", "lse", "dk", "dv"):
            assert torch.equal(x, y), name
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-2 * float(y.abs().max()), msg=name)
    distance = (torch.arange(M, device="cuda") - torch.arange(M, device="cuda")[:, None]).abs().double()
    for h in (0, 3, 4, 7):
        s = q[0, h].double() @ k[0, h // 4].double().mT * D**-0.5 - b[h].double() * distance
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf")) if causal else s
        for x, y, right in zip(ours, other, (s.softmax(-1) @ v[0, h // 4].double(), s.logsumexp(-1)), strict=False):
            mine, others = ((z[0, h].double() - right).abs().max() for z in (x, y))
            assert mine <= 1.5 * others + 1e-6
    clear_caches()
