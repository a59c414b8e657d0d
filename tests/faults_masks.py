"""Faults of masks by tiles, of dynamic masks and of keys that are gathered: see faults.py."""

from __future__ import annotations

from fault import Fault

MASKS = [
    # --- masks by tiles ---
    Fault(
        "tilewise/masks/tree.py", "ends[parent] = max(ends[parent], ends[segment])", "ends[parent] = ends[segment]",
        "a prompt is visible to its first response alone",
        "unit/test_trees.py::test_a_tree_is_its_sequences",
    ),
    Fault(
        "tilewise/masks/tree.py", "self._of_tokens(before), token - 1)", "token - 1, token - 1)",
        "the last token of one response predicts the first of the next",
        "unit/test_trees.py::test_previous_tokens_predict",
    ),
    Fault(
        "tilewise/spec/block_mask.py", "(tiles - PARTIAL).clamp(0, places - 1)", "(tiles - PARTIAL).clamp(0, places)",
        "the number of a tile leads past the bits",
        "unit/test_tile_mask.py::test_wrong_numbers_reach_no_memory",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "self.has_bias or problem.mask is not None", "self.has_bias or inputs.mask is not None",
        "NaN in a key that a mask by tiles hides comes through",
        "unit/test_tile_mask.py::test_hidden_nan",
    ),
    Fault(
        "tilewise/backends/kernels/block_mask.py", "tiles.tiles.clamp(0, most)", "tiles.tiles",
        "a kernel reads bits that a mask does not have",
        "backends/test_tile_mask_triton.py::test_wrong_numbers_reach_no_memory",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "mixed = place >= fulls", "mixed = place > fulls",
        "the first mixed tile of a list passes for a full one in the backward",
        "backends/test_tile_mask_triton.py::test_patterns",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "(other[None, :] > length[:, None])", "(other[None, :] < length[:, None])",
        "the shortest work tiles come first",
        "backends/test_hopper_mask.py::test_work_tiles_come_the_longest_first",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "head = first * parts + nth // sizes.key_tiles",
        "head = first + nth // sizes.key_tiles",
        "some heads that share a bias beside a mask have no gradient, others have it twice",
        "backends/test_hopper_dbias.py::test_each_tile_comes_once_and_in_the_order_of_the_list",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/documents.py", "listed = count * 0", "listed = count * 1",
        "both kernels compute short documents",
        "backends/test_hopper_documents.py::test_the_device_says_which_kernel_has_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/documents.py", "tl.minimum(tl.maximum(end - first, 0), queries)",
        "tl.maximum(end - first, 0)",
        "wrong ends of documents lead past the keys",
        "backends/test_hopper_documents.py::test_wrong_offsets_lead_nowhere_else",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/documents.py", "(their_keys[None, :] > keys[:, None])",
        "(their_keys[None, :] < keys[:, None])",
        "the shortest documents run first",
        "backends/test_hopper_documents.py::test_tiles_are_those_of_a_packed_batch",
    ),
    Fault(
        "tilewise/spec/problem.py", "longest = 1, max(N, 2)", "longest = 1, N",
        "sequences of one key share the first one's bias",
        "backends/test_hopper_packed.py::test_one_key_or_query_of_each_sequence",
    ),
    Fault(
        "tilewise/spec/problem.py", "longest = max(M, 2), 1", "longest = M, 1",
        "sequences of one query share the first one's bias",
        "backends/test_hopper_packed.py::test_one_key_or_query_of_each_sequence",
    ),
    Fault(
        "tilewise/operator/dispatch.py", "dlse.masked_fill(nothing, 0.0)", "dlse",
        "a sink gets NaN from rows that no sequence has",
        "unit/test_varlen.py::test_a_sink_where_there_is_nothing_to_compute",
    ),
    Fault(
        "tilewise/distributed/autograd.py", "else do.resolve_neg()", "else do",
        "a kernel reads the memory of a gradient that is kept negated",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "[rows.start // self.tiling.rows][j]", "[0][j]",
        "all queries skip the tiles that the first do not see",
        "unit/test_tile_mask.py::test_tiles_of_the_mask",
    ),
    Fault(
        "tilewise/spec/block_mask.py", "(least == FULL) & (most == FULL)", "most == FULL",
        "a tile that is hidden from one head passes for one that all see",
        "unit/test_tile_mask.py::test_states_are_those_of_each_tile",
    ),
    Fault(
        "tilewise/backends/kernels/tile_lists.py", "return (*(None if x is None else x._version for x in tiles), stream)",
        "return (stream,)",
        "the lists of a mask that has changed are those of before",
        "backends/test_tile_lists.py::test_a_changed_mask_is_read_again",
    ),
    Fault(
        "tilewise/backends/kernels/tile_lists.py", "any(x is not None and x.is_inference() for x in tiles)", "tiles.tiles is None",
        "a mask is kept whose changes nobody counts",
        "backends/test_tile_lists.py::test_what_may_not_be_kept",
    ),
    Fault(
        "tilewise/topk/selection.py", "torch.full_like(place, w - 1)", "torch.full_like(place, w)",
        "a key is kept for one better key too long",
        "unit/test_dynamic_mask.py::test_what_is_kept",
    ),
    # --- keys that are gathered ---
    Fault(
        "tilewise/topk/gather.py", "keep + rows - 1) // CHUNK", "keep) // CHUNK",
        "a chunk has no room for the keys that its later queries keep",
        "unit/test_gather.py::test_as_many_keys_as_a_chunk_may_keep",
    ),
    Fault(
        "tilewise/topk/gather.py", "seen_to = torch.where(keys < begins.shape[3], seen_to, 0)", "pass",
        "what stands in a place without a key is seen",
        "unit/test_gather.py::test_as_many_keys_as_a_chunk_may_keep",
    ),
    Fault(
        "tilewise/topk/gather.py", "rank = torch.where(seen_from == 0, rows - seen_to, rows + seen_from)", "rank = keys",
        "gathered keys lie anyhow, and nearly every tile is visited pair by pair",
        "unit/test_gather.py::test_nearly_all_tiles_are_full_or_hidden",
    ),
    Fault(
        "tilewise/topk/gather.py", "begins = torch.maximum(begins, j - band.hi)", "pass",
        "a call that is causal shows what comes, where the mask is not",
        "unit/test_gather.py::test_against_the_bool_mask",
    ),
    Fault(
        "tilewise/topk/gather.py", "mask.heads not in (1, p.kv_heads)", "False",
        "query heads that keep keys of their own get those of one",
        "unit/test_gather.py::test_what_is_not_gathered",
    ),
    Fault(
        "tilewise/topk/gather.py", "if p.score.dropout:", "if False:",
        "dropout drops by the places of gathered keys",
        "unit/test_gather.py::test_what_is_not_gathered",
    ),
    Fault(
        "tilewise/topk/autograd.py", "torch.where(keys < N, first + keys, B * H * N)", "first + keys.clamp(max=N - 1)",
        "the gradient of a place without a key is added to the last key's",
        "unit/test_gather.py::test_gradients_of_rows",
    ),
    Fault(
        "tilewise/topk/kernels.py", "mask=(place >= 0)[:, None]", "mask=(place >= -1)[:, None]",
        "a key that a chunk does not keep gets the gradient of another",
        "unit/test_gather.py::test_the_kernels_are_their_twins",
    ),
    Fault(
        "tilewise/topk/kernels.py", "h, c, b = row % heads, row // heads % chunks",
        "c, h, b = row % chunks, row // chunks % heads",
        "chunks and heads are taken for each other",
        "unit/test_gather.py::test_the_kernels_are_their_twins",
    ),
    Fault(
        "tilewise/topk/kernels.py", "until - begin // 2", "until - begin",
        "numbers before the node are counted",
        "unit/test_dynamic_mask.py::test_the_kernel_of_the_running_smallest_is_its_twin",
    ),
    Fault(
        "tilewise/topk/kernels.py", "for at in range(node, start, WIDE)", "for at in range(node, start - WIDE, WIDE)",
        "the last blocks before one are not added up",
        "unit/test_dynamic_mask.py::test_the_kernel_of_the_running_smallest_adds_up_a_long_node",
    ),
    Fault(
        "tilewise/topk/kernels.py", "mask=inside & (i >= keep), other=n", "mask=inside, other=n",
        "the best keys go when some number says so that nobody has found",
        "unit/test_dynamic_mask.py::test_the_kernel_of_intervals_is_its_twin",
    ),
    Fault(
        "tilewise/topk/kernels.py", "rank = tl.where(seen_from == 0, rows - seen_to, rows + seen_from)",
        "rank = rows + seen_from",
        "keys that go lie as they come, and their tiles are visited pair by pair",
        "unit/test_gather.py::test_the_kernels_of_chunks_are_their_twins",
    ),
    Fault(
        "tilewise/topk/kernels.py", "key < count, c * rows, rows, lo, hi)", "key < count, 0, rows, lo, hi)",
        "each chunk's keys are seen as by the queries of the first",
        "unit/test_gather.py::test_the_kernels_of_chunks_are_their_twins",
    ),
    Fault(
        "tilewise/topk/kernels.py", "here = chosen & (place < cols)", "here = chosen",
        "a mask that was changed writes past its room",
        "unit/test_gather.py::test_the_kernels_of_chunks_are_their_twins",
    ),
    Fault(
        "tilewise/backends/kernels/interval_tiles.py", "last = tl.where(end > begin, (end + block_m - 1) // block_m, first)",
        "last = (end + block_m - 1) // block_m",
        "a tile of empty intervals is visited",
        "unit/test_dynamic_mask.py::test_the_kernel_of_tiles_of_intervals_is_its_twin",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "_interval(x, matrix, key + 8, row0, keys)",
        "_interval(x, matrix, key, row0, keys)",
        "the backward shows of a key's intervals those of the key eight before it",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "(begin <= 0) & (end >= shown)", "(begin <= 0) & (end >= 64)",
        "a tile in which queries end is looked at pair by pair",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "tl.minimum(tl.maximum(last % 8 - two, 0), 2)",
        "tl.minimum(tl.maximum(last % 8 - two, 0), 1)",
        "a query that sees a key as the last one does not",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "if mask.kept is not None:", "if False:",
        "a dynamic mask takes the way of an earlier mask, which gathers nothing",
        "unit/test_tile_mask.py::test_a_usual_call_has_its_own_mask",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "(arguments, mask.queries, mask.keys)", "(arguments,)",
        "a mask for other sizes passes, because one with tiles like these did",
        "unit/test_tile_mask.py::test_a_usual_call_has_its_own_mask",
    ),
    Fault(
        "tilewise/topk/kernels.py", "key.to(tl.int64)[:, None] * x.stride2", "key[:, None] * x.stride2",
        "rows of kept keys are read outside of memory from 2³¹ elements on",
        "tools/test_index_width.py::test_elements_past_an_int32",
    ),
    Fault(
        "tilewise/masks/picture.py", "(matrices == FULL).all(0), True)", "(matrices == FULL).all(0), False)",
        "a cell at the end of a mask is drawn as partial",
        "unit/test_mask_pictures.py::test_cells_are_what_all_of_their_tiles_are",
    ),
    Fault(
        "tilewise/masks/picture.py", "is_fake(tiles) or not is_eager((tiles,))", "tiles.is_meta",
        "repr of a mask raises where its tiles cannot be read",
        "unit/test_mask_pictures.py::test_what_cannot_be_read_has_sizes_alone",
    ),
]  # fmt: skip
