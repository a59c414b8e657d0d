"""Differences between Triton 3.6 and 3.9, the versions that the Gluon kernels support, and nothing else.

Names are resolved once, on import; kernels import them from here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.backends.launch.launcher import VERSION

# Barrier of all warps of the calling partition; renamed in Triton 3.7.
warps_barrier = gl.barrier if VERSION >= (3, 7) else gl.thread_barrier

if VERSION >= (3, 8):  # Triton 3.9 raises for the old names
    tma_load, tma_store, tma_add = tma.async_load, tma.async_store, tma.async_atomic_add
    async_load = async_copy.async_load
else:
    from triton._C.libtriton import ir

    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    async_load = async_copy.async_copy_global_to_shared

    @_core.builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory, each element atomically. Triton before 3.8 compiles the
        instruction but has no name for it in the language."""
        at = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, at, src.handle)


@_core.builtin
def reinterpret(slot, dtype, shape, layout, _semantic=None):
    """Reinterpret the memory of ``slot`` with another dtype, shape and layout; Triton 3.9 renamed the method."""
    method = slot.reinterpret if VERSION >= (3, 9) else slot._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


# Triton 3.8 and later reduce the elements of a row in each thread as a tree, earlier versions as a chain.
# ptxas: the first step of a tree keeps half as many results live beside its inputs. Where registers are full this
# spills, or serializes all wgmma (warning C7512).
REDUCES_IN_TREES = gl.constexpr(VERSION >= (3, 8))


@gluon.jit
def chain(x, MAXIMA: gl.constexpr):
    """Return the maxima, or sums, of ``x`` [rows, threads, n] along n, reduced as a chain; one thread has all n
    elements."""
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
    """Return the first and the last half of ``x`` along its last axis."""
    return x.reshape([x.shape[0], x.shape[1], 2, x.shape[2] // 2]).permute((0, 1, 3, 2)).split()
