"""Pictures for docs/performance.md, one for each question that has a results file, and their numbers as tables.

    python -m tilewise_tools.benchmarks.gains     # writes them beside README's

`FIGURES` names them; each function reads its file under benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewise_tools.benchmarks.bars import Chart, Panel

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs" / "images"
TABLES = ROOT / "docs" / "notebook" / "results.md"
PASSES = ("forward", "backward")
H200 = "NVIDIA H200, bfloat16"


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


Value = Callable[[str, str, str], float | None]


def both_passes(title: str, series: Sequence[str], labels: Sequence[str], unit: str, form: str, value: Value) -> Chart:
    """Return a chart with a panel for each pass, of ``value(label, series, pass)``."""
    panels = [
        Panel(f"{which.capitalize()}, {unit}", form, [[value(label, one, which) for one in series] for label in labels])
        for which in PASSES
    ]
    return Chart(title, series, [("", labels)], panels)


def pair_bias() -> Chart:
    found = {(row["case"], row["provider"]): row for row in results("h200_bias_terms")["beside_cuequivariance"]["rows"]}
    names = {"tilewise": "tilewise-hopper", "FlexAttention": "flex", "cuEquivariance": "cuequivariance"}
    lengths = (256, 384, 512, 768)
    rows = [[found[f"pair bias D32 S{length}", name] for name in names.values()] for length in lengths]
    panels = [
        Panel(
            "Forward + backward, ms; shorter is better",
            "{:.1f}",
            [[one["forward_ms"] + one["backward_ms"] for one in row] for row in rows],
        ),
        Panel("Working memory, MiB; shorter is better", "{:.0f}", [[one["memory_mib"] for one in row] for row in rows]),
    ]
    return Chart(
        f"A pair bias with its gradient, D = 32, 4 heads, {H200}",
        list(names),
        [("", [f"S = B = {length}" for length in lengths])],
        panels,
    )


def head_dimensions() -> Chart:
    file = results("h200_masks_and_sinks")
    key = {"forward": "fwd", "backward": "bwd"}
    latent = {(row["what"], "tilewise" if row["name"] == "new" else "other"): row for row in file["mla"]["rows"]}
    names = {"tilewise": "tilewise", "sdpa default": "other"}
    large = {(row["what"], names.get(row["name"])): row for row in file["heads_above_256"]["rows"]}
    cases = {
        "D = 192, Dv = 128": (latent, "192/128 4k"),
        "the same, causal": (latent, "192/128 4k causal"),
        "the same, 32 heads on 8": (latent, "192/128 4k causal gqa"),
        "D = 512": (large, "512 4k"),
        "D = 512, causal": (large, "512 4k causal"),
        "D = 512, bias (1, H, M, N)": (large, "512 4k bias"),
        "D = 512, causal, 8 heads on 4": (large, "gemma 512 4k causal gqa"),
        "D = 576, Dv = 512, 8 heads on 1": (large, "576/512 4k mqa"),
    }
    series = {"tilewise": "tilewise", "FlashAttention-4, SDPA": "other"}

    def value(label: str, one: str, which: str) -> float | None:
        rows, what = cases[label]
        number = rows[what, series[one]].get(key[which])
        return None if number is None else float(number)

    title = f"Other head dimensions, S = 4096, {H200}"
    return both_passes(title, list(series), list(cases), "TFLOP/s; longer is better", "{:.0f}", value)


def packed() -> Chart:
    cases = {
        f"D = {row['head_dim']}{', causal' if row['causal'] else ''}": row for row in results("h200_varlen")["cases"]
    }

    def value(label: str, one: str, which: str) -> float:
        """Return the mean of the turns."""
        turns = [turn[PASSES.index(which)] for turn in cases[label][one]]
        return float(sum(turns) / len(turns))

    title = f"Packed batch of 32,768 tokens, 52 sequences, {H200}"
    return both_passes(
        title, ("tilewise", "FlashAttention-4"), list(cases), "TFLOP/s; longer is better", "{:.0f}", value
    )


def masks() -> Chart:
    rows = results("h200_masks_and_sinks")["tile_masks"]["rows"]
    found = {(row["case"], row["provider"]): row for row in rows if row["outcome"] == "measured"}
    cases = {
        "all pairs": "dense D128 full S16384",
        "25 % of the tiles": "blocks 25 D128 full S16384",
        "5 % of the tiles": "blocks 5 D128 full S16384",
        "causal window, 2048": "window 2048 D128 causal S16384",
        "causal window, 512": "window 512 D128 causal S16384",
    }
    series = {"tilewise": "tilewise-hopper", "FlashAttention-4": "fa4", "FlexAttention": "flex"}

    def value(label: str, one: str, which: str) -> float | None:
        row = found.get((cases[label], series[one]))
        return None if row is None else float(row[f"{which}_ms"])

    title = f"Masks and windows, S = 16384, D = 128, {H200}"
    return both_passes(title, list(series), list(cases), "ms; shorter is better", "{:.2f}", value)


def decoding() -> Chart:
    copy, *rows = results("h200_masks_and_sinks")["decoding_above_256"]["now"]
    rows = [row for row in rows if row["decode"][2] > 1]
    labels = ["B = {}, {} heads on {}, N = {}, D = {}".format(*row["decode"]) for row in rows]
    values = [[row["tb"], copy["copy"]] for row in rows]
    panel = Panel("TB/s of keys and values; longer is better", "{:.2f}", values)
    return Chart(f"Decoding: one query, {H200}", ("tilewise", "a copy"), [("", labels)], [panel])


def host() -> Chart:
    turns = [row for row in results("h200_host")["beside_sdpa"]["rows"] if row["source"] == "src"]
    cases = {
        "no bias": (("plain", "sdpa"), ("both", "sdpa both")),
        "bias (1, H, M, N)": (("bias", "sdpa bias"), ("bias both", "sdpa bias both")),
    }

    def least(name: str) -> float:
        return float(min(turn[name][0] for turn in turns))

    panels = [
        Panel(
            "Forward, no gradient, µs; shorter is better",
            "{:.0f}",
            [[least(name) for name in names] for names, _ in cases.values()],
        ),
        Panel(
            "Forward + backward, µs; shorter is better",
            "{:.0f}",
            [[least(name) for name in names] for _, names in cases.values()],
        ),
    ]
    title = "Host time of a small call, B = 1, H = 8, S = 128, D = 64"
    return Chart(title, ("tilewise", "SDPA"), [("", list(cases))], panels)


def softmax() -> Chart:
    found = {
        (row["length"], row["variant"], row["pass"]): row["of_copy"]
        for row in results("h200_softmax")["rows"]
        if row["dtype"] == "torch.bfloat16"
    }
    lengths = {f"rows of {length:,}": length for length in (1024, 4096, 16384, 65536, 131072)}
    series = {"tilewise.softmax": "chosen", "torch.softmax": "torch"}

    def value(label: str, one: str, which: str) -> float:
        return float(found[lengths[label], series[one], which])

    title = f"Softmax, share of the speed of a copy, {H200}"
    return both_passes(title, list(series), list(lengths), "longer is better", "{:.2f}", value)


def matmul() -> Chart:
    found = {row["name"]: row for row in results("h200_matmul")["rows"]}
    names = ("8192³", "4096³", "2048³", "1024³", "8192 × 8192 × 512", "8192 × 8192 × 512 + C", "scores of 64 heads")
    values = [[found[name]["tflops"], found[name]["torch_tflops"]] for name in names]
    panel = Panel("TFLOP/s; longer is better", "{:.0f}", values)
    return Chart(f"Matrix products, {H200}", ("tilewise.matmul", "torch"), [("", names)], [panel])


def cpu() -> Chart:
    file = results("cpu")
    rows = [row for row in file["rows"] if row["backward"]]
    values = [[row["median_seconds"][name] for name in ("tilewise", "SDPA")] for row in rows]
    labels = [row["name"].replace("forward and backward", "no bias") for row in rows]
    panel = Panel("Forward + backward, s; shorter is better", "{:.2f}", values)
    title = f"A CPU with {file['threads']} threads, S = 4096, D = 64, 8 heads"
    return Chart(title, ("tilewise", "SDPA"), [("", labels)], [panel])


FIGURES: dict[str, Callable[[], Chart]] = {
    "pair-bias": pair_bias, "head-dimensions": head_dimensions, "packed-batches": packed, "masks": masks,
    "decoding": decoding, "softmax": softmax, "matmul": matmul, "cpu": cpu, "host-time": host,
}  # fmt: skip


def tables() -> str:
    """Return the numbers of all pictures in Markdown, each table under its title."""
    charts = [figure() for figure in FIGURES.values()]
    return "\n\n".join(f"{chart.title}:\n\n{chart.table()}" for chart in charts)
