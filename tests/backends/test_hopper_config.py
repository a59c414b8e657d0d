"""Which scales the Hopper forward multiplies Q by: those that round nothing. How dQ leaves the backward, what its
registers hold, and which work its programs have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tilewise.spec.operands import TensorSpec, TileOperand
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.common import config as tables
from tilewise.backends.gluon.sm90.common.config import backward_config, forward_config
from tilewise.backends.gluon.sm90.forward import launch

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook"


def sections(page):
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", (NOTEBOOK / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("table", ["FORWARD_TILES", "FORWARD_FIELDS", "BACKWARD_TILES", "BACKWARD_FIELDS"])
def test_sources_of_rules_are_sections(table):
    sources = [rule.source.partition(".md#") for rule in getattr(tables, table)]
    named = [(f"{page}.md", section) for page, mark, section in sources if mark]
    assert len(named) >= len(sources) / 2
    assert [(page, section) for page, section in named if section not in sections(page)] == []


@pytest.mark.parametrize(
    ("table", "widths"),
    [(tables.FORWARD_TILES, tables.WIDTHS), (tables.BACKWARD_TILES, tables.BACKWARD_WIDTHS)],
    ids=["forward", "backward"],
)
def test_each_width_has_tiles_without_a_condition(table, widths):
    assert {width for rule in table if rule.when is tables._always for width in rule.widths} == set(widths)


def of(scale, dtype, **changes):
    return Problem(**{
        "device": "cuda", "capability": (9, 0), "dtype": dtype, "batch": 4, "heads": 8, "kv_heads": 8, "queries": 512,
        "keys": 512, "head_dim": 64, "value_dim": 64, "score": Score(scale, None, Band()), "bias_grad": False,
        "deterministic": False, "bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512), **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("scale", "dtype", "changes", "goes"),
    [
        (1 / 8, torch.bfloat16, {}, True),
        (2**-16, torch.bfloat16, {}, True),
        (1.0, torch.bfloat16, {}, True),
        (1 / 8, torch.float16, {}, False),  # an element of 1e-6 would lose bits
        (2.0, torch.bfloat16, {}, False),  # a large one would overflow
        (2**-17, torch.bfloat16, {}, False),
        (64**-0.5 * 1.5, torch.bfloat16, {}, False),
        (128**-0.5, torch.bfloat16, {}, False),
        (1 / 8, torch.bfloat16, {"bias": None}, False),  # there is nothing to save
        (1 / 8, torch.bfloat16, {"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 512)}, False),
        (1 / 16, torch.bfloat16, {"head_dim": 256, "value_dim": 256}, False),  # wgmma reads Q from shared memory
    ],
    ids=str,
)
def test_a_scale_goes_into_q_where_that_is_exact(scale, dtype, changes, goes):
    problem = of(scale, dtype, **changes)
    config = forward_config(problem)
    assert config.scale_in_q == goes
    assert launch._compiled(problem, config, False).SCALE_IN_Q.value == goes
    capped = Problem(**{**vars(problem), "score": Score(scale, 5.0, Band())})
    assert not forward_config(capped).scale_in_q


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_goes_into_q_is_exact(dtype):
    """Each scale that is taken, times each element down to the bound of `_scales_exactly`."""
    scales = [digits * 2.0**power for power in range(-40, 20) for digits in (1, 1.25)]
    taken = [scale for scale in scales if forward_config(of(scale, dtype)).scale_in_q]
    assert bool(taken) == (dtype == torch.bfloat16)
    q = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    q = q[q.isfinite() & (q >= 2**-110)]
    for scale in taken:
        assert torch.equal((q.float() * scale).to(dtype).double(), q.double() * scale)


@pytest.mark.parametrize("band", [Band(), Band(None, 3)], ids=["full", "causal"])
@pytest.mark.parametrize("bias", [None, (4, 8, 512, 512), (1, 8, 512, 512), (4, 1, 1, 512)], ids=str)
@pytest.mark.parametrize("dim", [32, 40, 64, 128, 192, 256])
def test_an_order_needs_tma(dim, bias, band):
    """Additions to dQ from registers have no order: none with deterministic=True. Else by what was measured."""
    bias = None if bias is None else TensorSpec(torch.bfloat16, *bias)
    changes = {"head_dim": dim, "value_dim": dim, "bias": bias, "score": Score(0.1, None, band), "bias_grad": True}
    assert backward_config(of(0.1, torch.bfloat16, **changes, deterministic=True)).dq_by_tma
    slower = dim in (40, 64, 128)
    assert backward_config(of(0.1, torch.bfloat16, **changes)).dq_by_tma == slower


@pytest.mark.parametrize(
    ("changes", "subtiles", "in_registers"),
    [
        ({"bias": None}, 2, "k"),
        ({"bias": None, "score": Score(0.1, None, Band(None, 3)), "deterministic": True}, 2, "k"),
        ({"bias": TensorSpec(torch.bfloat16, 4, 8, 512, 512), "score": Score(0.1, None, Band(None, 3))}, 2, ""),
        ({"bias": None, "score": Score(0.1, None, Band(None, 3))}, 2, "k"),
        ({"bias": None, "score": Score(0.1, None, Band(-400, 3))}, 1, "kv"),
        ({"bias": None, "score": Score(0.1, 5.0, Band(None, 3))}, 1, "kv"),
        ({"bias": None, "score": Score(0.1, None, Band(None, 3)), "queries": 4096, "keys": 4096}, 2, "k"),
        ({"bias": None, "mask": TensorSpec(torch.bool, 4, 1, 512, 512)}, 1, "kv"),
        ({"bias": None, "score": Score(0.1, 5.0, Band())}, 1, "kv"),
        ({"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 512)}, 1, "kv"),
        ({"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 512), "deterministic": True}, 1, "k"),
        ({"bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512)}, 2, ""),
        ({"bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512), "score": Score(0.1, 5.0, Band())}, 1, ""),
        ({"bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512), "batch": 16, "bias_grad": True}, 2, ""),
        ({"bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512), "batch": 32, "bias_grad": True}, 1, ""),
        ({"bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512), "batch": 16, "bias_grad": False}, 2, ""),
        ({"bias": TensorSpec(torch.float32, 4, 8, 512, 512)}, 1, ""),
        ({"bias": None, "head_dim": 128, "value_dim": 128}, 1, ""),
    ],
    ids=str,
)
def test_subtiles_and_operands_in_registers(changes, subtiles, in_registers):
    """At 64 dimensions, each where registers and shared memory have room for it."""
    config = backward_config(of(0.1, torch.bfloat16, **changes))
    assert (config.m_subtiles, config.block_m) == (subtiles, 64 * subtiles)
    assert (config.k_in_registers, config.v_in_registers) == ("k" in in_registers, "v" in in_registers)


CAUSAL = {"score": Score(0.1, None, Band(None, 0))}
WINDOW = {"score": Score(0.1, None, Band(-511, 0))}


@pytest.mark.parametrize(
    ("dim", "length", "changes", "dynamic"),
    [
        (32, 4096, {}, True),
        (32, 4096, CAUSAL, True),
        (64, 4096, {}, True),
        (64, 4096, CAUSAL, True),
        (64, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 8, 4096, 4096)}, True),
        (64, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 8, 4096, 4096), **CAUSAL}, False),
        (64, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 4096)}, True),
        (128, 4096, {}, True),
        (128, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 1, 4096, 1)}, True),
        (128, 1024, {"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 1024)}, False),
        (256, 4096, CAUSAL, True),
        (256, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 4096)}, False),
        (256, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 8, 4096, 4096)}, True),
        (256, 4096, {"bias": TensorSpec(torch.bfloat16, 4, 8, 4096, 4096), "score": Score(0.1, 5.0, Band())}, False),
    ],
    ids=str,
)
def test_which_programs_of_the_backward_stay(dim, length, changes, dynamic):
    sizes = {"head_dim": dim, "value_dim": dim, "queries": length, "keys": length}
    config = backward_config(of(0.1, torch.bfloat16, **{"bias": None, **sizes, **changes}))
    assert config.dynamic == dynamic
    tile = changes.get("bias") is not None and changes["bias"].rows > 1
    assert config.key_stages == config.value_stages == (2 if dim <= 64 and not tile else 1)  # where there is room


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        ({"score": Score(0.1, None, Band(-511, 0))}, True),
        ({"totals": (8192, 8192)}, True),
        ({"totals": (8192, 8192), **CAUSAL}, True),
        ({"totals": (8192, 8192), "queries": 100, "keys": 100}, False),  # dQ is no sum, and has no memory of its own
        ({"totals": (8192, 8192), "bias": TensorSpec(torch.bfloat16, 1, 1, 1, 8192)}, False),
        ({}, False),
        (CAUSAL, False),
    ],
    ids=str,
)
def test_k_of_the_next_work_tile_comes_ahead(changes, ahead):
    """At 128 dimensions, where work tiles are short."""
    sizes = {"head_dim": 128, "value_dim": 128, "queries": 4096, "keys": 4096}
    config = backward_config(of(0.1, torch.bfloat16, **{"bias": None, **sizes, **changes}))
    assert (config.key_stages, config.value_stages) == ((2, 1) if ahead else (1, 1))


@pytest.mark.parametrize(
    ("dim", "length", "changes", "turns", "later"),
    [
        (64, 1024, {}, 32, True), (64, 4096, {}, 16, True), (64, 16384, {}, 4, True), (128, 1024, {}, 16, True),
        (128, 4096, {}, 8, True), (128, 4096, {"kv_heads": 2}, 2, True), (256, 4096, {}, 4, True),
        (256, 16384, {}, 1, False), (256, 10**6, {}, 1, False), (64, 4096, CAUSAL, 16, False),
        (128, 16384, CAUSAL, 8, False), (128, 16384, WINDOW, 8, False), (64, 16384, WINDOW, 8, False),
    ],
    ids=str,
)  # fmt: skip
def test_heads_are_swizzled_where_order_matters(dim, length, changes, turns, later):
    """As many as the L2 cache holds; without an order eight under a band, and no two without, nor in a window."""
    sizes = {"head_dim": dim, "value_dim": dim, "queries": length, "keys": length, "bias": None}
    problem = of(0.1, torch.bfloat16, **sizes, **changes)
    config = backward_config(dataclasses.replace(problem, deterministic=True))
    assert (config.head_swizzle, config.deferred_release) == (turns, later)
    config = backward_config(problem)
    swizzled = changes == CAUSAL or (changes == WINDOW and dim == 64)
    assert (config.head_swizzle, config.deferred_release) == (8 if swizzled else 1, False)


BAND, MASK = Score(0.1, None, Band(None, 0)), TensorSpec(torch.bool, 4, 1, 512, 512)


@pytest.mark.parametrize(
    ("dim", "changes", "by_thread", "apart", "over"),
    [
        (64, {}, True, False, False),
        (128, {}, False, False, False),
        (256, {}, True, False, False),
        (64, {"score": BAND}, True, True, False),  # two warpgroups, as many queries as keys
        (64, {"score": BAND, "queries": 4096, "keys": 4096}, True, True, True),  # three
        (128, {"score": BAND}, True, True, False),
        (256, {"score": BAND}, True, True, True),
        (64, {"score": Score(0.1, None, Band(-9, 0))}, True, False, False),
        (64, {"mask": MASK, "score": BAND}, True, False, False),
        (64, {"mask": TensorSpec(torch.bool, 4, 1, 1, 512)}, False, False, False),
        (128, {"mask": MASK}, False, False, False),
        (64, {"bias": TensorSpec(torch.bfloat16, 4, 8, 512, 512)}, False, False, False),
        (64, {"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 512)}, True, False, False),
        (64, {"bias": TensorSpec(torch.bfloat16, 4, 1, 1, 512), "mask": MASK}, True, False, False),
        (32, {"bias": TensorSpec(torch.bfloat16, 1, 8, 512, 512), "score": BAND}, False, True, True),
    ],
    ids=str,
)
def test_sums_and_loops_of_the_forward(dim, changes, by_thread, apart, over):
    """As was measured. Sums that stay with their threads are for the lazy rescaling alone, whose vote they share."""
    config = forward_config(of(0.1, torch.bfloat16, **{"bias": None, "head_dim": dim, "value_dim": dim, **changes}))
    assert (config.sums_by_thread, config.peeled, config.skips_hidden) == (by_thread, apart, over)
    assert config.lazy or not by_thread
    assert config.q_in_registers == (
        dim <= 128 and config.warpgroups == 2 and config.programs == 1 and not ("mask" in changes and by_thread)
    )


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(-400, 3)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("length", [512, 4096])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_a_bias_without_tiles_has_the_forward_of_none(dim, length, band, mask):
    """Of keys or of queries: it takes neither shared memory that counts nor registers."""
    changes = {"head_dim": dim, "value_dim": dim, "queries": length, "keys": length, "score": Score(0.1, None, band),
               "mask": None if mask is None else dataclasses.replace(mask, rows=length, cols=length)}  # fmt: skip
    none, keys, queries = (
        forward_config(of(0.1, torch.bfloat16, bias=bias, **changes))
        for bias in (None, TensorSpec(torch.bfloat16, 4, 1, 1, length), TensorSpec(torch.float32, 1, 8, length, 1))
    )
    assert queries == none
    assert keys == dataclasses.replace(none, bias_first=True)
    assert none.block_n == (64 if dim == 256 else 128)


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({}, True),
        ({"keys": 129}, False),
        ({"keys": 1, "queries": 4096, "kv_heads": 2}, True),
        (CAUSAL, True),
        ({"deterministic": True}, True),
        ({"head_dim": 128, "value_dim": 128}, True),
        ({"head_dim": 32, "value_dim": 32}, False),
        ({"head_dim": 256, "value_dim": 256}, False),
        ({"score": Score(0.1, 5.0, Band())}, False),  # whose tiles have 64 keys
        ({"score": Score(0.1, 5.0, Band()), "keys": 64}, True),
        ({"bias": TensorSpec(torch.bfloat16, 4, 8, 128, 128)}, True),
        ({"bias": TensorSpec(torch.bfloat16, 1, 8, 128, 128), "keys": 64}, False),  # shared by the batch
        ({"mask": TensorSpec(torch.bool, 1, 1, 128, 128)}, False),
    ],
    ids=str,
)
def test_dq_is_no_sum_where_all_keys_are_one_tile(changes, stored):
    problem = of(0.1, torch.bfloat16, **{"bias": None, "queries": 128, "keys": 128, **changes})
    config = backward_config(problem)
    assert config.dq_stored == stored
    if stored:  # nobody waits for zeros, of more heads than run at once
        problem = dataclasses.replace(problem, batch=60)
        sizes, _ = backward_launch._sizes(problem, config, torch.device("meta"))
        assert sizes.zeroed == problem.batch * problem.kv_heads


def one_bias(length, kind):
    """Sixteen heads that share a bias, beside a mask by tiles or a bool one."""
    bias, mask = (TensorSpec(dtype, 1, 1, length, length) for dtype in (torch.bfloat16, torch.bool))
    tiles = TileOperand(128, 128, kind) if kind else None
    return {"batch": 1, "heads": 16, "kv_heads": 16, "bias": bias, "mask": mask, "tile_mask": tiles}


@pytest.mark.parametrize(
    ("length", "head_dim", "changes", "order"),
    [
        (256, 32, {}, "batch"),  # K and V of a head, of all batch elements, stay in the L2 cache
        (768, 32, {}, "tiles"),
        (2048, 32, {}, "batch"),  # the bias does not
        (768, 32, {"mask": TensorSpec(torch.bool, 768, 1, 1, 768)}, "tiles"),
        (768, 32, {"bias": TensorSpec(torch.bfloat16, 768, 4, 768, 768)}, "tiles"),
        (768, 32, {"bias": TensorSpec(torch.bfloat16, 768, 1, 768, 768)}, "heads"),
        (768, 32, CAUSAL, "longest"),
        (16384, 128, one_bias(16384, "bits"), "longest"),  # few heads at once, whose keys and values fit
        (16384, 128, one_bias(16384, "intervals"), "heads"),
        (16384, 128, one_bias(16384, ""), "heads"),
        (1024, 128, one_bias(1024, "bits"), "heads"),
    ],
)
def test_order_of_the_forward(length, head_dim, changes, order):
    bias = TensorSpec(torch.bfloat16, 1, 4, length, length)
    sizes = {"batch": length, "heads": 4, "kv_heads": 4, "queries": length, "keys": length}
    sizes |= {"head_dim": head_dim, "value_dim": head_dim}
    problem = of(0.1, torch.bfloat16, **{"bias": bias, **sizes, **changes})
    assert launch.raster(problem).at(length, length) == order
    assert order == problem.raster_order or (problem.raster_order, order) in (("batch", "tiles"), ("heads", "longest"))


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({}, 3),
        ({"batch": 32, "keys": 1024}, 3),
        ({"batch": 31, "keys": 8192}, 1),
        ({"batch": 32, "keys": 256}, 3),
        ({"batch": 32, "keys": 192}, 1),  # too few work tiles
        ({"queries": 128, "keys": 128}, 3),
        ({"queries": 127}, 1),
        ({"keys": 120}, 1),
        ({"head_dim": 24, "value_dim": 24}, 3),
        ({"head_dim": 28, "value_dim": 28}, 1),  # rows of dQ are stored eight elements at a time
        ({"bias_grad": False}, 1),
        ({"deterministic": True}, 1),
        ({"mask": TensorSpec(torch.bool, 768, 1, 1, 768)}, 3),
        ({"mask": TensorSpec(torch.bool, 768, 1, 768, 768)}, 1),
        ({"mask": TensorSpec(torch.bool, 768, 4, 1, 768)}, 1),
        ({"head_dim": 64, "value_dim": 64}, 1),
        ({"score": Score(0.1, None, Band(None, 0))}, 1),
        ({"score": Score(0.1, 5.0, Band())}, 1),
    ],
    ids=str,
)
def test_batch_elements_side_by_side(changes, elements):
    sizes = {"batch": 768, "heads": 4, "kv_heads": 4, "queries": 768, "keys": 768, "head_dim": 32, "value_dim": 32}
    sizes |= {"bias_grad": True, **changes}
    problem = of(0.1, torch.bfloat16, bias=TensorSpec(torch.bfloat16, 1, 4, sizes["queries"], sizes["keys"]))
    problem = dataclasses.replace(problem, **sizes)
    assert backward_config(problem).elements == elements
    for bias in (
        TensorSpec(torch.float32, 1, 4, sizes["queries"], sizes["keys"]),
        TensorSpec(torch.bfloat16, sizes["batch"], 4, sizes["queries"], sizes["keys"]),
        TensorSpec(torch.bfloat16, 1, 4, 1, sizes["keys"]),
    ):
        assert backward_config(dataclasses.replace(problem, bias=bias)).elements == 1


@pytest.mark.parametrize(
    ("batch", "changes", "parts"),
    [
        (768, {}, {"statistics of rows": 18, "dq_accum": 10.125, "float32 dBias": 9}),  # three elements
        (768, {"deterministic": True}, {"dq_accum": 288, "dS buffer": 76.5, "float32 dBias": 9}),
        (768, {"mask": TensorSpec(torch.bool, 768, 1, 1, 768)}, {"dq_accum": 10.125, "float32 dBias": 9}),
        (768, {"mask": TensorSpec(torch.bool, 768, 1, 768, 768)}, {"dq_accum": 288, "dS buffer": 76.5}),
        (4, {}, {"dq_accum": 1.5, "dS buffer": 0, "float32 dBias": 0}),
        (4, {"deterministic": True}, {"dq_accum": 1.5, "dS buffer": 18, "float32 dBias": 0}),
        (8, {"bias": TensorSpec(torch.bfloat16, 8, 4, 768, 768)}, {"dq_accum": 3, "dS buffer": 0, "float32 dBias": 0}),
    ],
    ids=str,
)
def test_working_memory_is_what_is_allocated(batch, changes, parts):
    sizes = {"batch": batch, "heads": 4, "kv_heads": 4, "queries": 768, "keys": 768, "head_dim": 32, "value_dim": 32}
    bias = TensorSpec(torch.bfloat16, 1, 4, 768, 768)
    problem = of(0.1, torch.bfloat16, **{"bias": bias, **sizes, "bias_grad": True, **changes})

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, bias, mask = meta(batch, 4, 768, 32), meta(*problem.bias.shape), problem.mask and meta(*problem.mask.shape)
    outputs = Outputs(q, meta(batch, 4, 768, dtype=torch.float32))
    made = backward_launch.HopperBackward(
        problem, Inputs(q, q, q, bias, mask), outputs, Outputs(q, None), Needs(True, True, True, True, False)
    )
    found = backward_launch.working_memory(problem, q.device)
    stats, _, rows_of_sum = made.sizes
    assert found["statistics of rows"] == 4 * stats
    assert found["dq_accum"] == 4 * backward_launch.DQ_COLS.value * rows_of_sum
    assert found.get("dS buffer", 0) == (made.empty_ds_buffer().nbytes if made.empty_ds_buffer else 0)
    dbias = made.empty_dbias(device="meta")
    assert found.get("float32 dBias", 0) == (dbias.nbytes if dbias.dtype == torch.float32 else 0)
    assert {name: found.get(name, 0) / 2**20 for name in parts} == parts
    if made.elements:  # zeroed by the preprocess, behind the counters
        shape, strides, first = made.dbias_layout
        assert (shape, strides) == (dbias.shape, dbias.stride())
        assert first > 2 * batch * 4
        assert first % 32 == 0
        assert made.sizes[1] == first + dbias.untyped_storage().nbytes() // 4
        assert (
            made.after.programs == rows_of_sum // 64 // 2 + 4 * 768 // 8 * 768 // 128
        )  # half of the pipeline, and dBias
    else:
        assert made.dbias_layout is None


@pytest.mark.parametrize(("n", "own"), [(23200, True), (23168, True), (23000, False)])
def test_a_dbias_with_more_elements_than_an_int32_counts_has_zeros_of_its_own(n, own):
    """So has one at whose end the count of the last program of the preprocess would begin anew below zero."""
    bias = TensorSpec(torch.bfloat16, 1, 4, n, n)
    sizes = {"batch": 32, "heads": 4, "kv_heads": 4, "queries": n, "keys": n, "head_dim": 32, "value_dim": 32}
    problem = of(0.1, torch.bfloat16, bias=bias, bias_grad=True, **sizes)
    q, bias = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((32, 4, n, 32), bias.shape))
    outputs = Outputs(q, torch.empty(32, 4, n, device="meta"))
    made = backward_launch.HopperBackward(
        problem, Inputs(q, q, q, bias, None), outputs, Outputs(q, None), Needs(True, True, True, True, False)
    )
    assert made.elements
    assert (made.dbias_layout is None) == own
    assert made.sizes[1] + 128 * made.before.programs < 2**31
    assert made.empty_dbias(device="meta").dtype == torch.float32
