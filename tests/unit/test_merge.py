"""merge_attention: parts of the keys, put together, are attention of all of them, with its gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tilewise import attention, merge_attention

B, H, M, N, D = 2, 4, 11, 30, 8
CUTS = {"one part": [0, N], "two": [0, 17, N], "of one key": [0, 1, 2, N], "an empty one": [0, 9, 9, N]}


def drawn(dtype=torch.float64, Dv=6):
    shapes = ((B, H, M, D), (B, 2, N, D), (B, 2, N, Dv))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def sink_of(kind, dtype=torch.float64):
    shape = {"h": (H,), "bhm": (B, H, M), "1h1": (1, H, 1)}.get(kind)
    return None if shape is None else torch.randn(shape, dtype=dtype).requires_grad_()


def in_parts(q, k, v, mask, cuts):
    pairs = itertools.pairwise(cuts)
    keys = [slice(*pair) for pair in pairs]
    return zip(*(attention(q, k[:, :, n], v[:, :, n], mask=mask[..., n], return_lse=True) for n in keys), strict=True)


@pytest.mark.parametrize("sink", ["", "h", "bhm", "1h1"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_parts_are_the_whole(cuts, sink):
    """Rows that see nothing in a part, and one that sees nothing at all."""
    inputs, sink = drawn(), sink_of(sink)
    mask = torch.rand(B, 1, M, N) < 0.2
    mask[:, :, 3] = False
    mask[:, :, 5, 1:] = False
    leaves = [x for x in (*inputs, sink) if x is not None]
    do, dlse = torch.randn(B, H, M, 6, dtype=torch.float64), torch.randn(B, H, M, dtype=torch.float64)
    expected = attention(*inputs, mask=mask, sink=sink, return_lse=True)
    found = merge_attention(*in_parts(*inputs, mask, cuts), sink=sink)
    torch.testing.assert_close(found, expected)
    grads = [
        torch.autograd.grad((o * do).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum(), leaves)
        for o, lse in (found, expected)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("sink", ["", "h", "bhm"])
def test_gradients(sink):
    """To the second order; one row unseen by one part, one by all."""
    outputs = [torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3)]
    lses = [torch.randn(1, 2, 4, dtype=torch.float64) for _ in range(3)]
    gone = torch.tensor([[False, True, False, False], [False, True, True, False], [False, True, False, False]])
    tensors = [x.requires_grad_() for x in (*outputs, *lses)]
    if sink:
        tensors.append(torch.randn((2,) if sink == "h" else (1, 2, 4), dtype=torch.float64).requires_grad_())

    def call(*tensors):
        parts = [x.masked_fill(row[None, None, :], -math.inf) for x, row in zip(tensors[3:6], gone, strict=True)]
        o, lse = merge_attention(tensors[:3], parts, sink=tensors[6] if sink else None)
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def test_rows_that_no_part_has_seen():
    """Whatever their outputs hold, and with a cotangent for the -inf: nothing, and no NaN."""
    outputs = [torch.full((1, 1, 2, 3), math.nan).requires_grad_() for _ in range(2)]
    lses = [torch.full((1, 1, 2), -math.inf).requires_grad_() for _ in range(2)]
    sink = torch.full((1,), -math.inf).requires_grad_()
    for given in (None, sink):
        o, lse = merge_attention(outputs, lses, sink=given)
        assert torch.equal(o, torch.zeros_like(o))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))
        tensors = [*outputs, *lses, *([] if given is None else [given])]
        for grad in torch.autograd.grad((o, lse), tensors, (torch.ones_like(o), torch.ones_like(lse))):
            assert torch.equal(grad, torch.zeros_like(grad))
    o, lse = merge_attention(outputs, lses, sink=torch.full((1,), 2.5))
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, 2.5))


def test_large_and_distant_lses():
    """exp of none overflows, and a part far below another is exactly nothing."""
    outputs = [torch.randn(1, 1, 4, 3) for _ in range(2)]
    lses = [torch.tensor([[[1e4, -1e4, 300.0, 0.0]]]), torch.tensor([[[0.0, -1e4, -300.0, 0.0]]])]
    o, lse = merge_attention(outputs, lses)
    half = (outputs[0] + outputs[1]) / 2
    torch.testing.assert_close(lse, torch.tensor([[[1e4, -1e4 + math.log(2), 300.0, math.log(2)]]]))
    torch.testing.assert_close(o[0, 0, [0, 2]], outputs[0][0, 0, [0, 2]])
    torch.testing.assert_close(o[0, 0, [1, 3]], half[0, 0, [1, 3]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_summed_in_float32(dtype):
    """64 parts: one rounding at the end, where sums in 16 bits would have 64."""
    outputs = [torch.randn(1, 1, 50, 8).to(dtype) for _ in range(64)]
    lses = [torch.randn(1, 1, 50) for _ in range(64)]
    o, lse = merge_attention(outputs, lses, sink=torch.zeros(1, dtype=dtype))
    exact, exact_lse = merge_attention([x.double() for x in outputs], [x.double() for x in lses], sink=torch.zeros(1))
    assert (o.dtype, lse.dtype, exact.dtype) == (dtype, torch.float32, torch.float64)
    torch.testing.assert_close(o.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_compiled():
    torch._dynamo.reset()
    outputs, lses = [torch.randn(1, 2, 3, 4) for _ in range(2)], [torch.randn(1, 2, 3) for _ in range(2)]
    compiled = torch.compile(merge_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(outputs, lses), merge_attention(outputs, lses))


OUT, L = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5)
ERRORS = {
    "outputs: expected a sequence of tensors, one of each part, got Tensor": (OUT, [L]),
    "lses: expected a sequence of tensors, one of each part, got Tensor": ([OUT], L),
    "outputs: needs one part or more, got none": ([], []),
    "lses: expected one for each of the 2 outputs, got 1": ([OUT, OUT], [L]),
    "outputs[0]: expected 4 dimensions (B, H, M, Dv), got shape (2, 4, 5)": ([L], [L]),
    "outputs[0]: expected a torch.Tensor, got float": ([1.0], [L]),
    "outputs[0]: dtype must be float16, bfloat16, float32 or float64, got torch.int64": ([OUT.long()], [L]),
    "outputs[1]: dtype must equal outputs[0]'s torch.float32, got torch.float16": ([OUT, OUT.half()], [L, L]),
    "outputs[1]: shape must equal outputs[0]'s (2, 4, 5, 8), got (2, 4, 5, 4)": ([OUT, OUT[..., :4]], [L, L]),
    "outputs[1]: must be on outputs[0]'s device cpu, got meta": ([OUT, OUT.to("meta")], [L, L]),
    "lses[0]: expected shape (B, H, M) = (2, 4, 5), got (2, 5, 4)": ([OUT], [L.mT]),
    "lses[0]: dtype must be torch.float32 for outputs of torch.float16, got torch.float16": ([OUT.half()], [L.half()]),
    "lses[0]: dtype must be torch.float64 for outputs of torch.float64, got torch.float32": ([OUT.double()], [L]),
    "lses[0]: must be on outputs[0]'s device cpu, got meta": ([OUT], [L.to("meta")]),
}
SINKS = {
    "sink: expected one logit for each head, (4|1,), or for each query, (2|1, 4|1, 5|1), got shape (3,)": L[0, 0, :3],
    "sink: dtype must be float16, bfloat16, float32 or float64, got torch.int64": L.long(),
    "sink: must be on outputs[0]'s device cpu, got meta": L.to("meta"),
    "sink: expected a torch.Tensor, got float": 1.0,
}


@pytest.mark.parametrize("message", [*ERRORS, *SINKS])
def test_errors_name_the_argument(message):
    outputs, lses = ERRORS.get(message, ([OUT], [L]))
    with pytest.raises((TypeError, ValueError)) as error:
        merge_attention(outputs, lses, sink=SINKS.get(message))
    assert str(error.value) == message
