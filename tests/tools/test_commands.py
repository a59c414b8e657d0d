"""``tilewise explain``, ``layout`` and ``doctor`` on the command line."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from command_line import invoke, shown
from helpers import compute_by
from processes import python

import tilewise
from tilewise import TileMask, explain
from tilewise.backends import cpu
from tilewise.explanation.text import traffic_table
from tilewise.spec.score import Band
from tilewise_tools import cli
from tilewise_tools.commands import arguments, doctor, patterns, spelling

SHAPE = ("--shape", "4,16,64,64")


def test_the_command_modules_import_no_torch():
    """So that --help is quick."""
    modules = ", ".join(cli.COMMANDS.values())
    code = f"import sys, {modules}; print(*{{'torch', 'rich.progress', 'matplotlib'}} & set(sys.modules))"
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_another_encoding_is_no_error():
    """A terminal or a file whose encoding lacks the dash of the table."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = python("-m", "tilewise", "explain", *SHAPE, "--device", "sm_90", env=environment, text=False)
    assert done.stderr == b""
    assert b"  S  2 times 524 kB            ?     1.05 MB" in done.stdout.splitlines()
    assert "µs".encode("latin-1") in done.stdout


SUBCOMMANDS = ("list", "plot", "report")


@pytest.mark.parametrize(
    "arguments", [[], *([name] for name in cli.COMMANDS), *(["bench", name] for name in SUBCOMMANDS)], ids=" ".join
)
def test_help(arguments, monkeypatch):
    """Also in a narrow terminal: every option by its whole name, every command with a description that is not cut."""
    monkeypatch.setenv("COLUMNS", "40")
    result = invoke(*arguments, "--help")
    assert result.exit_code == 0
    assert invoke(*arguments, "-h").output == result.output
    assert "Usage: " in result.output
    assert "  -h, --help " in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(*arguments, "--help").output
    assert "..." not in text.replace("[ARGS]...", "").replace("fp4, ...", "")


@pytest.mark.parametrize(
    ("typed", "completed"), [("do", ["doctor"]), ("explain --ma", ["--mask"]), ("layout --p", ["--png"])]
)
def test_a_shell_completes_commands_and_options(typed, completed):
    words = f"tilewise {typed}".split()
    asked = {"_TILEWISE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert python("-m", "tilewise", env={**os.environ, **asked}).stdout.split() == completed
    assert "--install-completion" in invoke("--help").output


def test_no_command_says_door():
    said = [invoke(*words, "-h").output for words in ([], *([name] for name in cli.COMMANDS))]
    assert "door" not in " ".join([*said, invoke("bench", "list").output, invoke("doctor").output])


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"tilewise {tilewise.__version__}\n")


# explain


def test_explain_is_tilewise_explain():
    def meta(*shape, **options):
        return torch.empty(shape, device="meta", dtype=torch.float16, **options)

    options = "--shape 4,16,4096,64 --kv-shape 4,4,8192,64 --value-dim 32 --bias 16,4096,8192 --dtype float16 "
    options += (
        "--causal --window 512,none --softcap 30 --scale 0.5 --deterministic --device sm_90 --sink 16 --dropout-p 0.1"
    )
    result = invoke("explain", *options.split())
    expected = explain(
        meta(4, 16, 4096, 64), meta(4, 4, 8192, 64), meta(4, 4, 8192, 32),
        bias=meta(16, 4096, 8192, requires_grad=True), causal=True, window=(512, None), softcap=30.0, scale=0.5,
        deterministic=True, device="sm_90", sink=meta(16, requires_grad=True), dropout_p=0.1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output == "\n".join([str(expected), "", *traffic_table(expected), ""])


def test_explain_makes_no_tensor_of_that_size(no_gpu):
    """Shapes of 128 TiB; also on this machine's own device."""
    result = invoke("explain", "--shape", "64,64,65536,128", "--bias", "64,64,65536,65536", "--mask", "65536,65536")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("attention on cpu, bfloat16\n")
    assert "bias (64, 64, 65536, 65536) bfloat16, with its gradient" in result.output


def test_the_traffic_table_by_hand():
    """B=H=1, M=N=1024, D=64 in bfloat16: a matrix is 2 MiB, q, k, v and o 128 KiB each, the LSE 4 KiB."""
    result = invoke("explain", "--shape", "1,1,1024,64", "--device", "sm_80", "--limits", "1e12,1e9")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines()[-11:] if line.strip()}
    assert rows["forward"] == ["528", "kB", "8.92", "MB", "16.9", "x"]
    assert rows["S"] == ["2", "times", "2.1", "MB", "–", "4.19", "MB"]
    assert rows["dS"] == ["3", "times", "2.1", "MB", "–", "6.29", "MB"]
    assert "  takes at least            528 µs     8.92 ms    16.9 x" in result.output.splitlines()


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("documents:300", lambda: TileMask.documents(torch.arange(1024) // 300)),
        ("documents:24,1000", lambda: TileMask.documents((torch.arange(1024) >= 24).int())),
        ("prefix:100", lambda: TileMask.prefix_lm(torch.tensor([100]), 1024)),
        ("window:255,0,4", lambda: TileMask.sliding_window(1024, 1024, (255, 0), global_tokens=4)),
        ("dilated:32,4", lambda: TileMask.dilated(1024, 1024, 32, 4)),
        ("strided:64", lambda: TileMask.strided(1024, 1024, 64)),
    ],
)
def test_explain_of_a_pattern(text, made):
    """Its tiles and FLOPs are told for a device that is not here, as `tilewise.explain` tells them."""
    shape = ("--shape", "1,2,1024,64", "--device", "sm_90", "--causal")
    found = invoke("explain", *shape, "--mask", text).output
    x = torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16, device="meta")
    mask = made()
    assert str(explain(x, x, x, mask=mask, causal=True, device="sm_90")) in found
    on_cpu = torch.empty(1, 2, 1024, 64)
    assert (
        explain(x, x, x, mask=mask, causal=True, device="sm_90").mask
        == explain(on_cpu, on_cpu, on_cpu, mask=mask, causal=True).mask
    )


def test_explain_of_a_stored_mask_and_its_picture(tmp_path):
    seen = torch.zeros(300, 400, dtype=torch.bool)
    seen[:128, :256] = seen[200:, 300:] = True
    torch.save(seen, tmp_path / "mask.pt")
    shape = ("--shape", "1,1,300,16", "--kv-shape", "1,1,400,16", "--device", "cpu")
    result = invoke("explain", *shape, "--mask", str(tmp_path / "mask.pt"), "--png", str(tmp_path / "tiles.png"))
    assert "6 of 12 tiles visible, 3 of them in part" in result.output
    assert "tiles.png: 6 of 12 tiles of 128 x 128 visible, 3 in part" in result.output
    causal = invoke(
        "explain", *shape, "--mask", str(tmp_path / "mask.pt"), "--causal", "--png", str(tmp_path / "c.png")
    )
    assert "6 of 12 tiles visible without causal or window" in causal.output
    assert "c.png: 5 of 12 tiles of 128 x 128 visible with causal or window" in causal.output
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "cut.pt").touch()
    cut = invoke("explain", *shape, "--mask", str(tmp_path / "cut.pt"))
    assert "it ends early" in shown(cut.output)
    wrong = invoke("explain", "--shape", "1,1,300,16", "--mask", str(tmp_path / "mask.pt"))
    assert "is for 300 queries and 400 keys, not 300 and 300" in shown(wrong.output)


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-100, 20)])
def test_shades_are_what_mask_and_band_leave(band):
    """Of several heads a tile is full, or hidden, where it is in all."""
    generator = torch.Generator().manual_seed(0)
    tiles = torch.rand(1, 3, 3, 4, generator=generator) < 0.6
    inside = torch.rand(1, 3, 300, 450, generator=generator) < 0.5
    inside[:, :, :128, :256] = True
    mask = TileMask.from_tiles(tiles, 300, 450, mask=inside)
    distance = torch.arange(450) - torch.arange(300)[:, None]
    in_band = torch.ones_like(distance, dtype=torch.bool)
    for limit, keeps in ((band.lo, torch.ge), (band.hi, torch.le)):
        if limit is not None:
            in_band &= keeps(distance, limit)
    seen = (mask.dense() & in_band)[0]
    for m, row in enumerate(patterns.shades(mask, band)):
        for n, shade in enumerate(row):
            tile = seen[:, 128 * m : 128 * m + 128, 128 * n : 128 * n + 128]
            assert shade == (0 if not tile.any() else 2 if tile.all() else 1)


def test_explain_of_nothing_has_no_table():
    result = invoke("explain", "--shape", "1,1,0,64", "--kv-shape", "1,1,8,64", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "memory traffic  " not in result.output


SM_90 = (*SHAPE, "--device", "sm_90")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Missing option '--shape'"),
        (["--shape", "4,16,64"], "--shape: 4 sizes, such as 4,16,4096,128, are needed, got 3: '4,16,64'"),
        (
            ["--shape", "4,16,y,64"],
            "--shape: sizes separated by commas, such as 4,16,4096,128, are needed, got '4,16,y",
        ),
        (["--shape", "4_0,16,64,64"], "--shape: sizes separated by commas, such as 4,16,4096,128, are needed"),
        (["--shape", ""], "--shape: sizes separated by commas, such as 4,16,4096,128, are needed, got ''"),
        (["--shape", "4,-1,64,64"], "--shape: a size cannot be negative"),
        (["--shape", f"1,1,{10**20},64"], "--shape: at most 2**58 elements are allowed"),
        (["--shape", f"0,{2**40},{2**40},64"], "--shape: at most 2**58 elements are allowed"),
        (
            ["--shape", "1,1,1,1", "--kv-shape", f"1,1,{2**58},1", "--value-dim", "256"],
            "--value-dim: at most 2**58 elements are allowed",
        ),
        (["--shape", "1,1,1,0"], "for --shape: head dimension must be 1 or more, got 0"),
        (
            ["--shape", "1,1,1,0", "--kv-shape", "1,1,1,0"],
            "for --shape / --kv-shape: head dimension must be 1 or more, got 0",
        ),
        ([*SHAPE, "--value-dim", "0"], "--value-dim: a whole number of 1 or more is needed, got '0'"),
        ([*SHAPE, "--bias", "1,1,1,1,1"], "--bias: at most 4 sizes, such as 4,16,4096,128, are needed, got 5"),
        ([*SHAPE, "--bias", "3,3"], "for --bias: shape (3, 3) does not broadcast"),
        ([*SHAPE, "--dropout-p", "1.5"], "for --dropout-p: must be a float in [0, 1], got 1.5"),
        ([*SHAPE, "--sink", "3"], "for --sink: expected one logit for each head, ("),
        ([*SHAPE, "--mask", "3,3"], "for --mask: shape (3, 3) does not broadcast"),
        (
            [*SHAPE, "--mask", "documents:"],
            "--mask: documents:LENGTH, or all lengths, separated by commas, is needed, got 'documents:'",
        ),
        ([*SHAPE, "--mask", "documents:1,2"], "got 'documents:1,2': these are 3 tokens in all, of 64"),
        ([*SHAPE, "--mask", "window:3"], "--mask: window:LEFT,RIGHT,GLOBAL is needed"),
        ([*SHAPE, "--mask", "dilated:3,0"], "got 'dilated:3,0': dilation: must be 1 or more, got 0"),
        ([*SHAPE, "--mask", "not_there.pt"], "--mask: cannot read not_there.pt: "),
        (
            [*SHAPE, "--kv-shape", "4,16,32,64", "--mask", "prefix:3"],
            "got 'prefix:3': it has as many queries as keys, not 64 and 32",
        ),
        ([*SHAPE, "--mask", "64,64", "--png", "x.png"], "--png: draws the tiles of a pattern: give one with --mask"),
        ([*SHAPE, "--mask", "strided:8", "--png", "no/x.png"], "--png: there is no folder "),
        ([*SHAPE, "--bias-dtype", "fp32"], "--bias-dtype: there is no bias: give its shape with --bias"),
        (
            [*SHAPE, "--bias", "1", "--bias-dtype", "bool"],
            "--bias-dtype: must be one of float16 (fp16), bfloat16 (bf16)",
        ),
        ([*SHAPE, "--kv-shape", "4,3,64,64"], "for --kv-shape: the 3 key/value heads must divide the 16 query heads"),
        ([*SHAPE, "--kv-shape", "4,16,64,32"], "for --kv-shape: head dimension must equal --shape's 64, got 32"),
        ([*SHAPE, "--kv-shape", "3,16,64,64"], "for --kv-shape: batch size must equal --shape's 4, got 3"),
        (
            [*SHAPE, "--device", "tpu"],
            "--device: must be cpu, cuda, a GPU such as h100, or a compute capability such as sm_90, got 'tpu'",
        ),
        ([*SHAPE, "--device", "cuda"], "--device: torch sees no CUDA device here"),
        ([*SHAPE, "--window", "3"], "--window: two widths are needed, each a number or none, such as 512,0, got '3'"),
        ([*SHAPE, "--window", "-3,0"], "for --window: left width must be 0 or more (none for no limit), got -3"),
        (
            [*SHAPE, "--limits", "fast,slow"],
            "--limits: two numbers, positive and finite, are needed, FLOP/s and bytes/s",
        ),
        ([*SHAPE, "--limits", "0,1"], "--limits: two numbers, positive and finite, are needed"),
        ([*SHAPE, "--scale", "0"], "for --scale: must be positive and finite, got 0.0"),
        ([*SHAPE, "--scale", "half"], "for --scale: a number is needed, got 'half'"),
        ([*SHAPE, "--softcap", "nan"], "for --softcap: must be positive and finite, got nan"),
        ([*SHAPE, "--backend", "metal"], "--backend: must be one of auto, hopper, triton, cpu, reference, got 'metal'"),
        ([*SM_90, "--backend", "cpu"], "for --backend: 'cpu' cannot run this call"),
        ([*SM_90, "--dtype", "fp64"], "Invalid value: no backend can run this call: hopper: "),
        ([*SHAPE, "--dtype", "int8"], "--dtype: must be one of float16 (fp16), bfloat16 (bf16), float32 (fp32)"),
    ],
)
def test_mistakes_in_explain(options, message, no_gpu):
    result = invoke("explain", *options)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in shown(result.output)
    assert not re.search(r"[:,] (q|k|v|bias|mask|window|scale|softcap|backend|device|limits): ", result.output)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "mask: shape (4, 64) does not broadcast; a padding mask (B, N) is passed as mask[:, None, None, :]",
            "--mask: shape (4, 64) does not broadcast; a padding mask (B, N) is passed as --mask B,1,1,N",
        ),
        ("q, k: sizes differ", "--shape / --kv-shape: sizes differ"),
        ("k, v: sizes differ from q's", "--kv-shape: sizes differ from --shape's"),
        ("shape[K]: must be even", "--tile: K must be even"),
        ("rows: must divide shape[MN]=24, with deterministic=True", "--rows: must divide --tile's MN 24, with --sure"),
        ("limits: unknown, give limits=(FLOP/s, bytes/s)", "--limits: unknown, give --limits FLOP/s,bytes/s"),
        ("nobody can: cpu: give bias= or None", "nobody can: cpu: give --bias or none"),
        ("other: is no option here", "other: is no option here"),
        ("q, other: are no options here", "q, other: are no options here"),
        ("no colon", "no colon"),
    ],
)
def test_what_the_library_says_is_said_of_options(error, message):
    options = {"q": "--shape", "k": "--kv-shape", "v": "--kv-shape", "shape": "--tile", "deterministic": "--sure"}
    options |= {name: f"--{name}" for name in ("bias", "mask", "rows", "limits")}
    found = arguments.told(ValueError(error), options)
    assert ": ".join(part for part in (found.param_hint, found.message) if part) == message


@pytest.mark.parametrize(
    "spelled", ["4,16,4096,64", "4x16x4096x64", "4 X 16 X 4096 X 64", "(4, 16, 4096, 64)", "[4,16,4096,64]"]
)
def test_a_shape_in_every_spelling(spelled):
    assert arguments.shape(spelled, "--shape", 4) == (4, 16, 4096, 64)
    result = invoke("explain", "--shape", spelled, "--device", "sm_90")
    assert "  q (4, 16, 4096, 64)\n" in result.output
    tile = spelled.replace("4,16,", "").replace("4x16x", "").replace("4 X 16 X ", "").replace("4, 16, ", "")
    place = tile.replace("4096", "5").replace("64", "7")
    assert (
        "element (5, 7) is at byte "
        in invoke("layout", "--shape", tile.replace("4096", "64"), "--element", place).output
    )


@pytest.mark.parametrize(
    ("name", "spelled"), [(name, text) for name, others in spelling.DTYPES.items() for text in (name, *others)]
)
def test_a_dtype_in_every_spelling(name, spelled):
    for text in (spelled, spelled.upper(), f"torch.{spelled}"):
        assert arguments.dtype(text, "--dtype") == name
    result = invoke(
        "explain", *SHAPE, "--device", "cpu", "--dtype", spelled, "--bias", "64,64", "--bias-dtype", spelled
    )
    assert f"attention on cpu, {name}\n" in result.output
    assert f"bias (1, 1, 64, 64) {name}, " in result.output
    result = invoke("layout", "--shape", "64,64", "--dtype", spelled)
    bits = getattr(torch, name).itemsize * 8
    assert (
        f"64 x 64, {bits}-bit" in result.output if bits < 64 else "--dtype: must have 4, 8, 16 or 32" in result.output
    )


def test_explain_speaks_of_options_in_its_answer_too():
    """The library's answer, with deterministic=True and limits=... as options."""
    shape = ("--shape", "2,4,512,192", "--device", "sm_90", "--softcap", 30, "--deterministic")
    output = invoke("explain", *shape, "--bias", "1,1,512,512").output
    assert "with --deterministic\n" in output
    assert "measured; with --limits FLOP/s,bytes/s the bound" in invoke("explain", *SHAPE, "--device", "cpu").output


def test_a_device_and_a_backend_in_other_words():
    assert "attention on cpu" in invoke("explain", *SHAPE, "--device", "CPU").output
    expected = invoke("explain", *SM_90).output
    assert invoke("explain", *SM_90, "--backend", "auto").output == expected
    for name in ("h100", "H100", "SM_90"):
        assert invoke("explain", *SHAPE, "--device", name).output == expected
    assert "(data sheet of the H200 SXM)" in invoke("explain", *SHAPE, "--device", "h200").output
    assert "(compute capability 8.9)" in invoke("explain", *SHAPE, "--device", "RTX 4090").output
    tile = ("layout", "--shape", "128,64", "--arch")
    assert invoke(*tile, "B200").output == invoke(*tile, "sm_100").output
    assert "--arch: must be one of sm_90, sm_100, got 'a100'" in shown(invoke(*tile, "a100").output)


# layout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shape 128", "--shape: 2 sizes, such as 128,64, are needed, got 1: '128'"),
        ("--shape 100x64", "for --shape: MN must be a multiple of 8, got 100"),
        ("--shape 128,64 --swizzle 48", "for --swizzle: must be one of 0, 32, 64, 128, got 48"),
        ("--shape 128,64 --swizzle wide", "for --swizzle: a whole number of 0 or more is needed, got 'wide'"),
        ("--shape 24,64", "for --rows (the usual one): must divide --shape's MN 24 and be whole atoms"),
        ("--shape 128,64 --rows 32", "for --rows: must be 64, got 32"),
        ("--shape 128,256 --dtype fp4", "for --dtype: must have 8, 16 or 32 bits for wgmma (sm_90), got 4"),
        ("--shape 128,64 --dtype fp32 --major mn", "for --major: must be 'k' with elements of 32 bits, got 'mn'"),
        ("--shape 128,64 --major rows", "for --major: must be one of k, mn, got 'rows'"),
        ("--shape 128,64 --arch sm_80", "for --arch: must be one of sm_90, sm_100, got 'sm_80'"),
        ("--shape 128,64 --element 200,3", "for --element: must be inside the tile (128, 64), got (200, 3)"),
        ("--shape 128,64 --instruction 8", "for --instruction: there are 8, counted from 0, got 8"),
        ("--shape 128,64 --svg -", "for --svg: the name of a file is needed, got '-'"),
        ("--shape 128,64 --svg .", "for --svg: cannot write .: it is a folder"),
    ],
)
def test_mistakes_in_layout(options, message):
    result = invoke("layout", *options.split())
    assert result.exit_code == 2
    assert message in shown(result.output)


def test_layout_names_the_files_that_it_wrote(tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    output = invoke("layout", "--shape", "128,64", "--svg", svg, "--html", html).output
    assert output.endswith(f"picture: {svg}\npage: {html}\n")


@pytest.mark.parametrize("memory", [[], ["--memory", "tensor", "--arch", "sm_100"]], ids=["shared", "tensor"])
def test_a_closed_pipe_stops_no_file(memory, tmp_path):
    """As in ``| head -1``; and nothing is said about the pipe."""
    files = [tmp_path / f"a.{ending}" for ending in ("svg", "png", "html")[: 2 if memory else 3]]
    options = [word for path in files for word in (f"--{path.suffix[1:]}", str(path))]
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tilewise", "layout", "--shape", "128,64", *memory, *options]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.stderr == b""
    assert [path.stat().st_size > 1000 for path in files] == [True] * len(files)


# doctor


def test_doctor_on_a_machine_without_a_gpu(no_gpu):
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[1].startswith("cpu: ")
    assert any(
        re.match(r"  backend cpu, float32: right \(off float64's by o \de-\d+, dq .* of its norm\), ", line)
        for line in lines
    )
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

    compute_by(monkeypatch, cpu, backward=broken)
    result = invoke("doctor")
    assert result.exit_code == 1
    found = "wrong: dbias is off by 1.0e+00 of its norm" if defect == "wrong" else "RuntimeError: no such kernel,"
    assert f"backend cpu, float32: PROBLEM: {found}" in result.output
    assert result.output.splitlines()[-1] == "PROBLEM: see above"


def test_doctor_ends_with_status_1_when_no_backend_can_run(no_gpu, monkeypatch):
    monkeypatch.setattr(cpu, "declines", lambda problem, work="forward": "it is tired")
    result = invoke("doctor")
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
