"""Bench cases of structure models: entry points beside the plain call, masks of keys, and windows of atoms."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.integrations.evoformer import triangle_attention
from tilewise_tools.bench import cases, providers, reference, results, run, structure, windows
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.windows import WindowCase

CPU = torch.device("cpu")
BIAS = (1, 2, 40, 40)
TRIANGLE = Case("triangle", 3, 2, 2, 40, 40, 8, bias=BIAS, dtype="float32", padded=True, entry="triangle_attention")
TOKENS = replace(TRIANGLE, family="tokens", padded=False, entry="attention_pair_bias")
SWIN = replace(TRIANGLE, family="swin", batch=6, padded=False, windows=3, entry="attention")
SEVERAL = replace(TRIANGLE, family="several triangles", batch=6, bias=(2, *BIAS[1:]))
WINDOWS = WindowCase("windows", 2, 2, 96, 8, dtype="float32")


def of(operator):
    return {p.name: p for p in providers.providers(CPU) if p.operator == operator}


def said_wrong(case, right, steps, x):
    o = steps.forward()
    found = dict(zip(right, (o, *(steps.backward(o) if case.backward else ())), strict=True))
    return reference.wrong(reference.errors(found, right), case)


@pytest.mark.parametrize("case", [TRIANGLE, TOKENS, SWIN, SEVERAL], ids=lambda case: case.family)
@pytest.mark.parametrize("name", ["tilewise-cpu", "tilewise-entry", "sdpa-math"])
def test_entry_points_and_calls_are_right(case, name):
    """With the mask, and wrong without it."""
    x = case.inputs(CPU)
    assert (x.mask is not None) == (case is not TOKENS)
    right, provider = reference.exact(case, x), of("attention")[name]
    if case is SEVERAL and name == "sdpa-math":
        assert "an expanded one would be a copy" in provider.declines(case)
        return
    assert provider.declines(case) is None
    assert not said_wrong(case, right, provider.prepare(case, x), x)
    if x.mask is not None:
        other = x._replace(mask=torch.ones_like(x.mask))
        assert said_wrong(case, right, provider.prepare(case, other), x)


@pytest.mark.parametrize("case", [TRIANGLE, TOKENS, SWIN, SEVERAL], ids=lambda case: case.family)
def test_an_entry_point_is_called(case, monkeypatch):
    called = []
    monkeypatch.setattr(structure, case.entry, lambda *x, **_: called.append(x[0].shape) or x[0])
    provider, x = of("attention")["tilewise-entry"], case.inputs(CPU)
    assert provider.prepare(case, x).forward().shape == x.q.shape
    assert called == [(2, 3, *x.q.shape[1:]) if case in (SWIN, SEVERAL) else (1, *x.q.shape)]
    assert provider.applies(case)
    assert not provider.applies(replace(case, entry=None))


def test_cuequivariance_is_asked_as_it_wants_to_be(monkeypatch):
    """By a module in its place, which is the function of the same name."""
    provider = of("attention")["cuequivariance"]
    monkeypatch.setitem(sys.modules, "cuequivariance_ops_torch", SimpleNamespace(triangle_attention=triangle_attention))
    for case in (TRIANGLE, replace(TRIANGLE, padded=False), SEVERAL):
        assert provider.declines(case) is None
        x = case.inputs(CPU)
        right = reference.exact(case, x)
        assert not said_wrong(case, right, provider.prepare(case, x), x)
    M, N = TRIANGLE.queries, TRIANGLE.keys
    for change in (
        {"bias": None},
        {"causal": True},
        {"windows": 3},
        {"bias": (1, 1, M, N)},
        {"dropout": 0.1},
        {"sink": True},
    ):
        assert provider.declines(replace(TRIANGLE, **change))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("tilewise-entry", TRIANGLE),
        ("tilewise-entry", TOKENS),
        ("tilewise-entry", SWIN),
        ("cuequivariance", TRIANGLE),
        ("tilewise-entry", SEVERAL),
    ],
    ids=["triangle", "tokens", "swin", "cuequivariance", "several triangles"],
)
def test_what_an_entry_point_is_called_with_costs_nothing(name, case, monkeypatch):
    """A tensor of q's size more, and its time, would be the bench's own."""
    stand_in = SimpleNamespace(triangle_attention=triangle_attention)
    monkeypatch.setitem(sys.modules, "cuequivariance_ops_torch", stand_in)
    steps, made = of("attention")[name].prepare(case, case.inputs(CPU)), []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            made.append(op.name())
            return op(*args, **(kwargs or {}))

    with Names():
        steps.backward(steps.forward())
    assert {"tilewise::attention", "tilewise::attention_backward"} <= set(made)
    assert not {"aten::select_backward", "aten::clone", "aten::copy_", "aten::_to_copy"} & set(made)


def test_who_takes_no_mask_of_keys_says_so():
    said = {name: p.declines(replace(TRIANGLE, dtype="bfloat16")) for name, p in of("attention").items()}
    assert said["flex"] is None
    assert said["cudnn-graph"] == said["fa4"] == "takes no mask of keys"
    assert providers._no_bias(SWIN) == providers._no_cudnn_graph(SWIN) == "takes no mask of pairs"


@pytest.mark.parametrize("case", [TRIANGLE, SWIN, SEVERAL], ids=lambda case: case.family)
def test_flex_hides_keys(case):
    """Its scores, added up here."""
    case = replace(case, backward=False)
    x = case.inputs(CPU)
    right = reference.exact(case, x)
    bias = providers._score_mod(x.bias, case.run)
    mod, s = providers._score_mod_of_mask(bias, x.mask), torch.zeros(())
    b, h, i, j = (torch.arange(n).view(-1, *(1,) * (3 - d)) for d, n in enumerate((case.batch, 2, 40, 40)))
    scores = x.q @ x.k.mT * 8**-0.5 + mod(s, b, h, i, j)
    found = {"o": scores.softmax(-1) @ x.v}
    assert not reference.wrong(reference.errors(found, right), case)


# Windows


@pytest.mark.parametrize("name", ["tilewise-windows-cpu", "einsum-windows", "sdpa-windows"])
def test_windows_are_right(name):
    """All give the formula, which here is a dense matrix of the bias, -inf outside of the windows."""
    x = WINDOWS.inputs(CPU)
    q, k, v, bias = x.leaves
    dense = torch.full((1, 2, 96, 96), -torch.inf)
    for i in range(96):
        for j in range(96 - windows.PADDING):
            place = j - (i // 32 * 32 - 48)
            if 0 <= place < 128:
                dense[..., i, j] = bias.detach()[..., i // 32, i % 32, place]
    o = (q @ k.mT * 8**-0.5 + dense).softmax(-1) @ v
    right = WINDOWS.exact(x)
    assert not reference.wrong(reference.errors({"o": o}, {"o": right["o"]}), WINDOWS)
    assert right["dbias"].shape == bias.shape
    assert not said_wrong(WINDOWS, right, of("windows")[name].prepare(WINDOWS, x), x)
    other = replace(WINDOWS, k_block=64).exact(x._replace(named={**x.named, "bias": bias.detach()[..., 32:96]}))
    assert said_wrong(WINDOWS, right | {"o": other["o"]}, of("windows")[name].prepare(WINDOWS, x), x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_windows(monkeypatch):
    """Its mask and scores, uncompiled: it has no backward on the CPU."""
    case = replace(WINDOWS, backward=False)
    x = case.inputs(CPU)
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    found = {"o": windows.flex(case, x)()}
    assert not reference.wrong(reference.errors(found, case.exact(x)), case)


def test_windows_in_a_run(monkeypatch, tmp_path):
    """Rows of all that run on a CPU, results that are read again, and the work of all pairs of windows."""
    case = replace(WINDOWS, keys=64, host=True)
    monkeypatch.setattr(run, "calibrate", lambda clock, dtypes: results.Calibration(dict.fromkeys(dtypes, 1e11), 1e10))
    monkeypatch.setattr(run, "host_seconds", lambda step, device: 1e-3)
    monkeypatch.setattr(run, "Clock", lambda device, seconds: SimpleNamespace(device=device, time=clock))

    def clock(step):
        step()
        return results.Timing(1e-3, 1e-3, 1e-3, 1)

    options = run.RunOptions("cpu", providers=("tilewise-windows-cpu", "einsum", "flex"))
    monkeypatch.setattr(windows, "einsum_compiled", windows.einsum)
    found = run.run(options, run.PlainProgress(), todo=[case])
    assert {row.provider: row.outcome for row in found.rows} == dict.fromkeys(
        ("tilewise-windows-cpu", "einsum-windows", "einsum-compiled"), "measured"
    )
    results.write(found, tmp_path / "found.json")
    assert results.read(tmp_path / "found.json") == found
    assert found.work(case, "forward").flops == 4 * 8 * 2 * 2 * 2 * 32 * 128
    assert found.work(case, "backward").flops == 2.5 * found.work(case, "forward").flops


def test_the_list_has_them():
    names = [case.name for case in cases.cases("cuda")]
    assert {
        *(f"pair bias D32 S{s}" for s in (256, 384, 512, 768)), "triangle_attention D32 S384",
        "triangle_attention D32 S768", "attention_pair_bias D48 S768", "window_pair_attention D32 N10240",
        "window_pair_attention D32 16 samples N10240",
    } <= set(names)  # fmt: skip
