"""context_parallel_attention in two and in four processes, held to one process; distributed_child.py has the cases."""

from __future__ import annotations

import distributed_child
import pytest
import torch
from processes import processes

from tilewise.distributed import documents

LIMIT = 120.0  # seconds, of all processes together


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_what_one_process_gets(size, tmp_path):
    """o, lse and every gradient of each case; an error is raised on every rank; and what goes with them."""
    ranks = processes(distributed_child.run, size, tmp_path / "store", LIMIT)
    assert None not in ranks, "a rank did not end"
    names = distributed_child.checks(size)
    assert len(names) > 80
    wrong = [{name: words for name in names if (words := found.get(name, "did not run"))} for found, _ in ranks]
    assert wrong == [{}] * size


def test_a_rank_that_dies_ends_the_others(tmp_path):
    """Within the group's timeout of 5 seconds, by an error."""
    (words, seconds), *gone = processes(distributed_child.die, 2, tmp_path / "store", 30.0)
    assert gone == [None]
    assert words.startswith(("RuntimeError", "DistBackendError")), words
    assert seconds < 10.0


def test_documents_of_a_sharded_batch_are_of_one_stream(monkeypatch):
    """No stream reads what another may not have written yet."""
    found = documents.Documents(2, True, (0, 5, 8))
    cpu = torch.device("cpu")
    made = {}
    for stream in (1, 2, 1):
        monkeypatch.setattr(documents, "stream_of", lambda device, stream=stream: stream)
        parts = [found.order(cpu), found.parts(0, True, cpu), found.seen(0, cpu), found.whole(cpu)]
        before = made.setdefault(stream, parts)
        assert all(x is y for x, y in zip(parts, before, strict=True))
    assert all(x is not y for x, y in zip(made[1], made[2], strict=True))
