"""Our side of the peers that no CPU runs: they are called with what they need, and their answers read rightly."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tilewise_tools.bench import providers, reference, terms
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.run import _Measured
from tilewise_tools.bench.timing import Clock

CPU = torch.device("cpu")
CAUSAL = Case("causal", 2, 4, 2, 20, 20, 16, causal=True, dtype="float32")
BIASES = ((2, 2, 20, 20), (1, 2, 20, 20), (2, 1, 1, 20))
BIASED = [Case("bias", 2, 2, 2, 20, 20, 16, bias=bias, dtype="float32") for bias in BIASES]
FULL = Case("full", 2, 2, 2, 20, 20, 16, dtype="float32")
DECODE = Case("decode", 2, 4, 2, 1, 40, 16, dtype="float32", backward=False)


def right(case: Case, prepare) -> bool:
    x = case.inputs(CPU)
    steps = prepare(case, x)
    with steps.context():
        for _ in range(2):  # as often as the clock asks for it
            o = steps.forward()
            grads = steps.backward(o) if case.backward else ()
    found = dict(zip(("o", *(f"d{name}" for name in x.names)), (o, *grads), strict=False))
    return not reference.wrong(reference.errors(found, reference.exact(case, x)), case)


def test_a_sink_is_tilewises_alone():
    case = replace(FULL, sink=True)
    assert [
        p.name
        for p in providers.providers(CPU)
        if p.operator == case.operator and p.applies(case) and not p.declines(case)
    ] == ["tilewise-cpu"]
    assert right(case, next(p.prepare for p in providers.providers(CPU) if p.name == "tilewise-cpu"))


def test_who_has_dropout():
    """PyTorch's kernels drop what they like, so that nothing but ours can be held to an answer."""
    case = replace(CAUSAL, dropout=0.25)
    found = {p.name: p for p in providers.providers(CPU) if p.operator == case.operator and not p.declines(case)}
    assert {name.partition("-")[0] for name in found} == {"tilewise", "sdpa"}
    assert right(case, found["tilewise-cpu"].prepare)
    assert not right(case, found["sdpa-math"].prepare)
    measured = _Measured(case, Clock(CPU, 1e-3))
    rows = [measured.row(found[name]) for name in ("tilewise-cpu", "sdpa-math")]
    assert [(row.outcome, bool(row.errors)) for row in rows] == [("measured", True), ("measured", False)]


@pytest.mark.parametrize("name", terms.NAMES)
def test_a_term_is_tilewises_and_flexs(name):
    """The others would need its matrix."""
    case = replace(FULL, term=name)
    takes = [
        p for p in providers.providers(CPU) if p.operator == case.operator and p.applies(case) and not p.declines(case)
    ]
    assert [p.name for p in takes] == ["tilewise-cpu", "flex"]
    assert right(case, takes[0].prepare)


@pytest.mark.parametrize(
    "case", [CAUSAL, *BIASED, DECODE, *(replace(FULL, term=name) for name in terms.NAMES)], ids=str
)
def test_flex_uncompiled(case, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **{**options, "backend": "eager"}))
    assert right(replace(case, backward=False), providers._flex)  # it has no backward on the CPU


@pytest.mark.parametrize("case", [CAUSAL, FULL, DECODE], ids=str)
@pytest.mark.parametrize("returns", ["o", "o and lse"])
def test_flash_attention_4_gets_rows_of_heads(case, returns, monkeypatch):
    def flash_attn_func(q, k, v, causal):
        """(B, M, H, D) in and out."""
        assert q.is_contiguous()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
        return o if returns == "o" else (o, None)

    cute = ModuleType("flash_attn.cute")
    cute.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    assert right(case, providers._fa4)
    assert providers._no_bias(case) is None
    assert providers._no_bias(BIASED[0])


class Node:
    """A tensor of a graph: who stands for it is told when the graph is executed."""

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: self


class Graph:
    """cuDNN's frontend graph of one attention, computed by autograd."""

    def __init__(self, **types):
        self.built = False

    def tensor_like(self, tensor):
        return Node()

    def sdpa(self, *, name, is_inference, **nodes):
        assert not is_inference
        self.nodes, self.results = nodes, (Node(), Node())
        return self.results

    def sdpa_backward(self, *, name, **nodes):
        self.nodes, self.results = nodes, (Node(), Node(), Node())
        return self.results

    def build(self, modes):
        self.built = True

    def get_workspace_size(self):
        return 16

    def execute(self, tensors, workspace, handle):
        assert self.built
        given = {name: tensors[node] for name, node in self.nodes.items() if isinstance(node, Node)}
        names = [name for name in ("q", "k", "v", "bias") if name in given]
        leaves = {name: given[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            o = F.scaled_dot_product_attention(
                leaves["q"], leaves["k"], leaves["v"], attn_mask=leaves.get("bias"), enable_gqa=True,
                is_causal=self.nodes["use_causal_mask"], scale=self.nodes["attn_scale"],
            )  # fmt: skip
        if len(self.results) == 2:
            tensors[self.results[0]].copy_(o.detach())
            tensors[self.results[1]].fill_(7)
            return
        assert (given["stats"] == 7).all()
        torch.testing.assert_close(given["o"], o.detach())
        grads = torch.autograd.grad(o, list(leaves.values()), given["dO"])
        outputs = [tensors[node] for node in self.results] + ([given["dBias"]] if "bias" in given else [])
        for output, grad in zip(outputs, grads, strict=True):
            output.copy_(grad)


@pytest.mark.parametrize("case", [CAUSAL, *BIASED, DECODE], ids=str)
def test_cudnn_graphs_are_given_every_tensor(case, monkeypatch):
    monkeypatch.setattr(providers._CudnnGraphs, "_graph", lambda self: Graph())
    cudnn = ModuleType("cudnn")
    cudnn.create_handle = lambda: None
    cudnn.data_type = SimpleNamespace(FLOAT=0)
    cudnn.heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    assert right(case, providers._cudnn_graph)


def test_a_package_whose_parent_cannot_be_imported_is_told(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_broken").mkdir()
    (tmp_path / "flash_attn_broken" / "__init__.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    missing = providers._missing("flash_attn_broken.cute", "flash-attn-4")
    assert missing == "flash-attn-4 cannot be imported: built for another torch"
    assert providers._missing("flash_attn_absent.cute", "flash-attn-4") == "flash-attn-4 is not installed"
    assert providers._missing("torch.nn", "torch") is None
