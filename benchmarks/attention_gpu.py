"""tilewise's Triton backend beside FlexAttention on one CUDA GPU, in one run: checked, then timed.

    python benchmarks/attention_gpu.py [--cases SUBSTRING,...] [--json PATH]

TFLOP/s count 4·B·H·M·N·D for a forward (half of it when causal) and 2.5 times that for a backward, whole: preparation,
kernels, casts. Both providers get the same inputs; their outputs and gradients must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

import tilewise

TOLERANCE = 2e-2  # relative to the largest element: two bfloat16 implementations of one function


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool = False
    bias: tuple[int, int] | None = None  # (batch, heads) of a bias (batch, heads, M, N)
    group: int = 1
    providers: tuple[str, ...] = ("tilewise", "flex")

    @property
    def flops(self) -> float:
        return 4 * self.batch * self.heads * self.length**2 * self.head_dim * (0.5 if self.causal else 1)


def cases() -> list[Case]:
    out = []
    for d in (64, 128):
        heads = 2048 // d
        for s in (4096, 16384):
            b = 16384 // s
            for causal in (False, True):
                out.append(Case(f"dense D{d} S{s} {'causal' if causal else 'full'}", b, heads, s, d, causal))
        b = 4
        out.append(Case(f"bias BHMN D{d} S4096", b, heads, 4096, d, bias=(b, heads)))
        out.append(Case(f"bias 1HMN D{d} S4096", b, heads, 4096, d, bias=(1, heads)))
    # A (B,H,M,N) bias at 16384 is 8 GiB a batch element at D128 and 16 GiB at D64: one batch element, fewer heads.
    out.append(Case("bias BHMN D128 S16384", 1, 8, 16384, 128, bias=(1, 8)))
    out.append(Case("bias 1HMN D128 S16384", 2, 8, 16384, 128, bias=(1, 8)))
    out.append(Case("bias BHMN D64 S16384", 1, 8, 16384, 64, bias=(1, 8)))
    out.append(Case("bias 1HMN D64 S16384", 2, 8, 16384, 64, bias=(1, 8)))
    out.append(Case("dense D256 S4096 full", 4, 8, 4096, 256, providers=("tilewise",)))
    out.append(Case("gqa 32/8 D128 S4096 full", 4, 32, 4096, 128, group=4, providers=("tilewise",)))
    out.append(Case("pair bias D32 S256", 256, 4, 256, 32, bias=(1, 4)))
    return out


def calibrate() -> dict[str, float]:
    """What this GPU does today: a bfloat16 product and a copy, in TFLOP/s and TB/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = do_bench(lambda: a @ b, warmup=50, rep=300, return_mode="median")
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = do_bench(lambda: y.copy_(x), warmup=50, rep=300, return_mode="median")
    return {"matmul_tflops": 2 * 8192**3 / product / 1e9, "copy_tbps": 2 * x.numel() * 2 / copy / 1e9}


def inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    b, h, s, d = case.batch, case.heads, case.length, case.head_dim

    def rows(heads: int) -> Tensor:
        return torch.randn(b, s, heads, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    tensors = [rows(h), rows(h // case.group), rows(h // case.group)]
    if case.bias is not None:
        tensors.append(torch.randn(*case.bias, s, s, device="cuda", dtype=torch.bfloat16))
    return [t.requires_grad_() for t in tensors], rows(h)


def provider(name: str, case: Case, tensors: list[Tensor]):
    """A function without arguments that runs the forward."""
    q, k, v, *rest = tensors
    bias = rest[0] if rest else None
    if name == "tilewise":
        return lambda: tilewise.attention(q, k, v, bias=bias, causal=case.causal, backend="triton")
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if case.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device="cuda")
    score_mod = None
    if bias is not None and bias.shape[0] == 1:
        shared = bias[0]

        def score_mod(s, b, h, i, j):
            return s + shared[h, i, j]
    elif bias is not None:

        def score_mod(s, b, h, i, j):
            return s + bias[b, h, i, j]

    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=case.group > 1)


def compare(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))


def measure(case: Case) -> list[dict]:
    torch.manual_seed(0)
    tensors, do = inputs(case)
    rows: list[dict] = []
    first: list[Tensor] | None = None
    for name in case.providers:
        forward = provider(name, case, tensors)
        torch.cuda.synchronize()
        start = time.perf_counter()
        o = forward()
        grads = torch.autograd.grad(o, tensors, do, retain_graph=True)
        torch.cuda.synchronize()
        compile_s = time.perf_counter() - start
        results = [o.detach(), *grads]
        error = 0.0 if first is None else compare(results, first)
        if first is None:
            first = results
        if not error < TOLERANCE:
            rows.append({"case": case.name, "provider": name, "error": error, "failed": "differs from tilewise"})
            continue
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(o, tensors, do, retain_graph=True)
        peak = torch.cuda.max_memory_allocated() - before
        del grads, results
        forward_ms = do_bench(forward, warmup=50, rep=200, return_mode="median")
        backward_ms = do_bench(
            lambda o=o: torch.autograd.grad(o, tensors, do, retain_graph=True), warmup=50, rep=200, return_mode="median"
        )
        rows.append(
            {
                **asdict(case),
                "case": case.name,
                "provider": name,
                "difference": error,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "forward_tflops": case.flops / forward_ms / 1e9,
                "backward_tflops": 2.5 * case.flops / backward_ms / 1e9,
                "backward_peak_bytes": peak,
                "first_call_s": compile_s,
            }
        )
        del o
    return rows


def host_time() -> dict[str, float]:
    """Microseconds that one forward call keeps the host busy at a tiny shape, gradients on."""
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 8, 128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    calls = {
        "tilewise": lambda: tilewise.attention(q, k, v, backend="triton"),
        "tilewise with bias": lambda: tilewise.attention(q, k, v, bias=bias, backend="triton"),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    out = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        out[name] = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only cases whose name contains one of these, comma-separated")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--commit", default="", help="the commit that is measured, where there is no git")
    args = parser.parse_args()
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    calibration = calibrate()
    print(f"{torch.cuda.get_device_name()}  {calibration}", flush=True)
    rows = []
    for case in cases():
        if args.cases and not any(part in case.name for part in args.cases.split(",")):
            continue
        found = measure(case)
        rows += found
        torch.cuda.empty_cache()
        for r in found:
            if "failed" in r:
                print(f"{r['case']:28s} {r['provider']:9s} {r['failed']} by {r['error']:.1e}", flush=True)
                continue
            print(
                f"{r['case']:28s} {r['provider']:9s} forward {r['forward_ms']:7.3f} ms {r['forward_tflops']:4.0f}  "
                f"backward {r['backward_ms']:7.3f} ms {r['backward_tflops']:4.0f} TFLOP/s  "
                f"first call {r['first_call_s']:.1f} s  difference {r['difference']:.1e}",
                flush=True,
            )
        if len(found) == 2 and not any("failed" in r for r in found):
            ours, theirs = found
            ratios = [theirs[k] / ours[k] for k in ("forward_ms", "backward_ms")]
            print(f"{'':28s} ratio     forward {ratios[0]:.2f}  backward {ratios[1]:.2f}", flush=True)
    host = host_time()
    print("host microseconds a forward call:", {k: round(v, 1) for k, v in host.items()}, flush=True)
    if args.json is not None:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
        versions = {"torch": torch.__version__, "triton": triton.__version__, "tilewise": tilewise.__version__}
        document = {
            "commit": commit,
            "gpu": torch.cuda.get_device_name(),
            "driver": driver.splitlines()[0] if driver else "",
            "versions": versions,
            "calibration": calibration,
            "host_us": host,
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
