"""DTensors, PyTorch's context manager, compiled calls and a mesh of two axes on two GPUs: nccl_mesh_child.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILD = Path(__file__).with_name("nccl_mesh_child.py")
LIMIT = 240.0  # seconds, with all that is compiled


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_get_what_one_gets(tmp_path):
    """o and every gradient of each check."""
    running = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), "2", str(tmp_path / "store")], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    try:
        for process in running:
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, err[-3000:]
            found.append([json.loads(line) for line in out.splitlines() if line.startswith("[")])
    finally:
        for process in running:
            process.kill()
    for line in found[0]:
        print(line)
    assert [{name: words for name, words, *_ in lines if words} for lines in found] == [{}, {}]
    assert all(len(lines) == 6 for lines in found)
