"""Faults of statistics of the scores: see faults.py."""

from __future__ import annotations

from fault import Fault

CPU, TRITON = "unit/test_statistics.py::", "backends/test_statistics_triton.py::"
FORWARD, SPLITS, PACKED = f"{TRITON}test_formulas", f"{TRITON}test_splits", f"{TRITON}test_packed_batches"

STATISTICS = [
    Fault(
        "tilewise/backends/triton/forward.py", "alpha * (excess + l_i * fall)", "alpha * excess",
        "the entropy's sum is not moved to a new maximum", FORWARD,
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "        if HIDES or c.BIAS:\n            power", "        if False:\n            power",
        "a hidden key makes the entropy NaN", FORWARD,
    ),
    Fault(
        "tilewise/backends/triton/forward.py", 'tl.where(s == -float("inf"), -float("inf"), plain)', "plain",
        "the maximum without the bias counts hidden keys", FORWARD,
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "tl.exp(-below) * (own + below)", "tl.exp(-below) * own",
        "splits of the keys lose the entropy between them", SPLITS,
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "statistics += start.query * (", "statistics += 0 * start.query * (",
        "all sequences of a packed batch write their statistics to the first", PACKED,
    ),
    Fault(
        "tilewise/backends/kernels/statistics.py", "tl.exp2(-sink_below) * tl.minimum(sink_below, 256.0)", "0.0 * sink_below",
        "the sink's share of the entropy is left out", FORWARD,
    ),
    Fault(
        "tilewise/backends/triton/launch.py", "and not statistics.max_scores_unbiased", "",
        "products start from the bias that their maximum leaves out", f"{TRITON}test_biases_by_distance",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "most = m_i if r.BIAS else", "most =",
        "rows that are computed again scale a maximum that has its bias",
        "backends/test_hopper_rows.py::test_statistics_are_computed_again",
    ),
    Fault(
        "tilewise/backends/cpu/statistics.py", "unbiased.masked_fill(s == -torch.inf, -torch.inf)", "unbiased",
        "the maximum without the bias counts hidden keys", f"{CPU}test_formulas",
    ),
    Fault(
        "tilewise/backends/cpu/statistics.py", "self._excess + self._total * fall", "self._excess",
        "the entropy's sum is not moved to a new maximum", f"{CPU}test_formulas",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "softcap, window, statistics\n", "softcap, window\n",
        "a call finds a cached one without its statistics", f"{CPU}test_repeated_calls_and_threads",
    ),
    Fault(
        "tilewise/operator/autograd.py", "            ctx.mark_non_differentiable(statistics)\n            return", "            return",
        "statistics seem to have a gradient", f"{CPU}test_formulas",
    ),
    Fault(
        "tilewise/operator/dispatch.py", "terms = terms._replace(statistics=0)", "terms = terms._replace()",
        "a backward is prepared for statistics that it does not compute",
        f"{CPU}test_the_backward_knows_nothing_of_them",
    ),
    Fault(
        "tilewise/planner.py", "        if not any(score.statistics):\n            return self", "        if True:\n            return self",
        "a backward is where the statistics of its forward are", f"{CPU}test_explanations",
    ),
]  # fmt: skip
