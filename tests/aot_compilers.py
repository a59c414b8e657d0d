"""Child processes that compile for GPUs that are not here: a target that a compiler cannot handle ends its process.

With TILEWISE_TRITON in the environment, a folder with a triton, every case is compiled by that one: so `make
test-versions` goes through the versions that are promised. With TILEWISE_LEDGER, a folder, what is compiled is written
there for a new ledger, see ledger.py.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import aot_child
import pytest

TRITON_360 = Path(sys.prefix) / "triton-3.6.0"  # what torch 2.11 pins, where `make test` has put it
EACH = os.environ.get("TILEWISE_TRITON")


def minor_version(triton: str) -> str:
    """Such as "3.8", of what compiles a case that is written for a triton, "installed" or "3.6.0"."""
    if EACH is not None:
        (found,) = importlib.metadata.distributions(name="triton", path=[EACH])
        triton = found.version
    elif triton == "installed":
        triton = importlib.metadata.version("triton")
    return triton.rpartition(".")[0]


def hold_hopper(codes, spilled: int) -> None:
    """The kernels of a case fit, spill at most so many bytes, and no wgmma waits for another or races."""
    for kernel, _, hazards in codes:
        print(kernel)
        assert kernel.shared <= kernel.shared_limit
        assert kernel.spill_stores <= spilled, f"{kernel.name} spills {kernel.spill_stores} bytes"
        assert not kernel.warnings
        assert not hazards


class Compilers:
    """Child processes, one for each triton: to start one takes as long as to compile a kernel."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.pools: dict[str | None, ProcessPoolExecutor] = {}  # by the path of a triton, None the installed one

    def run(self, function, triton: str, target: int, case: object, *more):
        """``function(case, *more)`` in the child for a triton, "installed" or "3.6.0", and a target such as 90."""
        return self._submit(triton, target, function, case, *more)

    def compile(self, function, triton: str, target: int, case: object, *more, again: bool = False):
        """The same of a function of aot_child that compiles; again: also what the ledger has an entry for."""
        name = " ".join(map(str, (function.__name__, triton, f"sm_{target}", case, *more)))
        folder = os.environ.get("TILEWISE_LEDGER")
        return self._submit(triton, target, aot_child.with_ledger, function, name, folder, again, case, *more)

    def rooms(self, function, triton: str, target: int, case: object, *more, again: bool = False):
        """The same of `room_child.room`."""
        folder = os.environ.get("TILEWISE_LEDGER")
        return self._submit(triton, target, aot_child.with_rooms, function, "", folder, again, case, *more)

    def _submit(self, triton: str, target: int, function, *arguments):
        if EACH is None and triton == "3.6.0" and not TRITON_360.is_dir():
            pytest.skip(f"no Triton 3.6.0 in {TRITON_360}: `make test` puts it there")
        path = EACH or (str(TRITON_360) if triton == "3.6.0" else None)
        if path not in self.pools:
            spawn = multiprocessing.get_context("spawn")
            self.pools[path] = ProcessPoolExecutor(1, spawn, aot_child.start, (path, str(self.cache)))
        try:
            return self.pools[path].submit(aot_child.on_target, target, function, *arguments).result()
        except BaseException:
            self.close()  # whatever a failed compilation leaves behind, the next one starts afresh
            raise

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()
        self.pools.clear()
