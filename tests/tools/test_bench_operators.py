"""The bench's cases of softmax and matmul: right answers, work, rows, results as JSON."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.explanation.work import Work
from tilewise_tools.bench import cases, operators, reference, report, results, run
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.operators import MatmulCase, SoftmaxCase

CPU = torch.device("cpu")
SOFTMAX = SoftmaxCase("softmax", 6, 50, "float32")
PRODUCT = MatmulCase("matmul", 6, 5, 4, dtype="float32")
SUM = MatmulCase("matmul plus c", 6, 5, 4, added=True, dtype="float32")
ATTENTION = Case("dense", 1, 1, 1, 8, 8, 8, dtype="float32")


@pytest.mark.parametrize("case", [SOFTMAX, PRODUCT, SUM], ids=lambda case: case.name)
def test_the_right_answer_is_autograds(case):
    x = case.inputs(CPU)
    leaves = {name: leaf.double().detach().requires_grad_() for name, leaf in x.named.items()}
    a = [*leaves.values()]
    y = torch.softmax(a[0], -1) if case is SOFTMAX else a[0] @ a[1] + (a[2] if case is SUM else 0)
    expected = dict(zip(["o", *(f"d{name}" for name in leaves)], (y, *torch.autograd.grad(y, a, x.do)), strict=True))
    exact = case.exact(x)
    assert set(exact) == set(expected)
    assert reference.errors(expected, exact) == pytest.approx(dict.fromkeys(exact, 0.0), abs=1e-12)


def test_work_by_hand():
    assert SOFTMAX.work("forward") == Work(1500, 2 * 1200, 0)
    assert SOFTMAX.work("backward") == Work(1500, 3 * 1200, 0)
    a, b, y = 96, 80, 120
    assert PRODUCT.work("forward") == Work(240, a + b + y, 0)
    assert PRODUCT.work("backward") == Work(480, 2 * (a + b) + y, 0)
    assert SUM.work("forward") == Work(240, a + b + 2 * y, 0)


def test_a_run_asks_each_provider_for_its_own_operator(no_calibration, tmp_path):
    options = run.RunOptions("cpu", quick=True, providers=("tilewise-softmax", "torch-softmax", "sdpa-math"))
    found = run.run(options, run.PlainProgress(), todo=[SOFTMAX, ATTENTION])
    outcomes = {(row.case, row.provider): row.outcome for row in found.rows}
    assert outcomes == {
        (SOFTMAX.name, "tilewise-softmax"): "measured",
        (SOFTMAX.name, "torch-softmax"): "measured",
        (ATTENTION.name, "sdpa-math"): "measured",
    }
    ours = found.of(SOFTMAX.name)[0]
    assert set(ours.errors) == {"o", "dx"}
    assert found.share(ours, "forward") == pytest.approx(2 * 1200 / 1e10 / ours.forward.median_s)
    assert SOFTMAX.name in report.terminal(found)
    results.write(found, tmp_path / "x.json")
    assert results.read(tmp_path / "x.json") == found


def test_a_wrong_softmax_is_not_timed(no_calibration, monkeypatch):
    monkeypatch.setattr(tilewise, "softmax", lambda x: 1.01 * torch.softmax(x, -1), raising=False)
    found = run.run(run.RunOptions("cpu", providers=("tilewise-softmax",)), run.PlainProgress(), todo=[SOFTMAX])
    assert [row.outcome for row in found.rows] == ["failed"]
    assert not run.ours_are_right(found)


def test_products_are_measured(no_calibration):
    options = run.RunOptions("cpu", providers=("matmul",))
    found = run.run(options, run.PlainProgress(), todo=[PRODUCT, SUM])
    assert {row.outcome for row in found.rows} == {"measured"}
    assert {row.provider for row in found.rows} == {"tilewise-matmul", "torch-matmul"}
    assert set(found.rows[-1].errors) == {"o", "da", "db", "dc"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_device_has_cases_of_both(device):
    for quick in (False, True):
        names = {case.operator for case in cases.cases(device, quick)}
        assert names == {"attention", "softmax", "matmul"} | (set() if quick else {"varlen", "windows"})
    assert {case.keys for case in operators.cases("cuda", quick=False) if case.operator == "softmax"} == {
        1 << n for n in (10, 12, 13, 14, 15, 16, 17)
    }
