"""``return_aux``: statistics of the scores on the CPU, at every entry point, and what is refused."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from helpers import Case
from statistics_helpers import EVERY, check_statistics
from torch.nn.attention.flex_attention import AuxRequest as FlexRequest

import tilewise
from tilewise import AuxRequest, attention, varlen_attention, varlen_attn
from tilewise.backends.cpu import fused
from tilewise.integrations.evoformer import triangle_attention
from tilewise.spec.statistics import NO_STATISTICS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use
USUAL = Case(B=2, H=4, Hkv=2, M=129, N=127, D=16, dtype=torch.float32)
TERMS = [
    {},
    {"causal": True, "dtype": torch.bfloat16},
    {"bias": "1hmn", "window": (20, 3)},
    {"bias": "bhmn", "bias_hides": True, "blind": True, "sink": "h"},
    {"bias": "b11n", "bias_scale": 1e6, "M": 3},
    {"bias": "1hm1", "softcap": 2.0, "sink": "bhm", "sink_none": True},
    {"mask": "b1mn", "blind": True, "planted": math.nan},
    {"mask": "bhmn", "bias": "1hmn", "planted": math.inf, "softcap": 5.0, "Hkv": 4},
    {"dropout_p": 0.3, "M": 1, "N": 1},
    {"M": 3, "N": 1100, "causal": True, "bias": "11mn"},  # several tiles of keys
    {"M": 200, "N": 100, "causal": True, "sink": "h", "sink_at": 30.0},
    {"layout": "sliced", "dtype": torch.float64, "scale": 3.0},
]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_formulas(backend, terms):
    check_statistics(replace(USUAL, **terms), backend, grad=True)


@pytest.mark.parametrize(
    "request_", [AuxRequest(max_scores=True), AuxRequest(lse=True, entropy=True), AuxRequest(max_scores_unbiased=True),
                 AuxRequest(lse=True), AuxRequest()], ids=str,
)  # fmt: skip
def test_what_is_asked_for(request_):
    check_statistics(replace(USUAL, bias="1hmn"), "cpu", request=request_)


def made(*lead: int, M: int = 40, N: int = 50, D: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*lead, 2, n, D, dtype=torch.float64) for n in (M, N, N)]


def test_pytorchs_requests():
    q, k, v = made(1)
    _, aux = attention(q, k, v, return_aux=FlexRequest(lse=True, max_scores=True))
    _, plain = attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert torch.equal(aux.lse, plain.lse)
    assert torch.equal(aux.max_scores, plain.max_scores)
    assert aux.entropy is None


def test_packed_batches_give_what_padded_ones_give():
    q, k, v = made(1)
    lengths = [(0, 5), (13, 0), (7, 20), (20, 25)]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True))
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    _, aux = varlen_attention(*packed, cu_q, cu_k, 20, 25, causal=True, return_aux=EVERY)
    for name in AuxRequest._fields:
        assert getattr(aux, name).shape == (2, 40)
    for n, (M, N) in enumerate(lengths):
        rows, keys = slice(int(cu_q[n]), int(cu_q[n]) + M), slice(int(cu_k[n]), int(cu_k[n]) + N)
        if M:
            _, alone = attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal=True, return_aux=EVERY)
            for x, y in zip(aux, alone, strict=True):
                torch.testing.assert_close(x[:, rows], y[0])
    _, aux = varlen_attn(
        *packed, cu_q, cu_k, 20, 25, window_size=(-1, 0), return_aux=FlexRequest(lse=True, max_scores=True)
    )
    assert aux.max_scores.shape == (2, 40)
    assert aux.lse is not None


def test_more_leading_dimensions():
    """Merged to one call, and split into several."""
    q, k, v = made(3, 4)
    for bias in (torch.randn(3, 1, 2, 40, 50), torch.randn(1, 4, 2, 40, 50)):
        _, aux = attention(q, k, v, bias=bias, return_aux=EVERY)
        for i, j in ((0, 0), (2, 3)):
            own = bias[min(i, bias.shape[0] - 1), min(j, bias.shape[1] - 1)]
            _, alone = attention(q[i, j][None], k[i, j][None], v[i, j][None], bias=own, return_aux=EVERY)
            for x, y in zip(aux, alone, strict=True):
                torch.testing.assert_close(x[i, j], y[0])
    _, aux = attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, return_aux=EVERY)
    assert aux.entropy.shape == (3, 4, 2, 40)


def test_jagged_tensors():
    parts = [torch.randn(n, 2, 8) for n in (3, 7)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    _, aux = attention(x, x, x, return_aux=EVERY)
    alone = [y.transpose(0, 1)[None] for y in parts]
    for n, y in enumerate(alone):
        _, own = attention(y, y, y, return_aux=EVERY)
        for found, wanted in zip(aux, own, strict=True):
            torch.testing.assert_close(found.unbind()[n], wanted[0])


def test_triangle_attention_gives_the_maximum():
    q, k, v = made(2, 5)
    bias = torch.randn(2, 1, 2, 40, 50)
    _, _, most = triangle_attention(q, k, v, bias, return_aux=True)
    torch.testing.assert_close(most, (q @ k.mT / math.sqrt(8) + bias).amax(-1))


def test_gathered_keys(monkeypatch):
    """Of a dynamic mask."""
    from tilewise.topk import gather

    monkeypatch.setitem(gather.WORTH, "cpu", 0.0)
    q, k, v = made(2, M=256, N=256)
    mask = tilewise.dynamic_mask(torch.randn(2, 2, 1, 256), keep=16, causal=True)
    _, aux = attention(q, k, v, mask=mask, causal=True, return_aux=EVERY)
    _, plain = attention(q, k, v, mask=mask.dense(), causal=True, return_aux=EVERY)
    for x, y in zip(aux, plain, strict=True):
        torch.testing.assert_close(x, y)


def test_nothing_to_see():
    q, k, v = made(1)
    for keys, sink in ((slice(0, 0), None), (slice(0, 0), torch.randn(2))):
        _, aux = attention(q, k[:, :, keys], v[:, :, keys], sink=sink, return_aux=EVERY)
        assert (aux.max_scores == -math.inf).all()
        assert (aux.max_scores_unbiased == -math.inf).all()
        assert (aux.entropy == 0).all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    q, k, v = (x.float().requires_grad_() for x in made(1))
    bias = torch.randn(2, 40, 50, requires_grad=True)

    def loss(q, k, v, bias):
        o, aux = attention(q, k, v, bias=bias, return_aux=EVERY)
        return o.sum() + aux.lse.sum(), aux

    (ours, aux), (plain, eager) = (
        torch.compile(loss, backend=backend, fullgraph=True)(q, k, v, bias),
        loss(q, k, v, bias),
    )
    for x, y in zip(aux, eager, strict=True):
        torch.testing.assert_close(x, y)
    assert not aux.entropy.requires_grad
    for x, y in zip(*(torch.autograd.grad(z, (q, k, v, bias)) for z in (ours, plain)), strict=True):
        torch.testing.assert_close(x, y)


def test_transforms():
    """Statistics have no derivative, and no tangent."""
    q, k, v = made(2)

    def entropy(q):
        return attention(q, k, v, return_aux=AuxRequest(entropy=True))[1].entropy

    found, tangent = torch.func.jvp(entropy, (q,), (q,))
    torch.testing.assert_close(found, entropy(q))
    assert not tangent.any()
    each = torch.func.vmap(lambda q: entropy(q.expand(2, -1, -1, -1)))(q)
    assert each.shape[0] == 2


def test_repeated_calls_and_threads():
    q, k, v = made(1)
    tilewise.clear_caches()
    attention(q, k, v)
    wanted = [attention(q, k, v, return_aux=AuxRequest(max_scores=True))[1].max_scores, attention(q, k, v)]
    found = []

    def run():
        for _ in range(20):
            found.append((attention(q, k, v, return_aux=AuxRequest(max_scores=True))[1].max_scores, attention(q, k, v)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(torch.equal(x, y) for pair in found for x, y in zip(pair, wanted, strict=True))


def test_the_backward_knows_nothing_of_them(monkeypatch):
    """PyTorch's fused kernel computes no statistics, and differentiates a call that has some."""
    taken, backward = [], fused.backward
    monkeypatch.setattr(fused, "backward", lambda *x: taken.append(x[0].score.statistics) or backward(*x))
    q, k, v = (x.float().requires_grad_() for x in made(1))
    attention(q, k, v, return_aux=AuxRequest(entropy=True))[0].sum().backward()
    assert taken == [NO_STATISTICS]


def test_explanations():
    """Hopper's forward declines the maximum without a bias by name; its backward runs all the same."""
    q = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    bias = torch.empty(8, 4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    request = AuxRequest(max_scores_unbiased=True)
    told, plain = (tilewise.explain(q, q, q, bias=bias, device="sm_90", return_aux=x) for x in (request, None))
    assert (told.plan.backend, told.plan.backward) == ("triton", "hopper")
    assert "starts its scores from the bias, and finds no maximum without it" in str(told)
    assert (plain.plan.backend, plain.plan.backward) == ("hopper", "hopper")
    assert told.forward.bytes - plain.forward.bytes == 4 * 8 * 4096


def test_checkpoints_recompute():
    q, k, v = (x.requires_grad_() for x in made(1))

    def run(q):
        o, aux = attention(q, k, v, return_aux=AuxRequest(lse=True, entropy=True))
        return o.sum() + aux.lse.sum()

    plain = torch.autograd.grad(run(q), q)
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, q, use_reentrant=False), q)
    assert torch.equal(plain[0], again[0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"return_aux": True}, TypeError, r"^return_aux: expected a tilewise.AuxRequest"),
        ({"return_aux": (True, False)}, TypeError, r"^return_aux: expected a tilewise.AuxRequest"),
        ({"return_aux": AuxRequest(lse=1)}, TypeError, r"^return_aux: lse must be a bool, got 1"),
        ({"return_aux": AuxRequest(), "return_lse": True}, ValueError, r"^return_lse: with return_aux ask for"),
        (
            {
                "return_aux": AuxRequest(max_scores_unbiased=True),
                "bias": tilewise.bias.low_rank_bias(torch.randn(1, 2, 40, 3), torch.randn(1, 2, 50, 3)),
            },
            NotImplementedError, r"^return_aux: a low-rank bias is part of the product",
        ),
    ],
)  # fmt: skip
def test_refused(given, error, message):
    with pytest.raises(error, match=message):
        attention(*(x.float() for x in made(1)), **given)
