"""Code shared by the Hopper forward and backward: tile sizes, softmax, wgmma, dropout, kinds of bias."""
