"""What the bench says: flattened reasons, numbers without exponents, spellings of names, mistakes that name the
option."""

from __future__ import annotations

import importlib.util
import re
from functools import partial

import pytest
import torch
from command_line import invoke

from tilewise_tools.bench import report, run
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.results import Calibration, Results, Row, Timing

CASE = Case("dense D64 full", 1, 1, 1, 2048, 2048, 64, dtype="float32")
TINY = Case("tiny", 1, 2, 2, 16, 16, 16, dtype="float32", backward=False)


class Silent:
    def start(self, total, left_out):
        self.total, self.left_out = total, left_out

    def working(self, what):
        pass

    def finished(self, found, row):
        pass


bench = partial(invoke, "bench")


def on_cpu(*rows: Row) -> Results:
    return Results(
        commit="", changed_files=[], date="2026-01-02", device={"type": "cpu", "name": "x", "threads": 2}, versions={},
        settings={}, unavailable={}, calibration=Calibration({"float32": 1e11}, 9e9), cases=[CASE], rows=list(rows),
    )  # fmt: skip


def test_a_dozen_reasons_that_are_one_are_one_line(no_calibration, no_gpu, monkeypatch):
    monkeypatch.setattr(run, "cases", lambda device, quick: [TINY])
    result = bench("--device", "cpu", "--providers", "tilewise-hopper,tilewise-triton,fa4,flex,sdpa")
    assert result.exit_code == 0, result.output
    line = "left out, for want of a CUDA device: tilewise-hopper, tilewise-triton, sdpa-cudnn, sdpa-efficient, fa4"
    assert [x.strip() for x in result.output.splitlines() if "CUDA" in x] == [line, line]  # before it and after it
    assert "[2/2] tiny S16 sdpa-math" in result.output
    assert "  flex: has no backward on the CPU" in result.output


def test_a_run_of_what_wants_a_gpu_says_that_nothing_was_measured(no_calibration):
    found = run.run(run.RunOptions("cpu", providers=("triton",)), Silent(), todo=[TINY])
    assert [row.outcome for row in found.rows] == ["declined"]  # as in the results' file
    assert report.terminal(found).splitlines()[2:] == [
        "Nothing was measured.", "", "Not measured:", "  left out, for want of a CUDA device: tilewise-triton",
    ]  # fmt: skip


def test_slow_and_fast_are_numbers_without_exponents():
    seconds = Timing(12.0, 12.0, 12.0, 1)
    slow = Row(CASE.name, "tilewise-cpu", "measured", None, {}, seconds, None, 1 << 20, 2.0)
    table = report.terminal(on_cpu(slow))
    assert re.search(r"tilewise-cpu +12,000 +0\.0895 ", table)
    assert re.search(r"^case +provider +forward ms  GFLOP/s ", table, re.MULTILINE)
    assert "matrix product 100 GFLOP/s in float32; copy 9 GB/s" in table
    assert "12000.000 ms  0.0895 GFLOP/s" in report.one_line(on_cpu(slow), slow)
    assert "GFLOP/s" in report.markdown(on_cpu(slow), "x.json", [])


def test_what_the_budget_left_out_is_not_said_of_what_wants_a_gpu(no_calibration):
    options = run.RunOptions("cpu", budget=0.0, providers=("tilewise-cpu", "fa4"))
    assert report.not_measured(run.run(options, Silent(), todo=[TINY])) == [
        "left out, for want of a CUDA device: fa4",
        "tilewise-cpu not run: the budget of 0 s was spent (every case)",
    ]


def test_a_dtype_in_a_name_has_every_spelling():
    def chosen(*parts: str) -> list[str]:
        return [case.name for case in run.chosen_cases(run.RunOptions("cuda", cases=parts))]

    lengths = (10, 12, 13, 14, 15, 16, 17)
    assert chosen("bf16") == chosen("BFLOAT16") == [f"softmax bfloat16 N{2**n}" for n in lengths]
    assert chosen("softmax fp32 N1024") == ["softmax float32 N1024"]
    with pytest.raises(run.UsageError, match=r"^--cases: nothing is called 'fp16'; there are: "):
        chosen("fp16")  # bfloat16 has these letters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--device", "tpu"], "--device: must be one of cpu, cuda, got 'tpu'"),
        (["--device", "cpu", "--providers", "softmax", "--cases", "tiny"], "--providers: none of those computes"),
        (["--budget", "nan"], "Invalid value for --budget: must be 0 or more, got 'nan'"),
        (["--budget", "-1"], "Invalid value for --budget: must be 0 or more, got '-1'"),
        (["--json", "."], "--json: cannot write .: it is a folder"),
        (["--json", "-"], "--json: the name of a file is needed, got '-'"),
        (["--json", "/dev/stdout"], "--json: cannot write /dev/stdout: it is no regular file"),
    ],
)
def test_mistakes_name_the_option(arguments, message, no_gpu):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_list_says_nothing_about_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cases on" not in bench("list", "--device", "cuda").output


def test_a_missing_matplotlib_is_one_line(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    result = bench("--plot", "x")
    assert result.exit_code == 2
    assert result.output == (
        "tilewise bench: not installed: matplotlib: in a checkout of tilewise, pip install '.[cli]'\n"
    )
