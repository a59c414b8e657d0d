"""What the documents say of results is what the results files say."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

from tilewise.bench import report, results

REPOSITORY = Path(__file__).parents[1]


def test_documents_hold_what_their_results_say():
    """Each results file of this schema has its place in the document of results, and what stands there is made from it,
    with all of its pictures or, of an older run, with none."""
    document = REPOSITORY / "docs" / "results.md"
    text = document.read_text(encoding="utf-8")
    names = set()
    for file in sorted((REPOSITORY / "benchmarks" / "results").glob("*.json")):
        if "schema" not in json.loads(file.read_text()):
            continue  # of a sweep
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
    for length in (256, 384, 768):
        end = f" | {' | '.join(cells(biased, f'pair bias D32 S{length}'))} |"
        assert sum(line.startswith(f"| S={length}") and line.endswith(end) for line in lines) == 1
