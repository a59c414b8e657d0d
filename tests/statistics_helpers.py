"""Statistics of the scores by plain torch in float64, and the check of a backend against them."""

from __future__ import annotations

import math
from typing import Any

import torch
from forced import forced_splits
from helpers import Case, Tensors, rows_of, tensors, visible
from torch import Tensor

from tilewise import AuxRequest, attention, bias, varlen_attention

EVERY = AuxRequest(lse=True, max_scores=True, max_scores_unbiased=True, entropy=True)


def by_formula(case: Case, inputs: Tensors) -> dict[str, Tensor]:
    """Each statistic (B, H, M), and the LSE, of the (B, H, M, N) scores."""
    q, k, added, sink = (None if x is None else x.double() for x in (inputs.q, inputs.k, inputs.bias, inputs.sink))
    k, added = (x if x is None or x.shape[1] == 1 else _of_heads(x, case.H) for x in (k, added))
    scale = 1 / math.sqrt(case.D) if case.scale is None else case.scale
    s = scale * (q @ k.mT)
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    seen = visible(case, inputs)
    biased = (s if added is None else s + added).masked_fill(~seen, -math.inf)
    every = biased
    if sink is not None:
        every = torch.cat([biased, rows_of(sink).expand(s.shape[:3])[..., None]], -1)
    lse = torch.logsumexp(every, -1)
    p = torch.softmax(every, -1).masked_fill((lse == -math.inf)[..., None], 0.0)
    return {
        "lse": lse,
        "max_scores": biased.amax(-1),
        "max_scores_unbiased": s.masked_fill(~seen, -math.inf).amax(-1),
        "entropy": torch.special.entr(p).sum(-1),
    }


def _of_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def hold(found: Tensor, wanted: Tensor, name: str, least: float = 1e-5) -> None:
    """Float32 sums: an error of some roundings of the number, or of the scores, of ``least``."""
    assert found.shape == wanted.shape
    assert torch.equal(found == -math.inf, wanted == -math.inf), f"{name}: other rows see nothing"
    error = (found.double() - wanted).masked_fill(wanted == -math.inf, 0.0).abs()
    allowed = least + 1e-6 * wanted.masked_fill(wanted == -math.inf, 0.0).abs()
    assert (error <= allowed).all(), f"{name}: off by {error.max():.3g}, where {wanted.abs().max():.3g} is the largest"


def check_statistics(
    case: Case, backend: str, device: str = "cpu", request: AuxRequest = EVERY, grad: bool = False
) -> None:
    """Hold what ``backend`` finds to the formulas, and o to that of a call without statistics."""
    x, clean = tensors(case, device), tensors(case, device, planted=False)
    q, k, v = (t.requires_grad_(grad) for t in x[:3])
    terms = dict(bias=x.bias, mask=x.mask, sink=x.sink, backend=backend, deterministic=case.deterministic, **case.terms)
    o, aux = attention(q, k, v, return_aux=request, **terms)
    wanted = by_formula(case, clean)
    for name, asked in zip(request._fields, request, strict=True):
        found = getattr(aux, name)
        assert (found is not None) == asked
        if asked:
            assert found.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
            assert found.requires_grad == (grad and name == "lse")
            hold(found.detach(), wanted[name], name)
    alone = attention(q, k, v, **terms)
    torch.testing.assert_close(o, alone, rtol=0.02, atol=0.02)
    if grad:
        do = x.do
        for found, plain in zip(*(torch.autograd.grad(y, (q, k, v), do) for y in (o, alone)), strict=True):
            torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)


def check_split_statistics(case: Case, splits: int, device: str = "cpu") -> None:
    """`check_statistics` of the triton backend in so many splits."""
    with forced_splits(splits):
        check_statistics(case, "triton", device)


def check_packed_statistics(backend: str, dtype: torch.dtype, device: str = "cpu", D: int = 16) -> None:
    """A packed batch finds what its sequences find alone, and -inf and 0 in rows of no sequence."""
    torch.manual_seed(0)
    lengths = [(0, 5), (13, 0), (70, 200), (20, 25), (129, 64)]
    ends = [torch.tensor([0, *n], dtype=torch.int32, device=device).cumsum(0).int() for n in zip(*lengths, strict=True)]
    rows, keys = int(ends[0][-1]) + 7, int(ends[1][-1]) + 3
    q, k, v = (torch.randn(n, h, D, device=device).to(dtype) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    along_keys, sink = torch.randn(4, keys, device=device), torch.randn(4, device=device)
    for given in ({"bias": along_keys, "causal": True}, {"sink": sink, "window": (50, 9)}):
        _, aux = varlen_attention(q, k, v, *ends, 129, 200, return_aux=EVERY, backend=backend, **given)
        past = slice(int(ends[0][-1]), None)
        assert (aux.max_scores[:, past] == -math.inf).all()
        assert (aux.max_scores_unbiased[:, past] == -math.inf).all()
        assert (aux.entropy[:, past] == 0).all()
        for n, (M, N) in enumerate(lengths):
            m, k0 = int(ends[0][n]), int(ends[1][n])
            if not M:
                continue
            case = Case(B=1, H=4, Hkv=2, M=M, N=N, D=D, causal="causal" in given, window=given.get("window"))
            own = [x.transpose(0, 1)[None] for x in (q[m : m + M], k[k0 : k0 + N], v[k0 : k0 + N])]
            of_keys = along_keys[None, :, None, k0 : k0 + N] if "bias" in given else None
            inputs = Tensors(*own, of_keys, None, own[0], own[0], given.get("sink"))
            wanted = by_formula(case, inputs) if N else None
            for name in EVERY._fields:
                found = getattr(aux, name)[:, m : m + M]
                if wanted is not None:
                    hold(found[None], wanted[name], name)
                elif name.startswith("max"):
                    assert (found == -math.inf).all()
                elif name == "entropy":
                    assert (found == 0).all()


def check_term_statistics(kind: str, backend: str, device: str = "cpu", D: int = 16, biased: bool = False) -> None:
    """A bias by distance gives what its matrix gives. biased: the maximum without it is not asked for."""
    x = tensors(Case(B=2, H=4, M=300, N=300, D=D, dtype=torch.float16), device)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    term: Any
    if kind == "t5":
        term = bias.t5_bias(drawn(32, 4), bidirectional=True)
    elif kind == "alibi":
        term = bias.alibi(drawn(4).abs() / 4)
    else:
        term = bias.RelativeBias(drawn(2, 4, 300, 104).half(), lo=-52)
    request = EVERY._replace(max_scores_unbiased=not biased)
    _, aux = attention(x.q, x.k, x.v, bias=term, return_aux=request, backend=backend)
    added = attention_bias(term, x)
    wanted = by_formula(Case(B=2, H=4, M=300, N=300, D=D), x._replace(bias=added))
    for name, found in zip(EVERY._fields, aux, strict=True):
        if found is not None:
            hold(found, wanted[name], name, 5e-5)  # scores to 300


def attention_bias(term: Any, x: Tensors) -> Tensor:
    """The matrix of a term: scores of zero queries, by the values that pick each key."""
    picks = torch.eye(x.k.shape[2], dtype=torch.float64)
    zeros = torch.zeros(*x.q.shape[:3], 8, dtype=torch.float64)
    on_cpu = torch.utils._pytree.tree_map(lambda y: y.cpu() if isinstance(y, Tensor) else y, term)
    p, lse = attention(
        zeros, zeros[:, :1], picks.expand(x.q.shape[0], 1, -1, -1), bias=on_cpu, return_lse=True, backend="reference"
    )
    return (p.log() + lse[..., None]).to(x.q.device)
