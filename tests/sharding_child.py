"""Two processes that call attention() on DTensors, and compare what they get with one process's result."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import tilewise.api  # noqa: F401  # before DTensor, which its operators meet later
from tilewise import attention, scaled_dot_product_attention
from tilewise.bias import RelativeBias

WHOLE = Replicate()
SIZES = {"B": 4, "H": 4, "Hkv": 4, "M": 6, "N": 8}


@dataclass(frozen=True)
class Case:
    """A call: where its inputs lie, and where ``o`` and the gradients have to; None: anywhere. The gradients of q, k
    and v lie as o does, but for ``kv_gradient``. Shapes of bias, mask and sink name their axes."""

    name: str
    qkv: tuple[Placement, ...]
    o: Placement | None = None
    bias: str | None = None
    bias_at: Placement = WHOLE
    bias_gradient: Placement | None = None
    kv_gradient: Placement | None = None
    mask: str | None = None
    mask_at: Placement = WHOLE
    sizes: tuple[tuple[str, int], ...] = ()
    causal: bool = False
    lse: bool = False
    frozen: tuple[str, ...] = ()
    sink: str | None = None
    sink_at: Placement = WHOLE
    sink_gradient: Placement | None = None
    door: str = "attention"
    term: str = ""  # what the bias is: values by distance of the "query", or with "starts" on the device

    def size(self, axis: str) -> int:
        return int(axis) if axis.isdigit() else {**SIZES, **dict(self.sizes)}[axis]


def _split(dim: int) -> tuple[Placement, ...]:
    return (Shard(dim),) * 3


GQA = (("Hkv", 2),)
CASES = [
    Case("whole", (WHOLE,) * 3, WHOLE),
    Case("batch", _split(0), Shard(0), causal=True),
    Case("heads", _split(1), Shard(1), causal=True, lse=True),
    Case("batch, unevenly", _split(0), Shard(0), sizes=(("B", 3),), bias="1 H M N", bias_gradient=Partial()),
    Case("heads, unevenly", _split(1), Shard(1), sizes=(("H", 3), ("Hkv", 3)), bias="1 H M N", bias_at=Shard(1),
         bias_gradient=Shard(1)),
    Case("batch, bias of heads", _split(0), Shard(0), bias="1 H M N", bias_gradient=Partial()),
    Case("heads, bias of heads", _split(1), Shard(1), bias="1 H M N", bias_at=Shard(1), bias_gradient=Shard(1)),
    Case("heads, bias of heads that lies whole", _split(1), bias="1 H M N"),
    Case("batch, bias of the batch", _split(0), Shard(0), bias="B 1 1 N", bias_at=Shard(0), bias_gradient=Shard(0)),
    Case("heads, bias of the batch", _split(1), Shard(1), bias="B 1 1 N", bias_gradient=Partial()),
    Case("batch, one bias", _split(0), Shard(0), bias="1 1 M N", bias_gradient=Partial(), lse=True),
    Case("heads, one bias", _split(1), Shard(1), bias="1 1 M N", bias_gradient=Partial(), frozen=("q", "v")),
    Case("heads, the bias alone is trained", _split(1), Shard(1), bias="1 1 M N", bias_gradient=Partial(),
         frozen=("q", "k", "v")),
    Case("heads, a frozen bias", _split(1), Shard(1), bias="1 H 1 N", bias_at=Shard(1), frozen=("bias",)),
    Case("batch, padding", _split(0), Shard(0), mask="B 1 1 N", mask_at=Shard(0)),
    Case("heads, padding and a bias", _split(1), Shard(1), mask="B 1 1 N", bias="1 1 M N", bias_gradient=Partial()),
    Case("batch, groups of heads", _split(0), Shard(0), sizes=GQA),
    Case("heads, groups of heads", _split(1), Shard(1), sizes=GQA, bias="1 Hkv M N", bias_at=Shard(1),
         bias_gradient=Shard(1)),
    Case("heads that share one", (Shard(1), WHOLE, WHOLE), Shard(1), sizes=(("Hkv", 1),),
         kv_gradient=Partial(), bias="1 H M N", bias_at=Shard(1)),
    Case("heads in groups that two devices would tear apart", _split(1), sizes=(("H", 6), ("Hkv", 3)), bias="1 H M N"),
    Case("queries split", (Shard(2), WHOLE, WHOLE), causal=True, bias="1 H M N", bias_at=Shard(2)),
    Case("sequences split", _split(2), causal=True, mask="B 1 1 N", mask_at=Shard(3)),
    Case("dimensions split", _split(3), bias="1 1 M N", bias_at=Shard(3)),
    Case("queries that are still to be summed", (Partial(), Shard(1), Shard(1)), bias="1 H M N"),
    Case("heads, sinks of heads", _split(1), Shard(1), sink="H", sink_at=Shard(0), sink_gradient=Shard(0), lse=True),
    Case("heads, sinks of heads that lie whole", _split(1), Shard(1), sink="H", causal=True),
    Case("batch, sinks of heads", _split(0), Shard(0), sink="H", sink_gradient=Partial(), bias="1 H M N"),
    Case("batch, sinks of queries", _split(0), Shard(0), sink="B H M", sink_at=Shard(0), sink_gradient=Shard(0)),
    Case("batch, values of queries", _split(0), Shard(0), bias="B H M 5", bias_at=Shard(0), bias_gradient=Shard(0),
         term="query"),
    Case("batch, values of all batches", _split(0), Shard(0), bias="1 H M 5", bias_gradient=Partial(), term="query"),
    Case("heads, values of queries", _split(1), Shard(1), bias="1 Hkv M 5", bias_at=Shard(1), bias_gradient=Shard(1),
         sizes=GQA, term="query"),
    Case("heads, values of all heads and starts", _split(1), Shard(1), bias="B 1 M 5", bias_gradient=Partial(),
         term="starts"),
    Case("batch, starts of the batch", _split(0), Shard(0), bias="B 1 M 5", bias_at=Shard(0), term="starts"),
    Case("the SDPA door", _split(1), Shard(1), bias="1 H M N", bias_at=Shard(1), bias_gradient=Shard(1), door="sdpa"),
    Case("the SDPA door, batch", _split(0), Shard(0), mask="B 1 1 N", mask_at=Shard(0), door="sdpa"),
]  # fmt: skip


def _call(case: Case, q, k, v, bias, mask, sink):
    if case.door == "sdpa":
        return scaled_dot_product_attention(q, k, v, mask if bias is None else bias), None
    if case.term:
        start = {"query": None, "starts": torch.arange(case.size("B"))}[case.term]
        if start is not None and isinstance(q, DTensor):
            start = distribute_tensor(start, q.device_mesh, [WHOLE])
        bias = RelativeBias(bias, lo=-2, outside="clamp", query_start=start)
    found = attention(q, k, v, bias=bias, mask=mask, sink=sink, causal=case.causal, return_lse=case.lse)
    return found if case.lse else (found, None)


def _loss(o, lse):
    return o.square().sum() + (0.0 if lse is None else lse.sin().sum())


def check(case: Case, mesh) -> None:
    torch.manual_seed(0)
    shapes = {
        "q": "B H M 8",
        "k": "B Hkv N 8",
        "v": "B Hkv N 12",
        "bias": case.bias,
        "mask": case.mask,
        "sink": case.sink,
    }
    places = {**dict(zip("qkv", case.qkv, strict=True)), "bias": case.bias_at, "mask": case.mask_at,
              "sink": case.sink_at}  # fmt: skip
    plain, spread = {}, {}
    for name, axes in shapes.items():
        if axes is None:
            plain[name] = spread[name] = None
            continue
        shape = tuple(case.size(axis) for axis in axes.split())
        x = torch.rand(shape) < 0.7 if name == "mask" else torch.randn(shape, dtype=torch.float64)
        trained = name != "mask" and name not in case.frozen
        plain[name] = x.clone().requires_grad_(trained)
        if places[name] == Partial():
            spread[name] = DTensor.from_local(x / mesh.size(), mesh, [Partial()]).requires_grad_(trained)
        else:
            spread[name] = distribute_tensor(x, mesh, [places[name]]).requires_grad_(trained)
    o, lse = _call(case, **spread)
    expected_o, expected_lse = _call(case, **plain)
    assert case.o is None or o.placements == (case.o,), o.placements
    torch.testing.assert_close(o.full_tensor(), expected_o)
    if lse is not None:
        torch.testing.assert_close(lse.full_tensor(), expected_lse)
    _loss(o, lse).backward()
    _loss(expected_o, expected_lse).backward()
    at = {"q": case.o, "k": case.kv_gradient or case.o, "v": case.kv_gradient or case.o, "bias": case.bias_gradient,
          "sink": case.sink_gradient}  # fmt: skip
    for name, x in plain.items():
        if x is None:
            continue
        grad = spread[name].grad
        assert (grad is None) == (x.grad is None), name
        if grad is not None:
            assert at[name] is None or grad.placements == (at[name],), (name, grad.placements)
            torch.testing.assert_close(grad.full_tensor(), x.grad, msg=lambda text, name=name: f"d{name}: {text}")


def run(rank: int, size: int, store: str) -> None:
    """Writes what is wrong with each case; nothing for one that is right."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    wrong = {}
    for case in CASES:
        try:
            check(case, mesh)
        except (AssertionError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            wrong[case.name] = f"{type(error).__name__}: {error}"
    Path(f"{store}.{rank}").write_bytes(pickle.dumps(wrong))
    dist.destroy_process_group()
