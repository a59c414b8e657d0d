"""explain() and explain_varlen(): what a call would do and what limits its speed, without running it.

attention  the explanation of a call of attention
shared     what the explanations of attention, matmul and softmax share
"""
