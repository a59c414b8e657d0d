"""The examples run, learn, and agree with what they are held against: the same model from the same seed in other code.

A gradient that were wrong or missing would show in the losses of the steps that follow.
"""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Of an example's name and arguments, what its main returns and what it prints, on the CPU."""

    def run(name, arguments):
        spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # torch's compiler looks it up there
        spec.loader.exec_module(module)
        return module.main([*arguments.split(), "--device", "cpu"]), capsys.readouterr().out

    return run


def learns_alike(losses, by, rtol):
    """Each list of losses goes down by so much, and they are the same ones but for rounding."""
    ours, others = losses.values()
    assert all(map(math.isfinite, ours))
    assert ours[-1] < ours[0] - by
    torch.testing.assert_close(ours, others, rtol=rtol, atol=0.0)


def test_t5_finetune(run):
    losses, printed = run("t5_finetune", "--steps 20 --length 128 --batch 8 --against eager")
    learns_alike(losses, by=2.0, rtol=1e-5)
    assert "\ntilewise: " in printed
    assert "\neager: " in printed


def test_packed_alibi(run):
    small = "--steps 10 --room 640 --width 48 --layers 2 --lr 1e-2 --dtype float64 --against padded"
    losses, printed = run("packed_alibi", small)
    learns_alike(losses, by=1.0, rtol=1e-9)
    assert "characters, " in printed


def test_swin_digits(run):
    losses, printed = run("swin_digits", "--steps 40 --batch 16 --dtype float64 --against sdpa")
    learns_alike(losses, by=0.8, rtol=1e-9)
    assert printed.count(" are right") == 2


def test_from_flex(run):
    apart, _ = run("from_flex", "--length 256")
    gradients = {f"gradient of {name}" for name in ("table", "slopes")}
    directions = {f"gradient of {name}, along a random direction" for name in "qkv"}
    assert apart.keys() == {"output", "output with TileMask.documents", *gradients, *directions}
    assert max(apart.values()) < 1e-8


def test_pairformer(run):
    losses, printed = run("pairformer", "--steps 15 --tokens 16 --batch 4 --dtype float64 --against einsum")
    learns_alike(losses, by=1.0, rtol=1e-9)
    assert printed.count("; new chains: ") == 2


def test_tree_grpo(run):
    small = "--steps 12 --prompts 2 --responses 6 --longest 40 --length 8 --lr 1e-2 --dtype float64 --against sequences"
    found, printed = run("tree_grpo", small)
    assert sum(found["rewards"][-3:]) / 3 > found["rewards"][0] + 0.2
    assert len(found["apart"]) == 24
    assert max(found["apart"]) < 1e-9
    assert "tokens in the tree" in printed
