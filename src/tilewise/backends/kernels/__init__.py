"""Triton functions shared by Triton and Gluon kernels, and small kernels that every GPU backend calls."""
