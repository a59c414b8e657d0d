"""``tilewise bench --nproc N``: context parallelism over N processes, compared with one process.

cases      lengths with and without a bias, and a packed batch
steps      providers: one process, each method of tilewise.distributed, PyTorch's context parallelism
measure    clock, memory measurement, runs without transfers, rates of transfers
timeline   times of communication and computation kernels, as numbers and as a picture
run        the loop over cases and providers, which every rank executes
results    results, their JSON and their table
launch     start of the processes by PyTorch's elastic launch or by torchrun
predict    predicted times for other numbers of GPUs; scaling: the formulas
"""
