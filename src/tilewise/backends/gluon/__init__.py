"""What kernels in Gluon of any GPU architecture share; `sm90` has those for Hopper.

score           the score pipeline in registers, and its numbers
values          values by distance as TMA reads them; relative: which tiles do
pipeline        pipelines of shared memory between warps, barriers, counters in global memory
tile_scheduler  which tile a persistent program has next, and which tiles it visits
mask_kernels    what a bool mask leaves of each tile; masks: their launches
preprocess      the statistics of rows before a backward
tensors         TMA descriptors
compat          what differs between versions of Triton
"""

RAGGED_ROWS = 2**30  # more than a packed tensor may have, see `tensors.ragged`
