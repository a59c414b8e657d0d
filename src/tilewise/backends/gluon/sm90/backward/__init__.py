"""The backward on Hopper: `kernel` is the main loop, `launch` prepares and starts it.

kernel        the main loop and its compile-time parameters
batched       the main loop with several batch elements per CTA, for a shared bias
warps         producer warps, and warps that store or zero
scheduler     key tiles of a CTA, and the query tiles that see them
m_subtiles    the products S and dP and the softmax between them, in subtiles of queries
masks         masks, windows and the end of the keys in a tile
dq            dQ: from the products of a key tile to dq_accum (float32), and from there to dQ
dbias         dBias: what kernels write, and dBias from it; `dbias_reduce` and `sparse_sum` sum over broadcast dims
relative      relative position bias; `zero` clears its gradient
toeplitz      T5's and ALiBi's bias and its gradient
resized       a prepared backward for other sequence lengths
"""
