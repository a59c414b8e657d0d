"""`tilewise.scaled_dot_product_attention` of split sequences: DTensors, and PyTorch's context_parallel.

PyTorch's context manager replaces its scaled_dot_product_attention and shards given buffers. Nothing public tells that
it is active, or its mesh. The replacement's closure holds the mesh, and its module's options say how the sequence is
split; if a version of PyTorch differs, the call is an error.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from tilewise.distributed.api import context_parallel_attention
from tilewise.distributed.dtensor import attention_of_sequences
from tilewise.distributed.layout import LoadBalancer
from tilewise.distributed.operands import Arguments, CallOptions
from tilewise.spec.tensors import is_causal_bias, is_dtensor

_HOME = "torch.distributed.tensor.experimental"
_INSTEAD = "use tilewise.distributed.context_parallel_attention, with shards that tilewise.distributed.shard makes"
_MANAGER = "within torch.distributed.tensor.experimental.context_parallel"


def sdpa_of_shards(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor | None:  # fmt: skip
    """Return o of a split sequence; None outside of the context manager if q, k and v are not DTensors split as needed.

    Raises:
        ValueError, TypeError, NotImplementedError: within the context manager, a call that
            `context_parallel_attention` does not support.
    """
    now = active()
    split = is_dtensor(query)
    reason = _declined(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is not None:
        if now is None:
            return None
        raise NotImplementedError(f"{reason} {_MANAGER}")
    is_bias = attn_mask is not None and attn_mask.dtype != torch.bool
    bias, mask = (attn_mask, None) if is_bias else (None, attn_mask)
    if split:
        options = CallOptions(is_causal, None, scale, None, None, None)
        given = Arguments((query, key, value), bias, mask, None, None, options, {})
        found = attention_of_sequences(given, None if now is None else now[1])
        if found is None and now is not None:
            raise NotImplementedError(f"query: DTensors that are not all split evenly along the sequence {_MANAGER}")
        return None if found is None else found[0]
    assert now is not None
    mesh, balancer = now
    terms: Any = {"bias": bias, "mask": mask, "causal": is_causal, "scale": scale}
    o = context_parallel_attention(query, key, value, mesh=mesh, load_balancer=balancer, **terms)
    assert isinstance(o, Tensor)
    return o


def _declined(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    enable_gqa: bool,
) -> str | None:  # fmt: skip
    """Return why a call is not supported, naming the argument; None if it is."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"{name}: must have 4 dimensions (B, H, L, E), got shape {tuple(x.shape)}"
    if key.shape[1] != query.shape[1] and not enable_gqa:
        return f"key: has {key.shape[1]} heads and query {query.shape[1]}, which takes enable_gqa=True"
    if is_causal and query.shape[2] != key.shape[2]:
        return f"is_causal: needs as many keys as queries, got {key.shape[2]} and {query.shape[2]},"
    if attn_mask is not None and is_causal_bias(attn_mask):
        return "attn_mask: a CausalBias has lengths of its own; pass is_causal=True"
    if dropout_p != 0:
        return "dropout_p: dropout is not taken"
    if query.dtype == torch.float32 and query.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return "query: float32 would be rounded to TF32, which this function never does; turn allow_tf32 off"
    return None


def active() -> tuple[DeviceMesh, LoadBalancer] | None:
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
    return meshes[0], "head_tail" if balanced else None
