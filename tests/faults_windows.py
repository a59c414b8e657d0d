"""Faults of the kernels of windows, and of calls that are remembered with their leading dimensions: see faults.py."""

from __future__ import annotations

from fault import Fault

KERNELS = "integrations/test_window_kernels.py::"

WINDOWS = [
    Fault(
        "tilewise/windows/autograd.py", "(x.shape, x.stride(), x.dtype, x.device)", "(x.shape, x.dtype, x.device)",
        "tensors that lie otherwise are read as those of an earlier call",
        f"{KERNELS}test_calls_that_differ_in_one_thing",
    ),
    Fault(
        "tilewise/windows/autograd.py", "for x in tensors], precision)", "for x in tensors], None)",
        "products of float32 are rounded as an earlier call wanted them",
        f"{KERNELS}test_precision_is_part_of_a_call",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "type(q_block) is type(k_block) is int and", "",
        "a bool passes for an earlier call's number",
        f"{KERNELS}test_equal_arguments_of_another_type",
    ),
    Fault(
        "tilewise/windows/launch.py", "ALONE=self._readers == 1", "ALONE=True",
        "the gradient of a shared bias is that of one sample",
        f"{KERNELS}test_windows",
    ),
    Fault(
        "tilewise/windows/backward.py", "past // c.Q_BLOCK + 1", "past // c.Q_BLOCK + 2",
        "keys get no gradient of the first block that sees them",
        f"{KERNELS}test_windows",
    ),
    Fault(
        "tilewise/windows/backward.py", "_finite(do_tile), dv_acc", "do_tile, dv_acc",
        "a cotangent's NaN reaches keys that its query does not see",
        f"{KERNELS}test_what_is_seen_comes_through",
    ),
    Fault(
        "tilewise/windows/forward.py", 'seen &= added != -float("inf")', "pass",
        "NaN in a key that only the bias hides comes through",
        f"{KERNELS}test_what_is_hidden_stays_out",
    ),
    Fault(
        "tilewise/windows/forward.py", 'top = tl.where(top == -float("inf"), 0.0, top)', "pass",
        "queries that see nothing get NaN",
        f"{KERNELS}test_windows",
    ),
    Fault(
        "tilewise/operator/views.py", "found[n] = grad.view(x.shape)", "found[n] = grad",
        "a second call's gradient has all dimensions where the bias has fewer",
        "unit/test_cache.py::test_operands_with_fewer_dimensions_are_cached",
    ),
    Fault(
        "tilewise/operator/views.py", "zip(given[:6], taken[:6], strict=True)", "zip((*given[:5], None), taken[:6], strict=True)",
        "the second call with more leading dimensions takes a sink for another",
        "unit/test_cache.py::test_operands_with_fewer_dimensions_are_cached",
    ),
    Fault(
        "tilewise/frontend/leading.py", "if cached is not None:", "if False:",
        "a first call with more leading dimensions saves other tensors than the one that recomputes it",
        "unit/test_cache.py::test_a_first_call_can_be_checkpointed",
    ),
    Fault(
        "tilewise/frontend/leading.py", "not self.split and 0 not in self.lead and self.merged", "not self.split and self.merged",
        "a second call of no batch elements takes a view of some",
        "unit/test_leading.py::test_empty_leading_dimensions",
    ),
    Fault(
        "tilewise/windows/forward.py", "_wide(places, c) * bias.stride3", "places * bias.stride3",
        "keys of a bias's window that lie far apart are read outside of memory",
        "tools/test_index_width.py::test_an_index_that_is_multiplied_by_a_stride_has_64_bits",
    ),
]  # fmt: skip
