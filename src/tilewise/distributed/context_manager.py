"""Detection of `torch.distributed.tensor.experimental.context_parallel`, PyTorch's context manager.

The manager replaces PyTorch's scaled_dot_product_attention and shards given buffers. Nothing public tells that it is
active, or its mesh. The replacement's closure holds the mesh, and its module's options say how the sequence is split;
if a version of PyTorch differs, the call is an error.
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
    """The mesh over which the active context manager splits the sequence, and how it balances the load."""

    mesh: DeviceMesh
    load_balancer: LoadBalancer


def active() -> Active | None:
    """Return the mesh and load balancer of PyTorch's active context manager; None outside of one.

    Raises:
        NotImplementedError: it is active, but its mesh or options are not found where this PyTorch has them.
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
