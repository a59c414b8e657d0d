"""Small calls, forward and backward, for compute-sanitizer to watch; child process of test_sanitizer.py.

An argument is how many multiprocessors hopper takes the GPU to have: of more tiles than that, programs take whichever
is left. Not under racecheck, which then reports the numbers of the tiles that one warp stores and others load:
mbarriers alone order the two.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # tilewise, where it is not installed
sys.path.insert(0, str(Path(__file__).parents[1]))

from forced import forced_splits
from helpers import Case, call, differentiate, tensors

FEW = Case(B=2, H=8, Hkv=2, M=1, N=300, D=64, dtype=torch.bfloat16, grads="")
MANY = Case(B=1, H=2, Hkv=2, M=129, N=131, D=64, dtype=torch.bfloat16, layout="padded")
CASES = [
    ("triton", FEW),
    ("triton", replace(FEW, bias="1h1n", mask="b11n")),
    ("triton", replace(FEW, M=5, bias="bhmn", causal=True, N=290)),
    ("triton", replace(FEW, H=2, M=17, N=273, layout="sliced", D=40, bias="b11n")),
    ("triton", MANY),
    ("triton", replace(MANY, bias="1hmn", causal=True, deterministic=True)),
    ("hopper", MANY),
    ("hopper", replace(MANY, bias="1hmn", causal=True, D=128)),
    ("hopper", replace(MANY, causal=True, D=256)),
    ("hopper", replace(MANY, M=200, N=2304, causal=True, grads="")),  # three warpgroups, some of which leave tiles out
    ("hopper", replace(MANY, bias="1hmn", deterministic=True, D=256)),
    ("hopper", replace(MANY, mask="bhmn", causal=True, deterministic=True)),
    ("hopper", replace(MANY, mask="b1mn", bias="1hmn", B=2, N=136, bias_dtype=torch.float32, D=128)),
]

if __name__ == "__main__":
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if hopper and sys.argv[1:]:
        from tilewise.backends.gluon.sm90.backward import launch as backward_launch
        from tilewise.backends.gluon.sm90.forward import launch

        for module in (launch, backward_launch):
            module.multiprocessors = lambda device: int(sys.argv[1])
    for backend, case in CASES:
        if backend == "hopper" and not hopper:
            continue
        with forced_splits(3):
            differentiate(case, tensors(case, "cuda"), lambda x, case=case, backend=backend: call(case, backend, x))
        torch.cuda.synchronize()
        print(backend, case, flush=True)
    print("  done", flush=True)
