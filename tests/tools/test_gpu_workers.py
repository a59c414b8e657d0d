"""tests/gpu_workers.py: a run leaves out what has passed in those before, and ends when it is told to."""

from __future__ import annotations

import gpu_workers

TOYS = """
import time
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
def test_is_slow(): time.sleep(60)
"""


def test_runs_follow_each_other(tmp_path):
    (tmp_path / "test_toys.py").write_text(TOYS)
    outcomes = tmp_path / "outcomes"
    more = {gpu_workers.OUTCOMES: str(outcomes)}
    arguments = ["-n0", "--rootdir", str(tmp_path), "-c", "/dev/null", "-k", "not slow", str(tmp_path)]
    assert gpu_workers.run(60.0, arguments, more) == 1
    lines = outcomes.read_text().splitlines()
    assert {name.partition("::")[2] for name in gpu_workers.passed(lines)} == {"test_passes", "test_is_skipped"}
    assert gpu_workers.run(3.0, [*arguments[:-3], str(tmp_path)], more) == 124
    again = outcomes.read_text().splitlines()[len(lines) :]
    assert {line.partition("::")[2] for line in again} <= {"test_fails", "test_is_slow"}
