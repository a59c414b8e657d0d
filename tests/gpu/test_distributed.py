"""Context parallel attention on two GPUs, through NCCL: nccl_child.py has the cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nccl_child import cases

CHILD = Path(__file__).with_name("nccl_child.py")
LIMIT = 240.0  # seconds, with all that is compiled: 20 for a case of a kind that is new, 7 for others
SHARES = 10  # of the cases, so that processes can compile side by side


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("share", range(SHARES))
def test_two_gpus_get_what_one_gets(tmp_path, share):
    """o and every gradient of each case."""
    command = [sys.executable, str(CHILD)]
    running = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), str(share), str(SHARES)], stdout=subprocess.PIPE,
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
    wrong = [{name: words for name, words, *_ in lines if words} for lines in found]
    assert wrong == [{}, {}]
    assert len(found[0]) == len(range(share, len(cases()), SHARES))
