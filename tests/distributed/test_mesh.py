"""DTensors split along a sequence, PyTorch's context manager and compiled calls, in two and four processes;
mesh_child.py has the checks."""

from __future__ import annotations

import mesh_child
import pytest
from processes import processes

LIMIT = 120.0  # seconds, of all processes together


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_what_one_process_gets(size, tmp_path):
    """Each check of mesh_child.py: one failure tells of all."""
    ranks = processes(mesh_child.run, size, tmp_path / "store", LIMIT)
    assert None not in ranks, "a rank did not end"
    assert [found for found, _ in ranks] == [{}] * size
    assert all(names == mesh_child.names(size) for _, names in ranks)
