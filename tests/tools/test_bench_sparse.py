"""Bench cases of masks by tiles: what everybody computes is one function of indices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise_tools.bench import cases, packed, providers, reference, results, run, sparse
from tilewise_tools.bench.cases import Case

CPU = torch.device("cpu")
SMALL = Case("small", 1, 2, 2, 300, 300, 16, dtype="float32", mask="blocks 25")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sparse.NAMES)
@pytest.mark.parametrize("size", [300, 1024])
def test_tiles_are_the_function(name, size, causal):
    i, j = torch.arange(size)[:, None], torch.arange(size)
    seen = sparse.seen(name, size, size, CPU)(i, j)
    found = sparse.tile_mask(name, size, size, CPU)
    assert torch.equal(found.dense()[0, 0], seen)
    assert 0 < seen.sum() < size * size
    assert seen.diagonal().all()
    assert sparse.operand(name).kind == ("bits" if found.tensors.begins is None else "intervals")
    if causal and name != "documents":
        with pytest.raises(ValueError, match=r"^causal: "):
            sparse.pairs(name, size, size, causal)
        return
    assert sparse.pairs(name, size, size, causal) == (seen & (j <= i) if causal else seen).sum()


def test_a_tree_is_its_packed_sequences():
    """A prompt of 4,096 tokens and 8 responses of 1,024; the copies have as many tokens, and see 2.27 times as much."""
    for head_dim in (64, 128):
        case, copies = cases.tree(head_dim), packed.rollouts_case(head_dim)
        prompt, responses = sparse.tree(case.keys)
        assert (prompt, responses) == (4096, [1024] * 8)
        assert copies.lengths == tuple(prompt + n for n in responses)
        assert (copies.heads, copies.head_dim, copies.causal) == (case.heads, case.head_dim, True)
        pairs = sparse.pairs("tree", case.queries, case.keys, causal=False)
        assert copies.work("forward").flops / (4 * head_dim * case.heads * pairs) == pytest.approx(2.27, abs=0.005)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_kept_is_the_definition(causal):
    """Of each head its own, one row by sorting, and the same by the mask."""
    own = sparse.scores(2, 300)
    distance = torch.arange(300) - torch.arange(300)[:, None]
    seen = sparse.kept("kept 40", own[0], distance, causal)
    assert torch.equal(sparse.new_mask("kept 40", own, 300, causal).dense()[0], seen)
    assert sparse.pairs("kept 40", 300, 300, causal) == seen[0].sum() == seen[1].sum()
    best = own[0, 1, 0, : 201 if causal else 300].sort(descending=True).indices[:40]
    assert seen[1, 200].nonzero().flatten().tolist() == sorted(best.tolist())
    assert not torch.equal(seen[0], seen[1])
    assert sparse.keep("documents") is None


@pytest.mark.parametrize(
    "more",
    [{"mask": "kept 40"}, {"mask": "kept 40", "causal": True}, {"mask": None, "causal": True, "window": 40}],
    ids=str,
)
def test_what_a_model_masks_is_right(more):
    """A mask that is made in the call, and a window."""
    case = replace(SMALL, **more)
    x = case.inputs(CPU)
    right = reference.exact(case, x)
    ours = next(p for p in providers.providers(CPU) if p.name == "tilewise-cpu")
    steps = ours.prepare(case, x)
    assert steps.renew is None
    o = steps.forward()
    found = dict(zip(right, (o, *steps.backward(o)), strict=True))
    assert not reference.wrong(reference.errors(found, right), case)
    for other in (
        replace(case, mask=None, window=None),
        replace(case, window=41) if case.window else replace(case, mask="kept 41"),
    ):
        assert reference.wrong(reference.errors(found, reference.exact(other, x)), case)


@pytest.mark.parametrize("name", sparse.NAMES)
def test_tilewise_is_right(name):
    case = replace(SMALL, mask=name, causal=name == "documents", bias=(1, 1, 300, 300))
    x = case.inputs(CPU)
    right = reference.exact(case, x)
    ours = next(p for p in providers.providers(CPU) if p.name == "tilewise-cpu")
    assert ours.declines(case) is None
    steps = ours.prepare(case, x)
    o = steps.forward()
    found = dict(zip(right, (o, *steps.backward(o)), strict=True))
    assert not reference.wrong(reference.errors(found, right), case)
    whole = reference.exact(replace(case, mask=None), x)
    assert reference.wrong(reference.errors(found, whole), case)


def test_who_takes_no_tiles_says_so():
    case = replace(SMALL, dtype="bfloat16")
    said = {p.name: p.declines(case) for p in providers.providers(CPU) if p.operator == "attention"}
    assert said["flex"] is None
    assert {said[name] for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-math", "fa4", "cudnn-graph")} == {
        "takes no list of visible tiles"
    }


def test_who_takes_windows_and_dynamic_masks():
    said = [{p.name: p.declines(replace(SMALL, dtype="bfloat16", causal=True, **more)) for p in providers.providers(CPU)
             if p.operator == "attention"} for more in ({"mask": None, "window": 40}, {"mask": "kept 40"})]  # fmt: skip
    assert said[0]["flex"] is said[0]["fa4"] is None
    assert said[0]["sdpa-flash"] == said[0]["cudnn-graph"] == "takes no window"
    assert said[1]["flex"] == "has no mask of the best keys"
    assert said[1]["fa4"] == "takes no list of visible tiles"


def test_work_is_that_of_visible_pairs():
    case = cases.masked("documents", 32768, causal=True)
    found = results.Results(
        commit="", changed_files=[], date="", device={"type": "cuda"}, versions={}, settings={}, unavailable={},
        calibration=results.Calibration({}, 1.0), cases=[case],
    )  # fmt: skip
    pairs = sparse.pairs("documents", 32768, 32768, True)
    assert found.work(case, "forward").flops == 4 * 128 * 16 * pairs
    assert found.work(case, "backward").flops == 10 * 128 * 16 * pairs
    assert found.work(case, "forward").bytes == found.work(replace(case, mask=None), "forward").bytes


def test_lists_of_a_new_mask_are_timed_apart():
    """By calls with a copy of the mask, which has to be read again."""
    mask = sparse.tile_mask("blocks 25", 512, 512, CPU)
    copied = sparse.copied(mask)
    assert copied.tensors.tiles is not mask.tensors.tiles
    assert torch.equal(copied.dense(), mask.dense())
    called = []
    clock = SimpleNamespace(time=lambda step: SimpleNamespace(median_s=float(len([step(), *called]))))
    seconds = run._new_lists(lambda: called.append("both"), lambda: called.append("renew"), clock)
    assert called == ["both", "renew", "both"]
    assert seconds == 2
