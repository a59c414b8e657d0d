"""Forward-mode and second derivatives of varlen_attention(), against those of its sequences one by one."""

from __future__ import annotations

import math

import pytest
import torch
import varlen_biases
from derivative_helpers import WAYS, no_lse, plain, tangents_like
from helpers import DROPOUT_SEED, Case, Tensors, dropout_mask, tensors
from pairwise import pairwise
from varlen_helpers import DOUBLE, HKV, RUNS, SMALL, USED, Again, H, New, call, joined, sequence_calls
from varlen_helpers import tensors as packed_tensors

from tilewise import attention, varlen_attention
from tilewise.backends import sequences
from tilewise.derivatives import scores

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
each_way = pytest.mark.parametrize("way", WAYS)
BIASES = {
    "none": None,
    "padded": varlen_biases.padded("1kmn"),
    "padded for each": varlen_biases.padded("bh1n"),
    "along the keys": varlen_biases.along_keys(H),
    "along the queries": varlen_biases.along_queries(1),
    "ragged": varlen_biases.ragged_bias(H),
    "query": varlen_biases.relative("query", outside=-math.inf),
    "key": varlen_biases.relative("key", HKV, outside="clamp"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 4)


def check(way, lengths, make=None, sink=None, backend=None, **options):
    """Of q, k, v, the leaves of the bias and the sink."""
    new = New(lengths, DOUBLE)
    if make is not None:
        make(new)
    qkv, _, _ = packed_tensors(lengths, DOUBLE)
    leaves = [x.detach() for x in (*qkv, *new.leaves, *([] if sink is None else [sink]))]
    count = len(new.leaves)

    def read(leaves):
        bias, parts = (None, None) if make is None else make(Again(lengths, leaves[3 : 3 + count]))
        return leaves[:3], bias, parts, None if sink is None else leaves[-1]

    def ours(*leaves):
        qkv, bias, _, logits = read(leaves)
        return no_lse(call(qkv, lengths, bias=bias, sink=logits, backend=backend, **options))

    def theirs(*leaves):
        qkv, _, parts, logits = read(leaves)
        found = []
        for s, q, k, v, bias, _, own in sequence_calls(qkv, lengths, parts, None, logits):
            case = Case(B=1, H=H, Hkv=HKV, M=s.m, N=s.n, D=q.shape[3], Dv=v.shape[3], dtype=DOUBLE, **options)
            found.append(plain(case, Tensors(q, k, v, None, None, q, q, own), [] if bias is None else [bias]))
        return no_lse(joined(qkv, lengths, found))

    given = tangents_like(leaves)
    for x, y in zip(*(WAYS[way](f, leaves, given) for f in (ours, theirs)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("way", "name", "backend"), pairwise(WAYS, BIASES, [None, "reference"]), ids=str)
def test_biases(way, name, backend):
    check(way, USED, BIASES[name], backend=backend, causal=True)


@each_way
@pytest.mark.parametrize("lengths", [SMALL, RUNS], ids=["small", "runs"])
def test_sequences(way, lengths):
    sinks = {"of heads": torch.randn(H, dtype=DOUBLE), "of queries": torch.randn(H, lengths.total_q, dtype=DOUBLE)}
    for sink in sinks.values():
        check(way, lengths, varlen_biases.padded("1hmn"), sink, softcap=1.5, window=(3, 2))


@each_way
def test_dropout_is_that_of_the_padded_batch(way, monkeypatch):
    monkeypatch.setattr(sequences, "PAIRS", 25)  # each sequence alone
    case = Case(B=3, H=2, Hkv=2, M=5, N=5, D=4, Dv=4, dtype=DOUBLE, dropout_p=0.4)
    x = tensors(case)
    dropout_mask(case)
    offsets = torch.tensor([0, 5, 10, 15])

    def ours(*qkv):
        flat = [y.transpose(1, 2).flatten(0, 1) for y in qkv]
        o, lse = varlen_attention(
            *flat, offsets, offsets, 5, 5, dropout_p=0.4, dropout_seed=DROPOUT_SEED, return_lse=True
        )
        return o.unflatten(0, (3, 5)).transpose(1, 2), lse.unflatten(1, (3, 5)).transpose(0, 1)

    def theirs(*qkv):
        return plain(case, x._replace(q=qkv[0], k=qkv[1], v=qkv[2]))

    given = tangents_like(x[:3])
    torch.testing.assert_close(tuple(WAYS[way](ours, x[:3], given)), tuple(WAYS[way](theirs, x[:3], given)))


def test_a_shared_bias_is_summed_unrounded(monkeypatch):
    """A float16 bias of two sequences, which nearly cancel: its second derivative is rounded once."""
    monkeypatch.setattr(sequences, "PAIRS", 16)  # each sequence alone
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 1, 4, dtype=torch.float16).repeat(2, 1, 1) for _ in range(3))
    bias, offsets = torch.randn(1, 1, 4, 4, dtype=torch.float16), torch.tensor([0, 4, 8])
    do = torch.tensor([1.0, -31 / 32]).repeat_interleave(4).view(8, 1, 1)
    found = []
    for dtype in (torch.float16, DOUBLE):
        x = [y.to(dtype).requires_grad_() for y in (q, k, v, bias)]
        o = varlen_attention(*x[:3], offsets, offsets, 4, 4, bias=x[3])
        (dq,) = torch.autograd.grad((o * do.to(dtype)).sum(), x[0], create_graph=True)
        found.append(torch.autograd.grad((dq * k.to(dtype)).sum(), x[3])[0].double())
    error = (found[0] - found[1]).abs().max() / found[1].abs().max()
    assert error < 2**-11


@each_way
def test_jagged_tensors(way):
    """Of values that are views of one another's memory, as nested tensors have them."""
    q = torch.randn(7, 2, 4, dtype=DOUBLE)
    offsets = torch.tensor([0, 3, 7])

    def ours(q):
        return (varlen_attention(q, q, q, offsets, offsets, 4, 4, causal=True),)

    def theirs(q):
        own = [q[a:b].transpose(0, 1)[None] for a, b in ((0, 3), (3, 7))]
        return (torch.cat([attention(x, x, x, causal=True)[0].transpose(0, 1) for x in own]),)

    given = tangents_like([q])
    torch.testing.assert_close(tuple(WAYS[way](ours, [q], given)), tuple(WAYS[way](theirs, [q], given)))
