"""One rank of test_distributed.py: cases on NCCL, held to one process's result; a line for each.

    python tests/gpu/nccl_child.py RANK SIZE STORE SHARE SHARES

For each rank of SIZE, with one file STORE that is not there yet; of the cases every SHARES-th, from number SHARE on.
Rank r has GPU r. Lines: the case, what went wrong or "", the largest error beside the norm, seconds.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src")]

from tilewise import attention, varlen_attention  # noqa: E402
from tilewise.bias import relative_logits  # noqa: E402
from tilewise.distributed import (  # noqa: E402
    context_parallel_attention,
    context_parallel_varlen_attention,
    operands,
    shard,
)
from tilewise.distributed import documents as packed  # noqa: E402

B, H, HKV, S, D, R = 2, 8, 4, 2048, 64, 129
METHODS = ("all_gather", "ring", "all_to_all")
BRAIN = torch.bfloat16
CLOSE = 1.2e-2  # of the norm: three roundings to 8 bits
LENGTHS = (700, 1, 0, 129, 1217, 1)
OFFSETS = tuple(accumulate(LENGTHS, initial=0))

Tensors = dict[str, torch.Tensor]
# Of each kind of bias: its tensors with the axis that is split, and how it is made of them.
KINDS: dict[str, tuple[dict[str, tuple[tuple[int, ...], int | None]], Callable[[Tensors], dict[str, Any]]]] = {
    "none": ({}, lambda t: {}),
    "relative": (
        {"states": ((B, H, S, 16), 2), "proj": ((16, R), None)},
        lambda t: {"bias": relative_logits(t["states"], t["proj"], lo=0, reverse=True)},
    ),
    "matrix": ({"x": ((1, H, S, S), 2)}, lambda t: {"bias": t["x"]}),
    "keys": ({"x": ((B, 1, 1, S), 3)}, lambda t: {"bias": t["x"]}),
}


def leaves(shapes: dict[str, tuple[tuple[int, ...], int | None]]) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(1)
    return {
        name: torch.randn(shape, device="cuda", dtype=BRAIN, generator=generator).requires_grad_()
        for name, (shape, _) in shapes.items()
    }


def hold(name: str, found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    assert found.isfinite().all(), f"{name}: not finite"
    error = float((found - expected).norm() / expected.norm())
    assert error < CLOSE, f"{name}: error {error:.3g}"
    return error


def compare(
    shapes: dict[str, tuple[tuple[int, ...], int | None]], part: Callable[[torch.Tensor, int], torch.Tensor],
    alone: Callable[[Tensors], torch.Tensor], together: Callable[[Tensors], torch.Tensor], rows: int, repeat: bool,
) -> float:  # fmt: skip
    """repeat: the same bits once more."""
    whole = leaves(shapes)
    local = {
        name: (x if shapes[name][1] is None else part(x, shapes[name][1])).detach().requires_grad_()
        for name, x in whole.items()
    }
    expected = alone(whole)
    do = torch.randn(expected.shape, device="cuda", dtype=BRAIN, generator=torch.Generator("cuda").manual_seed(2))
    wanted = torch.autograd.grad(expected, list(whole.values()), do)
    results = []
    for _ in range(2 if repeat else 1):
        o = together(local)
        grads = torch.autograd.grad(o, list(local.values()), part(do, rows))
        results.append([o, *grads])
    if repeat:
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), "other bits the second time"
    errors = [hold("o", results[0][0], part(expected, rows))]
    for (name, (_, axis)), grad, want in zip(shapes.items(), results[0][1:], wanted, strict=True):
        # What every rank has whole and is no bias's own tensor gets the gradient of this rank's rows.
        if name == "proj":
            dist.all_reduce(grad)
        errors.append(hold(f"d{name}", grad, want if axis is None else part(want, axis)))
    return max(errors)


def check_dense(mesh: DeviceMesh, method: str, kind: str, balancer: str | None, **more: Any) -> float:
    own, build = KINDS[kind]
    shapes = {"q": ((B, H, S, D), 2), "k": ((B, HKV, S, D), 2), "v": ((B, HKV, S, D), 2), **own}

    def call(function: Any, t: Tensors, **terms: Any) -> torch.Tensor:
        return function(t["q"], t["k"], t["v"], **build(t), causal=True, **more, **terms)

    return compare(
        shapes, lambda x, axis: shard(x, mesh, balancer, axis), lambda t: call(attention, t),
        lambda t: call(context_parallel_attention, t, mesh=mesh, method=method, load_balancer=balancer), 2,
        "deterministic" in more,
    )  # fmt: skip


def check_packed(mesh: DeviceMesh, method: str, kind: str, balancer: str | None) -> float:
    shapes: dict[str, tuple[tuple[int, ...], int | None]]
    shapes = {"q": ((S, H, D), 0), "k": ((S, HKV, D), 0), "v": ((S, HKV, D), 0)}
    if kind == "keys":
        shapes["x"] = ((H, S), 1)
    cu = torch.tensor(OFFSETS, device="cuda", dtype=torch.int32)
    longest = max(LENGTHS)

    def call(function: Any, t: Tensors, *lengths: Any, **terms: Any) -> torch.Tensor:
        return function(t["q"], t["k"], t["v"], *lengths, bias=t.get("x"), causal=True, **terms)

    return compare(
        shapes, lambda x, axis: shard(x, mesh, balancer, axis, cu_seqlens=OFFSETS),
        lambda t: call(varlen_attention, t, cu, cu, longest, longest),
        lambda t: call(
            context_parallel_varlen_attention, t, cu, mesh=mesh, method=method, load_balancer=balancer
        ), 0, False,
    )  # fmt: skip


def cases() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for kind in KINDS:
        for method in METHODS:
            found[f"{kind}, {method}"] = check_dense, method, kind, "head_tail"
    for method in METHODS:
        found[f"none, {method}, contiguous"] = check_dense, method, "none", None
        found[f"none, {method}, deterministic"] = check_dense, method, "none", "head_tail", {"deterministic": True}
        more = {"dropout_p": 0.2, "dropout_seed": (3, 4)}
        found[f"none, {method}, dropout"] = check_dense, method, "none", "head_tail", more
    for method in ("all_gather", "all_to_all"):
        for balancer in (None, "document"):
            found[f"packed, {method}, {balancer}"] = check_packed, method, "none", balancer
    found["packed, keys, all_gather, document"] = check_packed, "all_gather", "keys", "document"
    return found


def main(rank: int, size: int, store: str, share: int, shares: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    mesh = init_device_mesh("cuda", (size,))
    operands.GROUP_FLOPS = packed.GROUP_FLOPS = 0.0  # a key/value head at a time
    for name, (check, *arguments) in list(cases().items())[share::shares]:
        more = arguments.pop() if isinstance(arguments[-1], dict) else {}
        begun, words, error = time.monotonic(), "", 0.0
        try:
            error = check(mesh, *arguments, **more)
        except (AssertionError, RuntimeError, ValueError, TypeError) as found:
            words = f"{type(found).__name__}: {found}"[:500]
        print(json.dumps((name, words, error, time.monotonic() - begun)), flush=True)
        # One rank's error may have left the others waiting, or ahead.
        failed = torch.tensor(float(bool(words)), device="cuda")
        dist.all_reduce(failed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
