"""attention() on DTensors: placements, results and gradients in two processes, and what a compiler makes of them."""

import subprocess
import sys

import pytest
import sharding_child
import torch
import torch.distributed as dist
from processes import processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilewise import attention, matmul, scaled_dot_product_attention
from tilewise.backends import Inputs
from tilewise.operator.autograd import attention_op
from tilewise.spec.score import Band, Score


def test_two_processes_get_what_one_gets(tmp_path):
    """Each case of sharding_child.py: one failure tells of all."""
    assert processes(sharding_child.run, 2, tmp_path / "store", 120.0) == [{}, {}]


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


def test_dtensor_is_not_imported_for_calls_without_one():
    code = """
import sys, torch, tilewise
had = "torch.distributed.tensor" in sys.modules
x = torch.zeros(1, 1, 2, 8)
tilewise.attention(x, x, x)
tilewise.attention(x.to("meta"), x.to("meta"), x.to("meta"))
print(had, "torch.distributed.tensor" in sys.modules, "torch.utils.flop_counter" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3
