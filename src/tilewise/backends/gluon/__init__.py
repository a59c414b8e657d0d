"""Code shared by the Gluon kernels of all GPU architectures; `sm90` has the kernels for Hopper.

score           the score pipeline in registers, and its arguments
values          values by relative position as TMA reads them; relative: the tiles that have some
pipeline        shared-memory pipelines between warps, barriers, counters in global memory
scheduler       the work tiles of a persistent program and the key tiles each of them visits
mask_kernels    kernels that summarise a bool mask tile by tile; masks: their launches
preprocess      row statistics before a backward
tensors         TMA descriptors
compat          differences between versions of Triton
"""

RAGGED_ROWS = 2**30  # the most rows of a packed tensor, see `tensors.ragged`
