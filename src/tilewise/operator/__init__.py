"""What the operators share between their public functions and their kernels.

operator    an operator of PyTorch's dispatcher, declared once: schema, kernel, shapes, derivative, torch.func
eager       whether a call may leave the dispatcher out, and how autograd hears of one that does
prepared    what calls of a layout need once, kept by it
seed        the operator that draws a seed of dropout
explanation what the explanations of the operators share
tools       what PyTorch's tools ask of an operator beside its numbers, with `flops`, `sharding`, `plain`, `scripting`
"""
