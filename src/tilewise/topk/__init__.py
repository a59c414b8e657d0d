"""Top-k (selected) attention: each query sees its best keys alone, by scores that a model computes at each step.

selection  `tilewise.dynamic_mask`, the public function
gather     a call on the selected keys, gathered, in place of a call with a mask
autograd   gathered rows and their gradients
kernels    Triton kernels for both on a GPU
"""
