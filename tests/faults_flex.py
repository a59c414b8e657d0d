"""Faults of `tilewise.integrations.flex`: see faults.py."""

from __future__ import annotations

from fault import Fault

FLEX = [
    Fault(
        "tilewise/integrations/score_mod/symbols.py",
        "if affine.q and affine.q == -affine.kv:",
        "if affine.q and affine.kv:",
        "a bias by 2 kv - q is one by distance",
        "integrations/test_flex.py::test_values_and_gradients",
    ),
    Fault(
        "tilewise/integrations/score_mod/values.py",
        "args[0].float() if args[0].dtype in _HALF else args[0]",
        "args[0]",
        "the gradient of a table of 16 bits is summed in 16 bits",
        "integrations/test_flex.py::test_gradients_of_16_bit_tensors_are_rounded_once",
    ),
    Fault(
        "tilewise/integrations/score_mod/terms.py",
        "torch.where(buckets < 0, buckets + entries, buckets)",
        "buckets.clamp(min=0)",
        "negative distances read the first entry, not those at the end",
        "integrations/test_flex.py::test_values_and_gradients",
    ),
    Fault(
        "tilewise/integrations/score_mod/score.py",
        "if self.addends or self.visible:",
        "if self.visible:",
        "a softcap after a bias is computed before it",
        "integrations/test_flex.py::test_what_is_refused_is_named",
    ),
    Fault(
        "tilewise/integrations/score_mod/visible.py",
        "constant = form.constant + strict",
        "constant = form.constant",
        "q_idx > kv_idx shows the diagonal",
        "integrations/test_flex.py::test_values_and_gradients",
    ),
    Fault(
        "tilewise/masks/block_sparse.py",
        "made.key != key or ",
        "",
        "a condition keeps the numbers that it had at the first call",
        "integrations/test_flex.py::test_a_condition_is_evaluated_once",
    ),
]
