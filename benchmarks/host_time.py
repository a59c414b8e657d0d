"""What a tiny call on a GPU costs the host, beside PyTorch's attention.

    python benchmarks/host_time.py [--json FILE] [--commit HASH]

B=1, H=8, S=128, D=64, bfloat16, without and with a trainable (1,H,M,N) bias. Microseconds of a forward where no
gradient is asked for, of one where it is, and of forward and backward: medians of three turns, in which the providers
alternate, so that a host that changes its speed changes it for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise.bench.cases import Inputs, tiny
from tilewise.bench.run import origin
from tilewise.bench.timing import Clock, calibrate, host_seconds

COLUMNS = ("no grad", "forward", "both")
TURNS = 3


def own(backend: str) -> Callable[[Inputs], Tensor]:
    return lambda x: tilewise.attention(x.q, x.k, x.v, bias=x.bias, backend=backend)


def torchs(backend: SDPBackend) -> Callable[[Inputs], Tensor]:
    def call(x: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=x.bias)

    call.context = lambda: sdpa_kernel(backend)  # type: ignore[attr-defined]
    return call


def measure(call: Callable[[Inputs], Tensor], x: Inputs) -> list[float]:
    device = x.q.device

    def microseconds(step: Callable[[], object]) -> float:
        for _ in range(20):
            step()
        return 1e6 * host_seconds(step, device)

    context = getattr(call, "context", torch.enable_grad)
    with context():
        with torch.no_grad():
            alone = microseconds(lambda: call(x))
        return [
            alone,
            microseconds(lambda: call(x)),
            microseconds(lambda: torch.autograd.grad(call(x), x.leaves, x.do)),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--commit", default="", help="the commit that is measured, where there is no git")
    options = parser.parse_args()
    device = torch.device("cuda")
    results: dict[str, dict[str, list[float]]] = {}
    for bias in (False, True):
        x = tiny("bfloat16", bias).inputs(device)
        calls = {f"tilewise-{backend}": own(backend) for backend in ("hopper", "triton")}
        if bias:
            calls = {"sdpa-efficient": torchs(SDPBackend.EFFICIENT_ATTENTION), **calls}
        else:
            calls = {"sdpa-flash": torchs(SDPBackend.FLASH_ATTENTION), **calls}
        turns = [{name: measure(call, x) for name, call in calls.items()} for _ in range(TURNS)]
        found = {
            name: [statistics.median(t[name][n] for t in turns) for n in range(len(COLUMNS))] for name in calls
        }  # fmt: skip
        case = "tiny, bias 1HMN" if bias else "tiny"
        results[case] = found
        first = next(iter(found.values()))
        for name, row in found.items():
            cells = (f"{c} {t:6.1f} ({t / r:.2f}x)" for c, t, r in zip(COLUMNS, row, first, strict=True))
            print(f"{case:16} {name:16} ", "  ".join(cells), flush=True)
    if options.json is not None:
        document = {
            **origin(device, options.commit),
            "calibration": asdict(calibrate(Clock(device, 0.3), ["bfloat16"])),
            "unit": "microseconds",
            "columns": COLUMNS,
            "cases": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
