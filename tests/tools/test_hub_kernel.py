"""`make hub-kernel`: the folder loads without tilewise, beside tilewise, and says what the Hub asks for."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import call, python


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "tilewise"
    python(Path(__file__).parents[2] / "hub" / "build.py", folder)
    return folder


class Refuse:
    """Nothing of the kernel may come from the package, which can be imported here."""

    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] != "tilewise", name


def load(variant):
    """As kernels loads a variant: the module is named by the id in its metadata."""
    id = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(id, variant / "__init__.py")
    module = sys.modules[id] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_all(module, variant):
    """Every module that is there, but for kernels where there is no triton."""
    for path in sorted(variant.rglob("*.py")):
        name = ".".join(path.relative_to(variant).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        try:
            importlib.import_module(f"{module.__name__}.{name}" if name else module.__name__)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] != "triton":
                raise


def check(module):
    """Forward and backward beside PyTorch's, a bias term, and the parts; counted, so that operators are looked up."""
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 40, 40, requires_grad=True)
    found = module.attention(q, k, v, bias=bias)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(found, expected)
    do = torch.randn_like(found)
    inputs = (q, k, v, bias)
    for x, y in zip(*(torch.autograd.grad(o, inputs, do) for o in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)
    table = torch.zeros(32, 2, requires_grad=True)
    mask = module.TileMask.sliding_window(40, 40, (7, 0))
    module.attention(q, k, v, bias=module.bias.t5_bias(table, bidirectional=True), mask=mask).sum().backward()
    assert table.grad is not None
    torch.testing.assert_close(module.softmax(bias), bias.softmax(-1))
    torch.testing.assert_close(module.matmul(q, k.mT), q @ k.mT)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module.attention(q, k, v, softcap=5.0)
    assert counter.get_total_flops() == 2 * 2 * 2 * 40 * 40 * 8


def load_beside_the_package(folder, loader):
    """In a process that has not imported tilewise."""
    refuse = Refuse()
    sys.meta_path.insert(0, refuse)
    if loader == "kernels":
        from kernels import get_local_kernel

        module = get_local_kernel(folder, backend="cpu")
    else:
        module = load(folder / "build" / "torch-cpu")
        import_all(module, folder / "build" / "torch-cpu")
    check(module)
    other = load(folder / "build" / "torch-cuda")  # another id: both are in one process, and so is the package
    assert other.__name__ != module.__name__
    check(other)
    assert "tilewise" not in sys.modules
    sys.meta_path.remove(refuse)
    check(importlib.import_module("tilewise"))


def run(folder, loader):
    call(load_beside_the_package, folder, loader, environment={"HF_HUB_OFFLINE": "1"})


def test_it_loads_without_the_package(folder):
    run(folder, "import")


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="kernels is not installed")
def test_kernels_loads_it(folder):
    run(folder, "kernels")


def test_its_metadata(folder):
    variants = sorted((folder / "build").iterdir())
    assert [x.name for x in variants] == ["torch-cpu", "torch-cuda"]
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        digests = {
            path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in variant.rglob("*")
            if path.is_file() and path.suffix != ".json" and "__pycache__" not in path.parts
        }
        assert metadata["digest"]["files"] == digests


def test_its_imports_are_relative_and_of_torch(folder):
    """Or of Python itself, or of triton, which comes with torch."""
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in (folder / "build" / "torch-cpu").rglob("*.py"):
        for module in re.findall(
            r"^\s*(?:from|import) ([\w]+)[\w.]*(?: import| as|\s*$)", path.read_text(), re.MULTILINE
        ):
            assert module in allowed, (path.name, module)
