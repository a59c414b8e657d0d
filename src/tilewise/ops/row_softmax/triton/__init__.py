"""The softmax on GPUs: one read and one write where a row fits on chip, at most two reads elsewhere.

axes           the axes but the softmax's, joined where strides allow it
rows           where the elements of a tile of rows lie, and how programs that share a row learn its statistics
forward        kernels of P
backward       kernels of dS
bias_gradient  the kernel that sums dS over the axes that a bias broadcasts
config         which kernel, and how large its tiles are
launch         from tensors to kernels
"""
