"""A bias by positions, written out once more, and a term held to it: by definition, by its tiles, by its gradients."""

from __future__ import annotations

import ast
import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch

from tilewise.bias import RelativeBias
from tilewise.bias.canonical import canonical, dense
from tilewise.spec.relative import add_gradient, gather, scatter, tile, tile_kind

INF = math.inf
DOUBLE = torch.float64
B, H, HKV = 2, 4, 2
STARTS = {
    "default": {},
    "ints": {"query_start": 5, "key_start": 3},
    "apart": {"query_start": 0, "key_start": 400},
    "tensor": {"query_start": torch.tensor([4, 9])},
    "tensors": {"query_start": torch.tensor([4, -3], dtype=torch.int32), "key_start": torch.tensor(2)},
}


# --- written out once more: a bias by positions ---


def positions(M, N, query_start=None, key_start=0):
    """Key position minus query position, (B, 1, M, N)."""
    query_start = N - M if query_start is None else query_start
    queries = torch.as_tensor(query_start).reshape(-1, 1, 1, 1) + torch.arange(M)[:, None]
    keys = torch.as_tensor(key_start).reshape(-1, 1, 1, 1) + torch.arange(N)
    return (keys - queries).expand(B, 1, M, N)


def per_head(x):
    return x if x.shape[1] in (1, H) else x.repeat_interleave(H // x.shape[1], 1)


def expected(values, M, N, *, lo, reverse=False, outside=0.0, on="query", buckets=None, **starts):
    distance = positions(M, N, **starts)
    entry = (-distance if reverse else distance) - lo
    count = values.shape[3] if buckets is None else buckets.shape[0]
    inside = (entry >= 0) & (entry < count)
    entry = entry.clamp(0, count - 1)
    if buckets is not None:
        entry = buckets[entry]
    values = per_head(values.double())
    if on == "key":
        rows = values.mT[:, :, None].expand(B, H, M, -1, N)  # [b, h, i, r, j]
        found = rows.gather(3, entry[:, :, :, None].expand(B, H, M, 1, N))[:, :, :, 0]
    else:
        rows = values.expand(B, H, M, -1)
        found = rows.gather(3, entry.expand(B, H, M, N))
    return found if outside == "clamp" else torch.where(inside, found, outside)


def cuts(length, step):
    return [slice(x, min(x + step, length)) for x in range(0, length, step)]


def by_tiles(relative, M, N, rows=5, cols=4):
    """The bias put together from its tiles, by whole heads of the values."""
    shape = torch.broadcast_shapes((B, relative.values.shape[1], M, N), (*relative.values.shape[:2], M, N))
    whole = relative.values.new_zeros(shape)
    kinds = set()
    for m in cuts(M, rows):
        for n in cuts(N, cols):
            part = tile(relative, m, n)
            kinds.add(tile_kind(relative, m, n))
            if part is None:
                assert tile_kind(relative, m, n) == "zero"
            else:
                assert tile_kind(relative, m, n) != "zero"
                whole[..., m, n] = part
    return whole, kinds


def gradient_by_tiles(relative, ds, rows=5, cols=4):
    accumulator = torch.zeros_like(relative.values)
    tiles = [(m, n) for m in cuts(ds.shape[2], rows) for n in cuts(ds.shape[3], cols)]
    random.Random(0).shuffle(tiles)
    for m, n in tiles:
        part = ds[..., m, n]
        if relative.values.shape[1] not in (1, H):
            part = part.unflatten(1, (HKV, -1)).sum(2)
        add_gradient(accumulator, part, relative, m, n)
    return accumulator


def check(values, M, N, kinds=None, **settings):
    """A RelativeBias against `expected`: by definition, by its tiles, and each of their gradients."""
    values = values.detach().requires_grad_()
    ds = torch.randn(B, H, M, N, dtype=DOUBLE)
    want = expected(values, M, N, **settings)
    (grad,) = torch.autograd.grad(want, values, ds)
    want = want.detach()

    term = RelativeBias(values, **settings)
    full = dense(term, B, H, M, N, HKV)
    assert torch.equal(full, want)
    torch.testing.assert_close(torch.autograd.grad(full, values, ds)[0], grad)

    slots = canonical(term, B, H, HKV, M, N)
    found = [x for x in (slots.query, slots.key, slots.toeplitz) if x is not None]
    assert len(found) == 1
    relative = found[0]._replace(values=found[0].values.detach())
    assert torch.equal(per_head(gather(relative, M, N)).expand(want.shape), want)
    whole, seen = by_tiles(relative, M, N)
    assert torch.equal(per_head(whole).expand(want.shape), want)
    assert kinds is None or seen == kinds, seen

    sums = gradient_by_tiles(relative, ds)
    torch.testing.assert_close(scatter(relative, ds), sums)
    if slots.toeplitz is not None:
        assert seen == {"inside"}
        assert relative.values.shape[2:] == (1, M + N - 1)
        (sums,) = torch.autograd.grad(slots.toeplitz.values, values, sums)
    torch.testing.assert_close(sums, grad)


def normal(*shape, dtype=DOUBLE):
    return torch.randn(shape, dtype=DOUBLE).to(dtype)


def of_transformers(model, *names):
    """Functions and classes of a model's file by their names, run by themselves: importing the file takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None:
        pytest.skip("transformers is not installed")
    source = Path(found.origin).parent / "models" / model / f"modeling_{model}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    # Methods come after functions of the same name, and are not looked at.
    defined = {x.name: x for x in reversed(list(ast.walk(tree))) if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    parts = [defined[name] for name in names]
    for part in parts:
        part.decorator_list = []
    space = {"torch": torch, "nn": torch.nn, "math": math}
    exec(compile(ast.fix_missing_locations(ast.Module(parts, [])), str(source), "exec"), space)
    return [space[name] for name in names]
