"""``tilewise layout``: its facts and drawings, the figure as SVG and PNG, and the page in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import invoke, shown
from processes import python

from tilewise.layouts import Operand, Role, SwizzleMode, TensorMemoryOperand, instructions
from tilewise.layouts.figure import SHARE, TOP, UNIT_COLORS, Arrow, Box, Words, figure
from tilewise.layouts.page import to_html
from tilewise.layouts.svg import to_svg
from tilewise.layouts.tensor_memory_views import BLOCK, tensor_memory_drawing, tensor_memory_facts, tensor_memory_figure
from tilewise.layouts.text import drawing, facts

USUAL = "--shape 128,256 --dtype bf16 --swizzle 128 --major k --arch sm_90"


def command(arguments: str, *more: object):
    return invoke("layout", *arguments.split(), *more)


def shares_of(operand, **options):
    return list(instructions(operand, **options))


# Text


def test_the_command_answers_the_engineers_questions():
    result = command(USUAL, "--element", "5,37")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "128 x 256, 16-bit, K-major, 128-byte swizzle, atoms strided dimension first"
    for line in (
        "SBO        1024 bytes between atoms 8 indices of MN apart",
        "LBO        16384 bytes between atoms 64 elements of K apart; the instructions do not use it",
        "CuTe       (mn, k) -> element: Swizzle<3,3,3> o ((8,16),(64,4)):((64,512),(1,8192))",
        "canonical  Swizzle<3,4,3> o ((8,m),(T,2)):((8T,SBO),(1,T)), T = 8",
        "ldmatrix   .x4 and stmatrix: 4 wavefronts, no conflicts",
        "   offset=64 -> (1, 8)",
        "where out dims are: [dim0 (size 128), dim1 (size 256)]",
        "0x4000004000010000",
        "  32-45  stride byte offset      64  1024 bytes",
        "          0 ~ 127   0  1  .  .  .  .  .  .",
        "        640 ~ 767   .  .  .  . 11 10  .  .",
        "   1 17 33 49",
        "element (5, 37) is at byte 666, address 0x29a",
    ):
        assert line in lines, line
    assert Operand((128, 256), 16).byte_offset(5, 37) == 666


def test_the_command_for_blackwell_says_what_was_not_verified():
    output = command("--shape 256x128 --dtype fp4 --swizzle 64 --arch sm_100 --order leading --address 4096").output
    assert (
        "sm_100, tcgen05.mma (Blackwell, not verified on hardware): operand A in 4 instructions of 128 x 64" in output
    )
    assert "its descriptor for an operand at 0x1000" in output
    assert "ldmatrix" not in output


def test_the_command_without_a_swizzle_and_without_a_linear_layout():
    output = command("--shape 192x48 --swizzle 0 --major mn --operand b --rows 192").output
    assert "in the descriptor the other way round: SBO 768, along MN, and LBO 128, along K" in output
    assert "no linear layout over F2: a side is no power of two" in output
    assert "operand B in 3 instructions of 192 x 16" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--shape 128", "2 sizes, such as 128,64, are needed, got 1: '128'"),
        ("--shape 128x96", "K must be a multiple of 64, got 96"),
        ("--shape 128x128 --dtype e4m3 --major mn", "wgmma (sm_90) transposes 16-bit operands only"),
        ("--shape 128x64 --swizzle 48", "swizzle: must be one of 0, 32, 64, 128, got 48"),
        ("--shape 128x64 --address 512", "address: must be a multiple of 1024, got 512"),
        ("--shape 128x64 --dtype float64", "dtype: must have 4, 8, 16 or 32 bits"),
        ("--shape 128x64 --instruction 8", "there are 8, counted from 0, got 8"),
        ("--shape 128x64 --element 128,0", "element: must be inside the tile (128, 64), got (128, 0)"),
        ("--shape 128x64 --svg nowhere/a.svg", "there is no folder"),
    ],
)
def test_mistakes(arguments, words):
    result = command(arguments)
    assert result.exit_code == 2
    assert words in shown(result.output)


def test_the_drawing_is_where_the_units_are():
    for swizzle, major in ((32, "k"), (64, "mn"), (0, "k"), (128, "mn")):
        o = Operand((64, 128), 16, swizzle, major)
        share = shares_of(o)[2]
        units = share.units()
        rows = [line for line in drawing(o, share) if "~" in line]
        assert len(rows) == 8
        for row in rows:
            start = int(row.split("~")[0])
            for place, cell in zip(range(start, start + o.swizzle.width, 16), row.split()[3:], strict=True):
                assert cell == (str(units.index(place)) if place in units else ".")


def test_the_facts_say_how_the_linear_layout_and_the_descriptor_are():
    o = Operand((64, 64), 16)
    shares = shares_of(o)
    text = "\n".join(facts(o, shares, Role.A, 3))
    assert str(o.linear()).split("\nwhere")[0] in text
    assert f"{shares[3].descriptor.encode():#018x}" in text


# The figure


@pytest.mark.parametrize(("swizzle", "major"), [(128, "k"), (64, "k"), (0, "mn"), (128, "mn")])
def test_the_figure_marks_what_the_instruction_reads(swizzle, major):
    o = Operand((128, 64), 16, swizzle, major)
    share = shares_of(o)[1]
    scene = figure(o, share)
    assert all(0 <= s.x <= scene.width and 0 <= s.y <= scene.height for s in scene.shapes if not isinstance(s, Arrow))
    atom = o.byte_offset(share.mn, share.k) // o.atom_bytes
    read = [unit for unit in share.units() if unit // o.atom_bytes == atom]
    marks = [s for s in scene.shapes if isinstance(s, Box) and s.stroke == SHARE]
    assert len(marks) == 2 * len(read) + 2  # in both drawings of the atom, around the share in the tile, in the legend
    # The numbers in memory are those of the units that lie there.
    label = next(s for s in scene.shapes if isinstance(s, Words) and s.text == f"Atom {atom} in memory")
    cells = sorted(
        (s.y, s.x, int(s.text)) for s in scene.shapes if isinstance(s, Words) and s.anchor == "middle" and s.x > label.x
    )
    per_line = o.swizzle.width // 16
    expected = []
    for place in range(0, o.atom_bytes, 16):
        mn, k = o.coordinates((atom * o.atom_bytes + place) * 8 // 16)
        strided, leading = (mn, k) if major == "k" else (k, mn)
        expected.append(strided % 8 * per_line + leading % o.line // 8)
    assert [number for _, _, number in cells] == expected


def test_svg_and_png_are_written(tmp_path):
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    assert command(USUAL, "--svg", svg, "--png", png, "--instruction", 17).exit_code == 0
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "128 × 256, 16-bit, K-major, 128-byte swizzle" in texts
    assert "read by one instruction of sm_90: MN 64–127, K 16–31" in texts
    o = Operand((128, 256), 16)
    scene = figure(o, shares_of(o)[17])
    assert svg.read_text(encoding="utf-8") == to_svg(scene)
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert size == pytest.approx((2 * scene.width, 2 * scene.height), abs=2)


def test_the_pictures_of_the_document_are_up_to_date():
    """docs/layouts.md tells beside each picture the command that draws it."""
    folder = Path(__file__).parents[2]
    text = (folder / "docs" / "layouts.md").read_text(encoding="utf-8")
    commands = re.findall(r"tilewise (layout .* --svg (docs/images/layout-\S+\.svg))", text)
    pictures = re.findall(r"\]\((images/layout-\S+\.svg)\)", text)
    assert sorted(f"docs/{picture}" for picture in pictures) == sorted(path for _, path in commands)
    assert len(pictures) >= 5
    for arguments, path in commands:
        assert (folder / path).read_text(encoding="utf-8") == to_svg(scene(arguments)), path


def test_the_code_of_the_document_runs():
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})


def scene(arguments):
    options = dict(re.findall(r"--(\w+) (\S+)", arguments))
    shape = tuple(map(int, options["shape"].split(",")))
    bits = {"bf16": 16, "e4m3": 8}[options.get("dtype", "bf16")]
    if options.get("memory") == "tensor":
        return tensor_memory_figure(TensorMemoryOperand(shape, bits), int(options.get("instruction", 0)))
    o = Operand(
        shape, bits, int(options.get("swizzle", 128)), options.get("major", "k"), options.get("order", "strided")
    )
    return figure(o, shares_of(o)[int(options.get("instruction", 0))])


# Tensor memory


def test_the_command_tells_lanes_and_columns():
    result = command("--shape 64,64 --memory tensor --arch sm_100 --instruction 1", "--element", "17,5")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "64 x 64, 16-bit, operand A in tensor memory"
    for line in (
        "lanes      row m is in lane m + 16·(m // 16)",
        "columns    32 of 512, 2 elements in each, the first in the lowest bits",
        "   row=16 -> (0, 0)",
        "   row=32 -> (16, 0)",
        "sm_100, tcgen05.mma (Blackwell, not verified on hardware): operand A in 4 instructions of 64 x 16",
        "instruction 1 reads K 16 to 31 in columns 8 to 15; its address of A: 0x8",
        "       16 ~ 31   .",
        "       32 ~ 47   16 ~ 31",
        "             8   16 17",
        "            15   30 31",
        "element (17, 5) is in lane 33, column 2, bits 16 to 31",
    ):
        assert line in lines, line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--arch: must be sm_100 with --memory tensor, got 'sm_90'"),
        ("--arch sm_100 --swizzle 64", "--swizzle: must be 128 with --memory tensor, got '64'"),
        ("--arch sm_100 --operand b", "--operand: must be a with --memory tensor, got 'b'"),
        ("--arch sm_100 --major mn", "--major: must be k with --memory tensor, got 'mn'"),
        ("--arch sm_100 --html a.html", "--html: does not apply with --memory tensor, got 'a.html'"),
        ("--arch sm_100 --dtype fp4", "--dtype: must have 8, 16 or 32 bits for tensor memory, got 4"),
        ("--arch sm_100 --address 500", "--address: must leave 32 of 512 columns, got 0x1f4"),
        ("--arch sm_100 --instruction 4", "--instruction: there are 4, counted from 0, got 4"),
        ("--memory register", "--memory: must be one of shared, tensor, got 'register'"),
    ],
)
def test_mistakes_in_tensor_memory(options, words):
    chosen = "" if "--memory" in options else "--memory tensor"
    result = command(f"--shape 128,64 {chosen} {options}")
    assert result.exit_code == 2
    assert words in shown(result.output)


@pytest.mark.parametrize(("rows", "bits", "address"), [(128, 16, 0), (64, 16, 16 << 16), (64, 8, 32), (128, 32, 64)])
def test_the_figure_has_the_rows_and_columns_where_they_are(rows, bits, address):
    a = TensorMemoryOperand((rows, 1024 // bits), bits, address)
    picture = tensor_memory_figure(a, 2)
    assert all(0 <= s.x <= picture.width and 0 <= s.y <= picture.height for s in picture.shapes)
    # Around the share in the tile, the blocks of lanes that it has, its columns of a lane, and in the legend.
    assert sum(isinstance(s, Box) and s.stroke == SHARE for s in picture.shapes) == 1 + rows // 16 + 1 + 1
    first = a.cell(0, 2 * a.depth)
    words = [s for s in picture.shapes if isinstance(s, Words) and s.anchor == "middle"]
    assert [int(s.text) for s in sorted(words, key=lambda s: (s.y, s.x))] == list(range(2 * a.depth, 3 * a.depth))
    columns = [s.text for s in picture.shapes if isinstance(s, Words) and s.anchor == "end" and "–" not in s.text]
    assert columns == [str(first.column + i) for i in range(8)]
    # A block of lanes has the color of its rows.
    tops = {y: lane for lane in range(0, 128, 16) for y in [TOP + 36 + lane // 16 * BLOCK[1]]}
    edge = next(s.x for s in picture.shapes if isinstance(s, Words) and s.text == "Tensor memory, lanes down")
    found = {tops[s.y]: s.fill for s in picture.shapes if isinstance(s, Box) and (s.x, s.stroke) == (edge, "#ffffff")}
    expected = {a.cell(m, 0).lane: UNIT_COLORS[m // 16] for m in range(0, rows, 16)}
    assert found == dict.fromkeys(range(0, 128, 16), "#f8fafc") | expected


def test_the_text_of_tensor_memory_without_a_linear_layout():
    a = TensorMemoryOperand((64, 96), 8, 16 << 16)
    assert "no linear layout over F2: K is no power of two" in tensor_memory_facts(a)
    assert "lanes      row m is in lane m + 16·(m // 16) + 16" in tensor_memory_facts(a)
    assert "       48 ~ 63   16 ~ 31" in tensor_memory_drawing(a)


# The page


def test_the_page_is_one_file_that_loads_nothing():
    o = Operand((64, 64), 16)
    page = to_html(o, shares_of(o), Role.A)
    assert not re.search(r"\b(src|href|@import|url\()\s*=?", page)
    assert "http" not in page
    assert "fetch(" not in page
    assert "$" not in re.sub(r"\$\{", "", page)  # every placeholder was filled


PAGES = [
    Operand((64, 128), 16, SwizzleMode.B128),
    Operand((128, 64), 16, SwizzleMode.B64, "mn", "leading"),
    Operand((64, 32), 32, SwizzleMode.B32, "k", "leading"),
    Operand((96, 48), 16, SwizzleMode.NONE, "mn"),
    Operand((128, 128), 4, SwizzleMode.B64),
]
RECT = "(e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] })"


@pytest.mark.parametrize("o", PAGES, ids=str)
def test_pointing_lights_the_place_and_back(o, chromium, tmp_path):
    path = tmp_path / "page.html"
    options = {"arch": "sm_100"} if o.bits == 4 else {}
    role = Role.B if o.shape[0] == 96 else Role.A
    path.write_text(to_html(o, shares_of(o, role=role, **options), role), encoding="utf-8")
    chromium.open(path)
    per_line = 1024 // o.bits

    def rect(selector):
        return chromium.evaluate(f"{RECT}(document.querySelector('{selector}'))")

    def cell(panel, column, row):
        """Middle of a cell in the window, scrolled into view."""
        width, height = chromium.evaluate(f"[{panel}.width, {panel}.height]")
        x, y = column * width, row * height
        chromium.evaluate(f"{panel}.scroll.scrollTop = {y} - 100; {panel}.scroll.scrollLeft = {x} - 100; 0")
        chromium.evaluate(f"{panel}.scroll.scrollIntoView(); 0")
        left, top, *_ = rect(f"#{panel}")
        return left + x + width / 2, top + y + height / 2

    def lit(panel):
        """(column, row) of the lit cell."""
        left, top, *_ = rect(f"#{panel}")
        x, y, width, height = rect(f"#{panel} ~ .lit")
        return round((x - left) / width), round((y - top) / height)

    def told():
        return {name: int(value) for name, value in chromium.evaluate("({...readout.dataset})").items()}

    mn, k = o.shape
    for element in [(0, 0), (1, 9), (5, k - 1), (mn - 1, 0), (mn - 1, k - 1), (mn // 2 + 3, k // 2 + 1)]:
        offset = o.offset(*element)
        chromium.point(*cell("tile", element[1], element[0]))
        expected = {"mn": element[0], "k": element[1], "offset": offset, "byte": o.byte_offset(*element)}
        assert told() == expected
        assert lit("tile") == (element[1], element[0])
        assert lit("memory") == (offset % per_line, offset // per_line)
        # Away, and back from the other side.
        chromium.point(*cell("tile", 3, 2))
        assert told()["offset"] == o.offset(2, 3)
        chromium.point(*cell("memory", offset % per_line, offset // per_line))
        assert told() == expected
        assert lit("tile") == (element[1], element[0])
    chromium.press("ArrowLeft")
    assert (told()["mn"], told()["k"]) == (mn // 2 + 3, k // 2)


def test_the_slider_moves_the_share(chromium, tmp_path):
    o = Operand((64, 64), 16)
    path = tmp_path / "page.html"
    path.write_text(to_html(o, shares_of(o), Role.A, 1), encoding="utf-8")
    chromium.open(path)
    assert chromium.evaluate("share.textContent") == "1: MN 0 to 63, K 16 to 31"

    def color(element):
        """Of the unit in memory that holds it."""
        offset = o.offset(*element)
        at = f"({offset % 64} + 4) * memory.width, ({offset // 64} + 0.5) * memory.height"
        return chromium.evaluate(f"[...memory.context.getImageData({at}, 1, 1).data]")

    before = color((3, 16)), color((3, 32))
    chromium.evaluate("step.value = 2; step.dispatchEvent(new Event('input'))")
    assert chromium.evaluate("share.textContent") == "2: MN 0 to 63, K 32 to 47"
    assert color((3, 16)) != before[0]
    assert color((3, 32)) != before[1]


def test_the_command_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['tilewise', 'layout', '--shape', '64x64']\n"
    code += "from tilewise_tools import cli; cli.main()"
    assert python("-c", code).stdout.startswith("64 x 64, 16-bit, K-major")
