"""What compute-sanitizer's racecheck reports, less what is Triton's own; see gpu/test_sanitizer.py."""

from __future__ import annotations

import re
from pathlib import Path

import tilewise

KERNELS = Path(tilewise.__file__).parent
_ACCESS = re.compile(r"access at \w+\+0x[0-9a-f]+ in (\S+):(\d+)")


def hazards(report: str) -> list[str]:
    """The hazards of a report that lie in our own code.

    Where a kernel hands out roles (`gl.warp_specialize`) Triton writes a byte for each warp that says which role it
    takes, all warps meet at a barrier and each reads its own; racecheck takes the write of one role and the read of
    another for a race. Such accesses carry the line of the call or of the kernel's beginning, and no other.
    """
    blocks = [block for block in re.split(r"(?========== (?:Error|Warning): Race reported)", report) if "Race" in block]
    races = [block for block in blocks if block.startswith("========= ")]
    return [race for race in races if not all(_hands_out(*place) for place in _ACCESS.findall(race))]


def _hands_out(file: str, line: str) -> bool:
    """Whether a line hands out roles, or begins a kernel that does."""
    found = list(KERNELS.rglob(Path(file).name))
    number = int(line) - 1
    for path in found:
        lines = path.read_text(encoding="utf-8").splitlines()
        if number >= len(lines):
            continue
        text = lines[number].strip()
        if text.startswith("gl.warp_specialize("):
            return True
        if text.startswith(("@gluon.jit", "def ")):
            after = lines[number + 2 :]
            end = next((n for n, other in enumerate(after) if other.startswith(("@", "def ", "class "))), len(after))
            if any("gl.warp_specialize(" in other for other in after[:end]):
                return True
    return False
