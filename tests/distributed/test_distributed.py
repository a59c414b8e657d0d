"""context_parallel_attention in two and in four processes, held to one process; distributed_child.py has the cases."""

from __future__ import annotations

import distributed_child
import pytest
import torch
from processes import processes, ranks

from tilewise.distributed import documents


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_what_one_process_gets(size, tmp_path):
    """o, lse and every gradient of each case; an error is raised on every rank; and what goes with them."""
    assert len(distributed_child.checks(size)) > 80
    assert ranks(distributed_child.check_all, size, tmp_path, timeout=20.0) == [{}] * size


def test_a_rank_that_dies_ends_the_others(tmp_path):
    """Within the group's timeout of 5 seconds, by an error."""
    (wrong, seconds), *gone = processes(distributed_child.die, 2, tmp_path / "store", 30.0)
    assert gone == [None]
    assert wrong["after"].startswith(("RuntimeError", "DistBackendError")), wrong
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
