"""Triton functions that Triton and Gluon kernels share, and small kernels that every GPU backend calls."""
