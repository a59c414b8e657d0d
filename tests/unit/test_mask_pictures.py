"""repr and _repr_html_ of a TileMask and of explanations: what a REPL and a notebook show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import TileMask
from tilewise.masks.picture import SVG_CELLS, TEXT_CELLS, cells_of

PAGE = Path(__file__).parents[2] / "docs" / "sparse-masks.md"


def random_mask(rows, cols, matrices=(1, 1)):
    """Empty, partial and full tiles of 64 x 64."""
    kinds = torch.randint(3, (*matrices, rows, cols), generator=torch.Generator().manual_seed(0))
    inside = (kinds == 2).repeat_interleave(64, 2).repeat_interleave(64, 3)
    inside[..., ::64, ::64] = True
    return TileMask.from_tiles(kinds > 0, 64 * rows, 64 * cols, block=64, mask=inside), kinds


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (24, 24), (25, 7), (7, 131)])
@pytest.mark.parametrize("matrices", [(1, 1), (2, 3)])
def test_cells_are_what_all_of_their_tiles_are(size, matrices):
    mask, kinds = random_mask(*size, matrices)
    found = cells_of(mask.tensors.tiles, TEXT_CELLS)
    side = -(-max(size) // TEXT_CELLS)
    assert found.side == side
    parts = [x.split(side, -1) for x in kinds.split(side, -2)]
    expected = [[0 if not x.any() else 2 if (x == 2).all() else 1 for x in row] for row in parts]
    assert found.rows == expected
    assert (found.visible, found.partial, found.tiles) == (
        int((kinds > 0).sum()),
        int((kinds == 1).sum()),
        kinds.numel(),
    )


@pytest.mark.parametrize("size", [(3, 3), (24, 24), (25, 60), (131, 7)])
def test_a_repr_is_small_and_tells_sizes_and_sparsity(size):
    mask, kinds = random_mask(*size)
    head, counts, *drawn, legend = repr(mask).splitlines()
    sizes = f"{mask.queries} queries and {mask.keys} keys in tiles of 64 x 64, on cpu"
    assert head == f"TileMask(1, 1, {size[0]}, {size[1]}): {sizes}"
    share = 100 * (kinds == 0).float().mean().item()
    assert float(re.search(r"sparsity ([\d.]+)%$", counts)[1]) == pytest.approx(share, abs=0.1)
    assert f"{int((kinds > 0).sum())} of {kinds.numel()} tiles visible" in counts
    side = -(-max(size) // 24)
    assert len(drawn) == -(-size[0] // side) <= 24
    assert {len(line) for line in drawn} == {2 * -(-size[1] // side)}
    assert legend.startswith("· empty, ▒ partial, █ full")
    assert legend.endswith(f"; a cell is {side} x {side} tiles") == (side > 1)


def test_the_page_shows_this_picture():
    mask = TileMask.documents(torch.arange(1024) // 300)
    assert f"```\n{mask}\n```\n" in PAGE.read_text(encoding="utf-8")


def test_html_of_a_mask_is_svg_in_the_colors_of_the_page():
    mask, kinds = random_mask(5, 3)
    tree = ET.fromstring(mask._repr_html_().replace("<br>", ""))
    (drawn,) = tree.iter("{http://www.w3.org/2000/svg}svg")
    grid = torch.zeros(5, 3, dtype=torch.long)
    _, *rects = drawn
    for x in rects:
        place = int(x.get("x"))
        grid[int(x.get("y")), place : place + int(x.get("width"))] = {"0.35": 1, "0.85": 2}[x.get("fill-opacity")]
    assert torch.equal(grid, kinds[0, 0])
    assert drawn.get("fill") == "currentColor"
    assert not re.search(r"href|url|script|color:|#[0-9a-f]{3}", mask._repr_html_())
    large, _ = random_mask(130, 130)
    assert len(large._repr_html_()) < SVG_CELLS**2 * 80


class Reads(TorchDispatchMode):
    """Counts the copies of elements to the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def test_what_cannot_be_read_has_sizes_alone(monkeypatch):
    mask, _ = random_mask(3, 3)
    head = repr(mask).splitlines()[0]
    moved = mask.to("meta")
    assert repr(moved) == head.replace("on cpu", "on meta")
    assert moved._repr_html_() == f"<div>{moved!r}</div>"
    with FakeTensorMode() as fake:
        inside = TileMask(mask.queries, mask.keys, type(mask.tensors)(*map(fake.from_tensor, mask.tensors[:2])))
        assert repr(mask) == repr(inside) == head
    assert repr(inside) == head
    with Reads() as reads:
        assert repr(mask) == head
    assert reads.names == []
    with torch.inference_mode():
        assert len(repr(mask).splitlines()) == 6
    assert torch.vmap(lambda x: x + len(repr(mask)))(torch.zeros(2)).tolist() == [len(head)] * 2
    compiled = torch.compile(lambda x: x + len(repr(mask)), backend="eager")
    assert compiled(torch.zeros(2)).tolist()[0] in (len(head), len(repr(mask)))
    torch._dynamo.reset()


def test_one_read_of_the_device(monkeypatch):
    mask, _ = random_mask(30, 30)
    read = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.numel()) or tolist(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: read.append("item"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: read.append("bool"))
    monkeypatch.setattr(torch.Tensor, "__int__", lambda x: read.append("int"))
    repr(mask)
    assert read == [2 + 15 * 15]


def explanations():
    q = torch.empty(1, 2, 64, 16, device="meta", dtype=torch.bfloat16)
    ends = torch.tensor([0, 64], dtype=torch.int32)
    packed = q[0].transpose(0, 1)
    from tilewise.ops.gemm.explanation import explain as explain_matmul
    from tilewise.ops.row_softmax.explanation import explain as explain_softmax

    return [
        tilewise.explain(q, q, q, causal=True, device="sm_90"),
        tilewise.explain_varlen(packed, packed, packed, ends, ends, 64, 64, device="cpu"),
        explain_matmul(q, q.mT, device="sm_90"),
        explain_softmax(q),
    ]


def test_an_explanation_is_its_text():
    for found in explanations():
        assert repr(found) == str(found) == "\n".join(found.lines())


def test_html_of_an_explanation_has_its_lines():
    for found in explanations():
        table = ET.fromstring(found._repr_html_().replace("<br>", "<br/>"))
        assert [x.strip() for x in table.itertext()] == [line.strip() for line in str(found).splitlines()]
        assert not re.search(r"href|url|script|color|background", found._repr_html_())


@pytest.mark.parametrize("package", ["bias", "distributed", "layouts"])
def test_dir_of_a_package_has_public_names_alone(package):
    module = getattr(tilewise, package)
    assert dir(module) == sorted(module.__all__)
