"""compute-sanitizer on small shapes: no access outside a buffer, no race in shared memory but what racecheck.py names.

It takes minutes, so it runs where TILEWISE_SANITIZER=1 asks for it and the CUDA toolkit has the tool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from racecheck import hazards

TOOL = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}{os.pathsep}/usr/local/cuda/bin")


@pytest.mark.skipif(os.environ.get("TILEWISE_SANITIZER") != "1", reason="set TILEWISE_SANITIZER=1")
@pytest.mark.skipif(TOOL is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool):
    child = [sys.executable, Path(__file__).with_name("sanitizer_child.py"), *(["2"] if tool == "memcheck" else [])]
    done = subprocess.run(
        [TOOL, "--tool", tool, "--error-exitcode", "9", *child],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor a buffer of its own
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.count("\n  done") == 1, (done.stdout + done.stderr)[-5000:]
    if tool == "racecheck":
        assert not hazards(done.stdout), (done.stdout + done.stderr)[-5000:]
    else:
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
