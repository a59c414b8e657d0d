"""The bench: the right answer before the clock, failures that are told, results as JSON, tables and pictures."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from command_line import invoke, shown
from rich.console import Console
from torch import Tensor

import tilewise
from tilewise.planner import AUTOMATIC
from tilewise_tools.bench import __main__ as plain
from tilewise_tools.bench import cases, operators, plot, reference, report, results, run, timing
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.providers import Provider, Steps, _score_mod, providers
from tilewise_tools.bench.results import Calibration, Results, ResultsError, Row, Timing

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
CAUSAL = Case("dense causal", 2, 4, 2, 40, 40, 16, causal=True, dtype="float32")
BIASED = Case("bias", 2, 2, 2, 24, 24, 16, bias=(1, 2, 24, 24), dtype="float32")
TINY = Case("tiny", 1, 2, 2, 16, 16, 16, bias=(1, 2, 16, 16), dtype="bfloat16", host=True)
DECODE = Case("decode", 2, 4, 2, 1, 64, 16, dtype="float32", backward=False)


class Silent:
    def start(self, total, left_out):
        self.total, self.left_out, self.said, self.rows = total, left_out, [], []

    def working(self, what):
        self.said.append(what)

    def finished(self, found, row):
        self.rows.append(report.one_line(found, row))


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(plot, "DPI", 20)


@pytest.fixture
def no_calibration(monkeypatch):
    rates = dict.fromkeys(("float32", "bfloat16", "float64"), 1e11)
    monkeypatch.setattr(run, "calibrate", lambda clock, dtypes: Calibration(rates, 1e10))


@pytest.fixture(scope="module")
def measured():
    """A run on the CPU with all that a run does, and what its progress was told."""
    progress = Silent()
    found = run.run(run.RunOptions("cpu", quick=True), progress, todo=[CAUSAL, BIASED, TINY, DECODE])
    return found, progress


# The run


def test_a_run_measures_or_gives_the_reason(measured):
    found, progress = measured
    names = [f"tilewise-{backend}" for backend in AUTOMATIC]
    assert [p.name for p in providers(CPU)][: len(names)] == names
    assert progress.total == len(found.rows) - 2 * 4 == len(progress.rows)  # without hopper and triton
    assert not [words for words in (*progress.said, *progress.rows) if "tilewise-triton" in words]
    assert progress.left_out.startswith("left out, for want of a CUDA device: tilewise-hopper, tilewise-triton, ")
    assert found.rows
    assert "calibration" in progress.said
    assert "dense causal S40: sdpa-math" in progress.said
    assert all(row.reason for row in found.rows if row.outcome != "measured")
    assert found.unavailable["fa4"] == "measured on CUDA devices only"
    for case in (CAUSAL, BIASED, TINY, DECODE):
        rows = {row.provider: row for row in found.of(case.name)}
        for name in ("tilewise-cpu", "sdpa-math"):
            row = rows[name]
            assert row.outcome == "measured", row
            assert row.forward is not None
            assert row.forward.low_s <= row.forward.median_s <= row.forward.high_s
            assert (row.backward is not None) == case.backward
            assert (row.host_s is not None) == case.host
            assert row.first_call_s > 0
            assert row.memory_bytes >= 0
            assert set(row.errors) == ({"o"} if not case.backward else {"o", "dq", "dk", "dv"}) | (
                {"dbias"} if case.bias else set()
            )
            assert found.flops(row, "forward") > 0
            assert found.share(row, "forward") > 0
        assert rows["tilewise-triton"].outcome == "declined"
    assert run.ours_are_right(found)
    (flash,) = (row for row in found.of(BIASED.name) if row.provider == "sdpa-flash")
    assert flash.outcome == "failed"
    assert flash.reason.startswith("no kernel for this call")


def test_what_the_machine_is_is_kept(measured):
    found, _ = measured
    assert found.device["type"] == "cpu"
    assert found.device["name"]
    assert found.versions["torch"] == torch.__version__
    assert found.versions["tilewise"] == tilewise.__version__
    assert found.calibration.matmul_flops.keys() == {"float32", "bfloat16"}
    assert found.settings["quick"] is True


def attend(change):
    """A provider that computes attention by SDPA and then changes the output or the gradients."""

    def prepare(case, x):
        def forward():
            return F.scaled_dot_product_attention(*x[:3], attn_mask=x.bias, is_causal=case.causal, enable_gqa=True)

        def backward(o):
            return change("backward", torch.autograd.grad(o, x.leaves, x.do, retain_graph=True))

        return Steps(lambda: change("forward", (forward(),))[0], backward)

    return Provider("tilewise-changed", None, lambda case: None, prepare)


def last_row_is_lost(which, tensors):
    if which == "forward":
        return (torch.cat([tensors[0][:, :, :-1], torch.zeros_like(tensors[0][:, :, -1:])], dim=2),)
    return tensors


def bias_gradient_is_doubled(which, tensors):
    return (*tensors[:-1], 2 * tensors[-1]) if which == "backward" else tensors


def key_gradient_is_nan(which, tensors):
    return (tensors[0], torch.full_like(tensors[1], math.nan), *tensors[2:]) if which == "backward" else tensors


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (last_row_is_lost, "wrong: o is off by 1.0e+00 of its norm"),
        (bias_gradient_is_doubled, "wrong: dbias is off by 1.0e+00 of its norm"),
        (key_gradient_is_nan, "wrong: dk is off by nan of its norm"),
    ],
)
def test_a_wrong_answer_is_not_timed(change, word, monkeypatch, no_calibration):
    right = attend(lambda which, tensors: tensors)._replace(name="right")
    monkeypatch.setattr(run, "providers", lambda device: [attend(change), right])
    found = run.run(run.RunOptions("cpu"), Silent(), todo=[BIASED])
    wrong, measured = found.rows
    assert wrong.outcome == "failed"
    assert wrong.reason.startswith(word)
    assert wrong.forward is None
    assert measured.outcome == "measured"
    assert not run.ours_are_right(found)


class ForeignError(Exception):
    __module__ = "cudnn.somewhere"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError("no D=16\nand more"), "NotImplementedError: no D=16"),
        (torch.OutOfMemoryError("tried to allocate"), "out of memory"),
        (AssertionError(), "AssertionError: "),
        (ForeignError("graph not supported"), "ForeignError: graph not supported"),
    ],
)
def test_a_failure_is_told_with_its_reason(error, reason, monkeypatch, no_calibration):
    def prepare(case: Case, x: cases.CaseInputs) -> Steps:
        raise error

    failing = Provider("broken", None, lambda case: None, prepare)
    monkeypatch.setattr(run, "providers", lambda device: [failing])
    found = run.run(run.RunOptions("cpu"), Silent(), todo=[CAUSAL])
    assert [(row.outcome, row.reason) for row in found.rows] == [("failed", reason)]
    assert run.ours_are_right(found)
    assert f"broken failed: {reason} (every case)" in report.not_measured(found)


def test_an_error_of_no_provider_is_not_swallowed(monkeypatch, no_calibration):
    class Stranger(Exception):
        pass

    def prepare(case: Case, x: cases.CaseInputs) -> Steps:
        raise Stranger

    monkeypatch.setattr(run, "providers", lambda device: [Provider("x", None, lambda case: None, prepare)])
    with pytest.raises(Stranger):
        run.run(run.RunOptions("cpu"), Silent(), todo=[CAUSAL])


def test_a_spent_budget_lists_the_rest(no_calibration):
    saved = []
    found = run.run(run.RunOptions("cpu", budget=0.0), Silent(), saved.append, [CAUSAL, BIASED])
    assert {row.outcome for row in found.rows} == {"not run"}
    assert {row.case for row in found.rows} == {CAUSAL.name, BIASED.name}
    assert found.rows[0].reason == "the budget of 0 s was spent"
    assert len(saved) == 2


def test_a_lost_device_ends_the_run(monkeypatch, no_calibration):
    def lose(*args: object) -> Row:
        raise run.DeviceLost("the CUDA device was lost")

    monkeypatch.setattr(run._Measured, "row", lose)
    found = run.run(run.RunOptions("cpu", providers=("sdpa",)), Silent(), todo=[CAUSAL, BIASED])
    assert [row.outcome for row in found.rows] == ["failed", "not run", "not run", "not run"]
    assert {row.reason for row in found.rows} == {"the CUDA device was lost"}


def test_inputs_that_do_not_fit_are_told(monkeypatch, no_calibration):
    def no_room(*args: object) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(reference, "exact", no_room)
    found = run.run(run.RunOptions("cpu", providers=("sdpa-math",)), Silent(), todo=[CAUSAL])
    assert found.rows[0].reason == "the inputs and the right answer do not fit in memory"


def test_cases_have_names_of_their_own_and_are_problems():
    for device in ("cuda", "cpu"):
        for quick in (False, True):
            chosen = cases.cases(device, quick)
            assert len({case.name for case in chosen}) == len(chosen)
            for case in chosen:
                if isinstance(case, Case):
                    assert case.problem("cpu", None).flops > 0
                    assert case.heads % case.kv_heads == 0
        if device == "cuda":
            assert {c.name for c in chosen} < {c.name for c in cases.cases(device)}
    families = {case.family for case in cases.cases("cuda")}
    expected = {f"dense D{d} {kind}" for d in (64, 128, 256) for kind in ("full", "causal")}
    expected |= {f"bias {kind} D{d}" for kind in cases.KINDS for d in (64, 128)}
    expected |= {f"decode 32/8 D128{terms}" for terms in ("", " bias B11N", " bias 1H1N", " M8", " M16")}
    expected |= {f"decode 32/8 D128 B{batch}" for batch in (64, 25, 4, 1)}
    expected |= {"decode 32/32 D128 B4", "decode 32/8 D64", "decode 32/8 D256 B8"}
    assert families > expected | {"pair bias D32", "gqa 32/8 D128 full"}


def test_choosing_by_name():
    def chosen(*parts: str) -> list[str]:
        return [case.name for case in run.chosen_cases(run.RunOptions("cuda", cases=parts))]

    assert len(chosen()) == len(cases.cases("cuda"))
    assert chosen("pair bias") == [f"pair bias D32 S{s}" for s in (256, 384, 512, 768)]
    assert chosen("tiny D64 S128") == ["tiny D64 S128"]
    with pytest.raises(run.UsageError, match=r"^--cases: nothing is called 'flux'; there are: dense D128 full S4096, "):
        chosen("flux")
    with pytest.raises(run.UsageError, match=r"^--providers: nothing is called 'fa9'; there are: tilewise-"):
        run.chosen_providers(run.RunOptions("cpu", providers=("flex", "fa9")))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (1, 3, 1, 5), (2, 1, 4, 5)])
def test_what_flex_adds_is_the_bias(shape):
    bias = torch.randn(shape)
    add = _score_mod(bias)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 2, 1)):
        assert add(1.0, b, h, i, j) == 1.0 + bias.expand(2, 3, 4, 5)[b, h, i, j]


def test_median_and_spread():
    assert timing.summary([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert timing.summary([2.0]) == Timing(2.0, 2.0, 2.0, 1)


# Results


def timed(case: str, provider: str, forward: float, backward: float | None = None) -> Row:
    def at(seconds: float) -> Timing:
        return Timing(seconds, 0.9 * seconds, 1.1 * seconds, 10)

    back = None if backward is None else at(backward)
    return Row(case, provider, "measured", None, {"o": 1e-3}, at(forward), back, 1 << 20, 2.0)


def stored() -> Results:
    """Results as a GPU would give them, in round numbers."""
    long = Case("dense D64 full", 1, 1, 1, 2048, 2048, 64)
    short = Case("dense D64 full", 2, 1, 1, 1024, 1024, 64)
    tiny = Case("tiny D64", 1, 1, 1, 128, 128, 64, host=True)
    return Results(
        commit="0123456789abcdef",
        changed_files=[],
        date="2026-01-02T03:04:05+00:00",
        device={"type": "cuda", "name": "NVIDIA X", "driver": "1.2"},
        versions={"torch": "2.11.0", "triton": "3.6.0"},
        settings={},
        unavailable={"fa4": "flash-attn-4 is not installed"},
        calibration=Calibration({"bfloat16": 1e12}, 1e12),
        cases=[long, tiny, short],
        rows=[
            timed(long.name, "tilewise-hopper", 2e-3, 8e-3),
            timed(long.name, "tilewise-triton", 4e-3, 5e-3),
            timed(long.name, "flex", 3e-3, 4e-3),
            timed(long.name, "sdpa-cudnn", 6e-3, 8e-3),
            replace(timed(tiny.name, "tilewise-triton", 1e-3, 1e-3), host_s=70e-6, host_both_s=150e-6),
            timed(short.name, "tilewise-triton", 1e-3),
            Row(short.name, "flex", "failed", "out of memory"),
        ],
    )


def test_ratios_and_shares_by_hand():
    found = stored()
    hopper, triton, flex, _cudnn, _, short, _ = found.rows
    assert found.best_other(hopper, "forward") is flex
    assert found.ratio(hopper, "forward") == pytest.approx(1.5)
    assert found.ratio(triton, "forward") == pytest.approx(0.75)
    assert found.ratio(flex, "forward") == pytest.approx(2 / 3)  # tilewise's best backend
    assert found.best_of_ours(hopper.case, "backward") is triton
    assert found.ratio(triton, "backward") == pytest.approx(0.8)
    assert found.ratio(short, "forward") is None
    assert found.flops(short, "backward") is None
    flops = 4 * 2048 * 2048 * 64
    assert found.flops(hopper, "forward") == pytest.approx(flops / 2e-3)
    assert found.flops(hopper, "backward") == pytest.approx(2.5 * flops / 8e-3)
    wider = replace(found, calibration=Calibration({"bfloat16": 1e12, "float32": 2e12}, 1e12))
    assert [wider.limits(dtype).flops for dtype in ("bfloat16", "float32")] == [2e12, 2e12]
    narrower = replace(found, calibration=Calibration({"bfloat16": 2e12, "float32": 1e12}, 1e12))
    assert [narrower.limits(dtype).flops for dtype in ("bfloat16", "float32")] == [2e12, 1e12]
    assert found.share(hopper, "forward") == pytest.approx(flops / 1e12 / 2e-3)  # far above the break-even


def test_json_there_and_back(measured, tmp_path):
    for name, found in (("a.json", measured[0]), ("b.json", stored())):
        results.write(found, tmp_path / name)
        assert results.read(tmp_path / name) == found
        document = json.loads((tmp_path / name).read_text())
        assert document["schema"] == results.SCHEMA
        assert {"commit", "device", "versions", "calibration", "cases", "rows", "settings", "date"} <= set(document)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_json_has_no_nan(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    found = stored()
    found.rows[-1] = replace(found.rows[-1], errors={"o": math.nan, "dq": math.inf, "dk": 0.5})
    results.write(found, tmp_path / "x.json")
    json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse)
    errors = results.read(tmp_path / "x.json").rows[-1].errors
    assert math.isnan(errors["o"])
    assert math.isnan(errors["dq"])
    assert errors["dk"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "not results of tilewise bench: schema 1 is needed, found 99"),
        (lambda d: d.pop("schema"), "not results of tilewise bench: schema 1 is needed, found none"),
        (lambda d: d.pop("calibration"), "damaged results: 'calibration' is missing"),
        (lambda d: d["rows"][0].update(speed=3), "damaged results: "),
        (lambda d: d["rows"][0].update(case="x"), "a row names the case 'x', which is not among the cases"),
        (lambda d: d["rows"][0]["forward"].update(median_s=0), "not a positive number: 0"),
        (
            lambda d: d["calibration"]["matmul_flops"].update(int3=1.0),
            "a calibration is for 'int3', which is not a dtype",
        ),
        (lambda d: d["calibration"]["matmul_flops"].clear(), "there is no calibration for bfloat16"),
    ],
)
def test_other_files_are_refused(change, message, tmp_path):
    path = tmp_path / "x.json"
    results.write(stored(), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        results.read(path)


# Tables and pictures


def test_the_report_has_the_numbers():
    text = report.markdown(stored(), "benchmarks/results/x.json", [("Forward", "images/x-forward.png")])
    lines = text.splitlines()
    assert "NVIDIA X (driver 1.2), 2026-01-02T03:04:05+00:00; torch 2.11.0, triton 3.6.0; commit 0123456789ab." in text
    assert "matrix product 1 TFLOP/s in bfloat16; copy 1 TB/s" in text
    assert "![Forward](images/x-forward.png)" in lines
    row = "| dense D64 full S2048 | hopper | 2 | 0.537 | 54% | 1.50 | flex | 8 | 0.336 | 34% | 0.50 | flex |"
    assert row in lines
    assert "| dense D64 full S1024 | – | 0.537 / – | failed | – |" in lines  # families together, by length
    assert lines.index("| dense D64 full S1024 | – | 0.537 / – | failed | – |") < lines.index(
        "| dense D64 full S2048 | 0.537 / 0.336 | 0.268 / 0.537 | 0.358 / 0.671 | 0.179 / 0.336 |"
    )
    assert "Slower than the best other provider: dense D64 full S2048 backward (0.80 of flex)." in lines
    assert "| tilewise-triton | 70 / 150 | 2.0 / 2.0 |" in lines
    assert "- fa4: flash-attn-4 is not installed" in lines
    assert "- flex failed: out of memory (dense D64 full S1024)" in lines


def test_the_report_leaves_out_what_nobody_measured():
    found = stored()
    softmax = operators.SoftmaxCase("softmax", 1000, 1000)
    rows = [timed(softmax.name, "tilewise-softmax", 1e-5, 6e-6), replace(found.rows[3], memory_bytes=-5)]
    rows += [Row("tiny D64", "sdpa-cudnn", "declined", "too tiny")]
    text = report.markdown(replace(found, cases=[*found.cases, softmax], rows=rows), "x.json", [])
    assert "| case | sdpa-cudnn |" in text  # attention's providers only
    assert "| dense D64 full S2048 | 0 |" in text  # no -0
    assert "| dense D64 full S1024 |" not in text
    assert "| tiny D64 S128 | – |" not in text
    assert "### Softmax, share of the limit, forward / backward\n\n| case | tilewise-softmax |" in text
    assert "| softmax N1000 | 50% / 100% |" in text
    assert "### Softmax" not in report.markdown(found, "x.json", [])


def test_the_report_goes_between_its_markers():
    begin, end = report.markers("x")
    document = f"before\n\n{begin}\nold\n{end}\n\nafter\n"
    once = report.insert(document, "x", "new\n\nlines")
    assert once == f"before\n\n{begin}\n\nnew\n\nlines\n\n{end}\n\nafter\n"
    assert report.insert(once, "x", "new\n\nlines") == once
    assert report.between(once, "x") == "new\n\nlines"
    for wrong in ("", f"{end}\n{begin}", document + document):
        with pytest.raises(ValueError, match="needs one line"):
            report.insert(wrong, "x", "new")


def test_the_terminal_table(measured):
    text = report.terminal(measured[0])
    assert "host time of a forward call: tilewise-cpu" in text
    assert re.search(r"^bias S24 +tilewise-cpu +[\d.e-]+ +[\d.e-]+ +\d+% +\d", text, re.MULTILINE)
    assert "Not measured:" in text
    lines = text.splitlines()
    assert lines[lines.index("Not measured:") + 1] == f"  {measured[1].left_out}"
    assert text.count("CUDA device") == 1
    assert "  flex: has no backward on the CPU" in lines
    assert f"  sdpa-flash failed: no kernel for this call ({BIASED.name}, {TINY.name})" in lines
    assert re.search(r"^case +provider +forward ms  GFLOP/s ", text, re.MULTILINE)
    assert not re.search(r"\de[+-]\d|\b0\.000", "\n".join(lines[: lines.index("Not measured:")]))


@pytest.mark.parametrize("rows", ["all", "none"])
def test_pictures_are_drawn(rows, tmp_path):
    results.write(stored() if rows == "all" else replace(stored(), rows=[]), tmp_path / "x.json")
    result = bench("plot", tmp_path / "x.json", "--into", tmp_path / "new" / "pictures")
    assert result.exit_code == 0, result.output
    drawn = sorted((tmp_path / "new" / "pictures").iterdir())
    assert [path.name for path in drawn] == sorted(name for _, name in report.picture_names(Path("y/x.json")))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


# The command line


bench = partial(invoke, "bench")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: must be one of cpu, cuda, got 'tpu'"),
        (["--device", "cuda"], "torch sees no CUDA device here; use --device cpu"),
        (["list", "--device", "cuda"], "torch sees no CUDA device here; use --device cpu"),
        (["--device", "cpu", "--cases", "flux"], "--cases: nothing is called 'flux'"),
        (["--device", "cpu", "--cases", ","], "--cases: names separated by commas are needed, got ','"),
        (["--device", "cpu", "--providers", "fa9"], "--providers: nothing is called 'fa9'"),
        (["--budget", "soon"], "Invalid value for --budget: a number is needed, got 'soon'"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--json", "."], "cannot write .: it is a folder"),
        (["plot", "absent.json"], "cannot read absent.json: No such file or directory"),
        (["report", "absent.json"], "cannot read absent.json: No such file or directory"),
        (["report", "x.json", "--into", "."], "is a directory"),
        (["plot", "."], "cannot read .: Is a directory"),
        (["everything"], "No such command 'everything'"),
    ],
)
def test_mistakes_end_with_status_2_and_a_message(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = bench(*arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in shown(result.output).replace("'--cases'", "--cases").replace("'--providers'", "--providers")


@pytest.fixture
def two_cases(monkeypatch, no_calibration):
    monkeypatch.setattr(run, "cases", lambda device, quick: [DECODE, TINY])


def test_bench_writes_json_and_pictures(two_cases, tmp_path):
    path, folder = tmp_path / "x.json", tmp_path / "new" / "pictures"
    result = bench("--device", "cpu", "--quick", "--json", path, "--plot", folder, "--commit", "abc")
    assert result.exit_code == 0, result.output
    assert [case.name for case in results.read(path).cases] == [DECODE.name, TINY.name]
    assert results.read(path).commit == "abc"
    assert "decode S64" in result.output
    assert len(list(folder.iterdir())) == 3


def test_a_terminal_gets_a_bar(two_cases, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", partial(Console, file=screen, force_terminal=True, width=200))
    assert bench("--device", "cpu", "--cases", "tiny", "--providers", "sdpa-math").exit_code == 0
    assert "tiny S16: sdpa-math" in screen.getvalue()
    assert "1/1" in screen.getvalue()


def test_bench_ends_with_status_1_when_tilewise_is_wrong(two_cases, monkeypatch):
    monkeypatch.setattr(run, "providers", lambda device: [attend(last_row_is_lost)])
    result = bench("--device", "cpu", "--cases", "tiny")
    assert result.exit_code == 1
    assert "wrong: o is off by" in result.output


def test_list_names_cases_and_providers():
    output = bench("list", "--device", "cpu").output
    assert all(f"  {case.name}\n" in output for case in cases.cases("cpu"))
    assert re.search(r"^  fa4 +measured on CUDA devices only$", output, re.MULTILINE)
    assert re.search(r"^  tilewise-triton +needs a CUDA device, the tensors are on cpu$", output, re.MULTILINE)
    assert re.search(r"^  torch-softmax-compiled$", output, re.MULTILINE)


def test_report_into_a_document(tmp_path):
    path, document = tmp_path / "benchmarks" / "x.json", tmp_path / "docs" / "performance.md"
    path.parent.mkdir()
    document.parent.mkdir()
    results.write(stored(), path)
    begin, end = report.markers("x")
    document.write_text(f"# Lessons\n{begin}\n{end}\nby hand\n")
    result = bench("report", path, "--into", document)
    assert result.exit_code == 0, result.output
    text = document.read_text()
    assert "`benchmarks/x.json`: NVIDIA X" in text
    assert "![Roofline](images/x-roofline.png)" in text
    assert text.endswith("\nby hand\n")
    assert len(list((document.parent / "images").iterdir())) == 3
    document.write_text("no markers")
    result = bench("report", path, "--into", document)
    assert result.exit_code == 2
    assert "needs one line" in shown(result.output)
    assert "NVIDIA X" in bench("report", path).output


def test_without_typer_the_run_is_the_same(two_cases, monkeypatch, capsys, tmp_path):
    path = tmp_path / "x.json"
    arguments = ["--device", "cpu", "--providers", "tilewise-cpu", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert plain.main() == 0
    assert [row.provider for row in results.read(path).rows] == ["tilewise-cpu"] * 2
    assert "[2/2] tiny S16" in capsys.readouterr().out
    for wrong in ("--cases=flux", "--cases=,", "--budget=nan", "--json=no/such/folder/x.json", "--json=."):
        monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", wrong])
        with pytest.raises(SystemExit) as stop:
            plain.main()
        assert stop.value.code == 2


def test_files_of_a_commit_that_is_given_are_not_looked_for(monkeypatch):
    """Of a copy git says what another folder's files are, or nothing."""
    monkeypatch.setattr(run, "_git", lambda *words: f"{words[0]}: M a file")
    device = torch.device("cpu")
    given = run.origin(device, "abc")
    assert (given["commit"], given["changed_files"]) == ("abc", [])
    assert run.origin(device)["changed_files"] == ["status: M a file"]
