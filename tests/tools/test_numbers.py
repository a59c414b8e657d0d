"""Numbers of every public function: larger ones than anything has room for, numpy's, and tensors of no dimensions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tilewise
from tilewise import TileMask, attention, dynamic_mask, explain, explain_varlen, varlen_attention, varlen_attn
from tilewise.bias import (
    RelativeBias,
    alibi,
    alibi_slopes,
    log_buckets,
    relative_logits,
    swin_bias,
    t5_bias,
    t5_buckets,
)
from tilewise.integrations import flash_attn
from tilewise.integrations.evoformer import triangle_attention, window_pair_attention

Q = torch.linspace(-1, 1, 256).view(1, 2, 8, 16)
P = Q[0].transpose(0, 1)
OFFSETS = torch.tensor([0, 3, 8])
zeros = torch.zeros


def dense(**options):
    return attention(Q, Q, Q, **options)


def varlen(max_seqlen_q=5, max_seqlen_k=5, **options):
    return varlen_attention(P, P, P, OFFSETS, OFFSETS, max_seqlen_q, max_seqlen_k, **options)


def torch_varlen(max_q=5, max_k=5, **options):
    return varlen_attn(P, P, P, OFFSETS, OFFSETS, max_q, max_k, **options)


def flash_varlen(max_seqlen_q=5, max_seqlen_k=5, **options):
    return flash_attn.flash_attn_varlen_func(P, P, P, OFFSETS, OFFSETS, max_seqlen_q, max_seqlen_k, **options)


def flash_kvpacked(max_seqlen_q=5, max_seqlen_k=5, **options):
    kv = torch.stack([P, P], 1)
    return flash_attn.flash_attn_varlen_kvpacked_func(P, kv, OFFSETS, OFFSETS, max_seqlen_q, max_seqlen_k, **options)


def flash_qkvpacked(max_seqlen=5, **options):
    return flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([P, P, P], 1), OFFSETS, max_seqlen, **options)


def with_term(term, *tensors, call=dense, **usual):
    return lambda **changes: call(bias=term(*tensors, **usual | changes))


def with_mask(mask, *tensors, **usual):
    return lambda **changes: dense(mask=mask(*tensors, **usual | changes))


WINDOW, STARTS, FLOATS = {"window": "pair"}, {"query_start": "int", "key_start": "int"}, {"scale": "float"}
BLOCK = {"block": "int"}
SIZES = {"queries": 8, "keys": 8}
EVERY = {
    "attention": (dense, WINDOW | FLOATS | {"softcap": "float", "dropout_p": "float"}),
    "scaled_dot_product_attention": (lambda **x: tilewise.scaled_dot_product_attention(Q, Q, Q, **x), FLOATS),
    "varlen_attention": (
        varlen, WINDOW | FLOATS | {"softcap": "float", "max_seqlen_q": "int", "max_seqlen_k": "int"}
    ),
    "varlen_attn": (torch_varlen, FLOATS | {"window_size": "pair", "max_q": "int", "max_k": "int"}),
    "explain": (lambda **x: explain(Q, Q, Q, **x), WINDOW | FLOATS | {"limits": "pair"}),
    "explain_varlen": (
        lambda max_seqlen_q=5, **x: explain_varlen(P, P, P, OFFSETS, OFFSETS, max_seqlen_q, 5, **x),
        WINDOW | FLOATS | {"max_seqlen_q": "int"},
    ),
    "RelativeBias": (with_term(RelativeBias, zeros(1, 2, 8, 5), lo=0), STARTS | {"lo": "int"}),
    "RelativeBias of keys": (with_term(RelativeBias, zeros(1, 2, 8, 5), lo=0, on="key"), STARTS | {"lo": "int"}),
    "RelativeBias for all": (with_term(RelativeBias, zeros(1, 2, 1, 5), lo=0, outside="clamp"), STARTS | {"lo": "int"}),
    "RelativeBias of a packed batch": (
        with_term(RelativeBias, zeros(8, 2, 5), lo=0, call=varlen), STARTS | {"lo": "int"}
    ),
    "relative_logits": (with_term(relative_logits, zeros(1, 2, 8, 4), zeros(4, 5), lo=0), STARTS | {"lo": "int"}),
    "t5_bias": (with_term(t5_bias, zeros(8, 2), True), STARTS | {"max_distance": "int"}),
    "t5_bias of a packed batch": (
        with_term(t5_bias, zeros(8, 2), False, call=varlen), STARTS | {"max_distance": "int"}
    ),
    "alibi": (with_term(alibi, zeros(2)), STARTS),
    "alibi of a packed batch": (with_term(alibi, zeros(2), "signed", call=varlen), STARTS),
    "t5_buckets": (
        lambda **x: t5_buckets(torch.arange(5), **{"buckets": 8, "bidirectional": True} | x),
        {"buckets": "int", "max_distance": "int"},
    ),
    "log_buckets": (
        lambda **x: log_buckets(torch.arange(5), **{"buckets": 8, "max_distance": 20} | x),
        {"buckets": "int", "max_distance": "int"},
    ),
    "alibi_slopes": (alibi_slopes, {"heads": "int"}),
    "swin_bias": (lambda window: swin_bias(zeros(9, 2), window), {"window": "pair"}),
    "dynamic_mask": (with_mask(dynamic_mask, zeros(1, 1, 1, 8), keep=3), BLOCK | {"keep": "int", "queries": "int"}),
    "dynamic_mask, causal": (
        with_mask(dynamic_mask, zeros(1, 1, 1, 8), keep=3, causal=True), {"keep": "int", "queries": "int"}
    ),
    "dynamic_mask of rows": (with_mask(dynamic_mask, zeros(1, 1, 8, 8), keep=3), {"keep": "int"}),
    "sliding_window": (
        with_mask(TileMask.sliding_window, window=(1, 1), **SIZES),
        WINDOW | BLOCK | {"queries": "int", "keys": "int", "global_tokens": "int"},
    ),
    "dilated": (
        with_mask(TileMask.dilated, window=2, dilation=2, **SIZES),
        BLOCK | {"queries": "int", "keys": "int", "window": "int", "dilation": "int"},
    ),
    "strided": (with_mask(TileMask.strided, stride=2, **SIZES), BLOCK | {"queries": "int", "stride": "int"}),
    "from_mask_mod": (
        with_mask(TileMask.from_mask_mod, lambda b, h, i, j: i >= j, **SIZES),
        BLOCK | {"queries": "int", "keys": "int", "batch": "int", "heads": "int"},
    ),
    "from_intervals": (
        with_mask(TileMask.from_intervals, zeros(1, 1, 8).long(), zeros(1, 1, 8).long(), queries=8),
        BLOCK | {"queries": "int"},
    ),
    "prefix_lm": (with_mask(TileMask.prefix_lm, torch.tensor([2]), size=8), BLOCK | {"size": "int"}),
    "flash_attn_func": (
        lambda **x: flash_attn.flash_attn_func(P[None], P[None], P[None], **x),
        {"window_size": "pair", "softmax_scale": "float", "softcap": "float"},
    ),
    "flash_attn_varlen_func": (
        flash_varlen, {"window_size": "pair", "max_seqlen_q": "int", "max_seqlen_k": "int", "softmax_scale": "float"}
    ),
    "flash_attn_varlen_kvpacked_func": (flash_kvpacked, {"max_seqlen_q": "int", "max_seqlen_k": "int"}),
    "flash_attn_varlen_qkvpacked_func": (flash_qkvpacked, {"window_size": "pair", "max_seqlen": "int"}),
    "window_pair_attention": (
        lambda **x: window_pair_attention(Q, Q, Q, None, **x), FLOATS | {"q_block": "int", "k_block": "int"}
    ),
    "triangle_attention": (
        lambda **x: triangle_attention(*[zeros(1, 4, 2, 4, 8)] * 3, zeros(1, 1, 2, 4, 4), **x), FLOATS
    ),
    "matmul": (lambda **x: tilewise.matmul(Q, Q.mT, c=zeros(8, 8), **x), {"alpha": "float", "beta": "float"}),
    "softmax": (lambda **x: tilewise.softmax(Q, **x), FLOATS | {"dim": "int"}),
}  # fmt: skip
OTHERS = {"max_q": "max_seqlen_q", "max_k": "max_seqlen_k"}  # varlen_attn's errors have the names of varlen_attention


@pytest.mark.parametrize("name", EVERY)
def test_what_nothing_has_room_for_is_a_named_error(name):
    """2**70 and more, or 10**400, which is no float: never an OverflowError, or memory that nobody has."""
    function, arguments = EVERY[name]
    for argument, kind in arguments.items():
        for value in (10**400,) if kind == "float" else (2**70, -(2**70), 10**400, 2**63):
            given = ((value, 1), (1, value)) if kind == "pair" else (value,)
            for x in given:
                if argument == "limits" and value < 10**400:
                    continue
                if value < 0 and argument == "window_size":  # no limit, or an error as of any number below -1
                    continue
                words = OTHERS.get(argument, argument)
                with pytest.raises(ValueError, match=rf"^([A-Z]\w+\.)?{words}: "):
                    function(**{argument: x})


def as_tensor(x):
    return torch.tensor(x, dtype=torch.int32)


@pytest.mark.parametrize("kind", [np.int32, np.int64, as_tensor, torch.tensor], ids=lambda kind: kind.__name__)
def test_integers_of_other_kinds(kind):
    """Of flash_attn's functions and those of packed batches: as ints."""
    lengths = {"max_seqlen_q": kind(5), "max_seqlen_k": kind(5)}
    sides = [(kind(2), kind(0)), [kind(2), 0], kind([2, 0])]  # a number, a list of them, and an array
    for function in (varlen, explain_varlen_lines):
        for window in sides:
            assert same(function(window=window, **lengths), function(window=(2, 0)))
        assert same(function(window=(kind(2), None), **lengths), function(window=(2, None)))
    for function in (flash_varlen, flash_kvpacked):
        for window in sides:
            assert same(function(window_size=window, **lengths), function(window_size=(2, 0)))
    for window in sides:
        assert same(flash_qkvpacked(kind(5), window_size=window), flash_qkvpacked(window_size=(2, 0)))
        assert same(torch_varlen(kind(5), kind(5), window_size=window), torch_varlen(window_size=(2, 0)))
        x = P[None]
        found, expected = (flash_attn.flash_attn_func(x, x, x, window_size=pair) for pair in (window, (2, 0)))
        assert same(found, expected)


def explain_varlen_lines(max_seqlen_q=5, max_seqlen_k=5, **options):
    return str(explain_varlen(P, P, P, OFFSETS, OFFSETS, max_seqlen_q, max_seqlen_k, **options))


def same(x, y):
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


WRONG = [5.0, np.float64(5), torch.tensor(5.0), torch.tensor(True), True, torch.tensor([5])]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_no_integer(wrong):
    for function, names in (
        (varlen, ("max_seqlen_q", "max_seqlen_k")), (flash_varlen, ("max_seqlen_q", "max_seqlen_k")),
        (flash_qkvpacked, ("max_seqlen",)),
    ):  # fmt: skip
        for name in names:
            with pytest.raises(TypeError, match=f"^{name}: expected an int, got "):
                function(**{name: wrong})
    for function, name in ((varlen, "window"), (torch_varlen, "window_size"), (flash_varlen, "window_size")):
        for pair in ((wrong, 0), (1, wrong), torch.tensor([1.0, 0.0]), torch.tensor([1, 0, 2]), torch.tensor(1), "ab"):
            with pytest.raises(TypeError, match=f"^{name}: "):
                function(**{name: pair})


def test_a_call_keeps_no_tensor_of_its_numbers():
    """The next call with other numbers in the same tensors is another call."""
    window, longest = torch.tensor([2, 0]), torch.tensor(5)
    for left in (2, 1, 0):
        window[0] = left
        found = varlen(longest, longest, window=(window[0], window[1]))
        assert torch.equal(found, varlen(window=(left, 0)))


def test_flex_attentions_request_is_taken():
    o, lse = torch_varlen(return_aux=AuxRequest(lse=True))
    assert (o.shape, lse.shape) == (P.shape, (2, 8))
    assert math.isfinite(float(lse.sum()))
    _, aux = torch_varlen(return_aux=AuxRequest(lse=True, max_scores=True))
    torch.testing.assert_close(aux.lse, lse)  # another kernel computes it
    assert (aux.max_scores <= lse).all()
