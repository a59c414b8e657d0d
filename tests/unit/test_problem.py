"""Every error of the public call, by its whole message, and what a Problem says of a call that is accepted."""

import re

import pytest
import torch

from tilewise import attention, explain, varlen_attention
from tilewise.spec.operands import BroadcastGroup, TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise.spec.tma import fits_tma

B, H, HKV, M, N, D, DV = 2, 4, 2, 5, 6, 8, 3


def tensors():
    return {"q": torch.randn(B, H, M, D), "k": torch.randn(B, HKV, N, D), "v": torch.randn(B, HKV, N, DV)}


def call(arguments):
    arguments = tensors() | arguments
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def zeros(*shape, **kwargs):
    return torch.zeros(shape, **kwargs)


BAD_TENSORS = {
    "q is a list": ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
    "k is None": ({"k": None}, TypeError, "k: expected a torch.Tensor, got NoneType"),
    "bias is a number": ({"bias": 3.0}, TypeError, "bias: expected a torch.Tensor, got float"),
    "mask is a list": ({"mask": [True]}, TypeError, "mask: expected a torch.Tensor, got list"),
    "q is sparse": (
        {"q": zeros(B, H, M, D).to_sparse()},
        TypeError,
        "q: expected a dense tensor (layout torch.strided), got layout torch.sparse_coo",
    ),
    "k is nested": (
        {"k": torch.nested.nested_tensor([zeros(HKV, N, D)] * B, layout=torch.jagged)},
        TypeError,
        "k: expected a dense tensor (layout torch.strided), got a nested tensor",
    ),
    "q has three dimensions": (
        {"q": zeros(H, M, D)},
        ValueError,
        "q: expected 4 dimensions (batch, heads, length, head_dim), got shape (4, 5, 8)",
    ),
    "v has five dimensions": (
        {"v": zeros(1, B, HKV, N, DV)},
        ValueError,
        "v: expected 4 dimensions (batch, heads, length, head_dim), got shape (1, 2, 2, 6, 3)",
    ),
    "q is of integers": (
        {"q": zeros(B, H, M, D, dtype=torch.int64)},
        TypeError,
        "q: dtype must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "k is complex": (
        {"k": zeros(B, HKV, N, D, dtype=torch.complex64)},
        TypeError,
        "k: dtype must be float16, bfloat16, float32 or float64, got torch.complex64",
    ),
    "k of another dtype": (
        {"k": zeros(B, HKV, N, D, dtype=torch.float16)},
        TypeError,
        "k: dtype must equal q's, got torch.float16 with q torch.float32",
    ),
    "v of another dtype": (
        {"v": zeros(B, HKV, N, DV, dtype=torch.float64)},
        TypeError,
        "v: dtype must equal q's, got torch.float64 with q torch.float32",
    ),
    "k on another device": (
        {"k": zeros(B, HKV, N, D, device="meta")},
        ValueError,
        "k: must be on q's device cpu, got meta",
    ),
    "v on another device": (
        {"v": zeros(B, HKV, N, DV, device="meta")},
        ValueError,
        "v: must be on q's device cpu, got meta",
    ),
    "q on another device": (
        {"q": zeros(B, H, M, D, device="meta")},
        ValueError,
        "k: must be on q's device meta, got cpu",
    ),
    "k of another batch": (
        {"k": zeros(1, HKV, N, D)},
        ValueError,
        "k: batch size must equal q's 2, got 1 (shape (1, 2, 6, 8))",
    ),
    "v of another batch": (
        {"v": zeros(3, HKV, N, DV)},
        ValueError,
        "v: batch size must equal q's 2, got 3 (shape (3, 2, 6, 3))",
    ),
    "k of another head dimension": (
        {"k": zeros(B, HKV, N, 7)},
        ValueError,
        "k: head dimension must equal q's 8, got 7",
    ),
    "v of other heads": ({"v": zeros(B, 1, N, DV)}, ValueError, "v: number of heads must equal k's 2, got 1"),
    "v of another length": ({"v": zeros(B, HKV, 1, DV)}, ValueError, "v: length must equal k's 6, got 1"),
    "heads do not divide": (
        {"q": zeros(B, 3, M, D)},
        ValueError,
        "k, v: the 2 key/value heads must divide the 3 query heads",
    ),
    "heads after the length": (
        {"q": zeros(B, 9, H, D), "k": zeros(B, 7, H, D), "v": zeros(B, 7, H, DV)},
        ValueError,
        "k, v: the 7 key/value heads must divide the 9 query heads; "
        "tensors (batch, length, heads, head_dim) are passed as q.transpose(1, 2)",
    ),
    "a bias for heads after the length": (
        {"q": zeros(B, 9, H, D), "k": zeros(B, 9, H, D), "v": zeros(B, 9, H, DV), "bias": zeros(1, H, 9, 9)},
        ValueError,
        "bias: shape (1, 4, 9, 9) does not broadcast to (2|1, 9|1, 4|1, 4|1); "
        "tensors (batch, length, heads, head_dim) are passed as q.transpose(1, 2)",
    ),
    "more key heads than query heads": (
        {"q": zeros(B, 1, M, D)},
        ValueError,
        "k, v: the 2 key/value heads must divide the 1 query heads",
    ),
    "no key heads": (
        {"k": zeros(B, 0, N, D), "v": zeros(B, 0, N, DV)},
        ValueError,
        "k, v: the 0 key/value heads must divide the 4 query heads",
    ),
    "head dimension 0": (
        {"q": zeros(B, H, M, 0), "k": zeros(B, HKV, N, 0)},
        ValueError,
        "q, k: head dimension must be 1 or more, got 0",
    ),
    "value dimension 0": (
        {"v": zeros(B, HKV, N, 0)},
        ValueError,
        "v: head dimension must be 1 or more, got 0",
    ),
}

BAD_OPERANDS = {
    "bias is sparse": (
        {"bias": zeros(M, N).to_sparse()},
        TypeError,
        "bias: expected a dense tensor (layout torch.strided), got layout torch.sparse_coo",
    ),
    "bias of integers": (
        {"bias": zeros(M, N, dtype=torch.int64)},
        TypeError,
        "bias: dtype must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "bias of bool": (
        {"bias": zeros(M, N, dtype=torch.bool)},
        TypeError,
        "bias: dtype must be float16, bfloat16, float32 or float64, got torch.bool; a bool mask is passed as mask=",
    ),
    "mask of floats": (
        {"mask": zeros(M, N)},
        TypeError,
        "mask: dtype must be bool (True = attend), got torch.float32; an additive mask is passed as bias=",
    ),
    "mask that requires grad": (
        {"mask": zeros(M, N, requires_grad=True)},
        ValueError,
        "mask: requires grad, but a mask has no gradient; pass a trainable additive mask as bias=",
    ),
    "bias on another device": (
        {"bias": zeros(M, N, device="meta")},
        ValueError,
        "bias: must be on q's device cpu, got meta",
    ),
    "mask on another device": (
        {"mask": zeros(M, N, device="meta", dtype=torch.bool)},
        ValueError,
        "mask: must be on q's device cpu, got meta",
    ),
    "bias of five dimensions": (
        {"bias": zeros(1, B, H, M, N)},
        ValueError,
        "bias: expected at most 4 dimensions, got shape (1, 2, 4, 5, 6)",
    ),
    "bias of another batch": (
        {"bias": zeros(3, H, M, N)},
        ValueError,
        "bias: shape (3, 4, 5, 6) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "bias of other heads": (
        {"bias": zeros(B, 3, M, N)},
        ValueError,
        "bias: shape (2, 3, 5, 6) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "bias of other queries": (
        {"bias": zeros(B, H, N, N)},
        ValueError,
        "bias: shape (2, 4, 6, 6) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "mask of other keys": (
        {"mask": zeros(B, H, M, M, dtype=torch.bool)},
        ValueError,
        "mask: shape (2, 4, 5, 5) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "bias of three dimensions": (
        {"bias": zeros(3, M, N)},
        ValueError,
        "bias: shape (3, 5, 6) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "bias of two dimensions": (
        {"bias": zeros(N, M)},
        ValueError,
        "bias: shape (6, 5) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "mask of one dimension": (
        {"mask": zeros(M, dtype=torch.bool)},
        ValueError,
        "mask: shape (5,) does not broadcast to (2|1, 4|2|1, 5|1, 6|1)",
    ),
    "bias of two dimensions and integers": (
        {"bias": zeros(N, M, dtype=torch.int64)},
        TypeError,
        "bias: dtype must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "bias of two dimensions, v of another length": (
        {"bias": zeros(N, M), "v": zeros(B, HKV, 1, DV)},
        ValueError,
        "v: length must equal k's 6, got 1",
    ),
    "padding mask": (
        {"mask": zeros(B, N, dtype=torch.bool)},
        ValueError,
        "mask: shape (2, 6) does not broadcast to (2|1, 4|2|1, 5|1, 6|1); a padding mask (B, N) is passed as "
        "mask[:, None, None, :]",
    ),
    "padding bias": (
        {"bias": zeros(B, N)},
        ValueError,
        "bias: shape (2, 6) does not broadcast to (2|1, 4|2|1, 5|1, 6|1); a padding mask (B, N) is passed as "
        "bias[:, None, None, :]",
    ),
    "mask of each batch element": (
        {"mask": zeros(B, M, N, dtype=torch.bool), "k": zeros(B, H, N, D), "v": zeros(B, H, N, DV)},
        ValueError,
        "mask: shape (2, 5, 6) does not broadcast to (2|1, 4|1, 5|1, 6|1); a mask (B, M, N) is passed as mask[:, None]",
    ),
    "bias without grouped heads": (
        {"k": zeros(B, H, N, D), "v": zeros(B, H, N, DV), "bias": zeros(1, 2, M, N)},
        ValueError,
        "bias: shape (1, 2, 5, 6) does not broadcast to (2|1, 4|1, 5|1, 6|1)",
    ),
}

BAD_NUMBERS = {
    "window is a number": ({"window": 3}, TypeError, "window: expected a pair (left, right) of int or None, got 3"),
    "window of three": (
        {"window": (1, 2, 3)},
        TypeError,
        "window: expected a pair (left, right) of int or None, got (1, 2, 3)",
    ),
    "window of a negative left width": (
        {"window": (-1, 0)},
        ValueError,
        "window: left width must be 0 or more (None for no limit), got -1; flash-attn's -1 is None here",
    ),
    "window of flash-attn for none": (
        {"window": (-1, -1)},
        ValueError,
        "window: left width must be 0 or more (None for no limit), got -1; flash-attn's -1 is None here",
    ),
    "window of a negative right width": (
        {"window": (None, -2)},
        ValueError,
        "window: right width must be 0 or more (None for no limit), got -2",
    ),
    "window of a float": (
        {"window": (1, 2.0)},
        TypeError,
        "window: right width must be an int or None, got 2.0",
    ),
    "window of a bool": ({"window": (True, None)}, TypeError, "window: left width must be an int or None, got True"),
    "window of a word": ({"window": ("4", None)}, TypeError, "window: left width must be an int or None, got '4'"),
    "scale 0": ({"scale": 0}, ValueError, "scale: must be positive and finite, got 0"),
    "scale negative": ({"scale": -0.5}, ValueError, "scale: must be positive and finite, got -0.5"),
    "scale infinite": ({"scale": float("inf")}, ValueError, "scale: must be positive and finite, got inf"),
    "scale not a number": ({"scale": float("nan")}, ValueError, "scale: must be positive and finite, got nan"),
    "scale a tensor": ({"scale": torch.tensor(0.5)}, TypeError, "scale: expected a float, got Tensor"),
    "scale a word": ({"scale": "0.5"}, TypeError, "scale: expected a float, got str"),
    "scale a list": ({"scale": [0.5]}, TypeError, "scale: expected a float, got list"),
    "scale complex": ({"scale": 1j}, TypeError, "scale: expected a float, got complex"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap: must be positive and finite, got 0.0"),
    "softcap negative": ({"softcap": -30.0}, ValueError, "softcap: must be positive and finite, got -30.0"),
    "softcap a bool": ({"softcap": True}, TypeError, "softcap: expected a float, got bool"),
    "dropout over 1": ({"dropout_p": 1.5}, ValueError, "dropout_p: must be a float in [0, 1], got 1.5"),
    "dropout negative": ({"dropout_p": -0.1}, ValueError, "dropout_p: must be a float in [0, 1], got -0.1"),
    "dropout a bool": ({"dropout_p": True}, TypeError, "dropout_p: expected a float, got bool"),
    "dropout None": ({"dropout_p": None}, TypeError, "dropout_p: expected a float, got NoneType"),
}

BAD_FLAGS = {
    "causal a word": ({"causal": "top-left"}, TypeError, "causal: expected a bool, got 'top-left'"),
    "causal None": ({"causal": None}, TypeError, "causal: expected a bool, got None"),
    "return_lse a number": ({"return_lse": 1}, TypeError, "return_lse: expected a bool, got 1"),
    "deterministic a word": (
        {"deterministic": "no"},
        TypeError,
        "deterministic: expected a bool or None, got 'no'",
    ),
}

UNKNOWN = "backend: must be one of hopper, triton, cpu, reference, auto or None, got "
BAD_BACKENDS = {
    "unknown": ({"backend": "cuda"}, ValueError, UNKNOWN + "'cuda'"),
    "empty name": ({"backend": ""}, ValueError, UNKNOWN + "''"),
    "the plan's own word, shouted": ({"backend": "AUTO"}, ValueError, UNKNOWN + "'AUTO'"),
    "no name": ({"backend": 3}, ValueError, UNKNOWN + "3"),
    "a list": ({"backend": ["cpu"]}, ValueError, UNKNOWN + "['cpu']"),
    "unknown, nothing to compute": ({"q": zeros(B, H, 0, D), "backend": "cuda"}, ValueError, UNKNOWN + "'cuda'"),
}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param(*case, id=name)
        for table in (BAD_TENSORS, BAD_OPERANDS, BAD_NUMBERS, BAD_FLAGS, BAD_BACKENDS)
        for name, case in table.items()
    ],
)
def test_error(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$") as raised:
        call(arguments)
    assert type(raised.value) is error  # NotImplementedError is a RuntimeError, and so on


def test_oracle_is_an_earlier_name_of_the_reference():
    q = torch.randn(1, 2, 5, 8)
    o = attention(q, q, q, causal=True, backend="oracle")
    assert torch.equal(o, attention(q, q, q, causal=True, backend="reference"))
    assert explain(q, q, q, backend="oracle").plan.backend == "reference"
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    packed = varlen_attention(*[q[0].transpose(0, 1)] * 3, offsets, offsets, 5, 5, causal=True, backend="oracle")
    assert torch.equal(packed.transpose(0, 1), o[0])


@pytest.mark.parametrize("queries", [M, 0])
def test_explicit_backend_that_declines_is_an_error(queries):
    """Also where there is nothing to compute: what is asked for is not replaced."""
    with pytest.raises(ValueError, match=r"^backend: 'triton' cannot run this call: .*cpu"):
        call({"q": zeros(B, H, queries, D), "backend": "triton"})


def test_errors_are_the_same_on_the_meta_device():
    meta = {name: x.to("meta") for name, x in tensors().items()}
    assert call(meta).shape == (B, H, M, DV)
    with pytest.raises(ValueError, match=r"^k: head dimension must equal q's 8, got 7$"):
        call(meta | {"k": zeros(B, HKV, N, 7, device="meta")})


@pytest.mark.parametrize(
    ("given", "described"),
    [
        ((), (1, 1, 1, 1)), ((N,), (1, 1, 1, N)), ((M, 1), (1, 1, M, 1)), ((H, M, N), (1, H, M, N)),
        ((HKV, 1, N), (1, HKV, 1, N)), ((B, 1, 1, N), (B, 1, 1, N)), ((B, H, M, N), (B, H, M, N)),
    ],
)  # fmt: skip
def test_smaller_shapes_broadcast_from_the_right(given, described):
    same = tensors()
    bias = torch.randn(given, requires_grad=True)
    o = call(same | {"bias": bias})
    full = call(same | {"bias": bias.detach().view(described)})
    torch.testing.assert_close(o, full, rtol=0, atol=0)
    (grad,) = torch.autograd.grad(o.sum(), bias)
    assert grad.shape == bias.shape


def test_problem_describes_the_call():
    x = tensors()
    score = Score(0.5, 20.0, Band(None, 1))
    bias, mask = zeros(B, 1, M, N, dtype=torch.bfloat16), zeros(1, HKV, 1, N, dtype=torch.bool)
    problem = Problem.of(
        x["q"], x["k"], x["v"], bias, mask, None, None, None, None, None, score, bias_grad=True, deterministic=True
    )
    assert problem == Problem(
        device="cpu", capability=None, dtype=torch.float32, batch=B, heads=H, kv_heads=HKV, queries=M, keys=N,
        head_dim=D, value_dim=DV, score=score, bias=TensorSpec(torch.bfloat16, B, 1, M, N),
        mask=TensorSpec(torch.bool, 1, HKV, 1, N), bias_grad=True, deterministic=True,
    )  # fmt: skip
    assert hash(problem) == hash(
        Problem.of(*x.values(), bias, mask, None, None, None, None, None, score, bias_grad=True, deterministic=True)
    )
    assert problem.group == 2
    assert not problem.empty
    assert problem.bias is not None
    assert problem.bias.shape == (B, 1, M, N)
    # Causal, bottom-right, five queries and six keys: query i sees i + 2 keys.
    assert problem.pairs == B * H * (2 + 3 + 4 + 5 + 6)
    assert problem.flops == 2 * problem.pairs * (D + DV)
    assert problem.backward_flops == 2 * problem.pairs * (3 * D + 2 * DV)


@pytest.mark.parametrize(("n", "period"), [(1, False), (2, 2), (3, 3), (6, True)])
def test_a_mask_that_repeats(n, period):
    """Batch element b has mask b % n, of five dimensions; a caller passes these by more leading dimensions."""
    q, k, score = zeros(6, H, M, D), zeros(6, HKV, N, D), Score(1.0, None, Band())
    described = Problem.of(
        q, k, k, None, zeros(1, n, 1, M, N, dtype=torch.bool), None, None, None, None, None, score
    )  # fmt: skip
    assert described.mask == TensorSpec(torch.bool, n, 1, M, N)
    assert (type(described.mask_period), described.mask_period) == (type(period), period)
    assert described.mask_repeats == (type(period) is int)
    for shape in ((1, 4, 1, M, N), (2, 3, 1, M, N), (1, 0, 1, M, N), (1, 2, 1, M, M)):
        with pytest.raises(ValueError, match=r"mask: shape .* does not"):
            Problem.of(q, k, k, None, zeros(*shape, dtype=torch.bool), None, None, None, None, None, score)


@pytest.mark.parametrize(("n", "batch"), [(1, False), (2, 2), (3, 3), (6, True)])
def test_a_bias_of_runs(n, batch):
    """Batch element b has bias b // (6 // n), of five dimensions; a caller passes these by more leading dimensions."""
    q, k, score = zeros(6, H, M, D), zeros(6, HKV, N, D), Score(1.0, None, Band())
    described = Problem.of(q, k, k, zeros(n, 1, 1, M, N), None, None, None, None, None, None, score)
    assert described.bias == TensorSpec(torch.float32, n, 1, M, N)
    assert (type(described.bias_batch), described.bias_batch) == (type(batch), batch)
    assert described.bias_in_runs == (type(batch) is int)
    assert described.broadcast_group(described.bias).batch == 6 // n
    for shape in ((4, 1, 1, M, N), (2, 3, 1, M, N), (0, 1, 1, M, N), (2, 1, 1, 1, N), (2, 1, 1, M, M)):
        with pytest.raises(ValueError, match=r"bias: shape .* does not"):
            Problem.of(q, k, k, zeros(*shape), None, None, None, None, None, None, score)


@pytest.mark.parametrize("axis", ["batch", "heads", "queries", "keys"])
def test_zero_sizes_are_empty_problems(axis):
    shape = {"batch": B, "heads": H, "queries": M, "keys": N} | {axis: 0}
    q = zeros(shape["batch"], shape["heads"], shape["queries"], D)
    k = zeros(shape["batch"], shape["heads"], shape["keys"], D)
    problem = Problem.of(q, k, k, *(None,) * 7, Score(1.0, None, Band()))
    assert problem.empty
    assert problem.pairs == problem.flops == 0


def with_bias(batch, heads, rows, cols, causal=False, queries=M):
    bias = TensorSpec(torch.bfloat16, batch, heads, rows, cols)
    return Problem(
        device="cpu", capability=None, dtype=torch.float32, batch=B, heads=H, kv_heads=HKV, queries=queries, keys=N,
        head_dim=D, value_dim=DV, score=Score(1.0, None, Band(hi=0 if causal else None)), bias=bias,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "cols", "axes", "itemsize"), [(M, N, "matrix", 2), (M, 1, "rows", 0), (1, N, "cols", 0), (1, 1, "one", 0)]
)
def test_axes_of_an_operand(rows, cols, axes, itemsize):
    problem = with_bias(B, H, rows, cols)
    assert problem.bias.axes == axes
    assert problem.bias.matrix_itemsize == problem.bias_itemsize == itemsize


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("heads", [1, HKV, H])
def test_who_shares_an_operand(batch, heads):
    """Counted: of the (batch element, head) pairs those that read one matrix."""
    problem = with_bias(batch, heads, M, N)
    readers = {}
    for b in range(B):
        for h in range(H):
            readers.setdefault((b % batch, h * heads // H), set()).add((b, h, h // problem.group))
    (group,) = {
        BroadcastGroup(*(len({(b, h, kv)[i] for b, h, kv in found}) for i in range(3))) for found in readers.values()
    }
    assert problem.broadcast_group(problem.bias) == group
    assert group.single == ((batch, heads) == (B, H))


@pytest.mark.parametrize(
    ("shape", "causal", "order"),
    [
        ((B, H, M, N), False, "tiles"), ((1, 1, M, N), False, "batch"), ((1, H, M, N), False, "batch"),
        ((B, 1, M, N), False, "heads"), ((B, HKV, M, N), False, "heads"), ((1, 1, 1, N), False, "tiles"),
        ((1, 1, M, 1), False, "tiles"), ((1, H, M, N), True, "longest"),
    ],
)  # fmt: skip
def test_raster_order(shape, causal, order):
    assert with_bias(*shape, causal=causal).raster_order == order


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "aligned", "fits"),
    [
        ((2, 3, 5, 64), (960, 320, 64, 1), 2, True, True),
        ((2, 3, 5, 64), (960, 320, 64, 1), 2, False, False),
        ((2, 3, 5, 64), (960, 64, 192, 1), 2, True, True),  # heads last
        ((2, 3, 5, 13), (195, 65, 13, 1), 2, True, False),  # rows of 26 bytes
        ((1, 1, 1, 13), (13, 13, 13, 1), 2, True, True),  # which nobody steps over
        ((1, 1, 5, 1), (40, 40, 8, 5), 2, True, True),
        ((1, 1, 5, 64), (320, 320, 64, 2), 2, True, False),
        ((1, 3, 5, 64), (320, 0, 64, 1), 2, True, False),  # expanded
        ((1, 3, 5, 64), (0, 320, 64, 1), 2, True, True),
        ((1, 3, 5, 64), (-960, -320, 64, 1), 2, True, False),
        ((4, 2, 8, 4), (2**38, 32, 4, 1), 4, True, False),  # 2^40 bytes
        ((1, 1, 2**31, 8), (2**34, 2**34, 8, 1), 2, True, False),  # no index of 32 bits
    ],
)
def test_what_tma_can_describe(shape, strides, itemsize, aligned, fits):
    assert fits_tma(shape, strides, itemsize, aligned) == fits
