"""Statistics of the scores, bfloat16, on a GPU: time of the forward with each, relative to that without, in turns.

    python -m tilewise_tools.benchmarks.score_statistics [cases of CASES]

A line of JSON per case has the kernel time without statistics by CUDA graphs, the ratio with each request, and the
times of FlexAttention, compiled, which has the maximum alone. Before timing, a small call of the case is compared with
float64.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import AuxRequest, attention, varlen_attention
from tilewise_tools.benchmarks.pair import timed

HEADS, LENGTH = 16, 4096
REQUESTS = {
    "none": None,
    "max": AuxRequest(max_scores=True),
    "entropy": AuxRequest(entropy=True),
    "max, entropy": AuxRequest(max_scores=True, entropy=True),
    "max without bias": AuxRequest(max_scores_unbiased=True),
}


class StatisticsCase(NamedTuple):
    head_dim: int
    causal: bool = False
    bias: bool = False
    queries: int = LENGTH
    packed: bool = False


CASES = {
    f"D{D} {name}": StatisticsCase(D, **terms)
    for D in (64, 128)
    for name, terms in {
        "full": {}, "causal": {"causal": True}, "bias": {"bias": True}, "bias causal": {"bias": True, "causal": True},
        "packed causal": {"packed": True, "causal": True}, "decoding": {"queries": 1},
    }.items()
}  # fmt: skip


def call(case: StatisticsCase, batch: int, length: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a function of a request, and the tensors q, k, v and bias that it reads."""
    queries = min(case.queries, length)
    shapes = (batch, HEADS, queries, case.head_dim), *[(batch, HEADS, length, case.head_dim)] * 2
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    bias = torch.randn(1, HEADS, queries, length, device="cuda", dtype=torch.bfloat16) if case.bias else None
    if case.packed:
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        cu = torch.arange(0, batch * length + 1, length, device="cuda", dtype=torch.int32)
        run = partial(varlen_attention, *rows, cu, cu, length, length, causal=case.causal)
    else:
        run = partial(attention, q, k, v, bias=bias, causal=case.causal)  # type: ignore[arg-type]
    return lambda request: run(return_aux=request), [q, k, v, *([] if bias is None else [bias])]


def hold(name: str, case: StatisticsCase) -> None:
    """Compare a call of 1,024 keys with float64; exit where it is wrong."""
    run, (q, k, _, *bias) = call(case, 2, 1024)
    _, aux = run(AuxRequest(max_scores=True, max_scores_unbiased=True, entropy=True))
    s = plain = q.double() @ k.double().mT / math.sqrt(case.head_dim)
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").triu(1) if case.causal else None
    for x in bias:
        s = s + x.double()
    if hidden is not None:
        s, plain = s.masked_fill(hidden, -math.inf), plain.masked_fill(hidden, -math.inf)
    right = {
        "max_scores": s.amax(-1),
        "max_scores_unbiased": plain.amax(-1),
        "entropy": torch.special.entr(s.softmax(-1)).sum(-1),
    }
    for statistic, y in right.items():
        x = getattr(aux, statistic)
        x = x.unflatten(1, (2, -1)).transpose(0, 1) if case.packed else x
        error = (x - y).abs().max().item()
        if not error <= 1e-4:
            raise SystemExit(f"{name}: {statistic} is off by {error:.1e}")


def flex(case: StatisticsCase, tensors: list[Tensor], statistics: bool) -> Callable[[], Any]:
    """Return FlexAttention's forward, compiled."""
    from torch.nn.attention.flex_attention import AuxRequest as Request
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, *bias = tensors
    blocks = None
    if case.causal:
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cuda")
    shared = bias[0][0] if bias else None
    score_mod = (lambda s, b, h, i, j: s + shared[h, i, j]) if bias else None
    torch._dynamo.reset()
    compiled, request = torch.compile(flex_attention, dynamic=False), Request(lse=True, max_scores=statistics)
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, return_aux=request)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    milliseconds = timed({"cublas": lambda: x @ x})["cublas"]
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "cublas TFLOP/s": round(2 * 8192**3 / milliseconds / 1e9)}))
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        with torch.no_grad():
            hold(name, case)
            run, tensors = call(case, 16 if case.queries == 1 else 4, 8 * LENGTH if case.queries == 1 else LENGTH)
            variants: dict[str, Callable[[], Any]] = {}
            for request, asked in REQUESTS.items():
                if case.bias or request != "max without bias":
                    variants[request] = partial(run, asked)
            if case.queries > 1 and not case.packed:
                variants |= {"flex": flex(case, tensors, False), "flex, max": flex(case, tensors, True)}
            found = timed(variants)
        line = {"case": name, "ms": round(found["none"], 4)}
        print(json.dumps(line | {x: round(found[x] / found["none"], 3) for x in variants if x != "none"}), flush=True)


if __name__ == "__main__":
    main()
