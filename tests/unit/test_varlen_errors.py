"""What a packed batch refuses, by name: arguments, terms of a dense call, DTensors, ONNX."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from varlen_helpers import DV, HALF, HKV, D, H, Lengths, call, ints, tensors

from tilewise import attention, varlen_attention
from tilewise.bias import RaggedBias, RelativeBias, alibi, t5_bias
from tilewise.operator import custom_op as operator

SQUARE = Lengths((4, 6, 1), (4, 6, 1))


def arguments(**changes):
    """Of a good call, `SQUARE`, with changes."""
    (q, k, v), _, _ = tensors(SQUARE)
    cu_q, cu_k, max_q, max_k = SQUARE.arguments()
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q,
             "max_seqlen_k": max_k}  # fmt: skip
    return named | changes


VALUES = torch.zeros(11, H, 3)
BAD = {
    "four dimensions": ({"q": torch.zeros(1, 11, H, D)}, ValueError,
        r"^q: expected 3 dimensions \(total length, heads, head_dim\), got shape \(1, 11, 4, 8\)"),
    "no tensor": ({"q": None}, TypeError, "^q: expected a torch.Tensor, got NoneType"),
    "dtype of q": ({"q": torch.zeros(11, H, D, dtype=torch.int32)}, TypeError, "^q: dtype must be float16"),
    "dtype of k": ({"k": torch.zeros(11, HKV, D, dtype=HALF)}, TypeError, "^k: dtype must equal q's, got"),
    "device of v": ({"v": torch.zeros(11, HKV, DV, device="meta")}, ValueError, "^v: must be on q's device cpu"),
    "head dimension": ({"k": torch.zeros(11, HKV, 9)}, ValueError, "^k: head dimension must equal q's 8, got 9"),
    "heads": ({"k": torch.zeros(11, 3, D), "v": torch.zeros(11, 3, DV)}, ValueError, "^k, v: the 3 key/value heads"),
    "lengths of v": ({"v": torch.zeros(12, HKV, DV)}, ValueError, "^v: length must equal k's 11, got 12"),
    "narrow": ({"q": torch.zeros(11, H, 0)}, ValueError, "^q: head dimension must be 1 or more, got 0"),
    "no offsets": ({"cu_seqlens_q": None}, TypeError, "^cu_seqlens_q: expected a torch.Tensor, got NoneType"),
    "a list": ({"cu_seqlens_k": [0, 4, 10, 11]}, TypeError, "^cu_seqlens_k: expected a torch.Tensor, got list"),
    "dtype of offsets": ({"cu_seqlens_q": torch.zeros(4)}, TypeError, "^cu_seqlens_q: dtype must be int32 or int64"),
    "device of offsets": ({"cu_seqlens_k": ints(0, 4, 10, 11).to("meta")}, ValueError,
        "^cu_seqlens_k: must be on q's device cpu, got meta"),
    "offsets of two dimensions": ({"cu_seqlens_q": ints(0, 4)[None]}, ValueError,
        r"^cu_seqlens_q: expected \(B \+ 1,\)"),
    "no number": ({"cu_seqlens_q": ints()}, ValueError, r"^cu_seqlens_q: expected \(B \+ 1,\)"),
    "other numbers of sequences": ({"cu_seqlens_k": ints(0, 11)}, ValueError,
        r"^cu_seqlens_k: expected shape \(4,\) for 3 sequences, got \(2,\)"),
    "not from 0": ({"cu_seqlens_q": ints(1, 4, 10, 11)}, ValueError, "^cu_seqlens_q: must begin with 0, got 1"),
    "descends": ({"cu_seqlens_k": ints(0, 4, 3, 11)}, ValueError,
        "^cu_seqlens_k: must not descend, got 4 before 3 at 1"),
    "past the end": ({"cu_seqlens_q": ints(0, 4, 10, 12)}, ValueError,
        "^cu_seqlens_q: ends at 12, past the 11 rows of q"),
    "max_seqlen_q": ({"max_seqlen_q": 5}, ValueError,
        "^max_seqlen_q: must be the longest sequence's 6 or more, got 5"),
    "max_seqlen_k": ({"max_seqlen_k": 5}, ValueError,
        "^max_seqlen_k: must be the longest sequence's 6 or more, got 5"),
    "negative": ({"max_seqlen_k": -1}, ValueError, "^max_seqlen_k: must be 0 or more, got -1"),
    "no int": ({"max_seqlen_q": 6.0}, TypeError, "^max_seqlen_q: expected an int, got float"),
    "a bool": ({"max_seqlen_q": True}, TypeError, "^max_seqlen_q: expected an int, got bool"),
    "too many keys": ({"seqused_k": ints(4, 7, 1)}, ValueError, "^seqused_k: sequence 1 has 6 keys, got 7"),
    "fewer than no keys": ({"seqused_k": ints(4, -1, 1)}, ValueError, "^seqused_k: sequence 1 has 6 keys, got -1"),
    "shape of seqused": ({"seqused_k": ints(4, 7)}, ValueError, r"^seqused_k: expected shape \(3,\) for 3 sequences"),
    "dtype of seqused": ({"seqused_k": torch.zeros(3)}, TypeError, "^seqused_k: dtype must be int32 or int64"),
    "no seqused": ({"seqused_k": 3}, TypeError, "^seqused_k: expected a torch.Tensor, got int"),
    "bias": ({"bias": torch.zeros(3, 12)}, ValueError, r"^bias: shape \(3, 12\) is neither packed, along the keys "
        r"\(4\|2\|1, 11\) or the queries \(4\|2\|1, 11, 1\), nor padded, \(3\|1, 4\|2\|1, 6\|1, 6\|1\)"),
    "along the queries like keys": ({"q": torch.zeros(12, H, D), "bias": torch.zeros(H, 12)}, ValueError,
        r"^bias: shape \(4, 12\) is neither packed"),
    "bias of five dimensions": ({"bias": torch.zeros(1, 1, 1, 6, 6)}, ValueError, "^bias: shape .* is neither packed"),
    "padded bias": ({"bias": torch.zeros(3, 4, 11, 11)}, ValueError, r"^bias: shape \(3, 4, 11, 11\) does not broad"),
    "dtype of bias": ({"bias": torch.zeros(11, dtype=torch.bool)}, TypeError, "^bias: dtype must be float16"),
    "device of bias": ({"bias": torch.zeros(11, device="meta")}, ValueError, "^bias: must be on cpu, got meta"),
    "no bias": ({"bias": (1,)}, TypeError, "^bias: expected tensors and terms of tilewise.bias, got int"),
    "two matrices": ({"bias": (torch.zeros(1, 1, 6, 6), RaggedBias(torch.zeros(1, 53), ints(0, 16, 52, 53)))},
        ValueError, "^bias: takes a matrix of queries and keys once, got two"),
    "two along the keys": ({"bias": (torch.zeros(11), torch.zeros(3, 1, 1, 6))}, ValueError,
        "^bias: takes a bias along the keys once, got two; add them"),
    "two along the keys, turned": ({"bias": (torch.zeros(3, 1, 1, 6), torch.zeros(11))}, ValueError,
        "^bias: takes a bias along the keys once, got two; add them"),
    "two ragged": ({"bias": (RaggedBias(torch.zeros(1, 53), ints(0, 16, 52, 53)),) * 2}, ValueError,
        "^bias: takes a matrix of queries and keys once, got two; add them"),
    "ragged heads": ({"bias": RaggedBias(torch.zeros(3, 53), ints(0, 16, 52, 53))}, ValueError,
        r"^RaggedBias.values: shape \(3, 53\) is not \(4\|2\|1, pairs\)"),
    "ragged offsets": ({"bias": RaggedBias(torch.zeros(1, 53), ints(0, 16, 53))}, ValueError,
        r"^RaggedBias.offsets: expected shape \(4,\) for 3 sequences, got \(3,\)"),
    "ragged end": ({"bias": RaggedBias(torch.zeros(1, 52), ints(0, 16, 52, 53))}, ValueError,
        "^RaggedBias.offsets: sequence 2 has 1 x 1 pairs from 52 on, the values have 52"),
    "ragged device": ({"bias": RaggedBias(torch.zeros(1, 53, device="meta"), ints(0, 16, 52, 53).to("meta"))},
        ValueError, "^RaggedBias.values: must be on cpu, got meta"),
    "rows of values": ({"bias": RelativeBias(VALUES[1:], lo=0)}, ValueError,
        r"^RelativeBias.values: shape \(10, 4, 3\) is not packed, \(total_q, H\|Hkv\|1, R\) = \(11, 4\|2\|1, 3\)"),
    "starts": ({"bias": RelativeBias(VALUES, lo=0, query_start=ints(1, 2))}, ValueError,
        r"^RelativeBias.query_start: shape \(2,\) is not \(B\|1,\) = \(3\|1,\)"),
    "mixed starts": ({"bias": (alibi(torch.zeros(H), query_start=0), t5_bias(torch.zeros(8, H), True, 9))}, ValueError,
        "^bias: terms that say where queries begin, query_start=, and ones that do not; say it for all"),
    "mask": ({"mask": torch.ones(3, 1, 6, 7, dtype=torch.bool)}, ValueError, "^mask: shape .* does not broadcast to"),
    "dtype of mask": ({"mask": torch.zeros(3, 1, 6, 6)}, TypeError, "^mask: dtype must be bool"),
    "sink": ({"sink": torch.zeros(3)}, ValueError,
        r"^sink: expected one logit for each head, \(4\|1,\), or for each query, \(4\|1, 11\), got shape \(3,\)"),
    "sink of a padded batch": ({"sink": torch.zeros(3, 4, 6)}, ValueError, "^sink: expected one logit for each head"),
    "dtype of sink": ({"sink": torch.zeros(H, dtype=torch.int32)}, TypeError, "^sink: dtype must be float16"),
    "causal": ({"causal": "top-left"}, TypeError, "^causal: expected a bool, got 'top-left'"),
    "validate": ({"validate": 1}, TypeError, "^validate: expected a bool, got 1"),
    "backend": ({"backend": "metal"}, ValueError, "^backend: "),
    "window": ({"window": (-1, 0)}, ValueError, "^window: left width must be 0 or more"),
    "dropout": ({"dropout_p": 1.5}, ValueError, r"^dropout_p: must be a float in \[0, 1\], got 1.5"),
    "seed": ({"dropout_p": 0.5, "dropout_seed": 3}, TypeError, "^dropout_seed: expected a pair"),
    "unknown": ({"s_aux": None}, TypeError,
        r"unexpected keyword argument 's_aux'; tilewise.varlen_attention takes sink="),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        varlen_attention(**arguments(**changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "cu_seqlens_k"])
def test_nested_tensors(name):
    """They have no shape by which a call could be looked up."""
    nested = torch.nested.nested_tensor([torch.zeros(4, H, D), torch.zeros(7, H, D)])
    with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor .*, got a nested tensor"):
        varlen_attention(**arguments(**{name: nested}))


def test_lengths_are_checked_where_they_are_read():
    """In a forward; with validate= also before one."""
    named = arguments(cu_seqlens_q=ints(0, 4, 3, 11), validate=True)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: must not descend"):
        varlen_attention(**named)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: must not descend"):
        varlen_attention(**named | {"backend": "reference", "validate": False})


def test_terms_of_a_packed_batch_in_a_dense_call():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"^RaggedBias: belongs to a packed batch, tilewise.varlen_attention"):
        attention(q, q, q, bias=RaggedBias(torch.zeros(1, 16), ints(0, 16)))
    with pytest.raises(ValueError, match=r"^RelativeBias.values: three dimensions .* belong to a packed batch"):
        attention(q, q, q, bias=RelativeBias(torch.zeros(4, 1, 3), lo=0))


RAGGED = {
    "dimensions": ((torch.zeros(1, 1, 3), ints(0, 3)), ValueError, r"^RaggedBias.values: expected 2 dimensions"),
    "dtype": ((torch.zeros(1, 3, dtype=torch.int32), ints(0, 3)), TypeError, "^RaggedBias.values: dtype must be"),
    "dtype of offsets": ((torch.zeros(1, 3), torch.zeros(2)), TypeError, "^RaggedBias.offsets: dtype must be int32"),
    "shape of offsets": ((torch.zeros(1, 3), ints()), ValueError, r"^RaggedBias.offsets: expected \(B \+ 1,\)"),
    "a list": ((torch.zeros(1, 3), [0, 3]), TypeError, "^RaggedBias.offsets: expected a torch.Tensor, got list"),
    "devices": ((torch.zeros(1, 3), ints(0, 3).to("meta")), ValueError, "^RaggedBias.offsets: must be on cpu"),
}


@pytest.mark.parametrize("name", RAGGED)
def test_errors_of_a_ragged_bias(name):
    given, error, message = RAGGED[name]
    with pytest.raises(error, match=message):
        RaggedBias(*given)


def test_a_ragged_bias_in_words():
    assert repr(RaggedBias(torch.zeros(4, 53), ints(0, 16, 52, 53))) == "RaggedBias((4, 53) float32, offsets (4,))"


def test_no_dtensors(tmp_path):
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        whole = {name: distribute_tensor(x.detach(), mesh, [Replicate()]) for name, x in arguments().items()
                 if isinstance(x, torch.Tensor)}  # fmt: skip
        for changes in (whole, {"q": whole["q"]}):
            with pytest.raises(NotImplementedError, match=r"^q: packed batches take no DTensors"):
                varlen_attention(**arguments(**changes))
    finally:
        distributed.destroy_process_group()


def test_no_onnx(monkeypatch):
    qkv, _, _ = tensors(SQUARE)
    monkeypatch.setattr(operator, "exports_onnx", lambda: True)
    for name in ("operator.autograd", "frontend.call_cache"):
        monkeypatch.setattr(f"tilewise.{name}.is_eager", lambda tensors: False)
    with pytest.raises(NotImplementedError, match=r"varlen_attention: packed batches have no form in ONNX"):
        call(qkv, SQUARE)
