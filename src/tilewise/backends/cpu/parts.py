"""Operations on tiles: a fast matrix product, the exponential of a difference, masking with -inf."""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tilewise.backends import Outputs, lse_dtype
from tilewise.spec.problem import Problem
from tilewise.spec.rounding import with_low_bits
from tilewise.spec.tiles import visible_pairs

LOG2E = math.log2(math.e)
LARGE_PRODUCT = 1 << 22  # multiplications
HUGE_PAGE = 1 << 21  # bytes


def product(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """Return ``start + a @ b``, in place of ``start``, for tiles (T, m, k), (T, k, n) and (T, m, n).

    `torch.baddbmm` calls MKL, half as fast as oneDNN on AMD CPUs. There large float32 tiles use oneDNN, which compiles
    a kernel for each shape in the time of two such products.
    """
    large = a.shape[0] == 1 and a.shape[1] * a.shape[2] * b.shape[2] >= LARGE_PRODUCT
    if large and a.dtype == torch.float32 and _prefers_onednn():
        out = torch.ops.mkldnn._linear_pointwise(a[0], b[0].mT, None, "none", [], "").unsqueeze(0)
        return out if start is None else start.add_(out)
    return torch.bmm(a, b) if start is None else torch.baddbmm(start, a, b, out=start)


@cache
def _prefers_onednn() -> bool:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    usable = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return x86 and usable and not _is_intel()


def _is_intel() -> bool:
    """True if /proc/cpuinfo names an Intel CPU; False without this file."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "GenuineIntel" in path.read_text()


@cache
def keep_freed_tiles() -> None:
    """Make glibc keep the memory of freed tiles, so that new tiles do not take fresh, zeroed pages.

    Freeing a block raises the size below which glibc allocates from its heap; this block is never written.
    """
    torch.empty(1 << 24, dtype=torch.uint8, device="cpu")


def in_huge_pages(x: Tensor) -> Tensor:
    """Return the new tensor ``x``, in huge pages if it is large: creating small ones takes too long."""
    first = -x.data_ptr() % mmap.PAGESIZE
    size = (x.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and size >= HUGE_PAGE:
        libc = ctypes.CDLL(None)  # madvise is only a hint
        libc.madvise(ctypes.c_void_p(x.data_ptr() + first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return x


def exp_difference(s: Tensor, row: Tensor) -> Tensor:
    """Return ``exp(s - row)`` in place of ``s``; 0 where row = -inf (nothing visible so far).

    `torch.exp2` takes a quarter of the time of `torch.exp`, and the change of base no extra pass, except for huge rows
    (a bias of -1e9 at all keys), where the rounding of ``row * LOG2E`` exceeds the difference.
    """
    row = row.masked_fill(row == -torch.inf, 0.0)
    if _is_huge(row):
        return s.sub_(row).mul_(LOG2E).exp2_()
    return torch.add(row.mul_(-LOG2E), s, alpha=LOG2E, out=s).exp2_()


def exp_of_maxima(old: Tensor, new: Tensor) -> Tensor:
    """Return ``exp(old - new)``, rounded like `exp_difference`; exactly 1 where the maximum stays."""
    new = new.masked_fill(new == -torch.inf, 0.0)
    if _is_huge(new):
        return old.sub(new).mul_(LOG2E).exp2_()
    return old.mul(LOG2E).sub_(new.mul_(LOG2E)).exp2_()


def minus_delta(outputs: Outputs, cotangents: Outputs) -> Tensor:
    """Return ``dLSE - rowsum(dO∘O)``, (B, H, M), in the LSE's dtype."""
    dtype = lse_dtype(outputs.o.dtype)
    found = (cotangents.o.to(dtype) * with_low_bits(outputs.o, outputs.o_low)).sum(-1).neg_()
    return found if cotangents.lse is None else found.add_(cotangents.lse)


def is_coarse(lse: Tensor) -> bool:
    """True if some abs(lse) > 64, whose float32 rounding changes exp(s - lse) by up to 2^-18 or more."""
    return _exceeds(lse.masked_fill(lse == -torch.inf, 0.0), 64.0)


def _is_huge(row: Tensor) -> bool:
    """True if x + 1 may round to x for some element x."""
    return _exceeds(row, 1 / torch.finfo(row.dtype).eps)


def _exceeds(row: Tensor, limit: float) -> bool:
    return row.numel() > 0 and bool(row.abs().amax() > limit)


def hide(s: Tensor, visible: Tensor) -> Tensor:
    """Set float32 or float64 ``s`` to -inf in place where not ``visible``, which broadcasts.

    It operates on bits: `torch.where` branches per element and takes ten times as long with an irregular mask.
    """
    integer, mantissa_bits = (torch.int64, 52) if s.dtype == torch.float64 else (torch.int32, 23)
    keep = visible.to(integer).neg_()  # every bit where visible, none elsewhere
    bits = s.view(integer).bitwise_and_(keep)
    bits.bitwise_or_(keep.bitwise_not_().bitwise_and_(-1 << mantissa_bits))  # the bits of -inf where hidden
    return s


def finite(x: Tensor) -> bool:
    """True if ``x`` has no NaN or infinity; may also be False if its sum overflows. Takes one pass."""
    return bool(x.sum(dtype=lse_dtype(x.dtype)).isfinite())


def band_hides(problem: Problem) -> bool:
    """True if the causal or local window hides some key from some query."""
    return visible_pairs(problem.queries, problem.keys, problem.score.band) < problem.queries * problem.keys
