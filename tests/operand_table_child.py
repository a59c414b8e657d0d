"""Run by test_operand_table.py on a package whose table has a row more: ``dummy``, (B|1, H, 2, R), with a gradient."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends import Gradients, Inputs, Needs, cpu
from tilewise.explanation.attention import explain
from tilewise.frontend.arguments import Call
from tilewise.operator.autograd import ATTENTION, attention_op
from tilewise.operator.dispatch import describe
from tilewise.spec.bias_components import Parts
from tilewise.spec.operands import TensorSpec
from tilewise.spec.score import Band, Score, ScoreNumbers

B, H, M, D, R = 2, 4, 8, 16, 3
SCORE = Score.of(Band(), D)
TERMS = ScoreNumbers.of(SCORE, False, "cpu")


def inputs(dummy, grad=True):
    q, k, v = (torch.randn(B, H, M, D, requires_grad=grad) for _ in range(3))
    return Inputs(q, k, v, None, None, None, Parts(dummy=dummy))


def test_schema():
    forward, backward = torch.ops.tilewise.attention.default, torch.ops.tilewise.attention_backward.default
    for operator in (forward, backward):
        assert "Tensor? toeplitz, Tensor? dummy, Tensor? query_shift" in str(operator._schema)
    assert len(backward._schema.returns) == len(Needs._fields) == 11


def test_checks():
    described = describe(inputs(torch.zeros(B, H, 2, R)), TERMS, **Needs(*[True] * 11).of_problem)
    assert described.parts.dummy == TensorSpec(torch.float32, B, H, 2, R)
    assert "dummy" in described.parts.grads
    assert described.parts.named()[-1] == ("dummy", described.parts.dummy)
    for bad in (torch.zeros(3, H, 2, R), torch.zeros(B, 1, 2, R), torch.zeros(B, H, M, R), torch.zeros(H, 2, R)):
        with pytest.raises(ValueError, match=r"^bias: values per dummy: shape \(.*\) does not fit the call"):
            describe(inputs(bad), TERMS)
    with pytest.raises(TypeError, match=r"^bias: values per dummy: dtype must be float, got torch\.int32"):
        describe(inputs(torch.zeros(B, H, 2, R, dtype=torch.int32)), TERMS)
    with pytest.raises(ValueError, match=r"^bias: values per dummy: must be on q's device cpu, got meta"):
        describe(inputs(torch.zeros(B, H, 2, R, device="meta")), TERMS)


def test_gradients(monkeypatch):
    """A backend that knows the dummy is all that is missing: eager calls, the operator and an empty call hand it on."""
    asked = []

    def backward(problem, given, outputs, cotangents, needs):
        def run(given, outputs, cotangents):
            asked.append(needs)
            return Gradients(
                *[torch.zeros_like(x) for x in given[:3]], None, dummy=7 * torch.ones_like(given.parts.dummy)
            )

        return run

    monkeypatch.setattr(cpu, "prepare", cpu.prepare | {"backward": backward})
    for operator in (False, True):
        x = inputs(torch.zeros(1, H, 2, R, requires_grad=True))
        if operator:
            o, *_ = ATTENTION(*x.flat(), *TERMS)
        else:
            o, *_ = attention_op(x, SCORE, False, "cpu", return_lse=False)
        o.sum().backward()
        assert torch.equal(x.parts.dummy.grad, torch.full((1, H, 2, R), 7.0))
        assert asked.pop() == Needs(True, True, True, False, dummy=True)
    x = inputs(torch.zeros(1, H, 2, R, requires_grad=True))
    x = x._replace(k=x.k[:, :, :0], v=x.v[:, :, :0])
    attention_op(x, SCORE, False, "cpu", return_lse=False)[0].sum().backward()
    assert torch.equal(x.parts.dummy.grad, torch.zeros(1, H, 2, R))


def test_placements():
    from torch.distributed.tensor import Replicate, Shard

    from tilewise.operator.sharding import OTHERS, _layouts

    mesh = SimpleNamespace(shape=(2,))
    q = SimpleNamespace(shape=(B, H, M, D), mesh=mesh)

    def place(name):
        """Placement of 6 numbers where the batch is split."""
        numbers = [SimpleNamespace(shape=(6,)) if name == x else None for x in OTHERS]
        return [*_layouts(q, q, numbers)][1].operands[OTHERS.index(name)]

    for batch in (1, B):
        others = [SimpleNamespace(shape=(batch, H, 2, R)) if name == "dummy" else None for name in OTHERS]
        whole, by_batch, by_heads = _layouts(q, q, others)
        at = OTHERS.index("dummy")
        assert whole.operands[at] == Replicate()
        assert by_batch.operands[at] == (Shard(0) if batch > 1 else Replicate())
        assert by_heads.operands[at] == Shard(1)
        assert by_heads.differentiated[-1] == Shard(1)
    assert [place("query_shift"), place("query_buckets")] == [Shard(0), Replicate()]


def test_words(monkeypatch):
    x = torch.randn(B, H, M, D)
    call = Call(inputs(torch.zeros(B, H, 2, R), False), SCORE, False, "cpu")
    monkeypatch.setattr("tilewise.explanation.attention.read_call", lambda *_, **__: call)
    assert "a dummy bias (2, 4, 2, 3) float32" in str(explain(x, x, x))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", "-c", os.devnull, "-p", "no:cacheprovider"]))
