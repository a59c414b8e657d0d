"""What the documents say of results is what the results files say."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from tilewise_tools.bench import report, results
from tilewise_tools.benchmarks import figures, gains

REPOSITORY = Path(__file__).parents[2]
MAKE = f"python -m {gains.__name__}"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_first_picture_and_table_are_made_from_a_results_file():
    found = results.read(gains.FILE)
    assert gains.PICTURE.read_text(encoding="utf-8") == gains.picture(found), MAKE
    assert gains.insert(README, gains.table(found)) == README, MAKE
    assert f"]({gains.PICTURE.relative_to(REPOSITORY)})" in README


@pytest.mark.parametrize("name", figures.FIGURES)
def test_each_picture_of_a_question_is_made_from_its_results_file(name):
    chart = figures.FIGURES[name]()
    assert (figures.IMAGES / f"{name}.svg").read_text(encoding="utf-8") == chart.svg(), MAKE
    assert f"](images/{name}.svg)" in (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    cases = sum(len(labels) for _, labels in chart.groups)
    assert [len(panel.values) for panel in chart.panels] == [cases] * len(chart.panels)


def test_the_tables_of_these_pictures_are_made_from_the_same_numbers():
    document = figures.TABLES.read_text(encoding="utf-8")
    assert gains.insert(document, figures.tables()) == document, MAKE
    assert "| all pairs | 3.38 | – | – | 9.30 | – | – |" in document  # None is a dash


BIAS_TERMS = json.loads((REPOSITORY / "benchmarks" / "results" / "h200_bias_terms.json").read_text(encoding="utf-8"))


def called(case, who, other, passes=results.PASSES):
    """How many times as long ``other`` takes, called as in the bench."""
    rows = {(row["case"], row["provider"]): row for row in BIAS_TERMS["beside_cuequivariance"]["rows"]}
    ours, theirs = (sum(rows[case, x][f"{which}_ms"] for which in passes) for x in (who, other))
    return theirs / ours


def pair_biases():
    """Rows of tilewise and of FlexAttention, by length: kernels alone, and the memory of a call."""
    kernels = {str(row["S"]): row for row in BIAS_TERMS["pair_bias_lanes"]["beside_flex_by_kernels"]["rows"]}
    graphs = {str(row["S"]): row for row in BIAS_TERMS["masked_pair_bias"]["rows"] if row["hidden"] == "no mask"}
    return [
        {
            (S := row["case"][-3:]): {
                "forward_ms": graphs[S][forward], "backward_ms": kernels[S][backward], "memory_mib": row["memory_mib"],
            }
            for row in BIAS_TERMS["beside_cuequivariance"]["rows"]
            if row["provider"] == who and row["case"].startswith("pair bias")
        }
        for who, forward, backward in (("tilewise-hopper", "now_ms", "ms"), ("flex", "flex_ms", "flex_ms"))
    ]  # fmt: skip


def test_what_is_said_of_pair_biases_that_are_called():
    """Beside cuEquivariance without a mask, and with one by the entry point; FlexAttention where the host is slow."""
    both = [f"{called(f'pair bias D32 S{S}', 'tilewise-hopper', 'cuequivariance'):.1f}" for S in (256, 384, 512, 768)]
    masked = [f"{called(f'triangle_attention D32 S{S}', 'tilewise-entry', 'cuequivariance'):.1f}" for S in (384, 768)]
    backward = [f"{called(f'pair bias D32 S{S}', 'tilewise-hopper', 'flex', ['backward']):.2f}" for S in (256, 384)]
    page = " ".join((REPOSITORY / "docs" / "performance.md").read_text().split())
    assert f"takes {', '.join(both)} times as long at S=256, 384, 512, 768" in page
    assert f"beside a mask {', '.join(masked)} at 384, 768" in page
    assert f"the backward, called, is {', '.join(backward)} times as fast as FlexAttention's there" in page


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
    found = results.read(gains.FILE)
    cases = [case.format(D) for name, case in gains.CASES.items() if name != "no bias" for D in gains.HEAD_DIMS]
    pairs = [[gains.row(found, case, who) for who in (gains.OURS, gains.OTHER)] for case in cases]
    longer = [flex.timing("backward").median_s / row.timing("backward").median_s for row, flex in pairs]
    larger = [flex.memory_bytes / row.memory_bytes for row, flex in pairs]
    assert f"its backward takes {min(longer):.1f} to {max(longer):.1f} times as long" in words
    assert f"it needs {min(larger):.1f} to {max(larger):.0f} times the working memory" in words
    ours, flex = pair_biases()
    assert len(ours) == len(flex) == 4
    assert all(flex[S]["memory_mib"] > ours[S]["memory_mib"] for S in ours)
    assert all(flex[S][f"{which}_ms"] >= ours[S][f"{which}_ms"] for S in ours for which in ("forward", "backward"))


def test_documents_hold_what_their_results_say():
    """Each results file of this schema has its place in the document of results, and what stands there is made from it,
    with all of its pictures or, of an older run, with none and only the first table."""
    document = REPOSITORY / "docs" / "notebook" / "results.md"
    text = document.read_text(encoding="utf-8")
    names = set()
    for file in sorted((REPOSITORY / "benchmarks" / "results").glob("*.json")):
        document_of = json.loads(file.read_text())
        if "schema" not in document_of or "kind" in document_of:
            continue  # of a sweep, or of several processes
        pictures = [(words, f"images/{name}") for words, name in report.picture_names(file)]
        drawn = [(document.parent / name).is_file() for _, name in pictures]
        assert all(drawn) or not any(drawn), f"{file.name} has some of its pictures"
        source, brief = f"benchmarks/results/{file.name}", not all(drawn)
        made = report.markdown(results.read(file), source, [] if brief else pictures, brief)
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
        return (
            [f"{found.flops(row, which) / 1e12:.3g}" for which in results.PASSES],
            [f"{found.ratio(row, which):.2f}" for which in results.PASSES],
            [f"{one.memory_bytes / 2**20:.0f}" for one in (row, other)],
        )

    for head_dim, mask in product((64, 128, 256), ("full", "causal")):
        case = f"dense D{head_dim} {mask}"
        ratios = [x for length in (1024, 4096, 16384) for x in cells(dense, f"{case} S{length}")[1]]
        row = [f"D={head_dim} {mask}", *cells(dense, f"{case} S4096")[0], *ratios]
        assert f"| {' | '.join(row)} |" in lines
    for mask in ("full", "causal"):
        speeds, ratios, _ = cells(dense, f"gqa 32/8 D128 {mask} S4096")
        row = [f"32 heads on 8, D=128 {mask}", *speeds, "–", "–", *ratios, "–", "–"]
        assert f"| {' | '.join(row)} |" in lines
    for head_dim, shape in product((128, 64), ("BHMN", "1HMN", "B11N")):
        found = [x for pair in cells(biased, f"bias {shape} D{head_dim} S4096") for x in pair]
        assert f"| ({','.join(shape)}), D={head_dim} | {' | '.join(found)} |" in lines
    ours, flex = pair_biases()
    for length, row in ours.items():
        forward = 4 * 32 * 4 * int(length) ** 3  # of four heads and as many batch elements as tokens
        times = (("forward", 1), ("backward", 2.5))
        found = [
            *(f"{x * forward / row[f'{which}_ms'] / 1e9:.3g}" for which, x in times),
            *(f"{flex[length][f'{which}_ms'] / row[f'{which}_ms']:.2f}" for which, _ in times),
            f"{row['memory_mib']}", f"{flex[length]['memory_mib']}",
        ]  # fmt: skip
        assert f"| pair bias, S={length} | {' | '.join(found)} |" in lines
