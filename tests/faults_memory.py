"""Faults of what is kept from call to call: see faults.py."""

from __future__ import annotations

from fault import Fault

MEMORY = [
    Fault(
        "tilewise/backends/protocol.py", "*tensors, *needs)", "*tensors, *call[len(tensors) :])",
        "the first call of a layout is never freed",
        "unit/test_memory.py::test_no_tensor_outlives_its_call",
    ),
    Fault(
        "tilewise/bias/constants.py", "key = (*key, device, stream_of(device))", "key = (*key, device)",
        "a stream reads a table of buckets that another has not written yet",
        "unit/test_memory.py::test_constants_are_of_one_stream",
    ),
    Fault(
        "tilewise/cache.py", "= {}, self._recent", "= {}, {}",
        "a full cache drops what was just used",
        "unit/test_cache.py::test_the_least_recently_used_go_first",
    ),
    Fault(
        "tilewise/cache.py", "            self.put(key, found)\n", "",
        "a full cache drops what is used between others",
        "unit/test_cache.py::test_the_least_recently_used_go_first",
    ),
    Fault(
        "tilewise/cache.py", "key = (function, *arguments)", "key = arguments",
        "functions of equal arguments share results",
        "unit/test_cache.py::test_a_function_is_computed_once",
    ),
    Fault(
        "tilewise/backends/launch/launcher.py", "with _keeping:", "if True:",
        "a kernel for aligned addresses is kept for others",
        "unit/test_memory.py::test_a_launch_of_two_threads_keeps_a_kernel_for_its_addresses",
    ),
    Fault(
        "tilewise/operator/structure.py", "[found, *(x for x in self.prepared if x is not found)]", "[found]",
        "threads forget what was prepared for others",
        "unit/test_structure.py::test_threads_share_variants",
    ),
    Fault(
        "tilewise/backends/triton/resized.py", "found = copy(run)", "found = run",
        "a pass changes while another thread runs it",
        "aot/test_triton_room.py::test_a_pass_that_does_not_fit_leaves_other_threads_theirs",
    ),
    Fault(
        "tilewise/spec/tensors.py", "x() is y and n == y._version for", "x() is y for",
        "a mask is that of numbers that its mask_mod no longer reads",
        "unit/test_tile_mask.py::test_what_a_mask_mod_reads_may_change",
    ),
    Fault(
        "tilewise/masks/block_sparse.py", "with torch.inference_mode(False):", "with torch.inference_mode(True):",
        "a BlockMask that validation has seen first cannot train",
        "unit/test_tile_mask.py::test_a_block_mask_that_comes_first_in_inference_mode_trains_later",
    ),
    Fault(
        "tilewise/masks/block_sparse.py", "(partial[place] & _asked(mask_mod, b, h, q, kv))",
        "_asked(mask_mod, b, h, q, kv)",
        "a mask_mod shows pairs of small blocks that a BlockMask does not list",
        "unit/test_tile_mask.py::test_blocks_of_any_size",
    ),
    Fault(
        "tilewise/masks/block_sparse.py", ".clamp(max=length) - 1) // of + 1", ".clamp(max=length) - 1) // of",
        "a tile misses the last of its blocks",
        "unit/test_tile_mask.py::test_blocks_of_any_size",
    ),
    Fault(
        "tilewise/masks/block_sparse.py", "torch.where(full, FULL, torch.where(partial, kind, EMPTY))",
        "torch.where(full, FULL, kind)",
        "under a compiler a mask_mod shows blocks that a BlockMask does not list",
        "unit/test_tile_mask.py::test_a_block_mask_compiles_in_one_graph",
    ),
    Fault(
        "tilewise/masks/block_sparse.py", '{**self.__dict__, "_lists": {}}', "dict(self.__dict__)",
        "a file with a mask holds what was made of it",
        "unit/test_tile_mask.py::test_a_file_with_a_mask",
    ),
    Fault(
        "tilewise/distributed/documents.py", "None if device is None else stream_of(device)", "None",
        "a stream reads places that another has not written yet",
        "distributed/test_distributed.py::test_documents_of_a_sharded_batch_are_of_one_stream",
    ),
]  # fmt: skip
