"""Faults of `tilewise.sdpa`: see faults.py."""

from __future__ import annotations

from fault import Fault

SDPA = [
    Fault(
        "tilewise/integrations/pytorch.py", "if _is_active():  #", "if False:  #",
        "a call within two modes counts twice",
        "integrations/test_sdpa_mode.py::test_nesting_counts_once",
    ),
    Fault(
        "tilewise/integrations/pytorch.py", "    names[old.__name__] = new", "    names[old.__name__] = old",
        "under another mode, nn.MultiheadAttention is PyTorch's",
        "integrations/test_sdpa_mode.py::test_modules_under_other_modes",
    ),
    Fault(
        "tilewise/integrations/pytorch.py", "_ATEN.default: _attention", "_ATEN.default: _ATEN.default",
        "calls of exported programs are PyTorch's",
        "integrations/test_sdpa_mode.py::test_exported_programs",
    ),
    Fault(
        "tilewise/integrations/pytorch.py", "if id(value) in new:", "if id(value) in new and name[0] == 's':",
        "a module that has the function under another name keeps it",
        "integrations/test_sdpa_mode.py::test_values_and_gradients_are_pytorchs",
    ),
    Fault(
        "tilewise/integrations/checkpoints.py", "begin(self, again(recompute_fn)", "begin(self, recompute_fn",
        "a checkpoint whose backward is outside of the mode recomputes with other saved tensors",
        "integrations/test_sdpa_mode.py::test_checkpoints_recompute_within",
    ),
    Fault(
        "tilewise/integrations/checkpoints.py", "forward(ctx, again(run_function)", "forward(ctx, run_function",
        "a reentrant checkpoint recomputes PyTorch's dropout",
        "integrations/test_sdpa_mode.py::test_checkpoints_recompute_within",
    ),
    Fault(
        "tilewise/integrations/sdpa_calls.py", "if query.shape[-1] == 0 or", "if",
        "heads of 0 dimensions, which PyTorch averages, are an error",
        "integrations/test_sdpa_mode.py::test_what_pytorch_computes",
    ),
    Fault(
        "tilewise/integrations/sdpa_calls.py", "_OLDEST = (8, 0)", "_OLDEST = (7, 5)",
        "calls on GPUs without kernels are an error",
        "integrations/test_sdpa_mode.py::test_old_gpus",
    ),
]  # fmt: skip
