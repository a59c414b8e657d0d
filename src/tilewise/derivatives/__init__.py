"""Tangents and second derivatives of attention: tiles in plain PyTorch, on every device, not fused yet.

Triton has a kernel for the tangents of most calls (`planner.TANGENTS`).

`tangents` is the forward-mode derivative (JVP). `second` differentiates the backward. `packed` computes both for packed
batches. docs/maths.md, "Tangents and second derivatives", derives the formulas.
"""
