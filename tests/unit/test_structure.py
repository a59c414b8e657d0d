"""What is prepared for one length serves others: made of it, a pass is what it would be prepared from the beginning."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import random
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import Case, empty_cache, rows_of
from torch import Tensor

from tilewise import attention, scaled_dot_product_attention
from tilewise.backends import Inputs, Needs, Outputs, empty_output
from tilewise.backends.protocol import Structure, resized_problem
from tilewise.cache import calls
from tilewise.operator import dispatch
from tilewise.operator.structure import Variants, layouts, structure_of, terms_key
from tilewise.planner import make_plan
from tilewise.spec.problem import Problem, irregular
from tilewise.spec.score import Band, Score, ScoreNumbers

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


def terms_of(case: Case, backend: str) -> ScoreNumbers:
    band = Band.aligned(case.causal, case.window, case.N - case.M)
    return ScoreNumbers.of(Score.of(band, case.D, softcap=case.softcap), case.deterministic, backend)


NOTHING = None, None, None  # no bias, mask and sink
NEEDS = Needs(True, True, True, False)


def prepared(case: Case, backend: str, work: str, longest: int):
    """``(structure, terms, problem, tensors, the pass)``; the pass is None where the backend declines."""
    inputs, outputs, cotangents = made(case, longest)
    terms, backward = terms_of(case, backend), work == "backward"
    names = irregular(*inputs[:4], cotangents.o if backward else None)
    problem = Problem.of(*inputs, terms.score, deterministic=terms.deterministic, irregular=names)
    problem = replace(problem, device="cuda", capability=(9, 0))
    tensors = (inputs, outputs, cotangents, NEEDS) if backward else (inputs,)
    structure = structure_of(*layouts(*inputs[:6], *(*outputs[:2], *cotangents[:2]) if backward else ()))
    try:
        plan = make_plan(problem, backend)
    except ValueError:
        return structure, terms, problem, tensors, None
    module = plan.backward_module if backward else plan.module
    run = module.prepare[work](problem, *tensors)
    return structure, terms, problem, tensors, run


def facts(x):
    """All that decides what is launched: of kernels, layouts, numbers and allocations."""
    from tilewise.backends.launch.launcher import Launch

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


def attributes(run) -> dict:
    """Of one that was made of another, those of that one too where it has none of its own. Without launches that it
    knows of."""
    if hasattr(run, "__dict__"):
        return {name: x for name, x in run.__dict__.items() if name not in ("bases", "made", "tiled")}
    more = "problem", "layouts"
    own = {name: getattr(run, name) for name in (*run.__slots__, *more) if name != "of" and hasattr(run, name)}
    names = [name for x, _ in run.of.bases for name, y in attributes(run.of).items() if y is x]
    launches = {name: x.whole(run.varied, {}) for name, x in zip(names, run.launches, strict=True)}
    return {**attributes(run.of), **own, **launches}


def run_facts(run) -> dict:
    return {name: facts(x) for name, x in attributes(run).items()}


def stride_codes(run) -> dict[str, tuple[int, ...]]:
    """What Triton looks at of the strides of each launch; a kernel's choice by `Launch.resized` rests on it."""
    from tilewise.backends.launch.arguments import strides_of
    from tilewise.backends.launch.launcher import Launch, _codes

    return {name: _codes(strides_of(x.layouts)) for name, x in attributes(run).items() if isinstance(x, Launch)}


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
    kinds = (lambda: rng.randrange(1, 40), lambda: rng.randrange(1, 700), lambda: 128 * rng.randrange(1, 40),
             lambda: rng.randrange(1, 9000))  # fmt: skip
    some = [rng.choice(kinds)() for _ in range(10)]
    if kind == "decoding":
        return [(one, n) for n in some]
    if kind == "square":
        return [(n, n) for n in some]
    return list(itertools.pairwise([*some, *some[::-1]]))


@without_triton
@pytest.mark.parametrize("seed", range(3))
def test_a_resized_pass_is_what_would_be_prepared(seed):
    """Of random calls, in random lengths: wherever a structure has been met, what is made of it is compared."""
    rng, resized, fresh = random.Random(seed), 0, 0
    for _ in range(16):
        case, backend = draw(rng)
        seen: dict[tuple, Variants] = {}
        for M, N in lengths(rng):
            case = replace(case, M=M, N=N)
            for work in ("forward", "backward"):
                structure, terms, problem, tensors, run = prepared(case, backend, work, 9000)
                if structure is None or run is None or not getattr(run, "resizable", False):
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
                    first = seen[key].prepared[0][1]
                    assert stride_codes(found) == stride_codes(first), (case, backend, work)
    assert resized > 60, (resized, fresh)


@without_triton
@pytest.mark.parametrize("work", ["forward", "backward"])
def test_what_is_prepared_holds_no_tensor(work):
    """Of random calls, also of those that cannot be resized."""
    rng, count = random.Random(0), 0
    gc.collect()
    gc.freeze()  # what was there before need not be looked through for each call
    for _ in range(16):
        case, backend = draw(rng)
        *_, tensors, run = prepared(replace(case, M=200, N=270), backend, work, 300)
        alive = [weakref.ref(x) for record in tensors for x in record if isinstance(x, Tensor)]
        del tensors
        gc.collect()
        assert run is None or [x for x in alive if x() is not None] == []
        count += run is not None
    assert count > 10


# --- through the public functions ---


@pytest.fixture
def prepared_by(monkeypatch):
    """Nothing is known of earlier calls; which passes are computed, with their problems, and whether they are resized.

    They compute by the CPU's backend.
    """
    from tilewise.backends import cpu

    empty_cache(monkeypatch)
    log: list[tuple[str, bool, Problem]] = []

    class Pass:
        resizable = True

        def __init__(self, work, problem, *tensors, resized=False):
            self.work, self.problem = work, problem
            log.append((work, resized, problem))
            self.run = prepare[work](problem, *tensors)

        def resized(self, structure, lo, hi, *tensors):
            return Pass(self.work, resized_problem(self.problem, structure, lo, hi), *tensors, resized=True)

        def __call__(self, *tensors):
            return self.run(*tensors)

    prepare = cpu.prepare
    monkeypatch.setattr(cpu, "prepare", {work: partial(Pass, work) for work in prepare})
    return log


def qkv(M, N, grad=False):
    made = (torch.randn(2, 2, n, 16, dtype=torch.float64) for n in (M, N, N))
    return [x.requires_grad_(grad) for x in made]


DOORS = {
    "attention": lambda q, k, v, **more: attention(q, k, v, **more),
    "causal": lambda q, k, v, **more: attention(q, k, v, causal=True, **more),
    "window": lambda q, k, v, **more: attention(q, k, v, window=(3, 2), **more),
    "sdpa": scaled_dot_product_attention,
    "sdpa causal": partial(scaled_dot_product_attention, is_causal=True),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("operand", ["none", "bias", "mask"])
def test_a_new_length_is_what_it_would_be_without_others(prepared_by, door, operand):
    """Lengths of one structure, after others of it and alone: outputs, gradients, and what computes them."""

    def run(M, N):
        q, k, v = x = qkv(M, N, grad=True)
        more = {}
        if operand != "none":
            masked = torch.randn(1, 2, 1, N, dtype=torch.float64)
            masked = masked > -1 if operand == "mask" else masked
            more = {"attn_mask" if door.startswith("sdpa") else operand: masked}
        o = DOORS[door](q, k, v, **more)
        return [o, *torch.autograd.grad(o.sin().sum(), x)]

    lengths = [(20, 33), (20, 35), (21, 37), (23, 23), (21, 39)]
    torch.manual_seed(0)
    after_others = [run(M, N) for M, N in lengths]
    seen = list(prepared_by)
    assert sum(resized for _, resized, _ in seen) >= 6
    torch.manual_seed(0)
    for (M, N), found in zip(lengths, after_others, strict=True):
        calls.clear()
        assert all(torch.equal(x, y) for x, y in zip(found, run(M, N), strict=True))
    alone = prepared_by[len(seen) :]
    fresh = [(work, problem) for work, resized, problem in alone if not resized]
    # What was prepared for a call is resized for its like, at its own lengths.
    assert all((work, problem) in fresh for work, resized, problem in alone if resized)
    assert [x for x, _ in itertools.groupby((work, problem) for work, _, problem in seen)] == fresh


def test_an_error_of_a_new_length_is_the_usual_one(prepared_by):

    def given(n):
        operands = {"bias": torch.zeros(1, 2, 1, n), "mask": torch.ones(1, 1, 8, n, dtype=torch.bool)}
        return {**dict(zip("qkv", qkv(8, n), strict=True)), **operands, "sink": torch.zeros(2), "causal": True}

    for n in (20, 21, 23):
        attention(**given(n))
    assert prepared_by[-1][1]
    q, k, v = qkv(8, 22)
    for name, wrong in (
        ("v", {"v": v[:, :, 1:]}), ("v", {"k": k[:, :1]}), ("k", {"k": k[..., 1:]}), ("v", {"v": v[:1]}),
        ("sink", {"sink": torch.zeros(())}), ("sink", {"sink": torch.zeros(3)}), ("sink", {"sink": torch.zeros(1, 2)}),
        ("sink", {"sink": torch.zeros(1, 2, 9)}), ("sink", {"sink": torch.zeros(1, 3, 8)}),
        ("bias", {"bias": torch.zeros(1, 2, 1, 21)}), ("mask", {"mask": torch.ones(1, 1, 7, 22, dtype=torch.bool)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}"):
            attention(**{**given(22), "q": q, "k": k, "v": v, **wrong})


STRUCTURES = {
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
    "one query": lambda q, k, v: (q[:, :, :1], k, v),
    "many keys": lambda q, k, v: (q, *(x.repeat(1, 1, 9, 1) for x in (k, v))),
    "heads": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "head dimension": lambda q, k, v: (q[..., :4], k[..., :4], v),
    "order in memory": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "stride 0": lambda q, k, v: (q, k, v[:, :, :1].expand_as(v)),
    "rows apart": lambda q, k, v: (q, k.repeat(1, 1, 1, 2)[..., ::2], v),
    "odd rows": lambda q, k, v: (torch.cat([q, q[..., :1]], -1)[..., :16], k, v),
    "by columns": lambda q, k, v: (q, k.mT.contiguous().mT, v),
}


@pytest.mark.parametrize("change", STRUCTURES)
def test_another_structure(change):
    q, k, v = qkv(8, 24)
    one, other = (structure_of(*layouts(*x), *NOTHING) for x in ((q, k, v), STRUCTURES[change](q, k, v)))
    assert one is not None
    assert other is not None
    assert one.key != other.key
    q, k, v = qkv(10, 40)
    assert structure_of(*layouts(q, k, v), *NOTHING).key == one.key


@pytest.mark.parametrize("which", range(10))
def test_another_alignment_is_another_structure(which):
    """Of every tensor that a kernel may read, also of a backward's; a CPU's addresses count as 0."""
    q, k, v = qkv(8, 24)
    bias, sink = torch.zeros(1, 2, 8, 24), torch.zeros(1, 2, 1)
    lse = torch.zeros(2, 2, 8)
    found = list(layouts(q, k, v, bias, bias > 0, sink, q, lse, q, lse))
    one = structure_of(*found)
    found[which] = (*found[which][:4], 8)
    assert structure_of(*found).key != one.key


def test_where_a_structure_ends():
    """Strides are looked at together where all are multiples of 16: a 0, a wide one and one that is none still count,
    of any axis."""

    def key(*strides):
        shape = (2, 2, 24, 16)
        laid = (shape, BRAIN, None, (768, 384, 16, 1), 0)
        return structure_of((*laid[:3], strides, 0), laid, laid, None, None, None).key

    strides, usual = (768, 384, 16, 1), key(768, 384, 16, 1)
    assert key(1536, 768, 32, 1) == usual
    for axis in range(4):
        for other in (0, 8, 24, 2**24) if axis < 3 else (0, 2, 16):
            assert key(*strides[:axis], other, *strides[axis + 1 :]) != usual, (axis, other)


def test_calls_without_a_structure():
    """With more than q, k, v, bias, mask and sink, without anything to compute, or too large for it."""
    q, k, v = qkv(8, 24)
    inputs = Inputs(q, k, v, None, None, seed=torch.zeros(2, dtype=torch.int64))
    assert dispatch._structure(inputs, layouts(*inputs.tensors())) is None
    assert dispatch._structure(inputs._replace(seed=None), layouts(*inputs[:6])) is not None
    assert structure_of(*layouts(q[:, :, :0], k, v), *NOTHING) is None
    assert structure_of(*layouts(q, k[:, :, :0], v[:, :, :0]), *NOTHING) is None
    q, k, v = (torch.empty(1, 64, 2**22, 64, dtype=BRAIN, device="meta") for _ in range(3))
    assert structure_of(*layouts(q, k, v), *NOTHING) is None


def test_threads_share_variants():
    """Eight threads, whose lengths take turns among four variants: each look-up finds the one that serves it."""

    class For:
        def __init__(self, n):
            self.n = n

        def resized(self, structure, lo, hi):
            return self.n if structure.keys % 4 == self.n else None

    variants, terms = Variants([]), ScoreNumbers.of(Score.of(Band(), 16), False, "auto")
    problem = Problem.of(*qkv(8, 24), *(None,) * 7, Score.of(Band(), 16))
    for n in range(4):
        assert variants.add(problem, For(n))
    structures = [Structure((), 8, n, ()) for n in range(4)]

    def run(thread):
        return [variants.resized(structures[(thread + i) % 4], terms) == (thread + i) % 4 for i in range(3000)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = [x for some in pool.map(run, range(8)) for x in some]
    finally:
        sys.setswitchinterval(before)
    assert all(found), f"{found.count(False)} of {len(found)} were missed"
    assert sorted(run.n for _, run in variants.prepared) == [0, 1, 2, 3]


def test_variants_are_bounded(monkeypatch):
    class Never:
        resizable = True

        def resized(self, *_):
            return None

    empty_cache(monkeypatch)
    problem = Problem.of(*qkv(8, 24), *(None,) * 7, Score.of(Band(), 16))
    for _ in range(40):
        dispatch._keep_variant(("x",), problem, Never())
    dispatch._keep_variant(("y",), problem, object())  # which cannot be resized
    assert len(calls.get(("x",)).prepared) == 16
    assert calls.get(("y",)) is None


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_in_the_interpreter(interpreter, causal):
    """A cache that grows, and squares, in the Triton backend: numbers, after others of their structure."""
    interpreter(growing, causal)


def growing(causal: bool) -> None:
    resized = []
    usual = Variants.resized

    def counted(self, *arguments):
        found = usual(self, *arguments)
        resized.append(found is not None)
        return found

    Variants.resized = counted
    try:
        torch.manual_seed(0)
        cache = [torch.randn(1, 2, 50, 16).half() for _ in range(2)]
        for M, lengths in ((1, (33, 34, 39, 41)), (None, (19, 21, 37))):
            for N in lengths:
                q = torch.randn(1, 2, M or N, 16).half()
                x = [q, *(y[:, :, :N] for y in cache)]
                x = [y.detach().requires_grad_(M is None) for y in x]
                o = attention(*x, causal=causal, backend="triton")
                right = attention(*(y.double() for y in x), causal=causal, backend="reference")
                torch.testing.assert_close(o, right.half(), rtol=4e-3, atol=4e-3)
                if M is None:
                    do = torch.randn_like(o)
                    found = torch.autograd.grad(o, x, do)
                    wanted = torch.autograd.grad(right, x, do.double())
                    for a, b in zip(found, wanted, strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        assert sum(resized) >= 6, resized
    finally:
        Variants.resized = usual
