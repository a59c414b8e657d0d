"""Launches of Triton and Gluon kernels with little host time.

launcher      `Launch`: a kernel with its arguments prepared; the one place that calls Triton's compiler
short_launch  Triton's launcher in C, with its arguments laid out beforehand
arguments     tensors as kernel arguments: pointers and strides, or TMA descriptors
"""
