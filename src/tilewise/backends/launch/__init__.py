"""Launches of Triton and Gluon kernels with little host time.

launcher      `Launch`: a kernel with prepared arguments; the only caller of Triton's compiler
short_launch  direct calls of Triton's C launcher with a prepared argument list
arguments     tensors as kernel arguments: pointers and strides, or TMA descriptors
"""
