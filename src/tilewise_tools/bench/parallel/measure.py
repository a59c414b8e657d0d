"""Clock over all ranks, memory measurement, a mesh without transfers, and rates of transfers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise_tools.bench.parallel.cases import ParallelCase
from tilewise_tools.bench.timing import synchronize

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_FEWEST, _MOST = 2, 10  # repetitions
LONG = 5.0  # seconds; a longer step is measured once
Sample = tuple[float, float, float]  # seconds of a forward, of a backward, and of both


class Team:
    """This process's rank and its communication with the others."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        kind = mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self._token = torch.zeros(1, device=self.device)

    def meet(self) -> None:
        """Wait for all ranks; on a GPU the stream waits, without host synchronization."""
        dist.all_reduce(self._token, group=self.mesh.get_group())

    def tell(self, found: Any, source: int = 0) -> Any:
        """Broadcast the object ``found`` of rank ``source`` to every rank."""
        box = [found]
        dist.broadcast_object_list(box, src=source, group=self.mesh.get_group(), device=self.device)
        return box[0]

    def all(self, mine: Any) -> list[Any]:
        """Gather the object ``mine`` of each rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.mesh.get_group())
        return found


class Step(NamedTuple):
    """A forward and a backward of one provider on one case; ``leaves`` require grad."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    do: Tensor

    def __call__(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        o = self.forward()
        return o.detach(), torch.autograd.grad(o, self.leaves, self.do)

    def sample(self, device: torch.device, meet: Callable[[], None]) -> Sample:
        meet()
        if device.type != "cuda":
            begin = time.perf_counter()
            o = self.forward()
            middle = time.perf_counter()
            torch.autograd.grad(o, self.leaves, self.do)
            end = time.perf_counter()
            return middle - begin, end - middle, end - begin
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        o = self.forward()
        marks[1].record()
        torch.autograd.grad(o, self.leaves, self.do)
        marks[2].record()
        marks[2].synchronize()
        first, second = marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3
        return first, second, first + second


def samples(
    step: Step, device: torch.device, seconds: float, *, meet: Callable[[], None] = lambda: None,
    agreed: Callable[[int], int] = lambda count: count,
) -> list[Sample]:  # fmt: skip
    """Return samples of a step after one or two warm-up repetitions, which may compile.

    A step longer than `LONG` is sampled once. ``meet``: called before each repetition. ``agreed``: turns this rank's
    number of repetitions into the number for all ranks.
    """
    count = 0
    for _ in range(2):
        meet()
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        took = max(time.perf_counter() - begin, 1e-6)
        count = agreed(-1 if took > LONG else min(int(seconds / took), _MOST))
        if count >= _FEWEST:
            break
    count = 1 if count < 0 else max(count, _FEWEST)
    return [step.sample(device, meet) for _ in range(count)]


def slowest(ranks: Sequence[list[Sample]]) -> list[Sample]:
    """Return the slowest rank's time of each repetition."""
    repetitions = zip(*ranks, strict=True)
    columns = [[max(times) for times in zip(*rows, strict=True)] for rows in repetitions]
    return [(forward, backward, both) for forward, backward, both in columns]


def step_of(prepare: Callable[[dict[str, Tensor]], Callable[[], Tensor]], x: dict[str, Tensor], do: Tensor) -> Step:
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    return Step(prepare(leaves), list(leaves.values()), do)


def held(device: torch.device) -> int:
    """Return the allocated bytes after garbage collection; 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def peak_bytes(step: Step, device: torch.device, before: int) -> int | None:
    """Return the peak memory of a step, with inputs and gradients, beyond ``before``; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


MOST_CTAS = 8  # per NCCL collective, see docs/distributed.md


def quick_lanes(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same ranks whose collectives have high priority and use few SMs.

    Every rank must call it. Returns ``mesh`` itself unless its backend is NCCL.
    """
    if dist.get_backend(mesh.get_group()) != "nccl":
        return mesh
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MOST_CTAS
    return DeviceMesh.from_group(dist.new_group(pg_options=options), mesh.device_type)


def silent(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same ranks whose transfers do nothing: each rank computes on arbitrary data.

    Every rank must call it.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers it

    group = dist.new_group(backend="fake")
    return DeviceMesh.from_group(group, mesh.device_type)


class Transfers(NamedTuple):
    """Bytes per second that each rank sends (and receives), in collectives of ``bytes`` bytes in total."""

    bytes: int
    all_reduce: float  # NCCL's bus bandwidth: 2 (N - 1) / N of the tensor
    all_gather: float
    reduce_scatter: float
    all_to_all: float
    ring: float  # to the next rank, while receiving from the previous one
    latency_s: float  # of an all_reduce of one number


def transfers(team: Team) -> Transfers:
    """Measure the rates of transfers, with 256 MiB (bfloat16) on GPUs and 1 MiB (float32) on CPUs."""
    size, device, group = team.size, team.device, team.mesh.get_group()
    total = (256 << 20) if device.type == "cuda" else (1 << 20)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = total // dtype.itemsize // size * size
    total = count * dtype.itemsize
    whole, part = torch.zeros(count, device=device, dtype=dtype), torch.zeros(count // size, device=device, dtype=dtype)
    other = torch.zeros_like(whole)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    following, before = (dist.get_global_rank(group, (team.rank + n) % size) for n in (1, -1))

    def ring() -> None:
        operations = [dist.P2POp(dist.isend, whole, following, group), dist.P2POp(dist.irecv, other, before, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    shared = total * (size - 1) / size
    steps: dict[str, tuple[Callable[[], object], float]] = {
        "all_reduce": (lambda: dist.all_reduce(whole, group=group), 2 * shared),
        "all_gather": (lambda: _all_gather(whole, part, group=group), shared),
        "reduce_scatter": (lambda: scatter(part, whole, group=group), shared),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole, group=group), shared),
        "ring": (ring, float(total)),
    }
    rates = {name: sent / _seconds(team, step) for name, (step, sent) in steps.items()}
    return Transfers(total, **rates, latency_s=_seconds(team, team.meet))


def _seconds(team: Team, step: Callable[[], object], repeats: int = 10) -> float:
    """Return the mean time of a step on the slowest rank, in seconds."""
    step()
    synchronize(team.device)
    team.meet()
    synchronize(team.device)
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(team.device)
    return float(max(team.all((time.perf_counter() - begin) / repeats)))


def errors(case: ParallelCase, found: Sequence[Tensor], right: Sequence[Tensor]) -> dict[str, float]:
    """Return |found - right| / |right| of o and each gradient."""
    names = ["o", *(f"d{name}" for name in case.shapes())]
    return {name: float((x.double() - y).norm() / y.norm()) for name, x, y in zip(names, found, right, strict=True)}
