"""Softmax on GPUs: one read and one write if a row fits on chip, otherwise at most two reads.

axes           all axes but the softmax's, merged if strides allow it
rows           addresses of the elements of a tile, and statistics of rows shared by several programs
forward        kernels of P
backward       kernels of dS
bias_gradient  the kernel that sums dS over the axes that a bias broadcasts
config         choice of the kernel and its tiles
launch         kernel launches
"""
