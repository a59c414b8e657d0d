"""`tilewise.plan`: a run is the call of `tilewise.attention` that it was planned for, and no other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tilewise
from tilewise import attention, explain, plan
from tilewise.bias import alibi

B, H, HKV, M, N, D = 2, 4, 2, 5, 7, 8


def tensors(seed=0, **shapes):
    generator = torch.Generator().manual_seed(seed)
    whole = {"q": (B, H, M, D), "k": (B, HKV, N, D), "v": (B, HKV, N, D)} | shapes
    made = {name: torch.randn(shape, generator=generator) for name, shape in whole.items()}
    return {name: x > 0 if name == "mask" else x.requires_grad_() for name, x in made.items()}


def run(function, given, **options):
    torch.manual_seed(3)
    q, k, v, *_ = given.values()
    found = function(q, k, v, **{name: x for name, x in given.items() if name not in "qkv"}, **options)
    o, lse = found if isinstance(found, tuple) else (found, torch.zeros(()))
    leaves = [x for x in given.values() if x.requires_grad]
    return [found, *torch.autograd.grad((o * torch.arange(D)).sum() + lse.sum(), leaves)]


CALLS = {
    "plain": ({}, {}),
    "bias of all": ({"bias": (1, H, M, N)}, {"causal": True, "return_lse": True}),
    "bias of three dimensions": ({"bias": (H, M, N)}, {"window": (2, None)}),
    "mask of keys": ({"mask": (B, 1, 1, N)}, {"softcap": 5.0, "backend": "reference"}),
    "sink of heads": ({"sink": (H,), "mask": (M, N)}, {"scale": 0.3, "return_lse": True}),
    "sink of queries": ({"sink": (B, H, M)}, {"deterministic": True}),
    "dropout": ({"bias": (B, 1, M, N)}, {"dropout_p": 0.5}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_run_is_the_call(name):
    """The second run as well, of other numbers, and after the caches were emptied."""
    shapes, options = CALLS[name]
    given = tensors(**shapes)
    planned = plan(*list(given.values())[:3], **{n: x for n, x in given.items() if n not in "qkv"}, **options)
    for seed in (0, 1, 2):
        x = tensors(seed, **shapes)
        for ours, theirs in zip(run(planned.run, x), run(attention, x, **options), strict=True):
            for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (ours, theirs)), strict=True):
                assert torch.equal(a, b)
        tilewise.clear_caches()


def test_no_tensor_is_held():
    given = tensors(bias=(H, M, N), sink=(H,))
    planned = plan(**given)
    planned.run(**given).sum().backward()
    watched = [weakref.ref(x) for x in given.values()]
    del given
    gc.collect()
    assert not any(x() is not None for x in watched)
    assert "bias (4, 5, 7)" in repr(planned)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": (B, HKV, N + 1, D)}, ValueError, r"k: planned was \(2, 2, 7, 8\) .*, got \(2, 2, 8, 8\) torch.float32"),
        ({"bias": None}, ValueError, r"bias: planned was \(4, 5, 7\) .*, got None"),
        ({"mask": (M, N)}, ValueError, r"mask: planned was None, got \(5, 7\) torch.bool"),
        ({"q": 3}, TypeError, "q: expected a torch.Tensor, got int"),
    ],
)
def test_another_layout_is_an_error(changed, error, message):
    given = tensors(bias=(H, M, N))
    planned = plan(**given)
    others = tensors(**{name: x for name, x in ({"bias": (H, M, N)} | changed).items() if isinstance(x, tuple)})
    others |= {name: x for name, x in changed.items() if not isinstance(x, tuple)}
    with pytest.raises(error, match=message):
        planned.run(**others)
    with pytest.raises(ValueError, match=r"q: planned .* strides \(160, 40, 8, 1\), got .* strides \(160, 8, 32, 1\)"):
        planned.run(**given | {"q": given["q"].detach().transpose(1, 2).contiguous().transpose(1, 2)})
    planned.run(**given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": alibi(torch.rand(H))}, TypeError, "bias: a plan takes a tensor, got Alibi"),
        (
            {"mask": tilewise.TileMask.documents(torch.zeros(1, M, dtype=torch.int32))},
            TypeError,
            "mask: .* got TileMask",
        ),
        ({"window": "wide"}, (TypeError, ValueError), "window"),
        ({"backend": "hopper"}, ValueError, "hopper"),
        ({"bias": torch.zeros(3, M, N)}, ValueError, "bias: shape"),
    ],
)
def test_what_cannot_be_planned(options, error, message):
    with pytest.raises(error, match=message):
        plan(**tensors() | options)


def test_autocast():
    x = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"autocast would cast torch\.float32"):
            plan(**x)
        q = x["q"].bfloat16()
        assert plan(q, q, q).run(q, q, q).dtype is torch.bfloat16
    planned = plan(**x)
    with torch.autocast("cpu", torch.bfloat16):
        assert planned.run(**x).dtype is torch.float32


def test_explain():
    given = tensors(bias=(1, H, M, N), mask=(B, 1, M, N))
    found = plan(**given, causal=True, dropout_p=0.1).explain()
    expected = explain(**given, causal=True, dropout_p=0.1)
    assert str(found).splitlines()[:7] == str(expected).splitlines()[:7]
    assert found.plan.backend == "cpu"
    assert found.plan.problem.bias_grad


def test_compiled():
    given = tensors(bias=(1, H, M, N))
    planned = plan(**given)
    compiled = torch.compile(planned.run, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(run(compiled, given), run(attention, given), strict=True):
        torch.testing.assert_close(ours, theirs)
