"""What of a call over ranks outlives it: what test_distributed.py's processes run."""

from __future__ import annotations

from functools import partial
from typing import Any

from distributed_child import METHODS
from memory_helpers import Call, leftovers
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed import context_parallel_attention, context_parallel_varlen_attention


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


def checks_of_memory() -> dict[str, tuple]:
    return {"memory": (check_memory,)}
