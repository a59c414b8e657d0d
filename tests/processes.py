"""Processes of a group for tests of `tilewise.distributed`, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from pathlib import Path

# Imports that take seconds; not the modules of tests, for a server does not find these before Python 3.14.
# tilewise.api before DTensor, which its operators meet later.
PRELOAD = [
    "tilewise.api", "torch.distributed.tensor", "torch.testing", "torch._dynamo", "tilewise.distributed",
    "tilewise.backends.cpu",
]  # fmt: skip


def processes(target, size, store, limit):
    """Return what each process wrote, None for one that wrote nothing; none is left running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    running = [context.Process(target=target, args=(rank, size, str(store)), daemon=True) for rank in range(size)]
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
