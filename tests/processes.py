"""Child processes of tests: Python with arguments, a function in a fresh process, and the ranks of a process group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from garbage import collect_seldom

# Imports that take seconds; not the modules of tests, for a server does not find these before Python 3.14.
# tilewise.api before DTensor, which its operators meet later.
PRELOAD = [
    "tilewise.api", "torch.distributed.tensor", "torch.testing", "torch._dynamo", "tilewise.distributed",
    "tilewise.backends.cpu",
]  # fmt: skip


def python(*arguments: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, which is to be by this status; options: those of `subprocess.run`."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, **{"capture_output": True, "text": True, "timeout": 120, **options})
    assert done.returncode == status, f"status {done.returncode}: {str(done.stdout)[-3000:]}{str(done.stderr)[-3000:]}"
    return done


def fresh(start: Callable[..., Any] | None = None, *arguments: Any) -> ProcessPoolExecutor:
    """A pool of one process that has imported nothing; start: what it calls before it looks for other functions."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start, arguments)


def call(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str]) -> Any:
    """Return ``function(*arguments)``, or raise its error, by a fresh process with more in its environment."""
    with fresh(_set, dict(environment)) as pool:
        return pool.submit(function, *arguments).result()


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


# --- groups ---


def processes(target: Callable[..., Any], size: int, store: Path, limit: float, *arguments: Any) -> list[Any]:
    """Return ``target(rank, size, store, *arguments)`` of each rank, None of one that ends before; none stays alive.

    They are forked from a server that has imported torch. limit: seconds, for all of them together.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    running = [
        context.Process(target=_write, args=(target, rank, size, str(store), *arguments), daemon=True)
        for rank in range(size)
    ]
    for process in running:
        process.start()
    end = time.monotonic() + limit
    for process in running:
        process.join(max(end - time.monotonic(), 0.0))
    for process in running:
        if process.is_alive():
            process.kill()
            process.join()
    files = [Path(f"{store}.{rank}") for rank in range(size)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _write(target: Callable[..., Any], rank: int, size: int, store: str, *arguments: Any) -> None:
    collect_seldom()  # a collection would copy the memory of what the server has imported
    Path(f"{store}.{rank}").write_bytes(pickle.dumps(target(rank, size, store, *arguments)))


def start(rank: int, size: int, store: str, timeout: float, device: str = "cpu") -> Any:
    """Join the group, of NCCL on GPUs and else of gloo; return its mesh."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=timeout), device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )  # fmt: skip
    return init_device_mesh(device, (size,))


def ranks(
    function: Callable[..., Any], size: int, folder: Path, *arguments: Any,
    limit: float = 120.0, timeout: float = 30.0, device: str = "cpu",
) -> list[Any]:  # fmt: skip
    """Return ``function(mesh, *arguments)`` of each rank of a group; what a rank raises is in the output.

    limit: seconds, for all of them together. timeout: of each exchange.
    """
    found = processes(_in_group, size, folder / "store", limit, function, arguments, timeout, device)
    assert None not in found, f"no result of the ranks {[rank for rank, x in enumerate(found) if x is None]}"
    return found


def _in_group(
    rank: int, size: int, store: str, function: Callable[..., Any], arguments: tuple, timeout: float, device: str
) -> Any:
    import torch.distributed as dist

    found = function(start(rank, size, store, timeout, device), *arguments)
    dist.destroy_process_group()
    return found


def failures(mesh: Any, checks: Mapping[str, tuple]) -> dict[str, str]:
    """Make each check, a function and its first arguments, the mesh last; return what went wrong, and with which."""
    wrong = dict.fromkeys(checks, "did not run")
    for name, (function, *arguments) in checks.items():
        del wrong[name]
        try:
            function(*arguments, mesh)
        except (AssertionError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            wrong[name] = f"{type(error).__name__}: {error}"
            if "Timeout" in wrong[name] or "timed out" in wrong[name]:
                break  # the ranks have lost each other
    return wrong


def raises(kind: type[Exception], words: str, function: Callable, *arguments: Any, **keywords: Any) -> None:
    """Hold a call to an error; another one, or none, is an AssertionError, which `failures` tells of."""
    found: Exception | None = None
    try:
        function(*arguments, **keywords)
    except (ValueError, TypeError, RuntimeError) as error:  # of which NotImplementedError is one
        found = error
    assert isinstance(found, kind), repr(found)
    assert re.search(words, str(found)), str(found)
