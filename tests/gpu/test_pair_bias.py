"""Hopper's kernels of the pair bias of structure models: the forward's tiles of K, V and the bias come together, and
three batch elements of a program of the backward share the bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Case, check, run, tensors

import tilewise
from tilewise import clear_caches
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.backends.gluon.sm90.forward.small_heads import small_heads_kernel

PAIR = Case(B=45, H=4, M=768, N=768, D=32, bias="1hmn", dtype=torch.bfloat16)

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"B": 43},  # the last program of a head has one
        {"B": 44, "M": 833, "N": 776},
        {"B": 60, "Hkv": 2, "N": 1160},
        {"H": 8, "bias": "11mn"},
        {"D": 24, "Dv": 16},
        {"dtype": torch.float16, "lse": False},
        {"bias_hides": True, "planted": float("nan")},
        {"sink": "h"},
        {"mask": "b11n"},
        {"mask": "b11n", "B": 43, "Hkv": 4, "H": 8, "N": 776},
        {"mask": "111n", "M": 833, "N": 800, "dtype": torch.float16, "planted": float("nan")},
        {"mask": "b11n", "bias_hides": True, "planted": float("nan")},
        {"mask": "b11n", "blind": True},
        {"B": 128, "M": 130, "N": 128},  # sums of dQ of all heads have a place
        {"B": 64, "M": 239, "N": 255, "mask": "b11n"},
        {"B": 35, "H": 3, "M": 300, "N": 500},  # but for some that are no whole group
    ],
    ids=str,
)
def test_batch_elements_side_by_side(hopper_backwards, terms):
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert [made.config.elements for made in hopper_backwards] == [3]


@pytest.mark.parametrize("terms", [{"deterministic": True}, {"B": 16}, {"N": 120}, {"mask": "b1mn"}], ids=str)
def test_others_have_a_sum_each(hopper_backwards, terms):
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert [made.config.elements for made in hopper_backwards] == [1]


@pytest.mark.parametrize(
    ("terms", "elements"),
    [
        ({"N": 767, "M": 515}, 3),
        ({"N": 761, "layout": "heads_last"}, 3),
        ({"layout": "heads_last", "dtype": torch.float16}, 3),
        ({"B": 7, "M": 127, "N": 129}, 1),
        ({"B": 8, "M": 256, "N": 255, "mask": "b11n"}, 1),
        ({"B": 16, "M": 128, "N": 131, "deterministic": True}, 1),
        ({"B": 12, "M": 129, "N": 127, "D": 64}, 1),
        ({"B": 3, "H": 8, "Hkv": 2, "M": 300, "N": 239, "D": 128, "bias": "11mn", "causal": True}, 1),
        ({"B": 5, "M": 239, "N": 799, "bias_dtype": torch.float32, "softcap": 5.0}, 1),
        ({"B": 9, "M": 96, "N": 70, "bias_hides": True, "planted": float("nan")}, 1),
    ],
    ids=str,
)
def test_a_bias_that_is_copied(hopper_backwards, terms, elements):
    """Rows of any length, and heads last, of a bias that many share."""
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert [made.config.elements for made in hopper_backwards] == [elements]


@pytest.mark.parametrize("shown", [64, 300, 767])
def test_work_tiles_that_are_hidden(hopper_backwards, shown):
    """Of some batch elements all keys, of others all but the first few, as padding hides them."""
    x = tensors(PAIR, "cuda")
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, x.bias)]
    length = torch.where(torch.arange(45, device="cuda") % 9 < 3, 0, shown + torch.arange(45, device="cuda"))
    mask = torch.arange(768, device="cuda") < length[:, None, None, None]
    q, k, v, bias = leaves
    do = torch.randn_like(q)
    found = torch.autograd.grad(tilewise.attention(q, k, v, bias=bias, mask=mask, backend="hopper"), leaves, do)
    assert [made.config.elements for made in hopper_backwards] == [3]

    def plain(dtype):
        q, k, v, bias = (t.detach().to(dtype).requires_grad_() for t in leaves)
        s = (q @ k.mT * 32**-0.5 + bias).masked_fill(~mask, -float("inf"))
        o = s.softmax(-1).nan_to_num(0.0) @ v
        return torch.autograd.grad(o, (q, k, v, bias), do.to(dtype))

    for one, right, rough in zip(found, plain(torch.float64), plain(torch.bfloat16), strict=True):
        right, rough = right.nan_to_num(0.0), rough.nan_to_num(0.0)
        assert (one - right).abs().max() <= 2 * (rough - right).abs().max() + 1e-5
    hidden = length == 0
    assert all(not one[hidden].any() for one in found[:3])


def test_dbias_has_the_same_bits_where_that_is_asked_for():
    case = replace(PAIR, deterministic=True)
    x = tensors(case, "cuda")
    first = run(case, "hopper", "cuda", x)
    for _ in range(5):
        again = run(case, "hopper", "cuda", x)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("dq", "dk", "dv", "dbias"))


@pytest.fixture
def forwards(monkeypatch):
    """The kernels of the forwards that are made; what was prepared before is forgotten."""
    clear_caches()
    made, init = [], launch.Launch.__init__

    def spy(self, kernel, *arguments, **options):
        made.append(kernel)
        init(self, kernel, *arguments, **options)

    monkeypatch.setattr(launch.Launch, "__init__", spy)
    return made


SMALL = replace(PAIR, B=5, H=3, M=200, N=320)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"N": 64},
        {"N": 128, "M": 65},
        {"B": 300, "M": 256, "N": 192},  # programs have several tiles of queries
        {"B": 256, "H": 4, "M": 768, "N": 768},
        {"bias": "bhmn", "Hkv": 1},
        {"bias": "11mn", "bias_dtype": torch.float16, "D": 17, "Dv": 24, "layout": "padded"},
        {"dtype": torch.float16, "scale": 1.0},
        {"scale": 2.0, "mask": "b11n"},
        {"bias_hides": True, "planted": float("nan")},
        {"bias_hides": True, "blind": True},
        {"N": 319, "layout": "padded"},
        {"B": 256, "M": 768, "N": 761, "layout": "padded"},
        {"mask": "b11n"},
        {"mask": "111n", "N": 3},
        {"mask": "b11n", "N": 193, "layout": "padded", "dtype": torch.float16},
        {"mask": "b11n", "bias": "bhmn", "Hkv": 1, "bias_hides": True},
        {"mask": "b11n", "B": 256, "H": 4, "M": 768, "N": 768},
        {"mask": "b11n", "planted": float("nan")},
        {"mask": "b11n", "blind": True},
    ],
    ids=str,
)
def test_tiles_that_come_together(forwards, terms):
    check(replace(SMALL, **terms), "hopper", "cuda")
    assert small_heads_kernel in forwards


@pytest.mark.parametrize("terms", [{"mask": "b1mn"}, {"mask": "bh1n"}, {"causal": True}, {"sink": "h"}], ids=str)
def test_tiles_that_come_apart(forwards, terms):
    check(replace(SMALL, **terms), "hopper", "cuda")
    assert small_heads_kernel not in forwards


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.bfloat16).min, -float("inf")])
@pytest.mark.parametrize("keys", [slice(0, 64), slice(256, 320), slice(100, 320)], ids=str)
def test_numbers_that_hide_keys(least, keys):
    """Of whole tiles, the first that is visited and others; of one row all keys."""
    x = tensors(SMALL, "cuda")
    q, k, v, bias = x.q.detach(), x.k.detach(), x.v.detach(), x.bias.detach().clone()
    bias[:, :, 10:150, keys] = least
    bias[:, :, 7] = least
    o, lse = tilewise.attention(q, k, v, bias=bias, return_lse=True, backend="hopper")
    s = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()
    rows = torch.arange(q.shape[2], device="cuda") != 7
    right = s.softmax(-1) @ v.double()
    rough = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
    allowed = 2 * (rough[:, :, rows] - right[:, :, rows]).abs().max() + 1e-5
    assert (o[:, :, rows] - right[:, :, rows]).abs().max() <= allowed
    assert (lse[:, :, rows] - s.logsumexp(-1)[:, :, rows]).abs().max() < 1e-3
    if least == -float("inf"):
        assert not o[:, :, 7].any()
    else:
        mean = s[:, :, 7:8].float().softmax(-1) @ v.float()  # of float32, where the scores of such keys are alike
        assert (o[:, :, 7:8].float() - mean).abs().max() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", [4.0, -4.0, 9.5, -9.5, 30.0, -30.0, -200.0])
def test_scores_that_grow_from_tile_to_tile(dtype, step):
    """By less and by more than what P and O bear without another maximum."""
    x = tensors(replace(SMALL, dtype=dtype, mask="b11n"), "cuda")
    q, k, v, mask = x.q.detach(), x.k.detach(), x.v.detach(), x.mask
    bias = (x.bias.detach().float() + step * (torch.arange(320, device="cuda") // 64)).to(dtype)
    o, lse = tilewise.attention(q, k, v, bias=bias, mask=mask, return_lse=True, backend="hopper")
    s = (q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()).masked_fill(~mask, -float("inf"))
    right = s.softmax(-1) @ v.double()
    rough = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(~mask, -float("inf")).softmax(-1) @ v
    assert (o - right).abs().max() <= 2 * (rough - right).abs().max() + 1e-5
    assert (lse - s.logsumexp(-1)).abs().max() < 1e-3


def test_a_row_that_sees_the_least_number_after_hidden_tiles():
    """Its keys are alike: O is the mean of their values."""
    x = tensors(SMALL, "cuda")
    q, k, v, bias = x.q.detach(), x.k.detach(), x.v.detach(), x.bias.detach().clone()
    bias[:, :, 7] = -float("inf")
    bias[:, :, 7, 64:256] = torch.finfo(torch.bfloat16).min
    o = tilewise.attention(q, k, v, bias=bias, backend="hopper")
    mean = v[:, :, 64:256].float().mean(2).repeat_interleave(q.shape[1] // k.shape[1], 1)
    assert (o[:, :, 7].float() - mean).abs().max() < 0.01
