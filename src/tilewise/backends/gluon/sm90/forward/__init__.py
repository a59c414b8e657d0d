"""The forward on Hopper: `kernel` is the main loop, `launch` prepares and starts it.

kernel       the main loop and its producer warps
small_heads  the main loop for small head dimensions beside a bias
bias         bias tiles: their loads, and their part of the scores
masks        masks, windows and the end of the keys in a tile
nan_fixup    computes rows again that NaN in masked keys or values has reached
documents    packed documents, given as a block-sparse mask
"""
