"""A bias by distance with values per query through Hopper's kernels, forward and backward: the error rule of helpers.py
against float64 attention with the whole bias, written out here once more."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import SLACK, poisoned_memory

from tilewise import attention, explain
from tilewise.bias import RelativeBias, relative_logits

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Call:
    """R values of each query, from the distance ``lo`` on, without it up to the query's own position.

    layout: "read" where they lie, with NaN between rows, if the first distance is a multiple of 16 bytes, else copied
    as "whole" rows and "strided" elements are.
    axes: which of batch and heads the values are full along; "k": of key/value heads.
    grads: the inputs that need a gradient, "r" of the values.
    """

    M: int = 799
    N: int | None = None
    R: int = 297
    lo: int | None = None
    B: int = 2
    H: int = 4
    Hkv: int = 2
    D: int = 128
    dtype: torch.dtype = BRAIN
    values_dtype: torch.dtype | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    reverse: bool = False
    outside: float = 0.0
    layout: str = "read"
    axes: str = "bh"
    sink: bool = False
    grads: str = "qkvr"
    deterministic: bool = False
    hides: bool = False

    @property
    def keys(self) -> int:
        return self.M if self.N is None else self.N

    @property
    def first(self) -> int:
        """The first distance: of key minus query, or with ``reverse`` of query minus key."""
        return self.lo if self.lo is not None else 0 if self.reverse else 1 - self.R

    def __str__(self) -> str:
        fields = [(x.name, getattr(self, x.name), x.default) for x in dataclasses.fields(self)]
        return " ".join(
            f"{name}={str(value).removeprefix('torch.')}" for name, value, usual in fields if value != usual
        )


def drawn(c: Call) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(c.M + 7 * c.R + c.D)

    def normal(*shape, dtype=c.dtype):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    heads = {"h": c.H, "k": c.Hkv, "1": 1}[c.axes[1]]
    values = normal(c.B if c.axes[0] == "b" else 1, heads, c.M, c.R, dtype=c.values_dtype or c.dtype)
    if c.hides:
        values[torch.rand(values.shape, generator=generator, device="cuda") < 0.1] = -math.inf
    return {
        "q": normal(c.B, c.H, c.M, c.D), "k": normal(c.B, c.Hkv, c.keys, c.D), "v": normal(c.B, c.Hkv, c.keys, c.D),
        "r": laid(values, c.layout), "do": normal(c.B, c.H, c.M, c.D), "dlse": normal(c.B, c.H, c.M, dtype=FLOAT),
    }  # fmt: skip


def laid(values, layout):
    """Memory between the rows is NaN."""
    B, H, M, R = values.shape
    if layout == "whole":
        return values
    if layout == "strided":
        view = values.new_full((B, M, H, 2 * R), math.nan).transpose(1, 2)[..., ::2]
    else:
        step = 16 // values.element_size()
        rows = -(-M // step) * step
        view = values.new_full((B, H, rows, R + (1 - R) % step + step), math.nan)[:, :, :M, :R]
    return view.copy_(values)


def positions(c: Call):
    """Key minus query; the last query stands at the last key."""
    return torch.arange(c.keys, device="cuda") - (torch.arange(c.M, device="cuda") + c.keys - c.M)[:, None]


def seen_by(c: Call):
    distance = positions(c)
    left, right = c.window or (None, None)
    seen = distance <= 0 if c.causal else torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def unfused(c: Call, q, k, v, r):
    """In q's dtype, with the whole bias; rows that see nothing are 0, and -inf in the LSE."""
    entry = (-positions(c) if c.reverse else positions(c)) - c.first
    inside = (entry >= 0) & (entry < c.R)
    rows = r.expand(c.B, -1, -1, -1).repeat_interleave(c.H // r.shape[1], 1)
    bias = rows.gather(3, entry.clamp(0, c.R - 1).expand(c.B, c.H, c.M, c.keys))
    bias = torch.where(inside, bias, c.outside)
    group = c.H // c.Hkv
    s = (q @ k.repeat_interleave(group, 1).mT) / math.sqrt(c.D)
    s = (s + bias.to(s.dtype)).masked_fill(~seen_by(c), -math.inf)
    blind = (s == -math.inf).all(-1, keepdim=True)
    if c.sink:
        s = torch.cat([s, s.new_full((*s.shape[:3], 1), 0.5)], -1)
        blind = torch.zeros_like(blind)
    s = s.masked_fill(blind, 0.0)
    p = torch.softmax(s, -1).masked_fill(blind, 0.0)[..., : c.keys]
    lse = torch.logsumexp(s.to(torch.promote_types(s.dtype, FLOAT)), -1)
    return p @ v.repeat_interleave(group, 1), lse.masked_fill(blind[..., 0], -math.inf)


def fused(c: Call, q, k, v, r):
    bias = RelativeBias(r, lo=c.first, reverse=c.reverse, outside=c.outside)
    sink = torch.full((c.H,), 0.5, device="cuda", dtype=FLOAT) if c.sink else None
    return attention(q, k, v, bias=bias, causal=c.causal, window=c.window, sink=sink, return_lse=True,
                     deterministic=c.deterministic, backend="hopper")  # fmt: skip


def results(c: Call, function, x, double=False):
    """By name: o, lse and the gradients."""
    leaves = {name: x[name].double() if double else x[name] for name in "qkvr"}
    leaves = {name: t.detach().requires_grad_(name in c.grads) for name, t in leaves.items()}
    o, lse = function(c, *leaves.values())
    wanted = [t for t in leaves.values() if t.requires_grad]
    found = {"o": o.detach(), "lse": lse.detach()}
    if wanted:
        outputs = [t for t in (o, lse) if t.requires_grad]  # plain torch: the LSE does not know of v
        cotangents = [
            (x["do"] if t is o else x["dlse"].masked_fill(lse == -math.inf, 0.0)).to(t.dtype) for t in outputs
        ]
        grads = torch.autograd.grad(outputs, wanted, cotangents)
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
        assert y.isfinite().all(), f"{name}: {int((~y.isfinite()).sum())} of {y.numel()} elements are not finite"
        error, yardstick, largest = (float(t.abs().max()) for t in (y - truth, z - truth, truth))
        if error > 2 * yardstick + SLACK * largest:
            wrong.append(f"{name} is off by {error:.3e}, unfused by {yardstick:.3e}, largest {largest:.3e}")
    assert not wrong, f"{c}: {'; '.join(wrong)}"
    if "dr" in ours:
        assert (ours["dr"].dtype, ours["dr"].shape) == (x["r"].dtype, x["r"].shape)
        assert not ours["dr"][exact["dr"] == 0].any(), "an entry that no visible pair has"


CALLS = [
    Call(2048, R=1025, B=1),
    Call(2048, R=1025, B=1, D=64),
    Call(),
    Call(799, R=130, N=1023),
    Call(1023, R=300, N=799),  # the first queries see nothing
    Call(1023, R=700, reverse=True, layout="whole"),
    Call(129, R=64),
    Call(129, R=1),
    Call(2, N=2, R=3),
    Call(3, N=70, R=9, lo=-20),
    Call(129, R=300),  # all visible pairs have an entry
    Call(799, R=300, window=(200, None)),
    Call(799, R=300, window=(500, None), D=64),
    Call(799, R=200, outside=-math.inf),
    Call(799, R=201, lo=-100, causal=False),
    Call(799, N=1023, R=100, lo=50, causal=False),
    Call(1023, N=799, R=100, lo=-700, causal=False, layout="strided"),
    Call(700, R=65, lo=400, causal=False, D=64),
    Call(799, R=201, lo=-100, causal=False, dtype=HALF, D=64),
    Call(799, dtype=HALF, hides=True),
    Call(799, D=32, R=130),
    Call(768, D=40, R=130, H=2),
    Call(799, sink=True, grads="qr"),
    Call(799, grads="qkv"),
    Call(799, axes="1k", grads="qkv", D=64),
    Call(799, axes="b1", grads=""),
    Call(1023, deterministic=True, Hkv=4),
    Call(1023, deterministic=True, causal=False, lo=-200, D=64),
]


@pytest.mark.parametrize("c", CALLS, ids=str)
def test_values_per_query(c):
    check(c)


@pytest.mark.parametrize("causal", [True, False])
def test_hidden_keys_that_are_not_finite(causal):
    """Rows are computed again with the bias by distance, too."""
    c = Call(300, N=300, R=70, causal=causal, window=(None, 0) if causal else (50, 20), grads="")
    x = drawn(c)
    clean = fused(c, *(x[name] for name in "qkvr"))
    x["k"][:, :, -1, 3] = math.nan
    x["v"][:, :, -1] = math.inf
    o, lse = fused(c, *(x[name] for name in "qkvr"))
    blind = slice(0, 299) if causal else slice(0, 279)  # who does not see the last key
    torch.testing.assert_close(o[:, :, blind], clean[0][:, :, blind], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse[:, :, blind], clean[1][:, :, blind], rtol=1e-4, atol=1e-3)
    assert o[:, :, -1].isnan().all()


@pytest.mark.parametrize("c", [Call(2048, R=1025, B=1), Call(1023, R=301, lo=-150, causal=False, D=64)], ids=str)
def test_gradients_of_values_repeat_bit_by_bit(c):
    """With deterministic=True all of them do."""
    x = drawn(c)
    first, second = (results(replace(c, deterministic=ordered), fused, x) for ordered in (True, False))
    for _ in range(10):
        again = results(replace(c, deterministic=True), fused, x)
        assert all(torch.equal(again[name], first[name]) for name in first)
        assert torch.equal(results(c, fused, x)["dr"], second["dr"])
    assert torch.equal(first["dr"], second["dr"])


def test_inkling_is_hoppers():
    states = torch.randn(1, 4, 512, 16, device="cuda", dtype=BRAIN)
    proj = torch.randn(16, 128, device="cuda", dtype=BRAIN, requires_grad=True)
    q, k = (torch.randn(1, h, 512, 128, device="cuda", dtype=BRAIN) for h in (4, 2))
    bias = relative_logits(states, proj, lo=0, reverse=True)
    plan = explain(q, k, k, bias=bias, causal=True).plan
    assert (plan.backend, plan.backward) == ("hopper", "hopper")
    attention(q, k, k, bias=bias, causal=True).sum().backward()
    assert proj.grad.isfinite().all()
