"""The bench's packed batches: the same lengths everywhere, right answers by sequence, work, peers, rows, results."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise, product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

import tilewise
from tilewise_tools.bench import cases, packed, packed_peers, providers, reference, report, results, run
from tilewise_tools.bench.packed import BIASES, PackedCase
from tilewise_tools.bench.results import Calibration, ResultsError

CPU = torch.device("cpu")
PLAIN = PackedCase("varlen", "few", 2, 16, dtype="float32")
FEW = [
    replace(PLAIN, family=f"varlen {bias} {causal}", bias=bias, causal=causal)
    for bias, causal in product((None, *BIASES), (False, True))
]


def block_diagonal(case, x):
    """The bias of all tokens at once, (H, total, total), -inf where they do not see each other; differentiable."""
    total = case.keys
    whole = torch.full((case.heads, total, total), -math.inf, dtype=x.do.dtype)
    for (begin, end), start in zip(pairwise(x.cu.tolist()), x.pairs.tolist(), strict=False):
        n = end - begin
        for i, j in product(range(n), range(n)):
            if case.causal and j > i:
                continue
            value = torch.zeros(())
            if case.bias == "keys":
                value = x.named["bias"][0, begin + j]
            elif case.bias == "relative" and -255 <= j - i <= 0:
                value = x.named["bias"][begin + i, :, 255 + j - i]
            elif case.bias == "ragged":
                value = x.named["bias"][:, start + i * n + j]
            whole[:, begin + i, begin + j] = value
    return whole


def by_autograd(case, x, bias=None):
    bias = block_diagonal(case, x) if bias is None else bias
    q, k, v = (t.transpose(0, 1)[None] for t in x.leaves[:3])
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])[0].transpose(0, 1)
    return {"o": o, **dict(zip([f"d{n}" for n in x.names], torch.autograd.grad(o, x.leaves, x.do), strict=True))}


def found_by(case, x, steps):
    for _ in range(2):  # as often as the clock asks for it
        o = steps.forward()
        found = steps.plain((o, *steps.backward(o)) if case.backward else (o,))
    return dict(zip(("o", *(f"d{name}" for name in x.names)), found, strict=False))


def is_right(case, prepare):
    x = case.inputs(CPU)
    right = reference.exact_packed(case, x)
    return not reference.wrong(reference.errors_packed(case, found_by(case, x, prepare(case, x)), right), case)


def provider(name):
    return next(p for p in providers.providers(CPU) if p.name == name)


# Lengths


def test_lengths_are_the_same_on_every_machine():
    lengths = {name: packed.lengths_of(name) for name in packed.BATCHES}
    assert {name: (len(x), sum(x), min(x), max(x), sum(n * n for n in x)) for name, x in lengths.items()} == {
        "lognormal": (52, 32768, 44, 3800, 44291184),
        "uneven": (68, 16457, 67, 511, 5198843),
        "short": (4096, 147233, 8, 64, 6387705),
        "rollouts": (8, 40960, 5120, 5120, 209715200),
        "few": (5, 53, 1, 33, 1263),
    }
    assert lengths["lognormal"][:8] == (221, 642, 316, 172, 418, 301, 160, 967)
    assert lengths["uneven"][:8] == (467, 459, 72, 76, 364, 296, 258, 121)
    assert lengths["short"][:8] == (21, 39, 29, 42, 43, 11, 8, 55)


@pytest.mark.parametrize(("count", "total", "longest"), [(52, 32768, 3800), (10, 1000, 400), (7, 300, 90)])
def test_lognormal_lengths_have_their_sum_and_longest(count, total, longest):
    found = packed.lognormal(count, total, longest)
    assert (len(found), sum(found), max(found)) == (count, total, longest)
    assert min(found) >= 1


def test_logarithms_of_lognormal_lengths_are_normal():
    logs = torch.tensor(packed.lengths_of("lognormal"), dtype=torch.float64).log().sort().values
    z = torch.special.ndtri((torch.arange(52, dtype=torch.float64) + 0.5) / 52)
    assert torch.corrcoef(torch.stack([logs, z]))[0, 1] > 0.9999


# The list


def test_the_cases_of_a_gpu():
    chosen = {case.name: case for case in run.chosen_cases(run.RunOptions("cuda", cases=("varlen",)))}
    lognormal = [f"varlen D{d} {mask}" for d in (128, 64) for mask in ("causal", "full")]
    assert list(chosen) == [
        "varlen D128 causal T32768",
        "varlen D128 causal bias along keys T32768",
        "varlen D128 causal bias by distance T32768",
        "varlen ragged bias D32 T16457",
        "varlen short D64 full T147233",
        *(f"varlen rollouts D{d} causal T40960" for d in (128, 64)),
        *(f"{x} T32768" for x in lognormal[1:]),
        *(f"{x} dense at the mean length S630" for x in lognormal),
    ]
    without = {case.name: case.without_bias for case in chosen.values() if isinstance(case, PackedCase)}
    assert {name: other for name, other in without.items() if other} == dict.fromkeys(
        list(chosen)[1:3], next(iter(chosen))
    )
    dense = chosen["varlen D64 full dense at the mean length S630"]
    assert (dense.batch, dense.heads, dense.queries, dense.head_dim, dense.causal) == (52, 32, 630, 64, False)
    assert chosen["varlen short D64 full T147233"].host
    # what a run takes that names none: these at its end, and none of them with --quick
    assert [case.name for case in cases.cases("cuda")][-len(chosen) :] == list(chosen)
    for device in ("cuda", "cpu"):
        assert not [case.name for case in cases.cases(device, quick=True) if case.name.startswith("varlen")]


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_backends_are_asked_about_the_call_that_is_made(case):
    x = case.inputs(CPU)
    arguments = (*x.leaves[:3], x.cu, x.cu, case.longest, case.longest)
    explained = tilewise.explain_varlen(*arguments, bias=case.term(x), causal=case.causal)
    assert case.problem("cpu", None) == explained.problem
    for which in results.PASSES:
        found, expected = case.work(which), getattr(explained, which)
        shifts = 8 * 5 if case.bias == "relative" else 0  # where the distances of each sequence begin, which it makes
        assert (found.flops, found.bytes + shifts) == (expected.flops, expected.bytes), which


def test_work_by_hand():
    pairs = {False: 25 + 1 + 33 * 33 + 4 + 144, True: 15 + 1 + 33 * 17 + 3 + 78}
    for causal in (False, True):
        case = replace(PLAIN, causal=causal)
        assert case.work("forward").flops == 2 * 4 * 16 * pairs[causal]
        assert case.work("backward").flops == 2 * 10 * 16 * pairs[causal]


# The right answer


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_the_right_answer_is_attention(case):
    """Of one sequence of all tokens, in float64, whose bias lets nobody see another sequence."""
    case = replace(case, dtype="float64")
    x = case.inputs(CPU)
    exact, expected = reference.exact_packed(case, x), by_autograd(case, x)
    assert set(exact) == set(expected) == {"o", "dq", "dk", "dv", *(["dbias"] if case.bias else [])}
    for name, value in expected.items():
        torch.testing.assert_close(exact[name], value.detach(), msg=name)


def test_a_forward_alone_has_o_alone():
    case = replace(PLAIN, backward=False)
    assert set(reference.exact_packed(case, case.inputs(CPU))) == {"o"}


@pytest.mark.parametrize(
    ("bias", "name"), [("keys", "o"), ("keys", "dq"), ("keys", "dv"), *((bias, "dbias") for bias in BIASES)]
)
def test_one_short_sequence_that_is_wrong_is_seen(bias, name):
    """Of 32,768 tokens 44 are less than a norm of everything notices."""
    case = PackedCase("varlen", "uneven" if bias == "ragged" else "lognormal", 2, 4, bias=bias)
    b = case.lengths.index(min(case.lengths))
    shapes = {"o": (case.keys, 2, 4), "dq": (case.keys, 2, 4), "dv": (case.keys, 2, 4), "dbias": case.bias_shape}
    right = {key: torch.randn(shape) for key, shape in shapes.items()}
    assert set(reference.errors_packed(case, right, right).values()) == {0.0}
    found = {key: x.clone() for key, x in right.items()}
    rows = case.sequences[b]
    if name == "dbias" and bias != "relative":
        place = (slice(None), case.matrices[b] if bias == "ragged" else rows)
    else:
        place = (rows, 1)
    found[name][place] = 0
    off = torch.linalg.vector_norm(found[name] - right[name]) / torch.linalg.vector_norm(right[name])
    assert off < 0.05
    errors = reference.errors_packed(case, found, right)
    assert errors.pop(name) > 0.5
    assert set(errors.values()) == {0.0}


def test_where_all_cancels_an_error_is_measured_by_the_others():
    """dQ of one token that sees itself alone is 0; rounding there is no error, and NaN is one."""
    x = PLAIN.inputs(CPU)
    right = reference.exact_packed(PLAIN, x)
    found = {key: value.clone() for key, value in right.items()}
    assert right["dq"][5].abs().max() < 1e-12
    found["dq"][5] += 1e-8
    assert 0 < reference.errors_packed(PLAIN, found, right)["dq"] < 1e-6
    found["dq"][5] += 0.1
    assert reference.errors_packed(PLAIN, found, right)["dq"] > 0.01
    found["dq"][5] = math.nan
    errors = reference.errors_packed(PLAIN, found, right)
    assert reference.wrong(errors, PLAIN) == "dq is off by nan of its norm"
    with pytest.raises(ValueError, match=r"^the shape is \(52, 2, 16\), not \(53, 2, 16\)$"):
        reference.errors_packed(PLAIN, found | {"o": right["o"][1:]}, right)


# Runs


def test_a_run_measures_tilewise_and_the_padded_batch(no_calibration, tmp_path):
    todo = [replace(FEW[0], host=True), *FEW[1:]]
    found = run.run(run.RunOptions("cpu", quick=True), run.PlainProgress(), todo=todo)
    rows = {(row.case, row.provider): row for row in found.rows}
    for case in todo:
        row = rows[case.name, "tilewise-varlen-cpu"]
        assert row.outcome == "measured", row
        assert set(row.errors) == {"o", "dq", "dk", "dv", *(["dbias"] if case.bias else [])}
        assert row.forward.median_s > 0
        assert row.backward.median_s > 0
        assert (row.host_s is not None) == case.host
        assert found.flops(row, "forward") == pytest.approx(case.work("forward").flops / row.forward.median_s)
        padded = rows[case.name, "padded"]
        assert padded.outcome == ("measured" if case.bias == "ragged" else "declined"), padded
        if case.bias == "ragged":
            assert found.best_other(row, "forward") is padded
            assert set(padded.errors) == set(row.errors)
    assert found.unavailable["fa4-varlen"] == found.unavailable["torch-varlen"] == "measured on CUDA devices only"
    assert found.unavailable["flex-varlen"] == "has no backward on the CPU"
    assert run.ours_are_right(found)
    results.write(found, tmp_path / "x.json")
    assert results.read(tmp_path / "x.json") == found
    assert f"| {todo[-1].name} | varlen-cpu |" in report.markdown(found, "x.json", [])
    assert "| case | tilewise-varlen-cpu | padded |" in report.markdown(found, "x.json", [])
    document = json.loads((tmp_path / "x.json").read_text())
    document["cases"][0]["batch"] = "many"
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=r"damaged results: there is no packed batch 'many' with bias None$"):
        results.read(tmp_path / "x.json")


@pytest.mark.parametrize("fault", ["one sequence", "causal", "bias"])
def test_a_wrong_answer_is_not_timed(fault, no_calibration, monkeypatch):
    attend = tilewise.varlen_attention

    def wrong(q, k, v, cu_q, cu_k, max_q, max_k, *, bias, causal, backend):
        if fault == "one sequence":  # the last two are taken for one
            cu_q = cu_k = torch.cat([cu_q[:-2], cu_q[-1:]])
        if fault == "bias":
            bias = 1.01 * bias
        return attend(
            q, k, v, cu_q, cu_k, max_q, max_k, bias=bias, causal=causal != (fault == "causal"), backend=backend
        )

    monkeypatch.setattr(tilewise, "varlen_attention", wrong, raising=False)
    case = replace(PLAIN, bias="keys", causal=True)
    found = run.run(run.RunOptions("cpu", providers=("tilewise-varlen-cpu",)), run.PlainProgress(), todo=[case])
    assert [(row.outcome, row.forward) for row in found.rows] == [("failed", None)]
    assert found.rows[0].reason.startswith("wrong: ")
    assert not run.ours_are_right(found)


# Peers


def test_who_takes_a_bias():
    takes = {
        case.bias: {p.name for p in providers.providers(CPU) if p.operator == "varlen" and not p.declines(case)}
        for case in FEW
    }
    everybody = {"tilewise-varlen-cpu", "flex-varlen"}
    assert takes.pop("ragged") == everybody | {"padded"}
    assert takes.pop(None) == everybody | {"fa4-varlen", "torch-varlen"}
    assert takes == dict.fromkeys(("keys", "relative"), everybody)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("returns", ["o", "o and lse"])
def test_flash_attention_4_gets_the_packed_batch(causal, returns, monkeypatch):
    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert max_seqlen_q == max_seqlen_k == 33
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        o = one_by_one(q, k, v, cu_seqlens_q, causal)
        return o if returns == "o" else (o, None)

    cute = ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    assert is_right(replace(PLAIN, causal=causal), provider("fa4-varlen").prepare)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("signature", ["window", "is_causal"])
def test_pytorchs_function_gets_the_packed_batch(causal, signature, monkeypatch):
    def with_window(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert window_size in ((-1, -1), (-1, 0))
        assert max_q == max_k == 33
        return one_by_one(query, key, value, cu_seq_q, window_size == (-1, 0))

    def with_flag(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        return one_by_one(query, key, value, cu_seq_q, is_causal)

    function = with_window if signature == "window" else with_flag
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = function
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    assert is_right(replace(PLAIN, causal=causal), provider("torch-varlen").prepare)


def one_by_one(q, k, v, cu, causal):
    parts = []
    for begin, end in pairwise(cu.tolist()):
        own = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*own, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_flex_uncompiled(case, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **{**options, "backend": "eager"}))
    assert is_right(replace(case, backward=False), provider("flex-varlen").prepare)  # no backward on the CPU


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 16, 53, 64])
def test_the_block_mask_is_flexs_own(block, causal, monkeypatch):
    monkeypatch.setattr(packed_peers, "BLOCK", block)
    case = replace(PLAIN, causal=causal)
    document = packed_peers.documents(case, case.inputs(CPU))
    assert document.bincount().tolist() == list(case.lengths)
    ours = packed_peers.block_mask(case, document)
    other = create_block_mask(ours.mask_mod, None, None, 53, 53, device="cpu", BLOCK_SIZE=block)
    assert torch.equal(ours.to_dense(), other.to_dense())
    assert ours.seq_lengths == other.seq_lengths
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(other, name)), name
    for which in ("kv", "q"):
        for kind in ("", "full_"):
            counts = getattr(ours, f"{kind}{which}_num_blocks")
            a, b = (getattr(x, f"{kind}{which}_indices") for x in (ours, other))
            listed = torch.arange(a.shape[-1]) < counts[..., None]
            assert torch.equal(a[listed], b[listed]), kind + which


@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_batch_is_the_packed_one(causal):
    case = replace(PLAIN, bias="ragged", causal=causal)
    assert is_right(case, provider("padded").prepare)
    full = packed_peers.padded(case, case.inputs(CPU))
    assert [x.shape for x in full.leaves] == 3 * [(5, 2, 33, 16)] + [(5, 2, 33, 33)]
    assert full.mask.sum((1, 2, 3)).tolist() == [5, 1, 33, 2, 12]


def test_a_bias_is_compared_with_none():
    """By the fastest of ours without it, forward and backward; of what was not measured nothing is said."""
    chosen = [packed.lognormal_case(128, causal=True), *packed.biased()]
    rows = [
        results.Row(chosen[n].name, f"tilewise-varlen-{backend}", "measured", forward=time(f), backward=time(b),
                    first_call_s=1.0, memory_bytes=1)
        for n, backend, f, b in [(0, "hopper", 2.0, 6.0), (0, "triton", 3.0, 5.0), (1, "hopper", 4.0, 8.0),
                                 (2, "hopper", 2.5, None), (3, "triton", 1.0, 1.0)]
    ]  # fmt: skip
    rows.append(results.Row(chosen[1].name, "tilewise-varlen-triton", "failed"))
    rows.append(results.Row(chosen[1].name, "fa4-varlen", "declined"))
    found = results.Results(
        "", [], "", {"type": "cpu", "name": "none"}, {}, {}, {}, Calibration({"bfloat16": 1e12}, 1e12), chosen, rows
    )
    lines = [x for x in report.terminal(found).splitlines() if x.startswith("share of the speed without bias: ")]
    assert [x.partition(": ")[2] for x in lines] == [
        f"tilewise-varlen-hopper forward 0.50, backward 0.62 ({chosen[1].name})",
        f"tilewise-varlen-hopper forward 0.80 ({chosen[2].name})",
    ]


def time(seconds):
    return None if seconds is None else results.Timing(seconds, seconds, seconds, 1)
