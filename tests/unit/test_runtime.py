"""What attention, matmul and softmax share between the public call and the kernels."""

import itertools
from functools import partial

import pytest
import torch
from helpers import cached, empty_cache
from torch.autograd import forward_ad

from tilewise import attention, matmul, scaled_dot_product_attention, softmax
from tilewise import scaled_dot_product as sdpa
from tilewise.windows import autograd  # noqa: F401  # registers its operators

TERMS = (
    "SymInt? lo, SymInt? hi, float scale, float? softcap, bool deterministic, bool exact, str backend, "
    "SymInt? query_lo, SymInt? query_count, str query_rule, SymInt? key_lo, SymInt? key_count, str key_rule, "
    "int dropout, SymInt? max_q, SymInt? max_k, str packed_forms, int first_query, int first_key, int first_head, "
    "SymInt? toeplitz_lo, SymInt? toeplitz_hi, str toeplitz_rule, int statistics"
)
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? sink, Tensor? cols, Tensor? rows, "
    "Tensor? query, Tensor? key, Tensor? toeplitz, Tensor? query_shift, Tensor? key_shift, Tensor? query_buckets, "
    "Tensor? key_buckets, Tensor? seed, Tensor? cu_q, Tensor? cu_k, Tensor? used_k, Tensor? pairs, "
    "Tensor? tiles, Tensor? bits, Tensor? begins, Tensor? ends, Tensor? offsets"
)
WINDOWS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, float scale, int q_block, int k_block, bool shift"
NEEDED = "q", "k", "v", "bias", "sink", "cols", "rows", "query", "key", "toeplitz"
TANGENTS = ", ".join(f"Tensor? {name}_tangent" for name in NEEDED)
# Exported programs hold them: a change is one that older files do not survive.
SCHEMAS = {
    "attention": f"{INPUTS}, {TERMS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_backward": f"Tensor? do, Tensor? dlse, {INPUTS}, Tensor o, Tensor lse, Tensor? o_low, {TERMS}, "
    f"bool[] needs) -> ({', '.join(['Tensor'] * 10)})",
    "attention_tangents": f"{INPUTS}, {TANGENTS}, Tensor o, Tensor lse, Tensor? o_low, {TERMS}) -> (Tensor, Tensor)",
    "attention_second": f"Tensor? do, Tensor? dlse, {INPUTS}, {TANGENTS}, {TERMS}, bool[] needs) "
    f"-> ({', '.join(['Tensor'] * 12)})",
    "matmul": "Tensor a, Tensor b, Tensor? c, float alpha, float beta, SymInt[] summed, str backend) -> Tensor",
    "softmax": "Tensor x, float scale, Tensor? bias, Tensor? mask, int dim) -> Tensor",
    "softmax_backward": "Tensor dp, Tensor p, float scale, SymInt[]? bias_shape, ScalarType? bias_dtype, int dim, "
    "bool[] needs) -> (Tensor, Tensor)",
    "window_attention": f"{WINDOWS}) -> (Tensor, Tensor)",
    "window_attention_backward": f"{WINDOWS}, Tensor o, Tensor stats, Tensor do, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
}

# Calls of one square matrix each, and PyTorch's own.
BY_NAME = {
    "attention": (
        lambda x: attention(*[x[None, None]] * 3, scale=0.5)[0, 0],
        lambda x: torch.softmax(0.5 * x @ x.mT, -1) @ x,
    ),
    "matmul": (lambda x: matmul(x, x.mT), lambda x: x @ x.mT),
    "softmax": (lambda x: softmax(x, bias=x.mT), lambda x: torch.softmax(x + x.mT, -1)),
}
each_function = pytest.mark.parametrize("name", BY_NAME)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_made_from_records(name):
    assert str(getattr(torch.ops.tilewise, name).default._schema) == f"tilewise::{name}({SCHEMAS[name]}"


@each_function
@pytest.mark.parametrize("differentiated", [False, True])
def test_transforms_need_no_fallback(name, differentiated, recwarn):
    """vmap and grad, and both: PyTorch's fallback for an operator that they do not know would say so."""
    function, expected = BY_NAME[name]
    x = torch.randn(3, 4, 4, dtype=torch.float64)

    def transformed(f):
        return torch.vmap(torch.func.grad(lambda x: f(x).sin().sum()) if differentiated else f)(x)

    torch.testing.assert_close(transformed(function), transformed(expected))
    assert not [w for w in recwarn if "performance drop" in str(w.message)]


@each_function
def test_the_jacobian_of_a_batch_of_cotangents(name):
    function, expected = BY_NAME[name]
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    cotangents = torch.randn(3, 4, 4, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(f(x), x, cotangents, is_grads_batched=True) for f in (function, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["matmul", "softmax"])
@pytest.mark.parametrize("graph", [False, True])
def test_tangents_are_refused(name, graph):
    """With gradients asked for, and without, where a kernel would lose them without a word."""
    x = torch.randn(4, 4)
    with forward_ad.dual_level(), torch.set_grad_enabled(graph):
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=rf"^tilewise\.{name} has no forward-mode derivative"):
            BY_NAME[name][0](dual)


# --- scaled_dot_product_attention's calls like an earlier one ---


@pytest.fixture
def remembered(monkeypatch):
    """What `call` remembers, nothing yet."""
    empty_cache(monkeypatch)
    return partial(cached, "call")


def qkv(lead=(2, 3), M=5, N=5, dtype=torch.float32, **options):
    return [torch.randn(*lead, n, 8, dtype=dtype, **options) for n in (M, N, N)]


MASKS = {
    "none": None, "bool": torch.rand(2, 1, 5, 5) < 0.7, "float": torch.randn(1, 3, 5, 5),
    "of pairs": torch.rand(5, 5) < 0.7, "of heads": torch.randn(3, 5, 5),
}  # fmt: skip


def expected_of(qkv, mask, is_causal=False, **options):
    """By PyTorch's function, of which not every kernel takes a mask beside is_causal; a query that sees nothing: 0."""
    if is_causal:
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        mask = (
            seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
        )
    return torch.nn.functional.scaled_dot_product_attention(*qkv, mask, **options).nan_to_num()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
def test_sdpa_does_not_read_a_usual_call_again(remembered, monkeypatch, mask, options):
    mask = MASKS[mask]
    scaled_dot_product_attention(*qkv(), mask, **options)
    others = qkv(requires_grad=True)
    monkeypatch.setattr(sdpa, "_check_tensors", None)
    o = scaled_dot_product_attention(*others, mask, **options)
    torch.testing.assert_close(o, expected_of(others, mask, **options), rtol=1e-5, atol=1e-5)
    assert all(x.any() for x in torch.autograd.grad(o.sum(), others))
    assert len(remembered()) == 1


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (qkv(lead=(3,)), {}),  # flattened
        (qkv(lead=(2, 2, 2)), {}),
        ([qkv()[0], *qkv(lead=(2, 1))[1:]], {}),  # broadcast
        (qkv(), {"scale": -0.5}),
        (qkv(), {"scale": 0.0}),
        (qkv(), {"scale": 1}),
        (qkv(M=0), {"scale": torch.tensor(0.5)}),
    ],
)
def test_sdpa_remembers_no_other_call(remembered, tensors, options):
    for _ in range(2):
        scaled_dot_product_attention(*tensors, **options)
    assert not remembered()


def test_the_doors_do_not_take_each_others_calls(remembered):
    """On the same tensors: attention is aligned bottom-right, the other top-left."""
    q, k, v = qkv(N=7)
    results = [
        (attention(q, k, v, causal=True), scaled_dot_product_attention(q, k, v, is_causal=True)) for _ in range(2)
    ]
    for ours, theirs in results:
        assert torch.equal(ours, results[0][0])
        torch.testing.assert_close(theirs[:, :, 0], v[:, :, 0])  # sees one key
        assert not torch.allclose(ours[:, :, 0], v[:, :, 0])  # sees three
    assert len(remembered()) == 2


def test_errors_after_a_usual_sdpa_call(remembered):
    q, k, v = qkv()
    mask = torch.zeros(2, 3, 5, 5)
    for _ in range(2):
        scaled_dot_product_attention(q, k, v, mask)
    for arguments, error, name in (
        ({"query": None}, TypeError, "query"), ({"key": k.to_sparse()}, TypeError, "key"),
        ({"value": v.double()}, TypeError, "value"), ({"attn_mask": mask[..., :2]}, ValueError, "attn_mask"),
        ({"attn_mask": mask.long()}, TypeError, "attn_mask"), ({"attn_mask": [0.0]}, TypeError, "attn_mask"),
        ({"dropout_p": -0.5}, ValueError, "dropout_p"), ({"is_causal": 1}, TypeError, "is_causal"),
        ({"enable_gqa": None}, TypeError, "enable_gqa"), ({"scale": True}, TypeError, "scale"),
        ({"scale": float("nan")}, ValueError, "scale"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name}: "):
            scaled_dot_product_attention(**{"query": q, "key": k, "value": v, "attn_mask": mask, **arguments})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("which", range(3))
def test_nested_tensors_are_refused_by_name(remembered, which):
    tensors = qkv()
    scaled_dot_product_attention(*tensors)
    tensors[which] = torch.nested.nested_tensor([torch.randn(3, 5, 8), torch.randn(3, 4, 8)])
    with pytest.raises(TypeError, match=rf"^{('query', 'key', 'value')[which]}: expected a dense tensor"):
        scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("dtypes", list(itertools.product([torch.float32, torch.bfloat16], repeat=3)))
def test_autocast_comes_before_the_look_up(remembered, dtypes):
    tensors = [x.to(dtype) for x, dtype in zip(qkv(), dtypes, strict=True)]
    wanted = scaled_dot_product_attention(*(x.bfloat16() for x in tensors))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [scaled_dot_product_attention(*tensors) for _ in range(2)]
    assert all(torch.equal(x, wanted) for x in found)
    assert len(remembered()) == 1


def test_a_usual_sdpa_call_follows_the_determinism_that_is_asked_for(remembered):
    tensors = qkv()
    scaled_dot_product_attention(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        scaled_dot_product_attention(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sorted(known.terms.deterministic for known in remembered().values()) == [False, True]
    assert all(known.terms.exact for known in remembered().values())
