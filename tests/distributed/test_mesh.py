"""DTensors split along a sequence, PyTorch's context manager and compiled calls, in two and four processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import failures, raises, ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tilewise import attention, scaled_dot_product_attention
from tilewise.bias import RelativeBias, alibi, low_rank_bias, t5_bias
from tilewise.distributed import context_parallel_attention, shard, unshard

WHOLE, ROWS = Replicate(), Shard(2)
B, H, Hkv, S, D, Dv = 2, 4, 2, 16, 8, 6
DOUBLE = torch.float64


def draw(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        name: torch.rand(shape) < 0.8 if name == "mask" else torch.randn(shape, dtype=DOUBLE)
        for name, shape in shapes.items()
    }


QKV = {"q": (B, H, S, D), "k": (B, Hkv, S, D), "v": (B, Hkv, S, Dv)}


def same(found: Any, right: Any, what: str) -> None:
    torch.testing.assert_close(found, right, msg=lambda text: f"{what}: {text}")


def loss_of(o: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
    return o.square().sum() if lse is None else o.square().sum() + lse.sin().sum()


# --- DTensors ---

# Of each: the shapes of what goes with q, k and v, where each lies and its gradient has to, and the call.
Terms = Callable[[dict[str, Any]], dict[str, Any]]
SPLIT: dict[str, tuple[dict, dict, Terms]] = {
    "plain": ({}, {}, lambda t: {"causal": True}),
    "matrix": ({"x": (1, H, S, S)}, {"x": (ROWS, ROWS)}, lambda t: {"bias": t["x"], "causal": True}),
    "matrix that lies whole": ({"x": (S, S)}, {"x": (WHOLE, None)}, lambda t: {"bias": t["x"]}),
    "keys": ({"x": (B, 1, 1, S)}, {"x": (Shard(3), Shard(3))}, lambda t: {"bias": t["x"], "window": (5, 0)}),
    "terms and a sink": (
        {"x": (1, H, S, 5), "y": (32, H), "z": (H,), "s": (H,)},
        {"x": (ROWS, ROWS), "y": (WHOLE, WHOLE), "z": (WHOLE, WHOLE), "s": (WHOLE, WHOLE)},
        lambda t: {
            "bias": (RelativeBias(t["x"], lo=-2, outside="clamp"), t5_bias(t["y"], False), alibi(t["z"])),
            "sink": t["s"], "causal": True,
        },
    ),
    "low rank, sinks of queries": (
        {"u": (1, H, S, 3), "w": (B, Hkv, S, 3), "s": (B, H, S)},
        {"u": (ROWS, ROWS), "w": (ROWS, ROWS), "s": (ROWS, ROWS)},
        lambda t: {"bias": low_rank_bias(t["u"], t["w"]), "sink": t["s"]},
    ),
    "padding": ({"mask": (B, 1, 1, S)}, {"mask": (Shard(3), None)}, lambda t: {"mask": t["mask"]}),
}  # fmt: skip


def counted(calls: list[str]) -> Callable[[], None]:
    """Notes calls of context_parallel_attention's inner function; returns what takes that back."""
    from tilewise.distributed import dtensor

    usual = dtensor.attend_shards

    def noted(*arguments, **keywords):
        calls.append("sharded")
        return usual(*arguments, **keywords)

    dtensor.attend_shards = noted

    def restore() -> None:
        dtensor.attend_shards = usual

    return restore


def check_dtensors(name: str, mesh: DeviceMesh) -> None:
    shapes, places, terms = SPLIT[name]
    whole = draw(**QKV, **shapes)
    at = {"q": (ROWS, ROWS), "k": (ROWS, ROWS), "v": (ROWS, ROWS), **places}
    plain = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in whole.items()}
    split = {n: distribute_tensor(x, mesh, [at[n][0]]).requires_grad_(x.is_floating_point()) for n, x in whole.items()}
    calls: list[str] = []
    restore = counted(calls)
    try:
        o, lse = attention(split["q"], split["k"], split["v"], **terms(split), return_lse=True)
    finally:
        restore()
    assert calls == ["sharded"]
    right, right_lse = attention(plain["q"], plain["k"], plain["v"], **terms(plain), return_lse=True)
    assert o.placements == lse.placements == (ROWS,)
    assert o.shape == right.shape
    same(o.full_tensor(), right, "o")
    same(lse.full_tensor(), right_lse, "lse")
    loss_of(o, lse).backward()
    loss_of(right, right_lse).backward()
    for n, x in plain.items():
        if x.requires_grad:
            grad = split[n].grad
            assert at[n][1] is None or grad.placements == (at[n][1],), (n, grad.placements)
            same(grad.full_tensor(), x.grad, f"d{n}")


def check_two_axes(mesh: DeviceMesh) -> None:
    """The batch, or heads, along one axis of a mesh, and the sequence along the other."""
    shape = (mesh.size() // 2, 2) if mesh.size() > 2 else (1, 2)
    two = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    whole = draw(**QKV, x=(1, H, S, S), y=(32, H))
    for other in (Shard(0), Shard(1)):
        at = {
            "x": [Shard(1) if other == Shard(1) else WHOLE, ROWS],
            "y": [other if other == Shard(1) else WHOLE, WHOLE],
        }
        plain = {n: x.clone().requires_grad_() for n, x in whole.items()}
        split = {n: distribute_tensor(x, two, at.get(n, [other, ROWS])).requires_grad_() for n, x in whole.items()}
        found, right = (
            attention(t["q"], t["k"], t["v"], bias=(t["x"], t5_bias(t["y"], False)), causal=True)
            for t in (split, plain)
        )
        assert found.placements == (other, ROWS)
        same(found.full_tensor(), right, "o")
        loss_of(found).backward()
        loss_of(right).backward()
        for n, x in plain.items():
            same(split[n].grad.full_tensor(), x.grad, f"d{n}")
        if other == Shard(0) and shape[0] > 1:
            assert split["x"].grad.placements == (Partial(), ROWS)


# --- a mesh of two axes ---


def check_heads_and_ring(mesh: DeviceMesh) -> None:
    """Rows for heads along the second axis, a ring or a gathering along the first, with every kind of tensor."""
    shape = (mesh.size() // 2, 2) if mesh.size() > 2 else (2, 1)
    two = init_device_mesh("cpu", shape)
    shapes = {**QKV, "r": (1, H, S, 5), "m": (1, 1, S, S), "mask": (B, 1, 1, S), "t": (32, H), "s": (H,)}
    whole, dims = draw(**shapes), {"mask": 3, "t": None, "s": None}
    for method, balancer in (("ring", "head_tail"), ("all_gather", None), ("auto", None)):

        def call(function, x, **more):
            bias = (RelativeBias(x["r"], lo=-2), x["m"], t5_bias(x["t"], False))
            terms = {"bias": bias, "mask": x["mask"], "sink": x["s"], "causal": True, "return_lse": True}
            return function(x["q"], x["k"], x["v"], **terms, **more)

        plain = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in whole.items()}
        local = {
            n: x.clone() if dims.get(n, 2) is None else shard(x, two, balancer, dims.get(n, 2))
            for n, x in whole.items()
        }
        local = {n: x.requires_grad_(x.is_floating_point()) for n, x in local.items()}
        o, lse = call(context_parallel_attention, local, mesh=two, method=method, load_balancer=balancer)
        right, right_lse = call(attention, plain)
        same(unshard(o.detach(), two, balancer), right, "o")
        same(lse, shard(right_lse, two, balancer), "lse")
        loss_of(o, lse).backward()
        loss_of(right, right_lse).backward()
        for n, x in plain.items():
            if x.requires_grad:
                grad = x.grad if dims.get(n, 2) is None else shard(x.grad, two, balancer, 2)
                same(local[n].grad, grad, f"d{n}")
    qkv = [torch.zeros(1, 4, 8, 8) for _ in range(3)]
    last = mesh.get_local_rank() == mesh.size() - 1
    raises(ValueError, "causal: must be alike", context_parallel_attention, *qkv, mesh=two, causal=last)
    raises(
        ValueError, "method: must be 'auto', 'ring' or", context_parallel_attention, *qkv, mesh=two, method="all_to_all"
    )
    raises(ValueError, "softcap: must be positive", context_parallel_attention, *qkv, mesh=two,
            softcap=-1.0 if last else None)  # fmt: skip


def check_other_placements(mesh: DeviceMesh) -> None:
    """Queries alone are split, or lengths that do not divide: DTensor brings them to where the operator takes them."""
    whole = draw(**QKV)
    split = [distribute_tensor(x, mesh, [ROWS if n == "q" else WHOLE]) for n, x in whole.items()]
    same(attention(*split, causal=True).full_tensor(), attention(*whole.values(), causal=True), "queries alone")
    odd = [x[:, :, :13] for x in whole.values()]
    split = [distribute_tensor(x.contiguous(), mesh, [ROWS]) for x in odd]
    same(attention(*split, causal=True).full_tensor(), attention(*odd, causal=True), "13 rows")
    split = [distribute_tensor(x, mesh, [ROWS]) for x in whole.values()]
    raises(TypeError, "^bias: must be a DTensor as q is, got Tensor", attention, *split, bias=torch.zeros(S, S))
    raises(NotImplementedError, "^dropout_p: dropout takes no DTensors", attention, *split, dropout_p=0.5)


def check_sdpa_of_dtensors(mesh: DeviceMesh) -> None:
    whole = draw(**QKV, x=(1, 1, S, S))
    split = {n: distribute_tensor(x, mesh, [ROWS]).requires_grad_() for n, x in whole.items()}
    plain = {n: x.clone().requires_grad_() for n, x in whole.items()}
    found, right = (
        scaled_dot_product_attention(t["q"], t["k"], t["v"], t["x"], is_causal=True, scale=0.3, enable_gqa=True)
        for t in (split, plain)
    )
    assert found.placements == (ROWS,)
    same(found.full_tensor(), right, "o")
    loss_of(found).backward()
    loss_of(right).backward()
    for n, x in plain.items():
        same(split[n].grad.full_tensor(), x.grad, f"d{n}")


# --- PyTorch's context manager ---


def check_manager(mesh: DeviceMesh, balanced: bool) -> None:
    """Buffers that it shards, a bias by its rows, and the gradient of what each rank computes."""
    from torch.distributed.tensor.experimental import context_parallel

    its = inspect.unwrap(context_parallel).__globals__["_cp_options"]

    whole = draw(**QKV, x=(1, H, S, S))
    plain = {n: x.clone().requires_grad_() for n, x in whole.items()}
    terms: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    right = scaled_dot_product_attention(plain["q"], plain["k"], plain["v"], plain["x"], **terms)
    loss_of(right).backward()
    buffers = {n: x.clone() for n, x in whole.items()}
    balancer = "head_tail" if balanced else None
    before, its.enable_load_balance = its.enable_load_balance, balanced
    try:
        with context_parallel(mesh, buffers=list(buffers.values()), buffer_seq_dims=[2] * len(buffers)):
            local = {n: x.detach().clone().requires_grad_() for n, x in buffers.items()}
            o = scaled_dot_product_attention(local["q"], local["k"], local["v"], local["x"], **terms)
            loss_of(o).backward()
            # And where it has tilewise's function in PyTorch's place: it makes DTensors of what it is given.
            raises(
                NotImplementedError, "^dropout_p: dropout is not taken within torch.distributed",
                scaled_dot_product_attention, local["q"], local["k"], local["v"], dropout_p=0.5, enable_gqa=True,
            )  # fmt: skip
            raises(
                NotImplementedError, "^query: must have 4 dimensions", scaled_dot_product_attention,
                *(x[0] for x in buffers.values() if x.shape[1] == H and x.shape[3] == D for _ in range(3)),
            )  # fmt: skip
    finally:
        its.enable_load_balance = before
    same(o, shard(right, mesh, balancer), "o")
    for n, x in plain.items():
        same(local[n].grad, shard(x.grad, mesh, balancer), f"d{n}")
    same(scaled_dot_product_attention(*whole.values(), **terms), right, "afterwards")


def check_manager_around_ours(mesh: DeviceMesh) -> None:
    """The manager wraps what stands in PyTorch's place, and gives it DTensors: of a head and a tail each."""
    from torch.distributed.tensor.experimental import context_parallel

    whole = draw(**QKV)
    right = scaled_dot_product_attention(*whole.values(), is_causal=True, enable_gqa=True)
    usual, F.scaled_dot_product_attention = F.scaled_dot_product_attention, scaled_dot_product_attention
    try:
        buffers = [x.clone() for x in whole.values()]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            o = F.scaled_dot_product_attention(*buffers, is_causal=True, enable_gqa=True)
    finally:
        F.scaled_dot_product_attention = usual
    same(o, shard(right, mesh, "head_tail"), "o")


# --- compiled ---


def check_compiled(mesh: DeviceMesh) -> None:
    """Every method in one graph, and what eager calls get, forward and backward."""
    shapes = {**QKV, "r": (1, H, S, 5), "m": (1, H, S, S), "mask": (B, 1, 1, S), "t": (32, H), "s": (H,)}
    whole, dims = draw(**shapes), {"mask": 3, "t": None, "s": None}
    methods = ("all_gather", "ring", "all_to_all")

    def call(q, k, v, r, m, mask, t, s):
        bias, losses = (RelativeBias(r, lo=-2, outside=-torch.inf), m, t5_bias(t, False)), []
        for method in methods:
            o, lse = context_parallel_attention(
                q * 2, k, v, mesh=mesh, bias=bias, mask=mask, sink=s, causal=True, window=(9, 0), method=method,
                load_balancer="head_tail", return_lse=True,
            )  # fmt: skip
            losses.append(loss_of(o, lse))
        return losses

    torch._dynamo.reset()
    results: list[dict[str, torch.Tensor]] = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        x = {
            n: t.clone() if dims.get(n, 2) is None else shard(t, mesh, "head_tail", dims.get(n, 2)).clone()
            for n, t in whole.items()
        }
        leaves = [t.requires_grad_() for t in x.values() if t.is_floating_point()]
        found = {}
        for method, loss in zip(methods, function(*x.values()), strict=True):
            grads = torch.autograd.grad(loss, leaves, retain_graph=True)
            found |= {f"{method}, gradient {n}": grad for n, grad in enumerate(grads)} | {method: loss.detach()}
        results.append(found)
    for n, right in results[0].items():
        assert right.abs().max() > 0, n
        same(results[1][n], right, n)


def check_compiled_dropout(mesh: DeviceMesh) -> None:
    """What the eager call drops with the first rank's generator on every rank, and with a seed that is given."""
    whole, rank, seeds = draw(**QKV), mesh.get_local_rank(), (None, (3, 5))

    def call(q, k, v):
        options = {"mesh": mesh, "dropout_p": 0.5, "method": "ring"}
        return [context_parallel_attention(q, k, v, dropout_seed=seed, **options) for seed in seeds]

    results = []
    for function, start in ((call, 7), (torch.compile(call, fullgraph=True, backend="aot_eager"), 7 + rank)):
        torch.manual_seed(start)
        x = [shard(t, mesh).requires_grad_() for t in whole.values()]
        outputs = function(*x)
        grads = [torch.autograd.grad(loss_of(o), x, retain_graph=True) for o in outputs]
        results.append([*(o.detach() for o in outputs), *(grad for found in grads for grad in found)])
    for n, (found, right) in enumerate(zip(*results, strict=True)):
        same(found, right, f"result {n}")


def check_compiled_errors(mesh: DeviceMesh) -> None:
    """Found by all ranks when the graph runs, and by one when it is traced."""
    qkv = [torch.zeros(1, 4, 8, 8) for _ in range(3)]
    call = torch.compile(lambda *x, **y: context_parallel_attention(*x, mesh=mesh, **y), fullgraph=True,
                         backend="aot_eager")  # fmt: skip
    raises(ValueError, "^causal: must be alike", call, *qkv, causal=mesh.get_local_rank() == 0)
    raises(ValueError, "^method: 'all_to_all' cannot run this call", call, *(x[:, :3] for x in qkv),
            method="all_to_all")  # fmt: skip


def check_compiled_dtensors(mesh: DeviceMesh) -> None:
    whole = draw(**QKV)
    call = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    split = [distribute_tensor(x, mesh, [ROWS]).requires_grad_() for x in whole.values()]
    plain = [x.clone().requires_grad_() for x in whole.values()]
    found, right = call(*split), attention(*plain, causal=True)
    same(found.full_tensor(), right, "o")
    loss_of(found).backward()
    loss_of(right).backward()
    for x, y in zip(split, plain, strict=True):
        same(x.grad.full_tensor(), y.grad, "a gradient")


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    **{f"DTensors: {name}": lambda mesh, name=name: check_dtensors(name, mesh) for name in SPLIT},
    "DTensors: two axes": check_two_axes,
    "a mesh of two axes": check_heads_and_ring,
    "DTensors: other placements": check_other_placements,
    "DTensors: the SDPA door": check_sdpa_of_dtensors,
    "DTensors: compiled": check_compiled_dtensors,
    "manager: a head and a tail": lambda mesh: check_manager(mesh, True),
    "manager: contiguous": lambda mesh: check_manager(mesh, False),
    "manager: around tilewise's function": check_manager_around_ours,
    "compiled: errors": check_compiled_errors,
    "compiled: dropout": check_compiled_dropout,
    "compiled: every method": check_compiled,
}

# Of four processes: what needs a mesh of two axes, and more steps of a ring than two ranks have.
OF_FOUR = (
    "a mesh of two axes", "DTensors: two axes", "DTensors: terms and a sink", "manager: a head and a tail",
)  # fmt: skip


def check_all(mesh: DeviceMesh) -> dict[str, str]:
    return failures(mesh, {name: (CHECKS[name],) for name in (CHECKS if mesh.size() == 2 else OF_FOUR)})


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_what_one_process_gets(size, tmp_path):
    """One failure tells of all."""
    assert ranks(check_all, size, tmp_path) == [{}] * size
