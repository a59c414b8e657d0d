"""What a packed batch costs, in words and in FLOPs: `explain_varlen`, and PyTorch's counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import explain, explain_varlen, varlen_attention
from tilewise.bias import RaggedBias

H, D = 2, 16
QUERIES, KEYS = (3, 0, 7, 5), (4, 2, 7, 0)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(device="cpu", **more):
    q, k, v = (torch.zeros(n, H, D, device=device, **more) for n in (sum(QUERIES), sum(KEYS), sum(KEYS)))
    return q, k, v, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}], ids=str)
def test_work_is_that_of_the_sequences(options):
    found = explain_varlen(*packed(), **options)
    each = [
        explain(*(torch.zeros(1, H, n, D) for n in (m, n, n)), **options)
        for m, n in zip(QUERIES, KEYS, strict=True)
    ]  # fmt: skip
    for name in ("forward", "backward"):
        for what in ("flops", "bytes", "unfused_bytes"):
            assert getattr(getattr(found, name), what) == sum(getattr(getattr(x, name), what) for x in each)


def test_words():
    values = torch.zeros(H, sum(m * n for m, n in zip(QUERIES, KEYS, strict=True)), requires_grad=True)
    bias = RaggedBias(values, torch.tensor([0, 12, 12, 61, 61]))
    found = explain_varlen(*packed(), bias=bias, causal=True, return_lse=True)
    words = str(found)
    assert "4 sequences of at most 7 queries and 7 keys" in words
    assert f"q (15, {H}, {D})" in words
    plain = explain_varlen(*packed(), causal=True)
    assert found.forward.bytes == plain.forward.bytes + 4 * values.numel()
    assert found.backward.bytes == plain.backward.bytes + 8 * values.numel()


def test_seqused_and_other_devices():
    used = torch.tensor([1, 2, 3, 0])
    q, k, v, *lengths = packed("meta", dtype=torch.bfloat16)
    found = explain_varlen(q, k, v, *lengths, seqused_k=used, device="sm_90", limits=(1e12, 1e12))
    assert found.forward.flops == 2 * 2 * D * H * (3 * 1 + 7 * 3)
    assert found.plan.backend == "hopper"
    matrix = torch.zeros(1, H, 7, 7, device="meta", dtype=torch.bfloat16)
    biased = explain_varlen(q, k, v, *lengths, bias=matrix, device="sm_90", limits=(1e12, 1e12))
    assert biased.plan.backend == "triton"
    assert "no ragged or padded bias of a packed batch" in dict(biased.plan.declined)["hopper"]
    with pytest.raises(ValueError, match=r"^device: needed"):
        explain_varlen(q, k, v, *lengths)
    lengths[0] = lengths[0].to("meta")
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: is read"):
        explain_varlen(q, k, v, *lengths, device="cpu")
    with pytest.raises(TypeError, match="attn_mask"):
        explain_varlen(*packed(), attn_mask=None)


@pytest.mark.parametrize("used", [None, (1, 2, 3, 0)])
def test_flops_are_counted_by_sequences(used):
    q, k, v, *lengths = packed()
    q.requires_grad_()
    seqused = None if used is None else torch.tensor(used)
    with FlopCounterMode(display=False) as counter:
        varlen_attention(q, k, v, *lengths, seqused_k=seqused).sum().backward()
    pairs = sum(m * n for m, n in zip(QUERIES, used or KEYS, strict=True))
    assert counter.get_total_flops() == 2 * H * pairs * (2 + 5) * D


def test_flops_of_lengths_without_numbers():
    """As PyTorch counts those of its own: all sequences are as long as the longest."""
    q, k, v, *lengths = packed("meta")
    lengths = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in lengths]
    with FlopCounterMode(display=False) as counter:
        tilewise.varlen_attention(q, k, v, *lengths, backend="cpu")
    assert counter.get_total_flops() == 2 * H * len(QUERIES) * max(QUERIES) * max(KEYS) * 2 * D


def test_of_jagged_tensors():
    """As of the packed batch that they are."""
    q, k, v, cu_q, cu_k, *longest = packed()
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    own = [torch.nested.nested_tensor_from_jagged(x, cu) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))]
    own = [x.transpose(1, 2) for x in own]
    for options in (
        {},
        {"causal": True, "device": "sm_90", "dropout_p": 0.1},
        {"window": (2, 1), "limits": (1e12, 1e11)},
    ):
        found, expected = explain(*own, **options), explain_varlen(q, k, v, cu_q, cu_k, *longest, **options)
        assert str(found) == str(expected)
        assert found.forward == expected.forward
        assert found.backward == expected.backward
    with pytest.raises(ValueError, match=r"^q: its lengths are read"):
        explain(*(x.to("meta") for x in own), device="sm_90")
