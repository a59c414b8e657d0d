"""The operator ``tilewise::drawn_seed``: a dropout seed that a compiled backward does not draw again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import traceback
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy

from tilewise.operator.custom_op import composed_operator

_BITS = 62


def drawn_seed(q: Tensor) -> Tensor:
    """Draw a seed (2,), int64, from torch's generator on q's device, without host synchronization."""
    # Within a transform torch.randint follows vmap's ``randomness``.
    if (is_compiling() or is_in_torch_dispatch_mode()) and not torch._C._are_functorch_transforms_active():
        seed: Tensor = torch.ops.tilewise.drawn_seed(q)
        return seed
    return torch.randint(1 << _BITS, (2,), dtype=torch.int64, device=q.device)


def _draw(q: Tensor) -> Tensor:
    """Draw the numbers that torch.randint draws.

    AOTAutograd's partitioner recomputes random operators in the backward if ``activation_memory_budget`` is below 1,
    with other numbers than in the forward (pytorch#190758). It never merges two ``aten.empty``, so two calls draw two
    seeds. Inductor does not replace ``aten.random`` by its own generator, whose nodes have no mark.
    """
    with _kept():
        return torch.ops.aten.random.to(torch.empty(2, dtype=torch.int64, device=q.device), 1 << _BITS)


@contextmanager
def _kept() -> Iterator[None]:
    """Mark the traced nodes as saved for the backward. With a budget of 0 the partitioner saves only the inputs of the
    graph; if told to recompute, it then restores the generator's state, as for activation checkpointing."""
    from torch._functorch import config  # imported only to compile

    keep = config.activation_memory_budget > 0
    meta = traceback.current_meta
    before = {"recompute": meta["recompute"]} if "recompute" in meta else {}
    meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        del meta["recompute"]
        meta.update(before)


composed_operator("drawn_seed(Tensor q) -> Tensor", _draw)
