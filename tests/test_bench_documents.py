"""What the documents say of results is what the results files say."""

from __future__ import annotations

import importlib
import json
import re
from itertools import product
from pathlib import Path

import pytest

from tilewise.bench import report, results

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def gains(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("gains")


def test_the_first_picture_and_table_are_made_from_a_results_file(gains):
    found = results.read(gains.FILE)
    assert gains.PICTURE.read_text(encoding="utf-8") == gains.picture(found), "python benchmarks/gains.py"
    assert gains.insert(README, gains.table(found)) == README, "python benchmarks/gains.py"
    assert f"]({gains.PICTURE.relative_to(REPOSITORY)})" in README


def pair_biases():
    """Rows of tilewise and of FlexAttention, by length: forwards by CUDA graphs; of 256 tokens the backward's kernels
    alone, as it waited for the host."""
    file = REPOSITORY / "benchmarks" / "results" / "h200_bias_terms.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in found["beside_cuequivariance"]["rows"] if not row["case"].endswith("S256")]
    kernels = found["pair_bias_lanes"]["beside_flex_by_kernels"]
    short = next(row for row in kernels["rows"] if row["S"] == 256)
    rows += [
        {"case": "pair bias D32 S256", "provider": who, "backward_ms": short[which], "memory_mib": memory}
        for (who, memory), which in zip(kernels["memory_mib"]["256"].items(), ("ms", "flex_ms"), strict=True)
    ]
    graphs = {str(row["S"]): row for row in found["masked_pair_bias"]["rows"] if row["hidden"] == "no mask"}
    return [
        {
            row["case"][-3:]: row | {"forward_ms": graphs[row["case"][-3:]][which]}
            for row in sorted(rows, key=lambda row: row["case"])
            if row["provider"] == who and row["case"].startswith("pair bias")
        }
        for who, which in (("tilewise-hopper", "now_ms"), ("flex", "flex_ms"))
    ]


def test_what_readme_says_in_words_is_in_the_results():
    """Beside FlashAttention-4 and cuDNN without a bias, and where it is weak."""
    folder = REPOSITORY / "benchmarks" / "results"
    dense = results.read(folder / "h200_slots.json")

    def ratios(found, start, which=results.PASSES):
        rows = [row for row in found.rows if row.provider == "tilewise-hopper" and row.case.startswith(start)]
        return [found.ratio(row, one) for row in rows for one in which if row.timing(one) is not None]

    small = [x for head_dim in (64, 128) for x in ratios(dense, f"dense D{head_dim}")] + ratios(dense, "gqa")
    large = ratios(dense, "dense D256")
    words = " ".join(README.split())
    assert (
        f"it has {min(small):.2f} to {max(small):.2f} of the speed of the faster of FlashAttention-4 and cuDNN" in words
    )
    assert f"to D=128, and {min(large):.2f} to {max(large):.2f} at D=256" in words
    ours, flex = pair_biases()
    assert len(ours) == len(flex) == 4
    assert all(flex[S]["memory_mib"] > ours[S]["memory_mib"] for S in ours)
    assert all(flex[S][f"{which}_ms"] >= ours[S][f"{which}_ms"] for S in ours for which in ("forward", "backward"))


def test_documents_hold_what_their_results_say():
    """Each results file of this schema has its place in the document of results, and what stands there is made from it,
    with all of its pictures or, of an older run, with none."""
    document = REPOSITORY / "docs" / "results.md"
    text = document.read_text(encoding="utf-8")
    names = set()
    for file in sorted((REPOSITORY / "benchmarks" / "results").glob("*.json")):
        document_of = json.loads(file.read_text())
        if "schema" not in document_of or "kind" in document_of:
            continue  # of a sweep, or of several processes
        pictures = [(words, f"images/{name}") for words, name in report.picture_names(file)]
        drawn = [(document.parent / name).is_file() for _, name in pictures]
        assert all(drawn) or not any(drawn), f"{file.name} has some of its pictures"
        made = report.markdown(results.read(file), f"benchmarks/results/{file.name}", pictures if all(drawn) else [])
        assert report.insert(text, file.stem, made) == text, f"tilewise bench report {file} --into {document}"
        names.add(file.stem)
    assert set(re.findall(r"<!-- tilewise bench report (\w+): begin -->", text)) == names


def test_a_users_page_says_what_the_results_say():
    """The rows of the tables of attention: TFLOP/s, how many times as fast as the best other, working memory."""
    lines = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    folder = REPOSITORY / "benchmarks" / "results"
    dense, biased = (results.read(folder / f"{name}.json") for name in ("h200_slots", "h200_slots_bias"))

    def cells(found, case):
        row = next(row for row in found.of(case) if row.provider == "tilewise-hopper")
        other = found.best_other(row, "forward")
        speeds, ratios = [getattr(found, name) for name in ("flops", "ratio")]
        return [
            " / ".join(f"{speeds(row, which) / 1e12:.3g}" for which in results.PASSES),
            " / ".join(f"{ratios(row, which):.2f}" for which in results.PASSES),
            " / ".join(f"{one.memory_bytes / 2**20:.0f}" for one in (row, other)),
        ]

    for head_dim, mask in product((64, 128, 256), ("full", "causal")):
        case = f"dense D{head_dim} {mask}"
        ratios = [cells(dense, f"{case} S{length}")[1] for length in (1024, 4096, 16384)]
        row = [f"D={head_dim} {mask}", cells(dense, f"{case} S4096")[0], *ratios]
        assert f"| {' | '.join(row)} |" in lines
    for mask in ("full", "causal"):
        speed, ratio, _ = cells(dense, f"gqa 32/8 D128 {mask} S4096")
        assert f"| 32 heads on 8, D=128 {mask} | {speed} | – | {ratio} | – |" in lines
    for shape in ("BHMN", "1HMN", "B11N"):
        row = [cell for head_dim in (128, 64) for cell in cells(biased, f"bias {shape} D{head_dim} S4096")]
        assert f"| ({','.join(shape)}) | {' | '.join(row)} |" in lines
    ours, flex = pair_biases()
    for length, row in ours.items():
        forward = 4 * 32 * 4 * int(length) ** 3  # of four heads and as many batch elements as tokens
        found = [
            " / ".join(
                f"{x * forward / row[f'{which}_ms'] / 1e9:.3g}" for which, x in (("forward", 1), ("backward", 2.5))
            ),
            " / ".join(f"{flex[length][f'{which}_ms'] / row[f'{which}_ms']:.2f}" for which in ("forward", "backward")),
            f"{row['memory_mib']} / {flex[length]['memory_mib']}",
        ]
        end = f" | {' | '.join(found)} |"
        assert sum(line.startswith(f"| S={length}") and line.endswith(end) for line in lines) == 1
