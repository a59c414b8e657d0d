"""context_parallel_attention in two and in four processes, held to one process; distributed_child.py has the cases."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from pathlib import Path

import distributed_child
import pytest
from distributed_child import CASES, ERRORS, OTHERS

LIMIT = 120.0  # seconds, of all processes together
# What takes seconds to import; not this folder's modules, for a server does not look here before Python 3.14.
PRELOAD = ["torch.distributed.tensor", "torch.testing", "tilewise.distributed", "tilewise.backends.cpu"]


def processes(target, size, store, limit):
    """What each wrote, None for one that did not; nobody is left behind. A server that has imported torch forks them:
    two cores take seconds to import it in each."""
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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By the number of ranks, what each rank found wrong with each case; they start where they are first asked for."""
    worlds = {}

    def of(size):
        if size not in worlds:
            worlds[size] = processes(distributed_child.run, size, tmp_path_factory.mktemp("world") / "store", LIMIT)
        return worlds[size]

    return of


def of_case(world, name):
    return ["did not end" if rank is None else rank[0].get(name, "did not run") for rank in world]


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 4) for name in CASES[size]])
def test_ranks_get_what_one_process_gets(found, size, name):
    """o, lse and every gradient."""
    assert of_case(found(size), name) == [""] * size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_raised_on_every_rank(found, size, name):
    assert of_case(found(size), f"error: {name}") == [""] * size


@pytest.mark.parametrize(("size", "name"), [(2, name) for name in OTHERS] + [(4, "shard"), (4, "meshes")])
def test_beside_the_numbers(found, size, name):
    assert of_case(found(size), name) == [""] * size


def test_a_rank_that_dies_ends_the_others(tmp_path):
    """Within the group's timeout of 5 seconds, by an error."""
    (words, seconds), *gone = processes(distributed_child.die, 2, tmp_path / "store", 30.0)
    assert gone == [None]
    assert words.startswith(("RuntimeError", "DistBackendError")), words
    assert seconds < 10.0
