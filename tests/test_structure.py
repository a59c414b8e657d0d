"""What is prepared for one length serves others: made of it, a pass is what it would be prepared from the beginning."""

from __future__ import annotations

import importlib.util
import itertools
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import Case, rows_of
from torch import Tensor

from tilewise import attention, call, dispatch, scaled_dot_product_attention
from tilewise.backends import Inputs, Needs, Outputs, empty_output
from tilewise.ops.runtime.prepared import Prepared
from tilewise.plan import make_plan
from tilewise.problem import Problem, irregular
from tilewise.score.terms import Band, Score, Terms
from tilewise.structure import Variants, structure_of, terms_key

BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# --- the same as from the beginning ---


def laid(layout: str, *shape: int, dtype: torch.dtype, longest: int) -> Tensor:
    """On no device; "cache": the first rows of one that holds the longest."""
    B, H, N, D = shape
    if layout == "heads_last":
        return torch.empty(B, N, H, D, dtype=dtype, device="meta").transpose(1, 2)
    if layout == "cache":
        return torch.empty(B, H, longest, D, dtype=dtype, device="meta")[:, :, :N]
    return torch.empty(shape, dtype=dtype, device="meta")


def made(case: Case, longest: int) -> tuple[Inputs, Outputs, Outputs]:
    def operand(kind: str | None, dtype: torch.dtype) -> Tensor | None:
        return None if kind is None else torch.empty(case.shape(kind), dtype=dtype, device="meta")

    c, q_layout = case, "dense" if case.layout == "cache" else case.layout
    q = laid(q_layout, c.B, c.H, c.M, c.D, dtype=c.dtype, longest=longest)
    k, v = (laid(c.layout, c.B, c.kv_heads, c.N, d, dtype=c.dtype, longest=longest) for d in (c.D, c.value_dim))
    sink = None if c.sink is None else rows_of(torch.empty(c.shape(c.sink), dtype=c.dtype, device="meta"))
    inputs = Inputs(q, k, v, operand(c.bias, c.dtype), operand(c.mask, torch.bool), sink)
    o = empty_output(q, c.value_dim)
    lse = torch.empty(c.B, c.H, c.M, device="meta")
    return inputs, Outputs(o, lse), Outputs(torch.empty_like(o), torch.empty_like(lse) if c.lse else None)


def terms_of(case: Case, backend: str) -> Terms:
    band = Band.aligned(case.causal, case.window, case.N - case.M)
    return Terms.of(Score.of(band, case.D, softcap=case.softcap), case.deterministic, backend)


NEEDS = Needs(True, True, True, False)


def prepared(case: Case, backend: str, work: str, longest: int):
    """``(structure, terms, problem, tensors, the pass)``; the pass is None where the backend declines."""
    inputs, outputs, cotangents = made(case, longest)
    terms, backward = terms_of(case, backend), work == "backward"
    names = irregular(*inputs[:4], cotangents.o if backward else None)
    problem = Problem.of(*inputs, terms.score, deterministic=terms.deterministic, irregular=names)
    problem = replace(problem, device="cuda", capability=(9, 0))
    tensors = (inputs, outputs, cotangents, NEEDS) if backward else (inputs,)
    structure = structure_of(inputs, *(*outputs, *cotangents) if backward else ())
    try:
        plan = make_plan(problem, backend)
    except ValueError:
        return structure, terms, problem, tensors, None
    module = plan.backward_module if backward else plan.module
    run = module.prepare[work](problem, *tensors)
    return structure, terms, problem, tensors, run


def facts(x):
    """All that decides what is launched: of kernels, layouts, numbers and allocations."""
    from tilewise.backends.launcher import Launch

    if isinstance(x, Launch):
        return x.kernel, x.programs, facts(x.layouts), facts(x.numbers), facts(sorted(x.options.items()))
    if isinstance(x, partial):
        empty = x.func(*x.args, **{**x.keywords, "device": "meta"})
        return empty.shape, empty.stride(), empty.dtype
    if isinstance(x, (tuple, list)):
        return tuple(map(facts, x))
    if isinstance(x, dict):
        return {name: facts(y) for name, y in x.items()}
    if hasattr(x, "block_shape"):
        return type(x), facts(x.shape), facts(x.strides), facts(x.block_shape), getattr(x, "layout", None), x.padding
    if type(x).__name__ == "constexpr":
        return x.value
    return x


def run_facts(run) -> dict:
    return {name: facts(x) for name, x in run.__dict__.items()}


def draw(rng: random.Random) -> tuple[Case, str]:
    """A random call but its lengths, and a backend."""
    backend = rng.choice(["hopper", "triton"])
    D = rng.choice([32, 64, 64, 96, 128, 128, 192] if backend == "hopper" else [16, 40, 64, 64, 128, 256])
    H = rng.choice([2, 8])
    bias = rng.choice([None, None, None, "1hmn", "b11n", "11mn"])
    case = Case(
        B=rng.choice([1, 3]), H=H, Hkv=rng.choice([H, H // 2]), M=1, N=1, D=D, dtype=rng.choice([BRAIN, HALF]),
        causal=rng.random() < 0.5, bias=bias, softcap=rng.choice([None, None, 20.0]),
        window=rng.choice([None, None, (40, None), (30, 50)]), sink=rng.choice([None, None, "h"]),
        mask=rng.choice([None, None, "b11n"]) if backend == "triton" else None,
        layout=rng.choice(["dense", "heads_last", "cache"]), deterministic=rng.random() < 0.2, lse=rng.random() < 0.2,
    )  # fmt: skip
    return case, backend


def lengths(rng: random.Random) -> list[tuple[int, int]]:
    """Of several calls: decoding, square, or of any lengths."""
    kind = rng.choice(["decoding", "square", "any"])
    one = rng.choice([1, 1, 2, 7])
    some = [rng.choice([rng.randrange(1, 700), 128 * rng.randrange(1, 40), rng.randrange(1, 9000)]) for _ in range(10)]
    if kind == "decoding":
        return [(one, n) for n in some]
    if kind == "square":
        return [(n, n) for n in some]
    return list(itertools.pairwise([*some, *some[::-1]]))


@without_triton
@pytest.mark.parametrize("seed", range(4))
def test_a_resized_pass_is_what_would_be_prepared(seed):
    """Of random calls, in random lengths: wherever a structure has been met, what is made of it is compared."""
    rng, resized, fresh = random.Random(seed), 0, 0
    for _ in range(25):
        case, backend = draw(rng)
        seen: dict[tuple, Variants] = {}
        for M, N in lengths(rng):
            case = replace(case, M=M, N=N)
            for work in ("forward", "backward"):
                structure, terms, problem, tensors, run = prepared(case, backend, work, 9000)
                if structure is None or run is None or not hasattr(run, "resized"):
                    continue
                key = work, structure.key, terms_key(terms)
                found = seen[key].resized(structure, terms, *tensors) if key in seen else None
                if found is None:
                    fresh += 1
                    seen.setdefault(key, Variants([])).prepared.append((problem, run))
                else:
                    resized += 1
                    mine, right = run_facts(found), run_facts(run)
                    for name in right:
                        assert mine[name] == right[name], (name, case, backend, work)
    assert resized > 100, (resized, fresh)
