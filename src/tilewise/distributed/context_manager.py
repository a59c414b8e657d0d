"""Calls within `torch.distributed.tensor.experimental.context_parallel`, which replaces PyTorch's
scaled_dot_product_attention and shards the buffers that it is given.

Nothing public says that it is active, nor with which mesh. But the function that it puts in PyTorch's place keeps the
mesh, and its options say how the sequence is split; where a PyTorch does it otherwise the call is an error.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from tilewise.distributed.layout import LoadBalancer

_HOME = "torch.distributed.tensor.experimental"
_INSTEAD = "use tilewise.distributed.context_parallel_attention, with shards that tilewise.distributed.shard makes"


class Active(NamedTuple):
    """mesh: over which the sequence is split. load_balancer: how."""

    mesh: DeviceMesh
    load_balancer: LoadBalancer


def active() -> Active | None:
    """What PyTorch's context manager is at now; None outside of one.

    Raises:
        NotImplementedError: it is active, and does not say how as this PyTorch's and older ones do.
    """
    now: Any = functional.scaled_dot_product_attention
    if type(now) is not FunctionType or not str(now.__module__).startswith(_HOME):
        return None
    meshes = [x for x in inspect.getclosurevars(now).nonlocals.values() if isinstance(x, DeviceMesh)]
    options = now.__globals__.get("_cp_options")
    balanced = getattr(options, "enable_load_balance", None)
    if len(meshes) != 1 or not isinstance(balanced, bool):
        raise NotImplementedError(f"query: PyTorch's context_parallel does not say here what its mesh is; {_INSTEAD}")
    return Active(meshes[0], "head_tail" if balanced else None)
