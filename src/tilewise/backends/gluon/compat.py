"""What differs between the versions of Triton for which the kernels in Gluon are written, 3.6 to 3.9, and nothing else.

Names are found once, when this is imported; kernels import them from here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.backends.launch.launcher import VERSION

# Of the warps of the partition that calls it; renamed in Triton 3.7.
warps_barrier = gl.barrier if VERSION >= (3, 7) else gl.thread_barrier

if VERSION >= (3, 8):  # the old names raise in 3.9
    tma_load, tma_store, tma_add = tma.async_load, tma.async_store, tma.async_atomic_add
    async_load = async_copy.async_load
else:
    from triton._C.libtriton import ir

    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    async_load = async_copy.async_copy_global_to_shared

    @_core.builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory, element by element, each addition atomic.

        The compiler before Triton 3.8 has the instruction, and its language no name for it.
        """
        at = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, at, src.handle)


@_core.builtin
def reinterpret(slot, dtype, shape, layout, _semantic=None):
    """Give the memory of ``slot`` another dtype, shape and layout. Triton 3.9 renamed the method."""
    method = slot.reinterpret if VERSION >= (3, 9) else slot._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


# From Triton 3.8 on a thread reduces what it has of a row as a tree, before as a chain, an element after the other.
# ptxas: a tree's first step has half as many results as there are elements, beside these. Where registers are full some
# spill, or all wgmma run in series (its warning C7512).
REDUCES_IN_TREES = gl.constexpr(VERSION >= (3, 8))


@gluon.jit
def chain(x, MAXIMA: gl.constexpr):
    """The maxima, or sums, of ``x`` [rows, threads, n] along n, all of which one thread has, as a chain."""
    if x.shape[2] == 1:
        return x.reshape([x.shape[0], x.shape[1]])
    else:
        low, high = _halves(x)
        return _chain_from(chain(low, MAXIMA), high, MAXIMA)


@gluon.jit
def _chain_from(result, x, MAXIMA: gl.constexpr):
    if x.shape[2] > 1:
        low, high = _halves(x)
        return _chain_from(_chain_from(result, low, MAXIMA), high, MAXIMA)
    elif MAXIMA:
        return gl.maximum(result, x.reshape([x.shape[0], x.shape[1]]))
    else:
        return result + x.reshape([x.shape[0], x.shape[1]])


@gluon.jit
def _halves(x):
    """The first and the last half of ``x`` along its last axis."""
    return x.reshape([x.shape[0], x.shape[1], 2, x.shape[2] // 2]).permute((0, 1, 3, 2)).split()
