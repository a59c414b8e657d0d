"""Planted faults in what packed batches and biases that come by pointers are read and written by: see faults.py."""

from __future__ import annotations

from fault import Fault

PACKED = [
    Fault(
        "tilewise/backends/triton/varlen_preprocess.py", "if filled < last - first:", "if filled == 0:",
        "of a ragged bias's gradient, what lies beside a matrix is not cleared",
        "backends/test_varlen_triton.py::test_what_no_matrix_of_a_ragged_bias_has",
    ),
    Fault(
        "tilewise/backends/triton/varlen.py", " & (pair <= sizes.pairs)", "",
        "an offset near the end of 64 bits passes for one inside",
        "backends/test_varlen_triton.py::test_offsets_that_are_none_write_nothing_outside",
    ),
    Fault(
        "tilewise/backends/triton/varlen.py", "(row < start.rows) & (row + c.BLOCK_M > queries)", "queries < 0",
        "what a sequence has past the longest is never written",
        "backends/test_varlen_triton.py::test_rows_that_no_sequence_has",
    ),
    Fault(
        "tilewise/backends/triton/varlen.py", "if (row < first) | (", "if (",
        "rows before the first sequence are never written",
        "backends/test_varlen_triton.py::test_rows_that_no_sequence_has",
    ),
    Fault(
        "tilewise/backends/triton/varlen_preprocess.py", "store_rows(dv, zeros", "store_rows(dk, zeros",
        "gradients of values that no sequence has are never written",
        "backends/test_varlen_triton.py::test_rows_that_no_sequence_has",
    ),
    Fault(
        "tilewise/backends/triton/tensors.py", "tile = tile.permute(0, 2, 1, 3).reshape(", "tile = tile.reshape(",
        "a tile of a bias that is loaded row after row has pieces of its rows exchanged",
        "backends/test_varlen_triton.py::test_a_bias_of_two_bytes",
    ),
    Fault(
        "tilewise/backends/triton/backward.py", "c.BLOCK_N // 32, 32]).permute(0, 2, 1, 3)", "c.BLOCK_N // 32, 32])",
        "a tile of its gradient has pieces of its rows exchanged",
        "backends/test_varlen_triton.py::test_a_bias_of_two_bytes",
    ),
    Fault(
        "tilewise/backends/triton/ordered.py", "count = tl.where(tm < m_tiles, 1, 0)", "count = 1",
        "the ordered gradient of a shared bias takes what lies past a sequence that is shorter than the longest",
        "backends/test_varlen_triton.py::test_what_has_an_order_across_tiles",
    ),
    Fault(
        "tilewise/backends/triton/ordered.py", "has_first, has_last = has_last, has_first", "pass",
        "of values per key with clamped ends the ordered gradient of far queries goes to no entry",
        "backends/test_relative_triton.py::test_what_has_an_order_has_no_atomics",
    ),
    Fault(
        "tilewise/frontend/varlen.py", "if packed and mask is None and not validate and", "if packed and not validate and",
        "the longest length is rounded up where a mask has its shape",
        "unit/test_varlen_again.py::test_longest_lengths_in_common",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "kv_lengths.device) < kv_lengths", "kv_lengths.device) <= kv_lengths",
        "one key more than kv_lengths counts is visible",
        "integrations/test_evoformer.py::test_triangle_lengths",
    ),
    Fault(
        "tilewise/frontend/varlen.py", "arguments = longest, exact, settings", "arguments = longest, exact",
        "a packed batch is computed with the settings of an earlier one",
        "unit/test_varlen_again.py",
    ),
    Fault(
        "tilewise/operator/autograd.py", "ctx.save_for_backward(*inputs.tensors(), *saved)",
        "ctx.save_for_backward(*[x if x is None else x.clone() for x in inputs.tensors()], *saved)",
        "inputs that are changed before the backward go unnoticed",
        "unit/test_varlen_again.py::test_in_place_changes_are_noticed",
    ),
    Fault(
        "tilewise/backends/triton/bias_components.py", "(problem.parts is not None or by_elements)", "(problem.parts is not None)",
        "a bias whose rows begin anywhere has the softmax in the layout of its loads, and registers spill",
        "aot/test_triton_aot.py::test_a_bias_whose_rows_begin_anywhere",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/key_mask.py", "(cols // 8 * 2 + cols % 2)", "(cols // 4 + cols % 2)",
        "beside a pair bias other keys are hidden than the mask says",
        "aot/test_hopper_small_heads.py::test_hidden_keys_have_the_bits_of_the_mask",
    ),
    Fault(
        "tilewise/backends/gluon/mask_kernels.py", "4 * n + 2 * hidden + cut, mask=listed != 0", "4 * n + cut, mask=listed != 0",
        "tiles of which a mask hides some keys are taken for full", "backends/test_hopper_mask.py::test_summary",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/common/config.py", "mask.rows == 1 and mask.heads == 1", "mask.heads == 1",
        "a mask of pairs hides keys of the first query from all",
        "aot/test_hopper_small_heads.py::test_which_do_not",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/launch.py", "(mask is not None or problem.keys % config.block_n != 0)", "mask is not None",
        "keys past the end are seen as the bias has them",
        "aot/test_hopper_small_heads.py::test_hidden_keys_are_one_more_step",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/small_heads.py", "full, shared.v.index(place.v))", "full, shared.v.index(place.slot))",
        "V of a tile comes where the product with P reads that of another",
        "aot/test_hopper_small_heads.py::test_tiles_are_handed_on",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/small_heads.py", "with_maxima(s, rows, o, x, terms, c, False)",
        "with_maxima(s, found, o, x, terms, c, False)", "a tile whose scores have grown is counted twice",
        "backends/test_hopper_terms.py::test_a_maximum_stays_until_scores_have_grown",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/small_heads.py", "gl.where(m_i == -float(\"inf\"), m_i, gl.maximum(",
        "gl.where(m_i == -float(\"inf\"), LOWEST_BASE, gl.maximum(",
        "a row that first sees nothing, then the least number of a dtype, is taken for one that sees nothing",
        "backends/test_hopper_terms.py::test_a_row_that_begins_hidden",
    ),
    Fault(
        "tilewise/integrations/packed.py", "first[0] = True", "pass",
        "tokens before the first restart of positions are in no sequence",
        "integrations/test_padding_free.py::test_a_row_that_begins_within_a_sequence",
    ),
    Fault(
        "tilewise/integrations/packed.py", "known[0] == version is not None", "version is not None",
        "positions that were changed in place tell of the sequences that were there before",
        "integrations/test_padding_free.py::test_positions_are_read_once_a_forward",
    ),
    Fault(
        "tilewise/integrations/packed.py", '"CrossAttention" in type(module).__name__', "False",
        "a decoder's positions tell the encoder's keys apart",
        "integrations/test_padding_free.py::test_cross_attention_has_other_keys",
    ),
    Fault(
        "tilewise/integrations/packed.py", "ids.masked_fill(~padding[0, 0], -1)", "ids",
        "a graph shows padding",
        "integrations/test_padding_free.py::test_in_a_graph",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "x if x.dim() == 5 else x[None] for x in (q, k, v)", "x for x in (q, k, v)",
        "triangle_attention of four dimensions gives four back",
        "integrations/test_evoformer.py::test_triangle_gated_as_a_caller_does",
    ),
    Fault(
        "tilewise/integrations/evoformer.py", "lse.masked_fill(kv_lengths.squeeze(-1) <= 0, 0.0)", "lse",
        "the lse of a length of 0 is -inf, where cuEquivariance's is 0",
        "integrations/test_evoformer.py::test_triangle_aux_of_no_keys",
    ),
    Fault(
        "tilewise/varlen.py", "if dropout_seed is None and validate is False and", "if False and",
        "arguments of varlen_attention are converted before a call is looked up",
        "backends/test_packed_host.py::test_frames_of_a_repeated_call",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/forward/launch.py", "takes_rows = True", "takes_rows = False",
        "Hopper's passes get views of a packed batch",
        "backends/test_packed_host.py::test_frames_of_a_repeated_call",
    ),
    Fault(
        "tilewise/backends/gluon/sm90/backward/launch.py", "for x in rows]), bias is None", "for x in rows]), True",
        "the gradient of a bias along the queries is taken from rows",
        "backends/test_packed_host.py::test_results_have_the_shapes_and_strides_of_an_uncached_call",
    ),
    Fault(
        "tilewise/operator/dispatch.py", "with_rows(run(*without_rows(*tensors)))", "run(*without_rows(*tensors))",
        "gradients of a packed batch keep the operator's shapes",
        "backends/test_packed_host.py::test_results_have_the_shapes_and_strides_of_an_uncached_call",
    ),
    Fault(
        "tilewise/operator/derivatives.py", "if inputs.q.dim() == 3:", "if False:",
        "the operator gets a packed batch in the caller's shapes",
        "backends/test_packed_host.py::test_results_have_the_shapes_and_strides_of_an_uncached_call",
    ),
    Fault(
        "tilewise/frontend/call_cache.py", "if packed is None else (packed.max_q, packed.max_k)", "",
        "a repeated packed call has as many distances as tokens in all",
        "unit/test_varlen_again.py::test_distances_again",
    ),
    Fault(
        "tilewise/frontend/varlen.py", "x.is_nested for x in given.tensors()", "x.is_sparse for x in given.tensors()",
        "a nested tensor of a packed batch gets PyTorch's error",
        "unit/test_varlen_errors.py::test_nested_tensors",
    ),
    Fault(
        "tilewise/backends/launch/short_launch.py", '(f" + {offset}" if offset else "")', '""',
        "the counter of a list of tiles is taken for its length",
        "backends/test_launcher.py::test_a_pointer_within_a_tensor",
    ),
    Fault(
        "tilewise/varlen.py", "(enable_gqa or query.shape[1] == key.shape[1])", "True",
        "a repeated varlen_attn takes fewer heads of keys without enable_gqa",
        "unit/test_varlen_attn.py::test_a_known_call_is_checked",
    ),
]  # fmt: skip
