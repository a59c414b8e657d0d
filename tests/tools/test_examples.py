"""The examples run, learn, and agree with what they are held against: the same model from the same seed in other code.

A gradient that were wrong or missing would show in the losses of the steps that follow.
"""

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from tilewise_tools.demo import example

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Of an example's name and arguments, what its main returns and what it prints, on the CPU.

    Each prints time and memory of a step in both ways of computing, and writes one picture.
    """
    threads = torch.get_num_threads()

    def run(name, arguments):
        spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # torch's compiler looks it up there
        spec.loader.exec_module(module)
        found = module.main([*arguments.split(), "--device", "cpu", "--output", str(tmp_path / "new")])
        printed = capsys.readouterr().out
        (picture,) = (tmp_path / "new").iterdir()
        assert f"picture: {picture}\n" in printed
        assert picture.name == f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        measured = re.findall(r"^(\w+) +a step: ([\d.]+) ms, ([\d.]+) MiB$", printed, re.MULTILINE)
        assert len({way for way, _, _ in measured}) == len(measured) == 2
        assert all(float(x) > 0 for _, *numbers in measured for x in numbers)
        return found, printed

    yield run
    torch.set_num_threads(threads)


def learns_alike(losses, by, rtol):
    """Each list of losses goes down by so much, and they are the same ones but for rounding."""
    ours, others = losses.values()
    assert all(map(math.isfinite, ours))
    assert ours[-1] < ours[0] - by
    torch.testing.assert_close(ours, others, rtol=rtol, atol=0.0)


def test_t5_finetune(run):
    losses, printed = run("t5_finetune", "--steps 14 --length 64 --batch 4")
    learns_alike(losses, by=2.0, rtol=1e-5)
    assert "\ntilewise: " in printed
    assert "\neager: " in printed
    assert "losses of tilewise and eager differ by " in printed


def test_packed_alibi(run):
    small = "--steps 6 --room 640 --width 48 --layers 2 --lr 2e-2 --dtype float64"
    losses, printed = run("packed_alibi", small)
    learns_alike(losses, by=1.0, rtol=1e-9)
    assert "characters, " in printed


def test_swin_digits(run):
    losses, printed = run("swin_digits", "--steps 20 --batch 8 --lr 4e-3 --dtype float64")
    learns_alike(losses, by=0.8, rtol=1e-9)
    assert printed.count(" are right") == 2


def test_from_flex(run):
    apart, _ = run("from_flex", "--length 96")
    gradients = {f"gradient of {name}" for name in ("table", "slopes")}
    directions = {f"gradient of {name}, along a random direction" for name in "qkv"}
    assert apart.keys() == {"output", "output by hand, with TileMask.documents", *gradients, *directions}
    assert max(apart.values()) < 1e-8


def test_pairformer(run):
    losses, printed = run("pairformer", "--steps 30 --tokens 12 --batch 3 --lr 6e-3 --dtype float64")
    learns_alike(losses, by=1.0, rtol=1e-9)
    for right, guessed in re.findall(r": new groups: ([\d.]+)% of the hidden pairs are right, ([\d.]+)% by", printed):
        assert float(right) > float(guessed) + 5
    assert printed.count(": new groups: ") == 2


def test_long_context(run, monkeypatch):
    """On one process; tests/distributed compares two."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    losses, printed = run("long_context", "--steps 8 --length 128")
    learns_alike(losses, by=1.0, rtol=1e-4)
    assert "bits a byte on 1 of cpu" in printed


def test_nothing_beside_tilewise(monkeypatch, capsys, tmp_path):
    """By ``--against none``, on its own; without matplotlib it says so."""
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    example.report([example.Trial("tilewise", [1.0], [0.5, 0.25, 0.75], 3 << 20)], tmp_path, "x", "a title")
    assert capsys.readouterr().out == "tilewise  a step: 500.0 ms, 3.0 MiB\nno picture: x.png needs matplotlib\n"
    assert not list(tmp_path.iterdir())


def test_tree_grpo(run):
    small = "--steps 6 --prompts 2 --responses 6 --longest 40 --length 8 --lr 2e-2 --dtype float64"
    found, printed = run("tree_grpo", small)
    assert sum(found["rewards"][-3:]) / 3 > found["rewards"][0] + 0.2
    assert len(found["apart"]) == 12
    assert max(found["apart"]) < 1e-9
    assert "tokens in the tree" in printed
