"""What compute-sanitizer's racecheck reports, less what is Triton's own; see gpu/test_sanitizer.py."""

from __future__ import annotations

import re
from pathlib import Path

import tilewise

KERNELS = Path(tilewise.__file__).parent
HANDS_OUT = "gl.warp_specialize("
_RACE = "Race reported between"
_ACCESS = re.compile(r"access at (?:(\w+)\+0x[0-9a-f]+ in (\S+):(\d+))?")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


def hazards(report: str) -> list[str]:
    """The hazards of a report that lie in our own code; all of a report that cannot be read.

    Where a kernel hands out roles (`gl.warp_specialize`) Triton writes a byte for each warp that says which role it
    takes, all warps meet at a barrier and each reads its own; racecheck takes the write of one role and the read of
    another for a race. Such accesses carry the line of the call, of the condition before it or of the kernel's
    beginning, and no other.
    """
    races = [block for block in re.split(r"(?=={9} (?:Error|Warning): )", report) if _RACE in block]
    summary = _SUMMARY.search(report)
    if summary is None or int(summary[1]) != len(races):
        return [report]
    return [race for race in races if not all(_hands_out(*place) for place in _ACCESS.findall(race))]


def _hands_out(kernel: str, file: str, line: str) -> bool:
    """True if a line hands out roles, or begins a kernel that does. Of several files of one name the one that defines
    the kernel counts, or else all of them."""
    if not file:
        return False
    texts = [path.read_text(encoding="utf-8") for path in KERNELS.rglob(file)]
    texts = [text for text in texts if f"def {kernel}(" in text] or texts
    sources = [text.splitlines() for text in texts]
    sources = [lines for lines in sources if int(line) <= len(lines)]
    return bool(sources) and all(_hands_out_in(lines, int(line) - 1) for lines in sources)


def _hands_out_in(lines: list[str], number: int) -> bool:
    text = lines[number].strip()
    if text.startswith(("if ", "elif ", "else:")):  # a choice between ways to hand out
        text = lines[number + 1].strip()
    if not text.startswith(("@gluon.jit", "def ")):
        return text.startswith(HANDS_OUT)
    rest = lines[number + 2 :]
    end = next((n for n, line in enumerate(rest) if line.startswith(("@", "def ", "class "))), len(rest))
    return any(HANDS_OUT in line for line in rest[:end])
