"""Forward on Hopper: `kernel` has the main loop, `launch` prepares and launches it.

kernel       the main loop and its producer warps
small_heads  the main loop for small head dimensions with a bias
bias         loads of bias tiles, and how scores use them
masks        bool masks, windows and the end of the keys in a tile
nan_fixup    recomputes rows that a NaN in masked keys or values has reached
documents    packed documents, given as a block mask
"""
