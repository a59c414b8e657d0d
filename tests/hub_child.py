"""What tests/tools/test_hub_kernel.py runs in a process of its own: tilewise as a kernel of the Hub, without tilewise.

python tests/hub_child.py FOLDER import|kernels
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import torch


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


def call(module):
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


def main(folder, loader):
    refuse = Refuse()
    sys.meta_path.insert(0, refuse)
    if loader == "kernels":
        from kernels import get_local_kernel

        module = get_local_kernel(folder, backend="cpu")
    else:
        module = load(folder / "build" / "torch-cpu")
        import_all(module, folder / "build" / "torch-cpu")
    call(module)
    other = load(folder / "build" / "torch-cuda")  # another id: both are in one process, and so is the package
    assert other.__name__ != module.__name__
    call(other)
    assert "tilewise" not in sys.modules
    sys.meta_path.remove(refuse)
    call(importlib.import_module("tilewise"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
