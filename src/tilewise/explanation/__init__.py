"""explain() and explain_varlen(): backend, tiles, FLOPs and bytes of a call, and what limits its speed.

attention  the two functions
text       the explanation and its text
work       FLOPs, bytes, and limits of devices
shared     helpers also used for matmul and softmax
"""
