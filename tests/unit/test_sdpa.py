"""The SDPA drop-in against torch.nn.functional.scaled_dot_product_attention itself."""

import inspect
import itertools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import empty_cache

import tilewise.frontend.arguments
import tilewise.scaled_dot_product
from tilewise import scaled_dot_product_attention
from tilewise.frontend import call_cache

L, S, E, EV = 5, 7, 4, 3


def tensors(q_lead, k_lead=None, v_lead=None, *, L=L, S=S, Ev=EV, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    k_lead = q_lead if k_lead is None else k_lead
    v_lead = k_lead if v_lead is None else v_lead
    shapes = ((*q_lead, L, E), (*k_lead, S, E), (*v_lead, S, Ev))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def make_mask(shape, kind, dtype=torch.float64):
    gen = torch.Generator().manual_seed(1)
    if kind == "bool":
        mask = torch.rand(shape, generator=gen) < 0.6
        mask[..., 0] = True  # every query sees a key: rows that see nothing have a test of their own
        return mask
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def value_and_gradients(function, qkv, attn_mask, **options):
    leaves = [x.clone().requires_grad_() for x in qkv]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.clone().requires_grad_()
        leaves.append(attn_mask)
    o = function(*leaves[:3], attn_mask=attn_mask, **options)
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(o.dtype)
    return o, *torch.autograd.grad(o, leaves, cotangent)


def check(qkv, attn_mask=None, rtol=1e-9, atol=1e-9, **options):
    ours = value_and_gradients(scaled_dot_product_attention, qkv, attn_mask, **options)
    theirs = value_and_gradients(F.scaled_dot_product_attention, qkv, attn_mask, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_signature():
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    ours = [(p.name, p.default, p.kind == keyword_only) for p in parameters]
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    theirs = [(a.name, a.default_value if a.has_default_value() else p.empty, a.kwarg_only)
              for a, p in zip(schema, parameters, strict=True)]  # fmt: skip
    assert ours == theirs


LEADS = [(), (3,), (2, 3), (1, 3), (2, 1, 3), (2, 4, 3), (2, 3, 2, 3)]
BROADCASTS = [
    (lead, tuple(1 if one else size for one, size in zip(ones, lead, strict=True)))
    for lead in LEADS
    for ones in itertools.product((True, False), repeat=len(lead))
]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("lead", "mask_lead"), BROADCASTS)
def test_masks(lead, mask_lead, kind):
    check(tensors(lead), make_mask((*mask_lead, L, S), kind))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(L, S), (1, S), (L, 1), (1, 1), (4, 3, 1, S), (3, L, 1), (1, 3, L, S)])
def test_smaller_masks(shape, kind):
    check(tensors((2, 4, 3)), make_mask(shape, kind))


def test_one_dimensional_mask():
    """PyTorch wants two dimensions; one broadcasts all the same."""
    qkv = tensors((2, 3))
    mask = make_mask((S,), "bool")
    torch.testing.assert_close(
        scaled_dot_product_attention(*qkv, attn_mask=mask),
        F.scaled_dot_product_attention(*qkv, attn_mask=mask[None]),
    )


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 7), (7, 5), (1, 4)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_causal_is_top_left(lead, sizes, is_causal):
    check(tensors(lead, L=sizes[0], S=sizes[1]), is_causal=is_causal)


SCALES = [None, 0.3, 2, -0.7, 0, 0.0, -0.0, np.float32(-0.7), np.float64(0.3), np.int64(2), torch.tensor(0.3),
          torch.tensor(-0.7, dtype=torch.bfloat16), torch.tensor(2)]  # fmt: skip


@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize("kind", ["bool", "float", None])
def test_scale(scale, kind):
    check(tensors((2, 3)), None if kind is None else make_mask((3, L, S), kind), scale=scale)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("sizes", [(5, 5), (5, 7), (7, 5)])
def test_a_mask_and_is_causal_are_both(sizes, lead, kind):
    """PyTorch's kernel for CPUs read them so in 2.13; what else it has refuses: one mask says both here."""
    qkv = tensors(lead, L=sizes[0], S=sizes[1])
    mask, triangle = make_mask(sizes, kind), torch.ones(sizes, dtype=torch.bool).tril()
    both = mask & triangle if kind == "bool" else mask.masked_fill(~triangle, -torch.inf)
    ours = value_and_gradients(scaled_dot_product_attention, qkv, mask, is_causal=True)
    theirs = value_and_gradients(F.scaled_dot_product_attention, qkv, both)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.__version__ >= torch.torch_version.TorchVersion("2.14"), reason="PyTorch refuses it now")
def test_a_mask_and_is_causal_as_the_fused_kernel():
    qkv, mask = tensors((2, 3), Ev=E), make_mask((L, S), "bool")
    ours = scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=True))


ORDERS = {
    "contiguous": lambda x: x,
    "heads last": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x,
    "columns first": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() > 2 else x,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lead", LEADS)
def test_the_result_lies_as_pytorchs(lead, order):
    """Also where folding by a mask's dimensions makes the operator's result lie otherwise."""
    qkv = [ORDERS[order](x) for x in tensors(lead, Ev=E)]
    mask_leads = {tuple(1 if one else n for one, n in zip(ones, lead, strict=True))
                  for ones in itertools.product((True, False), repeat=len(lead))}  # fmt: skip
    for mask in (None, *(make_mask((*mask_lead, L, S), "bool") for mask_lead in mask_leads)):
        ours, theirs = (f(*qkv, mask) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
        if len(lead) == 1 and order == "heads last":  # which PyTorch keeps in 2.15 and not in 2.13
            assert ours.is_contiguous()
        else:
            assert meaningful_strides(ours) == meaningful_strides(theirs), mask is not None and mask.shape


@pytest.mark.parametrize("order", ["contiguous", "heads last"])
@pytest.mark.parametrize(
    ("q_lead", "k_lead"),
    [((1, 3), (4, 3)), ((4, 3), (1, 3)), ((4, 1), (4, 3)), ((3,), (4, 3)), ((4, 3), ()), ((2, 1, 3), (1, 4, 3))],
)
def test_what_was_broadcast_lies_as_pytorchs(q_lead, k_lead, order):
    qkv = [ORDERS[order](x) for x in tensors(q_lead, k_lead, Ev=E)]
    ours, theirs = (f(*qkv) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert meaningful_strides(ours) == meaningful_strides(theirs)


def meaningful_strides(x):
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("kind", ["bool", "float", None])
@pytest.mark.parametrize(
    ("q_lead", "k_lead", "v_lead", "mask_lead"),
    [
        ((2, 6), (2, 2), (2, 2), (2, 6)),
        ((2, 6), (2, 1), (2, 1), (6,)),
        ((2, 6), (2, 6), (2, 6), (1, 1)),
        ((6,), (2,), (2,), (6,)),
        ((2, 3, 6), (2, 3, 2), (2, 3, 2), (2, 3, 6)),
        ((2, 3, 6), (2, 3, 2), (2, 3, 2), (2, 1, 6)),
        ((2, 3, 6), (2, 3, 2), (2, 3, 2), (1, 3, 6)),
        ((2, 3, 6), (2, 3, 2), (2, 3, 2), (2, 1, 1)),
        ((2, 6), (2, 2), (2, 3), (2, 1)),
        ((2, 6), (2, 1), (2, 3), (2, 6)),
    ],
)
def test_grouped_queries(q_lead, k_lead, v_lead, mask_lead, kind):
    mask = None if kind is None else make_mask((*mask_lead, L, S), kind)
    check(tensors(q_lead, k_lead, v_lead), mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("q_lead", "k_lead", "v_lead"),
    [
        ((1, 3), (4, 3), (4, 3)), ((4, 3), (1, 3), (1, 3)), ((4, 3), (4, 3), (1, 3)), ((4, 3), (4, 1), (4, 1)),
        ((4, 1), (4, 3), (4, 3)), ((4, 3), (4, 1), (4, 3)), ((3,), (4, 3), (4, 3)), ((4, 3), (), ()),
        ((2, 1, 3), (1, 4, 3), (4, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_causal", [True, False])
def test_leading_dimensions_broadcast(q_lead, k_lead, v_lead, is_causal):
    check(tensors(q_lead, k_lead, v_lead), is_causal=is_causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mask_of_another_dtype(dtype, mask_dtype):
    """PyTorch takes query's dtype and float32; here every floating dtype gives what the exact values give."""
    qkv = tensors((2, 3), dtype=dtype)
    mask = make_mask((3, L, S), "float", mask_dtype)
    o, dq, dk, dv, dmask = value_and_gradients(scaled_dot_product_attention, qkv, mask)
    assert (o.dtype, dq.dtype, dk.dtype, dv.dtype, dmask.dtype) == (*(4 * [dtype]), mask_dtype)
    exact = value_and_gradients(F.scaled_dot_product_attention, [x.double() for x in qkv], mask.double())
    tolerance = 3 * max(torch.finfo(dtype).eps, torch.finfo(mask_dtype).eps)
    for a, b in zip((o, dq, dk, dv, dmask), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    if mask_dtype in (dtype, torch.float32):
        F.scaled_dot_product_attention(*qkv, attn_mask=mask)
    else:
        with pytest.raises(RuntimeError, match="attn_mask dtype"):
            F.scaled_dot_product_attention(*qkv, attn_mask=mask)


@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float16),
    (torch.float64, torch.float64, torch.float64),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "float", None])
def test_autocast(dtypes, kind):
    qkv = [x.to(dtype) for x, dtype in zip(tensors((2, 3)), dtypes, strict=True)]
    # PyTorch casts float32 masks as well, and then refuses them beside float64.
    mask_dtype = torch.float64 if dtypes[0] == torch.float64 else torch.float32
    mask = None if kind is None else make_mask((L, S), kind, mask_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ours = value_and_gradients(scaled_dot_product_attention, qkv, mask)
        theirs = value_and_gradients(F.scaled_dot_product_attention, qkv, mask)
        with torch.autocast("cpu", enabled=False):
            assert scaled_dot_product_attention(*(x.float() for x in qkv)).dtype == torch.float32
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert ours[0].dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.bfloat16)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_nothing(kind):
    qkv = tensors((2, 3))
    mask = make_mask((L, S), "bool")
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(L, S, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    o, dq, *rest = value_and_gradients(scaled_dot_product_attention, qkv, mask)
    assert not o[..., 2, :].any()
    assert not dq[..., 2, :].any()
    if kind == "float":
        assert not rest[-1][2].any()
    assert all(x.isfinite().all() for x in (o, dq, *rest))


@pytest.mark.parametrize(("L", "S"), [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(L, S):
    check(tensors((2, 3), L=L, S=S))


@pytest.fixture
def flattened(monkeypatch):
    """The inputs that reach the operator."""
    seen = []
    uncached, cached = tilewise.scaled_dot_product.attention_op, call_cache.eager_attention

    def spy(inputs, *rest, **options):
        seen.append(inputs)
        return uncached(inputs, *rest, **options)

    def spy_of_cached(inputs, terms, run, views, return_lse):
        seen.append(inputs if views is None else views.inputs(inputs))
        return cached(inputs, terms, run, views, return_lse)

    monkeypatch.setattr(tilewise.scaled_dot_product, "attention_op", spy)
    monkeypatch.setattr(call_cache, "eager_attention", spy_of_cached)
    empty_cache(monkeypatch)  # or a call like an earlier one is not read
    return seen


@pytest.mark.parametrize("lead", LEADS)
def test_views_where_strides_allow(flattened, lead):
    qkv = tensors(lead)
    o = scaled_dot_product_attention(*qkv)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(flattened[0][:3], qkv, strict=True))
    assert o.shape == (*lead, L, EV)


def test_transposed_data_is_not_copied(flattened):
    qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors((2, 3))]
    o = scaled_dot_product_attention(*qkv)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(flattened[0][:3], qkv, strict=True))
    assert o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("lead", "mask_lead"), BROADCASTS)
def test_a_mask_is_never_expanded(flattened, lead, mask_lead):
    mask = make_mask((*mask_lead, L, S), "float")
    scaled_dot_product_attention(*tensors(lead), attn_mask=mask)
    assert flattened[0].bias.numel() == mask.numel()
    assert flattened[0].bias.untyped_storage().nbytes() == mask.untyped_storage().nbytes()


def _q(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


q4, k4 = _q(2, 6, L, E), _q(2, 6, S, E)
ERRORS = {
    "one dimension": ((_q(E), k4, k4), {}, ValueError, r"query: expected at least 2 dimensions .* got shape \(4,\)"),
    "integer mask": ((q4, k4, k4, _q(L, S, dtype=torch.int)), {}, TypeError, r"attn_mask: dtype .* got torch.int32"),
    "mask length": ((q4, k4, k4, _q(L, S + 1)), {}, ValueError, r"attn_mask: shape \(5, 8\) .* \(2, 6, 5, 7\)"),
    "mask batch": ((q4, k4, k4, _q(3, 1, L, S)), {}, ValueError, r"attn_mask: shape \(3, 1, 5, 7\) does not broadcast"),
    "mask wider than query": ((q4[:1], k4[:1], k4[:1], _q(2, 1, L, S)), {}, ValueError, r"attn_mask: shape"),
    "mask dimensions": ((q4, k4, k4, _q(1, 1, 1, L, S)), {}, ValueError, r"attn_mask: shape \(1, 1, 1, 5, 7\)"),
    "heads": ((q4, k4[:, :2], k4[:, :2]), {}, ValueError, r"key, value: number of heads .* 6 or be 1, got 2 and 2"),
    "heads that do not divide": (
        (q4, k4[:, :4], k4[:, :4]), {"enable_gqa": True}, ValueError, "key: its 4 heads must divide query's 6"),
    "grouped, no heads": ((q4[0, 0], k4[0, 0], k4[0, 0]), {"enable_gqa": True}, ValueError, "enable_gqa: needs"),
    "batch": ((q4, k4.repeat(2, 1, 1, 1), k4), {}, ValueError, "leading dimensions do not broadcast"),
    "dtype": ((q4, k4.double(), k4), {}, TypeError, "key: dtype must equal query's torch.float32, got torch.float64"),
    "head dimension": ((q4, k4[..., :3], k4), {}, ValueError, "key: head dimension must equal query's 4, got 3"),
    "device": ((q4, k4.to("meta"), k4), {}, ValueError, "key: must be on query's device cpu, got meta"),
    "not a tensor": ((q4, k4, None), {}, TypeError, "value: expected a torch.Tensor, got NoneType"),
    "positional scale": ((q4, k4, k4, None, 0.0, False, 0.5), {}, TypeError, "positional"),
    "sparse mask": (
        (q4, k4, k4, _q(L, S).to_sparse()), {}, TypeError, r"attn_mask: expected a dense tensor .* torch.sparse_coo"),
    "is_causal": ((q4, k4, k4), {"is_causal": None}, TypeError, "is_causal: expected a bool, got None"),
    "enable_gqa": ((q4, k4, k4), {"enable_gqa": "yes"}, TypeError, "enable_gqa: expected a bool, got 'yes'"),
    "scale": ((q4, k4, k4), {"scale": "1"}, TypeError, "scale: expected a float, got str"),
    "scale of one dimension": (
        (q4, k4, k4), {"scale": torch.ones(1)}, TypeError, r"scale: expected a float, .* tensor of shape \(1,\)$"),
    "scale that requires grad": (
        (q4, k4, k4), {"scale": torch.tensor(0.5, requires_grad=True)}, TypeError, "scale: .* that requires grad$"),
    "scale on meta": (
        (q4, k4, k4), {"scale": torch.tensor(0.5, device="meta")}, TypeError, "scale: .* on the meta device$"),
    "complex scale": ((q4, k4, k4), {"scale": torch.tensor(1j)}, TypeError, "scale: expected a float, got complex"),
    "dropout": ((q4, k4, k4), {"dropout_p": 2.0}, ValueError, "dropout_p: must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_where_torch_has_them(name):
    args, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(*args, **options)
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)):
        F.scaled_dot_product_attention(*args, **options)


def test_errors_that_torch_does_not_have():
    for scale in (float("inf"), -float("inf"), float("nan"), torch.tensor(-float("inf")), np.float32("nan")):
        with pytest.raises(ValueError, match=f"^scale: must be finite, got {float(scale)}$"):
            scaled_dot_product_attention(q4, k4, k4, scale=scale)
    for scale in (True, False, torch.tensor(False)):
        with pytest.raises(TypeError, match=r"^scale: expected a float, got bool$"):
            scaled_dot_product_attention(q4, k4, k4, scale=scale)
    with pytest.raises(ValueError, match="value: length must equal key's 7, got 3"):
        scaled_dot_product_attention(q4, k4, k4[..., :3, :])
    with pytest.raises(ValueError, match="attn_mask: must be on query's device cpu, got meta"):
        scaled_dot_product_attention(q4, k4, k4, _q(L, S).to("meta"))
    nested = torch.nested.nested_tensor([q4[0], q4[1]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"query: expected a dense tensor .* got a nested tensor"):
        scaled_dot_product_attention(nested, k4, k4)


OWN_NAMES = "query|key|value|query, key|key, value|query, key, value|attn_mask|is_causal|enable_gqa|scale|dropout_p"


def bad_calls():
    """Each argument made wrong in many ways, with and without a mask, in two, three, four and five dimensions."""
    wrongs = [
        lambda x: x.long(), lambda x: x.bool(), lambda x: x.to(torch.complex64), lambda x: x.double(),
        lambda x: x.half(), lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: None, lambda x: [1.0],
        lambda x: x[..., :0], lambda x: x[..., :2], lambda x: x[..., :2, :], lambda x: x.repeat_interleave(100, -1),
        lambda x: x[None], lambda x: x.repeat(*(3 for _ in x.shape)), lambda x: x.flatten(), lambda x: x.sum(),
        lambda x: x.detach().to(torch.float8_e4m3fn), lambda x: torch.nested.nested_tensor([x, x]),
    ]  # fmt: skip
    for lead in ((), (6,), (2, 6), (2, 2, 6)):
        for kind in ("bool", "float", None):
            given = [*tensors(lead, dtype=torch.float32)]
            given.append(None if kind is None else make_mask((L, S), kind, torch.float32))
            for which, wrong in itertools.product(range(4), wrongs):
                if given[which] is not None:
                    yield [*given[:which], wrong(given[which]), *given[which + 1 :]]


@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("with_autocast", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_errors_speak_of_pytorchs_arguments(options, with_autocast):
    messages = []
    for args in bad_calls():
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=with_autocast):
                scaled_dot_product_attention(*args, **options)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    for message in messages:
        assert re.match(f"({OWN_NAMES}): ", message)
        assert not re.search(r"\b(q|k|v|bias)\b|\bmask(=|\[)|\bcausal=", message)
    assert len(messages) > 400


def test_a_mask_that_lacks_an_axis_gets_a_hint():
    padding = torch.ones(2, S, dtype=torch.bool)
    message = "attn_mask: shape (2, 7) does not broadcast to (2, 6, 5, 7); a padding mask (B, S) is passed as "
    with pytest.raises(ValueError, match=f"^{re.escape(message + 'attn_mask[:, None, None, :]')}$"):
        scaled_dot_product_attention(q4, k4, k4, padding)
    with pytest.raises(ValueError, match=r"; a mask \(B, L, S\) is passed as attn_mask\[:, None\]$"):
        scaled_dot_product_attention(q4, k4, k4, padding[:, None].expand(2, L, S))
    scaled_dot_product_attention(q4, k4, k4, padding[:, None, None, :])


def test_compiles_without_a_graph_break():
    """Full graph, and a second length does not compile again; test_compiled_autocast.py has other leading axes."""
    lead = (2, 4, 3)

    def call(q, k, v, mask):
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return o + scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for stance, size in (("default", 5), ("fail_on_recompile", 9)):
        with torch.compiler.set_stance(stance):
            qkv = tensors(lead, L=size, S=size)
            mask = make_mask((lead[0], *(1 for _ in lead[1:]), size, size), "float")
            ours = value_and_gradients(lambda q, k, v, attn_mask: compiled(q, k, v, attn_mask), qkv, mask)
            theirs = value_and_gradients(lambda q, k, v, attn_mask: call(q, k, v, attn_mask), qkv, mask)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)
