"""The operators of PyTorch's dispatcher: their autograd, compilation, and use by PyTorch's tools.

custom_op   an operator, declared once: schema, kernel, fake kernel, derivative, torch.func
autograd    the operators of attention
dispatch    prepared forwards and backwards, cached by layout
structure   calls that differ in their lengths only
prepared    the cache
eager       calls without the dispatcher
seed        the operator that draws a dropout seed
tools       PyTorch's tools: `flops`, `sharding`, `onnx`, `scripting`
"""
