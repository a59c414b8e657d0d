"""``tilewise bench --nproc N``: one sequence over the processes of a mesh, beside one of them that has it whole.

cases      what is computed: lengths, with and without a bias, and a packed batch
steps      who computes it: one process alone, each method of tilewise.distributed, PyTorch's context parallelism
measure    the clock, the memory gauge, transfers left out, and how fast this machine's transfers are
timeline   which kernels ran when: communication beside computation, as numbers and as a picture
run        the loop over cases and providers, the same on every rank
results    what came out, its JSON and its table
launch     processes started by PyTorch's elastic launch, or by torchrun
predict    the same table for other numbers of GPUs, by arithmetic from measured speeds
"""
