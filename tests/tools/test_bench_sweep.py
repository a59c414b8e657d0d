"""The sweeps beside the bench: each runs at tiny sizes or says what it needs, and measures what the kept files have."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise.ops.gemm.config import hopper_config
from tilewise_tools.bench import timing
from tilewise_tools.bench.providers import providers
from tilewise_tools.bench.results import Calibration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def sweep():
    return importlib.import_module("tilewise_tools.benchmarks.sweep")


@pytest.fixture
def on_cpu():
    return importlib.import_module("tilewise_tools.benchmarks.on_cpu")


@pytest.fixture
def on_gpu():
    pytest.importorskip("triton")
    return importlib.import_module("tilewise_tools.benchmarks.on_gpu")


@pytest.fixture
def hopper(monkeypatch, sweep):
    """A GPU, as far as the command line asks about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(
        sweep, "origin", lambda device, commit: {"commit": commit, "device": {"type": device.type, "name": "X"}}
    )
    monkeypatch.setattr(sweep, "calibrate", lambda clock, dtypes: Calibration(dict.fromkeys(dtypes, 1e11), 1e10))


def kept(name):
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_who_begins_changes_and_the_first_turns_do_not_count():
    in_turns = importlib.import_module("tilewise_tools.benchmarks.turns").in_turns
    said = []
    takes = {name: lambda name=name: said.append(name) or len(said) for name in "abc"}
    assert in_turns(takes, 2, unmeasured=1) == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert "".join(said) == "abcbcacab"
    times = in_turns({"a": lambda: None}, 1, seconds=0.01)
    assert len(times["a"]) > 1


def test_attention_on_a_cpu(sweep, on_cpu, monkeypatch, tmp_path, capsys):
    tiny = tuple(replace(case, length=40, gate=0.0) for case in on_cpu.CASES)
    monkeypatch.setattr(on_cpu, "CASES", tiny)
    monkeypatch.setattr(on_cpu, "MEMORY_LENGTHS", (48,))
    threads = torch.get_num_threads()
    monkeypatch.setattr(on_cpu, "extra_memory_in_child", lambda case, *of: on_cpu.memory_of(case.name, *of))
    path = tmp_path / "x.json"
    arguments = ["attention-cpu", "--turns", "2", "--threads", str(threads)]
    assert sweep.main([*arguments, "--json", str(path), "--commit", "abc"]) == 0
    document, before = json.loads(path.read_text()), kept("cpu")
    assert (document["sweep"], document["commit"], document["device"]["type"]) == ("attention-cpu", "abc", "cpu")
    assert [row["name"] for row in document["rows"]] == [row["name"] for row in before["rows"]]
    assert document["rows"][0].keys() == {*before["rows"][0], "threads"}
    assert all(len(seconds) == 2 for row in document["rows"] for seconds in row["seconds"].values())
    assert all(row["extra_bytes"].keys() == {"SDPA", "tilewise"} for row in document["rows"])

    monkeypatch.setattr(on_cpu, "CASES", [replace(tiny[0], gate=1e9)])
    assert sweep.main(arguments) == 1
    assert "MISSED" in capsys.readouterr().out
    if on_cpu.CLEAR_REFS.exists():  # as a fresh process is asked
        assert sweep.main([*arguments, "--memory", tiny[0].name, "SDPA", "48"]) == 0
        int(capsys.readouterr().out)


def test_the_softmax_on_a_cpu(sweep, on_cpu, monkeypatch, tmp_path):
    before = kept("cpu_softmax")
    cases = [(row["case"], tuple(row["shape"]), row["dim"]) for row in before["rows"][:12]]
    assert [case[:3] for case in on_cpu.SOFTMAX_CASES] == cases
    tiny = tuple((name, tuple(3 for _ in shape), *rest) for name, shape, *rest in on_cpu.SOFTMAX_CASES)
    monkeypatch.setattr(on_cpu, "SOFTMAX_CASES", tiny)
    monkeypatch.setattr(on_cpu, "SOFTMAX_SECONDS", 0.0)
    monkeypatch.setattr(on_cpu, "SOFTMAX_GATE", 1e9)
    path = tmp_path / "x.json"
    arguments = ["softmax-cpu", "--turns", "2", "--threads", str(torch.get_num_threads())]
    assert sweep.main([*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [[row[name] for name in ("case", "dtype", "dim")] for row in rows] == [
        [row[name] for name in ("case", "dtype", "dim")] for row in before["rows"][:24]
    ]
    assert rows[0].keys() == before["rows"][0].keys()

    monkeypatch.setattr(on_cpu, "SOFTMAX_GATE", 0.0)
    assert sweep.main([*arguments, "--cases", "plain"]) == 1
    assert sweep.main([*arguments, "--cases", "mask, few"]) == 0  # have no gate


def test_a_wrong_result_ends_the_run(sweep, on_cpu, monkeypatch):
    monkeypatch.setattr(on_cpu.tilewise, "softmax", lambda x, *, scale, bias, mask, dim: torch.softmax(x, dim) * 1.01)
    monkeypatch.setattr(on_cpu, "SOFTMAX_CASES", (("plain", (4, 8), -1, ()),))
    with pytest.raises(SystemExit, match=r"\(4, 8\) \(\): the results differ by .* of their largest element"):
        sweep.main(["softmax-cpu", "--threads", str(torch.get_num_threads())])


def test_what_a_call_costs_the_host(sweep, on_gpu, hopper, monkeypatch, tmp_path):
    """With the CPU's backend in place of each provider."""
    (stand_in,) = (provider for provider in providers(CPU) if provider.name == "tilewise-cpu")
    names = ("sdpa-flash", "sdpa-efficient", "tilewise-hopper", "tilewise-triton")
    monkeypatch.setattr(on_gpu, "providers", lambda device: [stand_in._replace(name=name) for name in names])
    monkeypatch.setattr(on_gpu, "GPU", CPU)
    monkeypatch.setattr(timing, "_HOST_CALLS", 10)
    path = tmp_path / "x.json"
    assert sweep.main(["host", "--turns", "1", "--json", str(path)]) == 0
    document, before = json.loads(path.read_text()), kept("h200_host")
    assert [*document.pop("calibration")] == [*before["calibration"]]
    for name in ("unit", "columns"):
        assert document[name] == before[name]
    assert {case: [*rows] for case, rows in document["cases"].items()} == {
        case: [*rows] for case, rows in before["cases"].items()
    }
    assert all(len(row) == 3 and min(row) > 0 for rows in document["cases"].values() for row in rows.values())


def test_the_products_are_those_of_the_kept_file(on_gpu, monkeypatch):
    configs = []
    monkeypatch.setattr(on_gpu, "GPU", torch.device("meta"))
    monkeypatch.setattr(on_gpu.hopper, "prepare", lambda product, *rest: configs.append((product, rest[-1])))
    found = [(name, gate) for name, _, gate, _, _ in on_gpu.product_cases()]
    assert found == [(row["name"], row["gate"]) for row in kept("h200_matmul")["rows"]]
    assert sum(config != hopper_config(product) for product, config in configs) == 5


def test_the_tiles_of_the_softmax_are_those_of_the_kept_file(on_gpu):
    before = [(row["dtype"], row["length"], row["pass"], row["variant"]) for row in kept("h200_softmax")["rows"]]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for length in on_gpu.LENGTHS:
            for which in ("forward", "backward"):
                of = (length, dtype.itemsize, which == "backward", 132)
                tiles = dict(on_gpu.softmax_variants(*of, registers=False))
                assert all(config.block * config.parts == length for name, config in tiles.items() if "of" in name)
                found += [(str(dtype), length, which, name) for name in (*tiles, "torch")]
                if dtype == torch.bfloat16 and length >= 1 << 14:
                    assert len(dict(on_gpu.softmax_variants(*of, registers=True))) > 4
    assert found == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["host"], "host: needs a CUDA device of compute capability 9.0\n"),
        (["matmul"], "matmul: needs a CUDA device of compute capability 9.0\n"),
        (["softmax", "--registers"], "softmax: needs a CUDA device of compute capability 8.0 or later\n"),
        (["attention-cpu", "--cases", "xyz"], "--cases: nothing is called 'xyz'\n"),
        (["attention-cpu", "--json", "/nowhere/x.json"], "--json: there is no folder /nowhere\n"),
        (["softmax-cpu", "--turns", "0"], "argument --turns: must be 1 or more, got 0\n"),
    ],
)
def test_mistakes_say_what_is_needed(arguments, message, sweep, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        sweep.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(("capability", "able"), [((7, 5), ()), ((8, 0), ("softmax",)), ((10, 0), ("softmax",))])
def test_another_gpu_runs_what_it_can(capability, able, sweep, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    found = [name for name, one in sweep.SWEEPS.items() if not sweep.lacking(one.capability)]
    assert found == ["attention-cpu", "softmax-cpu", *able]
