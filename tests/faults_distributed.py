"""Faults of calls over several processes, and of what is around them: see faults.py."""

from __future__ import annotations

from fault import Fault

DISTRIBUTED = [
    Fault(
        "tilewise/distributed/head_groups.py", "return group.n * (call.sizes.H // group.of)", "return 0",
        "every group of heads drops what the first does",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/distributed/ring.py", "if source < call.ranks.rank else", "if source > call.ranks.rank else",
        "queries see keys behind them in the place of those before",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/distributed/documents.py", "used = span.end.minimum(seen) if causal", "used = seen if causal",
        "the last query of a chunk of a sequence sees the last key of the whole",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/distributed/documents.py", "grad[: self.mine].to(total.dtype)", "total[self.sent[: self.mine]]",
        "gradients of keys lack what other ranks' queries give them",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/distributed/head_groups.py", "0 if query.is_local else call.keys", "0",
        "the gradient of a bias along the keys, of what several ranks have, goes to what is a rank's alone",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/distributed/documents.py", "total[self.first :].copy_(", "total[: self.count].copy_(",
        "gradients of keys that several ranks have go to those that are a rank's alone",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/distributed/load_balance.py", "            work[rank] += lengths[n] ** 2", "            work[rank] += lengths[n]",
        "ranks have as many tokens, and some far more pairs",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise/backends/kernels/dropout.py", "rows += terms.origin.query_rest", "rows += 0",
        "a part of a call that begins between multiples of 16 drops what another does",
        "unit/test_dropout.py::test_parts_of_a_call_in_triton",
    ),
    Fault(
        "tilewise/distributed/autograd.py", "            dist.all_reduce(total, group=ranks.group)\n", "",
        "the gradient of a table is each rank's own",
        "distributed/test_mesh.py",
    ),
    Fault(
        "tilewise/distributed/all_to_all.py", "whole.narrow(slot.heads, ranks.rank * count, count)",
        "whole.narrow(slot.heads, 0, count)",
        "the gradient of some heads of a table goes to others",
        "distributed/test_mesh.py",
    ),
    Fault(
        "tilewise/distributed/operator.py", "        share_seed(sharded)\n", "        pass\n",
        "under a compiler each rank drops by a seed of its own",
        "distributed/test_mesh.py",
    ),
    Fault(
        "tilewise/distributed/drop_in.py", '"head_tail" if balanced else None', "None",
        "within PyTorch's context manager a tail counts as what follows the head",
        "distributed/test_mesh.py",
    ),
    Fault(
        "tilewise/distributed/dtensor.py", "Partial() if placement == Replicate() and place", "placement if place",
        "the gradient of a DTensor that lies whole is one device's",
        "distributed/test_mesh.py",
    ),
    Fault(
        "tilewise/distributed/all_to_all.py", "grads = summed(call, grads, call.ranks.axes[0])", "pass",
        "on a mesh of two axes a table's gradient lacks the rows of other ranks",
        "distributed/test_mesh.py",
    ),
    Fault(
        "tilewise/distributed/ring.py", "with_low_bits(part, part_low), part_lse", "part, part_lse",
        "parts of a row are merged as they were rounded",
        "distributed/test_distributed.py",
    ),
    Fault(
        "tilewise_tools/bench/parallel/run.py", "if not error <= _FACTOR * allowed[name] + slack", "if error != error",
        "a wrong answer is measured",
        "distributed/test_bench_parallel.py::test_a_run_of_two_processes",
    ),
    Fault(
        "tilewise_tools/bench/parallel/timeline.py", "if found and begin <= found[-1][1]:", "if found and begin < found[0][1]:",
        "what runs after something else counts as running beside it",
        "distributed/test_bench_parallel.py::test_a_timeline_tells_what_runs_beside_what",
    ),
]  # fmt: skip
