"""What the processes of test_distributed.py do: each case on every rank, held to one process's result."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triangle_child
from memory_helpers import Call, leftovers
from pairwise import pairwise
from processes import failures, raises, start
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tilewise import TileMask, attention
from tilewise.backends import Outputs
from tilewise.bias import RelativeBias, alibi, low_rank_bias, t5_bias
from tilewise.cache import CallCache
from tilewise.distributed import (
    agreement,
    context_parallel_attention,
    context_parallel_varlen_attention,
    explain_context_parallel,
    head_groups,
    operands,
    shard,
    unshard,
)
from tilewise.distributed import documents as packed
from tilewise.distributed.ring import Ring as ring

B, H, Hkv, M, N, D, Dv = 2, 8, 4, 16, 24, 8, 6
DOUBLE, FLOAT, BRAIN = torch.float64, torch.float32, torch.bfloat16
METHODS = ("all_gather", "ring", "all_to_all")

# Of each kind: the shape and the axis that is split of each tensor, and how bias, mask and sink are made of them.
ROWS, KEYS, WHOLE = 2, 3, None
Kind = tuple[dict[str, tuple[tuple[int, ...], int | None]], Callable[[dict[str, Any]], dict[str, Any]]]
KINDS: dict[str, Kind] = {
    "plain": ({}, lambda t: {}),
    "matrix": ({"x": ((1, H, M, N), ROWS)}, lambda t: {"bias": t["x"]}),
    "matrix of key heads": ({"x": ((B, Hkv, M, N), ROWS)}, lambda t: {"bias": t["x"]}),
    "matrix for all heads": ({"x": ((1, 1, M, N), ROWS)}, lambda t: {"bias": t["x"][0, 0]}),
    "keys": ({"x": ((B, H, 1, N), KEYS)}, lambda t: {"bias": t["x"]}),
    "keys for all heads": ({"x": ((B, 1, 1, N), KEYS)}, lambda t: {"bias": t["x"]}),
    "rows": ({"x": ((1, H, M, 1), ROWS)}, lambda t: {"bias": t["x"]}),
    "number": ({"x": ((1, H, 1, 1), WHOLE)}, lambda t: {"bias": t["x"]}),
    "values per query": (
        {"x": ((1, H, M, 9), ROWS)}, lambda t: {"bias": RelativeBias(t["x"], lo=-4, outside="clamp")}
    ),
    "values per key": ({"x": ((B, Hkv, N, 9), 2)}, lambda t: {"bias": RelativeBias(t["x"], lo=-4, on="key")}),
    "values for all": (
        {"x": ((1, H, 1, 13), WHOLE)},
        lambda t: {"bias": RelativeBias(t["x"], lo=-9, reverse=True, outside=-torch.inf)},
    ),
    "starts on the device": (
        {"x": ((1, 1, M, 40), ROWS)},
        lambda t: {"bias": RelativeBias(t["x"], lo=-20, query_start=torch.tensor([3, 9]), key_start=2)},
    ),
    "t5": ({"x": ((16, H), WHOLE)}, lambda t: {"bias": t5_bias(t["x"], True, 12)}),
    "alibi": ({"x": ((H,), WHOLE)}, lambda t: {"bias": alibi(t["x"])}),
    "alibi of batches": ({"x": ((B, H), WHOLE)}, lambda t: {"bias": alibi(t["x"], "signed", query_start=3)}),
    "low rank": (
        {"u": ((1, H, M, 3), ROWS), "w": ((B, Hkv, N, 3), 2)}, lambda t: {"bias": low_rank_bias(t["u"], t["w"])}
    ),
    "several": (
        {"x": ((B, 1, M, N), ROWS), "y": ((1, 1, 1, N), KEYS), "z": ((16, H), WHOLE), "s": ((H,), WHOLE)},
        lambda t: {"bias": (t["x"], t5_bias(t["z"], False, 30), t["y"]), "sink": t["s"]},
    ),
    "mask": ({"m": ((B, H, M, N), ROWS)}, lambda t: {"mask": t["m"]}),
    "padding": ({"m": ((B, 1, 1, N), KEYS)}, lambda t: {"mask": t["m"]}),
    "mask of queries": ({"m": ((1, 1, M, 1), ROWS)}, lambda t: {"mask": t["m"]}),
    "sink": ({"s": ((H,), WHOLE)}, lambda t: {"sink": t["s"]}),
    "sink of queries": ({"s": ((B, H, M), 2)}, lambda t: {"sink": t["s"]}),
    "sink of batches": ({"s": ((B, 1, 1), WHOLE)}, lambda t: {"sink": t["s"]}),
}  # fmt: skip
SEEN = {
    "all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (5, 0)},
    "both sides": {"window": (3, 2)},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    method: str
    kind: str
    seen: str
    balancer: str | None
    dtype: torch.dtype = DOUBLE
    sizes: dict[str, int] = field(default_factory=dict)
    lse: bool = True
    frozen: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.method, self.kind, self.seen, self.balancer or "contiguous"]
        words += [str(self.dtype).removeprefix("torch.")] * (self.dtype != DOUBLE)
        words += [f"{name} {x}" for name, x in (self.sizes | self.more).items()]
        words += ["no lse"] * (not self.lse) + [f"no d{name}" for name in self.frozen]
        return ", ".join(words)


UNUSUAL = (
    {"kind": "several", "seen": "window"}, {"kind": "several", "seen": "both sides"},
    {"kind": "matrix", "dtype": FLOAT}, {"kind": "t5", "dtype": BRAIN}, {"kind": "keys", "lse": False},
    {"kind": "plain", "sizes": {"M": 32, "N": 16}}, {"kind": "keys", "seen": "all", "frozen": ("q", "k", "x")},
    {"kind": "sink", "sizes": {"M": 32, "N": 16}, "more": {"softcap": 2.0, "scale": 0.3}},
    {"kind": "keys", "more": {"dropout_p": 0.3, "dropout_seed": (5, 6)}},
    {"kind": "several", "seen": "all", "frozen": ("q", "k", "v", "z")},
)  # fmt: skip


def _cases(size: int) -> list[Case]:
    """Each two of method, kind, what is seen, how it is split, what is unusual; on four ranks of a quarter of kinds."""
    kinds, balancers = (list(KINDS) if size == 2 else list(KINDS)[::4]), (None, "head_tail")
    found = [Case(*row) for row in pairwise(METHODS, kinds, ("causal", "all"), balancers)]
    for method, balancer, unusual in pairwise(METHODS, balancers, UNUSUAL):
        found.append(Case(method=method, balancer=balancer, **{"seen": "causal", **unusual}))
    found += [Case("ring", kind, "causal", "head_tail", sizes={"M": N}) for kind in ("plain", "keys", "sink", "alibi")]
    found += [Case("ring", "plain", "window", None, sizes={"M": 64, "N": 64}), Case("auto", "plain", "all", None)]
    return found if size == 2 else [case for case in found if case.dtype == DOUBLE and not case.frozen]


CASES = {size: {str(case): case for case in _cases(size)} for size in (2, 4)}


def _tensors(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, int | None]]:
    """Whole ones, the same on every rank, and along which axis each is split."""
    torch.manual_seed(1)
    sizes = {"M": M, "N": N, **case.sizes}
    shapes = {
        "q": ((B, H, sizes["M"], D), 2), "k": ((B, Hkv, sizes["N"], D), 2), "v": ((B, Hkv, sizes["N"], Dv), 2),
        **KINDS[case.kind][0],
    }  # fmt: skip
    tensors = {}
    for name, (shape, _) in shapes.items():
        if name == "m":
            tensors[name] = torch.rand(shape) < 0.7
            if shape[2] == M:
                tensors[name][:, :, 5] = False
        else:
            tensors[name] = torch.randn(shape, dtype=DOUBLE).to(case.dtype)
    return tensors, {name: axis for name, (_, axis) in shapes.items()}


def _leaves(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    trained = {name for name, x in tensors.items() if x.is_floating_point() and name not in case.frozen}
    return {name: x.detach().clone().requires_grad_(name in trained) for name, x in tensors.items()}


def _loss(o, lse, do, dlse):
    loss = (o * do).sum()
    return loss if lse is None else loss + (torch.where(lse == -torch.inf, 0.0, lse) * dlse).sum()


def check(case: Case, mesh: DeviceMesh) -> None:
    tensors, axes = _tensors(case)
    build, terms = KINDS[case.kind][1], {**SEEN[case.seen], **case.more}

    def part(x, axis):
        return x if axis is None else shard(x, mesh, case.balancer, axis)

    def call(function, given, **more):
        found = function(given["q"], given["k"], given["v"], **build(given), **terms, **more, return_lse=case.lse)
        return found if case.lse else (found, None)

    whole = _leaves(case, tensors)
    local = _leaves(case, {name: part(x, axes[name]) for name, x in tensors.items()})
    expected, expected_lse = call(attention, whole)
    o, lse = call(context_parallel_attention, local, mesh=mesh, method=case.method, load_balancer=case.balancer)
    close = {DOUBLE: {}, FLOAT: {"rtol": 1e-4, "atol": 1e-5}, BRAIN: {"rtol": 2e-2, "atol": 4e-2}}[case.dtype]
    assert o.dtype == case.dtype
    torch.testing.assert_close(o, part(expected, 2), msg=lambda text: f"o: {text}", **close)
    do, dlse = torch.randn_like(expected), torch.randn(expected.shape[:3]).to(expected.dtype)
    if lse is not None:
        torch.testing.assert_close(lse, part(expected_lse, 2), msg=lambda text: f"lse: {text}", **close)
        dlse = dlse.to(lse.dtype)
    _loss(expected, expected_lse, do, dlse).backward()
    _loss(o, lse, part(do, 2), part(dlse, 2)).backward()
    for name, x in whole.items():
        grad = local[name].grad
        assert (grad is None) == (x.grad is None), f"d{name}"
        if grad is not None:
            torch.testing.assert_close(
                grad, part(x.grad, axes[name]), msg=lambda text, name=name: f"d{name}: {text}", **close
            )


# --- errors, each on every rank ---


def _qkv(*shape: int, dtype=FLOAT):
    return [torch.zeros(shape or (1, 4, 4, 8), dtype=dtype) for _ in range(3)]


def _odd(rank: int, **terms: Any) -> tuple[list, dict]:
    """Rank 1 has another argument than the others."""
    return _qkv(), {name: (other if rank == 1 else usual) for name, (usual, other) in terms.items()}


def _same(**terms: Any) -> Callable[[int, int], tuple[list, dict]]:
    return lambda rank, size: (_qkv(), terms)


# What this rank passes, and what every rank raises: the kind of error, and its words.
VALUE, TYPE, NOT = ValueError, TypeError, NotImplementedError
ERRORS: dict[str, tuple[Callable[[int, int], tuple[list, dict]], type[Exception], str]] = {
    "lengths differ": (
        lambda r, n: (_qkv(1, 4, 6, 8) if r == 1 else _qkv(), {}), VALUE,
        r"^q: must be alike on all ranks, got \(\(1, 4, 4, 8\), torch.float32, False\) on rank 0 and \(\(1, 4, 6, 8\)",
    ),
    "dtypes differ": (lambda r, n: (_qkv(dtype=DOUBLE if r == 1 else FLOAT), {}), VALUE, "^q: must be alike on all"),
    "options differ": (lambda r, n: _odd(r, causal=(False, True)), VALUE, "^causal: must be alike on all ranks"),
    "methods differ": (lambda r, n: _odd(r, method=("ring", "auto")), VALUE, "^method: must be alike on all"),
    "balancers differ": (
        lambda r, n: _odd(r, load_balancer=(None, "head_tail")), VALUE, "^load_balancer: must be alike"
    ),
    "a bias on one rank": (
        lambda r, n: _odd(r, bias=(None, torch.zeros(1, 4, 1, 1))), VALUE, "^bias.*: must be alike on all ranks, got"
    ),
    "one rank's own error": (
        lambda r, n: _odd(r, softcap=(None, -1.0)), VALUE, r"^(rank 1: )?softcap: must be positive and finite, got"
    ),
    "one rank's type error": (
        lambda r, n: _odd(r, causal=(True, "yes")), TYPE, r"^(rank 1: )?causal: expected a bool, got 'yes'"
    ),
    "a bias of another mesh": (
        lambda r, n: (_qkv(), {"bias": torch.zeros(1, 4, 4, 4 * n + 8)}), VALUE,
        r"^bias: shape \(1, 4, 4, \d+\) is not one of this rank's 4 queries and all \d+ keys",
    ),
    "a mask of all rows": (
        lambda r, n: (_qkv(), {"mask": torch.zeros(4 * n, 4 * n, dtype=torch.bool)}), VALUE, "^mask: shape"
    ),
    "a bias that is no tensor": (_same(bias=(1.0,)), TYPE, "^bias: expected a torch.Tensor"),
    "a bias of other heads": (
        lambda r, n: (_qkv(), {"bias": torch.zeros(1, 3, 4, 4 * n)}), VALUE, "^bias: shape .* does not broadcast"
    ),
    "a table of other heads": (_same(bias=t5_bias(torch.zeros(16, 3), True)), VALUE, "^T5Bias.table: shape"),
    "values of other rows": (
        _same(bias=RelativeBias(torch.zeros(1, 4, 5, 3), lo=0)), VALUE,
        r"^RelativeBias.values: expected this rank's 4 rows, got shape \(1, 4, 5, 3\)",
    ),
    "a sink of other rows": (
        lambda r, n: (_qkv(), {"sink": torch.zeros(1, 4, 4 * n)}), VALUE, "^sink: expected one logit for each head"
    ),
    "heads that do not divide": (
        lambda r, n: (_qkv(1, 3, 4, 8), {"method": "all_to_all"}), VALUE,
        r"^method: 'all_to_all' cannot run this call: the 3 query heads do not divide by \d ranks",
    ),
    "key heads that do not divide": (
        lambda r, n: ([torch.zeros(1, 4, 4, 8), *_qkv(1, 1, 4, 8)[:2]], {"method": "all_to_all"}), VALUE,
        r"the 1 key/value heads do not divide by \d ranks",
    ),
    "an odd length": (
        lambda r, n: (_qkv(1, 4, 5, 8), {"load_balancer": "head_tail"}), VALUE,
        "^q: with load_balancer='head_tail' a shard has an even length, got 5",
    ),
    "shards of one row": (
        lambda r, n: (_qkv(1, 4, 1, 8), {"sink": torch.zeros(4)}), VALUE, "^q: a shard of one row does not tell"
    ),
    "a method": (_same(method="star"), VALUE, "^method: must be 'auto' or one of"),
    "a balancer": (_same(load_balancer="zigzag"), VALUE, "^load_balancer: must be None or"),
    "dropout": (_same(dropout_p=1.5), VALUE, "^dropout_p: must be a float in"),
    "a seed on one rank": (
        lambda r, n: (_qkv(), {"dropout_p": 0.1, "dropout_seed": (1, 2) if r == 1 else None}), VALUE,
        "^dropout_seed: must be alike on all ranks",
    ),
    "a seed of one number": (_same(dropout_p=0.1, dropout_seed=3), TYPE, "^dropout_seed: expected a pair"),
    "a TileMask": (
        lambda r, n: (_qkv(), {"mask": TileMask.documents(torch.zeros(4 * n, dtype=torch.int32))}), NOT,
        "^mask: context_parallel_attention takes no TileMask yet",
    ),
    "packed": (_same(cu_seqlens_q=torch.zeros(3)), NOT, "^cu_seqlens_q: .* takes no packed batches"),
    "an unknown keyword": (_same(is_causal=True), TYPE, "an unexpected keyword argument 'is_causal'; tilewise"),
    "jagged": (
        lambda r, n: ([torch.nested.nested_tensor([torch.zeros(2, 4, 8)], layout=torch.jagged)] * 3, {}), TYPE,
        "^q: expected a dense tensor",
    ),
    "no DeviceMesh": (_same(mesh="cp"), TYPE, "^mesh: expected a torch.distributed DeviceMesh"),
}  # fmt: skip


def check_error(name: str, mesh: DeviceMesh) -> None:
    arguments, kind, words = ERRORS[name]
    qkv, terms = arguments(mesh.get_local_rank(), mesh.size())
    raises(kind, words, context_parallel_attention, *qkv, **{"mesh": mesh, **terms})


# --- the rest ---


def check_dtensor(mesh: DeviceMesh) -> None:
    q, k, v = (DTensor.from_local(x, mesh, [Shard(2)]) for x in _qkv())
    words = "^q: context_parallel_attention takes no DTensor; pass this rank's shard"
    raises(NotImplementedError, words, context_parallel_attention, q, k, v, mesh=mesh)


def check_meshes(mesh: DeviceMesh) -> None:
    """A mesh of three axes is refused, and one of its axes is taken; a mesh without this process is refused."""
    three = init_device_mesh("cpu", (1, 1, mesh.size()))
    two = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
    alone = DeviceMesh("cpu", [0])
    words = "^mesh: expected one axis, that of the sequence, got 3"
    raises(ValueError, words, context_parallel_attention, *_qkv(), mesh=three)
    if mesh.get_local_rank() != 0:
        raises(ValueError, "^mesh: .* is not in it", context_parallel_attention, *_qkv(), mesh=alone)
    o = context_parallel_attention(*_qkv(), mesh=two["cp"])
    assert o.shape == (1, 4, 4, 8)
    if mesh.get_local_rank() == 0:  # a mesh of one
        context_parallel_attention(*_qkv(), mesh=alone, method="ring", causal=True)


def check_shard(mesh: DeviceMesh) -> None:
    """shard and unshard undo each other, with gradients that are each other's transposes."""
    size, rank = mesh.size(), mesh.get_local_rank()
    for balancer, dim in itertools.product((None, "head_tail"), (0, 1, -1)):
        x = torch.arange(2 * 8 * 8 * 8.0).view(16, 8, 8).requires_grad_()
        whole = unshard(shard(x, mesh, balancer, dim), mesh, balancer, dim)
        assert torch.equal(whole, x)
        (grad,) = torch.autograd.grad((whole * x.detach()).sum() * (rank + 1), x)
        (inside,) = torch.autograd.grad(shard(x, mesh, balancer, dim).sum(), x)
        assert inside.sum() == x.numel() // size
        torch.testing.assert_close(grad, x.detach() * inside * (size * (size + 1) // 2))
    head, tail = shard(torch.arange(4 * size), mesh, "head_tail", 0).chunk(2)
    assert head.tolist() == [2 * rank, 2 * rank + 1]
    assert tail.tolist() == [4 * size - 2 * rank - 2, 4 * size - 2 * rank - 1]
    words = "^tensor: length along dim 1 must be a multiple of"
    raises(ValueError, words, shard, torch.zeros(3, 9), mesh, None, 1)
    raises(ValueError, "^dim: must be an axis of the tensor's shape", shard, torch.zeros(2), mesh, None, 2)


def check_explanation(mesh: DeviceMesh) -> None:
    """Bytes by hand, and which method auto takes."""
    size = mesh.size()
    q, k, v = (torch.zeros(1, heads, 64, 32, requires_grad=True) for heads in (8, 4, 4))
    plan = explain_context_parallel(q, k, v, mesh=mesh, causal=True)
    gathered, ring, exchanged = plan.costs
    shard_bytes = 2 * 4 * 64 * 32 * 4
    assert (gathered.forward_bytes, gathered.backward_bytes) == ((size - 1) * shard_bytes, (size - 1) * 2 * shard_bytes)
    assert (gathered.groups, gathered.exposed_bytes) == (1, (size - 1) * 3 * shard_bytes)
    assert (ring.forward_bytes, ring.backward_bytes) == ((size - 1) * shard_bytes, (2 * size - 1) * shard_bytes)
    assert exchanged.forward_bytes == exchanged.backward_bytes == 24 * 64 * 32 * 4 * (size - 1) // size
    assert plan.method == min(plan.costs, key=lambda cost: cost.exposed_bytes).method
    assert max(plan.flops) > min(plan.flops)
    balanced = explain_context_parallel(q, k, v, mesh=mesh, causal=True, load_balancer="head_tail")
    assert len(set(balanced.flops)) == 1
    assert sum(balanced.flops) == sum(plan.flops)
    window = explain_context_parallel(q, k, v, mesh=mesh, causal=True, window=(20, 0), method="ring")
    assert window.costs[1].forward_bytes == shard_bytes
    assert "asked for" in str(window)
    longer = [torch.empty(1, heads, 16384, 64, dtype=BRAIN) for heads in (8, 4, 4)]
    gathered = explain_context_parallel(*longer, mesh=mesh, method="all_gather").costs[0]
    assert gathered.groups == 4
    assert gathered.exposed_bytes == (gathered.forward_bytes + gathered.backward_bytes) // 4
    assert "in 4 groups of heads" in str(gathered)
    few = [torch.zeros(1, 3, 64, 32)] * 3
    assert "not supported, the 3 query heads" in str(explain_context_parallel(*few, mesh=mesh))
    long = [torch.empty(1, 3, 8192, 64, dtype=BRAIN)] * 3
    assert explain_context_parallel(*long, mesh=mesh).method == "ring"


def check_validation(mesh: DeviceMesh) -> None:
    """Calls that all ranks have made before are compared again where that is asked for, and else not."""
    asked = 0
    usual = dist.all_gather_object

    def counted(*arguments, **keywords):
        nonlocal asked
        asked += 1
        return usual(*arguments, **keywords)

    dist.all_gather_object = counted
    try:
        for validate, count in ((False, 1), (False, 1), (True, 2), (False, 2)):
            context_parallel_attention(*_qkv(1, 4, 12, 8), mesh=mesh, validate=validate)
            assert asked == count, (validate, asked)
        terms = {"mesh": mesh, "validate": True, "causal": mesh.get_local_rank() == 1}
        raises(ValueError, "^causal: must be alike", context_parallel_attention, *_qkv(1, 4, 12, 8), **terms)
    finally:
        dist.all_gather_object = usual


def check_autocast(mesh: DeviceMesh) -> None:
    """q, k and v are cast, and what becomes a part of them; backward outside of the context."""
    torch.manual_seed(2)
    tensors = [torch.randn(1, 4, 8, size) for size in (8, 8, 8, 3, 3)]
    for method in METHODS:
        whole = [x.clone().requires_grad_() for x in tensors]
        local = [shard(x, mesh).detach().requires_grad_() for x in tensors]
        with torch.autocast("cpu", BRAIN):
            expected = attention(*whole[:3], bias=low_rank_bias(*whole[3:]))
            o = context_parallel_attention(*local[:3], bias=low_rank_bias(*local[3:]), mesh=mesh, method=method)
        assert o.dtype == BRAIN
        expected.sum().backward()
        o.sum().backward()
        torch.testing.assert_close(o, shard(expected, mesh), rtol=2e-2, atol=2e-2)
        for x, y in zip(local, whole, strict=True):
            torch.testing.assert_close(x.grad, shard(y.grad, mesh), rtol=2e-2, atol=5e-2)


def check_dropout(mesh: DeviceMesh) -> None:
    """Without a seed all ranks drop by one, which another call does not repeat; their generators stay alike."""
    torch.manual_seed(7 + mesh.get_local_rank())
    q, k, v = (torch.zeros(1, 4, 16, 16) for _ in range(3))
    v = torch.eye(16 * mesh.size()).narrow(0, 16 * mesh.get_local_rank(), 16)[None, None].expand(1, 4, -1, -1)
    masks = []
    for method in METHODS:  # o is the mask, times a constant
        torch.manual_seed(7 + mesh.get_local_rank())
        masks.append(unshard(context_parallel_attention(q, k, v, mesh=mesh, method=method, dropout_p=0.5), mesh) > 0)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    torch.manual_seed(7)
    whole = torch.zeros(1, 4, 16 * mesh.size(), 16)
    alone = attention(whole, whole, torch.eye(16 * mesh.size()).expand(1, 4, -1, -1), dropout_p=0.5)
    assert torch.equal(masks[0], alone > 0)
    other = unshard(context_parallel_attention(q, k, v, mesh=mesh, dropout_p=0.5), mesh) > 0
    assert not torch.equal(masks[0], other)


def check_hidden(mesh: DeviceMesh) -> None:
    """NaN in keys and values that the mask hides reaches nothing, and their gradients are 0."""
    torch.manual_seed(4)
    tensors = [torch.randn(1, 4, 8 * mesh.size(), 8) for _ in range(3)]
    mask = torch.ones(1, 1, 1, tensors[1].shape[2], dtype=torch.bool)
    mask[..., [1, -2, -1]] = False
    spoilt = [tensors[0], *(x.masked_fill(~mask.mT, torch.nan) for x in tensors[1:])]
    for method, balancer in itertools.product(METHODS, (None, "head_tail")):
        whole = [x.clone().requires_grad_() for x in tensors]
        local = [shard(x, mesh, balancer).requires_grad_() for x in spoilt]
        terms = {"mask": shard(mask, mesh, balancer, 3), "mesh": mesh, "method": method, "load_balancer": balancer}
        expected, o = attention(*whole, mask=mask), context_parallel_attention(*local, **terms)
        torch.testing.assert_close(o, shard(expected, mesh, balancer))
        expected.square().sum().backward()
        o.square().sum().backward()
        for x, y in zip(local, whole, strict=True):
            torch.testing.assert_close(x.grad, shard(y.grad, mesh, balancer))


def check_derivatives(mesh: DeviceMesh) -> None:
    """A cotangent whose memory holds its negative; and no second derivative, rather than a wrong one."""
    for method in METHODS:
        q, k, v = (torch.randn(1, 4, 4, 8).requires_grad_() for _ in range(3))
        o = context_parallel_attention(q, k, v, mesh=mesh, method=method)
        do = torch.randn(o.shape)
        negative = torch.complex(torch.zeros_like(do), -do).conj().imag
        assert negative.is_neg()
        backwards = ring.backward, head_groups.Gathered.backward
        ring.backward, head_groups.Gathered.backward = (_unless_negative(x) for x in backwards)
        try:
            found, expected = (torch.autograd.grad(o, (q, k, v), x, retain_graph=True) for x in (negative, do))
        finally:
            ring.backward, head_groups.Gathered.backward = backwards
        torch.testing.assert_close(found, expected)
        (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        raises(RuntimeError, r"not have been used|no second derivative", torch.autograd.grad, dq.sum(), q)
    x = torch.ones(4, requires_grad=True)
    (dx,) = torch.autograd.grad(unshard(x, mesh, dim=0).square().sum(), x, create_graph=True)
    raises(RuntimeError, "not have been used", torch.autograd.grad, dx.sum(), x)


def _unless_negative(backward: Callable) -> Callable:
    """A kernel reads memory, where a CPU's operations see to the sign."""

    def checked(*arguments):
        for record in arguments:
            if isinstance(record, Outputs):
                assert not any(x is not None and x.is_neg() for x in record)
        return backward(*arguments)

    return checked


def check_forgotten(mesh: DeviceMesh) -> None:
    """More kinds of calls than are kept: all ranks forget the same ones."""
    group = mesh.get_group()
    agreement._agreed[group] = CallCache(4)
    for count in (1, 2, 3, 4, 5, 1, 5):
        context_parallel_attention(*_qkv(1, 4, 4 * count, 16), mesh=mesh)
        assert 0 < agreement._agreed[group].info().size <= 4
    del agreement._agreed[group]


def check_recipe(mesh: DeviceMesh) -> None:
    """The page's, as torchrun would run them."""
    page = Path(__file__).parents[1] / "docs" / "distributed.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    os.environ.update(WORLD_SIZE=str(mesh.size()), RANK=str(mesh.get_local_rank()))
    before: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), before)


def check_example(mesh: DeviceMesh) -> None:
    """A model learns on two ranks what it learns on one."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "long_context.py"))
    found, alone = example["run"](mesh, 64, 4).losses, DeviceMesh("cpu", [0])
    assert found[-1] < found[0] - 0.5
    if mesh.get_local_rank() == 0:
        torch.testing.assert_close(found, example["run"](alone, 64, 4).losses, rtol=1e-4, atol=0.0)


def check_one_key(mesh: DeviceMesh) -> None:
    """Beside dropout gradients of rows that see one key are 0, in 16 bits too: parts are merged, rows are traded and a
    compiler's operator hands on what rounding takes of o."""
    for method, balancer in itertools.product(METHODS, (None, "head_tail")):
        torch.manual_seed(3)
        x = [torch.randn(1, 4, 8, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]

        def call(*x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
            return context_parallel_attention(
                *x, mesh=mesh, causal=True, window=(0, 0), dropout_p=0.9, dropout_seed=(1, 2), **more
            )

        more = {"method": method, "load_balancer": balancer}
        for f in (call, torch.compile(call, backend="eager", fullgraph=True))[: 1 if balancer else 2]:
            dq, dk, dv = torch.autograd.grad((f(*x, more=more).float() * torch.arange(16.0)).sum(), x)
            assert dv.abs().max() > 100, method
            assert max(dq.abs().max(), dk.abs().max()) < 1e-2, (method, balancer, f is call)


def check_memory(mesh: DeviceMesh) -> None:
    """No tensor of a call; of a packed batch, whose tables of places are kept, none that went in or came out."""

    def dense(c: Call, method: str) -> Any:
        q, k, v = (c.normal(1, 4, c.n, 8) for _ in range(3))
        bias = c.normal(1, 4, c.n, c.n * mesh.size())
        return context_parallel_attention(q, k, v, bias=bias, mesh=mesh, method=method, causal=True)

    def packed(c: Call) -> Any:
        q, k, v = (c.normal(c.n, 4, 8) for _ in range(3))
        cu = c.ints(0, 5, c.n * mesh.size())
        return context_parallel_varlen_attention(q, k, v, cu, mesh=mesh, causal=True)

    for n, method in enumerate(METHODS):
        found = leftovers(partial(dense, method=method), 30 + 2 * n, "cpu")
        assert found == [], (method, found)
    found = [x for x in leftovers(packed, 40, "cpu") if not x.startswith("a tensor")]
    assert found == [], found


OTHERS = {
    "DTensors": check_dtensor, "meshes": check_meshes, "shard": check_shard, "explanation": check_explanation,
    "validation": check_validation, "autocast": check_autocast, "recipe": check_recipe,
    "dropout": check_dropout, "hidden NaN": check_hidden, "derivatives": check_derivatives,
    "forgotten": check_forgotten, "example": check_example, "one key": check_one_key, "memory": check_memory,
}  # fmt: skip


def checks(size: int) -> dict[str, tuple]:
    """All that a world of so many ranks does, a function and its first arguments by name."""
    from distributed_packed import checks_of_packed  # which imports this module

    found: dict[str, tuple] = {name: (check, case) for name, case in CASES[size].items()} | checks_of_packed(size)
    errors = ERRORS if size == 2 else [name for name in ERRORS if "differ" in name or "one rank" in name]
    found |= {f"error: {name}": (check_error, name) for name in errors}
    found |= triangle_child.CHECKS
    return found | {name: (OTHERS[name],) for name in (OTHERS if size == 2 else ("shard", "meshes", "dropout"))}


def check_all(mesh: DeviceMesh) -> dict[str, str]:
    # Two ranks gather a key/value head at a time and leave out keys that nobody sees, four all at once.
    if mesh.size() == 2:
        operands.GROUP_FLOPS, packed.GROUP_FLOPS, operands.KEY_STEP = 0.0, 0.0, 4
    return failures(mesh, checks(mesh.size()))


def die(rank: int, size: int, store: str) -> tuple[dict[str, str], float]:
    """Rank 1 ends between two calls; what the others say, and after how long."""
    mesh = start(rank, size, store, 5.0)

    def check(mesh: DeviceMesh) -> None:
        for method in METHODS:
            context_parallel_attention(*_qkv(), mesh=mesh, method=method)

    check(mesh)
    if rank == 1:
        os._exit(3)
    begun = time.monotonic()
    return failures(mesh, {"after": (check,)}), time.monotonic() - begun
