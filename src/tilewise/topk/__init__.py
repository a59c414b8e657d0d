"""Top-k (selected) attention: each query sees only its best keys, by scores computed at each step.

selection  `tilewise.dynamic_mask`, the public function
gather     a call on the gathered, selected keys instead of a call with a mask
autograd   gathered rows and their gradients
kernels    Triton kernels for both on a GPU
"""
