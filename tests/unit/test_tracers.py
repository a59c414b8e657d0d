"""Who records a call to run it elsewhere: torch.export, torch.jit, ONNX. Supported, or refused by name."""

import io

import pytest
import torch

from tilewise import attention, matmul, scaled_dot_product_attention, softmax
from tilewise.backends import Inputs
from tilewise.operator import onnx as plain
from tilewise.operator.autograd import attention_op
from tilewise.spec.score import Band, Score

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def tensors(B=2, H=4, Hkv=2, M=5, N=7, D=8, Dv=6, dtype=torch.float32):
    shapes = ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


class Call(torch.nn.Module):
    def __init__(self, function, **terms):
        super().__init__()
        self.function, self.terms = function, terms

    def forward(self, *inputs):
        return self.function(*inputs, **self.terms)


def calls():
    """Each operator once: its name, a module, its inputs."""
    q, k, v = tensors()
    return [
        ("attention", Call(attention, causal=True, softcap=3.0), (q, k, v)),
        ("attention", Call(scaled_dot_product_attention, enable_gqa=True), (q, k, v, torch.randn(5, 7))),
        ("matmul", Call(matmul, alpha=0.5), (q[0, 0], k[0, 0].mT.contiguous())),
        ("softmax", Call(softmax, scale=0.5), (q,)),
    ]


NAMES = ["attention", "the SDPA door", "matmul", "softmax"]


# --- torch.export, torch.jit ---


@pytest.mark.parametrize("n", range(len(NAMES)), ids=NAMES)
def test_exported_programs_call_the_operator(n):
    operator, module, inputs = calls()[n]
    program = torch.export.export(module, inputs)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for loaded in (program, torch.export.load(file)):
        assert f"torch.ops.tilewise.{operator}.default" in str(loaded.graph)
        others = [torch.randn_like(x) for x in inputs]
        torch.testing.assert_close(loaded.module()(*others), module(*others), **TOLERANCE)


def test_exported_programs_take_other_lengths():
    module, inputs = Call(attention, window=(2, 0)), tuple(tensors())
    length = torch.export.Dim("length", max=1024)
    sizes = ({2: torch.export.Dim("queries", max=1024)}, {2: length}, {2: length})
    program = torch.export.export(module, inputs, dynamic_shapes=(sizes,))
    others = tensors(M=6, N=11)
    torch.testing.assert_close(program.module()(*others), module(*others), **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
@pytest.mark.parametrize("n", range(len(NAMES)), ids=NAMES)
def test_traced_calls_are_the_operator(n):
    operator, module, inputs = calls()[n]
    traced = torch.jit.trace(module, inputs, check_trace=False)
    assert f"tilewise::{operator}" in str(traced.inlined_graph)
    others = [torch.randn_like(x) for x in inputs]
    torch.testing.assert_close(traced(*others), module(*others), **TOLERANCE)


def _call_attention(q, k, v):
    return attention(q, k, v)


def _call_sdpa(q, k, v):
    return scaled_dot_product_attention(q, k, v)


def _call_matmul(a, b):
    return matmul(a, b)


def _call_softmax(x):
    return softmax(x)


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    ("code", "name"),
    [
        (_call_attention, "attention"),
        (attention, "attention"),
        (Attention(), "attention"),
        (_call_sdpa, "scaled_dot_product_attention"),
        (_call_matmul, "matmul"),
        (_call_softmax, "softmax"),
    ],
)
def test_scripts_are_refused_by_name(code, name):
    with pytest.raises(NotImplementedError, match=rf"^tilewise\.{name}: torch\.jit\.script .* use torch\.compile"):
        torch.jit.script(code)


# --- torch.fx ---


class Layer(torch.nn.Module):
    def __init__(self, door):
        super().__init__()
        self.door, self.bias = door, torch.nn.Parameter(torch.randn(1, 4, 5, 7))

    def forward(self, q, k, v):
        if self.door is scaled_dot_product_attention:
            return self.door(q * 2, k, v, self.bias, enable_gqa=True)
        o, lse = self.door(q * 2, k, v, bias=self.bias, window=(4, None), return_lse=True)
        return o + lse.unsqueeze(-1)


@pytest.mark.parametrize("door", [attention, scaled_dot_product_attention])
def test_symbolic_traces_call_the_door(door):
    layer, inputs = Layer(door), tensors()
    traced = torch.fx.symbolic_trace(layer)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"][1] is door
    found, expected = traced(*inputs), layer(*inputs)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    pairs = zip(*(torch.autograd.grad(o.square().sum(), layer.bias) for o in (found, expected)), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, **TOLERANCE)


@pytest.mark.parametrize("door", [attention, scaled_dot_product_attention])
def test_symbolic_traces_of_a_bias_alone(door):
    q, k, v = tensors(Hkv=4)
    keyword = "attn_mask" if door is scaled_dot_product_attention else "bias"
    traced = torch.fx.symbolic_trace(lambda bias: door(q, k, v, **{keyword: bias}))
    bias = torch.randn(5, 7)
    torch.testing.assert_close(traced(bias), door(q, k, v, **{keyword: bias}), **TOLERANCE)


# --- ONNX, which is not installed here: what its exporters would get ---


@pytest.fixture
def onnx_export(monkeypatch):
    """As during torch.onnx.export, of either kind."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)


@pytest.mark.parametrize("n", range(len(NAMES)), ids=NAMES)
def test_onnx_gets_pytorchs_own_operators(n, onnx_export):
    _, module, inputs = calls()[n]
    program = torch.export.export(module, inputs)
    assert "tilewise" not in str(program.graph)
    others = [torch.randn_like(x) for x in inputs]
    torch.testing.assert_close(program.module()(*others), module(*others), **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
@pytest.mark.parametrize("n", range(len(NAMES)), ids=NAMES)
def test_the_older_onnx_export_gets_them_too(n, onnx_export):
    _, module, inputs = calls()[n]
    traced = torch.jit.trace(module, inputs, check_trace=False)
    assert "tilewise::" not in str(traced.inlined_graph)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(
    "terms",
    [(None, None, 0.3, None), (None, 0, 0.3, 2.0), (-2, None, 1.0, None), (1, 2, 0.3, None), (9, None, 0.3, None)],
)
def test_attention_in_pytorchs_own(dtype, heads, terms):
    q, k, v = tensors(dtype=dtype)
    bias, mask = torch.randn(1, heads, 5, 7, dtype=dtype), torch.rand(2, heads, 1, 7) < 0.6
    bias[..., 3] = -torch.inf
    mask[0] = False
    lo, hi, scale, softcap = terms
    score = Score(scale, softcap, Band(lo, hi))
    sink = torch.randn(2, heads, 5, dtype=dtype) if heads == 4 else None
    *expected, _ = attention_op(Inputs(q, k, v, bias, mask, sink), score, False, "reference")
    coarse = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    found = plain.attention(q, k, v, bias, mask, sink, None, None, None, None, score)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    torch.testing.assert_close(found, expected, rtol=coarse, atol=coarse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_in_pytorchs_own(dtype):
    a, b, c = (torch.randn(shape, dtype=dtype) for shape in ((3, 4, 5), (5, 6), (1, 6)))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else TOLERANCE
    torch.testing.assert_close(plain.matmul(a, b, c, 0.5, 2.0), matmul(a, b, c=c, alpha=0.5, beta=2.0), **tolerance)
    c[:] = torch.nan
    torch.testing.assert_close(plain.matmul(a, b, c, 0.5, 0.0), matmul(a, b, c=c, alpha=0.5, beta=0.0), **tolerance)
    mask = torch.rand(3, 4, 5) < 0.5
    mask[0, 0], mask[1, 1] = False, True
    bias = torch.randn(4, 5)
    a[1, 1, 1] = torch.nan
    torch.testing.assert_close(
        plain.softmax(a, 0.7, bias, mask, -1), softmax(a, scale=0.7, bias=bias, mask=mask), equal_nan=True, **tolerance
    )
