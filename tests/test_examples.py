"""The examples run, learn, and agree with what they are held against: the same model from the same seed in other code.

A gradient that were wrong or missing would show in the losses of the steps that follow.
"""

import importlib.util
import math
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, arguments, capsys):
    """What main of an example returns, and what it prints, on the CPU."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([*arguments.split(), "--device", "cpu"]), capsys.readouterr().out


def learns_alike(losses, by, rtol=1e-4):
    """Each list of losses goes down by so much, and they are the same ones but for rounding."""
    ours, others = losses.values()
    assert all(map(math.isfinite, ours))
    assert ours[-1] < ours[0] - by
    torch.testing.assert_close(ours, others, rtol=rtol, atol=0.0)


def test_t5_finetune(capsys):
    losses, printed = run("t5_finetune", "--steps 20 --length 128 --batch 8 --against eager", capsys)
    learns_alike(losses, by=2.0)
    assert "\ntilewise: " in printed
    assert "\neager: " in printed


def test_packed_alibi(capsys):
    small = "--steps 10 --room 640 --width 48 --layers 2 --lr 1e-2 --against padded"
    losses, printed = run("packed_alibi", small, capsys)
    learns_alike(losses, by=1.0)
    assert "characters, " in printed


def test_swin_digits(capsys):
    losses, printed = run("swin_digits", "--steps 40 --batch 16 --dtype float64 --against sdpa", capsys)
    learns_alike(losses, by=0.8, rtol=1e-9)
    assert printed.count(" are right") == 2
