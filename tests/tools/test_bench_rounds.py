"""The rounds of the bench, in which the providers of a case take turns."""

from __future__ import annotations

import pytest

from tilewise_tools.bench import run, timing
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.results import Row, Timing

CAUSAL = Case("dense causal", 2, 4, 2, 40, 40, 16, causal=True, dtype="float32")
DECODE = Case("decode", 2, 4, 2, 1, 64, 16, dtype="float32", backward=False)
PROVIDERS = ("tilewise-cpu", "sdpa-math")


class Told:
    def start(self, total, left_out):
        self.said, self.rows = [], []

    def working(self, what):
        self.said.append(what)

    def finished(self, found, row):
        self.rows.append(row)


pytestmark = pytest.mark.usefixtures("no_calibration")


def test_the_median_of_rounds_counts():
    rounds = [Timing(3.0, 2.0, 4.0, 5), Timing(2.0, 2.0, 2.0, 1)]
    assert timing.over_rounds(rounds) == Timing(2.5, 2.0, 4.0, 6)
    assert timing.over_rounds(rounds[:1]) == rounds[0]


def test_providers_take_turns(monkeypatch):
    monkeypatch.setitem(run._ROUNDS, "cpu", 3)
    times = iter(range(1, 100))
    monkeypatch.setattr(timing.Clock, "time", lambda clock, step: Timing(n := float(next(times)), n - 0.5, n + 0.5, 2))
    told = Told()
    found = run.run(run.RunOptions("cpu", providers=PROVIDERS), told, todo=[CAUSAL, DECODE])
    assert [said.split(": ")[1] for said in told.said[1:]] == [*PROVIDERS] * 6
    assert [row.provider for row in found.rows] == [*PROVIDERS] * 2
    assert found.settings["rounds"] == 3
    # forward and backward of one provider, then of the other, three times
    assert [row.forward for row in found.rows[:2]] == [Timing(5.0, 0.5, 9.5, 6), Timing(7.0, 2.5, 11.5, 6)]
    assert [row.backward for row in found.rows[:2]] == [Timing(6.0, 1.5, 10.5, 6), Timing(8.0, 3.5, 12.5, 6)]
    assert [row.forward.median_s for row in found.rows[2:]] == [15.0, 16.0]
    assert told.rows == found.rows


@pytest.mark.parametrize("error", ["failed", "lost"])
def test_a_failure_in_a_later_turn_is_one(monkeypatch, error):
    def fail(*args: object) -> Row:
        raise RuntimeError("not again") if error == "failed" else run.DeviceLost("not again")

    monkeypatch.setitem(run._ROUNDS, "cpu", 2)
    monkeypatch.setattr(run._Measured, "_measure_again", fail)
    if error == "lost":  # what looks after the device says so, and the run ends
        monkeypatch.setattr(run._Measured, "again", fail)
    found = run.run(run.RunOptions("cpu", providers=PROVIDERS), Told(), todo=[CAUSAL, DECODE])
    reasons = [(row.outcome, row.reason) for row in found.rows]
    if error == "failed":
        assert reasons == 4 * [("failed", "RuntimeError: not again")]
    else:
        assert reasons == [("failed", "not again"), ("measured", None), *2 * [("not run", "not again")]]
