"""Faults that a careless hand could make, and for each the test that should notice: see mutants.py."""

from __future__ import annotations

from fault import Fault
from faults_derivatives import DERIVATIVES
from faults_distributed import DISTRIBUTED
from faults_flex import FLEX
from faults_hopper import HOPPER
from faults_masks import MASKS
from faults_memory import MEMORY
from faults_one_tile import ONE_TILE
from faults_packed import PACKED
from faults_sdpa import SDPA
from faults_statistics import STATISTICS
from faults_windows import WINDOWS

FAULTS = [
    # --- what is computed, and where ---
    Fault(
        "tilewise/spec/reference.py", "(capped / cap).square()", "(capped / cap).abs()",
        "the softcap's derivative is not its derivative",
        "unit/test_score.py::test_softcap_derivative",
    ),
    Fault(
        "tilewise/spec/reference.py", "distance <= band.hi", "distance < band.hi",
        "the band is one key too narrow",
        "unit/test_score.py::test_in_band",
    ),
    Fault(
        "tilewise/spec/tiles.py", "min(max(row0 + rows - 1 + lo, 0), N)", "min(max(row0 + lo, 0), N)",
        "tiles that a window's left side cuts pass for full ones",
        "unit/test_tiles.py::test_key_tiles",
    ),
    Fault(
        "tilewise/spec/tiles.py", "min(part, longer) + begin", "min(part, longer)",
        "the pieces of a split begin at the first key, whatever the band leaves",
        "unit/test_tiles.py::test_split_tiles",
    ),
    # --- from a call to a backend ---
    Fault(
        "tilewise/spec/tma.py", "all(0 < line < 2**40", "all(0 <= line < 2**40",
        "TMA is asked to read an axis that repeats, with a stride of 0",
        "backends/test_hopper.py",
    ),
    Fault(
        "tilewise/planner.py", 'raise ValueError(f"backend: {backend!r} cannot', 'return make_plan(problem)  # f"{backend!r} can',
        "a backend that was asked for and declines is replaced without a word",
        "unit/test_problem.py::test_explicit_backend_that_declines_is_an_error",
    ),
    Fault(
        "tilewise/scaled_dot_product.py", "None, diagonal=0)", "None, key.shape[-2] - query.shape[-2])",
        "is_causal is aligned bottom-right, as PyTorch's is not",
        "unit/test_sdpa.py::test_causal_is_top_left",
    ),
    Fault(
        "tilewise/scaled_dot_product.py", "return (-query, -scale) if", "return (query, -scale) if",
        "a negative scale loses its sign",
        "unit/test_sdpa.py::test_scale",
    ),
    Fault(
        "tilewise/frontend/arguments.py", "hi if band.hi is None else min(band.hi, hi)", "hi",
        "a CausalBias takes the place of the window's right side",
        "unit/test_doors.py::test_a_causal_bias_beside_other_terms",
    ),
    Fault(
        "tilewise/windows/api.py", "torch.float64 if grad.dtype == torch.float64 else torch.float32", "grad.dtype",
        "gradients of overlapping windows are summed in half precision",
        "integrations/test_windows.py::test_shifted_windows_are_summed_in_float32",
    ),
    Fault(
        "tilewise/windows/api.py", "inside = row[:, self.before : self.before + self.length]", "inside = row",
        "a window that begins before its sequence sees the end of the one before",
        "integrations/test_windows.py::test_windows",
    ),
    Fault(
        "tilewise/windows/api.py", "windows.length % q_block :].fill_(-torch.inf)", "windows.length % q_block :]",
        "NaN of a bias for queries that there are not reaches the gradients of keys",
        "integrations/test_windows.py::test_nan_of_a_bias_outside_the_sequence",
    ),
    Fault(
        "tilewise/distributed/triangle.py", "_transposed(tensor, ranks)", "_transposed(tensor, ranks).transpose(1, 2)",
        "the ending node attends along the rows of the starting one",
        "distributed/test_distributed.py::test_ranks_get_what_one_process_gets",
    ),
    Fault(
        "tilewise/frontend/leading.py", "return not full", "return True",
        "a bias that only some of the leading dimensions share passes for one that all share",
        "unit/test_leading.py::test_bias",
    ),
    Fault(
        "tilewise/frontend/leading.py", "ordered=dropout_p != 0", "ordered=False",
        "dropout counts sequences as they lie in memory",
        "unit/test_leading.py::test_dropout_counts_sequences_in_order",
    ),
    Fault(
        "tilewise/frontend/leading.py", "        while dims and x.shape[dims[0]] == 1:\n            del dims[0]\n", "",
        "a mask that all images share takes a call for each window",
        "unit/test_leading.py::test_a_mask_that_repeats_along_the_batch",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "device=x.device) % x.shape[0]", "device=x.device).clamp(max=x.shape[0] - 1)",
        "a mask that repeats along the batch ends with its last one, on the CPU",
        "unit/test_leading.py::test_a_mask_that_repeats_along_the_batch",
    ),
    Fault(
        "tilewise/backends/triton/tensors.py", "else b % how.BATCH", "else tl.minimum(b, how.BATCH - 1)",
        "a mask that repeats along the batch ends with its last one, in Triton",
        "backends/test_repeated_masks.py",
    ),
    Fault(
        "tilewise/spec/checks.py", "or sizes.B % x.shape[1] != 0", "or x.shape[1] > sizes.B",
        "a mask repeats along a batch that it does not divide",
        "unit/test_problem.py::test_a_mask_that_repeats",
    ),
    Fault(
        "tilewise/spec/checks.py", "or sizes.B % x.shape[0] != 0", "or x.shape[0] > sizes.B",
        "runs of batch elements share a bias, and some elements have none",
        "unit/test_problem.py::test_a_bias_of_runs",
    ),
    Fault(
        "tilewise/frontend/leading.py", "        while dims and x.shape[dims[-1]] == 1:\n            del dims[-1]\n", "",
        "triangle attention of a batch takes a call for each element",
        "unit/test_leading.py::test_bias_and_mask_that_are_shared_along_unlike_dimensions",
    ),
    Fault(
        "tilewise/nn/multihead.py", "~(hidden[0] | hidden[1])", "~hidden[0]",
        "a module's attn_mask has no effect beside padding",
        "unit/test_nn.py::test_it_is_pytorchs",
    ),
    Fault(
        "tilewise/nn/multihead.py", "given = [F.pad(x, (0, more)) for", "given = [F.pad(x, (0, more), value=1) for",
        "a mask hides the keys that a module adds",
        "unit/test_nn.py::test_it_is_pytorchs",
    ),
    Fault(
        "tilewise/backends/runs.py", "own[\"bias\"] = inputs.bias[n : n + 1]", "own[\"bias\"] = inputs.bias[:1]",
        "all runs of batch elements have the bias of the first, on the CPU",
        "backends/test_bias_runs.py::test_cpu",
    ),
    Fault(
        "tilewise/backends/triton/tensors.py", "mb = b // (batch // how.BATCH)", "mb = b % how.BATCH",
        "batch elements take turns with the biases of runs, in Triton",
        "backends/test_bias_runs.py::test_triton",
    ),
    Fault(
        "tilewise/backends/triton/ordered.py", "b = b * (sizes.batch // how.BATCH)", "b = b * 1",
        "a fixed order sums the gradient of a run's bias over other elements, in Triton",
        "backends/test_bias_runs.py::test_triton",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/scheduler.py", "return gl.where(nth < sizes.run, place",
        "return gl.where(nth <= sizes.run, place",
        "a program of three elements takes one of the next run, which has another bias, on Hopper",
        "backends/test_hopper_batched.py::test_roles_of_lanes",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/launch.py", " or reduction(p) == DBiasMode.REDUCE", "",
        "heads past the first wait for ever for the zeros of their sum of dQ, on Hopper",
        "backends/test_hopper_dbias.py::test_sums_of_dq_that_no_later_program_zeroes_are_zeroed_before",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "do_tile = (do_tile * factor[:, None]).to", "do_tile = do_tile.to",
        "the rounding of the LSE beside a large bias stays in the gradients, in Triton",
        "backends/test_large_bias.py::test_triton",
    ),
    Fault(
        "tilewise/backends/gluon/preprocess.py", "tl.store(counts - 1 - place, coarse.to(tl.int32))",
        "tl.store(counts - 1 - place, coarse.to(tl.int32) * 0)",
        "no query tile reads the dO that makes up for the rounding of the LSE, on Hopper",
        "backends/test_hopper_rows.py::test_do_makes_up_for_the_rounding_of_a_large_lse",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "return causal, ordered, backend, dropout_p,", "return causal, backend, dropout_p,",
        "calls are remembered without what they said of determinism",
        "unit/test_autograd.py::test_a_usual_call_follows_the_determinism_that_is_asked_for",
    ),
    Fault(
        "tilewise/operator/dispatch.py", '"backward", found, forward, needs)', '"backward", found, forward)',
        "a prepared backward of an eager call answers one that needs other gradients",
        "unit/test_cache.py::test_a_backward_is_found_by_what_it_reads",
    ),
    Fault(
        "tilewise/operator/structure.py", "None if x is None else (x.stride(), x.dtype, x.numel()) for x in tensors])",
        "None if x is None else (x.dtype, x.numel()) for x in tensors])",
        "a backward reads tensors that a hook restored with other strides as those that were saved",
        "unit/test_cache.py::test_a_backward_is_found_by_what_it_reads",
    ),
    Fault(
        "tilewise/spec/problem.py", "not all(None in allowed or n in allowed", "not all(None in allowed or n >= 1",
        "the axes of an operand's row are not checked",
        "unit/test_operand_table.py::test_one_row_adds_an_operand",
    ),
    Fault(
        "tilewise/operator/sharding.py", '"BH"[dim] in OPERANDS[name].sizes(dim)', "True",
        "DTensor splits buckets, which have no batch",
        "unit/test_operand_table.py::test_one_row_adds_an_operand",
    ),
    Fault(
        "tilewise/operator/dispatch.py", '"backward", found, terms, needs)', '"backward", found, terms)',
        "a prepared backward answers calls that need other gradients",
        "unit/test_cache.py::test_a_backward_is_found_by_what_it_reads",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "if limits is not None:", "if False:",
        "a call with a new length has the band of an earlier one",
        "unit/test_structure.py::test_a_new_length_is_what_it_would_be_without_others",
    ),
    Fault(
        "tilewise/operator/structure.py", "0 if usual else _codes((*q_strides", "0 if True else _codes((*q_strides",
        "what is prepared for contiguous rows reads others",
        "unit/test_structure.py::test_another_structure",
    ),
    Fault(
        "tilewise/backends/triton/resized.py", "(shares > 1) != (run.merge is not None)", "False",
        "splits of the keys are not merged where another length has none",
        "unit/test_structure.py::test_a_resized_pass_is_what_would_be_prepared",
    ),
    Fault(
        "tilewise/backends/launch/short_launch.py", "        if mask:\n", "        if mask is None:\n",
        "a kernel that was compiled for multiples of 16 gets any address",
        "backends/test_launcher.py::test_the_short_way_declines_another_alignment",
    ),
    Fault(
        "tilewise/backends/launch/arguments.py", "(before != 0 and keeps(s))", "keeps(s)",
        "a resized launch steps along an axis of size 1",
        "backends/test_launcher.py::test_a_resized_launch_hands_over_what_a_new_one_would",
    ),
    Fault(
        "tilewise/backends/launch/arguments.py", "[*[n != 1 or keeps(s) for n, s in", "[*[True for n, s in",
        "a resized launch's descriptor has the stride of an axis of size 1, which TMA may refuse",
        "backends/test_launcher.py::test_strides_along_an_axis_of_size_1",
    ),
    Fault(
        "tilewise/backends/launch/short_launch.py", "            kept.clear()\n", "            kept.popitem()\n",
        "of a launch whose descriptors are too many, all but one are kept for ever",
        "backends/test_launcher.py::test_descriptors_are_kept_by_address",
    ),
    Fault(
        "tilewise/backends/launch/short_launch.py", 'f"if watched(): {other}", ', "",
        "hooks do not see resized launches",
        "backends/test_launcher.py::test_who_launches_a_resized_launch",
    ),
    Fault(
        "tilewise/operator/custom_op.py", "else x.select(dim, i)", "else x.select(0, i)",
        "vmap takes the elements along the first axis, whatever in_dims says",
        "unit/test_transforms.py::test_vmap",
    ),
    # --- the CPU ---
    Fault(
        "tilewise/backends/cpu/tiled.py", "l_i = alpha * l_i + p", "l_i = l_i + p",
        "the softmax's sum keeps the scale of an earlier maximum",
        "backends/test_cpu.py::test_lengths",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "if cotangents.lse is not None:", "if False:",
        "the gradient of the LSE is dropped",
        "backends/test_cpu.py::test_lengths",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "x.unflatten(1, (p.kv_heads, p.group)) if", "x.unflatten(1, (p.group, p.kv_heads)) if",
        "query heads read the bias of another head of their group",
        "backends/test_cpu.py::test_groups",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "else x.shift[self.kv[0]]", "else x.shift",
        "a batch element stands where the first one does",
        "unit/test_bias_attention.py::test_tile_by_tile",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "visible = visible & (part != -torch.inf)", "pass",
        "NaN comes through where a term hides a key",
        "unit/test_bias_attention.py::test_nan_beyond_the_range_and_behind_it",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "if self.relatives and self._hidden_by_distance(rows, j):", "if False:",
        "tiles that a term hides are visited",
        "unit/test_bias_attention.py::test_tiles_that_a_term_hides_are_not_visited",
    ),
    Fault(
        "tilewise/frontend/arguments.py", "bias, cols = cols, None", "bias = cols",
        "a bias along the keys is added twice",
        "unit/test_bias_attention.py::test_every_term",
    ),
    Fault(
        "tilewise/frontend/arguments.py", ".extended(inputs.q, inputs.k, score.scale)", ".extended(inputs.q, inputs.k, 1.0)",
        "a bias of low rank is scaled as q @ k.mT is",
        "unit/test_bias_attention.py::test_low_rank_keeps_the_scale_of_q",
    ),
    Fault(
        "tilewise/operator/autograd.py", "return tuple(named.get(name) for name in INPUT_NAMES)",
        "return tuple(named.get(name) for name in (*Needs._fields, *INPUT_NAMES))[: len(INPUT_NAMES)]",
        "gradients go to inputs by position",
        "unit/test_bias_attention.py::test_compile",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "self.only_visible(dp.sub_(delta).mul_(p), tile)", "dp.sub_(delta).mul_(p)",
        "NaN in a hidden value leaks into the gradients",
        "backends/test_cpu.py::test_hidden_keys_may_hold_anything",
    ),
    Fault(
        "tilewise/backends/cpu/fused.py", "and (lse == 0).any()", "and False",
        "a query that sees nothing has an LSE of 0, not of -inf",
        "backends/test_cpu.py::test_rows_that_see_nothing",
    ),
    Fault(
        "tilewise/backends/cpu/parts.py", "if _is_huge(row):", "if False:",
        "where all keys have a bias of -1e9 the exponentials are off by any factor",
        "backends/test_cpu.py::test_a_row_at_a_very_negative_bias_is_a_mean",
    ),
    # --- Triton ---
    Fault(
        "tilewise/backends/triton/blocks.py", "c.D_BLOCKS if DIM == \"head\" else c.DV_BLOCKS):\n            block",
        "1):\n            block",
        "of heads of more than 256 dimensions the first block of columns alone is multiplied",
        "backends/test_wide_heads.py::test_dense",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "inside &= column == 0", "inside &= column > 1",
        "no program of the first columns stores the LSE",
        "backends/test_wide_heads.py::test_dense",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "elif x.column == 0:", "elif x.column >= 0:",
        "each tile of columns adds the gradient of the bias",
        "backends/test_wide_heads.py::test_dense",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "LN2) + tl.log2(l_i) * LN2", "LN2) + tl.log2(l_i)",
        "a part of the LSE is in base 2",
        "backends/test_triton_interpreter.py::test_lengths",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "query, base + tl.log2(total) * LN2", "query, base + tl.log2(total)",
        "a part of the LSE of a split forward is in base 2",
        "backends/test_triton_interpreter.py::test_few_queries",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "v_tile = tl.where(finite, v_tile, 0.0).to(v_tile.dtype)", "v_tile += 0.0",
        "NaN in a hidden value leaks into the output",
        "backends/test_triton_interpreter.py::test_hidden_keys_that_are_not_finite",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "m.to(tl.int64) * dlse.stride2", "m.to(tl.int64)",
        "the gradient of the LSE is read as if its rows were contiguous",
        "backends/test_triton_interpreter.py::test_layouts",
    ),
    Fault(
        "tilewise/backends/kernels/score.py", "ds = db * slope", "ds = db",
        "the softcap's derivative is left out",
        "backends/test_triton_interpreter.py::test_head_dimensions",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "tl.sum(db, 0), mask=m < ", "tl.sum(db, 1), mask=m < ",
        "the gradient of a bias of rows is summed over the queries",
        "backends/test_triton_interpreter.py::test_bias_broadcasts",
    ),
    Fault(
        "tilewise/backends/triton/visibility.py", "visits & is_full(n, full_begin, full_end, state)", "visits & (cut == 0)",
        "a mixed tile is computed without its mask",
        "unit/test_visibility.py::test_masks_of_hidden_and_whole_tiles",
    ),
    Fault(
        "tilewise/backends/triton/visibility.py", "whole + tl.cumsum(cut, 0)", "whole + tl.cumsum(full, 0)",
        "tiles that are cut are listed one over the other",
        "unit/test_visibility.py::test_lists_of_a_mask",
    ),
    Fault(
        "tilewise/backends/triton/ordered.py", "acc += _tile_gradient(", "acc = _tile_gradient(",
        "the ordered gradient of a shared bias is that of the last who shares it",
        "backends/test_triton_interpreter.py::test_bias_broadcasts",
    ),
    Fault(
        "tilewise/backends/triton/reductions.py", "problem.deterministic and reduction not in (BiasReduction.NONE, BiasReduction.STORE)", "False",
        "a gradient that should be summed in one order is summed by atomics",
        "backends/test_triton_interpreter.py::test_what_has_an_order_has_no_atomics",
    ),
    Fault(
        "tilewise/backends/triton/config.py", "(capacity - block_m * d * size - 4096)", "(capacity - 4096)",
        "a program of few queries takes more shared memory than there is",
        "aot/test_triton_room.py::test_few_wide_queries",
    ),
    *HOPPER,
    # --- a product and a softmax of their own ---
    Fault(
        "tilewise/ops/gemm/triton_kernel.py", "added.to(tl.float32) * beta", "added.to(tl.float32)",
        "beta is lost",
        "backends/test_matmul_interpreter.py::test_triton",
    ),
    Fault(
        "tilewise/ops/gemm/problem.py", "any(o != inner.size * i for", "any(o < inner.size * i for",
        "axes are merged that do not follow each other in memory",
        "unit/test_matmul.py::test_merged_axes",
    ),
    Fault(
        "tilewise/ops/row_softmax/cpu.py", "ds.masked_fill_(hidden, 0.0)", "pass",
        "where a visible dP is NaN so is the gradient of what is hidden",
        "unit/test_softmax.py::test_a_visible_gradient_that_is_not_finite_leaves_alone_where_p_is_zero",
    ),
    Fault(
        "tilewise/ops/row_softmax/triton/backward.py", "(ds * scale).to(", "ds.to(",
        "dx loses the scale",
        "aot/test_softmax_triton.py::test_axes_and_layouts",
    ),
    # --- sinks ---
    Fault(
        "tilewise/backends/triton/forward.py", "        top, l_i, alpha = with_sink(", "        _, l_i, alpha = with_sink(",
        "the LSE does not know of a sink that is above all scores",
        "backends/test_sinks.py::test_triton",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "total += tl.exp((more - base).to(tl.float32))", "pass",
        "a sink is forgotten where the keys are split",
        "backends/test_sinks.py::test_few_queries",
    ),
    Fault(
        "tilewise/backends/__init__.py", "(p * minus_delta).sum_to_size", "(p * -minus_delta).sum_to_size",
        "dsink has the wrong sign",
        "backends/test_sinks.py::test_gradcheck",
    ),
    Fault(
        "tilewise/backends/kernels/score.py", "l_i * alpha + tl.exp2(", "l_i + tl.exp2(",
        "the sum keeps the scale of a maximum below the sink",
        "backends/test_hopper_terms.py::test_a_sink_is_one_more_score",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "        acc *= alpha[:, None]\n", "",
        "a row that is computed again keeps the sink's share",
        "backends/test_hopper_rows.py::test_rows_are_computed_again",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/nan_fixup.py", "        acc *= terms.weight\n", "        acc *= 1.0\n",
        "a row that is computed again does not weigh what dropout keeps",
        "backends/test_hopper_rows.py::test_rows_are_computed_again",
    ),
    Fault(
        "tilewise/backends/kernels/sinks.py", "total += sign * p", "total -= sign * p",
        "the kernels' dsink has the wrong sign",
        "backends/test_sinks.py::test_the_kernel_of_the_gradient_is_its_twin",
    ),
    Fault(
        "tilewise/backends/__init__.py", "call.bias is not None or call.sink is not None", "call.bias is not None",
        "P beside a large sink has the rounding of the LSE",
        "backends/test_large_bias.py::test_gradient_of_a_sink_beside_large_scores_triton",
    ),
    Fault(
        "tilewise/backends/kernels/sinks.py", "value.to(tl.float64)", "value.to(tl.float32)",
        "dsink has the rounding of a large sink",
        "backends/test_large_bias.py::test_gradient_of_a_sink_beside_large_scores_triton",
    ),
    Fault(
        "tilewise/backends/kernels/sinks.py", "own + 1 if ROWS else blocks", "own + 1",
        "dsink of a head is that of its first queries",
        "backends/test_sinks.py::test_the_kernel_of_the_gradient_is_its_twin",
    ),
    Fault(
        "tilewise/backends/kernels/sinks.py", "(m // tile) * between", "(m // tile) * tile",
        "dsink on Hopper takes a row's LSE for its delta",
        "backends/test_hopper_rows.py::test_the_gradient_of_a_sink",
    ),
    # --- values by distance ---
    Fault(
        "tilewise/backends/gluon/values.py", " + (WIDEST if distances.lo > 0 and distances.lo % WIDEST else 0)", "",
        "TMA is asked for a tile that begins at a negative column",
        "backends/test_hopper_relative.py::test_a_tile_of_the_forward",
    ),
    Fault(
        "tilewise/backends/gluon/values.py", "distances.lo if band.lo is None else max(distances.lo, band.lo)", "distances.lo",
        "entries of tiles that a window leaves out are neither stored nor zeroed",
        "backends/test_hopper_relative.py::test_tiles_of_the_backward",
    ),
    Fault(
        "tilewise/backends/gluon/values.py", "found.flip(3) if", "found if",
        "the gradient of values that descend ascends",
        "backends/test_hopper_values.py::test_values_that_tma_reads_are_not_copied",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/relative.py", "found == INSIDE", "found >= CUT",
        "a tile that is cut is stored over the entries of another",
        "backends/test_hopper_relative.py::test_how_a_gradient_leaves",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/relative.py", "m - 1, work_tile.end - 1", "m - 1, work_tile.end",
        "the first values of the next head are those of a tile behind",
        "backends/test_hopper_relative.py::test_the_backward_knows_the_tile_that_follows",
    ),
    Fault(
        "tilewise/backends/gluon/varlen_values.py", "position + BLOCK_M - 1 + inner_lo", "position + inner_lo",
        "what tiles at the range's lower end add to is not zeroed",
        "backends/test_hopper_relative.py::test_tiles_of_the_backward",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/zero.py", "tl.cast(bh // heads, tl.int64) * dvalues.stride0", "0",
        "the first batch element alone is zeroed",
        "backends/test_hopper_relative.py::test_zeros_of_every_head",
    ),
    Fault(
        "tilewise/backends/triton/relative.py", 'value = tl.where(inside, value, -float("inf"))', "pass",
        "what a term hides is visible",
        "backends/test_relative_triton.py::test_terms",
    ),
    Fault(
        "tilewise/backends/triton/relative.py", "tl.gather(db, (cols + at.rows) % c.BLOCK_N, 0)",
        "tl.gather(db, (cols - at.rows + c.BLOCK_M * c.BLOCK_N) % c.BLOCK_N, 0)",
        "columns are turned the other way, so that no diagonal is a row",
        "backends/test_relative_triton.py::test_terms",
    ),
    Fault(
        "tilewise/backends/triton/relative.py", "near_end + i - left)", "near_end + i - left + 1)",
        "of the tiles beyond the entries one is left out",
        "backends/test_relative_triton.py::test_lengths",
    ),
    Fault(
        "tilewise/backends/triton/relative.py", "and band.lo is not None and band.lo >= distances.lo", "and band.lo is not None",
        "values in front of a row pass for its own",
        "backends/test_relative_triton.py::test_tiles_without_an_entry",
    ),
    Fault(
        "tilewise/backends/triton/relative.py", "    hi = _plain(numbers.distances) - 1 - origin\n    if BY",
        "    hi = _plain(numbers.distances) - 2 - origin\n    if BY",
        "a tile with the last entry alone passes for one without",
        "backends/test_relative_triton.py::test_tiles_without_an_entry",
    ),
    Fault(
        "tilewise/backends/triton/bias_components.py", '("cols", "rows", "toeplitz", "query", "key")',
        '("cols", "rows", "query", "toeplitz", "key")',
        "a Toeplitz bias is lost beside values per query",
        "backends/test_relative_triton.py::test_together",
    ),
    Fault(
        "tilewise/backends/triton/bias_components.py", "{name: x.contiguous() for", "{name: x for",
        "buckets that lie apart are read as if they did not",
        "backends/test_relative_triton.py::test_terms",
    ),
    Fault(
        "tilewise/backends/kernels/vectors.py", "tl.load(bounds + 2 * b + 1) - first, 0), width)",
        "tl.load(bounds + 2 * b + 1) - first, 0), width - 1)",
        "the last distance of a call is left out of the gradient of T5's table",
        "unit/test_bias_vectors.py::test_the_kernels_are_the_definition",
    ),
    Fault(
        "tilewise/backends/kernels/vectors.py", "total += value * _of_distance(first + place, SIGNED)",
        "total += value * _of_distance(start, SIGNED)",
        "a slope's gradient has one distance for a whole block",
        "unit/test_bias_vectors.py::test_the_kernels_are_the_definition",
    ),
    Fault(
        "tilewise/bias/toeplitz.py", "begin = torch.where(begin == 0, -_INFINITE, begin + own.lo)", "begin = begin + own.lo",
        "the last bucket ends where the distances with a row of their own do",
        "unit/test_bias_vectors.py::test_a_bucket_is_an_interval",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "return term.rule, query_start, key_start, layouts(x)", "return term.rule, query_start, layouts(x)",
        "a call takes the positions of the keys from an earlier one",
        "unit/test_bias_vectors.py::test_a_call_like_an_earlier_one_is_not_read",
    ),
    Fault(
        "tilewise/bias/autograd.py", "if is_eager_backward(gradient):", "if True:",
        "the gradient of a vector has no gradient itself",
        "unit/test_bias_vectors.py::test_gradients_of_gradients_and_batched_ones",
    ),
    Fault(
        "tilewise/bias/canonical.py", "heads = max(x.shape[1] for x in vectors)", "heads = vectors[0].shape[1]",
        "Toeplitz terms are added up for the heads of the first",
        "unit/test_bias_calls.py::test_toeplitz_terms_in_any_order",
    ),
    Fault(
        "tilewise/spec/relative.py", "        and (values.stride(-2) >= values.shape[-1] or values.shape[-2] == 1)\n", "",
        "rows of values that are one in memory are skewed",
        "unit/test_bias_attention.py::test_tile_by_tile",
    ),
    Fault(
        "tilewise/spec/relative.py", "return state(least + first, most + last,", "return state(least + first, most + first,",
        "batch elements that stand further on are judged by the first",
        "unit/test_bias_terms.py::test_every_rule_axis_order_and_start",
    ),
    # --- dropout ---
    Fault(
        "tilewise/spec/dropout.py", "torch.where(j & 8 == 0, half", "torch.where(j & 4 == 0, half",
        "of eight scores two by two share a number",
        "unit/test_dropout.py::test_numbers",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "            dp.mul_(z)\n", "            pass\n",
        "the gradients of the scores on the CPU know of no dropout",
        "unit/test_dropout.py::test_gradcheck",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "- delta[None, :], -delta[None, :])", "- delta[None, :], 0.0)",
        "the score of a dropped probability has no gradient, though it was part of the sum",
        "unit/test_dropout.py::test_triton",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "stream(seed, b, at.head, ", "stream(seed, b, h, ",
        "query heads that are packed into a tile drop as one head does",
        "unit/test_dropout.py::test_few_queries",
    ),
    Fault(
        "tilewise/backends/triton/forward.py", "o_low, low, b, head", "o_low, low * 0, b, head",
        "D is made from an O of 16 bits",
        "backends/test_low_bits.py::test_triton",
    ),
    Fault(
        "tilewise/backends/cpu/tiled.py", "self.rows(outputs.o, rows, outputs.o_low)", "self.rows(outputs.o, rows)",
        "D is made from an O of 16 bits",
        "backends/test_low_bits.py::test_cpu",
    ),
    Fault(
        "tilewise/backends/kernels/rounding.py", "tl.minimum(tl.maximum(steps, LEAST_STEP), GREATEST_STEP)", "tl.maximum(steps, LEAST_STEP)",
        "what of a float16 that is nearly 0 does not fit comes back as another number",
        "backends/test_low_bits.py::test_numbers_come_back_in_triton",
    ),
    Fault(
        "tilewise/backends/kernels/dropout.py", "(j & 8) == 0", "(j & 4) == 0",
        "the kernels' scores share numbers that the reference keeps apart",
        "unit/test_dropout.py::test_triton",
    ),
    Fault(
        "tilewise/backends/kernels/dropout.py", "0xBB67AE85", "0x9E3779B9",
        "the kernels' Philox has one key schedule for both words",
        "unit/test_dropout.py::test_triton",
    ),
    Fault(
        "tilewise/backends/kernels/dropout.py", "sequence, head, low.to", "sequence, sequence, low.to",
        "all heads of the kernels drop the same",
        "unit/test_dropout.py::test_triton",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "dv_sum, terms.weight", "dv_sum, None",
        "dV misses the weight of what is kept",
        "unit/test_dropout.py::test_triton",
    ),
    # --- models ---
    Fault(
        "tilewise/integrations/models.py", 'return -_own(module, "build_mpt', 'return _own(module, "build_mpt',
        "MPT's slopes have the wrong sign",
        "integrations/test_bias_terms_of_models.py::test_outputs_and_gradients",
    ),
    Fault(
        "tilewise/integrations/models.py", "x.device, num_buckets, True, 128, None)", "x.device, num_buckets, False, 128, None)",
        "MPNet's keys after the query share one bucket",
        "integrations/test_bias_terms_of_models.py::test_outputs_and_gradients",
    ),
    Fault(
        "tilewise/integrations/models.py", "    if module.clip_qkv:", "    if False:",
        "MPT's clip of q, k and v is forgotten",
        "integrations/test_bias_terms_of_models.py::test_settings_that_small_models_leave_at_their_defaults",
    ),
    Fault(
        "tilewise/integrations/models.py", "        module.relative_attention_max_distance,", "        128,",
        "T5's buckets are those of the usual distance",
        "integrations/test_bias_terms_of_models.py::test_settings_that_small_models_leave_at_their_defaults",
    ),
    Fault(
        "tilewise/integrations/models.py", "module.pos_dropout(rel_embeddings)", "rel_embeddings",
        "DeBERTa's embeddings of distances are not dropped out",
        "integrations/test_bias_terms_of_models.py::test_dropout_beside_the_attention",
    ),
    Fault(
        "tilewise/integrations/models.py", "past_key_values.is_updated[module.layer_idx] = True", "pass",
        "UMT5's cross attention adds its keys to the cache at each token",
        "integrations/test_bias_terms_of_models.py::test_decoding_of_t5_with_a_cache",
    ),
    Fault(
        "tilewise/integrations/position_bias.py", "max_distance, query_start=query_start)", "max_distance)",
        "T5's queries stand at the end of a static cache",
        "integrations/test_bias_terms_of_models.py::test_static_caches",
    ),
    Fault(
        "tilewise/integrations/position_bias.py", "query_start=query_start, key_start=key_start", "query_start=query_start",
        "Inkling's keys stand at 0, wherever they do",
        "integrations/test_bias_terms_of_models.py::test_relative_logits_of_positions_that_count_from_anywhere",
    ),
    # --- around them ---
    Fault(
        "tilewise/backends/launch/launcher.py", "self._compiled if aligned == self._aligned else None", "self._compiled",
        "a kernel that was compiled for aligned addresses gets others",
        "backends/test_launcher.py::test_another_alignment_is_asked_for",
    ),
    Fault(
        "tilewise/backends/launch/launcher.py", "(self._wants, *kinds, *aligned)", "(self._wants, *kinds)",
        "the same, where another launch has asked before",
        "backends/test_launcher.py::test_another_alignment_is_asked_for",
    ),
    Fault(
        "tilewise/backends/launch/arguments.py", "            found += x[1:]", "            pass",
        "strides that 16 does not divide get the kernel of those that it divides",
        "backends/test_launcher.py::test_a_kernel_is_shared_where_triton_would_choose_the_same",
    ),
    Fault(
        "tilewise/bias/canonical.py", "torch.promote_types(x.dtype, other.dtype), torch.float32)",
        "x.dtype, other.dtype)",
        "two biases of 16 bits are rounded when they are added",
        "unit/test_bias_calls.py::test_tensors_of_one_place_are_added",
    ),
    Fault(
        "tilewise/bias/packed.py", "(put if is_packed else add)(found", "add(found",
        "a padded and a packed bias are added as if of one form",
        "unit/test_varlen_errors.py",
    ),
    Fault(
        "tilewise/backends/launch/launcher.py", "    if nested:\n", "    if False:\n",
        "numbers of a bias by distance that 16 does not divide get the kernel of those that it divides",
        "backends/test_launcher.py::test_numbers_that_triton_tells_apart",
    ),
    Fault(
        "tilewise/operator/sharding.py", "return Partial() if split and", "return Replicate() if split and",
        "a gradient that is a sum over the devices passes for the same on each",
        "distributed/test_sharding.py",
    ),
    Fault(
        "tilewise/layouts/operand.py", "self.atom_bytes * self._along(self.grid)[0]", "self.atom_bytes * self.grid[0]",
        "the leading byte offset of an MN-major operand counts atoms along the wrong side",
        "unit/test_layouts_operand.py::test_laws",
    ),
    Fault(
        "tilewise/layouts/tensor_memory.py", "else m + m // HALF * HALF", "else m",
        "64 rows of operand A lie in the first 64 lanes of tensor memory",
        "backends/test_layouts_triton.py::test_kernels_for_blackwell_have_the_operand_there",
    ),
    Fault(
        "tilewise/integrations/transformers.py", "(attention_mask.shape[1] - 1, 0)", "(attention_mask.shape[1], 0)",
        "a sliding window is one key too wide",
        "integrations/test_transformers.py",
    ),
    Fault(
        "tilewise/integrations/flash_attn.py", "None if width is None or width < 0 else width",
        "None if width is None or width <= 0 else width",
        "a side of flash-attn's window of width 0 has no limit",
        "integrations/test_flash_attn.py::test_options",
    ),
    Fault(
        "tilewise/integrations/flash_attn.py", "else (term, *bias)", "else tuple(bias)",
        "slopes beside a tuple of biases are left out",
        "integrations/test_flash_attn.py::test_bias_terms_and_slopes",
    ),
    Fault(
        "tilewise/explanation/work.py", "if problem.bias and problem.bias_grad else 0", "if problem.bias else 0",
        "the traffic counts a bias gradient that nobody asked for",
        "unit/test_explain.py::test_traffic_of_a_bias",
    ),
    Fault(
        "tilewise_tools/bench/reference.py", "if not e <= tolerance", "if e > tolerance",
        "NaN passes for a right answer",
        "tools/test_bench.py::test_a_wrong_answer_is_not_timed",
    ),
    *MASKS, *DISTRIBUTED, *WINDOWS, *PACKED, *ONE_TILE, *MEMORY, *SDPA, *FLEX, *DERIVATIVES, *STATISTICS,
]  # fmt: skip
