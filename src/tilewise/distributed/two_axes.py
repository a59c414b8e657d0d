"""Context parallelism on a mesh of two axes: rows are traded for heads along the second, keys move along the first.

Rank r of R = A B, counted along the second axis first, has the r-th part of the sequence, or the r-th head and tail.
After the trade the B ranks of a mesh row have, each for its own heads, the row's one of A parts, or head and tail: a
call on one axis with fewer heads. So a ring has A steps, and the number of heads limits B alone.

Source: unified sequence parallelism (arXiv 2405.07719).
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.agreement import Description, agree, agreed
from tilewise.distributed.layout import BALANCERS, LoadBalancer, Ranks, Split
from tilewise.distributed.operands import ShardedCall

METHODS = ("ring", "all_gather")


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """This process's ranks along each axis, and among all, which have no process group."""

    across: Ranks  # along the first axis
    inside: Ranks  # along the second axis
    all: Ranks

    @classmethod
    def of(cls, mesh: DeviceMesh, load_balancer: LoadBalancer) -> MeshAxes:
        """Return the ranks of a mesh of two axes; raise a ValueError that names the mesh or the load balancer."""
        if mesh.get_coordinate() is None:
            raise ValueError(f"mesh: this process, rank {dist.get_rank()}, is not in it: {mesh}")
        if load_balancer not in BALANCERS:
            raise ValueError(f"load_balancer: must be None or 'head_tail', got {load_balancer!r}")
        across, inside = (Ranks.of_group(mesh.get_group(n), mesh.device_type, load_balancer) for n in (0, 1))
        split = Split(across.size * inside.size, across.split.pieces)
        rank = across.rank * inside.size + inside.rank
        return cls(across, inside, Ranks(None, rank, split, mesh.device_type))

    def agreed(self, description: Description) -> str | None:
        return agreed(self.across, description)

    def agree(self, description: Description | None, method: str | None, failure: Exception | None) -> None:
        """Raise an error of one rank on all ranks of its mesh row, then on those of the other rows."""
        try:
            agree(self.inside, description, method, failure)
        except (ValueError, TypeError, NotImplementedError) as error:
            failure = error
        agree(self.across, description, method, failure)

    def method(self, method: str, call: ShardedCall) -> str:
        """Return the method along the first axis; raise if the call is not supported."""
        for name, heads in (("query heads", call.sizes.H), ("key/value heads", call.sizes.Hkv)):
            if heads % self.inside.size:
                raise ValueError(f"mesh: the {heads} {name} do not divide by the {self.inside.size} of its second axis")
        if method not in ("auto", *METHODS):
            raise ValueError(f"method: must be 'auto', 'ring' or 'all_gather' with a mesh of two axes, got {method!r}")
        if call.options.dropout_p:
            raise NotImplementedError("dropout_p: dropout is not taken with a mesh of two axes")
        return METHODS[0] if method == "auto" else method
