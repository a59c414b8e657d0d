"""Faults of the kernels for Hopper, as far as a CPU can run or compile these: see faults.py."""

from __future__ import annotations

from fault import Fault

HOPPER = [
    Fault(
        "tilewise/backends/gluon/sm90/forward/launch.py", "self.always_hides or tiles.hides(M, N, lo, hi),", "self.always_hides,",
        "a length at which a band hides something has no look for rows that a hidden NaN has spoilt",
        "unit/test_structure.py::test_a_resized_pass_is_what_would_be_prepared",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/toeplitz.py", "terms.far_lo + 1, 0) //", "terms.far_lo + 9, 0) //",
        "a tile that the near distances cut takes the number of those that lie below",
        "backends/test_hopper_toeplitz.py::test_the_forwards_loops",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/toeplitz.py", "return _whole(odd, _whole(odd2, even2)), even4",
        "return _whole(odd, _whole(odd2, even2)), odd4",
        "dS of eight queries goes to the distances of others",
        "backends/test_hopper_toeplitz.py::test_diagonals_of_near_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/toeplitz.py", "+ gl.zeros_like(x).to(gl.int32) >= 8",
        "+ gl.zeros_like(x).to(gl.int32) > 8",
        "dS of a diagonal that begins where another ends goes to that one",
        "backends/test_hopper_toeplitz.py::test_diagonals_of_near_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/toeplitz.py", "low = (slope - high) - middle", "low = 0.0 * slope",
        "a slope loses a third of its bits",
        "backends/test_hopper_toeplitz.py::test_a_tile_on_a_line",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/underflow.py", "needed = 2 * score", "needed = score",
        "beside large norms tiles are left out that count",
        "backends/test_hopper_underflow.py::test_how_far_a_head_reaches",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/underflow.py", "squared < float(\"inf\"), squared", "True, squared",
        "a NaN in keys does not keep the tile that has it",
        "backends/test_hopper_underflow.py::test_how_far_a_head_reaches",
    ),
    Fault(
        "tilewise/backends/gluon/scheduler.py", "last = gl.maximum(row0 + rows - 1 + gl", "last = gl.maximum(row0 + gl",
        "the last queries of a tile miss keys above the near distances",
        "backends/test_hopper_underflow.py::test_no_tile_within_reach_is_left_out",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "work_tile.n0 + c.BLOCK_N - gl.load(reach)",
        "work_tile.n0 - gl.load(reach)",
        "keys miss the dS of queries that come late",
        "backends/test_hopper_underflow.py::test_no_tile_within_reach_is_left_out",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "first = gl.maximum(first, gl.maximum(m0 + lo, 0) // c.BLOCK_N)",
        "first = gl.maximum(first, 0)",
        "with a fixed order a tile of keys waits for one that is left out, for ever",
        "backends/test_hopper_underflow.py::test_no_tile_within_reach_is_left_out",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/toeplitz.py", "entry += step", "entry += 1",
        "a transposed tile takes two entries in the wrong order",
        "backends/test_hopper_toeplitz.py::test_words_in_memory",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/toeplitz.py", "return -slope * tl.arange", "return slope * tl.arange",
        "probabilities of queries on a line change along a tile the other way",
        "backends/test_hopper_toeplitz.py::test_the_lse_of_far_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/toeplitz.py", "return total, 4.0 * fours", "return total, 2.0 * fours",
        "what is summed up on a line has half of the distance between its first and its last queries",
        "backends/test_hopper_toeplitz.py::test_sums_of_far_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/toeplitz.py", "gl.where(m >= near_end, tiles", "gl.where(m > near_end, tiles",
        "the first tile of queries below the near distances takes the LSE of those above",
        "backends/test_hopper_toeplitz.py::test_the_backwards_loops",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "[:, None] + (sizes.queries - 1)", "[:, None] + (sizes.keys - 1)",
        "rows that are computed again read a Toeplitz bias from where no query begins",
        "backends/test_hopper_toeplitz.py::test_rows_are_computed_again",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dq.py", "(4, 3, 0, 2, 5, 1, 6)", "(4, 3, 0, 2, 1, 5, 6)",
        "dQ is summed in another order than it is read in",
        "backends/test_hopper_dq_accum.py",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dq.py", "(step * c.DQ_PARTS + PART) & 1) ^ 1)", "(step * c.DQ_PARTS + PART) & 1))",
        "dQ is stored before the tile ahead of it has left, or never",
        "backends/test_hopper_roles.py",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "    if cols < c.BLOCK_N:\n        full_begin = end\n", "",
        "keys past the end pass for keys that every query sees",
        "backends/test_hopper_mask.py::test_summary_by_keys",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "m // c.WARPGROUPS * c.WARPGROUPS + w", "m + 0 * w",
        "half of a tile of queries reads bits that nobody has written",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "full = tl.minimum(full, tl.min((", "full = tl.minimum(1, tl.min((",
        "a full tile beside one that is not reads bits that nobody has written",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/sparse_sum.py", "(b_of_mask + i // s.HEADS)", "b_of_mask",
        "a tile of dBias that later batch elements alone see is not zeroed before, and 0 after",
        "backends/test_sparse_sum.py::test_what_is_zeroed_and_read",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/sparse_sum.py", "b % s.BATCH if", "b // s.BATCH if",
        "a tile of dBias is zeroed where another batch element's mask shows it",
        "backends/test_sparse_sum.py::test_what_is_zeroed_and_read",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/sparse_sum.py", "mask=inside & (found != 0)", "mask=inside",
        "dBias has what lay in memory where nobody adds to it",
        "backends/test_sparse_sum.py::test_what_is_zeroed_and_read",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "(n < key_count) & ~wanted", "~wanted",
        "a program says of tiles past the last key that they are hidden, in the next row's place",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "cut = c.BANDED | (", "cut = (",
        "the backward reads bits of a full tile, which a band cuts, that nobody has written",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dbias_reduce.py", "mask=m >= begin, other=0)", "mask=m >= 0, other=0)",
        "tiles of dS before the band's are added up",
        "backends/test_hopper_work.py::test_what_a_mask_hides_from_all_sharers_is_not_added_up",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dbias_reduce.py", "some |= _stored_by(", "some = _stored_by(",
        "tiles of dS count where the last of the heads that share a bias stores them",
        "backends/test_hopper_work.py::test_what_a_mask_hides_from_all_sharers_is_not_added_up",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "            if c.SPARSE:\n", "            if c.DQ_ORDER:\n",
        "queries that see nothing read bits that nobody has written",
        "backends/test_tile_mask_triton.py::test_lists_for_hopper_are_those_of_the_bool_mask",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "        mask += b * (sizes.heads", "        mask -= b * (sizes.heads",
        "rows that are computed again read the mask of another batch element",
        "backends/test_hopper_rows.py::test_rows_of_a_mask_by_tiles_are_computed_again",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "= terms.lo + seq.diagonal, terms.hi + seq.diagonal",
        "= terms.lo, terms.hi",
        "the tiles of queries that a packed tile of keys visits are those of a square",
        "backends/test_hopper_bands.py::test_a_packed_tile_counts_from_the_ends_of_its_sequence",
    ),
    Fault(
        "tilewise/backends/gluon/scheduler.py", "= terms.lo + seq.diagonal, terms.hi + seq.diagonal",
        "= terms.lo, terms.hi",
        "the tiles of keys that a packed tile of queries visits are those of a square",
        "backends/test_hopper_schedule.py::test_a_packed_tile_counts_from_the_ends_of_its_sequence",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/config.py", "or x.problem.totals is not None", "",
        "the host deals out tiles of a packed batch that it does not know",
        "backends/test_hopper_packed.py::test_programs_take_whichever_tile_is_next",
    ),
    Fault(
        "tilewise/backends/gluon/score.py", "threshold > INFINITY", "threshold > INFINITY + 1",
        "dropout compares numbers to a NaN",
        "unit/test_dropout.py::test_two_numbers_at_once",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/dropout.py", "gl.where(odd == 0, high, low)", "gl.where(odd == 0, low, high)",
        "in a backward threads keep what they should trade",
        "backends/test_hopper_dropout.py::test_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/dropout.py", "a | d << 8 | b << 16", "a | b << 8 | d << 16",
        "outcomes at places off 16 go to their neighbours",
        "backends/test_hopper_dropout.py::test_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/preprocess.py", "(natural - constant) * LOG2E", "natural * LOG2E - constant",
        "a bias of the queries is taken out of an LSE in another base",
        "backends/test_hopper_rows.py::test_what_the_backward_knows_of_a_row",
    ),
    Fault(
        "tilewise/backends/gluon/preprocess.py", "o_tile = with_low_bits(o_tile, ", "o_tile + (",
        "beside dropout D is made from an O of 16 bits",
        "backends/test_hopper_rows.py::test_what_the_backward_knows_of_a_row",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "low_bits(acc, leaving)", "low_bits(acc, acc)",
        "rows that are computed again lose what rounding takes of them",
        "backends/test_hopper_rows.py::test_rows_are_computed_again",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "(distance <= hi)", "(distance < hi)",
        "rows that are computed again do not see the last key of the band",
        "backends/test_hopper_rows.py::test_rows_are_computed_again",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "head // parts // alone", "head // parts % alone",
        "a program works for the batch element of another",
        "backends/test_hopper_work.py::test_every_tile_has_one_program_and_sharers_are_one_group",
    ),
    Fault(
        "tilewise/backends/gluon/scheduler.py", "64 * (WARPGROUP + 1) - 1 + hi", "64 * WARPGROUP + hi",
        "a warpgroup leaves out tiles that all but its first query see",
        "backends/test_hopper_schedule.py::test_what_a_warpgroup_leaves_out_or_does_not_mask",
    ),
    Fault(
        "tilewise/backends/sequences.py", ".unfold(dim - 1, size, step)", ".unfold(dim - 1, size, size)",
        "sequences of equal lengths read their neighbours' keys where some of their own do not count",
        "unit/test_varlen.py::test_bias_of_sequences_of_equal_lengths",
    ),
    Fault(
        "tilewise/backends/sequences.py", ", shifts[x.number]) == (first.queries, first.keys, shifts[first.number])",
        ") == (first.queries, first.keys)",
        "sequences of equal lengths take the first one's start of distances",
        "unit/test_varlen.py::test_bias_of_sequences_of_equal_lengths",
    ),
    Fault(
        "tilewise/backends/gluon/varlen.py", "_length[None, :] > length[:, None]", "_length[None, :] < length[:, None]",
        "the longest sequences of a packed batch come last",
        "backends/test_hopper_packed.py::test_tiles_are_listed",
    ),
    Fault(
        "tilewise/backends/gluon/varlen.py", "t -= (n - nth) * heads", "t -= n * heads",
        "some tiles of a packed batch come twice, and others never",
        "backends/test_hopper_packed.py::test_each_tile_and_head_comes_once",
    ),
    Fault(
        "tilewise/backends/gluon/varlen.py", "tl.minimum(tl.maximum(found, 0), most)", "found",
        "offsets of a packed batch that are none lead outside",
        "backends/test_hopper_packed.py::test_offsets_that_are_none",
    ),
    Fault(
        "tilewise/backends/gluon/varlen.py", "RAGGED_AXIS - count + row", "RAGGED_AXIS - count + row - 1",
        "boxes of a packed batch begin a row too early",
        "backends/test_hopper_packed.py::test_a_ragged_box_ends_with_its_sequence",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/key_bias.py", "gl.cast(seq.first_key + n0, gl.int64)", "gl.cast(n0, gl.int64)",
        "every sequence of a packed batch reads the bias of the first one's keys",
        "backends/test_hopper_packed.py::test_a_bias_of_the_keys_is_that_of_the_sequence",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/key_bias.py", "sums, mask=cols < work_tile.seq.keys", "sums, mask=cols < sizes.keys",
        "the gradient of a bias along the keys goes to the next sequence's, too",
        "backends/test_hopper_packed.py::test_a_bias_of_the_keys_is_that_of_the_sequence",
    ),
    Fault(
        "tilewise/backends/gluon/varlen_values.py", "+ ((seq.first_query - seq.diagonal - lo + (STEP - 1)) & -STEP)",
        "+ (seq.first_query - seq.diagonal - lo)",
        "boxes of values by distance begin at no multiple of 16 bytes",
        "backends/test_hopper_packed.py::test_values_by_distance_are_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/varlen_values.py", "position = m0 + diagonal", "position = m0",
        "zeros in the gradient of values by distance are where those of a square would be",
        "backends/test_hopper_packed.py::test_values_by_distance_are_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/varlen_values.py", "_two_of(laid + (word + odd), odd, (", "_two_of(laid + word, odd, (",
        "a word of an odd row of a gradient by distance comes from the word before it",
        "backends/test_hopper_packed.py::test_values_by_distance_are_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/varlen_values.py", "mask=(tail >= begin) & (tail < end)", "mask=tail < begin",
        "the last entries of a tile's last row are not zeroed",
        "backends/test_hopper_relative.py::test_tiles_of_the_backward",
    ),
    Fault(
        "tilewise/backends/gluon/varlen_values.py", "there = inside & (key >= 0) & (key < seq.keys)",
        "there = inside & (key > 0) & (key < seq.keys)",
        "the first key of a sequence has no value by distance",
        "backends/test_hopper_packed.py::test_values_by_distance_are_tiles",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/relative.py", "work_tile.n0 - work_tile.seq.diagonal - m", "work_tile.n0 - m",
        "the range of a packed batch is counted from a sequence's first query and key",
        "backends/test_hopper_relative.py::test_a_packed_tile_counts_from_the_ends_of_its_sequence",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "column = first_column(seq, terms.first)", "column = terms.column",
        "rows that are computed again read another sequence's values by distance",
        "backends/test_hopper_packed.py::test_rows_beside_values_are_computed_again",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/launch.py", "and lengths.used_k is None and p.queries == p.keys", "",
        "dQ of queries that see nothing is whatever was there",
        "backends/test_hopper_packed.py::test_queries_that_see_nothing_are_thought_of",
    ),
    Fault(
        "tilewise/backends/gluon/score.py", "seen = cols <= last", "seen = cols < last",
        "the band is one key too narrow",
        "backends/test_hopper_bands.py",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/config.py", '{"do_stages": 1}', '{"do_stages": 2}',
        "a backward of 256 dimensions takes more shared memory than there is",
        "aot/test_hopper_room.py::test_every_structure_has_room",
    ),
    Fault(
        "tilewise/backends/gluon/score.py", "1.0 if capped else 1.0 / score.scale", "1.0 if capped else score.scale",
        "a bias is multiplied by the scale twice, not divided by it",
        "backends/test_hopper_terms.py::test_scores_in_the_units_of_the_kernels",
    ),
    Fault(
        "tilewise/spec/problem.py", "if self.bias_in_runs else self.bias.batch > 1", "if self.bias_in_runs else self.batch > 1",
        "a bias that all batch elements share is read past its end",
        "backends/test_hopper_terms.py::test_a_bias_and_a_mask_are_those_of_the_head",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/softmax.py", "l_i * alpha + sums_of_rows", "l_i + sums_of_rows",
        "the softmax's sum keeps the scale of an earlier maximum",
        "backends/test_hopper_terms.py::test_tiles_of_a_row_add_up_to_its_softmax",
    ),
    Fault(
        "tilewise/backends/gluon/score.py", "softcap_derivative(s, terms.cap)", "softcap_derivative(s + bias, terms.cap)",
        "the softcap's derivative is taken behind the bias",
        "backends/test_hopper_terms.py::test_probabilities_of_the_backward",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/kernel.py", "warpgroup_mma_wait(0 if FIRST else 1,", "warpgroup_mma_wait(2,",
        "the softmax reads scores before their product is done",
        "aot/test_hopper_aot.py",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/batched.py", "gl.where(present > 2, third, 0.0)", "third",
        "what lies where an element has no batch element is added to dBias",
        "backends/test_hopper_batched.py",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/batched.py", "release(elements[element].shared.ds_pipeline, slot)",
        "release(elements[0].shared.ds_pipeline, slot)",
        "elements wait for ever for room for their dS",
        "backends/test_hopper_batched.py",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dq.py", " & (b0 + element < batch)", "",
        "dQ of batch elements that are not there is written",
        "backends/test_hopper_dq_accum.py::test_earlier_heads_are_finished_and_their_places_zeroed",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "(place // c.ELEMENTS * sizes.kv_heads + work_tile.hk) * c.ELEMENTS",
        "(work_tile.hk * (sizes.batch // c.ELEMENTS) + place // c.ELEMENTS) * c.ELEMENTS",
        "a head of elements waits for programs of another",
        "backends/test_hopper_work.py::test_heads_of_lanes_take_turns_in_the_sum_of_dq",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/sizes.py", "zeroed = 2 * (-(-3 * lag // (2 * key_tiles)) + 1) * config.elements",
        "zeroed = -(-lag // key_tiles) * config.elements",
        "programs of elements wait for heads that others are at work on",
        "backends/test_hopper_work.py::test_heads_of_lanes_take_turns_in_the_sum_of_dq",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/sizes.py", "zeroed = min(zeroed, there)", "zeroed = min(zeroed, heads)",
        "dQ's sum of heads of which no preprocess knows begins with what was in memory",
        "backends/test_hopper_work.py::test_heads_of_lanes_take_turns_in_the_sum_of_dq",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dq.py", "wait_group(AHEAD * HEADS - 1)", "wait_group(AHEAD * HEADS)",
        "dQ is finished of strips that are still on their way",
        "backends/test_hopper_dq_accum.py::test_earlier_heads_are_finished_and_their_places_zeroed",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/launch.py", "if shared <= L2_CACHE // 2 <", "if shared <= L2_CACHE <",
        "a bias that does not stay in the L2 cache is read from memory for every batch element",
        "backends/test_hopper_config.py::test_order_of_the_forward",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/copied_bias.py", "group.batch * group.heads >= SHARERS", "group.batch >= SHARERS",
        "a bias that all heads of a batch element share is read one element at a time",
        "backends/test_hopper_copied_bias.py::test_who_shares_it",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/dbias.py", "found.to(bias.dtype).contiguous()", "found.to(bias.dtype)",
        "a compiled graph gets a dBias whose rows are longer than it was told",
        "backends/test_hopper_copied_bias.py::test_rows_of_its_gradient_are_longer_until_it_is_done",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/config.py", "min(p.queries, p.keys) >= BATCHED_FROM", "p.keys >= BATCHED_FROM",
        "short work tiles wait for their elements",
        "backends/test_hopper_config.py::test_batch_elements_side_by_side",
    ),
]  # fmt: skip
