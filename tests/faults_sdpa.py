"""Faults of `tilewise.sdpa` and of OpenFold's attention: see faults.py."""

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
        "tilewise/integrations/sdpa_calls.py", "return declines_gpu(_capability(query.device.index))", "return None",
        "calls on GPUs without kernels are an error",
        "integrations/test_sdpa_mode.py::test_old_gpus",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "mask_biases and not bias.requires_grad and all(", "mask_biases and all(",
        "a trained bias of the keys is read as a mask",
        "integrations/test_evoformer_openfold.py::test_what_is_a_mask",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "return bias > -5e3", "return bias > -5e4",
        "a mask of -1e4 hides nothing",
        "integrations/test_evoformer_openfold.py::test_masks_in_any_dtype",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "else mask & seen", "else seen",
        "of two mask biases the last one counts",
        "integrations/test_evoformer_openfold.py::test_what_is_a_mask",
    ),
]  # fmt: skip
