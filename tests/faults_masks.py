"""Faults of dynamic masks and of calls like an earlier one with a mask by tiles: see faults.py."""

from __future__ import annotations

from fault import Fault

MASKS = [
    # --- keys that are gathered ---
    Fault(
        "gather/__init__.py", "keep + rows - 1) // CHUNK", "keep) // CHUNK",
        "a chunk has no room for the keys that its later queries keep",
        "test_gather.py::test_as_many_keys_as_a_chunk_may_keep",
    ),
    Fault(
        "gather/__init__.py", "seen_to = torch.where(keys < begins.shape[3], seen_to, 0)", "pass",
        "what stands in a place without a key is seen",
        "test_gather.py::test_as_many_keys_as_a_chunk_may_keep",
    ),
    Fault(
        "gather/__init__.py", "rank = torch.where(seen_from == 0, rows - seen_to, rows + seen_from)", "rank = keys",
        "gathered keys lie anyhow, and nearly every tile is visited pair by pair",
        "test_gather.py::test_nearly_all_tiles_are_full_or_hidden",
    ),
    Fault(
        "gather/__init__.py", "begins = torch.maximum(begins, j - band.hi)", "pass",
        "a call that is causal shows what comes, where the mask is not",
        "test_gather.py::test_against_the_bool_mask",
    ),
    Fault(
        "gather/__init__.py", "mask.heads not in (1, p.kv_heads)", "False",
        "query heads that keep keys of their own get those of one",
        "test_gather.py::test_what_is_not_gathered",
    ),
    Fault(
        "gather/__init__.py", "if p.score.dropout:", "if False:",
        "dropout drops by the places of gathered keys",
        "test_gather.py::test_what_is_not_gathered",
    ),
    Fault(
        "gather/autograd.py", "torch.where(keys < N, first + keys, B * H * N)", "first + keys.clamp(max=N - 1)",
        "the gradient of a place without a key is added to the last key's",
        "test_gather.py::test_gradients_of_rows",
    ),
    Fault(
        "backends/kept_keys.py", "mask=(place >= 0)[:, None]", "mask=(place >= -1)[:, None]",
        "a key that a chunk does not keep gets the gradient of another",
        "test_gather.py::test_the_kernels_are_their_twins",
    ),
    Fault(
        "backends/kept_keys.py", "h, c, b = row % heads, row // heads % chunks",
        "c, h, b = row % chunks, row // chunks % heads",
        "chunks and heads are taken for each other",
        "test_gather.py::test_the_kernels_are_their_twins",
    ),
    Fault(
        "backends/kept_keys.py", "until - begin // 2", "until - begin",
        "numbers before the node are counted",
        "test_dynamic_mask.py::test_the_kernel_of_the_running_smallest_is_its_twin",
    ),
    Fault(
        "call.py", "and (tiles is None or tiles.kept is None)", "and (tiles is None or True)",
        "a dynamic mask takes the way of an earlier mask, which gathers nothing",
        "test_tile_mask.py::test_a_usual_call_has_its_own_mask",
    ),
    Fault(
        "call.py", "else (tiles.queries, tiles.keys, layouts", "else (layouts",
        "a mask for other sizes passes, because one with tiles like these did",
        "test_tile_mask.py::test_a_usual_call_has_its_own_mask",
    ),
]  # fmt: skip
