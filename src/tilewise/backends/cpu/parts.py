"""What the tiles are made of: a fast product, the exponential of a difference, -inf for what is hidden."""

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
    """``start + a @ b`` for tiles (T, m, k), (T, k, n) and (T, m, n), in the place of ``start``.

    `torch.baddbmm` calls MKL, which on an Intel CPU is a little faster than oneDNN and on an AMD CPU takes twice as
    long; there a large float32 tile goes through oneDNN. oneDNN first compiles a kernel for each shape, in the time of
    two such products.
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
    """As Linux tells; False where there is no /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "GenuineIntel" in path.read_text()


@cache
def keep_freed_tiles() -> None:
    """Let glibc keep the memory of freed tiles, so that a new tile is not made of fresh, zeroed pages each time.

    A freed block raises the size below which glibc serves blocks from its heap; this one is never touched.
    """
    torch.empty(1 << 24, dtype=torch.uint8, device="cpu")


def in_huge_pages(x: Tensor) -> Tensor:
    """``x``, fresh and large, of which Linux is asked to make it of huge pages: making small ones takes longer than
    writing them."""
    first = -x.data_ptr() % mmap.PAGESIZE
    size = (x.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and size >= HUGE_PAGE:
        libc = ctypes.CDLL(None)  # advice that is not taken changes nothing
        libc.madvise(ctypes.c_void_p(x.data_ptr() + first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return x


def exp_difference(s: Tensor, row: Tensor) -> Tensor:
    """``exp(s - row)``, in the place of ``s``; a row at -inf (nothing seen so far) gives 0.

    In base 2, since `torch.exp` takes four times as long as `torch.exp2` here; the change of base costs no pass. Only
    where a row is so large that 1 more is lost in its rounding, as one whose keys all have a bias of -1e9, it does: the
    product ``row * LOG2E`` would be rounded by more than the difference.
    """
    row = row.masked_fill(row == -torch.inf, 0.0)
    if _is_huge(row):
        return s.sub_(row).mul_(LOG2E).exp2_()
    return torch.add(row.mul_(-LOG2E), s, alpha=LOG2E, out=s).exp2_()


def exp_of_maxima(old: Tensor, new: Tensor) -> Tensor:
    """``exp(old - new)``, where both have been subtracted by `exp_difference`: by what it has rounded them to, so that
    tiles before and after fit, and exactly 1 where a maximum stays."""
    new = new.masked_fill(new == -torch.inf, 0.0)
    if _is_huge(new):
        return old.sub(new).mul_(LOG2E).exp2_()
    return old.mul(LOG2E).sub_(new.mul_(LOG2E)).exp2_()


def minus_delta(outputs: Outputs, cotangents: Outputs) -> Tensor:
    """``dLSE - rowsum(dO∘O)`` of every row, (B, H, M), in the dtype of the LSE."""
    dtype = lse_dtype(outputs.o.dtype)
    found = (cotangents.o.to(dtype) * with_low_bits(outputs.o, outputs.o_low)).sum(-1).neg_()
    return found if cotangents.lse is None else found.add_(cotangents.lse)


def is_coarse(lse: Tensor) -> bool:
    """True if exp(s - lse) is off by more than 2^-18 (float32), the spacing of numbers of the size of some lse."""
    return _exceeds(lse.masked_fill(lse == -torch.inf, 0.0), 64.0)


def _is_huge(row: Tensor) -> bool:
    """True if 1 more is lost in the rounding of some element."""
    return _exceeds(row, 1 / torch.finfo(row.dtype).eps)


def _exceeds(row: Tensor, limit: float) -> bool:
    return row.numel() > 0 and bool(row.abs().amax() > limit)


def hide(s: Tensor, visible: Tensor) -> Tensor:
    """``where(visible, s, -inf)`` for float32 or float64, in the place of ``s``; ``visible`` broadcasts.

    By bits: `torch.where` branches at each element and takes ten times as long on an irregular mask.
    """
    integer, mantissa_bits = (torch.int64, 52) if s.dtype == torch.float64 else (torch.int32, 23)
    keep = visible.to(integer).neg_()  # every bit where visible, none elsewhere
    bits = s.view(integer).bitwise_and_(keep)
    bits.bitwise_or_(keep.bitwise_not_().bitwise_and_(-1 << mantissa_bits))  # the bits of -inf where hidden
    return s


def finite(x: Tensor) -> bool:
    """There is no NaN or infinity in ``x``. May be False for huge numbers too, whose sum overflows; takes one pass."""
    return bool(x.sum(dtype=lse_dtype(x.dtype)).isfinite())


def band_hides(problem: Problem) -> bool:
    """The band hides some key from some query."""
    return visible_pairs(problem.queries, problem.keys, problem.score.band) < problem.queries * problem.keys
