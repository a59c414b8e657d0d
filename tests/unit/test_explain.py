"""explain(): its numbers by hand, its words, and that it runs nothing."""

import dataclasses
import inspect
import re

import pytest
import torch
from helpers import compute_by
from torch._subclasses import FakeTensorMode

import tilewise
from tilewise import explain
from tilewise.backends import cpu
from tilewise.explanation.text import Explanation, traffic_table
from tilewise.explanation.work import DATA_SHEETS, Limits, Work, _data_sheet
from tilewise.quantities import count, duration, number, percent, quantity
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

B, H, HKV, M, N, D, DV = 2, 4, 2, 5, 6, 8, 3


def meta(*shape, dtype=torch.bfloat16, requires_grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def small(dtype=torch.bfloat16):
    return meta(B, H, M, D, dtype=dtype), meta(B, HKV, N, D, dtype=dtype), meta(B, HKV, N, DV, dtype=dtype)


def test_work_by_hand():
    e = explain(*small(), device="cpu")
    pairs = B * H * M * N
    inputs = 2 * (B * H * M * D + B * HKV * N * D + B * HKV * N * DV)
    results = B * H * M * (2 * DV + 4)  # o in bfloat16, lse in float32
    assert e.forward == Work(2 * pairs * (D + DV), inputs + results, 4 * 2 * pairs)
    assert e.backward == Work(2 * pairs * (3 * D + 2 * DV), 2 * inputs + results + 2 * B * H * M * DV, 7 * 2 * pairs)
    assert e.forward.intensity == e.forward.flops / e.forward.bytes
    assert e.problem is e.plan.problem


@pytest.mark.parametrize(
    ("shape", "dtype", "read"),
    [
        ((B, H, M, N), torch.float32, 4 * B * H * M * N),
        ((H, M, N), torch.bfloat16, 2 * H * M * N),
        ((HKV, 1, N), torch.float32, 4 * HKV * N),
        ((M, 1), torch.float16, 2 * M),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_traffic_of_a_bias(shape, dtype, read, requires_grad):
    """Read once in each pass as it is, not as it broadcasts; its gradient, where asked for, is written once."""
    plain = explain(*small(), device="cpu")
    biased = explain(*small(), bias=meta(*shape, dtype=dtype, requires_grad=requires_grad), device="cpu")
    assert biased.forward.bytes - plain.forward.bytes == read
    assert biased.backward.bytes - plain.backward.bytes == read * (2 if requires_grad else 1)
    assert biased.forward.flops == plain.forward.flops


def test_traffic_of_a_mask():
    plain = explain(*small(), device="cpu")
    masked = explain(*small(), mask=meta(B, 1, M, N, dtype=torch.bool), device="cpu")
    assert masked.forward.bytes - plain.forward.bytes == B * M * N


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(B, H, M, N), (1, HKV, 1, N), (B, 1, M, 1)])
def test_what_a_mask_leaves(causal, shape):
    """Counted element by element; a mask without elements says nothing."""
    M, N = 200, 300
    q, k, v = meta(B, H, M, D), meta(B, HKV, N, D), meta(B, HKV, N, DV)
    mask = torch.rand(*(n if size > 1 else 1 for n, size in zip((B, shape[1], M, N), shape, strict=True))) < 0.5
    mask[..., : mask.shape[2] // 2, mask.shape[3] // 3 :] = False
    bare, known = (
        explain(*(torch.zeros(x.shape) for x in (q, k, v)), causal=causal, **more) for more in ({}, {"mask": mask})
    )
    every = torch.ones(M, N, dtype=torch.bool).tril(N - M if causal else N)
    seen = mask.expand(B, -1, M, N).repeat_interleave(H // mask.shape[1], 1) & every
    assert known.mask.pairs == pytest.approx(int(seen.sum()) / (B * H * int(every.sum())))
    assert known.forward.flops == 2 * int(seen.sum()) * (D + DV)
    assert known.backward.flops == 2 * int(seen.sum()) * (3 * D + 2 * DV)

    def tiles(x):
        return sum(bool(part.any()) for rows in x.split(128, -2) for part in rows.split(128, -1))

    found = sum(tiles(of_head) for of_batch in seen for of_head in of_batch)
    assert known.mask.tiles == pytest.approx(found / (B * H * tiles(every)))
    of, where = ("these", "their tiles") if causal else ("the scores", "tiles")
    line = f"  mask: leaves {percent(known.mask.pairs)} of {of}, in {percent(known.mask.tiles)} of {where} of 128 x 128"
    assert line in str(known).splitlines()
    assert bare.mask is None
    assert explain(q, k, v, mask=meta(*mask.shape, dtype=torch.bool), device="cpu").mask is None


def test_a_mask_that_leaves_nothing():
    e = explain(*(torch.zeros(x.shape) for x in small()), mask=torch.zeros(1, 1, M, 1, dtype=torch.bool))
    assert e.mask == (0, 0)
    assert str(e).splitlines()[-1] == "no query sees a key: o is 0 and lse -inf"


def test_what_the_band_hides_is_neither_computed_nor_read():
    """Causal, bottom-right, with a left window of one: query i sees keys i and i + 1 of six, so all keys are seen."""
    bias = meta(H, M, N)
    full, band = (
        explain(*small(), bias=bias, **terms, device="cpu") for terms in ({}, {"causal": True, "window": (1, None)})
    )
    assert band.forward.flops == 2 * B * H * (2 * M) * (D + DV)
    assert full.forward.bytes - band.forward.bytes == 2 * H * (M * N - 2 * M)
    # One query at the end of a long cache with a window of 10: eleven keys are read.
    q, k = meta(1, 1, 1, D), meta(1, 1, 1000, D)
    whole, window = explain(q, k, k, device="cpu"), explain(q, k, k, window=(10, 0), device="cpu")
    assert whole.forward.bytes - window.forward.bytes == 2 * (1000 - 11) * 2 * D
    # More queries than keys: the first three see nothing and are not read.
    q, k = meta(1, 1, 5, D), meta(1, 1, 2, D)
    whole, causal = explain(q, k, k, device="cpu"), explain(q, k, k, causal=True, device="cpu")
    assert whole.forward.bytes - causal.forward.bytes == 2 * 3 * D


def test_the_bound():
    e = explain(*small(), device="cpu")
    assert e.limits is None
    assert e.bound is None
    intensity = e.forward.intensity
    for factor, bound in ((0.9, "compute"), (1.1, "memory")):
        e = explain(*small(), device="cpu", limits=(1e9 * intensity * factor, 1e9))
        assert e.bound == bound
        assert f"{bound}-bound" in str(e)
        assert e.limits.seconds(e.forward) == pytest.approx(
            max(e.forward.flops / (1e9 * intensity * factor), e.forward.bytes / 1e9)
        )


@pytest.mark.parametrize(
    ("device", "why"), [("cpu", "this CPU's speed is not measured"), ("sm_120", "unknown for this GPU and dtype")]
)
def test_unknown_limits_are_said_and_no_bound(device, why):
    text = str(explain(*small(), device=device))
    assert text.endswith(f"limits: {why}; with limits=(FLOP/s, bytes/s) the bound and the least time are shown")
    assert len(re.findall(r"^  [\d.]+ FLOP/byte$", text, re.MULTILINE)) == 2
    assert "-bound" not in text


@pytest.mark.parametrize(
    ("name", "capability", "bandwidth"),
    [
        ("h100", (9, 0), 3.35e12), ("H200", (9, 0), 4.8e12), ("NVIDIA H200", (9, 0), 4.8e12), ("gh200", (9, 0), None),
        ("A100", (8, 0), 2.0e12), ("a30", (8, 0), None), ("RTX 4090", (8, 9), None),
        ("geforce-rtx-5090", (12, 0), None),
    ],
)  # fmt: skip
def test_a_gpu_by_its_name(name, capability, bandwidth):
    """With the data sheet of this GPU, not of another one of its capability."""
    e = explain(*small(), device=name)
    assert (e.problem.device, e.problem.capability) == ("cuda", capability)
    assert (e.limits and e.limits.bytes_per_second) == bandwidth


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        (None, 3.35e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H200", 4.8e12), ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
    ],
)  # fmt: skip
def test_data_sheets_go_by_the_device_name(name, bandwidth):
    problem = dataclasses.replace(
        Problem.of(*small(), *(None,) * 7, Score(1.0, None, Band())), device="cuda", capability=(9, 0)
    )
    found = _data_sheet(problem, name)
    assert (None if found is None else found[:2]) == (None if bandwidth is None else (990e12, bandwidth))
    for other in (
        dataclasses.replace(problem, dtype=torch.float32),
        dataclasses.replace(problem, capability=(7, 5)),
        dataclasses.replace(problem, device="cpu", capability=None),
    ):
        assert _data_sheet(other, name) is None


def test_every_data_sheet_is_in_order_of_magnitude():
    for sheets in DATA_SHEETS.values():
        for sheet in sheets:
            assert 100 < Limits(sheet.flops, sheet.bytes_per_second, "").break_even < 1000


def test_words_of_a_plan_for_a_gpu():
    q = meta(4, 16, 4096, 128)
    bias = meta(1, 16, 4096, 4096, dtype=torch.float32, requires_grad=True)
    e = explain(q, q, q, bias=bias, causal=True, device="sm_90")
    assert (e.plan.backend, e.plan.backward) == ("hopper", "hopper")
    assert e.problem.capability == (9, 0)
    assert e.problem.bias_grad
    lines = str(e).splitlines()
    assert lines[0] == "attention on cuda (compute capability 9.0), bfloat16"
    for line in (
        "  q (4, 16, 4096, 128)",
        "  bias (1, 16, 4096, 4096) float32, with its gradient",
        "  causal or window: 50% of the scores are visible",
        f"backend hopper: {e.tiles}",
        "  not triton: hopper comes before it",
        "  storing S and P would add 8.59 GB of traffic",
        "  storing P, dP and dS would add 15 GB of traffic",
        "limits: 990 TFLOP/s, 3.35 TB/s (data sheet of the H100 SXM)",
    ):
        assert line in lines, line
    assert any(re.match(r"  not cpu: .*CPU", line) for line in lines)
    assert re.fullmatch(r"\d+ queries x \d+ keys, .*", e.tiles)
    assert any(line.startswith("forward: 275 GFLOP, at least 806 MB of memory traffic") for line in lines)
    assert any(line.startswith("backward: 687 GFLOP, at least 2.15 GB") for line in lines)


def test_words_of_a_plan_for_the_cpu():
    q, k, v = (torch.zeros(x.shape) for x in small())
    e = explain(q, k, v)
    assert e.plan.backend == "cpu"
    assert e.tiles == cpu.tiles(e.problem)
    lines = str(e).splitlines()
    assert lines[0] == "attention on cpu, float32"
    assert f"backend cpu: {e.tiles}" in lines
    assert any(re.match(r"  not triton: .*CUDA", line) for line in lines)
    assert explain(q, k, v, device="sm_120").problem.capability == (12, 0)
    named = explain(q, k, v, backend="reference")
    assert named.plan.backend == "reference"
    assert "  not cpu: another backend was asked for" in str(named).splitlines()


def test_nothing_is_run(monkeypatch):
    def refuse(*args):
        raise AssertionError("explain ran the backend")

    compute_by(monkeypatch, cpu, forward=refuse, backward=refuse)
    assert isinstance(explain(*(torch.zeros(x.shape) for x in small())), Explanation)


def test_nothing_to_compute():
    q, k = torch.zeros(1, 1, 3, D), torch.zeros(1, 1, 0, D)
    e = explain(q, k, k, bias=torch.zeros(3, 1), causal=True)
    assert e.forward.flops == e.forward.unfused_bytes == 0
    assert e.forward.intensity == 0
    assert str(e).splitlines()[-1] == "no query sees a key: o is 0 and lse -inf"


def test_the_arguments_are_attentions():
    """The same keyword arguments, in the same order, and the same errors."""
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (explain, tilewise.attention))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert [p.name for p in ours[len(theirs) :]] == ["device", "limits"]
    with pytest.raises(ValueError, match=r"^window: left width must be 0 or more"):
        explain(*small(), window=(-1, 0), device="cpu")
    with pytest.raises(ValueError, match=r"^bias: shape \(3, 3\) does not broadcast to"):
        explain(*small(), bias=meta(3, 3), device="cpu")
    with pytest.raises(ValueError, match=r"^backend: 'cpu' cannot run this call: "):
        explain(*small(), backend="cpu", device="sm_90")


@pytest.mark.parametrize("device", ["cuda", "sm90", "sm_9", "cuda:0", "", 90, "h1000"])
def test_device_of_another_form(device):
    with pytest.raises(
        ValueError, match=r"^device: must be 'cpu', a GPU such as 'H100', or a compute capability such as 'sm_90', got "
    ):
        explain(*small(), device=device)


def test_meta_tensors_need_a_device():
    with pytest.raises(ValueError, match=r"^device: needed for tensors on the meta device"):
        explain(*small())


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        (3.0, TypeError, "expected a pair (FLOP/s, bytes/s), got 3.0"),
        ((1e12,), TypeError, "expected a pair (FLOP/s, bytes/s), got (1000000000000.0,)"),
        ((1e12, "2"), TypeError, "expected a pair (FLOP/s, bytes/s) of floats, got (1000000000000.0, '2')"),
        ((1e12, 0), ValueError, "must be positive and finite, got (1000000000000.0, 0)"),
        ((float("inf"), 1e9), ValueError, "must be positive and finite, got (inf, 1000000000.0)"),
    ],
)
def test_limits_of_another_form(limits, error, message):
    with pytest.raises(error, match=f"^{re.escape('limits: ' + message)}$"):
        explain(*small(), device="cpu", limits=limits)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (0, "0 s"), (1, "1 s"), (999, "999 s"), (1000, "1 ks"), (1234567, "1.23 Ms"), (0.00123, "1.23 ms"),
        (2.5e-6, "2.5 µs"), (3e-10, "0.3 ns"), (9.9e17, "990 Ps"), (999600, "1 Ms"),
        (1e18, "1 Es"), (2e25, "20,000 Zs"), (1e-30, "1e-21 ns"),
    ],
)  # fmt: skip
def test_quantities(x, words):
    assert quantity(x, "s") == words


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (0, "0"), (1, "1"), (17.04, "17"), (0.333333, "0.333"), (2043.6, "2,040"), (43701, "43,700"),
        (0.0307, "0.0307"), (3.07e-5, "0.0000307"), (1234567, "1,230,000"), (999.9, "1,000"), (1e-12, "1e-12"),
        (5.5e26, "5.5e26"), (1e28, "1e28"),
    ],
)  # fmt: skip
def test_numbers(x, words):
    assert number(x) == words


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (0, "0 s"), (2.05e-6, "2.05 µs"), (119, "119 s"), (180, "3 min"), (7200, "2 h"), (180000, "2.08 days"),
        (2.69e6, "31.1 days"), (4e8, "4,630 days"),
    ],
)  # fmt: skip
def test_durations(x, words):
    assert duration(x) == words


def test_shares_and_counts():
    assert [percent(x) for x in (0, 0.5, 1, 0.00308, 1.53e-5, 1e-7)] == [
        "0%", "50%", "100%", "0.308%", "0.00153%", "less than 0.001%",
    ]  # fmt: skip
    assert [count(n, "warp") for n in (0, 1, 4)] == ["0 warps", "1 warp", "4 warps"]


EXPONENT = re.compile(r"\d[eE][+-]?\d")


@pytest.mark.parametrize(
    ("shape", "keywords"),
    [
        ((4, 16, 4096, 128), {"device": "sm_90"}),
        ((4, 16, 4096, 128), {"device": "sm_90", "causal": True}),
        ((1, 1, 65536, 1), {"device": "sm_80", "window": (0, 0)}),
        ((64, 64, 65536, 128), {"device": "sm_80"}),
        ((1, 1, 1, 1), {"device": "cpu"}),
        ((4, 16, 4096, 128), {"device": "cpu", "limits": (5e9, 1e9)}),
    ],
)
def test_no_number_has_an_exponent_and_no_column_runs_into_the_next(shape, keywords):
    e = explain(*(meta(*shape),) * 3, **keywords)
    table = traffic_table(e)
    assert not [line for line in [*str(e).splitlines(), *table] if EXPONENT.search(line)]
    assert not [line for line in table if re.search(r"[A-Za-z]\d", line)]


def test_words_of_the_field():
    q, few = meta(4, 16, 4096, 128), meta(1, 1, 1, 8)
    assert explain(q, q, q, device="sm_90").tiles.endswith("persistent programs with a grid-stride loop over the tiles")
    causal = explain(q, q, q, causal=True, device="sm_90").tiles
    assert "2 consumer warpgroups, 2 stages, persistent programs with a dynamic tile scheduler" in causal
    assert "tiles of 1 query x 1 key, 1 head at a time" in explain(few, few, few, device="cpu").tiles
    one_stage = explain(*(meta(4, 16, 4096, 128, dtype=torch.float32),) * 3, device="sm_90").tiles
    assert one_stage.endswith("4 warps, 1 pipeline stage")


def test_a_mask_without_numbers_says_nothing():
    with FakeTensorMode():
        q = torch.zeros(1, 2, 8, 16)
        e = explain(q, q, q, mask=torch.ones(8, 8, dtype=torch.bool))
    assert e.mask is None
    assert "  mask: leaves" not in str(e)


def test_no_kernel_takes_a_gpu_of_amd(monkeypatch):
    """PyTorch for ROCm calls an MI250 9.0."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    q = meta(1, 2, 256, 64)
    with pytest.raises(ValueError, match=r"hopper: needs an NVIDIA GPU, this PyTorch is built for ROCm; triton: needs"):
        explain(q, q, q, device="sm_90")
