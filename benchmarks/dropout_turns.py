"""Dropout on Hopper: variants of its kernels in turns, beside no dropout and SDPA's flash kernel with dropout.

    python benchmarks/dropout_turns.py [forward|backward|both]

Times by CUDA events, L2 flushed, median of rounds that alternate; each variant has a dropout_p of its own, by which it
is planned anew. TFLOP/s of S=4096, 16,384 tokens, bfloat16.
"""

# ruff: noqa: B023, BLE001
from __future__ import annotations

import dataclasses
import statistics
import sys

import torch

from tilewise import attention
from tilewise.backends.gluon.sm90 import backward_launch, launch

F, B = launch.forward_config, backward_launch.backward_config
THREE = {"warpgroups": 3, "registers": (160, 32), "q_in_registers": False, "q_stages": 2}
SHARED = {"q_in_registers": False}
FORWARDS = {
    "as is": (0, {}, {}),
    "borders": (3, {}, {}),
    "Q shared": (0, SHARED, {}),
    "no turns": (4, {}, {}),
    "no turns, Q shared": (4, SHARED, {}),
    "late turns": (16, {}, {}),
    "late turns, borders": (19, {}, {}),
    "no Philox": (8, {}, {}),
    "no Philox, Q shared": (8, SHARED, {}),
    "not lazy": (0, {"lazy": False}, {}),
    "of 64 keys": (0, SHARED | {"block_n": 64}, {}),
}
TWO = {"block_m": 64, "m_subtiles": 1, "programs": 2, "block_n": 64, "warpgroups": 1, "v_in_registers": True}
BACKWARDS = {
    "backward as is": (0, {}, {}),
    "K from shared": (0, {}, {"k_in_registers": False}),
    "two programs": (0, {}, TWO),
}


def wanted(name: str, D: int, causal: bool) -> bool:
    if D == 64 and not causal:
        return True
    if not causal:
        return name in FORWARDS or name == "backward as is"
    return name in ("as is", "Q shared") or (name in BACKWARDS and D == 64) or name == "backward as is"


def timed(steps: dict, rounds: int = 5, each: int = 6) -> dict:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    found: dict = {name: [] for name in steps}
    for step in steps.values():
        step(), step()
    for _ in range(rounds):
        for name, step in steps.items():
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(each)]
            for start, end in events:
                flush.zero_()
                start.record()
                step()
                end.record()
            torch.cuda.synchronize()
            found[name] += [s.elapsed_time(e) for s, e in events]
    return {name: statistics.median(x) for name, x in found.items()}


def main(what: str) -> None:
    torch.manual_seed(0)
    for D, causal in ((64, False), (128, False), (64, True), (128, True)):
        H, S, N = 2048 // D, 4096, 4
        q, k, v = (torch.randn(N, H, S, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        do = torch.randn_like(q)
        flops = 4 * N * H * S * S * D / (2 if causal else 1) / 1e9  # of the forward, per millisecond in TFLOP/s
        options = {"causal": causal, "backend": "hopper"}
        forwards, backwards = {}, {}

        def add(name, call, forward, backward):
            if forward:
                forwards[name] = lambda: call()
            if backward:
                o = call()
                backwards[name] = lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

        launch.forward_config, backward_launch.backward_config = F, B
        torch.autograd.grad(attention(q, k, v, **options), (q, k, v), do)  # planned before anything is changed
        add("no dropout", lambda: attention(q, k, v, **options), True, True)

        def flash():
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=causal)

        add("SDPA flash, dropout", flash, True, True)
        p = 0.1
        chosen = (FORWARDS if what != "backward" else {}) | (BACKWARDS if what != "forward" else {})
        for name, (borders, forward, backward) in chosen.items():
            if not wanted(name, D, causal):
                continue
            p += 1 / 65536
            try:
                launch.DROPOUT_BORDERS = borders
                launch.forward_config = lambda x, change=forward: dataclasses.replace(F(x), **change)
                backward_launch.backward_config = lambda x, change=backward: dataclasses.replace(B(x), **change)
                call = lambda p=p: attention(q, k, v, dropout_p=p, dropout_seed=(1, 2), **options)  # noqa: E731
                o = call()
                torch.autograd.grad(o, (q, k, v), do)
                add(name, call, name in FORWARDS, name in BACKWARDS)
            except Exception as error:
                print(f"D{D} {name}: {type(error).__name__} {str(error)[-200:]}")
        for label, steps, times in (("forward", forwards, 1.0), ("backward", backwards, 2.5)):
            if len(steps) < 3:
                continue
            found = timed(steps)
            base, peer = found["no dropout"], found["SDPA flash, dropout"]
            for name, ms in found.items():
                print(
                    f"D{D} {'causal' if causal else 'full':6} {label:8} {name:22} {ms:7.3f} ms "
                    f"{flops * times / ms:6.0f} TFLOP/s  {base / ms:5.2f} of none  {peer / ms:5.2f} x flash",
                    flush=True,
                )


if __name__ == "__main__":
    torch.cuda.init()
    print(torch.cuda.get_device_name())
    main(sys.argv[1] if len(sys.argv) > 1 else "both")
