"""attention() on DTensors: placements, results and gradients in two processes, and what a compiler makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from processes import failures, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilewise import attention, matmul, scaled_dot_product_attention
from tilewise.backends import Inputs
from tilewise.bias import RelativeBias
from tilewise.operator.autograd import attention_op
from tilewise.spec.score import Band, Score

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


def check_all(mesh) -> dict[str, str]:
    return failures(mesh, {case.name: (check, case) for case in CASES})


def test_two_processes_get_what_one_gets(tmp_path):
    """One failure tells of all."""
    assert ranks(check_all, 2, tmp_path) == [{}, {}]


@pytest.fixture
def fake_devices():
    """Makes a mesh of devices of which this process is the first and the others do nothing."""

    def mesh(*shape):
        count = torch.Size(shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
        return init_device_mesh("cpu", shape)

    yield mesh
    dist.destroy_process_group()


def placed(mesh, shape, placements, requires_grad=True):
    """A DTensor of global ``shape``, of which only its places are of interest."""
    x = torch.zeros(shape)
    for axis, place in enumerate(placements):
        if isinstance(place, Shard):
            x = x.chunk(mesh.size(axis), place.dim)[0]
    return DTensor.from_local(x, mesh, placements).requires_grad_(requires_grad)


def test_a_mesh_of_two_axes(fake_devices):
    """Batches along one axis and heads along the other, which is how models are trained."""
    mesh = fake_devices(2, 4)
    at = [Shard(0), Shard(1)]
    q, k, v = (placed(mesh, (4, heads, 6, 8), at) for heads in (8, 4, 4))
    bias = placed(mesh, (1, 8, 6, 6), [Replicate(), Shard(1)])
    o = attention(q, k, v, bias=bias, causal=True)
    o.sum().backward()
    assert list(o.placements) == at
    assert [list(x.grad.placements) for x in (q, k, v)] == [at] * 3
    assert list(bias.grad.placements) == [Partial(), Shard(1)]


@pytest.mark.parametrize(
    ("kv_heads", "mesh", "together"),
    [
        (8, (4,), True),
        (4, (8, 4), True),  # over 4 devices or not at all
        (8, (2, 2, 2), True),
        (3, (2,), False),
        (6, (2, 4), False),
        (12, (2, 4), False),  # over 2 and over 4, but not over both
        (24, (2, 4), True),
        (5, (8,), True),
    ],
)
def test_groups_of_heads_stay_together(kv_heads, mesh, together):
    from tilewise.operator.sharding import groups_stay_together  # which the tests above leave to the calls

    assert groups_stay_together(kv_heads, mesh) is together


def test_compiled(fake_devices):
    torch._dynamo.reset()
    mesh = fake_devices(2)
    q, k, v = (placed(mesh, (2, 4, 6, 8), [Shard(1)]) for _ in range(3))
    bias = placed(mesh, (1, 1, 6, 6), [Replicate()])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q, k, v, bias):
        return attention(q, k, v, bias=bias, causal=True)

    o = call(q, k, v, bias)
    o.sum().backward()
    assert list(o.placements) == [Shard(1)]
    assert list(bias.grad.placements) == [Partial()]


@pytest.mark.parametrize("call", [attention, scaled_dot_product_attention])
def test_dropout_is_refused(fake_devices, call):
    """Each device would begin to count sequences and heads at 0."""
    mesh = fake_devices(2)
    q, k, v = (placed(mesh, (2, 4, 6, 8), [Shard(1)]) for _ in range(3))
    with pytest.raises(NotImplementedError, match="dropout_p: dropout takes no DTensors"):
        call(q, k, v, dropout_p=0.1)
    seed = DTensor.from_local(torch.tensor([1, 2]), mesh, [Replicate()])
    score = Score.of(Band(), 8, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="seed: dropout takes no DTensors"):
        attention_op(Inputs(q, k, v, None, None, seed=seed), score, False, "auto")


def test_other_operators_name_themselves(fake_devices):
    a = placed(fake_devices(2), (4, 4), [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"tilewise\.matmul\.default does not have a sharding strategy"):
        matmul(a, a)
