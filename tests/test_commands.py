"""``tilewise explain`` and ``tilewise doctor`` on the command line."""

from __future__ import annotations

import importlib.util
import re
import stat
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise import cli, explain
from tilewise.backends import cpu
from tilewise.commands import doctor
from tilewise.explanation import traffic_table


def command(*arguments: object):
    return CliRunner().invoke(cli.make_app(), list(map(str, arguments)))


def shown(output: str) -> str:
    """What typer printed, without its line breaks."""
    return " ".join(output.split())


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_the_command_modules_import_no_torch():
    """So that --help is quick."""
    modules = ", ".join(cli.COMMANDS.values())
    code = f"import sys, {modules}; print(*{{'torch', 'rich.progress', 'matplotlib'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


SUBCOMMANDS = ("list", "plot", "report")


@pytest.mark.parametrize(
    "arguments", [[], *([name] for name in cli.COMMANDS), *(["bench", name] for name in SUBCOMMANDS)], ids=" ".join
)
def test_help(arguments, monkeypatch):
    """Also in a narrow terminal: every option by its whole name, every command with a description that is not cut."""
    monkeypatch.setenv("COLUMNS", "40")
    result = command(*arguments, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.output
    assert "  --help " in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "80")
    text = command(*arguments, "--help").output
    assert "..." not in text.replace("[ARGS]...", "").replace("fp4, ...", "")


def test_version():
    result = command("--version")
    assert (result.exit_code, result.output) == (0, f"tilewise {tilewise.__version__}\n")


# explain


def test_explain_is_tilewise_explain():
    def meta(*shape, **options):
        return torch.empty(shape, device="meta", dtype=torch.float16, **options)

    options = "--shape 4,16,4096,64 --kv-shape 4,4,8192,64 --value-dim 32 --bias 16,4096,8192 --dtype float16 "
    options += "--causal --window 512,none --softcap 30 --scale 0.5 --deterministic --device sm_90"
    result = command("explain", *options.split())
    expected = explain(
        meta(4, 16, 4096, 64), meta(4, 4, 8192, 64), meta(4, 4, 8192, 32),
        bias=meta(16, 4096, 8192, requires_grad=True), causal=True, window=(512, None), softcap=30.0, scale=0.5,
        deterministic=True, device="sm_90",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output == "\n".join([str(expected), "", *traffic_table(expected), ""])


def test_explain_makes_no_tensor_of_that_size(no_gpu):
    """Shapes of 128 TiB; also on this machine's own device."""
    result = command("explain", "--shape", "64,64,65536,128", "--bias", "64,64,65536,65536", "--mask", "65536,65536")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("attention on cpu, bfloat16\n")
    assert "bias (64, 64, 65536, 65536) bfloat16, with its gradient" in result.output


def test_the_traffic_table_by_hand():
    """B=H=1, M=N=1024, D=64 in bfloat16: a matrix is 2 MiB, q, k, v and o 128 KiB each, the LSE 4 KiB."""
    result = command("explain", "--shape", "1,1,1024,64", "--device", "sm_80", "--limits", "1e12,1e9")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines()[-11:] if line.strip()}
    assert rows["forward"] == ["528", "kB", "8.92", "MB", "16.9", "x"]
    assert rows["S"] == ["2", "times", "2.1", "MB", "–", "4.19", "MB"]
    assert rows["dS"] == ["3", "times", "2.1", "MB", "–", "6.29", "MB"]
    assert "  takes at least            528 µs     8.92 ms    16.9 x" in result.output.splitlines()


def test_explain_of_nothing_has_no_table():
    result = command("explain", "--shape", "1,1,0,64", "--kv-shape", "1,1,8,64", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "memory traffic  " not in result.output


SHAPE = ("--shape", "4,16,64,64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--shape'"),
        (["--shape", "4,16,64"], "--shape: 4 sizes are needed, got 3: '4,16,64'"),
        (["--shape", "4,16,x,64"], "--shape: sizes separated by commas are needed, got '4,16,x,64'"),
        (["--shape", "4,-1,64,64"], "--shape: a size cannot be negative"),
        (["--shape", f"1,1,{10**20},64"], "--shape: at most 2**58 elements are allowed"),
        (["--shape", f"0,{2**40},{2**40},64"], "--shape: at most 2**58 elements are allowed"),
        ([*SHAPE, "--value-dim", "300"], "--value-dim': Input should be less than or equal to 256"),
        ([*SHAPE, "--bias", "1,1,1,1,1"], "--bias: at most 4 sizes are needed, got 5"),
        ([*SHAPE, "--bias", "3,3"], "bias: shape (1, 1, 3, 3) does not broadcast"),
        ([*SHAPE, "--kv-shape", "4,3,64,64"], "the 3 key/value heads must divide the 16 query heads"),
        ([*SHAPE, "--device", "tpu"], "--device: must be cpu, cuda or a compute capability such as sm_90, got 'tpu'"),
        ([*SHAPE, "--device", "cuda"], "--device: torch sees no CUDA device here"),
        ([*SHAPE, "--window", "3"], "--window: two widths are needed, each a number or none, got '3'"),
        ([*SHAPE, "--window", "-3,0"], "window: left width must be 0 or more"),
        ([*SHAPE, "--limits", "fast,slow"], "--limits: two numbers are needed"),
        ([*SHAPE, "--limits", "0,1"], "limits: must be positive and finite"),
        ([*SHAPE, "--backend", "metal"], "backend: must be one of"),
        ([*SHAPE, "--dtype", "int8"], "'int8' is not one of"),
    ],
)
def test_mistakes_in_explain(arguments, message, no_gpu):
    result = command("explain", *arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in shown(result.output)


# doctor


def test_doctor_on_a_machine_without_a_gpu(no_gpu):
    result = command("doctor")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[1].startswith("cpu: ")
    assert any(re.match(r"  backend cpu, float32: right \(o \d", line) for line in lines)
    assert any(line.startswith("  backend triton, float32: cannot run here: ") for line in lines)
    assert "cuda: torch sees no CUDA device" in lines
    assert any(line.startswith("ptxas") for line in lines)
    assert lines[-1] == "tilewise works here"


@pytest.mark.parametrize("defect", ["wrong", "raises"])
def test_doctor_ends_with_status_1_when_a_backend_is_wrong(defect, no_gpu, monkeypatch):
    backward = cpu.backward

    def broken(*arguments):
        if defect == "raises":
            raise RuntimeError("no such kernel\nand more")
        gradients = backward(*arguments)
        return gradients._replace(bias=2 * gradients.bias)

    monkeypatch.setattr(cpu, "backward", broken)
    result = command("doctor")
    assert result.exit_code == 1
    found = "wrong: dbias is off by 1.0e+00 of its norm" if defect == "wrong" else "RuntimeError: no such kernel,"
    assert f"backend cpu, float32: PROBLEM: {found}" in result.output
    assert result.output.splitlines()[-1] == "PROBLEM: see above"


def test_doctor_ends_with_status_1_when_no_backend_can_run(no_gpu, monkeypatch):
    monkeypatch.setattr(cpu, "declines", lambda problem: "it is tired")
    result = command("doctor")
    assert result.exit_code == 1
    assert "backend cpu, float32: cannot run here: it is tired" in result.output
    assert "PROBLEM: no backend can run on this device" in result.output


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("12.4", "older than the versions with the known wgmma hazard"),
        ("12.8", "has the known wgmma hazard"),
        ("12.9", "has the known wgmma hazard"),
        ("13.0", "may have the known wgmma hazard"),
        ("13.3", "without the known wgmma hazard"),
        ("14.0", "without the known wgmma hazard"),
    ],
)
def test_the_ptxas_that_triton_is_told_to_use(release, words, monkeypatch, tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.93'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    line = doctor.ptxas_line([(9, 0)])
    assert line.startswith(f"ptxas {release}: {words}")
    assert "concerns" not in line
    assert doctor.ptxas_line([(8, 0)]).endswith(" (concerns GPUs of compute capability 9.0, none here)")


def test_a_ptxas_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "absent"))
    assert doctor.ptxas_line([]).endswith("absent does not tell its version")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor.ptxas_line([]).startswith("ptxas: none found")
