"""racecheck.py, on reports as compute-sanitizer writes them."""

from __future__ import annotations

import pytest
from racecheck import KERNELS, hazards

REPORT = """========= COMPUTE-SANITIZER
  hopper B1, Hkv 2, N131, D64, bfloat16, padded
========= Error: Race reported between Read access at backward_kernel+0x110 in kernel.py:{begin}
=========     and Write access at backward_kernel+0x10d0 in kernel.py:{begin} [6 hazards]
=========     and Write access at backward_kernel+0x5c40 in kernel.py:{roles} [11 hazards]
=========
========= Error: Race reported between Read access at forward_kernel+0x210 in kernel.py:{read}
=========     and Write access at forward_kernel+0xb7d0 in kernel.py:{other} [5 hazards]
=========     and Write access at forward_kernel+0x139d0 in kernel.py:{choice} [7 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def line(file, text):
    lines = (KERNELS / "backends" / "gluon" / "sm90" / file).read_text(encoding="utf-8").splitlines()
    return next(n for n, found in enumerate(lines, 1) if text in found)


@pytest.mark.parametrize("ours", [False, True])
def test_hazards_of_our_own_show(ours):
    file, name = "forward/kernel.py", "def forward_kernel("
    report = REPORT.format(
        begin=line("backward/kernel.py", "def backward_kernel(") - 1,
        roles=line("backward/kernel.py", "gl.warp_specialize("),
        read=line(file, name),
        choice=line(file, 'if c.WARPGROUPS == 2 and c.BIAS != "matrix":'),
        other=line(file, "def compute(") if ours else line(file, "gl.warp_specialize("),
    )
    assert ["forward_kernel" in race for race in hazards(report)] == [True] * ours


def test_what_cannot_be_read_is_a_hazard():
    clean = "========= RACECHECK SUMMARY: {} hazards displayed (0 errors, 0 warnings)"
    assert not hazards(clean.format(0))
    assert hazards(clean.format(1))  # of another kind
    assert hazards("the program ended early")
    nowhere = "========= Error: Race reported between Read access at kernel\n========= and Write access at 0x10\n"
    assert hazards(nowhere + clean.format(1))
