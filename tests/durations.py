"""Each test file's share of the time of a whole run, in percent, held to what tests/durations.json has recorded.

A share does not depend on how fast a machine is. A file has grown if its share is more than half larger than recorded,
and by more than two percentage points. That fails a run of all files on a CPU, and of such a run only; what is to stay
is recorded by another one, as it must be where a large file has become much faster and all others have grown beside it:

    TILEWISE_DURATIONS=record make test
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
RECORDED = TESTS / "durations.json"
FACTOR, POINTS = 1.5, 2.0

Seconds = dict[str, float]
_seconds: Seconds = defaultdict(float)  # of each file, below tests
_lines: list[str] = []


def shares(seconds: Seconds) -> Seconds:
    """Percent of the whole, to a tenth."""
    whole = sum(seconds.values()) or 1.0
    return {file: round(100 * seconds[file] / whole, 1) for file in sorted(seconds)}


def grown(found: Seconds, recorded: Seconds) -> list[str]:
    """In words, which files take a larger share than they may; one that is not recorded may take two points."""
    return [
        f"{file}: {share:.1f} % of the time, recorded are {recorded.get(file, 0.0):.1f} %"
        for file, share in found.items()
        if share > FACTOR * recorded.get(file, 0.0) and share > recorded.get(file, 0.0) + POINTS
    ]


def is_whole(files: set[str]) -> bool:
    """All test files have run, but those that need a GPU."""
    here = {x.relative_to(TESTS).as_posix() for x in TESTS.rglob("test_*.py")}
    return files == {x for x in here if not x.startswith("gpu/")}


# --- hooks, which conftest.py imports; of xdist's processes the one that starts the others gets all reports ---


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.split("::")[0].removeprefix("tests/")] += report.duration


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput") or exitstatus != 0 or session.config.option.keyword:
        return
    found = shares(_seconds)
    if not is_whole(set(found)):
        return
    if os.environ.get("TILEWISE_DURATIONS") == "record":
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    _lines.extend(grown(found, json.loads(RECORDED.read_text(encoding="utf-8"))))
    if _lines:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    if _lines:
        terminalreporter.section("files that have grown, see tests/durations.py")
        for line in _lines:
            terminalreporter.line(line)
