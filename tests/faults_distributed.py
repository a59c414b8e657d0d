"""Faults of calls over several processes: see faults.py."""

from __future__ import annotations

from fault import Fault

DISTRIBUTED = [
    Fault(
        "distributed/head_groups.py", "return group.n * (call.sizes.H // group.of)", "return 0",
        "every group of heads drops what the first does",
        "test_distributed.py",
    ),
    Fault(
        "distributed/ring.py", "if source < call.ranks.rank else", "if source > call.ranks.rank else",
        "queries see keys behind them in the place of those before",
        "test_distributed.py",
    ),
    Fault(
        "distributed/documents.py", "used = span.end if causal else", "used = self.cu.diff() if causal else",
        "the last query of a chunk of a sequence sees the last key of the whole",
        "test_distributed.py",
    ),
    Fault(
        "backends/dropout.py", "rows += terms.origin.query_rest", "rows += 0",
        "a part of a call that begins between multiples of 16 drops what another does",
        "test_dropout.py::test_parts_of_a_call_in_triton",
    ),
]  # fmt: skip
