"""Biases that runs of batch elements share: a call of each backend, on the CPU and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from bias_runs import RunsCase, hold_runs

FLOAT, DOUBLE = torch.float32, torch.float64
CASES = [
    RunsCase(),
    RunsCase("1mn", "r11n", planted=True),
    RunsCase("kmn", "1hmn", H=4, deterministic=True),
    RunsCase("hmn", "r1mn", keys=True, M=9, N=12, D=16, options=(("causal", True),)),
    RunsCase("hmn", M=33, N=40, trained=False, options=(("softcap", 3.0),)),
]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu(backend, dtype, case):
    hold_runs(case._replace(dtype=dtype), backend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton(interpreter, case):
    few = {"runs": 2, "rows": 3, "N": min(case.N, 70)}  # two tiles of queries, and three of keys
    interpreter(hold_runs, case._replace(dtype=FLOAT, **few), "triton")
