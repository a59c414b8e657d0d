"""Parts of the Hopper kernels that forward and backward share: tile sizes, the softmax, wgmma, dropout, bias kinds."""
