"""`varlen_attn`, the packed call by PyTorch's signature, against `varlen_attention`."""

import inspect
import re

import pytest
import torch

from tilewise import varlen_attention, varlen_attn

CU_Q, CU_K = torch.tensor([0, 3, 8, 9]), torch.tensor([0, 4, 9, 16])
LENGTHS = (CU_Q, CU_K, 5, 7)


def qkv(heads=4):
    gen = torch.Generator().manual_seed(0)
    shapes = ((9, 4, 8), (16, heads, 8), (16, heads, 6))
    return [torch.randn(s, generator=gen, dtype=torch.float64, requires_grad=True) for s in shapes]


def test_signature():
    """PyTorch's in 2.12 and 2.13; before, it had fewer arguments."""
    theirs = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    ours = [(p.name, p.default, p.kind) for p in inspect.signature(varlen_attn).parameters.values()]
    expected = [(p.name, p.default, p.kind) for p in inspect.signature(theirs).parameters.values()]
    if not torch.__version__.startswith(("2.12", "2.13")):
        expected = [x for x in expected if x in ours]
        assert len(expected) >= 8
    assert [x for x in ours if x in expected] == expected


@pytest.mark.parametrize(("window_size", "options"), [
    ((-1, -1), {}), ((-1, 0), {"causal": True}), ((2, 0), {"window": (2, 0)}), ((-1, 1), {"window": (None, 1)}),
    ((0, -1), {"window": (0, None)}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("heads", [2, 4])
def test_is_varlen_attention(window_size, options, heads):
    aux = pytest.importorskip("torch.nn.attention.varlen").AuxRequest(lse=True)
    inputs = qkv(heads)
    bias = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    used = torch.tensor([4, 2, 7])
    more = {"scale": 0.3, "seqused_k": used, "bias": bias}
    ours = varlen_attn(*inputs, *LENGTHS, window_size=window_size, enable_gqa=heads != 4, return_aux=aux, **more)
    theirs = varlen_attention(*inputs, *LENGTHS, return_lse=True, **options, **more)
    leaves = [*inputs, bias]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(o.sin().sum(), leaves) for o in (ours[0], theirs[0])]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch.equal(varlen_attn(*inputs, *LENGTHS), varlen_attention(*inputs, *LENGTHS)) if heads == 4 else True


def test_refusals():
    q, k, v = qkv(2)
    for options, error, message in (
        ({}, ValueError, "key: number of heads must equal query's 4, got 2; enable_gqa=True"),
        ({"enable_gqa": 1}, TypeError, "enable_gqa: "),
        ({"block_table": CU_Q}, NotImplementedError, "block_table: is not implemented"),
        ({"num_splits": 1}, NotImplementedError, "num_splits: is not implemented"),
        ({"window_size": (1,)}, TypeError, r"window_size: expected a pair \(left, right\), got \(1,\)"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: expected -1"),
        ({"window_size": (None, 0)}, TypeError, "window_size: expected ints"),
        ({"return_aux": True}, TypeError, "return_aux: expected a tilewise.AuxRequest"),
        ({"cu_seq_k": None}, TypeError, "cu_seq_k: expected a torch.Tensor, got NoneType"),
    ):
        given = {"cu_seq_q": CU_Q, "cu_seq_k": CU_K, "max_q": 5, "max_k": 7} | options
        with pytest.raises(error, match=f"^{message}"):
            varlen_attn(q, k, v, **given)
    with pytest.raises(ValueError, match=re.escape("max_seqlen_k: must be the longest sequence's 7 or more, got 6")):
        varlen_attn(q, k, v, CU_Q, CU_K, 5, 6, enable_gqa=True)


def test_a_known_call_is_checked():
    """What was not asked for, or a number of another type, is refused although an equal call is cached."""
    q, k, v = qkv(2)
    varlen_attn(q, k, v, *LENGTHS, enable_gqa=True)
    for options, error, name in (
        ({}, ValueError, "key"),
        ({"enable_gqa": 1}, TypeError, "enable_gqa"),
        ({"enable_gqa": True, "window_size": (-1.0, -1)}, TypeError, "window_size"),
        ({"enable_gqa": True, "window_size": (-1, False)}, TypeError, "window_size"),
        ({"enable_gqa": True, "window_size": (-2, 4)}, ValueError, "window_size"),
        ({"enable_gqa": True, "num_splits": 1}, NotImplementedError, "num_splits"),
    ):
        with pytest.raises(error, match=f"{name}: "):
            varlen_attn(q, k, v, *LENGTHS, **options)
