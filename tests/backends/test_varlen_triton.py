"""Packed batches in the Triton kernels, in Triton's interpreter, by the error rule: see varlen_helpers.py."""

from __future__ import annotations

import interpreter_child
import packed_child
import pytest
import torch
from varlen_biases import BIASES
from varlen_helpers import ONES, USED, H

HALF = torch.float16


@pytest.mark.parametrize("lengths", ["SMALL", "USED"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (2, 1), "softcap": 3.0, "scale": 0.4}, {"dtype": HALF, "causal": True}],
    ids=str,
)
def test_lengths(interpreter, lengths, options):
    interpreter(run, lengths, None, options)


def test_lengths_about_those_of_tiles(interpreter):
    interpreter(run, "TILES", None, {"window": (30, 20), "dtype": HALF, "heads": (2, 1), "dims": (16, 16)})


# Of the rest nothing else is computed by the kernels.
LEFT_OUT = (
    "padded bh11", "padded 11mn", "padded 1111", "padded 11m1", "along the keys, one head",
    "along the keys, one dimension", "along the queries, one head", "ragged, shared", "ragged, groups",
    "query, start of all", "query, a start of all on the device", "query, starts of keys", "key, hidden outside",
    "all, start", "all, start of keys", "t5, starts", "alibi", "alibi, start", "several by distance",
    "several with starts", "low rank", "padded, along both",
)  # fmt: skip


@pytest.mark.parametrize("bias", [x for x in BIASES if x not in LEFT_OUT])
def test_bias(interpreter, bias):
    """By turns causal or not, with softcap or without one."""
    n = [*BIASES].index(bias)
    causal = {"causal": True} if n % 2 else {}
    interpreter(run, "USED", bias, causal if bias == "everything" or n % 3 else causal | CAP)


CAP = {"softcap": 3.0}
# Ways in which a gradient is summed; the rest are below, across tiles.
SUMMED = (
    "padded bkm1", "padded 1111", "query, clamped and reversed", "query, buckets", "all, of each sequence",
    "t5, starts", "padded, along both", "everything",
)  # fmt: skip


@pytest.mark.parametrize("bias", SUMMED)
def test_what_has_an_order_has_no_atomics(interpreter, bias):
    """With deterministic=True, whose backward once refused a sum that its forward had let pass."""
    causal = {"causal": True} if SUMMED.index(bias) % 2 else {}
    options = {"deterministic": True, **causal, **({} if bias == "everything" else CAP)}
    interpreter(interpreter_child.without_atomics, run, "USED", bias, options)


@pytest.mark.parametrize("bias", ["padded 11mn", "ragged, shared", "t5", "key, buckets and starts"])
def test_what_has_an_order_across_tiles(interpreter, bias):
    options = {"heads": (H, 2), "dims": (16, 8), "deterministic": True}
    interpreter(interpreter_child.without_atomics, run, "TILES", bias, options)


@pytest.mark.parametrize("bias", ["ragged", "t5", "query", "key"])
def test_bias_across_tiles(interpreter, bias):
    interpreter(run, "TILES", bias, {"heads": (H, 2), "dims": (16, 8)})


def test_a_bias_of_two_bytes(interpreter):
    interpreter(packed_child.reads_rows_of_two_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {"mask_shape": (USED.B, 1, USED.max_q, USED.max_k), "causal": True},
        {"mask_shape": (1, H, 1, USED.max_k)},
        {"sink_shape": (H,)},
        {"sink_shape": (H, USED.total_q), "causal": True},
        {"offsets_dtype": torch.int64, "deterministic": True, "causal": True},
    ],
    ids=str,
)
def test_options(interpreter, options):
    interpreter(run, "USED", None, options)


@pytest.mark.parametrize("bias", ["along the queries", "ragged, along the keys and alibi", "query"])
def test_one_query_of_each_sequence(interpreter, bias):
    """An axis of all queries is one of numbers of their own, though no sequence has two."""
    interpreter(run, "ONES", bias, {"sink_shape": (H, ONES.total_q), "causal": True})


def test_dropout(interpreter):
    interpreter(packed_child.same_drops, 0.3)


def test_offsets_that_are_none_write_nothing_outside(interpreter):
    interpreter(packed_child.stays_inside)


def test_rows_that_no_sequence_has(interpreter):
    interpreter(packed_child.clears_rows_that_no_sequence_has)


def test_what_no_matrix_of_a_ragged_bias_has(interpreter):
    interpreter(packed_child.clears_what_no_matrix_has)


def run(lengths, bias, options):
    packed_child.hold_named(lengths, bias, **options)
