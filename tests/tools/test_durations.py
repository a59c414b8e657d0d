"""What counts as a test file that has grown, and what the run that looks at it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import durations
import pytest
from durations import RECORDED, TESTS, grown, is_whole, shares


def test_shares_are_percent_whatever_the_machine():
    seconds = {"test_b.py": 30.0, "test_a.py": 10.0}
    assert shares(seconds) == shares({file: 7 * x for file, x in seconds.items()}) == {"test_a.py": 25, "test_b.py": 75}
    assert shares({}) == {}


@pytest.mark.parametrize(
    ("share", "recorded", "too_much"),
    [(6.0, 4.0, False), (6.1, 4.0, True), (3.0, 1.0, False), (3.1, 1.0, True), (59.0, 40.0, False), (61.0, 40.0, True)],
)
def test_more_than_half_and_than_two_points(share, recorded, too_much):
    assert bool(grown({"test_a.py": share}, {"test_a.py": recorded, "test_gone.py": 1.0})) == too_much


def test_a_new_file_may_take_two_points():
    assert grown({"test_new.py": 2.0}, {}) == []
    assert grown({"test_new.py": 2.1}, {}) == ["test_new.py: 2.1 % of the time, recorded are 0.0 %"]


def test_a_whole_run_is_of_all_files_but_those_of_a_gpu():
    folders = ("unit", "backends", "aot", "distributed", "integrations", "tools")
    files = {f"{folder}/{x.name}" for folder in folders for x in (TESTS / folder).glob("test_*.py")}
    assert is_whole(files)
    assert not is_whole(files - {"unit/test_tiles.py"})


def test_what_is_recorded_is_a_whole():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert sum(recorded.values()) == pytest.approx(100, abs=0.05 * len(recorded))


@pytest.fixture
def end_of_run(monkeypatch, tmp_path):
    """The end of a run in which one of two files has grown by so many points: its exit status and what it says."""
    monkeypatch.setattr(durations, "RECORDED", tmp_path / "durations.json")
    monkeypatch.setattr(durations, "_lines", [])
    monkeypatch.delenv("TILEWISE_DURATIONS", raising=False)
    durations.RECORDED.write_text('{"test_a.py": 1.0, "test_b.py": 99.0}')

    def end(points, exitstatus=0, keyword="", whole=True, **config):
        durations._lines.clear()
        option = SimpleNamespace(keyword=keyword)
        session = SimpleNamespace(config=SimpleNamespace(option=option, **config), exitstatus=exitstatus)
        with monkeypatch.context() as patch:  # no longer: this test's own run is looked at, too
            patch.setattr(durations, "_seconds", {"test_a.py": 1.0 + points, "test_b.py": 99.0 - points})
            patch.setattr(durations, "is_whole", lambda files: whole)
            durations.pytest_sessionfinish(session, exitstatus)
        return session.exitstatus, list(durations._lines)

    return end


def test_a_run_that_has_grown_fails_and_says_why(end_of_run):
    """At the end of a whole run; not of another, nor in xdist's workers, nor where a test has failed."""
    status, lines = end_of_run(2 * durations.POINTS + 1)
    assert (status, len(lines)) == (1, 1)
    assert end_of_run(0.0) == (0, [])
    assert end_of_run(50.0, exitstatus=2) == (2, [])
    assert end_of_run(50.0, keyword="bias") == (0, [])
    assert end_of_run(50.0, whole=False) == (0, [])
    assert end_of_run(50.0, workerinput={}) == (0, [])


def test_a_run_records_what_it_found(monkeypatch, end_of_run):
    monkeypatch.setenv("TILEWISE_DURATIONS", "record")
    assert end_of_run(50.0) == (0, [])
    assert json.loads(durations.RECORDED.read_text()) == {"test_a.py": 51.0, "test_b.py": 49.0}
