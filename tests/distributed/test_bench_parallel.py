"""bench --nproc: a run of two processes, its results and pictures, and the arithmetic for other numbers of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import processes

from tilewise_tools.bench import __main__ as plain
from tilewise_tools.bench.parallel import launch, measure, predict, results, run, scaling, steps, timeline
from tilewise_tools.bench.parallel.cases import ParallelCase, cases
from tilewise_tools.bench.results import Calibration, ResultsError
from tilewise_tools.bench.run import UsageError

METHODS = ("all_gather", "ring", "all_to_all")


def _wrong(case, x, mesh):
    forward = steps.providers()[0].prepare(case, x, mesh)
    return lambda: 1.1 * forward()


def _fails_on_one(case, x, mesh):
    if mesh.get_local_rank() == 1:
        raise RuntimeError("out of luck")
    return lambda: x["q"] + 0 * (x["k"] + x["v"])


def _run(rank: int, size: int, store: str) -> int:
    """A run with two providers more, one that is wrong and one that fails on one rank."""
    torch.set_num_threads(1)
    usual = steps.providers()
    always = lambda case, mesh: None  # noqa: E731
    run.providers = lambda: [
        *usual,
        steps.ParallelProvider("wrong", _wrong, always),
        steps.ParallelProvider("out", _fails_on_one, always),
    ]
    run.calibrate = lambda clock, dtypes: Calibration(dict.fromkeys(dtypes, 1e11), 1e10)
    run._SECONDS = {"cpu": 0.01}
    folder = Path(store).parent
    options = run.ParallelRunOptions(("causal", "packed"), commit="abc", json=folder / "found.json", plot=folder)
    return launch.rank_of("cpu", options, f"file://{store}", rank, size)


def test_a_run_of_two_processes(tmp_path, monkeypatch):
    assert processes(_run, 2, tmp_path / "store", 120.0) == [0, 0]
    found = results.read(tmp_path / "found.json")
    assert (found.ranks, found.commit, len(found.devices)) == (2, "abc", 2)
    case = cases("cpu", 2)[0].name
    rows = {row.provider: row for row in found.rows if row.case == case}
    one = rows[results.ONE]
    for name in METHODS:
        row = rows[name]
        assert row.outcome == "measured", row.reason
        assert set(row.errors) == {"o", "dq", "dk", "dv"}
        assert max(row.errors.values()) < 1e-5
        assert row.forward.median_s > 0
        assert row.both.median_s >= row.forward.median_s
        assert row.exposed_s == row.both.median_s - row.silent.median_s
        assert row.communication_s > 0
        assert found.ideal(row) == one.both.median_s / (2 * row.both.median_s)
    # Of a shard of keys and values, 8 heads of 64 rows of 16 float32 numbers.
    assert rows["all_gather"].sent_bytes[0] == 2 * 8 * 64 * 16 * 4
    assert rows["wrong"].outcome == "failed"
    assert rows["wrong"].reason.startswith("rank 0: ValueError: wrong: o 0.1, ")
    assert rows["out"].outcome == "failed"
    assert rows["torch-flash"].reason == "needs a CUDA device"
    assert rows["two axes"].reason == "two axes need 4 ranks or more, an even number, got 2"
    assert {line.provider for line in found.timelines if line.case == case} >= set(METHODS)
    assert (tmp_path / f"timeline_{case.replace(' ', '_')}.png").stat().st_size > 1000
    words = results.table(found)
    assert re.search(rf"{case} +ring +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ ", words)
    assert f"{case}      wrong                      failed: rank 0: ValueError: wrong" in words
    scaled = predict.scaled(found)
    assert {x.prediction.ranks for x in scaled if x.case == case} == {2, 4, 8, 64}
    assert [x.measured_s for x in scaled if x.prediction.ranks == 2] == [rows[name].both.median_s for name in METHODS]
    results.write(found, tmp_path / "again.json")
    assert results.read(tmp_path / "again.json") == found
    runs = [json.loads((tmp_path / "again.json").read_text()), {}]
    (tmp_path / "several.json").write_text(json.dumps({"parts": runs}))
    assert results.read(tmp_path / "several.json") == found


def test_files_that_hold_something_else(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ResultsError, match="not JSON"):
        results.read(path)
    path.write_text(json.dumps({"schema": 1}))
    with pytest.raises(ResultsError, match="not results of tilewise bench --nproc"):
        results.read(path)
    path.write_text(json.dumps({"schema": 1, "kind": results.KIND, "rows": [], "timelines": []}))
    with pytest.raises(ResultsError, match="damaged results: 'calibration'"):
        results.read(path)


def test_a_timeline_tells_what_runs_beside_what():
    def event(name, begin, length, kind="kernel"):
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length}

    events = [
        event("ncclDevKernel_SendRecv", 100, 40), event("forward_kernel", 110, 20), event("copy_kernel", 150, 10),
        event("ncclDevKernel_AllGather", 145, 10),
        event("aten::mul", 0, 500, "cpu_op"), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    line = timeline.Timeline("ring", "a case", timeline.lanes_of(events, "cuda"))
    assert [round(1e6 * x) for x in (line.seconds, line.communication_s, line.exposed_s, line.idle_s)] == [
        60,
        50,
        25,
        5,
    ]
    assert [len(line.lanes[lane]) for lane in timeline.LANES] == [2, 1, 1]


def test_the_slowest_rank_counts():
    assert measure.slowest([[(1.0, 2.0, 3.0)], [(2.0, 1.0, 3.5)]]) == [(2.0, 2.0, 3.5)]


def test_predictions_by_hand():
    """Stages overlap, all_to_all does not; a ring whose transfers are longer than its products waits for them."""
    q, k = torch.empty(1, 8, 1024, 64, device="meta"), torch.empty(1, 4, 1024, 64, device="meta")
    flops = 4 * 64 * 8 * 1024 * 1025 // 2
    machine = scaling.Machine(1e12, 1e12, dict.fromkeys(METHODS, math.inf))
    for x in scaling.predict(q, k, k, 4, machine, causal=True, load_balancer="head_tail"):
        assert x.of_ideal == pytest.approx(1)
        assert x.seconds == pytest.approx(3.5 * flops / 4 / 1e12)
    slow = replace(machine, rates=dict.fromkeys(METHODS, 1e9))
    found = {x.method: x for x in scaling.predict(q, k, k, 4, slow, causal=True, load_balancer="head_tail")}
    shard = 2 * 4 * 256 * 64 * 4  # bytes of keys and values
    gathered, ring = found["all_gather"], found["ring"]
    assert gathered.exposed_s == pytest.approx(gathered.transfer_s)
    assert gathered.transfer_s > 3 * shard / 1e9
    hops = gathered.compute_s / 4 + ring.transfer_s
    assert ring.seconds == pytest.approx(hops, rel=0.2)
    (staged, *_) = scaling.predict(q, k, k, 4, slow, causal=True, load_balancer="head_tail", stages=4)
    assert staged.seconds < gathered.seconds
    assert staged.transfer_s == gathered.transfer_s
    two = scaling.predict_two_axes(q, k, k, 2, 2, machine, causal=True, load_balancer="head_tail")
    assert (two.ranks, two.exposed_s) == (4, pytest.approx(0, abs=1e-12))
    assert two.of_ideal == pytest.approx(1)
    two = scaling.predict_two_axes(q, k, k, 2, 2, slow, causal=True, load_balancer="head_tail")
    assert two.exposed_s > (2 * 8 + 2 * 4) * 512 * 64 * 4 / 4 * 2 / 1e9 / 2  # half of what each of two has is traded
    contiguous = scaling.predict(q, k, k, 4, machine, causal=True)
    assert contiguous[0].of_ideal < 0.6  # the last rank sees most
    assert contiguous[2].of_ideal == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "1"], "--nproc: must be 2 or more, got 1"),
        (["--nproc", "2", "--device", "cpu", "--cases", "nope"], "nothing is called 'nope'; there are: causal S128"),
        (["--nproc", "2", "--device", "cpu", "--providers", "nope"], "nothing is called 'nope'; there are: all_gather"),
        (["--plot", "x"], "--plot: goes with --nproc"),
    ],
)
def test_mistakes_are_named(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        plain.main()
    assert words in capsys.readouterr().err


def test_torchrun_has_started_it(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="torchrun has started 4 processes, got 2"):
        launch.launch(2, "cpu", run.ParallelRunOptions())


def test_work_of_a_packed_batch():
    case = ParallelCase("packed", 131072)
    assert sum(case.lengths) == case.length
    assert case.flops == 14 * 128 * 32 * sum(n * (n + 1) // 2 for n in case.lengths)
    assert ParallelCase("causal", 64, 2, 2, 8).flops == 14 * 8 * 2 * 64 * 65 // 2
