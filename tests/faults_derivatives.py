"""Faults of forward-mode and second derivatives: see faults.py."""

from __future__ import annotations

from fault import Fault

DENSE, PACKED = "unit/test_derivatives.py::", "unit/test_varlen_derivatives.py::"
KERNEL, TRITON = "tilewise/backends/triton/tangents/kernel.py", "backends/test_tangents_triton.py::"

DERIVATIVES = [
    Fault(
        "tilewise/derivatives/tangents.py", "moved / total - shift * o)", "moved / total)",
        "the tangent of o keeps what all scores of a row have in common", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/tangents.py", "shift + p * sink_tangent", "shift",
        "a sink's tangent does not reach the lse", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/tangents.py", "moved = alpha * moved\n", "moved = 1.0 * moved\n",
        "a sum is not moved to a new maximum", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/scores.py", "tangent = product if slope is None or product is None else slope * product",
        "tangent = product", "the softcap passes a tangent on whole", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/scores.py", 'outside = "zero" if x.distances.outside == "hidden"', 'outside = "hidden" if False',
        "the tangent of a relative bias is -inf where the bias hides", f"{DENSE}test_bias_terms",
    ),
    Fault(
        "tilewise/derivatives/scores.py", "+ p.sequence", "", "each run of a packed batch drops what the first drops",
        f"{PACKED}test_dropout_is_that_of_the_padded_batch",
    ),
    Fault(
        "tilewise/derivatives/scores.py", "self.careful = bool(hides) and", "self.careful = False and",
        "NaN in a hidden key reaches the tangents", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/scores.py", "cuts=not full_begin <= j < full_end)", "cuts=False)",
        "causal hides whole tiles only", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/second.py", "dx_tangent = dx_tangent - dx", "dx_tangent = dx_tangent + dx",
        "the softcap bends the other way", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/second.py", "p_tangent * (dp - delta) - p * minus, tile)", "p_tangent * (dp - delta), tile)",
        "the tangents of dP and D are left out", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/second.py", "place -= (p_tangent * delta + p * delta_tangent)", "place -= (p_tangent * delta)",
        "the sink's second derivative lacks a term", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/derivatives/packed.py", ", wide=shared_names(problem, inputs) & sums.keys()", "",
        "what sequences add to a shared bias is rounded one by one", f"{PACKED}test_a_shared_bias_is_summed_unrounded",
    ),
    Fault(
        "tilewise/operator/derivatives.py", "return gradients_like(inputs.differentiable(), [_sum(x, y)",
        "return gradients_like(inputs.differentiable(), [x", "the cotangents' own tangents are dropped",
        f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/operator/derivatives.py", "ddo, ddlse = (x if asked[name] else None",
        "ddo, ddlse = (None", "a second derivative by dO is missing", f"{DENSE}test_derivatives",
    ),
    Fault(
        "tilewise/operator/eager.py", " or forward_ad._current_level >= 0\n    return not", "\n    return not",
        "a cached call drops tangents or refuses them", f"{DENSE}test_eager_forward_mode",
    ),
    Fault(
        "tilewise/operator/custom_op.py", "forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()",
        "forward_ad._current_level < 0", "a compiled jvp drops its tangents", f"{DENSE}test_compiled",
    ),
    Fault(
        "tilewise/backends/reference.py", "bend = -2 / problem", "bend = 2 / problem",
        "the reference's softcap bends the other way", f"{DENSE}test_derivatives",
    ),
    Fault(
        KERNEL, "(sums.acc - sums.weight[:, None] * o_tile)", "sums.acc",
        "the kernel keeps what all scores of a row have in common", f"{TRITON}test_lengths",
    ),
    Fault(
        KERNEL, "acc, total = sums.acc * alpha[:, None],", "acc, total = sums.acc * 1.0,",
        "the kernel does not move a sum to a new maximum", f"{TRITON}test_lengths",
    ),
    Fault(
        KERNEL, "found *= slope", "pass", "the kernel passes a tangent through the softcap whole", f"{TRITON}test_terms",
    ),
    Fault(
        KERNEL, "weight = weight * alpha + tl.sum(w.to(tl.float32), 1)", "weight = weight * alpha + tl.sum(moved, 1)",
        "where a query sees one key, o moves", f"{TRITON}test_one_key",
    ),
    Fault(
        KERNEL, "s_tangent = tl.where(visible, s_tangent, 0.0)", "pass", "NaN in a hidden key reaches the kernel's tangents",
        f"{TRITON}test_hidden_keys_that_are_not_finite",
    ),
    Fault(
        KERNEL, "shift, weight = shift + more, weight + more", "shift = shift + more",
        "a sink's tangent moves the lse, not o", f"{TRITON}test_absent_tangents",
    ),
    Fault(
        "tilewise/operator/dispatch.py", "layouts(*inputs.tensors(), *given, outputs.o), terms)", "layouts(*inputs.tensors()), terms)",
        "a call without some tangent takes what is prepared for all", f"{TRITON}test_tangents_are_prepared_once",
    ),
    Fault(
        "tilewise/operator/dispatch.py", "problem.empty or not alike or", "problem.empty or",
        "a kernel gets tangents of another dtype", f"{TRITON}test_tangents_of_another_dtype",
    ),
]  # fmt: skip
