"""Gluon kernels for NVIDIA Hopper GPUs (sm_90a). The Triton backend computes the gradients that they do not support.

Nothing here imports triton until a problem is run: the plan calls `declines` on machines without triton.
"""

from __future__ import annotations

import os

import torch

from tilewise.backends import declines_gpu, has_triton, no_parts
from tilewise.backends.gluon import RAGGED_ROWS
from tilewise.backends.gluon.sm90.common.copied_bias import (
    copied,
    copied_bytes,
    is_copied,
    is_row_of_16_bytes,
    pads_gradient,
)
from tilewise.backends.gluon.toeplitz import toeplitz_constants
from tilewise.backends.gluon.values import as_matrix, ends
from tilewise.backends.protocol import Backward, Forward, Inputs, Needs, Outputs, Pass
from tilewise.backends.short_sequences import fit_tiles
from tilewise.quantities import count, quantity
from tilewise.spec.operands import PART_WORDS, BiasKind, PartOperands, TensorSpec
from tilewise.spec.problem import Problem


def declines_device(device: str, capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
    """Return why no Gluon kernel for Hopper runs on this device, whatever the problem; None if one may."""
    if not has_triton():
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter does not run Gluon"
    if capability is None:
        return f"needs a CUDA device, the tensors are on {device}"
    if capability != (9, 0):
        return f"needs compute capability 9.0, this GPU has {'.'.join(map(str, capability))}"
    reason = declines_gpu(capability)
    if reason is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"has kernels for float16 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
    return None


def declines(problem: Problem, work: Pass = "forward") -> str | None:
    if problem.totals is not None:
        reason = _declines_packed(problem, work)
        if reason is not None:
            return reason
    return _declines_forward(problem) if work == "forward" else _declines_backward(problem)


def _declines_packed(problem: Problem, work: Pass) -> str | None:
    if work == "backward" and problem.sink_grad:
        return "has no kernel for the gradient of a packed batch's sink"
    if problem.score.dropout:
        return "has no kernel for dropout of a packed batch"
    bias, packed = problem.bias, problem.score.packed
    if problem.mask is not None:
        return "takes no mask beside a packed batch"
    if bias is not None and (packed is None or "bias" not in packed.forms):
        return "takes no ragged or padded bias of a packed batch, only one number for each packed key or query"
    if problem.totals is not None and max(problem.totals) > RAGGED_ROWS:
        return f"counts the rows of a packed batch up to {RAGGED_ROWS}"
    return None


def prefers(problem: Problem) -> str | None:
    if problem.few_queries:
        return f"has tiles of 128 queries and does not split the keys: too slow for {problem.queries}"
    if fit_tiles(problem):
        return "has tiles of 128 queries and several launches: triton computes each of many short sequences in one tile"
    return None


def _declines_forward(problem: Problem) -> str | None:
    reason = declines_device(problem.device, problem.capability, problem.dtype)
    if reason is not None:
        return reason
    if max(problem.head_dim, problem.value_dim) > 256:
        return f"has kernels up to 256 dimensions, not for {max(problem.head_dim, problem.value_dim)}"
    bias = problem.bias
    if bias is not None and bias.dtype == torch.float64:
        return "reads a bias in float16, bfloat16 or float32, not float64"
    if problem.parts is not None:
        reason = _declines_parts(problem, problem.parts)
        if reason is not None:
            return reason
    biased = (bias is not None and bias.cols > 1) or problem.parts is not None
    if problem.score.statistics.max_scores_unbiased and biased:
        return "starts its scores from the bias, and finds no maximum without it"
    if problem.sink is not None:
        if problem.sink.dtype == torch.float64:
            return "reads a sink in float16, bfloat16 or float32, not float64"
        if bias is not None and bias.cols == 1:
            return "takes no sink beside a bias that is constant along the keys"
    by_pointers = (bias is not None and bias.axes != BiasKind.MATRIX) or is_copied(problem)
    irregular = [name for name in problem.irregular if name != "do" and (name != "bias" or not by_pointers)]
    if irregular:
        return (
            f"reads by TMA, which cannot describe {', '.join(irregular)}: the last dimension must be contiguous, the "
            "address and every other stride a multiple of 16 bytes, no stride 0"
        )
    if problem.value_dim % 8:
        return f"writes o by TMA, in rows of a multiple of 16 bytes: not {problem.value_dim} elements"
    return None


def _declines_parts(problem: Problem, parts: PartOperands) -> str | None:
    """Return why these bias terms are not supported. Values per query are read like a matrix, at positions known on the
    host."""
    if parts.toeplitz is not None and len(parts.named()) == 1:
        return _declines_toeplitz(problem, parts.toeplitz)
    values, distances = parts.query, problem.score.query
    if values is None or distances is None or len(parts.named()) > 1:
        return no_parts(parts)
    name = PART_WORDS["query"]
    packed = problem.score.packed
    if packed is not None and "query_from_end" not in packed.forms:
        return f"reads {name} of a packed batch whose last query is at its last key: without query_start, key_start"
    if (parts.shifts and packed is None) or parts.buckets:
        what = "through buckets" if parts.buckets else "from a start that is a tensor"
        return f"reads {name} at positions that the host knows, one entry for each distance: not {what}"
    if distances.outside == "clamp" or (distances.outside == "hidden" and any(ends(problem))):
        return f"reads {name} that is 0 outside its distances, or masked by the window: not {distances.outside!r}"
    beside = {"another bias": problem.bias, "a mask": problem.mask, "a softcap": problem.score.transformed or None}
    found = [word for word, x in beside.items() if x is not None]
    if found:
        return f"takes {name} alone: not beside {' and '.join(found)}"
    if values.dtype == torch.float64:
        return f"reads {name} in float16, bfloat16 or float32, not float64"
    if max(problem.head_dim, problem.value_dim) > 128:
        return f"reads {name} up to 128 dimensions"
    if min(problem.queries, problem.keys) == 1:
        return f"reads {name} for two queries and keys or more"
    if max(abs(distances.lo), abs(distances.hi)) >= 2**30:
        return "counts distances in 32 bits"
    return None


def _declines_toeplitz(problem: Problem, vector: TensorSpec) -> str | None:
    name = PART_WORDS["toeplitz"]
    if problem.score.toeplitz is None:
        return f"reads {name} where it is known what far distances have"
    if problem.totals is not None:
        return f"reads {name} of dense batches, not of a packed one"
    beside = {"another bias": problem.bias, "a softcap": problem.score.softcap}
    found = [word for word, x in beside.items() if x is not None]
    if found:
        return f"takes {name} alone: not beside {' and '.join(found)}"
    if vector.dtype == torch.float64:
        return f"reads {name} in float32, not float64"
    if max(problem.head_dim, problem.value_dim) > 128:
        return f"reads {name} up to 128 dimensions"
    if max(problem.queries, problem.keys) >= 2**28:
        return "counts distances in 32 bits"
    return None


def _declines_backward(problem: Problem) -> str | None:
    """Return why the backward of a problem whose forward is supported is not; None if it is."""
    d, dv = problem.head_dim, problem.value_dim
    if d % 8:
        return f"writes gradients by TMA, in rows of a multiple of 16 bytes: not {d} elements"
    if "do" in problem.irregular:
        return "reads do by TMA, which cannot describe it"
    if problem.totals is None:
        rows = problem.batch * (problem.queries + 128)  # a sequence may end with a tile that has one row
    else:
        rows = max(problem.totals) + 128 * problem.batch
    numbers = 2 if problem.parts is None or problem.parts.toeplitz is None else 4  # per row, see `far_stats_kernel`
    if numbers * problem.heads * rows >= 2**31:
        return "counts the rows of all heads in 32 bits"
    mask, bias = problem.mask, problem.bias
    if problem.parts is not None and problem.parts.query is not None:
        return _declines_values_backward(problem, problem.parts.query)
    if problem.deterministic and problem.parts is not None and "toeplitz" in problem.parts.grads:
        return f"adds the gradient of {PART_WORDS['toeplitz']} in any order, not with deterministic=True"
    if mask is not None and mask.batch * mask.heads * -(-mask.rows // 64) * -(-problem.keys // 128) * 256 >= 2**31:
        return "counts the words of the bit-packed mask in 32 bits"
    if bias is None or bias.axes != BiasKind.MATRIX:
        return None
    if max(d, dv) > 128 and bias.dtype != problem.dtype and problem.deterministic:
        return (
            "has no shared memory left past 128 dimensions for a matrix bias of another dtype than q's, with "
            "deterministic=True"
        )
    if problem.bias_grad and not (is_row_of_16_bytes(bias) or pads_gradient(problem)):
        return f"writes dbias by TMA, in rows of a multiple of 16 bytes: not {bias.cols} elements"
    shared = not problem.broadcast_group(bias).single
    capped = problem.score.transformed
    if max(d, dv) > 128 and problem.bias_grad and shared and capped and problem.deterministic:
        return (
            "has no shared memory left past 128 dimensions for dbias of a bias that is shared, beside a softcap, with "
            "deterministic=True"
        )
    return None


def _declines_values_backward(problem: Problem, values: TensorSpec) -> str | None:
    name = PART_WORDS["query"]
    if values.dtype != problem.dtype:
        return f"differentiates {name} in q's dtype {problem.dtype}, not {values.dtype}"
    # With sharing, an entry would be a sum. Else it gets one nonzero number, which no order or rounding of sums
    # changes.
    if as_matrix(problem).bias_grad and not problem.broadcast_group(values).single:
        return f"differentiates {name} where no two batch elements or heads share them"
    return None


def tiles(problem: Problem) -> str:
    from tilewise.backends.gluon.sm90.common.config import backward_config, forward_config
    from tilewise.backends.gluon.sm90.forward.documents import as_packed

    c = forward_config(as_matrix(problem))
    scheduler = "a dynamic tile scheduler" if c.dynamic else "a grid-stride loop over the tiles"
    forward = (
        f"{c.block_m} queries x {c.block_n} keys, {count(c.warpgroups, 'consumer warpgroup')}, "
        f"{count(c.stages, 'stage')}, persistent programs with {scheduler}"
    )
    if as_packed(problem) is not None:
        forward += "; documents that are long as a packed batch"
    if is_copied(problem):
        size = quantity(copied_bytes(problem), "B")
        forward += f"; the bias is copied, to rows that begin at multiples of 16 bytes, {size}"
    if toeplitz_constants(problem, 2 * c.block_n)["UNDERFLOWS"]:
        forward += "; tiles whose probabilities underflow are left out, and counted as FLOPs like all"
    if (
        not problem.bias_grad
        or problem.totals is not None
        or problem.parts is not None
        or declines(problem, "backward")
    ):
        return forward
    from tilewise.backends.gluon.sm90.backward.launch import working_memory

    device = torch.device(problem.device if torch.cuda.is_available() else "meta")  # "meta" for a plan without this GPU
    parts = working_memory(problem, device)
    named = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in parts.items() if size)
    elements = backward_config(problem).elements
    beside = f" of {elements} batch elements side by side" if elements > 1 else ""
    return f"{forward}; the backward's programs{beside} take {quantity(sum(parts.values()), 'B')} of memory: {named}"


def _prepare_forward(problem: Problem, inputs: Inputs) -> Forward:
    from tilewise.backends.gluon.sm90.forward import launch

    if not is_copied(problem):
        return launch.HopperForward(problem, inputs)
    run = launch.HopperForward(problem, _with_copy(inputs))
    return lambda inputs: run(_with_copy(inputs))


def _prepare_backward(
    problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs
) -> Backward:
    from tilewise.backends.gluon.sm90.backward import launch as backward_launch

    if not is_copied(problem):
        return backward_launch.HopperBackward(problem, inputs, outputs, cotangents, needs)
    run = backward_launch.HopperBackward(problem, _with_copy(inputs), outputs, cotangents, needs)
    return lambda inputs, outputs, cotangents: run(_with_copy(inputs), outputs, cotangents)


def _with_copy(inputs: Inputs) -> Inputs:
    assert inputs.bias is not None
    return inputs._replace(bias=copied(inputs.bias))


prepare = {"forward": _prepare_forward, "backward": _prepare_backward}
